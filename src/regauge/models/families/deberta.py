"""DeBERTa-v2 and v3: post-norm encoders whose attention also reads a table of relative positions,
as queries and as keys.
"""

from __future__ import annotations

import re

from regauge.core.groups import GeneralLinear, OrthogonalFixingOnes, Permutation
from regauge.core.spec import Space, Spec
from regauge.models.families.bert import TABLES, add_masked_language_head
from regauge.models.families.family import Boundary, Family
from regauge.models.families.pieces import (
    LAYER_NORM,
    POST_NORM,
    Config,
    Draft,
    Names,
    attention,
    foldable_norm,
    linear,
    neurons,
    norm,
    qa_logits,
    use_old_norm_names,
)


def spec(c: Config, names: Names) -> Spec:
    base = names.prefix("deberta.")
    width, heads = c.hidden_size, c.num_attention_heads
    d = Draft("deberta-v2", buffers=(r".*embeddings\.position_ids",))
    d.spaces["stream"] = Space(width, Permutation(), why=POST_NORM)
    embed = add_embeddings(d, c, names, base)
    for i in range(c.num_hidden_layers):
        prefix = f"{base}encoder.layer.{i}."
        # keys meet relative positions too
        a = attention(i, heads, c("attention_head_size", width // heads), dot_product_only=False)
        d.spaces |= a.spaces | {f"ffn.{i}": neurons(c.intermediate_size, c("hidden_act", "gelu"))}
        d.backbone |= {
            **linear(prefix + "attention.self.query_proj", a.q, "stream"),
            **linear(prefix + "attention.self.key_proj", a.k, "stream"),
            **linear(prefix + "attention.self.value_proj", a.v, "stream"),
            **linear(prefix + "attention.output.dense", "stream", a.o),
            **norm(prefix + "attention.output.LayerNorm"),
            **linear(prefix + "intermediate.dense", f"ffn.{i}", "stream"),
            **linear(prefix + "output.dense", "stream", f"ffn.{i}"),
            **norm(prefix + "output.LayerNorm"),
        }
        for name, out in (("pos_query_proj", a.q), ("pos_key_proj", a.k)):
            if names.has_prefix(f"{prefix}attention.self.{name}."):
                d.backbone |= linear(f"{prefix}attention.self.{name}", out, "rel")
    add_relative_positions(d, names, base, width)
    if names.has_prefix(f"{base}encoder.conv."):  # reads the stream before block 0, writes it after
        conv = f"{base}encoder.conv."
        d.backbone |= {
            conv + "conv.weight": "stream stream* _",
            conv + "conv.bias": "stream",
            **norm(conv + "LayerNorm"),
        }
        d.notes.append(
            "cut: the convolution stands between the blocks and reads what entered the first of "
            "them, so the model has no boundary"
        )
    add_heads(d, c, names, base, embed)
    if names.has_prefix(f"{base}encoder.conv.") and c("conv_groups", 1) > 1:
        split_stream_into_groups(d, f"{base}encoder.conv.conv.weight", int(c.conv_groups), width)
    d.embed, d.backbone, d.head = (
        use_old_norm_names(part, names) for part in (d.embed, d.backbone, d.head)
    )
    d.notes.append(
        "tokens: rows may be permuted inside the encoder, with the mask and the relative "
        "positions that it computes"
    )
    return d.spec()


def split_stream_into_groups(d: Draft, weight: str, groups: int, width: int) -> None:
    """Split the stream into the groups of a grouped convolution: the groups and the channels inside
    them come in any order.

    An order for each group would be a symmetry too. The notation has one order for all: the
    kernel's second axis lists the channels of the group that a row of its first axis belongs to,
    and one member per group requires the group as a separate axis, or before it in the same axis.
    """
    why = "a convolution mixes channels within groups"
    d.spaces["group"] = Space(groups, Permutation(), why=why)
    d.spaces["stream"] = Space(width // groups, Permutation(), why=f"{POST_NORM}; {why}")
    for part in (d.embed, d.backbone, d.head, d.outputs):
        for name, axes in part.items():
            part[name] = re.sub(r"(\|?)\bstream\b(\|?)(\*?)", r"(group \1stream\2)\3", axes)
    d.backbone[weight] = "(group stream) stream* _"


def add_embeddings(d: Draft, c: Config, names: Names, base: str) -> int:
    """Add the embedding tables, in the stream or, if a projection follows, in a space `embed`.
    Returns their width.
    """
    width = int(c("embedding_size", c.hidden_size))
    space = "stream" if width == c.hidden_size else "embed"
    if space == "embed":
        is_tied_mlm = names.has_prefix("cls.predictions.") and c("tie_word_embeddings", True)
        why = (
            "the tied head's activation and norm act on it"
            if is_tied_mlm
            else "a linear layer reads the sum of the tables"
        )
        d.spaces["embed"] = Space(width, Permutation() if is_tied_mlm else GeneralLinear(), why=why)
        d.embed |= linear(f"{base}embeddings.embed_proj", "stream", "embed", bias=False)
    for table, rows in TABLES.items():
        if names.has_prefix(f"{base}embeddings.{table}."):
            d.embed[f"{base}embeddings.{table}.weight"] = f"{c.axis(rows)} {space}"
    d.embed |= norm(f"{base}embeddings.LayerNorm")
    return width


def add_relative_positions(d: Draft, names: Names, base: str, width: int) -> None:
    """Add the table of relative positions: in a space `rel` if it has separate readers, else in the
    stream, whose projections it shares.
    """
    readers = [
        n.removesuffix(".weight") for n, axes in d.backbone.items() if axes.endswith(" rel*")
    ]
    space, has_norm = "rel" if readers else "stream", names.has_prefix(f"{base}encoder.LayerNorm.")
    if names.has_prefix(f"{base}encoder.rel_embeddings."):
        d.embed[f"{base}encoder.rel_embeddings.weight"] = f"_ {space}"
    if has_norm:  # also present without relative attention
        d.embed |= norm(f"{base}encoder.LayerNorm", space)
    if readers and has_norm:
        d.spaces["rel"] = Space(width, Permutation(), folded=OrthogonalFixingOnes(), why=LAYER_NORM)
        if not names.has("LayerNorm.gamma"):
            d.norms.append(
                foldable_norm(d.embed | d.backbone, f"{base}encoder.LayerNorm", *readers)
            )
    elif readers:
        d.spaces["rel"] = Space(width, GeneralLinear(), why="linear layers read the table")


def add_heads(d: Draft, c: Config, names: Names, base: str, embed: int) -> None:
    """Add the heads and the outputs."""
    has_masked_head = add_masked_language_head(
        d, c, names, f"{base}embeddings.word_embeddings.weight", embed
    )
    if names.has_prefix("lm_predictions."):  # multiplies with the word table itself
        lm = "lm_predictions.lm_head."
        d.head |= {
            **linear(lm + "dense", "stream", "stream"),
            **norm(lm + "LayerNorm"),
            lm + "bias": c.axis("vocab_size"),
        }
        # the first versions of transformers 5 have the table under a second name
        if f"{lm}weight" in names.names:
            d.head[f"{lm}weight"], d.ties[f"{lm}weight"] = (
                f"{c.axis('vocab_size')} stream*",
                f"{base}embeddings.word_embeddings.weight",
            )
        has_masked_head = True
    # v3's discriminator, which checkpoints contain and no class reads
    if names.has_prefix("mask_predictions."):
        d.spaces["mask"] = Space(
            c.hidden_size, Permutation(), why="a LayerNorm with gains follows the activation"
        )
        mask = "mask_predictions."
        d.head |= {
            **linear(mask + "dense", "mask", "stream"),
            **norm(mask + "LayerNorm", "mask"),
            **linear(mask + "classifier", "_", "mask"),
        }
    if names.has_prefix("pooler.dense."):
        d.spaces["pool"] = neurons(
            c("pooler_hidden_size", c.hidden_size), c("pooler_hidden_act", "gelu")
        )
        d.head |= linear("pooler.dense", "pool", "stream")
    d.outputs = {"logits": "_ _ _"} if has_masked_head else {"last_hidden_state": "_ _ stream"}
    for name, input_space in (
        ("classifier", "pool" if "pool" in d.spaces else "stream"),
        ("qa_outputs", "stream"),
    ):
        if names.has_prefix(f"{name}."):
            d.head |= linear(name, "_", input_space)
            d.outputs = (
                qa_logits()
                if name == "qa_outputs"
                else {"logits": "_ _" if input_space == "pool" else "_ _ _"}
            )


def boundaries(c: Config, names: Names) -> tuple[Boundary, ...]:
    base = names.prefix("deberta.")
    # the convolution stands between the blocks and reads what entered the first of them
    if names.has_prefix(f"{base}encoder.conv."):
        return ()
    rel = "rel" if names.has("attention.self.pos_") else "stream"
    enter = {
        "hidden_states": "_ token stream",
        "attention_mask": "_ _ token token*",
        "relative_pos": "_ token token*",
        "rel_embeddings": f"_ {rel}",
    }
    return (Boundary("", f"{base}encoder.layer", enter, "_ token stream", ("hidden_states", "")),)


FAMILY = Family("deberta", ("deberta-v2",), spec, boundaries)
