"""Mutated requests of a split client, for the tests and for `python -m soak`.

Real requests are changed on three levels: bits and stretches of their bytes, the text of their
table, and their values and tensors. On the last two the checksum is made to fit, so that the fault
gets past it.
"""

from __future__ import annotations

import random
import struct

import torch

from regauge.errors import FrameError
from regauge.split import Host, InProcess, OptimizerConfig, connect
from regauge.split.client.journal import MemoryJournal
from regauge.split.protocol.frames import (
    CODECS,
    HEADER,
    UNCHECKED_SIZE,
    Frame,
    Kind,
    Limits,
    checksum,
    decode,
    encode,
)
from support.split_pairs import batch, make_model, optimizer_of, train

LIMITS = Limits(payload=1 << 22, table=1 << 14)
SESSION = "0" * 32


def requests(name: str) -> tuple[Host, list[bytes]]:
    """A server at work, and one of every kind of request that it is sent. Its rate is 0: it trains,
    and stays as it is.
    """
    mine = make_model(name)
    host = Host(
        make_model(name),
        OptimizerConfig("adamw", lr=0.0),
        limits=LIMITS,
        max_length=64,
        max_open_passes=64,
        max_sessions=4,
    )
    frames: list[bytes] = []

    class RecordingInProcess(InProcess):
        def exchange(self, request: list[memoryview]) -> bytes:
            frames.append(b"".join(request))
            return super().exchange(request)

    journal = MemoryJournal()
    journal.session = SESSION
    link = connect(mine, RecordingInProcess(host), journal=journal)
    train(name, mine, optimizer_of(mine), range(1))
    with torch.no_grad():
        mine(**batch(name, 0))
    losses = [
        mine(**batch(name, step)).loss for step in range(2)
    ]  # two passes are open: STEP is sent after both
    sum(losses).backward()
    if name == "gpt2":
        mine.generate(batch(name, 0)["input_ids"], max_new_tokens=2, do_sample=False)
    link.close()
    return host, frames


def fit_header(data: bytearray) -> bytes:
    """With lengths and a checksum that fit, if there is a header."""
    if len(data) >= HEADER.size:
        data[UNCHECKED_SIZE : HEADER.size] = checksum(data[:UNCHECKED_SIZE], data[HEADER.size :])
    return bytes(data)


def in_bytes(good: bytes, dice: random.Random) -> bytes:
    data = bytearray(good)
    for _ in range(dice.choice((1, 1, 2, 5))):
        top = max(1, len(data) if dice.random() < 0.4 else min(len(data), 300))
        at, n = dice.randrange(top), dice.randrange(1, 40)
        match dice.randrange(6):
            case 0 if data:
                data[min(at, len(data) - 1)] ^= 1 << dice.randrange(8)
            case 1:
                del data[at : at + n]
            case 2:
                data[at:at] = data[at : at + n]
            case 3:
                del data[at:]
            case 4 if len(data) >= HEADER.size:  # lengths: of the table, of the payload
                size, where = dice.choice((("<I", 8), ("<Q", 12)))
                top = dice.choice((0, 1, 1 << 16, 1 << 31, (1 << 8 * struct.calcsize(size)) - 1))
                struct.pack_into(size, data, where, min(top, (1 << 8 * struct.calcsize(size)) - 1))
            case _:
                data[at:at] = dice.randbytes(n)
    return fit_header(data) if dice.random() < 0.5 else bytes(data)


BOMBS = (
    b"[" * 8000,
    b'{"a":' * 1500,
    b'{"values":{},"tensors":[' + b"[]," * 3000 + b"[]]}",
    b'{"values":{"a":' + b"9" * 5000 + b'},"tensors":[]}',
    b'{"values":{"a":1e999},"tensors":[]}',
    b'{"values":{},"values":{},"tensors":[]}',
    b'{"values":{"session":"' + b"\\u0000" * 1500 + b'"},"tensors":[]}',
    b'\xff\xfe{"values":{},"tensors":[]}',
    b'{"values":{},"tensors":[["x","F32",[1099511627775],""]]}',
    b'{"values":{},"tensors":[["x","F64",[4194304],"BITS"]]}',
    b'{"values":{},"tensors":[["x","F32",[1,1,1,1,1,1,1,1,1],""]]}',
)
WORDS = (
    b"0",
    b"-1",
    b"1e400",
    b"null",
    b"true",
    b'"',
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b"NaN",
    b"99999999999999999999",
    b'"BITS"',
    b'"Q8"',
    b'"BOOL"',
    b'"F64"',
)


def in_text(good: bytes, dice: random.Random) -> bytes:
    """Another table before the same payload."""
    magic, version, kind, zero, table, payload, number, _ = HEADER.unpack_from(good)
    text, rest = bytearray(good[HEADER.size : HEADER.size + table]), good[HEADER.size + table :]
    if dice.random() < 0.2:
        text = bytearray(dice.choice(BOMBS))
    for _ in range(dice.randrange(3)):
        at = dice.randrange(len(text) + 1)
        text[at : at + dice.choice((0, 0, 1, 3))] = dice.choice(WORDS)
    head = HEADER.pack(magic, version, kind, zero, len(text), payload, number, b"")
    return fit_header(bytearray(head + text + rest))


def in_frame(good: Frame, dice: random.Random, done: int) -> bytes:
    values, tensors = dict(good.values), dict(good.tensors)
    for _ in range(dice.choice((1, 1, 2))):
        match dice.randrange(5):
            case 0 if values:
                values[dice.choice(sorted(values))] = dice.choice(
                    [
                        None,
                        -1,
                        10**30,
                        "x",
                        "x" * 500,
                        [],
                        [[]],
                        [["a", "b"]],
                        True,
                        0.5,
                        [None] * 3,
                        ["hidden_states"],
                        [[[[[]]]]],
                        -(2**63),
                    ]
                )
            case 1 if tensors:
                tensors.pop(dice.choice(sorted(tensors)))
            case 2 | 3 if tensors:
                name = dice.choice(sorted(tensors))
                t = tensors[name]
                changes = [
                    t[:0],
                    t.float(),
                    t.long(),
                    t.bool(),
                    t.to(torch.bfloat16),
                    t.flatten(),
                    t.unsqueeze(0),
                    t[..., :1],
                    t.expand(3, *t.shape),
                ]
                if t.is_floating_point():
                    changes += [
                        t * float("inf"),
                        t * float("nan"),
                        t + 1e300,
                        t.where(torch.rand(t.shape) < 0.9, float("nan")),
                    ]
                tensors[name] = dice.choice(changes)
            case _ if tensors:
                tensors[
                    dice.choice(
                        [
                            "stream",
                            "attention_mask",
                            "a.b",
                            "position_embeddings.7",
                            "",
                            "past_key_values",
                            "hidden_states@1",
                            "x" * 300,
                        ]
                    )
                ] = dice.choice(list(tensors.values()))
    number = dice.choice([done + 1] * 6 + [0, 1, done, done + 2, 2**63])
    kind = dice.choice([good.kind] * 5 + list(Kind))
    try:
        return b"".join(
            encode(Frame(kind, number, values, tensors), dice.choice(CODECS), tuple(tensors)[:1])
        )
    except FrameError:
        return b""


def mutate(good: list[bytes], dice: random.Random, done: int) -> bytes:
    """A request with a fault on one of the three levels. `done` is the number of the session's last
    request.
    """
    match dice.randrange(3):
        case 0:
            return in_bytes(dice.choice(good), dice)
        case 1:
            return in_text(dice.choice(good), dice)
        case _:
            return in_frame(decode(dice.choice(good)), dice, done)
