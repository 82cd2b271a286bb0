"""The basis test: do two models share a basis, before or after a match? Check this before merging.

Similarity is the cosine between matrices: gains and biases point the same way in every model and
would flatter it. The control is the same search on a copy with values shuffled within each tensor:
what matching finds between unrelated models.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from regauge.core import axes as ax
from regauge.core.action import State
from regauge.core.element import Element, identity
from regauge.core.progress import Progress
from regauge.core.spec import Spec
from regauge.matching import Match, SharedRows, layers_of, match_states
from regauge.matching.blocks import split_blocks
from regauge.matching.costs import Costs
from regauge.matching.invariants import invariant_distance, state_invariants
from regauge.matching.preparation import require_pair
from regauge.matching.result import SearchLog

# Two models at a smaller relative distance are equal: the rounding of half precision.
MAX_ROUNDING = 1e-3
MIN_COSINE = 0.5  # a cosine above which two models have a common ancestor
MIN_SIMILAR_SHARE = 0.9  # the share of rows, and of columns, that must be similar
MIN_SUMMANDS = 8  # a cosine of fewer numbers says nothing
EQUAL = "The two are equal, number for number."
ROUNDING = "The two are one model up to rounding. They share a basis without matching."
MIN_COSINE_RATIO = 0.98  # unmatched over matched cosine, for models in one basis


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison.

    Attributes:
        verdict: "equal", "same basis", "same model, transformed", "related" or "unrelated".
        explanation: the verdict in sentences.
        cosines: cosines of the matrices: unmatched, matched, and by chance (matched after
            shuffling). None if the two were not matched.
        match: the match.
        layers: cosines and distances, each unmatched and matched, by layer.
        relative_invariant_distance: the distance of the invariants, as a share of b's; None if the
            two were not matched.
        fixed_shares: the share of each space that stays in place.
    """

    verdict: str
    explanation: str
    cosines: tuple[float, float | None, float | None]
    match: Match
    layers: Mapping[str, tuple[float, float | None, float, float | None]]
    relative_invariant_distance: float | None
    fixed_shares: Mapping[str, float]

    @property
    def shares_basis(self) -> bool:
        """Whether the two share a basis without matching."""
        return self.verdict in ("equal", "same basis")


def compare_unmatched(
    spec: Spec,
    a: State,
    b: State,
    *,
    rows: Mapping[str, SharedRows] | None = None,
) -> Comparison | None:
    """Compare two states without a search, in one pass over both.

    Args:
        spec: the spec of both models, with norms as stored.
        a: the first state.
        b: the second state.
        rows: the rows that two tables have in common, for models with different vocabularies.

    Returns:
        The comparison if the two are equal or share a basis: if most rows and columns of every
        matrix are similar, and no other one is moved. None if only a search can tell.
    """
    require_pair(spec, a, b, rows or {})
    costs, unit = Costs(spec, a, b, rows=rows), identity(spec)
    products = _inner_products(costs, unit)
    cosine = _total_cosine(products)
    unmatched = SearchLog(costs, time.monotonic()).result(unit)
    if unmatched.relative_distance >= MAX_ROUNDING:
        # a fine-tune may have trained a head of its own
        names = [name for name in products if spec.parts.get(name) != "head"]
        if cosine < MIN_COSINE or not all(_is_similar(costs, name, products) for name in names):
            return None
    if unmatched.distance_before == 0:
        verdict, explanation = "equal", EQUAL
    elif unmatched.relative_distance < MAX_ROUNDING:
        verdict, explanation = "same basis", ROUNDING
    else:
        verdict = "same basis"
        explanation = (
            f"The two share a basis without matching (cosine {cosine:.3f}; most rows and columns "
            "of every matrix are similar). They merge without matching."
        )
    layers = _layer_rows(spec, unmatched, products, products)
    return Comparison(
        verdict,
        explanation,
        (cosine, None, None),
        unmatched,
        {label: (row[0], None, row[2], None) for label, row in layers.items()},
        None,
        {},
    )


def _is_similar(costs: Costs, name: str, products: Mapping[str, Any]) -> bool:
    """Return whether most rows, and most columns, of a matrix are similar in both models, and the
    others are not moved.
    """
    cosine = _total_cosine({name: products[name]})
    if cosine < MIN_COSINE:
        return False
    y, x = (t.reshape(len(t), -1) for t in costs.tensor_pair(name, identity(costs.spec)))
    is_mostly_similar = all(
        is_mostly_above([p.sum(dim).double() for p in (y * x, y * y, x * x)], cosine / 2)
        for dim, size in ((0, y.shape[0]), (1, y.shape[1]))
        if size >= MIN_SUMMANDS
    )
    return is_mostly_similar and not _has_moved_rows(costs, name, cosine / 2)


