"""What matching compares: the tensors of two models as blocks, each weighted, with the directions left out that no function sees.

A key bias without rotary positions shifts all scores of a query alike, and softmax does not see it: it takes no part. A value bias reaches the
output through attention rows that sum to one: it is counted in the output's bias, where it acts. Both concern what is compared, and nothing else: what
moves in the end is the whole model, as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from regauge import axes as ax
from regauge.action import State, act
from regauge.elements import Element
from regauge.errors import RegaugeError
from regauge.fold import origin
from regauge.groups import GeneralLinear
from regauge.matching.blocks import Block, Values, blocks, layout
from regauge.spec import Spec, stored

if TYPE_CHECKING:
    import torch

Weights = Mapping[str, float] | Callable[[str, "torch.Tensor"], float]


class MatchError(RegaugeError):
    """Two models that cannot be matched, or a wish that matching cannot fulfil."""


@dataclass(frozen=True)
class Shared:
    """Which rows of a table two models have in common, where their vocabularies differ: rows `a` of the one are rows `b` of the other."""

    a: tuple[int, ...]
    b: tuple[int, ...]


class Costs:
    """Two states under one spec, tensor by tensor. Nothing is held: values are read, and moved, each time they are asked for."""

    def __init__(
        self,
        spec: Spec,
        a: State,
        b: State,
        *,
        weights: Weights | None = None,
        rows: Mapping[str, Shared] | None = None,
        whole: bool = False,
    ) -> None:
        self.spec, self.a, self.b, self.rows, self.whole = spec, a, b, dict(rows or {}), whole
        self._weights = weights
        self._stored = stored(spec)
        self._members: dict[str, list[str]] = {}
        for name, entry in self._stored.items():
            self._members.setdefault(entry.pattern, []).append(name)

    @cached_property
    def patterns(self) -> list[str]:
        """The tensors that are compared: those that something acts on, each once."""
        return [p for p in self.spec.tensors if p not in self.spec.ties and ax.spaces(self.spec.tensors[p])]

    @cached_property
    def layouts(self) -> dict[str, list[Block]]:
        """The blocks of every tensor, without values."""
        out = {}
        for pattern in self.patterns:
            names = self._members[pattern]
            shape = tuple(self._raw(self.b, names[0], only_shape=True).shape)
            if self._stored[names[0]].parent is not None:
                shape = (len(names), *shape)
            out[pattern] = layout(self.spec, self.spec.tensors[pattern], shape)
        return out

    def where(self, space: str) -> list[str]:
        """The tensors that live in a space."""
        return [p for p in self.patterns if space in ax.spaces(self.spec.tensors[p])]

    def weight(self, pattern: str, value: torch.Tensor) -> float:
        if self._weights is None:
            return 1.0
        return float(self._weights.get(pattern, 1.0) if isinstance(self._weights, Mapping) else self._weights(pattern, value))

    def pairs(self, pattern: str, g: Element, scaled: bool = True) -> list[tuple[Block, Block]]:
        """The blocks of one tensor: those of b, and those of a as g moves them. Weighted by the root of the tensor's weight."""
        axes = self.spec.tensors[pattern]
        y = self._effective(self.b, pattern)
        x = act(g, self._effective(self.a, pattern), axes)
        if pattern in self.rows:
            dim = _free_axis(axes)
            y, x = (v.index_select(dim, _index(v, r)) for v, r in ((y, self.rows[pattern].b), (x, self.rows[pattern].a)))
        root = self.weight(pattern, y) ** 0.5 if scaled else 1.0
        found = (blocks(self.spec, axes, (v * root if root != 1 else v).numpy()) for v in (y, x))
        return [(one, other) for one, other in zip(*found, strict=True) if not self._unseen(one)]

    def _unseen(self, block: Block) -> bool:
        """A key bias, or a value bias that is counted elsewhere."""
        if self.whole or any(d is None for d in block.dims):
            return False
        inner = [d for d in block.dims if d is not None and self.spec.spaces[d.space].over is not None]
        if len(inner) != 1 or len(block.dims) != 2 or not isinstance(self.spec.spaces[inner[0].space].group, GeneralLinear):
            return False
        return inner[0].star or inner[0].space in self._values

    @cached_property
    def _values(self) -> dict[str, tuple[str, str, str]]:
        """For each value space: the tensors of the value bias, of the output weight and of the output bias."""
        out: dict[str, tuple[str, str, str]] = {}
        for space, about in self.spec.spaces.items():
            if about.over is None or not isinstance(about.group, GeneralLinear):
                continue
            biases = [p for p in self.where(space) if len(ax.parse(self.spec.tensors[p]).terms) == 1]
            weights = [p for p in self.where(space) for blk in self.layouts[p] if _writes_from(blk, space)]
            into = weights[0].removesuffix("weight") + "bias" if weights else ""
            plain = [p for p in biases for blk in self.layouts[p] if any(d is not None and d.space == space and not d.star for d in blk.dims)]
            if len(plain) == 1 and len(weights) == 1 and into in self.layouts and into not in plain:
                out[space] = (plain[0], weights[0], into)
        return out

    @cached_property
    def _absorbs(self) -> dict[str, list[str]]:
        """For each output bias the value spaces whose bias it takes up."""
        out: dict[str, list[str]] = {}
        for space, (_, _, into) in self._values.items():
            out.setdefault(into, []).append(space)
        return out

    def _effective(self, state: State, pattern: str) -> torch.Tensor:
        """One tensor, stacks joined, in the precision of matching; an output bias with the value biases that act through it."""
        value = self._value(state, pattern)
        if self.whole:
            return value
        for space in self._absorbs.get(pattern, ()):
            bias, weight, _ = self._values[space]
            (v,) = [blk for blk in self._blocks(state, bias) if space in blk.spaces]
            (o,) = [blk for blk in self._blocks(state, weight) if space in blk.spaces]
            value = value + value.new_tensor(_through(o, v, space, self.spec.spaces[space].over))
        return value

    def _blocks(self, state: State, pattern: str) -> list[Block]:
        return blocks(self.spec, self.spec.tensors[pattern], self._value(state, pattern).numpy())

    def _value(self, state: State, pattern: str) -> torch.Tensor:
        import torch

        names = self._members[pattern]
        found = [_work(self._raw(state, name)) for name in names]
        return found[0] if self._stored[names[0]].parent is None else torch.stack(found)

    def _raw(self, state: State, name: str, only_shape: bool = False) -> Any:
        source = origin(self.spec, state, name)
        shapes = getattr(state, "entries", None)
        return shapes[source] if only_shape and shapes is not None else state[source]

    def distances(self, g: Element) -> dict[str, tuple[float, float]]:
        """For each tensor |b - g a|^2 and |b|^2: all of it, unweighted, as it is stored."""
        out = {}
        for pattern in (p for p in self.spec.tensors if p not in self.spec.ties):
            if pattern in self.rows:
                y, x = self._value(self.b, pattern), act(g, self._value(self.a, pattern), self.spec.tensors[pattern])
                dim = _free_axis(self.spec.tensors[pattern])
                y, x = (v.index_select(dim, _index(v, r)) for v, r in ((y, self.rows[pattern].b), (x, self.rows[pattern].a)))
            else:
                y, x = self._value(self.b, pattern), act(g, self._value(self.a, pattern), self.spec.tensors[pattern])
            out[pattern] = (float((y.double() - x.double()).square().sum()), float(y.double().square().sum()))
        return out

    def each(self, space: str, g: Element, usable: Callable[[Block], bool]) -> Iterator[tuple[Block, Block]]:
        """The pairs of blocks that live in a space and are usable, judged by their layout before anything is read."""
        for pattern in self.where(space):
            chosen = [space in blk.spaces and usable(blk) for blk in self.layouts[pattern]]
            if any(chosen):
                for y, x in self.pairs(pattern, g):
                    if space in y.spaces and usable(y):
                        yield y, x


