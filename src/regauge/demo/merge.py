"""The second chapter: two models trained independently can be averaged once they are aligned."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from regauge.demo.context import DemoContext
from regauge.demo.digits import EPOCHS, SPLIT, accuracy, load_images, make_vit
from regauge.results.findings import Claim, Figure, Finding, Results, Table

if TYPE_CHECKING:
    from regauge.core.progress import Progress
    from regauge.matching.refine import Evaluation

STEPS, POINTS = 100, 11  # steps of the refinement; models measured on the way from A to B
UNALIGNED, ALIGNED = "not aligned", "aligned"


def show_merge(context: DemoContext) -> Results:
    """Average two ViTs that were trained from different seeds, before and after alignment."""
    import torch

    from regauge import apply, spec_of
    from regauge.core.fold import fold_norms
    from regauge.matching import match_states
    from regauge.matching.connectivity import connect
    from regauge.matching.refine import refine
    from regauge.merging import merge_states

    first, second = context.models
    spec = spec_of(first)
    a, b = first.state_dict(), second.state_dict()
    (folded, folded_a), (_, folded_b) = fold_norms(spec, a), fold_norms(spec, b)
    matched = match_states(folded, folded_a, folded_b, sweeps=0)
    with context.bar("align") as progress:
        images = load_images()[0][:SPLIT].float()
        refined = refine(
            folded,
            folded_a,
            folded_b,
            matched.element,
            first,
            [{"pixel_values": part} for part in torch.split(images, 50)],
            steps=STEPS,
            on_mark=partial(_report_step, progress),
            seed=context.seed,
        ).g
    with context.bar("measure the path") as progress:
        paths = connect(
            first,
            second,
            context.test,
            aligner=lambda *_: refined,
            label=ALIGNED,
            points=POINTS,
            calibrate=False,
            batch_size=len(context.test),
            progress=progress,
        )
    by_weights = make_vit(context.seed).float()
    by_weights.load_state_dict(merge_states((apply(matched.element, folded_a), folded_b), "linear"))
    curves = paths.figures[1].data
    y = {UNALIGNED: list(curves["y"]["unaligned"]), ALIGNED: list(curves["y"][ALIGNED])}
    half = list(curves["x"]).index(0.5)
    before, after = y[UNALIGNED][half], y[ALIGNED][half]
    worse = min(y[UNALIGNED][0], y[UNALIGNED][-1])
    accuracies = {
        "A": y[UNALIGNED][0],
        "B": y[UNALIGNED][-1],
        "average, not aligned": before,
        "average, aligned by the weights alone": accuracy(by_weights, context.test),
        "average, aligned on images without labels": after,
    }
    better = Finding(
        "averaging/matched",
        "After alignment, the average of two models is far more accurate than without it.",
        after > before + 0.2,
        after,
        before,
        worse,
        f"accuracy {after:.1%}, {before:.1%} without alignment; A and B have "
        f"{accuracies['A']:.1%} and {accuracies['B']:.1%}",
        measure="accuracy",
    )
    claim = Claim(
        "Two models trained independently can be averaged, once they are aligned"
        if after > worse - 0.05
        else "Alignment makes the average of two models better, and not yet as good as they are",
        "good" if after > worse - 0.05 else "mixed" if better.holds else "bad",
        f"{before:.0%} → {after:.0%}",
        "accuracy of the average, before and after alignment",
        f"A and B learned the same digits from different seeds ({accuracies['A']:.0%} and "
        f"{accuracies['B']:.0%} correct). Alignment changes the basis of A to that of B, and "
        "nothing of what A computes.",
        "regauge match VIT OTHER --refine IMAGES -o ALIGNED\n"
        "regauge merge ALIGNED OTHER --data IMAGES -o AVERAGE",
    )
    figure = Figure(
        "Accuracy of mixtures of A and B",
        "lines",
        {
            "x": list(curves["x"]),
            "y": y,
            "xlabel": "share of B in the mixture",
            "ylabel": "accuracy",
            "percent": True,
        },
        "Each point is a model whose weights are a mixture of those of A and B.",
    )
    table = Table(
        "Two ViTs that were trained independently, and their average",
        ("", "accuracy"),
        tuple(accuracies.items()),
        f"{EPOCHS} epochs each, one pair. Distance of the weights: "
        f"{matched.distance_before:.1f} before, {matched.distance:.1f} after alignment by the "
        f"weights; then {STEPS} steps on the training images without labels, which change only the "
        "basis.",
    )
    return Results(
        "Averaging models",
        (better, *paths.findings),
        (table, *paths.tables),
        (figure, paths.figures[0]),
        unchecked=paths.unchecked,
        claim=claim,
    )


def _report_step(progress: Progress, evaluation: Evaluation) -> None:
    is_last = evaluation.step >= STEPS
    message = "" if is_last else f"divergence {evaluation.held_out_loss:.3f}"
    progress(evaluation.step, STEPS, message)
