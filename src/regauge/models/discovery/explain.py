"""Why a group is not larger: the operators that touch a space, each with what it keeps and its line
in the source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from regauge.models.discovery.graph import Place, operator, place
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

    operator: str
    kind: str
    does: str
    keeps: str
    places: tuple[Place, ...]

    def __str__(self) -> str:
        first, rest = self.places[0] if self.places else None, len(self.places) - 1
        where = f" at {first}" if first is not None and first.file else ""
        more = f" (and {rest} more)" if rest > 0 else ""
        code = f"\n    {first.code}" if first is not None and first.code else ""
        if self.kind == "frozen":
            return f"`{self.operator}`{where}{more} keeps nothing: {self.does}{code}"
        return f"`{self.operator}`{where}{more} {self.does}: it {self.keeps}{code}".replace(
            "angles of their own: it keep ", "angles of their own: they keep "
        )


def reasons(restrictions: Sequence[Restriction]) -> list[Reason]:
    """What restricts a space, operator by operator, what leaves the least first."""
    found: dict[tuple[str, str, str], list[Place]] = {}
    for r in restrictions:
        if r.kind == "still":
            continue
        name = (
            operator(r.node)
            if r.node is not None and r.node.op == "call_function"
            else "the module"
        )
        if r.kind.startswith("rotary"):
            name = "rotary positions"
        does = RESTRICTIONS[r.kind].does if r.kind != "frozen" else r.detail
        places = found.setdefault((name, r.kind, does), [])
        if r.node is not None and place(r.node) not in places:
            places.append(place(r.node))
    ordered = sorted(
        found.items(),
        key=lambda item: _ORDER.index(item[0][1]) if item[0][1] in _ORDER else len(_ORDER),
    )
    return [
        Reason(name, kind, does, RESTRICTIONS[kind].keeps, tuple(places))
        for (name, kind, does), places in ordered
    ]


def why(kind: Kind) -> str:
    """One line for the table of spaces: what the operators do that leave this group and no larger
    one.
    """
    found = reasons(kind.restrictions)
    telling = (
        [r for r in found if r.kind not in ("batch", "rms-batch", "shift", "product")]
        or [r for r in found if r.kind != "rms-batch"]
        or found
    )
    if not telling:
        return "only linear layers and products touch it"
    said: dict[str, list[str]] = {}
    for r in telling[:4]:
        said.setdefault(r.operator, []).append(r.does)
    lines = [f"{name} {' and '.join(dict.fromkeys(does))}" for name, does in said.items()]
    return "; ".join(lines[:3]) + (f"; {kind.note}" if kind.note else "")
