"""The audit of gradients: make, attack and score updates for each combination of defences."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import torch

from regauge.attacks.inversion import to_patches
from regauge.attacks.membership import auc
from regauge.attacks.subspaces import find_text_layers
from regauge.attacks.updates import Rehearsal, SentUpdate, Update
from regauge.audit.engine import (
    Attack,
    Measured,
    Steps,
    apply_verdicts,
    attack_row,
    pixel_values,
    to_pixels,
    with_undefended,
)
from regauge.audit.gradient_audit import report
from regauge.audit.gradient_audit.attempts import (
    QUICK,
    TEXT_ATTACKS,
    Budget,
    attempt,
    filter_applicable,
    fit_attack,
)
from regauge.audit.gradient_audit.clients import (
    Truth,
    build_recorded_view,
    contribute_rows,
    prepare_model,
    rehearse,
    sample_rehearsals,
)
from regauge.audit.scores import (
    MEAN_IMAGE,
    OTHERS,
    UPDATE_METRICS,
    AttackScores,
    Case,
    Row,
    Scores,
    best_assignment,
    label_recall,
    merge_scores,
    score_images,
)
from regauge.audit.text_scores import ANOTHER_TEXT, score_texts, words_f1
from regauge.checkpoints.resume import StateStore
from regauge.core.progress import Progress
from regauge.data.tasks import Examples
from regauge.defences.gradients import Mjp, Plan, parse_plan
from regauge.errors import AuditError, UpdateError, need
from regauge.jigsaw.layers import Layers, find_layers
from regauge.results.findings import Results
from regauge.results.metrics import Lpips

Tensor = torch.Tensor
MAX_CANDIDATES = 400  # candidate patches of the batch for membership, and as many of other images
MAX_OWN_IMAGES = 500  # of the attacker, for statistics
REHEARSALS = 4  # for the calibration of attacks
GUESSES = 1000  # random batches behind the share of a guess


@dataclass(frozen=True, eq=False)
class GradientCase:
    """A model of images or texts, and its data.

    Attributes:
        model: The model.
        victims: The examples of the clients.
        own: The examples of the attacker, from the same distribution.
        mean: Channel means of the normalization; empty for texts.
        std: Channel deviations of the normalization; empty for texts.
        updates: The number of attacked updates.
        batch: Samples in an update, unless the combination sets it.
        steps: Local steps in an update, unless the combination sets them.
        lr: The learning rate of local steps.
        seed: The random seed.
        name: The name in tables and findings.
        stages: The model at other stages of its training, by name, for a curve.
    """

    model: torch.nn.Module
    victims: Examples
    own: Examples
    mean: Sequence[float] = ()
    std: Sequence[float] = ()
    updates: int = 8
    batch: int = 1
    steps: int = 1
    lr: float = 0.01
    seed: int = 0
    name: str = "gradients"
    stages: Mapping[str, torch.nn.Module] = field(default_factory=dict)

    @property
    def is_text(self) -> bool:
        """Whether the model reads texts."""
        return reads_tokens(self.victims)

    def plan(self, combination: str) -> Plan:
        """Return the plan of a client under a combination of defences."""
        return parse_plan(combination, self.batch, self.steps, self.lr)


@dataclass(frozen=True, eq=False)
class AttackedUpdate:
    """An update, the model that it belongs to, and the truth behind it."""

    model: torch.nn.Module
    update: Update
    truth: Truth


@dataclass(frozen=True, eq=False)
class Attacker:
    """What an attacker has besides an update, and how it is scored.

    Attributes:
        own: Its examples.
        budget: The budget of attacks that optimize or learn.
        mean: Channel means of the normalization; empty for texts.
        std: Channel deviations of the normalization.
        seed: The random seed of candidate patches.
        rehearse: Return the rehearsals that calibrate an attack.
        practise: Make so many rehearsals, for attacks that learn.
        lpips: The LPIPS network; None: without LPIPS.
        pictures: The number of reconstructions to return.
        fitted: The cache of fitted attacks.
    """

    own: Examples
    budget: Budget = field(default_factory=Budget)
    mean: Sequence[float] = ()
    std: Sequence[float] = ()
    seed: int = 0
    rehearse: Callable[[Attack], tuple[Rehearsal, ...]] = lambda attack: ()
    practise: Callable[[int], Iterable[Rehearsal]] = lambda count: ()
    lpips: Lpips | None = None
    pictures: int = 0
    fitted: dict[Any, Any] = field(default_factory=dict)

    def images(self, most: int = MAX_OWN_IMAGES) -> Tensor | None:
        """Return the attacker's images, and None if it has texts."""
        own, _ = split_own_images(self.own)
        rows = np.arange(min(most, len(own)))
        return None if reads_tokens(self.own) else pixel_values(own.only(rows))

    def texts(self, count: int) -> list[list[int]]:
        """Return so many of the attacker's own texts, repeated if there are fewer."""
        inputs, labels = self.own.batch(np.arange(count) % len(self.own))
        return token_lists(Truth(inputs, inputs, labels), self.own.causal)

    def guess_labels(self, size: int) -> float:
        """Return the share of the labels of an update that a guess by their frequencies gets.

        It is the mean over random batches of its own labels, of this size.
        """
        labels = self.own.batch(np.arange(min(MAX_OWN_IMAGES, len(self.own))))[1].cpu()
        expected = torch.bincount(labels, minlength=self.own.classes) / len(labels) * size
        counts = expected.floor()
        rest = size - int(counts.sum())
        counts[(expected - counts).topk(rest).indices] += 1
        rng = np.random.default_rng(0)
        batches = (labels[rng.integers(0, len(labels), size)] for _ in range(GUESSES))
        return statistics.fmean(label_recall(counts.long(), batch) for batch in batches)


