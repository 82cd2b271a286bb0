"""Evaluations and studies as tables and figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from regauge.jigsaw.masks import Grid, JigsawError
from regauge.jigsaw.metrics import Evaluation
from regauge.jigsaw.robustness import Errors, mean_corruption_error, mean_error
from regauge.results.findings import Figure, Results, Table


@dataclass(frozen=True)
class PuzzleGrid:
    """How a model's images are cut for puzzles: patches in pixels, and their grid. `fixed`: its
    positions are of that patch.
    """

    patch: Grid
    grid: Grid
    fixed: bool = False


def check_puzzle_grids(cuts: Mapping[str, PuzzleGrid]) -> None:
    """Refuse models whose puzzles differ: their numbers could not be compared."""
    if len({cut.grid for cut in cuts.values()}) <= 1:
        return
    told = "; ".join(
        f"{name}: {_format_pair(cut.grid)} patches of {_format_pair(cut.patch)} pixels"
        for name, cut in cuts.items()
    )
    fixed = {cut.patch for cut in cuts.values() if cut.fixed}
    sides = {cut.grid[0] * cut.patch[0] for cut in cuts.values()}
    if len(fixed) > 1 or len(sides) > 1:
        hint = "give them in calls of their own"
    else:
        hint = (
            f"--patch {min(fixed or {cut.patch for cut in cuts.values()})[0]} puts the same "
            "puzzles to all"
        )
    raise JigsawError(
        "these models would be given different puzzles, and their numbers could not be "
        f"compared: {told}",
        hint=hint,
    )


def _format_pair(pair: Grid) -> str:
    return f"{pair[0]} x {pair[1]}"


def report_training(losses: Sequence[float], facts: Mapping[str, Any]) -> Results:
    """A training: its loss on the way, step by step and in the mean of fifty."""
    span = min(50, len(losses))
    means: list[float | None] = [
        None if i + 1 < span else float(np.mean(losses[i + 1 - span : i + 1]))
        for i in range(len(losses))
    ]
    series = {"each step": list(losses), f"mean of {span} steps": means}
    figure = Figure(
        "The loss on the way",
        "lines",
        {"x": list(range(1, len(losses) + 1)), "y": series, "xlabel": "step", "ylabel": "loss"},
    )
    marks = sorted({round(i * (len(losses) - 1) / 10) for i in range(11)})
    rows = tuple(
        (i + 1, losses[i], float(np.mean(losses[max(0, i + 1 - span) : i + 1]))) for i in marks
    )
    table = Table(
        "The loss on the way",
        ("step", "loss", f"mean of the last {span}"),
        rows,
        "With the weighted regression of positions in it.",
    )
    return Results("A training with masked jigsaw puzzles", (), (table,), (figure,), facts)


def report_evaluations(
    found: Mapping[str, Evaluation], cuts: Mapping[str, PuzzleGrid], bare: Mapping[str, Evaluation]
) -> tuple[tuple[Table, ...], tuple[Figure, ...]]:
    """What puzzles do to some models: a table of all, and a curve of each over the ratios. `bare`
    are the plain checkpoints of those that were trained with puzzles.
    """
    columns = (
        "model",
        "ratio",
        "accuracy",
        "consistency",
        "unwrapped",
        "difference norm",
        "squared",
        "patch",
        "grid",
    )
    rows: list[tuple[Any, ...]] = []
    for name, one in found.items():
        cut = (_format_pair(cuts[name].patch), _format_pair(cuts[name].grid))
        plain = (
            [100 * s.consistency for s in bare[name].shuffled]
            if name in bare
            else [None] * len(one.shuffled)
        )
        rows.append(
            (name, 0.0, 100 * one.accuracy, 100.0, 100.0 if name in bare else None, 0.0, 0.0, *cut)
        )
        rows += [
            (name, s.ratio, 100 * s.accuracy, 100 * s.consistency, b, s.norm, s.squared, *cut)
            for s, b in zip(one.shuffled, plain, strict=True)
        ]
    note = (
        "Ratio: the share of patches that a puzzle shuffles, a puzzle for each image. Percent; "
        "norms of what the last linear layer is given. A model "
        "that was trained with the unknown embedding is told which patches were shuffled, since "
        "these carry it. Unwrapped: the consistency of its "
        "plain checkpoint, which is not told, as no plain model is."
    )
    x = [0.0, *(s.ratio for s in next(iter(found.values())).shuffled)]
    series: dict[str, dict[str, list[float]]] = {
        "Accuracy": {
            name: [one.accuracy, *(s.accuracy for s in one.shuffled)] for name, one in found.items()
        },
        "Consistency": {
            name: [1.0, *(s.consistency for s in one.shuffled)] for name, one in found.items()
        },
    }
    told = {name: one for name, one in bare.items() if one is not found[name]}
    series["Consistency"] |= {
        f"{name}, unwrapped": [1.0, *(s.consistency for s in one.shuffled)]
        for name, one in told.items()
    }
    figures = [
        Figure(
            f"{what} under puzzles",
            "lines",
            {"x": x, "y": y, "xlabel": "ratio at inference", "ylabel": what.lower()},
        )
        for what, y in series.items()
    ]
    return (Table("Puzzles at inference", columns, tuple(rows), note),), tuple(figures)


def plot_projections(name: str, found: Mapping[str, Any]) -> list[Figure]:
    """A table of positions in two directions, as PCA and UMAP lay it out: a line for each row of
    patches, one for each column.
    """
    rows, columns = found["grid"]
    figures = []
    for kind in ("pca", "umap"):
        if kind not in found:
            continue
        points = np.asarray(found[kind]).reshape(rows, columns, 2)
        series = {f"row {i}": points[i].tolist() for i in range(rows)} | {
            f"column {j}": points[:, j].tolist() for j in range(columns)
        }
        caption = (
            "Every point is a patch; lines join the patches of a row and of a column. A "
            "table that knows its places is a net."
        )
        figures.append(
            Figure(f"{kind.upper()} of positions: {name}", "net", {"lines": series}, caption)
        )
    return figures


def plot_attention(images: Any, task: Mapping[str, Any], maps: Mapping[str, Any]) -> Figure:
    """Images, and where CLS looks in the last layer: the mean over heads, brightest where it looks
    most.
    """
    mean, std = (np.asarray(task[k]).reshape(1, -1, 1, 1) for k in ("mean", "std"))
    shown = np.clip(np.asarray(images) * std + mean, 0, 1).transpose(0, 2, 3, 1)
    shown = shown if shown.shape[-1] == 3 else shown[..., 0]
    rows: list[dict[str, Any]] = [{"label": "images", "images": shown.tolist()}]
    for name, found in maps.items():
        array = np.asarray(found)
        rows.append({"label": name, "images": (array / array.max((1, 2), keepdims=True)).tolist()})
    return Figure(
        "Attention of CLS in the last layer",
        "images",
        {"columns": ["" for _ in shown], "rows": rows},
        "The mean over heads, per image.",
    )


def report_studies(
    found: Mapping[str, Mapping[str, Any]],
) -> tuple[tuple[Table, ...], tuple[Figure, ...]]:
    """The tables of positions of some models, or of none: variance, regression, eigenvalues,
    projections.
    """
    if not found:
        return (), ()
    dimensions: Sequence[int] = tuple(next(iter(found.values()))["explained"])
    variance = tuple(
        (name, *(100 * v for v in one["explained"].values())) for name, one in found.items()
    )
    places = tuple(
        (name, *one["regression"]["1-D"], *one["regression"]["2-D"]) for name, one in found.items()
    )
    tables = (
        Table(
            "Explained variance",
            ("directions", *map(str, dimensions)),
            variance,
            "Percent of the variance of the centred table.",
        ),
        Table(
            "Places read off their embeddings",
            ("", "1-D MAE", "spread", "2-D MAE", "spread"),
            places,
            "Mean absolute error, in patches, of a linear map; five folds, repeated; spreads "
            "over repeats.",
        ),
    )
    count = min(len(one["eigenvalues"]) for one in found.values())
    curves = {name: one["eigenvalues"][:count] for name, one in found.items()}
    data = {
        "x": list(range(1, count + 1)),
        "y": curves,
        "xlabel": "how many",
        "ylabel": "share of all",
    }
    return tables, (
        Figure("Accumulated eigenvalues", "lines", data),
        *(f for name, one in found.items() for f in plot_projections(name, one)),
    )


def report_corruptions(
    found: Mapping[str, Errors],
) -> tuple[tuple[Table, ...], tuple[Figure, ...], tuple[str, ...]]:
    """Errors under corruptions, and mCE relative to the first model; or why there is none."""
    first = next(iter(found.values()))
    means = {
        name: {c: 100 * float(np.mean(values)) for c, values in errors.items()}
        for name, errors in found.items()
    }
    rows: list[tuple[Any, ...]] = [(c, *(means[name][c] for name in found)) for c in first]
    rows.append(("mean", *(100 * mean_error(errors) for errors in found.values())))
    missing: tuple[str, ...] = ()
    try:
        rows.append(
            (
                "mCE, relative to the first",
                *(100 * mean_corruption_error(errors, first) for errors in found.values()),
            )
        )
    except JigsawError as error:
        missing = (f"mCE: {error}; {error.hint}",)
    note = (
        "Percent, the mean over five severities. Frost and snow are made from noise, where "
        "ImageNet-C has photographs."
    )
    data = {
        "labels": list(first),
        "y": {name: list(values.values()) for name, values in means.items()},
        "ylabel": "error, percent",
    }
    table = Table("Errors under corruptions", ("corruption", *found), tuple(rows), note)
    return (table,), (Figure("Errors under corruptions", "bars", data),), missing


def tabulate_hard_images(found: Mapping[str, tuple[float, float, int]]) -> Table:
    """Accuracy, AURRA and the number of images, of images that are hard to tell."""
    rows = tuple(
        (name, 100 * accuracy, 100 * area, count) for name, (accuracy, area, count) in found.items()
    )
    note = (
        "Percent. AURRA: the accuracy over the surest answers, averaged over how many are "
        "given. It is the accuracy where sureness says nothing."
    )
    return Table("Hard images", ("model", "accuracy", "AURRA", "images"), rows, note)


def tabulate_outliers(found: Mapping[str, tuple[float, int, int]]) -> Table:
    """AUPR and the numbers of images of a class and of none."""
    rows = tuple(
        (name, 100 * area, 100 * none / (some + none), some, none)
        for name, (area, some, none) in found.items()
    )
    note = (
        "Percent. AUPR: precision over recall in finding the images of no class by how "
        "unsure the model is; a guess has their share of all images."
    )
    return Table(
        "Images of no class", ("model", "AUPR", "a guess", "of a class", "of none"), rows, note
    )
