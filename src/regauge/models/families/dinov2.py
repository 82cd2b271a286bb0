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
    words = STORED if names.has("attention.attention.query") else LIVE
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
        at = f"{base}encoder.layer.{i}."
        a = attention(i, heads, width // heads)
        ffn, up, down = feed_forward(d, c, names, at, i)
        d.spaces |= a.spaces
        d.backbone |= {
            **norm(at + "norm1"),
            **linear(at + "attention." + words["q"], a.q, "stream", bias),
            **linear(at + "attention." + words["k"], a.k, "stream", bias),
            **linear(at + "attention." + words["v"], a.v, "stream", bias),
            **linear(at + "attention." + words["o"], "stream", a.o),
            at + "layer_scale1.lambda1": "|stream|",
            **norm(at + "norm2"),
            **ffn,
            at + "layer_scale2.lambda1": "|stream|",
        }
        d.norms += [
            foldable_norm(d.backbone, at + "norm1", *(at + "attention." + words[x] for x in "qkv")),
            foldable_norm(d.backbone, at + "norm2", *up),
        ]
        d.scales += [
            foldable_scale(d.backbone, at + "layer_scale1.lambda1", at + "attention." + words["o"]),
            foldable_scale(d.backbone, at + "layer_scale2.lambda1", down),
        ]
    d.head = norm(f"{base}layernorm")
    if names.has_prefix(
        "classifier."
    ):  # reads the class token and the mean of the patches, side by side
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
        "at place 0"
    )
    return d.spec()


def feed_forward(
    d: Draft, c: Config, names: Names, at: str, i: int
) -> tuple[dict[str, str], list[str], str]:
    """The tensors of the feed-forward block, its readers of the stream, and its writer. SwiGLU is
    fused on disk and apart in memory.
    """
    inner = int(c.hidden_size * c("mlp_ratio", 4))
    if not c("use_swiglu_ffn", False):
        d.spaces[f"ffn.{i}"] = neurons(inner, c("hidden_act", "gelu"))
        return (
            linear(at + "mlp.fc1", f"ffn.{i}", "stream")
            | linear(at + "mlp.fc2", "stream", f"ffn.{i}"),
            [at + "mlp.fc1"],
            at + "mlp.fc2",
        )
    d.spaces[f"ffn.{i}"] = neurons((int(inner * 2 / 3) + 7) // 8 * 8, "silu", gated=True)
    if names.has_prefix(at + "mlp.weights_in."):
        up, down = (
            linear(at + "mlp.weights_in", f"|ffn.{i}|+ffn.{i}", "stream"),
            at + "mlp.weights_out",
        )
    else:
        up = linear(at + "mlp.gate_proj", f"|ffn.{i}|", "stream") | linear(
            at + "mlp.up_proj", f"ffn.{i}", "stream"
        )
        down = at + "mlp.down_proj"
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
