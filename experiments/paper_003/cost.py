"""Table 3 of the rotation-symmetry paper: the CPU seconds of matching, of a plain transcription of
the paper's formulas, and of the merges.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from experiments.paper_003 import reference_matcher
from experiments.paper_003.matchers import FINDERS, PAPER, Request
from experiments.paper_003.pair_cells import (
    METHODS,
    Bench,
    Merging,
    Parameters,
    ends_of,
    examples_of,
)
from experiments.paper_003.pair_results import EXACT, open_pairs, results
from experiments.shared.cells import Cell
from experiments.shared.runner import Lab
from regauge.checkpoints.resume import Outcome, ResumeState
from regauge.core.action import State
from regauge.core.element import identity
from regauge.core.fold import fold_norms
from regauge.core.spec import Spec
from regauge.data.tasks import Examples
from regauge.matching import match_states
from regauge.matching.costs import Costs
from regauge.models.resolve import spec_of
from regauge.results.findings import Finding, Results, Table

# keys of the cached seconds, and the names of two of them in tables
PLAIN, PAPERS, WHOLE = "plain numpy", "ours, 003's matcher", "ours, everything"
NAMES = {PAPERS: "regauge, the paper's matcher", WHOLE: "regauge, by weights"}


def clock(p: Parameters, data: Mapping[str, Any], work: ResumeState) -> Outcome:
    """Time matching and merging in turn, `runs` times, and compare the distances of our matcher and
    the plain transcription. Not a pure function: the cache holds one measurement of one machine.
    CPU seconds depend less on other processes than wall seconds do.
    """
    module, spec, a, b = ends_of({**p, "way": {}}, data)
    config = getattr(module, "config", None)
    heads = int(getattr(config, "num_attention_heads", 0))
    tasks: dict[str, Callable[[], Any]] = {
        PAPERS: lambda: FINDERS["match"](Request(spec, a, b, PAPER, module, _none))
    }
    transcribed = reference_matcher.read(b, spec.family, heads)
    if transcribed is not None:
        tasks[PLAIN] = lambda: [
            reference_matcher.matched(x, y)
            for x, y in zip(*_layers(spec, heads, a, b), strict=True)
        ]
    tasks[WHOLE] = lambda: _whole_match(module, a, b)
    some = examples_of(
        p, data, "train"
    )  # before any clock runs: tokenizing does not belong to a merge
    for name, method in METHODS.items():
        given = Merging(module, spec, a, b, lambda: some, p["samples"])
        tasks[f"merge: {name}"] = lambda method=method, given=given: method(given)  # type: ignore[misc]
    wall: dict[str, list[float]] = {name: [] for name in tasks}
    cpu: dict[str, list[float]] = {name: [] for name in tasks}
    long = {
        f"merge: {name}" for name in METHODS if name != "Simple"
    }  # seconds each: once is enough, without a warm-up
    for run in range(p["runs"] + 1):
        for name, task in tasks.items():
            if name in long and run != 1:
                continue
            started = time.perf_counter(), time.process_time()
            task()
            if run:  # the first round warms up
                wall[name].append(time.perf_counter() - started[0])
                cpu[name].append(time.process_time() - started[1])
    values: dict[str, Any] = {"wall": wall, "cpu": cpu, "distance": {}}
    if transcribed is not None:
        costs = Costs(spec, a, b)
        rest = sum(d for d, _ in costs.distances(identity(spec)).values())
        for x, y in zip(*_layers(spec, heads, a, b), strict=True):
            rest += reference_matcher.squared(
                reference_matcher.matched(x, y), y
            ) - reference_matcher.squared(x, y)
        ours = FINDERS["match"](Request(spec, a, b, PAPER, module, _none)).element
        values["distance"] = {
            PLAIN: rest**0.5,
            "ours": sum(d for d, _ in costs.distances(ours).values()) ** 0.5,
        }
    return Outcome(values)


def _none() -> Examples:
    raise AssertionError("data-free")


def _whole_match(module: torch.nn.Module, a: State, b: State) -> None:
    spec = spec_of(module)
    (folded, a), (_, b) = fold_norms(spec, a), fold_norms(spec, b)
    match_states(folded, a, b)


def _layers(spec: Spec, heads: int, *states: State) -> list[list[reference_matcher.Layer]]:
    return [reference_matcher.read(state, spec.family, heads) or [] for state in states]


CLOCK = Cell("clock", 3, clock)


def clocked(bench: Bench) -> Mapping[str, Any]:
    """The seconds of one pair."""
    p = {**bench.parameters, "runs": bench.effort["runs"], "samples": bench.effort["samples"]}
    return bench.lab.run(
        CLOCK, p, {**bench.data, **bench.examples}, f"time {bench.pair.label}"
    ).values


def median_ratio(one: Sequence[float], other: Sequence[float]) -> float:
    """The median over runs of one / other, which were measured in turn; where what takes long was
    run less often, the ratio of the medians.
    """
    if len(one) != len(other):
        return statistics.median(one) / max(statistics.median(other), 1e-9)
    return statistics.median(x / max(y, 1e-9) for x, y in zip(one, other, strict=True))


def table3(lab: Lab) -> Results:
    """CPU seconds of matching, of a transcription of the paper's formulas, and of the merges."""
    ends, benches = open_pairs(lab, lambda ends: len(ends.ready), most=1)
    rows, findings = [], []
    for bench in benches:
        found = clocked(bench)
        seconds, kind = found["cpu"], bench.pair.kind
        base = seconds.get(PLAIN)
        for what in (
            w for w in (PLAIN, PAPERS, WHOLE, *(f"merge: {m}" for m in METHODS)) if w in seconds
        ):
            times = seconds[what]
            ratio = median_ratio(times, base) if base else None
            wall = statistics.median(found["wall"][what])
            rows.append(
                (
                    bench.pair.about.name,
                    NAMES.get(what, what),
                    statistics.median(times),
                    min(times),
                    max(times),
                    ratio,
                    wall,
                    len(times),
                )
            )
        if base:
            ratio = median_ratio(seconds[PAPERS], base)
            said = (
                f"CPU seconds of our matcher on the {bench.pair.about.name}s, as the "
                "paper's, over those of its plain transcription"
            )
            detail = "median ratio, timed in turn on this machine"
            findings.append(
                Finding(
                    f"{kind}/seconds",
                    said,
                    None,
                    ratio,
                    None,
                    1.0,
                    detail,
                    "003 Tab. 3",
                    "ratio of seconds",
                    trials=len(base),
                )
            )
            for method in ("Fisher", "RegMean"):
                times = seconds[f"merge: {method}"]
                share, trials = (
                    median_ratio(seconds[PAPERS], times),
                    min(len(seconds[PAPERS]), len(times)),
                )
                said = (
                    f"CPU seconds of the paper's matching of the {bench.pair.about.name}s "
                    f"over those of a merge by {method}"
                )
                detail = "the paper reports under 0.05, on an A100 with 1000 steps"
                findings.append(
                    Finding(
                        f"{kind}/{method}/share",
                        said,
                        None,
                        share,
                        None,
                        1.0,
                        detail,
                        "003 Tab. 3",
                        "ratio of seconds",
                        trials=trials,
                    )
                )
            ours, theirs = found["distance"]["ours"], found["distance"][PLAIN]
            off = abs(ours - theirs) / theirs if theirs else abs(ours)
            said = (
                f"Our matcher brings the {bench.pair.about.name}s as close as the transcription "
                "does"
            )
            detail = f"{ours:.6g} and {theirs:.6g}"
            findings.append(
                Finding(
                    f"{kind}/distance",
                    said,
                    off <= EXACT,
                    off,
                    EXACT,
                    sentence=detail,
                    source="003 Thm 4.1",
                )
            )
    heads = (
        "models",
        "computation",
        "CPU seconds, median",
        "minimum",
        "maximum",
        "ratio to plain numpy",
        "wall seconds, median",
        "runs",
    )
    note = (
        "Timed in turn; ratios are medians over runs, of CPU seconds. Plain numpy computes in "
        "float64 and validates nothing. The paper's seconds (A100, three models): matching 1.59, "
        "1.71, 3.48; simple averaging 0.13, 0.09, 0.22; Fisher 197, 70, 84; RegMean 138, 36, 71."
    )
    title = "Table 3: the cost of matching"
    return results(lab, "table3", title, findings, Table(title, heads, tuple(rows), note), [], ends)
