"""A trainable backbone: blocks, their optimizer and its progress.

A server has one, and with averaging a copy for each session.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from regauge.data.optimizer_config import OptimizerConfig, dtype_name, moment_fault
from regauge.errors import CheckpointError, Hint
from regauge.models.cut import Cut
from regauge.models.families import Boundary
from regauge.split.master_weights import MasterOptimizer, Snapshot, are_finite
from regauge.split.protocol.messages import blocks_of
from regauge.split.server import checkpoint

Tensor = torch.Tensor
PRECISIONS = {"": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class TrainableBackbone:
    """The blocks of a cut model and their optimizer.

    Attributes:
        step: Optimizer steps taken.
        losses_since_step: Losses whose gradients are accumulated for the next step.
        steps_since_mean: Steps since the last average over sessions.
        inactive_state: Restored training state of parameters that are not trained now.
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
        self.inactive_state: checkpoint.TrainingState | None = None

    def copy(self) -> TrainableBackbone:
        """Return a copy of the blocks with a new optimizer."""
        backbone = TrainableBackbone(
            Cut(_copy_blocks(self.cut), self.cut.boundaries),
            self.training,
            None if self.optimizer is None else self.optimizer.snapshot,
        )
        backbone.set_masters(self.masters)
        return backbone

    @property
    def masters(self) -> dict[str, torch.nn.Parameter]:
        """Return the weights that the optimizer steps.

        These are float32 copies of half-precision parameters, and otherwise the parameters.
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
        """Return all blocks, in the order of the boundaries."""
        return tuple(block for b in self.cut.boundaries for block in blocks_of(self.cut, b))

    def nbytes(self, extra_gradients: int = 0, *, snapshot: bool = False) -> int:
        """Return the bytes of the weights, their gradients and the optimizer state.

        Args:
            extra_gradients: Sets of gradients that exist beside the accumulated ones during a pass.
            snapshot: Include the copy of weights and moments for rollbacks, which all copies of the
                backbone share.
        """
        weights = sum(t.numel() * t.element_size() for t in self.state().values())
        masters = sum(m.numel() * m.element_size() for m in self.masters.values())
        half = (
            0
            if self.optimizer is None
            else sum(m.numel() * m.element_size() for m in self.optimizer.half_masters.values())
        )
        moments = 0 if self.training is None else 1 if self.training.optimizer == "sgd" else 2
        return weights + half + (1 + moments + extra_gradients + (1 + moments) * snapshot) * masters

    def count_loss(self) -> bool:
        """Count a loss whose gradients are accumulated, and step after `accumulate` of them.

        Returns:
            Whether a step was taken.

        Raises:
            StepError: The step was rolled back, and its gradients dropped.
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

    # Checkpoints

    def state(self) -> dict[str, Tensor]:
        """Return weights and buffers, not copied, by their names in the model."""
        return {
            name: t
            for b in self.cut.boundaries
            for name, t in self.cut.model.get_submodule(b.blocks)
            .state_dict(prefix=f"{b.blocks}.")
            .items()
        }

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """Return the optimizer state by parameter and entry."""
        return {} if self.optimizer is None else self.optimizer.moments()

    def gradients(self) -> dict[str, Tensor]:
        """Return the accumulated gradients by parameter."""
        return {} if self.optimizer is None else self.optimizer.gradients()

    def training_state(self) -> checkpoint.TrainingState:
        """Return the state to save in a checkpoint.

        It includes the restored state of parameters that are not trained now, so that a server that
        only serves for a while loses no moments.

        Raises:
            CheckpointError: A weight or the optimizer state is not finite.
        """
        moments: dict[str, Mapping[str, Tensor]] = dict(self.moments())
        gradients = self.gradients()
        masters = {} if self.optimizer is None else self.optimizer.half_masters
        if self.inactive_state is not None:
            moments = {**self.inactive_state.optimizer, **moments}
            gradients = {**self.inactive_state.gradients, **gradients}
            masters = {**self.inactive_state.masters, **masters}
        self.require_finite(
            (
                *gradients.values(),
                *masters.values(),
                *(t for entries in moments.values() for t in entries.values()),
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

    def require_finite(self, others: Iterable[Tensor] = ()) -> None:
        """Raise CheckpointError if weights hold NaN or Inf. Buffers, such as masks, may."""
        if not are_finite((*self.parameters.values(), *others)):
            raise CheckpointError(
                "the backbone's weights and optimizer state must be finite, got NaN or Inf",
                hint="start from finite weights or a finite checkpoint",
            )

    def restore(self, state: checkpoint.TrainingState, path: object) -> None:
        """Resume from a checkpoint.

        Args:
            state: Training state of the checkpoint.
            path: Its path, for error messages.

        Raises:
            CheckpointError: The state does not match these blocks, or is damaged. Nothing is
                changed then.
        """
        faults = self._faults(state)
        if faults:
            rest = f" (and {len(faults) - 3} more)" if len(faults) > 3 else ""
            raise CheckpointError(
                f"{path} does not match this backbone, or is damaged: "
                f"{'; '.join(faults[:3])}{rest}",
                hint="restore it from a copy",
            )
        stored_optimizers = {
            "sgd" if "momentum_buffer" in m else "adamw"
            for n, m in state.optimizer.items()
            if m and n in self.trainable
        }
        if self.training is not None and stored_optimizers - {
            "sgd" if self.training.optimizer == "sgd" else "adamw"
        }:
            other = stored_optimizers.pop()
            raise CheckpointError(
                f"{path} holds the optimizer state of {other}, got {self.training.optimizer}",
                hint=Hint(
                    f'resume with optimizer="{other}", or pass another folder',
                    cli=f"resume with --optimizer {other}, or pass another folder",
                ),
            )
        with torch.no_grad():
            for name, tensor in self.state().items():
                tensor.copy_(state.weights[name])
        if self.optimizer is not None:
            self.optimizer.restore(state)
        self.inactive_state = replace(
            state,
            weights={},
            optimizer={n: m for n, m in state.optimizer.items() if n not in self.trainable},
            gradients={n: g for n, g in state.gradients.items() if n not in self.trainable},
            masters={n: m for n, m in state.masters.items() if n not in self.trainable},
        )
        self.step, self.losses_since_step, self.steps_since_mean = (
            state.step,
            state.losses_since_step,
            state.steps_since_mean,
        )

    def require_valid_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Raise ValueError unless there is a finite weight for each trained parameter."""
        if {n: (t.shape, t.dtype) for n, t in weights.items()} != {
            n: (m.shape, m.dtype) for n, m in self.masters.items()
        }:
            raise ValueError("weights of an ended session do not match the backbone")
        if not are_finite(weights.values()):
            raise ValueError("weights of an ended session hold NaN or Inf")

    def _faults(self, saved: checkpoint.TrainingState) -> list[str]:
        """Return what prevents a training state from being restored."""
        state = self.state()
        faults = [f'"{name}" is missing' for name in state if name not in saved.weights]
        faults += [
            f'unexpected tensor "{name[:100]}"' for name in saved.weights if name not in state
        ]
        for name, expected in state.items():
            tensor = saved.weights.get(name)
            if tensor is not None and (
                tensor.shape != expected.shape or tensor.dtype != expected.dtype
            ):
                shapes = (
                    f"{list(tensor.shape)} in {dtype_name(tensor)}, expected "
                    f"{list(expected.shape)} in {dtype_name(expected)}"
                )
                faults.append(f'"{name}" is {shapes}')
            elif tensor is not None and name in self.parameters and not are_finite([tensor]):
                faults.append(f'"{name}" holds NaN or Inf')
        for kind, tensors in (("gradient", saved.gradients), ("master weight", saved.masters)):
            for name, tensor in tensors.items():
                matches = (
                    name in self.parameters
                    and tensor.shape == self.parameters[name].shape
                    and tensor.is_floating_point()
                )
                if not matches or not are_finite([tensor]):
                    faults.append(
                        f'the {kind} of "{name[:100]}" belongs to no parameter, has another '
                        "shape or dtype, or holds NaN or Inf"
                    )
        for name, master in saved.masters.items():
            if not faults and not torch.equal(
                master.to(saved.weights[name].dtype), saved.weights[name]
            ):
                faults.append(f'the master weight of "{name}" does not round to its weight')
        for name, moments in saved.optimizer.items():
            fault = (
                moment_fault(moments, self.parameters[name])
                if name in self.parameters
                else "belongs to no parameter"
            )
            if fault is not None:
                faults.append(f'the optimizer state of "{name[:100]}" {fault}')
        return faults


def weighted_mean(parts: Sequence[tuple[int, Mapping[str, Tensor]]]) -> dict[str, Tensor]:
    """Return the mean of states, each weighted by its number.

    It is added up in the given order. The mean of one state is that state, bit for bit.
    """
    count = sum(n for n, _ in parts)
    means: dict[str, Tensor] = {}
    for name, like in parts[0][1].items():
        total_weights = torch.zeros_like(like, dtype=torch.float64)
        for n, weights in parts:
            total_weights += weights[name].detach().double() * (n / count)
        means[name] = total_weights.to(like.dtype)
    return means


def autocast(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """Return torch's autocast for "bf16" or "fp16", or a context that does nothing for ""."""
    dtype = PRECISIONS[precision]
    return (
        nullcontext()
        if dtype is None
        else torch.autocast(device.type, dtype=dtype, cache_enabled=False)
    )


def compute_gradients(
    output: Tensor, leaves: Sequence[Tensor], grad_output: Tensor, precision: str
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of leaves from the gradient of the output.

    In float16 small gradients would underflow. `grad_output` is therefore scaled by a power of two
    that brings its largest magnitude near 2^10, and by less if that overflows. The scale depends on
    `grad_output` alone, so that loss scaling needs no state. Gradients of float16 leaves are
    returned in float32, in which they do not underflow either.
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
        grads = torch.autograd.grad(output, leaves, scaled, allow_unused=True, retain_graph=True)
        if power <= -20 or all(g is None or bool(torch.isfinite(g).all()) for g in grads):
            return tuple(None if g is None else g.float() / scale for g in grads)
        power -= 5


def _named_parameters(cut: Cut, boundary: Boundary) -> Iterator[tuple[str, torch.nn.Parameter]]:
    return cut.model.get_submodule(boundary.blocks).named_parameters(boundary.blocks)


def _copy_blocks(cut: Cut) -> torch.nn.Module:
    """Return a module that holds only copies of the blocks, at their paths.

    The config, which they share with the rest of the model, is not copied.
    """
    root = torch.nn.Module()
    config = getattr(cut.model, "config", None)
    for boundary in cut.boundaries:
        *parents, leaf = boundary.blocks.split(".")
        parent = root
        for name in parents:
            if name not in dict(parent.named_children()):
                parent.add_module(name, torch.nn.Module())
            parent = parent.get_submodule(name)
        parent.add_module(
            leaf,
            copy.deepcopy(
                cut.model.get_submodule(boundary.blocks),
                {id(config): config} if config is not None else {},
            ),
        )
    return root
