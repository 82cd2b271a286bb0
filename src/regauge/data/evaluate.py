"""Evaluation of models on examples: predictions in batches, loss, accuracy and perplexity."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from regauge.core.progress import Progress
from regauge.data.tasks import Examples, logits_of, loss_of
from regauge.data.train import exact_arithmetic, move_batch

Tensor = torch.Tensor


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


def evaluate_model(
    model: torch.nn.Module, examples: Examples, batch_size: int, progress: Progress | None = None
) -> dict[str, float]:
    """Evaluate a model on examples.

    Args:
        model: The model; it is set to evaluation mode.
        examples: Test data.
        batch_size: Examples per forward pass.
        progress: The progress callback, in examples.

    Returns:
        "loss" (mean), "accuracy" (over all labels, for multi-label examples too) and "examples";
        with "perplexity" for tasks that predict tokens.
    """
    loss_sum = correct = count = 0.0
    for _, _, labels, logits in predict(model, examples, batch_size, progress):
        loss = float(loss_of(examples, logits, labels))
        if examples.causal:
            logits, labels = logits[:, :-1], labels[:, 1:]
        if examples.multi_label:
            right, is_labelled = (logits > 0) == (labels > 0), torch.ones_like(labels).bool()
        else:
            right = logits.argmax(1 if examples.dense else -1) == labels
            is_labelled = labels != -100
        n = int(is_labelled.sum())
        loss_sum, count = loss_sum + loss * n, count + n
        correct += float(right[is_labelled].sum())
    loss = loss_sum / count
    metrics = {"loss": loss, "accuracy": correct / count, "examples": float(len(examples))}
    predicts_tokens = examples.causal or examples.tokens
    return metrics | ({"perplexity": math.exp(min(loss, 700.0))} if predicts_tokens else {})


def accuracy(model: torch.nn.Module, examples: Examples, batch_size: int = 250) -> float:
    """Return the share of labels that a model predicts."""
    return evaluate_model(model, examples, batch_size)["accuracy"]


def mean_loss(model: torch.nn.Module, examples: Examples, batch_size: int) -> float:
    """Return the mean loss over examples, in exact arithmetic for float64 models.

    Examples count equally, where in `evaluate_model` their labels do.
    """
    total = 0.0
    with exact_arithmetic(_dtype_of(model)):
        for rows, _, labels, logits in predict(model, examples, batch_size):
            total += len(rows) * float(loss_of(examples, logits, labels))
    return total / len(examples)


def _dtype_of(model: torch.nn.Module) -> torch.dtype:
    return next(p.dtype for p in model.parameters() if p.is_floating_point())
