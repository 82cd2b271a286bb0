"""Attacks by optimization: images whose gradients match those of the update.

    result = inverting_gradients(view, DescentConfig(steps=400, restarts=4))

All attacks share one engine: an objective on gradients, priors on images, a schedule, and restarts
that run side by side.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from regauge.attacks.classes import expand_counts, label_counts
from regauge.attacks.embeddings import unused_rows
from regauge.attacks.passes import double_backward, make_gradient_fn
from regauge.attacks.updates import SentUpdate
from regauge.core.progress import Progress
from regauge.errors import UpdateError
from regauge.jigsaw.layers import find_layers
from regauge.jigsaw.wrapper import MaskedJigsaw

Tensor = torch.Tensor
Objective = Literal["euclidean", "cosine", "layers", "april"]


@dataclass(frozen=True)
class DescentConfig:
    """Configuration of a descent.

    Attributes:
        steps: Number of optimizer steps.
        restarts: Number of random starts, optimized side by side.
        lr: Peak learning rate.
        objective: Distance between gradients: "euclidean" or "cosine" (over all tensors as one
            vector), "layers" (mean cosine over tensors) or "april" (euclidean, plus the cosine of
            the position gradients).
        tv_weight: Weight of the total variation.
        seam_weight: Weight of the differences across patch borders.
        consensus_weight: Weight of the distance to the mean of the restarts.
        signed: Whether to step along the sign of the image gradient.
        schedule: Learning rate in steps, along a cosine, or constant.
        optimize_labels: Whether to optimize the labels too.
        seed: Random seed.
        progress: Progress callback, in steps.
    """

    steps: int = 300
    restarts: int = 1
    lr: float = 0.1
    objective: Objective = "cosine"
    tv_weight: float = 0.0
    seam_weight: float = 0.0
    consensus_weight: float = 0.0
    signed: bool = True
    schedule: Literal["steps", "cosine", "none"] = "steps"
    optimize_labels: bool = False
    seed: int = 0
    progress: Progress | None = field(default=None, compare=False)


@dataclass(frozen=True, eq=False)
class DescentResult:
    """Images of the best restart [batch, channels, height, width], their labels and objective, and
    the best objective after each twentieth of the steps.
    """

    images: Tensor
    labels: Tensor
    objective: float
    curve: tuple[float, ...] = ()


def descend(
    view: SentUpdate, config: DescentConfig, *, start: Tensor | None = None
) -> DescentResult:
    """Optimize images until their gradients match the update.

    Args:
        view: The model, the update and what is granted.
        config: The configuration.
        start: Images to start from, [batch, channels, height, width]; random if None.

    Returns:
        The best restart.

    Raises:
        UpdateError: The batch size is not granted.
    """
    batch = view.granted.batch
    if batch is None:
        raise UpdateError(
            "the batch size must be granted for an optimization attack, got none",
            hint="pass Threat(batch=True)",
        )
    like = next(p for p in view.model.parameters() if p.is_floating_point())
    target = {n: t.detach().to(like) for n, t in view.grads.items()}
    generator = torch.Generator().manual_seed(config.seed)
    gradient_fn = make_gradient_fn(view, _mask(view))
    shape = (config.restarts, batch, *view.shape)
    x = (
        torch.randn(shape, generator=generator).to(like)
        if start is None
        else start.to(like).expand(shape).clone()
    )
    low, high = _range(view, like)
    labels = None if config.optimize_labels else _labels(view, batch).to(like.device)
    label_logits = (
        0.1 * torch.randn(config.restarts, batch, _classes(view), generator=generator).to(like)
        if config.optimize_labels
        else None
    )
    variables = [x.requires_grad_(True)] + (
        [label_logits.requires_grad_(True)] if label_logits is not None else []
    )
    optimizer = torch.optim.Adam(variables, config.lr)
    best_images, best_objective, curve = (
        x.detach().clone(),
        torch.full((config.restarts,), math.inf, dtype=torch.float64),
        [],
    )
    names, grid = (
        list(target),
        find_layers(view.model, view.shape)
        if config.seam_weight or config.objective == "april"
        else None,
    )
    with double_backward():
        for step in range(config.steps):
            if config.progress is not None:
                config.progress(step, config.steps, "steps")
            for group in optimizer.param_groups:
                group["lr"] = config.lr * _lr_factor(config.schedule, step / config.steps)
            if label_logits is not None:
                targets = label_logits.softmax(-1)
            else:
                targets = labels.expand(config.restarts, batch)  # type: ignore[union-attr]
            grads = gradient_fn(x, targets)
            objective = gradient_distance(
                grads, target, names, config.objective, grid.positions if grid is not None else None
            )
            total = objective
            if config.tv_weight:
                total = total + config.tv_weight * total_variation(x)
            if config.seam_weight and grid is not None:
                total = total + config.seam_weight * patch_seams(x, grid.patch)
            if config.consensus_weight and config.restarts > 1:
                total = total + config.consensus_weight * (x - x.detach().mean(0)).square().flatten(
                    1
                ).mean(1)
            updates = torch.autograd.grad(total.sum(), variables)
            with torch.no_grad():
                is_better = objective.double().cpu() < best_objective
                best_objective = torch.where(is_better, objective.double().cpu(), best_objective)
                best_images[is_better.to(best_images.device)] = x.detach()[
                    is_better.to(best_images.device)
                ]
                if step % max(1, config.steps // 20) == 0:
                    curve.append(float(best_objective.min()))
            for variable, update in zip(variables, updates, strict=True):
                variable.grad = update.sign() if config.signed and variable is x else update
            optimizer.step()
            with torch.no_grad():
                x.clamp_(low, high)
    best_index = int(best_objective.argmin())
    if labels is None:
        labels = label_logits[best_index].argmax(-1)  # type: ignore[index]
    return DescentResult(
        best_images[best_index], labels, float(best_objective[best_index]), tuple(curve)
    )


def gradient_distance(
    grads: Mapping[str, Tensor],
    target: Mapping[str, Tensor],
    names: list[str],
    objective: Objective,
    positions: str | None,
) -> Tensor:
    """Return the distance of each guess's gradients from those of the update: [guesses]."""
    if objective == "cosine":  # over all tensors at once: one product instead of one per tensor
        guess, reference = (
            torch.cat([t.flatten(d) for t in (tensors[n] for n in names)], -1)
            for tensors, d in ((grads, 1), (target, 0))
        )
        return (
            1
            - guess
            @ reference
            / (guess.square().sum(1) * reference.square().sum()).clamp(min=1e-30).sqrt()
        )
    inner_products = torch.stack([(grads[n] * target[n]).flatten(1).sum(1) for n in names])
    guess_power = torch.stack([grads[n].square().flatten(1).sum(1) for n in names])
    target_power = torch.stack([target[n].square().sum() for n in names])[:, None]
    if objective == "layers":
        is_nonzero = target_power[:, 0] > 0
        return (
            1
            - inner_products[is_nonzero]
            / (guess_power[is_nonzero] * target_power[is_nonzero]).clamp(min=1e-30).sqrt()
        ).mean(0)
    out: Tensor = (guess_power - 2 * inner_products + target_power).sum(0)
    if objective == "april" and positions is not None and positions in target:
        position_index = names.index(positions)
        out = out + (
            1
            - inner_products[position_index]
            / (guess_power[position_index] * target_power[position_index]).clamp(min=1e-30).sqrt()
        )
    return out


