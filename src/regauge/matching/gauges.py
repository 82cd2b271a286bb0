"""Gauge fixing: the same function, with directions that do not affect it set to fixed values.

Some directions of the weights affect no output and do not belong to the group. Training leaves
noise in them, and distances count it.

    keys      a key bias adds the same to all scores of a query, and softmax cancels it: zero
    values    attention weights sum to one, so a value bias b arrives as W_O b: it is added to the
              output's bias, and becomes zero
    balance   an element: the query and key side of every head, and its value and output side, get
              the same Gram matrix, (BQ)(BQ)^T = (B^-T K)(B^-T K)^T, the point of least norm on the
              orbit; a rotary plane, and a neuron that may be scaled, the same norm on both sides

`fold_norms` does the same for norms. `Space.constant`, in the family's file, declares which biases
these are.
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
    """Return the state with these gauges fixed: the same function, of the same spec.

    Computed in float64 (float32 for half precision) and rounded once.
    """
    thunks = fix_lazily(spec, state, gauges)
    return {name: thunks[name]().to(state[name].dtype) for name in thunks}


def fix_lazily(spec: Spec, state: State, gauges: Iterable[str] = GAUGES) -> Thunks:
    """Return one thunk per tensor that computes what `fix_gauges` does, without rounding.

    With "balance" every head is read once immediately.

    Raises:
        SpecError: if a gauge is unknown.
    """
    gauges = list(gauges)
    unknown = next((gauge for gauge in gauges if gauge not in GAUGES), None)
    if unknown is not None:
        raise SpecError(f'gauges must be among {", ".join(GAUGES)}, got "{unknown}"')
    thunks: Thunks = {name: partial(state.__getitem__, name) for name in state}
    if "values" in gauges:
        thunks = _move_value_biases(spec, state, thunks)
    if "keys" in gauges:
        unseen = _constant_sides(spec, "unseen", star=True)
        thunks |= {
            name: partial(_zero_bias, spec, name, thunks[name], unseen)
            for name in thunks
            if _has_bias_in(spec, name, unseen)
        }
    if "balance" in gauges:
        fixed = LazyState.from_thunks(dict(thunks))
        thunks = apply_lazily(balance(spec, fixed), fixed)
    return thunks


def balance(spec: Spec, state: State) -> Element:
    """Return the element that balances the two sides of every space whose members may scale."""
    costs, unit = Costs(spec, state, state), identity(spec)
    members = {}
    for name, space in spec.spaces.items():
        if not _has_scaling(space.group):
            continue
        sides: dict[bool, list[Floats]] = {False: [], True: []}
        for block, _ in costs.iter_block_pairs(name, unit, lambda _: True):
            for axis in block.axes_of(name):
                leaf = block.dims[axis]
                if leaf is not None and not leaf.bar:
                    outer = block.axes_of(space.over)[0] if space.over is not None else None
                    sides[leaf.star].append(block.unfold(outer, axis).astype(np.float64))
        if sides[False] and sides[True]:
            members[name] = _balancing_member(
                space.group, *(_concatenate(side, spec.count(name)) for side in sides.values())
            )
    return Element(spec, members)


def _has_scaling(group: Group) -> bool:
    """Return whether members of a group may scale."""
    return isinstance(group, GeneralLinear | Scaling | Rotary) and not isinstance(group, PlaneSigns)


def _balancing_member(group: Group, plain: Floats, dual: Floats) -> Member:
    """Return the member that gives both sides the same Gram matrix or norms."""
    if isinstance(group, GeneralLinear):
        return Dense(fit_balance(plain, dual))
    norms = [np.square(side).sum(2) for side in (plain, dual)]
    if isinstance(group, Rotary):
        plane_norms = [
            n.reshape(len(n), 2, -1)
            if group.layout == "half"
            else n.reshape(len(n), -1, 2).swapaxes(1, 2)
            for n in norms
        ]
        norms = [h.sum(1) for h in plane_norms]
    with np.errstate(divide="ignore", invalid="ignore"):
        factor = (norms[1] / norms[0]) ** 0.25
    factor = np.where(np.isfinite(factor) & (factor > 0), factor, 1.0)
    if isinstance(group, Rotary):
        return Planes(factor.astype(np.complex128), group.layout)
    return Monomial(np.tile(np.arange(factor.shape[1]), (len(factor), 1)), factor)


def _concatenate(side: list[Floats], count: int) -> Floats:
    """Join the blocks of one side along their features, repeated for each member."""
    return np.concatenate([np.broadcast_to(x, (count, *x.shape[1:])) for x in side], axis=-1)


def _constant_sides(spec: Spec, constant: str, star: bool) -> set[tuple[str, bool]]:
    """Return the spaces with this `constant`, each with the star of its side."""
    return {(name, star) for name, space in spec.spaces.items() if space.constant == constant}


def _is_bias(block: Block) -> bool:
    """Return whether a block is a vector, over a head and its inside perhaps: no axis of it
    reads.
    """
    return all(d is not None for d in block.dims)


def _lies_in(spec: Spec, block: Block, sides: set[tuple[str, bool]]) -> bool:
    """Return whether a piece of a bias lies in one of these spaces, and besides only in their
    parents.
    """
    inner = [d for d in block.dims if d is not None and (d.space, d.star) in sides]
    outer = {spec.spaces[d.space].over for d in inner}
    return (
        len(inner) == 1
        and _is_bias(block)
        and all(d in inner or (d is not None and d.space in outer) for d in block.dims)
    )


def _has_bias_in(spec: Spec, name: str, sides: set[tuple[str, bool]]) -> bool:
    """Return whether a tensor is a bias with a piece in one of these spaces."""
    text = spec.tensors.get(name)
    if (
        text is None
        or len(ax.parse(text).terms) != 1
        or not ax.spaces(text) & {s for s, _ in sides}
    ):
        return False
    return any(
        _lies_in(spec, block, sides)
        for block in empty_blocks(spec, text, _expected_shape(spec, text))
    )


def _expected_shape(spec: Spec, text: str) -> tuple[int, ...]:
    """Return the shape that the axes give; 0 where any size is allowed."""
    return tuple(ax.size(term, spec.sizes) or 0 for term in ax.parse(text).terms)


def _zero_bias(
    spec: Spec, name: str, thunk: Callable[[], Tensor], sides: set[tuple[str, bool]]
) -> Tensor:
    """Return a bias with zeros in these spaces."""
    import torch

    values = np.array(to_work_dtype(thunk()).cpu().numpy())
    for block in split_blocks(spec, spec.tensors[name], values):
        if _lies_in(spec, block, sides):
            block.values[...] = 0  # a view of values
    return torch.from_numpy(values)


def _move_value_biases(spec: Spec, state: State, thunks: Thunks) -> Thunks:
    """Return the thunks with value biases moved into the outputs' biases."""
    out = dict(thunks)
    for space in [s for s, space_spec in spec.spaces.items() if space_spec.constant == "passed"]:
        biases = [n for n in state if _has_bias_in(spec, n, {(space, False)})]
        readers = [
            n
            for n, text in spec.tensors.items()
            if n in state and len(ax.parse(text).terms) > 1 and space in _read_spaces(text)
        ]
        output_biases = {n: _bias_name(n) for n in readers}
        if not biases or not all(bias in state for bias in output_biases.values()):
            continue  # there is nothing to move, or no bias to move it to
        for reader, bias in output_biases.items():
            out[bias] = partial(_absorb_biases, spec, state, out[bias], reader, biases, space)
        for name in biases:
            out[name] = partial(_zero_bias, spec, name, out[name], {(space, False)})
    return out


