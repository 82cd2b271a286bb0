"""DINOv2 (with and without registers): pre-norm encoders on image patches with LayerScale, which
folds backwards into the writers.
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
    foldable_scale,
    linear,
    neurons,
    norm,
)

LIVE = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj"}
STORED = {"q": "attention.query", "k": "attention.key", "v": "attention.value", "o": "output.dense"}


def spec(c: Config, names: Names) -> Spec:
    base = names.prefix(f"{c.model_type}.")
    naming = STORED if names.has("attention.attention.query") else LIVE
    width, heads, bias = c.hidden_size, c.num_attention_heads, c("qkv_bias", True)
    d = Draft(c.model_type)
    d.spaces["stream"] = Space(width, Permutation(), folded=OrthogonalFixingOnes(), why=LAYER_NORM)
    d.embed = {
        f"{base}embeddings.cls_token": "_ _ stream",
        f"{base}embeddings.position_embeddings": f"_1 {c.position_rows(1)} stream",
        f"{base}embeddings.patch_embeddings.projection.weight": f"stream {c.patch_axes()}",
        f"{base}embeddings.patch_embeddings.projection.bias": "stream",
    }
    if names.has("mask_token"):
        d.embed[f"{base}embeddings.mask_token"] = "_ stream"
    registers = int(c("num_register_tokens", 4)) if names.has("register_tokens") else 0
    if registers:
        d.embed[f"{base}embeddings.register_tokens"] = "_ register stream"
        d.spaces["register"] = Space(
            registers,
            Permutation(),
            why="registers are read by attention alone, and in a mean: they come in any order",
        )
    for i in range(c.num_hidden_layers):
        prefix = f"{base}encoder.layer.{i}."
        a = attention(i, heads, width // heads)
        ffn, up, down = feed_forward(d, c, names, prefix, i)
        d.spaces |= a.spaces
        d.backbone |= {
            **norm(prefix + "norm1"),
            **linear(prefix + "attention." + naming["q"], a.q, "stream", bias),
            **linear(prefix + "attention." + naming["k"], a.k, "stream", bias),
            **linear(prefix + "attention." + naming["v"], a.v, "stream", bias),
            **linear(prefix + "attention." + naming["o"], "stream", a.o),
            prefix + "layer_scale1.lambda1": "|stream|",
            **norm(prefix + "norm2"),
            **ffn,
            prefix + "layer_scale2.lambda1": "|stream|",
        }
        d.norms += [
            foldable_norm(
                d.backbone, prefix + "norm1", *(prefix + "attention." + naming[x] for x in "qkv")
            ),
            foldable_norm(d.backbone, prefix + "norm2", *up),
        ]
        d.scales += [
            foldable_scale(
                d.backbone, prefix + "layer_scale1.lambda1", prefix + "attention." + naming["o"]
            ),
            foldable_scale(d.backbone, prefix + "layer_scale2.lambda1", down),
        ]
    d.head = norm(f"{base}layernorm")
    # the classifier reads the class token and the mean of the patches, concatenated
    if names.has_prefix("classifier."):
        d.head |= linear("classifier", "_", "stream+stream")
        d.norms.append(foldable_norm(d.head, f"{base}layernorm", "classifier"))
        d.outputs = {"logits": "_ _"}
    else:
        d.outputs = {
            "last_hidden_state": f"_ {'_1+register+_' if registers else '_'} stream",
            "pooler_output": "_ stream",
        }
    d.notes.append(
        "tokens: patches may be shuffled after the position embedding; the class token is read "
        "at position 0"
    )
    return d.spec()


def feed_forward(
    d: Draft, c: Config, names: Names, prefix: str, i: int
) -> tuple[dict[str, str], list[str], str]:
    """Add the space of a feed-forward block. Returns its tensors, its readers of the stream, and
    its writer. SwiGLU is fused on disk and split in memory.
    """
    inner = int(c.hidden_size * c("mlp_ratio", 4))
    if not c("use_swiglu_ffn", False):
        d.spaces[f"ffn.{i}"] = neurons(inner, c("hidden_act", "gelu"))
        return (
            linear(prefix + "mlp.fc1", f"ffn.{i}", "stream")
            | linear(prefix + "mlp.fc2", "stream", f"ffn.{i}"),
            [prefix + "mlp.fc1"],
            prefix + "mlp.fc2",
        )
    d.spaces[f"ffn.{i}"] = neurons((int(inner * 2 / 3) + 7) // 8 * 8, "silu", gated=True)
    if names.has_prefix(prefix + "mlp.weights_in."):
        up, down = (
            linear(prefix + "mlp.weights_in", f"|ffn.{i}|+ffn.{i}", "stream"),
            prefix + "mlp.weights_out",
        )
    else:
        up = linear(prefix + "mlp.gate_proj", f"|ffn.{i}|", "stream") | linear(
            prefix + "mlp.up_proj", f"ffn.{i}", "stream"
        )
        down = prefix + "mlp.down_proj"
    return (
        up | linear(down, "stream", f"ffn.{i}"),
        [n.removesuffix(".weight") for n in up if n.endswith(".weight")],
        down,
    )


def boundaries(c: Config, names: Names) -> tuple[Boundary, ...]:
    base = names.prefix(f"{c.model_type}.")
    return (
        Boundary("", f"{base}encoder.layer", {"hidden_states": "_ token stream"}, "_ token stream"),
    )


FAMILY = Family("dinov2", ("dinov2", "dinov2_with_registers"), spec, boundaries)
