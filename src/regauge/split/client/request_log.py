"""The client's log: every request is answered exactly once, whatever the network and the server go
through.

A request is written to the journal, sent, and sent again, the same bytes, until its reply is there.
A server that has lost some (it was started again from a checkpoint) says which one it has answered
last; those after it are sent again in order. There is no other way to recover.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection
from contextlib import suppress

from regauge.split.client.journal import Journal, JournalError
from regauge.split.protocol.frames import (
    PIECE,
    Bytes,
    Frame,
    FrameError,
    Kind,
    Limits,
    RefusedError,
    Value,
    chunks,
    decode,
    encode,
    frame_identity,
)
from regauge.split.protocol.transport import Transport, TransportError

# Refusals that mean that the server does not have what was sent before.
_STATE_LOST = frozenset({"gap", "session"})
# ... and those that only the line can be the reason of: what was sent had another checksum, and all
# of its bytes.
_CORRUPTED_IN_TRANSIT = frozenset({"checksum", "length"})


class RequestLog:
    def __init__(
        self,
        transport: Transport,
        journal: Journal,
        hello: dict[str, Value],
        *,
        codec: str = "",
        limits: Limits | None = None,
        patience: float = 120.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.transport, self.journal, self.codec, self.limits = (
            transport,
            journal,
            codec,
            limits or Limits(),
        )
        self.hello, self.patience, self.sleep = (
            {**hello, "session": journal.session},
            patience,
            sleep,
        )
        self.number = 0  # of the last request that was answered
        self.saved = self.checkpointed = 0
        self.tickets = 0
        self.welcome: dict[str, Value] | None = None

    def handshake(self) -> dict[str, Value]:
        """Say HELLO, and be told how far the session is."""
        reply, _ = self._exchange(
            encode(Frame(Kind.HELLO, 0, self.hello)),
            lambda f: f.kind is Kind.WELCOME and f.values.get("session") == self.journal.session,
        )
        self.welcome = {
            name: _printable(value) if isinstance(value, str) else value
            for name, value in reply.values.items()
        }
        self._update_saved(reply)
        return self.welcome

    def submit(self, frame: Frame, exact: Collection[str] = ()) -> Frame:
        """The reply to the next request. `frame` has no number yet."""
        n = self.number + 1
        sent = Frame(
            frame.kind, n, {**frame.values, "session": self.journal.session}, frame.tensors
        )
        data = list(
            chunks(encode(sent, self.codec, exact), PIECE)
        )  # the one copy: tensors may change, and this must not
        before = self.journal.request(n)
        if before is not None and b"".join(before) != b"".join(data):
            raise JournalError(
                f"request {n} is not the one that the journal has",
                hint="a run that goes on from a checkpoint must repeat its steps bit for bit: "
                "the same data, seeds, threads and options",
            )
        told = self.journal.reply(n)
        if told is not None:
            reply = decode(told, self.limits)
        else:
            self.journal.put_request(n, data)
            reply, came = self._send_in_order(n, data)
            self.journal.put_reply(n, came)
        self.number = n
        self._update_saved(reply)
        return reply

    def predict(self, frame: Frame, exact: Collection[str] = ()) -> Frame:
        """The reply to a request that changes nothing."""
        if self.welcome is None:
            self.handshake()
        self.tickets += 1
        ticket = self.tickets
        sent = Frame(
            Kind.FORWARD,
            0,
            {**frame.values, "session": self.journal.session, "ticket": ticket},
            frame.tensors,
        )
        data = encode(sent, self.codec, exact)
        for _ in range(2):
            try:
                return self._exchange(
                    data, lambda f: f.kind is Kind.OUTPUT and f.values.get("ticket") == ticket
                )[0]
            except RefusedError as error:
                if error.code not in _STATE_LOST:
                    raise
                self.handshake()
        raise TransportError(
            "the server forgets the session at once",
            hint="does something else answer at its address?",
        )

    def mark_checkpoint(self) -> int:
        """Say that the client has a checkpoint of its own with all that was answered so far:
        replies up to here are not needed again.
        """
        self.checkpointed = self.number
        self.journal.prune(self.saved, self.checkpointed)
        return self.checkpointed

    def flush(self) -> None:
        """Make sure that the server has answered all that was asked. One that was started again may
        have lost the last requests, and would be sent them with the next one, which does not come
        if this was the last.
        """
        if self.number:
            self._replay(self._fetch_done(), self.number + 1)

    def end_session(self) -> None:
        """Let the server forget the session, once it has all of it. One that does not answer will
        have to forget it by itself.
        """
        bye = encode(Frame(Kind.BYE, 0, {"session": self.journal.session, "done": self.number}))
        with suppress(FrameError, TransportError):
            while True:
                self.flush()
                try:
                    self._exchange(bye, lambda f: f.kind is Kind.BYE)
                    return
                except RefusedError as error:
                    if error.code != "gap":  # it was started again meanwhile
                        raise

    def abandon_session(self) -> None:
        """Let the server forget a session that nobody will go on with, whatever it has of it, if it
        answers soon.
        """
        with suppress(Exception):
            self._exchange(
                encode(Frame(Kind.BYE, 0, {"session": self.journal.session, "done": 0})),
                lambda f: f.kind is Kind.BYE,
            )

    def _send_in_order(self, n: int, data: list[bytes]) -> tuple[Frame, Bytes]:
        """The reply to request n and its bytes, after everything before it is there too."""
        if self.welcome is None:
            self._replay(self._fetch_done(), n)
        while True:
            try:
                return self._send(n, data)
            except RefusedError as error:
                if error.code not in _STATE_LOST:
                    self.journal.withdraw(n)
                    raise
                self._replay(self._fetch_done(), n)

    def _replay(self, done: int, n: int) -> None:
        if done > n:
            raise FrameError(
                "past",
                f"the server has answered {done} requests of this session, and this is {n}",
                hint="the journal is not this run's",
            )
        k = done + 1
        while k < n:
            data = self.journal.request(k)
            if data is None:
                raise FrameError(
                    "lost",
                    f"the server has lost request {k}, which it had said was kept, or which "
                    "this client has no record of",
                    hint="was it started with another checkpoint folder? Start a new session "
                    "from your own checkpoint",
                )
            try:
                self._send(k, data)
            except RefusedError as error:
                if error.code not in _STATE_LOST:
                    raise
                k = (
                    self._fetch_done()
                )  # it was started again meanwhile, and has lost some of these too
            k += 1

    def _send(self, n: int, data: list[bytes]) -> tuple[Frame, Bytes]:
        return self._exchange(
            [memoryview(piece) for piece in data],
            lambda f: f.number == n and f.kind in (Kind.OUTPUT, Kind.GRADIENT, Kind.ACKNOWLEDGE),
        )

    def _exchange(
        self, request: list[memoryview], is_reply: Callable[[Frame], bool]
    ) -> tuple[Frame, Bytes]:
        """Send until the reply comes: it and its bytes. A refusal that does not mean the way is
        raised, with its code.
        """
        began, delay, strange = time.monotonic(), 0.002, 0
        number, check = frame_identity(request[0])
        while True:
            try:
                data = self.transport.exchange(request)
                reply = decode(data, self.limits)
                if is_reply(reply):
                    return reply, data
                why = "what came back is no reply to this"
                if reply.kind is Kind.ERROR:
                    refused = _to_error(reply)
                    why, checked = str(refused), reply.values.get("check")
                    if checked == check and reply.number == number and refused.code != "busy":
                        raise refused
                    # A refusal that does not say of what is of bytes that were no frame: they may
                    # be so once, on their way, but not always.
                    strange += checked is None and refused.code not in _CORRUPTED_IN_TRANSIT
                    if strange > 4:
                        raise refused
            except RefusedError:
                raise
            except (TransportError, FrameError) as error:
                why = str(error)
            if time.monotonic() - began > self.patience:
                raise TransportError(
                    f"no reply within {self.patience:g} s: {why}",
                    hint="is the server running, and the network up?",
                )
            self.sleep(delay * random.uniform(0.5, 1.0))
            delay = min(delay * 2, 1.0)

    def _update_saved(self, reply: Frame) -> None:
        saved = reply.values.get("saved")
        if type(saved) is int and saved > self.saved:
            self.saved = saved
            self.journal.prune(self.saved, self.checkpointed)

    def _fetch_done(self) -> int:
        """How many requests of this session the server has answered, by its own word."""
        found = self.handshake().get("done")
        if type(found) is not int or found < 0:
            raise FrameError("done", 'the server does not say how many requests are "done"')
        return found


def _to_error(reply: Frame) -> RefusedError:
    code, message = reply.values.get("code"), _printable(reply.values.get("message"))
    return RefusedError(
        _printable(code)[:32],
        f"the server refuses: {message}",
        hint=_printable(reply.values.get("hint")) or None,
    )


def _printable(text: object) -> str:
    return "".join(c for c in text if c.isprintable())[:500] if isinstance(text, str) else ""
