"""What clients hold of a server's memory while their frames come and are answered, so that none can
fill it.

Bytes are counted as they arrive, for each client over all of its streams. Past its share a client
is read from one stream at a time, the one whose frame began first, and the others wait: nobody is
refused for being large, and a frame that has begun can always end. One client holds its share, one
frame more, and a chunk of each other stream. Past the `total` of all clients, only the client whose
frames began first is read from.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from regauge.split.protocol.frames import FrameError


class StreamUsage:
    """The bytes of one stream's frame."""

    def __init__(self, peer: dict[StreamUsage, int]) -> None:
        self.client_usage = peer

    def add(self, size: int) -> None:
        self.client_usage[self] = self.client_usage.get(self, 0) + size

    @property
    def size(self) -> int:
        return self.client_usage.get(self, 0)

    def clear(self) -> None:
        """The frame is answered, or gone."""
        self.client_usage.pop(self, None)


class FlowControl:
    """`share` is how many bytes of frames a client may hold before its streams take turns,
    `streams` how many of those it may have, and `total` how many bytes all clients may hold.
    """

    def __init__(self, share: int, streams: int, total: int | None = None) -> None:
        self.share, self.max_streams, self.total = share, streams, total
        self.stream_counts: dict[str, int] = {}
        self.usage: dict[
            str, dict[StreamUsage, int]
        ] = {}  # in the order in which frames have begun

    @contextmanager
    def stream(self, peer: str) -> Iterator[StreamUsage]:
        if (
            self.stream_counts.get(peer, 0) >= self.max_streams
        ):  # those that were lost a moment ago are among them
            raise FrameError(
                "busy",
                f"{peer or 'a client'} has {self.max_streams} streams open",
                hint="use fewer of them, or come again in some seconds",
            )
        self.stream_counts[peer] = self.stream_counts.get(peer, 0) + 1
        held = StreamUsage(self.usage.setdefault(peer, {}))
        try:
            yield held
        finally:
            held.clear()
            self.stream_counts[peer] -= 1
            if not self.stream_counts[peer]:
                del self.stream_counts[peer], self.usage[peer]

    def may_read(self, held: StreamUsage) -> bool:
        """May more be read from this stream?"""
        others = held.client_usage
        if sum(others.values()) >= self.share and next(iter(others)) is not held:
            return False
        return (
            self.total is None
            or self.size < self.total
            or others is next(found for found in self.usage.values() if found)
        )

    @property
    def size(self) -> int:
        """Bytes that all clients hold."""
        return sum(sum(found.values()) for found in self.usage.values())
