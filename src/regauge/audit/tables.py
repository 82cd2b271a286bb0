"""Findings, tables and figures that all audits share, of images and of texts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from regauge.audit.engine import Attack, titles_of
from regauge.audit.scores import (
    AttackScores,
    Case,
    Row,
    Scores,
    mean_score,
    metric_cells,
    metric_columns,
    worst_score,
)
from regauge.audit.text_scores import MEASURES
from regauge.audit.verdicts import Quantity
from regauge.results.findings import Figure, Finding, Table, spread_of

Tensor = torch.Tensor
MAX_SIDE = 64  # pixels of an image in a gallery, at most
Cells = Mapping[str, Callable[[Row], Any]]  # columns, and their values


def build_findings(
    case: Case,
    attacks: Sequence[Attack],
    quantity: Quantity,
    describe: Callable[[Row, AttackScores], str],
    further: Callable[[Row], list[Finding]] = lambda row: [],
) -> list[Finding]:
    """Return one finding for each combination and attack on whole images or texts.

    Args:
        case: The measurements.
        attacks: The attacks of the report.
        quantity: What they recover, to judge it as the verdicts do.
        describe: Return the sentence of a finding.
        further: Return further findings on a row.
    """
    undefended, findings, titles = case.rows[0], [], titles_of(attacks)
    for row in case.rows:
        for name, result in row.by_attack.items():
            values, means = result.scores[case.metric], result.by_seed(case.metric)
            evidence = case.evidence(row, name)
            findings.append(
                Finding(
                    f"{case.name}/{row.combination}/{name}",
                    f'Under "{row.combination}", {titles[name]} does not recover the '
                    f"{case.subject}.",
                    None,
                    result.value(case.metric),
                    evidence.guess,
                    # an attack on shuffles has no undefended case
                    undefended.value(name, case.metric)
                    if name in undefended.by_attack
                    else undefended.best(case.metric)[1],
                    describe(row, result),
                    measure=case.metric,
                    spread=spread_of(means if len(means) > 1 else values),
                    trials=len(values),
                    interval=evidence.interval,
                    beats_floor=quantity.beats_guess(evidence),
                )
            )
        findings += further(row)
    return findings


def build_details(
    case: Case,
    attacks: Sequence[Attack],
    columns: Mapping[str, Callable[[AttackScores], Any]],
    note: str,
) -> Table:
    """Return every metric, in the mean and of the worst image.

    Args:
        case: The measurements.
        attacks: The attacks of the report.
        columns: Further columns, such as the number of epochs.
        note: The note of the table.
    """
    metrics = metric_columns(next(iter(case.floors.values())))
    titles, order = titles_of(attacks), [a.name for a in attacks]
    has_inputs = any(r.read is not None for row in case.rows for r in row.by_attack.values())
    rows: list[tuple[Any, ...]] = []
    for row in case.rows:
        for name in sorted(row.by_attack, key=order.index):
            result = row.by_attack[name]
            for against, scores in (("the original", result.scores), ("the input", result.read)):
                if scores is not None:
                    side = (against,) if has_inputs else ()
                    cells = (*metric_cells(scores, metrics), *(c(result) for c in columns.values()))
                    rows.append((row.combination, titles[name], *side, *cells))
    blank = (None,) * len(columns)
    side = ("the original",) if has_inputs else ()
    rows += [
        ("baseline", name, *side, *metric_cells(scores, metrics), *blank)
        for name, scores in case.floors.items()
    ]
    heads = ("defences", "attack", *(("against",) if has_inputs else ()), *metrics, *columns)
    return Table(f"Every metric: {case.name}", heads, round_rows(rows), note)


def build_text_table(
    case: Case,
    attacks: Sequence[Attack],
    before: Cells,
    after: Cells,
    guess: Sequence[Any],
    title: str,
    note: str,
) -> Table:
    """Return the main table of texts: every measure of each combination and attack.

    Args:
        case: The measurements.
        attacks: The attacks of the report.
        before: Columns before the scores.
        after: Columns after the scores, and before the run time.
        guess: The label of the last row, and its values of the columns `before`.
        title: The title.
        note: What the table adds to the note.
    """
    titles = titles_of(attacks)

    def summarize(scores: Scores) -> list[float | None]:
        return [*(mean_score(scores, m) for m in MEASURES), worst_score(scores, case.metric)]

    rows = [
        (
            row.combination,
            *(cell(row) for cell in before.values()),
            titles[name],
            *summarize(result.scores),
            *(cell(row) for cell in after.values()),
            result.seconds,
        )
        for row in case.rows
        for name, result in row.by_attack.items()
    ]
    (floor,) = case.floors.values()
    rows.append((*guess, "", *summarize(floor), *(None for _ in after), None))
    columns = ("defences", *before, "attack", *MEASURES, f"worst {case.metric}", *after, "seconds")
    shares = (
        "Shares of each text, in the mean over texts: tokens as a bag, tokens in their places, "
        "ROUGE on tokens (F1), texts that are exactly right. "
    )
    return Table(title, columns, round_rows(rows), shares + note)


def round_rows(rows: Iterable[Sequence[Any]]) -> tuple[tuple[Any, ...], ...]:
    """Round the numbers of a table's rows to three digits after the point."""
    return tuple(tuple(round(v, 3) if isinstance(v, float) else v for v in row) for row in rows)


def gallery(
    title: str, rows: Sequence[tuple[str, Tensor | None]], caption: str = ""
) -> list[Figure]:
    """Return a figure of rows of images, the true ones first; none without reconstructions."""
    shown = [
        {"label": label, "images": to_pictures(images)}
        for label, images in rows
        if images is not None and len(images)
    ]
    return [Figure(title, "images", {"columns": [], "rows": shown}, caption)] if shown[1:] else []


def line_figure(
    title: str,
    x: Sequence[Any],
    y: Mapping[str, Sequence[float | None]],
    xlabel: str,
    ylabel: str,
    caption: str = "",
    **options: Any,
) -> Figure:
    """Return a figure of curves."""
    data = {"x": list(x), "y": y, "xlabel": xlabel, "ylabel": ylabel, **options}
    return Figure(title, "lines", data, caption)


def to_pictures(images: Tensor) -> list[Any]:
    """Return images as nested lists for a figure, at most `MAX_SIDE` pixels wide."""
    if images.shape[-1] > MAX_SIDE:
        images = torch.nn.functional.interpolate(images, (MAX_SIDE, MAX_SIDE), mode="area")
    images = images[:, 0] if images.shape[1] == 1 else images.permute(0, 2, 3, 1)
    pictures: list[Any] = (images.double() * 100).round().div(100).tolist()
    return pictures


def plot_lock(findings: Sequence[Finding]) -> tuple[Figure, ...]:
    """Plot what each attack on a lock gets, beside its baseline and the owner."""
    shown = [
        f
        for f in findings
        if f.value is not None
        and f.floor is not None
        and f.ceiling is not None
        and all(0 <= x <= 1 for x in (f.value, f.floor, f.ceiling))
        and "/handling/" not in f.id
    ]
    if not shown:
        return ()
    data = {
        "labels": [f.id.removeprefix("lock/") for f in shown],
        "y": {
            "attack": [f.value for f in shown],
            "no knowledge": [f.floor for f in shown],
            "owner": [f.ceiling for f in shown],
        },
        "ylabel": "share of the key, or accuracy",
        "percent": True,
    }
    caption = "An attack that reaches the owner's bar undoes what it attacks."
    return (Figure("What each attack gets", "bars", data, caption),)
