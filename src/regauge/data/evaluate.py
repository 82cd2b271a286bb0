"""Evaluation of models on examples: predictions in batches, loss, accuracy and perplexity, their
standard errors, and the same numbers of a guess that reads no input.

    score = score_model(model, examples, 32)
    score.accuracy, score.accuracy_error, score.guess.accuracy
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from regauge.core.progress import Progress
from regauge.data.tasks import Examples, logits_of, loss_of, losses_of
from regauge.data.train import exact_arithmetic, move_batch
from regauge.errors import DataError

Tensor = torch.Tensor
_MAX_EXPONENT = 700.0  # exp of more is not a float


class Prediction(NamedTuple):
    """A batch and the logits of a model for it.

    Attributes:
        rows: The indices of the examples.
        inputs: The arguments of forward.
        labels: The labels.
        logits: The logits.
    """

    rows: Any
    inputs: dict[str, Tensor]
    labels: Tensor
    logits: Tensor


def predict(
    model: torch.nn.Module, examples: Examples, batch_size: int, progress: Progress | None = None
) -> Iterator[Prediction]:
    """Yield the predictions of a model batch by batch, in evaluation mode and without gradients.

    Args:
        model: The model; it is set to evaluation mode. Parameters on the meta device (of a backbone
            that is elsewhere) are ignored.
        examples: The examples. They are moved to the device and the dtype of the model.
        batch_size: Examples per forward pass.
        progress: The progress callback, in examples.
    """
    device = next(p.device for p in model.parameters() if not p.is_meta)
    dtype = _dtype_of(model)
    model.eval()
    for start in range(0, len(examples), batch_size):
        rows = np.arange(start, min(start + batch_size, len(examples)))
        inputs, labels = move_batch(examples.batch(rows), device, dtype)
        with torch.no_grad():
            logits = logits_of(model, inputs)
        yield Prediction(rows, inputs, labels, logits)
        if progress is not None:
            progress(int(rows[-1]) + 1, len(examples), "")


@dataclass(frozen=True)
class Guess:
    """Loss and accuracy of a guess that reads no input.

    Attributes:
        loss: The loss of the frequencies of the labels: their entropy. No constant prediction has
            a smaller one.
        accuracy: The share of the most frequent label.
        uniform_loss: The loss of equal probabilities.
        uniform_accuracy: Their accuracy, 1 / classes.
    """

    loss: float
    accuracy: float
    uniform_loss: float
    uniform_accuracy: float


@dataclass(frozen=True, eq=False)
class Score:
    """The scores of a model on examples, one by one.

    Means count labels alike. Their standard errors treat examples as the sample, because the
    tokens of a window are not independent.

    Attributes:
        losses: The sum of the losses of the labels of each example.
        correct: The number of correct labels of each example.
        labels: The number of labels of each example.
        guess: The same numbers for a guess that reads no input.
        predicts_tokens: Whether labels are tokens, so that the loss has a perplexity.
    """

    losses: NDArray[np.float64]
    correct: NDArray[np.float64]
    labels: NDArray[np.float64]
    guess: Guess
    predicts_tokens: bool = False

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def loss(self) -> float:
        """The mean loss of a label, in nats."""
        return float(self.losses.sum() / self.labels.sum())

    @cached_property
    def accuracy(self) -> float:
        """The share of correct labels, for multi-label examples too."""
        return float(self.correct.sum() / self.labels.sum())

    @property
    def perplexity(self) -> float | None:
        """The exponential of the loss, for tasks that predict tokens."""
        return perplexity_of(self.loss) if self.predicts_tokens else None

    @property
    def loss_error(self) -> float | None:
        """The standard error of the loss; None for one example."""
        return self._error(self.losses - self.loss * self.labels)

    @property
    def accuracy_error(self) -> float | None:
        """The standard error of the accuracy; None for one example.

        If all labels are right, or all wrong, it is that of Agresti and Coull (1998), who add two
        of each: otherwise it would be 0 for any number of examples.
        """
        if self.accuracy not in (0.0, 1.0) or len(self) < 2:
            return self._error(self.correct - self.accuracy * self.labels)
        return self._error_at_bound()

    def loss_change(self, since: Score) -> tuple[float, float | None]:
        """Return the change of the loss since another score on the same examples, with its
        standard error.

        Errors of the two that are due to the choice of examples cancel.
        """
        self._require_same_examples(since)
        change = self.loss - since.loss
        return change, self._error(self.losses - since.losses - change * self.labels)

    def accuracy_change(self, since: Score) -> tuple[float, float | None]:
        """Return the change of the accuracy, as `loss_change` does that of the loss.

        If it is the same in all examples, its error is that of `accuracy_error` at its bounds.
        """
        self._require_same_examples(since)
        change = self.accuracy - since.accuracy
        error = self._error(self.correct - since.correct - change * self.labels)
        return change, self._error_at_bound() if change and error == 0 else error

    def _error_at_bound(self) -> float:
        """Return the standard error where all examples agree."""
        n = len(self) + 4
        return math.sqrt(2 / n * (1 - 2 / n) / n)

    def is_comparable(self, other: Score) -> bool:
        """Return whether another score has examples with as many labels, as the same ones have."""
        return np.array_equal(self.labels, other.labels)

    def to_dict(self) -> dict[str, float]:
        """Return "loss", "accuracy" and "examples"; with "perplexity" for tasks that predict
        tokens.
        """
        metrics = {"loss": self.loss, "accuracy": self.accuracy, "examples": float(len(self))}
        return metrics | ({} if self.perplexity is None else {"perplexity": self.perplexity})

    def _require_same_examples(self, other: Score) -> None:
        if not self.is_comparable(other):
            raise DataError(
                f"scores must be of the same examples, got {len(self)} examples with "
                f"{self.labels.sum():.0f} labels and {len(other)} with {other.labels.sum():.0f}"
            )

    def _error(self, residuals: NDArray[np.float64]) -> float | None:
        """Return the standard error of a ratio of sums over examples, from their residuals."""
        n = len(residuals)
        if n < 2:
            return None
        variance = float((residuals**2).sum()) * n / (n - 1)
        return math.sqrt(variance) / float(self.labels.sum())


def perplexity_of(loss: float) -> float:
    """Return the exponential of a loss, of at most 700 nats."""
    return math.exp(min(loss, _MAX_EXPONENT))


def score_model(
    model: torch.nn.Module, examples: Examples, batch_size: int, progress: Progress | None = None
) -> Score:
    """Score a model on examples.

    Args:
        model: The model; it is set to evaluation mode.
        examples: Test data.
        batch_size: Examples per forward pass.
        progress: The progress callback, in examples.

    Raises:
        DataError: The examples have no labels.
    """
    parts: list[Any] = []
    counts: Any = 0
    for _, _, labels, logits in predict(model, examples, batch_size, progress):
        losses = losses_of(examples, logits, labels)
        if examples.causal:
            logits, labels = logits[:, :-1], labels[:, 1:]
        if examples.multi_label:
            right, is_labelled = (logits > 0) == (labels > 0), torch.ones_like(labels).bool()
        else:
            right = logits.argmax(1 if examples.dense else -1) == labels
            is_labelled = labels != -100
        parts.append(
            [
                part.reshape(len(labels), -1).sum(1).double().cpu().numpy()
                for part in (losses, right & is_labelled, is_labelled)
            ]
        )
        counts = counts + _count_labels(examples, labels, is_labelled)
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    if not columns or not columns[2].sum():
        raise DataError("examples must have labels, got none", hint="pass labelled examples")
    summed, correct, n_labels = columns
    return Score(
        summed,
        correct,
        n_labels,
        _guess(counts),
        predicts_tokens=examples.causal or examples.tokens,
    )


def _count_labels(examples: Examples, labels: Tensor, is_labelled: Tensor) -> NDArray[np.float64]:
    """Count the labels of each class; for binary labels [outputs, 2]."""
    if examples.multi_label:
        positive = (labels > 0).double().sum(0).cpu().numpy()
        return np.stack([len(labels) - positive, positive], -1)
    classes = labels[is_labelled].cpu().numpy()
    return np.bincount(classes, minlength=examples.classes).astype(np.float64)


def _guess(counts: NDArray[np.float64]) -> Guess:
    shares = counts / counts.sum(-1, keepdims=True)
    entropy = -(shares * np.log(np.where(shares > 0, shares, 1.0))).sum(-1)
    classes = counts.shape[-1]
    return Guess(
        float(entropy.mean()), float(shares.max(-1).mean()), math.log(classes), 1 / classes
    )


def evaluate_model(
    model: torch.nn.Module, examples: Examples, batch_size: int, progress: Progress | None = None
) -> dict[str, float]:
    """Return the scores of a model on examples as plain numbers (`score_model`)."""
    return score_model(model, examples, batch_size, progress).to_dict()


def accuracy(model: torch.nn.Module, examples: Examples, batch_size: int = 250) -> float:
    """Return the share of labels that a model predicts."""
    return score_model(model, examples, batch_size).accuracy


def mean_loss(model: torch.nn.Module, examples: Examples, batch_size: int) -> float:
    """Return the mean loss over examples, in exact arithmetic for float64 models.

    Examples count equally, where in `score_model` their labels do.
    """
    total = 0.0
    with exact_arithmetic(_dtype_of(model)):
        for rows, _, labels, logits in predict(model, examples, batch_size):
            total += len(rows) * float(loss_of(examples, logits, labels))
    return total / len(examples)


def _dtype_of(model: torch.nn.Module) -> torch.dtype:
    return next(p.dtype for p in model.parameters() if p.is_floating_point())
