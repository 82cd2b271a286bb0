"""A client with a good certificate and bad intentions, a server likewise, and disks that fill up:
what each may spoil, and for whom.
"""

from __future__ import annotations

import asyncio
import json
import math
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from regauge.errors import CheckpointError, FrameError, RefusedError
from regauge.split import Host, InProcess, OptimizerConfig, TransportError, connect
from regauge.split.client.journal import MemoryJournal
from regauge.split.protocol.channel import Loop
from regauge.split.protocol.frames import (
    HEADER,
    MAGIC,
    UNCHECKED_SIZE,
    VERSION,
    Bytes,
    Frame,
    Kind,
    checksum,
    decode,
    encode,
)
from regauge.split.protocol.transport import deliver
from regauge.split.server.network import Grpc, Server
from regauge.split.server.quotas import Quota, Quotas
from support.split_pairs import ADAMW, batch, make_model, optimizer_of, same, train

pytest.importorskip("grpc")


class Tapped:
    """A transport that keeps what crosses, and changes replies if asked to."""

    def __init__(
        self, host: Host, peer: str = "", change: Callable[[Frame], Frame] | None = None
    ) -> None:
        self.inner, self.change = InProcess(host, peer), change
        self.sent: list[bytes] = []

    def exchange(self, request: Sequence[memoryview]) -> Bytes:
        self.sent.append(b"".join(request))
        reply = self.inner.exchange(request)
        return reply if self.change is None else b"".join(encode(self.change(decode(reply))))


def raw(kind: int, number: int, table: bytes, payload: bytes = b"") -> bytes:
    """A frame of any table."""
    bare = HEADER.pack(MAGIC, VERSION, kind, 0, len(table), len(payload), number, b"")[
        :UNCHECKED_SIZE
    ]
    return bare + checksum(bare, table, payload) + table + payload


def exchange(host: Host, data: bytes, peer: str = "") -> Frame:
    return decode(deliver(host, [data], peer))


def open_session(host: Host, peer: str = "") -> bytes:
    """The bytes of a first training request, whose session is there and which was not sent."""
    spare = Host(make_model("gpt2"), ADAMW)
    mine = make_model("gpt2")
    tap = Tapped(spare)
    with connect(mine, tap):
        mine(**batch("gpt2", 0)).loss.backward()
    hello, forward = tap.sent[0], next(d for d in tap.sent if decode(d).kind is Kind.FORWARD)
    assert exchange(host, hello, peer).kind is Kind.WELCOME
    return forward


def with_value(data: bytes, name: str, value: str) -> bytes:
    """The same request with one more value, given as text, in a table that is written as another
    program would.
    """
    table, payload = HEADER.unpack_from(data)[4:6]
    report = json.loads(data[HEADER.size : HEADER.size + table])
    text = json.dumps(report, ensure_ascii=False).replace(
        '{"values": {', f'{{"values": {{"{name}": {value}, ', 1
    )
    return raw(data[5], HEADER.unpack_from(data)[6], text.encode(), data[len(data) - payload :])


def test_a_request_cannot_make_the_checkpoint_unwritable(tmp_path: Path) -> None:
    host = Host(make_model("gpt2"), ADAMW, folder=tmp_path)
    forward = open_session(host)
    assert exchange(host, with_value(forward, "x", "1e999")).values["code"] == "table"
    assert exchange(host, with_value(forward, "x", "1e99")).kind is Kind.OUTPUT
    host.save()


def test_a_request_cannot_make_the_checkpoint_unreadable(tmp_path: Path) -> None:
    """Its table is within the limits in UTF-8, and is not when it is written with escapes."""
    host = Host(make_model("gpt2"), ADAMW, folder=tmp_path)
    assert (
        exchange(host, with_value(open_session(host), "x", '"' + "\u4e2d" * 20_000 + '"')).kind
        is Kind.OUTPUT
    )
    host.save()
    assert (
        len(next(iter(Host(make_model("gpt2"), ADAMW, folder=tmp_path).sessions.values())).pending)
        == 1
    )


