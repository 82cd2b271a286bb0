"""The search: one member after the other, over the spec, from what is known to what is not.

A space can be fitted once everything else on some of its tensors is known. The residual stream
begins (embedding, positions and head have axes on which nothing acts), heads follow by what is free
of the basis inside them, then the insides of heads and the neurons. Which space comes next is not
written down for any family: it is the one with the most evidence, and evidence is counted from the
axes strings. After that first pass every space is fitted again from all of its tensors, in turn, as
long as it helps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import partial
from itertools import permutations
from typing import Any

import numpy as np

from regauge.core.element import Element
from regauge.core.fit import Pair, correlation, make_summed_pair
from regauge.core.groups import GeneralLinear, Group, Orthogonal, Permutation, Rotary, Trivial
from regauge.core.members import Member, Monomial
from regauge.core.rng import Floats
from regauge.matching.blocks import Block
from regauge.matching.closed_forms import (
    assign_two_level,
    product_cosines,
    rotary_cosines,
    row_cosines,
    solve_rescaling,
)
from regauge.matching.costs import Costs, MatchError

ROWS_PER_COORDINATE = (
    2  # rows of tables for each coordinate of a space, from which on they alone say where it is
)


@dataclass
class Solver:
    """Members found so far, as an element that moves a next to b. `groups` are the spaces that take
    part, and how far each may go.
    """

    costs: Costs
    groups: Mapping[str, Group]
    g: Element
    known: set[str] = field(default_factory=set)
    rescale: bool = False
    nearest: bool = True
    pool: Executor | None = None
    save: Callable[[Solver], None] | None = None
    units: list[list[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.spec = self.costs.spec
        self.groups = {
            s: group for s, group in self.groups.items() if not isinstance(group, Trivial)
        }
        self.known |= {s for s in self.spec.spaces if s not in self.groups}

    def first_pass(self, wanted: Iterable[str] | None = None) -> list[str]:
        """Find every wanted space from the evidence there is, best first; the order in which they
        were found.
        """
        open_ = [s for s in (self.groups if wanted is None else wanted) if s not in self.known]
        order: list[str] = []
        while open_:
            apart = self._independent_units(open_) if wanted is None else [open_]
            if len(apart) > 1:
                self.units = apart
                return order + self._solve_units([(self, unit, True) for unit in apart])
            evidence = {s: self.evidence(s) for s in open_}
            best = max(open_, key=lambda s: evidence[s])
            found = self.solve(best) if evidence[best] > 0 else self._fit_factors(open_)
            if not found:
                break
            order += found
            self.known.update(order)
            open_ = [s for s in open_ if s not in self.known]
        return order

    def sweep(self, order: Iterable[str]) -> None:
        """Fit every space once more, each from all of its tensors; unless `nearest`, what tables
        determine stays.
        """
        order = list(order)
        inside = {s for unit in self.units for s in unit}
        self._refit(
            [s for s in order if s not in inside and (self.nearest or not self.is_anchored(s))]
        )
        if self.units:
            self._solve_units(
                [(self, [s for s in order if s in unit], False) for unit in map(set, self.units)]
            )

    def is_anchored(self, space: str) -> bool:
        """Is a space more than determined by tables: tensors on which nothing else acts, with twice
        as many rows as it has coordinates?
        """
        size = self.spec.spaces[space].size
        alone = (
            b
            for p in self.costs.tensors_in(space)
            for b in self.costs.layouts[p]
            if b.spaces == {space} and len(b.axes_of(space)) == 1
        )
        return sum(b.values.size // size for b in alone) >= ROWS_PER_COORDINATE * size

    def _refit(self, spaces: Iterable[str]) -> None:
        done: set[str] = set()
        for space in spaces:
            if space not in done and not self._is_inner(space):
                done.update(self.solve(space, everything=True))

    def _solve_units(self, tasks: list[tuple[Solver, list[str], bool]]) -> list[str]:
        """Units have no tensor in common but through what is known: each is searched on its own, in
        another process if there are some.
        """
        order: list[str] = []
        try:
            for found, members in (
                self.pool.map(_solve_unit, tasks) if self.pool else map(_solve_unit, tasks)
            ):
                order += found
                self.known.update(found)
                self.g = Element(self.spec, {**self.g.members, **members})
                if self.save:
                    self.save(self)
        except BrokenProcessPool as error:
            raise MatchError(
                "a worker was ended from outside, most likely because memory ran out",
                hint="use fewer workers; --resume keeps what was found",
            ) from error
        return order

    def _independent_units(self, spaces: Iterable[str]) -> list[list[str]]:
        """Unknown spaces, in groups that no tensor joins."""
        unit = {s: s for s in spaces}

        def root(s: str) -> str:
            while unit[s] != s:
                s = unit[s]
            return s

        for pattern in self.costs.patterns:
            for block in self.costs.layouts[pattern]:
                there = sorted(block.spaces & unit.keys())
                for other in there[1:]:
                    unit[root(other)] = root(there[0])
        for s in unit:
            over = self.spec.spaces[s].over
            if over in unit:
                unit[root(s)] = root(over)
        out: dict[str, list[str]] = {}
        for s in unit:
            out.setdefault(root(s), []).append(s)
        return list(out.values())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "pool": None, "saved": None}

    def evidence(self, space: str) -> float:
        """How well a space could be found now. For permutations n ln-independent features N count
        as N / ln n: the square of the noise that an assignment bears. A dense member needs as many
        features as coordinates.
        """
        size, over = self.spec.spaces[space].size, self.spec.spaces[space].over
        if over is not None and over not in self.known:
            return 0.0
        if self._is_inner(space):
            return 0.0 if over in self.groups else 1.0
        direct, sides = 0.0, dict.fromkeys(self.spec.children(space), (0.0, 0.0))
        for pattern in self.costs.tensors_in(space, first=True):
            for block in self.costs.layouts[pattern]:
                if space not in block.spaces or not self._is_usable(block, space):
                    continue
                inside = self._free_children(block, space)
                features = block.values.size / (
                    size * math.prod(self.spec.spaces[c].size for c in inside)
                )
                if not inside:
                    direct += features / (self.spec.count(space))
                for child in inside:
                    plain, dual = sides[child]
                    star = any(d is not None and d.space == child and d.star for d in block.dims)
                    sides[child] = (plain, dual + features) if star else (plain + features, dual)
        total = direct + sum(p * d for p, d in sides.values())
        return (
            total / size
            if isinstance(self.groups[space], Orthogonal)
            else total / math.log(size + 1)
        )

    def _fit_factors(self, unknown: Iterable[str]) -> list[str]:
        """Of two orders that only occur together (groups of channels, and the channels of every
        group), the one that is assigned with the best of the other for each pair of its places: the
        other has evidence then.
        """
        alone = [
            s
            for s in unknown
            if self.spec.spaces[s].over is None
            and isinstance(self.groups[s], Permutation)
            and not self.spec.children(s)
        ]
        for outer, inner in permutations(alone, 2):
            scores: list[Floats] = []
            for y, x in self.costs.iter_block_pairs(
                outer, self.g, partial(self._has_unknowns, {outer, inner}), True
            ):
                if len(y.axes_of(outer)) == len(y.axes_of(inner)) == 1:
                    at = y.axes_of(outer)[0], y.axes_of(inner)[0]
                    scores.append(
                        np.einsum(
                            "abf,cdf->abcd",
                            y.unfold(*at),
                            x.unfold(*at),
                            dtype=np.float64,
                            optimize=True,
                        )
                    )
            if scores:
                index, _ = assign_two_level(np.sum(scores, 0))
                self.g = Element(self.spec, {outer: Monomial(index[None])}) @ self.g
                return [outer]
        return []

    def _has_unknowns(self, unknown: set[str], block: Block) -> bool:
        return block.spaces - self.known == unknown

    def solve(self, space: str, *, everything: bool = False) -> list[str]:
        """Fit one space (and what is assigned together with it) and go on from there; the spaces
        that were fitted.
        """
        found = (
            self._fit_parent(space, everything)
            if self.spec.children(space)
            else self._fit(space, everything)
        )
        if found:
            self.g = Element(self.spec, found) @ self.g
        if (
            self.rescale
            and isinstance(self.spec.spaces[space].group, GeneralLinear)
            and isinstance(self.groups[space], Orthogonal)
        ):
            self.fit_rescaling(space)
        return [space, *(s for s in found if s != space)]

    def _is_usable(self, block: Block, space: str, everything: bool = False) -> bool:
        """Is everything else on this block known, or inside what is asked for?"""
        children = self.spec.children(space)
        others = [d.space for d in block.dims if d is not None]
        others.remove(space)
        return everything or all(s in self.known or s in children for s in others)

    def _free_children(self, block: Block, space: str) -> list[str]:
        """The children of a space on a block whose own basis is not known and must not matter."""
        return [
            c
            for c in self.spec.children(space)
            if c in block.spaces and c in self.groups and not self._is_inner(c)
        ]

    def _is_inner(self, space: str) -> bool:
        """Is this space an index inside another one's members (the queries of a key-value head), to
        be assigned together with them?
        """
        over = self.spec.spaces[space].over
        if over is None or not isinstance(self.spec.spaces[space].group, Permutation | Trivial):
            return False
        siblings = [s for s in self.spec.children(over) if s != space]
        return any(
            space in b.spaces and any(s in b.spaces for s in siblings)
            for p in self.costs.tensors_in(space)
            for b in self.costs.layouts[p]
        )

    def _fit(self, space: str, everything: bool) -> dict[str, Member]:
        group, over = self.groups[space], self.spec.spaces[space].over
        if self._is_inner(space):
            return self._fit_parent(over, everything, fixed=True) if over is not None else {}
        sides: dict[str, list[Pair]] = {}
        totals: dict[str, Floats] = {}
        for y, x in self.costs.iter_block_pairs(
            space, self.g, lambda b: self._is_usable(b, space, everything), not everything
        ):
            for place in y.axes_of(space):
                leaf = y.dims[place]
                assert leaf is not None
                outer = y.axes_of(over)[0] if over is not None else None
                pair = (y.unfold(outer, place), x.unfold(outer, place))
                side = "bar" if leaf.bar else "dual" if leaf.star else "plain"
                # only the sum of y x^T counts, and the star changes nothing: no need to keep the
                # whole model
                if group.is_orthogonal:
                    side = "plain" if side == "dual" else side
                    totals[side] = correlation(pair, total=totals.get(side))
                else:
                    sides.setdefault(side, []).append(
                        (pair[0].astype(np.float64), pair[1].astype(np.float64))
                    )
        joined = {side: _concatenate(pairs) for side, pairs in sides.items()}
        joined |= {side: make_summed_pair(total) for side, total in totals.items()}
        return {space: group.fit(**joined)} if joined else {}

    def fit_rescaling(self, space: str) -> None:
        """One factor for each rotation of a general linear space, after it was found (paper
        003).
        """
        over = self.spec.spaces[space].over
        sides: dict[bool, list[Pair]] = {False: [], True: []}
        for y, x in self.costs.iter_block_pairs(space, self.g, lambda b: self._is_usable(b, space)):
            place = y.axes_of(space)[0]
            outer = y.axes_of(over)[0] if over is not None else None
            leaf = y.dims[place]
            sides[leaf is not None and leaf.star].append(
                (y.unfold(outer, place), x.unfold(outer, place))
            )
        if sides[False] and sides[True]:
            (q1, q2), (k1, k2) = _concatenate(sides[False]), _concatenate(sides[True])
            factors = np.array([solve_rescaling(*one) for one in zip(q1, k1, q2, k2, strict=True)])
            size = self.spec.spaces[space].size
            member = Monomial(
                np.tile(np.arange(size), (len(factors), 1)), np.repeat(factors[:, None], size, 1)
            )
            self.g = Element(self.spec, {space: member}) @ self.g

    def _fit_parent(self, parent: str, everything: bool, fixed: bool = False) -> dict[str, Member]:
        """Heads, key-value heads with their queries, experts: assigned by what does not depend on
        the basis inside them.

        `fixed`: the parent itself stays in its place, and only what is inside is assigned.
        """
        inner = [s for s in self.spec.children(parent) if self._is_inner(s) and s in self.groups]
        stacks: dict[tuple[str, str], list[tuple[Floats, Floats]]] = {}
        scores: list[Floats] = []
        for y, x in self.costs.iter_block_pairs(
            parent, self.g, lambda b: self._is_usable(b, parent, everything), not everything
        ):
            inside = self._free_children(y, parent)
            at = y.axes_of(parent)[0]
            if not inside:
                stacks.setdefault(("", "rows"), []).append((y.unfold(at), x.unfold(at)))
                continue
            (child,) = inside[:1]
            leaf = y.dims[y.axes_of(child)[0]]
            assert leaf is not None
            side = "bar" if leaf.bar else "dual" if leaf.star else "plain"
            within = next(
                (
                    y.axes_of(s)[0]
                    for s in self.spec.children(parent)
                    if self._is_inner(s) and s in y.spaces
                ),
                None,
            )
            where = (at, within, y.axes_of(child)[0])
            stacks.setdefault((child, side), []).append((y.unfold(*where), x.unfold(*where)))
        for (child, side), pairs in stacks.items():
            q1, q2 = _concatenate(pairs)
            if side == "rows":
                scores.append(row_cosines(q1, q2))
            elif side == "bar":
                scores.append(product_cosines((q1, q1), (q2, q2)))
            elif side == "plain":
                other = stacks.get((child, "dual"))
                k1, k2 = _concatenate(other) if other else (q1, q2)
                group = self.spec.spaces[child].group
                scores.append(
                    rotary_cosines((q1, k1), (q2, k2), group)
                    if isinstance(group, Rotary)
                    else product_cosines((q1, k1), (q2, k2))
                )
        if not scores:
            return {}
        shape = np.broadcast_shapes(*(s.shape for s in scores))
        total = np.zeros(shape) + sum(scores)
        if fixed or parent not in self.groups:
            n = shape[0]
            total = total - 1e9 * (1 - np.eye(n))[:, None, :, None]
        outer, inside_index = assign_two_level(total)
        found: dict[str, Member] = (
            {} if fixed or parent not in self.groups else {parent: Monomial(outer[None])}
        )
        for space in inner:
            found[space] = Monomial(inside_index).take(
                np.argsort(outer)
            )  # members go by the place that they come from
        return found


def _solve_unit(task: tuple[Solver, list[str], bool]) -> tuple[list[str], dict[str, Member]]:
    """One unit: the order in which its spaces were found, and their members."""
    search, unit, first = task
    own = Solver(search.costs, search.groups, search.g, set(search.known), search.rescale)
    if first:
        order = own.first_pass(unit)
    else:
        order = unit
        own._refit(unit)
    return order, {s: own.g.members[s] for s in unit if s in own.g.members}


def _concatenate(pairs: list[Pair]) -> Pair:
    if len(pairs) == 1:
        return pairs[0]
    count = [max(p[0].shape[i] for p in pairs) for i in range(pairs[0][0].ndim - 1)]
    y, x = (
        np.concatenate([np.broadcast_to(p[i], (*count, p[i].shape[-1])) for p in pairs], axis=-1)
        for i in (0, 1)
    )
    return y, x