def _has_moved_rows(costs: Costs, name: str, threshold: float) -> bool:
    """Return whether a dissimilar row of a matrix is similar to another one, or is a whole head or
    expert.

    A row is one entry of a space with all that it multiplies. Training may change single neurons
    beyond recognition; a change of basis permutes them. Heads and experts are too large for the
    first, and may be rotated inside.
    """
    import torch

    spec = costs.spec
    parents = {space.over for space in spec.spaces.values()}
    sides = (
        split_blocks(spec, costs.axes[name], v.numpy())
        for v in costs.tensor_pair(name, identity(spec))
    )
    for y, x in zip(*sides, strict=True):
        for axis, leaf in enumerate(y.dims):
            if leaf is None or spec.spaces[leaf.space].size == 1:
                continue
            outer = [i for s in [spec.spaces[leaf.space].over] if s for i in y.axes_of(s)]
            pairs = [torch.from_numpy(side.unfold(*outer[:1], axis)) for side in (y, x)]
            if pairs[0].shape[-1] < MIN_SUMMANDS:
                continue
            rows, others = (
                torch.nn.functional.normalize(p.reshape(-1, *p.shape[-2:]), dim=-1) for p in pairs
            )
            is_dissimilar = (rows * others).sum(-1) < threshold
            if leaf.space in parents and bool(is_dissimilar.any()):
                return True
            for i in is_dissimilar.any(-1).nonzero()[:, 0].tolist():
                if bool(((rows[i][is_dissimilar[i]] @ others[i].T).abs() >= threshold).any()):
                    return True
    return False


def is_mostly_above(sums: Sequence[Any], threshold: float) -> bool:
    """Return whether most cosines are at least `threshold`.

    Args:
        sums: sums of products and of both squares, by row or by column.
        threshold: the smallest cosine that counts.
    """
    product, x, y = sums
    cosines = product / (x.sqrt() * y.sqrt()).clamp(min=1e-300)
    return float((cosines >= threshold).double().mean()) >= MIN_SIMILAR_SHARE


