"""Steps along one axis: what a member does to it, and how steps are joined.

Permutations gather, (p . x)[i] = x[p[i]], and are never multiplied out: all gathers along one axis
become one index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np

from regauge.core.members import (
    Complexes,
    Dense,
    Layout,
    Member,
    Monomial,
    Planes,
    is_exact,
    planes,
)
from regauge.core.rng import Floats, Ints

if TYPE_CHECKING:
    import torch

    Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class Gather:
    """out[i] = scale[i] * x[index[i]]"""

    index: Ints
    scale: Floats | None = None

    @property
    def size(self) -> int:
        return len(self.index)

    @property
    def is_exact(self) -> bool:
        """Does it change places and signs, and nothing else?"""
        return self.scale is None or bool((np.abs(self.scale) == 1).all())

    def __call__(self, x: Tensor, dim: int) -> Tensor:
        import torch

        from regauge.core.gather import permute

        out = permute(x, torch.as_tensor(self.index, device=x.device), dim)
        if self.scale is None:
            return out
        shape = [1] * x.dim()
        shape[dim] = -1
        return out * torch.as_tensor(self.scale, dtype=x.dtype, device=x.device).view(shape)


@dataclass(frozen=True, eq=False)
class Multiply:
    """A block-diagonal matrix: values[b] on block b."""

    values: Floats

    @property
    def size(self) -> int:
        return int(self.values.shape[0] * self.values.shape[1])

    def __call__(self, x: Tensor, dim: int) -> Tensor:
        import torch

        m = torch.as_tensor(self.values, dtype=x.dtype, device=x.device)
        rows = x.movedim(dim, -1)
        out = torch.einsum(
            "bij,...bj->...bi", m, rows.reshape(*rows.shape[:-1], m.shape[0], m.shape[1])
        )
        return out.reshape(rows.shape).movedim(-1, dim)


@dataclass(frozen=True, eq=False)
class RotatePlanes:
    """A complex factor on each 2-plane of each block."""

    factor: Complexes
    layout: Layout

    @property
    def size(self) -> int:
        return 2 * int(self.factor.size)

    def __call__(self, x: Tensor, dim: int) -> Tensor:
        import torch

        count, half = self.factor.shape
        first, second = (torch.as_tensor(p, device=x.device) for p in planes(2 * half, self.layout))
        re, im = (
            torch.as_tensor(np.ascontiguousarray(f), dtype=x.dtype, device=x.device)
            for f in (self.factor.real, self.factor.imag)
        )
        rows = x.movedim(dim, -1)
        blocks = rows.reshape(*rows.shape[:-1], count, 2 * half)
        a, b = blocks.index_select(-1, first), blocks.index_select(-1, second)
        joined = torch.cat([a * re - b * im, a * im + b * re], dim=-1)
        back = torch.argsort(torch.cat([first, second]))
        return joined.index_select(-1, back).reshape(rows.shape).movedim(-1, dim)


@dataclass(frozen=True, eq=False)
class Blocks:
    """A direct sum of unlike steps: each acts on its own stretch of the axis."""

    chains: tuple[Chain, ...]

    @property
    def size(self) -> int:
        return sum(c.size for c in self.chains)

    def __call__(self, x: Tensor, dim: int) -> Tensor:
        import torch

        pieces = torch.split(x, [c.size for c in self.chains], dim=dim)
        return torch.cat(
            [chain(piece, dim) for chain, piece in zip(self.chains, pieces, strict=True)], dim=dim
        )


Step = Gather | Multiply | RotatePlanes | Blocks


@dataclass(frozen=True, eq=False)
class Chain:
    """Steps along one axis, first one first. No steps: nothing acts."""

    size: int
    steps: tuple[Step, ...] = ()

    def __call__(self, x: Tensor, dim: int) -> Tensor:
        for one in self.steps:
            x = one(x, dim)
        return x

    def then(self, later: Chain) -> Chain:
        steps = list(self.steps)
        for one in later.steps:
            if steps and isinstance(steps[-1], Gather) and isinstance(one, Gather):
                steps[-1] = _fuse(steps[-1], one)
            else:
                steps.append(one)
        return Chain(self.size, tuple(steps))

    @property
    def gather(self) -> Gather | None:
        """The one gather that this chain is, if it is just that."""
        return self.steps[0] if len(self.steps) == 1 and isinstance(self.steps[0], Gather) else None


def _fuse(first: Gather, later: Gather) -> Gather:
    scale = later.scale
    if first.scale is not None:
        scale = first.scale[later.index] if scale is None else scale * first.scale[later.index]
    return Gather(first.index[later.index], scale)


def step(member: Member) -> Step:
    """A member as a step along an axis of size count * size: its matrices are the diagonal blocks,
    in order.
    """
    match member:
        case Monomial():
            offset = member.size * np.arange(member.count)[:, None]
            return Gather(
                (member.index + offset).reshape(-1),
                None if member.scale is None else member.scale.reshape(-1),
            )
        case Dense():
            return Multiply(member.values)
        case _:
            return (
                _flip_planes(member)
                if is_exact(member)
                else RotatePlanes(member.factor, member.layout)
            )


def _flip_planes(member: Planes) -> Gather:
    """A sign for each 2-plane: nothing changes its place, and unlike a product of complex numbers
    it keeps every bit of a zero.
    """
    scale = np.empty((member.count, member.size))
    for side in planes(member.size, member.layout):
        scale[:, side] = member.factor.real
    return Gather(np.arange(member.count * member.size), scale.reshape(-1))


def direct_sum(chains: Sequence[Chain]) -> Chain:
    """Chains side by side along one axis. Like steps are joined; unlike ones stay blocks."""
    size = sum(c.size for c in chains)
    if all(not c.steps for c in chains):
        return Chain(size)
    if all(not c.steps or c.gather for c in chains):
        starts = np.cumsum([0, *(c.size for c in chains[:-1])])
        index = np.concatenate(
            [
                s + (c.gather.index if c.gather else np.arange(c.size))
                for s, c in zip(starts, chains, strict=True)
            ]
        )
        scale = None
        if any(c.gather and c.gather.scale is not None for c in chains):
            scale = np.concatenate(
                [
                    c.gather.scale if c.gather and c.gather.scale is not None else np.ones(c.size)
                    for c in chains
                ]
            )
        return Chain(size, (Gather(index, scale),))
    if len({len(c.steps) for c in chains}) == 1:
        columns = [_join(column) for column in zip(*(c.steps for c in chains), strict=True)]
        if all(c is not None for c in columns):
            return Chain(size, tuple(cast("Sequence[Step]", columns)))
    return Chain(size, (Blocks(tuple(chains)),))


def _join(steps: Sequence[Step]) -> Step | None:
    first = steps[0]
    if isinstance(first, Multiply) and all(
        isinstance(s, Multiply) and s.values.shape[1:] == first.values.shape[1:] for s in steps
    ):
        return Multiply(np.concatenate([s.values for s in steps if isinstance(s, Multiply)]))
    if isinstance(first, RotatePlanes) and all(
        isinstance(s, RotatePlanes)
        and (s.layout, s.factor.shape[1]) == (first.layout, first.factor.shape[1])
        for s in steps
    ):
        return RotatePlanes(
            np.concatenate([s.factor for s in steps if isinstance(s, RotatePlanes)]), first.layout
        )
    if all(isinstance(s, Gather) for s in steps):
        return direct_sum([Chain(s.size, (s,)) for s in steps]).gather
    return None


def widen(chain: Chain, width: int) -> Chain:
    """The chain of an outer factor, on an axis whose inner factors together have this width."""
    if width == 1 or not chain.steps:
        return Chain(chain.size * width, chain.steps)
    steps: list[Step] = []
    for one in chain.steps:
        if not isinstance(one, Gather):
            # M (x) I: gather so that the inner index comes first, act, gather back.
            order = np.arange(chain.size * width).reshape(chain.size, width).T.reshape(-1)
            inner = direct_sum([Chain(chain.size, (one,))] * width)
            swap, back = Gather(order), Gather(np.argsort(order))
            steps += [swap, *inner.steps, back]
        else:
            index = (one.index[:, None] * width + np.arange(width)).reshape(-1)
            steps.append(Gather(index, None if one.scale is None else np.repeat(one.scale, width)))
    return Chain(chain.size * width, tuple(steps))
