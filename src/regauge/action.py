"""Acting on tensors: one rule for weights, gradients, activations and masks.

Convention. An element moves activations, h' = M h; a weight of axes "out in*" becomes R W M^-1. A composite axis "(a b c)" is acted on from the
inside out: c, then b, then a. Permutations gather, (p . x)[i] = x[p[i]], and are never multiplied out: all gathers along one axis become one index.

`act` works in the tensor's own dtype, but never below float32. `apply` moves stored weights: what is not a pure gather goes through
float64 (float32 for half precision) and is rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from regauge import axes as ax
from regauge.element import Element, permutation_index
from regauge.errors import ElementError, SpecError
from regauge.groups import SignedPermutation
from regauge.members import Complexes, Dense, Layout, Member, Monomial, planes
from regauge.spec import PARTS, stored
from regauge.streams import Floats, Ints

if TYPE_CHECKING:
    import torch

    Tensor = torch.Tensor

State = Mapping[str, "Tensor"]


@dataclass(frozen=True, eq=False)
class Gather:
    """out[i] = scale[i] * x[index[i]]"""

    index: Ints
    scale: Floats | None = None

    @property
    def size(self) -> int:
        return len(self.index)

    def __call__(self, x: Tensor, dim: int) -> Tensor:
        import torch

        out = x.index_select(dim, torch.as_tensor(self.index, device=x.device))
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
        out = torch.einsum("bij,...bj->...bi", m, rows.reshape(*rows.shape[:-1], m.shape[0], m.shape[1]))
        return out.reshape(rows.shape).movedim(-1, dim)


@dataclass(frozen=True, eq=False)
class Turn:
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
        re, im = (torch.as_tensor(np.ascontiguousarray(f), dtype=x.dtype, device=x.device) for f in (self.factor.real, self.factor.imag))
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
        return torch.cat([chain(piece, dim) for chain, piece in zip(self.chains, pieces, strict=True)], dim=dim)


Step = Gather | Multiply | Turn | Blocks


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
    """A member as a step along an axis of size count * size: its matrices are the diagonal blocks, in order."""
    match member:
        case Monomial():
            offset = member.size * np.arange(member.count)[:, None]
            return Gather((member.index + offset).reshape(-1), None if member.scale is None else member.scale.reshape(-1))
        case Dense():
            return Multiply(member.values)
        case _:
            return Turn(member.factor, member.layout)


def direct_sum(chains: Sequence[Chain]) -> Chain:
    """Chains side by side along one axis. Like steps are joined; unlike ones stay blocks."""
    size = sum(c.size for c in chains)
    if all(not c.steps for c in chains):
        return Chain(size)
    if all(not c.steps or c.gather for c in chains):
        starts = np.cumsum([0, *(c.size for c in chains[:-1])])
        index = np.concatenate([s + (c.gather.index if c.gather else np.arange(c.size)) for s, c in zip(starts, chains, strict=True)])
        scale = None
        if any(c.gather and c.gather.scale is not None for c in chains):
            scale = np.concatenate([c.gather.scale if c.gather and c.gather.scale is not None else np.ones(c.size) for c in chains])
        return Chain(size, (Gather(index, scale),))
    if len({len(c.steps) for c in chains}) == 1:
        columns = [_join(column) for column in zip(*(c.steps for c in chains), strict=True)]
        if all(c is not None for c in columns):
            return Chain(size, tuple(cast("Sequence[Step]", columns)))
    return Chain(size, (Blocks(tuple(chains)),))


def _join(steps: Sequence[Step]) -> Step | None:
    first = steps[0]
    if isinstance(first, Multiply) and all(isinstance(s, Multiply) and s.values.shape[1:] == first.values.shape[1:] for s in steps):
        return Multiply(np.concatenate([s.values for s in steps if isinstance(s, Multiply)]))
    if isinstance(first, Turn) and all(isinstance(s, Turn) and (s.layout, s.factor.shape[1]) == (first.layout, first.factor.shape[1]) for s in steps):
        return Turn(np.concatenate([s.factor for s in steps if isinstance(s, Turn)]), first.layout)
    if all(isinstance(s, Gather) for s in steps):
        return direct_sum([Chain(s.size, (s,)) for s in steps]).gather
    return None


def _widen(chain: Chain, width: int) -> Chain:
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


def _chain(g: Element, term: ax.Term, n: int, at: Mapping[str, int], star: bool = False) -> Chain:
    """What an element does along one axis of size n. `at` holds the place of every parent that stands further out."""
    sizes = g.spec.sizes
    match term:
        case ax.Hole():
            return Chain(n)
        case ax.Leaf():
            return _leaf(g, term, n, at, star)
        case ax.Sum():
            parts = ax.block_sizes(term.terms, sizes, n, product=False)
            if parts is None:
                raise SpecError(f"an axis of size {n} is not {term}")
            return direct_sum([_chain(g, t, p, at, star) for t, p in zip(term.terms, parts, strict=True)])
        case ax.Product():
            parts = ax.block_sizes(term.factors, sizes, n, product=True)
            if parts is None:
                raise SpecError(f"an axis of size {n} is not {term}")
            return _product(g, term.factors, parts, at, star != term.star)


def _product(g: Element, factors: tuple[ax.Term, ...], parts: list[int], at: Mapping[str, int], star: bool) -> Chain:
    outer, n = factors[0], parts[0]
    if len(factors) == 1:
        return _chain(g, outer, n, at, star)
    width = int(np.prod(parts[1:]))
    parent = outer.space if isinstance(outer, ax.Leaf) else None
    if parent and g.spec.children(parent):
        inner = direct_sum([_product(g, factors[1:], parts[1:], {**at, parent: i}, star) for i in range(n)])
    else:
        inner = direct_sum([_product(g, factors[1:], parts[1:], at, star)] * n)
    return inner.then(_widen(_chain(g, outer, n, at, star), width))


def _leaf(g: Element, leaf: ax.Leaf, n: int, at: Mapping[str, int], star: bool) -> Chain:
    if leaf.space not in g.spec.spaces:
        raise SpecError(f'the spec "{g.spec.family}" has no space "{leaf.space}"')
    space = g.spec.spaces[leaf.space]
    if n != space.size:
        raise SpecError(f'an axis of size {n} cannot live in the space "{leaf.space}" of size {space.size}')
    member = g.members.get(leaf.space)
    if member is None:
        return Chain(n)
    if space.over is not None:
        if space.over not in at:
            raise SpecError(f'"{leaf.space}" lies over "{space.over}", which is no axis of this tensor')
        member = member.take(np.array([at[space.over]]))
    if leaf.bar:
        order = member.permutation()
        if order is None:
            raise ElementError(f"|{leaf.space}| follows a permutation, but the element is none there")
        return Chain(n, (step(order),))
    return Chain(n, (step(member.dual() if leaf.star != star else member),))


def _outer_parents(g: Element, terms: Sequence[ax.Term]) -> list[int]:
    """The axes whose own space is the parent of a space on another axis: those are gone through place by place."""
    out = []
    for i, term in enumerate(terms):
        if isinstance(term, ax.Leaf):
            children = set(g.spec.children(term.space))
            if any(leaf.space in children for j, t in enumerate(terms) if j != i for leaf in ax.leaves(t)):
                out.append(i)
    return out


def act(g: Element, x: Tensor, axes: str, *, at: Mapping[str, int] | None = None) -> Tensor:
    """Move a tensor with these axes. Differentiable; the result is a new tensor of the same shape, dtype and device.

    >>> # act(g, hidden, "_ _ stream"); act(g, grad, dual(weight_axes)); act(rows, mask, "_ _ token token*")
    """
    terms = ax.parse(axes).terms
    if len(terms) != x.dim():
        raise SpecError(f"a tensor of shape {list(x.shape)} has {x.dim()} axes, but {axes!r} has {len(terms)}")
    at = dict(at or {})
    outer = _outer_parents(g, terms)
    if outer:
        return _act_by_place(g, x, terms, outer[0], at)
    chains = [_chain(g, t, n, at) for t, n in zip(terms, x.shape, strict=True)]
    return _run(x, chains)


def _act_by_place(g: Element, x: Tensor, terms: Sequence[ax.Term], dim: int, at: Mapping[str, int]) -> Tensor:
    import torch

    leaf = terms[dim]
    assert isinstance(leaf, ax.Leaf)
    rest = str(ax.Axes((*terms[:dim], *terms[dim + 1 :])))
    member = g.members.get(leaf.space)
    order = range(x.shape[dim]) if member is None else permutation_index(member).tolist()
    return torch.stack([act(g, x.select(dim, j), rest, at={**at, leaf.space: j}) for j in order], dim=dim)


def _run(x: Tensor, chains: Sequence[Chain]) -> Tensor:
    """Gathers alone keep every bit in any dtype; everything else is computed in float32 or better."""
    import torch

    if all(not c.steps for c in chains):
        return x.clone()
    gathers = [c.gather for c in chains]
    if all(not c.steps or (gather and gather.scale is None) for c, gather in zip(chains, gathers, strict=True)):
        if x.device.type == "cpu" and not x.requires_grad:
            return _gather_numpy(x, [gather.index if gather else None for gather in gathers])
        work = x
    else:
        work = x if x.dtype.itemsize >= 4 and x.dtype.is_floating_point else x.to(torch.float32)
    for dim, chain in enumerate(chains):
        work = chain(work, dim)
    return work.to(x.dtype)


def _gather_numpy(x: Tensor, indices: Sequence[Ints | None]) -> Tensor:
    """Index every axis at once, on the bits. numpy's take is about three times as fast along the last axis as torch's index_select."""
    import torch

    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    source = x.detach().view(bits[x.dtype.itemsize]).numpy() if x.dtype not in (torch.int64, torch.bool) else x.detach().numpy()
    moving = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(moving) == 2 and source.ndim == 2 and source.size > 1 << 16:
        (_, rows), (_, columns) = moving
        out = np.empty_like(source)
        block = max(1, (1 << 18) // max(1, source.shape[1]))  # rows that stay in the cache between the two takes
        for start in range(0, len(rows), block):
            np.take(source[rows[start : start + block]], columns, axis=1, out=out[start : start + block], mode="clip")
    else:
        out = source
        for dim, index in moving:
            out = np.take(out, index, axis=dim)
    moved = torch.from_numpy(np.ascontiguousarray(out))
    return moved.view(x.dtype) if moved.dtype != x.dtype else moved


@dataclass(frozen=True)
class Move:
    """How one stored tensor of the moved state is made: from which tensor, and by what."""

    name: str
    source: str
    run: Callable[[Tensor], Tensor]


def moves(g: Element, part: str | None = None) -> Iterator[Move]:
    """One move per stored tensor, of all parts or one. A stack's tensors change places; every tensor is read on its own."""
    if part is not None and part not in PARTS:
        raise SpecError(f'there is no part "{part}"', hint=f"parts are {', '.join(PARTS)}")
    for name, entry in stored(g.spec).items():
        if part is not None and g.spec.parts.get(entry.pattern) != part:
            continue
        source, at = name, {}
        if entry.parent is not None:
            member = g.members.get(entry.parent)
            place = entry.place if member is None else int(permutation_index(member)[entry.place])
            source = entry.pattern.replace("{" + entry.parent + "}", str(place))
            at = {entry.parent: place}
        yield Move(name, source, _weight_move(g, entry.axes, at))


