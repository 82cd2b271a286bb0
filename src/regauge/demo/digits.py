"""A chapter on training: a small ViT learns scikit-learn's digits, plainly and under Algorithm 1,
and is then verified.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, cast

from regauge.core.progress import Progress
from regauge.demo.context import DemoContext
from regauge.errors import need
from regauge.results.findings import Figure, Finding, Results, Table

if TYPE_CHECKING:
    import torch

    from regauge.core.members import Monomial
    from regauge.data.tasks import Examples

EPOCHS, BATCH, LR = 15, 50, 1e-3
PATCH, LAYERS = 2, 4
COMPARED_STEPS, TOLERANCE = 100, 1e-9  # training amplifies rounding without bound


def show_training(context: DemoContext) -> Results:
    """Train a ViT on digits, once plainly and once permuted, and verify the theorems on it."""
    need("transformers", "experiments")
    need("sklearn", "experiments")

    from regauge import Permuted, element, spec_of, verify
    from regauge.models.summary import format_columns

    images, labels = load_images()
    split = 1500
    plain = make_vit(context.seed)
    start = copy.deepcopy(plain)
    key = element(spec_of(plain), context.seed + 1, within="permutation")
    permuted = Permuted(copy.deepcopy(plain), columns=key, rows=True, key=context.seed + 2)
    losses = {}
    for name, model in (("plain", plain), ("permuted", permuted)):
        with context.bar(f"train, {name}") as progress:
            losses[name] = train(model, images[:split], labels[:split], context.seed, progress)
    test, test_labels = images[split:], labels[split:]
    moved = Permuted(copy.deepcopy(plain), columns=key, rows=False)
    accuracies = {
        "tested plainly": accuracy(plain, test, test_labels),
        "tested with rows shuffled": accuracy(Permuted(copy.deepcopy(plain)), test, test_labels),
        "tested with columns moved": accuracy(moved, test, test_labels),
        "moved, but given plain features": accuracy(moved.model, test, test_labels),
        "trained with rows and columns permuted": accuracy(permuted, test, test_labels),
        "the same, put back": accuracy(copy.deepcopy(permuted).unwrap(), test, test_labels),
        "before training": accuracy(start, test, test_labels),
    }
    rows = [
        ("digits", "accuracy"),
        *((name, f"{100 * value:.1f} %") for name, value in accuracies.items()),
    ]
    context.echo(format_columns(rows, right=(1,)))
    with context.bar("verify") as progress:
        verified = verify(
            copy.deepcopy(plain).float(),
            {"pixel_values": test[:8].float()},
            seed=context.seed,
            general=True,
            optimizers=True,
            progress=progress,
        ).results
    held = sum(f.holds is True for f in verified.findings)
    decided = sum(f.holds is not None for f in verified.findings)
    context.echo(f"\n{held} of {decided} checks hold on it")
    with_key = accuracies["tested plainly"]
    without_key = accuracies["moved, but given plain features"]
    chance = max(float((test_labels == k).float().mean()) for k in range(10))
    differences = [
        abs(a - b) / losses["plain"][0]
        for a, b in zip(losses["plain"], losses["permuted"], strict=True)
    ]
    largest = max(differences[:COMPARED_STEPS])
    findings = (
        Finding(
            "digits/lost",
            "With plain features, the transformed model is no better than a guess.",
            without_key < chance + 0.1,
            without_key,
            chance,
            with_key,
            f"accuracy {100 * without_key:.1f} %; {100 * with_key:.1f} % with the key, "
            f"{100 * chance:.1f} % for the most frequent digit",
            "000 sec. 5.2",
            measure="accuracy",
        ),
        Finding(
            "digits/trained",
            "AdamW under Algorithm 1 follows the plain loss step by step, for the first "
            f"{COMPARED_STEPS} steps in float64.",
            largest <= TOLERANCE,
            largest,
            TOLERANCE,
            1.0,
            f"off by {largest:.0e} of the first loss; after {len(differences)} steps by "
            f"{differences[-1]:.0e}, since training amplifies rounding",
            "000 Alg. 1",
        ),
    )
    table = Table(
        "A ViT on scikit-learn's digits",
        ("", "accuracy"),
        tuple((n, v) for n, v in accuracies.items()),
        f"{split} training images, {len(test)} test images, one seed",
    )
    return Results(
        "digits",
        findings + verified.findings,
        (table, *verified.tables),
        (
            _plot_losses(losses, differences),
            _plot_images(test[:6], context.seed),
            *verified.figures,
        ),
        {
            "model": f"a ViT with {LAYERS} layers, 4 heads and width 48, trained here",
            "dtype": "float32",
            "epochs": EPOCHS,
        },
        verified.unchecked,
    )


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
) -> list[float]:
    """Train with AdamW, in an order that depends on the seed alone.

    Args:
        model: The model, plain or wrapped.
        images: The training images.
        labels: Their classes.
        seed: The seed of the order.
        progress: Called after each epoch.
        epochs: The number of epochs; `EPOCHS` by default.

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


def accuracy(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Compute the accuracy of a model."""
    from regauge.data import evaluate

    return evaluate.accuracy(model, _examples(images, labels), len(images))


def _examples(images: torch.Tensor, labels: torch.Tensor) -> Examples:
    from regauge.data.tasks import Examples

    return Examples(len(images), 10, lambda rows: ({"pixel_values": images[rows]}, labels[rows]))


def _plot_losses(losses: dict[str, list[float]], differences: list[float]) -> Figure:
    y = {**losses, "difference, relative to the first loss": [d or None for d in differences]}
    steps = list(range(len(differences)))
    data = {"x": steps, "y": y, "xlabel": "step", "ylabel": "loss", "log": True}
    caption = (
        "The two losses coincide. Their difference starts at the rounding error of float64 and "
        "grows with every step: two runs that differ in the last digit end at different, equally "
        "good models."
    )
    return Figure("Training, plainly and under Algorithm 1", "lines", data, caption)


def _plot_images(images: torch.Tensor, seed: int) -> Figure:
    """Plot digits, and their patches in the order of the backbone's inputs."""
    from regauge.locking.permuted import sample_row_permutation

    g = sample_row_permutation((8 // PATCH) ** 2, seed)
    index = cast("Monomial", g.members["token"]).index[0]
    pairs = []
    for image in images:
        patches = (
            image[0]
            .unfold(0, PATCH, PATCH)
            .unfold(1, PATCH, PATCH)
            .reshape(-1, PATCH, PATCH)[index]
        )
        shuffled = (
            patches.view(8 // PATCH, 8 // PATCH, PATCH, PATCH).permute(0, 2, 1, 3).reshape(8, 8)
        )
        pairs.append([((x + 1) / 2).tolist() for x in (image[0], shuffled)])
    labels = ("original", "in the order of the backbone's rows")
    strips = [
        {"label": label, "images": [pair[i] for pair in pairs]} for i, label in enumerate(labels)
    ]
    caption = (
        "A shuffle hides the order of the patches, not the patches: an adversary that restores the "
        "order has the image. This is obfuscation, not encryption."
    )
    return Figure(
        "The effect of shuffled rows",
        "images",
        {"columns": ["" for _ in pairs], "rows": strips},
        caption,
    )
