"""How near attacks came, image by image: the metrics, what costs an attacker nothing, and rows of
what was measured.

Images are scored in 0..1, whatever range the model has them in: reconstructions are clipped to it,
and the span of PSNR and SSIM is 1.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from regauge.attacks.inversion import to_images, to_patches
from regauge.errors import RegaugeError
from regauge.results.metrics import (
    Lpips,
    feature_similarity,
    is_identified,
    mse,
    psnr,
    spectral_distance,
    ssim,
)

Tensor = torch.Tensor
Scores = dict[str, list[float]]  # by metric, one number for each image


class LeakageError(RegaugeError):
    """A case that cannot be audited."""


@dataclass(frozen=True)
class Metric:
    """`is_leak` says whether more of it is more leaked."""

    name: str
    compute: Callable[[Tensor, Tensor, Lpips | None], Tensor | None]
    is_leak: bool = True


def _last_features(lpips: Lpips) -> Callable[[Tensor], Tensor]:
    return lambda x: lpips.features(x, 0.0, 1.0)[-1]


def _fits_lpips(lpips: Lpips | None, found: Tensor) -> bool:
    return lpips is not None and min(found.shape[-2:]) >= 32


METRICS: tuple[Metric, ...] = (
    Metric("SSIM", lambda a, b, _: ssim(a, b, 1.0)),
    Metric("PSNR", lambda a, b, _: psnr(a, b, 1.0)),
    Metric(
        "F-SIM",
        lambda a, b, net: (
            feature_similarity(a, b, _last_features(net))
            if net is not None and _fits_lpips(net, a)
            else None
        ),
    ),
    Metric(
        "LPIPS",
        lambda a, b, net: net(a, b, 0.0, 1.0) if net is not None and _fits_lpips(net, a) else None,
        is_leak=False,
    ),
    Metric("MSE", lambda a, b, _: mse(a, b), is_leak=False),
    Metric("identified", lambda a, b, _: is_identified(a, b).float()),
)
SPECTRAL = Metric(
    "FFT2D", lambda a, b, _: spectral_distance(a, b), is_leak=False
)  # 002's, for attacks on gradients
BY_NAME = {m.name: m for m in (*METRICS, SPECTRAL)}


def score_images(
    found: Tensor, true: Tensor, lpips: Lpips | None = None, metrics: Sequence[Metric] = METRICS
) -> Scores:
    """All metrics of reconstructions in 0..1; those that need AlexNet only where its weights are
    given and images are not too small for it.
    """
    values = ((m.name, m.compute(found.clamp(0, 1), true, lpips)) for m in metrics)
    return {
        name: [round(float(v), 6) for v in value.clamp(max=100.0)]
        for name, value in values
        if value is not None
    }


def best_assignment(found: Tensor, true: Tensor) -> Tensor:
    """Reconstructions of which it is not said whose they are, in the order in which they are
    nearest to the true ones: the best naming counts. Where there are fewer than images, each stands
    for several.
    """
    from scipy.optimize import linear_sum_assignment

    if len(found) < len(true):
        found = found.repeat(-(-len(true) // len(found)), 1, 1, 1)[: len(true)]
    return found[
        torch.from_numpy(
            linear_sum_assignment(torch.cdist(true.flatten(1), found.flatten(1)).numpy())[1]
        )
    ]


OTHERS = "other images, by the best naming"


def score_baselines(
    own: Tensor, true: Tensor, patch: int, lpips: Lpips | None = None, seed: int = 0
) -> dict[str, Scores]:
    """What costs an attacker nothing: the mean of its own images; what an order at random leaves of
    the true patches; and images of its own, each given to the true one that it fits, which is how
    an attack is scored that names nobody. Of many images some fit, whoever they show.
    """
    draw = torch.Generator().manual_seed(seed)
    patches = to_patches(true, patch)
    mixed = torch.stack([p[torch.randperm(len(p), generator=draw)] for p in patches])
    guesses = {
        "the mean image": own.mean(0, keepdim=True).expand_as(true),
        "true patches in a random order": to_images(mixed, patch, true.shape[1]),
    }
    guesses[OTHERS] = best_assignment(own[: len(true)], true)
    return {name: score_images(guess, true, lpips) for name, guess in guesses.items()}


def mean_score(scores: Scores, metric: str) -> float | None:
    return statistics.fmean(scores[metric]) if metric in scores else None


def worst_score(scores: Scores, metric: str) -> float | None:
    """Of the image that leaked most."""
    return (
        None
        if metric not in scores
        else max(scores[metric])
        if BY_NAME[metric].is_leak
        else min(scores[metric])
    )


@dataclass(frozen=True, eq=False)
class AttackScores:
    """What one attack got of one victim: scores of each image, validation losses after each epoch
    and what the mean image would have, seconds, and images for a gallery.
    """

    attack: str
    scores: Scores
    losses: Sequence[float]
    floor: float
    seconds: float
    images: Tensor | None = None
    seeds: int = 1  # whose scores follow each other, as many of each

    def by_seed(self, metric: str) -> list[float]:
        """The mean over images, of each seed."""
        found = self.scores[metric]
        each = len(found) // self.seeds
        return [statistics.fmean(found[i * each : (i + 1) * each]) for i in range(self.seeds)]

    @property
    def has_stopped(self) -> bool:
        """Had its loss stopped falling when it ended: by less than a hundredth of the mean image's
        over the last eighth of its epochs?
        """
        tail = max(3, len(self.losses) // 8)
        return not self.losses or (
            len(self.losses) > tail
            and min(self.losses[:-tail]) - min(self.losses) < 0.01 * self.floor
        )


@dataclass(frozen=True, eq=False)
class Row:
    """A combination of defences: what it costs the task, and what each attack got. One for each
    seed, `trials` of them put together by `joined`.
    """

    combination: str
    accuracy: float
    chance: float
    seconds: float
    by_attack: Mapping[str, AttackScores]
    accuracies: tuple[float, ...] = ()
    labels: float | None = None  # the share of labels that the server tells from gradients

    def value(self, attack: str, metric: str) -> float | None:
        return (
            mean_score(self.by_attack[attack].scores, metric) if attack in self.by_attack else None
        )


@dataclass(frozen=True, eq=False)
class Case:
    """All rows of one model on one data set, what costs nothing, and the true images of the
    gallery.
    """

    name: str
    rows: tuple[Row, ...]
    floors: Mapping[str, Scores]
    shown: Tensor | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    def row(self, combination: str) -> Row:
        return next(r for r in self.rows if r.combination == combination)

    def floor(self, metric: str) -> float | None:
        return mean_score(self.floors["the mean image"], metric)


def merge_trials(trials: Sequence[Row]) -> Row:
    """Rows of several seeds as one: scores of all their images, losses and pictures of the
    first.
    """
    first = trials[0]
    attacked = {}
    for name, one in first.by_attack.items():
        all_of = [t.by_attack[name] for t in trials if name in t.by_attack]
        scores = {metric: [v for a in all_of for v in a.scores[metric]] for metric in one.scores}
        attacked[name] = AttackScores(
            name,
            scores,
            one.losses,
            one.floor,
            statistics.fmean(a.seconds for a in all_of),
            one.images,
            len(all_of),
        )
    found = tuple(t.accuracy for t in trials)
    return Row(
        first.combination,
        statistics.fmean(found),
        first.chance,
        statistics.fmean(t.seconds for t in trials),
        attacked,
        found,
    )
