"""Execution of passes: forward, and backward without side effects until all results are finite."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from regauge.errors import CheckpointError, FrameError, RegaugeError, TrainingError
from regauge.models.cut import Crossing
from regauge.models.resolve import spec_of
from regauge.split.master_weights import are_usable
from regauge.split.protocol.frames import Frame
from regauge.split.protocol.messages import dtype_of, unpack
from regauge.split.server.backbone import PRECISIONS, TrainableBackbone, autocast, compute_gradients
from regauge.split.server.sessions import PendingForward

Tensor = torch.Tensor
_log = logging.getLogger("regauge.split")


class Executor:
    """Runs passes through the blocks of a backbone.

    Args:
        main: The backbone.
        config: The model's config, if it does not carry one.
        seed: Seed of dropout.
        max_length: Largest number of tokens of a stream.
        precision: Mixed precision over float32 weights: "bf16", "fp16", or "" for none.
        compiler: Backend of torch.compile, or "" for eager mode.
    """

    def __init__(
        self,
        main: TrainableBackbone,
        config: Mapping[str, Any] | None,
        *,
        seed: int,
        max_length: int,
        precision: str,
        compiler: str,
    ) -> None:
        self.model = main.cut.model
        self.sizes = _space_sizes(self.model, config)
        self.dtype = dtype_of(main.cut)
        if any(p.is_meta for p in main.parameters.values()):
            raise CheckpointError(
                "the backbone's weights must be loaded, got tensors on the meta device",
                hint="load them first",
            )
        self.device = next(iter(main.parameters.values())).device
        if precision not in PRECISIONS:
            raise TrainingError(
                f'precision must be bf16 or fp16, got "{precision}"', hint="choose from bf16, fp16"
            )
        if precision and self.dtype != torch.float32:
            raise TrainingError(
                "weights must be float32 for mixed precision, got "
                f"{str(self.dtype).removeprefix('torch.')}",
                hint="load them in float32, or leave out the precision",
            )
        self.seed, self.max_length, self.precision, self.compiler = (
            seed,
            max_length,
            precision,
            compiler,
        )

    def unpack_pass(self, backbone: TrainableBackbone, frame: Frame) -> Crossing:
        """Return the validated pass of a frame."""
        return unpack(frame, backbone.cut, self.sizes, self.dtype, self.device, self.max_length)

    def run(self, crossing: Crossing, frame: Frame, label: str) -> Tensor:
        """Run the blocks of a pass; dropout is seeded by `label`."""
        for block in crossing.blocks:
            block.train(frame.values.get("training") is True)
        with seeded_rng(f"{self.seed}/{label}"), autocast(self.device, self.precision):
            z = crossing.run()
        if not isinstance(z, Tensor) or z.dim() != crossing.stream.dim():
            raise FrameError("failed", "the blocks must return a stream, got something else")
        return z.to(crossing.stream.dtype)

    def forward(self, backbone: TrainableBackbone, frame: Frame) -> PendingForward:
        """Run a forward pass, and keep its graph for the backward pass.

        Raises:
            FrameError: The frame is invalid, or nothing in the pass requires gradients.
        """
        crossing = self.unpack_pass(backbone, frame)
        leaves = _inputs_with_grad(frame, crossing)
        # With an in-process client, autograd calls this with gradients disabled.
        with torch.enable_grad():
            z = self.run(
                crossing.with_inputs(**leaves), frame, f"{frame.values['session']}/{frame.number}"
            )
        if not z.requires_grad:
            raise FrameError(
                "graph",
                "a training pass must have trained weights or inputs that need gradients, got none",
                hint="use torch.no_grad()",
            )
        return PendingForward(frame, z, leaves)

    def backward(
        self, backbone: TrainableBackbone, pending: PendingForward, grad_output: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Run a backward pass without side effects.

        Args:
            backbone: Backbone of the session.
            pending: The forward pass; it is run again if a step has invalidated its graph.
            grad_output: Gradient of its output.

        Returns:
            The gradients of the inputs that the client requested, and the new sums of the weights'
            accumulated gradients.

        Raises:
            FrameError: The gradient has another shape or dtype, or a result is not finite.
        """
        if pending.output is None:
            pending = self.forward(backbone, pending.request)
        assert pending.output is not None
        if grad_output.shape != pending.output.shape or grad_output.dtype != pending.output.dtype:
            raise FrameError(
                "shape",
                f"the gradient must have the output's shape {list(pending.output.shape)} and "
                f"dtype, got {list(grad_output.shape)} in "
                f"{str(grad_output.dtype).removeprefix('torch.')}",
            )
        if not bool(torch.isfinite(grad_output).all()):
            raise FrameError("nonfinite", "the gradient holds NaN or Inf")
        trainable, count = backbone.trainable, len(pending.inputs)
        grads = compute_gradients(
            pending.output,
            [*pending.inputs.values(), *trainable.values()],
            grad_output.to(self.device),
            self.precision,
        )
        masters = zip(backbone.masters.items(), grads[count:], strict=True)
        sums = {
            n: g.to(m.dtype) if m.grad is None else m.grad + g
            for (n, m), g in masters
            if g is not None
        }
        input_grads = {
            n: torch.zeros_like(t) if g is None else g.to(t.dtype)
            for (n, t), g in zip(pending.inputs.items(), grads, strict=False)
        }
        if not are_usable((*input_grads.values(), *sums.values())):
            raise FrameError(
                "nonfinite",
                "the gradients of the backbone and their squares must be finite, got NaN or Inf",
            )
        return input_grads, sums

    # Compilation

    def compile(self, backbone: TrainableBackbone) -> None:
        """Compile the blocks of a backbone, if there is a compiler."""
        if not self.compiler:
            return
        import torch._functorch.config as functorch

        functorch.donated_buffer = False  # a repeated request uses its graph again
        for block in backbone.blocks:
            block.compile(backend=self.compiler, dynamic=True)

    def is_compiler_error(self, error: RuntimeError) -> bool:
        """Return whether the compiler failed, and not the blocks."""
        if not self.compiler:
            return False
        from torch._dynamo.exc import TorchDynamoException

        return isinstance(error, TorchDynamoException)

    def disable_compiler(self, backbones: Iterable[TrainableBackbone], error: Exception) -> None:
        """Run all backbones in eager mode from now on, and log the compiler's error."""
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        _log.warning("torch.compile failed, and the blocks run in eager mode: %s", reason)
        self.compiler = ""
        for backbone in backbones:
            for block in backbone.blocks:
                block._compiled_call_impl = None


