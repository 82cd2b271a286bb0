"""A new family in 40 lines: GPT-NeoX, which regauge does not ship. The law checker tests it.

python examples/new_family.py       # some seconds
"""

from dataclasses import replace

from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

import regauge
from regauge.core.fold import fold_norms
from regauge.core.groups import GeneralLinear, OrthogonalFixingOnes, Permutation, Rotary
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
from regauge.testing import assert_symmetry


def spec(c: Config, names: Names) -> Spec:
    d = Draft("gpt-neox", buffers=(r".*rotary_emb\.inv_freq",))
    larger = OrthogonalFixingOnes()  # after the gains of the norms are folded
    d.spaces["stream"] = Space(c.hidden_size, Permutation(), folded=larger, why=LAYER_NORM)
    d.embed = {"gpt_neox.embed_in.weight": f"{c.axis('vocab_size')} stream"}
    for i in range(c.num_hidden_layers):
        at = f"gpt_neox.layers.{i}."
        heads, width = c.num_attention_heads, c.hidden_size // c.num_attention_heads
        a = attention(i, heads, width, qk=Rotary("half"))
        d.spaces |= a.spaces | {f"ffn.{i}": neurons(c.intermediate_size, c("hidden_act", "gelu"))}
        # query, key and value of each head are adjacent, head after head
        fused = f"(head.{i} (qk.{i}+qk.{i}*+vo.{i}))"
        block = {
            **norm(at + "input_layernorm"),
            **linear(at + "attention.query_key_value", fused, "stream"),
            **linear(at + "attention.dense", "stream", a.o),
            **norm(at + "post_attention_layernorm"),
            **linear(at + "mlp.dense_h_to_4h", f"ffn.{i}", "stream"),
            **linear(at + "mlp.dense_4h_to_h", "stream", f"ffn.{i}"),
        }
        d.backbone |= block
        d.norms += [
            foldable_norm(block, at + "input_layernorm", at + "attention.query_key_value"),
            foldable_norm(block, at + "post_attention_layernorm", at + "mlp.dense_h_to_4h"),
        ]
    head = "lm_head" if names.has_prefix("lm_head.") else "embed_out"  # newer and older versions
    words = linear(head, c.axis("vocab_size"), "stream", bias=False)
    d.head = norm("gpt_neox.final_layer_norm") | words
    d.norms.append(foldable_norm(d.head, "gpt_neox.final_layer_norm", head))
    d.outputs = {"logits": "_ _ _"}
    return d.spec()


def boundaries(c: Config, names: Names) -> tuple[Boundary, ...]:
    stream, mask = "_ token stream", {"attention_mask": "_ _ token _+token*"}
    enter = {"hidden_states": stream, **mask, "position_embeddings": "_ token _"}
    return (Boundary("", "gpt_neox.layers", enter, stream, implicit={"attention_mask": None}),)


# In regauge: one file, and one entry in the tuple FAMILIES.
FAMILY = Family("gpt-neox", ("gpt_neox",), spec, boundaries)

if __name__ == "__main__":
    import torch

    torch.manual_seed(0)
    sizes = {"vocab_size": 30, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
    small = GPTNeoXConfig(**sizes, intermediate_size=40, rotary_pct=1.0)
    model = GPTNeoXForCausalLM(small).double().eval()
    with torch.no_grad():
        for p in model.parameters():  # gains and biases that are not ones and zeros
            p.add_(0.3 * torch.randn_like(p))
    state = model.state_dict()
    config = {**small.to_dict(), "architectures": ["GPTNeoXForCausalLM"]}
    described = FAMILY.spec(Config(config), Names(state))
    assert regauge.check(described, state) == [], "every tensor, every size"
    inputs = {"input_ids": torch.randint(0, 30, (2, 7))}
    assert_symmetry(model, described, regauge.element(described, key=1), inputs)
    folded, state = fold_norms(described, state)
    model.load_state_dict(state)
    assert_symmetry(model, folded, regauge.element(folded, key=1), inputs)

    # A false claim: with rotary positions, queries and keys do not allow every invertible matrix.
    spaces = {**described.spaces, "qk.0": Space(8, GeneralLinear(), over="head.0")}
    too_much = replace(described, spaces=spaces)
    try:
        assert_symmetry(model, too_much, regauge.element(too_much, key=1, spaces=["qk.0"]), inputs)
    except AssertionError as error:
        first = str(error).splitlines()[0]
        print(f"{len(spaces)} spaces hold, folded and not; the false claim fails: {first}")
    else:
        raise SystemExit("the false claim was accepted")