def total_variation(x: Tensor) -> Tensor:
    """Return the mean total variation of guesses [guesses, batch, channels, height, width]."""
    down, across = (x[..., 1:, :] - x[..., :-1, :]).abs(), (x[..., 1:] - x[..., :-1]).abs()
    variation: Tensor = down.flatten(1).mean(1) + across.flatten(1).mean(1)
    return variation


def patch_seams(x: Tensor, patch: tuple[int, int]) -> Tensor:
    """Return the root mean square difference across patch borders (GradViT's patch prior)."""
    p, q = patch
    down = x[..., p::p, :] - x[..., p - 1 : -1 : p, :]
    across = x[..., q::q] - x[..., q - 1 : -1 : q]
    difference: Tensor = (
        down.square().flatten(1).mean(1).sqrt() + across.square().flatten(1).mean(1).sqrt()
    )
    return difference


def dlg(view: SentUpdate, config: DescentConfig | None = None) -> DescentResult:
    """Optimize images and labels until their gradients are nearest to the update's.

    Sees: model, update, batch size.
    Recovers: images and labels, for small smooth models and single samples.
    Why it works: gradients mostly determine their input, and a descent finds it.
    What stops it: model size (the descent stalls); batches; noise.
    Floor: the mean image.
    Ceiling: exact.
    References: Zhu et al. 2019 (DLG, 1906.08935).
    Cost: as many double backward passes as steps.
    """
    return descend(
        view,
        config
        or DescentConfig(
            objective="euclidean", signed=False, optimize_labels=True, schedule="none"
        ),
    )


