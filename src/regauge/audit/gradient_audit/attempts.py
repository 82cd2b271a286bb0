"""The tables of attacks on updates of images and of texts: what each is granted, and how it is run.

Adding an attack is one line. Attacks of `kind` "images" return images in any order; "patches" a
score for each candidate patch; "mask" the masked positions; "labels" counts of classes; "texts" the
tokens of each text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
from regauge.attacks.subspaces import exact_search, tag, token_membership
from regauge.attacks.tables import locate_words
from regauge.attacks.updates import Rehearsal, SentUpdate, Threat
from regauge.audit import engine
from regauge.audit.engine import Attack, Attempt
from regauge.core.progress import Progress
from regauge.data.tasks import Examples
from regauge.errors import UpdateError

Tensor = torch.Tensor
RehearsalSource = Callable[[int], Iterable[Rehearsal]]  # make so many rehearsals


@dataclass(frozen=True)
class Budget:
    """The budget of attacks that optimize or learn."""

    steps: int = 300
    restarts: int = 1
    lr: float = 0.1
    seed: int = 0
    practice: int = 100  # rehearsals of attacks that learn
    progress: Progress | None = field(default=None, compare=False, repr=False)


Recovered = tuple[Tensor, Mapping[str, Any]]  # what is recovered, and facts such as the rank


def _run_least_squares(view: SentUpdate, budget: Budget, candidates: Tensor | None) -> Recovered:
    return _describe(*embedding_least_squares(view))


def _describe(images: Tensor, solution: Any) -> Recovered:
    """Return images with the facts of the system that was solved."""
    names = ("rank", "unknowns", "condition", "residual")
    return images, {name: getattr(solution, name) for name in names}


def _run_span(view: SentUpdate, budget: Budget, candidates: Tensor | None) -> Recovered:
    assert candidates is not None
    return span_membership(view, candidates), {}


def _calibrate(view: SentUpdate, budget: Budget, rehearsals: RehearsalSource) -> Calibration:
    return calibrate(view)


def _run_membership(
    view: SentUpdate, budget: Budget, candidates: Tensor | None, calibration: Calibration
) -> Recovered:
    assert candidates is not None
    return calibrated_membership(view, candidates, calibration), {
        "layer": calibration.layer,
        "practice": calibration.auc,
    }


def _fit_regression(view: SentUpdate, budget: Budget, rehearsals: RehearsalSource) -> RidgeModel:
    return fit_ridge(rehearsals(budget.practice))


def _run_regression(
    view: SentUpdate, budget: Budget, candidates: Tensor | None, ridge: RidgeModel
) -> Recovered:
    return ridge_regression(view, ridge), {"features": ridge.kind, "left": ridge.unexplained}


def _run_resemblance(
    view: SentUpdate, budget: Budget, candidates: Tensor | None, ridge: RidgeModel
) -> Recovered:
    assert candidates is not None
    return resemblance(view, candidates, ridge), {}


def _run_mask(view: SentUpdate, budget: Budget, candidates: Tensor | None) -> Recovered:
    return mask_leak(view), {}


def _run_labels(view: SentUpdate, budget: Budget, candidates: Tensor | None) -> Recovered:
    return label_counts(view), {}


def _run_april(view: SentUpdate, budget: Budget, candidates: Tensor | None) -> Recovered:
    if not is_april(view.model):
        raise UpdateError(
            "the first block must have neither norm nor residuals for APRIL's closed form; every "
            "ViT in use has both"
        )
    return _describe(*april(view))


def _make_descent(
    attack: Callable[[SentUpdate, DescentConfig], DescentResult], **options: Any
) -> Callable[..., Recovered]:
    """Return an attack by gradient descent with these options of `DescentConfig`."""

    def run(view: SentUpdate, budget: Budget, candidates: Tensor | None) -> Recovered:
        config = DescentConfig(
            steps=budget.steps,
            restarts=budget.restarts,
            lr=budget.lr,
            seed=budget.seed,
            progress=budget.progress,
            **options,
        )
        result = attack(view, config)
        return result.images, {"objective": result.objective, "curve": result.curve}

    return run


def _run_refinement(view: SentUpdate, budget: Budget, candidates: Tensor | None) -> Recovered:
    start, _ = embedding_least_squares(view)
    result = refine_images(
        view,
        start,
        DescentConfig(
            steps=budget.steps,
            lr=budget.lr / 5,
            seed=budget.seed,
            objective="layers",
            tv_weight=0.02,
            progress=budget.progress,
        ),
    )
    return result.images, {"objective": result.objective}


def _as_texts(attack: Callable[[SentUpdate], Sequence[Tensor]]) -> Callable[..., Any]:
    """Return an attack on texts in the form of the table."""

    def run(view: SentUpdate, budget: Budget, candidates: Tensor | None) -> Any:
        return [text.tolist() for text in attack(view)], {}

    return run


_OPTIMIZED = Threat(batch=True, images=True)
ATTACKS: tuple[Attack, ...] = (
    Attack(
        "least squares",
        "embedding least squares",
        "solves the patch embedding's gradient for the patches, with the positions' gradients "
        "as coefficients: closed form, unmodified models",
        _run_least_squares,
        "images",
        threat=Threat(batch=True, images=True),
    ),
    Attack(
        "span",
        "span membership",
        "tests whether a patch lies in the span of the inputs of the first layers",
        _run_span,
        "patches",
        threat=Threat(batch=True),
    ),
    Attack(
        "regression",
        "learned regression",
        "learns the map from updates to images on updates of its own images, made with the "
        "client's code and defences",
        _run_regression,
        "images",
        threat=Threat(batch=True, images=True),
        learn=_fit_regression,
    ),
    Attack(
        "membership",
        "practised membership",
        "scores a patch by its likelihood under the gradients of the first layers that are sent; "
        "layer and noise level are learned on its own updates",
        _run_membership,
        "patches",
        threat=Threat(batch=True, images=True),
        learn=_calibrate,
    ),
    Attack(
        "resemblance",
        "resemblance",
        "tests whether a patch is nearer to the regressed image than to the mean image",
        _run_resemblance,
        "patches",
        threat=Threat(batch=True, images=True),
        learn=_fit_regression,
    ),
    Attack(
        "mask",
        "mask from zero rows",
        "reads MJP's mask from the zero rows of the position gradient",
        _run_mask,
        "mask",
        threat=Threat(),
    ),
    Attack(
        "labels",
        "labels and counts",
        "reads the classes of a batch from the gradient of the head",
        _run_labels,
        "labels",
        threat=Threat(batch=True),
    ),
    Attack(
        "april",
        "APRIL",
        "solves the gradients of the first attention for the tokens; for a model without first "
        "norm and residuals",
        _run_april,
        "images",
        threat=Threat(),
    ),
    Attack(
        "inverting",
        "inverting gradients",
        "optimizes smooth images whose gradients are parallel to the update's, layer by layer",
        _make_descent(inverting_gradients, objective="layers", tv_weight=0.02, schedule="cosine"),
        "images",
        threat=_OPTIMIZED,
        is_slow=True,
    ),
    Attack(
        "refined",
        "least squares, then descent",
        "refines the closed form by gradient descent",
        _run_refinement,
        "images",
        threat=_OPTIMIZED,
        is_slow=True,
    ),
    Attack(
        "gradvit",
        "GradViT-style",
        "the same with priors for the seams of patches",
        _make_descent(
            gradvit,
            objective="layers",
            tv_weight=0.02,
            seam_weight=0.02,
            consensus_weight=0.01,
            schedule="cosine",
        ),
        "images",
        threat=_OPTIMIZED,
        is_slow=True,
    ),
    Attack(
        "dlg",
        "DLG",
        "optimizes images and labels by the distance of gradients",
        _make_descent(
            dlg, objective="euclidean", signed=False, optimize_labels=True, schedule="none"
        ),
        "images",
        threat=_OPTIMIZED,
        is_slow=True,
    ),
    Attack(
        "idlg",
        "iDLG",
        "the same with labels from the gradient of the head",
        _make_descent(idlg, objective="euclidean", signed=False, schedule="none"),
        "images",
        threat=_OPTIMIZED,
        is_slow=True,
    ),
    Attack(
        "april descent",
        "APRIL, optimized",
        "the same with the direction of the positions' gradient",
        _make_descent(april_descent, objective="april", tv_weight=0.01, signed=False),
        "images",
        threat=_OPTIMIZED,
        is_slow=True,
    ),
)
# The default of an audit.
QUICK = tuple(a for a in ATTACKS if not a.is_slow and a.name != "april")
TEXT_ATTACKS: tuple[Attack, ...] = (
    Attack(
        "search",
        "exact search",
        "searches the texts whose tokens lie in the spans of the gradients of the first two layers",
        _as_texts(exact_search),
        "texts",
        threat=Threat(batch=True, length=True),
    ),
    Attack(
        "tables",
        "words in their places",
        "matches rows of the gradients of the word table and the position table",
        _as_texts(locate_words),
        "texts",
        threat=Threat(batch=True),
    ),
    Attack(
        "words",
        "words by zero rows",
        "reads the bag of words from the rows of the word table's gradient that are not zero",
        _as_texts(lambda view: [token_membership(view).nonzero()[:, 0]]),
        "texts",
        is_ordered=False,
    ),
    Attack(
        "tag",
        "TAG",
        "optimizes embeddings by the distance of gradients, and takes the nearest words",
        _as_texts(tag),
        "texts",
        threat=Threat(batch=True, length=True),
        is_slow=True,
    ),
    next(a for a in ATTACKS if a.name == "labels"),
)


def filter_applicable(
    attacks: Sequence[Attack], examples: Examples
) -> tuple[tuple[Attack, ...], list[str]]:
    """Return the attacks that apply to the examples, and the reasons why others do not.

    Label counts and descents need one label for each image. The labels of a language model are its
    texts.

    Raises:
        UpdateError: No attack applies.
    """
    attacks = [a for a in attacks if a.kind != "labels" or examples.classifies]
    excluded = [a for a in attacks if examples.multi_label and (a.kind == "labels" or a.is_slow)]
    applicable = tuple(a for a in attacks if a not in excluded)
    if excluded and not applicable:
        raise UpdateError(
            f"images must have one label each for {excluded[0].title}, got several",
            hint="choose other attacks: least squares, span, regression",
        )
    return applicable, [
        f"{a.title}: images must have one label each, got several" for a in excluded
    ]


def fit_attack(
    cache: dict[Any, Any],
    attack: Attack,
    view: SentUpdate,
    budget: Budget,
    rehearsals: RehearsalSource,
) -> Any:
    """Fit an attack, or return the cached result; attacks with the same `learn` share it.

    Raises:
        UpdateError: The attack cannot be fitted; the error is cached too.
    """
    assert attack.learn is not None
    if attack.learn not in cache:
        try:
            cache[attack.learn] = attack.learn(view, budget, rehearsals)
        except UpdateError as error:
            cache[attack.learn] = error
    fitted = cache[attack.learn]
    if isinstance(fitted, UpdateError):
        raise fitted
    return fitted


def attempt(
    attack: Attack,
    view: SentUpdate,
    budget: Budget,
    candidates: Tensor | None = None,
    learned: Any = None,
) -> Attempt:
    """Run an attack on one update.

    Args:
        attack: The attack.
        view: The update and what is granted.
        budget: The budget.
        candidates: The candidate patches of membership attacks.
        learned: The result of `fit_attack` for attacks that learn.
    """

    def run() -> Recovered:
        if attack.learn is not None and learned is None:
            raise UpdateError("it learns from updates of its own, got none")
        more = () if attack.learn is None else (learned,)
        recovered: Recovered = attack.run(view, budget, candidates, *more)
        return recovered

    return engine.attempt(run)