@pytest.mark.parametrize("shape", [[0, 1 << 39, 1 << 39], [1 << 39, 1 << 39, 0]])
def test_shapes_that_overflow_behind_a_zero_are_refused(shape: list[int]) -> None:
    for dtype, codec in (("F32", ""), ("F32", "BITS"), ("BOOL", "")):
        with pytest.raises(FrameError, match="must have at most 8 axes"):
            decode(
                raw(
                    3,
                    1,
                    json.dumps({"values": {}, "tensors": [["a", dtype, shape, codec]]}).encode(),
                    bytes(8 if codec else 0),
                )
            )
    assert decode(raw(3, 1, b'{"values":{},"tensors":[["a","F32",[0,3],""]]}')).tensors[
        "a"
    ].shape == (0, 3)


def test_refusals_tell_nothing_of_others_sessions() -> None:
    host = Host(make_model("gpt2"), ADAMW)
    mine = make_model("gpt2")
    with connect(mine, InProcess(host, "bob")) as link:
        train("gpt2", mine, optimizer_of(mine), range(2))
        request = b"".join(encode(Frame(Kind.STEP, 99, {"session": link.log.journal.session})))
    assert exchange(host, request, "bob").values["done"] == 4
    refused = exchange(host, request, "ann").values
    assert (refused["code"], refused["done"], refused["saved"]) == ("session", 0, 0)


# Disks that fill up