def _weight_move(g: Element, axes: str, at: Mapping[str, int]) -> Callable[[Tensor], Tensor]:
    def run(w: Tensor) -> Tensor:
        import torch

        if w.dtype == torch.float32 and not _only_gathers(g, axes):
            return act(g, w.to(torch.float64), axes, at=at).to(torch.float32)
        return act(g, w, axes, at=at)

    return run


def _only_gathers(g: Element, axes: str) -> bool:
    return all(isinstance(m, Monomial) and m.scale is None for s in ax.spaces(axes) if (m := g.members.get(s)) is not None)


def apply(g: Element, state: State, part: str | None = None, *, force: bool = False) -> dict[str, Tensor]:
    """A new state dict, moved: all of it, or one part. Names that the spec calls buffers, and other parts, are passed on as they are.

    `force` applies an element that the spec does not allow. It exists for tests and demonstrations: the function breaks.
    """
    return {name: thunk() for name, thunk in apply_lazily(g, state, part, force=force).items()}


def apply_lazily(g: Element, state: State, part: str | None = None, *, force: bool = False) -> dict[str, Callable[[], Tensor]]:
    """What `apply` does, one thunk per tensor, so that a checkpoint can be moved without ever being in memory."""
    if not force:
        g.require()
    unknown = [n for n in state if n not in stored(g.spec) and not g.spec.is_buffer(n)]
    if unknown:
        raise SpecError(f'"{unknown[0]}" is in the state but not in the spec "{g.spec.family}"', hint="regauge.check lists every misfit")
    thunks: dict[str, Callable[[], Tensor]] = {name: partial(state.__getitem__, name) for name in state}
    for move in moves(g, part):
        if move.name in state:
            thunks[move.name] = partial(_moved, move, state)
    return thunks


