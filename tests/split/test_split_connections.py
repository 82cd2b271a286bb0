"""Bounds on connections and health streams, which need no session."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

pytest.importorskip("grpc")

import grpc

from regauge.split import Host, connect
from regauge.split.protocol.certificates import make_certificates
from regauge.split.server import connections
from regauge.split.server.connections import (
    SPARE_FILES,
    Watches,
    raise_open_file_limit,
    server_options,
)
from regauge.split.server.network import Grpc, Server
from support.split_pairs import ADAMW, batch, make_model

WATCH = "/grpc.health.v1.Health/Watch"


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(Host(make_model("gpt2"), ADAMW)) as running:
        yield running
        running.stop(0.0)


def test_watch_streams_are_bounded_per_client(server: Server) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        watch = channel.unary_stream(WATCH)
        streams = [watch(b"", timeout=30) for _ in range(connections.MAX_WATCHES_PER_CLIENT)]
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
    watches = Watches(total=3, per_client=2)
    with ExitStack() as stack:
        assert [
            stack.enter_context(watches.stream(name)) for name in ("a", "a", "a", "b", "c")
        ] == [True, True, False, True, False]
    assert not watches.open
    with watches.stream("c") as admitted:
        assert admitted


def is_closed(connection: socket.socket, seconds: float) -> bool:
    """Return whether the other side closes a connection within some seconds."""
    connection.settimeout(seconds)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


def test_connections_without_a_handshake_are_bounded_and_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 20)
    monkeypatch.setattr(connections, "HANDSHAKE_SECONDS", 2)
    tls = make_certificates(tmp_path, ["127.0.0.1"], ["ann"])
    with Server(Host(make_model("gpt2"), ADAMW), tls=tls["server"]) as server, ExitStack() as stack:
        idle = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 30))
            for _ in range(40)
        ]
        assert is_closed(idle[-1], 30)  # past the bound: at once
        model = make_model("gpt2")
        with (
            Grpc(f"127.0.0.1:{server.port}", tls=tls["ann"]) as network,
            connect(model, network, patience=60),
        ):
            model(
                **batch("gpt2", 0)
            ).loss.backward()  # a client gets through when handshakes have timed out
        assert server.host.step == 1
        assert all(is_closed(one, 30) for one in idle)
        server.stop(0.0)


def test_open_files() -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 300), hard))
        raised = raise_open_file_limit()
        assert raised == resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 300 or hard <= 300
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert dict(server_options(1024))["grpc.max_allowed_incoming_connections"] == 1024 - SPARE_FILES
    assert dict(server_options(10))["grpc.max_allowed_incoming_connections"] == 16
