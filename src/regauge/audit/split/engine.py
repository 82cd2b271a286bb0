"""The audit: for each combination of defences a victim is trained with it, watched, and
attacked.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from regauge.attacks.labels import cluster_labels, multilabel_attack, sample_grads
from regauge.attacks.views import SentGradients, ServerPass
from regauge.audit.split import report
from regauge.audit.split.attempts import (
    ATTACKS,
    Attack,
    Budget,
    Setting,
    attempt,
    collect_views,
    patch_size,
)
from regauge.audit.split.scores import (
    AttackScores,
    Case,
    LeakageError,
    Row,
    best_assignment,
    score_baselines,
    score_images,
)
from regauge.audit.split.victims import (
    drop_singleton_batch,
    make_split_pair,
    parse_combination,
)
from regauge.core.progress import Progress
from regauge.data.tasks import Examples
from regauge.defences.parser import NONE
from regauge.defences.split import BatchShuffle
from regauge.results.findings import Results, apply_threshold
from regauge.results.metrics import Lpips
from regauge.split import OptimizerConfig
from regauge.split.client.train import Run

Tensor = torch.Tensor
LABEL_STEPS, KNOWN_PER_CLASS = (
    20,
    3,
    # training steps whose gradients are looked at for labels; and how many of each class the server
    # knows
)


@dataclass(frozen=True, eq=False)
class SplitCase:
    """A model and its data: `train` is the client's, `own` the attacker's (other images of the
    kind), `test` is what accuracy is measured on, and the first `attacked` of it are what the
    attacker is after. `mean` and `std` say how pixels in 0..1 become what the model reads; texts
    have none.
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
    """Utility against privacy, for each combination of defences ("none" is the ceiling, and always
    there). `most`: findings on defended features fail where an attack gets more than this share of
    the way from its floor to its ceiling.
    """
    budget = budget or Budget()
    combinations = list(dict.fromkeys((NONE, *combinations)))
    check_case(case, combinations, attacks)
    total = len(combinations) * (1 + len(attacks))
    done = 0

    def tell(now: str) -> None:
        nonlocal done
        if progress:
            progress(done, total, now)
        done += 1

    rows = [
        audit_combination(case, combination, attacks, budget, lpips, pictures, tell)
        for combination in combinations
    ]
    if progress:
        progress(total, total, "")
    own, true = (
        to_pixels(case, part)
        for part in (case.own, case.test.only(np.arange(_attacked_count(case))))
    )
    patch = patch_size(case.model, true)
    measured = Case(
        case.name,
        tuple(rows),
        score_baselines(own, true, patch, lpips, case.run.seed),
        true[:pictures],
    )
    unchecked = [
        f"{a.title}: {type(case.model).__name__} has no patch embedding with a table of positions"
        for a in _untried_attacks(rows, attacks)
    ]
    if lpips is None:
        unchecked.append("LPIPS and F-SIM: the weights of AlexNet were not given (--lpips)")
    elif "LPIPS" not in rows[0].by_attack[next(iter(rows[0].by_attack))].scores:
        unchecked.append("LPIPS and F-SIM: images under 32 x 32 are too small for AlexNet")
    found = report.build_results("What the server learns", [measured], attacks, unchecked)
    judgements = tuple(
        f if f.id.split("/")[1] == NONE else apply_threshold(f, fail_above) for f in found.findings
    )
    return replace(found, findings=judgements)


def check_case(
    case: SplitCase, combinations: Sequence[str], attacks: Sequence[Attack] = ATTACKS
) -> None:
    """Refuse what cannot be, before anything is trained: each combination on the model, with two
    images.
    """
    if not any(a.fits(NONE) for a in attacks):
        raise LeakageError(
            "none of these attacks can try an undefended victim, which is the ceiling: "
            f"{', '.join(a.name for a in attacks) or 'there is none'}",
            hint="add least squares or decoder",
        )
    if len(case.own) < 20:
        raise LeakageError(
            f"an attacker with {len(case.own)} images learns nothing",
            hint="give more data, or a larger share of it to the attacker",
        )
    if _attacked_count(case) < 2:
        raise LeakageError(
            "there is one image to attack, which is always nearest to itself", hint="give more data"
        )
    few = next(
        (c for c in combinations if any(isinstance(d, BatchShuffle) for d in parse_combination(c))),
        None,
    )
    if few is not None and case.run.batch_size < 2:
        raise LeakageError(
            f'"{few}" shuffles tokens between samples, and batches have one',
            hint="--batch-size 2 or more",
        )
    shown = case.test.batch(np.arange(2))[0]["pixel_values"]
    patch_size(case.model, shown)
    for combination in combinations:
        pair = make_split_pair(copy.deepcopy(case.model), combination)
        pair.record_features(shown, 2, "check")


