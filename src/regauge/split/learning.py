"""A backbone that learns: blocks, the optimizer over them, and how far it is. A server has one, or one for each client that it averages."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from regauge.cutting import Cut
from regauge.errors import CheckpointError
from regauge.families import Boundary
from regauge.split.optimizing import Training, give_moments, moments_of
from regauge.split.passing import blocks_of

Tensor = torch.Tensor
PRECISIONS = {"": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Learner:
    """The blocks of a cut and what trains them. `step` counts the optimizer's steps, `waiting` the losses since the last one, `since` the steps since
    the last average."""

    def __init__(self, cut: Cut, training: Training | None) -> None:
        self.cut, self.training = cut, training
        self.names = {name: p for b in cut.boundaries for name, p in _named(cut, b)}
        self.trained = {n: p for n, p in self.names.items() if p.requires_grad and training is not None}
        self.optimizer = training.build(self.trained.values()) if training is not None and self.trained else None
        self.step = self.waiting = self.since = 0

    def copy(self) -> Learner:
        """Blocks of its own with the same weights, and an optimizer that begins."""
        return Learner(Cut(_shell(self.cut), self.cut.boundaries), self.training)

    @property
    def blocks(self) -> tuple[torch.nn.Module, ...]:
        return tuple(block for b in self.cut.boundaries for block in blocks_of(self.cut, b))

    def nbytes(self, spare: int = 0) -> int:
        """Return the bytes of the weights, their gradients and the optimizer's state, and of `spare` more gradients."""
        weights = sum(t.numel() * t.element_size() for t in self.state().values())
        trained = sum(p.numel() * p.element_size() for p in self.trained.values())
        moments = 0 if self.training is None else 1 if self.training.optimizer == "sgd" else 2
        return weights + (1 + moments + spare) * trained

    def count(self) -> bool:
        """A loss has been gone through. After enough of them a step is taken: was it now?"""
        if self.optimizer is None or self.training is None:
            return False
        self.waiting += 1
        if self.waiting < self.training.accumulate:
            return False
        if self.training.clip:
            torch.nn.utils.clip_grad_norm_(self.trained.values(), self.training.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = self.training.rate_at(self.step)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step, self.waiting, self.since = self.step + 1, 0, self.since + 1
        return True

    # What is kept

    def state(self) -> dict[str, Tensor]:
        """The weights and buffers as they are, by their names in the model."""
        return {name: t for b in self.cut.boundaries for name, t in self.cut.model.get_submodule(b.blocks).state_dict(prefix=f"{b.blocks}.").items()}

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """The optimizer's state by parameter and name."""
        return {} if self.optimizer is None else moments_of(self.optimizer, self.trained)

    def gradients(self) -> dict[str, Tensor]:
        return {n: p.grad for n, p in self.trained.items() if p.grad is not None}

    def restore(
        self, weights: Mapping[str, Tensor], moments: Mapping[str, Mapping[str, Tensor]], gradients: Mapping[str, Tensor], where: object
    ) -> None:
        with torch.no_grad():
            for name, tensor in self.state().items():
                if name not in weights:
                    raise CheckpointError(f'{where} has no "{name}"', hint="restore it from a copy")
                tensor.copy_(weights[name])
        for name, p in self.trained.items():
            if name in gradients:
                p.grad = gradients[name].to(p.device)
            if self.optimizer is not None and moments.get(name):
                if not isinstance(self.optimizer, torch.optim.SGD) and "exp_avg" not in moments[name]:
                    raise CheckpointError(f"{where} holds a training with sgd", hint="go on with --optimizer sgd, or name another folder")
                give_moments(self.optimizer, p, moments[name])


def mean(parts: Sequence[tuple[int, Mapping[str, Tensor]]]) -> dict[str, Tensor]:
    """The mean of weights, each counted by its number, in the order given. Of one it is that one, bit for bit."""
    total = sum(n for n, _ in parts)
    out: dict[str, Tensor] = {}
    for name, like in parts[0][1].items():
        whole = torch.zeros_like(like, dtype=torch.float64)
        for n, weights in parts:
            whole += weights[name].detach().double() * (n / total)
        out[name] = whole.to(like.dtype)
    return out


def autocast(device: torch.device, precision: str) -> AbstractContextManager[object]:
    dtype = PRECISIONS[precision]
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype, cache_enabled=False)


def slopes(output: Tensor, leaves: Sequence[Tensor], slope: Tensor, precision: str) -> tuple[Tensor | None, ...]:
    """The gradients of leaves, given that of the output. In float16 small ones would vanish: the slope is scaled by a power of two, so that its
    largest number is near 2^10, and by less where that overflows. The scale is a function of the slope alone, so that there is no state to keep."""
    if not leaves:
        return ()
    if precision != "fp16":
        return torch.autograd.grad(output, leaves, slope, allow_unused=True, retain_graph=True)
    largest = float(slope.abs().max())
    power = 10 - math.frexp(largest)[1] if largest else 0
    while True:
        scale = 2.0**power
        found = torch.autograd.grad(output, leaves, slope * scale, allow_unused=True, retain_graph=True)
        if power <= -20 or all(g is None or bool(torch.isfinite(g).all()) for g in found):
            return tuple(None if g is None else g / scale for g in found)
        power -= 5


def _named(cut: Cut, boundary: Boundary) -> Iterator[tuple[str, torch.nn.Parameter]]:
    return cut.model.get_submodule(boundary.blocks).named_parameters(boundary.blocks)


def _shell(cut: Cut) -> torch.nn.Module:
    """A module that has nothing but copies of the blocks, at their paths. What they share with the rest of the model (its config) is not copied."""
    root = torch.nn.Module()
    config = getattr(cut.model, "config", None)
    for boundary in cut.boundaries:
        *path, last = boundary.blocks.split(".")
        here = root
        for name in path:
            if name not in dict(here.named_children()):
                here.add_module(name, torch.nn.Module())
            here = here.get_submodule(name)
        here.add_module(last, copy.deepcopy(cut.model.get_submodule(boundary.blocks), {id(config): config} if config is not None else {}))
    return root
