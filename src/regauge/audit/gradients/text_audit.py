"""The audit of texts: updates of language models and classifiers of texts, attacked, and scored
word by word.
"""

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
from regauge.audit.gradients.clients import (
    Truth,
    build_view,
    cast_inputs,
    contribute,
    prepare_model,
)
from regauge.audit.gradients.report import CAVEAT
from regauge.audit.gradients.scores import label_recall
from regauge.audit.split.scores import LeakageError
from regauge.audit.text_scores import MEASURES, score_texts
from regauge.core.progress import Progress
from regauge.data.tasks import Examples
from regauge.defences.gradients import parse_plan
from regauge.defences.parser import NONE
from regauge.errors import UpdateError
from regauge.results.findings import Finding, Results, Table, apply_threshold

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class TextCase:
    """A model of texts and its data. `own` are other texts, whose words in the same places are what
    a guess gets.
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
    """What updates give away of texts, under each combination ("none" is the ceiling, and always
    there). `most`: findings on defended updates fail where an attack gets more than this share of
    the way from its floor to its ceiling.
    """
    find_text_layers(case.model)
    combinations = list(dict.fromkeys((NONE, *combinations)))
    for c in combinations:
        plan = parse_plan(c, case.batch, case.steps, case.lr)
        if plan.samples * plan.clients > len(case.victims):
            raise LeakageError(
                f'one update under "{c}" takes {plan.samples * plan.clients} texts, and there '
                f"are {len(case.victims)}",
                hint="give more data",
            )
    rows = []
    for i, c in enumerate(combinations):
        if progress:
            progress(i, len(combinations), c)
        rows.append(_audit_combination(case, c, attacks, optimised))
    if progress:
        progress(len(combinations), len(combinations), "")
    found = _build_results(case, rows, _score_baseline(case), attacks)
    return replace(
        found,
        findings=tuple(
            f if f"/{NONE}/" in f.id else apply_threshold(f, fail_above) for f in found.findings
        ),
    )


def _audit_combination(
    case: TextCase, combination: str, attacks: Sequence[TextAttack], optimised: int
) -> TextRow:
    plan = parse_plan(combination, case.batch, case.steps, case.lr)
    there, size = prepare_model(case.model, plan), plan.samples * plan.clients
    scores: dict[str, dict[str, list[float]]] = {}
    why: dict[str, str] = {}
    labels: list[float] = []
    seconds: dict[str, float] = {}
    for n in range(max(1, min(case.updates, len(case.victims) // size))):
        inputs, answers = case.victims.batch(np.arange(n * size, (n + 1) * size))
        update, truth = contribute(
            there, plan, case.victims, cast_inputs(there, inputs), answers, case.seed * 1000 + n
        )
        for attack in attacks:
            if attack.is_slow and n >= optimised:
                continue
            view = build_view(there, plan, update, truth, attack.threat)
            started = time.monotonic()
            try:
                with torch.random.fork_rng(devices=[]):
                    found = [t.tolist() for t in attack.run(view)]
            except UpdateError as error:
                why[attack.name], found = str(error), []
            seconds[attack.name] = round(time.monotonic() - started, 1)
            for m, values in score_texts(found, token_lists(truth, case.victims.causal)).items():
                scores.setdefault(attack.name, {}).setdefault(m, []).extend(values)
        if not case.victims.causal and not case.victims.tokens:
            try:
                labels.append(
                    label_recall(
                        label_counts(
                            build_view(there, plan, update, truth, Threat(batch=True)),
                            case.victims.classes,
                        ),
                        truth.labels,
                    )
                )
            except UpdateError as error:
                why["labels"] = str(error)
    return TextRow(combination, size, scores, labels, why, seconds)


def token_lists(truth: Truth, causal: bool) -> list[list[int]]:
    """The texts as layers read them: without padding; of a causal model without the last word,
    which is a label.
    """
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
    out: dict[str, list[float]] = {m: [] for m in MEASURES}
    for guess, true in zip(*texts, strict=True):
        for m, v in score_texts([guess], [true]).items():
            out[m] += v
    return out


def _build_results(
    case: TextCase,
    rows: Sequence[TextRow],
    floor: Mapping[str, list[float]],
    attacks: Sequence[TextAttack],
) -> Results:
    titles = {a.name: a.title for a in attacks}

    def line(scores: Mapping[str, list[float]]) -> list[float]:
        return [round(statistics.fmean(scores[m]), 3) for m in MEASURES] + [
            round(max(scores["ROUGE-L"]), 3)
        ]

    table = []
    for row in rows:
        for name, scores in row.scores.items():
            told = None if not row.labels else round(statistics.fmean(row.labels), 3)
            table.append(
                (row.combination, row.texts, titles[name], *line(scores), told, row.seconds[name])
            )
    table.append(("floor: another text", None, "", *line(floor), None, None))
    heads = ("defences", "texts", "attack", *MEASURES, "worst ROUGE-L", "labels", "seconds")
    note = (
        "Shares of each text, in the mean over texts: words as a bag, words in their places, "
        "ROUGE on tokens (F1), texts that are exactly right. "
    )
    note += (
        "Texts: how many one update was made of. Words by zero rows gives a bag: its order "
        "is the vocabulary's."
    )
    plain = rows[0]
    findings = [
        Finding(
            f"{case.name}/{row.combination}/{name}",
            f'Under "{row.combination}", {titles[name]} gives this much of the texts.',
            None,
            statistics.fmean(scores["ROUGE-L"]),
            statistics.fmean(floor["ROUGE-L"]),
            statistics.fmean(plain.scores[name]["ROUGE-L"]),
            f"{statistics.fmean(scores['exact']):.0%} of the texts exactly",
            measure="ROUGE-L",
            trials=len(scores["ROUGE-L"]),
        )
        for row in rows
        for name, scores in row.scores.items()
    ]
    verdict = [_describe_row(row, floor, titles) for row in rows] + [CAVEAT]
    why = [
        f"{row.combination}, {name}: {text}" for row in rows for name, text in row.reasons.items()
    ]
    return Results(
        "What updates give away",
        tuple(findings),
        (Table(f"Texts: {case.name}", heads, tuple(table), note),),
        (),
        {"verdict": verdict},
        tuple(why),
    )


def _describe_row(row: TextRow, floor: Mapping[str, Any], titles: Mapping[str, str]) -> str:
    name = max(row.scores, key=lambda n: statistics.fmean(row.scores[n]["ROUGE-L"]))
    got = row.scores[name]
    best, exact, low = (
        statistics.fmean(s) for s in (got["ROUGE-L"], got["exact"], floor["ROUGE-L"])
    )
    bag = max(statistics.fmean(s["words"]) for s in row.scores.values())
    told = (
        f"ROUGE-L {best:.2f} by {titles[name]} (another text: {low:.2f}), {exact:.0%} of the "
        f"texts exactly; {bag:.0%} of the words told"
    )
    return f"{row.combination}: {told}."
