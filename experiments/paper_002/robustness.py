"""Tables 4 and 9 of the masked-jigsaw paper: robustness to corruptions, to hard images, and to
images of unknown classes.

ImageNet-A holds images that a ResNet gets wrong; here they are the test images that the ResNet of
Table 1 gets wrong, in every preset. That ResNet is also the reference of mCE, as AlexNet is in the
benchmark. MNIST replaces ImageNet-O, because digits belong to none of the ten classes. With the
preset `paper` it is a folder `imagenet-o` beside `imagenet`.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from experiments.paper_002.accuracy import above, describe_trend, results, trials_of
from experiments.paper_002.jigsaw_cells import (
    TRAINED,
    How,
    how,
    model_of,
    parameters_with,
    subjects_of,
    trained,
)
from experiments.shared.cells import Cell
from experiments.shared.presets import From, Subject
from experiments.shared.runner import Lab
from regauge.checkpoints.resume import Outcome, ResumeState
from regauge.data.tasks import prepare
from regauge.jigsaw.corruptions import CORRUPTIONS
from regauge.jigsaw.robustness import (
    aupr,
    aurra,
    corruption_errors,
    evaluate_corruptions,
    mean_corruption_error,
    mean_error,
    score_predictions,
)
from regauge.results.findings import Figure, Finding, Results, Table

IMAGES = {"small": 250, "paper": 50_000, "pico": 4}  # that are corrupted in 75 ways
# The paper's Table 9; it has no zoom blur, snow, frost, fog and brightness.
PRINTED = {
    "gaussian_noise": (41.0, 39.9),
    "shot_noise": (42.7, 41.8),
    "impulse_noise": (42.8, 41.2),
    "defocus_blur": (50.5, 49.9),
    "glass_blur": (59.4, 58.6),
    "motion_blur": (45.5, 47.4),
    "contrast": (36.1, 34.5),
    "elastic_transform": (43.0, 43.3),
    "pixelate": (42.4, 40.0),
    "jpeg_compression": (36.6, 35.8),
}


def ways_of(lab: Lab) -> dict[str, How]:
    return {"plain": how("A"), "MJP": how("J", TRAINED[lab.preset_name])}


def suffer(p: Mapping[str, Any], data: Mapping[str, Any], work: ResumeState) -> Outcome:
    """A trained model's errors under every corruption; how sure it is of test images, whether it is
    right, and how sure of images of no class.
    """
    wrapped = trained(p, data["weights"], work.device)
    test, outside = (
        prepare(p["task"], data["test"]),
        prepare({**p["task"], "labelled": False}, data["outside"]),
    )
    sure, right = score_predictions(wrapped, test, p["batch"])
    strange, _ = score_predictions(wrapped, outside, p["batch"])
    some = data["test"].take(p["images"])
    errors = evaluate_corruptions(wrapped, some, p["task"], batch=p["batch"])
    tensors = {"sure": sure, "right": right, "strange": strange}
    return Outcome(
        {"errors": errors, "images": len(some)},
        {k: torch.from_numpy(v).contiguous() for k, v in tensors.items()},
    )


SUFFER = Cell("jigsaw-robust", 1, suffer)


def suffered(lab: Lab, key: str, way: How, trial: int) -> Outcome:
    subject = subjects_of(lab.preset_name)[key]
    weights = model_of(lab, subject, way, trial)
    parameters = {
        **parameters_with(subject, way),
        "batch": subject.batch,
        "images": IMAGES[lab.preset_name],
    }
    data = {
        "weights": weights,
        "test": lab.open(subject.test),
        "outside": lab.open(_outside(lab, subject)),
    }
    return lab.run(
        SUFFER,
        parameters,
        data,
        f"corrupt images for {subject.name}, {way['variant']}, seed {trial}",
    )


def _outside(lab: Lab, subject: Subject) -> From:
    if lab.preset_name == "paper":
        return From("imagenet-o", size=subject.task["size"])
    return (
        From("mnist.npz", {"image": "X_test", "label": "y_test"}, rows=1000)
        if lab.preset_name == "small"
        else From("digits", rows=60)
    )


def _all(lab: Lab) -> tuple[Outcome, dict[str, list[Outcome]]]:
    ways = ways_of(lab)
    lab.total = 2 + 2 * len(ways) * trials_of(lab)
    reference = suffered(lab, "resnet", how("A"), 0)
    return reference, {
        name: [suffered(lab, "vit", way, t) for t in range(trials_of(lab))]
        for name, way in ways.items()
    }


def table4(lab: Lab) -> Results:
    """Robustness: mCE under corruptions, accuracy and AURRA on hard images, AUPR on images of no
    known class.
    """
    reference, found = _all(lab)
    hard = reference.tensors["right"].numpy() == 0
    seeds: dict[str, list[list[float]]] = {}  # by way and measure, one value for each seed
    for name, runs in found.items():
        each = []
        for one in runs:
            sure, right = one.tensors["sure"].numpy(), one.tensors["right"].numpy()
            error = mean_corruption_error(one.values["errors"], reference.values["errors"])
            each.append(
                [
                    error,
                    mean_error(one.values["errors"]),
                    right[hard].mean(),
                    aurra(sure[hard], right[hard]),
                    aupr(sure, one.tensors["strange"].numpy()),
                ]
            )
        seeds[name] = [[100 * float(x) for x in column] for column in zip(*each, strict=True)]
    measured = {
        name: [statistics.fmean(column) for column in columns] for name, columns in seeds.items()
    }
    printed = {"plain": (44.0, 19.2, 25.1, 20.9), "MJP": (41.5, 21.6, 29.8, 22.6)}
    rows: tuple[tuple[Any, ...], ...] = tuple(
        (f"ViT, {name}", *values, *printed[name]) for name, values in measured.items()
    )
    columns = (
        "model",
        "mCE (%)",
        "mean error (%)",
        "hard images: accuracy (%)",
        "AURRA (%)",
        "AUPR (%)",
        "paper: mCE",
        "paper: ImageNet-A",
        "paper: AURRA",
        "paper: AUPR",
    )
    better = {"mCE": -1, "accuracy on hard images": 1, "AURRA": 1, "AUPR": 1}
    pairs = zip(better.items(), ([seeds[n][i] for n in found] for i in (0, 2, 3, 4)), strict=True)
    findings = [
        _compared(f"robust/{what}", f"Puzzles in training improve the {what}.", b, a, sign, lab)
        for (what, sign), (a, b) in pairs
    ]
    note = (
        f"Means over seeds; {reference.values['images']} images under 15 "
        f"corruptions of 5 severities; {int(hard.sum())} hard images."
    )
    detail = (
        (
            "frost and snow are made from noise here, where the benchmark has photographs: "
            "regauge.jigsaw.corruptions"
        ),
    )
    return results(
        lab,
        "002/table4",
        "Table 4: robustness",
        findings,
        (Table("Robustness", columns, rows, note),),
        (),
        detail,
    )


def table9(lab: Lab) -> Results:
    """Errors under each corruption of ImageNet-C, with and without puzzles in training."""
    reference, found = _all(lab)
    errors = {
        n: {
            c: 100 * statistics.fmean(statistics.fmean(one.values["errors"][c]) for one in runs)
            for c in CORRUPTIONS
        }
        for n, runs in found.items()
    }
    relative = {
        n: {
            c: statistics.fmean(
                corruption_errors(o.values["errors"], reference.values["errors"])[c] for o in runs
            )
            for c in CORRUPTIONS
        }
        for n, runs in found.items()
    }
    rows: tuple[tuple[Any, ...], ...] = tuple(
        (
            c,
            errors["plain"][c],
            errors["MJP"][c],
            100 * relative["plain"][c],
            100 * relative["MJP"][c],
            *PRINTED.get(c, (None, None)),
        )
        for c in CORRUPTIONS
    )
    columns = (
        "corruption",
        "plain: error (%)",
        "MJP: error (%)",
        "plain: CE (%)",
        "MJP: CE (%)",
        "paper: plain",
        "paper: MJP",
    )
    fewer = sum(errors["MJP"][c] < errors["plain"][c] for c in CORRUPTIONS)
    mean = {n: [mean_error(one.values["errors"]) for one in runs] for n, runs in found.items()}
    finding = Finding(
        "robust/corruptions",
        "Puzzles in training lower the error under most corruptions.",
        None,
        fewer / len(CORRUPTIONS),
        0.5,
        1.0,
        describe_trend(
            above(mean["MJP"], mean["plain"], -1),
            f"lower under {fewer} of {len(CORRUPTIONS)} corruptions",
        ),
        "002 Tab. 9",
        "share of corruptions",
        trials=trials_of(lab),
    )
    figure = Figure(
        "Error by corruption",
        "bars",
        {
            "labels": list(CORRUPTIONS),
            "y": {n: list(v.values()) for n, v in errors.items()},
            "ylabel": "error, percent",
        },
    )
    note = (
        "Mean error over five severities and seeds. CE (corruption error) is relative to the "
        "ResNet of Table 1."
    )
    return results(
        lab,
        "002/table9",
        "Table 9: errors under corruptions",
        (finding,),
        (Table("Corruptions", columns, rows, note),),
        (figure,),
    )


def _compared(
    key: str, statement: str, values: Sequence[float], before: Sequence[float], sign: int, lab: Lab
) -> Finding:
    value, base = statistics.fmean(values), statistics.fmean(before)
    sentence = describe_trend(
        above(values, before, sign), f"{value:.1f} with puzzles, {base:.1f} without"
    )
    return Finding(
        key,
        statement,
        None,
        value,
        base if sign > 0 else None,
        None if sign > 0 else base,
        sentence,
        "002 Tab. 4",
        "percent",
        trials=trials_of(lab),
    )