def audit_gradients(
    case: GradientCase,
    combinations: Sequence[str],
    *,
    attacks: Sequence[Attack] | None = None,
    budget: Budget | None = None,
    optimized: int = 2,
    batches: Sequence[int] = (),
    lpips: Lpips | None = None,
    pictures: int = 6,
    fail_above: float | None = None,
    progress: Progress | None = None,
    store: StateStore | None = None,
) -> Results:
    """Measure the leakage of updates under each combination of defences.

    Args:
        case: The model and its data.
        combinations: Combinations of defences; "none", the upper bound, is always added.
        attacks: The attacks to run; None: all but the slow ones.
        budget: The budget of attacks that optimize or learn.
        optimized: The number of updates on which slow attacks are run.
        batches: Further batch sizes, without a defence, for a curve.
        lpips: The LPIPS network; without it LPIPS is skipped.
        pictures: The number of images in the gallery.
        fail_above: Fail a finding on defended updates if its attack gets further than this share
            of the way from baseline to upper bound.
        progress: Progress callback.
        store: The saved steps of an interrupted run.

    Raises:
        AuditError: The case cannot be audited.
    """
    budget = budget or Budget(seed=case.seed)
    combinations = with_undefended(combinations)
    check_case(case, [*combinations, *(f"batch={size}" for size in batches)])
    requested = attacks if attacks is not None else default_attacks(case.is_text)
    attacks, skipped = filter_applicable(requested, case.victims)
    closed = [a for a in attacks if not a.is_slow]  # the attacks of the curves
    curves = len(batches) + len(case.stages) * len(combinations)
    kinds = [a.name for a in attacks] * len(combinations) + [a.name for a in closed] * curves
    steps = Steps(kinds, progress, store)

    def measure(
        combination: str, used: Sequence[Attack] = closed, stage: str = "", **options: Any
    ) -> Row:
        model = case.stages[stage] if stage else case.model
        return audit_combination(
            case, model, combination, used, budget, steps=steps, stage=stage, **options
        )

    rows = tuple(
        measure(c, attacks, lpips=lpips, pictures=pictures, optimized=optimized)
        for c in combinations
    )
    sizes = {size: measure(f"batch={size}") for size in batches}
    stages = {name: [measure(c, stage=name) for c in combinations] for name in case.stages}
    steps.finish()
    if case.is_text:
        floors = {
            ANOTHER_TEXT: score_other_texts(case, case.batch, _count_updates(case, case.batch))
        }
        measured = Case(case.name, rows, floors, metric="ROUGE-L", subject="texts")
        return apply_verdicts(report.build_text_results(measured, attacks), fail_above)
    shown = to_pixels(case, _first_victims(case, pictures)) if pictures else None
    floors = score_baselines(case, lpips)
    measured = Case(case.name, rows, floors, shown, sizes, stages, metric=report.LEAK)
    unchecked = [*skipped]
    if lpips is None:
        unchecked = ["LPIPS: the weights of AlexNet were not given (--lpips)", *skipped]
    if not any(a.is_slow for a in requested):
        unchecked.append("attacks by descent: not selected (--attacks inverting, or all)")
    results = report.build_results(measured, attacks, unchecked)
    return apply_verdicts(results, fail_above)


