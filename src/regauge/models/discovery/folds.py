"""Which gains can be folded: those that only linear layers read (forwards, a norm's) or that stand
right behind one (backwards, LayerScale).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from regauge.core.spec import Norm, Scale
from regauge.models.discovery.cases import get_argument
from regauge.models.discovery.graph import operator_name
from regauge.models.discovery.walk import Gain, Node, Value, Walk, shape

# Operators that are linear along the axis of a gain: whatever they rearrange or sum over lies on
# other axes.
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
# Operators that read a shape, and no number.
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
    """Every norm and LayerScale that folds, in the order of the graph. `ends`: what callers see."""
    norms, scales = [], []
    by_gain: dict[str, list[Gain]] = {}
    for gain in w.gains:
        by_gain.setdefault(gain.gain, []).append(gain)
    tied = {*w.graph.ties, *w.graph.ties.values()}
    for name, found in by_gain.items():
        if name in tied:
            continue
        writers = [_layer_before(w, g) for g in found]
        if all(writers):
            layers = tuple(dict.fromkeys(layer for layer in writers if layer))
            if not any(weight in tied for weight, _ in layers):
                scales.append(Scale(name, layers))
            continue
        norm = _foldable_norm(w, name, found, set(ends))
        if norm is not None:
            norms.append(norm)
    return norms, scales


def _layer_of(w: Walk, node: Node) -> Layer | None:
    """The weight and bias of a linear layer."""
    order = _LINEAR.get(operator_name(node)) if node.op == "call_function" else None
    if order is None:
        return None
    if operator_name(node) in _MATMULS:
        found = [_parameter_name(w, n, node) for n in node.args[:2]]
        return (found[1] or found[0] or "", None) if any(found) else None
    names = []
    for place in order[1:]:
        given = (
            get_argument(node, place, {1: "weight", 2: "bias"}.get(place, ""))
            if place >= 0
            else None
        )
        names.append(_parameter_name(w, given, node) if isinstance(given, fx.Node) else None)
    return (names[0], names[1]) if names[0] is not None else None


def _parameter_name(w: Walk, given: fx.Node, reader: fx.Node) -> str | None:
    """The parameter whose numbers a node is, by the name that its reader has for it."""
    value = w.values.get(given)
    if given in w.aliases:
        w.current_node = reader
        value = w.value(given)
    return value.source if isinstance(value, Value) and not value.cases else None


def _layer_before(w: Walk, gain: Gain) -> Layer | None:
    """The layer right in front of a gain, if nothing else reads what it writes."""
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
    """The operators that a weight goes into under this name, once it is reshaped."""
    todo = [
        u
        for n, named in w.aliases.items()
        if weight in named
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
    """Does a convolution reach over the edge, where there is no bias?"""
    padding = get_argument(node, 4, "padding", 0)
    if isinstance(padding, str):
        return padding != "valid" and any(n > 1 for n in shape(node.args[1])[2:])
    return any(padding) if isinstance(padding, list | tuple) else bool(padding)


def _foldable_norm(w: Walk, name: str, found: list[Gain], ends: set[fx.Node]) -> Norm | None:
    seen: set[fx.Node] = set()
    readers: list[Layer] = []
    used: list[fx.Node] = []
    todo = [g.node for g in found]
    padded = False
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
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
                padded |= operator_name(user) in ("pad", "constant_pad_nd")
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
                padded |= _has_padding(user)
            readers.append(layer)
            used.append(user)
            weight = user.args[order[1]]
            if (
                operator_name(user) not in _MATMULS
                and isinstance(weight, fx.Node)
                and weight.op == "placeholder"
            ):
                w.gain_axes[layer[0]] = 0 if operator_name(user) == "addmm" else 1
    joins = [n for n in seen if operator_name(n) in ("cat", "stack")]
    whole = all(a in seen for n in joins for a in n.all_input_nodes)
    alone = all(set(_consumers(w, weight)) <= set(used) for weight, _ in readers)
    repeated = any(
        weight in w.graph.ties.values() for weight, _ in readers
    )  # folding unties a reader that repeats another, not the other
    if not readers or not whole or not alone or repeated:
        return None
    biases = {g.bias for g in found}
    order_of = {name: i for i, name in enumerate(n for named in w.aliases.values() for n in named)}
    listed = tuple(sorted(dict.fromkeys(readers), key=lambda layer: order_of[layer[0]]))
    return Norm(
        name, found[0].bias, listed, neutral=found[0].neutral, padded=padded and biases != {None}
    )
