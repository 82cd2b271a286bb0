"""Loss, accuracy and perplexity against their definitions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from regauge.data.evaluate import (
    Score,
    accuracy,
    evaluate_model,
    mean_loss,
    predict,
    score_model,
)
from regauge.data.tasks import Examples
from regauge.errors import DataError

Tensor = torch.Tensor


class Stored(torch.nn.Module):
    """A model that returns stored logits by the index of the example."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(logits)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.logits[pixel_values.long()]


def make_examples(labels: Tensor, **kind: Any) -> Examples:
    def batch(rows: np.ndarray) -> tuple[dict[str, Tensor], Tensor]:
        return {"pixel_values": torch.from_numpy(rows)}, labels[rows]

    return Examples(len(labels), 4, batch, **kind)


@pytest.fixture
def logits() -> Tensor:
    return torch.randn(7, 4, generator=torch.Generator().manual_seed(0))


def test_classes(logits: Tensor) -> None:
    labels = logits.argmax(1)
    labels[:2] = (labels[:2] + 1) % 4  # two of seven are wrong
    found = evaluate_model(Stored(logits), make_examples(labels), 3)
    assert found == {
        "loss": pytest.approx(float(F.cross_entropy(logits, labels))),
        "accuracy": 5 / 7,
        "examples": 7.0,
    }
    assert accuracy(Stored(logits), make_examples(labels), 3) == 5 / 7


def test_labels_that_are_ignored_do_not_count(logits: Tensor) -> None:
    """Batches with fewer labels count less in `evaluate_model`; in `mean_loss` they count alike."""
    tokens = logits.view(1, 7, 4).repeat(4, 1, 1)
    labels = logits.argmax(1).repeat(4, 1)
    labels[0, 1:] = -100
    labels[0, 0] = (labels[0, 0] + 1) % 4
    examples = make_examples(labels, tokens=True)
    found = evaluate_model(Stored(tokens), examples, 1)
    exact = float(F.cross_entropy(tokens.flatten(0, 1), labels.flatten(), ignore_index=-100))
    assert found["loss"] == pytest.approx(exact)
    assert found["accuracy"] == 21 / 22
    assert found["perplexity"] == pytest.approx(math.exp(exact))
    by_examples = [
        float(F.cross_entropy(t, y, ignore_index=-100)) for t, y in zip(tokens, labels, strict=True)
    ]
    assert mean_loss(Stored(tokens), examples, 1) == pytest.approx(np.mean(by_examples))
    assert abs(float(np.mean(by_examples)) - exact) > 0.05


def test_the_next_token_is_predicted(logits: Tensor) -> None:
    ids = torch.cat([torch.zeros(1).long(), logits.argmax(1)[:-1]])[None]  # each token is the next
    found = evaluate_model(Stored(logits[None]), make_examples(ids, causal=True), 1)
    assert found["accuracy"] == 1.0
    shifted = make_examples(ids.roll(1, 1), causal=True)
    assert evaluate_model(Stored(logits[None]), shifted, 1)["accuracy"] < 1.0


def test_binary_labels(logits: Tensor) -> None:
    labels = (logits > 0).float()
    labels[0] = 1 - labels[0]
    found = evaluate_model(Stored(logits), make_examples(labels, multi_label=True), 2)
    assert found["accuracy"] == 6 / 7
    assert found["loss"] == pytest.approx(float(F.binary_cross_entropy_with_logits(logits, labels)))


def test_predictions_are_in_evaluation_mode_and_leave_gradients_on(logits: Tensor) -> None:
    model = Stored(logits).train()
    rows = []
    for batch in predict(model, make_examples(torch.zeros(7).long()), 3):
        rows.append(batch.rows.tolist())
        assert not model.training
        assert not batch.logits.requires_grad
        assert torch.is_grad_enabled()  # the caller's code is not affected
    assert rows == [[0, 1, 2], [3, 4, 5], [6]]


