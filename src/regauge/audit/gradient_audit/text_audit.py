"""The text audit: attack updates of language models and text classifiers, and score the texts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from regauge.attacks.classes import label_counts
from regauge.attacks.subspaces import exact_search, find_text_layers, tag, token_membership
from regauge.attacks.tables import locate_words
from regauge.attacks.updates import SentUpdate, Threat
from regauge.audit.gradient_audit.clients import (
    Truth,
    build_view,
    cast_inputs,
    contribute,
    prepare_model,
)
from regauge.audit.gradient_audit.report import CAVEAT
from regauge.audit.gradient_audit.scores import label_recall
from regauge.audit.text_scores import MEASURES, score_texts
from regauge.core.progress import Progress
from regauge.data.tasks import Examples
from regauge.defences.gradients import parse_plan
from regauge.defences.parser import NONE
from regauge.errors import AuditError, UpdateError
from regauge.results.findings import Finding, Results, Table, apply_threshold

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class TextCase:
    """A text model and its data.

    Attributes:
        model: The model.
        victims: The examples of the clients.
        own: Other texts; their tokens at the same positions are the baseline.
        updates: The number of attacked updates.
        batch: Texts in an update, unless the combination sets it.
        steps: Local steps in an update, unless the combination sets them.
        lr: The learning rate of local steps.
        seed: The random seed.
        name: The name in tables and findings.
    """

    model: torch.nn.Module
    victims: Examples
    own: Examples
    updates: int = 4
    batch: int = 1
    steps: int = 1
    lr: float = 0.01
    seed: int = 0
    name: str = "texts"


@dataclass(frozen=True)
class TextAttack:
    """An attack of the table; `run` returns the tokens of each text.

    Attributes:
        name: The id.
        title: The title in tables.
        threat: What it is granted besides model and update.
        run: The attack.
        is_slow: Whether it optimises texts: run on few updates.
    """

    name: str
    title: str
    threat: Threat
    run: Callable[[SentUpdate], list[Tensor]]
    is_slow: bool = False


ATTACKS: tuple[TextAttack, ...] = (
    TextAttack("search", "exact search", Threat(batch=True, length=True), exact_search),
    TextAttack("tables", "words in their places", Threat(batch=True), locate_words),
    TextAttack(
        "words",
        "words by zero rows",
        Threat(),
        lambda view: [token_membership(view).nonzero()[:, 0]],
    ),
    TextAttack("tag", "TAG", Threat(batch=True, length=True), tag, True),
)


@dataclass(frozen=True)
class TextRow:
    """The leakage of one combination of defences.

    Attributes:
        combination: The defences.
        texts: The number of texts in an update.
        scores: By attack and measure, the scores of each text.
        labels: The recovered share of the labels, for each update.
        reasons: Why attacks do not apply, by name.
        seconds: The run time of each attack.
    """

    combination: str
    texts: int
    scores: Mapping[str, Mapping[str, list[float]]]
    labels: list[float] = field(default_factory=list)
    reasons: Mapping[str, str] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)


def audit_texts(
    case: TextCase,
    combinations: Sequence[str],
    *,
    attacks: Sequence[TextAttack] = ATTACKS,
    optimised: int = 1,
    fail_above: float | None = None,
    progress: Progress | None = None,
) -> Results:
    """Measure the leakage of texts by updates under each combination of defences.

    Args:
        case: The model and its data.
        combinations: Combinations of defences; "none", the ceiling, is always added.
        attacks: The attacks to run.
        optimised: The number of updates on which slow attacks are run.
        fail_above: Fail a finding on defended updates if its attack gets further than this share
            of the way from floor to ceiling.
        progress: Progress callback.

    Raises:
        AuditError: There are too few texts.
    """
    find_text_layers(case.model)
    combinations = list(dict.fromkeys((NONE, *combinations)))
    for combination in combinations:
        plan = parse_plan(combination, case.batch, case.steps, case.lr)
        if plan.samples * plan.clients > len(case.victims):
            raise AuditError(
                f"clients must have >= {plan.samples * plan.clients} texts for an update under "
                f'"{combination}", got {len(case.victims)}',
                hint="pass more data",
            )
    rows = []
    for i, combination in enumerate(combinations):
        if progress:
            progress(i, len(combinations), combination)
        rows.append(_audit_combination(case, combination, attacks, optimised))
    if progress:
        progress(len(combinations), len(combinations), "")
    results = _build_results(case, rows, _score_baseline(case), attacks)
    return replace(
        results,
        findings=tuple(
            f if f"/{NONE}/" in f.id else apply_threshold(f, fail_above) for f in results.findings
        ),
    )


def _audit_combination(
    case: TextCase, combination: str, attacks: Sequence[TextAttack], optimised: int
) -> TextRow:
    plan = parse_plan(combination, case.batch, case.steps, case.lr)
    prepared, size = prepare_model(case.model, plan), plan.samples * plan.clients
    scores: dict[str, dict[str, list[float]]] = {}
    reasons: dict[str, str] = {}
    label_shares: list[float] = []
    seconds: dict[str, float] = {}
    for number in range(max(1, min(case.updates, len(case.victims) // size))):
        inputs, labels = case.victims.batch(np.arange(number * size, (number + 1) * size))
        update, truth = contribute(
            prepared,
            plan,
            case.victims,
            cast_inputs(prepared, inputs),
            labels,
            case.seed * 1000 + number,
        )
        for attack in attacks:
            if attack.is_slow and number >= optimised:
                continue
            view = build_view(prepared, plan, update, truth, attack.threat)
            started = time.monotonic()
            try:
                with torch.random.fork_rng(devices=[]):
                    texts = [t.tolist() for t in attack.run(view)]
            except UpdateError as error:
                reasons[attack.name], texts = str(error), []
            seconds[attack.name] = round(time.monotonic() - started, 1)
            true_texts = token_lists(truth, case.victims.causal)
            for measure, values in score_texts(texts, true_texts).items():
                scores.setdefault(attack.name, {}).setdefault(measure, []).extend(values)
        if not case.victims.causal and not case.victims.tokens:
            try:
                view = build_view(prepared, plan, update, truth, Threat(batch=True))
                counts = label_counts(view, case.victims.classes)
                label_shares.append(label_recall(counts, truth.labels))
            except UpdateError as error:
                reasons["labels"] = str(error)
    return TextRow(combination, size, scores, label_shares, reasons, seconds)


def token_lists(truth: Truth, causal: bool) -> list[list[int]]:
    """Return the tokens of each text without padding; a causal model's last token is a label."""
    ids = truth.read["input_ids"].cpu()
    mask = truth.read.get("attention_mask")
    rows = (
        [row.tolist() for row in ids]
        if mask is None
        else [row[m.bool()].tolist() for row, m in zip(ids, mask.cpu(), strict=True)]
    )
    return [row[:-1] if causal else row for row in rows]


