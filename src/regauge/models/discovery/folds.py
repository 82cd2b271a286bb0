"""Gains that can be folded: into the linear layers that read them (a norm's), or into the layer
before them (LayerScale).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from regauge.core.spec import Norm, Scale
from regauge.models.discovery.cases import get_argument
from regauge.models.discovery.graph import operator_name
from regauge.models.discovery.walk import Gain, Node, Value, Walk, shape

# Operators that are linear along the axis of a gain: they rearrange or sum over other axes.
_LINEAR_ALONG_AXIS = frozenset(
    {
        *(
            "view",
            "reshape",
            "flatten",
            "unflatten",
            "squeeze",
            "unsqueeze",
            "permute",
            "transpose",
            "mT",
            "movedim",
            "moveaxis",
            "swapaxes",
            "swapdims",
            "expand",
            "repeat",
            "repeat_interleave",
        ),
        *(
            "to",
            "_to_copy",
            "type_as",
            "clone",
            "contiguous",
            "alias",
            "detach",
            "dropout",
            "mean",
            "sum",
            "roll",
            "flip",
            "pad",
            "constant_pad_nd",
        ),
        *(
            "select",
            "slice",
            "index",
            "index_select",
            "gather",
            "split",
            "chunk",
            "split_with_sizes",
            "unbind",
            "getitem",
            "cat",
            "stack",
        ),
        *("avg_pool1d", "avg_pool2d", "adaptive_avg_pool1d", "adaptive_avg_pool2d"),
    }
)
# Operators that read only the shape of their input.
_SHAPE_ONLY = frozenset(
    {
        "full_like",
        "zeros_like",
        "ones_like",
        "empty_like",
        "new_zeros",
        "new_ones",
        "new_full",
        "new_empty",
        "sym_size",
    }
)
_MATMULS = ("matmul", "mm", "bmm")  # the weight may be on either side
_LINEAR = {
    **dict.fromkeys(("linear", "conv1d", "conv2d", "conv3d"), (0, 1, 2)),
    "addmm": (1, 2, 0),
    **dict.fromkeys(_MATMULS, (0, 1, -1)),
}
Layer = tuple[str, str | None]


def find_folds(w: Walk, ends: Sequence[fx.Node]) -> tuple[list[Norm], list[Scale]]:
    """Return every norm and LayerScale that can be folded, in the order of the graph. `ends`: the
    nodes of the outputs.
    """
    norms, scales = [], []
    by_gain: dict[str, list[Gain]] = {}
    for gain in w.gains:
        by_gain.setdefault(gain.gain, []).append(gain)
    tied = {*w.graph.ties, *w.graph.ties.values()}
    for name, gains in by_gain.items():
        if name in tied:
            continue
        writers = [_layer_before(w, g) for g in gains]
        if all(writers):
            layers = tuple(dict.fromkeys(layer for layer in writers if layer))
            if not any(weight in tied for weight, _ in layers):
                scales.append(Scale(name, layers))
            continue
        norm = _foldable_norm(w, name, gains, set(ends))
        if norm is not None:
            norms.append(norm)
    return norms, scales


def _layer_of(w: Walk, node: Node) -> Layer | None:
    """Return the weight and bias of a linear layer; None for any other operator."""
    order = _LINEAR.get(operator_name(node)) if node.op == "call_function" else None
    if order is None:
        return None
    if operator_name(node) in _MATMULS:
        sources = [_parameter_name(w, n, node) for n in node.args[:2]]
        return (sources[1] or sources[0] or "", None) if any(sources) else None
    names = []
    for position in order[1:]:
        operand = (
            get_argument(node, position, {1: "weight", 2: "bias"}.get(position, ""))
            if position >= 0
            else None
        )
        names.append(_parameter_name(w, operand, node) if isinstance(operand, fx.Node) else None)
    return (names[0], names[1]) if names[0] is not None else None


def _parameter_name(w: Walk, node: fx.Node, reader: fx.Node) -> str | None:
    """Return the parameter whose values a node has, under the name that its reader uses."""
    value = w.values.get(node)
    if node in w.aliases:
        w.current_node = reader
        value = w.value(node)
    return value.source if isinstance(value, Value) and not value.cases else None


def _layer_before(w: Walk, gain: Gain) -> Layer | None:
    """Return the layer right before a gain, if nothing else reads its output."""
    node: Any = gain.input
    if gain.bias is not None or operator_name(gain.node) != "mul":
        return None
    reader: Any = gain.node
    while True:
        if not isinstance(node, fx.Node) or [u for u in node.users if u in w.values] != [reader]:
            return None
        if operator_name(node) in (
            "view",
            "reshape",
            "to",
            "dropout",
            "contiguous",
            "clone",
            "alias",
        ):
            reader, node = node, node.args[0]
            continue
        layer = _layer_of(w, node)
        return layer if layer is not None and len(_consumers(w, layer[0])) == 1 else None


def _consumers(w: Walk, weight: str) -> list[fx.Node]:
    """Return the operators that read a weight under this name, after any reshaping."""
    todo = [
        u
        for n, by_name in w.aliases.items()
        if weight in by_name
        for u in n.users
        if u in w.values and _parameter_name(w, n, u) == weight
    ]
    out: list[fx.Node] = []
    while todo:
        node = todo.pop()
        if operator_name(node) in _LINEAR_ALONG_AXIS | {"t"}:
            todo += [u for u in node.users if u in w.values]
        else:
            out.append(node)
    return out


def _has_padding(node: Node) -> bool:
    """Return whether a convolution pads its input with zeros, to which no bias is added."""
    padding = get_argument(node, 4, "padding", 0)
    if isinstance(padding, str):
        return padding != "valid" and any(n > 1 for n in shape(node.args[1])[2:])
    return any(padding) if isinstance(padding, list | tuple) else bool(padding)


def _foldable_norm(w: Walk, name: str, gains: list[Gain], ends: set[fx.Node]) -> Norm | None:
    """Return the norm of a gain if only linear layers read it; None otherwise."""
    visited: set[fx.Node] = set()
    readers: list[Layer] = []
    layer_nodes: list[fx.Node] = []
    todo = [g.node for g in gains]
    is_padded = False
    while todo:
        node = todo.pop()
        if node in visited:
            continue
        visited.add(node)
        if node in ends:
            return None
        for user in node.users:
            if user not in w.values:
                continue
            if operator_name(user) in _SHAPE_ONLY:
                continue
            if operator_name(user) in _LINEAR_ALONG_AXIS or (
                operator_name(user) in ("mul", "div") and not isinstance(user.args[1], fx.Node)
            ):
                is_padded |= operator_name(user) in ("pad", "constant_pad_nd")
                todo.append(user)
                continue
            layer = _layer_of(w, user)
            order = _LINEAR.get(operator_name(user))
            if (
                layer is None
                or order is None
                or (operator_name(user) not in _MATMULS and user.args[order[0]] is not node)
            ):
                return None
            if operator_name(user).startswith("conv"):
                if get_argument(user, 6, "groups", 1) != 1:
                    return None
                is_padded |= _has_padding(user)
            readers.append(layer)
            layer_nodes.append(user)
            weight = user.args[order[1]]
            if (
                operator_name(user) not in _MATMULS
                and isinstance(weight, fx.Node)
                and weight.op == "placeholder"
            ):
                w.gain_axes[layer[0]] = 0 if operator_name(user) == "addmm" else 1
    joins = [n for n in visited if operator_name(n) in ("cat", "stack")]
    joins_complete = all(a in visited for n in joins for a in n.all_input_nodes)
    is_only_reader = all(set(_consumers(w, weight)) <= set(layer_nodes) for weight, _ in readers)
    # folding unties a reader that repeats another, not the other
    repeated = any(weight in w.graph.ties.values() for weight, _ in readers)
    if not readers or not joins_complete or not is_only_reader or repeated:
        return None
    biases = {g.bias for g in gains}
    order_of = {name: i for i, name in enumerate(n for named in w.aliases.values() for n in named)}
    ordered = tuple(sorted(dict.fromkeys(readers), key=lambda layer: order_of[layer[0]]))
    return Norm(
        name,
        gains[0].bias,
        ordered,
        neutral=gains[0].neutral,
        padded=is_padded and biases != {None},
    )
