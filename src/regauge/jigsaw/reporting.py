"""Evaluations and studies as tables and figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from regauge.findings import Figure, Table
from regauge.jigsaw.metrics import Evaluation


def evaluated(found: Mapping[str, Evaluation]) -> tuple[tuple[Table, ...], tuple[Figure, ...]]:
    """What puzzles do to some models: a table of all, and a curve of each over the ratios."""
    columns = ("model", "ratio", "accuracy", "consistency", "difference norm", "squared")
    rows: list[tuple[Any, ...]] = []
    for name, one in found.items():
        rows.append((name, 0.0, 100 * one.accuracy, 100.0, 0.0, 0.0))
        rows += [(name, s.ratio, 100 * s.accuracy, 100 * s.consistency, s.norm, s.squared) for s in one.shuffled]
    note = "Ratio: the share of patches that a puzzle shuffles, a puzzle for each image. Percent; norms of what the last linear layer is given."
    x = [0.0, *(s.ratio for s in next(iter(found.values())).shuffled)]
    series: dict[str, dict[str, list[float]]] = {
        "Accuracy": {name: [one.accuracy, *(s.accuracy for s in one.shuffled)] for name, one in found.items()},
        "Consistency": {name: [1.0, *(s.consistency for s in one.shuffled)] for name, one in found.items()},
    }
    figures = [
        Figure(f"{what} under puzzles", "lines", {"x": x, "y": y, "xlabel": "ratio at inference", "ylabel": what.lower()})
        for what, y in series.items()
    ]
    return (Table("Puzzles at inference", columns, tuple(rows), note),), tuple(figures)
