"""Passes through a server's blocks: forward, and backward with nothing changed before all of it is
there and finite.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from regauge.errors import CheckpointError, RegaugeError
from regauge.models.cut import Crossing
from regauge.models.resolve import spec_of
from regauge.split.master_weights import are_usable
from regauge.split.protocol.frames import Frame, FrameError
from regauge.split.protocol.messages import dtype_of, unpack
from regauge.split.server.backbone import PRECISIONS, TrainableBackbone, autocast, compute_gradients
from regauge.split.server.optimizer_config import TrainingError
from regauge.split.server.sessions import PendingForward

Tensor = torch.Tensor
_log = logging.getLogger("regauge.split")


class Executor:
    """How blocks run here: for streams of up to `length` tokens, dropout drawn from `seed`, over
    float32 in `precision`, compiled by `compiler`.
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
                "the backbone's weights are on the meta device", hint="load them first"
            )
        self.device = next(iter(main.parameters.values())).device
        if precision not in PRECISIONS:
            raise TrainingError(
                f'there is no precision "{precision}" here', hint="choose from bf16, fp16"
            )
        if precision and self.dtype != torch.float32:
            raise TrainingError(
                "mixed precision is over weights in float32, and these are "
                f"{str(self.dtype).removeprefix('torch.')}",
                hint="load them in float32, or leave precision out",
            )
        self.seed, self.max_length, self.precision, self.compiler = (
            seed,
            max_length,
            precision,
            compiler,
        )

    def unpack_pass(self, learner: TrainableBackbone, frame: Frame) -> Crossing:
        return unpack(frame, learner.cut, self.sizes, self.dtype, self.device, self.max_length)

    def run(self, crossing: Crossing, frame: Frame, label: str) -> Tensor:
        for block in crossing.blocks:
            block.train(frame.values.get("training") is True)
        with seeded_rng(f"{self.seed}/{label}"), autocast(self.device, self.precision):
            z = crossing.run()
        if not isinstance(z, Tensor) or z.dim() != crossing.stream.dim():
            raise FrameError("failed", "the blocks did not return a stream")
        return z.to(crossing.stream.dtype)

    def forward(self, learner: TrainableBackbone, frame: Frame) -> PendingForward:
        """A forward pass whose backward pass will come."""
        crossing = self.unpack_pass(learner, frame)
        wanted = _inputs_with_grad(frame, crossing)
        with torch.enable_grad():  # in one process, the client's function is called without
            z = self.run(
                crossing.with_inputs(**wanted), frame, f"{frame.values['session']}/{frame.number}"
            )
        if not z.requires_grad:
            raise FrameError(
                "graph",
                "nothing here is trained, and no gradient is wanted",
                hint="use torch.no_grad()",
            )
        return PendingForward(frame, z, wanted)

    def backward(
        self, learner: TrainableBackbone, passed: PendingForward, slope: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The gradients of the inputs that the client wants, and those of the weights with what
        they had before. Nothing is changed yet.
        """
        if passed.output is None:
            passed = self.forward(learner, passed.request)
        assert passed.output is not None
        if slope.shape != passed.output.shape or slope.dtype != passed.output.dtype:
            raise FrameError(
                "shape",
                f"the gradient has shape {list(slope.shape)}, the output "
                f"{list(passed.output.shape)}, or another dtype",
            )
        if not bool(torch.isfinite(slope).all()):
            raise FrameError("nonfinite", "the gradient holds NaN or Inf")
        trained, count = learner.trainable, len(passed.inputs)
        found = compute_gradients(
            passed.output,
            [*passed.inputs.values(), *trained.values()],
            slope.to(self.device),
            self.precision,
        )
        masters = zip(learner.masters.items(), found[count:], strict=True)
        sums = {
            n: g.to(m.dtype) if m.grad is None else m.grad + g
            for (n, m), g in masters
            if g is not None
        }
        back = {
            n: torch.zeros_like(t) if g is None else g.to(t.dtype)
            for (n, t), g in zip(passed.inputs.items(), found, strict=False)
        }
        if not are_usable((*back.values(), *sums.values())):
            raise FrameError(
                "nonfinite",
                "the gradients of the backbone hold NaN or Inf, or numbers whose squares are",
            )
        return back, sums

    # The compiler

    def compile(self, learner: TrainableBackbone) -> None:
        if not self.compiler:
            return
        import torch._functorch.config as functorch

        functorch.donated_buffer = False  # a graph is gone through again where a request is
        for block in learner.blocks:
            block.compile(backend=self.compiler, dynamic=True)

    def is_compiler_error(self, error: RuntimeError) -> bool:
        """Is it the compiler that failed, and not the blocks?"""
        if not self.compiler:
            return False
        from torch._dynamo.exc import TorchDynamoException

        return isinstance(error, TorchDynamoException)

    def disable_compiler(self, learners: Iterable[TrainableBackbone], error: Exception) -> None:
        first = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        _log.warning("torch.compile does not work here, and the blocks run as they are: %s", first)
        self.compiler = ""
        for learner in learners:
            for block in learner.blocks:
                block._compiled_call_impl = None


def _space_sizes(model: torch.nn.Module, config: Mapping[str, Any] | None) -> dict[str, int]:
    try:
        return dict(spec_of(model, config=config).sizes)
    except RegaugeError:
        return {}


def _inputs_with_grad(frame: Frame, crossing: Crossing) -> dict[str, Tensor]:
    """The inputs whose gradients the client wants, as leaves of a graph."""
    names = frame.values.get("wants", [])
    if not isinstance(names, list):
        raise FrameError("layout", '"wants" is not a list')
    out: dict[str, Tensor] = {}
    for name in names:
        found = crossing.inputs.get(name) if isinstance(name, str) else None
        if (
            not isinstance(name, str)
            or not isinstance(found, Tensor)
            or not found.is_floating_point()
        ):
            raise FrameError("layout", f"there is no gradient of {name!r:.64}")
        out[name] = found.detach().requires_grad_()
    return out


@contextmanager
def seeded_rng(label: str) -> Iterator[None]:
    """Random numbers that are a function of the label, whatever was drawn before. The process's own
    stay as they are.
    """
    seed = int.from_bytes(hashlib.sha256(label.encode()).digest()[:8], "little") >> 1
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield
