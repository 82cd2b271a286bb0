"""Llama and similar models (Mistral, Qwen2, Qwen3): pre-norm decoders with RMSNorm, rotary
positions, grouped queries and a gated FFN.
"""

from __future__ import annotations

from regauge.core.groups import Group, Orthogonal, PlaneSigns, Rotary, SignedPermutation
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
    hole,
    linear,
    neurons,
    norm,
    qa_logits,
)

QKV_BIAS = {"llama": "attention_bias", "qwen3": "attention_bias"}


def spec(c: Config, names: Names) -> Spec:
    # only LlamaForQuestionAnswering uses transformer.
    base = names.prefix("model.") or names.prefix("transformer.")
    kind = c.model_type
    d = Draft(kind, buffers=(r".*rotary_emb\.inv_freq",))
    d.spaces["stream"] = Space(
        c.hidden_size, SignedPermutation(), folded=Orthogonal(), why=RMS_NORM
    )
    d.embed = {f"{base}embed_tokens.weight": f"{c.axis('vocab_size')} stream"}
    bias = True if kind == "qwen2" else bool(c(QKV_BIAS.get(kind, ""), False))
    qk: Group = PlaneSigns("half") if kind == "qwen3" else Rotary("half")
    for i in range(c.num_hidden_layers):
        d.backbone |= block_tensors(
            d, c, f"{base}layers.{i}.", i, qk, bias=bias, out_bias=bias and kind != "qwen2"
        )
    add_language_head(d, c, names, base)
    return d.spec()


def block_tensors(
    d: Draft, c: Config, prefix: str, i: int, qk: Group, bias: bool, out_bias: bool
) -> dict[str, str]:
    """Add the spaces and norms of one block, and return its tensors."""
    a = add_attention(d, c, i, qk)
    mlp_bias = bool(c("mlp_bias", False))
    d.spaces[f"ffn.{i}"] = neurons(c.intermediate_size, c("hidden_act", "silu"), gated=True)
    block = {
        **norm(prefix + "input_layernorm", bias=False),
        **linear(prefix + "self_attn.q_proj", a.q, "stream", bias),
        **linear(prefix + "self_attn.k_proj", a.k, "stream", bias),
        **linear(prefix + "self_attn.v_proj", a.v, "stream", bias),
        **linear(prefix + "self_attn.o_proj", "stream", a.o, out_bias),
        **norm(prefix + "post_attention_layernorm", bias=False),
        **linear(prefix + "mlp.gate_proj", f"|ffn.{i}|", "stream", mlp_bias),
        **linear(prefix + "mlp.up_proj", f"ffn.{i}", "stream", mlp_bias),
        **linear(prefix + "mlp.down_proj", "stream", f"ffn.{i}", mlp_bias),
    }
    # gains on the head axis, shared by all heads: they commute with a sign for each plane
    if isinstance(qk, PlaneSigns):
        block |= {
            f"{prefix}self_attn.{x}_norm.weight": hole(d.spaces[f"qk.{i}"].size, "head_dim")
            for x in "qk"
        }
    d.norms += [
        foldable_norm(
            block, prefix + "input_layernorm", *(prefix + f"self_attn.{x}_proj" for x in "qkv")
        ),
        foldable_norm(
            block,
            prefix + "post_attention_layernorm",
            prefix + "mlp.gate_proj",
            prefix + "mlp.up_proj",
        ),
    ]
    return block


def add_attention(d: Draft, c: Config, i: int, qk: Group) -> Attention:
    """Add the spaces of an attention layer."""
    heads = c.num_attention_heads
    a = attention(
        i, heads, c("head_dim", c.hidden_size // heads), kv=c("num_key_value_heads", heads), qk=qk
    )
    d.spaces |= a.spaces
    return a


def add_language_head(d: Draft, c: Config, names: Names, base: str, fold: bool = True) -> None:
    """Add the final norm and its readers: the language head (tied or not), or a classifier."""
    d.head |= norm(f"{base}norm", bias=False)
    d.outputs = {"last_hidden_state": "_ _ stream"}
    readers = []
    if c.architecture.endswith("ForCausalLM") or names.has_prefix("lm_head."):
        d.head |= linear("lm_head", c.axis("vocab_size"), "stream", bias=False)
        if c("tie_word_embeddings", False):
            d.ties["lm_head.weight"] = f"{base}embed_tokens.weight"
        readers.append("lm_head")
    classifies_tokens = names.has_prefix(
        "score.bias"
    )  # token classifiers have a bias, sequence classifiers do not
    for name, bias in (("score", classifies_tokens), ("qa_outputs", True)):
        if names.has_prefix(f"{name}."):
            d.head |= linear(name, "_", "stream", bias)
            readers.append(name)
    if readers:
        d.outputs = (
            qa_logits()
            if readers == ["qa_outputs"]
            else {"logits": "_ _" if readers == ["score"] and not classifies_tokens else "_ _ _"}
        )
        if fold:
            d.norms.append(foldable_norm(d.head, f"{base}norm", *readers))
    d.notes.append(
        "tokens: rows may be permuted together with the 4-D causal mask and the position ids"
    )


def boundaries(c: Config, names: Names) -> tuple[Boundary, ...]:
    base = names.prefix("model.") or names.prefix("transformer.")
    enter = {
        "hidden_states": "_ token stream",
        "attention_mask": "_ _ token _+token*",
        "position_ids": "_ token",
        "position_embeddings": "_ token _",
    }
    return (
        Boundary("", f"{base}layers", enter, "_ token stream", implicit={"attention_mask": None}),
    )


FAMILY = Family("llama", ("llama", "mistral", "qwen2", "qwen3"), spec, boundaries)
