"""Mixtral: Llama with experts. Experts come in any order, and each has its own gated FFN.

In memory the experts are fused, one tensor for all; on disk each expert has its own tensors, which
the braces in a name denote as a stack.
"""

from __future__ import annotations

from regauge.core.groups import Orthogonal, Permutation, Rotary, SignedPermutation
from regauge.core.spec import Norm, Space, Spec
from regauge.models.families import llama
from regauge.models.families.family import Family
from regauge.models.families.pieces import (
    RMS_NORM,
    Config,
    Draft,
    Names,
    foldable_norm,
    linear,
    neurons,
    norm,
)


def spec(c: Config, names: Names) -> Spec:
    base = names.prefix("model.")
    d = Draft("mixtral", buffers=(r".*rotary_emb\.inv_freq",))
    d.spaces["stream"] = Space(
        c.hidden_size, SignedPermutation(), folded=Orthogonal(), why=RMS_NORM
    )
    d.embed = {f"{base}embed_tokens.weight": f"{c.axis('vocab_size')} stream"}
    for i in range(c.num_hidden_layers):
        prefix = f"{base}layers.{i}."
        a = llama.add_attention(d, c, i, Rotary("half"))
        expert, ffn = f"expert.{i}", f"ffn.{i}"
        d.spaces[expert] = Space(
            c.num_local_experts,
            Permutation(),
            why="the router addresses experts by index: any order",
        )
        d.spaces[ffn] = neurons(
            c.intermediate_size, c("hidden_act", "silu"), gated=True, over=expert
        )
        if names.has("block_sparse_moe."):
            moe = prefix + "block_sparse_moe."
            expert_prefix = f"{moe}experts.{{{expert}}}."
            readers = {
                moe + "gate.weight": f"{expert} stream*",
                expert_prefix + "w1.weight": f"{expert} |{ffn}| stream*",
                expert_prefix + "w3.weight": f"{expert} {ffn} stream*",
            }
            writers = {expert_prefix + "w2.weight": f"{expert} stream {ffn}*"}
        else:
            moe = prefix + "mlp."
            readers = {
                moe + "gate.weight": f"{expert} stream*",
                moe + "experts.gate_up_proj": f"{expert} |{ffn}|+{ffn} stream*",
            }
            writers = {moe + "experts.down_proj": f"{expert} stream {ffn}*"}
        d.backbone |= {
            **norm(prefix + "input_layernorm", bias=False),
            **linear(prefix + "self_attn.q_proj", a.q, "stream", bias=False),
            **linear(prefix + "self_attn.k_proj", a.k, "stream", bias=False),
            **linear(prefix + "self_attn.v_proj", a.v, "stream", bias=False),
            **linear(prefix + "self_attn.o_proj", "stream", a.o, bias=False),
            **norm(prefix + "post_attention_layernorm", bias=False),
            **readers,
            **writers,
        }
        d.norms += [
            foldable_norm(
                d.backbone,
                prefix + "input_layernorm",
                *(prefix + f"self_attn.{x}_proj" for x in "qkv"),
            ),
            Norm(
                prefix + "post_attention_layernorm.weight",
                None,
                tuple((reader, None) for reader in readers),
            ),
        ]
    llama.add_language_head(d, c, names, base)
    return d.spec()


FAMILY = Family("mixtral", ("mixtral",), spec, llama.boundaries)
