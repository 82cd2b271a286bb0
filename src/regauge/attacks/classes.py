"""Labels from an update: which classes a batch had, and how many of each."""

from __future__ import annotations

import torch

from regauge.attacks.updates import SentUpdate
from regauge.jigsaw.layers import head_of

Tensor = torch.Tensor


def label_counts(view: SentUpdate, classes: int | None = None) -> Tensor:
    """How many samples of each class an update was made of, [classes].

    Sees: the gradient by the head's bias or weight; the batch size. Recovers: labels at batch 1
    (iDLG), their counts in larger batches. Why it works: the gradient by the bias is the mean of p
    - y: its sign gives the label of one sample, and with p at hand the counts; p is that of the
    head on the features that a class's weight gradient points along, which are all alike in a model
    that has not learned yet. What stops it: a head that is not sent; noise; secure aggregation over
    many clients; a model that is sure of its answers leaves the mean of p wide open. Floor: the
    prior. Ceiling: exact; of two classes and no bias a coin, as turned features with the other
    label give the same gradient. References: iDLG (2001.02610); Yin et al. 2021 (GradInversion); Ma
    et al. 2022 (iLRG). Cost: none.
    """
    weight, bias = head_of(view.model, classes)
    batch = view.granted.batch or 1
    slopes = view.slopes
    state = {n: p.detach().double().cpu() for n, p in view.model.named_parameters()}
    if weight not in slopes:
        if bias is None or bias not in slopes:
            view.slope(weight, "the gradient by the head")
        assert bias is not None
        only = slopes[bias].detach().double().cpu()
        if batch == 1:
            return torch.nn.functional.one_hot(only.argmin(), len(only))
        return shared_out(
            (batch * (state[bias].softmax(0) - only)).clamp(min=0), batch
        )  # p as of features that say nothing
    steep = slopes[weight].detach().double().cpu()
    along = slopes[bias].detach().double().cpu() if bias is not None and bias in slopes else None
    if (
        along is None
        # rows of the weight's gradient are (p - y) times features: features' own direction tells p
        # - y up to a factor
    ):
        u, s, _ = torch.linalg.svd(steep, full_matrices=False)
        along = u[:, 0] * s[0]
        along = (
            along if -along.min() > along.max() else -along
        )  # p - y adds up to 0, and of one sample one number alone is negative
        along = along / along.abs().max()
    if batch == 1:
        return torch.nn.functional.one_hot(along.argmin(), len(along))
    sure = along.abs() > 1e-3 * along.abs().max()
    features = (steep[sure] / along[sure][:, None]).median(0).values
    p = (state[weight] @ features + (state[bias] if bias is not None else 0)).softmax(0)
    return shared_out((batch * (p - along)).clamp(min=0), batch)


def shared_out(amounts: Tensor, total: int) -> Tensor:
    """Whole numbers that add up to a total, nearest to these amounts: largest remainders."""
    amounts = amounts * total / amounts.sum().clamp(min=1e-300)
    whole = amounts.floor()
    missing = total - int(whole.sum())
    order = (amounts - whole).argsort(descending=True)
    whole[order[:missing]] += 1
    return whole.long()


def labels_from(counts: Tensor) -> Tensor:
    """Counts as a list of labels in order."""
    return torch.repeat_interleave(torch.arange(len(counts)), counts)
