"""Models, images and updates for the tests of attacks on gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from regauge.attacks.updates import Granted, SentUpdate, Update
from regauge.audit.gradient_audit.clients import Truth, contribute, prepare_model
from regauge.data.tasks import Examples
from regauge.defences.gradients import parse_plan


def vit(seed: int = 0, **more: Any) -> Any:
    config = {
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "image_size": 16,
        "patch_size": 4,
    }
    config |= {"num_channels": 3, "num_labels": 5, "initializer_range": 0.1}
    torch.manual_seed(seed)
    return transformers.ViTForImageClassification(transformers.ViTConfig(**config | more))


def timm_vit(name: str = "vit_small_patch16_224", **more: Any) -> Any:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    sizes = {
        "img_size": 16,
        "patch_size": 4,
        "embed_dim": 48,
        "depth": 2,
        "num_heads": 4,
        "num_classes": 5,
    }
    return timm.create_model(name, pretrained=False, **sizes | more)


def pictures(count: int, seed: int = 0, side: int = 16, channels: int = 3) -> torch.Tensor:
    """Images in -1..1 that are smooth, with some texture."""
    g = torch.Generator().manual_seed(seed)
    small = torch.nn.functional.interpolate(
        torch.rand(count, channels, 4, 4, generator=g),
        (side, side),
        mode="bilinear",
        align_corners=False,
    )
    return (2 * small - 1 + 0.15 * torch.randn(count, channels, side, side, generator=g)).clamp(
        -1, 1
    )


def examples(
    count: int, seed: int = 0, classes: int = 5, side: int = 16, channels: int = 3
) -> Examples:
    x, y = pictures(count, seed, side, channels), torch.arange(count) % classes
    return Examples(count, classes, lambda i: ({"pixel_values": x[i]}, y[i]))


def make_update(
    model: Any,
    combination: str = "none",
    *,
    seed: int = 0,
    first: int = 0,
    dtype: torch.dtype = torch.float32,
    **granted: Any,
) -> tuple[SentUpdate, Truth]:
    """One update of some images, as the server has it, and the truth."""
    plan = parse_plan(combination)
    there = prepare_model(model.to(dtype), plan)
    size = plan.samples * plan.clients
    data = examples(first + size, side=model.config.image_size if hasattr(model, "config") else 16)
    inputs, labels = data.batch(torch.arange(first, first + size))
    inputs = {k: v.to(dtype) for k, v in inputs.items()}
    update, truth = contribute(there, plan, data, inputs, labels, seed)
    return SentUpdate(
        there,
        update,
        tuple(inputs["pixel_values"].shape[1:]),
        Granted(**{"batch": size, **granted}),
    ), truth


def psnr(recovered: torch.Tensor, true: torch.Tensor, span: float = 2.0) -> float:
    """In dB, unclipped."""
    return float(10 * torch.log10(span**2 / (recovered.double() - true.double()).square().mean()))


def replace_tensors(view: SentUpdate, **tensors: torch.Tensor | None) -> SentUpdate:
    """The same view with other tensors in its update; None takes one out. Dots in names are written
    as two underscores.
    """
    new = {**view.update.tensors}
    for name, value in tensors.items():
        key = name.replace("__", ".")
        if value is None:
            new.pop(key)
        else:
            new[key] = value
    return SentUpdate(
        view.model,
        Update(new, view.update.kind, view.update.steps, view.update.lr),
        view.shape,
        view.granted,
    )
