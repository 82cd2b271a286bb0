"""What one client can take of a server: memory while frames come, streams, places, and bytes that
are not requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from regauge.errors import FrameError, RefusedError
from regauge.split import Host, InProcess, TransportError, connect
from regauge.split.client.journal import FolderJournal
from regauge.split.protocol.channel import Loop
from regauge.split.protocol.frames import Frame, Kind, Limits, decode, encode
from regauge.split.server import network as module
from regauge.split.server.flow_control import FlowControl, StreamUsage
from regauge.split.server.network import Grpc, Server
from regauge.split.server.quotas import Quota, Quotas
from support.split_pairs import ADAMW, batch, make_model, optimizer_of, train

pytest.importorskip("grpc")
GOOD = b"".join(encode(Frame(Kind.STEP, 1, {"session": "a" * 32})))


def test_past_its_share_a_client_is_read_from_one_stream_at_a_time() -> None:
    holdings = FlowControl(100, 3)
    with holdings.stream("ann") as a, holdings.stream("ann") as b, holdings.stream("bob") as c:

        def who() -> list[bool]:
            return [holdings.may_read(usage) for usage in (a, b, c)]

        assert who() == [True, True, True]
        b.add(60)
        a.add(39)
        assert who() == [True, True, True]
        a.add(1)
        assert who() == [False, True, True]  # b's frame began first
        b.add(1000)
        assert who() == [False, True, True]
        b.clear()
        assert who() == [True, True, True]
        a.add(100)
        assert who() == [True, False, True]
    assert (holdings.usage, holdings.stream_counts) == ({}, {})


def test_a_stream_that_ends_gives_back_what_it_held() -> None:
    holdings = FlowControl(100, 2)
    with holdings.stream("ann") as a:
        with holdings.stream("ann") as b:
            b.add(500)
            a.add(1)
            assert not holdings.may_read(a)
            with (
                pytest.raises(FrameError, match="ann has reached its limit of 2 streams") as error,
                holdings.stream("ann"),
            ):
                pass
            assert error.value.code == "busy"
            with holdings.stream("bob"):
                pass
        assert holdings.may_read(a)


async def _stream(link: Grpc, *pieces: bytes) -> Any:
    stream = link._open_stream()
    for piece in pieces:
        await stream.write(piece)
    return stream


async def _reply(stream: Any, seconds: float = 30.0) -> Frame:
    while not (piece := await asyncio.wait_for(stream.read(), seconds)):
        pass
    return decode(piece)


def test_half_frames_of_many_streams_wait_for_each_other_and_are_all_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two halves are held, and a third stream's bytes are not read, until one of them has ended.
    Its client hears that the server is there.
    """
    monkeypatch.setattr(module, "HEARTBEAT_SECONDS", 0.05)
    half = len(GOOD) // 2
    with (
        Server(Host(make_model("gpt2"), limits=Limits(payload=2 * half))) as server,
        Grpc(f"127.0.0.1:{server.port}") as link,
    ):
        server.flow_control.share = 2 * half

        def held() -> list[int]:
            return [sum(streams.values()) for streams in server.flow_control.usage.values()]

        async def run() -> None:
            first, second = await _stream(link, GOOD[:half]), await _stream(link, GOOD[:half])
            while held() != [2 * half]:
                await asyncio.sleep(0.01)
            third = await _stream(link, GOOD)
            await second.write(GOOD[half:])
            assert await asyncio.wait_for(third.read(), 30) == b""  # it waits
            await asyncio.sleep(0.2)
            assert held() == [2 * half]
            await first.write(GOOD[half:])
            for stream in (first, second, third):
                assert (await _reply(stream)).values["code"] == "session"

        Loop.run(run(), 60)


def test_streams_of_one_client_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_STREAMS", 2)
    with Server(Host(make_model("gpt2"))) as server, Grpc(f"127.0.0.1:{server.port}") as link:

        async def run() -> None:
            one, two = await _stream(link, GOOD), await _stream(link, GOOD)
            assert [(await _reply(s)).values["code"] for s in (one, two)] == ["session", "session"]
            assert (await _reply(await _stream(link, GOOD))).values["code"] == "busy"
            two.cancel()
            while server.streams > 1:
                await asyncio.sleep(0.01)
            assert (await _reply(await _stream(link, GOOD))).values["code"] == "session"

        Loop.run(run(), 60)


def test_bytes_that_are_no_request_count_too() -> None:
    now = [0.0]
    host = Host(make_model("gpt2"), quotas=Quotas(Quota(bytes=600), clock=lambda: now[0]))
    broken = GOOD[:-1] + bytes([GOOD[-1] ^ 1]) + bytes(600)
    with Server(host) as server, Grpc(f"127.0.0.1:{server.port}") as link:

        async def run() -> None:
            assert (await _reply(await _stream(link, GOOD))).values["code"] == "session"
            assert (await _reply(await _stream(link, broken))).values["code"] == "checksum"
            waits = await _stream(link, GOOD)
            assert (
                await asyncio.wait_for(waits.read(), 30) == b""
            )  # it has used its minute, and still learns that the server is healthy
            before = server.received
            await asyncio.sleep(0.1)
            assert server.received == before
            now[0] = 60.0
            assert (await _reply(waits)).values["code"] == "session"

        Loop.run(run(), 60)


def test_a_known_client_takes_a_quarter_of_all_places() -> None:
    host = Host(make_model("gpt2"), max_sessions=8)
    for _ in range(2):
        connect(make_model("gpt2"), InProcess(host, "ann")).close()
    with pytest.raises(RefusedError, match="ann has 2 sessions, and its quota is 2"):
        connect(make_model("gpt2"), InProcess(host, "ann"))
    connect(make_model("gpt2"), InProcess(host, "bob")).close()
    for _ in range(5):
        connect(make_model("gpt2"), InProcess(host)).close()  # without certificates all are one
    with pytest.raises(RefusedError, match="has reached its limit of 8 sessions"):
        connect(make_model("gpt2"), InProcess(host))


def test_a_server_that_says_for_ever_that_it_computes_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "HEARTBEAT_SECONDS", 0.05)
    with (
        Server(Host(make_model("gpt2"))) as server,
        Grpc(f"127.0.0.1:{server.port}", compute_timeout=0.5) as link,
    ):
        server.flow_control.share = -1
        with server.flow_control.stream("") as other:
            other.add(1)  # what began before never ends
            with pytest.raises(TransportError):
                link.exchange([memoryview(GOOD)])


def test_a_first_contact_that_fails_leaves_no_journal(tmp_path: Path) -> None:
    class Unreachable:
        def exchange(self, request: Sequence[memoryview]) -> bytes:
            raise TransportError("no server is listening")

    with pytest.raises(TransportError):
        connect(make_model("gpt2"), Unreachable(), journal=tmp_path / "a", patience=0.01)
    assert not list((tmp_path / "a").iterdir())
    host, mine = Host(make_model("gpt2"), ADAMW), make_model("gpt2")
    with connect(mine, InProcess(host), journal=tmp_path / "a"):
        train("gpt2", mine, optimizer_of(mine), range(1))
    session = FolderJournal(tmp_path / "a").session
    FolderJournal(tmp_path / "a").abandon()  # a run that has begun stays
    assert FolderJournal(tmp_path / "a").session == session
    assert batch("gpt2", 0)


def test_memory_is_counted_per_stream() -> None:
    peer: dict[StreamUsage, int] = {}
    first, second = StreamUsage(peer), StreamUsage(peer)
    first.add(3)
    first.add(4)
    assert (first.size, second.size) == (7, 0)
    second.clear()
    assert first.size == 7
