"""A chapter on merging: the average of two independently trained models is useless until one of
them is aligned with the other.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from regauge.demo.context import DemoContext
from regauge.demo.digits import EPOCHS, accuracy, load_images, make_vit, train
from regauge.demo.output import save_images, save_model, save_pickled
from regauge.errors import need
from regauge.results.findings import Finding, Results, Table

if TYPE_CHECKING:
    from regauge.core.progress import Progress
    from regauge.matching.refine import Evaluation

SPLIT = 1500
STEPS, GRID = 100, 9


def show_merge(context: DemoContext) -> Results:
    """Average two ViTs that were trained from different seeds, unmatched and matched."""
    need("transformers", "experiments")
    need("sklearn", "experiments")
    import torch

    from regauge import apply, spec_of
    from regauge.core.fold import fold_norms
    from regauge.data.tasks import Examples
    from regauge.matching import match_states
    from regauge.matching.connectivity import connect
    from regauge.matching.refine import refine
    from regauge.merging import merge_states
    from regauge.models.summary import format_columns

    images, labels = load_images()
    images = images.float()
    models = []
    for number, name in enumerate("AB"):
        model = make_vit(context.seed + 10 + number).float()
        with context.bar(f"train {name}") as progress:
            train(model, images[:SPLIT], labels[:SPLIT], context.seed + 10 + number, progress)
        models.append(model)
    for name, model in zip(("VIT", "OTHER"), models, strict=True):
        save_model(context.folder / name, model)
    save_pickled(context.folder / "PICKLED", models[0])
    save_images(context.folder / "IMAGES", SPLIT)
    test, test_labels = images[SPLIT:], labels[SPLIT:]
    spec = spec_of(models[0])
    a, b = (model.state_dict() for model in models)
    (folded, folded_a), (_, folded_b) = fold_norms(spec, a), fold_norms(spec, b)
    matched = match_states(folded, folded_a, folded_b, sweeps=0)
    with context.bar("refine") as progress:
        unlabelled = [{"pixel_values": part} for part in torch.split(images[:SPLIT], 50)]
        refined = refine(
            folded,
            folded_a,
            folded_b,
            matched.element,
            models[0],
            unlabelled,
            steps=STEPS,
            on_mark=partial(_report_step, progress),
            seed=context.seed,
        ).g
    mixed = make_vit(context.seed).float()
    accuracies = {
        "A": accuracy(models[0], test, test_labels),
        "B": accuracy(models[1], test, test_labels),
    }
    pairs = {
        "the average of A and B": (a, b),
        "the average of the matched A and B": (apply(matched.element, folded_a), folded_b),
        "matched, and refined without labels": (apply(refined, folded_a), folded_b),
    }
    for name, pair in pairs.items():
        mixed.load_state_dict(merge_states(pair, "linear"))
        accuracies[name] = accuracy(mixed, test, test_labels)
    rows = [
        ("digits", "accuracy"),
        *((name, f"{100 * value:.1f} %") for name, value in accuracies.items()),
    ]
    context.echo(format_columns(rows, right=(1,)))
    examples = Examples(len(test), 10, lambda i: ({"pixel_values": test[i]}, test_labels[i]))
    with context.bar("barrier") as progress:
        paths = connect(
            models[0],
            models[1],
            examples,
            aligner=lambda *_: refined,
            label="refined",
            grid=GRID,
            batch_size=len(test),
            progress=progress,
        )
    unmatched_accuracy, matched_accuracy, refined_accuracy = list(accuracies.values())[2:]
    better = Finding(
        "averaging/matched",
        "After matching, the average of two models is far more accurate than without it.",
        matched_accuracy > unmatched_accuracy + 0.2,
        matched_accuracy,
        unmatched_accuracy,
        min(accuracies["A"], accuracies["B"]),
        f"accuracy {100 * matched_accuracy:.1f} %, "
        f"{100 * refined_accuracy:.1f} % after refinement, "
        f"{100 * unmatched_accuracy:.1f} % without matching; A and B have "
        f"{100 * accuracies['A']:.1f} and {100 * accuracies['B']:.1f} %",
        "003",
        measure="accuracy",
    )
    table = Table(
        "Two independently trained ViTs, and their average",
        ("", "accuracy"),
        tuple(accuracies.items()),
        f"{EPOCHS} epochs each, one pair; matched by weights alone, with folded norms: distance "
        f"{matched.distance_before:.1f} before, {matched.distance:.1f} after; refined by {STEPS} "
        "steps on the training images without labels, which change only the element",
    )
    return Results(
        "averaging",
        (better, *paths.findings),
        (table, *paths.tables),
        (paths.figures[0], paths.figures[-1]),
        {},
        paths.unchecked,
    )


def _report_step(progress: Progress, evaluation: Evaluation) -> None:
    is_last = evaluation.step >= STEPS
    message = "" if is_last else f"divergence {evaluation.held_out_loss:.3f}"
    progress(evaluation.step, STEPS, message)
