"""Bounds on connections and streams that need no session: open files, handshakes, idle connections,
health watches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

HANDSHAKE_SECONDS = 10  # for TLS and the first frame of HTTP/2; gRPC's default is 120
IDLE_SECONDS = 300  # for a connection without a stream; a client that trains keeps one open
STREAMS_PER_CONNECTION = 512  # further ones wait
MAX_CONNECTIONS = 4096
SPARE_FILES = 256  # of the limit: checkpoints, weights, metrics, libraries
MAX_WATCHES, MAX_WATCHES_PER_CLIENT = 64, 8


def raise_open_file_limit() -> int:
    """Raise the soft limit of open files to the hard limit, where the system has one. Returns the
    limit.
    """
    try:
        import resource
    except ImportError:  # Windows
        return MAX_CONNECTIONS + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + SPARE_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
        except (ValueError, OSError):  # macOS has a lower limit of its own
            pass
    return MAX_CONNECTIONS + SPARE_FILES if soft == resource.RLIM_INFINITY else soft


def server_options(files: int) -> list[tuple[str, int]]:
    """Return channel options that bound connections, for a process that may have so many open
    files. Further connections are closed at once.
    """
    return [
        (
            "grpc.max_allowed_incoming_connections",
            max(16, min(MAX_CONNECTIONS, files - SPARE_FILES)),
        ),
        ("grpc.server_handshake_timeout_ms", 1000 * HANDSHAKE_SECONDS),
        ("grpc.max_connection_idle_ms", 1000 * IDLE_SECONDS),
        ("grpc.max_concurrent_streams", STREAMS_PER_CONNECTION),
    ]


def identify_client(context: Any) -> str:
    """Return what a caller is known by: the common name of its certificate, or its address without
    the port.
    """
    found = context.auth_context().get("x509_common_name")
    return found[0].decode(errors="replace") if found else str(context.peer()).rpartition(":")[0]


class Watches:
    """How many health streams are open, in all and per client."""

    def __init__(self, total: int = MAX_WATCHES, per_client: int = MAX_WATCHES_PER_CLIENT) -> None:
        self.total, self.per_client = total, per_client
        self.open: dict[str, int] = {}

    @contextmanager
    def stream(self, client: str) -> Iterator[bool]:
        """Count a stream while it is open. Yields False, and counts nothing, where there are too
        many.
        """
        if sum(self.open.values()) >= self.total or self.open.get(client, 0) >= self.per_client:
            yield False
            return
        self.open[client] = self.open.get(client, 0) + 1
        try:
            yield True
        finally:
            self.open[client] -= 1
            if not self.open[client]:
                del self.open[client]
