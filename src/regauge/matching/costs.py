"""The tensors of two models as pairs of blocks, weighted, without directions that do not affect the
function.

A key bias without rotary positions shifts all scores of a query alike, and softmax cancels it: it
is not compared. This concerns only the comparison: the element is applied to the whole model.
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
from regauge.errors import MatchError
from regauge.matching.blocks import Block, empty_blocks, split_blocks

if TYPE_CHECKING:
    import torch

    from regauge.matching.activations import Activations

_PIECE = 1 << 18  # entries whose squares are summed at a time: they fit into a cache
Weights = Mapping[str, float] | Callable[[str, "torch.Tensor"], float]


@dataclass(frozen=True)
class SharedRows:
    """The rows of a table that two models with different vocabularies have in common.

    Row `a[i]` of the first is row `b[i]` of the second.
    """

    a: tuple[int, ...]
    b: tuple[int, ...]


class Costs:
    """Two states under one spec, compared tensor by tensor.

    Values are read and transformed on each access; `within_unit` holds those of one layer.

    Attributes:
        spec: the spec of both states.
        a: the state that moves.
        b: the state that stays.
        rows: the rows that tables have in common.
        include_key_bias: compare key biases although softmax cancels them.
        axes: the axes of every compared tensor, recorded streams included.
        activations: the recorded streams of a and b, centred and of norm one, by place.
        anchors: the tensors that determine their spaces in the first pass.
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
        self._sizes: dict[str, float] = {}  # |b|^2 by tensor
        self._unit: frozenset[str] = frozenset()
        self._base: Element | None = None
        self._moved: dict[str, torch.Tensor] = {}
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
        """Add recorded streams as tensors to compare; each place is centred and has the same
        weight.
        """
        for name in a.streams.keys() & b.streams.keys():
            if a.streams[name].shape != b.streams[name].shape:
                raise MatchError(
                    "the activations of the two were recorded on different inputs",
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
        layouts = {}
        for pattern in self.patterns:
            if pattern in self.activations:
                layouts[pattern] = empty_blocks(
                    self.spec, self.axes[pattern], self.activations[pattern][1].shape
                )
                continue
            names = self._members[pattern]
            shape = tuple(self._read_stored(self.b, names[0], only_shape=True).shape)
            if self._stored[names[0]].parent is not None:
                shape = (len(names), *shape)
            layouts[pattern] = empty_blocks(self.spec, self.spec.tensors[pattern], shape)
        return layouts

    def __getstate__(self) -> dict[str, Any]:
        """Drop the layouts: they hold shapes only, but numpy would pickle every value."""
        return {name: value for name, value in self.__dict__.items() if name != "layouts"}

    def tensors_in(self, space: str, first: bool = False) -> list[str]:
        """Return the tensors that live in a space; in the first pass only its anchors, if it has
        any.
        """
        patterns = self._tensors_by_space.get(space, [])
        return ([p for p in patterns if p in self.anchors] if first else []) or patterns

    @cached_property
    def _tensors_by_space(self) -> dict[str, list[str]]:
        """The tensors of every space."""
        tensors: dict[str, list[str]] = {}
        for pattern in self.patterns:
            for space in ax.spaces(self.axes[pattern]):
                tensors.setdefault(space, []).append(pattern)
        # A space with recorded activations is matched by those alone.
        for space, patterns in tensors.items():
            tensors[space] = [p for p in patterns if p in self.activations] or patterns
        return tensors

    def weight(self, pattern: str, value: torch.Tensor) -> float:
        """Return the weight of a tensor in the distance."""
        if self._weights is None:
            return 1.0
        return float(
            self._weights.get(pattern, 1.0)
            if isinstance(self._weights, Mapping)
            else self._weights(pattern, value)
        )

    def block_pairs(self, pattern: str, g: Element) -> list[tuple[Block, Block]]:
        """Return the blocks of one tensor of b, each with that of a transformed by g.

        Both are scaled by the root of the tensor's weight.
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
        sides = (
            split_blocks(self.spec, axes, (v * root if root != 1 else v).numpy()) for v in (y, x)
        )
        return [
            (y_block, x_block)
            for y_block, x_block in zip(*sides, strict=True)
            if not self._is_softmax_invariant(y_block)
        ]

    def _is_softmax_invariant(self, block: Block) -> bool:
        """Return whether a block is a key bias that softmax cancels."""
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
        """Return the blocks of one tensor of b."""
        all_blocks = split_blocks(
            self.spec, self.axes[pattern], self._load_tensor(self.b, pattern).numpy()
        )
        return [block for block in all_blocks if not self._is_softmax_invariant(block)]

    def _load_tensor(self, state: State, pattern: str) -> torch.Tensor:
        """Return a tensor of a state, stacked if the checkpoint stores it in parts."""
        import torch

        names = self._members[pattern]
        parts = [_to_working_dtype(self._read_stored(state, name)) for name in names]
        return parts[0] if self._stored[names[0]].parent is None else torch.stack(parts)

    def _read_stored(self, state: State, name: str, only_shape: bool = False) -> Any:
        """Return a stored tensor, or with `only_shape` its header entry if there is one."""
        source = resolve_tie(self.spec, state, name)
        headers = (getattr(state, "entries", None) or {}) if only_shape else {}
        return headers[source] if source in headers else state[source]

    def distances(self, g: Element) -> dict[str, tuple[float, float]]:
        """Return |b - g a|^2 and |b|^2 of each tensor: complete, unweighted, as stored."""
        return {pattern: self.distance(pattern, g) for pattern in self.measured}

    @cached_property
    def measured(self) -> list[str]:
        """The tensors whose distances are measured: each once, without folded gains, which are
        equal.
        """
        skipped = self.spec.ties.keys() | self.spec.fixed.keys()
        return [p for p in self.spec.tensors if p not in skipped]

    def distance(self, pattern: str, g: Element) -> tuple[float, float]:
        """Return |b - g a|^2 and |b|^2 of one tensor: complete, unweighted, as stored."""
        y, x = self.tensor_pair(pattern, g)
        if pattern not in self._sizes:
            self._sizes[pattern] = _squared_norm(y)
        return _squared_norm(y, x), self._sizes[pattern]

    def tensor_pair(self, pattern: str, g: Element) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a tensor of b, and that of a transformed by g; of tables only the shared rows."""
        import torch

        axes = self.axes[pattern]
        if pattern in self.activations:
            x, y = self.activations[pattern]
            return y, act(g, x, axes)
        y, x = self._load_tensor(self.b, pattern), self._move_tensor(pattern, g)
        if pattern not in self.rows:
            return y, x
        dim, shared = _find_free_axis(axes), self.rows[pattern]
        return y.index_select(dim, torch.tensor(shared.b)), x.index_select(
            dim, torch.tensor(shared.a)
        )

    def within_unit(self, g: Element, unit: Iterable[str]) -> Costs:
        """Return the same costs for a search in which only the spaces of this unit change.

        Each tensor of a is transformed by the other members of g once, and then held in memory:
        that of a rotated stream takes longer than all the rest.
        """
        costs = object.__new__(Costs)
        costs.__dict__.update(self.__dict__)  # with the layouts, which a copy would drop
        costs._unit, costs._base, costs._moved = frozenset(unit), g, {}
        return costs

    def _move_tensor(self, pattern: str, g: Element) -> torch.Tensor:
        """Return a tensor of a transformed by g."""
        axes = self.axes[pattern]
        if not self._is_held(pattern, g):
            return act(g, self._load_tensor(self.a, pattern), axes)
        held = self._moved.get(pattern)
        if held is None:
            others = {s: m for s, m in g.members.items() if s not in self._unit}
            held = act(Element(self.spec, others), self._load_tensor(self.a, pattern), axes)
            self._moved[pattern] = held
        members = {s: m for s, m in g.members.items() if s in self._unit & ax.spaces(axes)}
        return act(Element(self.spec, members), held, axes) if members else held

    def _is_held(self, pattern: str, g: Element) -> bool:
        """Return whether a tensor may be held with the members outside the unit applied: these are
        unchanged, and act on axes of their own.
        """
        if self._base is None or not self._unit & ax.spaces(self.axes[pattern]):
            return False
        for term in ax.parse(self.axes[pattern]).terms:
            spaces = {leaf.space for leaf in ax.leaves(term)}
            others = spaces - self._unit
            if others and spaces & self._unit and others & g.members.keys():
                return False
            if any(g.members.get(s) is not self._base.members.get(s) for s in others):
                return False
        return True

    def iter_block_pairs(
        self, space: str, g: Element, usable: Callable[[Block], bool], first: bool = False
    ) -> Iterator[tuple[Block, Block]]:
        """Yield the pairs of blocks that live in a space and are usable.

        Usability is decided by the layout, before any tensor is read.
        """
        for pattern in self.tensors_in(space, first):
            is_usable = [space in b.spaces and usable(b) for b in self.layouts[pattern]]
            if any(is_usable):
                for y, x in self.block_pairs(pattern, g):
                    if space in y.spaces and usable(y):
                        yield y, x


def _expand_names(patterns: list[str], wanted: Iterable[str]) -> list[str]:
    """Return the tensors with these names, which may hold shell wildcards."""
    names: list[str] = []
    for name in wanted:
        matches = [p for p in patterns if fnmatchcase(p, name)]
        if not matches:
            raise MatchError(
                f'names must match a tensor that something acts on, got "{name}"',
                hint=f'an example is "{patterns[0]}"; * matches anything',
            )
        names += matches
    return names


def _find_reading_axis(spec: Spec, axes: str, size: int) -> int:
    """Return the axis by which a tensor reads a space of this size without a parent."""
    for dim, term in enumerate(ax.parse(axes).terms):
        if (
            isinstance(term, ax.Leaf)
            and term.star
            and spec.spaces[term.space].size == size
            and spec.spaces[term.space].over is None
        ):
            return dim
    raise MatchError(f"a tensor with axes {axes} must read a space of size {size}, but does not")


def _moment_root(moment: torch.Tensor) -> torch.Tensor:
    """Return the symmetric root of a second moment, scaled to a mean square of one."""
    import torch

    values, vectors = torch.linalg.eigh(moment)
    root: torch.Tensor = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
    scale = moment.shape[0] ** 0.5 / float(torch.linalg.matrix_norm(root))
    return torch.mul(root, scale)


def _find_free_axis(axes: str) -> int:
    """Return the first axis on which nothing acts."""
    return next(i for i, t in enumerate(ax.parse(axes).terms) if isinstance(t, ax.Hole))


def _squared_norm(x: torch.Tensor, minus: torch.Tensor | None = None) -> float:
    """Return the squared norm of x, or of x - minus, summed in float64 piece by piece."""
    import torch

    total, x = 0.0, x.reshape(-1)
    minus = None if minus is None else minus.reshape(-1)
    for start in range(0, len(x), _PIECE):
        piece = x[start : start + _PIECE]
        if minus is not None:
            piece = piece - minus[start : start + _PIECE]
        piece = piece.double()
        total += float(torch.dot(piece, piece))
    return total


def _to_working_dtype(x: torch.Tensor) -> torch.Tensor:
    """Convert to float32, unless it is float64, on the CPU."""
    import torch

    x = x.detach()
    return (x if x.dtype == torch.float64 else x.to(torch.float32)).cpu()
