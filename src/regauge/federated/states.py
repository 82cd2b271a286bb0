"""The weights that are exchanged, and the contributions of clients.

A state has every parameter and every floating-point buffer by name. Its layout (names, shapes,
dtypes) has a digest, so that another model is detected, and its first differing tensors named,
before anything is computed or averaged.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from regauge.core.canonical import canonical_json
from regauge.errors import FederatedError

Tensor = torch.Tensor
State = Mapping[str, Tensor]
Layout = dict[str, list[str | int]]


@dataclass(frozen=True, eq=False)
class Contribution:
    """The contribution of a client to a round.

    Attributes:
        client: The client.
        round: The round, from 0.
        layout: The layout digest of the client's model.
        tensors: The change of the weights or, with `kind` "weights", the weights; without withheld
            tensors.
        examples: The number of the client's examples.
        steps: The number of local steps.
        batch: The examples of a step.
        lr: The learning rate.
        loss: The mean loss of the steps.
        kind: "change" or "weights".
        rows: The example indices of each step, for scoring; not sent.

    Example:
        >>> settings = regauge.federated.Settings(clients=1, rounds=1)
        >>> state = regauge.federated.state_of(vit)
        >>> sent = regauge.federated.contribute(vit, state, images, settings, 0, 0)
        >>> sent.kind
        'change'
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
    rows: tuple[tuple[int, ...], ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Absence:
    """A selected client without a usable contribution, and the reason."""

    client: int
    reason: str


def state_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return a copy of the weights that are exchanged.

    Args:
        model: The model.

    Returns:
        The weights by name.

    Example:
        >>> regauge.federated.state_of(vit)["classifier.weight"].shape
        torch.Size([10, 12])
    """
    return {name: t.detach().clone() for name, t in _shared_tensors(model).items()}


def load_state(model: torch.nn.Module, state: State) -> None:
    """Load a state into a model, in place.

    Args:
        model: The model.
        state: The exchanged weights by name.

    Raises:
        FederatedError: The state is of another model.

    Example:
        >>> state = regauge.federated.state_of(vit)
        >>> regauge.federated.load_state(vit, state)
    """
    target = _shared_tensors(model)
    require_layout(layout_of(target), layout_of(state), "the model here", "the state that was sent")
    with torch.no_grad():
        for name, t in target.items():
            t.copy_(state[name])


def layout_of(state: State) -> Layout:
    """Return dtype and shape of each tensor."""
    return {name: [str(t.dtype).removeprefix("torch."), *t.shape] for name, t in state.items()}


def digest_of(layout: Layout) -> str:
    """Return the digest of a layout, by which two sides compare their models."""
    return hashlib.sha256(canonical_json(layout)).hexdigest()[:32]


def require_layout(first: Layout, second: Layout, first_name: str, second_name: str) -> None:
    """Raise if two layouts differ, and name the first differing tensors."""
    faults = [
        f'"{name}" is in {first_name} and not in {second_name}'
        for name in first.keys() - second.keys()
    ]
    faults += [
        f'"{name}" is in {second_name} and not in {first_name}'
        for name in second.keys() - first.keys()
    ]
    faults += [
        f'"{name}" is {_describe_tensor(first[name])} in {first_name} and '
        f"{_describe_tensor(second[name])} in {second_name}"
        for name in first.keys() & second.keys()
        if first[name] != second[name]
    ]
    if faults:
        shown = sorted(faults)[:5]
        rest = f"\n  and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise FederatedError(
            "two versions of a model differ:\n" + "\n".join(f"  {f}" for f in shown) + rest,
            hint="pass the same MODEL to all sides",
        )


def _describe_tensor(layout: list[str | int]) -> str:
    return f"{layout[0]} {layout[1:]}"


def norm_of(tensors: State) -> float:
    """Return the L2 norm of all tensors together, in float64."""
    return math.sqrt(sum(float(t.detach().double().square().sum()) for t in tensors.values()))


def _shared_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    saved = model.state_dict()
    buffers = {
        name: b for name, b in model.named_buffers() if name in saved and b.is_floating_point()
    }
    return {**dict(model.named_parameters()), **buffers}
