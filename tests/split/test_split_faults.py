"""Signals, resets and partitions: whatever happens on the way, the weights are those of an
undisturbed run, bit for bit.

REGAUGE_SOAK is how many times each fault happens (2; `make soak`: 50). With it, processes hang for
10 s and the network is parted for 30 s; a hung peer must be found within 5 s, and work go on within
5 s after it is back.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("grpc")

from regauge.split import Host, connect
from regauge.split.protocol.certificates import make_certificates
from regauge.split.server.network import Grpc, Server
from support.proxies import Proxy
from support.split_pairs import (
    ADAMW,
    KINDS,
    Faulty,
    assemble_state,
    columns,
    lock_backbone,
    make_model,
    optimizer_of,
    same,
)
from support.split_processes import (
    SECRET,
    Child,
    calm,
    client,
    end_server,
    saved_weights,
    server,
    train_steps,
)

COUNT = int(os.environ.get("REGAUGE_SOAK", "2"))
IS_SOAK = "REGAUGE_SOAK" in os.environ
EACH = 3  # steps between two faults
STEPS = EACH * (COUNT + 1)
DETECTED = RESUMED = 5.0  # seconds


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Run:
    """A server and a client at work, and which faults are to come."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port, self.random = folder, free_port(), random.Random(0)
        self.server, self.client = server(self.port, folder), client(self.port, folder, STEPS)
        self.reached = -1

    def until_busy(self, fault: int) -> None:
        """Wait until the client is some way into the steps of this fault, and goes on."""
        self.client.pipe.send(EACH * (fault + 1))
        at = EACH * fault + self.random.randrange(2)
        while self.reached < at:
            self.reached = self.client.receive("step")[1]
        time.sleep(self.random.uniform(0, 0.02))

    def finish(self) -> None:
        self.client.pipe.send(STEPS)
        self.client.receive("end")
        end_server(self.server)

    def close(self) -> None:
        for child in (self.client, self.server):
            child.kill()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    made.close()


def test_a_server_that_is_killed(run: Run) -> None:
    for fault in range(COUNT):
        run.until_busy(fault)
        run.server.kill()
        run.server = server(run.port, run.folder)
    run.finish()
    assert same(saved_weights(run.folder, STEPS), calm(STEPS))


def test_a_client_that_is_killed(run: Run) -> None:
    for fault in range(COUNT):
        run.until_busy(fault)
        run.client.kill()
        run.client = client(run.port, run.folder, STEPS)
        run.reached = -1
    run.finish()
    assert same(saved_weights(run.folder, STEPS), calm(STEPS))


@pytest.mark.parametrize("which", ["server", "client"])
def test_a_process_that_hangs(run: Run, which: str) -> None:
    for fault in range(COUNT):
        run.until_busy(fault)
        hung: Child = getattr(run, which)
        hung.signal(signal.SIGSTOP)
        stopped = time.monotonic()
        run.client.pipe.send(
            EACH * (fault + 1) + 1
        )  # so that there is a step that it must be found in
        # a ping is sent after 1 s and given up after 3 s more
        time.sleep(10.0 if IS_SOAK else (4.5, 0.5)[fault % 2])
        hung.signal(signal.SIGCONT)
        back = time.monotonic()
        if IS_SOAK and which == "server":
            assert run.client.receive("broken")[2] - stopped < DETECTED
        until = EACH * (fault + 1)
        while run.reached < until:
            _, run.reached, when = run.client.receive("step")
            if IS_SOAK and run.reached == until:
                assert when - back < RESUMED
    run.finish()
    assert same(saved_weights(run.folder, STEPS), calm(STEPS))


ROWS = 256


