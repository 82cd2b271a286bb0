"""timm's vit_*, deit_* and deit3_*: pre-norm encoders with fused qkv; LayerScale, registers and
other parts if the tensors contain them.

timm's config.json names an architecture and little more, so widths and depths come from the
tensors. The number of heads is not visible in a shape; it comes from the config (`num_heads`, or
`model_args`) or from the architecture's name.
"""

from __future__ import annotations

from dataclasses import replace
from math import isqrt

from regauge.core.groups import (
    GeneralLinear,
    Orthogonal,
    OrthogonalFixingOnes,
    Permutation,
    SignedPermutation,
)
from regauge.core.spec import Space, Spec
from regauge.errors import Hint, SpecError, UnknownModelError
from regauge.models.families.family import Boundary, Family
from regauge.models.families.pieces import (
    LAYER_NORM,
    POST_NORM,
    RMS_NORM,
    Attention,
    Config,
    Draft,
    Names,
    attention,
    foldable_norm,
    foldable_scale,
    linear,
    neurons,
    norm,
)

# Heads of timm's architectures by the width of the stream; OTHER_HEADS has the exceptions.
HEADS = {
    192: 3,
    256: 4,
    320: 5,
    384: 6,
    512: 8,
    640: 10,
    768: 12,
    832: 13,
    896: 14,
    1024: 16,
    1152: 16,
    1280: 16,
    1408: 16,
    1536: 24,
    1664: 16,
}
# Tensors of other classes under the same names: rotary and relative positions, convolutional stems,
# differential attention, unpacked SwiGLU.
OTHER_CLASSES = (
    "blocks.0.gamma_1",
    "rope.",
    "rel_pos.",
    "patch_embed.backbone.",
    "attn.lambda_",
    "mlp.fc1_g.",
)
OTHER_HEADS = {"vit_base_patch16_gap_224": 16, "vit_giantopt": 16}