def default_attacks(is_text: bool) -> tuple[Attack, ...]:
    """Return the attacks of an audit that names none: all but the slow ones."""
    return tuple(a for a in TEXT_ATTACKS if not a.is_slow) if is_text else QUICK


def reads_tokens(examples: Examples) -> bool:
    """Return whether examples are texts."""
    return "input_ids" in examples.batch(np.arange(1))[0]


def check_case(case: GradientCase, combinations: Sequence[str]) -> None:
    """Check a case before anything is attacked.

    Raises:
        AuditError: There are too few images or texts.
    """
    noun = "texts" if case.is_text else "images"
    if case.is_text:
        find_text_layers(case.model)
    elif len(case.own) < 2:
        raise AuditError(
            f"the attacker must have >= 2 images of its own, got {len(case.own)}",
            hint="pass more data",
        )
    else:
        find_layers(case.model, tuple(pixel_values(case.own.only([0])).shape[1:]))
    plans = {c: case.plan(c) for c in combinations}
    if any(plan.private for plan in plans.values()):
        need("dp_accounting", "privacy")  # for the epsilon of the report
    for combination, plan in plans.items():
        needed = plan.samples * plan.clients
        if needed > len(case.victims):
            raise AuditError(
                f'clients must have >= {needed} {noun} for an update under "{combination}", got '
                f"{len(case.victims)}",
                hint="pass more data, or a smaller batch",
            )


def audit_combination(
    case: GradientCase,
    model: torch.nn.Module,
    combination: str,
    attacks: Sequence[Attack],
    budget: Budget,
    lpips: Lpips | None = None,
    pictures: int = 0,
    optimized: int = 2,
    steps: Steps | None = None,
    stage: str = "",
) -> Row:
    """Make updates under one combination, attack each, and score the attacks.

    Args:
        case: The data.
        model: The model.
        combination: The defences.
        attacks: The attacks to run.
        budget: The budget of attacks that optimize or learn.
        lpips: The LPIPS network; None: without LPIPS.
        pictures: The number of images in the gallery.
        optimized: The number of updates on which slow attacks are run.
        steps: The steps of the audit.
        stage: The stage of training, which identifies the steps.
    """
    plan = case.plan(combination)
    size = plan.samples * plan.clients

    @cache
    def updates() -> list[AttackedUpdate]:
        return list(make_updates(case, model, plan))

    @cache
    def rehearsals() -> tuple[Rehearsal, ...]:
        if case.is_text:
            return ()
        own, _ = split_own_images(case.own)
        seed = case.seed * 1000 + 500
        return tuple(rehearse(updates()[0].model, plan, own, REHEARSALS, seed))

    def practise(count: int) -> Iterator[Rehearsal]:
        own, _ = split_own_images(case.own)
        return sample_rehearsals(updates()[0].model, plan, own, count, case.seed * 1000 + 700)

    attacker = Attacker(
        case.own,
        budget,
        case.mean,
        case.std,
        case.seed,
        lambda attack: rehearsals(),
        practise,
        lpips,
        pictures,
    )

    def run(attack: Attack, within: Progress) -> Measured:
        chosen = updates()[:optimized] if attack.is_slow else updates()
        return attack_updates(attack, chosen, attacker, within)

    row = attack_row(steps or Steps(), f"{stage}/{combination}", combination, attacks, run)
    count = _count_updates(case, size)
    floor = (
        score_other_texts(case, size, count)
        if case.is_text
        else _score_mean_image(case, count * size, None)
    )
    inputs = None
    if pictures and isinstance(plan.model, Mjp):
        read = [u.truth.read["pixel_values"] for u in updates() if u.truth.puzzle is not None]
        inputs = to_pixels(case, torch.cat(read)[:pictures]) if read else None
    epsilon = plan.private.epsilon() if plan.private is not None else None
    return replace(row, epsilon=epsilon, samples=size, inputs=inputs, floor=floor)


