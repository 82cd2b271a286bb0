"""The text audit: train a split language model for each combination of defences, and attack it.

Texts are truncated to one length, so that none is padded; the mask would reveal padding anyway.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch

from regauge.attacks.texts import embedding_search, order_leak, text_regression
from regauge.attacks.views import EmbeddedText, PairedTexts, ServerPass
from regauge.audit.engine import (
    CAVEAT,
    Attack,
    Steps,
    apply_verdicts,
    attempt,
    titles_of,
    with_undefended,
)
from regauge.audit.split_audit.engine import SplitCase, chance_accuracy, measure_label_leak
from regauge.audit.split_audit.report import build_glossary
from regauge.audit.split_audit.victims import (
    Pair,
    drop_shuffles,
    is_shuffled,
    make_split_pair,
    parse_combination,
)
from regauge.audit.text_report import LEAK, TextRow, build_text_results, merge_scores
from regauge.audit.text_scores import score_texts
from regauge.core.progress import Progress
from regauge.defences.split import BatchShuffle
from regauge.errors import AuditError
from regauge.results.findings import Results, Table

Tensor = torch.Tensor
MAX_LENGTH, MIN_TEXTS, LABEL_STEPS = 32, 20, 20
READ_THRESHOLD = 0.5  # ROUGE-L from which a text counts as read


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
) -> Results:
    """Measure accuracy and the leakage of texts under each combination of defences.

    Args:
        case: The model and its data.
        combinations: Combinations of defences; "none", the ceiling, is always added.
        attacks: The attacks to run.
        fail_above: Fail a finding on defended features if its attack gets further than this share
            of the way from floor to ceiling.
        length: The maximum number of tokens of a text.
        progress: Progress callback.

    Raises:
        AuditError: The case cannot be audited.
    """
    combinations = with_undefended(combinations)
    texts, own = (
        _truncate_texts(part, length)
        for part in (case.test.only(np.arange(min(case.attacked, len(case.test)))), case.own)
    )
    shared_length = min(texts.shape[1], own.shape[1])
    texts, own = texts[:, :shared_length], own[:, :shared_length]
    _check_case(case, combinations, texts, own)
    steps = Steps(len(combinations) * (1 + len(attacks)), progress)
    rows = [
        _audit_combination(case, combination, attacks, texts, own, steps)
        for combination in combinations
    ]
    steps.finish()
    floor = merge_scores(
        [
            score_texts([own_text.tolist()], [text.tolist()])
            for own_text, text in zip(own, texts, strict=False)
        ]
    )
    return apply_verdicts(_build_results(case.name, rows, floor, attacks), fail_above)


def _audit_combination(
    case: SplitCase,
    combination: str,
    attacks: Sequence[Attack],
    texts: Tensor,
    own: Tensor,
    notify: Steps,
) -> TextRow:
    notify(f"{combination}: train through the split")
    seed, batch = case.run.seed, max(2, case.run.batch_size)
    public = copy.deepcopy(case.model).eval()
    pair = make_split_pair(
        _copy_client_model(case.model, combination), combination, case.training, seed=seed
    )
    passes = pair.train(case.train, case.run, record_first=min(case.run.steps, LABEL_STEPS))
    accuracy = pair.measure(case.test, batch)["accuracy"]
    served = pair.record_passes(_make_batches(texts, batch), "seen")
    view = SentTexts(
        served, public, _embed_own_texts(pair, own, batch, seed), own, is_shuffled(combination)
    )
    scores, seconds = {}, {}
    for attack in attacks:
        notify(f"{combination}: {attack.title}")
        tried = attempt(partial(_recover, attack, view))
        scores[attack.name] = score_texts(tried.output, texts.tolist())
        seconds[attack.name] = round(tried.seconds, 1)
    is_classifier = not (case.train.causal or case.train.tokens or case.train.dense)
    label_leak = measure_label_leak(passes, case.train, case.run) if is_classifier else None
    return TextRow(
        combination,
        scores,
        seconds,
        [] if label_leak is None else [label_leak],
        accuracy=accuracy,
        chance=chance_accuracy(case.test) if is_classifier else 0.0,
    )


def _recover(attack: Attack, view: SentTexts) -> tuple[list[list[int]], dict[str, Any]]:
    """Return the tokens of each text, in the order that masks reveal if tokens are shuffled."""
    tokens, positions = attack.run(view)
    orders = [order_leak(served_pass) for served_pass in view.served] if view.shuffled else [None]
    if all(order is not None for order in orders):
        positions = torch.cat([order for order in orders if order is not None])
    return torch.zeros_like(tokens).scatter(1, positions, tokens).tolist(), {}


def _copy_client_model(model: torch.nn.Module, combination: str) -> torch.nn.Module:
    """Return a copy of the model.

    With shuffled rows it uses eager attention, which gets the causal mask as an input; fused
    kernels build their own.
    """
    copied: Any = copy.deepcopy(model)
    if is_shuffled(combination) and hasattr(copied, "set_attn_implementation"):
        copied.set_attn_implementation("eager")
    return cast(torch.nn.Module, copied)


def _embed_own_texts(pair: Pair, own: Tensor, batch: int, seed: int) -> Tensor:
    """Return the features of the attacker's own texts, under all defences but the shuffles."""
    if not is_shuffled(pair.combination):
        return torch.cat(
            [p.stream for p in pair.record_passes(_make_batches(own, batch), "own")]
        ).float()
    pair.link.close()
    unshuffled = make_split_pair(pair.model, drop_shuffles(pair.combination), seed=seed + 1)
    features = torch.cat(
        [p.stream for p in unshuffled.record_passes(_make_batches(own, batch), "own")]
    ).float()
    unshuffled.link.close()
    return features