def _score_baseline(case: TextCase) -> dict[str, list[float]]:
    count = min(len(case.own), len(case.victims), max(1, case.updates * case.batch))
    texts = []
    for data in (case.own, case.victims):
        inputs, labels = data.batch(np.arange(count))
        texts.append(token_lists(Truth(inputs, inputs, labels), data.causal))
    scores: dict[str, list[float]] = {measure: [] for measure in MEASURES}
    for guess, text in zip(*texts, strict=True):
        for measure, values in score_texts([guess], [text]).items():
            scores[measure] += values
    return scores


def _build_results(
    case: TextCase,
    rows: Sequence[TextRow],
    floor: Mapping[str, list[float]],
    attacks: Sequence[TextAttack],
) -> Results:
    titles = {a.name: a.title for a in attacks}

    def summarize(scores: Mapping[str, list[float]]) -> list[float]:
        return [round(statistics.fmean(scores[m]), 3) for m in MEASURES] + [
            round(max(scores["ROUGE-L"]), 3)
        ]

    table = []
    for row in rows:
        for name, scores in row.scores.items():
            label_share = None if not row.labels else round(statistics.fmean(row.labels), 3)
            table.append(
                (
                    row.combination,
                    row.texts,
                    titles[name],
                    *summarize(scores),
                    label_share,
                    row.seconds[name],
                )
            )
    table.append(("floor: another text", None, "", *summarize(floor), None, None))
    columns = ("defences", "texts", "attack", *MEASURES, "worst ROUGE-L", "labels", "seconds")
    note = (
        "Shares of each text, in the mean over texts: words as a bag, words in their places, "
        "ROUGE on tokens (F1), texts that are exactly right. "
    )
    note += (
        "Texts: the number of texts in an update. Words by zero rows gives a bag: its order is "
        "the vocabulary's."
    )
    undefended = rows[0]
    findings = [
        Finding(
            f"{case.name}/{row.combination}/{name}",
            f'Under "{row.combination}", {titles[name]} gives this much of the texts.',
            None,
            statistics.fmean(scores["ROUGE-L"]),
            statistics.fmean(floor["ROUGE-L"]),
            statistics.fmean(undefended.scores[name]["ROUGE-L"]),
            f"{statistics.fmean(scores['exact']):.0%} of the texts exactly",
            measure="ROUGE-L",
            trials=len(scores["ROUGE-L"]),
        )
        for row in rows
        for name, scores in row.scores.items()
    ]
    verdict = [_describe_row(row, floor, titles) for row in rows] + [CAVEAT]
    reasons = [
        f"{row.combination}, {name}: {text}" for row in rows for name, text in row.reasons.items()
    ]
    return Results(
        "What updates give away",
        tuple(findings),
        (Table(f"Texts: {case.name}", columns, tuple(table), note),),
        (),
        {"verdict": verdict},
        tuple(reasons),
    )


def _describe_row(row: TextRow, floor: Mapping[str, Any], titles: Mapping[str, str]) -> str:
    name = max(row.scores, key=lambda n: statistics.fmean(row.scores[n]["ROUGE-L"]))
    scores = row.scores[name]
    best, exact, baseline = (
        statistics.fmean(s) for s in (scores["ROUGE-L"], scores["exact"], floor["ROUGE-L"])
    )
    bag = max(statistics.fmean(s["words"]) for s in row.scores.values())
    return (
        f"{row.combination}: ROUGE-L {best:.2f} by {titles[name]} (another text: {baseline:.2f}), "
        f"{exact:.0%} of the texts exactly; {bag:.0%} of the words."
    )
