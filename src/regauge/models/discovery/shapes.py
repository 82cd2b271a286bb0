"""Rules for operators that only rearrange numbers: views, transpositions, slices and
concatenations.
"""

from __future__ import annotations

from dataclasses import replace

from regauge.models.discovery.cases import (
    find_case_axis,
    get_argument,
    permutation_of,
    select_cases,
    selected_range,
    split_cases,
    view_cases,
    with_axes,
)
from regauge.models.discovery.graph import operator_name
from regauge.models.discovery.terms import atom, unify
from regauge.models.discovery.walk import Axis, Node, Value, Walk, shape

SELECTED = "single indices of it are selected"


def view(w: Walk, node: Node) -> Value:
    """view, reshape, flatten, squeeze and variants: split and merge products, row-major."""
    x, new = w.value_with_cases(node.args[0]), shape(node)
    if x.cases:
        viewed = view_cases(x, shape(node.args[0]), new)
        if viewed is not None:
            return viewed
        x = w.collapse(x)
    case_axis = find_case_axis(w.graph, node)
    if case_axis is not None:
        split = split_cases(w, x, new, *case_axis)
        if split is not None:
            return split
    old = [a for a in x.axes if a.size != 1]
    # only axes of size 1 are added or removed
    if [a.size for a in old] == [n for n in new if n != 1]:
        rest = iter(old)
        return with_axes(x, [w.follow(next(rest)) if n != 1 else Axis(atom(1)) for n in new])
    axes = [Axis(atom(n)) for n in new]
    w.equate(x.axes, axes)
    return with_axes(x, axes)


def permute(w: Walk, node: Node) -> Value:
    """permute, transpose, t and variants."""
    x = w.value_with_cases(node.args[0])
    order = permutation_of(node, len(shape(node)))
    if not x.cases:
        return with_axes(x, [x.axes[d] for d in order])
    return replace(
        x,
        dim=order.index(x.dim),
        cases=tuple(with_axes(c, [c.axes[d] for d in order]) for c in x.cases),
    )


def identity(w: Walk, node: Node) -> Value:
    """Casts, copies and dropout in evaluation mode: the same numbers."""
    return w.value_with_cases(node.args[0])


def expand(w: Walk, node: Node) -> Value:
    """expand, broadcast_to: new axes are uniform."""
    x, new = w.value(node.args[0]), shape(node)
    old: list[Axis | None] = [None] * (len(new) - len(x.axes)) + list(x.axes)
    return with_axes(
        x,
        [
            a if a is not None and a.size == n else Axis(atom(n), uniform=True)
            for a, n in zip(old, new, strict=True)
        ],
    )


