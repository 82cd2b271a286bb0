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
        at = f"{base}encoder.layer.{i}."
        a = attention(
            i, heads, c("attention_head_size", width // heads), dot_product_only=False
        )  # keys meet relative positions too
        d.spaces |= a.spaces | {f"ffn.{i}": neurons(c.intermediate_size, c("hidden_act", "gelu"))}
        d.backbone |= {
            **linear(at + "attention.self.query_proj", a.q, "stream"),
            **linear(at + "attention.self.key_proj", a.k, "stream"),
            **linear(at + "attention.self.value_proj", a.v, "stream"),
            **linear(at + "attention.output.dense", "stream", a.o),
            **norm(at + "attention.output.LayerNorm"),
            **linear(at + "intermediate.dense", f"ffn.{i}", "stream"),
            **linear(at + "output.dense", "stream", f"ffn.{i}"),
            **norm(at + "output.LayerNorm"),
        }
        for name, out in (("pos_query_proj", a.q), ("pos_key_proj", a.k)):
            if names.has_prefix(f"{at}attention.self.{name}."):
                d.backbone |= linear(f"{at}attention.self.{name}", out, "rel")
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
            "them, so there is no boundary"
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
    """A convolution in groups divides the stream: its groups come in any order, and so do the
    channels inside of them.

    An order for each group would be a symmetry too. The notation has one order for all: the
    kernel's second axis lists the channels of the group that a row of its first axis is in, and a
    member for each group needs the group as an axis of its own, or in front in the same axis.
    """
    why = "a convolution mixes channels within groups"
    d.spaces["group"] = Space(groups, Permutation(), why=why)
    d.spaces["stream"] = Space(width // groups, Permutation(), why=f"{POST_NORM}; {why}")
    for part in (d.embed, d.backbone, d.head, d.outputs):
        for name, axes in part.items():
            part[name] = re.sub(r"(\|?)\bstream\b(\|?)(\*?)", r"(group \1stream\2)\3", axes)
    d.backbone[weight] = "(group stream) stream* _"


def add_embeddings(d: Draft, c: Config, names: Names, base: str) -> int:
    """The tables live in the stream, or in a space `embed` of their own if a projection follows.
    Returns their width.
    """
    width = int(c("embedding_size", c.hidden_size))
    space = "stream" if width == c.hidden_size else "embed"
    if space == "embed":
        masked = names.has_prefix("cls.predictions.") and c("tie_word_embeddings", True)
        why = (
            "the tied head's activation and norm act on it"
            if masked
            else "a linear layer reads the sum of the tables"
        )
        d.spaces["embed"] = Space(width, Permutation() if masked else GeneralLinear(), why=why)
        d.embed |= linear(f"{base}embeddings.embed_proj", "stream", "embed", bias=False)
    for table, rows in TABLES.items():
        if names.has_prefix(f"{base}embeddings.{table}."):
            d.embed[f"{base}embeddings.{table}.weight"] = f"{c.axis(rows)} {space}"
    d.embed |= norm(f"{base}embeddings.LayerNorm")
    return width


def add_relative_positions(d: Draft, names: Names, base: str, width: int) -> None:
    """The table of relative positions: in a space `rel` where it has readers of its own, else in
    the stream, whose projections it shares.
    """
    readers = [
        n.removesuffix(".weight") for n, axes in d.backbone.items() if axes.endswith(" rel*")
    ]
    space, normed = "rel" if readers else "stream", names.has_prefix(f"{base}encoder.LayerNorm.")
    if names.has_prefix(f"{base}encoder.rel_embeddings."):
        d.embed[f"{base}encoder.rel_embeddings.weight"] = f"_ {space}"
    if normed:  # it is there without relative attention too
        d.embed |= norm(f"{base}encoder.LayerNorm", space)
    if readers and normed:
        d.spaces["rel"] = Space(width, Permutation(), folded=OrthogonalFixingOnes(), why=LAYER_NORM)
        if not names.has("LayerNorm.gamma"):
            d.norms.append(
                foldable_norm(d.embed | d.backbone, f"{base}encoder.LayerNorm", *readers)
            )
    elif readers:
        d.spaces["rel"] = Space(width, GeneralLinear(), why="linear layers read the table")


def add_heads(d: Draft, c: Config, names: Names, base: str, embed: int) -> None:
    masked = add_masked_language_head(
        d, c, names, f"{base}embeddings.word_embeddings.weight", embed
    )
    if names.has_prefix("lm_predictions."):  # multiplies with the word table itself
        lm = "lm_predictions.lm_head."
        d.head |= {
            **linear(lm + "dense", "stream", "stream"),
            **norm(lm + "LayerNorm"),
            lm + "bias": c.axis("vocab_size"),
        }
        if (
            f"{lm}weight" in names.names
        ):  # the table under a second name, in the first versions of transformers 5
            d.head[f"{lm}weight"], d.ties[f"{lm}weight"] = (
                f"{c.axis('vocab_size')} stream*",
                f"{base}embeddings.word_embeddings.weight",
            )
        masked = True
    if names.has_prefix(
        "mask_predictions."
    ):  # v3's discriminator, which checkpoints carry and no class reads
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
    d.outputs = {"logits": "_ _ _"} if masked else {"last_hidden_state": "_ _ stream"}
    for name, reads in (
        ("classifier", "pool" if "pool" in d.spaces else "stream"),
        ("qa_outputs", "stream"),
    ):
        if names.has_prefix(f"{name}."):
            d.head |= linear(name, "_", reads)
            d.outputs = (
                qa_logits()
                if name == "qa_outputs"
                else {"logits": "_ _" if reads == "pool" else "_ _ _"}
            )


def boundaries(c: Config, names: Names) -> tuple[Boundary, ...]:
    base = names.prefix("deberta.")
    if names.has_prefix(
        f"{base}encoder.conv."
    ):  # it stands between the blocks and reads what entered the first of them
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
