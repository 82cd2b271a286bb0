"""One rule for each operator. What has no rule is `unknown`: nothing may act on what it touches,
which is always sound, and it is named.

`RESTRICTIONS` says what each kind of restriction keeps: scales, signs, and mixtures of coordinates.
A new operator is one line in `RULES`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from regauge.models.discovery import contractions as c
from regauge.models.discovery import elementwise as e
from regauge.models.discovery import lookups as k
from regauge.models.discovery import shapes as s
from regauge.models.discovery.constants import is_even
from regauge.models.discovery.graph import operator
from regauge.models.discovery.terms import atom
from regauge.models.discovery.walk import Axis, Node, Value, Walk, shape

Rule = Callable[[Walk, Node], Any]


@dataclass(frozen=True)
class Kept:
    """What a restriction leaves: scales, signs, and mixtures of coordinates ("all", "orthogonal",
    "ones" for those that keep the ones vector, "rotary" or "none"); what the operator does, and
    what it keeps, in words.
    """

    scales: bool
    signs: bool
    mixtures: str
    does: str
    keeps: str


_PERMUTATIONS = "keeps permutations only"
RESTRICTIONS: dict[str, Kept] = {
    "pointwise": Kept(False, False, "none", "is a function of each coordinate", _PERMUTATIONS),
    "softmax": Kept(False, False, "none", "compares its coordinates", _PERMUTATIONS),
    "shift": Kept(
        False,
        False,
        "ones",
        "adds the same number to every coordinate",
        "keeps orthogonal matrices that keep the all-ones vector",
    ),
    "odd": Kept(
        False,
        True,
        "none",
        "is an odd function of each coordinate",
        "keeps permutations with signs",
    ),
    "even": Kept(False, True, "none", "squares each coordinate", "keeps permutations with signs"),
    "relu": Kept(
        True,
        False,
        "none",
        "is positively homogeneous in each coordinate",
        "keeps permutations with positive scales",
    ),
    "product": Kept(
        True,
        True,
        "none",
        "multiplies coordinate by coordinate",
        "keeps permutations, and scales that cancel",
    ),
    "batch": Kept(
        False, False, "none", "treats its places side by side", "keeps any order of them"
    ),
    "ones": Kept(
        False,
        False,
        "ones",
        "takes the mean",
        "keeps orthogonal matrices that keep the all-ones vector",
    ),
    "rms": Kept(False, True, "orthogonal", "takes the length", "keeps orthogonal matrices"),
    "rms-batch": Kept(
        False, False, "none", "is computed at each of its places", "keeps any order of them"
    ),
    "gain": Kept(
        True,
        True,
        "none",
        "multiplies it by gains",
        "keeps permutations with signs or scales, and no rotation until the gains are folded",
    ),
    "still": Kept(False, False, "all", "is a gain", "keeps the order"),
    "rotary-half": Kept(
        True,
        True,
        "rotary",
        "turn the planes (j, j + n/2) by angles of their own",
        "keep one turn and one scale for each plane",
    ),
    "rotary-interleaved": Kept(
        True,
        True,
        "rotary",
        "turn the planes (2j, 2j + 1) by angles of their own",
        "keep one turn and one scale for each plane",
    ),
    "frozen": Kept(False, False, "nothing", "", "keeps nothing"),
}


def source(w: Walk, node: Node) -> Value:
    """A parameter: free. A buffer, a constant, an input: fixed numbers."""
    name, kind = w.graph.names[node], w.graph.kinds[node]
    sizes = tuple(getattr(node.meta.get("val"), "shape", ()))
    if kind == "parameter":
        first = w.graph.ties.get(name, name)
        names = [first, *(alias for alias, target in w.graph.ties.items() if target == first)]
        w.aliases[node] = {
            n: Value(tuple(Axis(atom(int(k))) for k in sizes), source=n, weights=True)
            for n in names
        }
        return w.aliases[node][first]
    if kind == "buffer" and _is_statistic(node):
        return Value(tuple(Axis(atom(int(n))) for n in sizes), source=name, weights=True)
    if node in w.graph.known:
        return constant(w, node)
    words = {
        "buffer": f'the module\'s constant "{name}" lies along it',
        "constant": "a constant lies along it",
        "input": f"it is an axis of the input {name}",
    }
    if kind != "input" and node.users:
        w.at = next(iter(node.users))  # the operator that brings it in
    return Value(tuple(w.fixed(int(n), words[kind]) for n in sizes))


def constant(w: Walk, node: Node) -> Value:
    """What the module computes from constants alone: nothing may act where its numbers differ.
    Zeros the walk knows besides.
    """
    value = w.graph.known[node]
    if node in w.zeros:
        return w.value(node)
    if w.graph.kinds.get(node) is not None and node.users:
        w.at = next(iter(node.users))  # the operator that brings it in
    why = "numbers that the module makes itself differ along it"
    return Value(
        tuple(
            Axis(atom(n), uniform=True) if n == 1 or is_even(value, i) else w.fixed(n, why)
            for i, n in enumerate(value.shape)
        )
    )


def _is_statistic(node: Node) -> bool:
    """A running mean or spread, which moves with its channels."""
    return bool(node.users) and all(
        "batch_norm" in operator(u) and node in u.args[3:5] for u in node.users
    )


def unknown(w: Walk, node: Node) -> Any:
    """No rule: nothing may act on what it touches."""
    name = operator(node)
    if node in w.moves:
        w.unknown.setdefault(name, node)
    for n in node.all_input_nodes:
        found = w.value(n) if n in w.aliases else w.values.get(n)
        for value in (
            found
            if isinstance(found, list)
            else []
            if found is None
            else [w.collapse(found) if found.cases else found]
        ):
            for a in value.axes:
                w.freeze(a, f"`{name}` has no rule")
    result = node.meta.get("val")
    made = [_made(w, v, name) for v in (result if isinstance(result, tuple | list) else [result])]
    return made if isinstance(result, tuple | list) else made[0]


def _made(w: Walk, value: Any, name: str) -> Value:
    return Value(
        tuple(w.fixed(int(n), f"`{name}` has no rule") for n in getattr(value, "shape", ()))
    )


def written(w: Walk, node: Node) -> Value:
    """Writing into a tensor: what it is a part of is fixed."""
    base: Any = node.args[0]
    while isinstance(base, fx.Node):
        found = w.values.get(base)
        if isinstance(found, Value):
            found = w.collapse(found) if found.cases else found
            w.values[base] = Value(
                tuple(w.fixed(a.size, "it is written into in parts") for a in found.axes)
            )
            for a in found.axes:
                w.freeze(a, "it is written into in parts")
        base = base.args[0] if base.op == "call_function" and base.args else None
    return Value(tuple(w.fixed(n, "it is written into in parts") for n in shape(node)))


def nothing(w: Walk, node: Node) -> Value:
    return Value(())


def _each(names: str, rule: Rule) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


RULES: dict[str, Rule] = {
    **_each(
        "view reshape flatten unflatten squeeze unsqueeze _unsafe_view view_as reshape_as", s.view
    ),
    **_each("permute transpose t numpy_T mT movedim moveaxis swapaxes swapdims", s.permute),
    **_each(
        "to _to_copy clone contiguous alias detach dropout feature_dropout native_dropout "
        "type_as lift_fresh_copy",
        s.passed,
    ),
    **_each("expand expand_as broadcast_to", s.expand),
    **_each("split split_with_sizes chunk", s.split),
    **_each("flip roll", s.reordered),
    **_each("pad constant_pad_nd", s.pad),
    **_each("pixel_shuffle pixel_unshuffle", s.shuffled),
    **_each("repeat repeat_interleave tile", s.repeat),
    "select": s.select,
    "unbind": s.unbind,
    "getitem": s.getitem,
    "slice": s.slice_,
    "cat": s.cat,
    "concat": s.cat,
    "stack": s.stack,
    "embedding": k.embedding,
    "index": k.index,
    "index_select": k.index_select,
    "gather": k.gather,
    **_each("add sub rsub", e.add),
    **_each("mul div", e.mul),
    "neg": e.negated,
    **_each("relu leaky_relu prelu max_pool", e.pointwise("relu")),
    **_each("tanh sin atan asinh sinh erf sign hardtanh softsign", e.pointwise("odd")),
    **_each(
        "gelu silu elu selu celu mish sigmoid hardswish hardsigmoid softplus log_sigmoid "
        "logsigmoid relu6 exp log log1p expm1 sqrt rsqrt reciprocal"
        " cos abs clamp clamp_min clamp_max eq ne lt le gt ge logical_not logical_and "
        "logical_or logical_xor bitwise_not bitwise_and bitwise_or"
        " __and__ __or__ maximum minimum isnan isinf floor ceil round trunc floor_divide "
        "remainder fmod nan_to_num threshold",
        e.pointwise("pointwise"),
    ),
    **_each("pow", e.power),
    **_each("square", e.square),
    **_each("where", e.where),
    **_each("masked_fill", e.masked_fill),
    **_each("sum mean", e.reduce("ones")),
    **_each("var std", e.reduce("spread")),
    **_each("linalg_vector_norm norm", e.reduce("rms")),
    **_each("amax amin max min any all prod logsumexp argmax argmin", e.reduce("pointwise")),
    **_each("softmax _softmax log_softmax _safe_softmax", e.softmax),
    **_each(
        "zeros ones full new_zeros new_ones new_full zeros_like ones_like full_like empty "
        "empty_like new_empty scalar_tensor",
        e.made,
    ),
    **_each("arange linspace eye tril_indices triu_indices randint rand randn", e.counted),
    "topk": e.topk,
    "one_hot": e.one_hot,
    "linear": c.linear,
    **_each("addmm baddbmm addbmm addmv", c.addmm),
    **_each("matmul mm bmm mv dot", c.matmul),
    "einsum": c.einsum,
    "scaled_dot_product_attention": c.attention,
    **_each(
        "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution",
        c.convolution,
    ),
    **_each(
        "avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d "
        "adaptive_avg_pool3d",
        c.pool(""),
    ),
    **_each(
        "upsample_bicubic2d upsample_bilinear2d upsample_nearest2d upsample_nearest1d "
        "_upsample_bicubic2d_aa _upsample_bilinear2d_aa",
        c.pool(""),
    ),
    **_each(
        "max_pool1d max_pool2d max_pool3d max_pool2d_with_indices adaptive_max_pool1d "
        "adaptive_max_pool2d",
        c.pool("relu"),
    ),
    "layer_norm": c.layer_norm,
    "rms_norm": c.rms_norm,
    "group_norm": c.group_norm,
    **_each("batch_norm _native_batch_norm_legit_no_training cudnn_batch_norm", c.batch_norm),
    **_each(
        "copy fill index_put masked_scatter scatter zero uniform normal bernoulli index_fill "
        "index_add",
        written,
    ),
    **_each(
        "_assert_tensor_metadata _assert_async _assert_scalar sym_size "
        "sym_constrain_range_for_size",
        nothing,
    ),
}
