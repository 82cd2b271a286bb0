"""Invariants of the weights under every element of the group.

A tensor on whose axes orthogonal members act keeps its singular values. A general linear member
acts on two sides at once, so the product of the two is invariant: of each head the singular values
of Q^T K and of O V, in any order of heads. A scaled neuron keeps the product of the norms of its
two sides; a gain keeps its values, in any order. For orthogonal groups the distance of the singular
values is a lower bound (Mirsky): no element brings one model closer to the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from regauge.core.action import State
from regauge.core.groups import GeneralLinear, Permutation, Rotary, Scaling
from regauge.core.rng import Floats
from regauge.core.spec import Spec
from regauge.matching.blocks import Block
from regauge.matching.costs import Costs

if TYPE_CHECKING:
    from regauge.models.sources import Source


def invariants(source: Source, *, spec: Spec | str | Path | None = None) -> dict[str, Floats]:
    """Return the invariants of a model; as `state_invariants`.

    Args:
        source: A path, a hub id, a checkpoint, a module, or a state dict with `spec`.
        spec: A spec or spec file. Default: that of the model's family.

    Returns:
        The invariants, by the name of a space or a tensor.

    Example:
        >>> regauge.invariants("model")["qk.0"].shape
        (3, 4)
    """
    from regauge.models.sources import require_fit, resolve

    model = resolve(source, spec)
    require_fit(model.checkpoint, model.spec)
    return state_invariants(model.spec, model.checkpoint)


def state_invariants(spec: Spec, state: State) -> dict[str, Floats]:
    """Return the invariants, by a tensor's name (and which of its blocks) or by the name of a
    space.

    The order of the numbers does not depend on the basis.
    """
    costs = Costs(spec, state, state)
    values: dict[str, Floats] = {}
    sides: dict[str, tuple[list[Floats], list[Floats]]] = {}
    for pattern in costs.patterns:
        for i, block in enumerate(costs.target_blocks(pattern)):
            scaled = [s for s in block.spaces if not _is_orthogonal(spec, s)]
            if not scaled:
                values[f"{pattern}#{i}" if len(costs.layouts[pattern]) > 1 else pattern] = (
                    _spectrum(spec, block)
                )
                continue
            # A block of two such spaces has no invariant.
            for space in scaled if len(scaled) == 1 else ():
                axis, over = block.axes_of(space)[0], spec.spaces[space].over
                outer = block.axes_of(over)[0] if over is not None else None
                leaf = block.dims[axis]
                assert leaf is not None
                if not leaf.bar:
                    sides.setdefault(space, ([], []))[leaf.star].append(block.unfold(outer, axis))
    for space, (plain, dual) in sides.items():
        if plain and dual:
            q, k = np.concatenate(plain, axis=2), np.concatenate(dual, axis=2)
            values[space] = _product_invariants(q, k, spec, space)
    return values


def find_nonfinite(state: State) -> str | None:
    """Return the name of a tensor with NaN or Inf, which has no singular values; None if there
    is none.
    """
    return next(
        (
            name
            for name, t in state.items()
            if t.is_floating_point() and not bool(t.isfinite().all())
        ),
        None,
    )


def invariant_distance(
    first: Mapping[str, Floats], second: Mapping[str, Floats]
) -> dict[str, tuple[float, float]]:
    """Return, for each invariant that both have, the squared distance and the squared norm of
    the second.
    """
    return {
        n: (float(((first[n] - second[n]) ** 2).sum()), float((second[n] ** 2).sum()))
        for n in second
        if n in first and first[n].shape == second[n].shape
    }


def _is_orthogonal(spec: Spec, space: str) -> bool:
    """Return whether the group of a space is orthogonal."""
    return spec.spaces[space].group.is_orthogonal


def _spectrum(spec: Spec, block: Block) -> Floats:
    """Return the sorted values of gains and vectors, otherwise singular values.

    For these a space, its parent and its siblings are one axis.
    """
    # Permutations with signs are included.
    is_permuted = all(isinstance(spec.spaces[s].group, Permutation) for s in block.spaces)
    if (block.values.ndim == 1 and is_permuted) or any(d is not None and d.bar for d in block.dims):
        return np.sort(np.abs(np.asarray(block.values, np.float64)).reshape(-1))
    roots = [None if d is None else spec.spaces[d.space].over or d.space for d in block.dims]
    first = next(r for r in roots if r is not None)
    rows = [i for i, r in enumerate(roots) if r == first]
    values = block.unfold(*rows)
    matrix = np.asarray(values.reshape(-1, values.shape[-1]), np.float64)
    tall = matrix.T if matrix.shape[0] < matrix.shape[1] else matrix
    return np.asarray(
        np.linalg.svd(
            _triangular_factor(tall.T) if tall.shape[0] > 2 * tall.shape[1] else tall,
            compute_uv=False,
        )
    )


def _product_invariants(q: Floats, k: Floats, spec: Spec, space: str) -> Floats:
    """Return the invariants of the product of both sides, members in the order of their largest
    value.
    """
    group = spec.spaces[space].group
    if isinstance(group, GeneralLinear):
        values = [
            np.linalg.svd(_triangular_factor(a) @ _triangular_factor(b).T, compute_uv=False)
            for a, b in zip(q, k, strict=True)
        ]
    elif isinstance(group, Scaling):
        values = [
            np.sort(np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))[::-1]
            for a, b in zip(q, k, strict=True)
        ]
    else:
        assert isinstance(group, Rotary)
        from regauge.core.members import planes

        first, second = planes(q.shape[1], group.layout)
        norms = [np.sqrt((x[:, first] ** 2).sum(2) + (x[:, second] ** 2).sum(2)) for x in (q, k)]
        values = list(norms[0] * norms[1])
    return np.stack(sorted(values, key=lambda s: tuple(-np.asarray(s))))


def _triangular_factor(x: Floats) -> Floats:
    """Return R of the QR decomposition of x^T, which has the singular values of x."""
    return np.asarray(np.linalg.qr(np.asarray(x, np.float64).T, mode="r"))
