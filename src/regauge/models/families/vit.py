"""ViT and DeiT of the transformers library: pre-norm encoders on image patches. Old (v4) and new
(v5) parameter names.
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
    linear,
    neurons,
    norm,
)

V5 = {
    "layer": "layers.{i}",
    "q": "attention.q_proj",
    "k": "attention.k_proj",
    "v": "attention.v_proj",
    "o": "attention.o_proj",
    "up": "mlp.fc1",
    "down": "mlp.fc2",
}
V4 = {
    "layer": "encoder.layer.{i}",
    "q": "attention.attention.query",
    "k": "attention.attention.key",
    "v": "attention.attention.value",
    "o": "attention.output.dense",
    "up": "intermediate.dense",
    "down": "output.dense",
}


def spec(c: Config, names: Names) -> Spec:
    base = names.prefix(f"{c.model_type}.")
    naming = V4 if names.has("attention.attention.query") else V5
    d = Draft(c.model_type)
    d.spaces["stream"] = Space(
        c.hidden_size, Permutation(), folded=OrthogonalFixingOnes(), why=LAYER_NORM
    )
    d.embed = {
        f"{base}embeddings.cls_token": "_ _ stream",
        f"{base}embeddings.position_embeddings": "_1 "
        f"{c.position_rows(2 if c.model_type == 'deit' else 1)} stream",
        f"{base}embeddings.patch_embeddings.projection.weight": f"stream {c.patch_axes()}",
        f"{base}embeddings.patch_embeddings.projection.bias": "stream",
    }
    for token in ("mask_token", "distillation_token"):
        if names.has(token):
            d.embed[f"{base}embeddings.{token}"] = "_ _ stream"
    for i in range(c.num_hidden_layers):
        prefix = f"{base}{naming['layer'].format(i=i)}."
        a = attention(
            i, c.num_attention_heads, c("head_dim", c.hidden_size // c.num_attention_heads)
        )
        bias = c("qkv_bias", True)
        d.spaces |= a.spaces | {f"ffn.{i}": neurons(c.intermediate_size, c.hidden_act)}
        d.backbone |= {
            **norm(prefix + "layernorm_before"),
            **linear(prefix + naming["q"], a.q, "stream", bias),
            **linear(prefix + naming["k"], a.k, "stream", bias),
            **linear(prefix + naming["v"], a.v, "stream", bias),
            **linear(prefix + naming["o"], "stream", a.o),
            **norm(prefix + "layernorm_after"),
            **linear(prefix + naming["up"], f"ffn.{i}", "stream"),
            **linear(prefix + naming["down"], "stream", f"ffn.{i}"),
        }
        d.norms += [
            foldable_norm(
                d.backbone, prefix + "layernorm_before", *(prefix + naming[x] for x in "qkv")
            ),
            foldable_norm(d.backbone, prefix + "layernorm_after", prefix + naming["up"]),
        ]
    d.head = norm(f"{base}layernorm")
    d.outputs = {"last_hidden_state": "_ _ stream"}
    readers = []
    if names.has("pooler.dense"):
        d.spaces["pool"] = neurons(c("pooler_output_size", c.hidden_size), c("pooler_act", "tanh"))
        d.head |= linear(f"{base}pooler.dense", "pool", "stream")
        d.outputs["pooler_output"] = "_ pool"
    for name in ("classifier", "cls_classifier", "distillation_classifier"):
        if names.has_prefix(f"{name}."):
            d.head |= linear(name, "_", "stream")
            readers.append(name)
    # masked image modelling: a 1x1 convolution on the normalized stream
    if names.has_prefix("decoder.0."):
        d.head |= {"decoder.0.weight": "_ stream* _ _", "decoder.0.bias": "_"}
        readers.append("decoder.0")
    if readers:
        d.outputs = {"reconstruction": "_ _ _ _"} if readers == ["decoder.0"] else {"logits": "_ _"}
        if "distillation_classifier" in readers:
            d.outputs |= {"cls_logits": "_ _", "distillation_logits": "_ _"}
        d.norms.append(foldable_norm(d.head, f"{base}layernorm", *readers))
    d.notes.append(
        "tokens: patches may be shuffled after the position embedding; the class token is read "
        "at position 0"
    )
    return d.spec()


def boundaries(c: Config, names: Names) -> tuple[Boundary, ...]:
    base = names.prefix(f"{c.model_type}.")
    return (
        Boundary(
            "",
            f"{base}layers",
            {"hidden_states": "_ token stream", "attention_mask": "_ _ token token*"},
            "_ token stream",
        ),
    )


FAMILY = Family("vit", ("vit", "deit"), spec, boundaries)
