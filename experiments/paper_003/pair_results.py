"""Shared code of the experiments on pairs of models: the pairs, their numbers, and their facts."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments.paper_003.pair_catalog import Ends, Pair, load, look
from experiments.paper_003.pair_cells import Bench
from experiments.shared.runner import Lab
from regauge.matching.barriers import Path
from regauge.results.findings import Figure, Finding, Results, Table, spread_of

KINDS = {
    "small": ("vit", "bert", "minilm", "gpt2", "gpt2-provided"),
    "paper": ("imfeld", "roberta", "deberta"),
    "pico": ("vit", "bert", "gpt2"),
}
MOST = 2  # pairs of a kind in the figures; `003/barriers` takes all
SAME = 1e-3  # nats by which a moved end may differ from itself: rounding in float32 stays far below
EXACT = 1e-6  # the share by which two computations of one distance may differ
# What the paper prints: accuracies of its ViT in percent, by method.
_ABLATED = ("paper", "without rescaling", "without FFN", "without attention")
PAPER_ACCURACY = {
    "Simple": dict(zip(_ABLATED, (10.19, 10.22, 11.15, 10.45), strict=True)),
    "Fisher": dict(zip(_ABLATED, (18.58, 18.61, 20.21, 12.21), strict=True)),
    "RegMean": dict(zip(_ABLATED, (15.35, 15.31, 12.94, 11.89), strict=True)),
    "OT-ACTS-EMD": dict(zip(_ABLATED, (32.53, 32.50, 28.66, 32.08), strict=True)),
    "OT-ACTS": dict(zip(_ABLATED, (61.25, 61.23, 60.07, 61.15), strict=True)),
    "OT-WTS": dict(zip(_ABLATED, (57.17, 57.16, 56.16, 57.11), strict=True)),
}


def numbers(path: Path) -> dict[str, float]:
    """Summarize a path in a few numbers."""
    ends = {"first": path.losses[0], "second": path.losses[-1]}
    measured = {
        "barrier": path.barrier,
        "rise": path.rise,
        "span": path.span,
        "midpoint": path.midpoint,
        "accuracy": path.accuracy_barrier,
    }
    if path.calibrated is not None:
        measured["calibrated"] = path.calibrated.barrier
    return {**measured, **ends}


class Rows:
    """Numbers by kind and case, one dict for each pair."""

    def __init__(self) -> None:
        self._found: dict[str, dict[Any, list[Mapping[str, Any]]]] = {}
        self._names: dict[str, str] = {}

    def add(self, pair: Pair, case: Any, values: Mapping[str, Any]) -> None:
        self._names[pair.kind] = pair.about.name
        self._found.setdefault(pair.kind, {}).setdefault(case, []).append(values)

    def name(self, kind: str) -> str:
        return self._names[kind]

    def values(self, kind: str, case: Any) -> list[Mapping[str, Any]]:
        return self._found[kind][case]

    def mean(self, kind: str, case: Any) -> Callable[[str], float]:
        return lambda column: statistics.fmean(v[column] for v in self._found[kind][case])

    def spread(self, kind: str, case: Any, column: str) -> float | None:
        return spread_of([v[column] for v in self._found[kind][case]])

    def trials(self, kind: str) -> int:
        return len(next(iter(self._found[kind].values())))


def open_pairs(
    lab: Lab, cells: Callable[[Ends], int], most: int | None = MOST
) -> tuple[Ends, list[Bench]]:
    """Open the available pairs, and announce the number of cells."""
    ends = look(lab, KINDS[lab.preset_name], most)
    lab.total = ends.steps + cells(ends)
    return ends, [Bench(lab, load(lab, ready)) for ready in ends.ready]


SLUGS = {
    "none": "unmatched",
    "neurons": "git-re-basin-ffn",
    "permutations": "git-re-basin",
    "transport": "ot-fusion",
    "ours": "by weights",
}


def slug(way: str) -> str:
    """Return the name of a matcher in the ids of findings."""
    return SLUGS.get(way, way.replace(" ", "-"))


def facts(lab: Lab, name: str, ends: Ends) -> dict[str, Any]:
    """Return the facts of an experiment on pairs."""
    which = (
        "all finished pairs"
        if ends.most is None
        else f"of finished pairs, at most {ends.most} of a kind"
    )
    return lab.facts(
        f"003/{name}",
        lab.seeds or which,
        pairs={kind: sum(r.kind == kind for r in ends.ready) for kind in ends.kinds},
    )


def results(
    lab: Lab,
    name: str,
    title: str,
    findings: Sequence[Finding],
    table: Table,
    figures: Sequence[Figure],
    ends: Ends,
    *unchecked: str,
) -> Results:
    own = (
        () if lab.preset_name == "paper" else ("the paper's own models and data (--preset paper)",)
    )
    return Results(
        title,
        tuple(findings),
        (table,),
        tuple(figures),
        facts(lab, name, ends),
        (*own, *ends.list_absent(), *unchecked),
    )
