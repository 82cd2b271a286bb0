"""Images by regression on the attacker's own updates.

The attacker computes many updates of its own images with the client's code and learns the inverse.

A defence acts on the attacker's updates as well, so that the attack adapts to it without a
description. It needs no closed form and no descent, and falls back to the mean image.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from regauge.attacks.inversion import to_patches
from regauge.attacks.updates import Rehearsal, SentUpdate
from regauge.errors import UpdateError
from regauge.jigsaw.layers import find_layers

Tensor = torch.Tensor
PENALTIES = tuple(10.0**n for n in range(-2, 4))
FOLDS = 5
# Above this share of unexplained variance in validation, the estimate is the mean image.
MAX_UNEXPLAINED = 0.999


@dataclass(frozen=True, eq=False)
class RidgeModel:
    """A ridge regression in its dual form.

    Attributes:
        kind: The kind of features (`update_features`).
        observed: Features of the training updates [count, features], standardized by `middle` and
            `scale`.
        middle: Mean of the features.
        scale: Standard deviation of the features.
        weights: Dual weights, [count, pixels].
        mean: The mean image.
        unexplained: Share of the variance that is unexplained in validation.
    """

    kind: str
    observed: Tensor
    middle: Tensor
    scale: Tensor
    weights: Tensor
    mean: Tensor
    unexplained: float


def update_features(grads: Mapping[str, Tensor], kind: str) -> Tensor:
    """Summarize an update in few numbers.

    "inputs": for every layer with a bias, its mean input weighted by the gradient of the bias,
    which is the input itself if the layer reads one token. "vectors": the directions of the
    gradients of biases and gains.
    """
    if kind == "inputs":
        inputs = []
        for name, grad in grads.items():
            bias = (
                grads.get(name.removesuffix("weight") + "bias")
                if name.endswith("weight") and grad.ndim > 1
                else None
            )
            if bias is not None and bias.ndim == 1 and grad.shape[0] == len(bias):
                bias_grad = bias.detach().double().cpu()
                inputs.append(
                    grad.detach().double().cpu().flatten(1).T
                    @ bias_grad
                    / bias_grad.square().sum().clamp(min=1e-24)
                )
        return torch.cat(inputs) if inputs else torch.empty(0, dtype=torch.float64)
    vectors = [
        vector.detach().double().cpu().flatten() for vector in grads.values() if vector.ndim == 1
    ]
    return (
        torch.cat([v / v.norm().clamp(min=1e-24) for v in vectors])
        if vectors
        else torch.empty(0, dtype=torch.float64)
    )


def fit_ridge(rehearsals: Iterable[Rehearsal]) -> RidgeModel:
    """Fit on updates with known images; choose features and penalty by five-fold
    cross-validation.
    """
    rows: dict[str, list[Tensor]] = {"inputs": [], "vectors": []}
    images = []
    for rehearsal in rehearsals:
        for kind, features in rows.items():
            features.append(update_features(rehearsal.update.grads, kind).float())
        images.append(
            (rehearsal.inputs if rehearsal.original is None else rehearsal.original)
            .detach()
            .double()
            .cpu()
            .mean(0)
            .flatten()
        )
    if len(images) < 2 * FOLDS:
        raise UpdateError(
            f"the number of rehearsed updates must be >= {2 * FOLDS}, got {len(images)}",
            hint=f"give at least {2 * FOLDS} more images",
        )
    y = torch.stack(images)
    best: RidgeModel | None = None
    for kind, features in rows.items():
        if features[0].numel():
            model = _cross_validate(kind, torch.stack(features).double(), y)
            best = model if best is None or model.unexplained < best.unexplained else best
    if best is None:
        raise UpdateError("the update must contain the gradient of a bias or a gain, got none")
    return best


def ridge_regression(view: SentUpdate, model: RidgeModel) -> Tensor:
    """Estimate the image, or the mean of the images, behind an update, [1, channels, height,
    width], by a fitted regression.

    Sees: the tensors that are sent; other images of the kind, and the client's code.
    Recovers: the coarse look of an image (colours, light and dark), or of a batch's mean; seldom
        details.
    Why it works: a layer's weight gradient, projected on its bias gradient, is the layer's input,
        and features of images determine the images; the attacker computes as many examples as it
        likes.
    What stops it: noise of the size of the whole gradient, as `private` adds; large batches;
        sending no matrices.
    Floor: the mean image.
    Ceiling: the image.
    References: Geiping et al. 2020 (2003.14053), for inputs of linear layers; Dosovitskiy and Brox
        2016 (1506.02753), for learned inversion; Wu et al. 2023 (2210.10880), for learning to
        invert updates.
    Cost: one client update per example.
    """
    x = (update_features(view.grads, model.kind).double() - model.middle) / model.scale
    image = model.mean + (model.observed @ x / len(x)) @ model.weights
    like = next(p for p in view.model.parameters() if p.is_floating_point())
    return image.view(1, *view.shape).to(like)


def resemblance(view: SentUpdate, candidates: Tensor, model: RidgeModel) -> Tensor:
    """Score patches [count, values] by how much nearer they are to the regressed image, at their
    best position, than to the mean image.

    Sees: what `ridge_regression` sees.
    Recovers: whether a patch is in the batch, from any update that reveals the look of its images.
    Why it works: the score is a likelihood ratio.
    What stops it: what stops `ridge_regression`.
    Floor: AUC 0.5.
    Ceiling: 1.
    References: as for `ridge_regression`.
    Cost: negligible after the regression.
    """
    layers = find_layers(view.model, view.shape)
    estimate = to_patches(ridge_regression(view, model).double().cpu(), layers.patch[0])[0]
    mean = to_patches(model.mean.view(1, *view.shape), layers.patch[0])[0]
    c = candidates.double().cpu()
    return (torch.cdist(c, mean).square() - torch.cdist(c, estimate).square()).max(1).values


def _cross_validate(kind: str, x: Tensor, y: Tensor) -> RidgeModel:
    """Fit the dual ridge regression with the best penalty in cross-validation."""
    middle, scale = x.mean(0), x.std(0).clamp(min=1e-12)
    x = (x - middle) / scale
    kernel, mean = x @ x.T / x.shape[1], y.mean(0)
    centred = y - mean
    folds = torch.arange(len(y)) % FOLDS
    errors = []
    for penalty in PENALTIES:
        total = 0.0
        for fold in range(FOLDS):
            is_train, is_test = folds != fold, folds == fold
            fold_weights = torch.linalg.solve(
                kernel[is_train][:, is_train]
                + penalty * torch.eye(int(is_train.sum()), dtype=torch.float64),
                centred[is_train],
            )
            total += float(
                (centred[is_test] - kernel[is_test][:, is_train] @ fold_weights).square().sum()
            )
        errors.append(total / float(centred.square().sum().clamp(min=1e-24)))
    best = min(range(len(PENALTIES)), key=lambda n: errors[n])
    if errors[best] > MAX_UNEXPLAINED:
        return RidgeModel(kind, x, middle, scale, torch.zeros_like(centred), mean, 1.0)
    weights = torch.linalg.solve(
        kernel + PENALTIES[best] * torch.eye(len(y), dtype=torch.float64), centred
    )
    return RidgeModel(kind, x, middle, scale, weights, mean, errors[best])
