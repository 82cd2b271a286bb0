"""Inversion by least squares: the cheapest attack on features of images, and often the best.

An embedding is affine, so that its inverse is; where noise was added, the best affine guess is the
Wiener filter, which regression on pairs finds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch

from regauge.attacks.inversion import Inverted, in_order, probe, to_images, to_patches
from regauge.attacks.views import PairedImages

Tensor = torch.Tensor
Predict = Callable[[Tensor], Tensor]
Scope = Literal["token", "image", "both", "set"]
LEADS = (
    1e-12,
    *(10.0**p for p in range(-6, 5)),
)  # how much of the features' own mean square is added: the size of the noise that is expected


def ridge(
    view: PairedImages,
    *,
    scopes: Sequence[Scope] = ("token", "image", "both"),
    shuffled: bool = False,
    seed: int = 0,
) -> Inverted:
    """Images from features, in closed form: from each token to its patch, from all tokens to the
    image, or from one to what the other left. The scope "set" asks for no order at all: what it
    regresses on are means over the tokens of random waves (a kernel between sets), so that both
    sides may be shuffled, and its answer need not be affine.

    Sees: features, and features of images of its own, in order (with `shuffled`, those that it
    attacks are in no order, and the probe finds it). Recovers: the images. Why it works: what a
    client sends is an affine function of each patch, or nearly; from all tokens at once, what noise
    took from one is known from its neighbours. What stops it: much noise; what is not affine (a
    client with blocks of its own); samples mixed. Floor: the mean image. Ceiling: exact, without a
    defence. References: Wiener 1949; Rahimi and Recht 2007 (random waves); 000 Sec. 5.3 for the
    setting. Cost: seconds; the ridge, and which of `scopes` it is, are those with the least loss on
    a tenth of the pairs, held out.
    """
    size, channels = view.patch, view.images.shape[1]
    y = to_patches(view.images.double(), size)
    x = view.features.double()
    seen = view.seen.double()
    if shuffled and set(scopes) != {"set"}:
        seen = in_order(view.seen, probe(view, seed=seed)).double()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    held, used = order[: max(1, len(x) // 10)], order[max(1, len(x) // 10) :]
    floor = float((y[held] - y[used].mean(0)).square().mean())
    tried: dict[Scope, tuple[float, float]] = {}
    for scope in scopes:
        fits = _fits(scope, x[used], y[used], _first(tried))
        losses = {lead: float((fits(lead)(x[held]) - y[held]).square().mean()) for lead in LEADS}
        lead = min(losses, key=lambda one: losses[one])
        tried[scope] = losses[lead], lead
    best = min(tried, key=lambda scope: tried[scope][0])
    found = _fits(best, x, y, _first(tried))(tried[best][1])(seen).clamp(
        float(y.min()), float(y.max())
    )
    return Inverted(
        to_images(found, size, channels).to(view.images.dtype),
        tuple(tried[s][0] for s in tried),
        floor,
    )


def _first(tried: Mapping[Scope, tuple[float, float]]) -> float:
    return tried["token"][1] if "token" in tried else LEADS[0]


def _fits(scope: Scope, x: Tensor, y: Tensor, first_lead: float) -> Callable[[float], Predict]:
    """The regression of a scope, for any ridge."""
    if scope == "set":
        waves = _waves(x)
        inner = _by_image(waves(x), y)
        return lambda lead: lambda z: inner(lead)(waves(z))
    if scope == "token":
        return _by_token(x, y)
    if scope == "image":
        return _by_image(x, y)
    first = _by_token(x, y)(first_lead)
    rest = _by_image(x, y - first(x))

    def both(lead: float) -> Predict:
        after = rest(lead)
        return lambda z: first(z) + after(z)

    return both


def _by_token(x: Tensor, y: Tensor) -> Callable[[float], Predict]:
    """One matrix for all places, and a mean for each: what a patch embedding with positions is."""
    skip = x.shape[1] - y.shape[1]  # a first token is of no patch
    at, to = x[:, skip:].mean(0), y.mean(0)
    solve = _solver((x[:, skip:] - at).flatten(0, 1), (y - to).flatten(0, 1))

    def fit(lead: float) -> Predict:
        weight = solve(lead)
        return lambda z: (z[:, skip:] - at) @ weight + to

    return fit


def _by_image(x: Tensor, y: Tensor) -> Callable[[float], Predict]:
    """From all tokens to all patches."""
    at, to = x.mean(0), y.mean(0)
    solve = _solver((x - at).flatten(1), (y - to).flatten(1))

    def fit(lead: float) -> Predict:
        weight = solve(lead)
        return lambda z: ((z - at).flatten(1) @ weight).view(len(z), *y.shape[1:]) + to

    return fit


def _waves(x: Tensor, count: int = 1536) -> Callable[[Tensor], Tensor]:
    """For each sample, [samples, 1, waves], the means over its tokens of waves of several
    lengths.
    """
    draw = torch.Generator().manual_seed(0)
    mean, scale = x.mean((0, 1)), x.std().clamp(min=1e-12)
    active = max(1, int((x.std((0, 1)) > 1e-9 * scale).sum()))
    turns = torch.randn(x.shape[-1], count, generator=draw, dtype=x.dtype) / active**0.5
    turns *= torch.tensor([0.5, 1.0, 2.0], dtype=x.dtype).repeat_interleave(count // 3)
    phase = 2 * torch.pi * torch.rand(count, generator=draw, dtype=x.dtype)

    def waves(z: Tensor) -> Tensor:
        return torch.cat(
            [
                torch.cos((part - mean) / scale @ turns + phase).mean(1, keepdim=True)
                for part in torch.split(z, 128)
            ]
        )

    return waves


def _solver(a: Tensor, b: Tensor) -> Callable[[float], Tensor]:
    """The weights of a ridge regression for any ridge, from one eigendecomposition: of rows or of
    columns, whichever are fewer.
    """
    wide = a.shape[1] > a.shape[0]
    values, vectors = torch.linalg.eigh(a @ a.T if wide else a.T @ a)
    values, size = values.clamp(min=0), float(values.mean()) + 1e-300
    told = vectors.T @ (b if wide else a.T @ b)

    def solve(lead: float) -> Tensor:
        inner = vectors @ (told / (values + lead * size)[:, None])
        out: Tensor = a.T @ inner if wide else inner
        return out

    return solve
