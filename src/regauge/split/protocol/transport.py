"""The network as one method: the bytes of a request in, the bytes of its reply out.

Any failure on the way raises a `TransportError`, and the client resends the same bytes. A reply may
be late or belong to another request: the caller checks what it received.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from regauge.errors import FrameError, TransportError
from regauge.split.protocol.frames import Assembler, Bytes, chunks
from regauge.split.protocol.replies import encode_error
from regauge.split.server.host import Host


class Transport(Protocol):
    """A connection to a server."""

    def exchange(self, request: Sequence[memoryview]) -> Bytes:
        """Send one request, and return the bytes of its reply.

        Raises:
            TransportError: No reply arrived.
        """


class InProcess:
    """A connection to a server in the same process.

    Frames are encoded, sent in chunks and decoded as they are over a network.

    Args:
        host: The server.
        peer: The name of the client.

    Example:
        >>> server = regauge.split.InProcess(regauge.split.Host(model))
        >>> remote = regauge.split.connect("model", server)
    """

    def __init__(self, host: Host, peer: str = "") -> None:
        self.host, self.peer = host, peer

    def exchange(self, request: Sequence[memoryview]) -> bytes:
        """Send one request, and return the bytes of its reply."""
        return deliver(self.host, chunks(request), self.peer)


def deliver(host: Host, pieces: object, peer: str = "") -> bytes:
    """Pass the chunks of one request to a server, and return its reply.

    Malformed bytes are answered with an error frame.

    Raises:
        TransportError: The request is incomplete.
    """
    assembler = Assembler(host.limits)
    try:
        for piece in pieces:  # type: ignore[attr-defined]
            for frame in assembler.feed(piece):
                return host.answer(frame, peer)
    except FrameError as error:
        return encode_error(error)
    raise TransportError("the request ended before its frame was complete")
