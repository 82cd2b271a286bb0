"""Scores of a reconstructed text against the true one, token by token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from regauge.core.assignment import best_assignment

TokenIds = Sequence[int]
ANOTHER_TEXT = "another text"  # the baseline
MEASURES = ("words", "in place", "ROUGE-1", "ROUGE-2", "ROUGE-L", "exact")


def rouge(predicted: TokenIds, reference: TokenIds, n: int) -> float:
    """Return ROUGE-N: the F1 of n-grams, as bags."""
    predicted_grams, reference_grams = (
        Counter(tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1))
        for tokens in (list(predicted), list(reference))
    )
    shared = sum((predicted_grams & reference_grams).values())
    return 2 * shared / max(1, sum(predicted_grams.values()) + sum(reference_grams.values()))


def rouge_l(predicted: TokenIds, reference: TokenIds) -> float:
    """Return ROUGE-L: the F1 of the longest common subsequence."""
    row = [0] * (len(reference) + 1)
    for token in predicted:
        diagonal = 0
        for j, other in enumerate(reference, 1):
            diagonal, row[j] = row[j], diagonal + 1 if token == other else max(row[j], row[j - 1])
    return 2 * row[-1] / max(1, len(predicted) + len(reference))


def score_texts(
    predicted: Sequence[TokenIds], reference: Sequence[TokenIds]
) -> dict[str, list[float]]:
    """Score each true text against its reconstruction, by the best one-to-one assignment.

    Args:
        predicted: Reconstructions; missing ones count as empty.
        reference: The true texts.

    Returns:
        For each of `MEASURES`, one score for each true text.
    """
    guesses = [*predicted, *([[]] * max(0, len(reference) - len(predicted)))]
    similarity = np.array([[rouge_l(g, t) for g in guesses] for t in reference])
    columns = best_assignment(-similarity)
    scores: dict[str, list[float]] = {measure: [] for measure in MEASURES}
    for i, j in enumerate(columns):
        guess, text = list(guesses[int(j)]), list(reference[int(i)])
        values = (
            sum((Counter(guess) & Counter(text)).values()) / max(1, len(text)),
            sum(left == right for left, right in zip(guess, text, strict=False))
            / max(1, len(text)),
            rouge(guess, text, 1),
            rouge(guess, text, 2),
            rouge_l(guess, text),
            float(guess == text),
        )
        for measure, value in zip(MEASURES, values, strict=True):
            scores[measure].append(value)
    return scores


def words_f1(predicted: Sequence[TokenIds], reference: Sequence[TokenIds]) -> float:
    """Return the F1 of the distinct tokens of all texts.

    F1 and not recall, so that guessing the whole vocabulary scores low.
    """
    guess, truth = ({token for text in texts for token in text} for texts in (predicted, reference))
    return 2 * len(guess & truth) / max(1, len(guess) + len(truth))
