"""Rules for look-ups by index, where the indices are inputs, constants, or selected by the model (a
router's experts).
"""

from __future__ import annotations

from regauge.models.discovery.cases import get_argument, select_cases, selected_range, with_axes
from regauge.models.discovery.graph import operator_name
from regauge.models.discovery.shapes import SELECTED
from regauge.models.discovery.walk import Axis, Node, Value, Walk, shape

LOOKED_UP = "it is looked up by index"


def embedding(w: Walk, node: Node) -> Value:
    """Look up rows of a table."""
    table, ids = w.value(node.args[0]), w.value(node.args[1])
    _look_up(w, table.axes[0], ids)
    return Value((*(w.follow(a) for a in ids.axes), w.follow(table.axes[1])), is_weight=False)


def _look_up(w: Walk, axis: Axis, ids: Value) -> None:
    """Look up an axis: in a fixed order, unless the indices point into an axis themselves."""
    if ids.indexed_axis is not None:
        w.equate([axis], [ids.indexed_axis])
    else:
        w.freeze(axis, LOOKED_UP)


def index(w: Walk, node: Node) -> Value:
    """Index by tensors."""
    span = selected_range(w.graph, node.args[0], node)
    if span is not None:
        return _index_range(w, node, *span)
    x, indices = w.value(node.args[0]), list(node.args[1])
    out = list(shape(node))
    dims = [d for d, i in enumerate(indices) if i is not None]
    values = [w.value(indices[d]) for d in dims]
    for d, ids in zip(dims, values, strict=True):
        if str(indices[d].meta["val"].dtype) == "torch.bool":
            return _mask_select(w, node, x, d, ids) if len(dims) == 1 else _freeze_all(w, node, x)
        _look_up(w, x.axes[d], ids)
    rank = max(len(v.axes) for v in values)
    first = dims[0] if dims == list(range(dims[0], dims[-1] + 1)) else 0
    axes: list[Axis] = [w.follow(a) for d, a in enumerate(x.axes) if d not in dims]
    broadcast = next(
        (
            v
            for v in values
            if len(v.axes) == rank
            and all(a.size == n for a, n in zip(v.axes, out[first:], strict=False))
        ),
        None,
    )
    if broadcast is not None:
        new = [w.follow(a) for a in broadcast.axes]
    else:
        new = [w.new_frozen_axis(n, LOOKED_UP) for n in out[first : first + rank]]
    axes[first:first] = new
    # the weights of each token's expert
    per_expert = x.is_weight and all(v.indexed_axis is not None for v in values)
    return Value(tuple(axes), source=x.source if per_expert else None, is_weight=per_expert)


def _index_range(w: Walk, node: Node, dim: int, start: int, stop: int) -> Value:
    """Select a contiguous range by a list of indices, as a slice would."""
    x = w.value_with_cases(node.args[0])
    case = select_cases(w, x, start, stop) if x.cases and dim == x.dim else None
    if case is not None:
        return case
    x = w.value(node.args[0])
    selected = w.split(x.axes[dim], (start, stop - start, x.axes[dim].size - stop))[1]
    return with_axes(x, [selected if i == dim else w.follow(a) for i, a in enumerate(x.axes)])


def _mask_select(w: Walk, node: Node, x: Value, start: int, mask: Value) -> Value:
    """Select by a boolean mask: the masked axes become one; the others pass."""
    end = start + len(mask.axes)
    for a in x.axes[start:end]:
        w.freeze(a, "it is selected by a mask")
    return Value(
        (
            *(w.follow(a) for a in x.axes[:start]),
            w.new_frozen_axis(shape(node)[start], "it is selected by a mask"),
            *(w.follow(a) for a in x.axes[end:]),
        )
    )


def index_select(w: Walk, node: Node) -> Value:
    """Select indices of one axis."""
    x, dim, ids = w.value(node.args[0]), get_argument(node, 1, "dim"), w.value(node.args[2])
    _look_up(w, x.axes[dim], ids)
    return Value(
        tuple(
            w.follow(ids.axes[0]) if i == dim % len(x.axes) else w.follow(a)
            for i, a in enumerate(x.axes)
        )
    )


def gather(w: Walk, node: Node) -> Value:
    """Select along `dim` by an index for each coordinate of the other axes."""
    x, ids = w.value(node.args[0]), w.value(node.args[2])
    dim = get_argument(node, 1, "dim") % len(x.axes)
    axes = []
    for i, (a, b) in enumerate(zip(x.axes, ids.axes, strict=True)):
        if i == dim:
            _look_up(w, a, ids)
            axes.append(w.follow(b))
        elif a.size == b.size:
            if not b.uniform:
                w.equate([a], [b])
                w.restrict(a, "batch")
            axes.append(w.follow(a))
        else:
            w.freeze(a, SELECTED)
            axes.append(w.follow(b))
    return Value(tuple(axes))


def _freeze_all(w: Walk, node: Node, *values: Value) -> Value:
    """Freeze the operands and the result."""
    for v in values:
        for a in v.axes:
            w.freeze(a, f"`{operator_name(node)}` is not supported in this form")
    return Value(
        tuple(
            w.new_frozen_axis(n, f"`{operator_name(node)}` is not supported in this form")
            for n in shape(node)
        )
    )
