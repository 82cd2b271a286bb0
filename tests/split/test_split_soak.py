"""Memory over many messages, every tenth stream of which is cancelled in the middle.
REGAUGE_MESSAGES is how many (200,000).
"""

from __future__ import annotations

import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("grpc")

from regauge.split import Host
from regauge.split.protocol.frames import Frame, Kind, decode, encode
from support.split_pairs import make_model
from support.split_processes import Child

MESSAGES = int(os.environ.get("REGAUGE_MESSAGES", "200000"))
GROWTH = 0.05


def resident(pid: int | str = "self") -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    from regauge.split.server.network import Server

    with Server(Host(make_model("gpt2"), max_sessions=4)) as server:
        pipe.send(("ready", server.port))
        pipe.recv()


def _ask(pipe: Connection, port: int, messages: int) -> None:
    """Messages over streams of ten each; every tenth message is begun, and its stream cancelled."""
    from regauge.split.server.network import Grpc

    class Cancelling(Grpc):
        def cancel_in_the_middle(self, request: Any) -> None:
            from regauge.split.protocol.channel import Loop

            async def work() -> None:
                if self.stream is None or self.stream.done():
                    self.stream = self._open_stream()
                await self.stream.write(request)
                self.stream.cancel()
                self.stream = None

            Loop.run(work(), 30)

    x = torch.randn(16, 256)
    frame = Frame(Kind.FORWARD, 0, {"session": "0" * 32}, {"x": x})
    half = b"".join(encode(frame))[: x.numel() * 2]
    with Cancelling(f"127.0.0.1:{port}") as network:
        for i in range(messages):
            if i % 10 == 9:
                network.cancel_in_the_middle(half)
            else:
                assert decode(network.exchange(encode(frame))).values["code"] == "session"
            if i % 100 == 99:
                pipe.send(("at", i + 1, resident()))
    pipe.send(("end",))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_memory_stays_where_it_is() -> None:
    server = Child(_serve)
    _, port = server.receive("ready")
    client = Child(_ask, port, MESSAGES)
    sizes: list[tuple[int, int, int]] = []
    try:
        while not sizes or sizes[-1][0] < MESSAGES // 100 * 100:
            _, i, size = client.receive("at")
            sizes.append((i, size, resident(server.process.pid or "self")))
    finally:
        client.kill()
        server.kill()
    warm = next(s for s in sizes if s[0] >= MESSAGES // 10)
    end = sizes[-1]
    for side, a, b in zip(("client", "server"), warm[1:], end[1:], strict=True):
        print(
            f"{side}: {a / 1e6:.1f} MB after {warm[0]} messages, {b / 1e6:.1f} MB after {end[0]}",
            file=sys.stderr,
        )
        assert b < (1 + GROWTH) * a, side
