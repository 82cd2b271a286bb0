"""Optimal transport between two models: OT-Fusion (Singh and Jaggi 2020) for Transformers.

After Imfeld et al. 2024 ("Transformer Fusion with Optimal Transport"): OT-WTS, OT-ACTS and
OT-ACTS-EMD. Coordinates of a space are compared by what writes them: the rows of the weights and
biases, or the activations on data. The plan between those of b and those of a, with uniform
marginals, times their number is a map that moves a towards b. Exact transport (no regularization)
ends in a vertex, which is a permutation, and so an element. Sinkhorn's plan, at `regularization`
times the mean cost, mixes coordinates: it is *not an element*, and changes the function.

A space that runs through layers, the residual stream, has one plan for each layer that writes it.
They are averaged, Imfeld's policy for residuals. There the maps of successive layers differ; here
the stream is one space with one map, the mean of all. Such a mean is soft, even if its plans are
exact, unless they agree. Heads (and experts) are permuted as wholes, by exact transport of exact
transports, and channels are transported within them. Imfeld et al. mix channels across heads, which
does not keep the function even if it is exact.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from regauge.core import axes as ax
from regauge.core.action import State, act
from regauge.core.assignment import best_assignment
from regauge.core.element import Element
from regauge.core.groups import Permutation
from regauge.core.members import Member, Monomial, Soft, permutation_index
from regauge.core.rng import Floats
from regauge.core.spec import Spec
from regauge.errors import SoftTransportError, need
from regauge.matching.blocks import Block, split_blocks
from regauge.matching.costs import Costs, SharedRows

if TYPE_CHECKING:
    import torch

    LayerOutputs = Mapping[str, torch.Tensor]

Pair = tuple[Block, Block]
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def transport_map(y: Floats, x: Floats, regularization: float | None = None) -> Floats:
    """Return the map [n, n] that brings the rows of x to those of y.

    It is n times the transport plan between them, by their Euclidean distances.

    Args:
        y: the target rows.
        x: the rows to transport.
        regularization: of Sinkhorn, as a share of the mean cost; None or 0 for exact transport.
    """
    need("ot", "transport")
    import ot

    n = len(y)
    uniform, cost = np.full(n, 1 / n), np.sqrt(_squared_distances(y, x))
    if not regularization:
        return np.asarray(n * ot.emd(uniform, uniform, cost, numItermax=1_000_000), np.float64)
    amount = regularization * float(cost.mean())
    if amount == 0:
        return np.eye(n)  # all rows are equal
    # With large costs the kernel underflows.
    method = "sinkhorn" if float(cost.max()) < 200 * amount else "sinkhorn_log"
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
    """Return the map that brings a to b, on every space that allows permutations.

    Apply it by `apply(g, a, force=True)`: if it is soft it is not an element. By weights, the rows
    of a layer are compared after its inputs were transported: first the spaces next to what both
    models share (tokens, pixels), then those behind them; then all again, given all others.

    Args:
        spec: the spec of both models.
        a: the state to transport.
        b: the target state.
        regularization: of Sinkhorn, as a share of the mean cost; None for exact transport.
        activations: layer outputs of a and of b on the same inputs (`statistics.activations`); by
            default weights are compared.
        rows: the rows that two tables have in common, for models with different vocabularies.
    """
    writers = _WritingBlocks(spec, a, b, activations, rows)
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
            member = _fit_space(
                writers,
                space,
                Element(spec, members),
                [s for s in order if s not in members],
                children,
                regularization,
            )
            if member is not None:
                members[space] = member
    return Element(spec, members)


class _WritingBlocks:
    """The blocks of the tensors (or activations) of b and of a that write a space, by layer."""

    def __init__(
        self,
        spec: Spec,
        a: State,
        b: State,
        activations: tuple[LayerOutputs, LayerOutputs] | None,
        rows: Mapping[str, SharedRows] | None,
    ) -> None:
        self.spec, self.activations, self.costs = (
            spec,
            activations,
            Costs(spec, a, b, rows=rows, include_key_bias=True),
        )
        self.axes = dict(spec.tensors)
        if activations is not None:
            self.axes = {
                n: f"_ {written}"
                for n in activations[1]
                if n in spec.tensors and (written := _output_term(spec.tensors[n]))
            }
            missing = next(
                (
                    n
                    for n in self.axes
                    if n not in activations[0] or activations[0][n].shape != activations[1][n].shape
                ),
                None,
            )
            if missing is not None or not self.axes:
                raise SoftTransportError(
                    f'activations of both models must be of the same inputs: "{missing}" differs'
                    if missing
                    else "activations must have at least one layer of the spec",
                    hint="record the activations of both on the same batches",
                )

    def writing_pairs(self, space: str, g: Element) -> dict[str, list[Pair]]:
        """Return the pairs of blocks that write a space, by layer.

        A layer with only a bias or a gain there writes nothing.
        """
        pairs_by_layer: dict[str, list[Pair]] = {}
        weighted_layers: set[str] = set()
        for pattern, text in self.axes.items():
            if space not in ax.spaces(text) or pattern in self.spec.ties:
                continue
            layer = pattern.rpartition(".")[0]
            writing = [
                (y, x)
                for y, x in self._pairs(pattern, text, g)
                if _writing_axis(self.spec, y, space) is not None
            ]
            if writing:
                pairs_by_layer.setdefault(layer, []).extend(writing)
                weighted_layers |= {layer} if len(ax.parse(text).terms) > 1 else set()
        return {layer: pairs for layer, pairs in pairs_by_layer.items() if layer in weighted_layers}

    def _pairs(self, pattern: str, text: str, g: Element) -> Iterator[Pair]:
        """Yield the blocks of one tensor of b, each with that of a transformed by g."""
        if self.activations is None:
            y, x = self.costs.tensor_pair(pattern, g)
        else:
            x, y = self.activations[0][pattern], self.activations[1][pattern]
            x = act(g, x, text)
        yield from zip(*(split_blocks(self.spec, text, v.numpy()) for v in (y, x)), strict=True)


def _fit_space(
    blocks: _WritingBlocks,
    space: str,
    g: Element,
    unknown: list[str],
    children: list[str],
    regularization: float | None,
) -> Member | None:
    """Fit the member of one space; None if no layer writes it."""
    pairs_by_layer = blocks.writing_pairs(space, g)
    others = set(unknown) - {space, *children}
    complete = {
        layer: usable
        for layer, pairs in pairs_by_layer.items()
        if (
            usable := [
                (y, x) for y, x in pairs if not y.spaces & others and len(y.axes_of(space)) == 1
            ]
        )
    }
    pairs_by_layer = complete or pairs_by_layer
    if not pairs_by_layer:
        return None
    if blocks.spec.children(space):
        return _assign_parents(
            blocks.spec, space, [p for pairs in pairs_by_layer.values() for p in pairs], children
        )
    spans_layers = len({tuple(_NUMBER.findall(f".{layer}.")) for layer in pairs_by_layer}) > 1
    groups = (
        list(pairs_by_layer.values())
        if spans_layers
        else [[p for pairs in pairs_by_layer.values() for p in pairs]]
    )
    maps = np.mean(
        [_transport_maps(blocks.spec, space, pairs, regularization) for pairs in groups], axis=0
    )
    parent = blocks.spec.spaces[space].over
    if parent is not None and parent in g.members:  # members are indexed by the place before
        maps = maps[np.argsort(permutation_index(g.members[parent]))]
    index = maps.argmax(2)
    is_permutation = bool(
        np.allclose(np.take_along_axis(maps, index[:, :, None], 2), 1, atol=1e-6)
    ) and bool((np.sort(index, 1) == np.arange(maps.shape[1])).all())
    return Monomial(index) if is_permutation else Soft(maps)


def _transport_maps(
    spec: Spec, space: str, pairs: list[Pair], regularization: float | None
) -> Floats:
    """Return the maps of a space, one for each member of its parent."""
    ys, xs = [], []
    for y, x in pairs:
        axis, parent = _writing_axis(spec, y, space), spec.spaces[space].over
        outer = None if parent is None else y.axes_of(parent)[0]
        ys.append(y.unfold(outer, axis))
        xs.append(x.unfold(outer, axis))
    targets, sources = (
        np.concatenate([np.asarray(v, np.float64) for v in values], 2) for values in (ys, xs)
    )
    return np.stack(
        [transport_map(y, x, regularization) for y, x in zip(targets, sources, strict=True)]
    )


def _assign_parents(spec: Spec, space: str, pairs: list[Pair], children: list[str]) -> Monomial:
    """Return the permutation of a parent: the cost of a pair is the exact transport between
    their parts.
    """
    size = spec.spaces[space].size
    cost = np.zeros((size, size))
    for y, x in pairs:
        inner_spaces = [c for c in children if c in y.spaces]
        if len(inner_spaces) > 1:
            continue
        axis, inner_axis = (
            _writing_axis(spec, y, space),
            y.axes_of(inner_spaces[0])[0] if inner_spaces else None,
        )
        targets, sources = (np.asarray(v.unfold(axis, inner_axis), np.float64) for v in (y, x))
        for i in range(size):
            for j in range(size):
                distances = _squared_distances(targets[i], sources[j])
                cost[i, j] += (
                    distances[range(len(distances)), best_assignment(distances)].sum()
                    if inner_spaces
                    else distances.sum()
                )
    return Monomial(best_assignment(cost)[None])


def _writing_axis(spec: Spec, block: Block, space: str) -> int | None:
    """Return the axis along which a block writes a space; None if it does not.

    It has no star, or lies inside a space without one (keys carry the dual of queries).
    """
    parent = spec.spaces[space].over
    for i in block.axes_of(space):
        leaf = block.dims[i]
        outer = [d for d in block.dims if d is not None and d.space == parent]
        if leaf is not None and (not leaf.star or any(not d.star for d in outer)):
            return i
    return None


def _output_term(axes: str) -> str | None:
    """Return the term of a weight's axes that names the outputs of its layer, if any."""
    terms = ax.parse(axes).terms
    for term in terms:
        first = next(iter(ax.leaves(term)), None)
        if first is not None and not first.star:
            return str(term)
    return None


def _squared_distances(y: Floats, x: Floats) -> Floats:
    """Return squared distances between rows."""
    squares = np.square(y).sum(1)[:, None] + np.square(x).sum(1)[None] - 2 * (y @ x.T)
    return np.asarray(np.maximum(squares, 0), np.float64)
