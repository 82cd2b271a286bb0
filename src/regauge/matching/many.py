"""More than two models: all of them next to one, or next to what they have in common.

Paper 003's code takes the model nearest to the mean of the weights as the anchor, and matches every
other to it. A common mean goes on from there: the mean of all, each in its place, is what the next
round matches to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from regauge.checkpoints.reader import LazyState
from regauge.core.action import State, apply_lazily
from regauge.core.element import Element, identity
from regauge.core.spec import Spec
from regauge.matching import Match, MatchError, match

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class MultiMatch:
    """The element of each model, in their order. `anchor` is the one that stayed, or that the first
    round matched to; `spread` is the root of the mean squared distance to the mean, before, and
    after each round.
    """

    elements: tuple[Element, ...]
    anchor: int
    matches: tuple[Match | None, ...]
    spread: tuple[float, ...]


def match_many(
    spec: Spec,
    states: Sequence[State],
    *,
    to: int | Literal["nearest", "mean"] = "nearest",
    rounds: int = 3,
    **options: Any,
) -> MultiMatch:
    """Match k models: to one of them by its number, to the one nearest the mean, or to a common
    mean in some rounds. `options` are `match`'s.
    """
    if len(states) < 2:
        raise MatchError(
            f"matching needs at least two models, and here {'is one' if states else 'are none'}"
        )
    if not isinstance(to, int) and to not in ("nearest", "mean"):
        raise MatchError(
            f'there is no "{to}" to match to',
            hint='give the number of a model, "nearest" or "mean"',
        )
    for i, state in enumerate(states[1:], 1):
        _require_same_shapes(states[0], state, i)
    anchor = to if isinstance(to, int) else nearest_to_mean(states)
    if not 0 <= anchor < len(states):
        raise MatchError(
            f"there is no model {anchor}", hint=f"models are counted from 0 to {len(states) - 1}"
        )
    elements = [identity(spec) for _ in states]
    spreads = [_spread(states)]
    matches: list[Match | None] = [None] * len(states)
    for i, state in enumerate(states):
        if i != anchor:
            found = match(spec, state, states[anchor], **options)
            matches[i], elements[i] = found, found.element
    spreads.append(_spread([apply_to_state(g, s) for g, s in zip(elements, states, strict=True)]))
    for _ in range(rounds if to == "mean" else 0):
        now = [apply_to_state(g, s) for g, s in zip(elements, states, strict=True)]
        middle = lazy_mean(now)
        steps = [match(spec, one, middle, **options) for one in now]
        proposed = [step.element @ g for step, g in zip(steps, elements, strict=True)]
        spread = _spread([apply_to_state(g, s) for g, s in zip(proposed, states, strict=True)])
        if spread >= spreads[-1] * (1 - 1e-6):
            break
        elements, matches = proposed, list(steps)
        spreads.append(spread)
    return MultiMatch(tuple(elements), anchor, tuple(matches), tuple(spreads))


def nearest_to_mean(states: Sequence[State]) -> int:
    """The model whose tensors lie nearest to their mean, by the sum of their distances (as paper
    003's code has it).
    """
    middle = lazy_mean(states)
    away = [0.0] * len(states)
    for name in _float_names(states[0]):
        there = middle[name]
        for i, state in enumerate(states):
            away[i] += float((state[name].to(there.dtype) - there).norm())
    return min(range(len(states)), key=lambda i: away[i])


def lazy_mean(states: Sequence[State]) -> State:
    """The mean of several states, tensor by tensor as each is asked for, in float32 or better."""
    return LazyState(list(states[0]), partial(_mean_tensor, states))


def apply_to_state(g: Element, state: State) -> State:
    """A state moved by an element, tensor by tensor as each is asked for."""
    return LazyState.from_thunks(apply_lazily(g, state))


def _mean_tensor(states: Sequence[State], name: str) -> torch.Tensor:
    import torch

    first = states[0][name]
    if not first.is_floating_point():
        return first
    work = torch.promote_types(first.dtype, torch.float32)
    total = first.to(work, copy=True)
    for other in states[1:]:
        total += other[name].to(work)
    return total / len(states)


def _require_same_shapes(first: State, other: State, number: int) -> None:
    for name in first:
        if name not in other:
            raise MatchError(
                f'model {number} has no "{name}", which model 0 has',
                hint="give models of one class and one config",
            )
        here, there = (list(state[name].shape) for state in (first, other))
        if here != there:
            raise MatchError(
                f'"{name}" is {here} in model 0 and {there} in model {number}',
                hint="give models of one class and one config",
            )


def _float_names(state: State) -> list[str]:
    return [name for name in state if state[name].is_floating_point()]


def _spread(states: Sequence[State]) -> float:
    middle, total = lazy_mean(states), 0.0
    for name in _float_names(states[0]):
        there = middle[name]
        total += sum(
            float((state[name].to(there.dtype) - there).square().sum()) for state in states
        )
    return float((total / len(states)) ** 0.5)
