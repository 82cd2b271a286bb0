"""The result of an evaluation: a table of models and guesses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from regauge.data.evaluate import Score, perplexity_of
from regauge.results.findings import Claim, Figure, Finding, Results, Table
from regauge.results.views import ResultView

SIGNIFICANCE = 2.0  # standard errors beyond which a difference is not chance
FREQUENCIES, UNIFORM = "guess: label frequencies", "guess: uniform"


@dataclass(frozen=True, eq=False, repr=False)
class Evaluation(ResultView):
    """The scores of models on the same data.

    The first model is the reference of the changes. Guesses read no input: one knows how frequent
    the labels are, the other takes all to be equally likely.

    Attributes:
        scores: The score of each model, by name.
        facts: Facts of the run, for the report.
        notes: Remarks on the models and the comparison.

    Example:
        >>> evaluation = regauge.evaluate({"before": vit, "after": vit}, images)
        >>> evaluation.scores["after"].accuracy == evaluation.scores["before"].accuracy
        True
    """

    scores: Mapping[str, Score]
    facts: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def metric(self) -> str:
        """The number that ranks the models: "accuracy", or "perplexity" of tokens."""
        return "perplexity" if self._first.predicts_tokens else "accuracy"

    @property
    def _changed(self) -> str:
        return "loss" if self.metric == "perplexity" else "accuracy"

    @property
    def best(self) -> str:
        """The name of the model with the highest accuracy, or the lowest perplexity."""
        if self.metric == "perplexity":
            return min(self.scores, key=lambda name: self.scores[name].loss)
        return max(self.scores, key=lambda name: self.scores[name].accuracy)

    def is_worse(self, name: str, than: str | None = None) -> bool:
        """Return whether a model is significantly worse than another (by default the first one).

        The difference is significant beyond two of its standard errors. A loss that is not finite
        is worse than a finite one.

        Args:
            name: The name of a model.
            than: The name of the other model.
        """
        score, reference = self.scores[name], self.scores[than or next(iter(self.scores))]
        return is_worse(score, reference)

    def joined(self, other: Evaluation) -> Evaluation:
        """Return the scores of both; the first model of this one remains the reference.

        Args:
            other: An evaluation of other models on the same data.
        """
        notes = (*self.notes, *(note for note in other.notes if note not in self.notes))
        scores = {**self.scores, **other.scores}
        return Evaluation(scores, {**other.facts, **self.facts, "models": list(scores)}, notes)

    @cached_property
    def results(self) -> Results:
        """Findings between guess and reference, one table, and a figure."""
        findings = tuple(self._finding(name) for name in self.scores)
        facts = dict(self.facts)
        if len(self.scores) > 1:  # the headline is the sentence of a single model
            facts["verdict"] = [self.describe(name) for name in self.scores]
        if self.notes:
            facts["notes"] = list(self.notes)
        table, figure = self._table(), self._figure()
        return Results("Evaluation", findings, (table,), (figure,), facts, claim=self._claim())

    def describe(self, name: str) -> str:
        """Return the score of a model in one sentence, with its baseline and its error."""
        score = self.scores[name]
        guess = score.guess
        shown = (
            _percent(guess.accuracy)
            if self.metric == "accuracy"
            else _short(perplexity_of(guess.loss))
        )
        verdict = ", no better than a guess" if not is_worse(guess, score) else ""
        return f"{name}: {self._amount(score)}{verdict}; a guess has {shown}"

    @property
    def verdicts(self) -> tuple[str, ...]:
        """What needs attention: models no better than a guess, or worse than the first one."""
        first, *others = self.scores
        lines = [
            f"{name} is no better than a guess"
            for name, score in self.scores.items()
            if not is_worse(score.guess, score)
        ]
        lines += [f"{name} is worse than {first}" for name in others if self.is_worse(name)]
        return tuple(lines)

    def __str__(self) -> str:
        from regauge.models.summary import format_columns

        rows = self._text_rows()
        labels = int(self._first.labels.sum())
        title = f"{self.facts.get('data', 'the data')}: {len(self._first):,} examples"
        title += f", {labels:,} labels" if labels != len(self._first) else ""
        return "\n".join(
            [
                f"{title} (± standard error)",
                "",
                format_columns(rows, right=tuple(range(1, len(rows[0])))),
                *(["", *self.verdicts] if self.verdicts else []),
                *(["", *(f"note: {note}" for note in self.notes)] if self.notes else []),
            ]
        )

    def __repr__(self) -> str:
        values = (f"{name} {self._value(score)}" for name, score in self.scores.items())
        return f"<evaluation, {self.metric}: {', '.join(values)}>"

    @property
    def _first(self) -> Score:
        return next(iter(self.scores.values()))

    def _value(self, score: Score) -> str:
        return _percent(score.accuracy) if self.metric == "accuracy" else _short(score.perplexity)

    def _claim(self) -> Claim:
        """Return the headline: the score of one model, or the best of several."""
        best = self.scores[self.best]
        guess = best.guess.accuracy if self.metric == "accuracy" else perplexity_of(best.guess.loss)
        text = f"{self.best} has {self._amount(best)}"
        if len(self.scores) > 1:
            rank = "highest" if self.metric == "accuracy" else "lowest"
            text = f"{self.best} has the {rank} {self.metric} of {len(self.scores)} models"
        shown = _percent(guess) if self.metric == "accuracy" else _short(guess)
        return Claim(
            text,
            "none",
            self._value(best),
            f"{self.metric} on {len(best):,} examples; a guess without input has {shown}",
            "; ".join(self.verdicts) + "." if self.verdicts else "",
        )

    def _amount(self, score: Score) -> str:
        """Return the metric of a score in words, with its error."""
        if self.metric == "accuracy":
            error = _plus_minus(score.accuracy_error, _percent)
            return f"accuracy {_percent(score.accuracy)}{error}"
        error = _plus_minus(score.loss_error, _four)
        return f"perplexity {_short(score.perplexity)} (loss {score.loss:.4f}{error} nats)"

    def _finding(self, name: str) -> Finding:
        score = self.scores[name]
        is_accuracy = self.metric == "accuracy"
        return Finding(
            f"evaluate/{name}",
            f"{self.metric} of {name}",
            None,
            score.accuracy if is_accuracy else score.perplexity,
            score.guess.accuracy if is_accuracy else perplexity_of(score.guess.loss),
            sentence=self.describe(name),
            measure=self.metric,
            where=name,
        )

    def _table(self) -> Table:
        """Return all numbers; the last columns are changes since the first model."""
        has_perplexity = self.metric == "perplexity"
        compares = len(self.scores) > 1
        columns = ["model", *(["perplexity"] if has_perplexity else [])]
        columns += ["loss", "loss error", "accuracy", "accuracy error"]
        columns += [f"change of {self._changed}", "change error"] if compares else []
        rows: list[tuple[Any, ...]] = []
        for name, score in self.scores.items():
            row = [name, *([score.perplexity] if has_perplexity else [])]
            row += [score.loss, score.loss_error, score.accuracy, score.accuracy_error]
            rows.append((*row, *(self._change(score) if compares else ())))
        for name, loss, accuracy in _guesses(self._first):
            row = [name, *([perplexity_of(loss)] if has_perplexity else [])]
            row += [loss, None, accuracy, None]
            rows.append((*row, *((None, None) if compares else ())))
        note = "errors are standard errors over examples; losses are in nats per label"
        note += "; changes are since the first model" if compares else ""
        return Table("Models and guesses", tuple(columns), tuple(rows), note)

    def _change(self, score: Score) -> tuple[float | None, float | None]:
        if score is self._first or not score.is_comparable(self._first):
            return None, None
        if self.metric == "accuracy":
            return score.accuracy_change(self._first)
        return score.loss_change(self._first)

    def _text_rows(self) -> list[tuple[str, ...]]:
        """Return the table as text, with errors beside their values."""
        has_perplexity = self.metric == "perplexity"
        head = ["model", *(["perplexity"] if has_perplexity else []), "loss", "accuracy"]
        rows = [(*head, *([f"change of {self._changed}"] if len(self.scores) > 1 else []))]
        for name, score in self.scores.items():
            cells = [name, *([_short(score.perplexity)] if has_perplexity else [])]
            cells.append(f"{score.loss:.4f}{_plus_minus(score.loss_error, _four)}")
            cells.append(f"{_percent(score.accuracy)}{_plus_minus(score.accuracy_error, _percent)}")
            if len(self.scores) > 1:
                cells.append(self._change_text(*self._change(score)))
            rows.append(tuple(cells))
        for name, loss, accuracy in _guesses(self._first):
            cells = [name, *([_short(perplexity_of(loss))] if has_perplexity else [])]
            cells += [f"{loss:.4f}", _percent(accuracy)]
            rows.append((*cells, *([""] if len(self.scores) > 1 else [])))
        return rows

    def _change_text(self, change: float | None, error: float | None) -> str:
        if change is None:
            return ""
        if self.metric == "perplexity":
            return f"{change:+.4f}{_plus_minus(error, _four)}"
        return f"{100 * change:+.1f}{_plus_minus(error, _points)} points"

    def _figure(self) -> Figure:
        is_accuracy = self.metric == "accuracy"
        guess = self._first.guess
        labels = [*self.scores, FREQUENCIES]
        values = [s.accuracy if is_accuracy else s.perplexity for s in self.scores.values()]
        values.append(guess.accuracy if is_accuracy else perplexity_of(guess.loss))
        direction = "higher" if is_accuracy else "lower"
        return Figure(
            f"{self.metric.capitalize()} of each model",
            "bars",
            {
                "labels": labels,
                "y": {self.metric: values},
                "ylabel": self.metric,
                "percent": is_accuracy,
            },
            f"{direction.capitalize()} is better; the last bar reads no input.",
        )


def is_worse(score: Any, reference: Score) -> bool:
    """Return whether a score (or a guess) is significantly worse than a reference.

    Accuracy decides for classes, the loss for tokens; a loss that is not finite is worse than a
    finite one. One example has no standard error, so that nothing on it is significant.
    """
    by_loss = reference.predicts_tokens
    if not math.isfinite(reference.loss):
        return False
    if not math.isfinite(score.loss):
        return True
    if not isinstance(score, Score):
        worse = score.loss - reference.loss if by_loss else reference.accuracy - score.accuracy
        error = reference.loss_error if by_loss else reference.accuracy_error
    elif score.is_comparable(reference):
        change, error = (
            score.loss_change(reference) if by_loss else score.accuracy_change(reference)
        )
        worse = change if by_loss else -change
    else:
        return False
    return error is not None and worse > SIGNIFICANCE * error


def _guesses(score: Score) -> tuple[tuple[str, float, float], ...]:
    guess = score.guess
    return (
        (FREQUENCIES, guess.loss, guess.accuracy),
        (UNIFORM, guess.uniform_loss, guess.uniform_accuracy),
    )


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _four(value: float) -> str:
    return f"{value:.4f}"


def _points(value: float) -> str:
    return f"{100 * value:.1f}"


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:,.2f}" if value < 1e6 else f"{value:.1e}"


def _plus_minus(error: float | None, text_of: Any) -> str:
    return "" if error is None else f" ± {text_of(error)}"
