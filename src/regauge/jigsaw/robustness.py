"""Measures of robustness: corruption errors relative to a reference model (ImageNet-C), AURRA
(ImageNet-A) and AUPR (ImageNet-O).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from regauge.core.progress import Progress
from regauge.data.datasets import Data, EncodedImages
from regauge.data.evaluate import predict
from regauge.data.tasks import Examples, conform_images, prepare
from regauge.errors import JigsawError, need
from regauge.jigsaw.corruptions import CORRUPTIONS, SEVERITIES, corrupt

PART = 1024  # images that are in memory at once
Errors = Mapping[str, Sequence[float]]  # corruption -> the error at each severity


def corruption_errors(errors: Errors, reference: Errors) -> dict[str, float]:
    """Compute the CE of each corruption: its errors over severities, relative to a reference model.

    Raises:
        JigsawError: The reference lacks a corruption, or makes no error under it.
    """
    missing = [name for name in errors if name not in reference]
    if missing:
        raise JigsawError(f"the reference model has no errors for {', '.join(missing)}")
    faultless = [name for name in errors if np.sum(reference[name]) == 0]
    if faultless:
        raise JigsawError(
            f"the reference model makes no error under {', '.join(faultless)}: relative errors "
            "are undefined",
            hint="use more images, or a weaker reference model",
        )
    return {
        name: float(np.sum(values) / np.sum(reference[name])) for name, values in errors.items()
    }


def mean_corruption_error(errors: Errors, reference: Errors) -> float:
    """Compute mCE, the mean of the CEs: 1 for the reference itself (tables print 100)."""
    return float(np.mean(list(corruption_errors(errors, reference).values())))


def mean_error(errors: Errors) -> float:
    """Compute the mean error over corruptions and severities, as in the paper's Table 9."""
    return float(np.mean([np.mean(values) for values in errors.values()]))


def aurra(confidence: Any, correct: Any) -> float:
    """Compute the area under the response rate accuracy curve.

    It is the accuracy over the n most confident predictions, averaged over n.
    """
    order = np.argsort(-np.asarray(confidence, float), kind="stable")
    ranked = np.asarray(correct, float)[order]
    return float((np.cumsum(ranked) / np.arange(1, len(ranked) + 1)).mean())


def aupr(inside: Any, outside: Any) -> float:
    """Compute the area under precision and recall of detecting outliers by low confidence.

    Args:
        inside: The confidence of images of a known class.
        outside: The confidence of outliers.
    """
    need("sklearn", "studies")
    from sklearn.metrics import average_precision_score

    scores = -np.concatenate([np.asarray(inside, float), np.asarray(outside, float)])
    return float(
        average_precision_score(np.r_[np.zeros(len(inside)), np.ones(len(outside))], scores)
    )


def evaluate_corruptions(
    model: torch.nn.Module,
    data: Data,
    task: Mapping[str, Any],
    *,
    batch: int = 100,
    progress: Progress | None = None,
) -> dict[str, list[float]]:
    """Measure a model's error under every corruption at severities 1 to 5.

    Args:
        model: A classifier of images.
        data: Images and labels.
        task: The preparation of the images.
        batch: The number of images of a pass.
        progress: Called before each corruption.
    """
    data = conform_images(task, data)
    count, right = len(data), {name: [0.0] * len(SEVERITIES) for name in CORRUPTIONS}
    parts = range(0, max(count, 1), PART)
    for part, start in enumerate(parts):
        rows = range(start, min(start + PART, count))
        images = data["image"]
        pixels = (
            images.to_array(rows)
            if isinstance(images, EncodedImages)
            else np.asarray(images[rows.start : rows.stop])
        )
        pixels = pixels if pixels.ndim == 4 else pixels[..., None]
        labels = data["label"][rows.start : rows.stop]
        for number, name in enumerate(CORRUPTIONS):
            if progress is not None:
                progress(part * len(CORRUPTIONS) + number, len(parts) * len(CORRUPTIONS), name)
            for i, severity in enumerate(SEVERITIES):
                changed = corrupt(pixels, name, severity, first=start)
                fields = {
                    "image": changed if changed.shape[-1] == 3 else changed[..., 0],
                    "label": labels,
                }
                examples = prepare(task, Data(data.name, fields, "", data.folders))
                right[name][i] += float(score_predictions(model, examples, batch)[1].sum())
    return {name: [1 - r / count for r in values] for name, values in right.items()}


def score_predictions(
    model: torch.nn.Module, examples: Examples, batch: int = 100
) -> tuple[Any, Any]:
    """Return the largest probability of each example, and whether it is that of its label.

    Raises:
        JigsawError: `examples` is empty or multi-label, or the model is not a classifier.
    """
    if examples.multi_label or len(examples) == 0:
        got = "several labels each" if examples.multi_label else "no images"
        raise JigsawError(
            f"the accuracy needs images with one label each, got {got}",
            hint="give images with one label each",
        )
    confidence, correct = [], []
    try:
        for _, _, labels, logits in predict(model, examples, batch):
            top = logits.softmax(-1).max(-1)
            confidence.append(top.values.double().cpu().numpy())
            correct.append((top.indices == labels).double().cpu().numpy())
    except AttributeError as error:  # outputs without a classifier have no logits
        raise JigsawError(
            f"{type(model).__name__} is not an image classifier",
            hint="give a model ...ForImageClassification",
        ) from error
    return np.concatenate(confidence), np.concatenate(correct)
