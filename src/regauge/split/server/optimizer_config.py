"""How the server trains its backbone: an optimizer out of a short list, a rate that is a function
of the step, clipping, accumulation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from regauge.errors import RegaugeError
from regauge.split.protocol.frames import Value

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


class TrainingError(RegaugeError):
    """Options of training that make no sense."""


@dataclass(frozen=True)
class OptimizerConfig:
    """The server's options. They are its own: clients are told, and not asked.

    `rate` is multiplied by the schedule: from 0 up in `warmup` steps, then constant, or down to 0
    at `steps` along a line or a cosine. `clip` bounds the norm of the backbone's gradient (the
    client's own parameters are not in it). A step is taken after every `accumulate` losses.
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
                f'there is no optimizer "{self.optimizer}" here',
                hint=f"choose from {', '.join(OPTIMIZERS)}",
            )
        if self.schedule not in SCHEDULES:
            raise TrainingError(
                f'there is no schedule "{self.schedule}"',
                hint=f"choose from {', '.join(SCHEDULES)}",
            )
        for name in ("lr", "weight_decay", "momentum", "clip", "warmup", "steps", "accumulate"):
            value, least = getattr(self, name), int(name == "accumulate")
            if not least <= value < math.inf:
                raise TrainingError(
                    f"{name} is {value:g}", hint=f"it is {least} or more, and finite"
                )
        if self.schedule != "constant" and self.steps <= self.warmup:
            raise TrainingError(
                f"a {self.schedule} schedule ends after its warm-up",
                hint="set steps to the number of all steps",
            )

    def lr_at(self, step: int) -> float:
        """The rate of a step, the first of which is 0. It needs no state, so that none has to be
        kept.
        """
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        if self.schedule == "constant":
            return self.lr
        done = min(1.0, (step - self.warmup) / (self.steps - self.warmup))
        return self.lr * (
            1 - done if self.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
        )

    def build(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.optimizer](list(parameters), self)

    def to_dict(self) -> dict[str, Value]:
        """For the handshake, so that a client can train its own parts likewise."""
        return {wire: getattr(self, field) for wire, field in _WIRE_NAMES.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> OptimizerConfig:
        """Build a configuration from the names of `to_dict`. Missing ones take their defaults."""
        return cls(**{_WIRE_NAMES[name]: value for name, value in values.items()})


def get_moments(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]
) -> dict[str, dict[str, torch.Tensor]]:
    """What an optimizer holds, by parameter and name."""
    return {
        n: {k: v for k, v in optimizer.state.get(p, {}).items() if isinstance(v, torch.Tensor)}
        for n, p in parameters.items()
    }


def load_moments(
    optimizer: torch.optim.Optimizer,
    parameter: torch.nn.Parameter,
    moments: Mapping[str, torch.Tensor],
) -> None:
    """Give an optimizer what one held for a parameter, if it held anything. Its count of steps
    stays on the CPU, where torch has it.
    """
    if moments:
        optimizer.state[parameter] = {
            k: v if k == "step" else v.to(parameter.device, parameter.dtype)
            for k, v in moments.items()
        }


def moment_fault(moments: Mapping[str, torch.Tensor], like: torch.Tensor) -> str | None:
    """Return what is wrong with the optimizer's state of one parameter, out of a file."""
    if moments and moments.keys() not in ({"momentum_buffer"}, {"step", "exp_avg", "exp_avg_sq"}):
        return (
            f"has the entries {', '.join(sorted(moments))[:100]}, which are those of no optimizer"
        )
    for name, tensor in moments.items():
        shape = torch.Size() if name == "step" else like.shape
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
    return str(tensor.dtype).removeprefix("torch.")


def _sgd(parameters: list[torch.nn.Parameter], o: OptimizerConfig) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, o.lr, momentum=o.momentum, weight_decay=o.weight_decay)


def _adam(parameters: list[torch.nn.Parameter], o: OptimizerConfig) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, o.lr, betas=o.betas, eps=o.eps, weight_decay=o.weight_decay)


def _adamw(parameters: list[torch.nn.Parameter], o: OptimizerConfig) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        parameters, o.lr, betas=o.betas, eps=o.eps, weight_decay=o.weight_decay
    )


OPTIMIZERS: dict[
    str, Callable[[list[torch.nn.Parameter], OptimizerConfig], torch.optim.Optimizer]
] = {"sgd": _sgd, "adam": _adam, "adamw": _adamw}