@contextmanager
def full_disk(most: int = 4096) -> Iterator[None]:
    """No file may have more bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_failing_checkpoint_does_not_reject_completed_steps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mine, calm = make_model("gpt2"), make_model("gpt2")
    host, other = (
        Host(make_model("gpt2"), ADAMW, folder=tmp_path, save_every=2),
        Host(make_model("gpt2"), ADAMW),
    )
    optimizer = optimizer_of(mine)
    with connect(mine, InProcess(host)) as link:
        with full_disk():
            train("gpt2", mine, optimizer, range(3))
            assert caplog.text.count("checkpoint at step 2 failed") == 1
            assert (link.log.saved, len(link.log.journal.requests), list(tmp_path.iterdir())) == (
                0,
                6,
                [],
            )  # type: ignore[union-attr]
            with pytest.raises(CheckpointError, match="cannot be written"):
                host.save()
        train("gpt2", mine, optimizer, range(3, 5))
        assert link.log.saved == 0 or host.saved_step == 4
    assert host.saved_step == 4
    with connect(calm, InProcess(other)):
        train("gpt2", calm, optimizer_of(calm), range(5))
    assert same(host.backbone(), other.backbone())
    assert (tmp_path / "split.safetensors").stat().st_mode & 0o077 == 0


# Numbers that spoil what all share


@pytest.mark.parametrize(("size", "accumulate"), [(1e30, 1), (2.5e38, 4)])
def test_gradients_that_overflow_later_are_refused_now(size: float, accumulate: int) -> None:
    host = Host(
        make_model("gpt2", torch.float32), OptimizerConfig("adamw", 1e-3, accumulate=accumulate)
    )
    mine = make_model("gpt2", torch.float32)
    with connect(mine, InProcess(host)):
        with pytest.raises(FrameError, match="and their squares must be finite"):
            (mine(**batch("gpt2", 0, torch.float32)).logits.mean() * size).backward()
        assert not host.main.gradients()
        mine(**batch("gpt2", 1, torch.float32)).loss.backward()
    assert all(
        bool(torch.isfinite(t).all())
        for moments in host.main.moments().values()
        for t in moments.values()
    )
    assert (host.step, len(host.main.gradients()) > 0) == (int(accumulate == 1), accumulate > 1)


# A step is taken once


@pytest.mark.parametrize("how", ["ended", "idle"])
def test_a_session_that_is_over_is_not_taken_again(tmp_path: Path, how: str) -> None:
    """The client's journal still has all requests: no checkpoint was there to say that they are
    kept.
    """
    host = Host(
        make_model("gpt2"), ADAMW, folder=tmp_path, save_every=1000, max_sessions=1, idle=0.0
    )
    mine, journal = make_model("gpt2"), MemoryJournal()
    with connect(mine, InProcess(host), journal=journal) as link:
        train("gpt2", mine, optimizer_of(mine), range(2))
        if how == "ended":
            link.end()
    if how == "idle":
        connect(make_model("gpt2"), InProcess(host)).close()  # takes its place
    before = host.backbone()
    assert sorted(journal.requests) == [1, 2, 3, 4]
    host.save()
    for server in (host, Host(make_model("gpt2"), ADAMW, folder=tmp_path)):
        with pytest.raises(RefusedError, match="the session has ended") as error:
            link.log.flush() if server is host else connect(
                make_model("gpt2"), InProcess(server), journal=journal
            )
        assert error.value.code == "ended"
        assert server.step == 2
        assert same(server.backbone(), before)


def test_a_server_that_crashes_again_during_recovery(tmp_path: Path) -> None:
    def fresh(folder: str) -> Host:
        return Host(make_model("gpt2"), ADAMW, folder=tmp_path / folder, save_every=1000)

    class Lost(Tapped):
        def exchange(self, request: Sequence[memoryview]) -> Bytes:
            if len(self.sent) in (
                9,
                13,
            ):  # after four steps, and in the middle of what is sent again
                self.inner = InProcess(spare.pop())
            return super().exchange(request)

    mine, calm, host, spare = (
        make_model("gpt2"),
        make_model("gpt2"),
        fresh("calm"),
        [fresh("lost"), fresh("lost")],
    )
    tap = Lost(fresh("lost"))
    with connect(mine, tap):
        train("gpt2", mine, optimizer_of(mine), range(5))
    with connect(calm, InProcess(host)):
        train("gpt2", calm, optimizer_of(calm), range(5))
    again = [decode(d).number for d in tap.sent]
    assert again.count(1) == 3, again
    assert same(tap.inner.host.backbone(), host.backbone())


def test_a_client_that_died_is_not_locked_out_by_its_own_quota() -> None:
    host = Host(make_model("gpt2"), quotas=Quotas(Quota(sessions=1)), idle=1000.0)
    connect(make_model("gpt2"), InProcess(host, "ann")).close()
    with pytest.raises(RefusedError, match="its quota is 1"):
        connect(make_model("gpt2"), InProcess(host, "ann"))
    connect(make_model("gpt2"), InProcess(host, "bob")).close()
    host.idle = 0.0
    connect(make_model("gpt2"), InProcess(host, "ann")).close()
    assert sorted(s.peer for s in host.sessions.values()) == ["ann", "bob"]


def test_rejected_clients_take_no_slot() -> None:
    """Carol is idle and the server full: bob, at his quota, is rejected and carol stays; dave takes
    her place. A client over a quota that was lowered loses none of its sessions by asking in vain.
    """
    host = Host(make_model("gpt2"), quotas=Quotas(Quota(sessions=1)), max_sessions=2, idle=100.0)
    for peer in ("carol", "bob"):
        connect(make_model("gpt2"), InProcess(host, peer)).close()
    (carols, carol), (_, bob) = host.sessions.items()
    carol.last_seen -= 200.0
    with pytest.raises(RefusedError, match="bob has 1 sessions, and its quota is 1"):
        connect(make_model("gpt2"), InProcess(host, "bob"))
    assert [s.peer for s in host.sessions.values()] == ["carol", "bob"]
    connect(make_model("gpt2"), InProcess(host, "dave")).close()
    assert [s.peer for s in host.sessions.values()] == ["bob", "dave"]
    assert carols not in host.sessions
    with pytest.raises(RefusedError, match="the server has reached its limit of 2 sessions"):
        connect(make_model("gpt2"), InProcess(host, "erin"))
    host.quotas, host.max_sessions = Quotas(), 8
    connect(make_model("gpt2"), InProcess(host, "bob")).close()
    host.quotas = Quotas(Quota(sessions=1))
    bob.last_seen -= 200.0
    with pytest.raises(RefusedError, match="bob has 2 sessions, and its quota is 1"):
        connect(make_model("gpt2"), InProcess(host, "bob"))
    assert sorted(s.peer for s in host.sessions.values()) == ["bob", "bob", "dave"]
    for session in host.sessions.values():
        session.last_seen -= 200.0
    connect(make_model("gpt2"), InProcess(host, "bob")).close()
    assert sorted(s.peer for s in host.sessions.values()) == ["bob", "dave"]


# Memory


def test_clients_that_join_and_leave_in_a_round_are_counted() -> None:
    host = Host(make_model("gpt2"), ADAMW, average=3, max_sessions=4)
    slow = make_model("gpt2")
    with connect(slow, InProcess(host)):
        train("gpt2", slow, optimizer_of(slow), range(1))  # the round waits for it
        for _ in range(4):
            mine = make_model("gpt2")
            with connect(mine, InProcess(host)) as link:
                train("gpt2", mine, optimizer_of(mine), range(1))
                link.end()
        assert len(host.rounds.departed) == 4
        mine = make_model("gpt2")
        with (
            connect(mine, InProcess(host), patience=0.01),
            pytest.raises(TransportError, match="the round ends when 1 more"),
        ):
            train("gpt2", mine, optimizer_of(mine), range(1))
        host.rounds.away = 0.0
        train("gpt2", slow, optimizer_of(slow), range(1, 2))
        with connect(mine, InProcess(host)):
            train("gpt2", mine, optimizer_of(mine), range(1))
    assert not host.rounds.departed


def test_a_text_in_a_cache_has_an_end() -> None:
    host = Host(make_model("gpt2").eval(), max_length=8)
    mine = make_model("gpt2").eval()
    ids = batch("gpt2", 0)["input_ids"][:, :4]
    with connect(mine, InProcess(host)), torch.no_grad():
        outputs = mine(ids, use_cache=True)
        outputs = mine(ids, past_key_values=outputs.past_key_values, use_cache=True)
        with pytest.raises(RefusedError, match="at most 8 tokens"):
            mine(ids, past_key_values=outputs.past_key_values, use_cache=True)


def test_a_turn_that_failed_half_way_is_not_taken_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(make_model("gpt2").eval())
    mine = make_model("gpt2").eval()
    ids = batch("gpt2", 0)["input_ids"]
    with connect(mine, InProcess(host)), torch.no_grad():
        outputs = mine(ids, use_cache=True)
        with monkeypatch.context() as patch:
            patch.setattr(
                host.blocks[-1].mlp, "forward", lambda *a: torch.zeros(3, 3) @ torch.zeros(4)
            )
            with pytest.raises(RefusedError, match="could not compute"):
                mine(ids[:, :1], past_key_values=outputs.past_key_values, use_cache=True)
        with pytest.raises(RefusedError, match="unknown cache"):
            mine(ids[:, :1], past_key_values=outputs.past_key_values, use_cache=True)


# A server that lies


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        (Kind.GRADIENT, lambda t: t * math.nan, "gradient of .* holds NaN"),
        (Kind.GRADIENT, lambda t: t[:, :1], "must have shape"),
        (Kind.GRADIENT, lambda t: t.float(), "and dtype float64, got another"),
        (Kind.OUTPUT, lambda t: t * math.inf, "stream holds NaN"),
        (Kind.OUTPUT, lambda t: t[:, :1], "returned a stream of shape"),
    ],
)
def test_what_a_server_returns_is_looked_at(
    kind: Kind, change: Callable[[torch.Tensor], torch.Tensor], words: str
) -> None:
    def changed(frame: Frame) -> Frame:
        return (
            replace(frame, tensors={n: change(t) for n, t in frame.tensors.items()})
            if frame.kind is kind
            else frame
        )

    mine = make_model("gpt2")
    optimizer = optimizer_of(mine)
    with connect(mine, Tapped(Host(make_model("gpt2"), ADAMW), change=changed)):
        with pytest.raises(FrameError, match=words):
            train("gpt2", mine, optimizer, range(1))
        if "shape" in words and kind is Kind.OUTPUT:
            with pytest.raises(FrameError, match=words), torch.no_grad():
                mine(**batch("gpt2", 0))


def test_sgds_moments_are_no_others(tmp_path: Path) -> None:
    host = Host(make_model("gpt2"), OptimizerConfig("sgd", 0.1, momentum=0.9), folder=tmp_path)
    mine = make_model("gpt2")
    with connect(mine, InProcess(host)):
        train("gpt2", mine, optimizer_of(mine), range(1))
    (tmp_path / ".split.safetensors.partial-0123456789ab").write_bytes(b"half")
    host.save()
    with pytest.raises(CheckpointError, match="was trained with sgd, got adamw"):
        Host(make_model("gpt2"), ADAMW, folder=tmp_path)
    without_a_trainer(tmp_path / "split.safetensors")
    with pytest.raises(
        CheckpointError, match="holds the optimizer state of sgd, got adamw"
    ):  # by its moments, then
        Host(make_model("gpt2"), ADAMW, folder=tmp_path)
    assert Host(make_model("gpt2"), host.training, folder=tmp_path).step == 1
    assert [p.name for p in tmp_path.iterdir()] == [
        "split.safetensors"
    ]  # and what a killed process had begun is gone


def without_a_trainer(path: Path) -> None:
    """A checkpoint as it was before it named its optimizer."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    about = json.loads(metadata["about"])
    del about["trainer"], metadata["checksum"]
    save_file(load_file(path), path, {**metadata, "about": json.dumps(about)})


