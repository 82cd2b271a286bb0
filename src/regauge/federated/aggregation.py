"""The server's side of a round: contributions become the next state. Pure functions; the order in
which contributions came does not matter.

They are averaged in float64, sorted by client, so that two engines that were sent the same numbers
end with the same ones.

    fedavg, fedprox    the state plus the server's rate times the mean change (FedProx differs on
    the clients)
    fedadam            Adam on the mean change (Reddi et al. 2021), with the bias corrected as
    Flower's strategy does
    matched            fedavg, but for a first round in which clients sent weights of their own:
    each is matched to the first before the mean

The mean change may be a robust one (`Settings.aggregation`), for any of these strategies but
`matched`:

    median, trimmed-mean    by coordinate, every client once (Yin et al. 2018): claimed counts of
    examples have no effect
    clipped-mean            the weighted mean of changes that are scaled down to a norm, by default
    the median of the round

The next state and the strategy's memory must be finite; otherwise `NonFiniteError` is raised and
neither counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch

from regauge.federated.settings import FederatedError, Settings
from regauge.federated.states import Contribution, State, norm_of

Tensor = torch.Tensor
BETAS, TAU = (0.9, 0.99), 1e-3  # Flower's, and the paper's


class NonFiniteError(FederatedError):
    """An aggregated state or optimizer state with NaN or Inf."""


@dataclass(frozen=True, eq=False)
class Memory:
    """What a strategy remembers from round to round: tensors by name, and how many rounds it has
    aggregated.
    """

    tensors: State = field(default_factory=dict)
    rounds: int = 0


def weighted_mean(
    sent: Sequence[Contribution], weigh: str = "examples", scales: Mapping[int, float] | None = None
) -> dict[str, Tensor]:
    """Return the weighted mean of each tensor over the clients that sent it. `scales` multiply a
    client's tensors, but not its weight.
    """
    out = {}
    for name, parts in _group_by_name(sent).items():
        total, weights = torch.zeros_like(parts[0].tensors[name], dtype=torch.float64), 0
        for c in parts:
            weight = c.examples if weigh == "examples" else 1
            total.add_(
                c.tensors[name].double(),
                alpha=weight if scales is None else weight * scales[c.client],
            )
            weights += weight
        out[name] = (total / weights).to(parts[0].tensors[name].dtype)
    return out


def trimmed_mean(sent: Sequence[Contribution], drop: Callable[[int], int]) -> dict[str, Tensor]:
    """Return the mean of each coordinate without its `drop(n)` smallest and as many largest of n
    values. Clients count once each.
    """
    out = {}
    for name, parts in _group_by_name(sent).items():
        values, _ = torch.stack([c.tensors[name].double() for c in parts]).sort(0)
        left = drop(len(parts))
        out[name] = values[left : len(parts) - left].mean(0).to(parts[0].tensors[name].dtype)
    return out


def trim_count(share: float, count: int) -> int:
    """Return how many values trimmed-mean drops at each end: the share, rounded down, but one of
    three or more.
    """
    return max(int(share * count), min(1, (count - 1) // 2))


def clipped_mean(sent: Sequence[Contribution], weigh: str, norm: float = 0.0) -> dict[str, Tensor]:
    """Return the weighted mean of contributions that are scaled down to a norm; 0 takes the median
    of theirs.
    """
    norms = {c.client: norm_of(c.tensors) for c in sent}
    most = norm or median(norms.values())
    return weighted_mean(
        sent,
        weigh,
        {client: min(1.0, most / found) if found else 1.0 for client, found in norms.items()},
    )


def _group_by_name(sent: Sequence[Contribution]) -> dict[str, list[Contribution]]:
    ordered = sorted(sent, key=lambda c: c.client)
    return {
        name: [c for c in ordered if name in c.tensors]
        for name in sorted({name for c in ordered for name in c.tensors})
    }


Combine = Callable[[Sequence[Contribution], Settings], dict[str, Tensor]]
COMBINE: Mapping[str, Combine] = {
    "mean": lambda sent, s: weighted_mean(sent, s.weigh),
    "median": lambda sent, s: trimmed_mean(sent, lambda n: (n - 1) // 2),
    "trimmed-mean": lambda sent, s: trimmed_mean(sent, lambda n: trim_count(s.trim, n)),
    "clipped-mean": lambda sent, s: clipped_mean(sent, s.weigh, s.clipping_norm),
}
Fuse = Callable[[State, Sequence[Contribution], Settings], dict[str, Tensor]]


def aggregate(
    state: State,
    sent: Sequence[Contribution],
    memory: Memory,
    settings: Settings,
    fuse: Fuse | None = None,
) -> tuple[dict[str, Tensor], Memory]:
    """The next state, and what the strategy remembers. Contributions have been checked. `fuse` is
    for weights that were sent whole (`fusing`).
    """
    if not sent:
        raise FederatedError("nothing was contributed, so that there is nothing to average")
    if len({c.client for c in sent}) < len(sent):
        raise FederatedError("a client contributed twice to one round")
    if any(c.kind == "weights" for c in sent):
        if fuse is None:
            raise FederatedError(
                "clients sent weights of their own, and nothing says how they are averaged"
            )
        made, after = fuse(state, sent, settings), Memory(memory.tensors, memory.rounds + 1)
    else:
        with torch.no_grad():  # a contribution of this process may carry a graph
            change = COMBINE[settings.aggregation](sent, settings)
            rate = settings.server_lr or DEFAULT_LRS.get(settings.strategy, 1.0)
            made, after = STEPS[settings.strategy](state, change, memory, rate)
    for kind, tensors in (("state", made), ("optimizer state", after.tensors)):
        bad = next((name for name, t in tensors.items() if not bool(torch.isfinite(t).all())), None)
        if bad is not None:
            raise NonFiniteError(
                f'the aggregated {kind} must be finite, got NaN or Inf in "{bad}"',
                hint="lower --server-lr, or set --max-norm",
            )
    return made, after


def _add_change(
    state: State, change: State, memory: Memory, rate: float
) -> tuple[dict[str, Tensor], Memory]:
    return {n: t + rate * change[n] if n in change else t for n, t in state.items()}, Memory(
        memory.tensors, memory.rounds + 1
    )


def _adam_step(
    state: State, change: State, memory: Memory, rate: float
) -> tuple[dict[str, Tensor], Memory]:
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
STEPS: Mapping[str, Step] = {
    "fedavg": _add_change,
    "fedprox": _add_change,
    "fedadam": _adam_step,
    "matched": _add_change,
}
DEFAULT_LRS: Mapping[str, float] = {"fedadam": 0.01}
