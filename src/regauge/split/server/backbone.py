"""A backbone that learns: blocks, the optimizer over them, and how far it is. A server has one, or
one for each client that it averages.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from regauge.errors import CheckpointError
from regauge.models.cut import Cut
from regauge.models.families import Boundary
from regauge.split.master_weights import MasterOptimizer, Snapshot, are_finite
from regauge.split.protocol.messages import blocks_of
from regauge.split.server import checkpoint
from regauge.split.server.optimizer_config import OptimizerConfig, dtype_name, moment_fault

Tensor = torch.Tensor
PRECISIONS = {"": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class TrainableBackbone:
    """The blocks of a cut and what trains them. `step` counts the optimizer's steps, `waiting` the
    losses since the last one, `since` the steps since the last average.
    """

    def __init__(
        self, cut: Cut, training: OptimizerConfig | None, snapshot: Snapshot | None = None
    ) -> None:
        self.cut, self.training = cut, training
        self.parameters = {name: p for b in cut.boundaries for name, p in _named_parameters(cut, b)}
        self.trainable = {
            n: p for n, p in self.parameters.items() if p.requires_grad and training is not None
        }
        self.optimizer = (
            MasterOptimizer(training, self.trainable, snapshot)
            if training is not None and self.trainable
            else None
        )
        self.step = self.losses_since_step = self.steps_since_mean = 0
        self.inactive_state: checkpoint.TrainingState | None = (
            None  # the checkpoint's training state of parameters that are not trained now
        )

    def copy(self) -> TrainableBackbone:
        """Blocks of its own with the same weights, and an optimizer that begins."""
        made = TrainableBackbone(
            Cut(_copy_blocks(self.cut), self.cut.boundaries),
            self.training,
            None if self.optimizer is None else self.optimizer.snapshot,
        )
        made.set_masters(self.masters)
        return made

    @property
    def masters(self) -> dict[str, torch.nn.Parameter]:
        """The float32 weights that the optimizer steps; the trained parameters themselves, unless
        those are in half precision.
        """
        return {} if self.optimizer is None else self.optimizer.masters

    def set_masters(self, weights: Mapping[str, Tensor]) -> None:
        """Overwrite the trained weights with values in the masters' precision."""
        if self.optimizer is not None:
            with torch.no_grad():
                for name, master in self.masters.items():
                    master.copy_(weights[name])
            self.optimizer.publish()

    @property
    def blocks(self) -> tuple[torch.nn.Module, ...]:
        return tuple(block for b in self.cut.boundaries for block in blocks_of(self.cut, b))

    def nbytes(self, extra_gradients: int = 0, *, snapshot: bool = False) -> int:
        """Return the bytes of the weights, their gradients and the optimizer's state, and of
        `spare` more gradients.

        Args:
            spare: gradients that exist beside the accumulated ones while a pass is computed.
            snapshot: count the copy of weights and moments that a failed step is undone from. It is
            shared by all copies of the backbone.
        """
        weights = sum(t.numel() * t.element_size() for t in self.state().values())
        masters = sum(m.numel() * m.element_size() for m in self.masters.values())
        half = (
            0
            if self.optimizer is None
            else sum(m.numel() * m.element_size() for m in self.optimizer.half.values())
        )
        moments = 0 if self.training is None else 1 if self.training.optimizer == "sgd" else 2
        return weights + half + (1 + moments + extra_gradients + (1 + moments) * snapshot) * masters

    def count_loss(self) -> bool:
        """Count a loss whose gradients are there, and take a step after enough of them. Return
        whether it was taken now.

        Raises:
            StepError: the step was undone. The gradients that waited for it are dropped.
        """
        if self.optimizer is None or self.training is None or not self.gradients():
            return False
        self.losses_since_step += 1
        if self.losses_since_step < self.training.accumulate:
            return False
        self.losses_since_step = 0
        self.optimizer.step(self.step)
        self.step, self.steps_since_mean = self.step + 1, self.steps_since_mean + 1
        return True

    # What is kept

    def state(self) -> dict[str, Tensor]:
        """The weights and buffers as they are, by their names in the model."""
        return {
            name: t
            for b in self.cut.boundaries
            for name, t in self.cut.model.get_submodule(b.blocks)
            .state_dict(prefix=f"{b.blocks}.")
            .items()
        }

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """The optimizer's state by parameter and name."""
        return {} if self.optimizer is None else self.optimizer.moments()

    def gradients(self) -> dict[str, Tensor]:
        return {} if self.optimizer is None else self.optimizer.gradients()

    def training_state(self) -> checkpoint.TrainingState:
        """Return what a checkpoint holds of it. The state of parameters that are not trained now is
        passed on from the last one: a server that only serves for a while loses no moments.

        Raises:
            CheckpointError: a weight or the optimizer's state is not finite.
        """
        moments: dict[str, Mapping[str, Tensor]] = dict(self.moments())
        gradients, masters = self.gradients(), {} if self.optimizer is None else self.optimizer.half
        if self.inactive_state is not None:
            moments = {**self.inactive_state.optimizer, **moments}
            gradients = {**self.inactive_state.gradients, **gradients}
            masters = {**self.inactive_state.masters, **masters}
        self.require_finite(
            (
                *gradients.values(),
                *masters.values(),
                *(t for found in moments.values() for t in found.values()),
            )
        )
        return checkpoint.TrainingState(
            self.step,
            self.losses_since_step,
            self.steps_since_mean,
            self.state(),
            moments,
            gradients,
            masters,
        )

    def require_finite(self, more: Iterable[Tensor] = ()) -> None:
        """Refuse to save weights with NaN or Inf. Buffers, such as masks, may hold Inf."""
        if not are_finite((*self.parameters.values(), *more)):
            raise CheckpointError(
                "the backbone's weights or its optimizer's state hold NaN or Inf",
                hint="start from weights or a checkpoint that are finite",
            )

    def restore(self, kept: checkpoint.TrainingState, where: object) -> None:
        """Go on from a checkpoint.

        Raises:
            CheckpointError: it does not fit these blocks, or is damaged. Nothing is changed then.
        """
        faults = self._faults(kept)
        if faults:
            more = f" (and {len(faults) - 3} more)" if len(faults) > 3 else ""
            raise CheckpointError(
                f"{where} does not fit this backbone, or is damaged: {'; '.join(faults[:3])}{more}",
                hint="restore it from a copy",
            )
        held = {
            "sgd" if "momentum_buffer" in m else "adamw"
            for n, m in kept.optimizer.items()
            if m and n in self.trainable
        }
        if self.training is not None and held - {
            "sgd" if self.training.optimizer == "sgd" else "adamw"
        }:
            other = held.pop()
            raise CheckpointError(
                f"{where} holds a training with {other}",
                hint=f"go on with --optimizer {other}, or name another folder",
            )
        with torch.no_grad():
            for name, tensor in self.state().items():
                tensor.copy_(kept.weights[name])
        if self.optimizer is not None:
            self.optimizer.restore(kept)
        self.inactive_state = replace(
            kept,
            weights={},
            optimizer={n: m for n, m in kept.optimizer.items() if n not in self.trainable},
            gradients={n: g for n, g in kept.gradients.items() if n not in self.trainable},
            masters={n: m for n, m in kept.masters.items() if n not in self.trainable},
        )
        self.step, self.losses_since_step, self.steps_since_mean = (
            kept.step,
            kept.losses_since_step,
            kept.steps_since_mean,
        )

    def require_valid_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Raise ValueError unless these are finite weights for each trained parameter."""
        if {n: (t.shape, t.dtype) for n, t in weights.items()} != {
            n: (m.shape, m.dtype) for n, m in self.masters.items()
        }:
            raise ValueError("weights of a session that has left do not fit the backbone")
        if not are_finite(weights.values()):
            raise ValueError("weights of a session that has left hold NaN or Inf")

    def _faults(self, kept: checkpoint.TrainingState) -> list[str]:
        state = self.state()
        out = [f'"{name}" is missing' for name in state if name not in kept.weights]
        out += [f'unexpected tensor "{name[:100]}"' for name in kept.weights if name not in state]
        for name, like in state.items():
            found = kept.weights.get(name)
            if found is not None and (found.shape != like.shape or found.dtype != like.dtype):
                shapes = (
                    f"{list(found.shape)} in {dtype_name(found)}, expected "
                    f"{list(like.shape)} in {dtype_name(like)}"
                )
                out.append(f'"{name}" is {shapes}')
            elif found is not None and name in self.parameters and not are_finite([found]):
                out.append(f'"{name}" holds NaN or Inf')
        for what, tensors in (("gradient", kept.gradients), ("master weight", kept.masters)):
            for name, found in tensors.items():
                fits = (
                    name in self.parameters
                    and found.shape == self.parameters[name].shape
                    and found.is_floating_point()
                )
                if not fits or not are_finite([found]):
                    out.append(
                        f'the {what} of "{name[:100]}" has no place here, another shape or '
                        "dtype, or holds NaN or Inf"
                    )
        for name, master in kept.masters.items():
            if not out and not torch.equal(master.to(kept.weights[name].dtype), kept.weights[name]):
                out.append(f'the master weight of "{name}" is not its weight')
        for name, moments in kept.optimizer.items():
            fault = (
                moment_fault(moments, self.parameters[name])
                if name in self.parameters
                else "has no place here"
            )
            if fault is not None:
                out.append(f'the optimizer\'s state of "{name[:100]}" {fault}')
        return out


def weighted_mean(parts: Sequence[tuple[int, Mapping[str, Tensor]]]) -> dict[str, Tensor]:
    """The mean of weights, each counted by its number, in the order given. Of one it is that one,
    bit for bit.
    """
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
    return (
        nullcontext()
        if dtype is None
        else torch.autocast(device.type, dtype=dtype, cache_enabled=False)
    )


def compute_gradients(
    output: Tensor, leaves: Sequence[Tensor], grad_output: Tensor, precision: str
) -> tuple[Tensor | None, ...]:
    """The gradients of leaves, given that of the output. In float16 small ones would vanish: the
    slope is scaled by a power of two, so that its largest number is near 2^10, and by less where
    that overflows. The scale is a function of the slope alone, so that there is no state to keep.
    Gradients of float16 leaves are then returned in float32, where they do not vanish either.
    """
    if not leaves:
        return ()
    if precision != "fp16" and output.dtype != torch.float16:
        return torch.autograd.grad(
            output, leaves, grad_output, allow_unused=True, retain_graph=True
        )
    largest = float(grad_output.abs().max())
    power = 10 - math.frexp(largest)[1] if largest else 0
    while True:
        scale = 2.0**power
        scaled = (grad_output.float() * scale).to(grad_output.dtype)
        found = torch.autograd.grad(output, leaves, scaled, allow_unused=True, retain_graph=True)
        if power <= -20 or all(g is None or bool(torch.isfinite(g).all()) for g in found):
            return tuple(None if g is None else g.float() / scale for g in found)
        power -= 5


def _named_parameters(cut: Cut, boundary: Boundary) -> Iterator[tuple[str, torch.nn.Parameter]]:
    return cut.model.get_submodule(boundary.blocks).named_parameters(boundary.blocks)


def _copy_blocks(cut: Cut) -> torch.nn.Module:
    """A module that has nothing but copies of the blocks, at their paths. What they share with the
    rest of the model (its config) is not copied.
    """
    root = torch.nn.Module()
    config = getattr(cut.model, "config", None)
    for boundary in cut.boundaries:
        *path, last = boundary.blocks.split(".")
        here = root
        for name in path:
            if name not in dict(here.named_children()):
                here.add_module(name, torch.nn.Module())
            here = here.get_submodule(name)
        here.add_module(
            last,
            copy.deepcopy(
                cut.model.get_submodule(boundary.blocks),
                {id(config): config} if config is not None else {},
            ),
        )
    return root
