"""Numbers of robustness: corruption errors relative to a reference model, and those of ImageNet-A and ImageNet-O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from regauge.errors import need
from regauge.jigsaw.masks import JigsawError

Errors = Mapping[str, Sequence[float]]  # corruption -> the error at each severity


def corruption_errors(errors: Errors, reference: Errors) -> dict[str, float]:
    """The CE of each corruption: the sum of errors over severities, over that of the reference model."""
    missing = [name for name in errors if name not in reference]
    if missing:
        raise JigsawError(f"the reference model has no errors for {', '.join(missing)}")
    return {name: float(np.sum(values) / max(np.sum(reference[name]), 1e-300)) for name, values in errors.items()}


def mean_corruption_error(errors: Errors, reference: Errors) -> float:
    """mCE: the mean of the CEs. 1 for the reference itself (tables print 100)."""
    return float(np.mean(list(corruption_errors(errors, reference).values())))


def mean_error(errors: Errors) -> float:
    """The mean error over corruptions and severities, without a reference: what the paper's Table 9 prints for each corruption."""
    return float(np.mean([np.mean(values) for values in errors.values()]))


def aurra(confidence: Any, correct: Any) -> float:
    """The area under the response rate accuracy curve: the accuracy over the surest answers, averaged over how many one responds to."""
    order = np.argsort(-np.asarray(confidence, float), kind="stable")
    right = np.asarray(correct, float)[order]
    return float((np.cumsum(right) / np.arange(1, len(right) + 1)).mean())


def aupr(inside: Any, outside: Any) -> float:
    """The area under precision and recall for finding what is of no known class, by its low confidence."""
    need("sklearn", "experiments")
    from sklearn.metrics import average_precision_score

    scores = -np.concatenate([np.asarray(inside, float), np.asarray(outside, float)])
    return float(average_precision_score(np.r_[np.zeros(len(inside)), np.ones(len(outside))], scores))
