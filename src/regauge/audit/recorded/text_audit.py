"""What a server makes of the texts of a recorded run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import numpy as np
import torch

from regauge.attacks.classes import label_counts
from regauge.attacks.updates import Granted, SentUpdate
from regauge.audit.gradients.attempts import resolve_attacks
from regauge.audit.gradients.clients import Truth
from regauge.audit.gradients.scores import label_recall
from regauge.audit.gradients.text_audit import ATTACKS, TextAttack, token_lists
from regauge.audit.recorded import to_update
from regauge.audit.recorded.engine import LeakFormat, RecordedRun, Row, build_results
from regauge.audit.text_scores import score_texts
from regauge.core.progress import Progress
from regauge.data.tasks import Examples
from regauge.errors import UpdateError
from regauge.federated.client import unwrap
from regauge.federated.recorder import RecordedUpdate
from regauge.federated.states import load_state
from regauge.results.findings import Results

Texts = list[list[int]]
PLAIN_ROUGE, PARTIAL_ROUGE = 0.9, 0.1  # ROUGE-L of texts that come back; above the floor


def audit_texts(
    run: RecordedRun, names: Sequence[str] | None, progress: Progress | None
) -> Results:
    attacks = resolve_attacks(names, ATTACKS, [a for a in ATTACKS if not a.is_slow], "texts")
    rows: list[Row] = []
    for n, clients in run.iterate(progress):
        row = attack_update(
            run.model, run.load_update(n, clients), run.load_truth(n, clients), run.test, attacks
        )
        rows.append({**row, "round": n, "client": clients[0]})
    return build_results(run, rows, TEXTS, attacks)


def attack_update(
    model: torch.nn.Module,
    seen: RecordedUpdate,
    truth: Truth,
    others: Examples,
    attacks: Sequence[TextAttack],
) -> Row:
    """One update under all attacks: what they got of the texts as they were (a puzzle is no
    excuse), next to other texts of the server's own.
    """
    load_state(model, seen.state)
    model.eval()
    update = to_update(seen)
    there = unwrap(model)
    if there is not model:  # what a puzzle adds to the model is no part of its own layers
        update = type(update)(
            {n.removeprefix("model."): t for n, t in update.tensors.items() if n != "unknown"},
            update.kind,
            update.steps,
            update.lr,
        )
    true = token_lists(Truth(truth.original, truth.original, truth.labels), others.causal)
    row: Row = {
        "texts": len(true),
        "floor": statistics.fmean(score_texts(_own_texts(others, len(true)), true)["ROUGE-L"]),
    }
    length = max(len(t) for t in true) + others.causal
    for attack in attacks:
        threat = attack.threat
        granted = Granted(
            batch=len(true) if threat.batch else None, length=length if threat.length else None
        )
        try:
            with torch.random.fork_rng(devices=[]):
                found = [t.tolist() for t in attack.run(SentUpdate(there, update, (), granted))]
        except UpdateError as error:
            row[f"why {attack.name}"] = str(error)
            continue
        if attack.name != "words":  # a bag has no order
            scores = score_texts(found, true)
            value = statistics.fmean(scores["ROUGE-L"])
            if value >= row.get("leak", -1.0):
                row["leak"], row["exact"] = value, statistics.fmean(scores["exact"])
        row["words"] = max(row.get("words", 0.0), _bag_f1(found, true))
    if not others.causal and not others.tokens:
        try:
            row["labels"] = label_recall(
                label_counts(
                    SentUpdate(there, update, (), Granted(batch=len(true))), others.classes
                ),
                truth.labels,
            )
        except UpdateError as error:
            row["why labels"] = str(error)
    return row


def _bag_f1(found: Texts, true: Texts) -> float:
    """Of the different words of all texts together, what is told: F1, so that naming the whole
    vocabulary is no answer.
    """
    a, b = ({w for text in texts for w in text} for texts in (found, true))
    return 2 * len(a & b) / max(1, len(a) + len(b))


def _own_texts(others: Examples, count: int) -> Texts:
    """The server's own texts, one for each that is to be guessed."""
    inputs, labels = others.batch(np.arange(count) % len(others))
    return token_lists(Truth(inputs, inputs, labels), others.causal)


def _describe_round(of: Callable[[str], float | None]) -> str:
    leak, floor, bag, labels, exact = (
        of(name) for name in ("leak", "floor", "words", "labels", "exact")
    )
    if leak is None or floor is None:
        texts = "none of the attacks on whole texts could try"
    else:
        head = (
            "texts come back"
            if leak >= PLAIN_ROUGE
            else "something of the texts comes back"
            if leak > floor + PARTIAL_ROUGE
            else "texts do not come back"
        )
        texts = f"{head} (ROUGE-L {leak:.2f}, another text {floor:.2f}; {exact or 0.0:.0%} exactly)"
    words = "" if bag is None else f"; {bag:.0%} of the words are told"
    return texts + words + ("" if labels is None else f"; {labels:.0%} of the labels are told")


TEXTS = LeakFormat(
    "texts",
    "ROUGE-L",
    "another text",
    {"exact": "texts exactly", "words": "words told", "labels": "labels told"},
    _describe_round,
    lambda leak, floor: leak >= PLAIN_ROUGE,
)
