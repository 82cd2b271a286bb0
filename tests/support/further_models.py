"""Architectures of the transformers library that no family describes: pico-models to discover."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as T

WIDE: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 40,
}
TEXT: dict[str, Any] = WIDE | {
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED: dict[str, Any] = TEXT | {"num_key_value_heads": 2}
VISION: dict[str, Any] = {
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "image_size": 8,
    "patch_size": 4,
    "num_labels": 5,
}
OPT: dict[str, Any] = WIDE | {
    "ffn_dim": 24,
    "max_position_embeddings": 32,
    "word_embed_proj_dim": 16,
}
FALCON: dict[str, Any] = WIDE | {"ffn_hidden_size": 24, "bos_token_id": 1, "eos_token_id": 2}
BLOOM: dict[str, Any] = {"hidden_size": 16, "n_layer": 2, "n_head": 4, "vocab_size": 40}
WHISPER: dict[str, Any] = {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "vocab_size": 40,
    "num_mel_bins": 8,
    "max_source_positions": 10,
    "max_target_positions": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 3,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}

FURTHER: dict[str, Callable[[], torch.nn.Module]] = {
    "phi": lambda: T.PhiForCausalLM(T.PhiConfig(**TEXT, partial_rotary_factor=0.5)),
    "falcon": lambda: T.FalconForCausalLM(T.FalconConfig(**FALCON)),
    "falcon-new": lambda: T.FalconForCausalLM(
        T.FalconConfig(**FALCON, new_decoder_architecture=True, num_kv_heads=2)
    ),
    "opt": lambda: T.OPTForCausalLM(T.OPTConfig(**OPT)),
    "gpt-neox": lambda: T.GPTNeoXForCausalLM(T.GPTNeoXConfig(**TEXT, rotary_pct=0.5)),
    "gpt-j": lambda: T.GPTJForCausalLM(
        T.GPTJConfig(
            n_embd=16, n_layer=2, n_head=2, rotary_dim=4, vocab_size=40, n_positions=32, n_inner=24
        )
    ),
    "bloom": lambda: T.BloomForCausalLM(T.BloomConfig(**BLOOM)),
    "electra": lambda: T.ElectraForMaskedLM(T.ElectraConfig(**TEXT, embedding_size=8)),
    "albert": lambda: T.AlbertForMaskedLM(T.AlbertConfig(**TEXT, embedding_size=8)),
    "beit": lambda: T.BeitForImageClassification(
        T.BeitConfig(**VISION, use_relative_position_bias=True)
    ),
    "siglip": lambda: T.SiglipModel(
        T.SiglipConfig(
            text_config=TEXT, vision_config=VISION | {"hidden_size": 16, "num_attention_heads": 4}
        )
    ),
    "whisper": lambda: T.WhisperForConditionalGeneration(T.WhisperConfig(**WHISPER)),
    "olmo2": lambda: T.Olmo2ForCausalLM(T.Olmo2Config(**GROUPED)),
    "cohere": lambda: T.CohereForCausalLM(T.CohereConfig(**GROUPED)),
    "modernbert": lambda: T.ModernBertForMaskedLM(
        T.ModernBertConfig(**TEXT, global_attn_every_n_layers=2, cls_token_id=1, sep_token_id=2)
    ),
    "starcoder2": lambda: T.Starcoder2ForCausalLM(T.Starcoder2Config(**GROUPED)),
    "gemma": lambda: T.GemmaForCausalLM(T.GemmaConfig(**GROUPED, head_dim=4)),
    "stablelm": lambda: T.StableLmForCausalLM(
        T.StableLmConfig(**GROUPED, partial_rotary_factor=0.5)
    ),
    "mpt": lambda: T.MptForCausalLM(
        T.MptConfig(d_model=16, n_heads=4, n_layers=2, vocab_size=40, max_seq_len=32)
    ),
    "phi3": lambda: T.Phi3ForCausalLM(T.Phi3Config(**GROUPED)),
}


def timm_models() -> dict[str, Callable[[], torch.nn.Module]]:
    """Small models of timm that no family describes; images of 32 x 32."""
    from timm.models import beit, cait, convnext, eva, mlp_mixer, resnet

    vision: dict[str, Any] = {"img_size": 32, "patch_size": 16, "embed_dim": 16, "num_classes": 5}
    return {
        "mlp-mixer": lambda: mlp_mixer.MlpMixer(**vision, num_blocks=2),
        "convnext": lambda: convnext.ConvNeXt(
            depths=(1, 1, 1, 1), dims=(8, 8, 12, 12), num_classes=5
        ),
        "resnet": lambda: resnet.ResNet(
            resnet.BasicBlock, (1, 1, 1, 1), channels=(8, 8, 12, 12), stem_width=8, num_classes=5
        ),
        "eva": lambda: eva.Eva(
            **vision, depth=2, num_heads=4, use_rot_pos_emb=True, swiglu_mlp=True
        ),
        "cait": lambda: cait.Cait(**vision, depth=2, num_heads=4),
        "beit": lambda: beit.Beit(**vision, depth=2, num_heads=4, use_shared_rel_pos_bias=True),
    }
