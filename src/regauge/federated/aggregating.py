"""The server's side of a round: contributions become the next state. Pure functions; the order in which contributions came does not matter.

They are averaged in float64, sorted by client, so that two engines that were sent the same numbers end with the same ones.

    fedavg, fedprox    the state plus the server's rate times the mean change (FedProx differs on the clients)
    fedadam            Adam on the mean change (Reddi et al. 2021), with the bias corrected as Flower's strategy does
    matched            fedavg, but for a first round in which clients sent weights of their own: each is matched to the first before the mean
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from regauge.federated.settings import FederatedError, Settings
from regauge.federated.states import Contribution, State

Tensor = torch.Tensor
BETAS, TAU = (0.9, 0.99), 1e-3  # Flower's, and the paper's


@dataclass(frozen=True, eq=False)
class Memory:
    """What a strategy remembers from round to round: tensors by name, and how many rounds it has aggregated."""

    tensors: State = field(default_factory=dict)
    rounds: int = 0


def mean_of(sent: Sequence[Contribution], weigh: str = "examples") -> dict[str, Tensor]:
    """The weighted mean of each tensor over those who sent it."""
    ordered = sorted(sent, key=lambda c: c.client)
    names = sorted({name for c in ordered for name in c.tensors})
    out = {}
    for name in names:
        parts = [(c.examples if weigh == "examples" else 1, c.tensors[name]) for c in ordered if name in c.tensors]
        total = torch.zeros_like(parts[0][1], dtype=torch.float64)
        for weight, t in parts:
            total.add_(t.double(), alpha=weight)
        out[name] = (total / sum(weight for weight, _ in parts)).to(parts[0][1].dtype)
    return out


Fuse = Callable[[State, Sequence[Contribution], Settings], dict[str, Tensor]]


def aggregate(
    state: State, sent: Sequence[Contribution], memory: Memory, settings: Settings, fuse: Fuse | None = None
) -> tuple[dict[str, Tensor], Memory]:
    """The next state, and what the strategy remembers. Contributions have been checked. `fuse` is for weights that were sent whole (`fusing`)."""
    if not sent:
        raise FederatedError("nothing was contributed, so that there is nothing to average")
    if len({c.client for c in sent}) < len(sent):
        raise FederatedError("a client contributed twice to one round")
    if any(c.kind == "weights" for c in sent):
        if fuse is None:
            raise FederatedError("clients sent weights of their own, and nothing says how they are averaged")
        return fuse(state, sent, settings), Memory(memory.tensors, memory.rounds + 1)
    change = mean_of(sent, settings.weigh)
    rate = settings.server_rate or DEFAULT_RATES.get(settings.strategy, 1.0)
    return STEPS[settings.strategy](state, change, memory, rate)


def _plainly(state: State, change: State, memory: Memory, rate: float) -> tuple[dict[str, Tensor], Memory]:
    return {n: t + rate * change[n] if n in change else t for n, t in state.items()}, Memory(memory.tensors, memory.rounds + 1)


def _adam(state: State, change: State, memory: Memory, rate: float) -> tuple[dict[str, Tensor], Memory]:
    one, two = BETAS
    at = memory.rounds + 1
    corrected = rate * math.sqrt(1 - two ** (at + 1)) / (1 - one ** (at + 1))
    out, kept = dict(state), dict(memory.tensors)
    for n, d in change.items():
        m = one * kept.get(f"m/{n}", torch.zeros_like(d)) + (1 - one) * d
        v = two * kept.get(f"v/{n}", torch.zeros_like(d)) + (1 - two) * d.square()
        out[n] = state[n] + corrected * m / (v.sqrt() + TAU)
        kept |= {f"m/{n}": m, f"v/{n}": v}
    return out, Memory(kept, at)


Step = Callable[[State, State, Memory, float], tuple[dict[str, Tensor], Memory]]
STEPS: Mapping[str, Step] = {"fedavg": _plainly, "fedprox": _plainly, "fedadam": _adam, "matched": _plainly}
DEFAULT_RATES: Mapping[str, float] = {"fedadam": 0.01}
