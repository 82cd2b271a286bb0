"""GPT-2 of the transformers library: pre-norm decoder, fused qkv in Conv1D layout, learned
positions, tied head.
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
    conv1d,
    foldable_norm,
    linear,
    neurons,
    norm,
    qa_logits,
)


def spec(c: Config, names: Names) -> Spec:
    base = names.prefix("transformer.")
    width = c.n_embd
    d = Draft(
        "gpt2",
        buffers=(r".*h\.\d+\.attn\.(masked_)?bias", r".*h\.\d+\.crossattention\.(masked_)?bias"),
    )
    d.spaces["stream"] = Space(width, Permutation(), folded=OrthogonalFixingOnes(), why=LAYER_NORM)
    d.embed = {
        f"{base}wte.weight": f"{c.axis('vocab_size')} stream",
        f"{base}wpe.weight": f"{c.axis('n_positions')} stream",
    }
    for i in range(c.n_layer):
        prefix = f"{base}h.{i}."
        a = attention(i, c.n_head, width // c.n_head)
        d.spaces |= a.spaces | {
            f"ffn.{i}": neurons(c("n_inner", 4 * width), c("activation_function", "gelu_new"))
        }
        d.backbone |= {
            **norm(prefix + "ln_1"),
            **conv1d(prefix + "attn.c_attn", f"{a.q}+{a.k}+{a.v}", "stream"),
            **conv1d(prefix + "attn.c_proj", "stream", a.o),
            **norm(prefix + "ln_2"),
            **conv1d(prefix + "mlp.c_fc", f"ffn.{i}", "stream"),
            **conv1d(prefix + "mlp.c_proj", "stream", f"ffn.{i}"),
        }
        d.norms += [
            foldable_norm(d.backbone, prefix + "ln_1", prefix + "attn.c_attn"),
            foldable_norm(d.backbone, prefix + "ln_2", prefix + "mlp.c_fc"),
        ]
    d.head = norm(f"{base}ln_f")
    d.outputs = {"last_hidden_state": "_ _ stream"}
    readers = []
    if c.architecture in ("GPT2LMHeadModel", "GPT2DoubleHeadsModel") or names.has_prefix(
        "lm_head."
    ):
        d.head |= linear("lm_head", c.axis("vocab_size"), "stream", bias=False)
        if c("tie_word_embeddings", True):
            d.ties["lm_head.weight"] = f"{base}wte.weight"
        readers.append("lm_head")
    for name, bias in (
        ("score", False),
        ("classifier", True),
        ("qa_outputs", True),
        ("multiple_choice_head.summary", True),
    ):
        if names.has_prefix(f"{name}."):
            d.head |= linear(name, "_", "stream", bias)
            readers.append(name)
    if readers:
        d.outputs = (
            qa_logits()
            if readers == ["qa_outputs"]
            else {"logits": "_ _" if readers == ["score"] else "_ _ _"}
        )
        if "multiple_choice_head.summary" in readers:  # ids have an axis of choices
            d.outputs = {"logits": "_ _ _ _", "mc_logits": "_ _"}
        d.norms.append(foldable_norm(d.head, f"{base}ln_f", *readers))
    d.notes.append(
        "tokens: rows may be permuted together with the 4-D causal mask and the position ids"
    )
    return d.spec()


def boundaries(c: Config, names: Names) -> tuple[Boundary, ...]:
    base = names.prefix("transformer.")
    enter = {
        "hidden_states": "_ token stream",
        "attention_mask": "_ _ token _+token*",
        "position_ids": "_ token",
    }
    return (Boundary("", f"{base}h", enter, "_ token stream", implicit={"attention_mask": None}),)


FAMILY = Family("gpt2", ("gpt2",), spec, boundaries)
