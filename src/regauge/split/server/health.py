"""The health service of gRPC (grpc.health.v1.Health), with a limit on its streams."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from regauge.split.server.connections import Watches, identify_client


async def make_service(*names: str) -> tuple[Any, Any]:
    """Return a health servicer that reports these services as serving, and its gRPC handler.

    The servicer is that of grpcio-health-checking. It alone would hold any number of streams, and
    log a traceback for each malformed request.
    """
    import grpc
    from google.protobuf.message import DecodeError
    from grpc_health.v1 import health, health_pb2

    watches = Watches()

    def parse(data: bytes) -> Any:
        try:
            return health_pb2.HealthCheckRequest.FromString(data)
        except DecodeError:
            return None

    def limited(answer: Any, *, is_stream: bool) -> Any:
        async def handle(request: Any, context: Any) -> Any:
            if request is None:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "malformed health check")
            client = identify_client(context)
            with watches.stream(client) if is_stream else nullcontext(True) as admitted:
                if not admitted:
                    limits = f"{watches.total} in all, {watches.per_client} per client"
                    await context.abort(
                        grpc.StatusCode.RESOURCE_EXHAUSTED,
                        f"too many Watch streams ({limits}); use Check",
                    )
                return await answer(request, context)

        return handle

    servicer = health.aio.HealthServicer()
    for name in names:
        await servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
    encoding = parse, health_pb2.HealthCheckResponse.SerializeToString
    check, watch = limited(servicer.Check, is_stream=False), limited(servicer.Watch, is_stream=True)
    methods = {
        "Check": grpc.unary_unary_rpc_method_handler(check, *encoding),
        "Watch": grpc.unary_stream_rpc_method_handler(watch, *encoding),
    }
    return servicer, grpc.method_handlers_generic_handler(health.SERVICE_NAME, methods)
