"""Numbers of robustness: corruption errors relative to a reference model, and those of ImageNet-A
and ImageNet-O.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from regauge.core.progress import Progress
from regauge.data.datasets import Data, EncodedImages
from regauge.data.tasks import Examples, conform_images, logits_of, prepare
from regauge.errors import need
from regauge.jigsaw.corruptions import CORRUPTIONS, SEVERITIES, corrupt
from regauge.jigsaw.masks import JigsawError

Errors = Mapping[str, Sequence[float]]  # corruption -> the error at each severity


def corruption_errors(errors: Errors, reference: Errors) -> dict[str, float]:
    """The CE of each corruption: the sum of errors over severities, over that of the reference
    model.
    """
    missing = [name for name in errors if name not in reference]
    if missing:
        raise JigsawError(f"the reference model has no errors for {', '.join(missing)}")
    faultless = [name for name in errors if np.sum(reference[name]) == 0]
    if faultless:
        raise JigsawError(
            f"the reference model makes no error under {', '.join(faultless)}: nothing is "
            "relative to that",
            hint="take more images, or a weaker model as the reference",
        )
    return {
        name: float(np.sum(values) / np.sum(reference[name])) for name, values in errors.items()
    }


def mean_corruption_error(errors: Errors, reference: Errors) -> float:
    """mCE: the mean of the CEs. 1 for the reference itself (tables print 100)."""
    return float(np.mean(list(corruption_errors(errors, reference).values())))


def mean_error(errors: Errors) -> float:
    """The mean error over corruptions and severities, without a reference: what the paper's Table 9
    prints for each corruption.
    """
    return float(np.mean([np.mean(values) for values in errors.values()]))


def aurra(confidence: Any, correct: Any) -> float:
    """The area under the response rate accuracy curve: the accuracy over the surest answers,
    averaged over how many one responds to.
    """
    order = np.argsort(-np.asarray(confidence, float), kind="stable")
    right = np.asarray(correct, float)[order]
    return float((np.cumsum(right) / np.arange(1, len(right) + 1)).mean())


def aupr(inside: Any, outside: Any) -> float:
    """The area under precision and recall for finding what is of no known class, by its low
    confidence.
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
    device: str = "cpu",
    progress: Progress | None = None,
) -> dict[str, list[float]]:
    """A model's error under every corruption at severities 1 to 5, on images and labels of a
    task.
    """
    data = conform_images(task, data)
    pixels = (
        data["image"].to_array()
        if isinstance(data["image"], EncodedImages)
        else np.asarray(data["image"])
    )
    pixels = pixels if pixels.ndim == 4 else pixels[..., None]
    errors: dict[str, list[float]] = {}
    for number, name in enumerate(CORRUPTIONS):
        if progress is not None:
            progress(number, len(CORRUPTIONS), name)
        errors[name] = []
        for severity in SEVERITIES:
            made = corrupt(pixels, name, severity)
            fields = {
                "image": made if made.shape[-1] == 3 else made[..., 0],
                "label": data["label"],
            }
            errors[name].append(
                float(
                    1
                    - score_predictions(
                        model, prepare(task, Data(data.name, fields, "")), batch, device
                    )[1].mean()
                )
            )
    return errors


def score_predictions(
    model: torch.nn.Module, examples: Examples, batch: int = 100, device: str = "cpu"
) -> tuple[Any, Any]:
    """The largest probability of each example, and whether it is that of its label."""
    if examples.multi_label or len(examples) == 0:
        fault = "have several labels each" if examples.multi_label else "are none"
        raise JigsawError(
            f"the images {fault}: there is no answer to be right or wrong",
            hint="give images with one label each",
        )
    sure, right = [], []
    model.eval()
    with torch.no_grad():
        for start in range(0, len(examples), batch):
            inputs, labels = examples.batch(np.arange(start, min(start + batch, len(examples))))
            try:
                logits = logits_of(model, {k: v.to(device) for k, v in inputs.items()})
            except (
                AttributeError
            ) as error:  # the output of a model without a classifier has no logits
                raise JigsawError(
                    f"{type(model).__name__} gives no classes of images",
                    hint="give a model ...ForImageClassification",
                ) from error
            top = logits.softmax(-1).max(-1)
            sure.append(top.values.double().cpu().numpy())
            right.append((top.indices.cpu() == labels).double().numpy())
    return np.concatenate(sure), np.concatenate(right)