def _read_spaces(text: str) -> set[str]:
    """Return the spaces that a tensor reads and does not write."""
    leaves = [(leaf.space, leaf.star) for term in ax.parse(text).terms for leaf in ax.leaves(term)]
    return {s for s, star in leaves if star and (s, False) not in leaves}


def _bias_name(weight: str) -> str:
    """Return the name of the bias that belongs to a weight."""
    return f"{weight.removesuffix('weight')}bias"


def _absorb_biases(
    spec: Spec,
    state: State,
    thunk: Callable[[], Tensor],
    reader: str,
    biases: list[str],
    space: str,
) -> Tensor:
    """Return the reader's bias plus the contribution of the value biases."""
    import torch

    total = np.array(to_work_dtype(thunk()).cpu().numpy())
    for weight in split_blocks(
        spec, spec.tensors[reader], to_work_dtype(state[reader]).cpu().numpy()
    ):
        if space not in weight.spaces:
            continue
        letters = {i: chr(97 + i) for i in range(len(weight.dims))}
        output_axes = "".join(
            letters[i] for i, d in enumerate(weight.dims) if d is None or not d.star
        )
        for name in biases:
            for bias in split_blocks(
                spec, spec.tensors[name], to_work_dtype(state[name]).cpu().numpy()
            ):
                if _lies_in(spec, bias, {(space, False)}):
                    bias_axes = "".join(
                        letters[weight.axes_of(d.space)[0]] for d in bias.dims if d is not None
                    )
                    contribution = np.einsum(
                        f"{''.join(letters.values())},{bias_axes}->{output_axes}",
                        weight.values,
                        bias.values,
                    )
                    total += contribution.reshape(total.shape).astype(total.dtype)
    return torch.from_numpy(total)
