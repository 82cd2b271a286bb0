"""Tables 1 to 3 and figures 2 and 6 of paper 002: accuracy, consistency and the norm of the difference, by backbone, variant and ratio."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from regauge.experiments.lab import Lab
from regauge.experiments.puzzles import RATIOS, How, how, score_of, subjects_of, told
from regauge.findings import Figure, Finding, Results, Table
from regauge.jigsaw.metrics import RATIO

Scores = list[Mapping[str, Any]]  # one for each seed
MEASURES = ("accuracy", "consistency", "norm", "squared")
SEEDS = {"small": 3, "paper": 1, "pico": 1}
SOME = 3  # seeds without which a spread says nothing


def trials_of(lab: Lab) -> int:
    return lab.seeds or SEEDS[lab.preset_name]


def scored(lab: Lab, key: str, ways: Sequence[How]) -> list[Scores]:
    """The scores of a backbone in several ways, for every seed."""
    subject = subjects_of(lab.preset_name)[key]
    return [[score_of(lab, subject, way, trial).values for trial in range(trials_of(lab))] for way in ways]


def value(one: Mapping[str, Any], measure: str, ratio: float = RATIO) -> float:
    """A measure of one seed; all but the accuracy of plain images are under puzzles of a ratio."""
    if measure == "accuracy":
        return float(one["accuracy"])
    at = next(s for s in one["shuffled"] if s["ratio"] == ratio)
    return float(at["accuracy" if measure == "shuffled" else measure])


def mean(scores: Scores, measure: str, ratio: float = RATIO) -> float:
    return statistics.fmean(value(one, measure, ratio) for one in scores)


def spread(scores: Scores, measure: str) -> float | None:
    found = [value(one, measure) for one in scores]
    return statistics.stdev(found) if len(found) > 1 else None


def table3(lab: Lab) -> Results:
    """Masked jigsaw puzzles of different ratios in training: accuracy, difference norm, consistency."""
    ways = [how("D"), *(how("J", ratio) for ratio in RATIOS)]
    lab.total = 2 * len(ways) * trials_of(lab)
    found = scored(lab, "vit", ways)
    columns = ("training ratio", "accuracy", "spread", "difference norm", "squared", "consistency", "spread", "paper: accuracy", "paper: consistency")
    printed = {0.0: (80.0, 64.0), 0.1: (80.5, 82.9), 0.3: (None, 88.1), 0.5: (None, 90.5), 0.7: (80.2, 92.3), 0.9: (80.3, 93.1)}
    rows = tuple((way["ratio"], *row_of(scores), *printed[way["ratio"]]) for way, scores in zip(ways, found, strict=True))
    consistencies = [mean(scores, "consistency") for scores in found]
    norms = [mean(scores, "norm") for scores in found]
    findings = (
        *(better(f"ratio/{way['ratio']:g}", f"trained with {told(way)}", scores, found[0]) for way, scores in zip(ways[1:], found[1:], strict=True)),
        trend("ratio/consistency", "The larger the training ratio, the more consistent.", [way["ratio"] for way in ways], consistencies, 1, lab),
        trend("ratio/norm", "The larger the training ratio, the smaller the difference norm.", [way["ratio"] for way in ways], norms, -1, lab),
    )
    figure = lines(
        "Consistency and accuracy by training ratio",
        [way["ratio"] for way in ways],
        {"consistency": consistencies, "accuracy": [mean(s, "accuracy") for s in found]},
        "training ratio",
    )
    note = f"Puzzles of ratio {RATIO:g} at inference. Ratio 0 has the regression of positions and no puzzle (variant D)."
    return results(lab, "002/table3", "Table 3: training with different ratios", findings, (Table("ViT", columns, rows, note),), (figure,))


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
    )


def better(key: str, what: str, scores: Scores, base: Scores) -> Finding:
    """More consistent than the baseline by more than the seeds' spread, and not less accurate by more than it."""
    gain, loss = (mean(scores, m) - mean(base, m) for m in ("consistency", "accuracy"))
    enough = len(scores) >= SOME
    margins = [max(spread(scores, m) or 0.0, spread(base, m) or 0.0) for m in ("consistency", "accuracy")]
    sentence = f"{100 * gain:+.1f} points, accuracy {100 * loss:+.1f}; spreads {100 * margins[0]:.1f} and {100 * margins[1]:.1f}"
    return Finding(
        key,
        f"A model {what} is more consistent than the plain one by more than the seeds' spread, at an accuracy that is not lower by more than it.",
        (gain > margins[0] and loss >= -margins[1]) if enough else None,
        mean(scores, "consistency"),
        mean(base, "consistency"),
        1.0,
        sentence if enough else f"{sentence}; too few seeds to judge",
        "002",
        measure="consistency",
        spread=spread(scores, "consistency"),
        trials=len(scores),
    )


def trend(key: str, statement: str, x: Sequence[float], y: Sequence[float], sign: int, lab: Lab) -> Finding:
    """Kendall's tau between a ratio and what it does: 1 where every step goes the way of the paper."""
    pairs = [(i, j) for i in range(len(x)) for j in range(i)]
    tau = sum(1 if sign * (x[i] - x[j]) * (y[i] - y[j]) > 0 else -1 for i, j in pairs) / len(pairs)
    told = f"of {len(pairs)} pairs of ratios {round((tau + 1) / 2 * len(pairs))} go that way"
    judged = trials_of(lab) >= SOME
    return Finding(key, statement, tau > 0.5 if judged else None, tau, 0.0, 1.0, told if judged else f"{told}; too few seeds to judge", "002", "tau")


def lines(title: str, x: Sequence[float], y: Mapping[str, Sequence[float | None]], xlabel: str, ylabel: str = "share", caption: str = "") -> Figure:
    data = {"x": list(x), "y": {k: list(v) for k, v in y.items()}, "xlabel": xlabel, "ylabel": ylabel}
    return Figure(title, "lines", data, caption)


def results(
    lab: Lab, name: str, title: str, findings: Sequence[Finding], tables: Sequence[Table], figures: Sequence[Figure], unchecked: Sequence[str] = ()
) -> Results:
    facts = {
        "experiment": name,
        "preset": lab.preset_name,
        "seeds": trials_of(lab),
        "models": lab.sizes,
        "device": lab.device,
        "minutes of computing": round(lab.seconds / 60, 1),
        "versions": {library: ", ".join(sorted(found)) for library, found in sorted(lab.made.items())},
    }
    return Results(title, tuple(findings), tuple(tables), tuple(figures), facts, tuple(unchecked))
