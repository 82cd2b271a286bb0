"""A chapter on places: a ViT that reads digits, and goes on learning with and without masked jigsaw
puzzles.
"""

from __future__ import annotations

import copy
from typing import Any

from regauge.demo.digits import accuracy, load_images, make_vit, train
from regauge.demo.stage import DemoContext
from regauge.errors import need
from regauge.results.findings import Figure, Finding, Results, Table

SPLIT, BASE_EPOCHS, TUNING_EPOCHS = 1500, 10, 8  # images to learn from; epochs of all, and of each
RATIO, RATIOS = 0.5, (0.25, 0.5, 0.75)
UNWRAPPED = "with puzzles, unwrapped"
MARGIN = 0.05  # of consistency


def show_jigsaw(stage: DemoContext) -> Results:
    """How much a ViT minds where its patches are, and what training with puzzles takes from that,
    and from its accuracy.
    """
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
    start = make_vit(stage.seed + 70).float()
    with stage.bar("train") as tick:
        train(start, images[:SPLIT], labels[:SPLIT], stage.seed, tick, BASE_EPOCHS)
    wraps: dict[str, dict[str, Any]] = {
        "plainly": {"variant": "A", "ratio": 0.0},
        "with puzzles": {"ratio": RATIO, "per": "sample"},
    }
    found: dict[str, Any] = {}
    for name, how in wraps.items():
        wrapped = MaskedJigsaw(copy.deepcopy(start), seed=stage.seed, **how)
        with stage.bar(f"train on, {name}") as tick:
            train(wrapped, images[:SPLIT], labels[:SPLIT], stage.seed + 1, tick, TUNING_EPOCHS)
        found[name] = evaluate(wrapped, test, RATIOS, batch=len(test))
    found[UNWRAPPED] = evaluate(
        MaskedJigsaw(wrapped.unwrap(), 0.0, variant="A"), test, RATIOS, batch=len(test)
    )
    heads = ("trained on", "accuracy", *(f"consistency at {r:g}" for r in RATIOS))
    values = {
        name: [one.accuracy, *(s.consistency for s in one.shuffled)] for name, one in found.items()
    }
    stage.echo(
        format_columns(
            [heads, *((name, *(f"{100 * v:.1f} %" for v in row)) for name, row in values.items())],
            right=(1, 2, 3, 4),
        )
    )
    plain, shuffled, bare = found["plainly"], found["with puzzles"], found[UNWRAPPED]
    finding = Finding(
        "puzzled/consistency",
        "A ViT that went on learning with masked jigsaw puzzles minds less where patches are "
        "than one that went on without.",
        shuffled.at_half.consistency > plain.at_half.consistency + MARGIN,
        shuffled.at_half.consistency,
        plain.at_half.consistency,
        1.0,
        f"half of the patches shuffled, {100 * shuffled.at_half.consistency:.1f} % of the "
        f"answers stay, {100 * plain.at_half.consistency:.1f} % "
        f"without puzzles in training; {100 * bare.at_half.consistency:.1f} % where nothing "
        "tells the model what was shuffled; right on digits as "
        f"they are: {100 * shuffled.accuracy:.1f} and {100 * plain.accuracy:.1f} %",
        "002",
        measure="consistency",
    )
    table = Table(
        "A ViT on digits, with and without masked jigsaw puzzles",
        heads,
        tuple((name, *row) for name, row in values.items()),
        f"Both go on from one training of {BASE_EPOCHS} epochs "
        f"({100 * accuracy(start, images[SPLIT:], labels[SPLIT:]):.1f} % right) for "
        f"{TUNING_EPOCHS} more; "
        f"{len(test)} images to be tested on, one seed. Consistency: how often an answer stays "
        "when so many patches are shuffled. "
        "The wrapped model is told which: they carry its unknown position embedding. Unwrapped "
        "it is a plain ViT, and is told nothing.",
    )
    y = {name: [one.accuracy, *(s.accuracy for s in one.shuffled)] for name, one in found.items()}
    figure = Figure(
        "Accuracy under puzzles",
        "lines",
        {
            "x": [0.0, *RATIOS],
            "y": y,
            "xlabel": "share of patches that are shuffled",
            "ylabel": "accuracy",
        },
        "",
    )
    return Results("puzzled", (finding,), (table,), (figure,), {})
