"""The audit: for each combination of defences some updates are made, attacked, and scored against
what the client kept.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from regauge.attacks.membership import auc
from regauge.attacks.updates import SentUpdate
from regauge.audit.gradients import report
from regauge.audit.gradients.attempts import (
    QUICK,
    Attack,
    Attempt,
    Budget,
    attempt,
    filter_applicable,
    fit_attack,
)
from regauge.audit.gradients.clients import (
    Truth,
    build_view,
    cast_inputs,
    contribute,
    prepare_model,
    rehearse,
    sample_rehearsals,
)
from regauge.audit.gradients.scores import (
    LEAK,
    Case,
    ImageScores,
    Row,
    extract_patches,
    label_recall,
    score_reconstructions,
)
from regauge.audit.split.engine import denormalize
from regauge.audit.split.scores import OTHERS, LeakageError, Scores, mean_score
from regauge.audit.split.scores import best_assignment as by_name
from regauge.core.progress import Progress
from regauge.data.tasks import Examples
from regauge.defences.gradients import Plan, parse_plan
from regauge.defences.parser import NONE
from regauge.errors import UpdateError, need
from regauge.jigsaw.layers import Layers, find_layers
from regauge.results.findings import Results, apply_threshold
from regauge.results.metrics import Lpips

Tensor = torch.Tensor
MAX_CANDIDATES = 400  # patches of other images that span membership is asked about, at most
MAX_OWN_IMAGES = 500  # images that the attacker takes statistics of, at most
REHEARSALS = 4


@dataclass(frozen=True, eq=False)
class GradientCase:
    """A model of images and its data: `victims` are the clients', `own` the attacker's (other
    images of the kind). `mean` and `std` say how pixels in 0..1 become what the model reads.
    `updates` are attacked, each of `batch` images and `steps` local steps where a combination does
    not say otherwise. `stages` are the same model at other times of its training, for a curve.
    """

    model: torch.nn.Module
    victims: Examples
    own: Examples
    mean: Sequence[float]
    std: Sequence[float]
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
    """What updates give away under each combination ("none" is the ceiling, and always there),
    against the size of the batch, and against training. Attacks by descent are tried on the first
    `optimised` updates of each. `most`: findings on defended updates fail where an attack gets more
    than this share of the way from its floor to its ceiling.
    """
    budget = budget or Budget(seed=case.seed)
    combinations = list(dict.fromkeys((NONE, *combinations)))
    check_case(case, [*combinations, *(f"batch={b}" for b in batches)])
    wanted = attacks
    attacks, unfit = filter_applicable(wanted, case.victims)
    closed = [a for a in attacks if not a.is_slow]  # what curves are drawn by
    total = (
        len(combinations) * len(attacks)
        + len(batches) * len(closed)
        + len(case.stages) * len(combinations) * len(closed)
    )
    done = 0

    def tell(now: str) -> None:
        nonlocal done
        if progress:
            progress(done, total, now)
        done += 1

    rows = tuple(
        audit_combination(case, case.model, c, attacks, budget, lpips, pictures, tell, optimised)
        for c in combinations
    )
    sizes = {
        b: audit_combination(case, case.model, f"batch={b}", closed, budget, None, 0, tell)
        for b in batches
    }
    stages = {
        name: [audit_combination(case, m, c, closed, budget, None, 0, tell) for c in combinations]
        for name, m in case.stages.items()
    }
    if progress:
        progress(total, total, "")
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
    unchecked += unfit
    if not any(a.is_slow for a in wanted):
        unchecked.append("attacks by descent: none was chosen (--attacks inverting, or all)")
    found = report.build_results("What updates give away", [measured], attacks, unchecked)
    return replace(
        found,
        findings=tuple(
            f if f"/{NONE}/" in f.id else apply_threshold(f, fail_above) for f in found.findings
        ),
    )


def check_case(case: GradientCase, combinations: Sequence[str]) -> None:
    """Refuse what cannot be before anything is attacked."""
    if len(case.own) < 2:
        raise LeakageError(
            f"an attacker with {len(case.own)} images of its own has no mean image to compare with",
            hint="give more data",
        )
    find_layers(case.model, tuple(_pixel_values(case.own.only([0])).shape[1:]))
    if any(_parse_plan(case, c).private for c in combinations):
        need("dp_accounting", "privacy")  # an epsilon is told at the end
    for combination in combinations:
        plan = _parse_plan(case, combination)
        needed = plan.samples * plan.clients
        if needed > len(case.victims):
            raise LeakageError(
                f'one update under "{combination}" takes {needed} images, and the clients have '
                f"{len(case.victims)}",
                hint="more data, or fewer",
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
    """One combination: make updates, attack each, score."""
    plan = _parse_plan(case, combination)
    made = make_updates(case, model, plan)
    mine, apart = split_own_images(case.own)
    own = _pixel_values(mine.only(np.arange(min(MAX_OWN_IMAGES, len(mine)))))
    rehearsals = tuple(rehearse(made[0][0], plan, mine, REHEARSALS, case.seed * 1000 + 500))
    scores: dict[str, ImageScores] = {}
    told: dict[str, list[float]] = {"mask": [], "labels": []}
    patches: dict[str, list[float]] = {}
    why: dict[str, str] = {}
    lessons: dict[Any, Any] = {}

    def learned_by(attack: Attack) -> Any:
        seen = build_view(made[0][0], plan, made[0][1], made[0][2], attack.threat, own, rehearsals)
        return fit_attack(
            lessons,
            attack,
            seen,
            budget,
            lambda n: sample_rehearsals(made[0][0], plan, mine, n, case.seed * 1000 + 700),
        )

    for attack in attacks:
        notify(f"{combination}: {attack.title}")
        tried: list[tuple[Attempt, Truth]] = []
        try:
            learned = None if attack.learn is None else learned_by(attack)
        except UpdateError as error:
            why[attack.name] = str(error)
            continue
        for n, (sent_model, update, truth) in enumerate(
            made[:optimised] if attack.is_slow else made
        ):
            view = build_view(sent_model, plan, update, truth, attack.threat, own, rehearsals)
            asked, inside = (
                sample_candidates(view, truth, apart, case.seed + n)
                if attack.kind == "patches"
                else (None, 0)
            )
            one = attempt(attack, view, replace(budget, seed=budget.seed + n), asked, learned)
            if one.output is None:
                why[attack.name] = one.reason
                break
            tried.append((one, truth))
            if attack.kind == "patches":
                patches.setdefault(attack.name, []).append(
                    auc(one.output[:inside], one.output[inside:])
                )
            elif attack.kind == "mask" and truth.puzzle is not None:
                told["mask"].append(float((one.output == truth.puzzle.mask[0]).double().mean()))
            elif attack.kind == "labels":
                told["labels"].append(label_recall(one.output, truth.labels))
        if attack.kind == "images" and tried and attack.name not in why:
            scores[attack.name] = _score_attempts(case, attack.name, tried, lpips, pictures)
    read = (
        torch.cat([truth.read["pixel_values"] for _, _, truth in made])[:pictures]
        if pictures and made[0][2].puzzle is not None
        else None
    )
    return Row(
        combination,
        scores,
        max(patches.values(), key=statistics.fmean, default=[]),
        told["mask"],
        told["labels"],
        plan.private.epsilon() if plan.private is not None else None,
        plan.samples * plan.clients,
        why,
        None if read is None else denormalize(read.float(), case.mean, case.std).clamp(0, 1),
        floor=mean_score(
            _score_mean_image(case, len(made) * plan.samples * plan.clients, None), LEAK
        ),
    )


def make_updates(
    case: GradientCase, model: torch.nn.Module, plan: Plan
) -> list[tuple[torch.nn.Module, Any, Truth]]:
    """Updates of the first victims, as many as there are images for: the model that both sides
    have, the update, the truth.
    """
    there = prepare_model(model, plan)
    size = plan.samples * plan.clients
    count = max(1, min(case.updates, len(case.victims) // size))
    out = []
    for n in range(count):
        inputs, labels = case.victims.batch(np.arange(n * size, (n + 1) * size))
        labels = labels.to(next(there.parameters()).device)
        update, truth = contribute(
            there, plan, case.victims, cast_inputs(there, inputs), labels, case.seed * 1000 + n
        )
        out.append((there, update, truth))
    return out


def _score_attempts(
    case: GradientCase,
    name: str,
    tried: Sequence[tuple[Attempt, Truth]],
    lpips: Lpips | None,
    pictures: int,
) -> ImageScores:
    kept: dict[str, list[Tensor]] = {"original": [], "read": [], "by original": [], "by read": []}
    for one, truth in tried:
        assert one.output is not None
        found = denormalize(one.output.float().cpu(), case.mean, case.std).clamp(0, 1)
        for what, inputs in (("original", truth.original), ("read", truth.read)):
            true = denormalize(inputs["pixel_values"].float().cpu(), case.mean, case.std).clamp(
                0, 1
            )
            kept[what].append(true)
            kept[f"by {what}"].append(by_name(found, true))
    true, read, found, shuffled = (
        torch.cat(kept[k]) for k in ("original", "read", "by original", "by read")
    )
    shuffles = not torch.equal(true, read)
    original = score_reconstructions(found, true, lpips)
    seconds = sum(one.seconds for one, _ in tried) / len(tried)
    against = score_reconstructions(shuffled, read, lpips) if shuffles else original
    return ImageScores(
        name, original, against, seconds, found[:pictures], [one.facts for one, _ in tried]
    )


def split_own_images(own: Examples) -> tuple[Examples, Tensor]:
    """The adversary's images, and some that it is not given: patches of these are what members of a
    batch are told apart from. If it had seen them, it would know them by that.
    """
    kept = len(own) if len(own) < 8 else len(own) - min(100, len(own) // 4)
    return own.only(np.arange(kept)), _pixel_values(
        own.only(np.arange(kept if kept < len(own) else 0, len(own)))
    )


def sample_candidates(view: SentUpdate, truth: Truth, own: Tensor, seed: int) -> tuple[Tensor, int]:
    """Patches of the batch, and as many of other images, for membership; and how many are of the
    batch.
    """
    side = _patch_layers(view).patch[0]
    true = extract_patches(truth.read["pixel_values"].cpu(), side)
    draw = torch.Generator().manual_seed(seed)
    true = true[torch.randperm(len(true), generator=draw)[:MAX_CANDIDATES]]
    others = extract_patches(own, side)
    others = others[torch.randperm(len(others), generator=draw)[: len(true)]]
    return torch.cat([true, others]), len(true)


def score_baselines(case: GradientCase, lpips: Lpips | None) -> dict[str, Any]:
    """What costs an attacker nothing, against the victims that "none" attacks: the mean of its own
    images; and where an update is of several images, so that nobody says which is which, images of
    its own by the best naming.
    """
    found = {"the mean image": _score_mean_image(case, case.updates * case.batch, lpips)}
    if case.batch > 1:
        true, own = (
            to_pixels(case, _first_victims(case, case.updates * case.batch)),
            to_pixels(case, case.own),
        )
        own = own.repeat(-(-len(true) // len(own)), 1, 1, 1)[: len(true)]
        pairs = zip(torch.split(own, case.batch), torch.split(true, case.batch), strict=True)
        found[OTHERS] = score_reconstructions(
            torch.cat([by_name(a, b) for a, b in pairs]), true, lpips
        )
    return found


def _score_mean_image(case: GradientCase, count: int, lpips: Lpips | None) -> Scores:
    true = to_pixels(case, _first_victims(case, count))
    own = to_pixels(case, case.own).mean(0, keepdim=True).expand_as(true)
    return score_reconstructions(own, true, lpips)


def to_pixels(case: GradientCase, examples: Examples) -> Tensor:
    return denormalize(_pixel_values(examples), case.mean, case.std).clamp(0, 1)


def _first_victims(case: GradientCase, count: int) -> Examples:
    return case.victims.only(np.arange(min(count, len(case.victims))))


def _pixel_values(examples: Examples) -> Tensor:
    return examples.batch(np.arange(len(examples)))[0]["pixel_values"]


def _parse_plan(case: GradientCase, combination: str) -> Plan:
    return parse_plan(combination, case.batch, case.steps, case.lr)


def _patch_layers(view: SentUpdate) -> Layers:
    found = find_layers(view.model, view.shape)
    if found.patch[0] != found.patch[1]:
        raise UpdateError(f"patches of {found.patch[0]} x {found.patch[1]} are not square")
    return found
