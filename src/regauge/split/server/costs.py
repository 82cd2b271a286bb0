"""Memory estimates of a pass from its declared shapes, before anything is unpacked or computed.

The blocks are run on fake tensors, which have shapes and no data, and every storage is counted
while it is alive: the activations saved for the backward pass, and the peaks of the forward and the
backward pass. Identical blocks are run once. If blocks cannot run on fake tensors (their control
flow depends on values), or take a cache, an upper bound from the sizes of their weight matrices is
used instead.
"""

from __future__ import annotations

import hashlib
import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from regauge.models.cut import Crossing
from regauge.split.protocol.frames import Frame, declared_tensors, nbytes
from regauge.split.protocol.messages import unpack
from regauge.split.server.backbone import TrainableBackbone, autocast
from regauge.split.server.executor import Executor
from regauge.split.server.memory import Cost

Tensor = torch.Tensor
Shapes = tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]
MAX_ESTIMATES = 512  # in the cache
# The estimate of a shape that is larger by up to this factor, in each axis, is reused.
SHAPE_TOLERANCE = 1.15
# Of the upper bound: activations per feature of a weight matrix, copies of the attention scores.
_LINEAR_FACTOR, _ATTENTION_FACTOR = 3, 4
_log = logging.getLogger("regauge.split")


@dataclass(frozen=True)
class _BlockCost:
    """Memory of one block in bytes.

    Attributes:
        saved: Activations saved for the backward pass.
        peak: Peak of the forward pass.
        backward: Peak of the backward pass beyond `saved`.
        outputs: The block's outputs, on the meta device.
    """

    saved: int
    peak: int
    backward: int
    outputs: Any = None


