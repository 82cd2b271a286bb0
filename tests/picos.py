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