def _space_sizes(model: torch.nn.Module, config: Mapping[str, Any] | None) -> dict[str, int]:
    """Return the sizes of the model's spaces, or none for a custom module."""
    try:
        return dict(spec_of(model, config=config).sizes)
    except RegaugeError:
        return {}


def _inputs_with_grad(frame: Frame, crossing: Crossing) -> dict[str, Tensor]:
    """Return the inputs whose gradients the client requests, as leaves of a graph."""
    names = frame.values.get("wants", [])
    if not isinstance(names, list):
        raise FrameError("layout", f'"wants" must be a list, got {type(names).__name__}')
    leaves: dict[str, Tensor] = {}
    for name in names:
        value = crossing.inputs.get(name) if isinstance(name, str) else None
        if (
            not isinstance(name, str)
            or not isinstance(value, Tensor)
            or not value.is_floating_point()
        ):
            raise FrameError("layout", f"{name!r:.64} must be a float input to have a gradient")
        leaves[name] = value.detach().requires_grad_()
    return leaves


@contextmanager
def seeded_rng(label: str) -> Iterator[None]:
    """Seed torch's random numbers by a label, and restore the global state afterwards."""
    seed = int.from_bytes(hashlib.sha256(label.encode()).digest()[:8], "little") >> 1
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield
