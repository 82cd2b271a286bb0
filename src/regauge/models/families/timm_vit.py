"""timm's vit_*, deit_* and deit3_*: pre-norm encoders with fused qkv; LayerScale, registers and the
rest where the tensors say so.

timm's config.json names an architecture and little more, so widths and depths come from the
tensors. The number of heads is in no shape: it comes from the config (`num_heads`, or `model_args`)
or from the architecture's name.
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
from regauge.errors import SpecError, UnknownModelError
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

# timm's own architectures: heads by the width of the stream, and the names for which that is not
# so.
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
            hint="docs/adding-a-model.md shows how to add one, or how to write a spec file for "
            "--spec",
        )
    width = names.size("blocks.0.attn.qkv.weight", 1)
    inner = names.size("blocks.0.attn.qkv.weight", 0) // 3
    heads = number_of_heads(c, width)
    rms = not names.has_prefix("blocks.0.norm1.bias")
    d = Draft("timm-vit")
    d.spaces["stream"] = stream_space(c, names, width, rms)
    d.embed = {"patch_embed.proj.weight": "stream _ _ _"}
    if "patch_embed.proj.bias" in names.names:  # not in front of norm_pre
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
        "at place 0"
    )
    return d.spec()


def add_registers(d: Draft, c: Config, names: Names) -> None:
    """Nobody reads a register by its place: they come in any order, with their rows of the position
    table where they have some.
    """
    count = names.size("reg_token", 1) if "reg_token" in names.names else 0
    before = sum(token in names.names for token in ("cls_token", "dist_token"))
    placed = has_prefix_positions(c, names, before + count)
    if (
        count < 2 or placed is None or pooling_of(c) == ""
    ):  # without pooling callers see every token at its place
        return
    d.spaces["register"] = Space(
        count,
        Permutation(),
        why="registers are read by attention alone, which takes them in any order",
    )
    d.embed["reg_token"] = "_ register stream"
    if placed:
        d.embed["pos_embed"] = f"_ _{before}+register+_ stream" if before else "_ register+_ stream"


def has_prefix_positions(c: Config, names: Names, prefix: int) -> bool | None:
    """Do the tokens before the patches have rows in the position table? Its length tells, if
    patches fill a square; None if nothing tells.
    """
    if "pos_embed" not in names.names:
        return False
    given = c("no_embed_class", c("model_args", {}).get("no_embed_class"))
    if given is not None:
        return not given
    rows = names.size("pos_embed", 1)
    square = [n > 0 and isqrt(n) ** 2 == n for n in (rows, rows - prefix)]
    return square[1] if square[0] != square[1] else None


def number_of_heads(c: Config, width: int) -> int:
    given = c("num_heads", None) or c("model_args", {}).get("num_heads")
    name = str(c("architecture", ""))
    heads = given or next(
        (n for start, n in OTHER_HEADS.items() if name.startswith(start)), HEADS.get(width)
    )
    if heads is None:
        raise SpecError(
            f'"{name}" is {width} wide, and how many heads it has is in no tensor\'s shape',
            hint='add "num_heads": N to config.json',
        )
    return int(heads)


def stream_space(c: Config, names: Names, width: int, rms: bool) -> Space:
    if pooling_of(c) in ("max", "avgmax"):
        return Space(
            width, Permutation(), why="the maximum over the tokens follows permutations only"
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
    if rms:
        return Space(width, SignedPermutation(), folded=Orthogonal(), why=RMS_NORM)
    return Space(width, Permutation(), folded=OrthogonalFixingOnes(), why=LAYER_NORM)


def pooling_of(c: Config) -> str:
    return str(c("model_args", {}).get("global_pool", c("global_pool", "token")))


def is_post_norm(c: Config) -> bool:
    """The norms stand behind the branches. No tensor name tells: the architecture's name does, or a
    live model's block.
    """
    return "_rpn_" in str(c("architecture", "")) or c("block_fn", "") == "ResPostBlock"


def is_rms(c: Config) -> bool:
    """Does the norm leave the mean alone? A missing bias does not tell (timm's SimpleNorm has none,
    and centres): without word, it may not.
    """
    return "rms" in str(c("norm_layer", c("model_args", {}).get("norm_layer", ""))).lower()


def add_block(d: Draft, c: Config, names: Names, i: int, heads: int, size: int, rms: bool) -> None:
    at, ffn = f"blocks.{i}.", f"ffn.{i}"
    a = restrict_qk(c, attention(i, heads, size), names, i)
    up, down = names.size(at + "mlp.fc1.weight", 0), names.size(at + "mlp.fc2.weight", 1)
    packed = (
        up == 2 * down
    )  # a gated FFN in one layer: SwiGLUPacked has the gate first, GluMlp last, and no shape tells
    layer = str(c("mlp_layer", c("model_args", {}).get("mlp_layer", ""))).lower() if packed else ""
    inside = (
        f"|{ffn}|+{ffn}"
        if "swiglu" in layer
        else f"{ffn}+|{ffn}|"
        if "glu" in layer
        else f"{ffn}+{ffn}"
        if packed
        else ffn
    )
    d.spaces |= a.spaces | {
        ffn: neurons(
            down,
            "a gate on an unknown side" if packed and not layer else "gelu",
            gated="|" in inside,
        )
    }
    if names.has_prefix(at + "mlp.norm."):
        d.spaces[ffn] = Space(
            down, Permutation(), why="a norm with gains stands behind the activation"
        )
    tensors = {
        **norm(at + "norm1", bias=not rms),
        **linear(
            at + "attn.qkv", f"{a.q}+{a.k}+{a.v}", "stream", f"{at}attn.qkv.bias" in names.names
        ),
        **linear(at + "attn.proj", "stream", a.o, f"{at}attn.proj.bias" in names.names),
        **norm(at + "norm2", bias=not rms),
        **linear(at + "mlp.fc1", inside, "stream", f"{at}mlp.fc1.bias" in names.names),
        **linear(at + "mlp.fc2", "stream", ffn, f"{at}mlp.fc2.bias" in names.names),
    }
    for x in ("q_norm", "k_norm"):
        if names.has_prefix(f"{at}attn.{x}."):
            tensors |= norm(f"{at}attn.{x}", f"qk.{i}", f"{at}attn.{x}.bias" in names.names)
    if names.has_prefix(at + "mlp.norm."):
        tensors |= norm(at + "mlp.norm", ffn, f"{at}mlp.norm.bias" in names.names)
    d.backbone |= tensors
    if not is_post_norm(c):
        d.norms += [
            foldable_norm(tensors, at + "norm1", at + "attn.qkv"),
            foldable_norm(tensors, at + "norm2", at + "mlp.fc1"),
        ]
    for scale, writer in (("ls1.gamma", "attn.proj"), ("ls2.gamma", "mlp.fc2")):
        if at + scale in names.names:
            d.backbone[at + scale] = "|stream|"
            d.scales.append(foldable_scale(tensors, at + scale, at + writer))


def restrict_qk(c: Config, a: Attention, names: Names, i: int) -> Attention:
    """Norms on queries and keys have one gain for all heads: what is left is one order of the
    coordinates, the same in every head.
    """
    if not names.has_prefix(f"blocks.{i}.attn.q_norm."):
        return a
    rms = f"blocks.{i}.attn.q_norm.bias" not in names.names and is_rms(c)
    why = "QK-norm gains are shared by all heads: one order of the coordinates for all of them"
    space = Space(a.spaces[f"qk.{i}"].size, SignedPermutation() if rms else Permutation(), why=why)
    return replace(a, spaces=a.spaces | {f"qk.{i}": space})


def add_heads(d: Draft, c: Config, names: Names, heads: int, width: int, rms: bool) -> None:
    """The final norm stands before pooling (norm) or behind it (fc_norm); for folding the two are
    the same.
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
    """SigLIP's pooling: a learned query attends to the stream; its result is a little stream of its
    own.
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
