"""Optimizer steps over float32 master weights, with a check for NaN and an exact rollback.

Half-precision parameters are trained through float32 copies (master weights), which the optimizer
state belongs to: in float16 AdamW's eps of 1e-8 is zero, and most steps are smaller than the
spacing of the weights. Parameters of other dtypes are their own masters, so their trajectory is
that of the plain optimizer, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch

from regauge.data.optimizer_config import OptimizerConfig, get_moments, load_moments
from regauge.errors import StepError
from regauge.split.server import checkpoint

Tensor = torch.Tensor
HALF_DTYPES = (torch.float16, torch.bfloat16)


class Snapshot:
    """A copy of tensors, to roll back a failed step.

    Its memory is reused: all backbones of a server share one snapshot.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._saved: dict[str, Tensor] = {}

    def save(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the tensors, and keep references to them for `restore`."""
        self._saved = {}
        for key, tensor in tensors.items():
            buffer = self._buffers.get(key)
            if buffer is None or (buffer.shape, buffer.dtype, buffer.device) != (
                tensor.shape,
                tensor.dtype,
                tensor.device,
            ):
                self._buffers[key] = torch.empty_like(tensor)
        torch._foreach_copy_([self._buffers[key] for key in tensors], list(tensors.values()))
        self._saved = dict(tensors)

    def restore(self) -> None:
        """Write the saved values back into their tensors."""
        if not self._saved:
            return
        torch._foreach_copy_(
            list(self._saved.values()), [self._buffers[key] for key in self._saved]
        )

    def release(self) -> None:
        """Drop the references to the tensors; the buffers are kept for the next `save`."""
        self._saved = {}


class MasterOptimizer:
    """An optimizer over the master weights of named parameters.

    Args:
        training: Options of the optimizer.
        parameters: Trained parameters by name.
        snapshot: Buffers for rollbacks, to share them with other optimizers.
    """

    def __init__(
        self,
        training: OptimizerConfig,
        parameters: Mapping[str, torch.nn.Parameter],
        snapshot: Snapshot | None = None,
    ) -> None:
        self.training, self.parameters = training, dict(parameters)
        self.masters = {
            n: torch.nn.Parameter(p.detach().float()) if p.dtype in HALF_DTYPES else p
            for n, p in self.parameters.items()
        }
        self.optimizer = training.build(self.masters.values())
        self.snapshot = snapshot or Snapshot()

    @property
    def half_masters(self) -> dict[str, Tensor]:
        """Return the master weights of half-precision parameters; checkpoints store them too."""
        return {n: m.detach() for n, m in self.masters.items() if m is not self.parameters[n]}

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """Return the optimizer state by parameter and entry."""
        return get_moments(self.optimizer, self.masters)

    def gradients(self) -> dict[str, Tensor]:
        """Return the accumulated gradients of the master weights."""
        return {n: m.grad for n, m in self.masters.items() if m.grad is not None}

    def collect_gradients(self) -> None:
        """Move the gradients of half-precision parameters to their masters, adding them up."""
        for name, p in self.parameters.items():
            master = self.masters[name]
            if master is not p and p.grad is not None:
                master.grad = p.grad.float() if master.grad is None else master.grad + p.grad
                p.grad = None

    def step(self, number: int) -> None:
        """Take one optimizer step with the accumulated gradients.

        The gradients are dropped, whether the step succeeds or not.

        Args:
            number: Index of the step in the learning rate schedule, from 0.

        Raises:
            StepError: A weight, also in its own dtype, or the optimizer state is not finite.
        """
        state = self.optimizer.state
        previous = {p: dict(entries) for p, entries in state.items()}
        try:
            self.snapshot.save(self._state_tensors())
            if self.training.clip:
                torch.nn.utils.clip_grad_norm_(self.masters.values(), self.training.clip)
            for group in self.optimizer.param_groups:
                group["lr"] = self.training.lr_at(number)
            self.optimizer.step()
            rounded = {n: m.to(self.parameters[n].dtype) for n, m in self.half_masters.items()}
            if not are_finite((*self._state_tensors().values(), *rounded.values())):
                raise StepError(
                    f"step {number} must leave finite weights and optimizer state, got NaN or Inf",
                    hint="lower the learning rate, clip the gradient, or train in float32",
                )
        except BaseException:
            state.clear()
            state.update(previous)
            self.snapshot.restore()
            raise
        finally:
            self.snapshot.release()
            self.optimizer.zero_grad(set_to_none=True)
        self._write_parameters(rounded)

    def restore(self, state: checkpoint.TrainingState) -> None:
        """Load masters, gradients and moments from a validated state whose weights are loaded."""
        for name, master in self.masters.items():
            with torch.no_grad():
                master.copy_(state.masters.get(name, self.parameters[name]))
            if name in state.gradients:
                master.grad = state.gradients[name].to(master.device, master.dtype)
            load_moments(self.optimizer, master, state.optimizer.get(name, {}))

    def publish(self) -> None:
        """Round the master weights into the half-precision parameters."""
        self._write_parameters(
            {n: m.to(self.parameters[n].dtype) for n, m in self.half_masters.items()}
        )

    def _write_parameters(self, rounded: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, tensor in rounded.items():
                self.parameters[name].copy_(tensor)

    def _state_tensors(self) -> dict[str, Tensor]:
        """Return all tensors that a step changes."""
        tensors = {n: m.detach() for n, m in self.masters.items()}
        return tensors | {
            f"{n}/{k}": t for n, entries in self.moments().items() for k, t in entries.items()
        }


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether all values are finite."""
    return _are_bounded(tensors, math.inf)


def are_usable(gradients: Iterable[Tensor]) -> bool:
    """Return whether all gradients and their squares are finite.

    A single infinite square would leave an infinite second moment in the optimizer for good.
    """
    return all(
        _are_bounded(group, math.sqrt(max(torch.finfo(dtype).max, torch.finfo(torch.float32).max)))
        for (dtype, _), group in _group_by_dtype(gradients).items()
    )


def _are_bounded(tensors: Iterable[Tensor], limit: float) -> bool:
    """Return whether every magnitude is finite and at most `limit`.

    Norms are 10 times as fast as `isfinite`, and never below the largest magnitude. If one is too
    large (it may have overflowed), the tensors are checked exactly.
    """
    for group in _group_by_dtype(tensors).values():
        largest = float(torch.stack(torch._foreach_norm(group)).max())
        if not (largest <= limit and math.isfinite(largest)) and not all(
            _is_bounded(t, limit) for t in group
        ):
            return False
    return True


def _is_bounded(tensor: Tensor, limit: float) -> bool:
    largest = float(tensor.abs().max())
    return largest <= limit and math.isfinite(largest)


def _group_by_dtype(
    tensors: Iterable[Tensor],
) -> dict[tuple[torch.dtype, torch.device], list[Tensor]]:
    """Group non-empty float tensors by dtype and device."""
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() and tensor.is_floating_point():
            groups.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    return groups
