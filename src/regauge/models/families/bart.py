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
    apart = not tied and all(f"{base}{side}.embed_tokens.weight" in names.names for side in sides)
    stream = {side: f"stream.{side}" if apart else "stream" for side in ("encoder", "decoder")}
    if sides == [
        "decoder"
    ]:  # a language model without an encoder; encoder states, if any, are the caller's
        stream["encoder"] = "_"
    for side in sides:
        d.spaces[stream[side]] = Space(c.d_model, Permutation(), why=POST_NORM)
    if f"{base}shared.weight" in names.names:
        d.embed[f"{base}shared.weight"] = f"{words} _" if apart else f"{words} stream"
    for side in sides:
        at, table = f"{base}{side}.", f"{base}{side}.embed_tokens.weight"
        places = c.axis("max_position_embeddings", 2)  # the first two rows are never read
        d.embed |= {
            table: f"{words} {stream[side]}",
            at + "embed_positions.weight": f"{places} {stream[side]}",
        }
        d.embed |= norm(at + "layernorm_embedding", stream[side])
        if f"{base}shared.weight" in names.names and not apart:
            d.ties[table] = f"{base}shared.weight"
        for i in range(c(f"{side}_layers", 12)):
            d.backbone |= block_tensors(d, c, side, f"{at}layers.{i}.", i, stream)
    add_heads(d, c, names, base, stream, tied and not apart)
    if apart:
        d.notes.append(
            'the tables are untied: "shared" is not read, and encoder and decoder have streams '
            "of their own"
        )
    d.notes.append(
        "tokens: rows of either side may be permuted together with masks and positions, which "
        "BART computes inside"
    )
    return d.spec()


def block_tensors(
    d: Draft, c: Config, side: str, at: str, i: int, stream: dict[str, str]
) -> Tensors:
    here, heads = stream[side], c(f"{side}_attention_heads", 16)
    own = attention(f"{side}.{i}", heads, c.d_model // heads)
    ffn = f"ffn.{side}.{i}"
    d.spaces |= own.spaces | {
        ffn: neurons(c(f"{side}_ffn_dim", 4096), c("activation_function", "gelu"))
    }
    cross: Tensors = {}
    if side == "decoder":
        a = attention(f"cross.{i}", heads, c.d_model // heads)
        d.spaces |= a.spaces
        cross = {
            **linear(at + "encoder_attn.q_proj", a.q, here),
            **linear(at + "encoder_attn.k_proj", a.k, stream["encoder"]),
            **linear(at + "encoder_attn.v_proj", a.v, stream["encoder"]),
            **linear(at + "encoder_attn.out_proj", here, a.o),
            **norm(at + "encoder_attn_layer_norm", here),
        }
    return {
        **linear(at + "self_attn.q_proj", own.q, here),
        **linear(at + "self_attn.k_proj", own.k, here),
        **linear(at + "self_attn.v_proj", own.v, here),
        **linear(at + "self_attn.out_proj", here, own.o),
        **norm(at + "self_attn_layer_norm", here),
        **cross,
        **linear(at + "fc1", ffn, here),
        **linear(at + "fc2", here, ffn),
        **norm(at + "final_layer_norm", here),
    }


def add_heads(
    d: Draft, c: Config, names: Names, base: str, stream: dict[str, str], tied: bool
) -> None:
    """The decoder's last state, and what reads it."""
    here = stream["decoder"]
    d.outputs = {
        "last_hidden_state": f"_ _ {here}",
        "encoder_last_hidden_state": f"_ _ {stream['encoder']}",
    }
    if "final_logits_bias" in names.names:
        d.head["final_logits_bias"] = f"_1 {c.axis('vocab_size')}"
    if (
        names.has_prefix("lm_head.")
        or "final_logits_bias" in d.head
        or c.architecture in ("BartForConditionalGeneration", "BartForCausalLM")
    ):
        d.head |= linear("lm_head", c.axis("vocab_size"), here, bias=False)
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
            **linear("classification_head.dense", "pool", here),
            **linear("classification_head.out_proj", "_", "pool"),
        }
        d.outputs = {"logits": "_ _"}
    if names.has_prefix("qa_outputs."):
        d.head |= linear("qa_outputs", "_", here)
        d.outputs = qa_logits()


def boundaries(c: Config, names: Names) -> tuple[Boundary, ...]:
    base, spaces = names.prefix("model."), spec(c, names).spaces
    here = {
        side: f"stream.{side}" if f"stream.{side}" in spaces else "stream"
        for side in ("encoder", "decoder")
    }
    source = here["encoder"] if names.has_prefix(f"{base}encoder.layers.") else "_"
    encoder = {"hidden_states": f"_ token {here['encoder']}", "attention_mask": "_ _ token token*"}
    decoder = {
        "hidden_states": f"_ token {here['decoder']}",
        "attention_mask": "_ _ token _+token*",
        "encoder_hidden_states": f"_ source {source}",
        "encoder_attention_mask": "_ _ token source*",
    }
    return (
        Boundary("encoder", f"{base}encoder.layers", encoder, f"_ token {here['encoder']}"),
        Boundary(
            "decoder",
            f"{base}decoder.layers",
            decoder,
            f"_ token {here['decoder']}",
            implicit={"attention_mask": None},
        ),
    )


FAMILY = Family("bart", ("bart",), spec, boundaries)
