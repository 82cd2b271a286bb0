"""Pico-models: the real classes, a few thousand random weights, float64. One line per variant that
a family distinguishes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import transformers as T

import support.torchvision_ops as torchvision_ops  # noqa: F401
from regauge.core.spec import Spec
from regauge.models.families import spec_from

IDS = {"input_ids": torch.randint(0, 30, (2, 7), generator=torch.Generator().manual_seed(1))}
CHOICES = {"input_ids": IDS["input_ids"].view(1, 2, 7)}
IMAGES = {
    "pixel_values": torch.randn(
        2, 3, 8, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    )
}


@dataclass(frozen=True)
class Pico:
    build: Callable[[], torch.nn.Module]
    inputs: dict[str, torch.Tensor]
    config: dict[str, Any] | None = None  # timm's models carry none


def vit(**more: Any) -> Any:
    return T.ViTConfig(
        **{
            "hidden_size": 12,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "intermediate_size": 20,
            "image_size": 8,
            "patch_size": 4,
            "num_labels": 5,
        }
        | more
    )


def deit() -> Any:
    return T.DeiTConfig(**vit().to_dict())


def gpt2(**more: Any) -> Any:
    return T.GPT2Config(
        **{
            "n_embd": 12,
            "n_layer": 2,
            "n_head": 3,
            "vocab_size": 30,
            "n_positions": 16,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        | more
    )


LLAMA = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 20,
    "vocab_size": 30,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

BERT = {
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "vocab_size": 30,
    "max_position_embeddings": 16,
}
DISTILBERT = {
    "dim": 12,
    "n_layers": 1,
    "n_heads": 3,
    "hidden_dim": 20,
    "vocab_size": 30,
    "max_position_embeddings": 16,
}
DEBERTA = BERT | {
    "relative_attention": True,
    "position_buckets": 4,
    "pos_att_type": ["p2c", "c2p"],
    "num_hidden_layers": 1,
}
V3 = DEBERTA | {
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "position_biased_input": False,
    "type_vocab_size": 0,
    "num_hidden_layers": 2,
}
V2 = DEBERTA | {"norm_rel_ebd": "layer_norm", "share_att_key": False, "type_vocab_size": 2}
XL = V2 | {"share_att_key": True, "conv_kernel_size": 3, "conv_act": "gelu", "embedding_size": 8}
DINOV2 = {
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "mlp_ratio": 2,
    "image_size": 8,
    "patch_size": 4,
    "num_labels": 5,
}
BART = {
    "d_model": 12,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 20,
    "decoder_ffn_dim": 24,
    "vocab_size": 30,
    "max_position_embeddings": 16,
}
ENDED = {
    "input_ids": torch.cat([3 + IDS["input_ids"] % 27, torch.full((2, 1), 2)], dim=1)
}  # BART's classifier reads the last state at </s>
STATES = {
    "encoder_hidden_states": torch.randn(
        2, 5, 12, generator=torch.Generator().manual_seed(3), dtype=torch.float64
    )
}
CLIP = {"num_hidden_layers": 1, "projection_dim": 8}
CLIP_TEXT = CLIP | {
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_attention_heads": 3,
    "vocab_size": 30,
    "max_position_embeddings": 16,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 1,
}
CLIP_VISION = CLIP | {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}


def clip() -> Any:
    return T.CLIPConfig(text_config=CLIP_TEXT, vision_config=CLIP_VISION, projection_dim=8)


def bert(cls: str, **more: Any) -> Callable[[], Any]:
    """A class of the BERT kind with its own config class."""
    kind = cls.split("For")[0].removesuffix("Model")
    size = DISTILBERT if kind == "DistilBert" else BERT
    return lambda: getattr(T, cls)(getattr(T, f"{kind}Config")(**size | more))


def timm_vit(architecture: str = "vit_pico", **more: Any) -> Pico:
    import timm
    from timm.models.deit import VisionTransformerDistilled

    arguments = {
        "img_size": 8,
        "patch_size": 4,
        "embed_dim": 12,
        "depth": 2,
        "num_heads": 3,
        "mlp_ratio": 2,
        "num_classes": 5,
    } | more
    pool = more.get("global_pool", "token")
    layer = (
        "swiglu"
        if getattr(more.get("mlp_layer"), "keywords", {}).get("gate_last") is False
        else getattr(more.get("mlp_layer"), "__name__", "")
    )
    cls = (
        VisionTransformerDistilled if "distilled" in architecture else timm.models.VisionTransformer
    )
    return Pico(
        lambda: cls(**arguments),
        {"x": IMAGES["pixel_values"]},
        {
            "architecture": architecture,
            "model_args": {
                "num_heads": 3,
                "global_pool": pool,
                "norm_layer": more.get("norm_layer"),
                "mlp_layer": layer,
            },
        },
    )


def post_norm_block() -> dict[str, Any]:
    from timm.models.vision_transformer import ResPostBlock

    return {"block_fn": ResPostBlock}


def glu() -> dict[str, Any]:
    from timm.layers import GluMlp

    return {"mlp_layer": GluMlp}


def swiglu() -> dict[str, Any]:
    from timm.layers import SwiGLUPacked

    return {"mlp_layer": SwiGLUPacked}


def timm_swin(**more: Any) -> Pico:
    import timm

    size = {
        "img_size": 16,
        "patch_size": 2,
        "embed_dim": 6,
        "depths": (2, 1),
        "num_heads": (2, 3),
        "window_size": 4,
        "mlp_ratio": 2,
        "num_classes": 5,
    }
    images = {
        "x": torch.randn(
            2, 3, 16, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64
        )
    }
    return Pico(
        lambda: timm.models.SwinTransformer(**size | more),
        images,
        {"architecture": "swin_pico", "model_args": {"depths": (2, 1)}},
    )


PICOS: dict[str, Pico] = {
    "vit": Pico(lambda: T.ViTForImageClassification(vit()), IMAGES),
    "vit-base": Pico(lambda: T.ViTModel(vit()), IMAGES),
    "vit-no-qkv-bias": Pico(lambda: T.ViTForImageClassification(vit(qkv_bias=False)), IMAGES),
    "vit-masked": Pico(lambda: T.ViTForMaskedImageModeling(vit(encoder_stride=4)), IMAGES),
    "deit": Pico(lambda: T.DeiTForImageClassification(deit()), IMAGES),
    "deit-base": Pico(lambda: T.DeiTModel(deit()), IMAGES),
    "deit-teacher": Pico(lambda: T.DeiTForImageClassificationWithTeacher(deit()), IMAGES),
    "gpt2": Pico(lambda: T.GPT2LMHeadModel(gpt2()), IDS),
    "gpt2-untied": Pico(lambda: T.GPT2LMHeadModel(gpt2(tie_word_embeddings=False)), IDS),
    "gpt2-classifier": Pico(lambda: T.GPT2ForSequenceClassification(gpt2()), IDS),
    "gpt2-double": Pico(lambda: T.GPT2DoubleHeadsModel(gpt2()), CHOICES),
    "gpt2-tokens": Pico(lambda: T.GPT2ForTokenClassification(gpt2()), IDS),
    "gpt2-answers": Pico(lambda: T.GPT2ForQuestionAnswering(gpt2()), IDS),
    "gpt2-base": Pico(lambda: T.GPT2Model(gpt2()), IDS),
    "llama": Pico(lambda: T.LlamaForCausalLM(T.LlamaConfig(**LLAMA)), IDS),
    "llama-mha-tied": Pico(
        lambda: T.LlamaForCausalLM(
            T.LlamaConfig(**LLAMA | {"num_key_value_heads": 4, "tie_word_embeddings": True})
        ),
        IDS,
    ),
    "llama-mqa-biases": Pico(
        lambda: T.LlamaForCausalLM(
            T.LlamaConfig(
                **LLAMA | {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}
            )
        ),
        IDS,
    ),
    "llama-base": Pico(lambda: T.LlamaModel(T.LlamaConfig(**LLAMA)), IDS),
    "llama-classifier": Pico(lambda: T.LlamaForSequenceClassification(T.LlamaConfig(**LLAMA)), IDS),
    "llama-tokens": Pico(lambda: T.LlamaForTokenClassification(T.LlamaConfig(**LLAMA)), IDS),
    "llama-answers": Pico(lambda: T.LlamaForQuestionAnswering(T.LlamaConfig(**LLAMA)), IDS),
    "mistral": Pico(lambda: T.MistralForCausalLM(T.MistralConfig(**LLAMA)), IDS),
    "qwen2": Pico(lambda: T.Qwen2ForCausalLM(T.Qwen2Config(**LLAMA)), IDS),
    "qwen3": Pico(lambda: T.Qwen3ForCausalLM(T.Qwen3Config(**LLAMA | {"head_dim": 8})), IDS),
    "gemma2": Pico(
        lambda: T.Gemma2ForCausalLM(T.Gemma2Config(**LLAMA | {"head_dim": 8, "sliding_window": 4})),
        IDS,
    ),
    "mixtral": Pico(
        lambda: T.MixtralForCausalLM(
            T.MixtralConfig(**LLAMA | {"num_local_experts": 3}, experts_implementation="eager")
        ),
        IDS,
    ),
    "bert": Pico(bert("BertForMaskedLM"), IDS),
    "bert-untied": Pico(bert("BertForMaskedLM", tie_word_embeddings=False), IDS),
    "bert-base": Pico(bert("BertModel"), IDS),
    "bert-pretraining": Pico(bert("BertForPreTraining", num_hidden_layers=1), IDS),
    "bert-next-sentence": Pico(bert("BertForNextSentencePrediction", num_hidden_layers=1), IDS),
    "bert-classifier": Pico(bert("BertForSequenceClassification", num_hidden_layers=1), IDS),
    "bert-tokens": Pico(bert("BertForTokenClassification", num_hidden_layers=1), IDS),
    "bert-answers": Pico(bert("BertForQuestionAnswering", num_hidden_layers=1), IDS),
    "roberta": Pico(bert("RobertaForMaskedLM", num_hidden_layers=1), IDS),
    "roberta-classifier": Pico(bert("RobertaForSequenceClassification", num_hidden_layers=1), IDS),
    "xlm-roberta": Pico(bert("XLMRobertaModel", num_hidden_layers=1), IDS),
    "camembert": Pico(bert("CamembertForMaskedLM", num_hidden_layers=1), IDS),
    "distilbert": Pico(bert("DistilBertForMaskedLM"), IDS),
    "distilbert-base": Pico(bert("DistilBertModel"), IDS),
    "distilbert-classifier": Pico(bert("DistilBertForSequenceClassification"), IDS),
    "deberta-v3": Pico(lambda: T.DebertaV2ForMaskedLM(T.DebertaV2Config(**V3)), IDS),
    "deberta-v3-new-head": Pico(
        lambda: T.DebertaV2ForMaskedLM(T.DebertaV2Config(**V3, legacy=False)), IDS
    ),
    "deberta-v3-base": Pico(lambda: T.DebertaV2Model(T.DebertaV2Config(**V3)), IDS),
    "deberta-v3-classifier": Pico(
        lambda: T.DebertaV2ForSequenceClassification(T.DebertaV2Config(**V3)), IDS
    ),
    "deberta-v2": Pico(lambda: T.DebertaV2ForTokenClassification(T.DebertaV2Config(**V2)), IDS),
    "deberta-v2-no-norm": Pico(
        lambda: T.DebertaV2ForQuestionAnswering(T.DebertaV2Config(**V2 | {"norm_rel_ebd": "none"})),
        IDS,
    ),
    "deberta-v2-xlarge": Pico(lambda: T.DebertaV2ForMaskedLM(T.DebertaV2Config(**XL)), IDS),
    "deberta-v2-xlarge-untied": Pico(
        lambda: T.DebertaV2ForMaskedLM(T.DebertaV2Config(**XL, tie_word_embeddings=False)), IDS
    ),
    "deberta-v2-xlarge-classifier": Pico(
        lambda: T.DebertaV2ForSequenceClassification(T.DebertaV2Config(**XL)), IDS
    ),
    "deberta-v2-xlarge-groups": Pico(
        lambda: T.DebertaV2ForTokenClassification(T.DebertaV2Config(**XL, conv_groups=2)), IDS
    ),
    "deberta-v2-unread": Pico(
        lambda: T.DebertaV2Model(T.DebertaV2Config(**V2 | {"pos_att_type": []})), IDS
    ),
    "deberta-v2-absolute": Pico(
        lambda: T.DebertaV2Model(T.DebertaV2Config(**V2 | {"relative_attention": False})), IDS
    ),
    "roberta-choice": Pico(bert("RobertaForMultipleChoice", num_hidden_layers=1), CHOICES),
    "dinov2": Pico(lambda: T.Dinov2ForImageClassification(T.Dinov2Config(**DINOV2)), IMAGES),
    "dinov2-base": Pico(lambda: T.Dinov2Model(T.Dinov2Config(**DINOV2)), IMAGES),
    "dinov2-swiglu": Pico(
        lambda: T.Dinov2ForImageClassification(T.Dinov2Config(**DINOV2, use_swiglu_ffn=True)),
        IMAGES,
    ),
    "dinov2-registers": Pico(
        lambda: T.Dinov2WithRegistersForImageClassification(T.Dinov2WithRegistersConfig(**DINOV2)),
        IMAGES,
    ),
    "dinov2-registers-base": Pico(
        lambda: T.Dinov2WithRegistersModel(T.Dinov2WithRegistersConfig(**DINOV2)), IMAGES
    ),
    "bart": Pico(lambda: T.BartForConditionalGeneration(T.BartConfig(**BART)), IDS),
    "bart-untied": Pico(
        lambda: T.BartForConditionalGeneration(T.BartConfig(**BART, tie_word_embeddings=False)), IDS
    ),
    "bart-base": Pico(lambda: T.BartModel(T.BartConfig(**BART)), IDS),
    "bart-classifier": Pico(lambda: T.BartForSequenceClassification(T.BartConfig(**BART)), ENDED),
    "bart-answers": Pico(lambda: T.BartForQuestionAnswering(T.BartConfig(**BART)), IDS),
    "bart-decoder": Pico(
        lambda: T.BartForCausalLM(T.BartConfig(**BART | {"encoder_layers": 2})), IDS | STATES
    ),
    "clip": Pico(lambda: T.CLIPModel(clip()), IDS | IMAGES),
    "clip-classifier": Pico(lambda: T.CLIPForImageClassification(clip()), IMAGES),
    "clip-text": Pico(lambda: T.CLIPTextModel(T.CLIPTextConfig(**CLIP_TEXT)), IDS),
    "clip-text-projection": Pico(
        lambda: T.CLIPTextModelWithProjection(T.CLIPTextConfig(**CLIP_TEXT)), IDS
    ),
    "clip-vision": Pico(lambda: T.CLIPVisionModel(T.CLIPVisionConfig(**CLIP_VISION)), IMAGES),
    "clip-vision-projection": Pico(
        lambda: T.CLIPVisionModelWithProjection(T.CLIPVisionConfig(**CLIP_VISION)), IMAGES
    ),
    "timm-vit": timm_vit(),
    "timm-vit-avg": timm_vit(
        class_token=False, global_pool="avg", reg_tokens=2, init_values=0.1, qkv_bias=False
    ),
    "timm-vit-registers": timm_vit(reg_tokens=3, no_embed_class=True),
    "timm-vit-features": timm_vit(num_classes=0),
    "timm-vit-tokens": timm_vit(num_classes=0, global_pool=""),
    "timm-vit-max": timm_vit(global_pool="avgmax"),
    "timm-vit-clip": timm_vit(pre_norm=True),
    "timm-vit-qk-norm": timm_vit(qk_norm=True),
    "timm-vit-rms": timm_vit(norm_layer="rmsnorm", qk_norm=True),
    "timm-vit-gate-last": timm_vit(**glu()),
    "timm-vit-simple-norm": timm_vit(norm_layer="simplenorm", qk_norm=True),
    "timm-vit-post-norm": timm_vit("vit_pico_rpn_8", **post_norm_block()),
    "timm-vit-swiglu": timm_vit(**swiglu()),
    "timm-siglip": timm_vit(class_token=False, global_pool="map"),
    "timm-siglip-rms": timm_vit(class_token=False, global_pool="map", norm_layer="rmsnorm"),
    "timm-deit-distilled": timm_vit("deit_pico_distilled"),
    "timm-swin": timm_swin(),
    "timm-swin-features": timm_swin(num_classes=0),
    "timm-swin-padded": timm_swin(window_size=3),
}

# T5 and Swin. The classifier reads the place of the one end token (1) in every row.

T5_IDS = {
    "input_ids": torch.tensor([[5, 9, 3, 22, 7, 1, 0], [8, 2, 29, 14, 6, 11, 1]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1, 1]]),
    "decoder_input_ids": torch.tensor([[0, 4, 17, 9, 1, 3, 2], [0, 21, 6, 5, 8, 3, 1]]),
}
T5_ENCODER_IDS = {k: T5_IDS[k] for k in ("input_ids", "attention_mask")}
SWIN_IMAGES = {
    "pixel_values": torch.randn(
        2, 3, 16, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64
    )
}


def t5(**more: Any) -> Any:
    small = {
        "d_model": 12,
        "d_kv": 4,
        "d_ff": 16,
        "num_layers": 2,
        "num_decoder_layers": 2,
        "num_heads": 3,
        "vocab_size": 30,
    }
    ids = {
        "decoder_start_token_id": 0,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 12,
        "num_labels": 4,
    }
    return T.T5Config(**small | ids | more)


def swin(**more: Any) -> Any:
    small = {
        "embed_dim": 8,
        "depths": [2, 2],
        "num_heads": [2, 4],
        "window_size": 2,
        "image_size": 16,
        "patch_size": 2,
        "mlp_ratio": 2.0,
    }
    return T.SwinConfig(**small | {"num_labels": 5, "encoder_stride": 4} | more)


PICOS |= {
    "t5": Pico(lambda: T.T5ForConditionalGeneration(t5()), T5_IDS),
    "t5-gated-unscaled": Pico(
        lambda: T.T5ForConditionalGeneration(
            t5(feed_forward_proj="gated-gelu", tie_word_embeddings=False)
        ),
        T5_IDS,
    ),
    "t5-base": Pico(lambda: T.T5Model(t5()), T5_IDS),
    "t5-encoder": Pico(lambda: T.T5EncoderModel(t5()), T5_ENCODER_IDS),
    "t5-classifier": Pico(lambda: T.T5ForSequenceClassification(t5()), T5_IDS),
    "t5-tokens": Pico(lambda: T.T5ForTokenClassification(t5()), T5_ENCODER_IDS),
    "t5-qa": Pico(
        lambda: T.T5ForQuestionAnswering(t5(num_labels=2, feed_forward_proj="gelu")), T5_IDS
    ),
    "swin": Pico(lambda: T.SwinForImageClassification(swin()), SWIN_IMAGES),
    "swin-padded": Pico(lambda: T.SwinForImageClassification(swin(window_size=3)), SWIN_IMAGES),
    "swin-base": Pico(
        lambda: T.SwinModel(swin(depths=[1, 1, 2], num_heads=[2, 4, 2], qkv_bias=False)),
        SWIN_IMAGES,
    ),
    "swin-mim": Pico(
        lambda: T.SwinForMaskedImageModeling(swin(use_absolute_embeddings=True)),
        SWIN_IMAGES | {"bool_masked_pos": torch.arange(128).view(2, 64) % 3 == 0},
    ),
}

_HEADS = (
    "base",
    "classifier",
    "tokens",
    "answers",
    "qa",
    "next-sentence",
    "pretraining",
    "double",
    "choice",
    "teacher",
    "mim",
    "new-head",
    "projection",
    "features",
    "untied",
)


# One of each family; the others are its variants.
FAMILIES = (
    "vit",
    "deit",
    "gpt2",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "mixtral",
    "bert",
    "roberta",
    "distilbert",
    "deberta-v3",
    "dinov2",
    "bart",
    "clip",
    "timm-vit",
    "timm-deit-distilled",
    "timm-swin",
    "t5",
    "swin",
)


# Variants that run code of their own in their family.
VARIANTS = (
    "llama-mqa-biases",
    "deberta-v2-no-norm",
    "deberta-v2-absolute",
    "deberta-v2-xlarge-groups",
    "dinov2-swiglu",
    "bart-decoder",
    "timm-vit-qk-norm",
    "timm-vit-gate-last",
    "timm-vit-post-norm",
    "t5-gated-unscaled",
    "swin-padded",
)


def of_each_family(name: str, *further: str) -> Any:
    """A parameter of a test of what families share: variants that are not `further` wait for `make
    soak`.
    """
    return name if name in (*FAMILIES, *further) else pytest.param(name, marks=pytest.mark.slow)


def late(name: str) -> Any:
    """A parameter of a law that the backbone decides: the same backbone under one more head, or
    none, waits for `make soak`.
    """
    is_late = name.endswith(_HEADS) and name not in ("bert-untied", "gpt2-untied")
    return pytest.param(name, marks=pytest.mark.slow) if is_late else name


def build(name: str, seed: int = 0) -> torch.nn.Module:
    """A pico-model in float64 with random, non-trivial weights: norm gains, biases and position
    tables too. Each is made once; a copy takes a third of the time.
    """
    return copy.deepcopy(_prototype(name, seed))


@cache
def _prototype(name: str, seed: int) -> torch.nn.Module:
    with torch.inference_mode(False), torch.random.fork_rng():
        torch.manual_seed(seed)
        model = PICOS[name].build().double().eval()
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn_like(p) * 0.4 + (1.0 if p.dim() == 1 else 0.0))
        if PICOS[name].config is not None:
            model.regauge_config = PICOS[name].config
    return model


def config_of(model: Any) -> dict[str, Any]:
    """What config.json would say of a live model."""
    return (
        model.regauge_config
        if hasattr(model, "regauge_config")
        else {**model.config.to_dict(), "architectures": [type(model).__name__]}
    )


def spec_of(model: Any) -> Spec:
    return spec_from(config_of(model), model.state_dict())
