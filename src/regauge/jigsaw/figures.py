"""Tables and figures of evaluations and studies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from regauge.errors import JigsawError
from regauge.evaluation.report import Evaluation as ModelEvaluation
from regauge.jigsaw.masks import Grid
from regauge.jigsaw.metrics import Evaluation
from regauge.jigsaw.robustness import Errors, mean_corruption_error, mean_error
from regauge.results.findings import Claim, Figure, Results, Table
from regauge.results.text import format_results


@dataclass(frozen=True)
class PuzzleGrid:
    """The patches of a model's puzzles: their size in pixels, and their grid.

    `fixed` is true if the model's position table belongs to this patch size.
    """

    patch: Grid
    grid: Grid
    fixed: bool = False


def check_puzzle_grids(grids: Mapping[str, PuzzleGrid]) -> None:
    """Raise JigsawError if models have different puzzles: their numbers could not be compared."""
    if len({grid.grid for grid in grids.values()}) <= 1:
        return
    listing = "; ".join(
        f"{name}: {_format_pair(grid.grid)} patches of {_format_pair(grid.patch)} pixels"
        for name, grid in grids.items()
    )
    fixed = {grid.patch for grid in grids.values() if grid.fixed}
    sides = {grid.grid[0] * grid.patch[0] for grid in grids.values()}
    if len(fixed) > 1 or len(sides) > 1:
        hint = "evaluate them in separate calls"
    else:
        patch = min(fixed or {grid.patch for grid in grids.values()})[0]
        hint = f"--patch {patch} gives the same puzzles to all"
    raise JigsawError(
        f"models must have the same puzzles to be comparable, got {listing}", hint=hint
    )


def _format_pair(pair: Grid) -> str:
    return f"{pair[0]} x {pair[1]}"


def report_training(
    losses: Sequence[float],
    facts: Mapping[str, Any],
    evaluation: ModelEvaluation | None = None,
) -> Results:
    """Report the model before and after, and the training loss of each step and averaged over
    fifty steps.

    Args:
        losses: The training loss of each step.
        facts: Facts of the run.
        evaluation: The model before training and after.
    """
    title = "A training with masked jigsaw puzzles"
    tables: tuple[Table, ...] = ()
    if evaluation is not None:
        scored = evaluation.results
        tables, facts = scored.tables, {**facts, "verdict": scored.facts["verdict"]}
    if not losses:
        return Results(title, (), tables, facts=facts)
    span = min(50, len(losses))
    means: list[float | None] = [
        None if i + 1 < span else float(np.mean(losses[i + 1 - span : i + 1]))
        for i in range(len(losses))
    ]
    series = {"each step": list(losses), f"mean of {span} steps": means}
    figure = Figure(
        "The training loss",
        "lines",
        {
            "x": list(range(1, len(losses) + 1)),
            "y": series,
            "xlabel": "step",
            "ylabel": "training loss",
        },
    )
    marks = sorted({round(i * (len(losses) - 1) / 10) for i in range(11)})
    rows = tuple(
        (i + 1, losses[i], float(np.mean(losses[max(0, i + 1 - span) : i + 1]))) for i in marks
    )
    table = Table(
        "The training loss",
        ("step", "training loss", f"mean of the last {span}"),
        rows,
        "With the weighted regression of positions in it.",
    )
    last = float(np.mean(losses[-max(1, len(losses) // 10) :]))
    claim = Claim(
        "Trained with masked jigsaw puzzles",
        "none",
        f"{losses[0]:.3g} → {last:.3g}",
        f"loss at the first of {len(losses)} steps, and in the mean of the last tenth",
        "Measure with regauge jigsaw evaluate how much less the model depends on patch order.",
    )
    if evaluation is not None:
        *_, after = evaluation.scores
        is_worse = evaluation.is_worse(after)
        scores = [f"{score.accuracy:.1%}" for score in evaluation.scores.values()]
        claim = replace(
            claim,
            text="Jigsaw training made the model worse" if is_worse else claim.text,
            tone="bad" if is_worse else "none",
            number=" → ".join(scores),
            label="accuracy on unshuffled images, before and after",
        )
    return Results(title, (), (*tables, table), (figure,), facts, claim=claim)


def conclude_evaluations(evaluations: Mapping[str, Evaluation]) -> Claim:
    """Return the headline of evaluations: how many predictions stay at the largest ratio."""
    stay = {name: e.shuffled[-1] for name, e in evaluations.items() if e.shuffled}
    if not stay:
        return Claim("Accuracy without shuffled patches")
    ratio = next(iter(stay.values())).ratio
    shares = [f"{s.consistency:.0%}" for s in stay.values()]
    best = max(stay, key=lambda name: stay[name].consistency)
    text = "depends least on the order of patches" if len(stay) > 1 else "under shuffled patches"
    label = f"of the predictions of {', '.join(stay)} stay when {ratio:.0%} of patches are shuffled"
    return Claim(f"{best} {text}", "none", ", ".join(shares), label)


def report_evaluations(
    evaluations: Mapping[str, Evaluation],
    grids: Mapping[str, PuzzleGrid],
    unwrapped: Mapping[str, Evaluation],
) -> tuple[tuple[Table, ...], tuple[Figure, ...]]:
    """Report the effect of puzzles on models: one table, and curves over the ratios.

    Args:
        evaluations: The evaluation of each model.
        grids: The patches of its puzzles.
        unwrapped: The evaluation of the plain checkpoint of each model that was trained with
            puzzles; the same object if nothing marks shuffled patches.
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
    for name, evaluation in evaluations.items():
        grid = (_format_pair(grids[name].patch), _format_pair(grids[name].grid))
        plain: list[float | None] = (
            [100 * s.consistency for s in unwrapped[name].shuffled]
            if name in unwrapped
            else [None] * len(evaluation.shuffled)
        )
        unshuffled = (100 * evaluation.accuracy, 100.0, 100.0 if name in unwrapped else None)
        rows.append((name, 0.0, *unshuffled, 0.0, 0.0, *grid))
        rows += [
            (name, s.ratio, 100 * s.accuracy, 100 * s.consistency, b, s.norm, s.squared, *grid)
            for s, b in zip(evaluation.shuffled, plain, strict=True)
        ]
    note = (
        "Ratio: the share of patches that a puzzle shuffles, with a puzzle for each image. "
        "Percent; norms of the inputs of the last linear layer. The unknown embedding marks the "
        "shuffled patches for a model that was trained with it. Unwrapped: the consistency of its "
        "plain checkpoint, without that mark."
    )
    x = [0.0, *(s.ratio for s in next(iter(evaluations.values())).shuffled)]
    accuracy = {
        name: [evaluation.accuracy, *(s.accuracy for s in evaluation.shuffled)]
        for name, evaluation in evaluations.items()
    }
    consistency = {
        name: [1.0, *(s.consistency for s in evaluation.shuffled)]
        for name, evaluation in evaluations.items()
    }
    consistency |= {
        f"{name}, unwrapped": [1.0, *(s.consistency for s in evaluation.shuffled)]
        for name, evaluation in unwrapped.items()
        if evaluation is not evaluations[name]
    }
    figures = [
        Figure(
            f"{measure} under puzzles",
            "lines",
            {
                "x": x,
                "y": y,
                "xlabel": "share of shuffled patches",
                "ylabel": measure.lower(),
                "percent": True,
            },
            caption,
        )
        for measure, y, caption in (
            (
                "Consistency",
                consistency,
                "The share of predictions that stay when patches are shuffled.",
            ),
            ("Accuracy", accuracy, "On test images with shuffled patches."),
        )
    ]
    return (Table("Puzzles at inference", columns, tuple(rows), note),), tuple(figures)


