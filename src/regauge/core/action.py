"""The action of elements on tensors: one rule for weights, gradients, activations and masks.

Convention. An element transforms activations, h' = M h; a weight of axes "out in*" becomes R W
M^-1. A product axis "(a b c)" is transformed from the inside out: c, then b, then a.

`act` works in the tensor's own dtype, but never below float32. `apply` transforms stored weights:
anything beyond a gather with signs is computed in float64 (float32 for half precision) and rounded
once. Gathers and signs are exact in any dtype, and act on numpy arrays of bits too, without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from regauge.core import axes as ax
from regauge.core.bits import Bits, gather_bits
from regauge.core.check import check_fixed, invertible, require
from regauge.core.element import Element
from regauge.core.members import Dense, Monomial, Soft, is_exact, permutation_index
from regauge.core.rng import Ints
from regauge.core.spec import PARTS, stored_tensors
from regauge.core.steps import Chain, Gather, direct_sum, step, widen
from regauge.errors import ElementError, RegaugeError, SpecError

if TYPE_CHECKING:
    import torch

    Tensor = torch.Tensor

State = Mapping[str, "Tensor"]
Array = TypeVar("Array", "Tensor", Bits)


def _chain(g: Element, term: ax.Term, n: int, at: Mapping[str, int], star: bool = False) -> Chain:
    """Return the steps of an element along one axis of size n. `at` gives the index into every
    parent further out.
    """
    sizes = g.spec.sizes
    match term:
        case ax.Hole():
            return Chain(n)
        case ax.Leaf():
            return _leaf(g, term, n, at, star)
        case ax.Sum():
            parts = ax.block_sizes(term.terms, sizes, n, product=False)
            if parts is None:
                raise SpecError(f"an axis of size {n} cannot be split into {term}")
            return direct_sum(
                [_chain(g, t, p, at, star) for t, p in zip(term.terms, parts, strict=True)]
            )
        case ax.Product():
            parts = ax.block_sizes(term.factors, sizes, n, product=True)
            if parts is None:
                raise SpecError(f"an axis of size {n} cannot be split into {term}")
            return _product(g, term.factors, parts, at, star != term.star)


def _product(
    g: Element, factors: tuple[ax.Term, ...], parts: list[int], at: Mapping[str, int], star: bool
) -> Chain:
    """Return the steps along a product axis: those of the inner factors, then of the outermost."""
    outer, n = factors[0], parts[0]
    if len(factors) == 1:
        return _chain(g, outer, n, at, star)
    width = int(np.prod(parts[1:]))
    parent = outer.space if isinstance(outer, ax.Leaf) else None
    if parent and g.spec.children(parent):
        inner = direct_sum(
            [_product(g, factors[1:], parts[1:], {**at, parent: i}, star) for i in range(n)]
        )
    else:
        inner = direct_sum([_product(g, factors[1:], parts[1:], at, star)] * n)
    return inner.then(widen(_chain(g, outer, n, at, star), width))


def _leaf(g: Element, leaf: ax.Leaf, n: int, at: Mapping[str, int], star: bool) -> Chain:
    """Return the step along an axis, or factor of one, in a single space."""
    space = g.spec.spaces[leaf.space]
    if n != space.size:
        raise SpecError(f'an axis in the space "{leaf.space}" must have size {space.size}, got {n}')
    member = g.members.get(leaf.space)
    if member is None:
        return Chain(n)
    if space.over is not None:
        if space.over not in at:
            raise SpecError(
                f'"{leaf.space}" lies over "{space.over}", which must be an axis of the tensor too'
            )
        member = member.take(np.array([at[space.over]]))
    if leaf.bar:
        order = member if isinstance(member, Soft) else member.permutation()
        if order is None:
            raise ElementError(
                f"|{leaf.space}| needs a permutation, but the element is not one on that space"
            )
        return Chain(n, (step(order),))
    # An orthogonal matrix is its own dual.
    if leaf.star != star and not (isinstance(member, Dense) and space.group.is_orthogonal):
        with invertible(leaf.space):
            member = member.dual()
    return Chain(n, (step(member),))


def _outer_parents(g: Element, terms: Sequence[ax.Term]) -> list[int]:
    """Return the axes whose space is the parent of a space on another axis. They are handled index
    by index.
    """
    dims = []
    for i, term in enumerate(terms):
        if isinstance(term, ax.Leaf):
            children = set(g.spec.children(term.space))
            if any(
                leaf.space in children
                for j, t in enumerate(terms)
                if j != i
                for leaf in ax.leaves(t)
            ):
                dims.append(i)
    return dims


def act(g: Element, x: Array, axes: str, *, at: Mapping[str, int] | None = None) -> Array:
    """Transform a tensor by an element. Differentiable.

    Args:
        g: The element.
        x: A tensor; or, for elements that only permute and flip signs, a numpy array of numbers or
            of the bits of floating-point numbers.
        axes: The axes string of x; for the gradient of a weight, the `dual` of its axes.
        at: The index into each parent space that is not an axis of x.

    Returns:
        A new tensor of the same shape, dtype and device.

    Raises:
        SpecError: The axes do not fit the array.
        ElementError: The array is numpy's, and the element does more than permute and flip signs.

    Example:
        >>> g = regauge.element(regauge.spec_of(model), 0)
        >>> hidden = torch.randn(2, 5, 12)
        >>> torch.equal(regauge.act(~g, regauge.act(g, hidden, "_ _ stream"), "_ _ stream"), hidden)
        True
    """
    terms = ax.parse(axes).terms
    if len(terms) != x.ndim:
        raise SpecError(
            f"axes {axes!r} have {len(terms)} terms, but the tensor of shape {list(x.shape)} has "
            f"{x.ndim} axes"
        )
    unknown = ax.spaces(axes) - g.spec.spaces.keys()
    if unknown:
        raise SpecError(
            f'the spec "{g.spec.family}" has no space "{min(unknown)}", which {axes!r} contains'
        )
    at = dict(at or {})
    outer = _outer_parents(g, terms)
    if outer:
        return _act_by_place(g, x, terms, outer[0], at)
    chains = [_chain(g, t, n, at) for t, n in zip(terms, x.shape, strict=True)]
    gathers = [c.gather for c in chains]
    if isinstance(x, np.ndarray):
        if not all(
            not c.steps or (gather and gather.is_exact)
            for c, gather in zip(chains, gathers, strict=True)
        ):
            raise ElementError(
                "a numpy array can only be permuted and sign-flipped, but the element does more",
                hint="pass a tensor",
            )
        return gather_bits(x, gathers)
    if all(
        not c.steps or (gather and gather.scale is None)
        for c, gather in zip(chains, gathers, strict=True)
    ):
        return _gather(x, [gather.index if gather else None for gather in gathers])
    return _compute(x, chains)


def _act_by_place(
    g: Element, x: Array, terms: Sequence[ax.Term], dim: int, at: Mapping[str, int]
) -> Array:
    """Transform a tensor index by index along the axis of a parent space."""
    leaf = terms[dim]
    assert isinstance(leaf, ax.Leaf)
    rest = str(ax.Axes((*terms[:dim], *terms[dim + 1 :])))
    member = g.members.get(leaf.space)
    order = range(x.shape[dim]) if member is None else permutation_index(member).tolist()
    if isinstance(x, np.ndarray):
        return np.stack(
            [act(g, x.take(j, axis=dim), rest, at={**at, leaf.space: j}) for j in order], axis=dim
        )
    import torch

    return torch.stack(
        [act(g, x.select(dim, j), rest, at={**at, leaf.space: j}) for j in order], dim=dim
    )


def _compute(x: Tensor, chains: Sequence[Chain]) -> Tensor:
    """Run chains along the axes, in float32 or better."""
    if not x.dtype.is_floating_point:
        raise ElementError(
            f"a tensor of {x.dtype} can only be permuted, but the element does more",
            hint="convert it to a floating-point dtype",
        )
    work = x if x.dtype.itemsize >= 4 else x.float()
    for dim, chain in enumerate(chains):
        work = chain(work, dim)
    return work.to(x.dtype)


def _gather(x: Tensor, indices: Sequence[Ints | None]) -> Tensor:
    """Permute every axis that has an index."""
    if all(index is None for index in indices):
        return x.clone()
    for dim, index in enumerate(indices):
        x = x if index is None else Gather(index)(x, dim)
    return x


@dataclass(frozen=True)
class TensorTransform:
    """The computation of one stored tensor of a transformed state.

    Args:
        name: The tensor that is computed.
        source: The tensor that it is computed from: another one of the same stack, or itself.
        axes: The axes of both.
        at: The index of the source into the space of its stack.
        run: Maps the source's values to the result.
    """

    name: str
    source: str
    axes: str
    at: Mapping[str, int]
    run: Callable[[Any], Any]


def tensor_transforms(g: Element, part: str | None = None) -> Iterator[TensorTransform]:
    """Yield the computation of every stored tensor, of all parts or one. Tensors of a stack are
    permuted among each other.
    """
    if part is not None and part not in PARTS:
        raise SpecError(f'part must be one of {", ".join(PARTS)}, got "{part}"')
    for name, entry in stored_tensors(g.spec).items():
        if part is not None and g.spec.parts.get(entry.pattern) != part:
            continue
        source, at = name, {}
        if entry.parent is not None:
            member = g.members.get(entry.parent)
            place = entry.place if member is None else int(permutation_index(member)[entry.place])
            source = entry.pattern.replace("{" + entry.parent + "}", str(place))
            at = {entry.parent: place}
        yield TensorTransform(
            name, source, entry.axes, at, partial(_move_weight, g, source, entry.axes, at)
        )


def _move_weight(g: Element, name: str, axes: str, at: Mapping[str, int], w: Array) -> Array:
    """Transform a stored weight, as exactly as the element allows. Errors name the weight."""
    changed = ax.spaces(axes) & g.members.keys()
    try:
        if not changed:
            return w
        if isinstance(w, np.ndarray):
            return act(g, w, axes, at=at)
        if is_exact_on(g, changed) and (w.dtype.is_floating_point or is_permutation_on(g, changed)):
            return (
                _act_on_bits(g, w.detach(), axes, at)
                if w.device.type == "cpu"
                else act(g, w, axes, at=at)
            )
        return act(
            g, w.double() if w.dtype.itemsize == 4 and w.dtype.is_floating_point else w, axes, at=at
        ).to(w.dtype)
    except RegaugeError as error:
        raise type(error)(f'"{name}": {error}', hint=error.hint) from error


def _act_on_bits(g: Element, w: Tensor, axes: str, at: Mapping[str, int]) -> Tensor:
    """Transform a stored tensor as bits: it needs no gradient, and numpy gathers faster."""
    import torch

    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(w.dtype.itemsize)
    if bits is None:
        return act(g, w, axes, at=at)
    # A view may be negated or conjugated by a flag, which its bits do not show.
    return torch.from_numpy(
        act(g, w.resolve_neg().resolve_conj().view(bits).numpy(), axes, at=at)
    ).view(w.dtype)


def is_exact_on(g: Element, spaces: Iterable[str] | None = None) -> bool:
    """Return whether an element, or its members on these spaces, only permute and flip signs."""
    return all(
        is_exact(m)
        for m in (g.members.values() if spaces is None else [g.members[s] for s in spaces])
    )


def is_permutation_on(g: Element, spaces: Iterable[str] | None = None) -> bool:
    """Return whether an element, or its members on these spaces, only permute."""
    members = g.members.values() if spaces is None else [g.members[s] for s in spaces]
    return all(isinstance(m, Monomial) and m.scale is None for m in members)


def apply(
    g: Element, state: State, part: str | None = None, *, force: bool = False
) -> dict[str, Tensor]:
    """Transform a state dict by an element.

    Args:
        g: The element.
        state: Tensors of the element's spec by name, all or some of them. Buffers of the spec are
            passed through.
        part: Transform only this part (embed, backbone or head) and pass the others through.
        force: Apply an element that the spec does not allow, for tests and demonstrations. It
            breaks the model's function.

    Returns:
        A new state dict.

    Raises:
        ElementError: The element is not allowed on its spec.
        SpecError: The state has a name that is not in the spec, or was not folded as the spec
            requires.

    Example:
        >>> g = regauge.element(regauge.spec_of(model), 0)
        >>> state = regauge.apply(g, model.state_dict())
        >>> _ = model.load_state_dict(state)  # the same function
    """
    return {name: thunk() for name, thunk in apply_lazily(g, state, part, force=force).items()}


def apply_lazily(
    g: Element, state: Mapping[str, Array], part: str | None = None, *, force: bool = False
) -> dict[str, Callable[[], Array]]:
    """Return what `apply` returns, as one thunk per tensor, so that a checkpoint need not fit into
    memory.
    """
    if not force:
        g.require()
        require_fixed(g, state)
    known = stored_tensors(g.spec)
    unknown = next((n for n in state if n not in known and not g.spec.is_buffer(n)), None)
    if unknown is not None:
        raise SpecError(
            f'"{unknown}" is in the state but not in the spec "{g.spec.family}"',
            hint="regauge.check lists every mismatch",
        )
    thunks: dict[str, Callable[[], Array]] = {
        name: partial(state.__getitem__, name) for name in state
    }
    for transform in tensor_transforms(g, part):
        if transform.name in state:
            if transform.source not in state:
                raise SpecError(
                    f'"{transform.name}" is computed from "{transform.source}", which is not in '
                    "the state",
                    hint="pass all tensors of a stack",
                )
            thunks[transform.name] = partial(_transform_tensor, transform, state)
    return thunks


def require_fixed(g: Element, state: Mapping[str, Any]) -> None:
    """Raise a SpecError unless the state is folded as the element's spec requires. Otherwise the
    element would break the function.
    """
    require(
        check_fixed(g.spec, state),
        "the state must be folded, as the spec of the element is",
        hint="apply the element to the state that fold_norms returned",
    )


def _transform_tensor(transform: TensorTransform, state: Mapping[str, Array]) -> Array:
    out: Array = transform.run(state[transform.source])
    return out
