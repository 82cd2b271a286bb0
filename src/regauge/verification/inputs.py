"""Random inputs for a model of transformers or timm: images, token ids, or both."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch

from regauge.errors import CheckpointError, CutError
from regauge.models.cut import cut

BATCH, LENGTH = 3, 12
LARGE = 256 * 256  # pixels; a single image above it


def read_inputs(path: str | Path, model: torch.nn.Module) -> dict[str, Any]:
    """Read inputs by name from an .npz or .safetensors file.

    Floating-point inputs are cast to the dtype of the model.
    """
    path = Path(path)
    try:
        if path.suffix == ".npz":
            from regauge.data.datasets import read_arrays

            tensors = {
                name: torch.from_numpy(array)
                for name, array in read_arrays(path.read_bytes(), str(path)).items()
            }
        else:
            from safetensors.torch import load_file

            tensors = load_file(path)
    # numpy and safetensors raise errors of many kinds for files of other formats
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be read as inputs: {error}",
            hint="pass a .npz or .safetensors file of arrays named like the arguments of forward",
        ) from error
    parameter = next(p for p in model.parameters() if p.is_floating_point())
    return {
        name: value.to(parameter.device, parameter.dtype)
        if value.is_floating_point()
        else value.to(parameter.device)
        for name, value in tensors.items()
    }


def example_inputs(model: torch.nn.Module, seed: int = 0) -> dict[str, Any]:
    """Return random inputs by the argument names of the model's forward.

    Encoders get padding at the end of one row, so that their mask is permuted too.
    """
    generator = torch.Generator().manual_seed(seed)
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
                f"inputs must be given for {type(model).__name__}, whose input size is unknown",
                hint="pass inputs={name: tensor}",
            )
        batch = BATCH if size[-1] * size[-2] <= LARGE else 1
        return {"x": torch.randn(batch, *size, generator=generator).to(first.device, first.dtype)}
    inputs: dict[str, Any] = {}
    parameters = inspect.signature(model.forward).parameters
    if "pixel_values" in parameters:
        inputs |= _images(model, config, generator, first)
    if "input_ids" in parameters:
        inputs |= {k: v.to(first.device) for k, v in _tokens(model, config, generator).items()}
    return inputs


def _images(
    model: torch.nn.Module, config: Any, generator: torch.Generator, first: torch.Tensor
) -> dict[str, Any]:
    """Return random images, with a mask for masked-image models."""
    vision = getattr(config, "vision_config", config)
    side = getattr(vision, "image_size", 224)  # a ResNet's config has none
    height, width = (side, side) if isinstance(side, int) else side
    batch = BATCH if height * width <= LARGE else 1
    inputs: dict[str, Any] = {
        "pixel_values": torch.randn(
            batch, vision.num_channels, height, width, generator=generator
        ).to(first.device, first.dtype)
    }
    if "MaskedImage" in type(model).__name__:
        patch = vision.patch_size if isinstance(vision.patch_size, int) else vision.patch_size[0]
        patches = (height // patch) * (width // patch)
        inputs["bool_masked_pos"] = (torch.rand(batch, patches, generator=generator) < 0.4).to(
            first.device
        )
    return inputs


def _tokens(model: torch.nn.Module, config: Any, generator: torch.Generator) -> dict[str, Any]:
    """Return random token ids, with masks and decoder inputs where the model takes them."""
    text = getattr(config, "text_config", config)
    max_length = (
        getattr(text, "max_position_embeddings", None)
        or getattr(text, "n_positions", None)
        or LENGTH + 4
    )
    n = min(LENGTH, int(max_length) - 4)
    special = {
        getattr(text, f"{name}_token_id", None) for name in ("pad", "bos", "eos", "decoder_start")
    }
    ordinary = torch.tensor([i for i in range(min(text.vocab_size, 2000)) if i not in special])
    ids = ordinary[torch.randint(len(ordinary), (BATCH, n), generator=generator)]
    end, pad = getattr(text, "eos_token_id", None), getattr(text, "pad_token_id", None)
    if isinstance(end, int):
        ids[:, -1] = end  # BART, T5 and CLIP read the output at the end token
    if "MultipleChoice" in type(model).__name__:
        return {"input_ids": ids.unsqueeze(0)}
    mask = torch.ones_like(ids)
    is_causal = not getattr(config, "is_encoder_decoder", False) and _is_causal(model)
    if (
        isinstance(pad, int) and not is_causal
    ):  # two pads at the end of row 0, the end token before them
        ids[0, -3:] = torch.tensor([end if isinstance(end, int) else int(ids[0, -3]), pad, pad])
        mask[0, -2:] = 0
    elif pad is None and "SequenceClassification" in type(model).__name__ and is_causal:
        ids, mask = ids[:1], mask[:1]  # without a padding token these take one row at a time
    inputs = {"input_ids": ids} if is_causal else {"input_ids": ids, "attention_mask": mask}
    if getattr(config, "is_encoder_decoder", False) and "Encoder" not in type(model).__name__:
        inputs["decoder_input_ids"] = (
            ids
            if "SequenceClassification" in type(model).__name__
            else ids[:, : n - 2].flip(1).clone()
        )
    return inputs


def _is_causal(model: torch.nn.Module) -> bool:
    """Return whether attention masks are implicit, as in causal models."""
    try:
        return any("attention_mask" in b.implicit for b in cut(model).boundaries)
    except CutError:
        return False
