"""The weights that travel, and what a client sends back.

A state is every parameter and every floating buffer by name. Its layout (names, shapes, dtypes) has
a digest: who has another model is told which tensor differs before anything is computed or
averaged.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from regauge.core.canonical import canonical_json
from regauge.federated.settings import FederatedError

Tensor = torch.Tensor
State = Mapping[str, Tensor]
Layout = dict[str, list[str | int]]


@dataclass(frozen=True, eq=False)
class Contribution:
    """What a client sends after its part of a round: the change of its weights or, where it began
    from its own, the weights. It took `steps` local steps at `rate`, each of `batch` examples;
    `loss` is their mean. What is withheld is not in `tensors`.
    """

    client: int
    round: int
    layout: str
    tensors: State
    examples: int
    steps: int
    batch: int
    lr: float
    loss: float
    kind: Literal["change", "weights"] = "change"
    rows: tuple[tuple[int, ...], ...] = field(
        default=(), repr=False
    )  # of the client's own data, step by step: it stays there, for scoring


@dataclass(frozen=True)
class Absence:
    """A client that was asked and sent nothing that can be used, and why."""

    client: int
    reason: str


def state_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """A copy of what travels."""
    return {name: t.detach().clone() for name, t in _shared_tensors(model).items()}


def load_state(model: torch.nn.Module, state: State) -> None:
    """Put a state into a model, in place. Another model's is refused by name."""
    own = _shared_tensors(model)
    require_layout(layout_of(own), layout_of(state), "the model here", "the state that was sent")
    with torch.no_grad():
        for name, t in own.items():
            t.copy_(state[name])


def layout_of(state: State) -> Layout:
    return {name: [str(t.dtype).removeprefix("torch."), *t.shape] for name, t in state.items()}


def digest_of(layout: Layout) -> str:
    return hashlib.sha256(canonical_json(layout)).hexdigest()[:32]


def require_layout(own: Layout, other: Layout, here: str, there: str) -> None:
    """Refuse another model's layout: the first tensors that differ are named."""
    faults = [f'"{n}" is in {here} and not in {there}' for n in own.keys() - other.keys()]
    faults += [f'"{n}" is in {there} and not in {here}' for n in other.keys() - own.keys()]
    faults += [
        f'"{n}" is {_describe_tensor(own[n])} in {here} and {_describe_tensor(other[n])} in {there}'
        for n in own.keys() & other.keys()
        if own[n] != other[n]
    ]
    if faults:
        shown = sorted(faults)[:5]
        more = f"\n  and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise FederatedError(
            "two versions of a model meet:\n" + "\n".join(f"  {f}" for f in shown) + more,
            hint="give all sides the same MODEL",
        )


def _describe_tensor(one: list[str | int]) -> str:
    return f"{one[0]} {one[1:]}"


def norm_of(tensors: State) -> float:
    """Return the L2 norm of all tensors together, in float64."""
    return math.sqrt(sum(float(t.detach().double().square().sum()) for t in tensors.values()))


def _shared_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    kept = model.state_dict()
    buffers = {
        name: b for name, b in model.named_buffers() if name in kept and b.is_floating_point()
    }
    return {**dict(model.named_parameters()), **buffers}
