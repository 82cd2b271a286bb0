"""Untying: a tensor that repeats another one becomes a tensor of its own. The function stays."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from regauge.core.action import State
from regauge.core.fold import resolve_tie
from regauge.core.spec import Spec

if TYPE_CHECKING:
    import torch

    Tensor = torch.Tensor


def untie_lazily(
    spec: Spec, state: State, aliases: Collection[str]
) -> tuple[Spec, dict[str, Callable[[], Tensor]]]:
    """Return a state with a tensor of its own for each of these tied names, one thunk per tensor,
    and its spec.

    Args:
        spec: The spec of the state.
        state: The state.
        aliases: Names that repeat another tensor; others are ignored.
    """
    lost = {alias: target for alias, target in spec.ties.items() if alias in aliases}
    thunks: dict[str, Callable[[], Tensor]] = {n: partial(state.__getitem__, n) for n in state}
    for alias, target in lost.items():
        source = resolve_tie(spec, state, alias)
        thunks.setdefault(target, partial(state.__getitem__, source))
        thunks[alias] = partial(_scaled, state, source, spec.untied.get(alias, 1.0))
    if not lost:
        return spec, thunks
    new = replace(
        spec,
        ties={alias: target for alias, target in spec.ties.items() if alias not in lost},
        untied={alias: by for alias, by in spec.untied.items() if alias not in lost},
        config={**spec.config, "tie_word_embeddings": False, **spec.untied_config},
    )
    return new, thunks


def _scaled(state: State, name: str, factor: float) -> Tensor:
    """Return a tensor times a number."""
    value: Tensor = state[name]
    return value if factor == 1.0 else value * factor
