"""timm's swin_*: windows with a relative-position bias, one stream for each stage, and patch
merging between them.

Widths, depths and heads come from the tensors: the bias table has one column for each head.
"""

from __future__ import annotations

from regauge.core.groups import OrthogonalFixingOnes, Permutation
from regauge.core.spec import Space, Spec
from regauge.models.families.family import Boundary, Family
from regauge.models.families.pieces import (
    LAYER_NORM,
    Config,
    Draft,
    Names,
    attention,
    foldable_norm,
    linear,
    neurons,
    norm,
)

EMBED_NORM = (
    "patch_embed.norm writes the stream: its gains act on the stream itself and cannot be folded"
)


def spec(c: Config, names: Names) -> Spec:
    d = Draft("timm-swin", buffers=(r".*\.relative_position_index", r".*\.attn_mask"))
    d.embed = {"patch_embed.proj.weight": "stream.0 _ _ _", "patch_embed.proj.bias": "stream.0"}
    if names.has_prefix("patch_embed.norm."):
        d.embed |= norm("patch_embed.norm", "stream.0")
    stages = names.count("layers.")
    # old checkpoints store the merging at the end of a stage, not at the beginning of the next
    merges_at_end = names.has_prefix("layers.0.downsample.")
    for s in range(stages):
        width = names.size(f"layers.{s}.blocks.0.attn.qkv.weight", 1)
        d.spaces[f"stream.{s}"] = Space(
            width, Permutation(), folded=OrthogonalFixingOnes(), why=LAYER_NORM
        )
        if s > 0:
            add_patch_merging(d, s - 1, f"layers.{s - 1 if merges_at_end else s}.downsample.")
        for b in range(names.count(f"layers.{s}.blocks.")):
            add_block(d, names, s, b)
    if names.has_prefix("patch_embed.norm."):
        d.spaces["stream.0"] = Space(d.spaces["stream.0"].size, Permutation(), why=EMBED_NORM)
    last = f"stream.{stages - 1}"
    d.head = norm("norm", last)
    head = "head.fc" if names.has_prefix("head.fc.") else "head"
    if names.has_prefix(f"{head}."):
        d.head |= linear(head, "_", last)
        d.norms.append(foldable_norm(d.head, "norm", head))
        d.outputs = {"logits": "_ _"}
    else:
        d.outputs = {"logits": f"_ {last}"}
    d.notes.append(
        "tokens: windows and shifts fix the positions, so that tokens cannot be permuted"
    )
    return d.spec()


def add_patch_merging(d: Draft, s: int, prefix: str) -> None:
    """Add patch merging: the norm and the reduction read the streams of four neighbours,
    concatenated.
    """
    four_streams = "+".join([f"stream.{s}"] * 4)
    d.backbone |= {
        prefix + "norm.weight": "+".join([f"|stream.{s}|"] * 4),
        prefix + "norm.bias": four_streams,
        **linear(prefix + "reduction", f"stream.{s + 1}", four_streams, bias=False),
    }
    d.norms.append(foldable_norm(d.backbone, prefix + "norm", prefix + "reduction"))


def add_block(d: Draft, names: Names, s: int, b: int) -> None:
    """Add one block."""
    prefix, label, stream = f"layers.{s}.blocks.{b}.", f"{s}.{b}", f"stream.{s}"
    heads = names.size(prefix + "attn.relative_position_bias_table", 1)
    a = attention(label, heads, names.size(prefix + "attn.qkv.weight", 0) // 3 // heads)
    d.spaces |= a.spaces | {
        f"ffn.{label}": neurons(names.size(prefix + "mlp.fc1.weight", 0), "gelu")
    }
    d.backbone |= {
        **norm(prefix + "norm1", stream),
        **linear(
            prefix + "attn.qkv",
            f"{a.q}+{a.k}+{a.v}",
            stream,
            f"{prefix}attn.qkv.bias" in names.names,
        ),
        prefix + "attn.relative_position_bias_table": f"_ head.{label}",
        **linear(prefix + "attn.proj", stream, a.o),
        **norm(prefix + "norm2", stream),
        **linear(prefix + "mlp.fc1", f"ffn.{label}", stream),
        **linear(prefix + "mlp.fc2", stream, f"ffn.{label}"),
    }
    d.norms += [
        foldable_norm(d.backbone, prefix + "norm1", prefix + "attn.qkv", padded=True),
        foldable_norm(d.backbone, prefix + "norm2", prefix + "mlp.fc1"),
    ]


def boundaries(c: Config, names: Names) -> tuple[Boundary, ...]:
    stages = names.count("layers.")
    return (Boundary("", "layers", {"x": "_ _ _ stream.0"}, f"_ _ _ stream.{stages - 1}"),)


FAMILY = Family("timm-swin", (), spec, boundaries, architectures=("swin_",))
