"""CLIP: two pre-norm towers, each with its own stream, that meet in a joint space `proj`, where
only angles matter.
"""

from __future__ import annotations

from regauge.core.groups import GeneralLinear, Orthogonal, OrthogonalFixingOnes, Permutation
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

# Defaults of the classes, which a nested config omits.
TEXT = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "hidden_act": "quick_gelu",
}
VISION = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "hidden_act": "quick_gelu",
}
PRE_NORM = "pre_layrnorm writes the stream: its gains act on the stream itself and cannot be folded"


def spec(c: Config, names: Names) -> Spec:
    d = Draft("clip", buffers=(r".*embeddings\.position_ids",))
    size = int(c("projection_dim", 512))
    if names.has("embeddings.token_embedding."):
        base = names.prefix("text_model.")
        text = Config({**TEXT, **c("text_config", c.values)})
        d.spaces["stream.text"] = Space(
            text.hidden_size, Permutation(), folded=OrthogonalFixingOnes(), why=LAYER_NORM
        )
        for table, rows in (("token", "vocab_size"), ("position", "max_position_embeddings")):
            d.embed[f"{base}embeddings.{table}_embedding.weight"] = f"{text.axis(rows)} stream.text"
        add_tower(d, text, base, "text", fold=True)
        d.head |= norm(f"{base}final_layer_norm", "stream.text")
        d.outputs |= {"last_hidden_state": "_ _ stream.text", "pooler_output": "_ stream.text"}
    if names.has("embeddings.patch_embedding."):
        base = names.prefix("vision_model.")
        vision = Config({**VISION, **c("vision_config", c.values)})
        positions = vision.position_rows(1)
        d.spaces["stream.vision"] = Space(vision.hidden_size, Permutation(), why=PRE_NORM)
        d.embed |= {
            f"{base}embeddings.class_embedding": "stream.vision",
            f"{base}embeddings.patch_embedding.weight": f"stream.vision {vision.patch_axes()}",
            f"{base}embeddings.position_embedding.weight": f"{positions} stream.vision",
            **norm(f"{base}pre_layrnorm", "stream.vision"),
        }
        add_tower(d, vision, base, "vision", fold=False)
        if names.has_prefix(f"{base}post_layernorm."):
            d.head |= norm(f"{base}post_layernorm", "stream.vision")
        d.outputs |= {"last_hidden_state": "_ _ stream.vision", "pooler_output": "_ stream.vision"}
    add_joint_space(d, names, size)
    return d.spec()


def add_tower(d: Draft, c: Config, base: str, side: str, fold: bool) -> None:
    """Add the blocks of one tower."""
    stream, heads = f"stream.{side}", c.num_attention_heads
    for i in range(c.num_hidden_layers):
        prefix = f"{base}encoder.layers.{i}."
        a = attention(f"{side}.{i}", heads, c.hidden_size // heads)
        d.spaces |= a.spaces | {f"ffn.{side}.{i}": neurons(c.intermediate_size, c.hidden_act)}
        d.backbone |= {
            **norm(prefix + "layer_norm1", stream),
            **linear(prefix + "self_attn.q_proj", a.q, stream),
            **linear(prefix + "self_attn.k_proj", a.k, stream),
            **linear(prefix + "self_attn.v_proj", a.v, stream),
            **linear(prefix + "self_attn.out_proj", stream, a.o),
            **norm(prefix + "layer_norm2", stream),
            **linear(prefix + "mlp.fc1", f"ffn.{side}.{i}", stream),
            **linear(prefix + "mlp.fc2", stream, f"ffn.{side}.{i}"),
        }
        if fold:
            d.norms += [
                foldable_norm(
                    d.backbone,
                    prefix + "layer_norm1",
                    *(prefix + f"self_attn.{x}_proj" for x in "qkv"),
                ),
                foldable_norm(d.backbone, prefix + "layer_norm2", prefix + "mlp.fc1"),
            ]


def add_joint_space(d: Draft, names: Names, size: int) -> None:
    """Add the projections and the outputs: a single tower also returns its last state, the whole
    model returns similarities.
    """
    embeddings: dict[str, str] = {}
    for name, out, stream in (
        ("text_projection", "text_embeds", "stream.text"),
        ("visual_projection", "image_embeds", "stream.vision"),
    ):
        if names.has_prefix(f"{name}."):
            d.spaces["proj"] = Space(
                size, GeneralLinear(), why="a single tower returns its embeddings unchanged"
            )
            d.head |= linear(name, "proj", stream, bias=False)
            embeddings[out] = "_ proj"
    if "logit_scale" in names.names:
        d.head["logit_scale"] = ""
        d.spaces["proj"] = Space(size, Orthogonal(), why="embeddings are compared by their cosine")
        d.norms.append(foldable_norm(d.head, "text_model.final_layer_norm", "text_projection"))
        d.outputs = {"logits_per_image": "_ _", "logits_per_text": "_ _", **embeddings}
        d.notes.append(
            "similarities do not depend on the basis of the joint space; the embeddings that the "
            "model also returns do"
        )
    elif names.has_prefix("classifier."):  # reads the mean of the patches, before any norm
        d.head |= linear("classifier", "_", "stream.vision")
        d.outputs = {"logits": "_ _"}
    else:
        if embeddings:
            del d.outputs["pooler_output"]
        d.outputs |= embeddings
        d.notes.append("the last state is returned too, so the final norm cannot be folded")


def boundaries(c: Config, names: Names) -> tuple[Boundary, ...]:
    sides = [
        s
        for s, kind in (("text", "clip_text_model"), ("vision", "clip_vision_model"))
        if c.model_type in ("clip", kind)
    ]
    mask = {"text": "_ _ token _+token*", "vision": "_ _ token token*"}
    return tuple(
        Boundary(
            s,
            f"{names.prefix(f'{s}_model.')}encoder.layers",
            {"hidden_states": f"_ token stream.{s}", "attention_mask": mask[s]},
            f"_ token stream.{s}",
            implicit={"attention_mask": None} if s == "text" else {},
        )
        for s in sides
    )


FAMILY = Family("clip", ("clip", "clip_text_model", "clip_vision_model"), spec, boundaries)
