"""The text audit of split learning: every token tried, and a learned map, scored by ROUGE.

Texts are truncated to one length, so that none is padded; the mask would reveal padding anyway.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from regauge.attacks.texts import embedding_search, order_leak, text_regression
from regauge.attacks.views import EmbeddedText, PairedTexts, ServerPass
from regauge.audit.engine import Attack, Measured, attempt
from regauge.audit.scores import AttackScores, Case, Row, merge_scores
from regauge.audit.split_audit import engine, report
from regauge.audit.split_audit.engine import SplitCase
from regauge.audit.split_audit.victims import (
    Pair,
    drop_shuffles,
    has_batch_shuffle,
    is_shuffled,
    make_split_pair,
    parse_combination,
    split_batches,
)
from regauge.audit.text_scores import ANOTHER_TEXT, score_texts
from regauge.checkpoints.resume import StateStore
from regauge.core.progress import Progress
from regauge.data.tasks import Examples
from regauge.errors import AuditError
from regauge.results.findings import Results

Tensor = torch.Tensor
MAX_LENGTH, MIN_TEXTS = 32, 20


@dataclass(frozen=True, eq=False)
class SentTexts:
    """The view of a server that reads texts.

    Attributes:
        served: The recorded passes.
        model: The public model from which client and server started.
        features: The features of the attacker's own texts, in order, by a copy of the client.
        ids: The attacker's own texts.
        shuffled: Whether tokens are shuffled.
    """

    served: Sequence[ServerPass]
    model: torch.nn.Module
    features: Tensor
    ids: Tensor
    shuffled: bool

    @property
    def observed(self) -> Tensor:
        return torch.cat([view.stream for view in self.served]).float()


TEXT_ATTACKS: tuple[Attack, ...] = (
    Attack(
        "vocabulary",
        "every token tried",
        "embeds every token at every position with the public embedding, and takes the nearest",
        lambda view: embedding_search(EmbeddedText(view.observed, view.model, None, view.shuffled)),
        "texts",
    ),
    Attack(
        "regression",
        "a learned map",
        "learns the map from states to tokens and positions on its own texts, defended "
        "likewise, in closed form",
        lambda view: text_regression(
            PairedTexts(
                view.observed,
                view.features,
                view.ids,
                view.model.get_input_embeddings().weight,
                view.shuffled,
            )
        ),
        "texts",
    ),
)


def audit_texts(
    case: SplitCase,
    combinations: Sequence[str],
    *,
    attacks: Sequence[Attack] = TEXT_ATTACKS,
    fail_above: float | None = None,
    length: int = MAX_LENGTH,
    progress: Progress | None = None,
    store: StateStore | None = None,
) -> Results:
    """Measure accuracy and the leakage of texts, see `engine.audit`.

    Args:
        case: The model and its data.
        combinations: Combinations of defences; "none", the upper bound, is always added.
        attacks: The attacks to run.
        fail_above: The threshold of findings.
        length: The maximum number of tokens of a text.
        progress: Progress callback.
        store: The saved steps of an interrupted run.
    """
    texts, own = (_truncate_texts(part, length) for part in (case.attacked_examples, case.own))
    shared = min(texts.shape[1], own.shape[1])
    medium = Texts(case, texts[:, :shared], own[:, :shared])
    return engine.audit(case, medium, combinations, attacks, fail_above, progress, store)


@dataclass(frozen=True, eq=False)
class Texts:
    """How texts are attacked.

    Attributes:
        case: The model and its data.
        texts: The attacked texts.
        own: The attacker's own texts.
    """

    case: SplitCase
    texts: Tensor
    own: Tensor

    def check(self, combinations: Sequence[str], attacks: Sequence[Attack]) -> None:
        """Check the case: run each combination on two texts."""
        if len(self.own) < MIN_TEXTS:
            raise AuditError(
                f"the attacker must have >= {MIN_TEXTS} texts, got {len(self.own)}",
                hint="pass more data, or longer texts",
            )
        if self.texts.shape[1] < 2 or len(self.texts) < 2:
            raise AuditError(
                "the attacked texts must be >= 2, of >= 2 tokens each, got "
                f"{len(self.texts)} of {self.texts.shape[1]} tokens",
                hint="pass more data, or longer texts",
            )
        if any(map(has_batch_shuffle, combinations)):
            raise AuditError(
                "defences of texts must not contain batch-shuffle: it moves tokens between texts, "
                "and masks belong to one text",
                hint="use rows",
            )
        defences = [d for c in combinations for d in parse_combination(c)]
        on_pixels = next((d for d in defences if d.stage == 0), None)
        if on_pixels is not None:
            raise AuditError(
                f"defences of texts must act on features, got {type(on_pixels).__name__}, which "
                "acts on images",
                hint="use noise, round, bottleneck or rows",
            )
        for combination in combinations:
            pair = make_split_pair(self.copy_model(combination), combination)
            pair.record_passes(_make_batches(self.texts[:2], 2), "check")

    def copy_model(self, combination: str) -> torch.nn.Module:
        """Return a copy of the model.

        With shuffled rows it uses eager attention, which gets the causal mask as an input; fused
        kernels build their own.
        """
        copied: Any = copy.deepcopy(self.case.model)
        if is_shuffled(combination) and hasattr(copied, "set_attn_implementation"):
            copied.set_attn_implementation("eager")
        return cast(torch.nn.Module, copied)

    def collect_views(self, pair: Pair) -> SentTexts:
        """Return the view of the attackers of a trained victim."""
        case = self.case
        served = pair.record_passes(_make_batches(self.texts, case.batch), "seen")
        unshuffled = pair
        if is_shuffled(pair.combination):
            pair.link.close()
            unshuffled = make_split_pair(
                pair.model, drop_shuffles(pair.combination), seed=case.run.seed + 1
            )
        passes = unshuffled.record_passes(_make_batches(self.own, case.batch), "own")
        features = torch.cat([p.stream for p in passes]).float()
        if unshuffled is not pair:
            unshuffled.link.close()
        public = copy.deepcopy(case.model).eval()
        return SentTexts(served, public, features, self.own, is_shuffled(pair.combination))

    def attack(
        self, attack: Attack, views: SentTexts, combination: str, within: Progress
    ) -> Measured:
        """Run an attack, and score its texts."""
        tried = attempt(lambda: (_recover(attack, views), {}))
        scores = score_texts(tried.output, self.texts.tolist())
        return Measured(AttackScores(attack.name, scores, seconds=round(tried.seconds, 1)))

    def report(self, rows: Sequence[Row], attacks: Sequence[Attack]) -> Results:
        """Return the results, with the baselines of the measurements."""
        pairs = zip(self.own.tolist(), self.texts.tolist(), strict=False)
        floor = merge_scores([score_texts([own], [text]) for own, text in pairs])
        measured = Case(
            self.case.name,
            tuple(rows),
            {ANOTHER_TEXT: floor},
            metric="ROUGE-L",
            subject="texts",
        )
        return report.build_text_results(measured, attacks)


def _recover(attack: Attack, view: SentTexts) -> list[list[int]]:
    """Return the tokens of each text, in the order that masks reveal if tokens are shuffled."""
    tokens, positions = attack.run(view)
    orders = [order_leak(served_pass) for served_pass in view.served] if view.shuffled else [None]
    if all(order is not None for order in orders):
        positions = torch.cat([order for order in orders if order is not None])
    recovered: list[list[int]] = torch.zeros_like(tokens).scatter(1, positions, tokens).tolist()
    return recovered


def _make_batches(ids: Tensor, batch: int) -> list[Mapping[str, Tensor]]:
    return [
        {"input_ids": part, "attention_mask": torch.ones_like(part)}
        for part in split_batches(ids, batch)
    ]


def _truncate_texts(examples: Examples, length: int) -> Tensor:
    """Remove padding, drop texts below half the length, and truncate the others to the shortest."""
    inputs, _ = examples.batch(np.arange(len(examples)))
    mask = inputs.get("attention_mask")
    rows = [
        row if mask is None else row[row_mask.bool()]
        for row, row_mask in zip(
            inputs["input_ids"], inputs["input_ids"] if mask is None else mask, strict=True
        )
    ]
    long_rows = [row[:length] for row in rows if len(row) >= min(length, max(map(len, rows))) // 2]
    shortest = min(map(len, long_rows))
    return torch.stack([row[:shortest] for row in long_rows])
