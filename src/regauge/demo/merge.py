"""A chapter on two models that learned the same apart: their average is worthless, until one of
them is written in the basis of the other.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from regauge.demo.digits import EPOCHS, accuracy, load_images, make_vit, train
from regauge.demo.output import save_images, save_model, save_pickled
from regauge.demo.stage import DemoContext
from regauge.errors import need
from regauge.results.findings import Finding, Results, Table

if TYPE_CHECKING:
    from collections.abc import Callable

    from regauge.matching.refine import Evaluation

SPLIT = 1500
STEPS, GRID = 100, 9


def show_merge(stage: DemoContext) -> Results:
    """Two ViTs that learned the digits from different seeds, averaged: as they stand, and after a
    match.
    """
    need("transformers", "experiments")
    need("sklearn", "experiments")
    import torch

    from regauge import apply, fold_norms, match, merge, spec_of
    from regauge.data.tasks import Examples
    from regauge.matching.connectivity import connect
    from regauge.matching.refine import refine
    from regauge.models.summary import format_columns

    images, labels = load_images()
    images = images.float()
    models = []
    for number, name in enumerate("AB"):
        model = make_vit(stage.seed + 10 + number).float()
        with stage.bar(f"train {name}") as tick:
            train(model, images[:SPLIT], labels[:SPLIT], stage.seed + 10 + number, tick)
        models.append(model)
    for name, model in zip(("VIT", "OTHER"), models, strict=True):
        save_model(stage.folder / name, model)
    save_pickled(stage.folder / "PICKLED", models[0])
    save_images(stage.folder / "IMAGES", SPLIT)
    test, answers = images[SPLIT:], labels[SPLIT:]
    spec = spec_of(models[0])
    a, b = (model.state_dict() for model in models)
    (folded, one), (_, other) = fold_norms(spec, a), fold_norms(spec, b)
    found = match(folded, one, other, sweeps=0)
    with stage.bar("refine") as tick:
        unlabelled = [{"pixel_values": part} for part in torch.split(images[:SPLIT], 50)]
        told = partial(_report_step, tick)
        refined = refine(
            folded,
            one,
            other,
            found.element,
            models[0],
            unlabelled,
            steps=STEPS,
            on_mark=told,
            seed=stage.seed,
        ).g
    mixed = make_vit(stage.seed).float()
    accuracies = {"A": accuracy(models[0], test, answers), "B": accuracy(models[1], test, answers)}
    pairs = {
        "the average of A and B": (a, b),
        "the average of the matched A and B": (apply(found.element, one), other),
        "matched, and refined without labels": (apply(refined, one), other),
    }
    for name, pair in pairs.items():
        mixed.load_state_dict(merge(pair, "linear"))
        accuracies[name] = accuracy(mixed, test, answers)
    rows = [
        ("digits", "accuracy"),
        *((name, f"{100 * value:.1f} %") for name, value in accuracies.items()),
    ]
    stage.echo(format_columns(rows, right=(1,)))
    examples = Examples(len(test), 10, lambda i: ({"pixel_values": test[i]}, answers[i]))
    with stage.bar("barrier") as tick:
        paths = connect(
            models[0],
            models[1],
            examples,
            aligner=lambda *_: refined,
            label="refined",
            grid=GRID,
            batch_size=len(test),
            progress=tick,
        )
    plain, matched, learned = list(accuracies.values())[2:]
    better = Finding(
        "averaging/matched",
        "After a match the average of two models reads far better than the average of the two "
        "as they stand.",
        matched > plain + 0.2,
        matched,
        plain,
        min(accuracies["A"], accuracies["B"]),
        f"{100 * matched:.1f} % right, {100 * learned:.1f} % after learned steps, "
        f"{100 * plain:.1f} % without a match; A and B themselves "
        f"{100 * accuracies['A']:.1f} and {100 * accuracies['B']:.1f} %",
        "003",
        measure="accuracy",
    )
    table = Table(
        "Two ViTs that learned apart, and their average",
        ("", "accuracy"),
        tuple(accuracies.items()),
        f"{EPOCHS} epochs each, one pair; matched by weights alone, with folded norms: distance "
        f"{found.distance_before:.1f} before, "
        f"{found.distance:.1f} after; refined by {STEPS} steps on the training images without "
        "their labels, which move only the element",
    )
    return Results(
        "averaging",
        (better, *paths.findings),
        (table, *paths.tables),
        (paths.figures[0], paths.figures[-1]),
        {},
        paths.unchecked,
    )


def _report_step(tick: Callable[[int, int, str], None], mark: Evaluation) -> None:
    tick(mark.step, STEPS, f"divergence {mark.held_out_loss:.3f}" if mark.step < STEPS else "")
