"""The image audit: train, record and attack a victim for each combination of defences."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from regauge.attacks.labels import cluster_labels, multilabel_attack, sample_grads
from regauge.attacks.views import SentGradients, ServerPass
from regauge.audit.engine import (
    Attack,
    Steps,
    apply_verdicts,
    denormalize,
    pixel_values,
    to_pixels,
    with_undefended,
)
from regauge.audit.scores import (
    AttackScores,
    Case,
    Row,
    best_assignment,
    score_baselines,
    score_images,
)
from regauge.audit.split_audit import report
from regauge.audit.split_audit.attempts import (
    ATTACKS,
    Budget,
    Setting,
    attempt,
    collect_views,
    patch_size,
)
from regauge.audit.split_audit.victims import (
    drop_singleton_batch,
    make_split_pair,
    parse_combination,
)
from regauge.core.progress import Progress
from regauge.data.tasks import Examples
from regauge.defences.parser import NONE
from regauge.defences.split import BatchShuffle
from regauge.errors import AuditError
from regauge.results.findings import Results
from regauge.results.metrics import Lpips
from regauge.split import OptimizerConfig
from regauge.split.client.train import Run

Tensor = torch.Tensor
LABEL_STEPS, KNOWN_PER_CLASS = 20, 3  # recorded steps of the label attack; labels that it knows
MIN_IMAGES = 20  # of the attacker


@dataclass(frozen=True, eq=False)
class SplitCase:
    """A model and its data.

    Attributes:
        model: The model before training.
        train: The examples of the client.
        own: The examples of the attacker, from the same distribution.
        test: Held-out examples for the accuracy; the first `attacked` of them are attacked.
        mean: Channel means of the normalization; empty for texts.
        std: Channel deviations of the normalization; empty for texts.
        training: The optimizer of both sides.
        run: The number of steps, the batch size and the seed.
        attacked: The number of attacked examples.
        name: The name in tables and findings.
    """

    model: torch.nn.Module
    train: Examples
    own: Examples
    test: Examples
    mean: Sequence[float] = ()
    std: Sequence[float] = ()
    training: OptimizerConfig = field(default_factory=OptimizerConfig)
    run: Run = field(default_factory=lambda: Run(200, 32))
    attacked: int = 64
    name: str = "split"


def audit_split(
    case: SplitCase,
    combinations: Sequence[str],
    *,
    attacks: Sequence[Attack] = ATTACKS,
    budget: Budget | None = None,
    lpips: Lpips | None = None,
    pictures: int = 6,
    fail_above: float | None = None,
    progress: Progress | None = None,
) -> Results:
    """Measure utility and leakage of each combination of defences.

    Args:
        case: The model and its data.
        combinations: Combinations of defences; "none", the ceiling, is always added.
        attacks: The attacks to run.
        budget: The training budget of the attacker's decoder.
        lpips: The LPIPS network; without it LPIPS and F-SIM are skipped.
        pictures: The number of images in the gallery.
        fail_above: Fail a finding on defended features if its attack gets further than this share
            of the way from floor to ceiling.
        progress: Progress callback.

    Raises:
        AuditError: The case cannot be audited.
    """
    budget = budget or Budget()
    combinations = with_undefended(combinations)
    check_case(case, combinations, attacks)
    steps = Steps(len(combinations) * (1 + len(attacks)), progress)
    rows = [
        audit_combination(case, combination, attacks, budget, lpips, pictures, steps)
        for combination in combinations
    ]
    steps.finish()
    own, images = (
        to_pixels(case, part)
        for part in (case.own, case.test.only(np.arange(_attacked_count(case))))
    )
    patch = patch_size(case.model, images)
    measured = Case(
        case.name,
        tuple(rows),
        score_baselines(own, images, patch, lpips, case.run.seed),
        images[:pictures],
    )
    unchecked = [
        f"{a.title}: {type(case.model).__name__} has no patch embedding with a position table"
        for a in _untried_attacks(rows, attacks)
    ]
    if lpips is None:
        unchecked.append("LPIPS and F-SIM: the weights of AlexNet were not given (--lpips)")
    elif "LPIPS" not in rows[0].by_attack[next(iter(rows[0].by_attack))].scores:
        unchecked.append("LPIPS and F-SIM: images under 32 x 32 are too small for AlexNet")
    results = report.build_results("What the server learns", [measured], attacks, unchecked)
    return apply_verdicts(results, fail_above)


def check_case(
    case: SplitCase, combinations: Sequence[str], attacks: Sequence[Attack] = ATTACKS
) -> None:
    """Check a case before anything is trained: run each combination on two images.

    Raises:
        AuditError: The case cannot be audited.
    """
    if not any(a.fits(NONE) for a in attacks):
        raise AuditError(
            "attacks must contain one that applies to an undefended victim, the ceiling, got "
            f"{', '.join(a.name for a in attacks) or 'none'}",
            hint="add least squares or decoder",
        )
    if len(case.own) < MIN_IMAGES:
        raise AuditError(
            f"the attacker must have >= {MIN_IMAGES} images, got {len(case.own)}",
            hint="pass more data, or a larger share of it to the attacker",
        )
    if _attacked_count(case) < 2:
        raise AuditError(
            f"the number of attacked images must be >= 2, got {_attacked_count(case)}: a single "
            "image is always nearest to itself",
            hint="pass more data",
        )
    shuffling = next(
        (c for c in combinations if any(isinstance(d, BatchShuffle) for d in parse_combination(c))),
        None,
    )
    if shuffling is not None and case.run.batch_size < 2:
        raise AuditError(
            f'the batch size must be >= 2 for "{shuffling}", which shuffles tokens between '
            f"samples, got {case.run.batch_size}",
            hint="set --batch-size 2 or more",
        )
    images = case.test.batch(np.arange(2))[0]["pixel_values"]
    patch_size(case.model, images)
    for combination in combinations:
        pair = make_split_pair(copy.deepcopy(case.model), combination)
        pair.record_features(images, 2, "check")


def audit_combination(
    case: SplitCase,
    combination: str,
    attacks: Sequence[Attack],
    budget: Budget,
    lpips: Lpips | None,
    pictures: int,
    notify: Steps,
) -> Row:
    """Train, evaluate, record and attack a victim under one combination.

    Args:
        case: The model and its data.
        combination: The defences.
        attacks: The attacks to run.
        budget: The training budget of the attacker's decoder.
        lpips: The LPIPS network; None: without LPIPS and F-SIM.
        pictures: The number of images in the gallery.
        notify: Called with a description before each step.
    """
    notify(f"{combination}: train through the split")
    started = time.monotonic()
    seed = case.run.seed
    pair = make_split_pair(copy.deepcopy(case.model), combination, case.training, seed=seed)
    passes = pair.train(case.train, case.run, record_first=min(case.run.steps, LABEL_STEPS))
    measures = pair.measure(case.test, max(2, case.run.batch_size))
    seconds = time.monotonic() - started
    attacked_examples = case.test.only(np.arange(_attacked_count(case)))
    setting = Setting(combination, budget, max(2, case.run.batch_size), seed)
    views = collect_views(
        pair, pixel_values(case.own), pixel_values(attacked_examples), setting.batch, seed
    )
    images = to_pixels(case, attacked_examples)
    by_attack: dict[str, AttackScores] = {}
    for attack in attacks:
        notify(f"{combination}: {attack.title}")
        if not attack.fits(combination):
            continue
        result = attempt(attack, views, setting)
        if result is not None and result.output is not None:
            guesses = denormalize(result.output, case.mean, case.std)
            guesses = guesses if attack.is_ordered else best_assignment(guesses, images)
            by_attack[attack.name] = AttackScores(
                attack.name,
                score_images(guesses, images, lpips),
                result.facts["losses"],
                result.facts["floor"],
                result.seconds,
                guesses[:pictures].clamp(0, 1),
            )
    label_leak = measure_label_leak(passes, case.train, case.run)
    return Row(
        combination,
        measures["accuracy"],
        chance_accuracy(case.test),
        seconds,
        by_attack,
        (measures["accuracy"],),
        label_leak,
    )


def measure_label_leak(passes: Sequence[ServerPass], examples: Examples, run: Run) -> float | None:
    """Return the share of labels that the gradients of the first steps reveal.

    The server knows `KNOWN_PER_CLASS` labels of each class; with multi-label examples, the labels
    of a tenth of them. None if no gradient was recorded.
    """
    examples = drop_singleton_batch(examples, run.batch_size)
    grads = sample_grads(passes)
    if not len(grads):
        return None
    truth = torch.cat(
        [examples.batch(run.batch_indices(examples, n))[1] for n in range(len(passes))]
    )
    if examples.multi_label:
        known = max(2, len(truth) // 10)
        scores = multilabel_attack(
            SentGradients(
                grads, known_label_sets={i: truth[i].int().tolist() for i in range(known)}
            ),
            examples.classes,
        )
        return float(((scores[known:] > 0) == (truth[known:] > 0)).double().mean())
    known_labels = {
        int(i): int(c)
        for c in range(examples.classes)
        for i in (truth == c).nonzero()[:KNOWN_PER_CLASS, 0]
    }
    is_unknown = torch.tensor([i not in known_labels for i in range(len(truth))])
    with torch.random.fork_rng():
        guess = cluster_labels(SentGradients(grads, known_labels), examples.classes, seed=run.seed)
    return float((guess == truth)[is_unknown].double().mean())


def chance_accuracy(examples: Examples) -> float:
    """Return the accuracy of the most frequent class; with multi-label examples, of each label."""
    labels = torch.cat(
        [
            examples.batch(rows)[1]
            for rows in np.array_split(np.arange(len(examples)), max(1, len(examples) // 256))
        ]
    )
    if examples.multi_label:
        share = labels.float().mean(0)
        return float(torch.maximum(share, 1 - share).mean())
    return float(torch.bincount(labels).max()) / len(labels)


def _attacked_count(case: SplitCase) -> int:
    return min(case.attacked, len(case.test))


def _untried_attacks(rows: Sequence[Row], attacks: Sequence[Attack]) -> list[Any]:
    return [
        a
        for a in attacks
        if any(a.fits(row.combination) for row in rows)
        and not any(a.name in row.by_attack for row in rows)
    ]
