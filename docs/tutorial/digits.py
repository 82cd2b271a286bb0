"""Small vision transformers for the tutorial, trained in seconds on the digits of scikit-learn.

The notebooks of this folder import it: `from digits import load_digits, train_vit`. Nothing is
downloaded.
"""

from __future__ import annotations

import copy
from functools import cache

import torch
from sklearn import datasets
from transformers import ViTConfig, ViTForImageClassification


@cache
def load_digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return training images and labels, and test images and labels.

    Images have 8 x 8 pixels with values in -1..1. The test images, 357 of 1,797, were written by
    other people than the training images.
    """
    bunch = datasets.load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    labels = torch.tensor(bunch.target)
    return images[:1440], labels[:1440], images[1440:], labels[1440:]


def new_vit(seed: int = 0) -> ViTForImageClassification:
    """Return an untrained ViT: 2 layers, 4 heads, width 48, 16 patches of 2 x 2 pixels."""
    torch.manual_seed(seed)
    config = ViTConfig(
        image_size=8,
        patch_size=2,
        num_channels=1,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        num_labels=10,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.1,
    )
    return ViTForImageClassification(config)


def fit(model: torch.nn.Module, *, epochs: int = 10, lr: float = 3e-3, seed: int = 0) -> None:
    """Train a model on the digits with AdamW: an ordinary PyTorch loop."""
    images, labels, *_ = load_digits()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    order = torch.Generator().manual_seed(seed)
    model.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(images), generator=order).split(50):
            optimizer.zero_grad()
            model(pixel_values=images[rows], labels=labels[rows]).loss.backward()
            optimizer.step()
    model.eval()


@cache
def _train(seed: int) -> ViTForImageClassification:
    model = new_vit(seed)
    fit(model, seed=seed)
    return model


def train_vit(seed: int = 0) -> ViTForImageClassification:
    """Return a ViT that was trained from random weights. A second call returns a copy."""
    return copy.deepcopy(_train(seed))


@torch.no_grad()
def accuracy(model: torch.nn.Module) -> float:
    """Return the share of test images that a model classifies correctly."""
    *_, images, labels = load_digits()
    model.eval()
    return float((model(pixel_values=images).logits.argmax(-1) == labels).float().mean())
