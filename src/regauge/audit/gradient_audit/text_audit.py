"""The text audit: attack updates of language models and text classifiers, and score the texts."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from regauge.attacks.classes import label_counts
from regauge.attacks.subspaces import exact_search, find_text_layers, tag, token_membership
from regauge.attacks.tables import locate_words
from regauge.attacks.updates import SentUpdate, Threat
from regauge.audit.engine import (
    CAVEAT,
    Attack,
    Attempt,
    Steps,
    apply_verdicts,
    attempt,
    titles_of,
    with_undefended,
)
from regauge.audit.gradient_audit.clients import Truth, build_view
from regauge.audit.gradient_audit.engine import GradientCase, make_updates
from regauge.audit.gradient_audit.scores import label_recall
from regauge.audit.text_report import LEAK, TextRow, TextScores, build_text_results, merge_scores
from regauge.audit.text_scores import score_texts
from regauge.core.progress import Progress
from regauge.data.tasks import Examples
from regauge.defences.gradients import parse_plan
from regauge.errors import AuditError, UpdateError
from regauge.results.findings import Results, Table

Tensor = torch.Tensor


ATTACKS: tuple[Attack, ...] = (
    Attack(
        "search",
        "exact search",
        "searches the texts whose tokens lie in the spans of the gradients of the first two layers",
        exact_search,
        "texts",
        threat=Threat(batch=True, length=True),
    ),
    Attack(
        "tables",
        "words in their places",
        "matches rows of the gradients of the word table and the position table",
        locate_words,
        "texts",
        threat=Threat(batch=True),
    ),
    Attack(
        "words",
        "words by zero rows",
        "reads the bag of words from the rows of the word table's gradient that are not zero",
        lambda view: [token_membership(view).nonzero()[:, 0]],
        "texts",
        is_ordered=False,
    ),
    Attack(
        "tag",
        "TAG",
        "optimises embeddings by the distance of gradients, and takes the nearest words",
        tag,
        "texts",
        threat=Threat(batch=True, length=True),
        is_slow=True,
    ),
)


# The default of an audit.
QUICK = tuple(a for a in ATTACKS if not a.is_slow)


def audit_texts(
    case: GradientCase,
    combinations: Sequence[str],
    *,
    attacks: Sequence[Attack] = ATTACKS,
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
    combinations = with_undefended(combinations)
    for combination in combinations:
        plan = parse_plan(combination, case.batch, case.steps, case.lr)
        if plan.samples * plan.clients > len(case.victims):
            raise AuditError(
                f"clients must have >= {plan.samples * plan.clients} texts for an update under "
                f'"{combination}", got {len(case.victims)}',
                hint="pass more data",
            )
    rows, steps = [], Steps(len(combinations), progress)
    for combination in combinations:
        steps(combination)
        rows.append(_audit_combination(case, combination, attacks, optimised))
    steps.finish()
    return apply_verdicts(_build_results(case, rows, _score_baseline(case), attacks), fail_above)


def _audit_combination(
    case: GradientCase, combination: str, attacks: Sequence[Attack], optimised: int
) -> TextRow:
    plan = parse_plan(combination, case.batch, case.steps, case.lr)
    scores: dict[str, list[TextScores]] = {}
    reasons: dict[str, str] = {}
    label_shares: list[float] = []
    seconds: dict[str, float] = {}
    for number, (model, update, truth) in enumerate(make_updates(case, case.model, plan)):
        for attack in attacks:
            if attack.is_slow and number >= optimised:
                continue
            tried = recover_texts(attack, build_view(model, plan, update, truth, attack.threat))
            if tried.output is None:
                reasons[attack.name] = tried.reason
            seconds[attack.name] = round(tried.seconds, 1)
            true_texts = token_lists(truth, case.victims.causal)
            scores.setdefault(attack.name, []).append(score_texts(tried.output or [], true_texts))
        share, reason = recover_labels(
            build_view(model, plan, update, truth, Threat(batch=True)), truth, case.victims
        )
        label_shares += [] if share is None else [share]
        reasons |= {"labels": reason} if reason else {}
    merged = {name: merge_scores(parts) for name, parts in scores.items()}
    return TextRow(
        combination, merged, seconds, label_shares, reasons, texts=plan.samples * plan.clients
    )


def recover_texts(attack: Attack, view: SentUpdate) -> Attempt:
    """Run an attack; its output is the tokens of each text."""
    return attempt(lambda: ([text.tolist() for text in attack.run(view)], {}))


def recover_labels(view: SentUpdate, truth: Truth, examples: Examples) -> tuple[float | None, str]:
    """Return the share of the labels that the gradient of the head reveals, or why it does not.

    Language models have no labels besides their texts.
    """
    if examples.causal or examples.tokens:
        return None, ""
    try:
        return label_recall(label_counts(view, examples.classes), truth.labels), ""
    except UpdateError as error:
        return None, str(error)


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


def _score_baseline(case: GradientCase) -> dict[str, list[float]]:
    count = min(len(case.own), len(case.victims), max(1, case.updates * case.batch))
    texts = []
    for data in (case.own, case.victims):
        inputs, labels = data.batch(np.arange(count))
        texts.append(token_lists(Truth(inputs, inputs, labels), data.causal))
    return merge_scores([score_texts([guess], [text]) for guess, text in zip(*texts, strict=True)])


def _build_results(
    case: GradientCase,
    rows: Sequence[TextRow],
    floor: Mapping[str, list[float]],
    attacks: Sequence[Attack],
) -> Results:
    note = (
        "Shares of each text, in the mean over texts: words as a bag, words in their places, "
        "ROUGE on tokens (F1), texts that are exactly right. "
        "Texts: the number of texts in an update. Words by zero rows gives a bag: its order is "
        "the vocabulary's."
    )
    results = build_text_results(
        "What updates give away",
        Table(f"Texts: {case.name}", (), (), note),
        rows,
        floor,
        attacks,
        name=case.name,
        before={"texts": lambda row: row.texts},
        after={
            "labels": lambda row: round(statistics.fmean(row.labels), 3) if row.labels else None
        },
        guess=("floor: another text", None),
        describe=lambda row, attack: f"{row.value(attack, 'exact'):.0%} of the texts exactly",
    )
    titles, baseline = titles_of(attacks), statistics.fmean(floor[LEAK])
    verdict = []
    for row in rows:
        name, best = row.best()
        verdict.append(
            f"{row.combination}: ROUGE-L {best:.2f} by {titles[name]} (another text: "
            f"{baseline:.2f}), {row.value(name, 'exact'):.0%} of the texts exactly; "
            f"{row.best('words')[1]:.0%} of the words."
        )
    reasons = tuple(
        f"{row.combination}, {name}: {text}" for row in rows for name, text in row.reasons.items()
    )
    return replace(results, facts={"verdict": [*verdict, CAVEAT]}, unchecked=reasons)
