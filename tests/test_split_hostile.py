"""A client with a good certificate and bad intentions, a server likewise, and disks that fill up: what each may spoil, and for whom."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from regauge.errors import CheckpointError
from regauge.split import Host, InProcess, Training, connect
from regauge.split.frames import BARE, HEADER, MAGIC, VERSION, Bytes, Frame, FrameError, Kind, checksum, decode, encode
from regauge.split.transport import deliver
from splits import ADAMW, batch, made, optimizer_of, same, train


class Tapped:
    """A transport that keeps what crosses, and changes replies if asked to."""

    def __init__(self, host: Host, peer: str = "", change: Callable[[Frame], Frame] | None = None) -> None:
        self.inner, self.change = InProcess(host, peer), change
        self.sent: list[bytes] = []

    def exchange(self, request: Sequence[memoryview]) -> Bytes:
        self.sent.append(b"".join(request))
        reply = self.inner.exchange(request)
        return reply if self.change is None else b"".join(encode(self.change(decode(reply))))


def raw(kind: int, number: int, table: bytes, payload: bytes = b"") -> bytes:
    """A frame of any table."""
    bare = HEADER.pack(MAGIC, VERSION, kind, 0, len(table), len(payload), number, b"")[:BARE]
    return bare + checksum(bare, table, payload) + table + payload


def said(host: Host, data: bytes, peer: str = "") -> Frame:
    return decode(deliver(host, [data], peer))


def opened(host: Host, peer: str = "") -> bytes:
    """The bytes of a first training request, whose session is there and which was not sent."""
    spare = Host(made("gpt2"), ADAMW)
    mine = made("gpt2")
    tap = Tapped(spare)
    with connect(mine, tap):
        mine(**batch("gpt2", 0)).loss.backward()
    hello, forward = tap.sent[0], next(d for d in tap.sent if decode(d).kind is Kind.FORWARD)
    assert said(host, hello, peer).kind is Kind.WELCOME
    return forward


def with_value(data: bytes, name: str, value: str) -> bytes:
    """The same request with one more value, given as text, in a table that is written as another program would."""
    table, payload = HEADER.unpack_from(data)[4:6]
    found = json.loads(data[HEADER.size : HEADER.size + table])
    text = json.dumps(found, ensure_ascii=False).replace('{"values": {', f'{{"values": {{"{name}": {value}, ', 1)
    return raw(data[5], HEADER.unpack_from(data)[6], text.encode(), data[len(data) - payload :])


def test_a_request_cannot_make_the_checkpoint_unwritable(tmp_path: Path) -> None:
    host = Host(made("gpt2"), ADAMW, folder=tmp_path)
    forward = opened(host)
    assert said(host, with_value(forward, "x", "1e999")).values["code"] == "table"
    assert said(host, with_value(forward, "x", "1e99")).kind is Kind.OUTPUT
    host.keep()


def test_a_request_cannot_make_the_checkpoint_unreadable(tmp_path: Path) -> None:
    """Its table is within the limits in UTF-8, and is not when it is written with escapes."""
    host = Host(made("gpt2"), ADAMW, folder=tmp_path)
    assert said(host, with_value(opened(host), "x", '"' + "\u4e2d" * 20_000 + '"')).kind is Kind.OUTPUT
    host.keep()
    assert len(next(iter(Host(made("gpt2"), ADAMW, folder=tmp_path).sessions.values())).open) == 1


@pytest.mark.parametrize("shape", [[0, 1 << 39, 1 << 39], [1 << 39, 1 << 39, 0]])
def test_shapes_that_overflow_behind_a_zero_are_refused(shape: list[int]) -> None:
    for dtype, codec in (("F32", ""), ("F32", "BITS"), ("BOOL", "")):
        with pytest.raises(FrameError, match="shape that does not cross"):
            decode(raw(3, 1, json.dumps({"values": {}, "tensors": [["a", dtype, shape, codec]]}).encode(), bytes(8 if codec else 0)))
    assert decode(raw(3, 1, b'{"values":{},"tensors":[["a","F32",[0,3],""]]}')).tensors["a"].shape == (0, 3)


def test_refusals_tell_nothing_of_others_sessions() -> None:
    host = Host(made("gpt2"), ADAMW)
    mine = made("gpt2")
    with connect(mine, InProcess(host, "bob")) as link:
        train("gpt2", mine, optimizer_of(mine), range(2))
        asked = b"".join(encode(Frame(Kind.STEP, 99, {"session": link.log.journal.session})))
    assert said(host, asked, "bob").values["done"] == 4
    refused = said(host, asked, "ann").values
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


def test_a_checkpoint_that_fails_is_no_reason_to_refuse_what_was_done(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mine, calm = made("gpt2"), made("gpt2")
    host, other = Host(made("gpt2"), ADAMW, folder=tmp_path, every=2), Host(made("gpt2"), ADAMW)
    optimizer = optimizer_of(mine)
    with connect(mine, InProcess(host)) as link:
        with full_disk():
            train("gpt2", mine, optimizer, range(3))
            assert caplog.text.count("no checkpoint at step 2") == 1
            assert (link.log.saved, len(link.log.journal.requests), list(tmp_path.iterdir())) == (0, 6, [])  # type: ignore[union-attr]
            with pytest.raises(CheckpointError, match="cannot be written"):
                host.keep()
        train("gpt2", mine, optimizer, range(3, 5))
        assert link.log.saved == 0 or host.kept_at == 4
    assert host.kept_at == 4
    with connect(calm, InProcess(other)):
        train("gpt2", calm, optimizer_of(calm), range(5))
    assert same(host.backbone(), other.backbone())
    assert (tmp_path / "split.safetensors").stat().st_mode & 0o077 == 0


# Numbers that spoil what all share


@pytest.mark.parametrize(("size", "accumulate"), [(1e30, 1), (2.5e38, 4)])
def test_gradients_that_overflow_later_are_refused_now(size: float, accumulate: int) -> None:
    host = Host(made("gpt2", torch.float32), Training("adamw", 1e-3, accumulate=accumulate))
    mine = made("gpt2", torch.float32)
    with connect(mine, InProcess(host)):
        with pytest.raises(FrameError, match="whose squares are"):
            (mine(**batch("gpt2", 0, torch.float32)).logits.mean() * size).backward()
        assert not host.main.gradients()
        mine(**batch("gpt2", 1, torch.float32)).loss.backward()
    assert all(bool(torch.isfinite(t).all()) for moments in host.main.moments().values() for t in moments.values())
    assert (host.step, len(host.main.gradients()) > 0) == (int(accumulate == 1), accumulate > 1)