def spec(c: Config, names: Names) -> Spec:
    if not names.has_prefix("blocks.0.attn.qkv.") or any(names.has(part) for part in OTHER_CLASSES):
        name = c("architecture", "this model")
        raise UnknownModelError(
            f'"{name}" is one of timm\'s models that no family describes: only its plain '
            "VisionTransformer, with fc1 and fc2 in its FFN, is known",
            hint=Hint(
                "regauge.discover(module, inputs) infers its symmetry; or pass a "
                "spec file with spec= (docs/guides/adding-a-model.md)",
                cli="pass a spec file with --spec (docs/guides/adding-a-model.md)",
            ),
        )
    width = names.size("blocks.0.attn.qkv.weight", 1)
    inner = names.size("blocks.0.attn.qkv.weight", 0) // 3
    heads = number_of_heads(c, width)
    rms = not names.has_prefix("blocks.0.norm1.bias")
    d = Draft("timm-vit")
    d.spaces["stream"] = stream_space(c, names, width, rms)
    d.embed = {"patch_embed.proj.weight": "stream _ _ _"}
    if "patch_embed.proj.bias" in names.names:  # absent before norm_pre
        d.embed["patch_embed.proj.bias"] = "stream"
    d.embed |= {
        token: "_ _ stream"
        for token in ("cls_token", "dist_token", "reg_token", "pos_embed")
        if token in names.names
    }
    add_registers(d, c, names)
    if names.has_prefix("norm_pre."):
        d.embed |= norm("norm_pre", bias=not rms)
    for i in range(names.count("blocks.")):
        add_block(d, c, names, i, heads, inner // heads, rms)
    add_heads(d, c, names, heads, width, rms)
    d.notes.append(
        "tokens: patches may be shuffled after the position embedding; the class token is read "
        "at position 0"
    )
    return d.spec()


def add_registers(d: Draft, c: Config, names: Names) -> None:
    """Add the register tokens. Nothing reads a register by its position: they come in any order,
    with their rows of the position table if they have any.
    """
    count = names.size("reg_token", 1) if "reg_token" in names.names else 0
    before = sum(token in names.names for token in ("cls_token", "dist_token"))
    has_positions = has_prefix_positions(c, names, before + count)
    # without pooling, every token is returned at its position
    if count < 2 or has_positions is None or pooling_of(c) == "":
        return
    d.spaces["register"] = Space(
        count,
        Permutation(),
        why="registers are read by attention alone, which takes them in any order",
    )
    d.embed["reg_token"] = "_ register stream"
    if has_positions:
        d.embed["pos_embed"] = f"_ _{before}+register+_ stream" if before else "_ register+_ stream"


def has_prefix_positions(c: Config, names: Names, prefix: int) -> bool | None:
    """Return whether the tokens before the patches have rows in the position table: by its length,
    if the patches fill a square; None if undecidable.
    """
    if "pos_embed" not in names.names:
        return False
    no_embed_class = c("no_embed_class", c("model_args", {}).get("no_embed_class"))
    if no_embed_class is not None:
        return not no_embed_class
    rows = names.size("pos_embed", 1)
    is_square = [n > 0 and isqrt(n) ** 2 == n for n in (rows, rows - prefix)]
    return is_square[1] if is_square[0] != is_square[1] else None


def number_of_heads(c: Config, width: int) -> int:
    """Return the number of heads: from the config, by the architecture's name, or by the width.

    Raises:
        SpecError: none of them determines it.
    """
    configured = c("num_heads", None) or c("model_args", {}).get("num_heads")
    name = str(c("architecture", ""))
    heads = configured or next(
        (number for prefix, number in OTHER_HEADS.items() if name.startswith(prefix)),
        HEADS.get(width),
    )
    if heads is None:
        raise SpecError(
            f'the number of heads of "{name}", {width} wide, is unknown',
            hint='add "num_heads": N to config.json',
        )
    return int(heads)


def stream_space(c: Config, names: Names, width: int, rms: bool) -> Space:
    """Return the space of the stream."""
    if pooling_of(c) in ("max", "avgmax"):
        return Space(
            width, Permutation(), why="the maximum over the tokens commutes with permutations only"
        )
    if names.has_prefix("norm_pre."):
        return Space(
            width,
            SignedPermutation() if rms and is_rms(c) else Permutation(),
            why="norm_pre writes the stream: its gains cannot be folded",
        )
    if is_post_norm(c):
        return Space(width, Permutation(), why=POST_NORM)
    return normed_space(width, rms and is_rms(c))


def normed_space(width: int, rms: bool) -> Space:
    """Return a space that norms read, which is larger once they are folded."""
    if rms:
        return Space(width, SignedPermutation(), folded=Orthogonal(), why=RMS_NORM)
    return Space(width, Permutation(), folded=OrthogonalFixingOnes(), why=LAYER_NORM)


def pooling_of(c: Config) -> str:
    """Return the kind of pooling."""
    return str(c("model_args", {}).get("global_pool", c("global_pool", "token")))


def is_post_norm(c: Config) -> bool:
    """Return whether the norms stand behind the branches. No tensor name determines it: the
    architecture's name does, or a live model's block.
    """
    return "_rpn_" in str(c("architecture", "")) or c("block_fn", "") == "ResPostBlock"


def is_rms(c: Config) -> bool:
    """Return whether the norm does not subtract the mean. A missing bias is not enough (timm's
    SimpleNorm has none, and centres); without evidence, assume that it does.
    """
    return "rms" in str(c("norm_layer", c("model_args", {}).get("norm_layer", ""))).lower()


def add_block(d: Draft, c: Config, names: Names, i: int, heads: int, size: int, rms: bool) -> None:
    """Add one block."""
    prefix, ffn = f"blocks.{i}.", f"ffn.{i}"
    a = restrict_qk(c, attention(i, heads, size), names, i)
    fc1_size, fc2_size = (
        names.size(prefix + "mlp.fc1.weight", 0),
        names.size(prefix + "mlp.fc2.weight", 1),
    )
    # a gated FFN in one layer: SwiGLUPacked has the gate first, GluMlp last; shapes do not differ
    is_packed = fc1_size == 2 * fc2_size
    mlp_layer = (
        str(c("mlp_layer", c("model_args", {}).get("mlp_layer", ""))).lower() if is_packed else ""
    )
    fc1_axes = (
        f"|{ffn}|+{ffn}"
        if "swiglu" in mlp_layer
        else f"{ffn}+|{ffn}|"
        if "glu" in mlp_layer
        else f"{ffn}+{ffn}"
        if is_packed
        else ffn
    )
    d.spaces |= a.spaces | {
        ffn: neurons(
            fc2_size,
            "a gate on an unknown side" if is_packed and not mlp_layer else "gelu",
            gated="|" in fc1_axes,
        )
    }
    if names.has_prefix(prefix + "mlp.norm."):
        d.spaces[ffn] = Space(
            fc2_size, Permutation(), why="a norm with gains stands behind the activation"
        )
    tensors = {
        **norm(prefix + "norm1", bias=not rms),
        **linear(
            prefix + "attn.qkv",
            f"{a.q}+{a.k}+{a.v}",
            "stream",
            f"{prefix}attn.qkv.bias" in names.names,
        ),
        **linear(prefix + "attn.proj", "stream", a.o, f"{prefix}attn.proj.bias" in names.names),
        **norm(prefix + "norm2", bias=not rms),
        **linear(prefix + "mlp.fc1", fc1_axes, "stream", f"{prefix}mlp.fc1.bias" in names.names),
        **linear(prefix + "mlp.fc2", "stream", ffn, f"{prefix}mlp.fc2.bias" in names.names),
    }
    for x in ("q_norm", "k_norm"):
        if names.has_prefix(f"{prefix}attn.{x}."):
            tensors |= norm(f"{prefix}attn.{x}", f"qk.{i}", f"{prefix}attn.{x}.bias" in names.names)
    if names.has_prefix(prefix + "mlp.norm."):
        tensors |= norm(prefix + "mlp.norm", ffn, f"{prefix}mlp.norm.bias" in names.names)
    d.backbone |= tensors
    if not is_post_norm(c):
        d.norms += [
            foldable_norm(tensors, prefix + "norm1", prefix + "attn.qkv"),
            foldable_norm(tensors, prefix + "norm2", prefix + "mlp.fc1"),
        ]
    for scale, writer in (("ls1.gamma", "attn.proj"), ("ls2.gamma", "mlp.fc2")):
        if prefix + scale in names.names:
            d.backbone[prefix + scale] = "|stream|"
            d.scales.append(foldable_scale(tensors, prefix + scale, prefix + writer))


def restrict_qk(c: Config, a: Attention, names: Names, i: int) -> Attention:
    """Restrict queries and keys that are normed: gains are shared by all heads, so one order of the
    coordinates is left for all of them.
    """
    if not names.has_prefix(f"blocks.{i}.attn.q_norm."):
        return a
    rms = f"blocks.{i}.attn.q_norm.bias" not in names.names and is_rms(c)
    why = "QK-norm gains are shared by all heads: one order of the coordinates for all of them"
    space = Space(a.spaces[f"qk.{i}"].size, SignedPermutation() if rms else Permutation(), why=why)
    return replace(a, spaces=a.spaces | {f"qk.{i}": space})


def add_heads(d: Draft, c: Config, names: Names, heads: int, width: int, rms: bool) -> None:
    """Add the final norm and the heads. The norm stands before pooling (norm) or behind it
    (fc_norm); for folding both are the same.
    """
    final = next((n for n in ("norm", "fc_norm") if names.has_prefix(f"{n}.")), None)
    if final:
        d.head = norm(final, bias=not rms)
    out, readers = "stream", []
    if names.has_prefix("attn_pool."):
        out, readers = "pool", add_attention_pool(d, c, names, heads, width)
    for name in ("head", "head_dist"):
        if names.has_prefix(f"{name}."):
            d.head |= linear(name, "_", out, f"{name}.bias" in names.names)
            if out == "stream":
                readers.append(name)
    rows = "_ _" if pooling_of(c) == "" else "_"
    d.outputs = {"logits": f"{rows} _" if names.has_prefix("head.") else f"{rows} {out}"}
    if final and readers and pooling_of(c) not in ("max", "avgmax"):
        d.norms.append(foldable_norm(d.head, final, *readers))


def add_attention_pool(d: Draft, c: Config, names: Names, heads: int, width: int) -> list[str]:
    """Add SigLIP's pooling: a learned query attends to the stream, and its result is a separate
    small stream. Returns the readers of the stream.
    """
    a, bias = attention("pool", heads, width // heads), "attn_pool.norm.bias" in names.names
    d.spaces |= a.spaces | {
        "latent": Space(width, GeneralLinear(), why="one linear layer reads the query"),
        "pool": normed_space(width, rms=not bias and is_rms(c)),
        "ffn.pool": neurons(names.size("attn_pool.mlp.fc1.weight", 0), "gelu"),
    }
    d.head |= {
        "attn_pool.latent": "_ _ latent",
        **linear("attn_pool.q", a.q, "latent"),
        **linear("attn_pool.kv", f"{a.k}+{a.v}", "stream"),
        **linear("attn_pool.proj", "pool", a.o),
        **norm("attn_pool.norm", "pool", bias),
        **linear("attn_pool.mlp.fc1", "ffn.pool", "pool"),
        **linear("attn_pool.mlp.fc2", "pool", "ffn.pool"),
    }
    d.norms.append(foldable_norm(d.head, "attn_pool.norm", "attn_pool.mlp.fc1"))
    return ["attn_pool.kv"]


def boundaries(c: Config, names: Names) -> tuple[Boundary, ...]:
    return (Boundary("", "blocks", {"x": "_ token stream"}, "_ token stream"),)


FAMILY = Family(
    "timm-vit",
    (),
    spec,
    boundaries,
    architectures=("vit_", "deit_", "deit3_", "flexivit_", "eva_large_"),
)
