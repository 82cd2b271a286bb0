"""Reasons why a group is not larger: the operators that restrict a space, each with its source
line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from regauge.models.discovery.graph import SourceLocation, operator_name, source_location
from regauge.models.discovery.rules import RESTRICTIONS
from regauge.models.discovery.walk import Restriction

if TYPE_CHECKING:
    from regauge.models.discovery.infer_groups import Kind

# The most restrictive first.
_ORDER = (
    "frozen",
    "pointwise",
    "softmax",
    "shift",
    "even",
    "odd",
    "relu",
    "gain",
    "product",
    "rotary-half",
    "rotary-interleaved",
    "ones",
    "rms",
    "rms-batch",
)


@dataclass(frozen=True)
class Reason:
    """An operator that restricts a space: its name, its effect, the matrices it preserves, and its
    source lines.
    """

    operator_name: str
    kind: str
    effect: str
    preserves: str
    locations: tuple[SourceLocation, ...]

    def __str__(self) -> str:
        first, rest = self.locations[0] if self.locations else None, len(self.locations) - 1
        where = f" at {first}" if first is not None and first.file else ""
        others = f" (and {rest} more)" if rest > 0 else ""
        code = f"\n    {first.code}" if first is not None and first.code else ""
        if self.kind == "frozen":
            return f"`{self.operator_name}`{where}{others} keeps nothing: {self.effect}{code}"
        pronoun = "they" if self.kind.startswith("rotary") else "it"
        return (
            f"`{self.operator_name}`{where}{others} {self.effect}: {pronoun} {self.preserves}{code}"
        )


def collect_reasons(restrictions: Sequence[Restriction]) -> list[Reason]:
    """Return the reasons for restrictions by operator, the most restrictive first."""
    by_operator: dict[tuple[str, str, str], list[SourceLocation]] = {}
    for r in restrictions:
        if r.kind == "still":
            continue
        name = (
            operator_name(r.node)
            if r.node is not None and r.node.op == "call_function"
            else "the module"
        )
        if r.kind.startswith("rotary"):
            name = "rotary positions"
        effect = RESTRICTIONS[r.kind].effect if r.kind != "frozen" else r.detail
        locations = by_operator.setdefault((name, r.kind, effect), [])
        if r.node is not None and source_location(r.node) not in locations:
            locations.append(source_location(r.node))
    ordered = sorted(
        by_operator.items(),
        key=lambda item: _ORDER.index(item[0][1]) if item[0][1] in _ORDER else len(_ORDER),
    )
    return [
        Reason(name, kind, effect, RESTRICTIONS[kind].preserves, tuple(locations))
        for (name, kind, effect), locations in ordered
    ]


def summarize_reasons(kind: Kind) -> str:
    """Return one line for the table of spaces: the operators that exclude a larger group."""
    reasons = collect_reasons(kind.restrictions)
    relevant = (
        [r for r in reasons if r.kind not in ("batch", "rms-batch", "shift", "product")]
        or [r for r in reasons if r.kind != "rms-batch"]
        or reasons
    )
    if not relevant:
        return "only linear layers and products touch it"
    effects: dict[str, list[str]] = {}
    for r in relevant[:4]:
        effects.setdefault(r.operator_name, []).append(r.effect)
    lines = [f"{name} {' and '.join(dict.fromkeys(listed))}" for name, listed in effects.items()]
    return "; ".join(lines[:3]) + (f"; {kind.note}" if kind.note else "")
