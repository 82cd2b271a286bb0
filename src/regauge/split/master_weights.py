"""Optimizer steps that count or leave no trace: float32 master weights, a check, an exact undo.

Half-precision parameters are trained through float32 copies (master weights), over which the
optimizer has its state: in float16 AdamW's eps of 1e-8 is zero, and most steps are smaller than the
spacing of the weights. Parameters of other dtypes are their own masters, so that their trajectory
is that of the plain optimizer, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch

from regauge.errors import RegaugeError
from regauge.split.server import checkpoint
from regauge.split.server.optimizer_config import OptimizerConfig, get_moments, load_moments

Tensor = torch.Tensor
HALF_DTYPES = (torch.float16, torch.bfloat16)


class StepError(RegaugeError):
    """A step with a result that is not finite.

    Weights and optimizer state are as before it. Its gradients are dropped.
    """


class Snapshot:
    """A copy of tensors that a failed step is undone from.

    Its memory is reused: one snapshot serves all learners of a server.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._saved: dict[str, Tensor] = {}

    def save(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the tensors, and remember where they came from."""
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
        """Write the saved values back into the tensors that they came from, if there are any."""
        if not self._saved:
            return
        torch._foreach_copy_(
            list(self._saved.values()), [self._buffers[key] for key in self._saved]
        )

    def release(self) -> None:
        """Forget the tensors, but not the memory of their copies."""
        self._saved = {}


class MasterOptimizer:
    """The optimizer of `training` over the master weights of `parameters`."""

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
    def half(self) -> dict[str, Tensor]:
        """The master weights of half-precision parameters, which a checkpoint holds too."""
        return {n: m.detach() for n, m in self.masters.items() if m is not self.parameters[n]}

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """The optimizer's state by parameter and name."""
        return get_moments(self.optimizer, self.masters)

    def gradients(self) -> dict[str, Tensor]:
        return {n: m.grad for n, m in self.masters.items() if m.grad is not None}

    def collect(self) -> None:
        """Add the gradients of half-precision parameters to those of their masters."""
        for name, p in self.parameters.items():
            master = self.masters[name]
            if master is not p and p.grad is not None:
                master.grad = p.grad.float() if master.grad is None else master.grad + p.grad
                p.grad = None

    def step(self, number: int) -> None:
        """Take the step of this number (the first is 0) with the gradients that are there.

        The gradients are dropped, whether the step succeeds or not.

        Raises:
            StepError: a weight, in its own dtype too, or the optimizer's state is not finite.
        """
        state = self.optimizer.state
        before = {p: dict(entries) for p, entries in state.items()}
        try:
            self.snapshot.save(self._state_tensors())
            if self.training.clip:
                torch.nn.utils.clip_grad_norm_(self.masters.values(), self.training.clip)
            for group in self.optimizer.param_groups:
                group["lr"] = self.training.lr_at(number)
            self.optimizer.step()
            rounded = {n: m.to(self.parameters[n].dtype) for n, m in self.half.items()}
            if not are_finite((*self._state_tensors().values(), *rounded.values())):
                raise StepError(
                    f"step {number} must leave finite weights and optimizer state, got NaN or Inf",
                    hint="lower the learning rate, clip the gradient, or train in float32",
                )
        except BaseException:
            state.clear()
            state.update(before)
            self.snapshot.restore()
            raise
        finally:
            self.snapshot.release()
            self.optimizer.zero_grad(set_to_none=True)
        self._write_parameters(rounded)

    def restore(self, kept: checkpoint.TrainingState) -> None:
        """Go on from a checkpoint that has been validated, and whose weights are loaded."""
        for name, master in self.masters.items():
            with torch.no_grad():
                master.copy_(kept.masters.get(name, self.parameters[name]))
            if name in kept.gradients:
                master.grad = kept.gradients[name].to(master.device, master.dtype)
            load_moments(self.optimizer, master, kept.optimizer.get(name, {}))

    def publish(self) -> None:
        """Round the master weights into the half-precision parameters."""
        self._write_parameters({n: m.to(self.parameters[n].dtype) for n, m in self.half.items()})

    def _write_parameters(self, rounded: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, tensor in rounded.items():
                self.parameters[name].copy_(tensor)

    def _state_tensors(self) -> dict[str, Tensor]:
        out = {n: m.detach() for n, m in self.masters.items()}
        return out | {
            f"{n}/{k}": t for n, entries in self.moments().items() for k, t in entries.items()
        }


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether no number is NaN or Inf."""
    return _are_bounded(tensors, math.inf)


def are_usable(gradients: Iterable[Tensor]) -> bool:
    """Return whether all gradients and their squares are finite.

    One that is not would leave an infinite moment with the optimizer, for ever.
    """
    return all(
        _are_bounded(group, math.sqrt(max(torch.finfo(dtype).max, torch.finfo(torch.float32).max)))
        for (dtype, _), group in _group_by_dtype(gradients).items()
    )


def _are_bounded(tensors: Iterable[Tensor], limit: float) -> bool:
    """Return whether every magnitude is finite and at most `limit`.

    Norms are 10 times as fast as `isfinite`, and never below the largest magnitude. Where one is
    too large (it may have overflowed), the tensors are checked exactly.
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
    out: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() and tensor.is_floating_point():
            out.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    return out
