"""Mutated frames, delivered to a live server: a reply each, a typed refusal or what the frame asks
for; nothing hangs, nothing grows.

REGAUGE_SOAK is the number of frames; `python -m soak split-frames` sends 100,000 (`splitfuzz` has
the mutations).
"""

from __future__ import annotations

import json
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from regauge.errors import FrameError
from regauge.split import TransportError
from regauge.split.protocol.frames import (
    BITS,
    CODECS,
    DTYPE_NAMES,
    DTYPES,
    HEADER,
    MAGIC,
    VERSION,
    Assembler,
    Kind,
    Limits,
    decode,
)
from regauge.split.protocol.transport import deliver
from support.frame_mutants import SESSION, fit_header, in_bytes, mutate, requests

COUNT = int(os.environ.get("REGAUGE_SOAK", "600"))
ROOM = 256 << 20  # what a process may grow by: buffers, graphs, and what allocators keep


@pytest.fixture(autouse=True)
def _no_hang() -> Iterator[None]:
    """A frame that takes long is stopped: SIGALRM ends the test. (A second in the soak; more where
    other tests run beside this one.)
    """

    def stop(number: int, frame: object) -> None:
        raise AssertionError("a frame hangs")

    before = signal.signal(signal.SIGALRM, stop)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@contextmanager
def limit_memory() -> Iterator[None]:
    """What is done here must not take long; what the test does in between may."""
    signal.setitimer(signal.ITIMER_REAL, 1.0 if "REGAUGE_SOAK" in os.environ else 30.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_mutated_frames_are_answered(name: str) -> None:
    host, good = requests(name)
    dice = random.Random(7)
    weights = host.backbone()
    codes: Counter[object] = Counter()
    before = 0
    for i in range(COUNT // 2):
        if i == COUNT // 10:
            before = resident()  # warm by now
        session = host.sessions.get(SESSION)
        if session is None:  # a BYE that got through
            host, _ = requests(name)
            session = host.sessions[SESSION]
        done = session.done
        data = mutate(good, dice, done)
        step = dice.choice((17, 1000, 1 << 20))
        try:
            with limit_memory():
                reply = decode(
                    deliver(host, [data[at : at + step] for at in range(0, len(data), step)])
                )
        except TransportError:
            codes["half"] += 1  # an incomplete frame is never answered
            continue
        codes[reply.values["code"] if reply.kind is Kind.ERROR else reply.kind.name] += 1
        assert reply.kind is not Kind.ERROR or reply.values["code"]
        now = host.sessions[SESSION].done if SESSION in host.sessions else done
        assert now in (done, done + 1)
        assert len(host.sessions) <= 4
        if session.pending and len(session.pending) > 32:
            session.pending.clear()  # as if they had been let go
    assert resident() - before < ROOM
    assert codes.keys() >= {
        "half",
        "magic",
        "version",
        "kind",
        "checksum",
        "table",
        "limit",
        "length",
        "dtype",
        "shape",
        "nonfinite",
        "gap",
        "layout",
    }
    assert codes["failed"] < COUNT / 100, codes  # what only the blocks themselves could tell
    assert all(torch.equal(t, weights[n]) for n, t in host.backbone().items())


def test_streams_of_mutants_are_cut_or_refused() -> None:
    """Frame after frame through one assembler in pieces of any size, until the first fault. Nothing
    is held beyond the limits.
    """
    good = requests("gpt2")[1]
    dice, limits = random.Random(8), Limits(payload=1 << 16, table=1 << 12)
    refused = 0
    for _ in range(COUNT // 2):
        stream = b"".join(
            in_bytes(dice.choice(good), dice) if dice.random() < 0.5 else dice.choice(good)
            for _ in range(3)
        )
        box, size = Assembler(limits), dice.choice((1, 50, 5000)) if len(stream) < 9000 else 5000
        try:
            with limit_memory():
                for at in range(0, len(stream), size):
                    for frame in box.feed(stream[at : at + size]):
                        assert (
                            sum(t.numel() * t.element_size() for t in frame.tensors.values())
                            <= limits.payload
                        )
                    assert (
                        box.buffer is None
                        or len(box.buffer) <= HEADER.size + limits.payload + limits.table
                    )
        except FrameError as error:
            refused += bool(error.code)
    assert refused > COUNT / 8


def test_every_dtype_and_codec_that_a_table_may_name_is_read_or_refused() -> None:
    for dtype in (*DTYPES, "F8", ""):
        for codec in (*CODECS, BITS, "zip"):
            for shape in ([], [0], [64], [2, 64]):
                text = json.dumps({"values": {}, "tensors": [["x", dtype, shape, codec]]}).encode()
                for payload in (b"", bytes(24), bytes(64), b"\xff" * 512, bytes(1024)):
                    head = bytearray(
                        HEADER.pack(MAGIC, VERSION, 3, 0, len(text), len(payload), 1, b"")
                    )
                    with suppress(FrameError):
                        (decoded,) = decode(fit_header(head + text + payload)).tensors.values()
                        assert list(decoded.shape) == shape
                        assert DTYPE_NAMES[decoded.dtype] == dtype


def resident() -> int:
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * 4096 if statm.exists() else 0
