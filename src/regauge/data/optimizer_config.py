"""Configuration of an optimizer: its kind, learning rate schedule, clipping and accumulation; and
the moments of an optimizer as tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from regauge.errors import TrainingError

OPTIMIZERS = ("sgd", "adam", "adamw")
SCHEDULES = ("constant", "linear", "cosine")
# Names in the handshake, and the fields that they belong to.
_WIRE_NAMES = {
    "optimizer": "optimizer",
    "rate": "lr",
    "decay": "weight_decay",
    "momentum": "momentum",
    "schedule": "schedule",
    "warmup": "warmup",
    "steps": "steps",
    "clip": "clip",
    "accumulate": "accumulate",
}


@dataclass(frozen=True)
class OptimizerConfig:
    """Options of an optimizer. In split learning the server sends them to its clients.

    Attributes:
        optimizer: "sgd", "adam" or "adamw".
        lr: Peak learning rate.
        weight_decay: Weight decay; decoupled for adamw.
        momentum: Momentum of sgd.
        betas: Decay of the moments of adam and adamw.
        eps: Epsilon of adam and adamw.
        schedule: After the warmup "constant", or "linear" or "cosine" down to 0 at `steps`.
        warmup: Steps in which the learning rate rises linearly from 0.
        steps: Total number of steps, for schedules that end.
        clip: Largest norm of the gradient of all parameters on this side; 0 does not clip.
        accumulate: Losses per optimizer step.

    Raises:
        TrainingError: An option is unknown or out of range.

    Example:
        >>> training = regauge.split.OptimizerConfig("adamw", lr=3e-4, weight_decay=0.1)
        >>> optimizer = training.build(model.parameters())
    """

    optimizer: str = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.0
    momentum: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    schedule: str = "constant"
    warmup: int = 0
    steps: int = 0
    clip: float = 0.0
    accumulate: int = 1

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise TrainingError(
                f'unknown optimizer "{self.optimizer}"',
                hint=f"choose from {', '.join(OPTIMIZERS)}",
            )
        if self.schedule not in SCHEDULES:
            raise TrainingError(
                f'unknown schedule "{self.schedule}"',
                hint=f"choose from {', '.join(SCHEDULES)}",
            )
        for name in ("lr", "weight_decay", "momentum", "clip", "warmup", "steps", "accumulate"):
            value, minimum = getattr(self, name), int(name == "accumulate")
            if not minimum <= value < math.inf:
                raise TrainingError(
                    f"{name} must be finite and at least {minimum}, got {value:g}",
                    hint=f"choose {minimum} or more",
                )
        if self.schedule != "constant" and self.steps <= self.warmup:
            raise TrainingError(
                f"steps of a {self.schedule} schedule must be more than its warmup of "
                f"{self.warmup}, got {self.steps}",
                hint="set steps to the total number of steps",
            )

    def lr_at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0. The schedule has no state."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        if self.schedule == "constant":
            return self.lr
        fraction = min(1.0, (step - self.warmup) / (self.steps - self.warmup))
        return self.lr * (
            1 - fraction if self.schedule == "linear" else (1 + math.cos(math.pi * fraction)) / 2
        )

    def build(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """Return a torch optimizer over these parameters."""
        shared: dict[str, Any] = {"lr": self.lr, "weight_decay": self.weight_decay}
        if self.optimizer == "sgd":
            return torch.optim.SGD(parameters, momentum=self.momentum, **shared)
        build = torch.optim.AdamW if self.optimizer == "adamw" else torch.optim.Adam
        return build(parameters, betas=self.betas, eps=self.eps, **shared)

    def to_dict(self) -> dict[str, str | int | float]:
        """Return the options as they are named in the handshake.

        A client can train its own parts with the same ones.
        """
        return {wire: getattr(self, field) for wire, field in _WIRE_NAMES.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> OptimizerConfig:
        """Build a configuration from the names of `to_dict`. Missing ones take their defaults."""
        return cls(**{_WIRE_NAMES[name]: value for name, value in values.items()})


def get_moments(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]
) -> dict[str, dict[str, torch.Tensor]]:
    """Return the tensors of an optimizer's state, by parameter and entry."""
    return {
        n: {k: v for k, v in optimizer.state.get(p, {}).items() if isinstance(v, torch.Tensor)}
        for n, p in parameters.items()
    }


def load_moments(
    optimizer: torch.optim.Optimizer,
    parameter: torch.nn.Parameter,
    moments: Mapping[str, torch.Tensor],
) -> None:
    """Set an optimizer's state of one parameter, unless it is empty.

    The step count stays on the CPU, where torch keeps it.
    """
    if moments:
        optimizer.state[parameter] = {
            k: v if k == "step" else v.to(parameter.device, parameter.dtype)
            for k, v in moments.items()
        }


def moment_fault(moments: Mapping[str, torch.Tensor], parameter: torch.Tensor) -> str | None:
    """Return what is wrong with a stored optimizer state of one parameter, or None."""
    if moments and moments.keys() not in ({"momentum_buffer"}, {"step", "exp_avg", "exp_avg_sq"}):
        return (
            f"has the entries {', '.join(sorted(moments))[:100]}, which no supported optimizer has"
        )
    for name, tensor in moments.items():
        shape = torch.Size() if name == "step" else parameter.shape
        if tensor.shape != shape or not tensor.is_floating_point():
            return (
                f'has a "{name}" of shape {list(tensor.shape)} and dtype '
                f"{dtype_name(tensor)}, expected {list(shape)} and a float dtype"
            )
        if not bool(torch.isfinite(tensor).all()):
            return f'has a "{name}" with NaN or Inf'
        if name in ("step", "exp_avg_sq") and bool((tensor < 0).any()):
            return f'has a "{name}" below 0'
    return None


def dtype_name(tensor: torch.Tensor) -> str:
    """Return a tensor's dtype as in "float32"."""
    return str(tensor.dtype).removeprefix("torch.")
