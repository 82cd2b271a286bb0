"""The client's request log: every request takes effect exactly once, despite failures.

A request is written to the journal, sent, and resent with the same bytes until its reply arrives. A
server that lost requests (it was restarted from a checkpoint) reports the last one it has answered;
all later ones are resent in order. This replay is the only recovery mechanism.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection
from contextlib import suppress

from regauge.errors import FrameError, JournalError, RefusedError, TransportError
from regauge.split.client.journal import Journal
from regauge.split.protocol.frames import (
    PIECE,
    Bytes,
    Frame,
    Kind,
    Limits,
    Value,
    chunks,
    decode,
    encode,
    frame_identity,
)
from regauge.split.protocol.transport import Transport

# Error codes of a server that has lost the session, or some of its requests.
_STATE_LOST = frozenset({"gap", "session"})
# Error codes that only corruption in transit explains: the frame was sent whole, with a checksum.
_CORRUPTED_IN_TRANSIT = frozenset({"checksum", "length"})


class RequestLog:
    """Numbered requests of one session, sent in order.

    Args:
        transport: Connection to the server.
        journal: Store of requests and replies.
        hello: Values of the HELLO frame.
        codec: Compression of features.
        limits: Largest frame to accept.
        patience: Seconds without a reply after which an exchange fails.
        sleep: Called with the seconds of a backoff.
    """

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
        self.number = 0  # the last request that was answered
        self.saved = self.checkpointed = 0
        self.tickets = 0
        self.welcome: dict[str, Value] | None = None

    def handshake(self) -> dict[str, Value]:
        """Send HELLO, and return the server's WELCOME with the state of the session."""
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
        """Send a frame as the next request, and return the reply.

        Args:
            frame: Request without a number.
            exact: Names of tensors that the codec must not round.

        Raises:
            JournalError: The journal holds another request of this number.
            RefusedError: The server rejects the request.
            TransportError: No reply arrived in time.
        """
        n = self.number + 1
        request = Frame(
            frame.kind, n, {**frame.values, "session": self.journal.session}, frame.tensors
        )
        # The only copy: the tensors may change later, the request must not.
        data = list(chunks(encode(request, self.codec, exact), PIECE))
        previous = self.journal.request(n)
        if previous is not None and b"".join(previous) != b"".join(data):
            raise JournalError(
                f"request {n} must be the one in the journal, got another",
                hint="a run that resumes from a checkpoint must repeat its steps bit for bit: "
                "the same data, seeds, threads and options",
            )
        stored = self.journal.reply(n)
        if stored is not None:
            reply = decode(stored, self.limits)
        else:
            self.journal.put_request(n, data)
            reply, reply_data = self._send_in_order(n, data)
            self.journal.put_reply(n, reply_data)
        self.number = n
        self._update_saved(reply)
        return reply

    def predict(self, frame: Frame, exact: Collection[str] = ()) -> Frame:
        """Send a FORWARD that changes no state, and return the reply."""
        if self.welcome is None:
            self.handshake()
        self.tickets += 1
        ticket = self.tickets
        request = Frame(
            Kind.FORWARD,
            0,
            {**frame.values, "session": self.journal.session, "ticket": ticket},
            frame.tensors,
        )
        data = encode(request, self.codec, exact)
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
            "the server drops the session at once",
            hint="check that nothing else answers at its address",
        )

    def mark_checkpoint(self) -> int:
        """Record that a checkpoint of the client includes all replies so far; return their number.

        The journal drops what is no longer needed.
        """
        self.checkpointed = self.number
        self.journal.prune(self.saved, self.checkpointed)
        return self.checkpointed

    def flush(self) -> None:
        """Resend requests that a restarted server has lost.

        During a run they are resent with the next request. Call this after the last one.
        """
        if self.number:
            self._replay(self._fetch_done(), self.number + 1)

    def end_session(self) -> None:
        """End the session once the server has answered all requests.

        If the server is unreachable, it evicts the session later.
        """
        bye = encode(Frame(Kind.BYE, 0, {"session": self.journal.session, "done": self.number}))
        with suppress(FrameError, TransportError):
            while True:
                self.flush()
                try:
                    self._exchange(bye, lambda f: f.kind is Kind.BYE)
                    return
                except RefusedError as error:
                    if error.code != "gap":  # the server was restarted meanwhile
                        raise

    def abandon_session(self) -> None:
        """End a session that will not be resumed, if the server answers in time."""
        with suppress(Exception):
            self._exchange(
                encode(Frame(Kind.BYE, 0, {"session": self.journal.session, "done": 0})),
                lambda f: f.kind is Kind.BYE,
            )

    def _send_in_order(self, n: int, data: list[bytes]) -> tuple[Frame, Bytes]:
        """Send request `n` after all earlier ones; return the reply and its bytes."""
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
        """Resend the requests after `done` and before `n`."""
        if done > n:
            raise FrameError(
                "past",
                f"the server has answered {done} requests of this session, got request {n}",
                hint="the journal belongs to another run",
            )
        k = done + 1
        while k < n:
            data = self.journal.request(k)
            if data is None:
                raise FrameError(
                    "lost",
                    f"the server has lost request {k}, which the journal no longer holds",
                    hint="restart the server with its checkpoint folder, or start a new session "
                    "from your own checkpoint",
                )
            try:
                self._send(k, data)
            except RefusedError as error:
                if error.code not in _STATE_LOST:
                    raise
                # The server was restarted meanwhile: some of these are lost as well.
                k = self._fetch_done()
            k += 1

    def _send(self, n: int, data: list[bytes]) -> tuple[Frame, Bytes]:
        """Send the encoded request `n` until its reply arrives."""
        return self._exchange(
            [memoryview(piece) for piece in data],
            lambda f: f.number == n and f.kind in (Kind.OUTPUT, Kind.GRADIENT, Kind.ACKNOWLEDGE),
        )

    def _exchange(
        self, request: list[memoryview], is_reply: Callable[[Frame], bool]
    ) -> tuple[Frame, Bytes]:
        """Send a request until its reply arrives; return the reply and its bytes.

        Raises:
            RefusedError: The server rejects the request itself, not a corrupted copy of it.
            TransportError: No reply arrived within `patience` seconds.
        """
        start, delay, unidentified = time.monotonic(), 0.002, 0
        number, check = frame_identity(request[0])
        while True:
            hint = None
            try:
                data = self.transport.exchange(request)
                reply = decode(data, self.limits)
                if is_reply(reply):
                    return reply, data
                reason = "the frame received is not a reply to this request"
                if reply.kind is Kind.ERROR:
                    rejection = _to_error(reply)
                    reason, rejected_check = str(rejection), reply.values.get("check")
                    if (
                        rejected_check == check
                        and reply.number == number
                        and rejection.code != "busy"
                    ):
                        raise rejection
                    # An error without a checksum concerns bytes that could not be parsed. Once,
                    # they may have been corrupted in transit; repeatedly, the request is wrong.
                    unidentified += (
                        rejected_check is None and rejection.code not in _CORRUPTED_IN_TRANSIT
                    )
                    if unidentified > 4:
                        raise rejection
            except RefusedError:
                raise
            except (TransportError, FrameError) as error:
                reason, hint = str(error), error.hint
            if time.monotonic() - start > self.patience:
                raise TransportError(
                    f"no reply within {self.patience:g} s: {reason}",
                    hint=hint or "check that the server is running and reachable",
                )
            self.sleep(delay * random.uniform(0.5, 1.0))
            delay = min(delay * 2, 1.0)

    def _update_saved(self, reply: Frame) -> None:
        """Drop requests from the journal that a checkpoint of the server covers."""
        saved = reply.values.get("saved")
        if type(saved) is int and saved > self.saved:
            self.saved = saved
            self.journal.prune(self.saved, self.checkpointed)

    def _fetch_done(self) -> int:
        """Ask the server how many requests of this session it has answered."""
        done = self.handshake().get("done")
        if type(done) is not int or done < 0:
            raise FrameError("done", f'"done" must be a number >= 0, got {done!r:.40}')
        return done


def _to_error(reply: Frame) -> RefusedError:
    """Return the exception that an ERROR frame describes."""
    code, message = reply.values.get("code"), _printable(reply.values.get("message"))
    return RefusedError(
        _printable(code)[:32],
        f"the server rejects the request: {message}",
        hint=_printable(reply.values.get("hint")) or None,
    )


def _printable(text: object) -> str:
    """Return at most 500 printable characters: a hostile server must not control the terminal."""
    return "".join(c for c in text if c.isprintable())[:500] if isinstance(text, str) else ""