def audit_combination(
    case: SplitCase,
    combination: str,
    attacks: Sequence[Attack],
    budget: Budget,
    lpips: Lpips | None,
    pictures: int,
    notify: Callable[[str], None],
) -> Row:
    """One combination: train, test, watch, attack, score."""
    notify(f"{combination}: train through the split")
    started = time.monotonic()
    seed = case.run.seed
    pair = make_split_pair(copy.deepcopy(case.model), combination, case.training, seed=seed)
    passes = pair.train(case.train, case.run, record_first=min(case.run.steps, LABEL_STEPS))
    found = pair.measure(case.test, max(2, case.run.batch_size))
    seconds = time.monotonic() - started
    seen = case.test.only(np.arange(_attacked_count(case)))
    setting = Setting(combination, budget, max(2, case.run.batch_size), seed)
    views = collect_views(pair, _pixel_values(case.own), _pixel_values(seen), setting.batch, seed)
    true = to_pixels(case, seen)
    attacked: dict[str, AttackScores] = {}
    for attack in attacks:
        notify(f"{combination}: {attack.title}")
        if not attack.fits(combination):
            continue
        tried = attempt(attack, views, setting)
        if tried is not None:
            images = denormalize(tried.images, case.mean, case.std)
            images = images if attack.is_ordered else best_assignment(images, true)
            attacked[attack.name] = AttackScores(
                attack.name,
                score_images(images, true, lpips),
                tried.losses,
                tried.floor,
                tried.seconds,
                images[:pictures].clamp(0, 1),
            )
    guessed = measure_label_leak(passes, case.train, case.run)
    return Row(
        combination,
        found["accuracy"],
        chance_accuracy(case.test),
        seconds,
        attacked,
        (found["accuracy"],),
        guessed,
    )


def measure_label_leak(passes: Sequence[ServerPass], examples: Examples, run: Run) -> float | None:
    """The share of labels that the server tells from the gradients of the first steps, where it
    knows three of each class; of several answers to each example, where it knows a tenth of the
    examples. None where no gradient was seen.
    """
    examples = drop_singleton_batch(examples, run.batch_size)
    slopes = sample_grads(passes)
    if not len(slopes):
        return None
    truth = torch.cat(
        [examples.batch(run.batch_indices(examples, n))[1] for n in range(len(passes))]
    )
    if examples.multi_label:
        known = max(2, len(truth) // 10)
        score = multilabel_attack(
            SentGradients(
                slopes, known_label_sets={i: truth[i].int().tolist() for i in range(known)}
            ),
            examples.classes,
        )
        return float(((score[known:] > 0) == (truth[known:] > 0)).double().mean())
    told = {
        int(i): int(c)
        for c in range(examples.classes)
        for i in (truth == c).nonzero()[:KNOWN_PER_CLASS, 0]
    }
    rest = torch.tensor([i not in told for i in range(len(truth))])
    with torch.random.fork_rng():
        guess = cluster_labels(SentGradients(slopes, told), examples.classes, seed=run.seed)
    return float((guess == truth)[rest].double().mean())


def chance_accuracy(examples: Examples) -> float:
    """What a guess without looking gets: the commonest class; of several answers, the commoner of
    each.
    """
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


def denormalize(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """What a model reads, as pixels in 0..1."""
    shift, scale = (
        torch.tensor(list(v), dtype=images.dtype).view(1, -1, 1, 1) for v in (mean, std)
    )
    return images * scale + shift


def to_pixels(case: SplitCase, examples: Examples) -> Tensor:
    return denormalize(_pixel_values(examples), case.mean, case.std).clamp(0, 1)


def _pixel_values(examples: Examples) -> Tensor:
    return examples.batch(np.arange(len(examples)))[0]["pixel_values"]


def _attacked_count(case: SplitCase) -> int:
    return min(case.attacked, len(case.test))


def _untried_attacks(rows: Sequence[Row], attacks: Sequence[Attack]) -> list[Any]:
    return [
        a
        for a in attacks
        if any(a.fits(row.combination) for row in rows)
        and not any(a.name in row.by_attack for row in rows)
    ]
