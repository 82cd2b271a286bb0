"""The table of attacks on updates: what each is granted, and what it makes of its view. Adding one
is a line.

Attacks of `kind` "images" give images, in no order of their own; "patches" a score for each patch
that it is asked about; "mask" places; "labels" counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

import torch

from regauge.attacks.april import april, is_april
from regauge.attacks.classes import label_counts
from regauge.attacks.descents import (
    DescentConfig,
    DescentResult,
    april_descent,
    dlg,
    gradvit,
    idlg,
    inverting_gradients,
    refine_images,
)
from regauge.attacks.embeddings import embedding_least_squares
from regauge.attacks.membership import Calibration, calibrate, calibrated_membership
from regauge.attacks.regression import RidgeModel, fit_ridge, resemblance, ridge_regression
from regauge.attacks.spans import mask_leak, span_membership
from regauge.attacks.updates import Rehearsal, SentUpdate, Threat
from regauge.data.tasks import Examples
from regauge.errors import UpdateError

Tensor = torch.Tensor
Kind = Literal["images", "patches", "mask", "labels"]
A = TypeVar("A", bound="HasName")
RehearsalSource = Callable[
    [int], Iterable[Rehearsal]
]  # so many updates of the adversary's own, made by the client's code


class HasName(Protocol):
    """What has a name, as attacks on images and on texts have."""

    @property
    def name(self) -> str: ...


@dataclass(frozen=True)
class Budget:
    """What an attack by optimisation may spend."""

    steps: int = 300
    restarts: int = 1
    lr: float = 0.1
    seed: int = 0
    practice: int = 100  # updates that attacks which learn make of their own images


@dataclass(frozen=True)
class Attack:
    """`name` is its id, `title` how it is told, `about` what it does in a line; `threat` what it is
    granted beside model and update. `learn` is done once for all updates of a combination, on a
    view of one of them and on updates of the adversary's own; `run` is then given what it learned.
    """

    name: str
    title: str
    about: str
    kind: Kind
    threat: Threat
    run: Callable[
        ..., tuple[Tensor, Mapping[str, Any]]
    ]  # of the view, the budget, patches that are asked about, and what was learned
    is_slow: bool = False  # a descent: tried on few updates, and where it is asked for
    learn: Callable[[SentUpdate, Budget, RehearsalSource], Any] | None = None


def _run_least_squares(
    view: SentUpdate, budget: Budget, asked: Tensor | None
) -> tuple[Tensor, Mapping[str, Any]]:
    images, solved = embedding_least_squares(view)
    facts = {
        "rank": solved.rank,
        "unknowns": solved.unknowns,
        "condition": solved.condition,
        "residual": solved.residual,
    }
    return images, facts


def _run_span(
    view: SentUpdate, budget: Budget, asked: Tensor | None
) -> tuple[Tensor, Mapping[str, Any]]:
    assert asked is not None
    return span_membership(view, asked), {}


def _calibrate(view: SentUpdate, budget: Budget, practice: RehearsalSource) -> Calibration:
    return calibrate(view)


def _run_membership(
    view: SentUpdate, budget: Budget, asked: Tensor | None, learned: Calibration
) -> tuple[Tensor, Mapping[str, Any]]:
    assert asked is not None
    return calibrated_membership(view, asked, learned), {
        "layer": learned.layer,
        "practice": learned.auc,
    }


def _fit_regression(view: SentUpdate, budget: Budget, practice: RehearsalSource) -> RidgeModel:
    return fit_ridge(practice(budget.practice))


def _run_regression(
    view: SentUpdate, budget: Budget, asked: Tensor | None, learned: RidgeModel
) -> tuple[Tensor, Mapping[str, Any]]:
    return ridge_regression(view, learned), {"features": learned.kind, "left": learned.unexplained}


def _run_resemblance(
    view: SentUpdate, budget: Budget, asked: Tensor | None, learned: RidgeModel
) -> tuple[Tensor, Mapping[str, Any]]:
    assert asked is not None
    return resemblance(view, asked, learned), {}


def _run_mask(
    view: SentUpdate, budget: Budget, asked: Tensor | None
) -> tuple[Tensor, Mapping[str, Any]]:
    return mask_leak(view), {}


def _run_labels(
    view: SentUpdate, budget: Budget, asked: Tensor | None
) -> tuple[Tensor, Mapping[str, Any]]:
    return label_counts(view), {}


def _run_april(
    view: SentUpdate, budget: Budget, asked: Tensor | None
) -> tuple[Tensor, Mapping[str, Any]]:
    if not is_april(view.model):
        raise UpdateError(
            "the first block has a norm and residuals, as every ViT in use: APRIL's closed form "
            "is for one without"
        )
    images, solved = april(view)
    return images, {
        "rank": solved.rank,
        "unknowns": solved.unknowns,
        "condition": solved.condition,
        "residual": solved.residual,
    }


def _make_descent(
    attack: Callable[[SentUpdate, DescentConfig], DescentResult], **how: Any
) -> Callable[..., tuple[Tensor, Mapping[str, Any]]]:
    def run(
        view: SentUpdate, budget: Budget, asked: Tensor | None
    ) -> tuple[Tensor, Mapping[str, Any]]:
        found = attack(
            view,
            DescentConfig(
                steps=budget.steps,
                restarts=budget.restarts,
                lr=budget.lr,
                seed=budget.seed,
                **how,
            ),
        )
        return found.images, {"objective": found.objective, "curve": found.curve}

    return run


def _run_refinement(
    view: SentUpdate, budget: Budget, asked: Tensor | None
) -> tuple[Tensor, Mapping[str, Any]]:
    start, _ = embedding_least_squares(view)
    found = refine_images(
        view,
        start,
        DescentConfig(
            steps=budget.steps,
            lr=budget.lr / 5,
            seed=budget.seed,
            objective="layers",
            tv_weight=0.02,
        ),
    )
    return found.images, {"objective": found.objective}


_OPTIMISED = Threat(batch=True, images=True)
ATTACKS: tuple[Attack, ...] = (
    Attack(
        "least squares",
        "embedding least squares",
        "solves the patch embedding's gradient for the patches, with the positions' gradients "
        "as coefficients: closed form, unmodified models",
        "images",
        Threat(batch=True, images=True),
        _run_least_squares,
    ),
    Attack(
        "span",
        "span membership",
        "asks of a patch whether it lies in the span of what the first layers were given",
        "patches",
        Threat(batch=True),
        _run_span,
    ),
    Attack(
        "regression",
        "learned regression",
        "learns from updates of its own images, made with the client's code and defences, what "
        "updates say of images",
        "images",
        Threat(batch=True, images=True),
        _run_regression,
        learn=_fit_regression,
    ),
    Attack(
        "membership",
        "practised membership",
        "asks of a patch how likely the gradients of the first layers that are sent make it; "
        "layer and softness are learned on updates of its own",
        "patches",
        Threat(batch=True, images=True),
        _run_membership,
        learn=_calibrate,
    ),
    Attack(
        "resemblance",
        "resemblance",
        "asks of a patch whether it is nearer to the regressed image than to the mean image",
        "patches",
        Threat(batch=True, images=True),
        _run_resemblance,
        learn=_fit_regression,
    ),
    Attack(
        "mask",
        "mask from zero rows",
        "reads MJP's mask off the rows of positions whose gradient is zero",
        "mask",
        Threat(),
        _run_mask,
    ),
    Attack(
        "labels",
        "labels and counts",
        "reads the classes of a batch off the head's gradient",
        "labels",
        Threat(batch=True),
        _run_labels,
    ),
    Attack(
        "april",
        "APRIL",
        "solves the first attention's gradients for the tokens; on a model without first norm "
        "and residuals",
        "images",
        Threat(),
        _run_april,
    ),
    Attack(
        "inverting",
        "inverting gradients",
        "descends to smooth images whose gradients point the way of the update's, layer by layer",
        "images",
        _OPTIMISED,
        _make_descent(inverting_gradients, objective="layers", tv_weight=0.02, schedule="cosine"),
        True,
    ),
    Attack(
        "refined",
        "least squares, then descent",
        "goes on from the closed form by a descent",
        "images",
        _OPTIMISED,
        _run_refinement,
        True,
    ),
    Attack(
        "gradvit",
        "GradViT-style",
        "the same with priors for the seams of patches",
        "images",
        _OPTIMISED,
        _make_descent(
            gradvit,
            objective="layers",
            tv_weight=0.02,
            seam_weight=0.02,
            consensus_weight=0.01,
            schedule="cosine",
        ),
        True,
    ),
    Attack(
        "dlg",
        "DLG",
        "descends to images and labels by the distance of gradients",
        "images",
        _OPTIMISED,
        _make_descent(
            dlg, objective="euclidean", signed=False, optimize_labels=True, schedule="none"
        ),
        True,
    ),
    Attack(
        "idlg",
        "iDLG",
        "the same with labels that were read first",
        "images",
        _OPTIMISED,
        _make_descent(idlg, objective="euclidean", signed=False, schedule="none"),
        True,
    ),
    Attack(
        "april descent",
        "APRIL, optimised",
        "the same with the direction of the positions' gradient",
        "images",
        _OPTIMISED,
        _make_descent(april_descent, objective="april", tv_weight=0.01, signed=False),
        True,
    ),
)
QUICK = tuple(
    a for a in ATTACKS if not a.is_slow and a.name != "april"
)  # what an audit tries where nothing else is said


def filter_applicable(
    attacks: Sequence[Attack], examples: Examples
) -> tuple[tuple[Attack, ...], list[str]]:
    """The attacks that can be tried on examples of a kind, and why others are not: classes are
    counted, and descents go by the loss, of one answer to each image.
    """
    out = [a for a in attacks if examples.multi_label and (a.kind == "labels" or a.is_slow)]
    kept = tuple(a for a in attacks if a not in out)
    if out and not kept:
        raise UpdateError(
            f"each image has several answers, and {out[0].title} is for one",
            hint="choose other attacks: least squares, span, regression",
        )
    return kept, [
        f"{a.title}: it is for one answer to each image, and these have several" for a in out
    ]


def resolve_attacks(
    names: Sequence[str] | None, table: Sequence[A], usual: Sequence[A], what: str
) -> tuple[A, ...]:
    """Attacks of a table by their names, in the table's order; "all", alone or among others, is all
    of them; no name: the usual ones.
    """
    known = [a.name for a in table]
    unknown = [n for n in names or () if n not in (*known, "all")]
    if unknown:
        raise UpdateError(
            f'there is no attack "{unknown[0]}" on {what}',
            hint=f"there are: {', '.join(known)}; or all",
        )
    return tuple(a for a in table if "all" in names or a.name in names) if names else tuple(usual)


def select_attacks(names: Sequence[str]) -> tuple[Attack, ...]:
    return tuple(a for a in ATTACKS if a.name in names)


def fit_attack(
    kept: dict[Any, Any],
    attack: Attack,
    view: SentUpdate,
    budget: Budget,
    practice: RehearsalSource,
) -> Any:
    """What an attack learns; it is `kept`, and attacks that learn the same share it. Raises where
    there is nothing to learn.
    """
    assert attack.learn is not None
    if attack.learn not in kept:
        try:
            kept[attack.learn] = attack.learn(view, budget, practice)
        except UpdateError as error:
            kept[attack.learn] = error
    found = kept[attack.learn]
    if isinstance(found, UpdateError):
        raise found
    return found


@dataclass(frozen=True, eq=False)
class Attempt:
    """What one attack made of one update, or why it could not try."""

    attack: str
    output: Tensor | None
    seconds: float
    facts: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""


def attempt(
    attack: Attack,
    view: SentUpdate,
    budget: Budget,
    asked: Tensor | None = None,
    learned: Any = None,
) -> Attempt:
    """Run an attack, which is given what it learned if it learns. Where the update or the model
    lacks what it needs, that is told and is no error: withholding is a defence.
    """
    started = time.monotonic()
    try:
        with torch.random.fork_rng(devices=[]):
            if attack.learn is not None and learned is None:
                raise UpdateError("it learns from updates of its own, and none were made")
            found, facts = (
                attack.run(view, budget, asked)
                if attack.learn is None
                else attack.run(view, budget, asked, learned)
            )
    except UpdateError as error:
        return Attempt(attack.name, None, time.monotonic() - started, reason=str(error))
    return Attempt(attack.name, found.detach(), time.monotonic() - started, facts)
