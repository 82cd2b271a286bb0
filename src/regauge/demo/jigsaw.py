"""The sixth chapter: masked jigsaw training makes a ViT depend less on the order of its patches."""

from __future__ import annotations

import copy
from typing import Any

from regauge.demo.context import DemoContext
from regauge.demo.digits import SPLIT, load_images, train
from regauge.results.findings import Claim, Figure, Finding, Results, Table

EPOCHS = 6  # of the fine-tuning, with and without puzzles
RATIO, RATIOS = 0.5, (0.25, 0.5, 0.75)
PLAIN, PUZZLES, UNWRAPPED = "fine-tuned plainly", "with jigsaw puzzles", "with puzzles, unwrapped"
MARGIN = 0.05  # of consistency


def show_jigsaw(context: DemoContext) -> Results:
    """Fine-tune a ViT with masked jigsaw puzzles, and measure how it depends on patch order."""
    from regauge.jigsaw import MaskedJigsaw
    from regauge.jigsaw.metrics import evaluate

    images, labels = load_images()
    images, labels = images[:SPLIT].float(), labels[:SPLIT]
    test = context.test
    variants: dict[str, dict[str, Any]] = {
        PLAIN: {"variant": "A", "ratio": 0.0},
        PUZZLES: {"ratio": RATIO, "per": "sample"},
    }
    evaluations: dict[str, Any] = {}
    for name, options in variants.items():
        wrapped = MaskedJigsaw(copy.deepcopy(context.models[0]), seed=context.seed, **options)
        with context.bar(f"train, {name}") as progress:
            train(wrapped, images, labels, context.seed + 1, progress, EPOCHS)
        evaluations[name] = evaluate(wrapped, test, RATIOS, batch=len(test))
    evaluations[UNWRAPPED] = evaluate(
        MaskedJigsaw(wrapped.unwrap(), 0.0, variant="A"), test, RATIOS, batch=len(test)
    )
    plain, shuffled, unwrapped = (evaluations[n] for n in (PLAIN, PUZZLES, UNWRAPPED))
    before, after = plain.at_half.consistency, shuffled.at_half.consistency
    finding = Finding(
        "jigsaw/consistency",
        "A ViT that is fine-tuned with masked jigsaw puzzles depends less on the order of patches "
        "than one that is fine-tuned without.",
        after > before + MARGIN,
        after,
        before,
        1.0,
        f"with half of the patches shuffled {after:.1%} of the predictions stay, {before:.1%} "
        f"without puzzles in training, {unwrapped.at_half.consistency:.1%} if shuffled patches are "
        f"not marked; accuracy on unshuffled digits {shuffled.accuracy:.1%} and "
        f"{plain.accuracy:.1%}",
        "masked jigsaw",
        measure="consistency",
    )
    claim = Claim(
        "With jigsaw training, more predictions stay the same when patches are shuffled"
        if finding.holds
        else "With jigsaw training, no more predictions stay the same when patches are shuffled",
        "good" if finding.holds else "bad",
        f"{before:.0%} → {after:.0%}",
        "of the predictions stay when half of the patches are shuffled, without and with "
        "jigsaw training",
        "In training some patches are shuffled and lose their position embedding. On unshuffled "
        f"digits the accuracy goes from {plain.accuracy:.1%} to {shuffled.accuracy:.1%}.",
        "regauge jigsaw train VIT --data IMAGES -o PUZZLED\n"
        "regauge jigsaw evaluate VIT PUZZLED --data IMAGES --report jigsaw.html",
    )
    return Results(
        "Masked jigsaw puzzles",
        (finding,),
        (_tabulate(evaluations),),
        (
            _plot(evaluations, "consistency", "Predictions that stay under shuffled patches"),
            _plot(evaluations, "accuracy", "Accuracy under shuffled patches"),
        ),
        claim=claim,
    )


def _tabulate(evaluations: dict[str, Any]) -> Table:
    return Table(
        "A ViT on digits, with and without masked jigsaw puzzles",
        ("trained on", "accuracy", *(f"consistency at {r:g}" for r in RATIOS)),
        tuple(
            (name, evaluation.accuracy, *(s.consistency for s in evaluation.shuffled))
            for name, evaluation in evaluations.items()
        ),
        f"Both continue the training of one ViT, for {EPOCHS} epochs; one seed. Consistency: the "
        "share of predictions that do not change when this share of patches is shuffled. The "
        "unknown position embedding marks shuffled patches for the wrapped model; unwrapped it is "
        "a plain ViT without that mark.",
    )


def _plot(evaluations: dict[str, Any], measure: str, title: str) -> Figure:
    y = {
        name: [
            1.0 if measure == "consistency" else evaluation.accuracy,
            *(getattr(s, measure) for s in evaluation.shuffled),
        ]
        for name, evaluation in evaluations.items()
        if name != UNWRAPPED
    }
    data = {
        "x": [0.0, *RATIOS],
        "y": y,
        "xlabel": "share of shuffled patches",
        "ylabel": "predictions that stay" if measure == "consistency" else "accuracy",
        "percent": True,
    }
    return Figure(title, "lines", data, "Measured on test images; the shuffles are random.")
