"""T5 of the transformers library: encoder and decoder with RMSNorm, relative positions and one
shared embedding; also T5 v1.1.

The relative position bias is stored in block 0 and used by all blocks of its stack: self-attention
has one head space per stack. Cross-attention has no bias and its own heads in each layer. Old T5
scales the decoder's output before a tied head; untied, the head takes that scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from regauge.core.groups import Orthogonal, Permutation, SignedPermutation
from regauge.core.spec import Space, Spec
from regauge.models.families.family import Boundary, Family
from regauge.models.families.pieces import (
    RMS_NORM,
    Attention,
    Config,
    Draft,
    Names,
    attention,
    foldable_norm,
    linear,
    neurons,
    norm,
    qa_logits,
)

UNTIED = {"tie_word_embeddings": False, "scale_decoder_outputs": False}


def spec(c: Config, names: Names) -> Spec:
    base = names.prefix("transformer.")
    d = Draft(
        "t5",
        buffers=(
            r".*decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
        ),
    )
    d.spaces["stream"] = Space(c.d_model, SignedPermutation(), folded=Orthogonal(), why=RMS_NORM)
    layers, words = {"encoder": c.num_layers}, c.axis("vocab_size")
    d.embed[f"{base}shared.weight"] = f"{words} stream"
    if names.has_prefix(f"{base}decoder."):
        layers["decoder"] = c("num_decoder_layers", c.num_layers)
    for stack, depth in layers.items():
        d.embed[f"{base}{stack}.embed_tokens.weight"] = f"{words} stream"
        d.ties[f"{base}{stack}.embed_tokens.weight"] = f"{base}shared.weight"
        d.spaces[f"head.{stack}"] = Space(
            c.num_heads,
            Permutation(),
            why="all blocks of a stack share one relative position bias, and with it the heads",
        )
        for i in range(depth):
            add_block(d, c, f"{base}{stack}.block.{i}.layer.", stack, i)
        d.head |= norm(f"{base}{stack}.final_layer_norm", bias=False)
    readers = add_heads(d, c, names, f"{base}{list(layers)[-1]}.final_layer_norm")
    if readers and "decoder" in layers:
        keys = [
            f"{base}decoder.block.{i}.layer.1.EncDecAttention.{x}"
            for i in range(layers["decoder"])
            for x in "kv"
        ]
        d.norms.append(foldable_norm(d.head, f"{base}encoder.final_layer_norm", *keys))
    d.notes.append(
        "tokens: rows may be permuted with the masks and a position_bias that is passed to "
        "block 0; it is looked up by position otherwise"
    )
    return d.spec()


def add_block(d: Draft, c: Config, prefix: str, stack: str, i: int) -> None:
    """Add one block: self-attention, cross-attention in the decoder, and the FFN."""
    self_attention = attention(f"{stack}.{i}", c.num_heads, c.d_kv, shared=f"head.{stack}")
    add_attention(d, f"{prefix}0.SelfAttention.", self_attention)
    if i == 0:
        d.backbone[f"{prefix}0.SelfAttention.relative_attention_bias.weight"] = (
            f"{c.axis('relative_attention_num_buckets')} head.{stack}"
        )
    add_norm(d, f"{prefix}0.layer_norm", *(f"{prefix}0.SelfAttention.{x}" for x in "qkv"))
    last = 1
    if stack == "decoder":
        add_attention(
            d, f"{prefix}1.EncDecAttention.", attention(f"cross.{i}", c.num_heads, c.d_kv)
        )
        # keys and values read the encoder's final norm
        add_norm(d, f"{prefix}1.layer_norm", f"{prefix}1.EncDecAttention.q")
        last = 2
    ffn, ffn_prefix = f"ffn.{stack}.{i}", f"{prefix}{last}.DenseReluDense."
    kind = c("feed_forward_proj", "relu")
    gated = kind.startswith("gated-")
    d.spaces[ffn] = neurons(c.d_ff, kind.removeprefix("gated-"), gated=gated)
    if gated:
        d.backbone |= {
            **linear(f"{ffn_prefix}wi_0", f"|{ffn}|", "stream", bias=False),
            **linear(f"{ffn_prefix}wi_1", ffn, "stream", bias=False),
        }
    else:
        d.backbone |= linear(f"{ffn_prefix}wi", ffn, "stream", bias=False)
    d.backbone |= linear(f"{ffn_prefix}wo", "stream", ffn, bias=False)
    add_norm(
        d,
        f"{prefix}{last}.layer_norm",
        *((f"{ffn_prefix}wi_0", f"{ffn_prefix}wi_1") if gated else (f"{ffn_prefix}wi",)),
    )


def add_attention(d: Draft, prefix: str, a: Attention) -> None:
    """Add the spaces and projections of an attention layer."""
    d.spaces |= a.spaces
    for name, out in (("q", a.q), ("k", a.k), ("v", a.v)):
        d.backbone |= linear(prefix + name, out, "stream", bias=False)
    d.backbone |= linear(prefix + "o", "stream", a.o, bias=False)


def add_norm(d: Draft, name: str, *readers: str) -> None:
    """Add a norm that folds into its readers."""
    d.backbone |= norm(name, bias=False)
    d.norms.append(foldable_norm(d.backbone, name, *readers))


def add_heads(d: Draft, c: Config, names: Names, final: str) -> list[str]:
    """Add the readers of the last final norm (the language head, tied or not, or a classifier) and
    the outputs.
    """
    readers = []
    if c.architecture == "T5ForConditionalGeneration" or names.has_prefix("lm_head."):
        d.head |= linear("lm_head", c.axis("vocab_size"), "stream", bias=False)
        scaled = c("scale_decoder_outputs", c("tie_word_embeddings", True))
        if scaled or not names.has_prefix("lm_head."):
            d.ties["lm_head.weight"] = "shared.weight"
            d.untied = {"lm_head.weight": c.d_model**-0.5} if scaled else {}
            d.untied_config = UNTIED
        readers.append("lm_head")
    if names.has_prefix("classification_head."):
        d.spaces["pool"] = neurons(c.d_model, "tanh")
        d.head |= {
            **linear("classification_head.dense", "pool", "stream"),
            **linear("classification_head.out_proj", "_", "pool"),
        }
        readers.append("classification_head.dense")
    for name in ("classifier", "qa_outputs"):
        if names.has_prefix(f"{name}."):
            d.head |= linear(name, "_", "stream")
            readers.append(name)
    if readers:
        d.outputs = (
            qa_logits()
            if "qa_outputs" in readers
            else {"logits": "_ _" if "pool" in d.spaces else "_ _ _"}
        )
        d.norms.append(foldable_norm(d.head, final, *readers))
    else:
        d.outputs = {"last_hidden_state": "_ _ stream"} | (
            {"encoder_last_hidden_state": "_ _ stream"} if "head.decoder" in d.spaces else {}
        )
    return readers


def _position_bias(block: Any, inputs: Mapping[str, Any]) -> Any:
    """Compute the position bias that block 0 looks up if it receives none. With a cache it is that
    of the new tokens.
    """
    cache, length = inputs.get("past_key_values"), inputs["hidden_states"].shape[1]
    past = cache.get_seq_length() if cache is not None else 0
    return block.layer[0].SelfAttention.compute_bias(length, past + length, past_seen_tokens=past)


def boundaries(c: Config, names: Names) -> tuple[Boundary, ...]:
    base = names.prefix("transformer.")
    carried = ("hidden_states", "position_bias", "encoder_decoder_position_bias")
    encoder = {
        "hidden_states": "_ token stream",
        "attention_mask": "_ _ token token*",
        "position_bias": "_ head.encoder token token*",
    }
    decoder = {
        "hidden_states": "_ token stream",
        "attention_mask": "_ _ token _+token*",
        "position_bias": "_ head.decoder token _+token*",
        "encoder_hidden_states": "_ source stream",
        "encoder_attention_mask": "_ _ token source*",
    }
    return (
        Boundary(
            "encoder",
            f"{base}encoder.block",
            encoder,
            "_ token stream",
            carried,
            {"position_bias": _position_bias},
        ),
        Boundary(
            "decoder",
            f"{base}decoder.block",
            decoder,
            "_ token stream",
            carried,
            {"attention_mask": None, "position_bias": _position_bias},
        ),
    )


FAMILY = Family("t5", ("t5",), spec, boundaries)
