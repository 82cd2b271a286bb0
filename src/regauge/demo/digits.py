"""The digits of scikit-learn, and small ViTs that learn them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from regauge.core.progress import Progress

if TYPE_CHECKING:
    import torch

    from regauge.data.tasks import Examples

EPOCHS, BATCH, LR = 12, 50, 1e-3
PATCH, LAYERS = 2, 4
SPLIT = 1500  # digits to train on; the others are to test on


def load_images() -> tuple[torch.Tensor, torch.Tensor]:
    """Load the 1,797 digits of 8 x 8 pixels of scikit-learn, in a fixed order."""
    import numpy as np
    import torch
    from sklearn.datasets import load_digits

    bunch: Any = load_digits()
    order = np.random.default_rng(0).permutation(len(bunch.target))
    images = torch.from_numpy(bunch.images[order]).double().unsqueeze(1) / 8 - 1
    return images, torch.from_numpy(bunch.target[order]).long()


def make_vit(seed: int) -> Any:
    """Create a ViT for the digits, in float64."""
    import torch
    import transformers

    config = transformers.ViTConfig(  # type: ignore[call-arg]
        hidden_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        intermediate_size=96,
        image_size=8,
        patch_size=PATCH,
        num_channels=1,
        num_labels=10,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        # float64, so that training can be compared over hundreds of steps
        return transformers.ViTForImageClassification(config).double()


def train(
    model: torch.nn.Module,
    images: torch.Tensor,
    labels: torch.Tensor,
    seed: int,
    progress: Progress,
    epochs: int | None = None,
    decay: bool = True,
) -> list[float]:
    """Train with AdamW, in an order that depends on the seed alone.

    Args:
        model: The model, plain or wrapped.
        images: The training images.
        labels: Their classes.
        seed: The seed of the order.
        progress: Called after each epoch.
        epochs: The number of epochs; `EPOCHS` by default.
        decay: Decay the learning rate to 0, by a cosine after a warm-up.

    Returns:
        The loss of every step.
    """
    import torch

    from regauge.data.optimizer_config import OptimizerConfig
    from regauge.data.train import ScheduledOptimizer, backward_on, descend

    generator = torch.Generator().manual_seed(seed)
    epochs = epochs or EPOCHS
    batches = [torch.randperm(len(images), generator=generator).split(BATCH) for _ in range(epochs)]
    rows = [batch for epoch in batches for batch in epoch]
    config = OptimizerConfig("adamw", LR, weight_decay=0.01)
    if decay:
        steps = len(rows) + 1
        config = replace(config, schedule="cosine", warmup=len(rows) // 10, steps=steps)
    optimizer = ScheduledOptimizer(model.parameters(), config)
    backward = backward_on(model, _examples(images, labels), lambda n: rows[n])
    losses = []
    model.train()
    for step, loss in descend(optimizer, backward, range(len(rows))):
        losses.append(loss)
        epoch, place = divmod(step, len(batches[0]))
        if not place:
            progress(epoch - 1, epochs, f"loss {loss:.3f}")
    progress(epochs, epochs, "")
    model.eval()
    return losses


def digits(first: int, last: int | None = None) -> Examples:
    """Return the digits from one index to another, in float32."""
    images, labels = load_images()
    return _examples(images[first:last].float(), labels[first:last])


def accuracy(model: torch.nn.Module, examples: Examples) -> float:
    """Compute the accuracy of a model."""
    from regauge.data import evaluate

    return evaluate.accuracy(model, examples, len(examples))


def guess_rate(examples: Examples) -> float:
    """Return the share of the most frequent digit."""
    import numpy as np

    _, labels = examples.batch(np.arange(len(examples)))
    return max(float((labels == k).float().mean()) for k in range(10))


def _examples(images: torch.Tensor, labels: torch.Tensor) -> Examples:
    from regauge.data.tasks import Examples

    return Examples(len(images), 10, lambda rows: ({"pixel_values": images[rows]}, labels[rows]))
