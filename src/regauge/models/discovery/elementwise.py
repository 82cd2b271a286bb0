"""Rules for elementwise operators and reductions: sums, products, activations, masks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import fx

from regauge.models.discovery.cases import get_argument, with_axes
from regauge.models.discovery.graph import operator_name
from regauge.models.discovery.terms import atom
from regauge.models.discovery.walk import Axis, Gain, Node, Value, Walk, shape


def _operands(w: Walk, node: Node, args: Any) -> list[tuple[Value, list[Axis | None]]]:
    """Return each tensor operand with its axes aligned to the result's; None where the operand is
    constant along an axis.
    """
    rank = len(shape(node))
    out = []
    for a in args:
        if isinstance(a, fx.Node):
            v = w.value(a)
            aligned: list[Axis | None] = [
                x if not x.uniform and (x.size != 1) else None for x in v.axes
            ]
            absent: list[Axis | None] = [None] * (rank - len(aligned))
            out.append((v, absent + aligned))
    return out


def add(w: Walk, node: Node) -> Value:
    """Add: the operands are transformed alike. Adding the same number at every coordinate preserves
    only orthogonal matrices that preserve the all-ones vector.
    """
    x, y = get_argument(node, 0, "self"), get_argument(node, 1, "other")
    operands = _operands(w, node, (x, y))
    has_number = len(operands) < 2
    if has_number and not isinstance(x, fx.Node):
        x, y = y, x
    if (
        has_number
        and operator_name(node) == "add"
        and operands[0][0].is_weight
        and isinstance(y, int | float)
    ):
        v = operands[0][0]
        return replace(with_axes(v, v.axes), shift=v.shift + float(y))  # 1 + w is a gain, as w is
    return _broadcast_sum(w, node, operands, has_number)


def _broadcast_sum(
    w: Walk,
    node: Node,
    operands: list[tuple[Value, list[Axis | None]]],
    has_number: bool,
    kind: str = "shift",
) -> Value:
    """Equate the operands axis by axis, and restrict axes along which an operand is constant."""
    axes = []
    for i, n in enumerate(shape(node)):
        present = [a for _, aligned in operands if (a := aligned[i]) is not None]
        if not present:
            axes.append(Axis(atom(n), uniform=True))
            continue
        out = Axis(present[0].term)
        for a in present:
            w.equate([a], [out])
        if has_number or len(present) < len(operands):
            w.restrict(out, kind)
        axes.append(out)
    return Value(tuple(axes), is_weight=all(v.is_weight for v, _ in operands))


def mul(w: Walk, node: Node) -> Value:
    """Multiply or divide. A factor that is constant along an axis is linear there; one that varies
    multiplies scales; a parameter is a gain.
    """
    x, y = get_argument(node, 0, "self"), get_argument(node, 1, "other")
    is_division = operator_name(node).startswith("div")
    if x is y and not is_division:
        return square(w, node)
    operands = _operands(w, node, (x, y))
    if len(operands) == 1:
        v, aligned = operands[0]
        if is_division and not isinstance(x, fx.Node):
            return pointwise("pointwise")(w, node)
        return (
            with_axes(v, [w.follow(a) for a in v.axes])
            if v.is_weight
            else _follow_axes(w, node, aligned)
        )
    (a, left), (b, right) = operands
    gain = None
    if a.is_weight != b.is_weight and not (is_division and a.is_weight):
        gain = a if a.is_weight else b
    axes = []
    for i, n in enumerate(shape(node)):
        p, q = left[i], right[i]
        if p is None and q is None:
            axes.append(Axis(atom(n), uniform=True))
        elif p is None or q is None:
            present = p if p is not None else q
            assert present is not None
            if p is None and is_division:
                w.restrict(present, "pointwise")
            axes.append(w.follow(present))
        elif gain is not None:
            value, factor = (q, p) if gain is a else (p, q)
            out = Axis(value.term)
            w.equate([value], [out])
            w.equate([factor], [out], kind="gain")
            w.restrict(factor, "still", detail=gain.source or "")
            w.restrict(out, "gain", detail=gain.source or "a product of parameters")
            axes.append(out)
        else:
            out = Axis(p.term)
            w.multiply(p, q, out, sign=-1 if is_division else 1)
            w.restrict(out, "product")
            axes.append(out)
    if gain is not None and gain.source is not None and not is_division:
        into = y if gain is a else x
        w.gains.append(Gain(gain.source, None, node, into, neutral=1.0 - gain.shift))
    return Value(tuple(axes), is_weight=a.is_weight and b.is_weight)


def _follow_axes(w: Walk, node: Node, aligned: list[Axis | None]) -> Value:
    """Return a value whose axes follow those of its only operand."""
    return Value(
        tuple(
            Axis(atom(n), uniform=True) if a is None else w.follow(a)
            for a, n in zip(aligned, shape(node), strict=True)
        )
    )


def neg(w: Walk, node: Node) -> Value:
    """Negate."""
    return replace(w.value(node.args[0]), source=None)


def pointwise(kind: str) -> Callable[[Walk, Node], Value]:
    """Return the rule of a function of single numbers. `kind`: its restriction."""

    def rule(w: Walk, node: Node) -> Value:
        tensors = [a for a in (*node.args, *node.kwargs.values()) if isinstance(a, fx.Node)]
        operands = _operands(w, node, tensors)
        if len(operands) == 1:
            v, aligned = operands[0]
            out = _follow_axes(w, node, aligned)
            for a in out.axes:
                if not a.uniform:
                    w.restrict(a, kind, detail=operator_name(node))
            return replace(out, is_weight=v.is_weight)
        return _broadcast_sum(w, node, operands, True, kind)

    return rule


def square(w: Walk, node: Node) -> Value:
    """Square. Where every reader sums over an axis, the sum is a norm along it and rotations are
    preserved.
    """
    x = node.args[0]
    assert isinstance(x, fx.Node)
    v = w.value(x)
    aligned = _operands(w, node, (x,))[0][1]
    summed = _summed_dims(node)
    axes = []
    for i, (a, n) in enumerate(zip(aligned, shape(node), strict=True)):
        if a is None:
            axes.append(Axis(atom(n), uniform=True))
        elif i in summed:
            w.restrict(a, "rms", detail=operator_name(node))
            axes.append(Axis(a.term, uniform=True))  # every reader sums over it
        else:
            out = Axis(a.term)
            w.equate([a], [out], kind="even")
            w.restrict(a, "even", detail=operator_name(node))
            axes.append(out)
    return Value(tuple(axes), is_weight=v.is_weight)


def _summed_dims(node: Node) -> set[int]:
    """Return the axes over which all readers of a node sum."""
    summed: list[set[int]] = []
    rank = len(shape(node))
    for user in node.users:
        while operator_name(user) in ("to", "_to_copy") and len(user.users) == 1:
            user = next(iter(user.users))
        if operator_name(user) not in ("mean", "sum"):
            return set()
        dims = get_argument(user, 1, "dim", None)
        if dims is None:
            return set()
        summed.append({d % rank for d in ([dims] if isinstance(dims, int) else dims)})
    return set.intersection(*summed) if summed else set()


def power(w: Walk, node: Node) -> Value:
    """pow: a square, an odd power, or any other function of single numbers."""
    exponent = node.args[1]
    if exponent == 2:
        return square(w, node)
    return pointwise(
        "odd" if isinstance(exponent, int | float) and exponent % 2 == 1 else "pointwise"
    )(w, node)


def where(w: Walk, node: Node) -> Value:
    """Select between two operands number by number; one that is constant along an axis is linear
    there.
    """
    condition, *choices = node.args
    operands = _operands(w, node, choices)
    mask = _operands(w, node, (condition,))
    out = _broadcast_sum(w, node, operands, len(operands) < 2)
    for i, a in enumerate(mask[0][1]):
        if a is not None:
            if out.axes[i].uniform:
                out = replace(out, axes=(*out.axes[:i], Axis(a.term), *out.axes[i + 1 :]))
            w.equate([a], [out.axes[i]], kind="mask")
            w.restrict(out.axes[i], "pointwise", detail="where")
    return out


def masked_fill(w: Walk, node: Node) -> Value:
    """Fill by a mask."""
    operands = _operands(w, node, node.args[:1])
    out = _broadcast_sum(w, node, operands, True)
    for i, a in enumerate(_operands(w, node, node.args[1:2])[0][1]):
        if a is not None:
            if out.axes[i].uniform:
                out = replace(out, axes=(*out.axes[:i], Axis(a.term), *out.axes[i + 1 :]))
            w.equate([a], [out.axes[i]], kind="mask")
    return out


def reduce(kind: str) -> Callable[[Walk, Node], Any]:
    """Return the rule of a reduction: a sum or mean (`ones`: the all-ones vector is preserved), a
    variance (`spread`), a norm (`rms`), or any other (`pointwise`).
    """

    def rule(w: Walk, node: Node) -> Any:
        # the elementwise maximum of two tensors
        if isinstance(get_argument(node, 1, "other"), fx.Node):
            return pointwise("pointwise")(w, node)
        if isinstance(node.meta["val"], tuple | list):  # values and indices
            from regauge.models.discovery.rules import unsupported

            return unsupported(w, node)
        x = w.value(node.args[0])
        dims = get_argument(node, 2 if "vector_norm" in operator_name(node) else 1, "dim", None)
        rank = len(x.axes)
        over = (
            set(range(rank))
            if dims is None or dims == []
            else {d % rank for d in ([dims] if isinstance(dims, int) else dims)}
        )
        keep = len(shape(node)) == rank and bool(over)
        axes = []
        for i, a in enumerate(x.axes):
            if i not in over:
                out = w.follow(a)
                if kind != "ones":
                    w.restrict(
                        out,
                        "pointwise" if kind == "pointwise" else "rms-batch",
                        detail=operator_name(node),
                    )
                axes.append(out)
                continue
            if not a.uniform:
                w.restrict(a, "ones" if kind == "spread" else kind, detail=operator_name(node))
            if keep:
                axes.append(Axis(atom(1)))
        return Value(tuple(axes), is_weight=x.is_weight)

    return rule


def softmax(w: Walk, node: Node) -> Value:
    """softmax, log_softmax."""
    x = w.value(node.args[0])
    dim = get_argument(node, 1, "dim", -1) % len(x.axes)
    axes = [w.follow(a) for a in x.axes]
    for i, a in enumerate(axes):
        w.restrict(a, "softmax" if i == dim else "pointwise", detail=operator_name(node))
    return Value(tuple(axes))


def full(w: Walk, node: Node) -> Value:
    """zeros, ones, full: the same number everywhere."""
    return Value(tuple(Axis(atom(n), uniform=True) for n in shape(node)))


def arange(w: Walk, node: Node) -> Value:
    """arange and other constants whose numbers differ."""
    return Value(
        tuple(w.new_frozen_axis(n, "constants of the module differ along it") for n in shape(node))
    )


def topk(w: Walk, node: Node) -> list[Value]:
    """Return the largest values and their indices, which are sorted by value."""
    x = w.value(node.args[0])
    dim = get_argument(node, 2, "dim", -1) % len(x.axes)
    w.restrict(x.axes[dim], "softmax", detail="topk")
    axes = []
    for i, a in enumerate(x.axes):
        axes.append(
            w.new_frozen_axis(node.meta["val"][0].shape[dim], "it is sorted by value")
            if i == dim
            else w.follow(a)
        )
        if i != dim:
            w.restrict(a, "pointwise", detail="topk")
    w.implied.append((axes[dim], x.axes[dim]))
    return [Value(tuple(axes)), Value(tuple(axes), indexed_axis=x.axes[dim])]


def one_hot(w: Walk, node: Node) -> Value:
    """Encode indices as one-hot vectors."""
    ids = w.value(node.args[0])
    n = shape(node)[-1]
    new = (
        w.follow(ids.indexed_axis)
        if ids.indexed_axis is not None and ids.indexed_axis.size == n
        else w.new_frozen_axis(n, "it is looked up by index")
    )
    return Value((*(w.follow(a) for a in ids.axes), new))
