"""Why a group is not larger: the operators that touch a space, each with what it keeps and its line
in the source.
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

# What leaves the least comes first.
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
    """An operator that restricts a space: its name, what it does and keeps, and where it stands."""

    operator_name: str
    kind: str
    effect: str
    preserves: str
    locations: tuple[SourceLocation, ...]

    def __str__(self) -> str:
        first, rest = self.locations[0] if self.locations else None, len(self.locations) - 1
        where = f" at {first}" if first is not None and first.file else ""
        more = f" (and {rest} more)" if rest > 0 else ""
        code = f"\n    {first.code}" if first is not None and first.code else ""
        if self.kind == "frozen":
            return f"`{self.operator_name}`{where}{more} keeps nothing: {self.effect}{code}"
        return (
            f"`{self.operator_name}`{where}{more} {self.effect}: it {self.preserves}{code}".replace(
                "angles of their own: it keep ", "angles of their own: they keep "
            )
        )


def collect_reasons(restrictions: Sequence[Restriction]) -> list[Reason]:
    """What restricts a space, operator by operator, what leaves the least first."""
    found: dict[tuple[str, str, str], list[SourceLocation]] = {}
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
        does = RESTRICTIONS[r.kind].effect if r.kind != "frozen" else r.detail
        places = found.setdefault((name, r.kind, does), [])
        if r.node is not None and source_location(r.node) not in places:
            places.append(source_location(r.node))
    ordered = sorted(
        found.items(),
        key=lambda item: _ORDER.index(item[0][1]) if item[0][1] in _ORDER else len(_ORDER),
    )
    return [
        Reason(name, kind, does, RESTRICTIONS[kind].preserves, tuple(places))
        for (name, kind, does), places in ordered
    ]


def summarize_reasons(kind: Kind) -> str:
    """One line for the table of spaces: what the operators do that leave this group and no larger
    one.
    """
    found = collect_reasons(kind.restrictions)
    telling = (
        [r for r in found if r.kind not in ("batch", "rms-batch", "shift", "product")]
        or [r for r in found if r.kind != "rms-batch"]
        or found
    )
    if not telling:
        return "only linear layers and products touch it"
    said: dict[str, list[str]] = {}
    for r in telling[:4]:
        said.setdefault(r.operator_name, []).append(r.effect)
    lines = [f"{name} {' and '.join(dict.fromkeys(does))}" for name, does in said.items()]
    return "; ".join(lines[:3]) + (f"; {kind.note}" if kind.note else "")
