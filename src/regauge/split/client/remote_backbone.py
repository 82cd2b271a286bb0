"""The client's side: an ordinary model whose backbone runs elsewhere.

    link = connect(model, transport, element=g, rows="batch")
    loss = model(**inputs).loss            # embed here, the blocks there, head here
    loss.backward()                        # and back; the server takes its step
    optimizer.step()                       # of embed and head, the client's own
    link.close()                           # the model is as it was

What leaves is moved by the element (columns) and shuffled (rows) before it is packed, and what
comes back is put in order again, outputs and gradients alike. The client's own copies of the blocks
are not used, and are frozen meanwhile; their weights may be on the meta device.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from regauge.core.element import Element
from regauge.core.rng import secret_of
from regauge.defences.parser import DefenceError
from regauge.defences.split import (
    BatchShuffle,
    Defence,
    KeyedRandom,
    Rows,
    apply_defences,
    parse_defences,
)
from regauge.errors import CutError, RegaugeError
from regauge.locking.authorize import is_authorized
from regauge.locking.optimizer_guard import PERMUTED, member_kind
from regauge.models.cut import Crossing, cut
from regauge.models.families import Boundary
from regauge.split.client.journal import FolderJournal, Journal, MemoryJournal
from regauge.split.client.request_log import RequestLog
from regauge.split.protocol.frames import CODECS, Frame, FrameError, Kind, Limits, Value
from regauge.split.protocol.messages import (
    CACHE,
    PROTOCOL,
    blocks_of,
    describe_model,
    exact_keys,
    pack,
)
from regauge.split.protocol.transport import Transport

Tensor = torch.Tensor


def connect(
    model: torch.nn.Module,
    transport: Transport,
    *,
    element: Element | None = None,
    rows: Literal["batch", "sample"] | None = None,
    keep_cls: bool = False,
    codec: str = "",
    journal: Journal | Path | str | None = None,
    secret: bytes | int | None = None,
    key: str = "",
    config: Mapping[str, Any] | None = None,
    boundaries: Sequence[Boundary] | None = None,
    limits: Limits | None = None,
    patience: float = 120.0,
    defences: Sequence[Defence | str] = (),
) -> RemoteBackbone:
    """Hand a model's backbone to a server until the link is closed. The model is used, trained and
    saved as ever.

    `element` is what the server's backbone is locked with. With `rows` the tokens are shuffled, by
    a fresh permutation for every batch or for every sample; `keep_cls` leaves the first one in its
    place. `defences` are more of what is done to what leaves (`regauge.defences.split`; "noise=0.5"
    is short for `Noise(0.5)`). `codec` is how features cross ("" as they are, "BF16", "F16", "Q8").
    `journal` is a folder for a run that may be killed and go on. `secret` is what shuffles are
    drawn from; without it they are from the system's randomness. `key` is the id of the key of the
    lock, if the server is to compare it. `patience` is how many seconds may pass without a reply.
    """
    kept = FolderJournal(journal) if isinstance(journal, str | Path) else journal or MemoryJournal()
    shuffled = [*defences, *([] if rows is None else [Rows(rows, keep_cls)])]
    return RemoteBackbone(
        model,
        transport,
        kept,
        element,
        parse_defences(shuffled),
        codec,
        secret,
        key,
        config,
        boundaries,
        limits,
        patience,
    )


class RemoteBackbone:
    """A model's backbone on a server. `close()` gives the model its own blocks back."""

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
                f"there is no codec {codec!r}",
                hint=f"choose from {', '.join(c or '(none)' for c in CODECS)}",
            )
        if is_authorized(model) or getattr(model, PERMUTED, False):
            raise CutError(
                f"this {type(model).__name__} is authorised or permuted on this machine",
                hint="undo that first: the link has its own element",
            )
        if element is not None:
            element.require()
        self.cut = cut(model, config, boundaries=boundaries)
        self.element, self.defences = element, tuple(defences)
        self.moves_rows = any(
            isinstance(d, Rows | BatchShuffle) for d in defences
        )  # do tokens leave their places?
        if self.moves_rows:
            self._require_movable_rows(model)
        self.secret = journal.secret if secret is None else secret_of(secret)
        self.make_nonce: Callable[[], str] = lambda: os.urandom(
            8
        ).hex()  # what a prediction draws from, beside the secret
        limits = limits or Limits()
        about: dict[str, Value] = {
            **describe_model(self.cut, config),
            "protocol": PROTOCOL,
            "key": key,
            "codec": codec,
        }
        about["limits"] = [limits.payload, limits.table, limits.tensors, limits.axes]
        self.log = RequestLog(
            transport, journal, about, codec=codec, limits=limits, patience=patience
        )
        if not journal.reply(1):
            try:
                self.log.handshake()  # a wrong model is refused here, and not in the first step
            except BaseException:
                journal.abandon()
                raise
        self.open_passes: set[int] = set()  # forward passes that may have a backward pass yet
        self.abandoned: list[int] = []  # and those that will not
        self.is_optimizer_checked = (
            False  # does the server's optimizer keep what the element does? looked at once
        )
        self.is_step_pending = False  # is the server to be told when the engine is through?
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
        for b in self.cut.boundaries:
            if "token" not in b.leave:
                raise CutError(
                    f"the rows of a {type(model).__name__} cannot move: its blocks look at "
                    "neighbours",
                    hint="connect with rows=None",
                )
            made = next((name for name, make in b.implicit.items() if make is not None), None)
            if made is not None:
                raise CutError(
                    f'the server\'s blocks make "{made}" from the order of their rows, so the '
                    "rows cannot move",
                    hint="connect with rows=None",
                )

    def close(self) -> None:
        """Give the model its blocks back. The session stays with the server: another link with the
        same journal may go on.
        """
        self.route.remove()
        if self.input_hook is not None:
            self.input_hook.remove()
        for p in self.frozen:
            p.requires_grad_(True)
        self.frozen = []

    def end(self) -> None:
        """Close, and let the server forget the session, once it has all of it."""
        self.close()
        self.log.end_session()

    def __enter__(self) -> RemoteBackbone:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def server_info(self) -> dict[str, Value]:
        """What the server says of itself: its optimizer, its limits, how far the session is."""
        return dict(self.log.welcome or self.log.handshake())

    def state_dict(self) -> dict[str, Any]:
        """For the client's own checkpoint, beside its model and its optimizer: which requests they
        have seen the replies to.
        """
        return {
            "session": self.log.journal.session,
            "number": self.log.number,
            "dead": list(self.abandoned),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["session"] != self.log.journal.session:
            raise FrameError(
                "session",
                "the checkpoint is of another session than the journal",
                hint="name the folder that it was made with",
            )
        self.log.number, self.abandoned = int(state["number"]), [int(n) for n in state["dead"]]

    def mark_saved(self) -> None:
        """Say that a checkpoint with `state_dict()` is on the disk: the journal drops what is not
        needed to go on from there.
        """
        self.log.mark_checkpoint()

    # One pass

    def _cross(self, crossing: Crossing) -> Tensor:
        learns = torch.is_grad_enabled()
        if learns:
            self._require_compatible_optimizer()
        cache = crossing.inputs.get(CACHE)
        if cache is not None:
            self._require_cache(cache, learns)
        there, home = apply_defences(self.defences, crossing, self._random_source())
        there = there if self.element is None else there.transform(self.element)
        z = self._trained(there) if learns else self._predict(there, cache)
        if z.shape[0] != crossing.stream.shape[0]:
            raise FrameError(
                "shape",
                f"the server returned a stream of shape {list(z.shape)} for "
                f"{list(crossing.stream.shape)}",
            )
        return home(z if self.element is None else crossing.restore(self.element, z))

    def _random_source(self) -> KeyedRandom:
        """What this pass draws from: a request that is made again draws the same; a prediction,
        which is not, draws afresh.
        """
        return KeyedRandom(
            self.secret,
            str(self.log.number + 1) if torch.is_grad_enabled() else f"predict/{self.make_nonce()}",
        )

    def _defend_inputs(
        self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The defences on images, before the model's embedding sees them."""
        draw, found = self._random_source(), 0

        def defended(value: Any) -> Any:
            nonlocal found
            if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() != 4:
                return value
            found += 1
            for defence in self.defences:
                value = defence.apply_to_images(value, draw)
            return value

        inputs = tuple(map(defended, args)), {key: defended(value) for key, value in kwargs.items()}
        if found != 1:
            named = next(d for d in self.defences if d.stage == 0)
            raise DefenceError(
                f"{type(named).__name__} is for images, and this model was given {found or 'none'}",
                hint="defend the stream: noise, clip",
            )
        return inputs

    def _trained(self, there: Crossing) -> Tensor:
        values, tensors = pack(there)
        return _RemoteForward.apply(  # type: ignore[no-any-return, no-untyped-call]
            self, there.boundary, values, list(tensors), self.anchor, *tensors.values()
        )

    def _require_compatible_optimizer(self) -> None:
        """Refuse to train under an element that the server's optimizer does not keep: it would not
        be the plain training.
        """
        told = self.log.welcome
        if (
            self.element is None
            or told is None
            or not told.get("trains")
            or self.is_optimizer_checked
        ):
            return
        for space, member in self.element.members.items():
            kind = member_kind(member)
            if kind == "linear" or (kind == "orthogonal" and told.get("optimizer") != "sgd"):
                raise CutError(
                    f"the server trains with {told.get('optimizer')}, which does not keep what "
                    f'the element does on "{space}" ({kind})',
                    hint="lock by (signed) permutations to train; a rotation needs a server "
                    "with sgd, and frozen unit gains",
                )
        self.is_optimizer_checked = True

    def _send_step(self) -> None:
        """The loss has been gone through, and a pass is open that was none of its own."""
        if self.is_step_pending:
            self.is_step_pending = False
            self.log.submit(Frame(Kind.STEP))

    def _predict(self, there: Crossing, cache: Any) -> Tensor:
        values, tensors = pack(there)
        remembered = None
        if cache is not None:
            remembered = self.caches.setdefault(cache, _RemoteCache())
            values |= remembered.request_values(cache)
        reply = self.log.predict(
            Frame(Kind.FORWARD, 0, values, tensors), exact_keys(there.boundary, tensors)
        )
        if remembered is not None:
            remembered.advance(cache, there.stream)
        return _read_stream(reply, there.stream, there.boundary)

    def _require_cache(self, cache: Any, learns: bool) -> None:
        if not hasattr(cache, "layers") or not hasattr(cache, "get_seq_length"):
            if hasattr(cache, "self_attention_cache") and not cache.get_seq_length():
                return
            raise CutError(
                f"a {type(cache).__name__} does not cross",
                hint="call the model with use_cache=False",
            )
        if not cache.get_seq_length():
            return
        if learns:
            raise CutError(
                "a cache that is filled does not cross while gradients are wanted",
                hint="use torch.no_grad(), or use_cache=False",
            )
        if self.moves_rows:
            raise CutError(
                "rows that were shuffled do not fit a cache",
                hint="generate with use_cache=False, or connect with rows=None",
            )
        if cache not in self.caches:
            raise CutError(
                "the cache was filled by other blocks than the server's",
                hint="generate from the beginning",
            )


class _PendingBackward:
    """A forward pass that waits for its backward pass, for as long as its graph lives."""

    def __init__(self, link: RemoteBackbone, number: int) -> None:
        link.open_passes.add(number)
        self.abandon = weakref.finalize(
            self, _mark_abandoned, link.open_passes, link.abandoned, number
        )
        self.abandon.atexit = False


def _mark_abandoned(alive: set[int], dead: list[int], number: int) -> None:
    alive.discard(number)
    dead.append(number)


class _RemoteForward(torch.autograd.Function):
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
        wanted = [
            needed and t.is_floating_point()
            for needed, t in zip(ctx.needs_input_grad[5:], tensors, strict=True)
        ]
        named = dict(zip(keys, tensors, strict=True))
        released = sorted(link.abandoned)
        asks: dict[str, Value] = {
            **values,
            "wants": [k for k, w in zip(keys, wanted, strict=True) if w],
            "release": list(released),
        }
        reply = link.log.submit(Frame(Kind.FORWARD, 0, asks, named), exact_keys(boundary, named))
        for n in released:  # others may have died meanwhile
            link.abandoned.remove(n)
        ctx.link, ctx.keys, ctx.wanted, ctx.number = link, keys, wanted, reply.number
        ctx.like = [(t.shape, t.dtype, t.device) for t in tensors]
        ctx.waits = _PendingBackward(link, reply.number)
        z = _read_stream(reply, named[boundary.stream], boundary)
        if not bool(torch.isfinite(z).all()):  # in a prediction, rows that are padding may be
            raise FrameError("nonfinite", "the server's stream holds NaN or Inf")
        return z

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        link, number = ctx.link, ctx.number
        if not ctx.waits.end.alive:
            raise CutError(
                "this pass has had its backward pass",
                hint="the server keeps no graph after it; run the model again",
            )
        # Where no other pass is open, this is the last of the loss. Otherwise that is known when
        # the engine is through.
        is_last = link.alive == {number}
        if not is_last and not link.stepping:
            link.stepping = True
            torch.autograd.Variable._execution_engine.queue_callback(link._send_step)
        try:
            reply = link.log.ask(
                Frame(Kind.BACKWARD, 0, {"of": number, "step": is_last}, {"stream": grad_output})
            )
        except RegaugeError:
            ctx.waits.end()  # it will have no other
            link.stepping = False
            raise
        ctx.waits.end.detach()
        link.alive.discard(number)
        link.stepping = link.stepping and not is_last
        out: list[Tensor | None] = []
        for key, wanted, (shape, dtype, device) in zip(ctx.keys, ctx.wanted, ctx.like, strict=True):
            found = reply.tensors.get(key) if wanted else None
            if wanted and (found is None or found.shape != shape or found.dtype != dtype):
                raise FrameError(
                    "layout",
                    f'the server returned no gradient of "{key}", or one of another shape or dtype',
                )
            if found is not None and not bool(torch.isfinite(found).all()):
                raise FrameError("nonfinite", f'the server\'s gradient of "{key}" holds NaN or Inf')
            out.append(None if found is None else found.to(device))
        return (None, None, None, None, None, *out)


def _read_stream(reply: Frame, like: Tensor, boundary: Boundary) -> Tensor:
    z = reply.tensors.get("stream")
    if z is None or z.dtype != like.dtype or z.dim() != like.dim():
        raise FrameError("stream", "the server's reply has no stream of the right kind")
    if boundary.leave == boundary.enter.get(boundary.stream) and z.shape != like.shape:
        raise FrameError(
            "shape", f"the server returned a stream of shape {list(z.shape)} for {list(like.shape)}"
        )
    return z.to(like.device)


class _RemoteCache:
    """The server's cache of one generation, as the client knows it.

    The client's own cache is filled with one number for each token, the row that it belongs to: it
    says how long the text is, and after the rows were chosen anew (beams), which ones.
    """

    def __init__(self) -> None:
        self.name, self.turn, self.rows = os.urandom(8).hex(), 0, 0

    def request_values(self, cache: Any) -> dict[str, Value]:
        values: dict[str, Value] = {"cache": self.name, "turn": self.turn + 1}
        if self.turn:
            order = [int(i) for i in cache.layers[0].keys[:, 0, -1, 0].tolist()]
            if order != list(range(self.rows)):
                values["rows"] = list(order)
        return values

    def advance(self, cache: Any, stream: Tensor) -> None:
        self.turn, self.rows = self.turn + 1, stream.shape[0]
        row = torch.arange(stream.shape[0], dtype=torch.float32).view(-1, 1, 1, 1)
        for i in range(len(cache.layers)):
            cache.update(
                row.expand(-1, 1, stream.shape[1], 1).contiguous(),
                row.expand(-1, 1, stream.shape[1], 1).contiguous(),
                i,
            )