def test_a_training_goes_on_with_its_own_optimizer(tmp_path: Path) -> None:
    Host(make_model("gpt2"), ADAMW, folder=tmp_path).save()
    for other in (OptimizerConfig("sgd", 0.1), OptimizerConfig("adam", 1e-2)):
        with pytest.raises(
            CheckpointError,
            match=f"was trained with adamw, got {other.optimizer}",
        ) as caught:
            Host(make_model("gpt2"), other, folder=tmp_path)
        assert "--optimizer adamw" in (caught.value.cli_hint or "")
    assert (
        Host(make_model("gpt2"), OptimizerConfig("adamw", 0.5), folder=tmp_path).step == 0
    )  # at any rate
    assert Host(make_model("gpt2"), folder=tmp_path).step == 0  # it only serves
    without_a_trainer(tmp_path / "split.safetensors")
    assert Host(make_model("gpt2"), OptimizerConfig("sgd", 0.1), folder=tmp_path).step == 0


@pytest.mark.parametrize(
    "address", ["localhost", "7000", "localhost:", "localhost:http", "127.0.0.1:99999"]
)
def test_an_address_has_a_port(address: str) -> None:
    with pytest.raises(TransportError, match="must be HOST:PORT"):
        Grpc(address)


def test_what_a_server_says_of_itself_is_printable() -> None:
    def changed(frame: Frame) -> Frame:
        return (
            replace(frame, values={**frame.values, "key": "\x1b[2J" + "k" * 9})
            if frame.kind is Kind.WELCOME
            else frame
        )

    with connect(make_model("gpt2"), Tapped(Host(make_model("gpt2")), change=changed)) as link:
        assert link.server_info["key"] == "[2J" + "k" * 9


