"""Assignment: the best permutation for a matrix of costs, exact or relaxed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from regauge.core.rng import Ints

if TYPE_CHECKING:
    import torch


def best_assignment(cost: Any) -> Ints:
    """Return for each row of a matrix the column that the assignment of the least cost gives it.

    Args:
        cost: an array or tensor [n, m] with n <= m.

    Example:
        >>> best_assignment([[1, 0], [0, 2]]).tolist()
        [1, 0]
    """
    from scipy.optimize import linear_sum_assignment

    return np.asarray(linear_sum_assignment(np.asarray(cost))[1])


def sinkhorn(scores: torch.Tensor, rounds: int = 20) -> torch.Tensor:
    """Normalize scores to a doubly stochastic matrix, differentiably.

    Args:
        scores: logarithms of the entries before normalization.
        rounds: the number of normalizations of rows and columns.
    """
    for _ in range(rounds):
        scores = scores - scores.logsumexp(1, keepdim=True)
        scores = scores - scores.logsumexp(0, keepdim=True)
    return scores.exp()
