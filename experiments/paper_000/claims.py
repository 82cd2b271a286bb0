"""The claims of the tables as findings, between a random guess and the plain model."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from experiments.shared.presets import Subject
from regauge.checkpoints.resume import Outcome
from regauge.results.findings import Finding, spread_of

Scores = dict[str, list[Outcome]]  # by way, one for each trial (and key)

# the names of ways in findings, where they differ from the parameter of the cells
WAYS = {"moved": "no key", "wrong": "wrong key"}
MEASURES = ("accuracy", "aAcc", "mIoU", "mAcc", "perplexity")
SAME = 1e-3  # a share of the examples, or of the perplexity, that rounding may change
# the largest share of the way from a guess to the plain model that a model without its key reaches
LOST = 0.2
KNOWS, KNOWS_TEXT = (
    0.05,
    math.log(4),
)  # how much better than a guess the plain model must be before anything can be lost
TOLERANCE = {"float32": 1e-4, "float64": 1e-6}


@dataclass(frozen=True)
class Column:
    """One measure of one subject, by way of inference or training."""

    key: str
    subject: Subject
    measure: str
    scores: Scores

    def values(self, way: str) -> list[float]:
        return [s.values["measures"][self.measure] for s in self.scores[way]]

    def mean(self, way: str) -> float:
        found = self.values(way)
        # Perplexities without the key spread over powers of ten: the mean is of their logarithms.
        return (
            math.exp(statistics.fmean(map(math.log, found)))
            if self.measure == "perplexity"
            else statistics.fmean(found)
        )

    def spread(self, way: str) -> float | None:
        return spread_of(self.values(way))

    @property
    def chance(self) -> float:
        return statistics.fmean(s.values["chance"][self.measure] for s in self.scores["plain"])

    def shown(self, way: str) -> float:
        return self.mean(way) * (1 if self.measure == "perplexity" else 100)


def columns_of(key: str, subject: Subject, scores: Scores) -> list[Column]:
    return [
        Column(key, subject, m, scores)
        for m in MEASURES
        if m in scores["plain"][0].values["measures"]
    ]


def same(c: Column, way: str, table: str, *, exact: bool = True) -> Finding:
    """Check that the measure equals that of the plain model, trial by trial."""
    pairs = list(zip(c.values(way), c.values("plain"), strict=True))
    worst = max(abs(a - b) / (b if c.measure == "perplexity" else 1) for a, b in pairs)
    verb = "Training" if table in ("table3", "table5") else "Inference"
    detail = (
        "the same in every trial"
        if worst == 0
        else f"the largest difference in a trial is {worst:.1e}"
    )
    return Finding(
        _id(c, way),
        f"{verb} with permuted {way} leaves the {c.measure} of {c.subject.name} unchanged.",
        worst <= SAME if exact else None,
        c.mean(way),
        c.chance,
        c.mean("plain"),
        detail if exact else f"{detail}; in float32, rounding accumulates over many steps",
        _source(table),
        c.measure,
        spread=c.spread(way),
        trials=len(pairs),
    )


def lost(c: Column, way: str, table: str) -> Finding:
    """Check that a model without its key is no better than a guess."""
    value, chance, plain = c.mean(way), c.chance, c.mean("plain")
    gap, left = (
        math.log(chance / x) if c.measure == "perplexity" else x - chance for x in (plain, value)
    )
    knows = gap > (KNOWS_TEXT if c.measure == "perplexity" else KNOWS)
    share = left / gap if knows else 0.0
    detail = (
        f"{100 * share:.0f} % of the way from a guess to the plain model"
        if share > 0
        else "no better than a guess, or worse"
    )
    given = "plain input" if way == "moved" else "input permuted by a wrong key"
    return Finding(
        _id(c, way),
        f"The permuted {c.subject.name} on {given} is no better than a guess ({c.measure}).",
        share <= LOST if knows else None,
        value,
        chance,
        plain,
        detail if knows else "no verdict: the plain model is hardly better than a guess",
        _source(table),
        c.measure,
        spread=c.spread(way),
        trials=len(c.scores[way]),
    )


def in_distribution(c: Column, way: str, table: str) -> Finding:
    gap, spread = c.mean(way) - c.mean("plain"), c.spread("plain")
    detail = f"the means differ by {gap:+.4f}" + (
        f"; the standard deviation over seeds is {spread:.4f}" if spread is not None else ""
    )
    return Finding(
        _id(c, way),
        f"With dropout, training with permuted {way} agrees with plain training in distribution "
        "only: the masks differ.",
        None,
        c.mean(way),
        c.chance,
        c.mean("plain"),
        detail,
        _source(table),
        c.measure,
        spread=c.spread(way),
        trials=len(c.scores[way]),
    )


def outputs(c: Column, way: str, table: str) -> Finding:
    """Check that the logits agree, not only the scores."""
    plain = c.scores["plain"]
    value = max(
        distance(outputs_of(a), outputs_of(b)) for a, b in zip(c.scores[way], plain, strict=True)
    )
    keys = len(c.scores["moved"]) // len(plain)
    control = min(
        distance(outputs_of(a), outputs_of(plain[i // keys]))
        for i, a in enumerate(c.scores["moved"])
    )
    floor = TOLERANCE[c.subject.dtype]
    statement = f"The logits of {c.subject.name} with permuted {way} are those of the plain model."
    detail = f"{c.subject.dtype}; the control is the moved model on normal input"
    return Finding(
        f"{c.key}/{way}/outputs",
        statement,
        value <= floor,
        value,
        floor,
        control,
        detail,
        _source(table),
        trials=len(plain),
    )


def agree(
    c: Column, way: str, table: str, what: str, by_way: Scores, dtype: str, of: Any
) -> Finding:
    """Check that permuted and plain training give the same outputs or weights; the control is
    another seed.
    """
    pairs = list(zip(by_way[way], by_way["plain"], strict=True))
    value = max(distance(of(a), of(b)) for a, b in pairs)
    others = [
        distance(of(a), of(b)) for a, b in zip(by_way["plain"][1:], by_way["plain"], strict=False)
    ]
    floor, exact = TOLERANCE[dtype], dtype == "float64"
    statement = (
        f"The {what} of a {c.subject.name} trained with permuted "
        f"{way}{', permuted back,' if what == 'weights' else ''} equal those of plain training."
    )
    detail = (
        f"{dtype}, after {by_way['plain'][0].values.get('steps', 'all')} steps"
        if what == "weights"
        else f"{dtype}, on the test data"
    )
    detail += "; the control is training from another seed" if others else ""
    return Finding(
        f"{c.key}/{way}/{what}",
        statement,
        value <= floor if exact else None,
        value,
        floor,
        min(others, default=None),
        detail if exact else f"{detail}; in float32, rounding accumulates over many steps",
        _source(table),
        trials=len(pairs),
    )


def distance(a: Mapping[str, Any], b: Mapping[str, Any]) -> float:
    """||a - b|| / ||b|| over all tensors together."""
    off = sum(float((a[name].double() - b[name].double()).square().sum()) for name in b)
    return math.sqrt(off / sum(float(t.double().square().sum()) for t in b.values()))


def outputs_of(outcome: Outcome) -> Mapping[str, Any]:
    return {"outputs": outcome.tensors["outputs"]}


def _id(c: Column, way: str) -> str:
    return (
        f"{c.key}/{WAYS.get(way, way)}"
        if c.measure in ("accuracy", "perplexity")
        else f"{c.key}/{WAYS.get(way, way)}/{c.measure}"
    )


def column_head(c: Column) -> str:
    """Return the head of a column: the model, its measure and the unit."""
    unit = "" if c.measure == "perplexity" else " (%)"
    return f"{c.subject.name}: {c.measure}{unit}"


def _source(table: str) -> str:
    return f"000 Tab. {table.removeprefix('table')}"