def attack_updates(
    attack: Attack,
    updates: Sequence[AttackedUpdate],
    attacker: Attacker,
    within: Progress | None = None,
) -> Measured:
    """Run an attack on some updates, and score what it recovers.

    Args:
        attack: The attack.
        updates: The updates.
        attacker: What the attacker has.
        within: Progress callback, in updates.
    """
    images = attacker.images() if attack.threat.images or attack.kind == "patches" else None
    outputs: list[Any] = []
    facts: list[Mapping[str, Any]] = []
    seconds: list[float] = []
    candidates: list[int] = []
    reason, learned = "", None

    def report_step(n: int) -> Progress:
        def report(done: int, total: int, label: str) -> None:
            if within is not None:
                within(n * total + done, len(updates) * total, label)

        return report

    for n, sent in enumerate(updates):
        try:
            rehearsals = attacker.rehearse(attack)
            view = build_recorded_view(
                sent.model, sent.update, sent.truth, attack.threat, images, rehearsals
            )
            if attack.learn is not None and learned is None:
                learned = fit_attack(
                    attacker.fitted, attack, view, attacker.budget, attacker.practise
                )
            patches, members = None, 0
            if attack.kind == "patches":
                patches, members = sample_candidates(view, sent.truth, attacker, attacker.seed + n)
        except UpdateError as error:
            return Measured(reason=str(error))
        budget = replace(attacker.budget, seed=attacker.budget.seed + n, progress=report_step(n))
        tried = attempt(attack, view, budget, patches, learned)
        report_step(n)(1, 1, "updates")
        if tried.output is None:
            reason = tried.reason
            if attack.kind != "texts":
                return Measured(reason=reason)
        outputs.append(tried.output)
        facts.append(tried.facts)
        seconds.append(tried.seconds)
        candidates.append(members)
    if all(output is None for output in outputs):
        return Measured(reason=reason)
    time = statistics.fmean(seconds)
    truths = [sent.truth for sent in updates]
    if attack.kind == "images":
        return Measured(_score_images(attack.name, outputs, truths, attacker, time, facts))
    if attack.kind == "texts":
        causal = attacker.own.causal
        texts = [token_lists(truth, causal) for truth in truths]
        guesses = [output or [] for output in outputs]
        scored = [score_texts(guess, text) for guess, text in zip(guesses, texts, strict=True)]
        f1 = [words_f1(guess, text) for guess, text in zip(guesses, texts, strict=True)]
        own = statistics.fmean(words_f1(attacker.texts(len(text)), text) for text in texts)
        scores = AttackScores(attack.name, merge_scores(scored), seconds=round(time, 1))
        return Measured(scores, f1, own, reason=reason)
    if attack.kind == "patches":
        shares = [auc(o[:m], o[m:]) for o, m in zip(outputs, candidates, strict=True)]
        return Measured(share=shares, guess=0.5)
    if attack.kind == "labels":
        labels = [truth.labels for truth in truths]
        shares = [label_recall(o, y) for o, y in zip(outputs, labels, strict=True)]
        guess = attacker.guess_labels(len(labels[0]))
        return Measured(share=shares, guess=guess, count=sum(map(len, labels)))
    masks = [truth.puzzle.mask[0] for truth in truths if truth.puzzle is not None]
    shares = [float((o == m).double().mean()) for o, m in zip(outputs, masks, strict=False)]
    ratios = [float(m.double().mean()) for m in masks] or [0.5]
    guess = statistics.fmean(max(ratio, 1 - ratio) for ratio in ratios)
    return Measured(share=shares, guess=guess, count=sum(map(len, masks)))


def make_updates(
    case: GradientCase, model: torch.nn.Module, plan: Plan
) -> Iterator[AttackedUpdate]:
    """Yield updates of the first victims."""
    prepared, size = prepare_model(model, plan), plan.samples * plan.clients
    for n in range(_count_updates(case, size)):
        rows = np.arange(n * size, (n + 1) * size)
        seed = case.seed * 1000 + n
        yield AttackedUpdate(prepared, *contribute_rows(prepared, plan, case.victims, rows, seed))