class Estimator:
    """Estimates of passes through a backbone's blocks, cached by shape."""

    def __init__(self, backbone: TrainableBackbone, executor: Executor) -> None:
        self.backbone, self.executor, self.device, self.precision = (
            backbone,
            executor,
            executor.device,
            executor.precision,
        )
        self._estimates: OrderedDict[tuple[bool, bytes], dict[Shapes, Cost]] = OrderedDict()

    def estimate_pass(self, frame: Frame, *, with_backward: bool) -> Cost:
        """Return the cost of a pass.

        Raises:
            FrameError: Its shapes or its layout are invalid.
        """
        tensors = declared_tensors(frame)
        shapes: Shapes = tuple((name, t.dtype, tuple(t.shape)) for name, t in tensors.items())
        layout = repr(
            [
                frame.values.get(name)
                for name in ("boundary", "plain", "layouts", "order", "training", "wants")
            ]
        )
        kind = (with_backward, hashlib.sha256(layout.encode(errors="backslashreplace")).digest())
        estimates = self._estimates.setdefault(kind, {})
        self._estimates.move_to_end(kind)
        cost = estimates.get(shapes) or next(
            (cost for other, cost in estimates.items() if _is_near(shapes, other)), None
        )
        if cost is None:
            crossing = self._crossing(frame, tensors)
            parts = self._block_costs(
                crossing, frame.values.get("training") is True, with_backward=with_backward
            )
            cost = _sum_blocks(parts, crossing.stream, nbytes(frame), with_backward=with_backward)
            estimates[shapes] = cost
            while sum(map(len, self._estimates.values())) > MAX_ESTIMATES:
                oldest = next(iter(self._estimates))
                if len(self._estimates[oldest]) > 1:
                    del self._estimates[oldest][next(iter(self._estimates[oldest]))]
                else:
                    del self._estimates[oldest]
        return cost

    def estimate_turn(self, frame: Frame, past: int) -> Cost:
        """Return the cost of a generation turn after `past` tokens.

        Held are all keys and values after the turn, for the rows of this turn: beam search may have
        repeated the rows of the turn before.
        """
        crossing = self._crossing(frame, declared_tensors(frame))
        stream = crossing.stream
        parts = [
            _bound_block(block, stream, self._heads(), past, with_backward=False)
            for block in crossing.blocks
        ]
        cost = _sum_blocks(parts, stream, nbytes(frame), with_backward=False)
        tokens = past + stream.numel() // (stream.shape[0] * stream.shape[-1])
        layer = (
            2
            * self._cached_features(stream.shape[-1])
            * tokens
            * stream.shape[0]
            * stream.element_size()
        )
        # A layer exists twice while it grows; the reply stays with the cache.
        return Cost(
            len(crossing.blocks) * layer + stream.numel() * stream.element_size(),
            cost.working + layer,
        )

    def _crossing(self, frame: Frame, tensors: Mapping[str, Tensor]) -> Crossing:
        """Return the pass on the meta device."""
        skeleton = Frame(frame.kind, frame.number, frame.values, tensors)
        return unpack(
            skeleton,
            self.backbone.cut,
            self.executor.sizes,
            self.executor.dtype,
            torch.device("meta"),
            self.executor.max_length,
        )

    def _heads(self) -> int:
        heads = getattr(
            getattr(self.backbone.cut.model, "config", None), "num_attention_heads", None
        )
        return heads if isinstance(heads, int) else 16

    def _cached_features(self, hidden: int) -> int:
        """Return the features per token of a layer's keys."""
        config = getattr(self.backbone.cut.model, "config", None)
        heads, size = (
            getattr(config, "num_key_value_heads", None),
            getattr(config, "head_dim", None),
        )
        if isinstance(heads, int) and not isinstance(size, int):
            size = hidden // max(1, self._heads())
        return heads * size if isinstance(heads, int) and isinstance(size, int) else hidden

    def _block_costs(
        self, crossing: Crossing, training: bool, *, with_backward: bool
    ) -> list[_BlockCost]:
        """Return the blocks' costs by simulation, or else by the upper bound."""
        for block in crossing.blocks:
            block.train(training)
        # It logs a traceback for shapes that do not match, which are the client's fault.
        noisy = logging.getLogger("torch._subclasses.fake_tensor")
        was_disabled, noisy.disabled = noisy.disabled, True
        try:
            return self._simulate(crossing, with_backward=with_backward)
        except Exception as error:  # blocks may raise anything; the bound holds for all of them
            _log.info(
                "bounding the memory of a pass: its blocks do not run on fake tensors: %s",
                type(error).__name__,
            )
            return [
                _bound_block(block, crossing.stream, self._heads(), 0, with_backward=with_backward)
                for block in crossing.blocks
            ]
        finally:
            noisy.disabled = was_disabled

    def _simulate(self, crossing: Crossing, *, with_backward: bool) -> list[_BlockCost]:
        """Return the blocks' costs, measured on fake tensors."""
        from torch._subclasses.fake_tensor import FakeTensorMode

        mode, boundary = FakeTensorMode(), crossing.boundary

        def fake(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            tensor = torch.empty(value.shape, dtype=value.dtype, device=self.device)
            return tensor.requires_grad_(with_backward and tensor.is_floating_point())

        memo: dict[tuple[object, ...], _BlockCost] = {}
        costs: list[_BlockCost] = []
        with mode, autocast(self.device, self.precision), torch.set_grad_enabled(with_backward):
            values = {key: tree_map(fake, value) for key, value in crossing.inputs.items()}
            z: Any = values[boundary.stream]
            carried: dict[str, Any] = {}
            for block, call in zip(crossing.blocks, crossing.calls, strict=True):
                inputs = {**values, boundary.stream: z}
                kwargs = {
                    name: carried.get(name, inputs[key]) for name, key in (*call.args, *call.kwargs)
                }
                kind = (
                    _block_signature(block),
                    repr(
                        sorted(
                            (name, tree_map(_describe_input, value))
                            for name, value in kwargs.items()
                        )
                    ),
                )
                if kind not in memo:
                    memo[kind] = _measure_block(
                        block, kwargs, mode.from_tensor, with_backward=with_backward
                    )
                costs.append(memo[kind])
                result = tree_map(fake, memo[kind].outputs)
                z, *rest = result if boundary.returns else (result,)
                if boundary.returns:
                    carried = {
                        name: value
                        for name, value in zip(boundary.returns[1:], rest, strict=False)
                        if name
                    }
        return costs


class _EagerBlock(torch.nn.Module):
    """A block without its compiled code and hooks."""

    def __init__(self, block: torch.nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, **kwargs: Any) -> Any:
        return self.block.forward(**kwargs)


class _StorageCounter:
    """Counts the bytes of all live storages that operators allocate, except those of `known`."""

    def __init__(self, known: list[Tensor]) -> None:
        self.current = self.peak = 0
        self.ignored = {t.untyped_storage()._cdata for t in known}
        self.alive: dict[int, weakref.ref[Any]] = {}

    def count(self) -> AbstractContextManager[object]:
        """Return a context in which the results of all operators are counted."""

        def dispatch(
            mode: object, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            for tensor in tree_leaves(out):
                if isinstance(tensor, Tensor):
                    self._add(tensor.untyped_storage())
            return out

        context: AbstractContextManager[object] = type(
            "StorageMode", (TorchDispatchMode,), {"__torch_dispatch__": dispatch}
        )()
        return context

    def _add(self, storage: Any) -> None:
        """Count a storage until it is freed."""
        address, size = storage._cdata, storage.nbytes()
        if address in self.ignored or address in self.alive:
            return

        def freed(_: object) -> None:
            self.current -= size
            self.alive.pop(address, None)

        self.alive[address] = weakref.ref(storage, freed)
        self.current += size
        self.peak = max(self.peak, self.current)


def _measure_block(
    block: torch.nn.Module,
    kwargs: Mapping[str, Any],
    fake: Callable[[Tensor], Tensor],
    *,
    with_backward: bool,
) -> _BlockCost:
    """Run one block forward and backward on fake tensors, and return its memory."""
    state = {
        f"block.{name}": fake(t) for name, t in (*block.named_parameters(), *block.named_buffers())
    }
    inputs = [t for t in tree_leaves(dict(kwargs)) if isinstance(t, Tensor)]
    storages = _StorageCounter([*state.values(), *inputs])
    with storages.count():
        result = torch.func.functional_call(_EagerBlock(block), state, (), dict(kwargs))
        saved, peak, backward = storages.current, storages.peak, 0
        outputs = [t for t in tree_leaves(result) if isinstance(t, Tensor) and t.requires_grad]
        if with_backward and outputs:
            storages.peak = storages.current
            leaves = [t for t in (*inputs, *state.values()) if t.requires_grad]
            grad_output = torch.empty_like(outputs[0])
            grads = torch.autograd.grad(
                outputs[0], leaves, grad_output, allow_unused=True, retain_graph=True
            )
            backward = storages.peak - saved
            del grads
    return _BlockCost(saved if with_backward else 0, peak, backward, tree_map(_to_meta, result))


def _to_meta(value: Any) -> Any:
    return (
        torch.empty(value.shape, dtype=value.dtype, device="meta")
        if isinstance(value, Tensor)
        else value
    )


def _describe_input(value: Any) -> Any:
    """Return what a block's memory depends on."""
    return (
        (str(value.dtype), tuple(value.shape), value.requires_grad)
        if isinstance(value, Tensor)
        else value
    )


def _block_signature(block: torch.nn.Module) -> tuple[object, ...]:
    """Return a key that is equal for identical blocks."""
    return type(block), *(
        (name, p.shape, p.dtype, p.requires_grad) for name, p in block.named_parameters()
    )


def _bound_block(
    block: torch.nn.Module, stream: Tensor, heads: int, past: int, *, with_backward: bool
) -> _BlockCost:
    """Return an upper bound from the features of weight matrices and the attention scores."""
    features = (
        sum(sum(p.shape[-2:]) for p in block.parameters() if p.dim() >= 2) or stream.shape[-1]
    )
    samples, tokens = stream.shape[0], stream.numel() // (stream.shape[0] * stream.shape[-1])
    scores = heads * samples * tokens * (past + tokens)
    peak = stream.element_size() * (
        _LINEAR_FACTOR * samples * tokens * features + _ATTENTION_FACTOR * scores
    )
    return _BlockCost(peak if with_backward else 0, peak, peak if with_backward else 0)


def _sum_blocks(
    parts: list[_BlockCost], stream: Tensor, request: int, *, with_backward: bool
) -> Cost:
    """Return the cost of a pass from those of its blocks.

    In the forward pass each block's peak adds to what earlier blocks have saved; the backward pass
    keeps the complete graph. An open pass keeps its request; the reply exists twice, as a tensor
    and as bytes.
    """
    saved = peak = 0
    for part in parts:
        peak = max(peak, saved + part.peak)
        saved += part.saved
    reply = 2 * stream.numel() * stream.element_size()
    if not with_backward:
        return Cost(0, request + peak + reply)
    return Cost(request + saved, max(peak - saved, max(part.backward for part in parts)) + reply)


def _is_near(shapes: Shapes, other: Shapes) -> bool:
    """Return whether each shape of `other` is at least this one, and not much larger."""
    if [(n, d, len(s)) for n, d, s in shapes] != [(n, d, len(s)) for n, d, s in other]:
        return False
    pairs = [
        (a, b)
        for (_, _, shape), (_, _, other_shape) in zip(shapes, other, strict=True)
        for a, b in zip(shape, other_shape, strict=True)
    ]
    return all(a <= b <= SHAPE_TOLERANCE * a for a, b in pairs)
