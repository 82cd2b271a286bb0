"""Gemma 2: a decoder like Llama with norms on both sides of every branch. The gains behind a branch
act on the stream and cannot be folded.
"""

from __future__ import annotations

from regauge.core.groups import Rotary, SignedPermutation
from regauge.core.spec import Space, Spec
from regauge.models.families import llama
from regauge.models.families.family import Family
from regauge.models.families.pieces import Config, Draft, Names, linear, neurons, norm

SANDWICH = (
    "RMSNorm gains (stored as 1 + w) also stand behind every branch, on the stream "
    "itself: signed permutations only, and no folding helps"
)


def spec(c: Config, names: Names) -> Spec:
    base = names.prefix("model.")
    d = Draft("gemma2", buffers=(r".*rotary_emb\.inv_freq",))
    d.spaces["stream"] = Space(c.hidden_size, SignedPermutation(), why=SANDWICH)
    d.embed = {f"{base}embed_tokens.weight": f"{c.axis('vocab_size')} stream"}
    bias = c("attention_bias", False)
    for i in range(c.num_hidden_layers):
        prefix = f"{base}layers.{i}."
        a = llama.add_attention(d, c, i, Rotary("half"))
        d.spaces[f"ffn.{i}"] = neurons(
            c.intermediate_size, c("hidden_activation", "gelu_pytorch_tanh"), gated=True
        )
        d.backbone |= {
            **norm(prefix + "input_layernorm", bias=False),
            **linear(prefix + "self_attn.q_proj", a.q, "stream", bias),
            **linear(prefix + "self_attn.k_proj", a.k, "stream", bias),
            **linear(prefix + "self_attn.v_proj", a.v, "stream", bias),
            **linear(prefix + "self_attn.o_proj", "stream", a.o, bias),
            **norm(prefix + "post_attention_layernorm", bias=False),
            **norm(prefix + "pre_feedforward_layernorm", bias=False),
            **linear(prefix + "mlp.gate_proj", f"|ffn.{i}|", "stream", bias=False),
            **linear(prefix + "mlp.up_proj", f"ffn.{i}", "stream", bias=False),
            **linear(prefix + "mlp.down_proj", "stream", f"ffn.{i}", bias=False),
            **norm(prefix + "post_feedforward_layernorm", bias=False),
        }
    llama.add_language_head(
        d, Config({"tie_word_embeddings": True, **c.values}), names, base, fold=False
    )
    return d.spec()


FAMILY = Family("gemma2", ("gemma2",), spec, llama.boundaries)
