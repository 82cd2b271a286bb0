"""The server without a network: frames in, bytes out.

The requests of a session are numbered 1, 2, 3, ..., and the server's state is a function of those
that it has answered. It stores the number of the last one, `done`, and the bytes of its reply:

    the same request again    the stored reply
    the next request          executed
    an earlier one            error "past"
    a later one               error "gap", with `done`; the client resends those in between

A rejected request changes nothing and uses no number. FORWARD opens a pass, BACKWARD closes it and
accumulates gradients. With its last BACKWARD, or by a STEP after it, a client marks the end of a
loss; after `accumulate` losses the optimizer takes a step. If another client's step changes the
weights while a pass is open, the pass is run again with the new weights on its BACKWARD, so that
clients never wait for each other. FORWARD with number 0 is inference: it has no state, except for a
cache that it names.

`sessions` holds the state of a client, `executor` the passes through the blocks, `generation` those
of generated texts, `rounds` the sessions' copies of the backbone and their average, `checkpoint`
the file that a restarted server resumes from.
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

from regauge.data.optimizer_config import OptimizerConfig
from regauge.errors import CheckpointError, FrameError, Hint, StepError
from regauge.models.cut import cut
from regauge.models.families import Boundary
from regauge.split.protocol.frames import Frame, Kind, Limits, Value, nbytes
from regauge.split.protocol.messages import PROTOCOL, describe_model
from regauge.split.protocol.replies import encode_error, encode_reply, frame_bytes
from regauge.split.server import checkpoint
from regauge.split.server.backbone import TrainableBackbone
from regauge.split.server.costs import Estimator
from regauge.split.server.executor import Executor
from regauge.split.server.generation import predict
from regauge.split.server.memory import FRAME_SHARE, Budget, Cost, charges
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
_MAX_ENDED_SESSIONS = 100_000  # names that are stored, to reject their requests
# Of frames in a checkpoint: their limits were checked when they arrived, in another encoding.
_STORED_LIMITS = Limits(1 << 62, (1 << 32) - 1, 1 << 16, 64)
_log = logging.getLogger("regauge.split")


class Host:
    """A server's backbone, which answers requests.

    Args:
        model: A model whose family has a cut, or any model with `boundaries`. Only its blocks are
            used; the rest may be on the meta device.
        training: Optimizer of the backbone; without it the server only runs inference.
        folder: Folder of checkpoints, which a restarted server resumes from.
        save_every: Steps between checkpoints.
        config: The model's config, if it does not carry one.
        boundaries: Where the model is cut, if its family does not define it.
        limits: Largest frame to accept; by default a fourth of a client's memory budget.
        key: Id of the key that locked the backbone, to compare it with the clients'.
        seed: Seed of dropout.
        max_sessions: Sessions at once.
        max_open_passes: Forward passes of a session that may await their backward pass.
        max_caches: Generation caches of a session.
        max_length: Tokens of a stream.
        idle: Seconds without a request after which a session may be evicted for another.
        precision: Mixed precision over float32 weights: "bf16" or "fp16".
        compiler: Backend of torch.compile, such as "inductor". Blocks that cannot be compiled run
            in eager mode, with a warning in the log.
        average: Steps that each session takes on its own copy between two averages; 0 trains one
            backbone for all.
        away: Seconds without a request after which a round no longer waits for a session.
        quotas: Sessions, requests and bytes that each client may use.
        memory: Bytes that all clients together may hold; by default half of what is available.
        client_memory: Bytes that each client may hold.

    Raises:
        CutError: The model cannot be cut.
        TrainingError, BudgetError: An option is invalid.
        CheckpointError: The weights are not finite, or the checkpoint in `folder` is damaged or
            belongs to another model.

    Example:
        >>> training = regauge.split.OptimizerConfig("adamw", lr=1e-3)
        >>> host = regauge.split.Host(model, training, folder="checkpoints")
        >>> remote = regauge.split.connect("model", regauge.split.InProcess(host))
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
        model_cut = cut(model, config, boundaries=boundaries)
        self.model_description = describe_model(model_cut, config)
        self.key, self.training = key, training
        self.max_sessions, self.max_open_passes, self.max_caches, self.idle = (
            max_sessions,
            max_open_passes,
            max_caches,
            idle,
        )
        self.quotas = quotas or Quotas()
        self.main = TrainableBackbone(model_cut, training)
        self.sessions: dict[str, Session] = {}
        # Their clients by name. Their requests are in the weights, and must not be executed again.
        self.ended_sessions: dict[str, str] = {}
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
        self.optimizer_name = ""  # in the checkpoint that was restored
        self.requests: dict[tuple[str, str], int] = {}  # counts by kind and result
        self.compute_seconds = 0.0
        self.folder, self.save_every = None if folder is None else Path(folder), save_every
        self.lock = threading.Lock()
        # Names of accepted clients; None accepts all that the transport lets in.
        self.clients: frozenset[str] | None = None
        if self.folder is not None:
            saved = checkpoint.load(self.folder)
            if saved is not None:
                self._restore(saved)

    # Requests

    def answer(self, frame: Frame, peer: str = "") -> bytes:
        """Return the reply to a frame; errors are encoded as replies too.

        Args:
            frame: The request.
            peer: Name of the client, as authenticated by the transport.
        """
        with self.lock:
            start, result = time.monotonic(), "ok"
            try:
                return self._execute(frame, peer)
            except FrameError as error:
                result = error.code
                name = frame.values.get("session")
                session = self.sessions.get(name) if isinstance(name, str) else None
                session = session if session is not None and session.peer == peer else None
                return encode_error(
                    error, frame, session.done if session else 0, session.saved if session else 0
                )
            finally:
                self.compute_seconds += time.monotonic() - start
                label = (frame.kind.name.lower(), result)
                self.requests[label] = self.requests.get(label, 0) + 1

    def _execute(self, frame: Frame, peer: str) -> bytes:
        """Answer a frame; any failure of the blocks becomes a FrameError."""
        try:
            self.quotas.take(peer, nbytes(frame))
            try:
                return self._dispatch(frame, peer)
            except RuntimeError as error:
                if not self.executor.is_compiler_error(error):
                    raise
                self.executor.disable_compiler(self.rounds.backbones(), error)
                for backbone in self.rounds.backbones():
                    self.rounds.invalidate_passes(backbone)
                return self._dispatch(frame, peer)
        except FrameError:
            raise
        except Exception as error:  # blocks may raise anything, and the server must survive it
            _log.warning("request %d of a session failed: %s", frame.number, type(error).__name__)
            raise FrameError(
                "failed",
                f"the server could not compute this: {type(error).__name__}: {str(error)[:200]}",
            ) from error

    def require_listed(self, peer: str) -> None:
        """Raise FrameError for a client that is not, or no longer, on the list."""
        if self.clients is not None and peer not in self.clients:
            raise FrameError(
                "client",
                "this client is not on the server's list",
                hint="ask the server's owner to list the name of your certificate",
            )

    def end_unlisted(self) -> list[str]:
        """End the sessions of clients that are not on the list; return the clients' names.

        Their training in the current round is dropped. A checkpoint is written, so that a restart
        does not restore the sessions.
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
        """Answer a frame by its kind."""
        self.require_listed(peer)
        if frame.kind is Kind.HELLO:
            return self._hello(frame, peer)
        session = find_session(self.sessions, frame, peer)
        session.last_seen = time.monotonic()
        match frame.kind:
            case Kind.FORWARD if frame.number == 0:
                backbone = self.rounds.backbone_of(session)
                return predict(
                    self.executor,
                    backbone,
                    session,
                    frame,
                    self._admit_turn,
                    max_caches=self.max_caches,
                    max_bytes=self.limits.payload,
                )
            case Kind.FORWARD | Kind.BACKWARD | Kind.STEP if frame.number > 0:
                return self._execute_next(session, frame)
            case Kind.BYE:
                sent = frame.values.get("done")
                if type(sent) is int and sent > session.done:
                    raise FrameError(
                        "gap",
                        f"the session has sent {sent} requests, and {session.done} are answered",
                    )
                self._end_session(session_name(frame))
                if self.folder is not None and (self.step > self.saved_step or self.rounds.average):
                    self._try_save()  # an ended session resends nothing
                return frame_bytes(Frame(Kind.BYE, frame.number))
            case _:
                raise FrameError(
                    "kind", f"a {frame.kind.name} frame of number {frame.number} is not a request"
                )

    def _hello(self, frame: Frame, peer: str) -> bytes:
        """Open or resume a session, and return the WELCOME."""
        name, codec, limits = parse_hello(frame, self.model_description, self.key)
        if name in self.ended_sessions:
            raise FrameError(
                "ended",
                "the session has ended, and its requests are executed",
                hint="start a new one",
            )
        session = self.sessions.get(name)
        if session is None:
            # Authenticated clients get at most a fourth of all sessions by default.
            limit = self.quotas.for_client(peer).sessions or (
                max(1, self.max_sessions // 4) if peer else 0
            )
            for evicted in sessions_to_evict(
                self.sessions, peer, limit, self.max_sessions, self.idle
            ):
                self._end_session(evicted)
            session = self.sessions[name] = Session(peer, codec, limits)
        elif session.peer != peer:
            raise FrameError("session", "the session belongs to another client")
        session.codec, session.limits, session.last_seen = codec, limits, time.monotonic()
        welcome: dict[str, Value] = {
            "protocol": PROTOCOL,
            "session": name,
            "done": session.done,
            "saved": session.saved,
            "keeps": self.folder is not None,
        }
        welcome |= {
            "limits": _limits_to_list(self.limits),
            "length": self.executor.max_length,
            "trains": self.main.optimizer is not None,
            "step": self.step,
        }
        welcome |= {
            "key": self.key,
            "precision": self.executor.precision,
            "average": self.rounds.average,
        }
        return frame_bytes(
            Frame(Kind.WELCOME, 0, welcome | (self.training.to_dict() if self.training else {}))
        )

    def _execute_next(self, session: Session, frame: Frame) -> bytes:
        """Answer a numbered request: execute the next one, or repeat the last reply."""
        n = frame.number
        if n == session.done:
            if frame.check != session.check:
                raise FrameError("conflict", f"request {n} differs from the one answered before")
            return session.reply
        if n < session.done:
            raise FrameError(
                "past", f"request {n} was answered before: the last one is {session.done}"
            )
        if n > session.done + 1:
            raise FrameError("gap", f"the next request must be {session.done + 1}, got {n}")
        if self.rounds.needs_copy(session):
            self._admit(session, Cost(self.copy_bytes), "a copy of the backbone for this session")
        is_new_member = self.rounds.join(session)
        if self.rounds.require_turn(session) and self.folder is not None:
            self._try_save()
        backbone = self.rounds.backbone_of(session)
        had_gradients = bool(backbone.gradients())
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
            if is_new_member:
                session.backbone = None  # a rejected request changes nothing
            if had_gradients and not backbone.gradients() and self.folder is not None:
                # A step was rolled back: the dropped gradients of earlier requests must not come
                # back with a restart.
                self._try_save()
            raise
        session.done, session.check, session.reply = n, frame.check, answer
        if self.folder is None:
            session.saved = n  # without checkpoints there is nothing to resend
        elif (
            is_new_member
            or self.step - max(self.saved_step, self.failed_save_step) >= self.save_every
        ):
            # The members of a round must survive a restart, or rounds would end at another request
            # when the requests are resent.
            self._try_save()
        return answer

    def _forward(self, session: Session, frame: Frame) -> bytes:
        """Open a pass."""
        released = frame.values.get("release", [])
        if not isinstance(released, list) or not all(type(n) is int for n in released):
            raise FrameError("layout", '"release" must be a list of numbers')
        remaining = {n: open_pass for n, open_pass in session.pending.items() if n not in released}
        if len(remaining) >= self.max_open_passes:
            raise FrameError(
                "graphs",
                f"the session has reached its limit of {self.max_open_passes} open forward passes",
                hint="call backward(), or use torch.no_grad()",
            )
        cost = self.costs.estimate_pass(frame, with_backward=True)
        self._admit(session, cost, "this pass", released=released)
        pending = self.executor.forward(self.rounds.backbone_of(session), frame)
        pending.cost = cost
        assert pending.output is not None
        answer = encode_reply(session, Kind.OUTPUT, frame, {"stream": pending.output})
        session.pending = remaining | {frame.number: pending}
        return answer

    def _backward(self, session: Session, frame: Frame) -> bytes:
        """Close a pass, and accumulate its gradients."""
        of = frame.values.get("of")
        pending = session.pending.get(of) if type(of) is int else None
        if pending is None:
            raise FrameError("graph", f"unknown forward pass {of!r:.20}")
        if frame.tensors.keys() != {"stream"}:
            raise FrameError("layout", 'a backward pass must have one tensor, "stream"')
        if pending.cost is None:
            cost = self.costs.estimate_pass(pending.request, with_backward=True)
            self._admit(session, cost, "this pass")
            pending.cost = cost
        # The cost of the pass includes a gradient of the stream's size.
        if nbytes(frame) > nbytes(pending.request):
            self._admit(session, Cost(nbytes(frame)), "this gradient")
        grad_output = frame.tensors["stream"]
        backbone = self.rounds.backbone_of(session)
        input_grads, sums = self.executor.backward(backbone, pending, grad_output)
        answer = encode_reply(session, Kind.GRADIENT, frame, input_grads)
        # Gradients are stored only after the reply is encoded: a failed request changes nothing.
        had_gradients = session.has_gradients
        for name, total in sums.items():
            backbone.masters[name].grad = total
        session.has_gradients = True
        try:
            if frame.values.get("step") is True:
                self._count_loss(session)
        except BaseException:
            session.has_gradients = had_gradients
            raise
        del session.pending[of]  # type: ignore[arg-type]
        return answer

    def _admit(
        self, session: Session, cost: Cost, label: str, released: Sequence[Value] = ()
    ) -> None:
        """Raise FrameError if a cost exceeds the budget, not counting the released passes."""
        self.budget.require(session.peer, cost, self.charges(session, released), label)

    def _admit_turn(self, session: Session, frame: Frame, cache: Cache | None) -> int:
        """Admit a prediction or a generation turn; return the bytes that its cache will hold."""
        if cache is None:
            self._admit(session, self.costs.estimate_pass(frame, with_backward=False), "this pass")
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
        """Yield the costs that clients hold, by client, without a session's released passes."""
        return charges(
            self.sessions,
            copy_bytes=self.copy_bytes,
            departed=len(self.rounds.departed),
            exclude=(session, released),
        )

    def _count_loss(self, session: Session) -> None:
        """Count a loss; it may complete an optimizer step, and the step a round."""
        if not session.has_gradients:
            raise FrameError(
                "empty",
                "a step must follow a backward pass, got none since the last one",
                hint="call backward() first",
            )
        backbone = self.rounds.backbone_of(session)
        try:
            stepped = backbone.count_loss()
        except StepError as error:
            _log.warning("a step was rolled back, and its gradients dropped: %s", error)
            raise FrameError("nonfinite", str(error), hint=error.hint) from error
        session.has_gradients = False
        if stepped:
            self.step += 1
            self.rounds.invalidate_passes(backbone)
            self.rounds.try_close()

    def _end_session(self, name: str) -> None:
        """End a session, and store its name so that its requests are not executed again."""
        session = self.sessions.pop(name)
        if session.done:
            self.ended_sessions[name] = session.peer
            # Drop one of the client with the most, so that no client can displace another's.
            if len(self.ended_sessions) > _MAX_ENDED_SESSIONS:
                busiest = Counter(self.ended_sessions.values()).most_common(1)[0][0]
                del self.ended_sessions[
                    next(n for n, peer in self.ended_sessions.items() if peer == busiest)
                ]
        self.rounds.leave(name, session)

    # Checkpoints

    def save(self) -> None:
        """Write a checkpoint now, if the server has a folder."""
        with self.lock:
            if self.folder is not None:
                self._save()

    def _try_save(self) -> None:
        """Write a checkpoint after a request, and log a failure.

        The request stays answered even if this fails: clients keep their journals until a
        checkpoint covers it. The next attempt follows after `save_every` steps.
        """
        try:
            self._save()
        except CheckpointError as error:
            self.failed_save_step = self.step
            _log.warning(
                "checkpoint at step %d failed, and clients keep their journals: %s",
                self.step,
                error,
            )

    def _save(self) -> None:
        """Write a checkpoint of the complete state."""
        assert self.folder is not None
        sessions = {name: s.to_dict() for name, s in self.sessions.items()}
        frames = {f"{name}/reply": s.reply for name, s in self.sessions.items() if s.reply}
        frames |= {
            f"{name}/{n}": frame_bytes(pending.request)
            for name, s in self.sessions.items()
            for n, pending in s.pending.items()
        }
        digest = str(self.model_description["digest"])
        copies = {
            name: s.backbone.training_state()
            for name, s in self.sessions.items()
            if s.backbone is not None
        }
        departed, optimizer_name = (
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
                departed,
                sessions,
                frames,
                self.ended_sessions,
                optimizer_name,
            ),
        )
        self.saved_step = self.step
        for session in self.sessions.values():
            session.saved = session.done

    def _restore(self, saved: checkpoint.SplitCheckpoint) -> None:
        """Resume from a checkpoint; raise CheckpointError if it does not match."""
        if saved.digest != self.model_description["digest"]:
            raise CheckpointError(
                f"{self.folder} must be a checkpoint of this model, got another model's",
                hint="name another folder",
            )
        if (saved.copies or saved.departed) and not self.rounds.average:
            raise CheckpointError(
                f"{self.folder} was trained with averaged copies, got average 0",
                hint="resume with average set, or name another folder",
            )
        if self.training is not None and saved.optimizer_name not in ("", self.training.optimizer):
            raise CheckpointError(
                f"{self.folder} was trained with {saved.optimizer_name}, got "
                f"{self.training.optimizer}",
                hint=Hint(
                    f'resume with optimizer="{saved.optimizer_name}", or pass another folder',
                    cli=f"resume with --optimizer {saved.optimizer_name}, or pass another folder",
                ),
            )
        try:
            sessions = restore_sessions(saved.sessions, saved.frames, _STORED_LIMITS)
            if not saved.copies.keys() <= sessions.keys():
                raise ValueError("a copy of the backbone belongs to no session")
            for _, weights in saved.departed.values():
                self.main.require_valid_weights(weights)
        except (ValueError, FrameError) as error:
            if isinstance(error, FrameError) and error.code == "version":
                raise CheckpointError(
                    f"{self.folder} holds requests of another version of regauge: {error}",
                    hint="finish the training with the regauge that began it",
                ) from error
            raise CheckpointError(
                f"{self.folder} is damaged: {error}", hint="restore it from a copy"
            ) from error
        self.main.restore(saved.main, self.folder)
        self.step, self.saved_step, self.optimizer_name = (
            saved.step,
            saved.step,
            saved.optimizer_name,
        )
        self.rounds.departed = {
            name: (n, dict(weights)) for name, (n, weights) in saved.departed.items()
        }
        self.ended_sessions = dict(saved.ended_sessions)
        self.sessions.update(sessions)  # in place: the rounds share the dict
        for name, state in saved.copies.items():
            backbone = sessions[name].backbone = self.rounds.copy_main()
            backbone.restore(state, self.folder)

    def backbone(self) -> dict[str, Tensor]:
        """Return a copy of the current weights, by their names in the model.

        With averaging it is the mean of the round so far.

        Raises:
            CheckpointError: The weights are not finite.
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
        """Return all blocks of the main backbone."""
        return self.main.blocks


def _limits_to_list(limits: Limits) -> list[Value]:
    return [limits.payload, limits.table, limits.tensors, limits.axes]
