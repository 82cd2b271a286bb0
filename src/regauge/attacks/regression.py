"""Images by regression: an attacker makes many updates of its own images with the client's code,
and learns what they say of the images.

Whatever a defence does to an update, it does to the attacker's own as well, so that this adapts to
each without being told how. It needs no closed form and no descent, and gives no less than the mean
image.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from regauge.attacks.inversion import to_patches
from regauge.attacks.updates import Rehearsal, SentUpdate
from regauge.errors import UpdateError
from regauge.jigsaw.layers import layers_of

Tensor = torch.Tensor
PENALTIES = tuple(10.0**n for n in range(-2, 4))
FOLDS = 5
# of the images' variance, in validation: what leaves more than this is no answer, and the mean
# image is
GIVES = 0.999


@dataclass(frozen=True, eq=False)
class Learned:
    """A ridge regression, in its dual form: what updates were `seen` [count, features] (each less
    `middle`, over `scale`), the weights that answer for them [count, pixels], and the mean image.
    `kind` are the features; `left` is the share of the variance that it did not explain in
    validation.
    """

    kind: str
    seen: Tensor
    middle: Tensor
    scale: Tensor
    weights: Tensor
    mean: Tensor
    left: float


def features_of(slopes: Mapping[str, Tensor], kind: str) -> Tensor:
    """What an update says in few numbers. "inputs": of every layer with a bias, its inputs in the
    mean, weighed as the gradient by the bias weighs them, which is the input itself where a layer
    reads one token; "vectors": the directions of the gradients by biases and gains.
    """
    if kind == "inputs":
        found = []
        for name, slope in slopes.items():
            bias = (
                slopes.get(name.removesuffix("weight") + "bias")
                if name.endswith("weight") and slope.ndim > 1
                else None
            )
            if bias is not None and bias.ndim == 1 and slope.shape[0] == len(bias):
                along = bias.detach().double().cpu()
                found.append(
                    slope.detach().double().cpu().flatten(1).T
                    @ along
                    / along.square().sum().clamp(min=1e-24)
                )
        return torch.cat(found) if found else torch.empty(0, dtype=torch.float64)
    vectors = [s.detach().double().cpu().flatten() for s in slopes.values() if s.ndim == 1]
    return (
        torch.cat([v / v.norm().clamp(min=1e-24) for v in vectors])
        if vectors
        else torch.empty(0, dtype=torch.float64)
    )


def learn_regression(rehearsals: Iterable[Rehearsal]) -> Learned:
    """Fit on updates whose images are known; features and penalty by validation in five parts."""
    rows: dict[str, list[Tensor]] = {"inputs": [], "vectors": []}
    images = []
    for one in rehearsals:
        for kind, held in rows.items():
            held.append(features_of(one.update.slopes, kind).float())
        images.append(
            (one.read if one.original is None else one.original)
            .detach()
            .double()
            .cpu()
            .mean(0)
            .flatten()
        )
    if len(images) < 2 * FOLDS:
        raise UpdateError(
            f"{len(images)} updates of its own are too few for an attacker to learn from",
            hint=f"give at least {2 * FOLDS} more images",
        )
    y = torch.stack(images)
    best: Learned | None = None
    for kind, held in rows.items():
        if held[0].numel():
            found = _fitted(kind, torch.stack(held).double(), y)
            best = found if best is None or found.left < best.left else best
    if best is None:
        raise UpdateError(
            "the update has neither a bias nor a gain, nor a layer with one: there is nothing "
            "to learn from"
        )
    return best


def regressed(view: SentUpdate, learned: Learned) -> Tensor:
    """The image, or the mean of the images, that an update was made of, [1, channels, height,
    width], as learned from other updates.

    Sees: whatever tensors are sent; other images of the kind, and the client's code. Recovers: the
    coarse look of an image (colours, light and dark), of a batch that of its mean; seldom details.
    Why it works: a layer's gradient by its weight, taken along its gradient by its bias, is what
    the layer was given, and features of images tell the images; the attacker makes as many examples
    as it likes. What stops it: noise of the size of the whole gradient, as `private` adds; large
    batches; sending no matrices. Floor: the mean image. Ceiling: the image. References: Geiping et
    al. 2020 (2003.14053), for inputs of linear layers; Dosovitskiy and Brox 2016 (1506.02753), for
    learned inversion; Wu et al. 2023 (2210.10880), for learning to invert updates. Cost: one update
    of the client's for each example.
    """
    x = (features_of(view.slopes, learned.kind).double() - learned.middle) / learned.scale
    found = learned.mean + (learned.seen @ x / len(x)) @ learned.weights
    like = next(p for p in view.model.parameters() if p.is_floating_point())
    return found.view(1, *view.shape).to(like)


def resemblance(view: SentUpdate, candidates: Tensor, learned: Learned) -> Tensor:
    """For each patch [count, values] a score: how much nearer it is to the regressed image, at its
    best place, than to the mean image.

    Sees: what the regression sees. Recovers: is this patch in the batch, from any update that tells
    its images' look. Why it works: a likelihood ratio. What stops it: what stops the regression.
    Floor: AUC 0.5. Ceiling: 1. References: as there. Cost: none after it.
    """
    layers = layers_of(view.model, view.shape)
    found = to_patches(regressed(view, learned).double().cpu(), layers.patch[0])[0]
    mean = to_patches(learned.mean.view(1, *view.shape), layers.patch[0])[0]
    c = candidates.double().cpu()
    return (torch.cdist(c, mean).square() - torch.cdist(c, found).square()).max(1).values


def _fitted(kind: str, x: Tensor, y: Tensor) -> Learned:
    middle, scale = x.mean(0), x.std(0).clamp(min=1e-12)
    x = (x - middle) / scale
    kernel, mean = x @ x.T / x.shape[1], y.mean(0)
    away = y - mean
    part = torch.arange(len(y)) % FOLDS
    missed = []
    for penalty in PENALTIES:
        total = 0.0
        for fold in range(FOLDS):
            held, out = part != fold, part == fold
            answer = torch.linalg.solve(
                kernel[held][:, held] + penalty * torch.eye(int(held.sum()), dtype=torch.float64),
                away[held],
            )
            total += float((away[out] - kernel[out][:, held] @ answer).square().sum())
        missed.append(total / float(away.square().sum().clamp(min=1e-24)))
    least = min(range(len(PENALTIES)), key=lambda n: missed[n])
    if missed[least] > GIVES:
        return Learned(kind, x, middle, scale, torch.zeros_like(away), mean, 1.0)
    weights = torch.linalg.solve(
        kernel + PENALTIES[least] * torch.eye(len(y), dtype=torch.float64), away
    )
    return Learned(kind, x, middle, scale, weights, mean, missed[least])
