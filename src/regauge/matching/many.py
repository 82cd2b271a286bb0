"""Matching of more than two models: all to one of them, or to their common mean.

The code of rotation symmetry (arXiv:2502.00264) takes the model nearest to the mean of the weights
as the anchor and matches every other to it. Matching to a common mean continues from there: each
round matches to the mean of the aligned models.
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
from regauge.matching import Match, MatchError, match_states

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class MultiMatch:
    """The elements that align several models.

    Attributes:
        elements: the element of each model, in their order.
        anchor: the model that was fixed in the first round.
        matches: the last match of each model; None for the anchor.
        spread: the root of the mean squared distance to the mean, before and after each round.
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
    """Match several models.

    Args:
        spec: the spec of all models.
        states: the models.
        to: the number of the model to match to, "nearest" for the one nearest to the mean, or
            "mean" for
            a common mean.
        rounds: the largest number of rounds towards a common mean.
        options: options of `match`.
    """
    if len(states) < 2:
        raise MatchError(f"states must hold at least two models, got {len(states)}")
    if not isinstance(to, int) and to not in ("nearest", "mean"):
        raise MatchError(
            f'to must be the number of a model, "nearest" or "mean", got "{to}"',
        )
    for i, state in enumerate(states[1:], 1):
        _require_same_shapes(states[0], state, i)
    anchor = to if isinstance(to, int) else nearest_to_mean(states)
    if not 0 <= anchor < len(states):
        raise MatchError(f"to must be from 0 to {len(states) - 1}, got {anchor}")
    elements = [identity(spec) for _ in states]
    spreads = [_spread(states)]
    matches: list[Match | None] = [None] * len(states)
    for i, state in enumerate(states):
        if i != anchor:
            result = match_states(spec, state, states[anchor], **options)
            matches[i], elements[i] = result, result.element
    spreads.append(_spread([apply_to_state(g, s) for g, s in zip(elements, states, strict=True)]))
    for _ in range(rounds if to == "mean" else 0):
        aligned = [apply_to_state(g, s) for g, s in zip(elements, states, strict=True)]
        middle = lazy_mean(aligned)
        results = [match_states(spec, state, middle, **options) for state in aligned]
        proposed = [result.element @ g for result, g in zip(results, elements, strict=True)]
        spread = _spread([apply_to_state(g, s) for g, s in zip(proposed, states, strict=True)])
        if spread >= spreads[-1] * (1 - 1e-6):
            break
        elements, matches = proposed, list(results)
        spreads.append(spread)
    return MultiMatch(tuple(elements), anchor, tuple(matches), tuple(spreads))


def nearest_to_mean(states: Sequence[State]) -> int:
    """Return the number of the model nearest to the mean, by the sum over tensors of the
    distances (as the code of rotation symmetry does).
    """
    mean = lazy_mean(states)
    distances = [0.0] * len(states)
    for name in _float_names(states[0]):
        target = mean[name]
        for i, state in enumerate(states):
            distances[i] += float((state[name].to(target.dtype) - target).norm())
    return min(range(len(states)), key=lambda i: distances[i])


def lazy_mean(states: Sequence[State]) -> State:
    """Return the mean of several states, computed tensor by tensor on access, in float32 or
    better.
    """
    return LazyState(list(states[0]), partial(_mean_tensor, states))


def apply_to_state(g: Element, state: State) -> State:
    """Return a state transformed by an element, tensor by tensor on access."""
    return LazyState.from_thunks(apply_lazily(g, state))


def _mean_tensor(states: Sequence[State], name: str) -> torch.Tensor:
    """Return the mean of one tensor; the first one if it is not floating-point."""
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
    """Raise unless a state has the tensors and shapes of the first."""
    for name in first:
        if name not in other:
            raise MatchError(
                f'model {number} must have the tensors of model 0, but lacks "{name}"',
                hint="pass models of one class and one config",
            )
        expected, shape = (list(state[name].shape) for state in (first, other))
        if expected != shape:
            raise MatchError(
                f'"{name}" of model {number} must be {expected} as in model 0, got {shape}',
                hint="pass models of one class and one config",
            )


def _float_names(state: State) -> list[str]:
    """Return the names of the floating-point tensors."""
    return [name for name in state if state[name].is_floating_point()]


def _spread(states: Sequence[State]) -> float:
    """Return the root of the mean squared distance to the mean."""
    mean, total = lazy_mean(states), 0.0
    for name in _float_names(states[0]):
        target = mean[name]
        total += sum(
            float((state[name].to(target.dtype) - target).square().sum()) for state in states
        )
    return float((total / len(states)) ** 0.5)
