"""The basis test: do two models share a basis, as they stand or after a match? To be asked before
any merge.

Alike is measured by the cosine between matrices (gains and biases point one way in every model, and
would flatter). What matching makes of models that have nothing in common is the control: the same
search on a copy whose values are shuffled within each tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from regauge.core import axes as ax
from regauge.core.action import State
from regauge.core.element import Element, identity
from regauge.core.progress import Progress
from regauge.core.spec import Spec
from regauge.matching import Match, SharedRows, layers_of, match
from regauge.matching.costs import Costs
from regauge.matching.invariants import invariant_distance, invariants

MAX_ROUNDING = (
    1e-3  # a relative distance below which two descriptions are one: the rounding of half precision
)
MIN_COSINE = 0.5  # a cosine above which two models are of one descent
MIN_COSINE_RATIO = 0.98  # a share of the matched cosine that models in one basis have as they stand


@dataclass(frozen=True)
class Comparison:
    """What a comparison found. `alike` are cosines of the matrices: as they stand, after the match,
    and what chance makes of the match.
    """

    verdict: str
    explanation: str
    cosines: tuple[float, float, float]
    match: Match
    layers: Mapping[str, tuple[float, float, float, float]]
    relative_invariant_distance: float
    fixed_shares: Mapping[str, float]

    @property
    def shares_basis(self) -> bool:
        """Do the two share a basis as they stand?"""
        return self.verdict in ("equal", "same basis")


def compare(
    spec: Spec,
    a: State,
    b: State,
    *,
    seed: int = 0,
    rows: Mapping[str, SharedRows] | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Comparison:
    """Compare two states of one spec. `options` are those of `match`."""
    found = match(spec, a, b, rows=rows, progress=progress, **options)
    costs = Costs(spec, a, b, rows=rows)
    stand, moved = _inner_products(costs, identity(spec)), _inner_products(costs, found.element)
    shuffled = ShuffledState(a, seed)
    chance_found = match(spec, shuffled, b, rows=rows, **{**options, "sweeps": 0})
    chance = _total_cosine(
        _inner_products(Costs(spec, shuffled, b, rows=rows), chance_found.element)
    )
    alike = (_total_cosine(stand), _total_cosine(moved), chance)
    verdict, words = _decide_verdict(found, alike)
    return Comparison(
        verdict,
        words,
        alike,
        found,
        _layer_rows(spec, found, stand, moved),
        _relative_invariant_distance(spec, a, b, rows),
        fixed_shares(found.element),
    )


class ShuffledState(Mapping[str, Any]):
    """A state whose values are shuffled within each tensor: the same numbers, and no model. Made
    anew each time, so that it takes no memory.
    """

    def __init__(self, state: State, seed: int) -> None:
        self.state, self.seed = state, seed

    def __getitem__(self, name: str) -> Any:
        import zlib

        import torch

        value = self.state[name]
        random = torch.Generator().manual_seed(zlib.crc32(name.encode()) ^ self.seed)
        # Rows, then columns, each in its own order, and turned along the diagonals: no axis keeps
        # its meaning, at the cost of two gathers.
        flat = value.reshape(len(value) if value.dim() else 1, -1)
        flat = flat[torch.randperm(flat.shape[0], generator=random)][
            :, torch.randperm(flat.shape[1], generator=random)
        ]
        turn = torch.randint(flat.shape[1], (flat.shape[0], 1), generator=random)
        return flat.gather(1, (torch.arange(flat.shape[1]) + turn) % flat.shape[1]).view(
            value.shape
        )

    def __contains__(self, name: object) -> bool:
        return name in self.state

    def __iter__(self) -> Any:
        return iter(self.state)

    def __len__(self) -> int:
        return len(self.state)


def fixed_shares(g: Element) -> dict[str, float]:
    """For each space that moves: the share of it that stays where it is. Of a permutation its fixed
    places, of a matrix the mean of its diagonal.
    """
    import numpy as np

    out = {}
    for name, member in g.members.items():
        matrices = member.matrix() if member.size <= 4096 else None
        order = member.permutation()
        if order is not None:
            out[name] = float((order.index == np.arange(member.size)).mean())
        elif matrices is not None:
            out[name] = float(np.einsum("kii->ki", matrices).mean())
    return out


def _inner_products(costs: Costs, g: Element) -> dict[str, tuple[float, float, float]]:
    """<b, g a>, |b|^2 and |g a|^2 of every matrix."""
    out = {}
    for pattern in costs.patterns:
        if len(ax.parse(costs.spec.tensors[pattern]).terms) > 1:
            y, x = (t.double() for t in costs.tensor_pair(pattern, g))
            out[pattern] = (float((y * x).sum()), float(y.square().sum()), float(x.square().sum()))
    return out


def _total_cosine(parts: Mapping[str, tuple[float, float, float]]) -> float:
    inner, y, x = (sum(p[i] for p in parts.values()) for i in range(3))
    return inner / math.sqrt(max(y * x, 1e-300))


def _layer_rows(
    spec: Spec, found: Match, stand: Mapping[str, Any], moved: Mapping[str, Any]
) -> dict[str, tuple[float, float, float, float]]:
    """For each layer, and for what belongs to none: cosines as they stand and matched, and
    distances as they stand and matched.
    """
    of = layers_of(spec)
    names: dict[str, list[str]] = {}
    for pattern, text in spec.tensors.items():
        layers = {of[s] for s in ax.spaces(text) if s in of}
        if pattern in found.before and ax.spaces(text):
            names.setdefault(f"layer {min(layers)}" if layers else "edges and norms", []).append(
                pattern
            )
    out = {}
    for label, patterns in sorted(
        names.items(),
        key=lambda item: (
            item[0] == "edges and norms",
            int(item[0].split()[-1]) if item[0][-1].isdigit() else 0,
        ),
    ):
        cosines = [
            _total_cosine({p: part[p] for p in patterns if p in part}) for part in (stand, moved)
        ]
        distances = [
            math.sqrt(sum(part[p] for p in patterns)) for part in (found.before, found.after)
        ]
        out[label] = (cosines[0], cosines[1], distances[0], distances[1])
    return out


def _relative_invariant_distance(
    spec: Spec, a: State, b: State, rows: Mapping[str, SharedRows] | None
) -> float:
    """How far apart the two are in what no description changes, as a share of the other's."""
    parts = invariant_distance(invariants(spec, a), invariants(spec, b))
    kept = [v for n, v in parts.items() if n.split("#")[0] not in (rows or {})]
    return math.sqrt(sum(v[0] for v in kept) / max(sum(v[1] for v in kept), 1e-300))


