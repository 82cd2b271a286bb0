"""A chapter on masked jigsaw puzzles: a ViT on digits, fine-tuned with and without puzzles."""

from __future__ import annotations

import copy
from typing import Any

from regauge.demo.context import DemoContext
from regauge.demo.digits import accuracy, load_images, make_vit, train
from regauge.errors import need
from regauge.results.findings import Figure, Finding, Results, Table

SPLIT, BASE_EPOCHS, TUNING_EPOCHS = (
    1500,
    10,
    8,
)  # training images; epochs before and after the split
RATIO, RATIOS = 0.5, (0.25, 0.5, 0.75)
UNWRAPPED = "with puzzles, unwrapped"
MARGIN = 0.05  # of consistency


def show_jigsaw(context: DemoContext) -> Results:
    """Fine-tune a ViT with masked jigsaw puzzles, and measure how it depends on patch order."""
    need("transformers", "experiments")
    need("sklearn", "experiments")
    from regauge.data.tasks import Examples
    from regauge.jigsaw import MaskedJigsaw
    from regauge.jigsaw.metrics import evaluate
    from regauge.models.summary import format_columns

    images, labels = load_images()
    images = images.float()
    test = Examples(
        len(images) - SPLIT, 10, lambda i: ({"pixel_values": images[SPLIT:][i]}, labels[SPLIT:][i])
    )
    start = make_vit(context.seed + 70).float()
    with context.bar("train") as progress:
        train(start, images[:SPLIT], labels[:SPLIT], context.seed, progress, BASE_EPOCHS)
    variants: dict[str, dict[str, Any]] = {
        "plainly": {"variant": "A", "ratio": 0.0},
        "with puzzles": {"ratio": RATIO, "per": "sample"},
    }
    evaluations: dict[str, Any] = {}
    for name, options in variants.items():
        wrapped = MaskedJigsaw(copy.deepcopy(start), seed=context.seed, **options)
        with context.bar(f"train on, {name}") as progress:
            train(
                wrapped, images[:SPLIT], labels[:SPLIT], context.seed + 1, progress, TUNING_EPOCHS
            )
        evaluations[name] = evaluate(wrapped, test, RATIOS, batch=len(test))
    evaluations[UNWRAPPED] = evaluate(
        MaskedJigsaw(wrapped.unwrap(), 0.0, variant="A"), test, RATIOS, batch=len(test)
    )
    heads = ("trained on", "accuracy", *(f"consistency at {r:g}" for r in RATIOS))
    values = {
        name: [evaluation.accuracy, *(s.consistency for s in evaluation.shuffled)]
        for name, evaluation in evaluations.items()
    }
    context.echo(
        format_columns(
            [heads, *((name, *(f"{100 * v:.1f} %" for v in row)) for name, row in values.items())],
            right=(1, 2, 3, 4),
        )
    )
    plain, shuffled = evaluations["plainly"], evaluations["with puzzles"]
    unwrapped = evaluations[UNWRAPPED]
    finding = Finding(
        "puzzled/consistency",
        "A ViT that is fine-tuned with masked jigsaw puzzles depends less on the order of patches "
        "than one that is fine-tuned without.",
        shuffled.at_half.consistency > plain.at_half.consistency + MARGIN,
        shuffled.at_half.consistency,
        plain.at_half.consistency,
        1.0,
        f"with half of the patches shuffled {100 * shuffled.at_half.consistency:.1f} % of the "
        f"predictions stay, {100 * plain.at_half.consistency:.1f} % without puzzles in training, "
        f"{100 * unwrapped.at_half.consistency:.1f} % if shuffled patches are not marked; accuracy "
        f"on unshuffled digits {100 * shuffled.accuracy:.1f} and {100 * plain.accuracy:.1f} %",
        "002",
        measure="consistency",
    )
    table = Table(
        "A ViT on digits, with and without masked jigsaw puzzles",
        heads,
        tuple((name, *row) for name, row in values.items()),
        f"Both start from one training of {BASE_EPOCHS} epochs "
        f"({100 * accuracy(start, images[SPLIT:], labels[SPLIT:]):.1f} % right) for "
        f"{TUNING_EPOCHS} more; "
        f"{len(test)} test images, one seed. Consistency: the share of predictions that do not "
        "change when this share of patches is shuffled. The unknown position embedding marks "
        "shuffled patches for the wrapped model; unwrapped it is a plain ViT without that mark.",
    )
    y = {
        name: [evaluation.accuracy, *(s.accuracy for s in evaluation.shuffled)]
        for name, evaluation in evaluations.items()
    }
    figure = Figure(
        "Accuracy under puzzles",
        "lines",
        {
            "x": [0.0, *RATIOS],
            "y": y,
            "xlabel": "share of shuffled patches",
            "ylabel": "accuracy",
        },
        "",
    )
    return Results("puzzled", (finding,), (table,), (figure,), {})
