"""The health service of gRPC (grpc.health.v1.Health), encoded by hand.

Its two messages have one field each and need no protobuf:

    HealthCheckRequest     field 1, a string: the service; absent for the server as a whole
    HealthCheckResponse    field 1, a number: 1 SERVING, 2 NOT_SERVING, 3 SERVICE_UNKNOWN
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from regauge.split.server.connections import Watches, identify_client

SERVICE = "grpc.health.v1.Health"
SERVING, NOT_SERVING, UNKNOWN = b"\x08\x01", b"\x08\x02", b"\x08\x03"
POLL_SECONDS = 0.05  # between two checks of a Watch stream


def parse_request(request: bytes) -> str | None:
    """Return the service that a request names, or None for a malformed request."""
    if not request:
        return ""
    # Names of services are shorter than 128, so that their length is one byte.
    if len(request) < 2 or request[0] != 0x0A or request[1] != len(request) - 2:
        return None
    return request[2:].decode(errors="replace")


def make_handler(serving: Callable[[], bool], *names: str) -> Any:
    """Return a gRPC handler that reports the health of these services and of the server.

    Args:
        serving: Returns whether the server accepts requests.
        names: Names of the services.
    """
    import grpc

    watches = Watches()

    def status(name: str) -> bytes:
        return UNKNOWN if name not in ("", *names) else SERVING if serving() else NOT_SERVING

    async def check(request: bytes, context: Any) -> bytes:
        name = parse_request(request)
        if name is None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "malformed health check")
        current = status(name or "")
        if current == UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return current

    async def watch(request: bytes, context: Any) -> AsyncIterator[bytes]:
        name = parse_request(request)
        if name is None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "malformed health check")
        with watches.stream(identify_client(context)) as admitted:
            if not admitted:
                limits = f"{watches.total} in all, {watches.per_client} per client"
                await context.abort(
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    f"too many Watch streams ({limits}); use Check",
                )
            previous = b""
            while True:
                current = status(name or "")
                if current != previous:
                    yield current
                    previous = current
                await asyncio.sleep(POLL_SECONDS)

    methods = {
        "Check": grpc.unary_unary_rpc_method_handler(check),
        "Watch": grpc.unary_stream_rpc_method_handler(watch),
    }
    return grpc.method_handlers_generic_handler(SERVICE, methods)
