"""BERT, RoBERTa (and XLM-RoBERTa, CamemBERT) and DistilBERT: post-norm encoders. LayerNorm gains
act on the stream itself, so nothing folds.
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
    attention,
    linear,
    neurons,
    norm,
    qa_logits,
    use_old_norm_names,
)

BASE = {
    "bert": "bert.",
    "roberta": "roberta.",
    "xlm-roberta": "roberta.",
    "camembert": "roberta.",
    "distilbert": "distilbert.",
}
TABLES = {
    "word_embeddings": "vocab_size",
    "position_embeddings": "max_position_embeddings",
    "token_type_embeddings": "type_vocab_size",
}
BERT = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "inner": "intermediate_size",
    "act": "hidden_act",
    "layer": "encoder.layer",
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "o": "attention.output.dense",
    "norm1": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "norm2": "output.LayerNorm",
}
DISTILBERT = {
    "layers": "n_layers",
    "width": "dim",
    "heads": "n_heads",
    "inner": "hidden_dim",
    "act": "activation",
    "layer": "transformer.layer",
    "q": "attention.q_lin",
    "k": "attention.k_lin",
    "v": "attention.v_lin",
    "o": "attention.out_lin",
    "norm1": "sa_layer_norm",
    "up": "ffn.lin1",
    "down": "ffn.lin2",
    "norm2": "output_layer_norm",
}


def spec(c: Config, names: Names) -> Spec:
    naming = DISTILBERT if c.model_type == "distilbert" else BERT
    base = names.prefix(BASE[c.model_type])
    width, heads = getattr(c, naming["width"]), getattr(c, naming["heads"])
    d = Draft(c.model_type, buffers=(r".*embeddings\.(position|token_type)_ids",))
    d.spaces["stream"] = Space(width, Permutation(), why=POST_NORM)
    for table, rows in TABLES.items():
        if names.has(table):
            d.embed[f"{base}embeddings.{table}.weight"] = f"{c.axis(rows)} stream"
    d.embed |= norm(f"{base}embeddings.LayerNorm")
    for i in range(getattr(c, naming["layers"])):
        prefix = f"{base}{naming['layer']}.{i}."
        a = attention(i, heads, width // heads)
        d.spaces |= a.spaces | {
            f"ffn.{i}": neurons(getattr(c, naming["inner"]), c(naming["act"], "gelu"))
        }
        d.backbone |= {
            **linear(prefix + naming["q"], a.q, "stream"),
            **linear(prefix + naming["k"], a.k, "stream"),
            **linear(prefix + naming["v"], a.v, "stream"),
            **linear(prefix + naming["o"], "stream", a.o),
            **norm(prefix + naming["norm1"]),
            **linear(prefix + naming["up"], f"ffn.{i}", "stream"),
            **linear(prefix + naming["down"], "stream", f"ffn.{i}"),
            **norm(prefix + naming["norm2"]),
        }
    add_heads(d, c, names, base, width)
    d.embed, d.backbone, d.head = (
        use_old_norm_names(part, names) for part in (d.embed, d.backbone, d.head)
    )
    d.notes.append(
        "tokens: rows may be permuted together with the padding mask, the position ids and the "
        "segment ids"
    )
    return d.spec()


def add_heads(d: Draft, c: Config, names: Names, base: str, width: int) -> None:
    """Add the heads. One name may read different spaces: BERT's `classifier` reads the pooler if
    there is one.
    """
    d.outputs = {"last_hidden_state": "_ _ stream"}
    has_masked_head = add_masked_language_head(
        d, c, names, f"{base}embeddings.word_embeddings.weight", width
    )
    if names.has_prefix(f"{base}pooler.dense."):
        d.spaces["pool"] = neurons(width, "tanh")
        d.head |= linear(f"{base}pooler.dense", "pool", "stream")
        d.outputs["pooler_output"] = "_ pool"
    if names.has_prefix("pre_classifier."):
        d.spaces["pool"] = neurons(width, "relu")
        d.head |= linear("pre_classifier", "pool", "stream")
    if names.has_prefix("classifier.dense."):
        d.spaces["cls"] = neurons(width, "tanh")
        d.head |= {
            **linear("classifier.dense", "cls", "stream"),
            **linear("classifier.out_proj", "_", "cls"),
        }
        d.outputs = {"logits": "_ _"}
    pooled = "pool" in d.spaces and not c.architecture.endswith("ForTokenClassification")
    for name, input_space in (
        ("classifier", "pool" if pooled else "stream"),
        ("cls.seq_relationship", "pool"),
        ("qa_outputs", "stream"),
    ):
        if f"{name}.weight" in names.names:
            d.head |= linear(name, "_", input_space)
            d.outputs = (
                qa_logits()
                if name == "qa_outputs"
                else {"logits": "_ _" if input_space == "pool" else "_ _ _"}
            )
    if (
        has_masked_head
    ):  # BertForMaskedLM leaves out the other head, which its checkpoints may carry
        has_both = "cls.seq_relationship.weight" in d.head and not c.architecture.endswith(
            "ForMaskedLM"
        )
        d.outputs = (
            {"prediction_logits": "_ _ _", "seq_relationship_logits": "_ _"}
            if has_both
            else {"logits": "_ _ _"}
        )


MASKED_HEADS = (  # dense, norm, decoder, bias
    (
        "cls.predictions.transform.dense",
        "cls.predictions.transform.LayerNorm",
        "cls.predictions.decoder",
        "cls.predictions.bias",
    ),
    ("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias"),
    ("vocab_transform", "vocab_layer_norm", "vocab_projector", ""),
)


def add_masked_language_head(d: Draft, c: Config, names: Names, table: str, width: int) -> bool:
    """Add the masked language head, if there is one, and return whether there is. Tied, its
    activation and norm use the table's space; untied, a space `mlm`.
    """
    for dense, layer_norm, decoder, bias in MASKED_HEADS:
        if names.has_prefix(f"{dense}."):
            tied, words = c("tie_word_embeddings", True), c.axis("vocab_size")
            space = d.embed[table].split()[-1] if tied else "mlm"
            if not tied:
                d.spaces["mlm"] = Space(
                    width, Permutation(), why="a LayerNorm with gains follows the activation"
                )
            d.head |= {
                **linear(dense, space, "stream"),
                **norm(layer_norm, space),
                f"{decoder}.weight": f"{words} {space}*",
            }
            if bias:
                d.head[bias] = words
            if tied or f"{decoder}.bias" in names.names:
                d.head[f"{decoder}.bias"] = words
            if tied:
                d.ties |= {f"{decoder}.weight": table} | ({f"{decoder}.bias": bias} if bias else {})
            return True
    return False


def boundaries(c: Config, names: Names) -> tuple[Boundary, ...]:
    naming = DISTILBERT if c.model_type == "distilbert" else BERT
    enter = {"hidden_states": "_ token stream", "attention_mask": "_ _ token token*"}
    implicit = {"attention_mask": None} if c("is_decoder", False) else {}
    return (
        Boundary(
            "",
            f"{names.prefix(BASE[c.model_type])}{naming['layer']}",
            enter,
            "_ token stream",
            implicit=implicit,
        ),
    )


FAMILY = Family("bert", tuple(BASE), spec, boundaries)
