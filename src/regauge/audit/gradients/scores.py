"""How near attacks on updates came: against the images as they were, and against what the model
read of them, which a puzzle may have shuffled.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from regauge.attacks.inversion import to_patches
from regauge.audit.split.scores import METRICS as SHARED
from regauge.audit.split.scores import SPECTRAL, Metric, Scores, mean_score, score_images
from regauge.results.metrics import Lpips

Tensor = torch.Tensor
METRICS: tuple[Metric, ...] = (*(m for m in SHARED if m.name != "F-SIM"), SPECTRAL)
LEAK = "PSNR"


@dataclass(frozen=True, eq=False)
class ImageScores:
    """What one attack got of all updates: scores of each image against the original and against
    what was read, images for a gallery, seconds, and what the attack says of how it stood (rank,
    condition) for each update.
    """

    attack: str
    original: Scores
    read: Scores
    seconds: float
    images: Tensor | None = None
    facts: Sequence[Mapping[str, Any]] = ()

    def value(self, metric: str = LEAK, *, read: bool = False) -> float | None:
        return mean_score(self.read if read else self.original, metric)


@dataclass(frozen=True, eq=False)
class Row:
    """One combination: what each attack on images got, the AUC of patches that were asked about,
    the share of the mask and of the labels that were told (one number for each update), the epsilon
    if there is one, and why attacks could not try.
    """

    combination: str
    images: Mapping[str, ImageScores]
    patches: Sequence[float] = ()
    mask: Sequence[float] = ()
    labels: Sequence[float] = ()
    epsilon: float | None = None
    samples: int = 1
    reasons: Mapping[str, str] = field(default_factory=dict)
    read: Tensor | None = (
        None  # of a gallery: the images as the model read them, where a puzzle was put to them
    )
    accuracy: float | None = None
    floor: float | None = None  # what the mean image has of the images that were attacked here

    def best(self, metric: str = LEAK) -> tuple[str, float | None]:
        """The attack that gets most of the images as they were or as they were read, and what it
        gets.
        """
        found = {
            name: max(s.value(metric) or 0.0, s.value(metric, read=True) or 0.0)
            for name, s in self.images.items()
        }
        if not found:
            return "", None
        name = max(found, key=lambda n: found[n])
        return name, found[name]


@dataclass(frozen=True, eq=False)
class Case:
    """All rows of one model on one data set, what costs nothing, and the true images of the
    gallery. `batches` and `stages` are further rows, by the size of the batch and by how far the
    model was trained, for the curves.
    """

    name: str
    rows: tuple[Row, ...]
    floors: Mapping[str, Scores]
    shown: Tensor | None = None
    batches: Mapping[int, Row] = field(default_factory=dict)
    stages: Mapping[str, Sequence[Row]] = field(default_factory=dict)

    def row(self, combination: str) -> Row:
        return next(r for r in self.rows if r.combination == combination)

    def floor(self, metric: str = LEAK) -> float:
        return mean_score(self.floors["the mean image"], metric) or 0.0


def score_reconstructions(found: Tensor, true: Tensor, lpips: Lpips | None) -> Scores:
    """All metrics; which image is nearest says nothing where there is one."""
    chosen = METRICS if len(true) > 1 else tuple(m for m in METRICS if m.name != "identified")
    return score_images(found, true, lpips, chosen)


def label_recall(counts: Tensor, labels: Tensor) -> float:
    """The share of a batch's labels that the counts have: the overlap of two bags."""
    true = torch.bincount(labels.cpu(), minlength=len(counts))
    return float(torch.minimum(counts.cpu(), true).sum()) / len(labels)


def extract_patches(images: Tensor, patch: int) -> Tensor:
    """All patches of images, [count, values]."""
    return to_patches(images, patch).flatten(0, 1)


def average(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None
