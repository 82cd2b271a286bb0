"""The rules of all operators, and the restrictions they impose.

An operator without a rule is `unsupported`: nothing may act on the axes it touches, which is always
sound, and the spec's notes name it. `RESTRICTIONS` lists what each kind of restriction preserves:
scales, signs, and linear maps. Support for a new operator is one line in `RULES`.
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
from regauge.models.discovery.constants import is_uniform
from regauge.models.discovery.graph import operator_name
from regauge.models.discovery.terms import atom
from regauge.models.discovery.walk import Axis, Node, Value, Walk, shape

Rule = Callable[[Walk, Node], Any]


@dataclass(frozen=True)
class RestrictionEffect:
    """The matrices that a restriction preserves, with a description for users.

    Attributes:
        scales: whether scales are preserved.
        signs: whether signs are preserved.
        mixtures: the linear maps that are preserved: "all", "orthogonal", "ones" (orthogonal maps
            that preserve the all-ones vector), "rotary", "none" or "nothing".
        effect: a description of the operator.
        preserves: a description of the matrices that it preserves.
    """

    scales: bool
    signs: bool
    mixtures: str
    effect: str
    preserves: str


_PERMUTATIONS = "keeps permutations only"
RESTRICTIONS: dict[str, RestrictionEffect] = {
    "pointwise": RestrictionEffect(
        False, False, "none", "is a function of each coordinate", _PERMUTATIONS
    ),
    "softmax": RestrictionEffect(False, False, "none", "compares its coordinates", _PERMUTATIONS),
    "shift": RestrictionEffect(
        False,
        False,
        "ones",
        "adds the same number to every coordinate",
        "keeps orthogonal matrices that keep the all-ones vector",
    ),
    "odd": RestrictionEffect(
        False,
        True,
        "none",
        "is an odd function of each coordinate",
        "keeps permutations with signs",
    ),
    "even": RestrictionEffect(
        False, True, "none", "squares each coordinate", "keeps permutations with signs"
    ),
    "relu": RestrictionEffect(
        True,
        False,
        "none",
        "is positively homogeneous in each coordinate",
        "keeps permutations with positive scales",
    ),
    "product": RestrictionEffect(
        True,
        True,
        "none",
        "multiplies coordinate by coordinate",
        "keeps permutations, and scales that cancel",
    ),
    "batch": RestrictionEffect(False, False, "none", "is batched over it", "keeps any order"),
    "ones": RestrictionEffect(
        False,
        False,
        "ones",
        "takes the mean",
        "keeps orthogonal matrices that keep the all-ones vector",
    ),
    "rms": RestrictionEffect(
        False, True, "orthogonal", "takes the norm", "keeps orthogonal matrices"
    ),
    "rms-batch": RestrictionEffect(
        False, False, "none", "is computed for each of its indices", "keeps any order"
    ),
    "gain": RestrictionEffect(
        True,
        True,
        "none",
        "multiplies it by gains",
        "keeps permutations with signs or scales, and no rotation until the gains are folded",
    ),
    "still": RestrictionEffect(False, False, "all", "is a gain", "keeps the order"),
    "rotary-half": RestrictionEffect(
        True,
        True,
        "rotary",
        "rotate the planes (j, j + n/2) by separate angles",
        "keep one rotation and one scale for each plane",
    ),
    "rotary-interleaved": RestrictionEffect(
        True,
        True,
        "rotary",
        "rotate the planes (2j, 2j + 1) by separate angles",
        "keep one rotation and one scale for each plane",
    ),
    "frozen": RestrictionEffect(False, False, "nothing", "", "keeps nothing"),
}


def source_value(w: Walk, node: Node) -> Value:
    """Return the value of a source node: a parameter has free axes; a buffer, a constant or an
    input has frozen ones.
    """
    name, kind = w.graph.names[node], w.graph.kinds[node]
    sizes = tuple(getattr(node.meta.get("val"), "shape", ()))
    if kind == "parameter":
        target_name = w.graph.ties.get(name, name)
        names = [
            target_name,
            *(alias for alias, target in w.graph.ties.items() if target == target_name),
        ]
        w.aliases[node] = {
            n: Value(tuple(Axis(atom(int(k))) for k in sizes), source=n, is_weight=True)
            for n in names
        }
        return w.aliases[node][target_name]
    if kind == "buffer" and _is_statistic(node):
        return Value(tuple(Axis(atom(int(n))) for n in sizes), source=name, is_weight=True)
    if node in w.graph.constants:
        return constant_value(w, node)
    reasons = {
        "buffer": f'the module\'s constant "{name}" varies along it',
        "constant": "a constant varies along it",
        "input": f"it is an axis of the input {name}",
    }
    if kind != "input" and node.users:
        w.current_node = next(iter(node.users))  # report the operator that reads it
    return Value(tuple(w.new_frozen_axis(int(n), reasons[kind]) for n in sizes))


def constant_value(w: Walk, node: Node) -> Value:
    """Return the value of a node computed from constants alone: frozen where its numbers differ."""
    value = w.graph.constants[node]
    if node in w.zeros:
        return w.value(node)
    if w.graph.kinds.get(node) is not None and node.users:
        w.current_node = next(iter(node.users))  # report the operator that reads it
    why = "constants of the module differ along it"
    return Value(
        tuple(
            Axis(atom(n), uniform=True)
            if n == 1 or is_uniform(value, i)
            else w.new_frozen_axis(n, why)
            for i, n in enumerate(value.shape)
        )
    )


def _is_statistic(node: Node) -> bool:
    """Return whether a buffer is a running mean or variance, which follows its channels."""
    return bool(node.users) and all(
        "batch_norm" in operator_name(u) and node in u.args[3:5] for u in node.users
    )


def unsupported(w: Walk, node: Node) -> Any:
    """Freeze everything that an operator without a rule touches."""
    name = operator_name(node)
    if node in w.parameter_dependent:
        w.unsupported.setdefault(name, node)
    for n in node.all_input_nodes:
        value = w.value(n) if n in w.aliases else w.values.get(n)
        for operand in (
            value
            if isinstance(value, list)
            else []
            if value is None
            else [w.collapse(value) if value.cases else value]
        ):
            for a in operand.axes:
                w.freeze(a, f"`{name}` has no rule")
    result = node.meta.get("val")
    results = [
        _frozen_value(w, v, name)
        for v in (result if isinstance(result, tuple | list) else [result])
    ]
    return results if isinstance(result, tuple | list) else results[0]


def _frozen_value(w: Walk, value: Any, name: str) -> Value:
    return Value(
        tuple(
            w.new_frozen_axis(int(n), f"`{name}` has no rule") for n in getattr(value, "shape", ())
        )
    )


def write_in_place(w: Walk, node: Node) -> Value:
    """Freeze a tensor that is written into, and every tensor that it is a view of."""
    base: Any = node.args[0]
    while isinstance(base, fx.Node):
        value = w.values.get(base)
        if isinstance(value, Value):
            value = w.collapse(value) if value.cases else value
            w.values[base] = Value(
                tuple(w.new_frozen_axis(a.size, "parts of it are overwritten") for a in value.axes)
            )
            for a in value.axes:
                w.freeze(a, "parts of it are overwritten")
        base = base.args[0] if base.op == "call_function" and base.args else None
    return Value(tuple(w.new_frozen_axis(n, "parts of it are overwritten") for n in shape(node)))


def no_output(w: Walk, node: Node) -> Value:
    """Return the empty value of an operator without results."""
    return Value(())


def _rules_for(names: str, rule: Rule) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


RULES: dict[str, Rule] = {
    **_rules_for(
        "view reshape flatten unflatten squeeze unsqueeze _unsafe_view view_as reshape_as", s.view
    ),
    **_rules_for("permute transpose t numpy_T mT movedim moveaxis swapaxes swapdims", s.permute),
    **_rules_for(
        "to _to_copy clone contiguous alias detach dropout feature_dropout native_dropout "
        "type_as lift_fresh_copy",
        s.identity,
    ),
    **_rules_for("expand expand_as broadcast_to", s.expand),
    **_rules_for("split split_with_sizes chunk", s.split),
    **_rules_for("flip roll", s.reorder),
    **_rules_for("pad constant_pad_nd", s.pad),
    **_rules_for("pixel_shuffle pixel_unshuffle", s.pixel_shuffle),
    **_rules_for("repeat repeat_interleave tile", s.repeat),
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
    **_rules_for("add sub rsub", e.add),
    **_rules_for("mul div", e.mul),
    "neg": e.neg,
    **_rules_for("relu leaky_relu prelu max_pool", e.pointwise("relu")),
    **_rules_for("tanh sin atan asinh sinh erf sign hardtanh softsign", e.pointwise("odd")),
    **_rules_for(
        "gelu silu elu selu celu mish sigmoid hardswish hardsigmoid softplus log_sigmoid "
        "logsigmoid relu6 exp log log1p expm1 sqrt rsqrt reciprocal"
        " cos abs clamp clamp_min clamp_max eq ne lt le gt ge logical_not logical_and "
        "logical_or logical_xor bitwise_not bitwise_and bitwise_or"
        " __and__ __or__ maximum minimum isnan isinf floor ceil round trunc floor_divide "
        "remainder fmod nan_to_num threshold",
        e.pointwise("pointwise"),
    ),
    **_rules_for("pow", e.power),
    **_rules_for("square", e.square),
    **_rules_for("where", e.where),
    **_rules_for("masked_fill", e.masked_fill),
    **_rules_for("sum mean", e.reduce("ones")),
    **_rules_for("var std", e.reduce("spread")),
    **_rules_for("linalg_vector_norm norm", e.reduce("rms")),
    **_rules_for("amax amin max min any all prod logsumexp argmax argmin", e.reduce("pointwise")),
    **_rules_for("softmax _softmax log_softmax _safe_softmax", e.softmax),
    **_rules_for(
        "zeros ones full new_zeros new_ones new_full zeros_like ones_like full_like empty "
        "empty_like new_empty scalar_tensor",
        e.full,
    ),
    **_rules_for("arange linspace eye tril_indices triu_indices randint rand randn", e.arange),
    "topk": e.topk,
    "one_hot": e.one_hot,
    "linear": c.linear,
    **_rules_for("addmm baddbmm addbmm addmv", c.addmm),
    **_rules_for("matmul mm bmm mv dot", c.matmul),
    "einsum": c.einsum,
    "scaled_dot_product_attention": c.attention,
    **_rules_for(
        "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution",
        c.convolution,
    ),
    **_rules_for(
        "avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d "
        "adaptive_avg_pool3d",
        c.pool(""),
    ),
    **_rules_for(
        "upsample_bicubic2d upsample_bilinear2d upsample_nearest2d upsample_nearest1d "
        "_upsample_bicubic2d_aa _upsample_bilinear2d_aa",
        c.pool(""),
    ),
    **_rules_for(
        "max_pool1d max_pool2d max_pool3d max_pool2d_with_indices adaptive_max_pool1d "
        "adaptive_max_pool2d",
        c.pool("relu"),
    ),
    "layer_norm": c.layer_norm,
    "rms_norm": c.rms_norm,
    "group_norm": c.group_norm,
    **_rules_for("batch_norm _native_batch_norm_legit_no_training cudnn_batch_norm", c.batch_norm),
    **_rules_for(
        "copy fill index_put masked_scatter scatter zero uniform normal bernoulli index_fill "
        "index_add",
        write_in_place,
    ),
    **_rules_for(
        "_assert_tensor_metadata _assert_async _assert_scalar sym_size "
        "sym_constrain_range_for_size",
        no_output,
    ),
}
