"""The image audit: make, attack and score updates for each combination of defences."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from regauge.attacks.membership import auc
from regauge.attacks.updates import SentUpdate, Update
from regauge.audit.engine import (
    Attack,
    Attempt,
    Steps,
    apply_verdicts,
    pixel_values,
    to_pixels,
    with_undefended,
)
from regauge.audit.gradient_audit import report
from regauge.audit.gradient_audit.attempts import (
    QUICK,
    Budget,
    attempt,
    filter_applicable,
    fit_attack,
)
from regauge.audit.gradient_audit.clients import (
    Truth,
    build_view,
    contribute_rows,
    prepare_model,
    rehearse,
    sample_rehearsals,
)
from regauge.audit.gradient_audit.scores import (
    LEAK,
    Row,
    extract_patches,
    label_recall,
    score_reconstructions,
)
from regauge.audit.scores import (
    MEAN_IMAGE,
    OTHERS,
    AttackScores,
    Case,
    Scores,
    best_assignment,
    mean_score,
)
from regauge.core.progress import Progress
from regauge.data.tasks import Examples
from regauge.defences.gradients import Plan, parse_plan
from regauge.errors import AuditError, UpdateError, need
from regauge.jigsaw.layers import Layers, find_layers
from regauge.results.findings import Results
from regauge.results.metrics import Lpips

Tensor = torch.Tensor
MAX_CANDIDATES = 400  # candidate patches of the batch for membership, and as many of other images
MAX_OWN_IMAGES = 500  # of the attacker, for statistics
REHEARSALS = 4  # for the calibration of attacks


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


def audit_gradients(
    case: GradientCase,
    combinations: Sequence[str],
    *,
    attacks: Sequence[Attack] = QUICK,
    budget: Budget | None = None,
    optimised: int = 2,
    batches: Sequence[int] = (),
    lpips: Lpips | None = None,
    pictures: int = 6,
    fail_above: float | None = None,
    progress: Progress | None = None,
) -> Results:
    """Measure the leakage of updates under each combination of defences.

    Args:
        case: The model and its data.
        combinations: Combinations of defences; "none", the ceiling, is always added.
        attacks: The attacks to run.
        budget: The budget of attacks that optimise or learn.
        optimised: The number of updates on which slow attacks are run.
        batches: Further batch sizes, without a defence, for a curve.
        lpips: The LPIPS network; without it LPIPS is skipped.
        pictures: The number of images in the gallery.
        fail_above: Fail a finding on defended updates if its attack gets further than this share
            of the way from floor to ceiling.
        progress: Progress callback.

    Raises:
        AuditError: The case cannot be audited.
    """
    budget = budget or Budget(seed=case.seed)
    combinations = with_undefended(combinations)
    check_case(case, [*combinations, *(f"batch={size}" for size in batches)])
    requested = attacks
    attacks, skipped = filter_applicable(requested, case.victims)
    closed = [a for a in attacks if not a.is_slow]  # the attacks of the curves
    total = (
        len(combinations) * len(attacks)
        + len(batches) * len(closed)
        + len(case.stages) * len(combinations) * len(closed)
    )
    notify = Steps(total, progress)
    rows = tuple(
        audit_combination(
            case, case.model, combination, attacks, budget, lpips, pictures, notify, optimised
        )
        for combination in combinations
    )
    sizes = {
        size: audit_combination(case, case.model, f"batch={size}", closed, budget, None, 0, notify)
        for size in batches
    }
    stages = {
        name: [
            audit_combination(case, stage_model, combination, closed, budget, None, 0, notify)
            for combination in combinations
        ]
        for name, stage_model in case.stages.items()
    }
    notify.finish()
    measured = Case(
        case.name,
        rows,
        score_baselines(case, lpips),
        to_pixels(case, _first_victims(case, pictures)) if pictures else None,
        sizes,
        stages,
    )
    unchecked = (
        [] if lpips is not None else ["LPIPS: the weights of AlexNet were not given (--lpips)"]
    )
    unchecked += skipped
    if not any(a.is_slow for a in requested):
        unchecked.append("attacks by descent: not selected (--attacks inverting, or all)")
    results = report.build_results("What updates give away", [measured], attacks, unchecked)
    return apply_verdicts(results, fail_above)


def check_case(case: GradientCase, combinations: Sequence[str]) -> None:
    """Check a case before anything is attacked.

    Raises:
        AuditError: There are too few images.
    """
    if len(case.own) < 2:
        raise AuditError(
            f"the attacker must have >= 2 images of its own, got {len(case.own)}",
            hint="pass more data",
        )
    find_layers(case.model, tuple(pixel_values(case.own.only([0])).shape[1:]))
    if any(_parse_plan(case, c).private for c in combinations):
        need("dp_accounting", "privacy")  # for the epsilon of the report
    for combination in combinations:
        plan = _parse_plan(case, combination)
        needed = plan.samples * plan.clients
        if needed > len(case.victims):
            raise AuditError(
                f'clients must have >= {needed} images for an update under "{combination}", got '
                f"{len(case.victims)}",
                hint="pass more data, or a smaller batch",
            )


def audit_combination(
    case: GradientCase,
    model: torch.nn.Module,
    combination: str,
    attacks: Sequence[Attack],
    budget: Budget,
    lpips: Lpips | None,
    pictures: int,
    notify: Callable[[str], None],
    optimised: int = 2,
) -> Row:
    """Make updates under one combination, attack each, and score the attacks.

    Args:
        case: The data.
        model: The model.
        combination: The defences.
        attacks: The attacks to run.
        budget: The budget of attacks that optimise or learn.
        lpips: The LPIPS network; None: without LPIPS.
        pictures: The number of images in the gallery.
        notify: Called with a description before each attack.
        optimised: The number of updates on which slow attacks are run.
    """
    plan = _parse_plan(case, combination)
    updates = list(make_updates(case, model, plan))
    own_examples, others = split_own_images(case.own)
    own = pixel_values(own_examples.only(np.arange(min(MAX_OWN_IMAGES, len(own_examples)))))
    rehearsals = tuple(
        rehearse(updates[0][0], plan, own_examples, REHEARSALS, case.seed * 1000 + 500)
    )
    scores: dict[str, AttackScores] = {}
    recovered: dict[str, list[float]] = {}
    reasons: dict[str, str] = {}
    fitted: dict[Any, Any] = {}

    def fit(attack: Attack) -> Any:
        view = build_view(
            updates[0][0], plan, updates[0][1], updates[0][2], attack.threat, own, rehearsals
        )
        return fit_attack(
            fitted,
            attack,
            view,
            budget,
            lambda n: sample_rehearsals(
                updates[0][0], plan, own_examples, n, case.seed * 1000 + 700
            ),
        )

    for attack in attacks:
        notify(f"{combination}: {attack.title}")
        attempts: list[tuple[Attempt, Truth]] = []
        try:
            learned = None if attack.learn is None else fit(attack)
        except UpdateError as error:
            reasons[attack.name] = str(error)
            continue
        for n, (sent_model, update, truth) in enumerate(
            updates[:optimised] if attack.is_slow else updates
        ):
            view = build_view(sent_model, plan, update, truth, attack.threat, own, rehearsals)
            result, score = attack_update(
                attack,
                view,
                truth,
                others,
                replace(budget, seed=budget.seed + n),
                case.seed + n,
                learned,
            )
            if result.output is None:
                reasons[attack.name] = result.reason
                break
            attempts.append((result, truth))
            if score is not None:
                recovered.setdefault(attack.name, []).append(score)
        if attack.kind == "images" and attempts and attack.name not in reasons:
            scores[attack.name] = _score_attempts(case, attack.name, attempts, lpips, pictures)
    read = (
        torch.cat([truth.read["pixel_values"] for _, _, truth in updates])[:pictures]
        if pictures and updates[0][2].puzzle is not None
        else None
    )
    patches, mask, labels = (
        max(
            (recovered[a.name] for a in attacks if a.kind == kind and a.name in recovered),
            key=statistics.fmean,
            default=[],
        )
        for kind in ("patches", "mask", "labels")
    )
    return Row(
        combination,
        scores,
        patches,
        mask,
        labels,
        plan.private.epsilon() if plan.private is not None else None,
        plan.samples * plan.clients,
        reasons,
        None if read is None else to_pixels(case, read),
        floor=mean_score(
            _score_mean_image(case, len(updates) * plan.samples * plan.clients, None), LEAK
        ),
    )


def attack_update(
    attack: Attack,
    view: SentUpdate,
    truth: Truth,
    others: Tensor,
    budget: Budget,
    seed: int,
    learned: Any = None,
) -> tuple[Attempt, float | None]:
    """Run an attack on one update, and score it unless it recovers images.

    Args:
        attack: The attack.
        view: The update and what is granted.
        truth: The samples of the client.
        others: Images that the attacker does not have, for non-members.
        budget: The budget of attacks that optimise or learn.
        seed: The random seed of the candidate patches.
        learned: The result of `fit_attack` for attacks that learn.

    Returns:
        The attempt, and the AUC of patches, or the recovered share of the mask or the labels.
    """
    candidates, members = (
        sample_candidates(view, truth, others, seed) if attack.kind == "patches" else (None, 0)
    )
    result = attempt(attack, view, budget, candidates, learned)
    output, score = result.output, None
    if output is not None and attack.kind == "patches":
        score = auc(output[:members], output[members:])
    elif output is not None and attack.kind == "labels":
        score = label_recall(output, truth.labels)
    elif output is not None and attack.kind == "mask" and truth.puzzle is not None:
        score = float((output == truth.puzzle.mask[0]).double().mean())
    return result, score


def make_updates(
    case: GradientCase, model: torch.nn.Module, plan: Plan
) -> Iterator[tuple[torch.nn.Module, Update, Truth]]:
    """Yield updates of the first victims: the model of both sides, the update, and the truth."""
    prepared, size = prepare_model(model, plan), plan.samples * plan.clients
    for n in range(max(1, min(case.updates, len(case.victims) // size))):
        rows = np.arange(n * size, (n + 1) * size)
        seed = case.seed * 1000 + n
        yield prepared, *contribute_rows(prepared, plan, case.victims, rows, seed)


def _score_attempts(
    case: GradientCase,
    name: str,
    attempts: Sequence[tuple[Attempt, Truth]],
    lpips: Lpips | None,
    pictures: int,
) -> AttackScores:
    sides: list[list[Tensor]] = [[], [], [], []]
    for result, truth in attempts:
        guesses = to_pixels(case, result.output)
        original, read = (
            to_pixels(case, inputs["pixel_values"]) for inputs in (truth.original, truth.read)
        )
        matched = (best_assignment(guesses, images) for images in (original, read))
        for side, images in zip(sides, (original, read, *matched), strict=True):
            side.append(images)
    originals, inputs_read, by_original, by_read = (torch.cat(side) for side in sides)
    return AttackScores(
        name,
        score_reconstructions(by_original, originals, lpips),
        (),
        0.0,
        statistics.fmean(result.seconds for result, _ in attempts),
        by_original[:pictures],
        read=None
        if torch.equal(originals, inputs_read)
        else score_reconstructions(by_read, inputs_read, lpips),
        facts=[result.facts for result, _ in attempts],
    )


def split_own_images(own: Examples) -> tuple[Examples, Tensor]:
    """Return the adversary's images, and held-out images for non-members in membership attacks.

    An adversary that had the non-members would recognise them as such.
    """
    count = len(own) if len(own) < 8 else len(own) - min(100, len(own) // 4)
    return own.only(np.arange(count)), pixel_values(
        own.only(np.arange(count if count < len(own) else 0, len(own)))
    )


def sample_candidates(
    view: SentUpdate, truth: Truth, other_images: Tensor, seed: int
) -> tuple[Tensor, int]:
    """Return candidate patches, and how many of them, the first ones, are members.

    Members are patches of the batch; the others are as many patches of other images.
    """
    side = _patch_layers(view).patch[0]
    members = extract_patches(truth.read["pixel_values"].cpu(), side)
    generator = torch.Generator().manual_seed(seed)
    members = members[torch.randperm(len(members), generator=generator)[:MAX_CANDIDATES]]
    others = extract_patches(other_images, side)
    others = others[torch.randperm(len(others), generator=generator)[: len(members)]]
    return torch.cat([members, others]), len(members)


def score_baselines(case: GradientCase, lpips: Lpips | None) -> dict[str, Any]:
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
        scores[OTHERS] = score_reconstructions(
            torch.cat([best_assignment(guesses, targets) for guesses, targets in pairs]),
            images,
            lpips,
        )
    return scores


def _score_mean_image(case: GradientCase, count: int, lpips: Lpips | None) -> Scores:
    images = to_pixels(case, _first_victims(case, count))
    guesses = to_pixels(case, case.own).mean(0, keepdim=True).expand_as(images)
    return score_reconstructions(guesses, images, lpips)


def _first_victims(case: GradientCase, count: int) -> Examples:
    return case.victims.only(np.arange(min(count, len(case.victims))))


def _parse_plan(case: GradientCase, combination: str) -> Plan:
    return parse_plan(combination, case.batch, case.steps, case.lr)


def _patch_layers(view: SentUpdate) -> Layers:
    layers = find_layers(view.model, view.shape)
    if layers.patch[0] != layers.patch[1]:
        raise UpdateError(f"patches must be square, got {layers.patch[0]} x {layers.patch[1]}")
    return layers