def _count_updates(case: GradientCase, size: int) -> int:
    return max(1, min(case.updates, len(case.victims) // size))


def _score_images(
    name: str,
    outputs: Sequence[Tensor],
    truths: Sequence[Truth],
    attacker: Attacker,
    seconds: float,
    facts: Sequence[Mapping[str, Any]],
) -> AttackScores:
    """Score images against the originals and, if a puzzle changed them, the model's inputs."""
    guesses = [to_pixels(attacker, output) for output in outputs]
    originals = [to_pixels(attacker, truth.original["pixel_values"]) for truth in truths]
    inputs = [to_pixels(attacker, truth.read["pixel_values"]) for truth in truths]

    def score(targets: Sequence[Tensor]) -> tuple[Tensor, Scores]:
        matched = torch.cat([best_assignment(*pair) for pair in zip(guesses, targets, strict=True)])
        return matched, score_reconstructions(matched, torch.cat(list(targets)), attacker.lpips)

    matched, scores = score(originals)
    is_changed = not torch.equal(torch.cat(originals), torch.cat(inputs))
    return AttackScores(
        name,
        scores,
        seconds=seconds,
        images=matched[: attacker.pictures],
        read=score(inputs)[1] if is_changed else None,
        facts=facts,
    )


def score_reconstructions(guesses: Tensor, images: Tensor, lpips: Lpips | None) -> Scores:
    """Return all metrics; identification is left out for a single image, where it is trivial."""
    single = len(images) == 1
    metrics = tuple(m for m in UPDATE_METRICS if not (single and m.name == "identified"))
    return score_images(guesses, images, lpips, metrics)


def split_own_images(own: Examples) -> tuple[Examples, Examples]:
    """Return the adversary's images, and held-out images for non-members in membership attacks.

    An adversary that had the non-members would recognize them as such.
    """
    count = len(own) if len(own) < 8 else len(own) - min(100, len(own) // 4)
    first = count if count < len(own) else 0
    return own.only(np.arange(count)), own.only(np.arange(first, len(own)))


def sample_candidates(
    view: SentUpdate, truth: Truth, attacker: Attacker, seed: int
) -> tuple[Tensor, int]:
    """Return candidate patches, and how many of them, the first ones, are members.

    Members are patches of the batch; the others are as many patches of other images.
    """
    side = _patch_layers(view).patch[0]
    members = extract_patches(truth.read["pixel_values"].cpu(), side)
    generator = torch.Generator().manual_seed(seed)
    members = members[torch.randperm(len(members), generator=generator)[:MAX_CANDIDATES]]
    others = extract_patches(pixel_values(split_own_images(attacker.own)[1]), side)
    others = others[torch.randperm(len(others), generator=generator)[: len(members)]]
    return torch.cat([members, others]), len(members)


def extract_patches(images: Tensor, patch: int) -> Tensor:
    """Return all patches of images, [count, values]."""
    return to_patches(images, patch).flatten(0, 1)


def token_lists(truth: Truth, causal: bool) -> list[list[int]]:
    """Return the tokens of each text without padding; a causal model's last token is a label.

    They are the original texts, before any puzzle.
    """
    ids = truth.original["input_ids"].cpu()
    mask = truth.original.get("attention_mask")
    rows = (
        [row.tolist() for row in ids]
        if mask is None
        else [row[m.bool()].tolist() for row, m in zip(ids, mask.cpu(), strict=True)]
    )
    return [row[:-1] if causal else row for row in rows]


def score_baselines(case: GradientCase, lpips: Lpips | None) -> dict[str, Scores]:
    """Score what costs an attacker nothing, against the victims of "none".

    These are the mean of its own images and, if an update has several images and so no order, its
    own images by the best assignment.
    """
    scores = {MEAN_IMAGE: _score_mean_image(case, case.updates * case.batch, lpips)}
    if case.batch > 1:
        images, own = (
            to_pixels(case, _first_victims(case, case.updates * case.batch)),
            to_pixels(case, case.own),
        )
        own = own.repeat(-(-len(images) // len(own)), 1, 1, 1)[: len(images)]
        pairs = zip(torch.split(own, case.batch), torch.split(images, case.batch), strict=True)
        matched = torch.cat([best_assignment(guesses, targets) for guesses, targets in pairs])
        scores[OTHERS] = score_reconstructions(matched, images, lpips)
    return scores


def score_other_texts(case: GradientCase, size: int, count: int) -> Scores:
    """Score texts of the attacker as guesses of some updates, assigned as those of an attack.

    Args:
        case: The data.
        size: The number of texts in an update.
        count: The number of updates.
    """
    total = min(size * count, len(case.victims))
    texts = []
    for data in (case.own, case.victims):
        inputs, labels = data.batch(np.arange(total) % len(data))
        texts.append(token_lists(Truth(inputs, inputs, labels), data.causal))
    own, victims = texts
    updates = [slice(first, first + size) for first in range(0, total, size)]
    return merge_scores([score_texts(own[update], victims[update]) for update in updates])


def _score_mean_image(case: GradientCase, count: int, lpips: Lpips | None) -> Scores:
    images = to_pixels(case, _first_victims(case, count))
    guesses = to_pixels(case, case.own).mean(0, keepdim=True).expand_as(images)
    return score_reconstructions(guesses, images, lpips)


def _first_victims(case: GradientCase, count: int) -> Examples:
    return case.victims.only(np.arange(min(count, len(case.victims))))


def _patch_layers(view: SentUpdate) -> Layers:
    layers = find_layers(view.model, view.shape)
    if layers.patch[0] != layers.patch[1]:
        raise UpdateError(f"patches must be square, got {layers.patch[0]} x {layers.patch[1]}")
    return layers
