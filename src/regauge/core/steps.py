"""Steps along one axis of a tensor: the operations of a member, and their composition.

Permutations gather, (p . x)[i] = x[p[i]], and are never multiplied out: all gathers along one axis
are fused into one index.
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
        """Whether it only permutes and flips signs."""
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
        if len(m) == 1 and dim % x.dim() == 0:  # one product, without moving axes
            return (m[0] @ x.reshape(x.shape[0], -1)).view(x.shape)
        if len(m) == 1 and dim % x.dim() == x.dim() - 1:
            return x @ m[0].T
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
        rotated = torch.cat([a * re - b * im, a * im + b * re], dim=-1)
        order = torch.argsort(torch.cat([first, second]))
        return rotated.index_select(-1, order).reshape(rows.shape).movedim(-1, dim)


@dataclass(frozen=True, eq=False)
class Blocks:
    """A direct sum of different steps: each acts on its own range of the axis."""

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
    """Steps along one axis, in the order in which they are applied. Without steps, the identity."""

    size: int
    steps: tuple[Step, ...] = ()

    def __call__(self, x: Tensor, dim: int) -> Tensor:
        for step in self.steps:
            x = step(x, dim)
        return x

    def then(self, later: Chain) -> Chain:
        """Append the steps of another chain. Consecutive gathers are fused."""
        steps = list(self.steps)
        for step in later.steps:
            if steps and isinstance(steps[-1], Gather) and isinstance(step, Gather):
                steps[-1] = _fuse(steps[-1], step)
            else:
                steps.append(step)
        return Chain(self.size, tuple(steps))

    @property
    def gather(self) -> Gather | None:
        """The gather that this chain consists of, or None if it is anything else."""
        return self.steps[0] if len(self.steps) == 1 and isinstance(self.steps[0], Gather) else None


def _fuse(first: Gather, later: Gather) -> Gather:
    """Return the gather that applies one gather after another."""
    scale = later.scale
    if first.scale is not None:
        scale = first.scale[later.index] if scale is None else scale * first.scale[later.index]
    return Gather(first.index[later.index], scale)


def step(member: Member) -> Step:
    """Return a member as a step along an axis of size count * size, with its matrices as diagonal
    blocks.
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
    """Return a step that flips the signs of 2-planes. Unlike a product of complex numbers it keeps
    every bit of a zero.
    """
    scale = np.empty((member.count, member.size))
    for side in planes(member.size, member.layout):
        scale[:, side] = member.factor.real
    return Gather(np.arange(member.count * member.size), scale.reshape(-1))


def direct_sum(chains: Sequence[Chain]) -> Chain:
    """Concatenate chains along one axis. Steps of one type are joined, others become `Blocks`."""
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
    """Concatenate steps into one, or return None if their types or blocks differ."""
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
    """Extend the chain of an outer factor to an axis whose inner factors have this total width."""
    if width == 1 or not chain.steps:
        return Chain(chain.size * width, chain.steps)
    steps: list[Step] = []
    for step in chain.steps:
        if not isinstance(step, Gather):
            # M (x) I: gather so that the inner index comes first, act, gather back.
            order = np.arange(chain.size * width).reshape(chain.size, width).T.reshape(-1)
            inner = direct_sum([Chain(chain.size, (step,))] * width)
            swap, back = Gather(order), Gather(np.argsort(order))
            steps += [swap, *inner.steps, back]
        else:
            index = (step.index[:, None] * width + np.arange(width)).reshape(-1)
            scale = None if step.scale is None else np.repeat(step.scale, width)
            steps.append(Gather(index, scale))
    return Chain(chain.size * width, tuple(steps))
