"""How near a text that was read comes to the true one, token by token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

TokenIds = Sequence[int]
MEASURES = ("words", "in place", "ROUGE-1", "ROUGE-2", "ROUGE-L", "exact")


def rouge(found: TokenIds, true: TokenIds, n: int) -> float:
    """F1 of n-grams, as bags."""
    a, b = (
        Counter(tuple(t[i : i + n]) for i in range(len(t) - n + 1))
        for t in (list(found), list(true))
    )
    both = sum((a & b).values())
    return 2 * both / max(1, sum(a.values()) + sum(b.values()))


def rouge_l(found: TokenIds, true: TokenIds) -> float:
    """F1 by the longest common subsequence."""
    row = [0] * (len(true) + 1)
    for word in found:
        before = 0
        for j, other in enumerate(true, 1):
            before, row[j] = row[j], before + 1 if word == other else max(row[j], row[j - 1])
    return 2 * row[-1] / max(1, len(found) + len(true))


def score_texts(found: Sequence[TokenIds], true: Sequence[TokenIds]) -> dict[str, list[float]]:
    """Each true text against the found one that is nearest to it by ROUGE-L; one is the answer to
    one.
    """
    from scipy.optimize import linear_sum_assignment

    guesses = [*found, *([[]] * max(0, len(true) - len(found)))]
    worth = np.array([[rouge_l(g, t) for g in guesses] for t in true])
    rows, columns = linear_sum_assignment(-worth)
    out: dict[str, list[float]] = {m: [] for m in MEASURES}
    for i, j in zip(rows, columns, strict=True):
        a, b = list(guesses[int(j)]), list(true[int(i)])
        values = (
            sum((Counter(a) & Counter(b)).values()) / max(1, len(b)),
            sum(x == y for x, y in zip(a, b, strict=False)) / max(1, len(b)),
            rouge(a, b, 1),
            rouge(a, b, 2),
            rouge_l(a, b),
            float(a == b),
        )
        for m, v in zip(MEASURES, values, strict=True):
            out[m].append(v)
    return out
