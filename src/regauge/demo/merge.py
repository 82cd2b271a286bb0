"""A chapter on two models that learned the same apart: their average is worthless, until one of
them is written in the basis of the other.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from regauge.demo.digits import EPOCHS, accuracy, load, train, vit
from regauge.demo.output import keep_digits, keep_model, keep_pickled
from regauge.demo.stage import Stage
from regauge.errors import need
from regauge.results.findings import Finding, Results, Table

if TYPE_CHECKING:
    from collections.abc import Callable

    from regauge.matching.refine import Mark

SPLIT = 1500
STEPS, GRID = 100, 9


def averaging(stage: Stage) -> Results:
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
    from regauge.models.summary import columns

    images, labels = load()
    images = images.float()
    models = []
    for number, name in enumerate("AB"):
        model = vit(stage.seed + 10 + number).float()
        with stage.bar(f"train {name}") as tick:
            train(model, images[:SPLIT], labels[:SPLIT], stage.seed + 10 + number, tick)
        models.append(model)
    for name, model in zip(("VIT", "OTHER"), models, strict=True):
        keep_model(stage.folder / name, model)
    keep_pickled(stage.folder / "PICKLED", models[0])
    keep_digits(stage.folder / "IMAGES", SPLIT)
    test, answers = images[SPLIT:], labels[SPLIT:]
    spec = spec_of(models[0])
    a, b = (model.state_dict() for model in models)
    (folded, one), (_, other) = fold_norms(spec, a), fold_norms(spec, b)
    found = match(folded, one, other, sweeps=0)
    with stage.bar("refine") as tick:
        unlabelled = [{"pixel_values": part} for part in torch.split(images[:SPLIT], 50)]
        told = partial(_told, tick)
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
    mixed = vit(stage.seed).float()
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
    stage.say(columns(rows, right=(1,)))
    examples = Examples(len(test), 10, lambda i: ({"pixel_values": test[i]}, answers[i]))
    with stage.bar("barrier") as tick:
        paths = connect(
            models[0],
            models[1],
            examples,
            mover=lambda *_: refined,
            moved="refined",
            grid=GRID,
            batch=len(test),
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


def _told(tick: Callable[[int, int, str], None], mark: Mark) -> None:
    tick(mark.step, STEPS, f"divergence {mark.held:.3f}" if mark.step < STEPS else "")
