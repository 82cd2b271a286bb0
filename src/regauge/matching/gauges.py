"""Fixing gauges: the same function, written so that what nobody sees is the same in every model.

Some directions of the weights are seen by no function and are none of the group's: training leaves
noise in them, and distances count it.

    keys      a key bias adds the same to all scores of a query, and softmax does not see it: zero
    values    the weights of an attention sum to one, so a value bias b arrives as W_O b: it goes
    into the output's bias, and is zero
    balance   an element: every head's query and key side, and its value and output side, get the
    same Gram matrix, (BQ)(BQ)^T = (B^-T K)(B^-T K)^T,
              the point of least norm on the orbit; a rotary plane, and a neuron that may be scaled,
              the same norm on both sides

`fold_norms` does the like for norms. Which biases are so is a fact about the model:
`Space.constant`, in the family's file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from regauge.checkpoints.reader import LazyState
from regauge.core import axes as ax
from regauge.core.action import State, apply_lazily
from regauge.core.element import Element, identity
from regauge.core.fit import fit_balance
from regauge.core.fold import to_work_dtype
from regauge.core.groups import GeneralLinear, Group, PlaneSigns, Rotary, Scaling
from regauge.core.members import Dense, Member, Monomial, Planes
from regauge.core.rng import Floats
from regauge.core.spec import Spec
from regauge.errors import SpecError
from regauge.matching.blocks import Block, empty_blocks, split_blocks
from regauge.matching.costs import Costs

if TYPE_CHECKING:
    import torch

    Tensor = torch.Tensor
    Thunks = dict[str, Callable[[], Tensor]]

GAUGES = ("keys", "values", "balance")


def fix_gauges(spec: Spec, state: State, gauges: Iterable[str] = GAUGES) -> dict[str, Tensor]:
    """The state with these gauges fixed: the same function, of the same spec. Computed in float64
    (float32 for half precision), rounded once.
    """
    made = fix_lazily(spec, state, gauges)
    return {name: made[name]().to(state[name].dtype) for name in made}


def fix_lazily(spec: Spec, state: State, gauges: Iterable[str] = GAUGES) -> Thunks:
    """What `fix_gauges` does, one thunk per tensor, not rounded. For a balance every head is read
    once, at once.
    """
    gauges = list(gauges)
    unknown = next((w for w in gauges if w not in GAUGES), None)
    if unknown is not None:
        raise SpecError(f'there is no gauge "{unknown}" to fix', hint=", ".join(GAUGES))
    made: Thunks = {name: partial(state.__getitem__, name) for name in state}
    if "values" in gauges:
        made = _move_value_biases(spec, state, made)
    if "keys" in gauges:
        unseen = _constant_sides(spec, "unseen", star=True)
        made |= {
            name: partial(_zero_bias, spec, name, made[name], unseen)
            for name in made
            if _has_bias_in(spec, name, unseen)
        }
    if "balance" in gauges:
        now = LazyState.from_thunks(dict(made))
        made = apply_lazily(balance(spec, now), now)
    return made


def balance(spec: Spec, state: State) -> Element:
    """The element that balances the two sides of every space whose members may stretch."""
    costs, none = Costs(spec, state, state), identity(spec)
    members = {}
    for name, space in spec.spaces.items():
        if not _has_scaling(space.group):
            continue
        sides: dict[bool, list[Floats]] = {False: [], True: []}
        for block, _ in costs.iter_block_pairs(name, none, lambda _: True):
            for place in block.axes_of(name):
                leaf = block.dims[place]
                if leaf is not None and not leaf.bar:
                    outer = block.axes_of(space.over)[0] if space.over is not None else None
                    sides[leaf.star].append(block.unfold(outer, place).astype(np.float64))
        if sides[False] and sides[True]:
            members[name] = _balancing_member(
                space.group, *(_concatenate(side, spec.count(name)) for side in sides.values())
            )
    return Element(spec, members)


def _has_scaling(group: Group) -> bool:
    return isinstance(group, GeneralLinear | Scaling | Rotary) and not isinstance(group, PlaneSigns)


def _balancing_member(group: Group, plain: Floats, dual: Floats) -> Member:
    if isinstance(group, GeneralLinear):
        return Dense(fit_balance(plain, dual))
    norms = [np.square(side).sum(2) for side in (plain, dual)]
    if isinstance(group, Rotary):
        halves = [
            n.reshape(len(n), 2, -1)
            if group.layout == "half"
            else n.reshape(len(n), -1, 2).swapaxes(1, 2)
            for n in norms
        ]
        norms = [h.sum(1) for h in halves]
    with np.errstate(divide="ignore", invalid="ignore"):
        factor = (norms[1] / norms[0]) ** 0.25
    factor = np.where(np.isfinite(factor) & (factor > 0), factor, 1.0)
    if isinstance(group, Rotary):
        return Planes(factor.astype(np.complex128), group.layout)
    return Monomial(np.tile(np.arange(factor.shape[1]), (len(factor), 1)), factor)


def _concatenate(side: list[Floats], count: int) -> Floats:
    return np.concatenate([np.broadcast_to(x, (count, *x.shape[1:])) for x in side], axis=-1)


def _constant_sides(spec: Spec, constant: str, star: bool) -> set[tuple[str, bool]]:
    return {(name, star) for name, space in spec.spaces.items() if space.constant == constant}


def _is_bias(block: Block) -> bool:
    """A vector, over a head and its inside perhaps: no axis of it reads."""
    return all(d is not None for d in block.dims)


def _lies_in(spec: Spec, block: Block, places: set[tuple[str, bool]]) -> bool:
    """Does this piece of a bias lie in one of these spaces, and in nothing else but their
    parents?
    """
    inner = [d for d in block.dims if d is not None and (d.space, d.star) in places]
    outer = {spec.spaces[d.space].over for d in inner}
    return (
        len(inner) == 1
        and _is_bias(block)
        and all(d in inner or (d is not None and d.space in outer) for d in block.dims)
    )


def _has_bias_in(spec: Spec, name: str, places: set[tuple[str, bool]]) -> bool:
    text = spec.tensors.get(name)
    if (
        text is None
        or len(ax.parse(text).terms) != 1
        or not ax.spaces(text) & {s for s, _ in places}
    ):
        return False
    return any(
        _lies_in(spec, block, places)
        for block in empty_blocks(spec, text, _expected_shape(spec, text))
    )


def _expected_shape(spec: Spec, text: str) -> tuple[int, ...]:
    return tuple(ax.size(term, spec.sizes) or 0 for term in ax.parse(text).terms)


def _zero_bias(
    spec: Spec, name: str, make: Callable[[], Tensor], places: set[tuple[str, bool]]
) -> Tensor:
    """A bias with nothing in these places."""
    import torch

    values = np.array(to_work_dtype(make()).cpu().numpy())
    for block in split_blocks(spec, spec.tensors[name], values):
        if _lies_in(spec, block, places):
            block.values[...] = 0  # a view of values
    return torch.from_numpy(values)


def _move_value_biases(spec: Spec, state: State, made: Thunks) -> Thunks:
    out = dict(made)
    for space in [s for s, about in spec.spaces.items() if about.constant == "passed"]:
        biases = [n for n in state if _has_bias_in(spec, n, {(space, False)})]
        readers = [
            n
            for n, text in spec.tensors.items()
            if n in state and len(ax.parse(text).terms) > 1 and space in _read_spaces(text)
        ]
        takers = {n: _bias_name(n) for n in readers}
        if not biases or not all(taker in state for taker in takers.values()):
            continue  # nothing to move, or nowhere to
        for reader, taker in takers.items():
            out[taker] = partial(_absorb_biases, spec, state, out[taker], reader, biases, space)
        for name in biases:
            out[name] = partial(_zero_bias, spec, name, out[name], {(space, False)})
    return out


def _read_spaces(text: str) -> set[str]:
    """The spaces that a tensor reads, and writes nothing of."""
    found = [(leaf.space, leaf.star) for term in ax.parse(text).terms for leaf in ax.leaves(term)]
    return {s for s, star in found if star and (s, False) not in found}


def _bias_name(weight: str) -> str:
    return f"{weight.removesuffix('weight')}bias"


def _absorb_biases(
    spec: Spec, state: State, make: Callable[[], Tensor], reader: str, biases: list[str], space: str
) -> Tensor:
    """The reader's bias, with what the value biases come to."""
    import torch

    total = np.array(to_work_dtype(make()).cpu().numpy())
    for weight in split_blocks(
        spec, spec.tensors[reader], to_work_dtype(state[reader]).cpu().numpy()
    ):
        if space not in weight.spaces:
            continue
        letters = {i: chr(97 + i) for i in range(len(weight.dims))}
        written = "".join(letters[i] for i, d in enumerate(weight.dims) if d is None or not d.star)
        for name in biases:
            for bias in split_blocks(
                spec, spec.tensors[name], to_work_dtype(state[name]).cpu().numpy()
            ):
                if _lies_in(spec, bias, {(space, False)}):
                    own = "".join(
                        letters[weight.axes_of(d.space)[0]] for d in bias.dims if d is not None
                    )
                    come = np.einsum(
                        f"{''.join(letters.values())},{own}->{written}", weight.values, bias.values
                    )
                    total += come.reshape(total.shape).astype(total.dtype)
    return torch.from_numpy(total)