def _writes_from(block: Block, space: str) -> bool:
    """Does this block contract a space and write another that is not a head's own?"""
    starred = [d for d in block.dims if d is not None and d.space == space and d.star]
    return bool(starred) and any(d is not None and not d.star and not d.bar for d in block.dims)


def _through(o: Block, v: Block, space: str, parent: str | None) -> Values:
    """sum over heads of O_h v_h: the value bias as the output sees it."""
    assert parent is not None
    outer, inner = o.places(parent)[0], o.places(space)[0]
    extra = [i for i, d in enumerate(o.dims) if d is not None and d.star and i not in (outer, inner)]
    weight = o.values.sum(axis=tuple(extra), keepdims=True) if extra else o.values
    flat = Block(o.dims, weight).unfolded(outer, inner)
    return np.asarray(np.einsum("hcf,hc->f", flat, v.unfolded(v.places(parent)[0], v.places(space)[0])[:, :, 0]))


def _free_axis(axes: str) -> int:
    return next(i for i, t in enumerate(ax.parse(axes).terms) if isinstance(t, ax.Hole))


def _index(value: torch.Tensor, rows: tuple[int, ...]) -> torch.Tensor:
    import torch

    return torch.tensor(rows, device=value.device)


def _work(x: torch.Tensor) -> torch.Tensor:
    """float64 stays; everything else is compared in float32."""
    import torch

    x = x.detach()
    return (x if x.dtype == torch.float64 else x.to(torch.float32)).cpu()
