"""Limits of connections and streams without a session: files, handshakes, idle time, watches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

HANDSHAKE_SECONDS = 10  # TLS and the first frame of HTTP/2; gRPC's default is 120
IDLE_SECONDS = 300  # of a connection without a stream; a client in training keeps one open
STREAMS_PER_CONNECTION = 512  # further ones wait
MAX_CONNECTIONS = 4096
SPARE_FILES = 256  # reserved for checkpoints, weights, metrics and libraries
MAX_WATCHES, MAX_WATCHES_PER_CLIENT = 64, 8


def raise_open_file_limit() -> int:
    """Raise the soft limit of open files up to the hard limit; return the resulting limit."""
    try:
        import resource
    except ImportError:  # Windows
        return MAX_CONNECTIONS + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = MAX_CONNECTIONS + SPARE_FILES
    if hard != resource.RLIM_INFINITY:
        target = min(target, hard)
    if soft != resource.RLIM_INFINITY and soft < target:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
            soft = target
        except (ValueError, OSError):  # macOS has another, lower limit
            pass
    return MAX_CONNECTIONS + SPARE_FILES if soft == resource.RLIM_INFINITY else soft


def server_options(files: int) -> list[tuple[str, int]]:
    """Return channel options that limit connections; further ones are closed at once.

    Args:
        files: Number of files that the process may open.
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
    """Return a caller's identity: the common name of its certificate, or its IP address."""
    names = context.auth_context().get("x509_common_name")
    return names[0].decode(errors="replace") if names else str(context.peer()).rpartition(":")[0]


class Watches:
    """Counts of open health streams, limited in total and per client."""

    def __init__(self, total: int = MAX_WATCHES, per_client: int = MAX_WATCHES_PER_CLIENT) -> None:
        self.total, self.per_client = total, per_client
        self.open: dict[str, int] = {}

    @contextmanager
    def stream(self, client: str) -> Iterator[bool]:
        """Count a stream while it is open. Yields False, and counts nothing, above a limit."""
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
