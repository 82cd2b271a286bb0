"""The server's side, without any network: frames in, bytes out.

A session's requests are numbered 1, 2, 3, ..., and the server's state is a function of those that
it has answered. It keeps the number of the last one, `done`, and the bytes of the reply to it:

    the same one again       the same bytes
    the next one             executed
    an earlier one           refused: "past"
    a later one              refused: "gap", with `done`; the client sends what lies between again

A request that is refused changes nothing and takes no number. FORWARD opens a pass, BACKWARD closes
it and adds to the gradients. With its last BACKWARD, or by STEP after it, a client says that its
loss has been gone through; after so many of those the optimizer takes a step. A pass that is open
while another client's step changes the weights is run again, with the new ones, when its BACKWARD
comes: nobody waits for anybody. FORWARD with number 0 is inference: it leaves nothing behind,
except for a cache that it names.

`sessions` has what is known of a client, `running` the passes through the blocks, `generating`
those of texts, `rounds` the copies of the backbone where each session has its own and they are
averaged, `keeping` the file that outlives the server.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from regauge.errors import CheckpointError
from regauge.models.cut import cut
from regauge.models.families import Boundary
from regauge.split.master_weights import StepError
from regauge.split.protocol.frames import Frame, FrameError, Kind, Limits, Value, nbytes
from regauge.split.protocol.messages import PROTOCOL, describe_model
from regauge.split.protocol.replies import encode_error, encode_reply, frame_bytes
from regauge.split.server import checkpoint
from regauge.split.server.backbone import TrainableBackbone
from regauge.split.server.costs import Estimator
from regauge.split.server.executor import Executor
from regauge.split.server.generation import predict
from regauge.split.server.memory import FRAME_SHARE, Budget, Cost, charges
from regauge.split.server.optimizer_config import OptimizerConfig
from regauge.split.server.quotas import Quotas
from regauge.split.server.rounds import Rounds
from regauge.split.server.sessions import (
    Cache,
    Session,
    find_session,
    parse_hello,
    restore_sessions,
    session_name,
    sessions_to_evict,
)

Tensor = torch.Tensor
_MAX_ENDED_SESSIONS = 100_000  # sessions that are remembered after their end
_STORED_LIMITS = Limits(
    1 << 62, (1 << 32) - 1, 1 << 16, 64
)  # of frames in a checkpoint: they were held against the limits when they came, as other bytes
_log = logging.getLogger("regauge.split")


class Host:
    """A backbone that answers. `model` is one of a family that has a cut (or `boundaries` are
    given); only its blocks are used, the rest may be on the meta device. With `training` it learns;
    without, it serves. With `folder` it is kept there every so many steps, and goes on from there.

    `key` is the id of the key that locked the backbone, if it is to be compared with the clients'.
    `seed` is what dropout is drawn from. `precision` is "bf16" or "fp16" for blocks that compute so
    over weights in float32. `compiler` names a backend of torch.compile, "inductor" as a rule; what
    cannot be compiled runs as it is, and the log says so. `average` is how many steps each session
    takes between two means, or 0 for one backbone of all. `quotas` say how much each client may
    ask. `memory` and `client_memory` are bytes that all clients, and each of them, may hold;
    without them the budget is half of what is available (`memory.Budget`).
    """

    def __init__(
        self,
        model: torch.nn.Module,
        training: OptimizerConfig | None = None,
        *,
        folder: Path | str | None = None,
        save_every: int = 100,
        config: Mapping[str, Any] | None = None,
        boundaries: Sequence[Boundary] | None = None,
        limits: Limits | None = None,
        key: str = "",
        seed: int = 0,
        max_sessions: int = 64,
        max_open_passes: int = 16,
        max_caches: int = 8,
        max_length: int = 8192,
        idle: float = 3600.0,
        precision: str = "",
        compiler: str = "",
        average: int = 0,
        away: float = 60.0,
        quotas: Quotas | None = None,
        memory: int | None = None,
        client_memory: int | None = None,
    ) -> None:
        where = cut(model, config, boundaries=boundaries)
        self.model_description = describe_model(where, config)
        self.key, self.training = key, training
        self.max_sessions, self.max_open_passes, self.max_caches, self.idle = (
            max_sessions,
            max_open_passes,
            max_caches,
            idle,
        )
        self.quotas = quotas or Quotas()
        self.main = TrainableBackbone(where, training)
        self.sessions: dict[str, Session] = {}
        self.ended_sessions: dict[
            str, str
            # sessions that have ended, and whose: their requests are in the weights, and must not
            # be taken again
        ] = {}
        self.executor = Executor(
            self.main,
            config,
            seed=seed,
            max_length=max_length,
            precision=precision,
            compiler=compiler,
        )
        if training is not None:
            self.main.require_finite()
        self.budget = Budget.with_defaults(
            memory,
            client_memory,
            device=self.executor.device,
            reserved=self.main.nbytes(extra_gradients=2, snapshot=True),
        )
        self.limits = limits or Limits(
            payload=min(Limits.payload, self.budget.client // FRAME_SHARE)
        )
        self.costs, self.copy_bytes = Estimator(self.main, self.executor), self.main.nbytes()
        self.rounds = Rounds(
            self.main,
            self.sessions,
            self.executor.compile,
            average=average,
            away=away,
            max_sessions=max_sessions,
        )
        self.step = self.saved_step = self.failed_save_step = 0
        self.optimizer_name = ""  # the optimizer of the checkpoint that it goes on from
        self.requests: dict[tuple[str, str], int] = {}  # by kind and result
        self.compute_seconds = 0.0  # spent on them
        self.folder, self.save_every = None if folder is None else Path(folder), save_every
        self.lock = threading.Lock()
        self.clients: frozenset[str] | None = (
            None  # those that may ask; None is everyone whom the transport lets in
        )
        if self.folder is not None:
            kept = checkpoint.load(self.folder)
            if kept is not None:
                self._restore(kept)

    # Requests

    def answer(self, frame: Frame, peer: str = "") -> bytes:
        """The reply to a frame, always: what is wrong with it is a reply too. `peer` is who sent
        it, as far as the transport knows.
        """
        with self.lock:
            began, result = time.monotonic(), "ok"
            try:
                return self._execute(frame, peer)
            except FrameError as error:
                result = error.code
                found = frame.values.get("session")
                session = self.sessions.get(found) if isinstance(found, str) else None
                session = session if session is not None and session.peer == peer else None
                return encode_error(
                    error, frame, session.done if session else 0, session.saved if session else 0
                )
            finally:
                self.compute_seconds += time.monotonic() - began
                counted = (frame.kind.name.lower(), result)
                self.requests[counted] = self.requests.get(counted, 0) + 1

    def _execute(self, frame: Frame, peer: str) -> bytes:
        try:
            self.quotas.take(peer, nbytes(frame))
            try:
                return self._dispatch(frame, peer)
            except RuntimeError as error:
                if not self.executor.is_compiler_error(error):
                    raise
                self.executor.disable_compiler(self.rounds.backbones(), error)
                for learner in self.rounds.backbones():
                    self.rounds.invalidate_passes(learner)
                return self._dispatch(frame, peer)
        except FrameError:
            raise
        except Exception as error:  # blocks raise whatever they run into; the server goes on
            _log.warning("request %d of a session failed: %s", frame.number, type(error).__name__)
            raise FrameError(
                "failed",
                f"the server could not compute this: {type(error).__name__}: {str(error)[:200]}",
            ) from error

    def require_listed(self, peer: str) -> None:
        """Refuse a client that is not, or no longer, on the list."""
        if self.clients is not None and peer not in self.clients:
            raise FrameError(
                "client",
                "this server does not know you",
                hint="ask its owner to list your certificate's name",
            )

    def end_unlisted(self) -> list[str]:
        """End the sessions of clients that are not on the list, and return the clients' names.

        What they have trained in a round that is not averaged yet is dropped. A checkpoint is
        written, so that a restart does not bring the sessions back.
        """
        with self.lock:
            ended = {
                n: s
                for n, s in self.sessions.items()
                if self.clients is not None and s.peer not in self.clients
            }
            for name, session in ended.items():
                session.backbone = None
                self._end_session(name)
            if ended and self.folder is not None:
                self._try_save()
            return sorted({s.peer for s in ended.values()})

    def _dispatch(self, frame: Frame, peer: str) -> bytes:
        self.require_listed(peer)
        if frame.kind is Kind.HELLO:
            return self._hello(frame, peer)
        session = find_session(self.sessions, frame, peer)
        session.last_seen = time.monotonic()
        match frame.kind:
            case Kind.FORWARD if frame.number == 0:
                learner = self.rounds.backbone_of(session)
                return predict(
                    self.executor,
                    learner,
                    session,
                    frame,
                    self._admit_turn,
                    max_caches=self.max_caches,
                    max_bytes=self.limits.payload,
                )
            case Kind.FORWARD | Kind.BACKWARD | Kind.STEP if frame.number > 0:
                return self._execute_next(session, frame)
            case Kind.BYE:
                known = frame.values.get("done")
                if type(known) is int and known > session.done:
                    raise FrameError(
                        "gap",
                        f"{known} requests were asked in this session, and {session.done} are "
                        "answered here",
                    )
                self._end_session(session_name(frame))
                if self.folder is not None and (self.step > self.saved_step or self.rounds.average):
                    self._try_save()  # whoever is gone sends nothing again
                return frame_bytes(Frame(Kind.BYE, frame.number))
            case _:
                raise FrameError(
                    "kind", f"a {frame.kind.name} of number {frame.number} is no request"
                )

    def _hello(self, frame: Frame, peer: str) -> bytes:
        name, codec, limits = parse_hello(frame, self.model_description, self.key)
        if name in self.ended_sessions:
            raise FrameError(
                "ended",
                "this session has ended, and what it asked for is done",
                hint="start a new one",
            )
        session = self.sessions.get(name)
        if session is None:
            most = self.quotas.for_client(peer).sessions or (
                max(1, self.max_sessions // 4) if peer else 0
            )  # where clients are known, none takes all places
            for one in sessions_to_evict(self.sessions, peer, most, self.max_sessions, self.idle):
                self._end_session(one)
            session = self.sessions[name] = Session(peer, codec, limits)
        elif session.peer != peer:
            raise FrameError("session", "the session is another client's")
        session.codec, session.limits, session.last_seen = codec, limits, time.monotonic()
        told: dict[str, Value] = {
            "protocol": PROTOCOL,
            "session": name,
            "done": session.done,
            "saved": session.saved,
            "keeps": self.folder is not None,
        }
        told |= {
            "limits": _limits_to_list(self.limits),
            "length": self.executor.max_length,
            "trains": self.main.optimizer is not None,
            "step": self.step,
        }
        told |= {
            "key": self.key,
            "precision": self.executor.precision,
            "average": self.rounds.average,
        }
        return frame_bytes(
            Frame(Kind.WELCOME, 0, told | (self.training.to_dict() if self.training else {}))
        )

    def _execute_next(self, session: Session, frame: Frame) -> bytes:
        """Execute a request if it is the next one."""
        n = frame.number
        if n == session.done:
            if frame.check != session.check:
                raise FrameError("conflict", f"request {n} was another one when it was answered")
            return session.reply
        if n < session.done:
            raise FrameError(
                "past", f"request {n} was answered long ago: the last one is {session.done}"
            )
        if n > session.done + 1:
            raise FrameError("gap", f"request {n} has come, and {session.done + 1} is the next one")
        if self.rounds.needs_copy(session):
            self._admit(session, Cost(self.copy_bytes), "a copy of the backbone for this session")
        joins = self.rounds.join(session)
        if self.rounds.require_turn(session) and self.folder is not None:
            self._try_save()
        learner = self.rounds.backbone_of(session)
        waited = bool(learner.gradients())
        try:
            match frame.kind:
                case Kind.FORWARD:
                    answer = self._forward(session, frame)
                case Kind.BACKWARD:
                    answer = self._backward(session, frame)
                case _:
                    answer = encode_reply(session, Kind.ACKNOWLEDGE, frame, {})
                    self._count_loss(session)
        except BaseException:
            if joins:
                session.backbone = None  # a request that is refused changes nothing
            if waited and not learner.gradients() and self.folder is not None:
                # a step was undone: gradients of earlier requests are gone, and must not come back
                # with a restart
                self._try_save()
            raise
        session.done, session.check, session.reply = n, frame.check, answer
        if self.folder is None:
            session.saved = (
                n  # nothing outlives this server, so that there is nothing to send again
            )
        elif joins or self.step - max(self.saved_step, self.failed_save_step) >= self.save_every:
            # who is in a round must outlive the server, or rounds would end elsewhere when requests
            # are sent again
            self._try_save()
        return answer

    def _forward(self, session: Session, frame: Frame) -> bytes:
        released = frame.values.get("release", [])
        if not isinstance(released, list) or not all(type(n) is int for n in released):
            raise FrameError("layout", '"release" is not a list of numbers')
        still = {n: o for n, o in session.pending.items() if n not in released}
        if len(still) >= self.max_open_passes:
            raise FrameError(
                "graphs",
                f"{len(still)} forward passes wait for their backward pass",
                hint="call backward(), or use torch.no_grad()",
            )
        cost = self.costs.estimate_pass(frame, learns=True)
        self._admit(session, cost, "this pass", released=released)
        passed = self.executor.forward(self.rounds.backbone_of(session), frame)
        passed.cost = cost
        assert passed.output is not None
        answer = encode_reply(session, Kind.OUTPUT, frame, {"stream": passed.output})
        session.pending = still | {frame.number: passed}
        return answer

    def _backward(self, session: Session, frame: Frame) -> bytes:
        of = frame.values.get("of")
        passed = session.pending.get(of) if type(of) is int else None
        if passed is None:
            raise FrameError("graph", f"no forward pass {of!r:.20} waits for its backward pass")
        if frame.tensors.keys() != {"stream"}:
            raise FrameError("layout", 'a backward pass has one tensor, "stream"')
        if passed.cost is None:
            cost = self.costs.estimate_pass(passed.request, learns=True)
            self._admit(session, cost, "this pass")
            passed.cost = cost
        if nbytes(frame) > nbytes(
            passed.request
        ):  # room for a gradient of the stream's size was made with the pass
            self._admit(session, Cost(nbytes(frame)), "this gradient")
        slope = frame.tensors["stream"]
        learner = self.rounds.backbone_of(session)
        back, sums = self.executor.backward(learner, passed, slope)
        answer = encode_reply(session, Kind.GRADIENT, frame, back)
        # Nothing is added to the parameters before the reply is there: a failed request changes
        # nothing.
        before = session.has_gradients
        for name, total in sums.items():
            learner.masters[name].grad = total
        session.has_gradients = True
        try:
            if frame.values.get("step") is True:
                self._count_loss(session)
        except BaseException:
            session.has_gradients = before
            raise
        del session.pending[of]  # type: ignore[arg-type]
        return answer

    def _admit(
        self, session: Session, cost: Cost, what: str, released: Sequence[Value] = ()
    ) -> None:
        """Refuse a cost that the budget has no room for, beside what clients hold but for this
        session's released passes.
        """
        self.budget.require(session.peer, cost, self.charges(session, released), what)

    def _admit_turn(self, session: Session, frame: Frame, cache: Cache | None) -> int:
        """Admit a prediction, or the next turn of a generated text; returns the bytes that its
        cache will hold.
        """
        if cache is None:
            self._admit(session, self.costs.estimate_pass(frame, learns=False), "this pass")
            return 0
        cost = self.costs.estimate_turn(frame, cache.length)
        self._admit(
            session,
            Cost(max(0, cost.held - cache.held), cost.working),
            "this turn of a generated text",
        )
        return cost.held

    def charges(
        self, session: Session | None = None, released: Sequence[Value] = ()
    ) -> Iterator[tuple[str, Cost]]:
        """Yield what clients hold, by client, as if a session had released these passes already."""
        return charges(
            self.sessions,
            copy_bytes=self.copy_bytes,
            departed=len(self.rounds.departed),
            exclude=(session, released),
        )

    def _count_loss(self, session: Session) -> None:
        """A loss has been gone through. After enough of them, a step is taken, and after enough of
        those, a mean.
        """
        if not session.has_gradients:
            raise FrameError(
                "empty",
                "a step must follow a backward pass, got none since the last one",
                hint="call backward() first",
            )
        learner = self.rounds.backbone_of(session)
        try:
            stepped = learner.count_loss()
        except StepError as error:
            _log.warning("a step was undone, and its gradients dropped: %s", error)
            raise FrameError("nonfinite", str(error), hint=error.hint) from error
        session.has_gradients = False
        if stepped:
            self.step += 1
            self.rounds.invalidate_passes(learner)
            self.rounds.try_close()

    def _end_session(self, name: str) -> None:
        """Forget a session, except that it was there."""
        session = self.sessions.pop(name)
        if session.done:
            self.ended_sessions[name] = session.peer
            if (
                len(self.ended_sessions) > _MAX_ENDED_SESSIONS
            ):  # of the client that has the most: nobody makes the server forget another's
                most = Counter(self.ended_sessions.values()).most_common(1)[0][0]
                del self.ended_sessions[
                    next(n for n, peer in self.ended_sessions.items() if peer == most)
                ]
        self.rounds.leave(name, session)

    # What is kept

    def save(self) -> None:
        """Write a checkpoint now, unless there is no folder."""
        with self.lock:
            if self.folder is not None:
                self._keep()

    def _try_save(self) -> None:
        """Write a checkpoint behind a request that is done. Where that fails the request stays
        done: clients are not told that it is saved, and keep what they need to send it again. The
        next try is after as many steps again.
        """
        try:
            self._keep()
        except CheckpointError as error:
            self.failed_save_step = self.step
            _log.warning(
                "no checkpoint at step %d, and clients keep their journals: %s", self.step, error
            )

    def _keep(self) -> None:
        assert self.folder is not None
        sessions = {name: s.to_dict() for name, s in self.sessions.items()}
        frames = {f"{name}/reply": s.reply for name, s in self.sessions.items() if s.reply}
        frames |= {
            f"{name}/{n}": frame_bytes(o.request)
            for name, s in self.sessions.items()
            for n, o in s.pending.items()
        }
        digest = str(self.model_description["digest"])
        copies = {
            name: s.backbone.training_state()
            for name, s in self.sessions.items()
            if s.backbone is not None
        }
        left, trainer = (
            dict(self.rounds.departed),
            self.training.optimizer if self.training else self.optimizer_name,
        )
        checkpoint.save(
            self.folder,
            checkpoint.SplitCheckpoint(
                digest,
                self.step,
                self.main.training_state(),
                copies,
                left,
                sessions,
                frames,
                self.ended_sessions,
                trainer,
            ),
        )
        self.saved_step = self.step
        for session in self.sessions.values():
            session.saved = session.done

    def _restore(self, kept: checkpoint.SplitCheckpoint) -> None:
        if kept.digest != self.model_description["digest"]:
            raise CheckpointError(
                f"{self.folder} holds another model's training", hint="name another folder"
            )
        if (kept.copies or kept.departed) and not self.rounds.average:
            raise CheckpointError(
                f"{self.folder} holds a training of copies that are averaged",
                hint="go on with average set, or name another folder",
            )
        if self.training is not None and kept.optimizer_name not in ("", self.training.optimizer):
            raise CheckpointError(
                f"{self.folder} holds a training with {kept.optimizer_name}, and this one is with "
                f"{self.training.optimizer}",
                hint=f"go on with --optimizer {kept.optimizer_name}, or name another folder",
            )
        try:
            sessions = restore_sessions(kept.sessions, kept.frames, _STORED_LIMITS)
            if not kept.copies.keys() <= sessions.keys():
                raise ValueError("a copy of the backbone belongs to no session")
            for _, weights in kept.departed.values():
                self.main.require_valid_weights(weights)
        except (ValueError, FrameError) as error:
            raise CheckpointError(
                f"{self.folder} is damaged: {error}", hint="restore it from a copy"
            ) from error
        self.main.restore(kept.main, self.folder)
        self.step, self.saved_step, self.optimizer_name = kept.step, kept.step, kept.optimizer_name
        self.rounds.departed = {
            name: (n, dict(weights)) for name, (n, weights) in kept.departed.items()
        }
        self.ended_sessions = dict(kept.ended_sessions)
        self.sessions.update(sessions)  # the rounds look at the same dict
        for name, copy in kept.copies.items():
            learner = sessions[name].backbone = self.rounds.copy_main()
            learner.restore(copy, self.folder)

    def backbone(self) -> dict[str, Tensor]:
        """The weights as they are now, by their names in the model, copied. Where copies are
        averaged, the mean of the round so far.
        """
        with self.lock:
            self.main.require_finite()
            state = self.main.state()
            return {
                n: t.detach().to(state[n].dtype, copy=True)
                for n, t in (state | self.rounds.mean()).items()
            }

    @property
    def blocks(self) -> tuple[torch.nn.Module, ...]:
        return self.main.blocks


def _limits_to_list(limits: Limits) -> list[Value]:
    return [limits.payload, limits.table, limits.tensors, limits.axes]
