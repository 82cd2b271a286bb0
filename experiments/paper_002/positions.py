"""Tables 7 and 8 and Figures 1, 3, 4 and 7 of the masked-jigsaw paper: position embeddings after
training with and without puzzles.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np

from experiments.paper_002.accuracy import above, describe_trend, lines, results, trials_of
from experiments.paper_002.jigsaw_cells import (
    TRAINED,
    How,
    describe,
    how,
    model_of,
    parameters_with,
    subjects_of,
    trained,
)
from experiments.shared.cells import Cell
from experiments.shared.presets import Subject
from experiments.shared.runner import Lab
from regauge.checkpoints.resume import Outcome, ResumeState
from regauge.data.tasks import prepare
from regauge.jigsaw.figures import plot_attention, plot_projections
from regauge.jigsaw.studies import DIMENSIONS, attention_entropies, attention_maps, study_positions
from regauge.results.findings import Finding, Results, Table

MOST = 0.9  # of the eigenvalues
LOOKED_AT = 8  # images whose attention is shown
Studies = list[Mapping[str, Any]]


def look(p: Mapping[str, Any], data: Mapping[str, Any], work: ResumeState) -> Outcome:
    """Study the position table of a trained model, and the attention of its CLS token."""
    wrapped = trained(p, data["weights"], work.device)
    images = prepare(p["task"], data["test"]).batch(np.arange(LOOKED_AT))[0]["pixel_values"]
    maps = attention_maps(wrapped, images.to(work.device))
    found = dict(study_positions(wrapped, umap=p["umap"]))
    found["explained"] = {str(k): v for k, v in found["explained"].items()}
    shown = {
        "attention": maps.mean(1).tolist(),
        "entropy": float(attention_entropies(maps).mean()),
        "apart": float(maps.std(1).mean() / maps.mean()),
    }
    return Outcome({**found, **shown})


LOOK = Cell("jigsaw-look", 1, look)


def studied(lab: Lab, ways: Sequence[How], umap: bool = False) -> list[Studies]:
    items = [(way, umap, trial) for way in ways for trial in range(trials_of(lab))]
    lab.ahead(_studied, items)
    found = [_studied(lab, item) for item in items]
    return [found[i : i + trials_of(lab)] for i in range(0, len(found), trials_of(lab))]


def _studied(lab: Lab, item: tuple[How, bool, int]) -> Mapping[str, Any]:
    way, umap, trial = item
    subject = looked_at(lab)
    weights = model_of(lab, subject, way, trial)
    data = {"weights": weights, "test": lab.open(subject.test)}
    return lab.run(
        LOOK,
        {**parameters_with(subject, way), "umap": umap},
        data,
        f"study {subject.name}, {describe(way)}, seed {trial}",
    ).values


def looked_at(lab: Lab) -> Subject:
    """Return the model whose positions are studied: trained for 3,000 steps, if it exists."""
    subjects = subjects_of(lab.preset_name)
    return subjects.get("vit-3000-steps", subjects["vit"])


def table7(lab: Lab) -> Results:
    """Explained variance of the position table by the number of directions, with and without
    puzzles.
    """
    ways = {"plain": how("A"), "MJP": how("J", TRAINED[lab.preset_name])}
    lab.total = 2 * len(ways) * trials_of(lab)
    found = dict(zip(ways, studied(lab, list(ways.values())), strict=True))
    printed: dict[str, tuple[float | None, ...]] = {
        "plain": (54.61, 68.55, None, 85.54, 90.74),
        "MJP": (46.74, 58.36, None, 78.13, 84.55),
    }
    means = {
        name: [statistics.fmean(one["explained"][str(d)] for one in runs) for d in DIMENSIONS]
        for name, runs in found.items()
    }
    rows: list[tuple[Any, ...]] = [
        (f"ViT, {name}", *(100 * v for v in values)) for name, values in means.items()
    ]
    rows += [(f"paper: DeiT-S, {name}", *values) for name, values in printed.items()]
    least = str(DIMENSIONS[0])
    first, before = ([one["explained"][least] for one in found[name]] for name in ("MJP", "plain"))
    statement, measure = (
        "With puzzles, position embeddings vary in more directions.",
        f"share of the variance in {least} components",
    )
    finding = _finding_of_trend(
        "positions/variance", statement, first, before, -1, "002 Tab. 7", measure
    )
    table = Table(
        "Explained variance",
        ("principal components", *map(str, DIMENSIONS)),
        tuple(rows),
        "Share of the variance of the mean-centred position table, in percent.",
    )
    return results(
        lab, "002/table7", "Table 7: explained variance of positions", (finding,), (table,), ()
    )


def table8(lab: Lab) -> Results:
    """Position regression by a linear map with five-fold cross-validation, 1-D and 2-D."""
    ratio = TRAINED[lab.preset_name]
    ways = {
        "plain": how("A"),
        "MJP, linear DAL": how("I", ratio),
        "MJP, nonlinear DAL": how("J", ratio),
    }
    lab.total = 2 * len(ways) * trials_of(lab)
    found = dict(zip(ways, studied(lab, list(ways.values())), strict=True))
    printed = {
        "plain": (0.945, 0.076),
        "MJP, linear DAL": (0.566, 0.042),
        "MJP, nonlinear DAL": (1.301, 0.134),
    }
    means = {
        n: [
            [statistics.fmean(one["regression"][k][i] for one in runs) for i in (0, 1)]
            for k in ("1-D", "2-D")
        ]
        for n, runs in found.items()
    }
    rows = tuple(
        (f"ViT, {n}", one[0], one[1], two[0], two[1], *printed[n])
        for n, (one, two) in means.items()
    )
    columns = (
        "training",
        "1-D MAE (patches)",
        "1-D ±",
        "2-D MAE (patches)",
        "2-D ±",
        "paper: 1-D",
        "paper: 2-D",
    )
    errors = {n: [one["regression"]["1-D"][0] for one in runs] for n, runs in found.items()}
    guess, measure = guess_of(found["plain"][0]["grid"]), "mean absolute error of positions, 1-D"
    findings = [
        _finding_of_trend(
            f"positions/{key}",
            text,
            errors[way],
            errors["plain"],
            sign,
            "002 Tab. 8",
            measure,
            guess,
        )
        for key, way, sign, text in (
            (
                "linear",
                "MJP, linear DAL",
                -1,
                "After training with a linear regression, positions are predicted more exactly.",
            ),
            (
                "mlp",
                "MJP, nonlinear DAL",
                1,
                (
                    "After training with an MLP, positions are predicted less exactly than from "
                    "the plain table."
                ),
            ),
        )
    ]
    note = (
        "Errors on held-out positions, five-fold cross-validation: means over seeds, standard "
        "deviations over repeats of the folds. "
    )
    note += f"Predicting the middle for every position has a 1-D error of {guess:.1f} patches."
    return results(
        lab,
        "002/table8",
        "Table 8: positions predicted from their embeddings",
        findings,
        (Table("Regression", columns, rows, note),),
        (),
    )


def figure1(lab: Lab) -> Results:
    """Projections of position tables (figures 1 and 7): PCA, and UMAP where it is installed; plain,
    and by training ratio.
    """
    ways = {"plain": how("A"), **{f"MJP, ratio {r:g}": how("J", r) for r in (0.1, 0.5, 0.9)}}
    umap = find_spec("umap") is not None and lab.preset_name != "pico"
    lab.total = 2 * len(ways) * trials_of(lab)
    found = dict(zip(ways, studied(lab, list(ways.values()), umap), strict=True))
    figures = [f for name, runs in found.items() for f in plot_projections(name, runs[0])]
    rows = tuple(
        (name, 100 * statistics.fmean(one["explained"]["3"] for one in runs))
        for name, runs in found.items()
    )
    table = Table(
        "Variance in three components",
        ("training", "variance in 3 components (%)"),
        rows,
        "Means over seeds.",
    )
    missing = (
        ()
        if umap
        else ("UMAP: umap-learn is not installed (regauge[studies]), or the preset leaves it out",)
    )
    return results(
        lab,
        "002/figure1",
        "Figures 1 and 7: projections of positions",
        (),
        (table,),
        figures,
        missing,
    )


def figure3(lab: Lab) -> Results:
    """Accumulated eigenvalues of position tables, with and without puzzles."""
    ways = {"plain": how("A"), "MJP": how("J", TRAINED[lab.preset_name])}
    lab.total = 2 * len(ways) * trials_of(lab)
    found = dict(zip(ways, studied(lab, list(ways.values())), strict=True))
    count = min(len(one["eigenvalues"]) for runs in found.values() for one in runs)
    curves = {
        n: [statistics.fmean(one["eigenvalues"][i] for one in runs) for i in range(count)]
        for n, runs in found.items()
    }
    needed = {n: [_needed(one["eigenvalues"]) for one in runs] for n, runs in found.items()}
    statement = f"With puzzles, {100 * MOST:.0f} % of the variance takes more components."
    measure = f"components for {100 * MOST:.0f} % of the variance"
    finding = _finding_of_trend(
        "positions/eigenvalues", statement, needed["MJP"], needed["plain"], 1, "002 Fig. 3", measure
    )
    figure = lines(
        "Cumulative eigenvalues",
        [float(i + 1) for i in range(count)],
        curves,
        "components",
        "share of the variance",
    )
    table = Table(
        "Components for 90 % of the variance",
        ("training", "components for 90 % of the variance"),
        tuple((n, statistics.fmean(values)) for n, values in needed.items()),
    )
    return results(
        lab,
        "002/figure3",
        "Figure 3: cumulative eigenvalues of positions",
        (finding,),
        (table,),
        (figure,),
    )


def figure4(lab: Lab) -> Results:
    """Attention of CLS in the last layer, with and without puzzles: maps, and how diverse they
    are.
    """
    ways = {"plain": how("A"), "MJP": how("J", TRAINED[lab.preset_name])}
    lab.total = 2 * len(ways) * trials_of(lab)
    found = dict(zip(ways, studied(lab, list(ways.values())), strict=True))
    subject = looked_at(lab)
    images = prepare(subject.task, lab.open(subject.test)).batch(np.arange(LOOKED_AT))[0][
        "pixel_values"
    ]
    rows: tuple[tuple[Any, ...], ...] = tuple(
        (n, *(statistics.fmean(one[k] for one in runs) for k in ("entropy", "apart")))
        for n, runs in found.items()
    )
    apart, before = ([one["apart"] for one in found[name]] for name in ("MJP", "plain"))
    statement = "With puzzles the heads of the last layer differ more."
    finding = _finding_of_trend(
        "attention/diverse", statement, apart, before, 1, "002 Fig. 4", "difference between heads"
    )
    lab.pictures.append(
        plot_attention(images, subject.task, {n: runs[0]["attention"] for n, runs in found.items()})
    )
    table = Table(
        "Attention of CLS",
        ("training", "entropy", "difference between heads"),
        rows,
        "Entropy is normalized: 1 is uniform attention. The difference between heads is the "
        "standard deviation over heads, relative to the mean.",
    )
    return results(
        lab, "002/figure4", "Figure 4: attention in the last layer", (finding,), (table,), ()
    )


def _needed(eigenvalues: Sequence[float]) -> int:
    """Return the number of components that reach most of the variance, from cumulative shares."""
    return next(i + 1 for i, v in enumerate(eigenvalues) if v >= MOST)


def _finding_of_trend(
    key: str,
    statement: str,
    values: Sequence[float],
    before: Sequence[float],
    sign: int,
    source: str,
    measure: str,
    guess: float | None = None,
) -> Finding:
    """Compare training with puzzles to plain training. With sign -1 the paper reports a lower
    value. `guess` is the error of a constant prediction.
    """
    value, base = statistics.fmean(values), statistics.fmean(before)
    sentence = describe_trend(
        above(values, before, sign), f"{value:.3g} with puzzles, {base:.3g} without"
    )
    if guess is not None and min(value, base) >= guess:
        sentence = (
            f"neither predicts positions: a guess has an error of {guess:.1f}; "
            f"{value:.3g} with puzzles, {base:.3g} without"
        )
    return Finding(
        key, statement, None, value, guess, base, sentence, source, measure, trials=len(values)
    )


def guess_of(grid: Sequence[int]) -> float:
    """Return the mean error of predicting the middle for every position of a grid, by its index."""
    places = np.arange(grid[0] * grid[1])
    return float(np.abs(places - places.mean()).mean())