def compare_states(
    spec: Spec,
    a: State,
    b: State,
    *,
    seed: int = 0,
    rows: Mapping[str, SharedRows] | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Comparison:
    """Compare two states of one spec.

    Args:
        spec: the spec of both models.
        a: the first state.
        b: the second state.
        seed: the seed of the shuffled control.
        rows: the rows that two tables have in common, for models with different vocabularies.
        progress: the progress callback.
        options: options of `match`.
    """
    result = match_states(spec, a, b, rows=rows, progress=progress, **options)
    costs = Costs(spec, a, b, rows=rows)
    unmatched, matched = (
        _inner_products(costs, identity(spec)),
        _inner_products(costs, result.element),
    )
    shuffled = ShuffledState(a, seed)
    control = match_states(spec, shuffled, b, rows=rows, **{**options, "sweeps": 0})
    chance = _total_cosine(_inner_products(Costs(spec, shuffled, b, rows=rows), control.element))
    cosines = (_total_cosine(unmatched), _total_cosine(matched), chance)
    invariant = _relative_invariant_distance(spec, a, b, rows)
    verdict, explanation = _decide_verdict(result, cosines, invariant)
    return Comparison(
        verdict,
        explanation,
        cosines,
        result,
        _layer_rows(spec, result, unmatched, matched),
        invariant,
        fixed_shares(result.element),
    )


class ShuffledState(Mapping[str, Any]):
    """A state with the values of each tensor shuffled: the same numbers, but not a model.

    Tensors are computed on access, so it takes no memory.
    """

    def __init__(self, state: State, seed: int) -> None:
        self.state, self.seed = state, seed

    def __getitem__(self, name: str) -> Any:
        import zlib

        import torch

        value = self.state[name]
        random = torch.Generator().manual_seed(zlib.crc32(name.encode()) ^ self.seed)
        # Rows and columns are permuted, then each row is rotated: no axis keeps its meaning, at the
        # cost of two gathers.
        flat = value.reshape(len(value) if value.dim() else 1, -1)
        flat = flat[torch.randperm(flat.shape[0], generator=random)][
            :, torch.randperm(flat.shape[1], generator=random)
        ]
        shift = torch.randint(flat.shape[1], (flat.shape[0], 1), generator=random)
        return flat.gather(1, (torch.arange(flat.shape[1]) + shift) % flat.shape[1]).view(
            value.shape
        )

    def __contains__(self, name: object) -> bool:
        return name in self.state

    def __iter__(self) -> Any:
        return iter(self.state)

    def __len__(self) -> int:
        return len(self.state)


def fixed_shares(g: Element) -> dict[str, float]:
    """Return for each space that moves the share of it that stays in place.

    For a permutation these are its fixed points, for a matrix the mean of its diagonal.
    """
    import numpy as np

    shares = {}
    for name, member in g.members.items():
        matrices = member.matrix() if member.size <= 4096 else None
        order = member.permutation()
        if order is not None:
            shares[name] = float((order.index == np.arange(member.size)).mean())
        elif matrices is not None:
            shares[name] = float(np.einsum("kii->ki", matrices).mean())
    return shares


def matrix_cosine(
    spec: Spec,
    a: State,
    b: State,
    g: Element | None = None,
    rows: Mapping[str, SharedRows] | None = None,
) -> float:
    """Return the cosine of all matrices of b together with those of a transformed by g.

    Args:
        spec: the spec of both models.
        a: the first state.
        b: the second state.
        g: the element that moves a; by default a stays as it is.
        rows: the rows that two tables have in common, for models with different vocabularies.
    """
    costs = Costs(spec, a, b, rows=rows)
    return _total_cosine(_inner_products(costs, identity(spec) if g is None else g))


def _inner_products(costs: Costs, g: Element) -> dict[str, tuple[float, float, float]]:
    """Return <b, g a>, |b|^2 and |g a|^2 of every matrix."""
    products = {}
    for pattern in costs.patterns:
        if len(ax.parse(costs.spec.tensors[pattern]).terms) > 1:
            y, x = (t.double() for t in costs.tensor_pair(pattern, g))
            products[pattern] = (
                float((y * x).sum()),
                float(y.square().sum()),
                float(x.square().sum()),
            )
    return products


def _total_cosine(parts: Mapping[str, tuple[float, float, float]]) -> float:
    """Return the cosine of all matrices together."""
    inner, y, x = (sum(p[i] for p in parts.values()) for i in range(3))
    return inner / math.sqrt(max(y * x, 1e-300))


def _layer_rows(
    spec: Spec, result: Match, unmatched: Mapping[str, Any], matched: Mapping[str, Any]
) -> dict[str, tuple[float, float, float, float]]:
    """Return cosines and distances, each unmatched and matched, by layer; tensors outside of layers
    are one row.
    """
    layer_by_space = layers_of(spec)
    names: dict[str, list[str]] = {}
    for pattern, text in spec.tensors.items():
        layers = {layer_by_space[s] for s in ax.spaces(text) if s in layer_by_space}
        if pattern in result.before and ax.spaces(text):
            names.setdefault(f"layer {min(layers)}" if layers else "edges and norms", []).append(
                pattern
            )
    rows = {}
    for label, patterns in sorted(
        names.items(),
        key=lambda item: (
            item[0] == "edges and norms",
            int(item[0].split()[-1]) if item[0][-1].isdigit() else 0,
        ),
    ):
        cosines = [
            _total_cosine({p: part[p] for p in patterns if p in part})
            for part in (unmatched, matched)
        ]
        distances = [
            math.sqrt(sum(part[p] for p in patterns)) for part in (result.before, result.after)
        ]
        rows[label] = (cosines[0], cosines[1], distances[0], distances[1])
    return rows


def _relative_invariant_distance(
    spec: Spec, a: State, b: State, rows: Mapping[str, SharedRows] | None
) -> float:
    """Return the distance of the invariants as a share of b's."""
    parts = invariant_distance(state_invariants(spec, a), state_invariants(spec, b))
    compared = [v for n, v in parts.items() if n.split("#")[0] not in (rows or {})]
    return math.sqrt(sum(v[0] for v in compared) / max(sum(v[1] for v in compared), 1e-300))


def _decide_verdict(
    result: Match, cosines: tuple[float, float, float], invariant: float
) -> tuple[str, str]:
    """Return the verdict and its explanation."""
    unmatched, matched, chance = cosines
    size = math.sqrt(max(sum(result.size.values()), 1e-300))
    if result.distance_before == 0:
        return "equal", EQUAL
    if result.distance_before / size < MAX_ROUNDING:
        return "same basis", ROUNDING
    if result.relative_distance < MAX_ROUNDING:
        return "same model, transformed", (
            "The two are one model in two bases: the element that was found transforms the one "
            "into the other. Match before merging."
        )
    if unmatched >= MIN_COSINE and unmatched >= MIN_COSINE_RATIO * matched:
        return "same basis", (
            f"The two share a basis without matching (cosine {unmatched:.3f}; {matched:.3f} after "
            "matching). They merge without matching."
        )
    if invariant < MAX_ROUNDING:
        return "related", (
            f"The two hold the same weights: their invariants differ by {invariant:.2%}. But no "
            f"change of basis maps one onto the other (cosine {matched:.3f} after matching). One "
            "is probably locked: unlock it first."
        )
    if matched >= MIN_COSINE:
        return "related", (
            f"The two have a common ancestor, but different bases: cosine {unmatched:.3f} before "
            f"matching, {matched:.3f} after matching. Match before merging."
        )
    return "unrelated", (
        f"The two do not share a basis, and matching does not find one: cosine {unmatched:.3f} "
        f"before matching, {matched:.3f} after matching, {chance:.3f} by chance. They were trained "
        "independently. A plain average will not work; match first, and measure the barrier "
        "(regauge barrier)."
    )
