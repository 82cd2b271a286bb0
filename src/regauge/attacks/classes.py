"""Labels from an update: the classes of a batch and their counts."""

from __future__ import annotations

import torch

from regauge.attacks.updates import SentUpdate
from regauge.jigsaw.layers import find_head

Tensor = torch.Tensor


def label_counts(view: SentUpdate, classes: int | None = None) -> Tensor:
    """Count the samples of each class behind an update, [classes].

    Sees: the gradient of the head's bias or weight; the batch size.
    Recovers: the label at batch size 1 (iDLG), the counts of labels in larger batches.
    Why it works: the gradient of the bias is the mean of p - y. Its sign gives the label of a
        single sample; with p it gives the counts. p is the head's output for the features along
        which a class's weight gradient points; an untrained model has almost the same features for
        all samples.
    What stops it: a head that is not sent; noise; secure aggregation over many clients; a confident
        model, for which the mean of p is hard to estimate.
    Floor: the prior.
    Ceiling: exact; with two classes and no bias a coin flip, because negated features with the
        other label give the same gradient.
    References: iDLG (2001.02610); Yin et al. 2021 (GradInversion); Ma et al. 2022 (iLRG).
    Cost: negligible.
    """
    weight, bias = find_head(view.model, classes)
    batch = view.granted.batch or 1
    grads = view.grads
    state = {n: p.detach().double().cpu() for n, p in view.model.named_parameters()}
    if weight not in grads:
        if bias is None or bias not in grads:
            view.grad(weight, "the gradient of the head")
        assert bias is not None
        bias_grad = grads[bias].detach().double().cpu()
        if batch == 1:
            return torch.nn.functional.one_hot(bias_grad.argmin(), len(bias_grad))
        return apportion(
            (batch * (state[bias].softmax(0) - bias_grad)).clamp(min=0), batch
        )  # p for uninformative features: the bias alone
    weight_grad = grads[weight].detach().double().cpu()
    residual = grads[bias].detach().double().cpu() if bias is not None and bias in grads else None
    if residual is None:
        # Rows of the weight's gradient are (p - y) times the features, so that the leading left
        # singular vector is p - y up to a factor.
        u, s, _ = torch.linalg.svd(weight_grad, full_matrices=False)
        residual = u[:, 0] * s[0]
        # p - y sums to 0, and for a single sample exactly one entry is negative.
        residual = residual if -residual.min() > residual.max() else -residual
        residual = residual / residual.abs().max()
    if batch == 1:
        return torch.nn.functional.one_hot(residual.argmin(), len(residual))
    is_large = residual.abs() > 1e-3 * residual.abs().max()
    features = (weight_grad[is_large] / residual[is_large][:, None]).median(0).values
    p = (state[weight] @ features + (state[bias] if bias is not None else 0)).softmax(0)
    return apportion((batch * (p - residual)).clamp(min=0), batch)


def apportion(amounts: Tensor, total: int) -> Tensor:
    """Round amounts to integers with a given total by the largest-remainder method."""
    amounts = amounts * total / amounts.sum().clamp(min=1e-300)
    counts = amounts.floor()
    remaining = total - int(counts.sum())
    order = (amounts - counts).argsort(descending=True)
    counts[order[:remaining]] += 1
    return counts.long()


def expand_counts(counts: Tensor) -> Tensor:
    """Return class counts as a sorted list of labels."""
    return torch.repeat_interleave(torch.arange(len(counts)), counts)
