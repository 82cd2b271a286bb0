"""Scores of attacks on updates, against the original images and against the model's inputs.

The two differ if a puzzle shuffled the images.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from regauge.attacks.inversion import to_patches
from regauge.audit.scores import METRICS as SHARED
from regauge.audit.scores import SPECTRAL, AttackScores, Metric, Scores, score_images
from regauge.results.metrics import Lpips

Tensor = torch.Tensor
METRICS: tuple[Metric, ...] = (*(m for m in SHARED if m.name != "F-SIM"), SPECTRAL)
LEAK = "PSNR"


@dataclass(frozen=True, eq=False)
class Row:
    """The leakage of one combination of defences.

    Attributes:
        combination: The defences.
        images: The scores of each attack on images.
        patches: The AUC of patch membership, for each update.
        mask: The recovered share of the mask, for each update.
        labels: The recovered share of the labels, for each update.
        epsilon: The privacy loss of one update, with differential privacy.
        samples: The number of images in an update.
        reasons: Why attacks do not apply, by name.
        read: The model's inputs for the gallery, if a puzzle changed them.
        accuracy: The accuracy of the model.
        floor: The score of the mean image on the attacked images.
    """

    combination: str
    images: Mapping[str, AttackScores]
    patches: Sequence[float] = ()
    mask: Sequence[float] = ()
    labels: Sequence[float] = ()
    epsilon: float | None = None
    samples: int = 1
    reasons: Mapping[str, str] = field(default_factory=dict)
    read: Tensor | None = None
    accuracy: float | None = None
    floor: float | None = None

    def best(self, metric: str = LEAK) -> tuple[str, float | None]:
        """Return the strongest attack and its score, on originals or the model's inputs."""
        scores = {
            name: max(s.value(metric) or 0.0, s.value(metric, read=True) or 0.0)
            for name, s in self.images.items()
        }
        if not scores:
            return "", None
        name = max(scores, key=lambda n: scores[n])
        return name, scores[name]


def score_reconstructions(guesses: Tensor, images: Tensor, lpips: Lpips | None) -> Scores:
    """Return all metrics; identification is left out for a single image, where it is trivial."""
    metrics = METRICS if len(images) > 1 else tuple(m for m in METRICS if m.name != "identified")
    return score_images(guesses, images, lpips, metrics)


def label_recall(counts: Tensor, labels: Tensor) -> float:
    """Return the share of a batch's labels that the counts contain: the overlap of two bags."""
    expected = torch.bincount(labels.cpu(), minlength=len(counts))
    return float(torch.minimum(counts.cpu(), expected).sum()) / len(labels)


def extract_patches(images: Tensor, patch: int) -> Tensor:
    """Return all patches of images, [count, values]."""
    return to_patches(images, patch).flatten(0, 1)


def average(values: Sequence[float]) -> float | None:
    """Return the mean; None without values."""
    return statistics.fmean(values) if values else None