def test_a_connection_that_is_reset_in_the_middle_of_a_frame(tmp_path: Path) -> None:
    tls = make_certificates(tmp_path)
    mine, dice = make_model("gpt2"), random.Random(1)
    g = columns(mine)
    host = Host(lock_backbone(mine, g), ADAMW)
    with (
        Server(host, tls=tls["server"]) as served,
        Proxy(served.port) as way,
        Grpc(f"localhost:{way.port}", tls=tls["client"]) as network,
    ):

        def after(step: int) -> None:
            if way.resets < COUNT:
                way.reset_after(
                    dice.randrange(1, 4 * ROWS * 16 * 12 * 8)
                )  # a step moves four tensors of that size

        with connect(mine, network, element=g, rows="batch", secret=SECRET):
            train_steps(mine, optimizer_of(mine), range(STEPS), ROWS, after)
        assert way.resets == COUNT
        assert way.connections > COUNT
    assert host.step == STEPS
    assert same(assemble_state(mine, host, g), calm(STEPS, ROWS))


def test_a_network_that_is_parted_for_a_while() -> None:
    mine = make_model("gpt2")
    g = columns(mine)
    host = Host(lock_backbone(mine, g), ADAMW)
    parted: list[float] = []
    with (
        Server(host) as served,
        Proxy(served.port) as way,
        Grpc(f"127.0.0.1:{way.port}") as network,
    ):

        def after(step: int) -> None:
            if parted and IS_SOAK and step % EACH == 0:
                assert time.monotonic() - parted[-1] < RESUMED
            if step % EACH == 2 and len(parted) < COUNT:
                seconds = 30.0 if IS_SOAK else (5.5, 0.5)[len(parted) % 2]
                parted.append(time.monotonic() + seconds)
                way.part(seconds)

        with connect(mine, network, element=g, rows="batch", secret=SECRET):
            train_steps(mine, optimizer_of(mine), range(STEPS), after=after)
    assert len(parted) == COUNT
    assert same(assemble_state(mine, host, g), calm(STEPS))


@pytest.mark.parametrize("kind", KINDS)
def test_frames_that_are_dropped_repeated_reordered_or_truncated(kind: str) -> None:
    mine = make_model("gpt2")
    g = columns(mine)
    host = Host(lock_backbone(mine, g), ADAMW)
    network = Faulty(lambda: host, 0, rate=0.4, kinds=(kind,))
    with connect(mine, network, element=g, rows="batch", secret=SECRET) as link:
        link.log.sleep = lambda _: None
        train_steps(mine, optimizer_of(mine), range(STEPS), rows=2)
    assert network.faults[kind] >= COUNT
    assert host.step == STEPS
    assert same(assemble_state(mine, host, g), calm(STEPS, 2))


def test_a_way_with_delay_stalls_and_resets_is_the_local_run() -> None:
    """As bad as a mobile network: 50 ms each way, a stall and a reset now and then."""
    mine, dice = make_model("gpt2"), random.Random(2)
    g = columns(mine)
    host = Host(lock_backbone(mine, g), ADAMW)
    with (
        Server(host) as served,
        Proxy(served.port, delay=0.05) as way,
        Grpc(f"127.0.0.1:{way.port}") as network,
    ):

        def after(step: int) -> None:
            if step % 3 == 1:
                way.part(0.3)
            if step % 3 == 2:
                way.reset_after(dice.randrange(1, 300_000))

        with connect(mine, network, element=g, rows="batch", secret=SECRET):
            train_steps(mine, optimizer_of(mine), range(STEPS), after=after)
        assert way.resets > 0
    assert same(assemble_state(mine, host, g), calm(STEPS))


@pytest.mark.slow
def test_a_slow_link_is_not_taken_for_a_hung_peer() -> None:
    """A frame takes longer than any ping may: 2 MiB at 200 kB/s."""
    rows = 1400
    mine = make_model("gpt2")
    g = columns(mine)
    host = Host(lock_backbone(mine, g), ADAMW)
    with (
        Server(host) as served,
        Proxy(served.port, rate=200e3) as way,
        Grpc(f"127.0.0.1:{way.port}") as network,
    ):
        with connect(mine, network, element=g, rows="batch", secret=SECRET, patience=5):
            train_steps(mine, optimizer_of(mine), range(1), rows)
        assert way.connections == 1  # nothing broke
        assert way.crossed[0] > 2 * rows * 16 * 12 * 8
    assert same(assemble_state(mine, host, g), calm(1, rows))


def test_threads_are_fixed() -> None:
    assert torch.get_num_threads() == 1  # what "bit for bit" rests on