def repeat(w: Walk, node: Node) -> Value:
    """Repeat a whole axis (repeat), or each coordinate of it (repeat_interleave)."""
    x, new = w.value(node.args[0]), shape(node)
    interleaved = operator_name(node) == "repeat_interleave"
    old: list[Axis | None] = [None] * (len(new) - len(x.axes)) + list(x.axes)
    axes = []
    for a, n in zip(old, new, strict=True):
        if a is None or (a.size == 1 and n > 1):
            axes.append(Axis(atom(n), uniform=True))
        elif a.size == n:
            axes.append(w.follow(a))
        else:
            copies, out = Axis(atom(n // a.size)), Axis(atom(n))
            w.equate([a, copies] if interleaved else [copies, a], [out])
            axes.append(out)
    return Value(tuple(axes))


def select(w: Walk, node: Node) -> Value:
    """Select one index of an axis: the others stay free."""
    x, span = w.value_with_cases(node.args[0]), selected_range(w.graph, node.args[0], node)
    case = (
        select_cases(w, x, *span[1:]) if x.cases and span is not None and span[0] == x.dim else None
    )
    if case is not None and span is not None:
        return with_axes(case, [a for i, a in enumerate(case.axes) if i != span[0]])
    x = w.value(node.args[0])
    dim = get_argument(node, 1, "dim", 0) % len(x.axes)
    axis = x.axes[dim]
    if span is None:
        w.freeze(axis, SELECTED)
    elif not axis.uniform:
        w.split(axis, (span[1], 1, axis.size - span[2]), SELECTED)
    return replace(
        with_axes(x, [w.follow(a) for i, a in enumerate(x.axes) if i != dim]), source=None
    )


def unbind(w: Walk, node: Node) -> list[Value]:
    """Select every index of an axis."""
    x, dim = w.value_with_cases(node.args[0]), get_argument(node, 1, "dim", 0)
    dim %= len(shape(node.args[0]))
    if x.cases and dim == x.dim and len(x.cases) == len(node.meta["val"]):
        return [with_axes(c, [a for i, a in enumerate(c.axes) if i != dim]) for c in x.cases]
    x = w.value(node.args[0])
    w.freeze(x.axes[dim], SELECTED)
    return [
        replace(with_axes(x, [w.follow(a) for i, a in enumerate(x.axes) if i != dim]), source=None)
        for _ in node.meta["val"]
    ]


def getitem(w: Walk, node: Node) -> Value:
    """Select one of several results."""
    values = w.values[node.args[0]]
    return values[node.args[1]] if isinstance(values, list) else values


def split(w: Walk, node: Node) -> list[Value]:
    """split, chunk and variants: a direct sum along one axis."""
    x = w.value_with_cases(node.args[0])
    dim = get_argument(node, 2, "dim", 0) % len(shape(node.args[0]))
    sizes = [v.shape[dim] for v in node.meta["val"]]
    if x.cases and dim == x.dim:
        cases = [select_cases(w, x, sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(len(sizes))]
        if all(cases):
            return [case for case in cases if case is not None]
    x = w.value(node.args[0])
    if len(sizes) == 1:
        return [x]
    rest = [a for i, a in enumerate(x.axes) if i != dim]
    out = []
    for piece in w.split(x.axes[dim], sizes):
        axes = [w.follow(a) for a in rest]
        axes.insert(dim, piece)
        out.append(with_axes(x, axes))
    return out


def slice_(w: Walk, node: Node) -> Value:
    """Select a range of an axis."""
    x, span = w.value_with_cases(node.args[0]), selected_range(w.graph, node.args[0], node)
    if shape(node) == shape(node.args[0]):
        return x
    if (
        x.cases
        and span is not None
        and span[0] == x.dim
        and (case := select_cases(w, x, *span[1:])) is not None
    ):
        return case
    x = w.value(node.args[0])
    dim = get_argument(node, 1, "dim", 0) % len(x.axes)
    axis, n = x.axes[dim], shape(node)[dim]
    if span is None:
        w.freeze(axis, "it is sliced with a step")
        piece = w.new_frozen_axis(n, SELECTED)
    else:
        piece = w.split(axis, (span[1], n, axis.size - span[2]))[1]
    return with_axes(x, [piece if i == dim else w.follow(a) for i, a in enumerate(x.axes)])


def cat(w: Walk, node: Node) -> Value:
    """Concatenate tensors along one axis."""
    nodes = [n for n in node.args[0] if 0 not in shape(n)]  # skip caches that are still empty
    values = [w.value(n) for n in nodes]
    if len(values) == 1:
        return values[0]
    dim = get_argument(node, 1, "dim", 0) % len(values[0].axes)
    axes = []
    for i, first in enumerate(values[0].axes):
        if i == dim:
            axes.append(w.concat([v.axes[i] for v in values]))
            continue
        out = Axis(first.term)
        for v in values:
            _align(w, v.axes[i], out)
        axes.append(out)
    return Value(tuple(axes), is_weight=all(v.is_weight for v in values))


def _align(w: Walk, axis: Axis, out: Axis) -> None:
    """Equate an operand's axis with the result's, or restrict the result where it is uniform."""
    if axis.uniform:
        w.restrict(out, "shift")
        unify(axis.term, out.term, w.freeze_misfit)
    else:
        w.equate([axis], [out])


def stack(w: Walk, node: Node) -> Value:
    """Stack tensors along a new axis."""
    values = [w.value(n) for n in node.args[0]]
    dim = get_argument(node, 1, "dim", 0) % (len(values[0].axes) + 1)
    if find_case_axis(w.graph, node) == (dim, (1,) * len(values)):
        cases = tuple(with_axes(v, (*v.axes[:dim], Axis(atom(1)), *v.axes[dim:])) for v in values)
        return Value((), dim=dim, cases=cases, is_weight=all(v.is_weight for v in values))
    axes = []
    for i, first in enumerate(values[0].axes):
        out = Axis(first.term)
        for v in values:
            _align(w, v.axes[i], out)
        axes.append(out)
    axes.insert(dim, w.new_frozen_axis(len(values), "tensors are stacked along it"))
    return Value(tuple(axes), is_weight=all(v.is_weight for v in values))


def reorder(w: Walk, node: Node) -> Value:
    """flip, roll: freeze the reordered axes; the others pass."""
    x = w.value(node.args[0])
    dims = get_argument(node, 2 if operator_name(node) == "roll" else 1, "dims", ())
    reordered = {d % len(x.axes) for d in ([dims] if isinstance(dims, int) else dims)}
    for d in reordered or set(range(len(x.axes))):
        w.freeze(x.axes[d], "it is shifted or reversed")
    return Value(tuple(w.follow(a) for a in x.axes))


def pad(w: Walk, node: Node) -> Value:
    """Pad: freeze the padded axes; the others pass."""
    x, new = w.value(node.args[0]), shape(node)
    axes = []
    for a, n in zip(x.axes, new, strict=True):
        if a.size == n:
            axes.append(w.follow(a))
        else:
            w.freeze(a, "it is padded")
            axes.append(w.new_frozen_axis(n, "it is padded"))
    return Value(tuple(axes))


def pixel_shuffle(w: Walk, node: Node) -> Value:
    """pixel_shuffle, pixel_unshuffle: channels become positions."""
    x = w.value(node.args[0])
    for a in x.axes[-3:]:
        w.freeze(a, "channels and positions are exchanged")
    return Value(
        (
            *(w.follow(a) for a in x.axes[:-3]),
            *(
                w.new_frozen_axis(n, "channels and positions are exchanged")
                for n in shape(node)[-3:]
            ),
        )
    )
