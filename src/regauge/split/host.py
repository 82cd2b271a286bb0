"""The server's side, without any network: frames in, bytes out.

A session's requests are numbered 1, 2, 3, ..., and the server's state is a function of those that it has answered. It keeps the number of the last
one, `done`, and the bytes of the reply to it:

    the same one again       the same bytes
    the next one             executed
    an earlier one           refused: "past"
    a later one              refused: "gap", with `done`; the client sends what lies between again

A request that is refused changes nothing and takes no number. FORWARD opens a pass, BACKWARD closes it and adds to the gradients. With its last
BACKWARD, or by STEP after it, a client says that its loss has been gone through; after so many of those the optimizer takes a step. A pass that is
open while another client's step changes the weights is run again, with the new ones, when its BACKWARD comes: nobody waits for anybody. FORWARD
with number 0 is inference: it leaves nothing behind, except for a cache that it names.

With `average` every session that trains has a copy of the backbone and an optimizer of its own, and all copies become their mean after so many steps
of each (SplitFed). Here they do wait: a session that has taken its steps is told "busy" until the others have taken theirs, so that what comes out
does not depend on who was quick. The first request that a session trains with makes it a member; the end of it, or a silence of `away` seconds while
others wait, takes it out, and the steps that it has taken in the round count by their number. Moments, waiting gradients and the schedule stay with
each session, and are not averaged.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from regauge.cutting import Crossing, cut
from regauge.errors import CheckpointError
from regauge.families import Boundary
from regauge.split import keeping
from regauge.split.frames import CODECS, Frame, FrameError, Kind, Limits, Value, decode, encode
from regauge.split.learning import PRECISIONS, Learner, autocast, mean, slopes
from regauge.split.optimizing import Training, TrainingError
from regauge.split.passing import CACHE, described, dtype_of, unpack
from regauge.split.quotas import Quotas, require_room

Tensor = torch.Tensor
PROTOCOL = 1
_GONE = 100_000  # sessions that are remembered after their end
_OWN = Limits(1 << 62, (1 << 32) - 1, 1 << 16, 64)  # of frames in a checkpoint: they were held against the limits when they came, as other bytes
_log = logging.getLogger("regauge.split")


@dataclass
class _Open:
    """A forward pass whose backward pass has not come yet. Its graph is for the weights that it was made with: a step makes it void."""

    request: Frame
    output: Tensor | None = None
    inputs: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class _Cache:
    """Keys and values of a text that is being generated. Its turns are numbered as a session's requests are."""

    value: Any
    turn: int
    reply: bytes
    check: int
    length: int = 0  # tokens, and bytes of the streams that they came in
    size: int = 0


@dataclass
class _Session:
    peer: str
    codec: str
    limits: Limits
    done: int = 0
    saved: int = 0
    check: int = 0
    reply: bytes = b""
    seen: float = 0.0
    learner: Learner | None = None  # of its own, where copies are averaged
    is_away: bool = False
    open: dict[int, _Open] = field(default_factory=dict)
    caches: OrderedDict[str, _Cache] = field(default_factory=OrderedDict)


