"""Flow control: a limit on the memory of frames that are received or being answered.

Bytes are counted as they arrive, per client over all of its streams. Above its share, a client is
read from one stream at a time, the one whose frame began first, and its other streams wait. Large
frames are thus never rejected, and a frame that has begun can always finish. One client holds at
most its share, one frame more, and a chunk of each other stream. Above the `total` of all clients,
only the client whose frames began first is read from.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from regauge.errors import FrameError


class StreamUsage:
    """The bytes that one stream's frame holds, as an entry of its client's usage."""

    def __init__(self, client_usage: dict[StreamUsage, int]) -> None:
        self.client_usage = client_usage

    def add(self, size: int) -> None:
        """Count received bytes."""
        self.client_usage[self] = self.client_usage.get(self, 0) + size

    @property
    def size(self) -> int:
        """Return the bytes held by this stream."""
        return self.client_usage.get(self, 0)

    def clear(self) -> None:
        """Release the bytes of a frame that is answered or dropped."""
        self.client_usage.pop(self, None)


class FlowControl:
    """Limits on the bytes of frames that clients hold.

    Args:
        share: Bytes that a client may hold before its streams take turns.
        streams: Streams that a client may open.
        total: Bytes that all clients may hold.
    """

    def __init__(self, share: int, streams: int, total: int | None = None) -> None:
        self.share, self.max_streams, self.total = share, streams, total
        self.stream_counts: dict[str, int] = {}
        # In the order in which the frames began.
        self.usage: dict[str, dict[StreamUsage, int]] = {}

    @contextmanager
    def stream(self, peer: str) -> Iterator[StreamUsage]:
        """Open a stream of a client.

        Raises:
            FrameError: The client has too many streams.
        """
        # Streams that were lost a moment ago still count, which is why the client should retry.
        if self.stream_counts.get(peer, 0) >= self.max_streams:
            raise FrameError(
                "busy",
                f"{peer or 'a client'} has reached its limit of {self.max_streams} streams",
                hint="open fewer streams, or retry in a few seconds",
            )
        self.stream_counts[peer] = self.stream_counts.get(peer, 0) + 1
        usage = StreamUsage(self.usage.setdefault(peer, {}))
        try:
            yield usage
        finally:
            usage.clear()
            self.stream_counts[peer] -= 1
            if not self.stream_counts[peer]:
                del self.stream_counts[peer], self.usage[peer]

    def may_read(self, stream: StreamUsage) -> bool:
        """Return whether more may be read from this stream."""
        client_usage = stream.client_usage
        if sum(client_usage.values()) >= self.share and next(iter(client_usage)) is not stream:
            return False
        return (
            self.total is None
            or self.size < self.total
            or client_usage is next(usage for usage in self.usage.values() if usage)
        )

    @property
    def size(self) -> int:
        """Return the bytes that all clients hold."""
        return sum(sum(usage.values()) for usage in self.usage.values())
