"""Tensors of several kinds side by side along one axis, which are taken apart again before anything
else is done: fused queries, keys and values.

A view whose axis is only ever cut (into single places, or into blocks) does not say that what lies
behind the axis is the same in every block: each block is a *case*, with axes of its own. Falcon's
rows of queries, one key and one value are three cases; so are timm's and BLOOM's. Where an operator
meets the cases as one tensor after all, `Walk.collapse` makes them alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from torch import fx

from regauge.models.discovery.graph import Graph, operator_name
from regauge.models.discovery.terms import Product, Sum, atom, unify
from regauge.models.discovery.walk import Axis, Node, Relation, Value, Walk, shape

MAX_CASES = 8
_PASSED = ("contiguous", "clone", "alias", "to")


def get_argument(node: Node, place: int, name: str, default: Any = None) -> Any:
    if len(node.args) > place:
        return node.args[place]
    return node.kwargs.get(name, default)


def with_axes(value: Value, axes: Any) -> Value:
    """The same numbers with other axes."""
    return replace(value, axes=tuple(axes), dim=-1, cases=())


def permutation_of(node: Node, rank: int) -> list[int]:
    """The order in which a transposition takes the axes."""
    if operator_name(node) == "permute":
        return [d % rank for d in get_argument(node, 1, "dims")]
    order = list(range(rank))
    if operator_name(node) == "numpy_T":
        return order[::-1]
    if operator_name(node) in ("t", "mT", "adjoint"):
        return [*order[:-2], *order[-2:][::-1]]
    if operator_name(node) in ("movedim", "moveaxis"):
        moved = [
            [d % rank for d in ([given] if isinstance(given, int) else given)]
            for given in node.args[1:3]
        ]
        rest = iter(d for d in order if d not in moved[0])
        return [moved[0][moved[1].index(d)] if d in moved[1] else next(rest) for d in range(rank)]
    a, b = get_argument(node, 1, "dim0"), get_argument(node, 2, "dim1")
    order[a], order[b] = order[b], order[a]
    return order


def find_case_axis(graph: Graph, node: Node) -> tuple[int, tuple[int, ...]] | None:
    """The axis of a tensor that is only ever cut, and the sizes of the blocks; None if there is no
    such axis.
    """
    for dim, n in enumerate(shape(node)):
        ends = _cut_points(graph, node, dim) if n > 1 else None
        if ends is not None:
            sizes = tuple(b - a for a, b in pairwise(sorted({0, *ends, n})))
            if 1 < len(sizes) <= MAX_CASES:
                return dim, sizes
    return None


def _cut_points(graph: Graph, node: Node, dim: int) -> set[int] | None:
    """Where everyone who reads a tensor cuts one of its axes; None if anyone does something
    else.
    """
    found: set[int] = set()
    for user in node.users:
        ends = _user_cut_points(graph, node, user, dim)
        if ends is None:
            return None
        found |= ends
    return found if node.users else None


def _user_cut_points(graph: Graph, node: Node, user: Node, dim: int) -> set[int] | None:
    name, rank, n = operator_name(user), len(shape(node)), shape(node)[dim]
    if name in _PASSED or (name == "slice" and shape(user) == shape(node)):
        return _cut_points(graph, user, dim)
    if name in ("permute", "transpose"):
        return _cut_points(graph, user, permutation_of(user, rank).index(dim))
    if name in ("squeeze", "unsqueeze"):
        old, new = ([i for i, k in enumerate(shape(x)) if k != 1] for x in (node, user))
        return (
            _cut_points(graph, user, new[old.index(dim)])
            if dim in old and len(old) == len(new)
            else None
        )
    span = selected_range(graph, node, user)
    if span is not None:
        return {*span[1:]} if span[0] == dim else None
    if name in ("unbind", "split", "chunk", "split_with_sizes"):
        at = get_argument(user, 1 if name == "unbind" else 2, "dim", 0) % rank
        if at != dim:
            return None
        sizes = [1] * n if name == "unbind" else [v.shape[dim] for v in user.meta["val"]]
        return {sum(sizes[:i]) for i in range(len(sizes) + 1)}
    return None


def selected_range(graph: Graph, node: Node, user: Node) -> tuple[int, int, int] | None:
    """The axis, start and stop of one run of places that an operator takes: a select, a slice, or a
    list of neighbouring numbers.
    """
    rank, name = len(shape(node)), operator_name(user)
    if name == "select" and isinstance(index := get_argument(user, 2, "index", 0), int):
        dim = get_argument(user, 1, "dim", 0) % rank
        index %= shape(node)[dim]
        return dim, index, index + 1
    if name == "slice" and get_argument(user, 4, "step", 1) == 1:
        dim = get_argument(user, 1, "dim", 0) % rank
        start, n = get_argument(user, 2, "start", 0) or 0, shape(node)[dim]
        start = max(0, start + n if start < 0 else start)
        return dim, start, start + shape(user)[dim]
    if name == "index":
        used = [(d, i) for d, i in enumerate(user.args[1]) if isinstance(i, fx.Node)]
        known = graph.constants.get(used[0][1]) if len(used) == 1 else None
        if (
            known is not None
            and known.dim() == 1
            and not known.is_floating_point()
            and known.dtype.itemsize > 1
        ):
            dim = used[0][0]
            places = [int(p) % shape(node)[dim] for p in known]
            if places and places == list(range(places[0], places[0] + len(places))):
                return dim, places[0], places[-1] + 1
    return None


def split_cases(
    w: Walk, x: Value, new: tuple[int, ...], dim: int, sizes: Sequence[int]
) -> Value | None:
    """A view whose axis `dim` lists cases: what lies behind it in the same old axis is of another
    kind in each.
    """
    start, at = 0, 0
    for axis in x.axes:
        size, start = 1, at
        while size < axis.size and at < len(new):
            size *= new[at]
            at += 1
        if size != axis.size:
            return None
        if start <= dim < at:
            break
    else:
        return None
    index = x.axes.index(axis)
    ahead, after = list(x.axes[:index]), list(x.axes[index + 1 :])
    if tuple(a.size for a in ahead) != new[:start] or tuple(a.size for a in after) != new[at:]:
        return None
    outer = [Axis(atom(n)) for n in new[start:dim]]
    inner = [[Axis(atom(n)) for n in (k, *new[dim + 1 : at])] for k in sizes]
    blocks = Sum(tuple(Product(tuple(a.term for a in one)) for one in inner))
    unify(axis.term, Product((*(a.term for a in outer), blocks)), w.freeze_misfit)
    w.relations.append(Relation("same", (axis,), (*outer, *(a for one in inner for a in one))))
    cases = tuple(Value((*ahead, *outer, *one, *after), is_weight=x.is_weight) for one in inner)
    return Value((), is_weight=x.is_weight, dim=dim, cases=cases)


def view_cases(x: Value, old: tuple[int, ...], new: tuple[int, ...]) -> Value | None:
    """Ones that come or go around cases; None for any other view."""
    if [n for n in old if n != 1] != [n for n in new if n != 1] or old[x.dim] == 1:
        return None
    which = [i for i, n in enumerate(old) if n != 1].index(x.dim)
    dim = [i for i, n in enumerate(new) if n != 1][which]
    cases = []
    for case in x.cases:
        rest = iter([a for i, a in enumerate(case.axes) if i != x.dim and a.size != 1])
        cases.append(
            with_axes(
                case,
                [
                    case.axes[x.dim] if i == dim else Axis(atom(1)) if n == 1 else next(rest)
                    for i, n in enumerate(new)
                ],
            )
        )
    return replace(x, axes=(), dim=dim, cases=tuple(cases))


def select_cases(w: Walk, x: Value, start: int, stop: int) -> Value | None:
    """The case that lies between two places, or several as one; None if they cut through a case."""
    ends = [0]
    for case in x.cases:
        ends.append(ends[-1] + case.axes[x.dim].size)
    if start not in ends or stop not in ends:
        return None
    inside = x.cases[ends.index(start) : ends.index(stop)]
    return inside[0] if len(inside) == 1 else w.collapse(replace(x, cases=inside))