def _moved(move: Move, state: State) -> Tensor:
    return move.run(state[move.source])


def apply_(g: Element, module: torch.nn.Module, part: str | None = None, *, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Move a live module in place, and with it the state of its optimizer, so that training goes on across the move.

    First moments and momenta follow as gradients do, second moments by the permutation alone. With an optimizer, the element must be made of
    (signed) permutations: Adam-type states have no other symmetry.
    """
    import torch

    g.require()
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    plan = [m for m in moves(g, part) if m.name in tensors]
    entries = stored(g.spec)
    with torch.no_grad():
        states = _moved_optimizer_states(g, {m.name: entries[m.name].axes for m in plan}, tensors, optimizer) if optimizer else []
        staged = {m.name: m.run(tensors[m.source]) for m in plan if m.source != m.name}
        for m in plan:
            tensors[m.name].copy_(staged[m.name] if m.name in staged else m.run(tensors[m.name]))
        for target, value in states:
            target.copy_(value)


_FIRST = frozenset({"exp_avg", "momentum_buffer", "grad_avg", "exp_avg_diff", "previous_grad", "prev"})
_SECOND = frozenset({"exp_avg_sq", "max_exp_avg_sq", "square_avg", "acc_delta", "sum", "exp_inf"})


def _moved_optimizer_states(
    g: Element, axes: Mapping[str, str], tensors: Mapping[str, Tensor], optimizer: torch.optim.Optimizer
) -> list[tuple[Tensor, Tensor]]:
    import torch

    for name, member in g.members.items():
        if SignedPermutation().fault(member):
            raise ElementError(
                f'the optimizer\'s state cannot follow the element on "{name}": Adam-type states keep signed permutations only',
                hint='draw the element with within="signed", or move before training starts',
            )
    out: list[tuple[Tensor, Tensor]] = []
    for name, text in axes.items():
        held: dict[str, Any] = optimizer.state.get(tensors[name], {})
        for key, value in held.items():
            if not isinstance(value, torch.Tensor) or value.dim() == 0:
                continue
            if value.shape != tensors[name].shape or key not in _FIRST | _SECOND:
                raise ElementError(f'the optimizer holds "{key}" for "{name}", which regauge does not know how to move')
            out.append((value, act(g, value, ax.dual(text) if key in _FIRST else ax.bar(text))))
    return out
