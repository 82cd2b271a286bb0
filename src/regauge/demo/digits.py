"""A chapter on a model that learns: a small ViT reads scikit-learn's digits, plainly and under
Algorithm 1, and is then verified.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from regauge.demo.stage import DemoContext
from regauge.errors import need
from regauge.results.findings import Figure, Finding, Results, Table

if TYPE_CHECKING:
    import torch

EPOCHS, BATCH, LR = 15, 50, 1e-3
PATCH = 2
COMPARED_STEPS, TOLERANCE = (
    100,
    1e-9,
)  # steps that are compared: training amplifies rounding without bound


def show_training(stage: DemoContext) -> Results:
    """A ViT that learns to read digits, the same learning under a shuffle, and the theorems on what
    it learned.
    """
    need("transformers", "experiments")
    need("sklearn", "experiments")
    import torch

    from regauge import Permuted, element, spec_of, verify
    from regauge.models.summary import format_columns
    from regauge.verification.general import add_general_findings

    images, labels = load_images()
    split = 1500
    plain = make_vit(stage.seed)
    start = copy.deepcopy(plain)
    key = element(spec_of(plain), stage.seed + 1, within="permutation")
    permuted = Permuted(copy.deepcopy(plain), columns=key, rows=True, key=stage.seed + 2)
    losses = {}
    for name, model in (("plain", plain), ("permuted", permuted)):
        with stage.bar(f"train, {name}") as tick:
            losses[name] = train(model, images[:split], labels[:split], stage.seed, tick)
    test, answers = images[split:], labels[split:]
    moved = Permuted(copy.deepcopy(plain), columns=key, rows=False)
    accuracies = {
        "tested plainly": accuracy(plain, test, answers),
        "tested with rows shuffled": accuracy(Permuted(copy.deepcopy(plain)), test, answers),
        "tested with columns moved": accuracy(moved, test, answers),
        "moved, but given plain features": accuracy(moved.model, test, answers),
        "trained with rows and columns permuted": accuracy(permuted, test, answers),
        "the same, put back": accuracy(copy.deepcopy(permuted).unwrap(), test, answers),
        "before training": accuracy(start, test, answers),
    }
    rows = [
        ("digits", "accuracy"),
        *((name, f"{100 * value:.1f} %") for name, value in accuracies.items()),
    ]
    stage.echo(format_columns(rows, right=(1,)))
    with stage.bar("verify") as tick:
        checked = verify(
            copy.deepcopy(plain).float(),
            {"pixel_values": test[:8].float()},
            seed=stage.seed,
            progress=tick,
        )
    found = add_general_findings(checked, torch.float32, stage.seed, optimizers=True)
    held, told = (
        sum(f.holds is True for f in found.findings),
        sum(f.holds is not None for f in found.findings),
    )
    stage.echo(f"\n{held} of {told} checks hold on it")
    good, chance, lost = (
        accuracies["tested plainly"],
        max(float((answers == k).float().mean()) for k in range(10)),
        accuracies["moved, but given plain features"],
    )
    apart = [
        abs(a - b) / losses["plain"][0]
        for a, b in zip(losses["plain"], losses["permuted"], strict=True)
    ]
    first = max(apart[:COMPARED_STEPS])
    findings = (
        Finding(
            "digits/lost",
            "Given plain features, the moved model reads no better than a guess.",
            lost < chance + 0.1,
            lost,
            chance,
            good,
            f"{100 * lost:.1f} % right, where the most frequent digit alone gives "
            f"{100 * chance:.1f} % and the key {100 * good:.1f} %",
            "000 sec. 5.2",
            measure="accuracy",
        ),
        Finding(
            "digits/trained",
            "AdamW under Algorithm 1 follows the plain loss step by step, for the first "
            f"{COMPARED_STEPS} steps in float64.",
            first <= TOLERANCE,
            first,
            TOLERANCE,
            1.0,
            f"off by {first:.0e} of the first loss; after {len(apart)} steps by "
            f"{apart[-1]:.0e}, since training amplifies rounding",
            "000 Alg. 1",
        ),
    )
    table = Table(
        "A ViT on scikit-learn's digits",
        ("", "accuracy"),
        tuple((n, v) for n, v in accuracies.items()),
        f"{split} images to learn from, {len(test)} to be tested on, one seed",
    )
    return Results(
        "digits",
        findings + found.findings,
        (table, *found.tables),
        (_plot_losses(losses, apart), _plot_images(test[:6], stage.seed), *found.figures),
        {
            "model": "a ViT with 4 layers, 4 heads and width 48, trained here",
            "dtype": "float32",
            "epochs": EPOCHS,
        },
        found.unchecked,
    )


def load_images() -> tuple[torch.Tensor, torch.Tensor]:
    """1,797 digits of 8 x 8 pixels that come with scikit-learn, in a fixed order."""
    import numpy as np
    import torch
    from sklearn.datasets import load_digits

    bunch: Any = load_digits()
    order = np.random.default_rng(0).permutation(len(bunch.target))
    images = torch.from_numpy(bunch.images[order]).double().unsqueeze(1) / 8 - 1
    return images, torch.from_numpy(bunch.target[order]).long()


def make_vit(seed: int) -> Any:
    import torch
    import transformers

    config = transformers.ViTConfig(  # type: ignore[call-arg]
        hidden_size=48,
        num_hidden_layers=4,
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
        return transformers.ViTForImageClassification(
            config
        ).double()  # so that training can be compared over hundreds of steps


def train(
    model: torch.nn.Module,
    images: torch.Tensor,
    labels: torch.Tensor,
    seed: int,
    tick: Any,
    epochs: int | None = None,
) -> list[float]:
    """Train, in an order that depends on the seed alone; the loss of every step."""
    import torch

    draw = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
    losses = []
    model.train()
    epochs = epochs or EPOCHS
    for epoch in range(epochs):
        for batch in torch.randperm(len(images), generator=draw).split(BATCH):  # type: ignore[no-untyped-call]
            out = model(pixel_values=images[batch])
            loss = torch.nn.functional.cross_entropy(out.logits, labels[batch]) + (
                getattr(out, "extra", None) or 0.0
            )  # of a wrapped model
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
        tick(epoch, epochs, f"loss {losses[-1]:.3f}")
    tick(epochs, epochs, "")
    model.eval()
    return losses


def accuracy(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    import torch

    model.eval()
    with torch.no_grad():
        return float((model(pixel_values=images).logits.argmax(-1) == labels).double().mean())


def _plot_losses(losses: dict[str, list[float]], apart: list[float]) -> Figure:
    y = {**losses, "difference, relative to the first loss": [a or None for a in apart]}
    data = {"x": list(range(len(apart))), "y": y, "xlabel": "step", "ylabel": "loss", "log": True}
    caption = (
        "One loss lies on the other. Their difference starts at the rounding error of "
        "float64 and grows with every step: two runs that differ in the"
    )
    return Figure(
        "Learning, plainly and under Algorithm 1",
        "lines",
        data,
        f"{caption} last digit end at different, equally good models.",
    )


def _plot_images(images: torch.Tensor, seed: int) -> Figure:
    """The digits, and their patches in the order in which the backbone is given them."""
    from regauge.locking.permuted import sample_row_permutation

    index = sample_row_permutation((8 // PATCH) ** 2, seed).members["token"].index[0]  # type: ignore[union-attr]
    made = []
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
        made.append([((x + 1) / 2).tolist() for x in (image[0], shuffled)])
    labels = ("as it is", "as the rows of the backbone are ordered")
    table = [
        {"label": label, "images": [pair[i] for pair in made]} for i, label in enumerate(labels)
    ]
    caption = (
        "A shuffle hides the order of the patches, not the patches: who can put them "
        "together again sees the picture. This is no encryption."
    )
    return Figure(
        "What a shuffle of rows does",
        "images",
        {"columns": ["" for _ in made], "rows": table},
        caption,
    )