def plot_projections(name: str, studies: Mapping[str, Any]) -> list[Figure]:
    """Plot the PCA and UMAP projections of a position table, a line for each row and column."""
    rows, columns = studies["grid"]
    figures = []
    for kind in ("pca", "umap"):
        if kind not in studies:
            continue
        points = np.asarray(studies[kind]).reshape(rows, columns, 2)
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
    """Plot images, and the attention of CLS in the last layer, averaged over heads.

    Args:
        images: Normalized images [images, channels, height, width].
        task: The `mean` and `std` of the normalization.
        maps: The attention maps of each model [images, rows, columns].
    """
    mean, std = (np.asarray(task[k]).reshape(1, -1, 1, 1) for k in ("mean", "std"))
    shown = np.clip(np.asarray(images) * std + mean, 0, 1).transpose(0, 2, 3, 1)
    shown = shown if shown.shape[-1] == 3 else shown[..., 0]
    rows: list[dict[str, Any]] = [{"label": "images", "images": shown.tolist()}]
    for name, attention in maps.items():
        array = np.asarray(attention)
        rows.append({"label": name, "images": (array / array.max((1, 2), keepdims=True)).tolist()})
    return Figure(
        "Attention of CLS in the last layer",
        "images",
        {"columns": ["" for _ in shown], "rows": rows},
        "The mean over heads, per image.",
    )


