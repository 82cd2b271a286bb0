"""Over gRPC: the same bytes, the same weights; who may not come is refused; a server that dies and comes back is found again."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

pytest.importorskip("grpc")

from regauge.split import Host, InProcess, TransportError, connect
from regauge.split.certs import make_certificates
from regauge.split.frames import Frame, Kind, RefusedError, decode, encode
from regauge.split.network import Grpc, Server, is_loopback
from splits import ADAMW, columns, locked, made, optimizer_of, same, train, whole

STEPS = range(4)


def undisturbed() -> dict[str, torch.Tensor]:
    mine = made("gpt2")
    g = columns(mine)
    host = Host(locked(mine, g), ADAMW)
    with connect(mine, InProcess(host), element=g, rows="batch", secret=5):
        train("gpt2", mine, optimizer_of(mine), STEPS)
    return whole(mine, host, g)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def test_training_over_mutual_tls_is_training_in_process(tmp_path: Path) -> None:
    tls = make_certificates(tmp_path, clients=("ann", "bob"))
    mine = made("gpt2")
    g = columns(mine)
    host = Host(locked(mine, g), ADAMW)
    with Server(host, tls=tls["server"], clients=["ann"]) as server:
        with (
            Grpc(f"localhost:{server.port}", tls=tls["ann"]) as network,
            connect(mine, network, element=g, rows="batch", secret=5),
        ):
            train("gpt2", mine, optimizer_of(mine), STEPS)
        assert [s.peer for s in host.sessions.values()] == ["ann"]
        with Grpc(f"localhost:{server.port}", tls=tls["bob"]) as network, pytest.raises(RefusedError, match="does not know you"):
            connect(made("gpt2"), network, patience=3)
        stranger = make_certificates(tmp_path / "other")["client"]
        for tls_or_none in (stranger, None):
            with Grpc(f"localhost:{server.port}", tls=tls_or_none) as network, pytest.raises(TransportError):
                connect(made("gpt2"), network, patience=0.3)
    assert same(whole(mine, host, g), undisturbed())
    assert all(f.stat().st_mode & 0o077 == 0 for f in tmp_path.glob("*.key"))


def test_large_frames_cross_in_chunks_and_nonsense_is_answered() -> None:
    with Server(Host(made("gpt2"), ADAMW)) as server:
        for data in (b"x" * 100, b"x" * 5_000_000):
            with Grpc(f"127.0.0.1:{server.port}") as network:
                reply = decode(network.exchange([memoryview(data)]))
                assert (reply.kind, reply.values["code"]) == (Kind.ERROR, "magic")
        large = Frame(Kind.FORWARD, 1, {"session": "0" * 32}, {"z": torch.zeros(1_000_000, dtype=torch.float64)})
        with Grpc(f"127.0.0.1:{server.port}") as network:
            for _ in range(2):  # on one stream
                assert decode(network.exchange(encode(large))).values["code"] == "session"


def test_plaintext_is_for_loopback() -> None:
    host = Host(made("gpt2"))
    for address in ("0.0.0.0:0", "192.168.1.5:7000", "example.org:7000", "[::]:0"):
        with pytest.raises(TransportError, match="without TLS"):
            Server(host, address)
        with pytest.raises(TransportError, match="without TLS"):
            Grpc(address)
    assert all(is_loopback(a) for a in ("127.0.0.1:1", "[::1]:1", "localhost:1", "unix:/tmp/s"))


def test_a_server_that_is_gone_for_a_while_is_found_again(tmp_path: Path) -> None:
    mine = made("gpt2")
    g = columns(mine)
    start = locked(mine, g)
    port = free_port()

    def served() -> Server:
        return Server(Host(locked(start, None), ADAMW, folder=tmp_path, every=2), f"127.0.0.1:{port}")

    servers = [served()]
    timers: list[threading.Timer] = []

    def after(step: int) -> None:
        if step in (0, 2):
            servers[-1].host.folder = None  # a server that is killed keeps nothing more
            servers[-1].stop(0)
            timers.append(threading.Timer(0.3, lambda: servers.append(served())))
            timers[-1].start()

    with Grpc(f"127.0.0.1:{port}") as network, connect(mine, network, element=g, rows="batch", secret=5):
        train("gpt2", mine, optimizer_of(mine), STEPS, after)
    for timer in timers:
        timer.join()
    servers[-1].stop()
    assert len(servers) == 3
    assert same(whole(mine, servers[-1].host, g), undisturbed())


def test_clients_at_once() -> None:
    host = Host(made("gpt2"), ADAMW)
    faults: list[BaseException] = []

    def one(seed: int) -> None:
        try:
            mine = made("gpt2")
            with Grpc(f"127.0.0.1:{server.port}") as network, connect(mine, network, rows="batch"):
                optimizer = optimizer_of(mine)
                for step in range(3):
                    optimizer.zero_grad()
                    mine(input_ids=torch.full((1, 4), 3 + seed), labels=torch.full((1, 4), 3 + step)).loss.backward()
                    optimizer.step()
        except BaseException as error:
            faults.append(error)

    with Server(host) as server:
        threads = [threading.Thread(target=one, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert faults == []
    assert host.step == 12


SERVE = """
import sys
sys.path[:0] = [{tests!r}]
import torch
torch.set_num_threads(1)
from regauge.split import Host
from regauge.split.network import Server
from splits import ADAMW, columns, locked, made
model = made("gpt2")
server = Server(Host(locked(model, columns(model)), ADAMW, folder={folder!r}, every=2), "127.0.0.1:{port}")
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_a_server_process_that_is_killed_or_hangs(tmp_path: Path, fault: str) -> None:
    import signal
    import time

    port = free_port()
    code = SERVE.format(tests=str(Path(__file__).parent), folder=str(tmp_path), port=port)

    def served() -> subprocess.Popen:
        process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    processes = [served()]
    took: list[float] = []

    def after(step: int) -> None:
        if step == 2:
            processes[-1].send_signal(signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
            if fault == "kill":
                processes[-1].wait()
                processes.append(served())
            else:
                began = time.monotonic()
                with Grpc(f"127.0.0.1:{port}") as other, pytest.raises(TransportError):
                    connect(made("gpt2"), other, patience=0.0)
                took.append(time.monotonic() - began)
                processes[-1].send_signal(signal.SIGCONT)

    try:
        mine = made("gpt2")
        g = columns(mine)
        with Grpc(f"127.0.0.1:{port}") as network, connect(mine, network, element=g, rows="batch", secret=5):
            train("gpt2", mine, optimizer_of(mine), STEPS, after)
        processes[-1].send_signal(signal.SIGKILL)
        processes[-1].wait()
        host = Host(locked(made("gpt2"), g), ADAMW, folder=tmp_path)
        assert same(whole(mine, host, g), undisturbed())  # four steps, the last checkpoint after the fourth
        assert all(t < 6 for t in took)
    finally:
        for process in processes:
            process.kill()
            process.wait()
