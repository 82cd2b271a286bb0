"""Cases: tensors of several kinds that are concatenated along one axis and split again before
anything else is done, such as fused queries, keys and values.

A view whose axis is only ever split (into single indices or into blocks) does not imply that the
axes behind it are the same in every block: each block is a *case* with its own axes. Falcon's rows
of queries, one key and one value are three cases; so are those of timm and BLOOM. Where an operator
uses the cases as one tensor after all, `Walk.collapse` merges them.
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


def get_argument(node: Node, position: int, name: str, default: Any = None) -> Any:
    """Return an argument of an operator by position or keyword."""
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


def with_axes(value: Value, axes: Any) -> Value:
    """Return the same value with other axes."""
    return replace(value, axes=tuple(axes), dim=-1, cases=())


def permutation_of(node: Node, rank: int) -> list[int]:
    """Return the order in which a transposition takes the axes."""
    if operator_name(node) == "permute":
        return [d % rank for d in get_argument(node, 1, "dims")]
    order = list(range(rank))
    if operator_name(node) == "numpy_T":
        return order[::-1]
    if operator_name(node) in ("t", "mT", "adjoint"):
        return [*order[:-2], *order[-2:][::-1]]
    if operator_name(node) in ("movedim", "moveaxis"):
        source, target = (
            [d % rank for d in ([dims] if isinstance(dims, int) else dims)]
            for dims in node.args[1:3]
        )
        rest = iter(d for d in order if d not in source)
        return [source[target.index(d)] if d in target else next(rest) for d in range(rank)]
    a, b = get_argument(node, 1, "dim0"), get_argument(node, 2, "dim1")
    order[a], order[b] = order[b], order[a]
    return order


def find_case_axis(graph: Graph, node: Node) -> tuple[int, tuple[int, ...]] | None:
    """Return the first axis of a tensor that is only ever split, and the sizes of its blocks; None
    if no axis is.
    """
    for dim, size in enumerate(shape(node)):
        points = _cut_points(graph, node, dim) if size > 1 else None
        if points is not None:
            sizes = tuple(b - a for a, b in pairwise(sorted({0, *points, size})))
            if 1 < len(sizes) <= MAX_CASES:
                return dim, sizes
    return None


def _cut_points(graph: Graph, node: Node, dim: int) -> set[int] | None:
    """Return where the readers of a tensor split one of its axes; None if any reader does something
    else.
    """
    points: set[int] = set()
    for user in node.users:
        user_points = _user_cut_points(graph, node, user, dim)
        if user_points is None:
            return None
        points |= user_points
    return points if node.users else None


def _user_cut_points(graph: Graph, node: Node, user: Node, dim: int) -> set[int] | None:
    """Return where one reader splits an axis; None if it does something else."""
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
    """Return the axis, start and stop of the contiguous range that an operator selects: a select, a
    slice, or a list of consecutive indices.
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
        indices = graph.constants.get(used[0][1]) if len(used) == 1 else None
        if (
            indices is not None
            and indices.dim() == 1
            and not indices.is_floating_point()
            and indices.dtype.itemsize > 1
        ):
            dim = used[0][0]
            positions = [int(p) % shape(node)[dim] for p in indices]
            if positions and positions == list(range(positions[0], positions[0] + len(positions))):
                return dim, positions[0], positions[-1] + 1
    return None


def split_cases(
    w: Walk, x: Value, new: tuple[int, ...], dim: int, sizes: Sequence[int]
) -> Value | None:
    """View a tensor so that axis `dim` lists cases: the axes behind it within the same old axis
    differ between cases.
    """
    start, end = 0, 0
    for axis in x.axes:
        size, start = 1, end
        while size < axis.size and end < len(new):
            size *= new[end]
            end += 1
        if size != axis.size:
            return None
        if start <= dim < end:
            break
    else:
        return None
    index = x.axes.index(axis)
    before, after = list(x.axes[:index]), list(x.axes[index + 1 :])
    if tuple(a.size for a in before) != new[:start] or tuple(a.size for a in after) != new[end:]:
        return None
    outer = [Axis(atom(n)) for n in new[start:dim]]
    inner = [[Axis(atom(n)) for n in (k, *new[dim + 1 : end])] for k in sizes]
    blocks = Sum(tuple(Product(tuple(a.term for a in case)) for case in inner))
    unify(axis.term, Product((*(a.term for a in outer), blocks)), w.freeze_misfit)
    w.relations.append(Relation("same", (axis,), (*outer, *(a for case in inner for a in case))))
    cases = tuple(Value((*before, *outer, *case, *after), is_weight=x.is_weight) for case in inner)
    return Value((), is_weight=x.is_weight, dim=dim, cases=cases)


def view_cases(x: Value, old: tuple[int, ...], new: tuple[int, ...]) -> Value | None:
    """Apply a view that only adds or removes axes of size 1 around the cases; None for any other
    view.
    """
    if [n for n in old if n != 1] != [n for n in new if n != 1] or old[x.dim] == 1:
        return None
    position = [i for i, n in enumerate(old) if n != 1].index(x.dim)
    dim = [i for i, n in enumerate(new) if n != 1][position]
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
    """Return the case between two indices, or several merged; None if an index is inside a case."""
    ends = [0]
    for case in x.cases:
        ends.append(ends[-1] + case.axes[x.dim].size)
    if start not in ends or stop not in ends:
        return None
    selected = x.cases[ends.index(start) : ends.index(stop)]
    return selected[0] if len(selected) == 1 else w.collapse(replace(x, cases=selected))
