"""Scores of reconstructed images: metrics, free baselines, and rows of measurements.

Images are scored in 0..1, whatever the range of the model: reconstructions are clipped to it, and
the data range of PSNR and SSIM is 1. Texts have measures of their own (`text_scores`); their rows
are the same.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from regauge.attacks.inversion import to_images, to_patches
from regauge.audit.verdicts import Evidence, evidence_of_mean, evidence_of_share
from regauge.core.assignment import best_assignment as assign_rows
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


@dataclass(frozen=True)
class Metric:
    """A metric of reconstructions; `is_leak` if larger values mean more leakage."""

    name: str
    compute: Callable[[Tensor, Tensor, Lpips | None], Tensor | None]
    is_leak: bool = True


def _last_features(lpips: Lpips) -> Callable[[Tensor], Tensor]:
    return lambda x: lpips.features(x, 0.0, 1.0)[-1]


def _fits_lpips(lpips: Lpips | None, images: Tensor) -> bool:
    return lpips is not None and min(images.shape[-2:]) >= 32


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
# The metric of masked jigsaw, for attacks on gradients.
SPECTRAL = Metric("FFT2D", lambda a, b, _: spectral_distance(a, b), is_leak=False)
UPDATE_METRICS = (*(m for m in METRICS if m.name != "F-SIM"), SPECTRAL)  # of attacks on gradients
BY_NAME = {m.name: m for m in (*METRICS, SPECTRAL)}


def score_images(
    guesses: Tensor, images: Tensor, lpips: Lpips | None = None, metrics: Sequence[Metric] = METRICS
) -> Scores:
    """Return all metrics of reconstructions, one value for each image.

    Metrics that need AlexNet are skipped without its weights, and for images that are too small.
    """
    values = ((m.name, m.compute(guesses.clamp(0, 1), images, lpips)) for m in metrics)
    return {
        name: [round(float(v), 6) for v in value.clamp(max=100.0)]
        for name, value in values
        if value is not None
    }


def best_assignment(guesses: Tensor, images: Tensor) -> Tensor:
    """Reorder reconstructions without an order by the best assignment to the true images.

    If there are fewer than images, they are repeated.
    """
    if len(guesses) < len(images):
        guesses = guesses.repeat(-(-len(images) // len(guesses)), 1, 1, 1)[: len(images)]
    return guesses[
        torch.from_numpy(assign_rows(torch.cdist(images.flatten(1), guesses.flatten(1))))
    ]


MEAN_IMAGE = "the mean image"
SHUFFLED_PATCHES = "true patches in a random order"
OTHERS = "other images, by the best assignment"


def score_baselines(
    own: Tensor, images: Tensor, patch: int, lpips: Lpips | None = None, seed: int = 0
) -> dict[str, Scores]:
    """Score what costs an attacker nothing.

    These are the mean of its own images, the true patches in random order, and its own images by
    the best assignment, which is the baseline of attacks without an order: among many images, some
    match by chance.
    """
    generator = torch.Generator().manual_seed(seed)
    patches = to_patches(images, patch)
    shuffled = torch.stack([p[torch.randperm(len(p), generator=generator)] for p in patches])
    guesses = {
        MEAN_IMAGE: own.mean(0, keepdim=True).expand_as(images),
        SHUFFLED_PATCHES: to_images(shuffled, patch, images.shape[1]),
    }
    guesses[OTHERS] = best_assignment(own[: len(images)], images)
    return {name: score_images(guess, images, lpips) for name, guess in guesses.items()}


def mean_score(scores: Scores, metric: str) -> float | None:
    """Return the mean over images; None without the metric."""
    return statistics.fmean(scores[metric]) if metric in scores else None


def worst_score(scores: Scores, metric: str) -> float | None:
    """Return the score of the image or text that leaked most."""
    is_leak = metric not in BY_NAME or BY_NAME[metric].is_leak
    return None if metric not in scores else (max if is_leak else min)(scores[metric])


def metric_columns(scores: Scores) -> list[str]:
    """Return the columns of a table of every metric: means, then the worst."""
    return [*scores, *(f"worst {name}" for name in scores if name != "identified")]


def metric_cells(scores: Scores, columns: Sequence[str]) -> list[float | None]:
    """Return the values of the columns of `metric_columns`."""
    return [
        worst_score(scores, name.removeprefix("worst "))
        if name.startswith("worst ")
        else mean_score(scores, name)
        for name in columns
    ]


@dataclass(frozen=True, eq=False)
class AttackScores:
    """The result of one attack on one victim.

    Attributes:
        attack: The name of the attack.
        scores: The scores of each image or text.
        losses: The validation loss after each epoch of the attacker's training.
        floor: The loss of the mean image.
        seconds: The run time.
        images: Reconstructions for the gallery.
        seeds: The number of seeds, whose scores follow one another in equal parts.
        read: The scores against the inputs of the model, if a puzzle changed them.
        facts: For each update, facts of the attack such as rank and condition number.
    """

    attack: str
    scores: Scores
    losses: Sequence[float] = ()
    floor: float = 0.0
    seconds: float = 0.0
    images: Tensor | None = None
    seeds: int = 1
    read: Scores | None = None
    facts: Sequence[Mapping[str, Any]] = ()

    def value(self, metric: str, *, read: bool = False) -> float | None:
        """Return the mean score against the originals or, with `read`, the model's inputs."""
        return mean_score(self.read if read and self.read is not None else self.scores, metric)

    def nearer(self, metric: str) -> Scores:
        """Return the scores against the originals or the model's inputs, whichever leak more."""
        if self.read is None or (self.value(metric) or 0.0) >= (mean_score(self.read, metric) or 0):
            return self.scores
        return self.read

    def by_seed(self, metric: str) -> list[float]:
        """Return the mean over images for each seed."""
        values = self.scores[metric]
        size = len(values) // self.seeds
        return [statistics.fmean(values[i * size : (i + 1) * size]) for i in range(self.seeds)]

    @property
    def has_stopped(self) -> bool:
        """Whether the loss had converged.

        It has if it fell by less than 1 % of the mean image's over the last eighth of the epochs.
        """
        tail = max(3, len(self.losses) // 8)
        return not self.losses or (
            len(self.losses) > tail
            and min(self.losses[:-tail]) - min(self.losses) < 0.01 * self.floor
        )


@dataclass(frozen=True, eq=False)
class Row:
    """The accuracy and leakage of one combination of defences.

    Attributes:
        combination: The defences.
        by_attack: The scores of each attack that recovers images or texts.
        accuracy: The accuracy of the model, if it was measured.
        chance: The accuracy of a guess; 0 if unknown.
        seconds: The time of the training.
        accuracies: The accuracy of each seed.
        shares: What else is recovered, for each update: the AUC of "patches", the share of the
            "mask", the "labels" and the "words".
        guesses: The shares of a guess.
        counts: The number of units behind all shares of a kind, such as labels.
        epsilon: The privacy loss of one update, with differential privacy.
        samples: The number of samples in an update.
        reasons: Why attacks do not apply, by name.
        inputs: The model's inputs for the gallery, if a puzzle changed them.
        floor: The scores of a guess on the attacked samples, if those differ between rows.
    """

    combination: str
    by_attack: Mapping[str, AttackScores]
    accuracy: float = 0.0
    chance: float = 0.0
    seconds: float = 0.0
    accuracies: tuple[float, ...] = ()
    shares: Mapping[str, Sequence[float]] = field(default_factory=dict)
    guesses: Mapping[str, float] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    epsilon: float | None = None
    samples: int = 1
    reasons: Mapping[str, str] = field(default_factory=dict)
    inputs: Tensor | None = None
    floor: Scores | None = None

    def value(self, attack: str, metric: str) -> float | None:
        """Return the mean score of an attack; None if it was not run."""
        return self.by_attack[attack].value(metric) if attack in self.by_attack else None

    def best(self, metric: str) -> tuple[str, float | None]:
        """Return the strongest attack and its score, on originals or the model's inputs.

        Without an attack they are "" and None.
        """
        scores = {n: mean_score(s.nearer(metric), metric) for n, s in self.by_attack.items()}
        name = max(scores, key=lambda n: scores[n] or 0.0, default="")
        return name, scores.get(name)

    def share(self, kind: str) -> float | None:
        """Return the mean share of a kind; None if none was measured."""
        return statistics.fmean(self.shares[kind]) if self.shares.get(kind) else None

    def evidence(self, kind: str) -> Evidence | None:
        """Return the evidence of the shares of a kind; None if none was measured."""
        share, guess = self.share(kind), self.guesses.get(kind, 0.0)
        if share is None:
            return None
        if kind in self.counts:
            return evidence_of_share(share, guess, self.counts[kind])
        # the guess of a single update is unknown, so none alone is beyond chance
        return replace(evidence_of_mean(self.shares[kind], guess), examples=())


@dataclass(frozen=True, eq=False)
class Case:
    """All rows of one model on one data set, with the baselines.

    Attributes:
        name: The name in tables and findings.
        rows: One row for each combination; the first is undefended.
        floors: The scores of the baselines; the first is that of findings.
        shown: The true images of the gallery.
        batches: Further rows by batch size, for a curve.
        stages: Further rows by stage of training, for a curve.
        metric: The metric of leakage.
        subject: What is recovered: "images" or "texts".
    """

    name: str
    rows: tuple[Row, ...]
    floors: Mapping[str, Scores]
    shown: Tensor | None = None
    batches: Mapping[int, Row] = field(default_factory=dict)
    stages: Mapping[str, Sequence[Row]] = field(default_factory=dict)
    metric: str = "SSIM"
    subject: Literal["images", "texts"] = "images"

    def row(self, combination: str) -> Row:
        """Return the row of a combination."""
        return next(r for r in self.rows if r.combination == combination)

    def floor(self, metric: str, row: Row | None = None) -> float:
        """Return the score of a guess, of the samples of a row if it has its own."""
        own = None if row is None else row.floor
        return mean_score(own or next(iter(self.floors.values())), metric) or 0.0

    def evidence(self, row: Row, attack: str, *, inputs: bool = False) -> Evidence:
        """Return the evidence of an attack on whole images or texts.

        Args:
            row: The row.
            attack: The attack.
            inputs: Whether to score against the model's inputs, where they are nearer.
        """
        result = row.by_attack[attack]
        values = (result.nearer(self.metric) if inputs else result.scores)[self.metric]
        guesses = (row.floor or next(iter(self.floors.values())))[self.metric] * result.seeds
        group = max(1, row.samples)
        if len(guesses) >= len(values):
            return evidence_of_mean(values, guesses[: len(values)], group)
        evidence = evidence_of_mean(values, statistics.fmean(guesses), group)
        return replace(evidence, reach=2 * max(guesses) - evidence.guess)

    def best_evidence(self) -> list[tuple[str, Evidence, str]]:
        """Return each row that was attacked, the evidence of its best attack, and its name."""
        best = {row.combination: (row, row.best(self.metric)[0]) for row in self.rows}
        return [
            (name, self.evidence(row, attack, inputs=True), attack)
            for name, (row, attack) in best.items()
            if attack
        ]

    def share_evidence(self, kind: str) -> list[tuple[str, Evidence, str]]:
        """Return each row with shares of a kind, and their evidence."""
        return [
            (row.combination, evidence, "")
            for row in self.rows
            if (evidence := row.evidence(kind)) is not None
        ]

    def has(self, kind: str) -> bool:
        """Return whether a share of this kind was measured."""
        return any(row.shares.get(kind) for row in self.rows)


def merge_scores(parts: Sequence[Mapping[str, Sequence[float]]]) -> Scores:
    """Concatenate the scores of several groups of images or texts."""
    return {metric: [value for part in parts for value in part[metric]] for metric in parts[0]}


def label_recall(counts: Tensor, labels: Tensor) -> float:
    """Return the share of a batch's labels that the counts contain: the overlap of two bags."""
    expected = torch.bincount(labels.cpu(), minlength=len(counts))
    return float(torch.minimum(counts.cpu(), expected).sum()) / len(labels)
