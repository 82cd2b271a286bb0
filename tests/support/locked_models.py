"""Models that drifted from a base, for attacks on locks."""

from __future__ import annotations

import torch

from regauge.core.fold import fold_norms
from regauge.core.spec import Spec
from support.picos import build, spec_of

State = dict[str, torch.Tensor]


def model_of(name: str, fold: bool = False) -> tuple[Spec, State]:
    """A pico with weights large enough to tell channels apart, as training makes them."""
    model = build(name)
    torch.manual_seed(7)
    state = {
        n: v + 0.3 * torch.randn_like(v) if v.is_floating_point() else v
        for n, v in model.state_dict().items()
    }
    spec = spec_of(model)
    state |= {alias: state[target] for alias, target in spec.ties.items() if alias in state}
    return fold_norms(spec, state) if fold else (spec, state)


def add_drift(spec: Spec, state: State, rho: float) -> State:
    """As fine-tuning would leave it: every tensor changed by a share of its own spread."""
    draw = torch.Generator().manual_seed(11)
    out = {
        n: v
        if n in spec.fixed or not v.is_floating_point()
        else v + rho * v.std() * torch.randn(v.shape, generator=draw, dtype=v.dtype)
        for n, v in state.items()
    }
    return out | {alias: out[target] for alias, target in spec.ties.items() if alias in out}
