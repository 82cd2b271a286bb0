"""A remote backbone: the client's model, with its blocks run by a server.

    link = connect(model, transport, element=g, rows="batch")
    loss = model(**inputs).loss            # embedding here, blocks on the server, head here
    loss.backward()                        # the server takes its step
    optimizer.step()                       # the client steps embedding and head
    link.close()                           # the model runs locally again

Features are transformed by the element (columns) and permuted (rows) before they are packed;
outputs and gradients that come back are restored to the model's own order and basis. The client's
copies of the blocks are unused and frozen meanwhile; their weights may be on the meta device.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from regauge.core.element import Element
from regauge.core.rng import secret_of
from regauge.defences.split import (
    BatchShuffle,
    Defence,
    KeyedRandom,
    Rows,
    apply_defences,
)
from regauge.errors import CutError, DefenceError, FrameError, RegaugeError
from regauge.locking.authorize import is_authorized
from regauge.locking.optimizer_guard import PERMUTED, member_kind
from regauge.models.cut import Crossing, cut
from regauge.models.families import Boundary
from regauge.split.client.journal import Journal
from regauge.split.client.request_log import RequestLog
from regauge.split.protocol.frames import CODECS, Frame, Kind, Limits, Value
from regauge.split.protocol.messages import (
    CACHE,
    PROTOCOL,
    blocks_of,
    describe_model,
    exact_keys,
    pack,
)
from regauge.split.protocol.transport import Transport
from regauge.split.server.network import Grpc

Tensor = torch.Tensor


class RemoteBackbone:
    """A model whose backbone is on a server, returned by `connect`.

    It is called like the model, and has the model's attributes beside its own. `close()` makes the
    model use its own blocks again.

    Attributes:
        model: The model, to be used, trained and saved as before.
        server_info: The server's WELCOME.

    Example:
        >>> host = regauge.split.Host(model, regauge.split.OptimizerConfig("sgd", lr=0.1))
        >>> remote = regauge.split.connect("model", regauge.split.InProcess(host))
        >>> remote(input_ids=torch.arange(6)[None]).logits.shape
        torch.Size([1, 6, 30])
        >>> remote.close()
    """

    def __init__(
        self,
        model: torch.nn.Module,
        transport: Transport,
        journal: Journal,
        element: Element | None,
        defences: Sequence[Defence],
        codec: str,
        secret: bytes | int | None,
        key: str,
        config: Mapping[str, Any] | None,
        boundaries: Sequence[Boundary] | None,
        limits: Limits | None,
        patience: float,
    ) -> None:
        if codec not in CODECS:
            raise FrameError(
                "codec",
                f"unknown codec {codec!r}",
                hint=f"choose from {', '.join(c or '(none)' for c in CODECS)}",
            )
        if is_authorized(model) or getattr(model, PERMUTED, False):
            raise CutError(
                f"the {type(model).__name__} must not be authorized or permuted locally",
                hint="undo that first, and pass the element to connect",
            )
        if element is not None:
            element.require()
        self.model = model
        self.network: Grpc | None = None  # that ends with the link
        self.cut = cut(model, config, boundaries=boundaries)
        self.element, self.defences = element, tuple(defences)
        self.moves_rows = any(isinstance(d, Rows | BatchShuffle) for d in defences)
        if self.moves_rows:
            self._require_movable_rows(model)
        self.secret = journal.secret if secret is None else secret_of(secret)
        # The randomness of a prediction, beside the secret.
        self.make_nonce: Callable[[], str] = lambda: os.urandom(8).hex()
        limits = limits or Limits()
        hello: dict[str, Value] = {
            **describe_model(self.cut, config),
            "protocol": PROTOCOL,
            "key": key,
            "codec": codec,
        }
        hello["limits"] = [limits.payload, limits.table, limits.tensors, limits.axes]
        self.log = RequestLog(
            transport, journal, hello, codec=codec, limits=limits, patience=patience
        )
        if not journal.reply(1):
            try:
                self.log.handshake()  # rejects a wrong model here, and not in the first step
            except BaseException:
                journal.abandon()
                raise
        self.open_passes: set[int] = set()  # forward passes whose graph is alive
        self.abandoned: list[int] = []  # forward passes that will have no backward pass
        self.is_optimizer_checked = False
        self.is_step_pending = False  # STEP is sent when the autograd engine has finished
        self.anchor = torch.zeros((), requires_grad=True)
        self.caches: weakref.WeakKeyDictionary[Any, _RemoteCache] = weakref.WeakKeyDictionary()
        self.frozen = [
            p
            for b in self.cut.boundaries
            for block in blocks_of(self.cut, b)
            for p in block.parameters()
            if p.requires_grad
        ]
        self.route = self.cut.route(self._cross)
        self.input_hook = (
            model.register_forward_pre_hook(self._defend_inputs, with_kwargs=True)
            if any(d.stage == 0 for d in defences)
            else None
        )
        for p in self.frozen:
            p.requires_grad_(False)

    def _require_movable_rows(self, model: torch.nn.Module) -> None:
        """Raise CutError if the blocks depend on the order of their rows."""
        for b in self.cut.boundaries:
            if "token" not in b.leave:
                raise CutError(
                    f"the rows of a {type(model).__name__} cannot be permuted: its blocks mix "
                    "neighbouring rows",
                    hint="connect with rows=None",
                )
            derived = next((name for name, make in b.implicit.items() if make is not None), None)
            if derived is not None:
                raise CutError(
                    f'the rows cannot be permuted: the server\'s blocks derive "{derived}" from '
                    "their order",
                    hint="connect with rows=None",
                )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model: embedding here, blocks on the server, head here."""
        return self.model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the model, such as `generate` or `parameters`."""
        if name.startswith("_") or name == "model":
            raise AttributeError(f"RemoteBackbone has no attribute {name!r}")
        return getattr(self.model, name)

    def __repr__(self) -> str:
        place = "a server" if self.network is None else self.network.address
        return f"<{type(self.model).__name__} with its backbone on {place}>"

    def close(self) -> None:
        """Make the model use its own blocks again.

        The server keeps the session: another link with the same journal can resume it.
        """
        self._detach()
        self._disconnect()

    def _disconnect(self) -> None:
        if self.network is not None:
            self.network.close()

    def _detach(self) -> None:
        self.route.remove()
        if self.input_hook is not None:
            self.input_hook.remove()
        for p in self.frozen:
            p.requires_grad_(True)
        self.frozen = []

    def end(self) -> None:
        """Close, and end the session once the server has answered all requests."""
        self._detach()
        self.log.end_session()
        self._disconnect()

    def __enter__(self) -> RemoteBackbone:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def server_info(self) -> dict[str, Value]:
        """Return the server's WELCOME: its optimizer, its limits, the state of the session."""
        return dict(self.log.welcome or self.log.handshake())

    def state_dict(self) -> dict[str, Any]:
        """Return the link's part of a client checkpoint, to be saved with model and optimizer.

        It states up to which request the two include the replies.
        """
        return {
            "session": self.log.journal.session,
            "number": self.log.number,
            "dead": list(self.abandoned),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the state of a client checkpoint."""
        if state["session"] != self.log.journal.session:
            raise FrameError(
                "session",
                "checkpoint and journal must belong to the same session, got two",
                hint="name the journal folder that the checkpoint was written with",
            )
        self.log.number, self.abandoned = int(state["number"]), [int(n) for n in state["dead"]]

    def mark_saved(self) -> None:
        """Record that a checkpoint with `state_dict()` is on disk.

        The journal drops what is not needed to resume from it.
        """
        self.log.mark_checkpoint()

    # Passes

    def _cross(self, crossing: Crossing) -> Tensor:
        """Run one pass of the backbone on the server."""
        with_grad = torch.is_grad_enabled()
        if with_grad:
            self._require_compatible_optimizer()
        cache = crossing.inputs.get(CACHE)
        if cache is not None:
            self._require_cache(cache, with_grad)
        sent, restore = apply_defences(self.defences, crossing, self._random_source())
        sent = sent if self.element is None else sent.transform(self.element)
        z = self._forward_with_grad(sent) if with_grad else self._predict(sent, cache)
        if z.shape[0] != crossing.stream.shape[0]:
            raise FrameError(
                "shape",
                f"the server returned a stream of shape {list(z.shape)} for "
                f"{list(crossing.stream.shape)}",
            )
        return restore(z if self.element is None else crossing.restore(self.element, z))

    def _random_source(self) -> KeyedRandom:
        """Return the random source of this pass.

        It depends on the request's number, so that a repeated request is the same. Predictions have
        no number and use fresh randomness.
        """
        return KeyedRandom(
            self.secret,
            str(self.log.number + 1) if torch.is_grad_enabled() else f"predict/{self.make_nonce()}",
        )

    def _defend_inputs(
        self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Apply the defences on images before the model's embedding."""
        source, count = self._random_source(), 0

        def defend(value: Any) -> Any:
            nonlocal count
            if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() != 4:
                return value
            count += 1
            for defence in self.defences:
                value = defence.apply_to_images(value, source)
            return value

        inputs = tuple(map(defend, args)), {key: defend(value) for key, value in kwargs.items()}
        if count != 1:
            defence = next(d for d in self.defences if d.stage == 0)
            raise DefenceError(
                f"{type(defence).__name__} needs one batch of images, got {count}",
                hint="use defences of the stream, such as noise or clip",
            )
        return inputs

    def _forward_with_grad(self, crossing: Crossing) -> Tensor:
        """Run a pass that has a backward pass."""
        values, tensors = pack(crossing)
        return _RemoteForward.apply(  # type: ignore[no-any-return, no-untyped-call]
            self, crossing.boundary, values, list(tensors), self.anchor, *tensors.values()
        )

    def _require_compatible_optimizer(self) -> None:
        """Raise CutError if the server's optimizer does not commute with the element.

        Training would then differ from that of the plain model.
        """
        server = self.log.welcome
        if (
            self.element is None
            or server is None
            or not server.get("trains")
            or self.is_optimizer_checked
        ):
            return
        for space, member in self.element.members.items():
            kind = member_kind(member)
            if kind == "linear" or (kind == "orthogonal" and server.get("optimizer") != "sgd"):
                raise CutError(
                    f"the server trains with {server.get('optimizer')}, which does not commute "
                    f'with the element\'s {kind} transform of "{space}"',
                    hint="lock with (signed) permutations to train; a rotation needs a server "
                    "with sgd, and frozen unit gains",
                )
        self.is_optimizer_checked = True

    def _send_step(self) -> None:
        """Send STEP after a backward pass that left other forward passes open."""
        if self.is_step_pending:
            self.is_step_pending = False
            self.log.submit(Frame(Kind.STEP))

    def _predict(self, crossing: Crossing, cache: Any) -> Tensor:
        """Run a pass without gradients; `cache` is the client's key/value cache, if any."""
        values, tensors = pack(crossing)
        remote_cache = None
        if cache is not None:
            remote_cache = self.caches.setdefault(cache, _RemoteCache())
            values |= remote_cache.request_values(cache)
        reply = self.log.predict(
            Frame(Kind.FORWARD, 0, values, tensors), exact_keys(crossing.boundary, tensors)
        )
        if remote_cache is not None:
            remote_cache.advance(cache, crossing.stream)
        return _read_stream(reply, crossing.stream, crossing.boundary)

    def _require_cache(self, cache: Any, with_grad: bool) -> None:
        """Raise CutError for caches that the server cannot stand in for."""
        if not hasattr(cache, "layers") or not hasattr(cache, "get_seq_length"):
            if hasattr(cache, "self_attention_cache") and not cache.get_seq_length():
                return
            raise CutError(
                f"unsupported cache: {type(cache).__name__}",
                hint="call the model with use_cache=False",
            )
        if not cache.get_seq_length():
            return
        if with_grad:
            raise CutError(
                "a filled cache must be used without gradients",
                hint="use torch.no_grad(), or use_cache=False",
            )
        if self.moves_rows:
            raise CutError(
                "permuted rows cannot be used with a cache",
                hint="generate with use_cache=False, or connect with rows=None",
            )
        if cache not in self.caches:
            raise CutError(
                "the cache must be filled by the server's blocks, got one filled elsewhere",
                hint="generate from the beginning",
            )


class _PendingBackward:
    """A forward pass that awaits its backward pass, as long as its graph is alive."""

    def __init__(self, link: RemoteBackbone, number: int) -> None:
        link.open_passes.add(number)
        self.abandon = weakref.finalize(
            self, _mark_abandoned, link.open_passes, link.abandoned, number
        )
        self.abandon.atexit = False


def _mark_abandoned(open_passes: set[int], abandoned: list[int], number: int) -> None:
    """Record that a forward pass will have no backward pass."""
    open_passes.discard(number)
    abandoned.append(number)


class _RemoteForward(torch.autograd.Function):
    """The server's blocks as one operation of the autograd graph."""

    @staticmethod
    def forward(
        ctx: Any,
        link: RemoteBackbone,
        boundary: Boundary,
        values: dict[str, Value],
        keys: list[str],
        anchor: Tensor,
        *tensors: Tensor,
    ) -> Tensor:
        """Send FORWARD, and return the stream of the reply."""
        needs_grad = [
            needed and t.is_floating_point()
            for needed, t in zip(ctx.needs_input_grad[5:], tensors, strict=True)
        ]
        inputs = dict(zip(keys, tensors, strict=True))
        released = sorted(link.abandoned)
        request: dict[str, Value] = {
            **values,
            "wants": [k for k, w in zip(keys, needs_grad, strict=True) if w],
            "release": list(released),
        }
        reply = link.log.submit(
            Frame(Kind.FORWARD, 0, request, inputs), exact_keys(boundary, inputs)
        )
        for n in released:  # others may have been abandoned meanwhile
            link.abandoned.remove(n)
        ctx.link, ctx.keys, ctx.needs_grad, ctx.number = link, keys, needs_grad, reply.number
        ctx.signatures = [(t.shape, t.dtype, t.device) for t in tensors]
        ctx.pending = _PendingBackward(link, reply.number)
        z = _read_stream(reply, inputs[boundary.stream], boundary)
        # Predictions are not checked: their padded rows may hold NaN.
        if not bool(torch.isfinite(z).all()):
            raise FrameError("nonfinite", "the server's stream holds NaN or Inf")
        return z

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        """Send BACKWARD, and return the gradients of the reply."""
        link: RemoteBackbone = ctx.link
        number: int = ctx.number
        if not ctx.pending.abandon.alive:
            raise CutError(
                "backward() was called twice on one pass",
                hint="the server frees the graph after the first call; run the model again",
            )
        # If no other pass is open, this is the last one of the loss. Otherwise this is known only
        # when the autograd engine has finished.
        is_last = link.open_passes == {number}
        if not is_last and not link.is_step_pending:
            link.is_step_pending = True
            torch.autograd.Variable._execution_engine.queue_callback(link._send_step)
        try:
            reply = link.log.submit(
                Frame(Kind.BACKWARD, 0, {"of": number, "step": is_last}, {"stream": grad_output})
            )
        except RegaugeError:
            ctx.pending.abandon()
            link.is_step_pending = False
            raise
        ctx.pending.abandon.detach()
        link.open_passes.discard(number)
        link.is_step_pending = link.is_step_pending and not is_last
        grads: list[Tensor | None] = []
        for key, needs_grad, (shape, dtype, device) in zip(
            ctx.keys, ctx.needs_grad, ctx.signatures, strict=True
        ):
            grad = reply.tensors.get(key) if needs_grad else None
            if needs_grad and (grad is None or grad.shape != shape or grad.dtype != dtype):
                raise FrameError(
                    "layout",
                    f'the server\'s gradient of "{key}" must have shape {list(shape)} and dtype '
                    f"{str(dtype).removeprefix('torch.')}, got another or none",
                )
            if grad is not None and not bool(torch.isfinite(grad).all()):
                raise FrameError("nonfinite", f'the server\'s gradient of "{key}" holds NaN or Inf')
            grads.append(None if grad is None else grad.to(device))
        return (None, None, None, None, None, *grads)


def _read_stream(reply: Frame, like: Tensor, boundary: Boundary) -> Tensor:
    """Return the stream of a reply, checked against the stream that was sent."""
    z = reply.tensors.get("stream")
    if z is None or z.dtype != like.dtype or z.dim() != like.dim():
        raise FrameError(
            "stream", "the server's reply must have a stream of the dtype and dimensions sent"
        )
    if boundary.leave == boundary.enter.get(boundary.stream) and z.shape != like.shape:
        raise FrameError(
            "shape", f"the server returned a stream of shape {list(z.shape)} for {list(like.shape)}"
        )
    return z.to(like.device)


class _RemoteCache:
    """The client's view of the server's key/value cache of one generation.

    The client's own cache stores one number for each token: the row that the token belongs to. It
    states how long the text is and, after a beam search has reordered the rows, which rows remain.
    """

    def __init__(self) -> None:
        self.name, self.turn, self.rows = os.urandom(8).hex(), 0, 0

    def request_values(self, cache: Any) -> dict[str, Value]:
        """Return the values of a request for the next turn."""
        values: dict[str, Value] = {"cache": self.name, "turn": self.turn + 1}
        if self.turn:
            order = [int(i) for i in cache.layers[0].keys[:, 0, -1, 0].tolist()]
            if order != list(range(self.rows)):
                values["rows"] = list(order)
        return values

    def advance(self, cache: Any, stream: Tensor) -> None:
        """Append the tokens of an answered turn to the client's cache."""
        self.turn, self.rows = self.turn + 1, stream.shape[0]
        row = torch.arange(stream.shape[0], dtype=torch.float32).view(-1, 1, 1, 1)
        for i in range(len(cache.layers)):
            cache.update(
                row.expand(-1, 1, stream.shape[1], 1).contiguous(),
                row.expand(-1, 1, stream.shape[1], 1).contiguous(),
                i,
            )
