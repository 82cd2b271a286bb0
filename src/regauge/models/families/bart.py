"""BART: a post-norm encoder and decoder. One embedding table for both makes their streams one
space; untied tables leave two.
"""

from __future__ import annotations

from regauge.core.groups import Permutation
from regauge.core.spec import Space, Spec
from regauge.models.families.family import Boundary, Family
from regauge.models.families.pieces import (
    POST_NORM,
    Config,
    Draft,
    Names,
    Tensors,
    attention,
    linear,
    neurons,
    norm,
    qa_logits,
)


def spec(c: Config, names: Names) -> Spec:
    base = names.prefix("model.")
    d = Draft("bart")
    sides = [side for side in ("encoder", "decoder") if names.has_prefix(f"{base}{side}.layers.")]
    tied, words = c("tie_word_embeddings", True), c.axis("vocab_size")
    untied = not tied and all(f"{base}{side}.embed_tokens.weight" in names.names for side in sides)
    stream = {side: f"stream.{side}" if untied else "stream" for side in ("encoder", "decoder")}
    # a language model without an encoder; encoder states, if any, come from the caller
    if sides == ["decoder"]:
        stream["encoder"] = "_"
    for side in sides:
        d.spaces[stream[side]] = Space(c.d_model, Permutation(), why=POST_NORM)
    if f"{base}shared.weight" in names.names:
        d.embed[f"{base}shared.weight"] = f"{words} _" if untied else f"{words} stream"
    for side in sides:
        prefix, table = f"{base}{side}.", f"{base}{side}.embed_tokens.weight"
        positions = c.axis("max_position_embeddings", 2)  # the first two rows are never read
        d.embed |= {
            table: f"{words} {stream[side]}",
            prefix + "embed_positions.weight": f"{positions} {stream[side]}",
        }
        d.embed |= norm(prefix + "layernorm_embedding", stream[side])
        if f"{base}shared.weight" in names.names and not untied:
            d.ties[table] = f"{base}shared.weight"
        for i in range(c(f"{side}_layers", 12)):
            d.backbone |= block_tensors(d, c, side, f"{prefix}layers.{i}.", i, stream)
    add_heads(d, c, names, base, stream, tied and not untied)
    if untied:
        d.notes.append(
            'the tables are untied: "shared" is unused, and encoder and decoder have separate '
            "streams"
        )
    d.notes.append(
        "tokens: rows of either side may be permuted together with masks and positions, which "
        "BART computes inside"
    )
    return d.spec()


def block_tensors(
    d: Draft, c: Config, side: str, prefix: str, i: int, stream: dict[str, str]
) -> Tensors:
    """Add the spaces of one block, and return its tensors."""
    side_stream, heads = stream[side], c(f"{side}_attention_heads", 16)
    self_attention = attention(f"{side}.{i}", heads, c.d_model // heads)
    ffn = f"ffn.{side}.{i}"
    d.spaces |= self_attention.spaces | {
        ffn: neurons(c(f"{side}_ffn_dim", 4096), c("activation_function", "gelu"))
    }
    cross_tensors: Tensors = {}
    if side == "decoder":
        cross_attention = attention(f"cross.{i}", heads, c.d_model // heads)
        d.spaces |= cross_attention.spaces
        cross_tensors = {
            **linear(prefix + "encoder_attn.q_proj", cross_attention.q, side_stream),
            **linear(prefix + "encoder_attn.k_proj", cross_attention.k, stream["encoder"]),
            **linear(prefix + "encoder_attn.v_proj", cross_attention.v, stream["encoder"]),
            **linear(prefix + "encoder_attn.out_proj", side_stream, cross_attention.o),
            **norm(prefix + "encoder_attn_layer_norm", side_stream),
        }
    return {
        **linear(prefix + "self_attn.q_proj", self_attention.q, side_stream),
        **linear(prefix + "self_attn.k_proj", self_attention.k, side_stream),
        **linear(prefix + "self_attn.v_proj", self_attention.v, side_stream),
        **linear(prefix + "self_attn.out_proj", side_stream, self_attention.o),
        **norm(prefix + "self_attn_layer_norm", side_stream),
        **cross_tensors,
        **linear(prefix + "fc1", ffn, side_stream),
        **linear(prefix + "fc2", side_stream, ffn),
        **norm(prefix + "final_layer_norm", side_stream),
    }


def add_heads(
    d: Draft, c: Config, names: Names, base: str, stream: dict[str, str], tied: bool
) -> None:
    """Add the heads that read the decoder's last state, and the outputs."""
    decoder_stream = stream["decoder"]
    d.outputs = {
        "last_hidden_state": f"_ _ {decoder_stream}",
        "encoder_last_hidden_state": f"_ _ {stream['encoder']}",
    }
    if "final_logits_bias" in names.names:
        d.head["final_logits_bias"] = f"_1 {c.axis('vocab_size')}"
    if (
        names.has_prefix("lm_head.")
        or "final_logits_bias" in d.head
        or c.architecture in ("BartForConditionalGeneration", "BartForCausalLM")
    ):
        d.head |= linear("lm_head", c.axis("vocab_size"), decoder_stream, bias=False)
        if tied:
            d.ties["lm_head.weight"] = (
                f"{base}shared.weight"
                if f"{base}shared.weight" in d.embed
                else f"{base}decoder.embed_tokens.weight"
            )
        d.outputs = {"logits": "_ _ _"}
    if names.has_prefix("classification_head."):
        d.spaces["pool"] = neurons(c.d_model, "tanh")
        d.head |= {
            **linear("classification_head.dense", "pool", decoder_stream),
            **linear("classification_head.out_proj", "_", "pool"),
        }
        d.outputs = {"logits": "_ _"}
    if names.has_prefix("qa_outputs."):
        d.head |= linear("qa_outputs", "_", decoder_stream)
        d.outputs = qa_logits()


def boundaries(c: Config, names: Names) -> tuple[Boundary, ...]:
    base, spaces = names.prefix("model."), spec(c, names).spaces
    streams = {
        side: f"stream.{side}" if f"stream.{side}" in spaces else "stream"
        for side in ("encoder", "decoder")
    }
    source = streams["encoder"] if names.has_prefix(f"{base}encoder.layers.") else "_"
    encoder = {
        "hidden_states": f"_ token {streams['encoder']}",
        "attention_mask": "_ _ token token*",
    }
    decoder = {
        "hidden_states": f"_ token {streams['decoder']}",
        "attention_mask": "_ _ token _+token*",
        "encoder_hidden_states": f"_ source {source}",
        "encoder_attention_mask": "_ _ token source*",
    }
    return (
        Boundary("encoder", f"{base}encoder.layers", encoder, f"_ token {streams['encoder']}"),
        Boundary(
            "decoder",
            f"{base}decoder.layers",
            decoder,
            f"_ token {streams['decoder']}",
            implicit={"attention_mask": None},
        ),
    )


FAMILY = Family("bart", ("bart",), spec, boundaries)
