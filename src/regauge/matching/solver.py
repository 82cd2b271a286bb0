"""The solver: one space of the element given all others, and the evidence for each space.

A space is solved from the blocks of tensors that live in it. Each group's `fit` holds the closed
form: assignment for permutations, Procrustes for rotations, balance for scales. Spaces with
children (heads, experts) are assigned by cosines that do not depend on the basis inside them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np

from regauge.core.axes import Leaf
from regauge.core.element import Element
from regauge.core.fit import Pair, correlation, make_summed_pair
from regauge.core.groups import (
    GeneralLinear,
    Group,
    Orthogonal,
    Permutation,
    Rotary,
    Scaling,
    Trivial,
)
from regauge.core.members import Dense, Member, Monomial
from regauge.core.rng import Floats
from regauge.matching.blocks import Block
from regauge.matching.closed_forms import (
    assign_factors,
    assign_two_level,
    product_cosines,
    rotary_cosines,
    row_cosines,
    solve_rescaling,
)
from regauge.matching.costs import Costs
from regauge.matching.saved_parts import SavedParts

# Tables with so many rows for each coordinate of a space determine it on their own.
ROWS_PER_COORDINATE = 2


@dataclass
class Solver:
    """The state of one search: the element so far, and the spaces that it already solves.

    Attributes:
        costs: the pairs of blocks that are compared.
        groups: the spaces that take part, each with the group that its member is chosen from.
        g: the element that moves a towards b.
        known: the spaces that are solved or do not take part.
        rescale: add one factor to each rotation of a general linear space.
        nearest: let sweeps also solve spaces that tables determine.
        pool: worker processes, if there are any.
        stage: the name of the current step: the first pass, or a sweep.
        units: the spaces that were solved independently of each other in the first pass.
        distances: the distances of tensors that were measured when their unit was solved.
    """

    costs: Costs
    groups: Mapping[str, Group]
    g: Element
    known: set[str] = field(default_factory=set)
    rescale: bool = False
    nearest: bool = True
    pool: Executor | None = None
    stage: str = "first pass"
    units: list[list[str]] = field(default_factory=list)
    distances: dict[str, tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.spec = self.costs.spec
        self.parts = SavedParts(self.spec)
        self.groups = {
            s: group for s, group in self.groups.items() if not isinstance(group, Trivial)
        }
        self.known |= {s for s in self.spec.spaces if s not in self.groups}

    def __getstate__(self) -> dict[str, Any]:
        """Drop what worker processes neither need nor can unpickle."""
        return {**self.__dict__, "pool": None, "parts": SavedParts(self.spec)}

    def part_key(self, *spaces: str) -> str:
        """Return the key of a part of the current step."""
        return " ".join((self.stage, *spaces))

    def solve_once(self, *spaces: str, all_tensors: bool = False) -> list[str]:
        """Solve a space, or the first of two factors, unless it was solved and saved before."""

        def compute() -> tuple[list[str], Element]:
            solved = (
                self.solve(*spaces, all_tensors=all_tensors)
                if len(spaces) == 1
                else self.solve_factors(*spaces)
            )
            return solved, self.g

        solved, self.g = self.parts.once(self.part_key(*spaces), self.g, compute)
        return solved

    def solve(self, space: str, *, all_tensors: bool = False) -> list[str]:
        """Solve one space, with the spaces that are assigned together with it, and update `g`.

        Args:
            space: the space to solve.
            all_tensors: use all tensors of the space, not only those whose other spaces are known.

        Returns:
            The spaces that were solved.
        """
        members = (
            self._fit_parent(space, all_tensors)
            if self.spec.children(space)
            else self._fit(space, all_tensors)
        )
        if members:
            self.g = Element(self.spec, members) @ self.g
        if (
            self.rescale
            and isinstance(self.spec.spaces[space].group, GeneralLinear)
            and isinstance(self.groups[space], Orthogonal)
        ):
            self._fit_rescaling(space)
        return [space, *(s for s in members if s != space)]

    def solve_factors(self, outer: str, inner: str) -> list[str]:
        """Solve the first of two permutations that only occur together (`factors`).

        Both are assigned together. The second has evidence of its own once the first is known.
        """
        scores: list[Floats] = []
        for y, x in self.costs.iter_block_pairs(
            outer, self.g, partial(self._joins_factors, outer, inner), True
        ):
            axes = y.axes_of(outer)[0], y.axes_of(inner)[0]
            pair = y.unfold(*axes), x.unfold(*axes)
            scores.append(np.einsum("abf,cdf->abcd", *pair, dtype=np.float64, optimize=True))
        if not scores:
            return []
        index, _ = assign_factors(np.sum(scores, 0))
        self.g = Element(self.spec, {outer: Monomial(index[None])}) @ self.g
        return [outer]

    def factors(self, unknown: Iterable[str]) -> dict[tuple[str, ...], float]:
        """Return the pairs of unknown permutations that share tensors with no third unknown, each
        with its evidence. The smaller comes first.

        An example is the order of channel groups and the order of the channels in every group. The
        evidence is that for one permutation of all pairs of places.
        """
        candidates = [
            s
            for s in unknown
            if self.spec.spaces[s].over is None
            and isinstance(self.groups[s], Permutation)
            and not self.spec.children(s)
        ]
        candidates.sort(key=lambda s: self.spec.spaces[s].size)
        found: dict[tuple[str, ...], float] = {}
        for outer, inner in combinations(candidates, 2):
            places = self.spec.spaces[outer].size * self.spec.spaces[inner].size
            features = sum(
                block.values.size / places
                for pattern in self.costs.tensors_in(outer, first=True)
                for block in self.costs.layouts[pattern]
                if self._joins_factors(outer, inner, block)
            )
            if features:
                found[outer, inner] = features / math.log(places + 1)
        return found

    def evidence(self, space: str) -> float:
        """Return how well a space is determined by what is known.

        For permutations of size n, N independent features count as N / ln n, the squared noise that
        an assignment tolerates. A dense member needs as many features as coordinates. A cosine is
        free of scale and so has one feature less: one of a single feature is always 1 or -1.
        """
        size, over = self.spec.spaces[space].size, self.spec.spaces[space].over
        if over is not None and over not in self.known:
            return 0.0
        if self.is_inner(space):
            return 0.0 if over in self.groups else 1.0
        direct, sides = 0.0, dict.fromkeys(self.spec.children(space), (0.0, 0.0))
        for pattern in self.costs.tensors_in(space, first=True):
            for block in self.costs.layouts[pattern]:
                if space not in block.spaces or not self._is_usable(block, space):
                    continue
                children = self._free_children(block, space)
                features = block.values.size / (
                    size * math.prod(self.spec.spaces[c].size for c in children)
                )
                if not children:
                    direct += features / (self.spec.count(space))
                for child in children:
                    plain, dual = sides[child]
                    star = any(d is not None and d.space == child and d.star for d in block.dims)
                    sides[child] = (plain, dual + features) if star else (plain + features, dual)
        total = direct + sum(max(p * d - 1, 0.0) for p, d in sides.values())
        return (
            total / size
            if isinstance(self.groups[space], Orthogonal)
            else total / math.log(size + 1)
        )

    def independent_units(self, spaces: Iterable[str]) -> list[list[str]]:
        """Partition unknown spaces into units that no tensor joins (union-find)."""
        parent = {s: s for s in spaces}

        def root(space: str) -> str:
            while parent[space] != space:
                space = parent[space]
            return space

        for pattern in self.costs.patterns:
            for block in self.costs.layouts[pattern]:
                joined = sorted(block.spaces & parent.keys())
                for other in joined[1:]:
                    parent[root(other)] = root(joined[0])
        for space in parent:
            over = self.spec.spaces[space].over
            if over in parent:
                parent[root(space)] = root(over)
        units: dict[str, list[str]] = {}
        for space in parent:
            units.setdefault(root(space), []).append(space)
        return list(units.values())

    def is_anchored(self, space: str) -> bool:
        """Return whether tables determine a space.

        Tables are tensors on which nothing else acts. They need `ROWS_PER_COORDINATE` rows for each
        coordinate.
        """
        size = self.spec.spaces[space].size
        tables = (
            block
            for pattern in self.costs.tensors_in(space)
            for block in self.costs.layouts[pattern]
            if block.spaces == {space} and len(block.axes_of(space)) == 1
        )
        return sum(table.values.size // size for table in tables) >= ROWS_PER_COORDINATE * size

    def is_inner(self, space: str) -> bool:
        """Return whether a space is an index inside another one's members.

        Such a space (the queries of a key-value head) is assigned together with its parent.
        """
        over = self.spec.spaces[space].over
        if over is None or not isinstance(self.spec.spaces[space].group, Permutation | Trivial):
            return False
        siblings = [s for s in self.spec.children(over) if s != space]
        return any(
            space in block.spaces and any(s in block.spaces for s in siblings)
            for pattern in self.costs.tensors_in(space)
            for block in self.costs.layouts[pattern]
        )

    def _joins_factors(self, outer: str, inner: str, block: Block) -> bool:
        """Return whether these two are the only unknown spaces of a block, each on one axis."""
        return (
            block.spaces - self.known == {outer, inner}
            and len(block.axes_of(outer)) == len(block.axes_of(inner)) == 1
        )

    def _is_usable(self, block: Block, space: str, all_tensors: bool = False) -> bool:
        """Return whether every other space on a block is known, or a child of this one."""
        children = self.spec.children(space)
        others = [d.space for d in block.dims if d is not None]
        others.remove(space)
        return all_tensors or all(s in self.known or s in children for s in others)

    def _free_children(self, block: Block, space: str) -> list[str]:
        """Return the children on a block whose basis is unknown, so that it must not matter."""
        return [
            c
            for c in self.spec.children(space)
            if c in block.spaces and c in self.groups and not self.is_inner(c)
        ]

    def _fit(self, space: str, all_tensors: bool) -> dict[str, Member]:
        """Fit the member of a space without children by its group's closed form."""
        group, over = self.groups[space], self.spec.spaces[space].over
        if self.is_inner(space):
            return self._fit_parent(over, all_tensors, fixed=True) if over is not None else {}
        sides: dict[str, list[Pair]] = {}
        totals: dict[str, Floats] = {}
        g = self.g
        if self._is_replaceable(space):
            g = g.without(space)
        for y, x in self.costs.iter_block_pairs(
            space, g, lambda b: self._is_usable(b, space, all_tensors), not all_tensors
        ):
            for axis in y.axes_of(space):
                leaf = y.dims[axis]
                assert leaf is not None
                outer = y.axes_of(over)[0] if over is not None else None
                pair = (y.unfold(outer, axis), x.unfold(outer, axis))
                side = _side(leaf)
                # For orthogonal groups the fit depends only on the sum of y x^T, and duals act like
                # plain axes: no need to hold the whole model in memory.
                if group.is_orthogonal:
                    side = "plain" if side == "dual" else side
                    totals[side] = correlation(pair, total=totals.get(side))
                elif isinstance(group, Scaling):  # its fit chooses the precision
                    sides.setdefault(side, []).append(pair)
                else:
                    sides.setdefault(side, []).append(
                        (pair[0].astype(np.float64), pair[1].astype(np.float64))
                    )
        pairs_by_side = {side: _concatenate(pairs) for side, pairs in sides.items()}
        pairs_by_side |= {side: make_summed_pair(total) for side, total in totals.items()}
        if not pairs_by_side:
            return {}
        self.g = g
        return {space: group.fit(**pairs_by_side)}

    def _is_replaceable(self, space: str) -> bool:
        """Return whether the best member of a space does not depend on the member that it has.

        So it is for a rotation of one axis of each tensor: then the tensors need not be rotated by
        the old member, which takes as long as the fit itself.
        """
        return (
            isinstance(self.groups[space], Orthogonal)
            and isinstance(self.g.members.get(space), Dense)
            and self.spec.spaces[space].over is None
            and all(
                len(block.axes_of(space)) <= 1
                for pattern in self.costs.tensors_in(space)
                for block in self.costs.layouts[pattern]
            )
        )

    def _fit_rescaling(self, space: str) -> None:
        """Fit one factor for each rotation of a general linear space, after the rotation."""
        over = self.spec.spaces[space].over
        sides: dict[bool, list[Pair]] = {False: [], True: []}
        for y, x in self.costs.iter_block_pairs(space, self.g, lambda b: self._is_usable(b, space)):
            axis = y.axes_of(space)[0]
            outer = y.axes_of(over)[0] if over is not None else None
            leaf = y.dims[axis]
            sides[leaf is not None and leaf.star].append(
                (y.unfold(outer, axis), x.unfold(outer, axis))
            )
        if sides[False] and sides[True]:
            (q1, q2), (k1, k2) = _concatenate(sides[False]), _concatenate(sides[True])
            heads = zip(q1, k1, q2, k2, strict=True)
            factors = np.array([solve_rescaling(*head) for head in heads])
            size = self.spec.spaces[space].size
            member = Monomial(
                np.tile(np.arange(size), (len(factors), 1)), np.repeat(factors[:, None], size, 1)
            )
            self.g = Element(self.spec, {space: member}) @ self.g

    def _fit_parent(self, parent: str, all_tensors: bool, fixed: bool = False) -> dict[str, Member]:
        """Assign heads, key-value heads with their queries, or experts, by cosines that do not
        depend on the basis inside them.

        Args:
            parent: the space with children.
            all_tensors: use all tensors of the space, not only those whose other spaces are known.
            fixed: keep the parent in place and assign only the indices inside it.
        """
        total = self._parent_scores(parent, all_tensors)
        if total is None:
            return {}
        is_fixed = fixed or parent not in self.groups
        if is_fixed:
            total = total - 1e9 * (1 - np.eye(total.shape[0]))[:, None, :, None]
        outer, inner_index = assign_two_level(total)
        members: dict[str, Member] = {} if is_fixed else {parent: Monomial(outer[None])}
        for space in self.spec.children(parent):
            if self.is_inner(space) and space in self.groups:
                # Members are indexed by the place that they come from.
                members[space] = Monomial(inner_index).take(np.argsort(outer))
        return members

    def _parent_scores(self, parent: str, all_tensors: bool) -> Floats | None:
        """Sum the cosines [members of b, inner of b, members of a, inner of a]; None if no block is
        usable.
        """
        stacks: dict[tuple[str, str], list[Pair]] = {}
        for y, x in self.costs.iter_block_pairs(
            parent, self.g, lambda b: self._is_usable(b, parent, all_tensors), not all_tensors
        ):
            children = self._free_children(y, parent)
            outer = y.axes_of(parent)[0]
            if not children:
                stacks.setdefault(("", "rows"), []).append((y.unfold(outer), x.unfold(outer)))
                continue
            child = children[0]
            axis = y.axes_of(child)[0]
            leaf = y.dims[axis]
            assert leaf is not None
            inner = next(
                (
                    y.axes_of(s)[0]
                    for s in self.spec.children(parent)
                    if self.is_inner(s) and s in y.spaces
                ),
                None,
            )
            axes = (outer, inner, axis)
            stacks.setdefault((child, _side(leaf)), []).append((y.unfold(*axes), x.unfold(*axes)))
        scores: list[Floats] = []
        for (child, side), pairs in stacks.items():
            q1, q2 = _concatenate(pairs)
            if side == "rows":
                scores.append(row_cosines(q1, q2))
            elif side == "bar":
                scores.append(product_cosines((q1, q1), (q2, q2)))
            elif side == "plain":
                dual = stacks.get((child, "dual"))
                k1, k2 = _concatenate(dual) if dual else (q1, q2)
                group = self.spec.spaces[child].group
                scores.append(
                    rotary_cosines((q1, k1), (q2, k2), group)
                    if isinstance(group, Rotary)
                    else product_cosines((q1, k1), (q2, k2))
                )
        if not scores:
            return None
        shape = np.broadcast_shapes(*(s.shape for s in scores))
        return np.asarray(np.zeros(shape) + sum(scores))


def _side(leaf: Leaf) -> str:
    """Name the side of a fit that an axis belongs to."""
    return "bar" if leaf.bar else "dual" if leaf.star else "plain"


def _concatenate(pairs: list[Pair]) -> Pair:
    """Join pairs along their features; members that one pair has only once are repeated."""
    if len(pairs) == 1:
        return pairs[0]
    count = [max(p[0].shape[i] for p in pairs) for i in range(pairs[0][0].ndim - 1)]
    y, x = (
        np.concatenate([np.broadcast_to(p[i], (*count, p[i].shape[-1])) for p in pairs], axis=-1)
        for i in (0, 1)
    )
    return y, x
