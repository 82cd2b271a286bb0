"""Rules for look-ups: rows taken by numbers, which the model is given, makes itself, or chooses (a
router's experts).
"""

from __future__ import annotations

from regauge.models.discovery.cases import get_argument, select_cases, selected_range, with_axes
from regauge.models.discovery.graph import operator_name
from regauge.models.discovery.shapes import SELECTED
from regauge.models.discovery.walk import Axis, Node, Value, Walk, shape

LOOKED_UP = "it is looked up by number"


def embedding(w: Walk, node: Node) -> Value:
    table, ids = w.value(node.args[0]), w.value(node.args[1])
    _look_up(w, table.axes[0], ids)
    return Value((*(w.follow(a) for a in ids.axes), w.follow(table.axes[1])), is_weight=False)


def _look_up(w: Walk, axis: Axis, ids: Value) -> None:
    """Rows are taken by number: in a fixed order, unless the numbers are themselves places on such
    an axis.
    """
    if ids.indexed_axis is not None:
        w.equate([axis], [ids.indexed_axis])
    else:
        w.freeze(axis, LOOKED_UP)


def index(w: Walk, node: Node) -> Value:
    span = selected_range(w.graph, node.args[0], node)
    if span is not None:
        return _index_range(w, node, *span)
    x, indices = w.value(node.args[0]), list(node.args[1])
    out = list(shape(node))
    used = [d for d, i in enumerate(indices) if i is not None]
    values = [w.value(indices[d]) for d in used]
    for d, ids in zip(used, values, strict=True):
        if str(indices[d].meta["val"].dtype) == "torch.bool":
            return _mask_select(w, node, x, d, ids) if len(used) == 1 else _freeze_all(w, node, x)
        _look_up(w, x.axes[d], ids)
    rank = max(len(v.axes) for v in values)
    first = used[0] if used == list(range(used[0], used[-1] + 1)) else 0
    axes: list[Axis] = [w.follow(a) for d, a in enumerate(x.axes) if d not in used]
    ahead = next(
        (
            v
            for v in values
            if len(v.axes) == rank
            and all(a.size == n for a, n in zip(v.axes, out[first:], strict=False))
        ),
        None,
    )
    if ahead is not None:
        new = [w.follow(a) for a in ahead.axes]
    else:
        new = [w.new_frozen_axis(n, LOOKED_UP) for n in out[first : first + rank]]
    axes[first:first] = new
    chosen = x.is_weight and all(v.indexed_axis is not None for v in values)  # each token's expert
    return Value(tuple(axes), source=x.source if chosen else None, is_weight=chosen)


def _index_range(w: Walk, node: Node, dim: int, start: int, stop: int) -> Value:
    """Neighbouring places, by their numbers: what a slice would take."""
    x = w.value_with_cases(node.args[0])
    case = select_cases(w, x, start, stop) if x.cases and dim == x.dim else None
    if case is not None:
        return case
    x = w.value(node.args[0])
    piece = w.split(x.axes[dim], (start, stop - start, x.axes[dim].size - stop))[1]
    return with_axes(x, [piece if i == dim else w.follow(a) for i, a in enumerate(x.axes)])


def _mask_select(w: Walk, node: Node, x: Value, at: int, mask: Value) -> Value:
    """A mask picks places of some axes, and they become one; the others pass."""
    end = at + len(mask.axes)
    for a in x.axes[at:end]:
        w.freeze(a, "a mask picks its places")
    return Value(
        (
            *(w.follow(a) for a in x.axes[:at]),
            w.new_frozen_axis(shape(node)[at], "a mask picks its places"),
            *(w.follow(a) for a in x.axes[end:]),
        )
    )


def index_select(w: Walk, node: Node) -> Value:
    x, dim, ids = w.value(node.args[0]), get_argument(node, 1, "dim"), w.value(node.args[2])
    _look_up(w, x.axes[dim], ids)
    return Value(
        tuple(
            w.follow(ids.axes[0]) if i == dim % len(x.axes) else w.follow(a)
            for i, a in enumerate(x.axes)
        )
    )


def gather(w: Walk, node: Node) -> Value:
    """Along `dim` numbers say which place is taken, for each place of the others."""
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
    for v in values:
        for a in v.axes:
            w.freeze(a, f"`{operator_name(node)}` follows no rule here")
    return Value(
        tuple(
            w.new_frozen_axis(n, f"`{operator_name(node)}` follows no rule here")
            for n in shape(node)
        )
    )
