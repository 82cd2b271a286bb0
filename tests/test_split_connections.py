"""Bounds on connections and health streams, which need no session."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

pytest.importorskip("grpc")

import grpc

from regauge.split import Host, connect, connections
from regauge.split.connections import SPARE_FILES, Watches, raise_open_files, server_options
from regauge.split.network import Grpc, Server
from splits import ADAMW, batch, made

WATCH = "/grpc.health.v1.Health/Watch"


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(Host(made("gpt2"), ADAMW)) as found:
        yield found
        found.stop(0.0)


def test_watch_streams_are_bounded_per_client(server: Server) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        watch = channel.unary_stream(WATCH)
        streams = [watch(b"", timeout=30) for _ in range(connections.WATCHES_PER_CLIENT)]
        assert [next(s) for s in streams] == [b"\x08\x01"] * len(streams)
        with pytest.raises(grpc.RpcError) as refused:
            next(watch(b"", timeout=30))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=30) == b"\x08\x01"
        for stream in streams:
            stream.cancel()
        answers = []
        while not answers:  # a cancelled stream is gone a moment later
            with suppress(grpc.RpcError):
                answers.append(next(watch(b"", timeout=30)))
        assert answers == [b"\x08\x01"]


def test_watch_streams_are_bounded_in_all() -> None:
    watches = Watches(most=3, per_client=2)
    with ExitStack() as stack:
        assert [stack.enter_context(watches.stream(name)) for name in ("a", "a", "a", "b", "c")] == [True, True, False, True, False]
    assert not watches.open
    with watches.stream("c") as admitted:
        assert admitted


def test_idle_connections_are_bounded_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MOST_CONNECTIONS", 20)
    monkeypatch.setattr(connections, "HANDSHAKE_SECONDS", 1)
    with Server(Host(made("gpt2"), ADAMW)) as server, ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 30)) for _ in range(60)]
        model = made("gpt2")
        with Grpc(f"127.0.0.1:{server.port}") as network, connect(model, network, patience=60):
            model(**batch("gpt2", 0)).loss.backward()  # a client gets through as soon as idle connections are closed
        assert server.host.step == 1
        for one in idle:
            one.settimeout(30)
            try:
                while one.recv(1 << 16):  # settings, then the end
                    pass
            except ConnectionResetError:
                pass
        server.stop(0.0)


def test_open_files() -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 300), hard))
        raised = raise_open_files()
        assert raised == resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 300 or hard <= 300
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert dict(server_options(1024))["grpc.max_allowed_incoming_connections"] == 1024 - SPARE_FILES
    assert dict(server_options(10))["grpc.max_allowed_incoming_connections"] == 16
