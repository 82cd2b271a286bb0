"""The audit of texts: a model of language trained split, with each combination of defences, and
what the server reads off the stream.

Texts are cut to one length, so that none is padded: which rows are padding the mask says anyway.
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
from regauge.audit.split.engine import SplitCase, chance_accuracy, measure_label_leak
from regauge.audit.split.report import CAVEAT, build_glossary
from regauge.audit.split.scores import LeakageError
from regauge.audit.split.victims import (
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
from regauge.results.findings import Finding, Results, Table, apply_threshold

Tensor = torch.Tensor
LEAK = "ROUGE-L"
MAX_LENGTH, MIN_TEXTS, LABEL_STEPS = 32, 20, 20
READ_THRESHOLD = 0.5  # a server that has half of a text's longest common subsequence has read it


@dataclass(frozen=True, eq=False)
class SentTexts:
    """What a server has who reads texts: `served` as they came, the open model that client and
    server started from, and texts of its own (`ids`) with what a client like this one makes of
    them, in order.
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
    """`name` is its id, `title` how it is told, `about` what it does in a line; it gives tokens and
    places, [texts, rows].
    """

    name: str
    title: str
    about: str
    run: Callable[[SentTexts], tuple[Tensor, Tensor]]


TEXT_ATTACKS: tuple[TextAttack, ...] = (
    TextAttack(
        "vocabulary",
        "every token tried",
        "makes the state of every token at every place with the embedding that was started "
        "from, and takes the nearest",
        lambda view: embedding_search(EmbeddedText(view.observed, view.model, None, view.shuffled)),
    ),
    TextAttack(
        "regression",
        "a learned map",
        "learns the map from states to tokens and places on texts of its own, defended "
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
    """A combination of defences: accuracy, and by attack the scores of each text."""

    combination: str
    accuracy: float
    chance: float
    scores: Mapping[str, Mapping[str, list[float]]]
    seconds: Mapping[str, float]
    labels: float | None = None

    def value(self, attack: str, measure: str = LEAK) -> float:
        return statistics.fmean(self.scores[attack][measure])

    def best(self) -> tuple[str, float]:
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
    """What a server of split learning reads of texts, under each combination of defences ("none" is
    the ceiling, and always there).
    """
    combinations = list(dict.fromkeys((NONE, *combinations)))
    true, own = (
        _truncate_texts(part, length)
        for part in (case.test.only(np.arange(min(case.attacked, len(case.test)))), case.own)
    )
    together = min(true.shape[1], own.shape[1])
    true, own = true[:, :together], own[:, :together]
    _check_case(case, combinations, true, own)
    total, done = len(combinations) * (1 + len(attacks)), 0

    def tell(now: str) -> None:
        nonlocal done
        if progress:
            progress(done, total, now)
        done += 1

    rows = [
        _audit_combination(case, combination, attacks, true, own, tell)
        for combination in combinations
    ]
    if progress:
        progress(total, total, "")
    guess = [
        score_texts([other.tolist()], [text.tolist()])
        for other, text in zip(own, true, strict=False)
    ]
    floor = {m: [v for one in guess for v in one[m]] for m in MEASURES}
    found = _build_results(case.name, rows, floor, attacks)
    return replace(
        found,
        findings=tuple(
            f if f"/{NONE}/" in f.id else apply_threshold(f, fail_above) for f in found.findings
        ),
    )


def _audit_combination(
    case: SplitCase,
    combination: str,
    attacks: Sequence[TextAttack],
    true: Tensor,
    own: Tensor,
    tell: Callable[[str], None],
) -> TextRow:
    tell(f"{combination}: train through the split")
    seed, batch = case.run.seed, max(2, case.run.batch_size)
    public = copy.deepcopy(case.model).eval()
    pair = make_split_pair(
        _copy_client_model(case.model, combination), combination, case.training, seed=seed
    )
    passes = pair.train(case.train, case.run, record_first=min(case.run.steps, LABEL_STEPS))
    accuracy = pair.measure(case.test, batch)["accuracy"]
    served = pair.record_passes(_make_batches(true, batch), "seen")
    view = SentTexts(
        served, public, _embed_own_texts(pair, own, batch, seed), own, is_shuffled(combination)
    )
    scores, seconds = {}, {}
    for attack in attacks:
        tell(f"{combination}: {attack.title}")
        started = time.monotonic()
        tokens, places = attack.run(view)
        told = [order_leak(one) for one in served] if view.shuffled else [None]
        if all(order is not None for order in told):
            places = torch.cat([order for order in told if order is not None])
        texts = torch.zeros_like(tokens).scatter(1, places, tokens)
        scores[attack.name] = score_texts(texts.tolist(), true.tolist())
        seconds[attack.name] = round(time.monotonic() - started, 1)
    classified = not (case.train.causal or case.train.tokens or case.train.dense)
    guessed = measure_label_leak(passes, case.train, case.run) if classified else None
    return TextRow(
        combination,
        accuracy,
        chance_accuracy(case.test) if classified else 0.0,
        scores,
        seconds,
        guessed,
    )


def _copy_client_model(model: torch.nn.Module, combination: str) -> torch.nn.Module:
    """A copy of the model. Where rows move it is given its causal mask, which fused kernels make
    themselves.
    """
    made: Any = copy.deepcopy(model)
    if is_shuffled(combination) and hasattr(made, "set_attn_implementation"):
        made.set_attn_implementation("eager")
    return cast(torch.nn.Module, made)


def _embed_own_texts(pair: Pair, own: Tensor, batch: int, seed: int) -> Tensor:
    """The attacker's own texts through a client like this one, with its defences but for the
    shuffles.
    """
    if not is_shuffled(pair.combination):
        return torch.cat(
            [p.stream for p in pair.record_passes(_make_batches(own, batch), "own")]
        ).float()
    pair.link.close()
    beside = make_split_pair(pair.model, drop_shuffles(pair.combination), seed=seed + 1)
    found = torch.cat(
        [p.stream for p in beside.record_passes(_make_batches(own, batch), "own")]
    ).float()
    beside.link.close()
    return found


def _make_batches(ids: Tensor, batch: int) -> list[dict[str, Tensor]]:
    parts = list(torch.split(ids, batch))
    if len(parts) > 1 and len(parts[-1]) == 1:
        parts = [*parts[:-2], torch.cat(parts[-2:])]
    return [{"input_ids": part, "attention_mask": torch.ones_like(part)} for part in parts]


def _truncate_texts(examples: object, length: int) -> Tensor:
    """Texts without their padding, those of at least half the length, cut to the shortest of
    them.
    """
    inputs, _ = examples.batch(np.arange(len(examples)))  # type: ignore[attr-defined,arg-type]
    mask = inputs.get("attention_mask")
    rows = [
        row if mask is None else row[m.bool()]
        for row, m in zip(
            inputs["input_ids"], inputs["input_ids"] if mask is None else mask, strict=True
        )
    ]
    kept = [row[:length] for row in rows if len(row) >= min(length, max(map(len, rows))) // 2]
    shortest = min(map(len, kept))
    return torch.stack([row[:shortest] for row in kept])


def _check_case(case: SplitCase, combinations: Sequence[str], true: Tensor, own: Tensor) -> None:
    """Refuse what cannot be before anything is trained."""
    if len(own) < MIN_TEXTS:
        raise LeakageError(
            f"an attacker with {len(own)} texts learns nothing",
            hint="give more data, or longer texts",
        )
    if true.shape[1] < 2 or len(true) < 2:
        raise LeakageError(
            f"{len(true)} texts of {true.shape[1]} tokens are too little to attack",
            hint="give more data, or longer texts",
        )
    if any(isinstance(d, BatchShuffle) for c in combinations for d in parse_combination(c)):
        raise LeakageError(
            "a batch shuffle takes tokens from text to text, and their masks belong to each text",
            hint="use rows",
        )
    on_pixels = next((d for c in combinations for d in parse_combination(c) if d.stage == 0), None)
    if on_pixels is not None:
        raise LeakageError(
            f"{type(on_pixels).__name__} acts on images, and these are texts",
            hint="noise, round, bottleneck, rows and the like",
        )
    for combination in combinations:
        make_split_pair(_copy_client_model(case.model, combination), combination).record_passes(
            _make_batches(true[:2], 2), "check"
        )


def _build_results(
    name: str,
    rows: Sequence[TextRow],
    floor: Mapping[str, list[float]],
    attacks: Sequence[TextAttack],
) -> Results:
    titles, plain = {a.name: a.title for a in attacks}, rows[0]
    low = statistics.fmean(floor[LEAK])
    labelled = any(row.labels is not None for row in rows)
    heads = (
        "defences",
        "accuracy",
        *(("labels",) if labelled else ()),
        "attack",
        *MEASURES,
        "worst ROUGE-L",
        "seconds",
    )
    lines: list[tuple[str | float | None, ...]] = []
    findings = []
    for row in rows:
        for attack, scores in row.scores.items():
            means = [round(statistics.fmean(scores[m]), 3) for m in MEASURES]
            known = (None if row.labels is None else round(row.labels, 3),) if labelled else ()
            lines.append(
                (
                    row.combination,
                    round(row.accuracy, 3),
                    *known,
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
                    low,
                    plain.value(attack),
                    f"{row.value(attack, 'words'):.0%} of the tokens, "
                    f"{row.value(attack, 'in place'):.0%} in their places",
                    measure=LEAK,
                    spread=statistics.stdev(scores[LEAK]) if len(scores[LEAK]) > 1 else None,
                    trials=len(scores[LEAK]),
                )
            )
    blank = (None,) if labelled else ()
    free = [round(statistics.fmean(floor[m]), 3) for m in MEASURES]
    lines.append(
        (
            "a guess, another text",
            round(plain.chance, 3) or None,
            *blank,
            "",
            *free,
            round(max(floor[LEAK]), 3),
            None,
        )
    )
    note = (
        "Shares of each text, in the mean over texts: tokens as a bag, tokens in their "
        "places, ROUGE on tokens (F1), texts that are exactly right. "
    )
    tables = (
        Table(f"Utility and privacy: {name}", heads, tuple(lines), note),
        build_glossary([r.combination for r in rows], attacks),
    )
    return Results(
        "What the server reads",
        tuple(findings),
        tables,
        (),
        {"verdict": _build_verdict(name, rows, low, titles)},
    )


def _build_verdict(
    name: str, rows: Sequence[TextRow], low: float, titles: Mapping[str, str]
) -> list[str]:
    plain = rows[0]
    having = [row for row in rows if row.best()[1] >= READ_THRESHOLD]
    out = [
        (
            f"{name}: the server reads the texts under {len(having)} of {len(rows)} combinations "
            f"(ROUGE-L of {READ_THRESHOLD:g} and more)."
        )
    ]
    for row in rows:
        attack, value = row.best()
        words = max(row.value(a, "words") for a in row.scores)
        out.append(
            f"{row.combination}: ROUGE-L {value:.2f} by {titles[attack]} (another text: "
            f"{low:.2f}), {words:.0%} of the tokens; accuracy "
            f"{row.accuracy:.3f} (undefended: {plain.accuracy:.3f})."
        )
    known = [row.labels for row in rows if row.labels is not None]
    if known:
        out.append(
            f"Labels are not sent, and the gradients tell them: {min(known):.0%} to "
            f"{max(known):.0%} of them (a guess: {plain.chance:.0%})."
        )
    return [*out, CAVEAT]
