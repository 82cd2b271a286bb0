"""Inversion by least squares: the cheapest attack on features of images, and often the best.

An embedding is affine, and so is its inverse. With added noise the best affine estimate is the
Wiener filter, which regression on pairs finds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch

from regauge.attacks.inversion import (
    InversionResult,
    position_probe,
    restore_order,
    to_images,
    to_patches,
)
from regauge.attacks.views import PairedImages

Tensor = torch.Tensor
Predict = Callable[[Tensor], Tensor]
Scope = Literal["token", "image", "both", "set"]
PENALTIES = (
    1e-12,
    *(10.0**p for p in range(-6, 5)),
)  # ridge penalties, relative to the mean square of the features: the expected noise


def ridge_inversion(
    view: PairedImages,
    *,
    scopes: Sequence[Scope] = ("token", "image", "both"),
    shuffled: bool = False,
    seed: int = 0,
) -> InversionResult:
    """Recover images from features in closed form.

    The scope "token" maps each token to its patch, "image" all tokens to the image, and "both" fits
    the image scope to the residual of the token scope. The scope "set" is independent of order: it
    regresses on means over tokens of random Fourier features (a kernel between sets), so that both
    sides may be shuffled and the estimate need not be affine.

    Sees: features, and features of the adversary's own images, in order (with `shuffled`, the
        attacked features come in random order, which the position probe restores).
    Recovers: the images.
    Why it works: what a client sends is an affine function of each patch, or nearly; with all
        tokens at once, neighbours restore what noise removed from one.
    What stops it: strong noise; a client that is not affine (with blocks of its own); mixed
        samples.
    Floor: the mean image.
    Ceiling: exact, without a defence.
    References: Wiener 1949; Rahimi and Recht 2007 (random features); Xu et al.
        (permutation equivariance, 2304.07735), Sec. 5.3, for the setting.
    Cost: seconds; the penalty and the scope have the lowest loss on a tenth of the pairs, held out.

    Args:
        view: The observed features and the adversary's pairs.
        scopes: The scopes to choose from.
        shuffled: Whether the observed tokens come in random order.
        seed: Random seed of the held-out split.
    """
    size, channels = view.patch, view.images.shape[1]
    y = to_patches(view.images.double(), size)
    x = view.features.double()
    observed = view.observed.double()
    if shuffled and set(scopes) != {"set"}:
        observed = restore_order(view.observed, position_probe(view, seed=seed)).double()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    heldout, train = order[: max(1, len(x) // 10)], order[max(1, len(x) // 10) :]
    floor = float((y[heldout] - y[train].mean(0)).square().mean())
    scores: dict[Scope, tuple[float, float]] = {}
    for scope in scopes:
        fit = _scope_regression(scope, x[train], y[train], _token_penalty(scores))
        losses = {
            penalty: float((fit(penalty)(x[heldout]) - y[heldout]).square().mean())
            for penalty in PENALTIES
        }
        penalty = min(losses, key=lambda candidate: losses[candidate])
        scores[scope] = losses[penalty], penalty
    best = min(scores, key=lambda scope: scores[scope][0])
    patches = _scope_regression(best, x, y, _token_penalty(scores))(scores[best][1])(
        observed
    ).clamp(float(y.min()), float(y.max()))
    return InversionResult(
        to_images(patches, size, channels).to(view.images.dtype),
        tuple(scores[s][0] for s in scores),
        floor,
    )


def _token_penalty(scores: Mapping[Scope, tuple[float, float]]) -> float:
    """Return the penalty chosen for the token scope, or the smallest."""
    return scores["token"][1] if "token" in scores else PENALTIES[0]


def _scope_regression(
    scope: Scope, x: Tensor, y: Tensor, token_penalty: float
) -> Callable[[float], Predict]:
    """Return the regression of a scope as a function of the penalty."""
    if scope == "set":
        features = _random_features(x)
        inner = _by_image(features(x), y)
        return lambda penalty: lambda z: inner(penalty)(features(z))
    if scope == "token":
        return _by_token(x, y)
    if scope == "image":
        return _by_image(x, y)
    first = _by_token(x, y)(token_penalty)
    rest = _by_image(x, y - first(x))

    def both(penalty: float) -> Predict:
        after = rest(penalty)
        return lambda z: first(z) + after(z)

    return both


def _by_token(x: Tensor, y: Tensor) -> Callable[[float], Predict]:
    """Fit one matrix for all positions and a mean for each: the form of a patch embedding with
    positions.
    """
    skip = x.shape[1] - y.shape[1]  # leading tokens without a patch
    x_mean, y_mean = x[:, skip:].mean(0), y.mean(0)
    solve = _solver((x[:, skip:] - x_mean).flatten(0, 1), (y - y_mean).flatten(0, 1))

    def fit(penalty: float) -> Predict:
        regress = solve(penalty)
        return lambda z: regress(z[:, skip:] - x_mean) + y_mean

    return fit


def _by_image(x: Tensor, y: Tensor) -> Callable[[float], Predict]:
    """Fit all patches on all tokens."""
    x_mean, y_mean = x.mean(0), y.mean(0)
    solve = _solver((x - x_mean).flatten(1), (y - y_mean).flatten(1))

    def fit(penalty: float) -> Predict:
        regress = solve(penalty)
        return lambda z: regress((z - x_mean).flatten(1)).view(len(z), *y.shape[1:]) + y_mean

    return fit


def _random_features(x: Tensor, count: int = 1536) -> Callable[[Tensor], Tensor]:
    """Return a map to [samples, 1, features]: means over tokens of random Fourier features of
    several scales.
    """
    generator = torch.Generator().manual_seed(0)
    mean, scale = x.mean((0, 1)), x.std().clamp(min=1e-12)
    active = max(1, int((x.std((0, 1)) > 1e-9 * scale).sum()))
    frequencies = torch.randn(x.shape[-1], count, generator=generator, dtype=x.dtype) / active**0.5
    frequencies *= torch.tensor([0.5, 1.0, 2.0], dtype=x.dtype).repeat_interleave(count // 3)
    phase = 2 * torch.pi * torch.rand(count, generator=generator, dtype=x.dtype)

    def features(z: Tensor) -> Tensor:
        return torch.cat(
            [
                torch.cos((part - mean) / scale @ frequencies + phase).mean(1, keepdim=True)
                for part in torch.split(z, 128)
            ]
        )

    return features


def _solver(a: Tensor, b: Tensor) -> Callable[[float], Predict]:
    """Return ridge regression as a function of the penalty, from one eigendecomposition of rows or
    columns, whichever are fewer.

    With fewer rows than columns the weights, [columns, values], are never formed: for the tokens of
    224 pixels they would take 182 GB.
    """
    is_wide = a.shape[1] > a.shape[0]
    values, vectors = torch.linalg.eigh(a @ a.T if is_wide else a.T @ a)
    values, size = values.clamp(min=0), float(values.mean()) + 1e-300
    projected = vectors.T @ (b if is_wide else a.T @ b)

    def solve(penalty: float) -> Predict:
        shrunk = values + penalty * size
        if is_wide:
            return lambda z: z @ a.T @ vectors / shrunk @ projected
        weight = vectors @ (projected / shrunk[:, None])
        return lambda z: z @ weight

    return solve
