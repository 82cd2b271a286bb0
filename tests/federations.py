"""What tests of federated learning share: a pico ViT, synthetic digits, and runs of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from regauge.federated import InProcess, Settings, parts_of, prepared, run, state_of
from regauge.federated.keeping import Kept
from regauge.tasks import Examples

SIZE = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "initializer_range": 0.2}


def vit(seed: int = 0, **more: Any) -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = transformers.ViTConfig(**{**SIZE, "image_size": 8, "patch_size": 2, "num_channels": 1, "num_labels": 4, **more})
        return transformers.ViTForImageClassification(config).eval()


def bars(count: int = 48, seed: int = 1) -> Examples:
    """Images of a bright quarter each, and which one it is."""
    draw = np.random.default_rng(seed)
    labels = torch.from_numpy(draw.integers(0, 4, count))
    images = torch.from_numpy(draw.normal(0, 0.3, (count, 1, 8, 8))).float()
    for image, label in zip(images, labels.tolist(), strict=True):
        image[0, 4 * (label // 2) :, 4 * (label % 2) :][:4, :4] += 1.5
    return Examples(count, 4, lambda rows: ({"pixel_values": images[rows]}, labels[rows]))


def ran(settings: Settings, examples: Examples | None = None, folder: Path | None = None, **more: Any) -> Kept:
    """A run in this process."""
    model = prepared(vit(), settings)
    return run(InProcess(model, parts_of(examples or bars(), settings), settings), state_of(model), settings, folder=folder, **more)
