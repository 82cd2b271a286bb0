"""Pico-models: the real classes, a few thousand random weights, float64. One line per variant that a family distinguishes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torchvision_ops  # noqa: F401
import transformers as T

from regauge.families import spec_from
from regauge.spec import Spec

IDS = {"input_ids": torch.randint(0, 30, (2, 7), generator=torch.Generator().manual_seed(1))}
IMAGES = {"pixel_values": torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)}


@dataclass(frozen=True)
class Pico:
    build: Callable[[], torch.nn.Module]
    inputs: dict[str, torch.Tensor]


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


def gpt2(**more: Any) -> Any:
    return T.GPT2Config(
        **{"n_embd": 12, "n_layer": 2, "n_head": 3, "vocab_size": 30, "n_positions": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
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

PICOS: dict[str, Pico] = {
    "vit": Pico(lambda: T.ViTForImageClassification(vit()), IMAGES),
    "vit-base": Pico(lambda: T.ViTModel(vit()), IMAGES),
    "vit-no-qkv-bias": Pico(lambda: T.ViTForImageClassification(vit(qkv_bias=False)), IMAGES),
    "gpt2": Pico(lambda: T.GPT2LMHeadModel(gpt2()), IDS),
    "gpt2-untied": Pico(lambda: T.GPT2LMHeadModel(gpt2(tie_word_embeddings=False)), IDS),
    "gpt2-classifier": Pico(lambda: T.GPT2ForSequenceClassification(gpt2()), IDS),
    "gpt2-base": Pico(lambda: T.GPT2Model(gpt2()), IDS),
    "llama": Pico(lambda: T.LlamaForCausalLM(T.LlamaConfig(**LLAMA)), IDS),
    "llama-mha-tied": Pico(lambda: T.LlamaForCausalLM(T.LlamaConfig(**LLAMA | {"num_key_value_heads": 4, "tie_word_embeddings": True})), IDS),
    "llama-mqa-biases": Pico(
        lambda: T.LlamaForCausalLM(T.LlamaConfig(**LLAMA | {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True})), IDS
    ),
    "mistral": Pico(lambda: T.MistralForCausalLM(T.MistralConfig(**LLAMA)), IDS),
    "qwen2": Pico(lambda: T.Qwen2ForCausalLM(T.Qwen2Config(**LLAMA)), IDS),
    "qwen3": Pico(lambda: T.Qwen3ForCausalLM(T.Qwen3Config(**LLAMA | {"head_dim": 8})), IDS),
}

# T5 and Swin. The classifier reads the place of the one end token (1) in every row.

T5_IDS = {
    "input_ids": torch.tensor([[5, 9, 3, 22, 7, 1, 0], [8, 2, 29, 14, 6, 11, 1]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1, 1]]),
    "decoder_input_ids": torch.tensor([[0, 4, 17, 9, 1, 3, 2], [0, 21, 6, 5, 8, 3, 1]]),
}
T5_ENCODER_IDS = {k: T5_IDS[k] for k in ("input_ids", "attention_mask")}
SWIN_IMAGES = {"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64)}


def t5(**more: Any) -> Any:
    small = {"d_model": 12, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 3, "vocab_size": 30}
    ids = {"decoder_start_token_id": 0, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12, "num_labels": 4}
    return T.T5Config(**small | ids | more)


def swin(**more: Any) -> Any:
    small = {"embed_dim": 8, "depths": [2, 2], "num_heads": [2, 4], "window_size": 2, "image_size": 16, "patch_size": 2, "mlp_ratio": 2.0}
    return T.SwinConfig(**small | {"num_labels": 5, "encoder_stride": 4} | more)


PICOS |= {
    "t5": Pico(lambda: T.T5ForConditionalGeneration(t5()), T5_IDS),
    "t5-gated-unscaled": Pico(lambda: T.T5ForConditionalGeneration(t5(feed_forward_proj="gated-gelu", tie_word_embeddings=False)), T5_IDS),
    "t5-base": Pico(lambda: T.T5Model(t5()), T5_IDS),
    "t5-encoder": Pico(lambda: T.T5EncoderModel(t5()), T5_ENCODER_IDS),
    "t5-classifier": Pico(lambda: T.T5ForSequenceClassification(t5()), T5_IDS),
    "t5-tokens": Pico(lambda: T.T5ForTokenClassification(t5()), T5_ENCODER_IDS),
    "t5-qa": Pico(lambda: T.T5ForQuestionAnswering(t5(num_labels=2, feed_forward_proj="gelu")), T5_IDS),
    "swin": Pico(lambda: T.SwinForImageClassification(swin()), SWIN_IMAGES),
    "swin-base": Pico(lambda: T.SwinModel(swin(depths=[1, 1, 2], num_heads=[2, 4, 2], qkv_bias=False)), SWIN_IMAGES),
    "swin-mim": Pico(
        lambda: T.SwinForMaskedImageModeling(swin(use_absolute_embeddings=True)),
        SWIN_IMAGES | {"bool_masked_pos": torch.arange(128).view(2, 64) % 3 == 0},
    ),
}


def build(name: str, seed: int = 0) -> torch.nn.Module:
    """A pico-model in float64 with random, non-trivial weights: norm gains, biases and position tables too."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = PICOS[name].build().double().eval()
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn_like(p) * 0.4 + (1.0 if p.dim() == 1 else 0.0))
    return model


def config_of(model: Any) -> dict[str, Any]:
    return {**model.config.to_dict(), "architectures": [type(model).__name__]}


def spec_of(model: Any) -> Spec:
    return spec_from(config_of(model), model.state_dict())
