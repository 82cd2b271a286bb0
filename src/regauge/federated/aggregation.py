"""The server's side of a round: aggregate contributions into the next state.

Pure functions that do not depend on the order of contributions: they are averaged in float64,
sorted by client, so that two engines with the same contributions end with the same state.
Strategies:

- fedavg, fedprox: the state plus the server's learning rate times the mean change (FedProx differs
  on the clients)
- fedadam: Adam on the mean change (Reddi et al. 2021), with the bias correction of Flower's
  strategy
- matched: fedavg, except for a first round of whole weights, in which each client is aligned with
  the mean of those before

`Settings.aggregation` replaces the mean change by a robust one, for every strategy but `matched`:

- median, trimmed-mean: by coordinate, every client once (Yin et al. 2018), so that claimed counts
  of examples have no effect
- clipped-mean: the weighted mean of changes that are scaled down to a norm, by default the median
  norm of the round

The next state and the memory of the strategy must be finite; otherwise `NonFiniteError` is raised
and both are discarded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch

from regauge.errors import FederatedError, Hint, NonFiniteError
from regauge.federated.settings import Settings
from regauge.federated.states import Contribution, State, norm_of

Tensor = torch.Tensor
BETAS, TAU = (0.9, 0.99), 1e-3  # Flower's, and the paper's


@dataclass(frozen=True, eq=False)
class Memory:
    """The optimizer state of a strategy: tensors by name, and the number of aggregated rounds."""

    tensors: State = field(default_factory=dict)
    rounds: int = 0


def weighted_mean(
    sent: Sequence[Contribution], weigh: str = "examples", scales: Mapping[int, float] | None = None
) -> dict[str, Tensor]:
    """Return the weighted mean of each tensor over the clients that sent it.

    Args:
        sent: The contributions.
        weigh: "examples" or "clients".
        scales: Factors of the tensors of each client; its weight stays the same.
    """
    means = {}
    for name, contributions in _group_by_name(sent).items():
        like = contributions[0].tensors[name]
        total, total_weight = torch.zeros_like(like, dtype=torch.float64), 0
        for contribution in contributions:
            weight = contribution.examples if weigh == "examples" else 1
            total.add_(
                contribution.tensors[name].double(),
                alpha=weight if scales is None else weight * scales[contribution.client],
            )
            total_weight += weight
        means[name] = (total / total_weight).to(like.dtype)
    return means


def trimmed_mean(sent: Sequence[Contribution], drop: Callable[[int], int]) -> dict[str, Tensor]:
    """Return the mean of each coordinate without the `drop(n)` smallest and largest of n values.

    Every client counts once.
    """
    means = {}
    for name, contributions in _group_by_name(sent).items():
        values, _ = torch.stack([c.tensors[name].double() for c in contributions]).sort(0)
        dropped = drop(len(contributions))
        means[name] = (
            values[dropped : len(contributions) - dropped]
            .mean(0)
            .to(contributions[0].tensors[name].dtype)
        )
    return means


def trim_count(share: float, count: int) -> int:
    """Return how many values trimmed-mean drops at each end.

    That is the share, rounded down, but at least one of three or more values.
    """
    return max(int(share * count), min(1, (count - 1) // 2))


def clipped_mean(sent: Sequence[Contribution], weigh: str, norm: float = 0.0) -> dict[str, Tensor]:
    """Return the weighted mean of contributions scaled down to a norm; 0: their median norm."""
    norms = {c.client: norm_of(c.tensors) for c in sent}
    limit = norm or median(norms.values())
    return weighted_mean(
        sent,
        weigh,
        {client: min(1.0, limit / value) if value else 1.0 for client, value in norms.items()},
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
    """Return the next state and the memory of the strategy.

    Args:
        state: The state that was sent out.
        sent: Valid contributions.
        memory: The memory of the strategy.
        settings: The settings of the run.
        fuse: Average whole weights (`fusion`).

    Returns:
        The next state, and the memory after it.

    Raises:
        FederatedError: Contributions are empty, two of one client, or whole weights without
            `fuse`.
        NonFiniteError: The next state or memory has NaN or Inf.

    Example:
        >>> from regauge.federated.aggregation import Memory
        >>> settings = regauge.federated.Settings(clients=1, rounds=1)
        >>> sent = regauge.federated.contribute(
        ...     vit, regauge.federated.state_of(vit), images, settings, 0, 0
        ... )
        >>> state, memory = regauge.federated.aggregate(
        ...     regauge.federated.state_of(vit), [sent], Memory(), settings
        ... )
    """
    if not sent:
        raise FederatedError("contributions must be >= 1, got 0")
    if len({contribution.client for contribution in sent}) < len(sent):
        raise FederatedError("contributions must be one for each client, got two of one client")
    if any(contribution.kind == "weights" for contribution in sent):
        if fuse is None:
            raise FederatedError(
                "contributions must be changes of weights without `fuse`, got whole weights"
            )
        next_state = fuse(state, sent, settings)
        next_memory = Memory(memory.tensors, memory.rounds + 1)
    else:
        with torch.no_grad():  # a contribution of this process may carry a graph
            change = COMBINE[settings.aggregation](sent, settings)
            lr = settings.server_lr or DEFAULT_LRS.get(settings.strategy, 1.0)
            next_state, next_memory = STEPS[settings.strategy](state, change, memory, lr)
    for kind, tensors in (("state", next_state), ("optimizer state", next_memory.tensors)):
        bad = next((name for name, t in tensors.items() if not bool(torch.isfinite(t).all())), None)
        if bad is not None:
            raise NonFiniteError(
                f'the aggregated {kind} must be finite, got NaN or Inf in "{bad}"',
                hint=Hint(
                    "lower server_lr, or set max_norm", cli="lower --server-lr, or set --max-norm"
                ),
            )
    return next_state, next_memory


def _add_change(
    state: State, change: State, memory: Memory, lr: float
) -> tuple[dict[str, Tensor], Memory]:
    return {n: t + lr * change[n] if n in change else t for n, t in state.items()}, Memory(
        memory.tensors, memory.rounds + 1
    )


def _adam_step(
    state: State, change: State, memory: Memory, lr: float
) -> tuple[dict[str, Tensor], Memory]:
    beta1, beta2 = BETAS
    step = memory.rounds + 1
    corrected_lr = lr * math.sqrt(1 - beta2 ** (step + 1)) / (1 - beta1 ** (step + 1))
    next_state, moments = dict(state), dict(memory.tensors)
    for name, delta in change.items():
        m = beta1 * moments.get(f"m/{name}", torch.zeros_like(delta)) + (1 - beta1) * delta
        v = beta2 * moments.get(f"v/{name}", torch.zeros_like(delta)) + (1 - beta2) * delta.square()
        next_state[name] = state[name] + corrected_lr * m / (v.sqrt() + TAU)
        moments |= {f"m/{name}": m, f"v/{name}": v}
    return next_state, Memory(moments, step)


Step = Callable[[State, State, Memory, float], tuple[dict[str, Tensor], Memory]]
STEPS: Mapping[str, Step] = {
    "fedavg": _add_change,
    "fedprox": _add_change,
    "fedadam": _adam_step,
    "matched": _add_change,
}
DEFAULT_LRS: Mapping[str, float] = {"fedadam": 0.01}
