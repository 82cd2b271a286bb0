"""Rules for linear layers, matrix products, attention, convolutions and norms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from regauge.models.discovery.cases import get_argument
from regauge.models.discovery.graph import operator_name
from regauge.models.discovery.terms import atom
from regauge.models.discovery.walk import Axis, Gain, Node, Value, Walk, shape

NEIGHBOURS = "neighbouring positions are mixed along it"


def linear(w: Walk, node: Node) -> Value:
    """x W^T + b."""
    x, weight = w.value(node.args[0]), w.value(node.args[1])
    w.contract(x.axes[-1], weight.axes[1])
    out = w.follow(weight.axes[0])
    _add_bias(w, get_argument(node, 2, "bias"), out)
    return Value((*(w.follow(a) for a in x.axes[:-1]), out))


def _add_bias(w: Walk, node: Any, out: Axis) -> None:
    """Equate the axis of a bias with the output axis."""
    if isinstance(node, fx.Node):
        w.equate([w.value(node).axes[-1]], [out])


def addmm(w: Walk, node: Node) -> Value:
    """addmm, baddbmm: b + x W."""
    out = _product(w, node, node.args[1], node.args[2])
    bias = w.value(node.args[0])
    aligned = [None] * (len(out.axes) - len(bias.axes)) + list(bias.axes)
    for a, b in zip(aligned, out.axes, strict=True):
        if a is None or a.uniform or a.size != b.size:
            w.restrict(b, "shift")
        else:
            w.equate([a], [b])
    return out


def matmul(w: Walk, node: Node) -> Value:
    """matmul, mm, bmm: contract the last axis of one operand with the second-to-last of the other;
    leading axes are batched.
    """
    return _product(w, node, node.args[0], node.args[1])


def _product(w: Walk, node: Node, left: Any, right: Any) -> Value:
    """Multiply two matrices or vectors."""
    a, b = w.value(left), w.value(right)
    is_vector = len(b.axes) == 1
    if len(a.axes) == 1:  # a vector
        a = Value((Axis(atom(1)), *a.axes), is_weight=a.is_weight)
        axes = _product_axes(w, a, b)
        return Value(tuple(axes[:-2] + axes[-1:]))
    b = Value((*b.axes, Axis(atom(1)))) if is_vector else b
    axes = _product_axes(w, a, b)
    return Value(tuple(axes[:-1] if is_vector else axes))


def _product_axes(w: Walk, a: Value, b: Value) -> list[Axis]:
    """Contract two matrices and return the axes of the product."""
    w.contract(a.axes[-1], b.axes[-2])
    activations = not a.is_weight and not b.is_weight
    axes = _broadcast_batch(w, a.axes[:-2], b.axes[:-2], activations)
    if activations:
        w.add_role(a.axes[-1], "contracted")
        w.add_role(b.axes[-1], "free")
    return [*axes, w.follow(a.axes[-2]), w.follow(b.axes[-1])]


def _broadcast_batch(
    w: Walk, left: tuple[Axis, ...], right: tuple[Axis, ...], activations: bool
) -> list[Axis]:
    """Broadcast the batch axes of two operands. `activations`: neither operand is a weight."""
    n = max(len(left), len(right))
    lefts: list[Axis | None] = [None] * (n - len(left)) + list(left)
    rights: list[Axis | None] = [None] * (n - len(right)) + list(right)
    out = []
    for x, y in zip(lefts, rights, strict=True):
        present = [a for a in (x, y) if a is not None and a.size != 1]
        if not present:
            out.append(Axis(atom(1)))
            continue
        axis = Axis(present[0].term)
        for a in present:
            w.equate([a], [axis], kind="batch")
            if len(present) == 2:
                w.restrict(a, "batch")
        if len(present) == 2:
            w.restrict(axis, "batch")
            if activations:
                w.add_role(axis, "head")
        else:
            w.equate([present[0]], [axis])
        out.append(axis)
    return out


def einsum(w: Walk, node: Node) -> Value:
    """Contract two operands with one letter per axis."""
    equation, nodes = str(node.args[0]).replace(" ", ""), list(node.args[1])
    inputs, _, output = equation.partition("->")
    letters = inputs.split(",")
    values = [w.value(n) for n in nodes]
    is_simple = "." not in equation and all(
        len(t) == len(set(t)) == len(v.axes) for t, v in zip(letters, values, strict=True)
    )
    if not is_simple or len(values) != 2 or not output:
        from regauge.models.discovery.rules import unsupported

        frozen: Value = unsupported(w, node)
        return frozen
    a, b = (dict(zip(t, v.axes, strict=True)) for t, v in zip(letters, values, strict=True))
    activations = not values[0].is_weight and not values[1].is_weight
    out = []
    for letter in {*a, *b} - set(output):
        if letter in a and letter in b:
            w.contract(a[letter], b[letter])
            if activations:
                w.add_role(a[letter], "contracted")
        else:
            w.restrict(a.get(letter) or b[letter], "ones", detail="einsum")
    for letter in output:
        if letter in a and letter in b:
            (axis,) = _broadcast_batch(w, (a[letter],), (b[letter],), activations)
            out.append(axis)
        else:
            out.append(w.follow(a.get(letter) or b[letter]))
    return Value(tuple(out))


def attention(w: Walk, node: Node) -> Value:
    """softmax(q k^T + mask) v in one operator, with grouped queries or not."""
    q, k, v = (w.value(n) for n in node.args[:3])
    w.contract(q.axes[-1], k.axes[-1])
    w.add_role(q.axes[-1], "contracted")
    w.contract(k.axes[-2], v.axes[-2])
    w.restrict(k.axes[-2], "softmax", detail="attention")
    w.restrict(q.axes[-2], "batch")
    batch = []
    for i, a in enumerate(q.axes[:-2]):
        out = w.follow(a)
        for other in (k.axes[i], v.axes[i]):
            if other.size == a.size:
                w.equate([other], [out], kind="batch")
            elif other.size > 1:  # grouped queries: several per key
                rep = Axis(atom(a.size // other.size))
                w.equate([other, rep], [out], kind="batch")
                w.restrict(rep, "batch")
                w.add_role(rep, "head")
            w.restrict(other, "batch")
        w.restrict(out, "batch")
        w.add_role(out, "head")
        batch.append(out)
    mask = get_argument(node, 3, "attn_mask")
    scores = [*batch, q.axes[-2], k.axes[-2]]
    if isinstance(mask, fx.Node):
        for a, b in zip(reversed(w.value(mask).axes), reversed(scores), strict=False):
            if not a.uniform and a.size != 1:
                w.equate([a], [b], kind="batch")
                w.restrict(a, "batch")
    elif get_argument(node, 5, "is_causal", False):
        for a in (q.axes[-2], k.axes[-2]):
            w.freeze(a, "attention is causal")
    out = w.follow(v.axes[-1])
    w.add_role(out, "free")
    return Value((*batch, w.follow(q.axes[-2]), out))


def convolution(w: Walk, node: Node) -> Value:
    """Contract the channels, in groups or not; freeze the spatial axes."""
    x, weight = w.value(node.args[0]), w.value(node.args[1])
    transposed = "transpose" in operator_name(node)
    groups = (
        int(get_argument(node, 7 if transposed else 6, "groups", 1))
        if operator_name(node) != "convolution"
        else int(node.args[8])
    )
    spatial = len(weight.axes) - 2
    channel_dim = len(x.axes) - spatial - 1
    for a in (*x.axes[channel_dim + 1 :], *weight.axes[2:]):
        w.freeze(a, NEIGHBOURS)
    into, out = (weight.axes[0], weight.axes[1]) if transposed else (weight.axes[1], weight.axes[0])
    if groups == 1:
        w.contract(x.axes[channel_dim], into)
        out_axis = w.follow(out)
    elif groups == x.axes[channel_dim].size == out.size and not transposed:  # depthwise
        out_axis = Axis(x.axes[channel_dim].term)
        w.equate([x.axes[channel_dim]], [out_axis])
        w.equate([out], [out_axis], kind="gain")
        w.restrict(out, "still")
        w.restrict(out_axis, "gain", detail=weight.source or "")
    elif not transposed:
        group = Axis(atom(groups))
        w.restrict(group, "batch")
        group_in, group_out = (
            Axis(atom(x.axes[channel_dim].size // groups)),
            Axis(atom(out.size // groups)),
        )
        w.equate([x.axes[channel_dim]], [group, group_in])
        w.equate([out], [group, group_out])
        w.contract(group_in, into)
        out_axis = Axis(out.term)
        w.equate([out], [out_axis])
    else:
        w.freeze(x.axes[channel_dim], "a grouped transposed convolution reads it")
        w.freeze(out, "a grouped transposed convolution writes it")
        out_axis = w.new_frozen_axis(shape(node)[channel_dim], NEIGHBOURS)
    bias = get_argument(node, 2, "bias")
    if isinstance(bias, fx.Node):
        w.equate([w.value(bias).axes[0]], [out_axis])
    axes = [
        *(w.follow(a) for a in x.axes[:channel_dim]),
        out_axis,
        *(w.new_frozen_axis(n, NEIGHBOURS) for n in shape(node)[channel_dim + 1 :]),
    ]
    return Value(tuple(axes))


def pool(kind: str) -> Callable[[Walk, Node], Any]:
    """Return the rule of pooling and resizing over positions: channels pass, or (max pooling)
    preserve positive scales.
    """

    def rule(w: Walk, node: Node) -> Any:
        x = w.value(node.args[0])
        has_indices = isinstance(node.meta["val"], tuple | list)
        new = tuple(node.meta["val"][0].shape) if has_indices else shape(node)
        spatial = {"1": 1, "3": 3}.get(
            next((c for c in operator_name(node) if c.isdigit()), "2"), 2
        )
        first_spatial = len(x.axes) - spatial
        for a in x.axes[first_spatial:]:
            w.freeze(a, NEIGHBOURS)
        axes = [w.follow(a) for a in x.axes[:first_spatial]]
        for a in axes:
            if kind:
                w.restrict(a, kind, detail=operator_name(node))
        value = Value((*axes, *(w.new_frozen_axis(n, NEIGHBOURS) for n in new[first_spatial:])))
        return [value, value] if has_indices else value

    return rule


def layer_norm(w: Walk, node: Node) -> Value:
    """layer_norm: a mean and a variance."""
    normalized_shape = node.args[1]
    return _norm(
        w,
        node,
        len(normalized_shape),
        "ones",
        get_argument(node, 2, "weight"),
        get_argument(node, 3, "bias"),
    )


def rms_norm(w: Walk, node: Node) -> Value:
    """rms_norm: a norm without a mean."""
    return _norm(w, node, len(node.args[1]), "rms", get_argument(node, 2, "weight"), None)


def _norm(w: Walk, node: Node, rank: int, kind: str, gain: Any, bias: Any) -> Value:
    """Restrict the normalized axes and record the gain."""
    x = w.value(node.args[0])
    start = len(x.axes) - rank
    axes = [w.follow(a) for a in x.axes]
    for i, a in enumerate(axes):
        w.restrict(a, kind if i >= start else "rms-batch", detail=operator_name(node))
    if isinstance(gain, fx.Node):
        v = w.value(gain)
        for a, b in zip(v.axes, axes[start:], strict=True):
            w.equate([a], [b], kind="gain")
            w.restrict(a, "still", detail=v.source or "")
            w.restrict(b, "gain", detail=v.source or "")
        shift = w.value(bias).source if isinstance(bias, fx.Node) else None
        if v.source is not None:
            w.gains.append(Gain(v.source, shift, node, node.args[0], neutral=1.0 - v.shift))
    if isinstance(bias, fx.Node):
        for a, b in zip(w.value(bias).axes, axes[start:], strict=True):
            w.equate([a], [b])
    return Value(tuple(axes))


def group_norm(w: Walk, node: Node) -> Value:
    """Normalize channels in groups, each with its own mean and variance."""
    x, groups = w.value(node.args[0]), int(node.args[1])
    axes = [w.follow(a) for a in x.axes]
    group, channel = Axis(atom(groups)), Axis(atom(x.axes[1].size // groups))
    w.equate([axes[1]], [group, channel])
    w.restrict(axes[1], "ones", detail="group_norm")
    if groups > 1:
        w.restrict(group, "batch")
    for a in axes[2:]:
        w.freeze(a, "group_norm takes its mean over it")
    for n, kind in (
        (get_argument(node, 2, "weight"), "gain"),
        (get_argument(node, 3, "bias"), "same"),
    ):
        if isinstance(n, fx.Node):
            v = w.value(n)
            w.equate([v.axes[0]], [axes[1]], kind=kind)
            if kind == "gain":
                w.restrict(v.axes[0], "still", detail=v.source or "")
                w.restrict(axes[1], "gain", detail=v.source or "")
    return Value(tuple(axes))


def batch_norm(w: Walk, node: Node) -> Any:
    """Normalize by stored means and variances, one per channel (evaluation mode). They absorb the
    scale of the input; the gain carries that of the output.
    """
    x = w.value(node.args[0])
    before, out = x.axes[1], Axis(x.axes[1].term)
    w.equate([before], [out], kind="mask")
    w.restrict(before, "pointwise", detail="batch_norm")
    arguments = [
        get_argument(node, i, name)
        for i, name in ((1, "weight"), (2, "bias"), (3, "running_mean"), (4, "running_var"))
    ]
    for i, n in enumerate(arguments):
        if isinstance(n, fx.Node):
            a = w.value(n).axes[0]
            w.equate([a], [out if i < 2 else before], kind="same" if i < 3 else "mask")
            if i >= 2:
                w.restrict(a, "still")
    value = Value(tuple(out if i == 1 else w.follow(a) for i, a in enumerate(x.axes)))
    return [value] * len(node.meta["val"]) if isinstance(node.meta["val"], tuple | list) else value
