"""Swin of the transformers library: windowed attention in stages of growing width. Old (v4) and new
(v5) parameter names.

Each stage has its own stream; patch merging reads four neighbours of one stage and writes the next.
The embedding's norm writes stage 0, and its gain cannot be folded: stage 0 keeps permutations, the
later stages rotate once their norms are folded.
"""

from __future__ import annotations

from regauge.core.groups import OrthogonalFixingOnes, Permutation
from regauge.core.spec import Space, Spec
from regauge.models.families.family import Boundary, Family
from regauge.models.families.pieces import (
    LAYER_NORM,
    POST_NORM,
    Config,
    Draft,
    Names,
    attention,
    foldable_norm,
    linear,
    neurons,
    norm,
)

V5 = {
    "q": "attention.q_proj",
    "k": "attention.k_proj",
    "v": "attention.v_proj",
    "o": "attention.o_proj",
    "bias": "attention.relative_position_bias.relative_position_bias_table",
    "up": "mlp.fc1",
    "down": "mlp.fc2",
}
V4 = {
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "o": "attention.output.dense",
    "bias": "attention.self.relative_position_bias_table",
    "up": "intermediate.dense",
    "down": "output.dense",
}


def spec(c: Config, names: Names) -> Spec:
    base = names.prefix("swin.")
    naming = V4 if names.has("attention.self.query") else V5
    d = Draft("swin", buffers=(r".*\.relative_position_index",))
    d.embed = {
        f"{base}embeddings.patch_embeddings.projection.weight": f"stream.0 {c.patch_axes()}",
        f"{base}embeddings.patch_embeddings.projection.bias": "stream.0",
        **norm(f"{base}embeddings.norm", "stream.0"),
    }
    for token in ("position_embeddings", "mask_token"):
        if names.has_prefix(f"{base}embeddings.{token}"):
            d.embed[f"{base}embeddings.{token}"] = "_ _ stream.0"
    stages = len(c.depths)
    for s in range(stages):
        width = c.embed_dim * 2**s
        folded = OrthogonalFixingOnes() if s else None
        d.spaces[f"stream.{s}"] = Space(
            width, Permutation(), folded=folded, why=LAYER_NORM if s else POST_NORM
        )
        for b in range(c.depths[s]):
            add_block(d, c, naming, f"{base}encoder.layers.{s}.blocks.{b}.", s, b)
        if s + 1 < stages:
            four_streams = "+".join([f"stream.{s}"] * 4)
            down = f"{base}encoder.layers.{s}.downsample."
            d.backbone |= {
                f"{down}norm.weight": "+".join([f"|stream.{s}|"] * 4),
                f"{down}norm.bias": four_streams,
            }
            d.backbone |= linear(f"{down}reduction", f"stream.{s + 1}", four_streams, bias=False)
            d.norms.append(foldable_norm(d.backbone, f"{down}norm", f"{down}reduction"))
    last = f"stream.{stages - 1}"
    d.head = norm(f"{base}layernorm", last)
    d.outputs = {"last_hidden_state": f"_ _ {last}", "pooler_output": f"_ {last}"}
    readers = []
    if names.has_prefix("classifier."):
        d.head |= linear("classifier", "_", last)
        d.outputs = {"logits": "_ _"}
        readers.append("classifier")
    # masked image modelling: a 1x1 convolution on the normalized stream
    if names.has_prefix("decoder.0."):
        d.head |= {"decoder.0.weight": f"_ {last}* _ _", "decoder.0.bias": "_"}
        d.outputs = {"reconstruction": "_ _ _ _"}
        readers.append("decoder.0")
    if readers:
        d.norms.append(foldable_norm(d.head, f"{base}layernorm", *readers))
    d.notes.append(
        "tokens: no permutation holds: attention is windowed and shifted, patches merge with "
        "their neighbours, the bias is looked up by position"
    )
    return d.spec()


def add_block(d: Draft, c: Config, naming: dict[str, str], prefix: str, s: int, b: int) -> None:
    """Add one block."""
    stream, ffn, width = f"stream.{s}", f"ffn.{s}.{b}", c.embed_dim * 2**s
    a = attention(f"{s}.{b}", c.num_heads[s], width // c.num_heads[s])
    bias = c("qkv_bias", True)
    d.spaces |= a.spaces | {ffn: neurons(int(c("mlp_ratio", 4.0) * width), c("hidden_act", "gelu"))}
    d.backbone |= {
        **norm(prefix + "layernorm_before", stream),
        **linear(prefix + naming["q"], a.q, stream, bias),
        **linear(prefix + naming["k"], a.k, stream, bias),
        **linear(prefix + naming["v"], a.v, stream, bias),
        **linear(prefix + naming["o"], stream, a.o),
        prefix + naming["bias"]: f"_ head.{s}.{b}",
        **norm(prefix + "layernorm_after", stream),
        **linear(prefix + naming["up"], ffn, stream),
        **linear(prefix + naming["down"], stream, ffn),
    }
    d.norms += [
        foldable_norm(
            d.backbone,
            prefix + "layernorm_before",
            *(prefix + naming[x] for x in "qkv"),
            padded=True,
        ),
        foldable_norm(d.backbone, prefix + "layernorm_after", prefix + naming["up"]),
    ]


def boundaries(c: Config, names: Names) -> tuple[Boundary, ...]:
    """Return the boundary of the stages: the stream enters in the space of stage 0 and leaves in
    that of the last.

    A stage returns two further items, for callers that request hidden states.
    """
    base = names.prefix("swin.")
    leave = f"_ _ stream.{len(c.depths) - 1}"
    return (
        Boundary(
            "",
            f"{base}encoder.layers",
            {"hidden_states": "_ _ stream.0"},
            leave,
            ("hidden_states", "", ""),
        ),
    )


FAMILY = Family("swin", ("swin",), spec, boundaries)