def report_studies(
    studies: Mapping[str, Mapping[str, Any]],
) -> tuple[tuple[Table, ...], tuple[Figure, ...]]:
    """Report position tables of models: variance, regression, eigenvalues and projections."""
    if not studies:
        return (), ()
    dimensions: Sequence[int] = tuple(next(iter(studies.values()))["explained"])
    variance = tuple(
        (name, *(100 * v for v in study["explained"].values())) for name, study in studies.items()
    )
    errors = tuple(
        (name, *study["regression"]["1-D"], *study["regression"]["2-D"])
        for name, study in studies.items()
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
            errors,
            "Mean absolute error, in patches, of a linear map; five folds, repeated; spreads "
            "over repeats.",
        ),
    )
    count = min(len(study["eigenvalues"]) for study in studies.values())
    curves = {name: study["eigenvalues"][:count] for name, study in studies.items()}
    data = {
        "x": list(range(1, count + 1)),
        "y": curves,
        "xlabel": "how many",
        "ylabel": "share of all",
    }
    return tables, (
        Figure("Accumulated eigenvalues", "lines", data),
        *(f for name, study in studies.items() for f in plot_projections(name, study)),
    )


def report_corruptions(
    errors: Mapping[str, Errors],
) -> tuple[tuple[Table, ...], tuple[Figure, ...], tuple[str, ...]]:
    """Report errors under corruptions, and mCE relative to the first model.

    Returns:
        Tables, figures, and the reason for a missing mCE.
    """
    first = next(iter(errors.values()))
    means = {
        name: {c: 100 * float(np.mean(values)) for c, values in of_model.items()}
        for name, of_model in errors.items()
    }
    rows: list[tuple[Any, ...]] = [(c, *(means[name][c] for name in errors)) for c in first]
    rows.append(("mean", *(100 * mean_error(of_model) for of_model in errors.values())))
    unchecked: tuple[str, ...] = ()
    try:
        rows.append(
            (
                "mCE, relative to the first",
                *(100 * mean_corruption_error(of_model, first) for of_model in errors.values()),
            )
        )
    except JigsawError as error:
        unchecked = (f"mCE: {error}; {error.hint}",)
    note = (
        "Percent, the mean over five severities. Frost and snow are made from noise, where "
        "ImageNet-C has photographs."
    )
    data = {
        "labels": list(first),
        "y": {name: list(values.values()) for name, values in means.items()},
        "ylabel": "error, percent",
    }
    table = Table("Errors under corruptions", ("corruption", *errors), tuple(rows), note)
    return (table,), (Figure("Errors under corruptions", "bars", data),), unchecked


def tabulate_hard_images(scores: Mapping[str, tuple[float, float, int]]) -> Table:
    """Tabulate accuracy, AURRA and the number of hard images for each model."""
    rows = tuple(
        (name, 100 * accuracy, 100 * area, count)
        for name, (accuracy, area, count) in scores.items()
    )
    note = (
        "Percent. AURRA: the accuracy over the n most confident predictions, averaged over n. It "
        "is the accuracy if confidence carries no information."
    )
    return Table("Hard images", ("model", "accuracy", "AURRA", "images"), rows, note)


def tabulate_outliers(scores: Mapping[str, tuple[float, int, int]]) -> Table:
    """Tabulate AUPR and the numbers of images of a known class and of none, for each model."""
    rows = tuple(
        (name, 100 * area, 100 * outliers / (known + outliers), known, outliers)
        for name, (area, known, outliers) in scores.items()
    )
    note = (
        "Percent. AUPR: the area under precision and recall of detecting images of no class by "
        "low confidence; a guess has their share of all images."
    )
    return Table(
        "Images of no class", ("model", "AUPR", "a guess", "of a class", "of none"), rows, note
    )


def format_report(results: Results) -> str:
    """Format results for a terminal: tables, and what was not checked."""
    tables = format_results(results).partition("  finding")[0].rstrip()
    return "\n".join(
        [
            tables,
            *([""] if results.unchecked else []),
            *(f"not checked: {text}" for text in results.unchecked),
        ]
    ).lstrip()
