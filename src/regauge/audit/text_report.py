"""The score table of audits of texts: rows, findings and tables, of features and of updates."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from regauge.audit.engine import Attack, titles_of
from regauge.audit.text_scores import MEASURES
from regauge.results.findings import Finding, Results, Table, spread_of

LEAK = "ROUGE-L"
TextScores = Mapping[str, list[float]]  # by measure, one score for each text
Cells = Mapping[str, Callable[["TextRow"], Any]]  # columns, and their values


@dataclass(frozen=True, eq=False)
class TextRow:
    """The leakage of one combination of defences.

    Attributes:
        combination: The defences.
        scores: The scores of each text, by attack and measure.
        seconds: The run time of each attack.
        labels: The recovered shares of the labels.
        reasons: Why attacks do not apply, by name.
        accuracy: The accuracy of the model.
        chance: The accuracy of a guess.
        texts: The number of texts in an update.
    """

    combination: str
    scores: Mapping[str, TextScores]
    seconds: Mapping[str, float]
    labels: Sequence[float] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    accuracy: float = 0.0
    chance: float = 0.0
    texts: int = 1

    def value(self, attack: str, measure: str = LEAK) -> float:
        """Return the mean score of an attack."""
        return statistics.fmean(self.scores[attack][measure])

    def best(self, measure: str = LEAK) -> tuple[str, float]:
        """Return the strongest attack by a measure, and its mean score."""
        name = max(self.scores, key=lambda n: self.value(n, measure))
        return name, self.value(name, measure)


def build_text_results(
    title: str,
    table: Table,
    rows: Sequence[TextRow],
    floor: TextScores,
    attacks: Sequence[Attack],
    *,
    name: str,
    before: Cells,
    after: Cells,
    guess: Sequence[Any],
    describe: Callable[[TextRow, str], str],
    has_spread: bool = False,
) -> Results:
    """Return the findings and the main table of an audit of texts.

    Args:
        title: The title of the results.
        table: Title and note of the table; its columns and rows are set.
        rows: The measurements; the first is undefended.
        floor: The scores of a guess.
        attacks: The attacks of the report.
        name: The name of the case in findings.
        before: Columns before the scores.
        after: Columns after the scores, and before the run time.
        guess: The label of the last row, and its values of the columns `before`.
        describe: Return the sentence of a finding on a row and an attack.
        has_spread: Whether findings have a spread over the texts.
    """
    titles, undefended = titles_of(attacks), rows[0]
    pairs = [(row, attack) for row in rows for attack in row.scores]
    body = [
        (
            row.combination,
            *(cell(row) for cell in before.values()),
            titles[attack],
            *summarize(row.scores[attack]),
            *(cell(row) for cell in after.values()),
            row.seconds[attack],
        )
        for row, attack in pairs
    ]
    body.append((*guess, "", *summarize(floor), *(None for _ in after), None))
    columns = ("defences", *before, "attack", *MEASURES, f"worst {LEAK}", *after, "seconds")
    findings = tuple(
        Finding(
            f"{name}/{row.combination}/{attack}",
            f'Under "{row.combination}", {titles[attack]} gives this much of the texts.',
            None,
            row.value(attack),
            statistics.fmean(floor[LEAK]),
            undefended.value(attack),
            describe(row, attack),
            measure=LEAK,
            spread=spread_of(row.scores[attack][LEAK]) if has_spread else None,
            trials=len(row.scores[attack][LEAK]),
        )
        for row, attack in pairs
    )
    return Results(title, findings, (Table(table.title, columns, tuple(body), table.note),))


def summarize(scores: TextScores) -> list[float]:
    """Return the mean of each measure, and the leakage of the text that leaked most."""
    means = [round(statistics.fmean(scores[m]), 3) for m in MEASURES]
    return [*means, round(max(scores[LEAK]), 3)]


def merge_scores(parts: Sequence[TextScores]) -> dict[str, list[float]]:
    """Concatenate the scores of several groups of texts."""
    return {measure: [value for part in parts for value in part[measure]] for measure in MEASURES}
