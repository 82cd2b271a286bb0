"""Tables 7 and 8 and figures 1, 3, 4 and 7 of paper 002: what the tables of positions hold after
trainings with and without puzzles.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np

from experiments.paper_002.accuracy import above, lines, results, said, trials_of
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
    """A trained model's table of positions, and where its CLS looks."""
    wrapped = trained(p, data["weights"])
    images = prepare(p["task"], data["test"]).batch(np.arange(LOOKED_AT))[0]["pixel_values"]
    maps = attention_maps(wrapped, images)
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
    """The model whose positions are studied: where the preset has one, that in which they have
    taken shape.
    """
    subjects = subjects_of(lab.preset_name)
    return subjects.get("places", subjects["vit"])


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
        "With puzzles a table of positions needs more directions.",
        f"share of the variance in {least} directions",
    )
    finding = _finding_of_trend(
        "positions/variance", statement, first, before, -1, "002 Tab. 7", measure
    )
    table = Table(
        "Explained variance",
        ("directions", *map(str, DIMENSIONS)),
        tuple(rows),
        "Percent of the variance of the centred table.",
    )
    return results(
        lab, "002/table7", "Table 7: explained variance of positions", (finding,), (table,), ()
    )


def table8(lab: Lab) -> Results:
    """Position regression by a linear map with five-fold cross-validation, 1-D and 2-D."""
    ratio = TRAINED[lab.preset_name]
    ways = {
        "plain": how("A"),
        "MJP (DAL - LN)": how("I", ratio),
        "MJP (DAL - NLN)": how("J", ratio),
    }
    lab.total = 2 * len(ways) * trials_of(lab)
    found = dict(zip(ways, studied(lab, list(ways.values())), strict=True))
    printed = {
        "plain": (0.945, 0.076),
        "MJP (DAL - LN)": (0.566, 0.042),
        "MJP (DAL - NLN)": (1.301, 0.134),
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
    columns = ("", "1-D MAE", "spread", "2-D MAE", "spread", "paper: 1-D", "paper: 2-D")
    errors = {n: [one["regression"]["1-D"][0] for one in runs] for n, runs in found.items()}
    guess, measure = guess_of(found["plain"][0]["grid"]), "mean absolute error of places, 1-D"
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
                "MJP (DAL - LN)",
                -1,
                "Trained with a linear regression, places are read off more exactly.",
            ),
            (
                "mlp",
                "MJP (DAL - NLN)",
                1,
                "Trained with an MLP, places are read off less exactly than off the plain table.",
            ),
        )
    ]
    note = (
        "Mean absolute error of places left out, in patches; spreads over repeats of the "
        "five folds, means over seeds. "
    )
    note += f"Whoever says the middle for every place is off by {guess:.1f} in 1-D."
    return results(
        lab,
        "002/table8",
        "Table 8: positions read off their embeddings",
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
        "Variance in three directions",
        ("", "percent"),
        rows,
        "Each point of the figures is a patch; lines join neighbours in a row.",
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
    statement = f"With puzzles {100 * MOST:.0f} % of the eigenvalues are of more directions."
    measure = f"directions with {100 * MOST:.0f} % of the eigenvalues"
    finding = _finding_of_trend(
        "positions/eigenvalues", statement, needed["MJP"], needed["plain"], 1, "002 Fig. 3", measure
    )
    figure = lines(
        "Accumulated eigenvalues",
        [float(i + 1) for i in range(count)],
        curves,
        "how many",
        "share of all",
    )
    table = Table(
        "Directions with 90 % of the eigenvalues",
        ("", "directions"),
        tuple((n, statistics.fmean(values)) for n, values in needed.items()),
    )
    return results(
        lab,
        "002/figure3",
        "Figure 3: accumulated eigenvalues of positions",
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
        ("", "entropy", "difference between heads"),
        rows,
        "Entropy: 1 is looking everywhere alike.",
    )
    return results(
        lab, "002/figure4", "Figure 4: attention in the last layer", (finding,), (table,), ()
    )


def _needed(eigenvalues: Sequence[float]) -> int:
    """How many directions hold most of the eigenvalues, which are given added up."""
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
    """What a training with puzzles has, beside the plain one. With sign -1 the paper's is lower.
    `guess` is an error that needs no table at all.
    """
    value, base = statistics.fmean(values), statistics.fmean(before)
    sentence = said(above(values, before, sign), f"{value:.3g}, against {base:.3g}")
    if guess is not None and min(value, base) >= guess:
        sentence = f"neither reads places: a guess has {guess:.1f}; {value:.3g}, against {base:.3g}"
    return Finding(
        key, statement, None, value, guess, base, sentence, source, measure, trials=len(values)
    )


def guess_of(grid: Sequence[int]) -> float:
    """The mean error of whoever says the middle for every place, by its number in a grid."""
    places = np.arange(grid[0] * grid[1])
    return float(np.abs(places - places.mean()).mean())
