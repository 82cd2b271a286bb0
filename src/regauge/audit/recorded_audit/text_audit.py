"""Attacks on the texts of a recorded run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import numpy as np
import torch

from regauge.attacks.updates import Granted, SentUpdate
from regauge.audit.engine import Attack, resolve_attacks
from regauge.audit.gradient_audit.clients import Truth
from regauge.audit.gradient_audit.text_audit import (
    ATTACKS,
    recover_labels,
    recover_texts,
    token_lists,
)
from regauge.audit.recorded_audit import to_update
from regauge.audit.recorded_audit.engine import LeakFormat, RecordedRun, Row, build_results
from regauge.audit.text_scores import score_texts
from regauge.core.progress import Progress
from regauge.data.tasks import Examples
from regauge.federated.client import unwrap
from regauge.federated.recorder import RecordedUpdate
from regauge.federated.states import load_state
from regauge.results.findings import Results

Texts = list[list[int]]
PLAIN_ROUGE, PARTIAL_ROUGE = 0.9, 0.1  # ROUGE-L: of recovered texts; above the floor, in part


def audit_texts(
    run: RecordedRun, names: Sequence[str] | None, progress: Progress | None
) -> Results:
    """Attack all targets of a run of texts, see `audit_recorded`."""
    attacks = resolve_attacks(names, ATTACKS, [a for a in ATTACKS if not a.is_slow], "texts")
    rows: list[Row] = []
    for number, clients in run.iterate(progress):
        row = attack_update(
            run.model,
            run.load_update(number, clients),
            run.load_truth(number, clients),
            run.test,
            attacks,
        )
        rows.append({**row, "round": number, "client": clients[0]})
    return build_results(run, rows, TEXTS, attacks)


def attack_update(
    model: torch.nn.Module,
    recorded: RecordedUpdate,
    truth: Truth,
    others: Examples,
    attacks: Sequence[Attack],
) -> Row:
    """Run all attacks on one update, and score them by the original texts, before any puzzle.

    The baseline is other texts of the server.

    Args:
        model: The model of both sides; its weights are overwritten.
        recorded: The recorded update.
        truth: The texts of the client.
        others: The server's own texts.
        attacks: The attacks.
    """
    load_state(model, recorded.state)
    model.eval()
    update = to_update(recorded)
    inner = unwrap(model)
    if inner is not model:  # without the parameters that a puzzle adds
        update = type(update)(
            {n.removeprefix("model."): t for n, t in update.tensors.items() if n != "unknown"},
            update.kind,
            update.steps,
            update.lr,
        )
    texts = token_lists(Truth(truth.original, truth.original, truth.labels), others.causal)
    row: Row = {
        "texts": len(texts),
        "floor": statistics.fmean(score_texts(_own_texts(others, len(texts)), texts)["ROUGE-L"]),
    }
    length = max(len(t) for t in texts) + others.causal
    for attack in attacks:
        threat = attack.threat
        granted = Granted(
            batch=len(texts) if threat.batch else None, length=length if threat.length else None
        )
        tried = recover_texts(attack, SentUpdate(inner, update, (), granted))
        recovered = tried.output
        if recovered is None:
            row[f"why {attack.name}"] = tried.reason
            continue
        if attack.is_ordered:
            scores = score_texts(recovered, texts)
            value = statistics.fmean(scores["ROUGE-L"])
            if value >= row.get("leak", -1.0):
                row["leak"], row["exact"] = value, statistics.fmean(scores["exact"])
        row["words"] = max(row.get("words", 0.0), _bag_f1(recovered, texts))
    view = SentUpdate(inner, update, (), Granted(batch=len(texts)))
    share, reason = recover_labels(view, truth, others)
    row |= ({} if share is None else {"labels": share}) | ({"why labels": reason} if reason else {})
    return row


def _bag_f1(recovered: Texts, true_texts: Texts) -> float:
    """Return the F1 of the distinct tokens of all texts.

    F1 and not recall, so that guessing the whole vocabulary scores low.
    """
    found_tokens, true_tokens = (
        {token for text in texts for token in text} for texts in (recovered, true_texts)
    )
    return 2 * len(found_tokens & true_tokens) / max(1, len(found_tokens) + len(true_tokens))


def _own_texts(others: Examples, count: int) -> Texts:
    """Return texts of the server, one for each attacked text."""
    inputs, labels = others.batch(np.arange(count) % len(others))
    return token_lists(Truth(inputs, inputs, labels), others.causal)


def _describe_round(mean_of_round: Callable[[str], float | None]) -> str:
    """Describe what the server recovers of a round."""
    leak, floor, bag, labels, exact = (
        mean_of_round(name) for name in ("leak", "floor", "words", "labels", "exact")
    )
    if leak is None or floor is None:
        texts = "none of the attacks on whole texts applies"
    else:
        head = (
            "texts come back"
            if leak >= PLAIN_ROUGE
            else "something of the texts comes back"
            if leak > floor + PARTIAL_ROUGE
            else "texts do not come back"
        )
        texts = f"{head} (ROUGE-L {leak:.2f}, another text {floor:.2f}; {exact or 0.0:.0%} exactly)"
    words = "" if bag is None else f"; {bag:.0%} of the words are revealed"
    return texts + words + ("" if labels is None else f"; {labels:.0%} of the labels are revealed")


TEXTS = LeakFormat(
    "texts",
    "ROUGE-L",
    "another text",
    {"exact": "texts exactly", "words": "words recovered", "labels": "labels recovered"},
    _describe_round,
    lambda leak, floor: leak >= PLAIN_ROUGE,
)
