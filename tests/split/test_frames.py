"""Frames of the split protocol: what goes in comes out, and whatever else comes in is one typed
error.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regauge.errors import FrameError
from regauge.split.protocol.frames import (
    CHUNK,
    DTYPES,
    HEADER,
    MAGIC,
    UNCHECKED_SIZE,
    VERSION,
    Assembler,
    Frame,
    Kind,
    Limits,
    checksum,
    chunks,
    decode,
    encode,
)


def encode_frame(frame: Frame, codec: str = "") -> bytes:
    return b"".join(encode(frame, codec))


def pack_frame(document: object, body: bytes = b"", **more: int) -> bytes:
    """Encode any table with a matching header; `more` overrides header fields."""
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    fields = {
        "version": VERSION,
        "kind": 3,
        "zero": 0,
        "table": len(text),
        "payload": len(body),
        "number": 7,
        **more,
    }
    bare = HEADER.pack(MAGIC, *fields.values(), b"")[:UNCHECKED_SIZE]
    return bare + checksum(bare, text, body) + text + body


def garble(data: bytes, at: int = -1) -> bytes:
    out = bytearray(data)
    out[at] ^= 1
    return bytes(out)


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    g = torch.Generator().manual_seed(1)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=g).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=g).to(dtype)


SHAPES = [(), (0,), (3,), (2, 0, 4), (2, 3, 5)]


def test_every_dtype_and_shape_comes_out_as_it_went_in() -> None:
    tensors = {
        f"{name}{shape}": random_tensor(dtype, shape)
        for name, dtype in DTYPES.items()
        for shape in SHAPES
    }
    tensors["turned"] = random_tensor(torch.float32, (4, 6)).T
    frame = Frame(Kind.FORWARD, 2**63, {"a": 1, "b": "ü", "c": [True, None, 0.5]}, tensors)
    decoded = decode(encode_frame(frame))
    assert (decoded.kind, decoded.number, decoded.values) == (
        frame.kind,
        frame.number,
        frame.values,
    )
    assert list(decoded.tensors) == list(tensors)
    for name, tensor in tensors.items():
        assert decoded.tensors[name].dtype == tensor.dtype
        assert torch.equal(decoded.tensors[name], tensor)


def test_codecs() -> None:
    x = {
        "x": random_tensor(torch.float32, (4, 5, 300)),
        "ids": torch.arange(5),
        "zero": torch.zeros(2, 3),
        "wide": random_tensor(torch.float64, (7, 8)),
    }
    size, errors = {}, {}
    for codec in ("", "BF16", "F16", "Q8"):
        data = encode_frame(Frame(Kind.OUTPUT, 0, {}, x), codec)
        tensors = decode(data).tensors
        assert all(tensors[n].dtype == t.dtype for n, t in x.items())
        assert torch.equal(tensors["ids"], x["ids"])
        assert torch.equal(tensors["zero"], x["zero"])
        size[codec], errors[codec] = (
            len(data),
            float((tensors["x"] - x["x"]).abs().max() / x["x"].abs().max()),
        )
    assert errors[""] == 0
    assert 0 < errors["F16"] < errors["BF16"] < 2**-8
    assert errors["Q8"] <= 0.5 / 127 * 1.01
    assert size["F16"] <= size["BF16"] < 0.55 * size[""]
    assert size["Q8"] < 0.3 * size[""]


def test_chunks_and_frames_that_follow_each_other() -> None:
    frames = [
        Frame(Kind.FORWARD, i, {}, {"x": random_tensor(torch.float32, (n,))})
        for i, n in enumerate((10, 700_000, 3))
    ]
    stream = b"".join(encode_frame(f) for f in frames)
    assert [len(c) for c in chunks(encode(frames[1]))] == [
        CHUNK,
        CHUNK,
        len(encode_frame(frames[1])) - 2 * CHUNK,
    ]
    for step in (1 << 20, 4096, 33):
        box, found = Assembler(), []
        for at in range(0, len(stream), step):
            found += box.feed(stream[at : at + step])
        assert [f.number for f in found] == [0, 1, 2]
        assert all(
            torch.equal(f.tensors["x"], g.tensors["x"]) for f, g in zip(found, frames, strict=True)
        )
        assert box.is_empty


ROW = ["x", "F32", [2], ""]


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "length"),
        (b"GET / HTTP/1.1\r\n" + bytes(32), "magic"),
        (pack_frame({}, version=VERSION + 1), "version"),
        (pack_frame({}, version=1), "version"),
        (pack_frame({}, version=2), "version"),
        (pack_frame({}, kind=0), "kind"),
        (pack_frame({}, kind=99), "kind"),
        (pack_frame({}, zero=1), "kind"),
        (pack_frame({}, table=1 << 20), "limit"),
        (pack_frame({}, payload=1 << 40), "limit"),
        (pack_frame({}, table=1), "length"),
        (garble(pack_frame({"values": {}, "tensors": [ROW]}, bytes(8))), "checksum"),
        (garble(pack_frame({"values": {}, "tensors": [ROW]}, bytes(8)), 20), "checksum"),
        (pack_frame({}), "table"),
        (pack_frame([]), "table"),
        (pack_frame(b"{"), "table"),
        (pack_frame(b"[" * 60000), "table"),
        (pack_frame(b'{"values": {"a": NaN}, "tensors": []}'), "table"),
        (pack_frame({"values": [], "tensors": []}), "table"),
        (pack_frame({"values": {}, "tensors": {}}), "limit"),
        (pack_frame({"values": {}, "tensors": [ROW] * 65}), "limit"),
        (pack_frame({"values": {}, "tensors": [["x"]]}), "table"),
        (pack_frame({"values": {}, "tensors": [[1, "F32", [2], ""]]}), "table"),
        (pack_frame({"values": {}, "tensors": [ROW, ROW]}, bytes(16)), "table"),
        (pack_frame({"values": {}, "tensors": [["x", "F99", [2], ""]]}), "dtype"),
        (pack_frame({"values": {}, "tensors": [["x", [], [2], ""]]}), "table"),
        (pack_frame({"values": {}, "tensors": [["x", "I64", [2], "Q8"]]}), "dtype"),
        (pack_frame({"values": {}, "tensors": [["x", "F32", [], "Q8"]]}), "dtype"),
        (pack_frame({"values": {}, "tensors": [["x", "F32", [-1], ""]]}), "shape"),
        (pack_frame({"values": {}, "tensors": [["x", "F32", [True], ""]]}), "shape"),
        (pack_frame({"values": {}, "tensors": [["x", "F32", [1.5], ""]]}), "shape"),
        (pack_frame({"values": {}, "tensors": [["x", "F32", [1] * 9, ""]]}), "shape"),
        (pack_frame({"values": {}, "tensors": [["x", "F32", [1 << 39, 1 << 39], ""]]}), "shape"),
        (pack_frame({"values": {}, "tensors": [["x", "F32", [1 << 30], ""]]}, bytes(8)), "length"),
        (pack_frame({"values": {}, "tensors": [ROW]}, bytes(9)), "length"),
        (pack_frame({"values": {}, "tensors": [ROW]}, bytes(7)), "length"),
        (
            pack_frame(
                {"values": {}, "tensors": [["x", "F64", [1 << 28], "BITS"]]}, bytes(16 + (1 << 25))
            ),
            "limit",
        ),
        (pack_frame({"values": {}, "tensors": [["x", "F32", [9], "BITS"]]}, bytes(9)), "length"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_invalid_frames_are_rejected_with_a_code(data: bytes, code: str) -> None:
    with pytest.raises(FrameError) as caught:
        decode(data)
    assert caught.value.code == code


def test_limits_are_looked_at_before_anything_is_held() -> None:
    box = Assembler(Limits(payload=100))
    with pytest.raises(FrameError) as caught:
        list(box.feed(pack_frame({"values": {}, "tensors": []}, payload=101)[: HEADER.size]))
    assert caught.value.code == "limit"
    assert box.buffer is None
    for limits, code in (
        (Limits(tensors=0), "limit"),
        (Limits(axes=0), "shape"),
        (Limits(table=4), "limit"),
    ):
        with pytest.raises(FrameError) as caught:
            decode(pack_frame({"values": {}, "tensors": [ROW]}, bytes(8)), limits)
        assert caught.value.code == code


def test_what_does_not_cross_is_refused_where_it_is() -> None:
    with pytest.raises(FrameError, match="complex64"):
        encode(Frame(Kind.FORWARD, 0, {}, {"x": torch.zeros(2, dtype=torch.complex64)}))
    with pytest.raises(FrameError, match="codec"):
        encode(Frame(Kind.FORWARD), "zip")


GOOD = encode_frame(
    Frame(Kind.FORWARD, 5, {"a": 1}, {"x": torch.arange(6.0).view(2, 3), "ids": torch.arange(3)})
)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_mutants_are_frames_or_typed_errors(data: st.DataObject) -> None:
    """Bytes changed, cut, repeated and put together anew; a checksum that fits makes the faults
    reach what is behind it.
    """
    mutant = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(len(mutant) - 1, 0)))
        match data.draw(st.sampled_from(["set", "cut", "insert", "double"])):
            case "set" if mutant:
                mutant[at] = data.draw(st.integers(0, 255))
            case "cut":
                del mutant[at : at + data.draw(st.integers(1, 40))]
            case "insert":
                mutant[at:at] = data.draw(st.binary(max_size=20))
            case "double":
                mutant[at:at] = mutant[at : at + 30]
    if len(mutant) >= HEADER.size and data.draw(st.booleans()):
        mutant[UNCHECKED_SIZE : HEADER.size] = checksum(
            mutant[:UNCHECKED_SIZE], mutant[HEADER.size :]
        )
    box = Assembler(Limits(payload=1 << 16))
    with suppress(FrameError):
        for at in range(0, len(mutant), 50):
            for frame in box.feed(bytes(mutant[at : at + 50])):
                assert sum(t.numel() for t in frame.tensors.values()) < 1 << 16
    assert box.buffer is None or len(box.buffer) < (1 << 17) + HEADER.size


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_what_happens_to_bytes_on_their_way_is_found(data: st.DataObject) -> None:
    """Any burst, any two words that are swapped, any end that is cut off."""
    values = torch.arange(600, dtype=torch.int32)
    good = encode_frame(Frame(Kind.FORWARD, 5, {"a": 1}, {"x": values}))
    bad = bytearray(good)
    match data.draw(st.sampled_from(["burst", "swap", "cut"])):
        case "burst":
            at, bits = (
                data.draw(st.integers(UNCHECKED_SIZE * 8, len(good) * 8 - 1)),
                data.draw(st.binary(min_size=1, max_size=64)),
            )
            number = int.from_bytes(good, "little") ^ (int.from_bytes(bits, "little") | 1) << at
            bad[:] = (number & ((1 << 8 * len(good)) - 1)).to_bytes(len(good), "little")
        case "swap":
            start = data.draw(st.integers(HEADER.size, len(good) - 16))
            other = data.draw(st.integers(start + 8, len(good) - 8))
            bad[start : start + 8], bad[other : other + 8] = (
                good[other : other + 8],
                good[start : start + 8],
            )
        case "cut":
            del bad[data.draw(st.integers(0, len(good) - 1)) :]
    if bytes(bad) == good:
        return
    with pytest.raises(FrameError) as caught:
        decode(bytes(bad))
    assert caught.value.code in ("checksum", "length")


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_masks_of_two_values_cross_as_bits_and_come_out_bit_for_bit(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(list(DTYPES.values())))
    size = dtype.itemsize
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    numbers = (
        st.integers(0, 1)
        if dtype is torch.bool
        else st.integers(-(1 << 8 * size - 1), (1 << 8 * size - 1) - 1)
        if size > 1
        else st.integers(0, 255)
    )
    some = torch.tensor(data.draw(st.lists(numbers, min_size=1, max_size=3)), dtype=integers)
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=0, max_size=4)))
    made = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    bits = some[torch.randint(0, len(some), shape, generator=made)]
    mask = bits.view(dtype) if shape else bits.reshape(1).view(dtype).reshape(())
    frame = Frame(Kind.FORWARD, 1, {}, {"mask": mask})
    parts = encode(frame, data.draw(st.sampled_from(["", "BF16", "Q8"])), exact=("mask",))
    tensors = decode(b"".join(parts)).tensors["mask"]
    assert (tensors.dtype, tensors.shape) == (dtype, mask.shape)
    assert torch.equal(tensors.reshape(-1).view(integers), mask.reshape(-1).view(integers))
    assert (b'"BITS"' in bytes(parts[0])) == (
        mask.numel() >= 64 and len(set(bits.reshape(-1).tolist())) < 3
    )


def test_masks_of_models_cross_as_bits() -> None:
    causal = torch.full((8, 1, 64, 64), torch.finfo(torch.float32).min).triu(1)
    hidden = torch.where(torch.rand(8, 1, 64, 64) < 0.5, -torch.inf, 0.0)
    rows = torch.rand(8, 64) < 0.5
    features = torch.randn(8, 64, 16)
    plain = Frame(
        Kind.FORWARD,
        1,
        {},
        {"causal": causal, "hidden": hidden, "rows": rows, "features": features},
    )
    data = b"".join(encode(plain, exact=("causal", "hidden", "rows")))
    assert len(data) < features.numel() * 4 + 2 * 8 * 64 * 64 // 8 + 8 * 64 // 8 + 400
    tensors = decode(data).tensors
    assert all(torch.equal(tensors[name], tensor) for name, tensor in plain.tensors.items())


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_a_header_alone_costs_nothing() -> None:
    head = pack_frame({"values": {}, "tensors": []}, payload=1 << 30)[: HEADER.size]
    before = resident()
    boxes = [Assembler() for _ in range(16)]
    for box in boxes:
        assert list(box.feed(head)) == []
    assert resident() - before < 64 << 20


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_a_frame_of_the_version_before_is_refused_by_version() -> None:
    """Its checksum, of another kind, is not looked at."""
    good = b"".join(encode(Frame(Kind.STEP, 1, {"session": "a" * 32})))
    assert decode(good).number == 1
    with pytest.raises(FrameError, match="version must be 3, got 2") as caught:
        decode(good[:4] + b"\x02" + good[5:])
    assert (caught.value.code, caught.value.hint) == ("version", "update the older side")