def _decide_verdict(found: Match, alike: tuple[float, float, float]) -> tuple[str, str]:
    stand, moved, chance = alike
    size = math.sqrt(max(sum(found.size.values()), 1e-300))
    if found.distance_before == 0:
        return "equal", "The two are equal, number for number."
    if found.distance_before / size < MAX_ROUNDING:
        return (
            "same basis",
            "The two are one model up to rounding. They share a basis as they stand.",
        )
    if found.relative_distance < MAX_ROUNDING:
        return "another description", (
            "The two are one model in two descriptions: moved by the element that was found, "
            "the one is the other. Match before merging."
        )
    if stand >= MIN_COSINE and stand >= MIN_COSINE_RATIO * moved:
        return "same basis", (
            f"The two share a basis as they stand (cosine {stand:.3f}; matching finds "
            f"{moved:.3f}). They merge without matching."
        )
    if moved >= MIN_COSINE:
        return "related", (
            f"The two are of one descent, but in different bases: cosine {stand:.3f} as they "
            f"stand, {moved:.3f} after matching. Match before merging."
        )
    return "unrelated", (
        f"The two do not share a basis, and matching does not find one: cosine {stand:.3f} as "
        f"they stand, {moved:.3f} after matching, where chance "
        f"gives {chance:.3f}. They were trained independently. A plain average will not work; "
        "match first, and measure the barrier (regauge barrier)."
    )
