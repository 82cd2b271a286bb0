"""What matching compares: the tensors of two models as blocks, each weighted, with the directions
left out that no function sees.

A key bias without rotary positions shifts all scores of a query alike, and softmax does not see it:
it takes no part. That concerns what is compared, and nothing else: what moves in the end is the
whole model, as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import TYPE_CHECKING, Any

from regauge.core import axes as ax
from regauge.core.action import State, act
from regauge.core.element import Element
from regauge.core.fold import resolve_tie
from regauge.core.spec import Spec, stored_tensors
from regauge.errors import RegaugeError
from regauge.matching.blocks import Block, empty_blocks, split_blocks

if TYPE_CHECKING:
    import torch

    from regauge.matching.activations import Activations

Weights = Mapping[str, float] | Callable[[str, "torch.Tensor"], float]


class MatchError(RegaugeError):
    """Two models that cannot be matched, or a wish that matching cannot fulfil."""


@dataclass(frozen=True)
class SharedRows:
    """Which rows of a table two models have in common, where their vocabularies differ: rows `a` of
    the one are rows `b` of the other.
    """

    a: tuple[int, ...]
    b: tuple[int, ...]


class Costs:
    """Two states under one spec, tensor by tensor. Nothing is held: values are read, and moved,
    each time they are asked for.
    """

    def __init__(
        self,
        spec: Spec,
        a: State,
        b: State,
        *,
        weights: Weights | None = None,
        rows: Mapping[str, SharedRows] | None = None,
        include_key_bias: bool = False,
        activations: tuple[Activations, Activations] | None = None,
        anchors: Iterable[str] | None = None,
    ) -> None:
        self.spec, self.a, self.b, self.rows, self.include_key_bias = (
            spec,
            a,
            b,
            dict(rows or {}),
            include_key_bias,
        )
        self.axes = dict(spec.tensors)
        self.activations: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._metrics: dict[str, torch.Tensor] = {}
        if activations is not None:
            self._add_activations(*activations)
        self._stored = stored_tensors(spec)
        self._members: dict[str, list[str]] = {}
        for name, entry in self._stored.items():
            self._members.setdefault(entry.pattern, []).append(name)
        self.anchors = frozenset(_expand_names(self.patterns, anchors or ()))
        self._weights: Weights | None = weights
        if isinstance(weights, Mapping):
            self._weights = {
                pattern: w
                for name, w in weights.items()
                for pattern in _expand_names(self.patterns, [name])
            }

    def _add_activations(self, a: Activations, b: Activations) -> None:
        """What the models were seen to do counts like tensors; each place is centred and has the
        same weight.
        """
        for name in a.streams.keys() & b.streams.keys():
            if a.streams[name].shape != b.streams[name].shape:
                raise MatchError(
                    "the two were seen at work on different inputs",
                    hint="record both on the same batches",
                )
            x, y = (s.streams[name] - s.streams[name].mean(0) for s in (a, b))
            self.activations[name] = (x / x.norm(), y / y.norm())
            self.axes[name] = b.axes[name]
        self._metrics = {name: _moment_root(moment) for name, moment in b.moments.items()}

    @cached_property
    def patterns(self) -> list[str]:
        """The tensors that are compared: those that something acts on, each once."""
        return [p for p in self.axes if p not in self.spec.ties and ax.spaces(self.axes[p])]

    @cached_property
    def layouts(self) -> dict[str, list[Block]]:
        """The blocks of every tensor, without values."""
        out = {}
        for pattern in self.patterns:
            if pattern in self.activations:
                out[pattern] = empty_blocks(
                    self.spec, self.axes[pattern], self.activations[pattern][1].shape
                )
                continue
            names = self._members[pattern]
            shape = tuple(self._read_stored(self.b, names[0], only_shape=True).shape)
            if self._stored[names[0]].parent is not None:
                shape = (len(names), *shape)
            out[pattern] = empty_blocks(self.spec, self.spec.tensors[pattern], shape)
        return out

    def __getstate__(self) -> dict[str, Any]:
        """Layouts have shapes and no values, but numpy would send every one of these to another
        process.
        """
        return {name: value for name, value in self.__dict__.items() if name != "layouts"}

    def tensors_in(self, space: str, first: bool = False) -> list[str]:
        """The tensors that live in a space; of these, for the first time that it is looked for, the
        anchors, if some are.
        """
        found = self._tensors_by_space.get(space, [])
        return ([p for p in found if p in self.anchors] if first else []) or found

    @cached_property
    def _tensors_by_space(self) -> dict[str, list[str]]:
        out: dict[str, list[str]] = {}
        for pattern in self.patterns:
            for space in ax.spaces(self.axes[pattern]):
                out.setdefault(space, []).append(pattern)
        for space, found in out.items():  # a space that was seen at work is found by that alone
            out[space] = [p for p in found if p in self.activations] or found
        return out

    def weight(self, pattern: str, value: torch.Tensor) -> float:
        if self._weights is None:
            return 1.0
        return float(
            self._weights.get(pattern, 1.0)
            if isinstance(self._weights, Mapping)
            else self._weights(pattern, value)
        )

    def block_pairs(self, pattern: str, g: Element) -> list[tuple[Block, Block]]:
        """The blocks of one tensor: those of b, and those of a as g moves them. Weighted by the
        root of the tensor's weight.
        """
        import torch

        axes = self.axes[pattern]
        y, x = self.tensor_pair(pattern, g)
        if pattern in self._metrics:
            dim = _find_reading_axis(self.spec, axes, self._metrics[pattern].shape[0])
            y, x = (
                torch.tensordot(v, self._metrics[pattern].to(v.dtype), ([dim], [0])).movedim(
                    -1, dim
                )
                for v in (y, x)
            )
        root = self.weight(pattern, y) ** 0.5
        found = (
            split_blocks(self.spec, axes, (v * root if root != 1 else v).numpy()) for v in (y, x)
        )
        return [
            (one, other)
            for one, other in zip(*found, strict=True)
            if not self._is_softmax_invariant(one)
        ]

    def _is_softmax_invariant(self, block: Block) -> bool:
        """A key bias that no softmax sees."""
        if self.include_key_bias or len(block.dims) != 2:
            return False
        inner = [
            d for d in block.dims if d is not None and self.spec.spaces[d.space].over is not None
        ]
        outer = [
            d
            for d in block.dims
            if d is not None and inner and d.space == self.spec.spaces[inner[0].space].over
        ]
        return (
            len(inner) == len(outer) == 1
            and inner[0].star
            and self.spec.spaces[inner[0].space].constant == "unseen"
        )

    def target_blocks(self, pattern: str) -> list[Block]:
        """The blocks of one tensor of b."""
        found = split_blocks(
            self.spec, self.axes[pattern], self._load_tensor(self.b, pattern).numpy()
        )
        return [block for block in found if not self._is_softmax_invariant(block)]

    def _load_tensor(self, state: State, pattern: str) -> torch.Tensor:
        import torch

        names = self._members[pattern]
        found = [_to_working_dtype(self._read_stored(state, name)) for name in names]
        return found[0] if self._stored[names[0]].parent is None else torch.stack(found)

    def _read_stored(self, state: State, name: str, only_shape: bool = False) -> Any:
        source = resolve_tie(self.spec, state, name)
        shapes = getattr(state, "entries", None)
        return shapes[source] if only_shape and shapes is not None else state[source]

    def distances(self, g: Element) -> dict[str, tuple[float, float]]:
        """For each tensor |b - g a|^2 and |b|^2: all of it, unweighted, as it is stored."""
        out = {}
        for pattern in (p for p in self.spec.tensors if p not in self.spec.ties):
            y, x = self.tensor_pair(pattern, g)
            out[pattern] = (_squared_norm(y - x), _squared_norm(y))
        return out

    def tensor_pair(self, pattern: str, g: Element) -> tuple[torch.Tensor, torch.Tensor]:
        """A tensor of b, and that of a as g moves it; of tables only the rows that both have."""
        import torch

        axes = self.axes[pattern]
        if pattern in self.activations:
            x, y = self.activations[pattern]
            return y, act(g, x, axes)
        y, x = self._load_tensor(self.b, pattern), act(g, self._load_tensor(self.a, pattern), axes)
        if pattern not in self.rows:
            return y, x
        dim, shared = _find_free_axis(axes), self.rows[pattern]
        return y.index_select(dim, torch.tensor(shared.b)), x.index_select(
            dim, torch.tensor(shared.a)
        )

    def iter_block_pairs(
        self, space: str, g: Element, usable: Callable[[Block], bool], first: bool = False
    ) -> Iterator[tuple[Block, Block]]:
        """The pairs of blocks that live in a space and are usable, judged by their layout before
        anything is read.
        """
        for pattern in self.tensors_in(space, first):
            chosen = [space in blk.spaces and usable(blk) for blk in self.layouts[pattern]]
            if any(chosen):
                for y, x in self.block_pairs(pattern, g):
                    if space in y.spaces and usable(y):
                        yield y, x


def _expand_names(patterns: list[str], wanted: Iterable[str]) -> list[str]:
    """The tensors with these names, which may hold the wildcards of a shell."""
    out: list[str] = []
    for name in wanted:
        found = [p for p in patterns if fnmatchcase(p, name)]
        if not found:
            raise MatchError(
                f'no tensor that anything acts on is called "{name}"',
                hint=f"{patterns[0]}, say; * stands for anything",
            )
        out += found
    return out


def _find_reading_axis(spec: Spec, axes: str, size: int) -> int:
    """The axis by which a tensor reads a space of this size that is nobody's child."""
    for dim, term in enumerate(ax.parse(axes).terms):
        if (
            isinstance(term, ax.Leaf)
            and term.star
            and spec.spaces[term.space].size == size
            and spec.spaces[term.space].over is None
        ):
            return dim
    raise MatchError(f"a tensor with axes {axes} reads no space of size {size}")


def _moment_root(moment: torch.Tensor) -> torch.Tensor:
    """The symmetric root of a second moment, with a mean square of one."""
    import torch

    values, vectors = torch.linalg.eigh(moment)
    root: torch.Tensor = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
    scale = moment.shape[0] ** 0.5 / float(torch.linalg.matrix_norm(root))
    return torch.mul(root, scale)


def _find_free_axis(axes: str) -> int:
    return next(i for i, t in enumerate(ax.parse(axes).terms) if isinstance(t, ax.Hole))


def _squared_norm(x: torch.Tensor) -> float:
    import torch

    return float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2


def _to_working_dtype(x: torch.Tensor) -> torch.Tensor:
    """float64 stays; everything else is compared in float32."""
    import torch

    x = x.detach()
    return (x if x.dtype == torch.float64 else x.to(torch.float32)).cpu()
