"""Tables 1 to 3 and Figures 2 and 6 of the masked-jigsaw paper: accuracy, consistency and
difference norm by backbone, variant and ratio; and experiments beyond the paper.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from experiments.paper_002.jigsaw_cells import (
    RATIOS,
    SHOWN,
    TRAINED,
    How,
    describe,
    how,
    model_of,
    score_of,
    subjects_of,
)
from experiments.shared.presets import Subject
from experiments.shared.runner import Lab
from experiments.shared.verdicts import ENOUGH, compare
from regauge.jigsaw.metrics import RATIO
from regauge.jigsaw.variants import VARIANTS
from regauge.results.findings import INCONCLUSIVE, Figure, Finding, Results, Table, spread_of

Scores = list[Mapping[str, Any]]  # one for each seed
LONG_VIT = "vit-300-epochs"  # the subject that is trained for 300 epochs
MEASURES = ("accuracy", "consistency", "norm", "squared")
SEEDS = {"small": 3, "paper": 1, "pico": 1}


def trials_of(lab: Lab) -> int:
    return lab.seeds or SEEDS[lab.preset_name]


def scored(lab: Lab, key: str, ways: Sequence[How]) -> list[Scores]:
    """The scores of a backbone in several ways, for every seed. "vit@0.1" is trained for a tenth of
    its time.
    """
    subject = _subject(lab, key)
    lab.ahead(_part, [(key, way, trial) for trial in range(trials_of(lab)) for way in ways])
    return [
        [score_of(lab, subject, way, trial).values for trial in range(trials_of(lab))]
        for way in ways
    ]


def _part(lab: Lab, item: tuple[str, How, int]) -> None:
    key, way, trial = item
    score_of(lab, _subject(lab, key), way, trial)


def _subject(lab: Lab, key: str) -> Subject:
    name, _, share = key.partition("@")
    subject = subjects_of(lab.preset_name)[name]
    if not share or float(share) == 1:
        return subject
    recipe = {
        k: max(1, round(v * float(share))) if k in ("steps", "epochs") else v
        for k, v in (subject.recipe or {}).items()
    }
    return replace(
        subject,
        name=f"{subject.name}, {float(share):.0%} of the schedule".replace("%", " %"),
        recipe=recipe,
    )


def value(one: Mapping[str, Any], measure: str, ratio: float = RATIO) -> float:
    """A measure of one seed; all but the accuracy of plain images are under puzzles of a ratio."""
    if measure == "accuracy":
        return float(one["accuracy"])
    if measure == "unwrapped":
        return float(one["bare"]["consistency"])
    at = next(s for s in one["shuffled"] if s["ratio"] == ratio)
    return float(at["accuracy" if measure == "shuffled" else measure])


def mean(scores: Scores, measure: str, ratio: float = RATIO) -> float:
    return statistics.fmean(value(one, measure, ratio) for one in scores)


def spread(scores: Scores, measure: str) -> float | None:
    return spread_of([value(one, measure) for one in scores])


def table1(lab: Lab) -> Results:
    """Backbones with and without masked jigsaw puzzles: accuracy, difference norm and consistency
    of ViT, Swin and ResNet.
    """
    printed = {
        "vit": ((79.8, 16.21, 64.3), (80.5, 8.96, 82.9)),
        "swin": ((81.3, 15.49, 41.5), (81.3, 12.36, 66.9)),
        "resnet": ((79.3, 11.77, 51.5), (79.4, 7.11, 69.3)),
    }
    subjects = subjects_of(lab.preset_name)
    lab.total = 2 * 2 * len(subjects) * trials_of(lab)
    rows: list[tuple[Any, ...]] = []
    findings: list[Finding] = []
    for key in subjects:
        judged, paper = key.startswith("vit"), printed.get(key, printed["vit"])
        base, puzzled = scored(
            lab, key, [how("A"), how("E" if key == "resnet" else "J", TRAINED[lab.preset_name])]
        )
        name = subjects[key].name
        rows += [(name, *row_of(base), *paper[0]), (f"{name} + MJP", *row_of(puzzled), *paper[1])]
        findings.append(
            better(
                f"{'goal/' if judged else ''}{key}/consistency",
                f"({name}) trained with puzzles",
                puzzled,
                base,
                judged=judged,
            )
        )
        findings.append(shorter(f"{key}/norm", name, puzzled, base))
    columns = ("model", *COLUMNS, "paper: accuracy (%)", "paper: norm", "paper: consistency (%)")
    ratios = f"Training ratio {TRAINED[lab.preset_name]:g}, inference ratio {RATIO:g}."
    note = (
        f"{ratios} {NOTE} A ResNet has no position embeddings: with MJP it is trained on shuffled "
        "patches only (variant E)."
    )
    return results(
        lab,
        "002/table1",
        "Table 1: backbones with and without puzzles",
        findings,
        (Table("Backbones", columns, tuple(rows), note),),
        (),
    )


def table2(lab: Lab) -> Results:
    """The variants A to J: the contribution of each part of the method."""
    printed = dict(
        zip(
            "ABCDEFGHIJ",
            (
                (79.8, 64.3),
                (77.5, 100.0),
                (74.9, 74.8),
                (80.0, 64.0),
                (79.2, 73.8),
                (79.9, 79.6),
                (80.1, 83.8),
                (79.9, 83.4),
                (80.0, 83.8),
                (80.5, 82.9),
            ),
            strict=True,
        )
    )
    lab.total = 2 * len(VARIANTS) * trials_of(lab)
    found = dict(
        zip(
            VARIANTS,
            scored(lab, "vit", [how(letter, TRAINED[lab.preset_name]) for letter in VARIANTS]),
            strict=True,
        )
    )
    rows = tuple(
        (f"{letter}: {VARIANTS[letter].name}", *row_of(scores), *printed[letter])
        for letter, scores in found.items()
    )
    sure = mean(found["B"], "consistency")
    findings = (
        Finding(
            "variants/B",
            "Without positions a ViT does not notice puzzles: its consistency is 100 %.",
            sure >= 1 - TIES,
            sure,
            mean(found["A"], "consistency"),
            1.0,
            f"{100 * sure:.2f} %; the order in which numbers are added may decide a tie",
            "002 Tab. 2",
            "consistency",
            trials=len(found["B"]),
        ),
        better("goal/variants/J", "trained with the whole method", found["J"], found["A"]),
        *(
            versus(f"variants/{a}-{b}/{m}", text, found[a], found[b], m, lab)
            for a, b, m, text in CLAIMS
        ),
    )
    note = (
        f"Training ratio {TRAINED[lab.preset_name]:g} (C shuffles all patches and pixels), "
        f"inference ratio {RATIO:g}. {NOTE}"
    )
    columns = ("variant", *COLUMNS, "paper: accuracy (%)", "paper: consistency (%)")
    return results(
        lab,
        "002/table2",
        "Table 2: the variants of the method",
        findings,
        (Table("ViT", columns, rows, note),),
        (),
    )


# pairs of variants, a measure, and the claim of the paper's numbers
CLAIMS = (
    ("A", "B", "accuracy", "Positions make a ViT more accurate."),
    ("A", "C", "accuracy", "Shuffling all patches and pixels costs accuracy."),
    ("E", "A", "consistency", "The shuffle alone makes a ViT more consistent."),
    (
        "F",
        "E",
        "consistency",
        "A second table by place makes it more consistent than the shuffle alone.",
    ),
    (
        "G",
        "E",
        "consistency",
        "The unknown embedding makes it more consistent than the shuffle alone.",
    ),
    ("G", "E", "accuracy", "The unknown embedding makes it more accurate than the shuffle alone."),
    ("J", "G", "accuracy", "The regression of positions makes it more accurate."),
)
COLUMNS = (
    "accuracy (%)",
    "accuracy ±",
    "difference norm",
    "squared norm",
    "consistency (%)",
    "consistency ±",
    "unwrapped (%)",
)
NOTE = (
    "Means and standard deviations (±) over seeds. Under puzzles a wrapped model knows which "
    'patches are shuffled, because they carry the unknown embedding; "unwrapped" is the '
    "consistency "
    "of the plain checkpoint, which does not know."
)
TIES = 1e-3
TIE = 0.01  # the share of a number below which a difference is not clear
VERDICTS = {True: "holds", False: "does not hold", None: "no clear difference"}


def table3(lab: Lab) -> Results:
    """Masked jigsaw puzzles of different ratios in training: accuracy, difference norm,
    consistency.
    """
    ways = by_ratio()
    lab.total = 2 * len(ways) * trials_of(lab)
    found = scored(lab, "vit", ways)
    columns = ("training ratio", *COLUMNS, "paper: accuracy (%)", "paper: consistency (%)")
    printed = {
        0.0: (80.0, 64.0),
        0.1: (80.5, 82.9),
        0.3: (None, 88.1),
        0.5: (None, 90.5),
        0.7: (80.2, 92.3),
        0.9: (80.3, 93.1),
    }
    rows = tuple(
        (way["ratio"], *row_of(scores), *printed[way["ratio"]])
        for way, scores in zip(ways, found, strict=True)
    )
    shares = [way["ratio"] for way in ways]
    consistencies, norms = ([mean(scores, m) for scores in found] for m in ("consistency", "norm"))
    findings = (
        *(
            better(
                f"ratio/{way['ratio']:g}",
                f"trained with {describe(way)}",
                scores,
                found[0],
                judged=False,
            )
            for way, scores in zip(ways[1:], found[1:], strict=True)
        ),
        trend(
            "ratio/consistency",
            "The larger the training ratio, the more consistent.",
            shares,
            consistencies,
            1,
            lab,
            [[value(one, "consistency") for one in found[i]] for i in (0, -1)],
        ),
        trend(
            "ratio/norm",
            "The larger the training ratio, the smaller the difference norm.",
            shares,
            norms,
            -1,
            lab,
            [[value(one, "norm") for one in found[i]] for i in (0, -1)],
        ),
    )
    curves = {"consistency": consistencies, "accuracy": [mean(s, "accuracy") for s in found]}
    note = (
        f"Inference ratio {RATIO:g}. Training ratio 0 is variant D: the regression of positions "
        "without "
        f"puzzles. {NOTE}"
    )
    figure = lines("Consistency and accuracy by training ratio", shares, curves, "training ratio")
    return results(
        lab,
        "002/table3",
        "Table 3: training with different ratios",
        findings,
        (Table("ViT", columns, rows, note),),
        (figure,),
    )


def by_ratio() -> list[How]:
    return [how("D"), *(how("J", ratio) for ratio in RATIOS)]


def figure2(lab: Lab) -> Results:
    """Accuracy under puzzles of every inference ratio: with and without the method, of ViT and
    Swin, and by training ratio.
    """
    ways, ratio = by_ratio(), TRAINED[lab.preset_name]
    lab.total = 2 * (1 + len(ways) + 2) * trials_of(lab)
    plain, *by = scored(lab, "vit", [how("A"), *ways])
    swins = scored(lab, "swin", [how("A"), how("J", ratio)])
    puzzled = by[[way["ratio"] for way in ways].index(ratio)]
    panels = {
        "(a) ViT": {"plain": plain, f"MJP, training ratio {ratio:g}": puzzled},
        "(b) Swin": {"plain": swins[0], f"MJP, training ratio {ratio:g}": swins[1]},
        "(c) ViT": {
            f"training ratio {way['ratio']:g}": scores for way, scores in zip(ways, by, strict=True)
        },
    }
    figures: list[Figure] = []
    rows: list[tuple[Any, ...]] = []
    for title, series in panels.items():
        curves = {
            name: [mean(s, "accuracy"), *(mean(s, "shuffled", r) for r in RATIOS)]
            for name, s in series.items()
        }
        figures.append(
            lines(
                f"{title}: accuracy under puzzles",
                [0.0, *RATIOS],
                curves,
                "inference ratio",
                "accuracy",
            )
        )
        rows += [
            (f"{title}, {name}", *(100 * v for v in values)) for name, values in curves.items()
        ]
    columns = ("model", *(f"ratio {r:g}" for r in (0.0, *RATIOS)))
    worst = RATIOS[-1]
    findings = [
        versus(
            f"figure2/{key}",
            f"Under puzzles of ratio {worst:g} a {name} that was trained with them is more "
            "accurate.",
            a,
            b,
            "shuffled",
            lab,
            worst,
        )
        for key, name, a, b in (
            ("vit", "ViT", puzzled, plain),
            ("swin", "Swin", swins[1], swins[0]),
        )
    ]
    ends = [mean(s, "shuffled", worst) for s in by]
    findings.append(
        trend(
            "figure2/ratio",
            "The larger the training ratio, the more accurate under large puzzles.",
            [w["ratio"] for w in ways],
            ends,
            1,
            lab,
            [[value(one, "shuffled", worst) for one in by[i]] for i in (0, -1)],
        )
    )
    table = Table(
        "Accuracy under puzzles", columns, tuple(rows), "Accuracy in percent, means over seeds."
    )
    return results(
        lab, "002/figure2", "Figure 2: accuracy by inference ratio", findings, (table,), figures
    )


def figure6(lab: Lab) -> Results:
    """Convergence with and without masked jigsaw puzzles."""
    subject = subjects_of(lab.preset_name)["vit"]
    ways = {"plain": how("A"), "MJP": how("J", TRAINED[lab.preset_name])}
    lab.total = len(ways) * trials_of(lab)
    seen = {
        name: [model_of(lab, subject, way, t).values["seen"] for t in range(trials_of(lab))]
        for name, way in ways.items()
    }
    steps = [step for step, _ in seen["plain"][0]]
    curves = {
        name: [statistics.fmean(one[i][1] for one in runs) for i in range(len(steps))]
        for name, runs in seen.items()
    }
    areas = {
        name: [statistics.fmean(a for _, a in one) for one in runs] for name, runs in seen.items()
    }
    gain = statistics.fmean(areas["MJP"]) - statistics.fmean(areas["plain"])
    finding = Finding(
        "convergence",
        "Puzzles make training converge faster: the mean of its accuracy over the steps is higher.",
        None,
        statistics.fmean(areas["MJP"]),
        statistics.fmean(areas["plain"]),
        None,
        describe_trend(
            above(areas["MJP"], areas["plain"]),
            f"{100 * gain:+.2f} points on average over training",
        ),
        "002 Fig. 6",
        "mean accuracy over the steps",
        trials=trials_of(lab),
    )
    table = Table(
        "Accuracy by step",
        ("step", *(f"{name}: accuracy (%)" for name in curves)),
        tuple((s, *(100 * curves[n][i] for n in curves)) for i, s in enumerate(steps)),
        f"Means over seeds, on {SHOWN:,} test images.",
    )
    figure = lines("Accuracy by step", [float(s) for s in steps], curves, "step", "accuracy")
    return results(lab, "002/figure6", "Figure 6: convergence", (finding,), (table,), (figure,))


PAPERS = "paper: ratio 0.1 per batch"
BEYOND: dict[str, How] = {
    "plain": how("A"),
    PAPERS: how("J"),
    "ratio 0.3 per batch": how("J", 0.3),
    "ratio 0.5 per batch": how("J", 0.5),
    "ratio 0.3 per image": how("J", 0.3, per="sample"),
    "ratio 0.5 per image, no puzzles in the last quarter of training": how(
        "J", 0.5, per="sample", until=0.75
    ),
    "ratio rising to 0.9 per image": how("J", 0.9, per="sample", ramp=True),
}
LONG = (
    "plain",
    PAPERS,
    "ratio 0.3 per batch",
    "ratio 0.5 per image, no puzzles in the last quarter of training",
)  # the settings of the long trainings


def beyond(lab: Lab) -> Results:
    """Beyond the paper: larger, rising and ending ratios and puzzles per image, against the paper's
    setting in the same run.
    """
    subjects = subjects_of(lab.preset_name)
    tried = {"vit": tuple(BEYOND), LONG_VIT: LONG}
    tried = {key: names for key, names in tried.items() if key in subjects}
    lab.total = 2 * trials_of(lab) * sum(len(names) for names in tried.values())
    findings, tables = [], []
    for key, names in tried.items():
        found = dict(zip(names, scored(lab, key, [BEYOND[n] for n in names]), strict=True))
        margin = max(spread(s, "accuracy") or 0.0 for s in found.values())
        level = {
            n: s
            for n, s in found.items()
            if n != "plain" and mean(s, "accuracy") >= mean(found[PAPERS], "accuracy") - margin
        }
        best = max(level, key=lambda n: mean(level[n], "consistency"))
        one = better(
            f"{'goal/' if key == LONG_VIT else ''}beyond/{key}",
            f'trained with "{best}"',
            found[best],
            found[PAPERS],
            judged=False,
        )
        statement = (
            "There is a setting that is more consistent than the paper's at the same "
            "accuracy, to within the seeds' spread"
        )
        findings.append(
            replace(
                one,
                statement=f"{statement} ({subjects[key].name}).",
                sentence=f"{INCONCLUSIVE}, selected on the test data: {best}; {one.sentence}",
            )
        )
        rows = tuple((name, *row_of(scores)) for name, scores in found.items())
        tables.append(
            Table(
                subjects[key].name,
                ("training", *COLUMNS),
                rows,
                f"Inference ratio {RATIO:g}. {NOTE}",
            )
        )
    return results(
        lab, "002/beyond", "Beyond the paper: other puzzles", findings, tuple(tables), ()
    )


SHARES = (0.1, 0.2, 0.5, 1.0)


def _length(share: float) -> str:
    """Describe the length of a training."""
    return "whole schedule" if share == 1 else f"{share:g} of the schedule"


def epochs(lab: Lab) -> Results:
    """Why accuracy falls in short trainings: the same images for a tenth, a fifth, half and all of
    a training, with and without puzzles.
    """
    key = LONG_VIT if LONG_VIT in subjects_of(lab.preset_name) else "vit"
    ways = [how("A"), how("J", TRAINED[lab.preset_name])]
    lab.total = 2 * 2 * len(SHARES) * trials_of(lab)
    rows: list[tuple[Any, ...]] = []
    gains: list[float] = []
    each: list[list[float]] = []  # the gain of each seed
    for share in SHARES:
        base, puzzled = scored(lab, f"{key}@{share:g}", ways)
        rows += [
            (f"{_length(share)}, {name}", *row_of(scores))
            for name, scores in (("plain", base), ("MJP", puzzled))
        ]
        gains.append(mean(puzzled, "accuracy") - mean(base, "accuracy"))
        both = zip(puzzled, base, strict=True)
        each.append([value(a, "accuracy") - value(b, "accuracy") for a, b in both])
    detail = ", ".join(f"{100 * g:+.1f}" for g in gains)
    finding = trend(
        "epochs/accuracy",
        "The longer the training on the same images, the less accuracy puzzles cost.",
        SHARES,
        gains,
        1,
        lab,
        [each[0], each[-1]],
    )
    figure = lines(
        "Accuracy gained by puzzles, by training length",
        list(SHARES),
        {"accuracy": gains},
        "share of the training",
    )
    note = f"{subjects_of(lab.preset_name)[key].name}. {NOTE}"
    tables = (Table("By training length", ("length, training", *COLUMNS), tuple(rows), note),)
    finding = replace(finding, sentence=f"{finding.sentence}; accuracy gained, in points: {detail}")
    return results(
        lab,
        "002/epochs",
        "Beyond the paper: the cost of puzzles by training length",
        (finding,),
        tables,
        (figure,),
    )


def row_of(scores: Scores) -> tuple[float | None, ...]:
    """Percentages and norms, as a table shows them."""
    a, c = spread(scores, "accuracy"), spread(scores, "consistency")
    return (
        100 * mean(scores, "accuracy"),
        None if a is None else 100 * a,
        mean(scores, "norm"),
        mean(scores, "squared"),
        100 * mean(scores, "consistency"),
        None if c is None else 100 * c,
        100 * mean(scores, "unwrapped"),
    )


def better(key: str, what: str, scores: Scores, base: Scores, *, judged: bool = True) -> Finding:
    """More consistent than the baseline by more than the seeds' spread, and not less accurate by
    more than it.
    """
    gain, loss = (mean(scores, m) - mean(base, m) for m in ("consistency", "accuracy"))
    margins = [
        max(spread(scores, m) or 0.0, spread(base, m) or 0.0) for m in ("consistency", "accuracy")
    ]
    holds = gain > margins[0] and loss >= -margins[1]
    judged = judged and len(scores) >= ENOUGH
    known = (
        f"consistency {100 * gain:+.1f} points (± {100 * margins[0]:.1f}), "
        f"accuracy {100 * loss:+.1f} points (± {100 * margins[1]:.1f})"
    )
    single = f"consistency {100 * gain:+.1f} points, accuracy {100 * loss:+.1f} points"
    return Finding(
        key,
        f"A model {what} is more consistent than the baseline by more than the seeds' spread, "
        "at an accuracy that is not lower by more than it.",
        holds if judged else None,
        mean(scores, "consistency"),
        mean(base, "consistency"),
        1.0,
        known
        if judged
        else describe_trend(holds, known)
        if len(scores) > 1
        else f"{single}; one seed, no spread to compare with",
        "002",
        measure="consistency",
        spread=spread(scores, "consistency"),
        trials=len(scores),
    )


def describe_trend(holds: bool | None, numbers: str) -> str:
    """Return a sentence on a trend of the paper; at this size it is not a check of the library."""
    return f"{VERDICTS[holds]}: {numbers}"


def above(values: Sequence[float], base: Sequence[float], sign: int = 1) -> bool | None:
    """Return whether the mean of the values is above the base (with sign -1, below it).

    None if the difference is within the seeds' spread or a hundredth of the base, or with fewer
    than three seeds.
    """
    return compare(values, base, sign, size=TIE * abs(statistics.fmean(base))).holds


def shorter(key: str, name: str, scores: Scores, base: Scores) -> Finding:
    norms, before = ([value(one, "norm") for one in some] for some in (scores, base))
    a, b = statistics.fmean(norms), statistics.fmean(before)
    return Finding(
        key,
        f"Puzzles in training make the difference norm of {name} smaller.",
        None,
        a,
        None,
        b,
        describe_trend(above(norms, before, -1), f"{a:.2f} with puzzles, {b:.2f} without"),
        "002",
        "norm",
        trials=len(scores),
    )


def versus(
    key: str,
    statement: str,
    scores: Scores,
    base: Scores,
    measure: str,
    lab: Lab,
    ratio: float = RATIO,
) -> Finding:
    """One is more than the other, in the mean over seeds."""
    found, before = ([value(one, measure, ratio) for one in some] for some in (scores, base))
    a, b = statistics.fmean(found), statistics.fmean(before)
    detail = describe_trend(above(found, before), f"{100 * (a - b):+.1f} points")
    return Finding(key, statement, None, a, b, 1.0, detail, "002", measure, trials=trials_of(lab))


def trend(
    key: str,
    statement: str,
    x: Sequence[float],
    y: Sequence[float],
    sign: int,
    lab: Lab,
    ends: Sequence[Sequence[float]],
) -> Finding:
    """Return Kendall's tau between x and y: 1 if every pair is in the claimed order.

    `ends` are the first and the last y for each seed: they must differ by more than the spread.
    """
    pairs = [(i, j) for i in range(len(x)) for j in range(i)]
    right = sum(sign * (x[i] - x[j]) * (y[i] - y[j]) > 0 for i, j in pairs)
    tau = 2 * right / len(pairs) - 1
    verdict = compare(ends[1], ends[0], sign).holds
    return Finding(
        key,
        statement,
        None,
        tau,
        0.0,
        1.0,
        describe_trend(
            None if verdict is None else verdict and tau > 0.5,
            f"{right} of {len(pairs)} pairs are in the claimed order",
        ),
        "002",
        "tau",
        trials=trials_of(lab),
    )


def lines(
    title: str,
    x: Sequence[float],
    y: Mapping[str, Sequence[float | None]],
    xlabel: str,
    ylabel: str = "share",
    caption: str = "",
) -> Figure:
    data = {
        "x": list(x),
        "y": {k: list(v) for k, v in y.items()},
        "xlabel": xlabel,
        "ylabel": ylabel,
    }
    return Figure(title, "lines", data, caption)


def results(
    lab: Lab,
    name: str,
    title: str,
    findings: Sequence[Finding],
    tables: Sequence[Table],
    figures: Sequence[Figure],
    unchecked: Sequence[str] = (),
) -> Results:
    return Results(
        title,
        tuple(findings),
        tuple(tables),
        tuple(figures),
        lab.facts(name, trials_of(lab)),
        tuple(unchecked),
    )