def idlg(view: SentUpdate, config: DescentConfig | None = None) -> DescentResult:
    """Optimize images as DLG does, with labels taken from the head's gradient.

    Sees: model, update, batch size.
    Recovers: images, with labels that are exact at batch size 1.
    Why it works: there is one unknown less.
    What stops it: as for DLG.
    Floor: the mean image.
    Ceiling: exact.
    References: Zhao et al. 2020 (iDLG, 2001.02610).
    Cost: as for DLG.
    """
    return descend(
        view, config or DescentConfig(objective="euclidean", signed=False, schedule="none")
    )


def inverting_gradients(
    view: SentUpdate, config: DescentConfig | None = None, *, start: Tensor | None = None
) -> DescentResult:
    """Optimize smooth images whose gradients have the direction of the update.

    Sees: model, update, batch size.
    Recovers: images, also from deeper models.
    Why it works: the direction of a gradient determines the image, its length only the loss; signed
        steps and total variation suppress high frequencies.
    What stops it: batches; noise; layers that are not sent.
    Floor: the mean image.
    Ceiling: exact.
    References: Geiping et al. 2020 (2003.14053).
    Cost: as for DLG, per restart.
    """
    return descend(view, config or DescentConfig(objective="cosine", tv_weight=0.2), start=start)


def gradvit(view: SentUpdate, config: DescentConfig | None = None) -> DescentResult:
    """Optimize images layer by layer with priors for patches.

    Sees: model, update, batch size.
    Recovers: images from ViTs.
    Why it works: every layer's gradient has the same weight; neighbouring patches must be
        continuous; restarts are regularized towards their mean.
    What stops it: as for DLG. The paper's image prior, the batch norms of a ResNet trained on
        ImageNet, is not included.
    Floor: the mean image.
    Ceiling: exact.
    References: Hatamizadeh et al. 2022 (GradViT, 2203.11894).
    Cost: as for DLG, per restart.
    """
    return descend(
        view,
        config
        or DescentConfig(
            objective="layers",
            tv_weight=0.05,
            seam_weight=0.1,
            consensus_weight=0.01,
            schedule="cosine",
        ),
    )


def april_descent(view: SentUpdate, config: DescentConfig | None = None) -> DescentResult:
    """Optimize images by the distance of gradients, plus the direction of the position gradients
    (APRIL's optimization form).

    Sees: model, update with the position gradient, batch size.
    Recovers: images, on unmodified models too.
    Why it works: the position gradient is the gradient of every token and carries most of the
        information.
    What stops it: withholding that gradient.
    Floor: the mean image.
    Ceiling: exact.
    References: Lu et al. (2112.14087), Sec. 4.
    Cost: as for DLG.
    """
    return descend(view, config or DescentConfig(objective="april", tv_weight=0.02, signed=False))


def refine_images(
    view: SentUpdate, start: Tensor, config: DescentConfig | None = None
) -> DescentResult:
    """Run inverting gradients from the solution of a closed form."""
    return inverting_gradients(view, config or DescentConfig(lr=0.02, tv_weight=0.05), start=start)


def _mask(view: SentUpdate) -> Tensor | None:
    """Return the positions with the unknown embedding: as granted, or from the zero rows of the
    position gradient.
    """
    if not isinstance(view.model, MaskedJigsaw):
        return None
    if view.granted.mask is not None:
        return view.granted.mask[:1]
    layers = find_layers(view.model, view.shape)
    if layers.unknown is None or layers.positions is None or layers.positions not in view.grads:
        return None
    table = view.grads[layers.positions][0, layers.prefix :].detach().double()
    return unused_rows(table)[None]


def _labels(view: SentUpdate, batch: int) -> Tensor:
    """Return the granted labels, or those that the head's gradient reveals."""
    if view.granted.labels is not None:
        return view.granted.labels
    return expand_counts(label_counts(view))[:batch]


def _classes(view: SentUpdate) -> int:
    """Return the number of classes."""
    from regauge.jigsaw.layers import find_head

    return int(view.model.get_parameter(find_head(view.model)[0]).shape[0])


def _range(view: SentUpdate, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the range of pixels: that of the granted images, or three standard deviations."""
    if view.granted.images is None:
        return torch.tensor(-3.0).to(like), torch.tensor(3.0).to(like)
    pixels = view.granted.images.transpose(0, 1).flatten(1)
    return pixels.min(1).values.view(-1, 1, 1).to(like), pixels.max(1).values.view(-1, 1, 1).to(
        like
    )


def _lr_factor(schedule: str, progress: float) -> float:
    """Return the factor of the learning rate at a share of the steps."""
    if schedule == "steps":
        return 0.1 ** sum(progress >= milestone for milestone in (3 / 8, 5 / 8, 7 / 8))
    return 0.5 * (1 + math.cos(math.pi * progress)) if schedule == "cosine" else 1.0
