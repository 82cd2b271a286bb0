"""Averages of the products inside attention heads, cut back to the size of a head.

Attention depends on queries and keys only through their product, and on values and outputs only
through theirs. The product of two averages is not the average of the products, unless the models
share a basis. Here the products are averaged, and the best approximation of the rank that a head
has replaces both factors. It lies in the basis that is nearest to the plain average.

With rotary positions queries and keys have no such product: only values and outputs are averaged
in this way.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from regauge.core import axes as ax
from regauge.core.groups import GeneralLinear
from regauge.core.spec import Spec
from regauge.matching.blocks import Block, split_blocks

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
CACHED_SPACES = 4  # more than one tensor of the output lies in


@dataclass(frozen=True, eq=False)
class Entries:
    """New values of some entries of a tensor.

    Attributes:
        index: their positions in the flattened tensor.
        values: their values.
    """

    index: Indices
    values: Floats

    def insert_(self, tensor: torch.Tensor) -> None:
        """Write the values into a contiguous tensor."""
        tensor.view(-1)[torch.from_numpy(self.index)] = torch.from_numpy(self.values).to(
            tensor.dtype
        )


class Products:
    """The averaged products of a merge. Those of the last spaces are kept, since every space has
    several tensors.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[Any, dict[str, list[Entries]]] = {}

    def entries(
        self,
        specs: Sequence[Spec],
        states: Sequence[Mapping[str, torch.Tensor]],
        names: Sequence[str],
        weights: Sequence[float],
    ) -> list[Entries]:
        """Return the new entries of one output tensor.

        Args:
            specs: the spec of each model.
            states: the state of each model.
            names: the name of the tensor in each of them.
            weights: the weight of each model in the average.
        """
        found: list[Entries] = []
        for spaces in zip(*map(product_spaces, specs, names), strict=True):
            key = (tuple(map(id, states)), spaces, tuple(weights))
            with self._lock:
                if key not in self._found:
                    while len(self._found) >= CACHED_SPACES:
                        del self._found[next(iter(self._found))]
                    self._found[key] = average_products(specs, states, spaces, weights)
                found += self._found[key].get(names[0], [])
        return found


def product_spaces(spec: Spec, name: str) -> tuple[str, ...]:
    """Return the spaces of a tensor between the two factors of a product: any invertible matrix may
    act there.
    """
    return tuple(
        space
        for space in ax.spaces(spec.tensors.get(name, ""))
        if isinstance(spec.spaces[space].group, GeneralLinear)
        and all("{" not in tensor for tensor in tensors_of(spec, space))
    )


def tensors_of(spec: Spec, space: str) -> list[str]:
    """Return the tensors that a space acts on."""
    return [name for name, text in spec.tensors.items() if space in ax.spaces(text)]


def average_products(
    specs: Sequence[Spec],
    states: Sequence[Mapping[str, torch.Tensor]],
    spaces: Sequence[str],
    weights: Sequence[float],
) -> dict[str, list[Entries]]:
    """Average the products of one space, and return the new entries of the first model's tensors.

    Args:
        specs: the spec of each model.
        states: the state of each model.
        spaces: the space in each of them.
        weights: the weight of each model in the average.
    """
    sides = [_sides(*model) for model in zip(specs, states, spaces, strict=True)]
    plain, dual = ([side[i][0] for side in sides] for i in (0, 1))
    size = plain[0].shape[1]
    means = [sum(w * x for w, x in zip(weights, side, strict=True)) for side in (plain, dual)]
    factors = _cut(
        np.concatenate([w * x for w, x in zip(weights, plain, strict=True)], 1),
        np.concatenate(dual, 1),
        size,
    )
    factors = _nearest(factors, means)
    out: dict[str, list[Entries]] = {}
    for factor, (_, places) in zip(factors, sides[0], strict=True):
        start = 0
        for name, index in places:
            stop = start + index.shape[2]
            values = factor[..., start:stop]
            out.setdefault(name, []).append(Entries(index.ravel(), values.ravel()))
            start = stop
    return out


Side = tuple[Floats, list[tuple[str, Indices]]]


def _sides(spec: Spec, state: Mapping[str, torch.Tensor], space: str) -> tuple[Side, Side]:
    """Return both factors of the products [heads, size, features], each with the positions of its
    entries in the tensors.
    """
    stacks: dict[bool, list[tuple[str, Floats, Indices]]] = {False: [], True: []}
    over = spec.spaces[space].over
    for name in tensors_of(spec, space):
        tensor, text = state[name], spec.tensors[name]
        values = tensor.detach().to(torch.float64).cpu().numpy()
        positions = np.arange(values.size).reshape(values.shape)
        for block, index in zip(
            split_blocks(spec, text, values), split_blocks(spec, text, positions), strict=True
        ):
            for axis in block.axes_of(space):
                leaf = block.dims[axis]
                assert leaf is not None
                stacks[leaf.star].append(
                    (name, _unfold(block, over, axis), _unfold(index, over, axis))
                )
    plain, dual = (
        (
            np.concatenate([values for _, values, _ in stacks[star]], 2),
            [(name, index) for name, _, index in stacks[star]],
        )
        for star in (False, True)
    )
    return plain, dual


def _unfold(block: Block, over: str | None, axis: int) -> Any:
    """Return a block as [heads, size, features]."""
    return block.unfold(None if over is None else block.axes_of(over)[0], axis)


def _cut(plain: Floats, dual: Floats, size: int) -> list[Floats]:
    """Return factors of this size whose product is nearest to plain^T dual, for every head."""
    q, q_upper = np.linalg.qr(plain.transpose(0, 2, 1))
    k, k_upper = np.linalg.qr(dual.transpose(0, 2, 1))
    left, values, right = np.linalg.svd(q_upper @ k_upper.transpose(0, 2, 1))
    rank = min(size, values.shape[1])
    root = np.sqrt(values[:, None, :rank])
    parts = (q @ (left[:, :, :rank] * root), k @ (right[:, :rank].transpose(0, 2, 1) * root))
    pad = ((0, 0), (0, size - rank), (0, 0))
    return [np.pad(part.transpose(0, 2, 1), pad) for part in parts]


def _nearest(factors: Sequence[Floats], means: Sequence[Any]) -> list[Floats]:
    """Return the factors in the orthogonal basis nearest to the plain averages."""
    correlation = sum(m @ f.transpose(0, 2, 1) for m, f in zip(means, factors, strict=True))
    left, _, right = np.linalg.svd(correlation)
    return [left @ right @ factor for factor in factors]