@pytest.mark.parametrize(
    "config", [{"accumulate": 0}, {"accumulate": "x"}, {"rate": "1"}, {"optimizer": None}]
)
def test_an_invalid_optimizer_config_in_a_frame_is_rejected(config: dict[str, object]) -> None:
    from regauge.split.client.run import require_server_config

    good = {"trains": True, **ADAMW.to_dict()}
    assert require_server_config(good) == good
    with pytest.raises(FrameError, match=f'sent an invalid "{min(config)}"'):
        require_server_config({**good, **config})


def test_an_incomplete_frame_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    import grpc

    from regauge.split.server import network

    monkeypatch.setattr(network, "STALL_SECONDS", 0.2)
    good = b"".join(encode(Frame(Kind.STEP, 1, {"session": "a" * 32})))

    async def written(pieces: Sequence[bytes]) -> object:
        stream = link._open_stream()
        for piece in pieces:
            await stream.write(piece)
        return await asyncio.wait_for(stream.read(), 30)

    with Server(Host(make_model("gpt2"))) as server, Grpc(f"127.0.0.1:{server.port}") as link:
        assert (
            decode(Loop.run(written([good[:50], good[50:]]))).kind is Kind.ERROR
        )  # a whole one is answered
        assert Loop.run(written([good[:50]])) is grpc.aio.EOF