def test_errors_are_those_of_means(logits: Tensor) -> None:
    """With one label for each example: the standard deviation over the root of the number."""
    labels = logits.argmax(1)
    labels[:2] = (labels[:2] + 1) % 4
    score = score_model(Stored(logits), make_examples(labels), 3)
    losses = F.cross_entropy(logits, labels, reduction="none").double().numpy()
    assert score.loss_error == pytest.approx(losses.std(ddof=1) / math.sqrt(7))
    right = np.array([0, 0, 1, 1, 1, 1, 1])
    assert score.accuracy_error == pytest.approx(right.std(ddof=1) / math.sqrt(7))
    single = score_model(Stored(logits[:1]), make_examples(labels[:1]), 3)
    assert single.loss_error is None


def test_tokens_of_one_window_are_one_observation(logits: Tensor) -> None:
    """Copies of a window's token add nothing: the error does not shrink with them."""
    labels = (logits.argmax(1) + (torch.arange(7) < 3)) % 4
    once = score_model(Stored(logits), make_examples(labels), 7)
    copies = logits[:, None].repeat(1, 50, 1)
    tokens = make_examples(labels[:, None].repeat(1, 50), tokens=True)
    repeated = score_model(Stored(copies), tokens, 7)
    assert repeated.loss_error == pytest.approx(once.loss_error)
    assert repeated.labels.sum() == 50 * once.labels.sum()


def test_a_guess_knows_the_frequencies_of_the_labels(logits: Tensor) -> None:
    labels = torch.tensor([0, 0, 0, 0, 1, 1, 2])
    guess = score_model(Stored(logits), make_examples(labels), 3).guess
    shares = np.array([4, 2, 1]) / 7
    assert guess.loss == pytest.approx(-(shares * np.log(shares)).sum())
    assert guess.accuracy == 4 / 7
    assert (guess.uniform_loss, guess.uniform_accuracy) == (pytest.approx(math.log(4)), 0.25)
    binary = torch.tensor([[1.0, 0, 0, 0]] * 6 + [[1.0, 0, 0, 1]])
    guess = score_model(Stored(logits), make_examples(binary, multi_label=True), 3).guess
    assert guess.accuracy == pytest.approx((3 + 6 / 7) / 4)
    assert guess.uniform_loss == pytest.approx(math.log(2))


def test_changes_on_the_same_examples_are_paired(logits: Tensor) -> None:
    """A shift that is equal for all examples has no error, however much their losses differ."""
    labels = logits.argmax(1)
    one = score_model(Stored(logits), make_examples(labels), 3)
    shifted = Score(one.losses + 0.25, one.correct, one.labels, one.guess)
    change, error = shifted.loss_change(one)
    assert change == pytest.approx(0.25)
    assert error == pytest.approx(0, abs=1e-12)
    assert one.loss_error is not None
    assert one.loss_error > 0.05
    with pytest.raises(DataError, match="of the same examples, got 7 examples with 7 labels"):
        one.loss_change(score_model(Stored(logits), make_examples(labels[:5]), 3))


def test_examples_without_labels_are_rejected(logits: Tensor) -> None:
    ignored = torch.full((1, 7), -100)
    for examples in (make_examples(labels=ignored, tokens=True), make_examples(ignored[:0])):
        with pytest.raises(DataError, match="must have labels, got none"):
            score_model(Stored(logits[None]), examples, 2)


@pytest.mark.parametrize("right", [0, 1])
def test_a_perfect_accuracy_has_an_error(right: int, logits: Tensor) -> None:
    """More examples make it smaller; a single wrong answer among many has about the same."""
    labels = (logits.argmax(1) + 1 - right) % 4
    score = score_model(Stored(logits), make_examples(labels), 3)
    assert score.accuracy == right
    assert score.accuracy_error == pytest.approx(math.sqrt(2 / 11 * 9 / 11 / 11))