def _make_batches(ids: Tensor, batch: int) -> list[dict[str, Tensor]]:
    parts = list(torch.split(ids, batch))
    if len(parts) > 1 and len(parts[-1]) == 1:
        parts = [*parts[:-2], torch.cat(parts[-2:])]
    return [{"input_ids": part, "attention_mask": torch.ones_like(part)} for part in parts]


def _truncate_texts(examples: object, length: int) -> Tensor:
    """Remove padding, drop texts below half the length, and truncate the others to the shortest."""
    inputs, _ = examples.batch(np.arange(len(examples)))  # type: ignore[attr-defined,arg-type]
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


def _check_case(case: SplitCase, combinations: Sequence[str], texts: Tensor, own: Tensor) -> None:
    """Check a case before anything is trained, on two texts for each combination."""
    if len(own) < MIN_TEXTS:
        raise AuditError(
            f"the attacker must have >= {MIN_TEXTS} texts, got {len(own)}",
            hint="pass more data, or longer texts",
        )
    if texts.shape[1] < 2 or len(texts) < 2:
        raise AuditError(
            "the attacked texts must be >= 2, of >= 2 tokens each, got "
            f"{len(texts)} of {texts.shape[1]} tokens",
            hint="pass more data, or longer texts",
        )
    if any(isinstance(d, BatchShuffle) for c in combinations for d in parse_combination(c)):
        raise AuditError(
            "defences of texts must not contain batch-shuffle: it moves tokens between texts, and "
            "masks belong to one text",
            hint="use rows",
        )
    on_pixels = next((d for c in combinations for d in parse_combination(c) if d.stage == 0), None)
    if on_pixels is not None:
        raise AuditError(
            f"defences of texts must act on features, got {type(on_pixels).__name__}, which acts "
            "on images",
            hint="use noise, round, bottleneck or rows",
        )
    for combination in combinations:
        make_split_pair(_copy_client_model(case.model, combination), combination).record_passes(
            _make_batches(texts[:2], 2), "check"
        )


def _build_results(
    name: str,
    rows: Sequence[TextRow],
    floor: Mapping[str, list[float]],
    attacks: Sequence[Attack],
) -> Results:
    has_labels = any(row.labels for row in rows)
    note = (
        "Shares of each text, in the mean over texts: tokens as a bag, tokens in their "
        "places, ROUGE on tokens (F1), texts that are exactly right. "
    )
    results = build_text_results(
        "What the server reads",
        Table(f"Utility and privacy: {name}", (), (), note),
        rows,
        floor,
        attacks,
        name=name,
        before={
            "accuracy": lambda row: round(row.accuracy, 3),
            **(
                {"labels": lambda row: round(row.labels[0], 3) if row.labels else None}
                if has_labels
                else {}
            ),
        },
        after={},
        guess=(
            "a guess, another text",
            round(rows[0].chance, 3) or None,
            *((None,) if has_labels else ()),
        ),
        describe=lambda row, attack: (
            f"{row.value(attack, 'words'):.0%} of the tokens, "
            f"{row.value(attack, 'in place'):.0%} in their places"
        ),
        has_spread=True,
    )
    return replace(
        results,
        tables=(*results.tables, build_glossary([r.combination for r in rows], attacks)),
        facts={"verdict": _build_verdict(name, rows, statistics.fmean(floor[LEAK]), attacks)},
    )


def _build_verdict(
    name: str, rows: Sequence[TextRow], baseline: float, attacks: Sequence[Attack]
) -> list[str]:
    undefended, titles = rows[0], titles_of(attacks)
    leaking = [row for row in rows if row.best()[1] >= READ_THRESHOLD]
    sentences = [
        (
            f"{name}: the server reads the texts under {len(leaking)} of {len(rows)} combinations "
            f"(ROUGE-L of {READ_THRESHOLD:g} and more)."
        )
    ]
    for row in rows:
        attack, value = row.best()
        sentences.append(
            f"{row.combination}: ROUGE-L {value:.2f} by {titles[attack]} (another text: "
            f"{baseline:.2f}), {row.best('words')[1]:.0%} of the tokens; accuracy "
            f"{row.accuracy:.3f} (undefended: {undefended.accuracy:.3f})."
        )
    shares = [share for row in rows for share in row.labels]
    if shares:
        sentences.append(
            f"Labels are not sent, but the gradients reveal {min(shares):.0%} to "
            f"{max(shares):.0%} of them (a guess: {undefended.chance:.0%})."
        )
    return [*sentences, CAVEAT]