class Host:
    """A backbone that answers. `model` is one of a family that has a cut (or `boundaries` are given); only its blocks are used, the rest may be on
    the meta device. With `training` it learns; without, it serves. With `folder` it is kept there every so many steps, and goes on from there.

    `key` is the id of the key that locked the backbone, if it is to be compared with the clients'. `seed` is what dropout is drawn from. `precision`
    is "bf16" or "fp16" for blocks that compute so over weights in float32. `compiler` names a backend of torch.compile, "inductor" as a rule; what
    cannot be compiled runs as it is, and the log says so. `average` is how many steps each session takes between two means, or 0 for one backbone of
    all. `quotas` say how much each client may ask.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        training: Training | None = None,
        *,
        folder: Path | str | None = None,
        every: int = 100,
        config: Mapping[str, Any] | None = None,
        boundaries: Sequence[Boundary] | None = None,
        limits: Limits | None = None,
        key: str = "",
        seed: int = 0,
        sessions: int = 64,
        graphs: int = 16,
        caches: int = 8,
        length: int = 8192,
        idle: float = 3600.0,
        precision: str = "",
        compiler: str = "",
        average: int = 0,
        away: float = 60.0,
        quotas: Quotas | None = None,
    ) -> None:
        self.cut = cut(model, config, boundaries=boundaries)
        self.about = described(self.cut, config)
        self.sizes = self._sizes(config)
        self.limits, self.key, self.seed = limits or Limits(), key, seed
        self.most, self.graphs, self.caches, self.length, self.idle = sessions, graphs, caches, length, idle
        self.dtype = dtype_of(self.cut)
        self.main = Learner(self.cut, training)
        if any(p.is_meta for p in self.main.names.values()):
            raise CheckpointError("the backbone's weights are on the meta device", hint="load them first")
        self.device = next(iter(self.main.names.values())).device
        self.training, self.precision, self.average, self.away = training, precision, average, away
        self._require_sense()
        self.quotas = quotas or Quotas()
        self.sessions: dict[str, _Session] = {}
        self.left: dict[str, tuple[int, dict[str, Tensor]]] = {}  # what those who are gone have done in this round
        self.gone: dict[str, None] = {}  # sessions that have ended: their requests are in the weights, and must not be taken again
        self.step = self.kept_at = self.failed_at = 0
        self.requests: dict[tuple[str, str], int] = {}  # by kind and result
        self.seconds = 0.0  # spent on them
        self.folder, self.every = None if folder is None else Path(folder), every
        self.lock = threading.Lock()
        self.compiled = compiler
        self._compile(self.main)
        if self.folder is not None:
            kept = keeping.load(self.folder)
            if kept is not None:
                self._restore(kept)

    def _sizes(self, config: Mapping[str, Any] | None) -> dict[str, int]:
        from regauge.errors import RegaugeError
        from regauge.sources import spec_of

        try:
            return dict(spec_of(self.cut.model, config=config).sizes)
        except RegaugeError:
            return {}

    def _require_sense(self) -> None:
        if self.precision not in PRECISIONS:
            raise TrainingError(f'there is no precision "{self.precision}" here', hint="choose from bf16, fp16")
        if self.precision and self.dtype != torch.float32:
            raise TrainingError(f"mixed precision is over weights in float32, and these are {str(self.dtype).removeprefix('torch.')}")
        if self.average < 0 or (self.average and self.main.optimizer is None):
            raise TrainingError("there is nothing to average where nothing is trained", hint="give the server an optimizer and a rate")

    def _compile(self, learner: Learner) -> None:
        if not self.compiled:
            return
        import torch._functorch.config as functorch

        functorch.donated_buffer = False  # a graph is gone through again where a request is
        for block in learner.blocks:
            block.compile(backend=self.compiled, dynamic=True)

    def _give_up_compiling(self, error: Exception) -> None:
        first = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        _log.warning("torch.compile does not work here, and the blocks run as they are: %s", first)
        self.compiled = ""
        for learner in self._learners():
            for block in learner.blocks:
                block._compiled_call_impl = None
            self._void(learner)

    def _learners(self) -> list[Learner]:
        return [self.main, *(s.learner for s in self.sessions.values() if s.learner is not None)]

    # Requests

    def answer(self, frame: Frame, peer: str = "") -> bytes:
        """The reply to a frame, always: what is wrong with it is a reply too. `peer` is who sent it, as far as the transport knows."""
        with self.lock:
            began, result = time.monotonic(), "ok"
            try:
                return self._tried(frame, peer)
            except FrameError as error:
                result = error.code
                found = frame.values.get("session")
                session = self.sessions.get(found) if isinstance(found, str) else None
                session = session if session is not None and session.peer == peer else None
                return refusal(error, frame, session.done if session else 0, session.saved if session else 0)
            finally:
                self.seconds += time.monotonic() - began
                counted = (frame.kind.name.lower(), result)
                self.requests[counted] = self.requests.get(counted, 0) + 1

    def _tried(self, frame: Frame, peer: str) -> bytes:
        try:
            self.quotas.take(peer, sum(t.numel() * t.element_size() for t in frame.tensors.values()))
            try:
                return self._answer(frame, peer)
            except RuntimeError as error:
                if not self.compiled or not _is_compilers(error):
                    raise
                self._give_up_compiling(error)
                return self._answer(frame, peer)
        except FrameError:
            raise
        except Exception as error:  # blocks raise whatever they run into; the server goes on
            _log.warning("request %d of a session failed: %s", frame.number, type(error).__name__)
            raise FrameError("failed", f"the server could not compute this: {type(error).__name__}: {str(error)[:200]}") from error

    def _answer(self, frame: Frame, peer: str) -> bytes:
        if frame.kind is Kind.HELLO:
            return self._hello(frame, peer)
        session = self._session(frame, peer)
        session.seen = time.monotonic()
        match frame.kind:
            case Kind.FORWARD if frame.number == 0:
                return self._predict(session, frame)
            case Kind.FORWARD | Kind.BACKWARD | Kind.STEP if frame.number > 0:
                return self._once(session, frame)
            case Kind.BYE:
                known = frame.values.get("done")
                if type(known) is int and known > session.done:
                    raise FrameError("gap", f"{known} requests were asked in this session, and {session.done} are answered here")
                self._leave(_text(frame, "session"))
                if self.folder is not None and (self.step > self.kept_at or self.average):
                    self._try_to_keep()  # whoever is gone sends nothing again
                return _bytes(Frame(Kind.BYE, frame.number))
            case _:
                raise FrameError("kind", f"a {frame.kind.name} of number {frame.number} is no request")

    def _hello(self, frame: Frame, peer: str) -> bytes:
        if frame.values.get("protocol") != PROTOCOL:
            raise FrameError(
                "version", f"the client speaks protocol {frame.values.get('protocol')!r:.20}, the server {PROTOCOL}", hint="update the older side"
            )
        for what, mine in self.about.items():
            if frame.values.get(what) != mine:
                other = str(frame.values.get(what))[:64]
                raise FrameError("model", f"the server's {what} is {mine}, the client's {other}", hint="both sides need the same model, of one dtype")
        key = frame.values.get("key")
        if key and self.key and key != self.key:
            raise FrameError("key", f"the backbone is locked with key {self.key}, the client has {key!r:.40}", hint="name the other key")
        codec, limits = frame.values.get("codec"), frame.values.get("limits")
        if codec not in CODECS:
            raise FrameError("codec", f"there is no codec {codec!r:.20}")
        if not (isinstance(limits, list) and len(limits) == 4 and all(type(n) is int and n > 0 for n in limits)):
            raise FrameError("limit", "the client does not say what it is ready to take")
        name = _text(frame, "session")
        if len(name) != 32 or not name.isascii() or not name.isalnum():
            raise FrameError("session", "a session's name is 32 letters and digits")
        if name in self.gone:
            raise FrameError("ended", "this session has ended, and what it asked for is done", hint="start a new one")
        session = self.sessions.get(name)
        if session is None:
            most = self.quotas.of(peer).sessions or (max(1, self.most // 4) if peer else 0)  # where clients are known, none takes all places
            self._make_room(peer, most)
            require_room(peer, sum(s.peer == peer for s in self.sessions.values()), most)
            session = self.sessions[name] = _Session(peer, codec, Limits(*limits))  # type: ignore[arg-type]
        elif session.peer != peer:
            raise FrameError("session", "the session is another client's")
        session.codec, session.limits, session.seen = codec, Limits(*limits), time.monotonic()  # type: ignore[arg-type]
        told: dict[str, Value] = {
            "protocol": PROTOCOL,
            "session": name,
            "done": session.done,
            "saved": session.saved,
            "keeps": self.folder is not None,
        }
        told |= {"limits": _listed(self.limits), "length": self.length, "trains": self.main.optimizer is not None, "step": self.step}
        told |= {"key": self.key, "precision": self.precision, "average": self.average}
        return _bytes(Frame(Kind.WELCOME, 0, told | (self.training.told() if self.training else {})))

    def _make_room(self, peer: str, own: int) -> None:
        """Let go of the session that was silent for longest, if there are too many: of this client's, or of all."""
        for mine, most in ((True, own), (False, self.most)):
            among = {n: s for n, s in self.sessions.items() if not mine or s.peer == peer}
            if not most or len(among) < most:
                continue
            name, oldest = min(among.items(), key=lambda item: item[1].seen)
            if time.monotonic() - oldest.seen >= self.idle:
                self._leave(name)
            elif not mine:
                raise FrameError("full", f"the server has {self.most} sessions, and takes no more", hint="end one, or come back later")

    def _session(self, frame: Frame, peer: str) -> _Session:
        session = self.sessions.get(_text(frame, "session"))
        if session is None or session.peer != peer:
            raise FrameError("session", "there is no such session of this client's", hint="say HELLO first")
        return session

    def _once(self, session: _Session, frame: Frame) -> bytes:
        """Execute a request if it is the next one."""
        n = frame.number
        if n == session.done:
            if frame.check != session.check:
                raise FrameError("conflict", f"request {n} was another one when it was answered")
            return session.reply
        if n < session.done:
            raise FrameError("past", f"request {n} was answered long ago: the last one is {session.done}")
        if n > session.done + 1:
            raise FrameError("gap", f"request {n} has come, and {session.done + 1} is the next one")
        joins = self._take_turn(session)
        try:
            match frame.kind:
                case Kind.FORWARD:
                    reply = self._forward(session, frame)
                case Kind.BACKWARD:
                    reply = self._backward(session, frame)
                case _:
                    reply = self._reply(session, Kind.ACKNOWLEDGE, frame, {})
                    self._count(session)
        except BaseException:
            if joins:
                session.learner = None  # a request that is refused changes nothing
            raise
        session.done, session.check, session.reply = n, frame.check, reply
        if self.folder is None:
            session.saved = n  # nothing outlives this server, so that there is nothing to send again
        elif joins or self.step - max(self.kept_at, self.failed_at) >= self.every:
            self._try_to_keep()  # who is in a round must outlive the server, or rounds would end elsewhere when requests are sent again
        return reply

    def _forward(self, session: _Session, frame: Frame) -> bytes:
        released = frame.values.get("release", [])
        if not isinstance(released, list) or not all(type(n) is int for n in released):
            raise FrameError("layout", '"release" is not a list of numbers')
        still = {n: o for n, o in session.open.items() if n not in released}
        if len(still) >= self.graphs:
            raise FrameError("graphs", f"{len(still)} forward passes wait for their backward pass", hint="call backward(), or use torch.no_grad()")
        passed = self._opened(session, frame)
        assert passed.output is not None
        reply = self._reply(session, Kind.OUTPUT, frame, {"stream": passed.output})
        session.open = still | {frame.number: passed}
        return reply

    def _opened(self, session: _Session, frame: Frame) -> _Open:
        crossing = self._crossing(session, frame)
        wanted = self._wanted(frame, crossing)
        with torch.enable_grad():  # in one process, the client's function is called without
            z = self._run(crossing.replaced(**wanted), frame, f"{frame.values['session']}/{frame.number}")
        if not z.requires_grad:
            raise FrameError("graph", "nothing here is trained, and no gradient is wanted", hint="use torch.no_grad()")
        return _Open(frame, z, wanted)

    def _wanted(self, frame: Frame, crossing: Crossing) -> dict[str, Tensor]:
        """The inputs whose gradients the client wants, as leaves of a graph."""
        names = frame.values.get("wants", [])
        if not isinstance(names, list):
            raise FrameError("layout", '"wants" is not a list')
        out: dict[str, Tensor] = {}
        for name in names:
            found = crossing.inputs.get(name) if isinstance(name, str) else None
            if not isinstance(name, str) or not isinstance(found, Tensor) or not found.is_floating_point():
                raise FrameError("layout", f"there is no gradient of {name!r:.64}")
            out[name] = found.detach().requires_grad_()
        return out

    def _run(self, crossing: Crossing, frame: Frame, label: str) -> Tensor:
        for block in crossing.blocks:
            block.train(frame.values.get("training") is True)
        with _drawing(f"{self.seed}/{label}"), autocast(self.device, self.precision):
            z = crossing.run()
        if not isinstance(z, Tensor) or z.dim() != crossing.stream.dim():
            raise FrameError("failed", "the blocks did not return a stream")
        return z.to(crossing.stream.dtype)

    def _learner(self, session: _Session) -> Learner:
        return session.learner or self.main

    def _crossing(self, session: _Session, frame: Frame) -> Crossing:
        return unpack(frame, self._learner(session).cut, self.sizes, self.dtype, self.device, self.length)

    def _backward(self, session: _Session, frame: Frame) -> bytes:
        of = frame.values.get("of")
        passed = session.open.get(of) if type(of) is int else None
        if passed is None:
            raise FrameError("graph", f"no forward pass {of!r:.20} waits for its backward pass")
        if passed.output is None:
            passed = self._opened(session, passed.request)
        assert passed.output is not None
        slope = frame.tensors.get("stream")
        if slope is None or frame.tensors.keys() != {"stream"}:
            raise FrameError("layout", 'a backward pass has one tensor, "stream"')
        if slope.shape != passed.output.shape or slope.dtype != passed.output.dtype:
            raise FrameError("shape", f"the gradient has shape {list(slope.shape)}, the output {list(passed.output.shape)}, or another dtype")
        if not bool(torch.isfinite(slope).all()):
            raise FrameError("nonfinite", "the gradient holds NaN or Inf")
        trained = self._learner(session).trained
        leaves = [*passed.inputs.values(), *trained.values()]
        # Nothing is added to the parameters before all of it is there and finite: a failed request changes nothing.
        found = slopes(passed.output, leaves, slope.to(self.device), self.precision)
        sums = {
            n: g if p.grad is None else p.grad + g for (n, p), g in zip(trained.items(), found[len(passed.inputs) :], strict=True) if g is not None
        }
        if not all(_is_usable(g) for g in (*found[: len(passed.inputs)], *sums.values()) if g is not None):
            raise FrameError("nonfinite", "the gradients of the backbone hold NaN or Inf, or numbers whose squares are")
        back = {name: torch.zeros_like(t) if g is None else g for (name, t), g in zip(passed.inputs.items(), found, strict=False)}
        reply = self._reply(session, Kind.GRADIENT, frame, back)
        del session.open[of]  # type: ignore[arg-type]
        for name, total in sums.items():
            trained[name].grad = total
        if frame.values.get("step") is True:
            self._count(session)
        return reply

    def _count(self, session: _Session) -> None:
        """A loss has been gone through. After enough of them, a step is taken, and after enough of those, a mean."""
        learner = self._learner(session)
        if learner.count():
            self.step += 1
            self._void(learner)
            self._close_round()

    def _void(self, learner: Learner) -> None:
        """The weights have changed: passes that are open are run again when their gradients come."""
        for session in self.sessions.values():
            if self._learner(session) is learner:
                for passed in session.open.values():
                    passed.output, passed.inputs = None, {}

    # Rounds

    def _take_turn(self, session: _Session) -> bool:
        """Make a session a member if it is none, and let it wait if it has taken its steps of the round. Is it new?"""
        if not self.average:
            return False
        session.is_away = False
        if session.learner is None and len(self.left) < self.most:
            session.learner = self.main.copy()
            self._compile(session.learner)
            return True
        if session.learner is None or session.learner.since >= self.average:
            late = [s for s in self._members() if s.learner is not None and s.learner.since < self.average]
            for other in late:
                other.is_away = time.monotonic() - other.seen > self.away
            if not any(other.is_away for other in late) or not self._close_round():
                raise FrameError("busy", f"the round ends when {len(late)} more have taken {self.average} steps", hint="wait for them")
            if self.folder is not None:
                self._try_to_keep()
        return False

    def _members(self) -> list[_Session]:
        return [s for s in self.sessions.values() if s.learner is not None and not s.is_away]

    def _leave(self, name: str) -> None:
        """Forget a session. What it has done in this round stays in the round."""
        session = self.sessions.pop(name)
        if session.done:
            self.gone[name] = None
            if len(self.gone) > _GONE:
                del self.gone[next(iter(self.gone))]
        if session.learner is not None and session.learner.since:
            self.left[name] = session.learner.since, {n: p.detach().clone() for n, p in session.learner.trained.items()}
        self._close_round()

    def _round(self) -> list[tuple[int, Mapping[str, Tensor]]]:
        """What was done since the last mean, in the order of the sessions' names, so that it is added up in one order always."""
        held: dict[str, tuple[int, Mapping[str, Tensor]]] = dict(self.left)
        held |= {n: (s.learner.since, s.learner.trained) for n, s in self.sessions.items() if s.learner is not None and s.learner.since}
        return [held[name] for name in sorted(held)]

    def _close_round(self) -> bool:
        """If all members have taken their steps, all copies become the mean."""
        if not self.average or any(s.learner.since < self.average for s in self._members() if s.learner is not None):
            return False
        parts = self._round()
        if not parts:
            return False
        found = mean(parts)
        for learner in self._learners():
            with torch.no_grad():
                for name, p in learner.trained.items():
                    p.copy_(found[name])
            learner.since = 0
            self._void(learner)
        self.left = {}
        return True

    def _predict(self, session: _Session, frame: Frame) -> bytes:
        name, turn = frame.values.get("cache"), frame.values.get("turn")
        if name is None:
            with torch.no_grad():
                return self._reply(session, Kind.OUTPUT, frame, {"stream": self._run(self._crossing(session, frame), frame, "predict")})
        if not isinstance(name, str) or len(name) > 64 or type(turn) is not int or turn < 1:
            raise FrameError("layout", "a cache has a name, and its turns are 1, 2, 3, ...")
        cache = session.caches.get(name)
        if cache is not None and cache.turn == turn and cache.check == frame.check:
            return cache.reply
        if turn != (cache.turn if cache else 0) + 1:
            raise FrameError("cache", "the server has no such cache", hint="it was dropped, or the server was started again: generate anew")
        cache = cache or _Cache(self._new_cache(), 0, b"", 0)
        crossing = self._crossing(session, frame)
        stream, order = crossing.stream, frame.values.get("rows")
        if order is not None and not (isinstance(order, list) and len(order) == len(stream) and all(type(i) is int and i >= 0 for i in order)):
            raise FrameError("layout", '"rows" is not a list of numbers, one for each row of the stream')
        length, size = cache.length + stream.shape[1], cache.size + stream.numel() * stream.element_size()
        if length > self.length or size > self.limits.payload:
            raise FrameError("limit", f"a text has at most {self.length} tokens, and all of its streams {self.limits.payload} bytes")
        try:
            if order is not None:
                cache.value.reorder_cache(torch.tensor(order, device=self.device))
            with torch.no_grad():
                z = self._run(crossing.replaced(**{CACHE: cache.value}), frame, "predict")
            cache.reply = self._reply(session, Kind.OUTPUT, frame, {"stream": z})
        except BaseException:
            session.caches.pop(name, None)  # some layers may have taken this turn, and it must not be taken twice
            raise
        cache.length, cache.size = length, size
        cache.turn, cache.check = turn, frame.check
        session.caches[name] = cache
        session.caches.move_to_end(name)
        while len(session.caches) > self.caches:
            session.caches.popitem(last=False)
        return cache.reply

    def _new_cache(self) -> Any:
        try:
            from transformers import DynamicCache
        except ImportError as error:
            raise FrameError("cache", "the server has no transformers library, and so no caches", hint="generate with use_cache=False") from error
        config = getattr(self.cut.model, "config", None)
        if config is None:
            raise FrameError("cache", "this model has no caches")
        return DynamicCache(config=config)

    def _reply(self, session: _Session, kind: Kind, frame: Frame, tensors: Mapping[str, Tensor]) -> bytes:
        size = sum(t.numel() * t.element_size() for t in tensors.values())
        if size > session.limits.payload:
            raise FrameError("limit", f"the reply has {size} bytes, and the client takes {session.limits.payload}")
        values: dict[str, Value] = {"session": frame.values["session"], "saved": session.saved}
        if "ticket" in frame.values:
            values["ticket"] = frame.values["ticket"]
        return _bytes(Frame(kind, frame.number, values, tensors), session.codec)

    # What is kept

    def keep(self) -> None:
        """Write a checkpoint now, unless there is no folder."""
        with self.lock:
            if self.folder is not None:
                self._keep()

    def _try_to_keep(self) -> None:
        """Write a checkpoint behind a request that is done. Where that fails the request stays done: clients are not told that it is saved, and keep
        what they need to send it again. The next try is after as many steps again."""
        try:
            self._keep()
        except CheckpointError as error:
            self.failed_at = self.step
            _log.warning("no checkpoint at step %d, and clients keep their journals: %s", self.step, error)

    def _keep(self) -> None:
        assert self.folder is not None
        sessions = {
            name: {"peer": s.peer, "codec": s.codec, "limits": _listed(s.limits), "done": s.done, "check": s.check, "away": s.is_away}
            for name, s in self.sessions.items()
        }
        frames = {f"{name}/reply": s.reply for name, s in self.sessions.items() if s.reply}
        frames |= {f"{name}/{n}": _bytes(o.request) for name, s in self.sessions.items() for n, o in s.open.items()}
        digest = str(self.about["digest"])
        copies = {name: _copied(s.learner) for name, s in self.sessions.items() if s.learner is not None}
        keeping.save(self.folder, keeping.Kept(digest, self.step, _copied(self.main), copies, dict(self.left), sessions, frames, tuple(self.gone)))
        self.kept_at = self.step
        for session in self.sessions.values():
            session.saved = session.done

    def _restore(self, kept: keeping.Kept) -> None:
        if kept.digest != self.about["digest"]:
            raise CheckpointError(f"{self.folder} holds another model's training", hint="name another folder")
        if (kept.copies or kept.left) and not self.average:
            raise CheckpointError(
                f"{self.folder} holds a training of copies that are averaged", hint="go on with average set, or name another folder"
            )
        self._give(self.main, kept.main)
        self.step = self.kept_at = kept.step
        self.left = {name: (n, dict(weights)) for name, (n, weights) in kept.left.items()}
        self.gone = dict.fromkeys(kept.gone)
        for name, s in kept.sessions.items():
            reply = kept.frames.get(f"{name}/reply", b"")
            made = _Session(s["peer"], s["codec"], Limits(*s["limits"]), s["done"], s["done"], s["check"], reply, time.monotonic())
            made.is_away = bool(s.get("away"))
            self.sessions[name] = made
            if name in kept.copies:
                made.learner = self.main.copy()
                self._give(made.learner, kept.copies[name])
                self._compile(made.learner)
        for place, data in kept.frames.items():
            name, _, n = place.partition("/")
            if n.isdigit():
                self.sessions[name].open[int(n)] = _Open(decode(data, _OWN))

    def _give(self, learner: Learner, kept: keeping.Copy) -> None:
        learner.restore(kept.weights, kept.optimizer, kept.gradients, self.folder)
        learner.step, learner.waiting, learner.since = kept.step, kept.waiting, kept.since

    def backbone(self) -> dict[str, Tensor]:
        """The weights as they are now, by their names in the model, copied. Where copies are averaged, the mean of the round so far."""
        with self.lock:
            parts = self._round()
            return {n: t.detach().clone() for n, t in (self.main.state() | (mean(parts) if parts else {})).items()}

    @property
    def blocks(self) -> tuple[torch.nn.Module, ...]:
        return self.main.blocks


