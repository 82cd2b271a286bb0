"""Tensors as blocks: pieces in which every axis is one space, or a plain axis.

A fused qkv weight "(head.0 qk.0)+(head.0 qk.0*)+(head.0 vo.0) stream*" has three blocks: [head.0,
qk.0, stream*], [head.0, qk.0*, stream*] and [head.0, vo.0, stream*]. Matching uses a model's layout
only through this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from regauge.core import axes as ax
from regauge.core.spec import Spec
from regauge.errors import SpecError

Values = npt.NDArray[Any]
Dims = tuple[ax.Leaf | None, ...]


@dataclass(frozen=True, eq=False)
class Block:
    """One piece of a tensor.

    Attributes:
        dims: the space of each axis of `values`, or None where nothing acts.
        values: the entries.
    """

    dims: Dims
    values: Values

    @property
    def spaces(self) -> frozenset[str]:
        """The spaces that act on the block."""
        return frozenset(d.space for d in self.dims if d is not None)

    def axes_of(self, space: str) -> list[int]:
        """Return the axes that live in a space."""
        return [i for i, d in enumerate(self.dims) if d is not None and d.space == space]

    def unfold(self, *leading: int | None) -> Values:
        """Move these axes to the front (None: an axis of size 1) and flatten all others into a last
        axis. The result is a view if it can be one.
        """
        front = [i for i in leading if i is not None]
        rest = [i for i in range(self.values.ndim) if i not in front]
        transposed = self.values.transpose([*front, *rest])
        shape = [1 if i is None else self.values.shape[i] for i in leading]
        return transposed.reshape(*shape, -1)


def split_blocks(spec: Spec, axes: str, values: Values) -> list[Block]:
    """Cut a tensor with these axes into blocks."""
    terms = ax.parse(axes).terms
    if len(terms) != values.ndim:
        raise SpecError(
            f"a tensor of axes {axes!r} must have {len(terms)} dimensions, got shape "
            f"{list(values.shape)}"
        )
    return [
        Block(dims, piece)
        for piece, dims in _expand(values, 0, [(t, False) for t in terms], spec.sizes)
    ]


def empty_blocks(spec: Spec, axes: str, shape: Sequence[int]) -> list[Block]:
    """Return the blocks of a tensor of this shape, without its values."""
    return split_blocks(spec, axes, np.broadcast_to(np.zeros(()), tuple(shape)))


def _expand(
    values: Values, dim: int, terms: Sequence[tuple[ax.Term, bool]], sizes: Any
) -> list[tuple[Values, Dims]]:
    """Cut the axes from `dim` on, one term each."""
    if not terms:
        return [(values, ())]
    (term, star), rest = terms[0], terms[1:]
    out: list[tuple[Values, Dims]] = []
    match term:
        case ax.Hole():
            out = [(v, (None, *dims)) for v, dims in _expand(values, dim + 1, rest, sizes)]
        case ax.Leaf():
            leaf = term if term.bar else replace(term, star=term.star != star)
            out = [(v, (leaf, *dims)) for v, dims in _expand(values, dim + 1, rest, sizes)]
        case ax.Sum():
            parts = _part_sizes(term.terms, sizes, values.shape[dim], product=False)
            for piece, part in zip(
                np.split(values, np.cumsum(parts)[:-1], axis=dim), term.terms, strict=True
            ):
                out += _expand(piece, dim, [(part, star), *rest], sizes)
        case ax.Product():
            parts = _part_sizes(term.factors, sizes, values.shape[dim], product=True)
            opened = values.reshape(*values.shape[:dim], *parts, *values.shape[dim + 1 :])
            out = _expand(
                opened, dim, [*((f, star != term.star) for f in term.factors), *rest], sizes
            )
    return out


def _part_sizes(terms: tuple[ax.Term, ...], sizes: Any, n: int, *, product: bool) -> list[int]:
    """Return the sizes of the terms of a sum or product, which must fit an axis of size n."""
    parts = ax.block_sizes(terms, sizes, n, product=product)
    if parts is None:
        raise SpecError(
            f"an axis of size {n} does not fit "
            f"{' '.join(map(str, terms)) if product else '+'.join(map(str, terms))}"
        )
    return parts
