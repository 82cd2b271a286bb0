"""Optimal transport between two models: OT-Fusion (Singh and Jaggi 2020), for Transformers as
Imfeld et al. 2024 have it ("Transformer Fusion with Optimal Transport"): OT-WTS, OT-ACTS,
OT-ACTS-EMD.

Coordinates of a space are compared by what writes them: the rows of the weights and biases, or the
activations on data. The plan between those of b and those of a, with uniform marginals, times their
number is a map that moves a next to b. Exact transport (`soft` = None) ends in a vertex, which is a
permutation, and so a true element. Sinkhorn's plan, at `soft` times the mean cost, mixes
coordinates: it is *no element*, and the moved model is another function.

A space that runs through layers, the residual stream, has one plan for each layer that writes it;
they are averaged, Imfeld's policy for residuals. There the maps of successive layers differ; here
the stream is one space with one map, the mean of all. Such a mean is soft, even if its plans are
exact, unless they agree. Heads (and experts) change places as wholes, by exact transport of exact
transports, and channels are transported within them; Imfeld et al. mix channels across heads, which
keeps no function even if it is exact.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from regauge.core import axes as ax
from regauge.core.action import State, act
from regauge.core.element import Element
from regauge.core.groups import Permutation
from regauge.core.members import Member, Monomial, Soft, permutation_index
from regauge.core.rng import Floats
from regauge.core.spec import Spec
from regauge.errors import RegaugeError, need
from regauge.matching.blocks import Block, split_blocks
from regauge.matching.costs import Costs, SharedRows

if TYPE_CHECKING:
    import torch

    LayerOutputs = Mapping[str, torch.Tensor]

Pair = tuple[Block, Block]
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


class TransportError(RegaugeError):
    """Two models between which nothing can be transported."""


def transport_map(y: Floats, x: Floats, regularization: float | None = None) -> Floats:
    """The map [n, n] that brings the rows of x next to those of y: n times the transport plan
    between them, by their Euclidean distances.
    """
    need("ot", "transport")
    import ot

    n = len(y)
    uniform, cost = np.full(n, 1 / n), np.sqrt(_squared_distances(y, x))
    if not regularization:
        return np.asarray(n * ot.emd(uniform, uniform, cost, numItermax=1_000_000), np.float64)
    amount = regularization * float(cost.mean())
    if amount == 0:
        return np.eye(n)  # all rows are one
    method = (
        "sinkhorn" if float(cost.max()) < 200 * amount else "sinkhorn_log"
    )  # else the kernel underflows
    return np.asarray(
        n * ot.sinkhorn(uniform, uniform, cost, amount, method=method, numItermax=5000, warn=False),
        np.float64,
    )


def fit_transport(
    spec: Spec,
    a: State,
    b: State,
    *,
    regularization: float | None = 0.05,
    activations: tuple[LayerOutputs, LayerOutputs] | None = None,
    rows: Mapping[str, SharedRows] | None = None,
) -> Element:
    """The map that brings a next to b, on every space that allows permutations: by weights, or by
    what the layers of both write on the same inputs (`activations` of a and of b). To be applied by
    `apply(g, a, force=True)`: where it is soft it is no element.

    By weights, a layer's rows are compared after what it reads has been moved: first the spaces
    that stand next to what both models share (tokens, pixels), then those behind them; then all
    again, with everything else in its place.
    """
    sides = _WritingBlocks(spec, a, b, activations, rows)
    order = [
        s
        for s, space in spec.spaces.items()
        if space.size > 1 and isinstance(space.group.within("permutation"), Permutation)
    ]
    members: dict[str, Member] = {}
    for _ in range(1 if activations else 2):
        for space in order:
            children = [s for s in spec.children(space) if s in order]
            for name in (space, *children):
                members.pop(name, None)
            found = _fit_space(
                sides,
                space,
                Element(spec, members),
                [s for s in order if s not in members],
                children,
                regularization,
            )
            if found is not None:
                members[space] = found
    return Element(spec, members)


class _WritingBlocks:
    """What is compared: for a space, the pieces of the tensors (or activations) of b and of a that
    write it, by layer.
    """

    def __init__(
        self,
        spec: Spec,
        a: State,
        b: State,
        seen: tuple[LayerOutputs, LayerOutputs] | None,
        rows: Mapping[str, SharedRows] | None,
    ) -> None:
        self.spec, self.activations, self.costs = (
            spec,
            seen,
            Costs(spec, a, b, rows=rows, include_key_bias=True),
        )
        self.axes = dict(spec.tensors)
        if seen is not None:
            self.axes = {
                n: f"_ {written}"
                for n in seen[1]
                if n in spec.tensors and (written := _output_term(spec.tensors[n]))
            }
            missing = next(
                (n for n in self.axes if n not in seen[0] or seen[0][n].shape != seen[1][n].shape),
                None,
            )
            if missing is not None or not self.axes:
                raise TransportError(
                    f'the two were not seen at work on the same inputs: "{missing}"'
                    if missing
                    else "no layer was seen at work",
                    hint="record the activations of both on the same batches",
                )

    def writing_pairs(self, space: str, g: Element) -> dict[str, list[Pair]]:
        """The pieces that write a space, by the layer that they belong to. A layer with nothing but
        a bias or a gain there writes nothing.
        """
        out: dict[str, list[Pair]] = {}
        wide: set[str] = set()
        for pattern, text in self.axes.items():
            if space not in ax.spaces(text) or pattern in self.spec.ties:
                continue
            layer = pattern.rpartition(".")[0]
            found = [
                (y, x)
                for y, x in self._pairs(pattern, text, g)
                if _writing_axis(self.spec, y, space) is not None
            ]
            if found:
                out.setdefault(layer, []).extend(found)
                wide |= {layer} if len(ax.parse(text).terms) > 1 else set()
        return {layer: pairs for layer, pairs in out.items() if layer in wide}

    def _pairs(self, pattern: str, text: str, g: Element) -> Iterator[Pair]:
        if self.activations is None:
            y, x = self.costs.tensor_pair(pattern, g)
        else:
            x, y = self.activations[0][pattern], self.activations[1][pattern]
            x = act(g, x, text)
        yield from zip(*(split_blocks(self.spec, text, v.numpy()) for v in (y, x)), strict=True)


def _fit_space(
    sides: _WritingBlocks,
    space: str,
    g: Element,
    unknown: list[str],
    children: list[str],
    soft: float | None,
) -> Member | None:
    found = sides.writing_pairs(space, g)
    free = set(unknown) - {space, *children}
    ready = {
        layer: kept
        for layer, pairs in found.items()
        if (
            kept := [(y, x) for y, x in pairs if not y.spaces & free and len(y.axes_of(space)) == 1]
        )
    }
    found = ready or found
    if not found:
        return None
    if sides.spec.children(space):
        return _assign_parents(
            sides.spec, space, [p for pairs in found.values() for p in pairs], children
        )
    through = len({tuple(_NUMBER.findall(f".{layer}.")) for layer in found}) > 1
    groups = list(found.values()) if through else [[p for pairs in found.values() for p in pairs]]
    maps = np.mean([_transport_maps(sides.spec, space, pairs, soft) for pairs in groups], axis=0)
    parent = sides.spec.spaces[space].over
    if parent is not None and parent in g.members:  # members are told by the place before the move
        maps = maps[np.argsort(permutation_index(g.members[parent]))]
    index = maps.argmax(2)
    hard = bool(np.allclose(np.take_along_axis(maps, index[:, :, None], 2), 1, atol=1e-6)) and bool(
        (np.sort(index, 1) == np.arange(maps.shape[1])).all()
    )
    return Monomial(index) if hard else Soft(maps)


def _transport_maps(spec: Spec, space: str, pairs: list[Pair], soft: float | None) -> Floats:
    """The maps of a space, one for each place of its parent."""
    ys, xs = [], []
    for y, x in pairs:
        place, parent = _writing_axis(spec, y, space), spec.spaces[space].over
        outer = None if parent is None else y.axes_of(parent)[0]
        ys.append(y.unfold(outer, place))
        xs.append(x.unfold(outer, place))
    there, here = (
        np.concatenate([np.asarray(v, np.float64) for v in values], 2) for values in (ys, xs)
    )
    return np.stack([transport_map(y, x, soft) for y, x in zip(there, here, strict=True)])


def _assign_parents(spec: Spec, space: str, pairs: list[Pair], children: list[str]) -> Monomial:
    """The permutation of a parent: wholes are as far from each other as the exact transport between
    their parts.
    """
    from scipy.optimize import linear_sum_assignment

    size = spec.spaces[space].size
    cost = np.zeros((size, size))
    for y, x in pairs:
        inside = [c for c in children if c in y.spaces]
        if len(inside) > 1:
            continue
        place, inner = _writing_axis(spec, y, space), y.axes_of(inside[0])[0] if inside else None
        there, here = (np.asarray(v.unfold(place, inner), np.float64) for v in (y, x))
        for i in range(size):
            for j in range(size):
                apart = _squared_distances(there[i], here[j])
                cost[i, j] += apart[linear_sum_assignment(apart)].sum() if inside else apart.sum()
    return Monomial(np.asarray(linear_sum_assignment(cost)[1], np.int64)[None])


def _writing_axis(spec: Spec, block: Block, space: str) -> int | None:
    """The axis along which a piece writes a space: one without a star, or the inside of one (keys
    carry the dual of what queries do).
    """
    parent = spec.spaces[space].over
    for i in block.axes_of(space):
        leaf = block.dims[i]
        outer = [d for d in block.dims if d is not None and d.space == parent]
        if leaf is not None and (not leaf.star or any(not d.star for d in outer)):
            return i
    return None


def _output_term(axes: str) -> str | None:
    """The term of a layer's weight that says what its outputs are, if one does."""
    terms = ax.parse(axes).terms
    for term in terms:
        first = next(iter(ax.leaves(term)), None)
        if first is not None and not first.star:
            return str(term)
    return None


def _squared_distances(y: Floats, x: Floats) -> Floats:
    """Squared distances between rows."""
    apart = np.square(y).sum(1)[:, None] + np.square(x).sum(1)[None] - 2 * (y @ x.T)
    return np.asarray(np.maximum(apart, 0), np.float64)
