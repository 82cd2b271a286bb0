"""The network is one method: the bytes of a request in, the bytes of its reply out.

Whatever may have happened to either on the way is a `TransportError`, upon which the same bytes are
sent again. A reply may be late, or another request's: whoever asked looks at what is in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from regauge.errors import RegaugeError
from regauge.split.protocol.frames import Assembler, Bytes, FrameError, chunks
from regauge.split.protocol.replies import encode_error
from regauge.split.server.host import Host


class TransportError(RegaugeError):
    """No reply came: the way to the server or back is broken, or the server does not answer."""


class Transport(Protocol):
    def exchange(self, request: Sequence[memoryview]) -> Bytes: ...


class InProcess:
    """A server in the same process. The frames are cut into chunks, put together and read as they
    are on a wire.
    """

    def __init__(self, host: Host, peer: str = "") -> None:
        self.host, self.peer = host, peer

    def exchange(self, request: Sequence[memoryview]) -> bytes:
        return deliver(self.host, chunks(request), self.peer)


def deliver(host: Host, pieces: object, peer: str = "") -> bytes:
    """Give a server the chunks of one request. Bytes that are no frame are answered by a refusal;
    half a frame never.
    """
    assembler = Assembler(host.limits)
    try:
        for piece in pieces:  # type: ignore[attr-defined]
            for frame in assembler.feed(piece):
                return host.answer(frame, peer)
    except FrameError as error:
        return encode_error(error)
    raise TransportError("the request ended before it was whole")
