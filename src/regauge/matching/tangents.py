"""The tangent space of the group: the gradient of a loss with respect to a small change of an
element.

The neighbours of an element g are d @ g with d = I + X near the identity. A transformed weight w
then changes by X w along an axis of the space, and by -X^T w along a dual axis. With G the gradient
of a loss with respect to w, read along the same axis, the loss changes by <G w^T, X> or -<w G^T,
X>. So the gradient on the group is made of sums of G w^T over the axes of a space: the sums that
matching takes of the weights of two models, taken of a weight and its gradient. No gradient passes
through the action, and every spec is supported.

X in each group (`tangent_grad` returns the gradient in these coordinates, `retract` the member of
one such X, by a map that stays in the group):

    orthogonal             a skew matrix; d = (I - X/2)^-1 (I + X/2), the Cayley map
    orthogonal-ones        a skew matrix whose rows sum to zero: the Cayley map then fixes the ones
                           vector
    linear                 any matrix; the same map
    monomial, monomial+    a number for each coordinate; d = exp(X)
    rotary, turns          a complex number for each plane; d = exp(X). Turns: an imaginary one

Permutations and signs are discrete: `assignment_scores` returns the scores of a straight-through
assignment.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from regauge.core import axes as ax
from regauge.core.groups import (
    GeneralLinear,
    Group,
    Orthogonal,
    OrthogonalFixingOnes,
    Permutation,
    PlaneSigns,
    Rotary,
    Scaling,
    SignedPermutation,
)
from regauge.core.members import Complexes, Dense, Layout, Member, Monomial, Planes, planes
from regauge.core.rng import Floats
from regauge.core.spec import Spec
from regauge.matching.blocks import Values, split_blocks

if TYPE_CHECKING:
    import torch

    Tensor = torch.Tensor

Array = npt.NDArray[Any]
Pair = tuple[Array, Array]


@dataclass
class Sides:
    """The weights of one space with their gradients, by plain, dual and barred axes.

    Each pair is (gradient, weight), two stacks [count, size, features].
    """

    plain: list[Pair] = field(default_factory=list)
    dual: list[Pair] = field(default_factory=list)
    bar: list[Pair] = field(default_factory=list)


def collect_sides(
    spec: Spec, weights: Mapping[str, Tensor], grads: Mapping[str, Tensor], spaces: set[str]
) -> dict[str, Sides]:
    """Return, for each of these spaces, the transformed weights that live in it with their
    gradients.

    Tensors without a gradient are skipped.
    """
    sides = {name: Sides() for name in spaces}
    for pattern, text in spec.tensors.items():
        if not ax.spaces(text) & spaces:
            continue
        g, w = _load_stacked(spec, pattern, grads), _load_stacked(spec, pattern, weights)
        if g is None or w is None:
            continue
        for grad_block, block in zip(
            split_blocks(spec, text, g), split_blocks(spec, text, w), strict=True
        ):
            for dim, leaf in enumerate(block.dims):
                if leaf is None or leaf.space not in spaces:
                    continue
                parent = spec.spaces[leaf.space].over
                outer = None if parent is None else block.axes_of(parent)[0]
                pair = grad_block.unfold(outer, dim), block.unfold(outer, dim)
                side = sides[leaf.space]
                (side.bar if leaf.bar else side.dual if leaf.star else side.plain).append(pair)
    return sides


def _load_stacked(spec: Spec, pattern: str, state: Mapping[str, Tensor]) -> Values | None:
    """Return a tensor of the spec, stacked if the checkpoint stores its parts one by one; None if
    the state lacks it.
    """
    stacked = re.search(r"\{([^{}]+)\}", pattern)
    if not stacked:
        return state[pattern].detach().cpu().numpy() if pattern in state else None
    names = [
        pattern.replace(stacked.group(), str(i)) for i in range(spec.spaces[stacked.group(1)].size)
    ]
    return (
        np.stack([state[n].detach().cpu().numpy() for n in names])
        if all(n in state for n in names)
        else None
    )


def tangent_grad(group: Group, side: Sides) -> Array | None:
    """Return the gradient with respect to X, one for each member of the stack.

    None if the group has no continuous part.
    """
    match group:
        case Orthogonal():
            c = _outer([*side.plain, *side.dual])
            skew = (c - c.swapaxes(1, 2)) / 2
            return _center(skew) if isinstance(group, OrthogonalFixingOnes) else skew
        case GeneralLinear():
            return np.asarray(
                _outer(side.plain, like=side.dual)
                - _outer(side.dual, like=side.plain).swapaxes(1, 2)
            )
        case Scaling():
            return np.asarray(
                _inner(side.plain, like=side.dual) - _inner(side.dual, like=side.plain)
            )
        case PlaneSigns():
            return None
        case Rotary():
            z, z_dual = (
                _plane_products(side.plain, group.layout, like=side.dual),
                _plane_products(side.dual, group.layout, like=side.plain),
            )
            total = z - z_dual.conj()
            return np.asarray(1j * total.imag if group.unit else total)
        case _:
            return None


def project(group: Group, x: Array) -> Array:
    """Project X onto the tangent space of the group.

    Optimizers that treat entries one by one leave it.
    """
    match group:
        case OrthogonalFixingOnes():
            return _center((x - x.swapaxes(1, 2)) / 2)
        case Orthogonal():
            return np.asarray((x - x.swapaxes(1, 2)) / 2)
        case Rotary(unit=True):
            return np.asarray(1j * x.imag)
        case _:
            return x


def retract(group: Group, x: Array) -> Member:
    """Return the member of one X: the identity plus X, up to second order."""
    match group:
        case Orthogonal() | GeneralLinear():
            eye = np.eye(x.shape[1])
            return Dense(np.asarray(np.linalg.solve(eye - x / 2, eye + x / 2)))
        case Scaling():
            return Monomial(np.tile(np.arange(x.shape[1]), (x.shape[0], 1)), np.exp(x))
        case Rotary():
            return Planes(np.exp(x), group.layout)
        case _:
            raise ValueError(f"{group} has no continuous part")


def assignment_scores(group: Group, side: Sides) -> tuple[Floats, Floats] | None:
    """Return similarities and gradients for a straight-through assignment, both of order one.

    Both are matrices [place, candidate] of inner products with the weights of each candidate for a
    place: of the weights that are there now, and of their gradient. The similarity, less a multiple
    of the gradient, scores how well a candidate fits what the loss wants at that place. For QK-norm
    there is one number for each plane, and its sign is assigned. None if the group has no discrete
    part.
    """
    pairs = [*side.plain, *side.dual, *side.bar]
    weight_pairs = [(w, w) for _, w in pairs]
    match group:
        case Permutation() | Scaling():
            scores, grads = _outer(weight_pairs), _outer(pairs)
            size = np.einsum("kii->", scores) / scores.shape[0] / scores.shape[1]
        case PlaneSigns():
            scores, grads = (
                np.asarray(_plane_products(p, group.layout).real) for p in (weight_pairs, pairs)
            )
            size = scores.mean()
        case _:
            return None
    return scores / max(size, 1e-300), grads / max(np.sqrt((grads**2).mean()), 1e-300)


def has_signs(group: Group) -> bool:
    """Return whether the members of a group of permutations may flip coordinates."""
    return isinstance(group, SignedPermutation) or (
        isinstance(group, Scaling) and not group.positive
    )


def _outer(pairs: list[Pair], like: list[Pair] | None = None) -> Floats:
    """Return the sum of G w^T; without pairs zeros, shaped as the sum of the other side."""
    count, size, _ = (pairs or like or [])[0][0].shape
    return np.asarray(sum((g @ w.swapaxes(1, 2) for g, w in pairs), np.zeros((count, size, size))))


def _inner(pairs: list[Pair], like: list[Pair]) -> Floats:
    """Return the sum of <G, w> for each coordinate."""
    return np.asarray(
        sum(
            (np.einsum("knf,knf->kn", g, w) for g, w in pairs),
            np.zeros((pairs or like)[0][0].shape[:2]),
        )
    )


def _plane_products(pairs: list[Pair], layout: Layout, like: list[Pair] | None = None) -> Complexes:
    """Return the sum of G conj(w) for each plane, its two coordinates as one complex number."""
    count, size, _ = (pairs or like or [])[0][0].shape
    a, b = planes(size, layout)
    total = np.zeros((count, size // 2), np.complex128)
    for g, w in pairs:
        total += np.einsum("knf,knf->kn", g[:, a] + 1j * g[:, b], w[:, a] - 1j * w[:, b])
    return total


def _center(x: Floats) -> Floats:
    """Project X so that it maps the ones vector to zero from both sides."""
    x = x - x.mean(1, keepdims=True)
    return np.asarray(x - x.mean(2, keepdims=True))
