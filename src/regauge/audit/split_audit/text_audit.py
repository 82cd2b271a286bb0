"""The text audit: train a split language model for each combination of defences, and attack it.

Texts are truncated to one length, so that none is padded; the mask would reveal padding anyway.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch

from regauge.attacks.texts import embedding_search, order_leak, text_regression
from regauge.attacks.views import EmbeddedText, PairedTexts, ServerPass
from regauge.audit.split_audit.engine import SplitCase, chance_accuracy, measure_label_leak
from regauge.audit.split_audit.report import CAVEAT, build_glossary
from regauge.audit.split_audit.victims import (
    Pair,
    drop_shuffles,
    is_shuffled,
    make_split_pair,
    parse_combination,
)
from regauge.audit.text_scores import MEASURES, score_texts
from regauge.core.progress import Progress
from regauge.defences.parser import NONE
from regauge.defences.split import BatchShuffle
from regauge.errors import AuditError
from regauge.results.findings import Finding, Results, Table, apply_threshold

Tensor = torch.Tensor
LEAK = "ROUGE-L"
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


@dataclass(frozen=True)
class TextAttack:
    """An attack of the table; `run` returns tokens and positions, [texts, rows].

    Attributes:
        name: The id.
        title: The title in tables.
        about: A one-line description.
        run: The attack.
    """

    name: str
    title: str
    about: str
    run: Callable[[SentTexts], tuple[Tensor, Tensor]]


TEXT_ATTACKS: tuple[TextAttack, ...] = (
    TextAttack(
        "vocabulary",
        "every token tried",
        "embeds every token at every position with the public embedding, and takes the nearest",
        lambda view: embedding_search(EmbeddedText(view.observed, view.model, None, view.shuffled)),
    ),
    TextAttack(
        "regression",
        "a learned map",
        "learns the map from states to tokens and positions on its own texts, defended "
        "likewise, in closed form",
        lambda view: text_regression(
            PairedTexts(
                view.observed,
                view.features,
                view.ids,
                view.model.get_input_embeddings().weight,  # type: ignore[operator]
                view.shuffled,
            )
        ),
    ),
)


@dataclass(frozen=True, eq=False)
class TextRow:
    """The accuracy of one combination of defences, and the scores of each text by attack."""

    combination: str
    accuracy: float
    chance: float
    scores: Mapping[str, Mapping[str, list[float]]]
    seconds: Mapping[str, float]
    labels: float | None = None

    def value(self, attack: str, measure: str = LEAK) -> float:
        return statistics.fmean(self.scores[attack][measure])

    def best(self) -> tuple[str, float]:
        """Return the strongest attack and its mean score."""
        name = max(self.scores, key=self.value)
        return name, self.value(name)


def audit_texts(
    case: SplitCase,
    combinations: Sequence[str],
    *,
    attacks: Sequence[TextAttack] = TEXT_ATTACKS,
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
    combinations = list(dict.fromkeys((NONE, *combinations)))
    texts, own = (
        _truncate_texts(part, length)
        for part in (case.test.only(np.arange(min(case.attacked, len(case.test)))), case.own)
    )
    shared_length = min(texts.shape[1], own.shape[1])
    texts, own = texts[:, :shared_length], own[:, :shared_length]
    _check_case(case, combinations, texts, own)
    total, done = len(combinations) * (1 + len(attacks)), 0

    def notify(step: str) -> None:
        nonlocal done
        if progress:
            progress(done, total, step)
        done += 1

    rows = [
        _audit_combination(case, combination, attacks, texts, own, notify)
        for combination in combinations
    ]
    if progress:
        progress(total, total, "")
    baselines = [
        score_texts([own_text.tolist()], [text.tolist()])
        for own_text, text in zip(own, texts, strict=False)
    ]
    floor = {m: [v for scores in baselines for v in scores[m]] for m in MEASURES}
    results = _build_results(case.name, rows, floor, attacks)
    return replace(
        results,
        findings=tuple(
            f if f"/{NONE}/" in f.id else apply_threshold(f, fail_above) for f in results.findings
        ),
    )


def _audit_combination(
    case: SplitCase,
    combination: str,
    attacks: Sequence[TextAttack],
    texts: Tensor,
    own: Tensor,
    notify: Callable[[str], None],
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
        started = time.monotonic()
        tokens, positions = attack.run(view)
        orders = [order_leak(served_pass) for served_pass in served] if view.shuffled else [None]
        if all(order is not None for order in orders):
            positions = torch.cat([order for order in orders if order is not None])
        recovered = torch.zeros_like(tokens).scatter(1, positions, tokens)
        scores[attack.name] = score_texts(recovered.tolist(), texts.tolist())
        seconds[attack.name] = round(time.monotonic() - started, 1)
    is_classifier = not (case.train.causal or case.train.tokens or case.train.dense)
    label_leak = measure_label_leak(passes, case.train, case.run) if is_classifier else None
    return TextRow(
        combination,
        accuracy,
        chance_accuracy(case.test) if is_classifier else 0.0,
        scores,
        seconds,
        label_leak,
    )


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
    attacks: Sequence[TextAttack],
) -> Results:
    titles, undefended = {a.name: a.title for a in attacks}, rows[0]
    baseline = statistics.fmean(floor[LEAK])
    has_labels = any(row.labels is not None for row in rows)
    columns = (
        "defences",
        "accuracy",
        *(("labels",) if has_labels else ()),
        "attack",
        *MEASURES,
        "worst ROUGE-L",
        "seconds",
    )
    table: list[tuple[str | float | None, ...]] = []
    findings = []
    for row in rows:
        for attack, scores in row.scores.items():
            means = [round(statistics.fmean(scores[m]), 3) for m in MEASURES]
            label_cells = (
                (None if row.labels is None else round(row.labels, 3),) if has_labels else ()
            )
            table.append(
                (
                    row.combination,
                    round(row.accuracy, 3),
                    *label_cells,
                    titles[attack],
                    *means,
                    round(max(scores[LEAK]), 3),
                    row.seconds[attack],
                )
            )
            findings.append(
                Finding(
                    f"{name}/{row.combination}/{attack}",
                    f'Under "{row.combination}", {titles[attack]} gives this much of the texts.',
                    None,
                    row.value(attack),
                    baseline,
                    undefended.value(attack),
                    f"{row.value(attack, 'words'):.0%} of the tokens, "
                    f"{row.value(attack, 'in place'):.0%} in their places",
                    measure=LEAK,
                    spread=statistics.stdev(scores[LEAK]) if len(scores[LEAK]) > 1 else None,
                    trials=len(scores[LEAK]),
                )
            )
    blank = (None,) if has_labels else ()
    baseline_cells = [round(statistics.fmean(floor[m]), 3) for m in MEASURES]
    table.append(
        (
            "a guess, another text",
            round(undefended.chance, 3) or None,
            *blank,
            "",
            *baseline_cells,
            round(max(floor[LEAK]), 3),
            None,
        )
    )
    note = (
        "Shares of each text, in the mean over texts: tokens as a bag, tokens in their "
        "places, ROUGE on tokens (F1), texts that are exactly right. "
    )
    tables = (
        Table(f"Utility and privacy: {name}", columns, tuple(table), note),
        build_glossary([r.combination for r in rows], attacks),
    )
    return Results(
        "What the server reads",
        tuple(findings),
        tables,
        (),
        {"verdict": _build_verdict(name, rows, baseline, titles)},
    )


def _build_verdict(
    name: str, rows: Sequence[TextRow], baseline: float, titles: Mapping[str, str]
) -> list[str]:
    undefended = rows[0]
    leaking = [row for row in rows if row.best()[1] >= READ_THRESHOLD]
    sentences = [
        (
            f"{name}: the server reads the texts under {len(leaking)} of {len(rows)} combinations "
            f"(ROUGE-L of {READ_THRESHOLD:g} and more)."
        )
    ]
    for row in rows:
        attack, value = row.best()
        words = max(row.value(a, "words") for a in row.scores)
        sentences.append(
            f"{row.combination}: ROUGE-L {value:.2f} by {titles[attack]} (another text: "
            f"{baseline:.2f}), {words:.0%} of the tokens; accuracy "
            f"{row.accuracy:.3f} (undefended: {undefended.accuracy:.3f})."
        )
    label_shares = [row.labels for row in rows if row.labels is not None]
    if label_shares:
        sentences.append(
            f"Labels are not sent, but the gradients reveal {min(label_shares):.0%} to "
            f"{max(label_shares):.0%} of them (a guess: {undefended.chance:.0%})."
        )
    return [*sentences, CAVEAT]
