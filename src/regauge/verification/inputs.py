"""Random inputs of the right kind for a model of transformers or timm: images, token ids, or
both.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from regauge.errors import CutError
from regauge.models.cut import cut

BATCH, LENGTH = 3, 12
LARGE = 256 * 256  # pixels; above it one image is enough to compute


def example_inputs(model: torch.nn.Module, seed: int = 0) -> dict[str, Any]:
    """Inputs as the model's forward names them. Encoders are given padding, at the end of one row,
    so that their mask is there to be permuted.
    """
    draw = torch.Generator().manual_seed(seed)
    first = next(p for p in model.parameters() if p.is_floating_point())
    config: Any = getattr(model, "config", None)
    if config is None:
        size = (
            getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None) or {}
        ).get("input_size")
        embed: Any = getattr(model, "patch_embed", None)
        if embed is not None:
            size = (embed.proj.in_channels, *embed.img_size)
        if size is None:
            raise CutError(
                f"regauge does not know what a {type(model).__name__} is given",
                hint="pass inputs={name: tensor}",
            )
        batch = BATCH if size[-1] * size[-2] <= LARGE else 1
        return {"x": torch.randn(batch, *size, generator=draw).to(first.device, first.dtype)}
    out: dict[str, Any] = {}
    takes = inspect.signature(model.forward).parameters
    if "pixel_values" in takes:
        out |= _images(model, config, draw, first)
    if "input_ids" in takes:
        out |= {k: v.to(first.device) for k, v in _tokens(model, config, draw).items()}
    return out


def _images(
    model: torch.nn.Module, config: Any, draw: torch.Generator, first: torch.Tensor
) -> dict[str, Any]:
    c = getattr(config, "vision_config", config)
    side = getattr(c, "image_size", 224)  # a ResNet's config names none
    height, width = (side, side) if isinstance(side, int) else side
    batch = BATCH if height * width <= LARGE else 1
    out: dict[str, Any] = {
        "pixel_values": torch.randn(batch, c.num_channels, height, width, generator=draw).to(
            first.device, first.dtype
        )
    }
    if "MaskedImage" in type(model).__name__:
        patch = c.patch_size if isinstance(c.patch_size, int) else c.patch_size[0]
        places = (height // patch) * (width // patch)
        out["bool_masked_pos"] = (torch.rand(batch, places, generator=draw) < 0.4).to(first.device)
    return out


def _tokens(model: torch.nn.Module, config: Any, draw: torch.Generator) -> dict[str, Any]:
    c = getattr(config, "text_config", config)
    longest = (
        getattr(c, "max_position_embeddings", None) or getattr(c, "n_positions", None) or LENGTH + 4
    )
    n = min(LENGTH, int(longest) - 4)
    special = {
        getattr(c, f"{name}_token_id", None) for name in ("pad", "bos", "eos", "decoder_start")
    }
    ordinary = torch.tensor([i for i in range(min(c.vocab_size, 2000)) if i not in special])
    ids = ordinary[torch.randint(len(ordinary), (BATCH, n), generator=draw)]
    end, pad = getattr(c, "eos_token_id", None), getattr(c, "pad_token_id", None)
    if isinstance(end, int):
        ids[:, -1] = end  # BART, T5 and CLIP read their answer at the end token
    if "MultipleChoice" in type(model).__name__:
        return {"input_ids": ids.unsqueeze(0)}
    mask = torch.ones_like(ids)
    causal = not getattr(config, "is_encoder_decoder", False) and _is_causal(model)
    if (
        isinstance(pad, int) and not causal
    ):  # two pads at the end of row 0, the end token before them
        ids[0, -3:] = torch.tensor([end if isinstance(end, int) else int(ids[0, -3]), pad, pad])
        mask[0, -2:] = 0
    elif pad is None and "SequenceClassification" in type(model).__name__ and causal:
        ids, mask = ids[:1], mask[:1]  # without a padding token these take one row at a time
    out = {"input_ids": ids} if causal else {"input_ids": ids, "attention_mask": mask}
    if getattr(config, "is_encoder_decoder", False) and "Encoder" not in type(model).__name__:
        out["decoder_input_ids"] = (
            ids
            if "SequenceClassification" in type(model).__name__
            else ids[:, : n - 2].flip(1).clone()
        )
    return out


def _is_causal(model: torch.nn.Module) -> bool:
    try:
        return any("attention_mask" in b.implicit for b in cut(model).boundaries)
    except CutError:
        return False
