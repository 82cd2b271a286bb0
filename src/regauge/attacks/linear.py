"""Inversion by least squares: the cheapest attack on features of images, and often the best.

An embedding is affine, so that its inverse is; where noise was added, the best affine guess is the Wiener filter, which regression on pairs finds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch

from regauge.attacks.inversion import Inverted, in_order, probe, to_images, to_patches
from regauge.attacks.views import PairedImages

Tensor = torch.Tensor
Predict = Callable[[Tensor], Tensor]
Scope = Literal["token", "image", "both"]
LEADS = (1e-12, *(10.0**p for p in range(-6, 5)))  # how much of the features' own mean square is added: the size of the noise that is expected


def ridge(view: PairedImages, *, scopes: Sequence[Scope] = ("token", "image", "both"), shuffled: bool = False, seed: int = 0) -> Inverted:
    """Images from features, in closed form: from each token to its patch, from all tokens to the image, or from one to what the other left.

    Sees: features, and features of images of its own, in order (with `shuffled`, those that it attacks are in no order, and the probe finds it).
    Recovers: the images. Why it works: what a client sends is an affine function of each patch, or nearly; from all tokens at once, what noise took
    from one is known from its neighbours. What stops it: much noise; what is not affine (a client with blocks of its own); samples mixed. Floor: the
    mean image. Ceiling: exact, without a defence. References: Wiener 1949; 000 Sec. 5.3 for the setting. Cost: seconds; the ridge, and which of
    `scopes` it is, are those with the least loss on a tenth of the pairs, held out.
    """
    size, channels = view.patch, view.images.shape[1]
    y = to_patches(view.images.double(), size)
    x = view.features.double()
    seen = (in_order(view.seen, probe(view, seed=seed)) if shuffled else view.seen).double()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    held, used = order[: max(1, len(x) // 10)], order[max(1, len(x) // 10) :]
    floor = float((y[held] - y[used].mean(0)).square().mean())
    tried: dict[Scope, tuple[float, float]] = {}
    for scope in scopes:
        first = tried.get("token", (0.0, LEADS[0]))[1]
        losses = {lead: float((fit(x[used], y[used])(x[held]) - y[held]).square().mean()) for lead, fit in _fits(scope, first)}
        lead = min(losses, key=lambda one: losses[one])
        tried[scope] = losses[lead], lead
    best = min(tried, key=lambda scope: tried[scope][0])
    fit = dict(_fits(best, tried.get("token", (0.0, LEADS[0]))[1]))[tried[best][1]]
    found = fit(x, y)(seen).clamp(float(y.min()), float(y.max()))
    return Inverted(to_images(found, size, channels).to(view.images.dtype), tuple(tried[s][0] for s in tried), floor)


Fit = Callable[[Tensor, Tensor], Predict]


def _fits(scope: Scope, first_lead: float) -> list[tuple[float, Fit]]:
    def both(lead: float) -> Fit:
        def fit(x: Tensor, y: Tensor) -> Predict:
            first = _by_token(x, y, first_lead)
            rest = _by_image(x, y - first(x), lead)
            return lambda z: first(z) + rest(z)

        return fit

    kinds: dict[Scope, Callable[[float], Fit]] = {
        "token": lambda lead: lambda x, y: _by_token(x, y, lead),
        "image": lambda lead: lambda x, y: _by_image(x, y, lead),
        "both": both,
    }
    return [(lead, kinds[scope](lead)) for lead in LEADS]


def _by_token(x: Tensor, y: Tensor, lead: float) -> Predict:
    """One matrix for all places, and a mean for each: what a patch embedding with positions is."""
    skip = x.shape[1] - y.shape[1]  # a first token is of no patch
    at, to = x[:, skip:].mean(0), y.mean(0)
    a, b = (x[:, skip:] - at).flatten(0, 1), (y - to).flatten(0, 1)
    gram = a.T @ a
    gram += (lead * float(gram.diagonal().mean()) + 1e-300) * torch.eye(len(gram), dtype=gram.dtype)
    weight = torch.linalg.solve(gram, a.T @ b)
    return lambda z: (z[:, skip:] - at) @ weight + to


def _by_image(x: Tensor, y: Tensor, lead: float) -> Predict:
    """From all tokens to all patches: as many equations as pairs, in the dual form."""
    at, to = x.mean(0), y.mean(0)
    a, b = (x - at).flatten(1), (y - to).flatten(1)
    gram = a @ a.T
    gram += (lead * float(gram.diagonal().mean()) + 1e-300) * torch.eye(len(gram), dtype=gram.dtype)
    weight = torch.linalg.solve(gram, b)
    return lambda z: ((z - at).flatten(1) @ a.T @ weight).view(len(z), *y.shape[1:]) + to
