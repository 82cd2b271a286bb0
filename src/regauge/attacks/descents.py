"""Attacks by optimisation: images whose gradients are those of the update.

    found = inverting_gradients(view, How(steps=400, restarts=4))

One engine serves them all: an objective on gradients, priors on images, a schedule, restarts that
run side by side. They differ in these alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from regauge.attacks.classes import label_counts, labels_from
from regauge.attacks.embeddings import silent_rows
from regauge.attacks.passes import slopes_by, twice
from regauge.attacks.updates import SentUpdate
from regauge.errors import UpdateError
from regauge.jigsaw.layers import layers_of
from regauge.jigsaw.wrapper import MaskedJigsaw

Tensor = torch.Tensor
Objective = Literal["euclidean", "cosine", "layers", "april"]


@dataclass(frozen=True)
class How:
    """How a descent goes. `objective` compares gradients: "euclidean" (all as one vector), "cosine"
    (likewise), "layers" (cosine of each tensor, in the mean), "april" (euclidean, and the cosine of
    the positions' gradients). `smooth` weighs total variation, `seams` the edges between patches,
    `near` the distance to the mean of restarts. With `signed` only the sign of the gradient by the
    image counts. `schedule`: the rate falls by steps, along a cosine, or not. `learned` labels are
    optimised too.
    """

    steps: int = 300
    restarts: int = 1
    rate: float = 0.1
    objective: Objective = "cosine"
    smooth: float = 0.0
    seams: float = 0.0
    near: float = 0.0
    signed: bool = True
    schedule: Literal["steps", "cosine", "none"] = "steps"
    learned: bool = False
    seed: int = 0


@dataclass(frozen=True, eq=False)
class Descended:
    """Images of the best restart [batch, channels, height, width], labels, its objective, and the
    objective of every restart after each twentieth part.
    """

    images: Tensor
    labels: Tensor
    objective: float
    curve: tuple[float, ...] = ()


def descend(view: SentUpdate, how: How, *, start: Tensor | None = None) -> Descended:
    """The engine. `start` are images to begin with [batch, channels, height, width]."""
    batch = view.granted.batch
    if batch is None:
        raise UpdateError(
            "how many samples the update was made of is not granted, and nothing can be "
            "optimised without",
            hint="Threat(batch=True)",
        )
    like = next(p for p in view.model.parameters() if p.is_floating_point())
    target = {n: t.detach().to(like) for n, t in view.slopes.items()}
    draw = torch.Generator().manual_seed(how.seed)
    slopes = slopes_by(view, _mask(view))
    shape = (how.restarts, batch, *view.shape)
    x = (
        torch.randn(shape, generator=draw).to(like)
        if start is None
        else start.to(like).expand(shape).clone()
    )
    low, high = _range(view, like)
    labels = None if how.learned else _labels(view, batch).to(like.device)
    answers = (
        0.1 * torch.randn(how.restarts, batch, _classes(view), generator=draw).to(like)
        if how.learned
        else None
    )
    held = [x.requires_grad_(True)] + (
        [answers.requires_grad_(True)] if answers is not None else []
    )
    optimizer = torch.optim.Adam(held, how.rate)
    best, worth, curve = (
        x.detach().clone(),
        torch.full((how.restarts,), math.inf, dtype=torch.float64),
        [],
    )
    names, grid = (
        list(target),
        layers_of(view.model, view.shape) if how.seams or how.objective == "april" else None,
    )
    with twice():
        for step in range(how.steps):
            for group in optimizer.param_groups:
                group["lr"] = how.rate * _falling(how.schedule, step / how.steps)
            y = answers.softmax(-1) if answers is not None else labels.expand(how.restarts, batch)  # type: ignore[union-attr]
            found = slopes(x, y)
            matched = compared(
                found, target, names, how.objective, grid.positions if grid is not None else None
            )
            total = matched
            if how.smooth:
                total = total + how.smooth * variation(x)
            if how.seams and grid is not None:
                total = total + how.seams * seams(x, grid.patch)
            if how.near and how.restarts > 1:
                total = total + how.near * (x - x.detach().mean(0)).square().flatten(1).mean(1)
            gradients = torch.autograd.grad(total.sum(), held)
            with torch.no_grad():
                better = matched.double().cpu() < worth
                worth = torch.where(better, matched.double().cpu(), worth)
                best[better.to(best.device)] = x.detach()[better.to(best.device)]
                if step % max(1, how.steps // 20) == 0:
                    curve.append(float(worth.min()))
            for p, g in zip(held, gradients, strict=True):
                p.grad = g.sign() if how.signed and p is x else g
            optimizer.step()
            with torch.no_grad():
                x.clamp_(low, high)
    chosen = int(worth.argmin())
    told = labels if labels is not None else answers[chosen].argmax(-1)  # type: ignore[index]
    return Descended(best[chosen], told, float(worth[chosen]), tuple(curve))


def compared(
    found: Mapping[str, Tensor],
    target: Mapping[str, Tensor],
    names: list[str],
    objective: Objective,
    positions: str | None,
) -> Tensor:
    """How far the gradients of each guess are from those of the update: [guesses]."""
    if objective == "cosine":  # of all as one: a product in place of one for each tensor
        whole, aim = (
            torch.cat([t.flatten(d) for t in (some[n] for n in names)], -1)
            for some, d in ((found, 1), (target, 0))
        )
        return (
            1 - whole @ aim / (whole.square().sum(1) * aim.square().sum()).clamp(min=1e-30).sqrt()
        )
    both = torch.stack([(found[n] * target[n]).flatten(1).sum(1) for n in names])
    own = torch.stack([found[n].square().flatten(1).sum(1) for n in names])
    true = torch.stack([target[n].square().sum() for n in names])[:, None]
    if objective == "layers":
        told = true[:, 0] > 0
        return (1 - both[told] / (own[told] * true[told]).clamp(min=1e-30).sqrt()).mean(0)
    out: Tensor = (own - 2 * both + true).sum(0)
    if objective == "april" and positions is not None and positions in target:
        at = names.index(positions)
        out = out + (1 - both[at] / (own[at] * true[at]).clamp(min=1e-30).sqrt())
    return out


def variation(x: Tensor) -> Tensor:
    """Total variation of guesses [guesses, batch, channels, height, width], in the mean."""
    down, across = (x[..., 1:, :] - x[..., :-1, :]).abs(), (x[..., 1:] - x[..., :-1]).abs()
    found: Tensor = down.flatten(1).mean(1) + across.flatten(1).mean(1)
    return found


def seams(x: Tensor, patch: tuple[int, int]) -> Tensor:
    """How much images jump where two patches meet (GradViT's patch prior)."""
    p, q = patch
    down = x[..., p::p, :] - x[..., p - 1 : -1 : p, :]
    across = x[..., q::q] - x[..., q - 1 : -1 : q]
    found: Tensor = (
        down.square().flatten(1).mean(1).sqrt() + across.square().flatten(1).mean(1).sqrt()
    )
    return found


def dlg(view: SentUpdate, how: How | None = None) -> Descended:
    """Images and labels whose gradients are nearest to the update's.

    Sees: model, update, batch size. Recovers: images and labels, of small smooth models and single
    samples. Why it works: gradients determine their input, mostly, and a descent finds it. What
    stops it: size (it gets stuck), batches, noise. Floor: the mean image. Ceiling: exact.
    References: Zhu et al. 2019 (DLG, 1906.08935). Cost: as many double backward passes as steps.
    """
    return descend(
        view, how or How(objective="euclidean", signed=False, learned=True, schedule="none")
    )


def idlg(view: SentUpdate, how: How | None = None) -> Descended:
    """The same with labels that were read off the head's gradient first.

    Sees: model, update, batch size. Recovers: images, given labels that are exact at batch 1. Why
    it works: one unknown less. What stops it: as DLG. Floor: the mean image. Ceiling: exact.
    References: Zhao et al. 2020 (iDLG, 2001.02610). Cost: as DLG.
    """
    return descend(view, how or How(objective="euclidean", signed=False, schedule="none"))


def inverting_gradients(
    view: SentUpdate, how: How | None = None, *, start: Tensor | None = None
) -> Descended:
    """Images whose gradients point the way of the update's, and that are smooth.

    Sees: model, update, batch size. Recovers: images, also of deeper models. Why it works: the
    direction of a gradient says what the image is, its length only how well the model does; signed
    steps and total variation keep the descent out of high frequencies. What stops it: batches,
    noise, layers that are not sent. Floor: the mean image. Ceiling: exact. References: Geiping et
    al. 2020 (2003.14053). Cost: as DLG, for each restart.
    """
    return descend(view, how or How(objective="cosine", smooth=0.2), start=start)


def gradvit(view: SentUpdate, how: How | None = None) -> Descended:
    """Images by gradients layer by layer, with priors for patches.

    Sees: model, update, batch size. Recovers: images of ViTs. Why it works: every layer's gradient
    counts alike; patches must continue each other; restarts pull each other to their mean. What
    stops it: as above. **Not the paper's**: its image prior is the batch norms of a ResNet that was
    trained on ImageNet, which is not here. Floor: the mean image. Ceiling: exact. References:
    Hatamizadeh et al. 2022 (GradViT, 2203.11894). Cost: as above.
    """
    return descend(
        view, how or How(objective="layers", smooth=0.05, seams=0.1, near=0.01, schedule="cosine")
    )


def april_descent(view: SentUpdate, how: How | None = None) -> Descended:
    """APRIL's optimisation form: gradients by distance, those of the positions by direction too.

    Sees: model, update with the positions' gradient, batch size. Recovers: images, on unmodified
    models too. Why it works: that gradient is the one by every token, and so says most. What stops
    it: that gradient withheld. Floor: the mean image. Ceiling: exact. References: Lu et al.
    (2112.14087), Sec. 4. Cost: as DLG.
    """
    return descend(view, how or How(objective="april", smooth=0.02, signed=False))


def refined(view: SentUpdate, start: Tensor, how: How | None = None) -> Descended:
    """Inverting gradients from where a closed form ended."""
    return inverting_gradients(view, how or How(rate=0.02, smooth=0.05), start=start)


def _mask(view: SentUpdate) -> Tensor | None:
    """The places that the unknown embedding has, as granted, or as the zero rows of the positions'
    gradient tell.
    """
    if not isinstance(view.model, MaskedJigsaw):
        return None
    if view.granted.mask is not None:
        return view.granted.mask[:1]
    layers = layers_of(view.model, view.shape)
    if layers.unknown is None or layers.positions is None or layers.positions not in view.slopes:
        return None
    table = view.slopes[layers.positions][0, layers.prefix :].detach().double()
    return silent_rows(table)[None]


def _labels(view: SentUpdate, batch: int) -> Tensor:
    if view.granted.labels is not None:
        return view.granted.labels
    return labels_from(label_counts(view))[:batch]


def _classes(view: SentUpdate) -> int:
    from regauge.jigsaw.layers import head_of

    return int(view.model.get_parameter(head_of(view.model)[0]).shape[0])


def _range(view: SentUpdate, like: Tensor) -> tuple[Tensor, Tensor]:
    """What pixels can be: as of the images that are granted, or three deviations."""
    if view.granted.images is None:
        return torch.tensor(-3.0).to(like), torch.tensor(3.0).to(like)
    over = view.granted.images.transpose(0, 1).flatten(1)
    return over.min(1).values.view(-1, 1, 1).to(like), over.max(1).values.view(-1, 1, 1).to(like)


def _falling(schedule: str, along: float) -> float:
    if schedule == "steps":
        return 0.1 ** sum(along >= mark for mark in (3 / 8, 5 / 8, 7 / 8))
    return 0.5 * (1 + math.cos(math.pi * along)) if schedule == "cosine" else 1.0
