"""The health service of gRPC (grpc.health.v1.Health), by its bytes: two messages of one field each
need no protobuf.

HealthCheckRequest    field 1, a string: the service that is asked for; none stands for the whole
server HealthCheckResponse   field 1, a number: 1 SERVING, 2 NOT_SERVING, 3 SERVICE_UNKNOWN
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from regauge.split.server.connections import Watches, identify_client

SERVICE = "grpc.health.v1.Health"
SERVING, NOT_SERVING, UNKNOWN = b"\x08\x01", b"\x08\x02", b"\x08\x03"
POLL_SECONDS = 0.05  # seconds between two looks, while somebody watches


def parse_request(request: bytes) -> str | None:
    """The service that a request names; None where it is no such request."""
    if not request:
        return ""
    if (
        len(request) < 2 or request[0] != 0x0A or request[1] != len(request) - 2
    ):  # names of services are shorter than 128
        return None
    return request[2:].decode(errors="replace")


def make_handler(serving: Callable[[], bool], *names: str) -> Any:
    """A generic handler that answers for these services, and for the server as a whole."""
    import grpc

    watches = Watches()

    def status(name: str) -> bytes:
        return UNKNOWN if name not in ("", *names) else SERVING if serving() else NOT_SERVING

    async def check(request: bytes, context: Any) -> bytes:
        name = parse_request(request)
        if name is None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no health check")
        found = status(name or "")
        if found == UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return found

    async def watch(request: bytes, context: Any) -> AsyncIterator[bytes]:
        name = parse_request(request)
        if name is None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no health check")
        with watches.stream(identify_client(context)) as admitted:
            if not admitted:
                limits = f"{watches.total} in all, {watches.per_client} per client"
                await context.abort(
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    f"too many Watch streams ({limits}); use Check",
                )
            last = b""
            while True:
                now = status(name or "")
                if now != last:
                    yield now
                    last = now
                await asyncio.sleep(POLL_SECONDS)

    methods = {
        "Check": grpc.unary_unary_rpc_method_handler(check),
        "Watch": grpc.unary_stream_rpc_method_handler(watch),
    }
    return grpc.method_handlers_generic_handler(SERVICE, methods)