def _copied(learner: Learner) -> keeping.Copy:
    return keeping.Copy(learner.step, learner.waiting, learner.since, learner.state(), learner.moments(), learner.gradients())


def _is_usable(gradient: Tensor) -> bool:
    """Is it finite, and its square too? Otherwise one request would leave an infinite moment with an optimizer of all, for ever."""
    if not gradient.numel():
        return True
    largest = float(gradient.abs().max())
    return largest * largest <= max(torch.finfo(gradient.dtype).max, torch.finfo(torch.float32).max)


def _is_compilers(error: RuntimeError) -> bool:
    from torch._dynamo.exc import TorchDynamoException

    return isinstance(error, TorchDynamoException)


def refusal(error: FrameError, frame: Frame | None = None, done: int = 0, saved: int = 0) -> bytes:
    """What is wrong, as bytes for the other side."""
    values: dict[str, Value] = {"code": error.code, "message": str(error)[:500], "hint": error.hint, "done": done, "saved": saved}
    if frame is not None:
        values["check"] = frame.check
    return _bytes(Frame(Kind.ERROR, 0 if frame is None else frame.number, values))


def _bytes(frame: Frame, codec: str = "") -> bytes:
    return b"".join(encode(frame, codec))


def _listed(limits: Limits) -> list[Value]:
    return [limits.payload, limits.table, limits.tensors, limits.axes]


def _text(frame: Frame, name: str) -> str:
    found = frame.values.get(name)
    if not isinstance(found, str):
        raise FrameError(name, f'the frame says no "{name}"')
    return found


@contextmanager
def _drawing(label: str) -> Iterator[None]:
    """Random numbers that are a function of the label, whatever was drawn before. The process's own stay as they are."""
    seed = int.from_bytes(hashlib.sha256(label.encode()).digest()[:8], "little") >> 1
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield
