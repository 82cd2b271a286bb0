"""Frames of the split protocol: what goes in comes out, and whatever else comes in is one typed error."""

from __future__ import annotations

import json
import struct
import zlib
from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regauge.split.frames import CHUNK, DTYPES, HEADER, MAGIC, Assembler, Frame, FrameError, Kind, Limits, chunks, decode, encode


def whole(frame: Frame, codec: str = "") -> bytes:
    return b"".join(encode(frame, codec))


def packed(said: object, held: bytes = b"", **more: int) -> bytes:
    """A frame with any table, and a header that fits it but for what is said otherwise."""
    text = said if isinstance(said, bytes) else json.dumps(said).encode()
    fields = {
        "version": 1,
        "kind": 3,
        "zero": 0,
        "table": len(text),
        "payload": len(held),
        "number": 7,
        "check": 0,
        **more,
    }
    head = HEADER.pack(MAGIC, *fields.values())
    check = struct.pack("<I", more.get("check", zlib.crc32(head[:-4] + text + held)))
    return head[:-4] + check + text + held


def drawn(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    g = torch.Generator().manual_seed(1)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=g).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=g).to(dtype)


SHAPES = [(), (0,), (3,), (2, 0, 4), (2, 3, 5)]


def test_every_dtype_and_shape_comes_out_as_it_went_in() -> None:
    tensors = {f"{name}{shape}": drawn(dtype, shape) for name, dtype in DTYPES.items() for shape in SHAPES}
    tensors["turned"] = drawn(torch.float32, (4, 6)).T
    frame = Frame(Kind.FORWARD, 2**63, {"a": 1, "b": "ü", "c": [True, None, 0.5]}, tensors)
    found = decode(whole(frame))
    assert (found.kind, found.number, found.values) == (frame.kind, frame.number, frame.values)
    assert list(found.tensors) == list(tensors)
    for name, tensor in tensors.items():
        assert found.tensors[name].dtype == tensor.dtype
        assert torch.equal(found.tensors[name], tensor)


def test_codecs() -> None:
    x = {"x": drawn(torch.float32, (4, 5, 300)), "ids": torch.arange(5), "zero": torch.zeros(2, 3), "wide": drawn(torch.float64, (7, 8))}
    size, errors = {}, {}
    for codec in ("", "BF16", "F16", "Q8"):
        data = whole(Frame(Kind.OUTPUT, 0, {}, x), codec)
        found = decode(data).tensors
        assert all(found[n].dtype == t.dtype for n, t in x.items())
        assert torch.equal(found["ids"], x["ids"])
        assert torch.equal(found["zero"], x["zero"])
        size[codec], errors[codec] = len(data), float((found["x"] - x["x"]).abs().max() / x["x"].abs().max())
    assert errors[""] == 0
    assert 0 < errors["F16"] < errors["BF16"] < 2**-8
    assert errors["Q8"] <= 0.5 / 127 * 1.01
    assert size["F16"] < size["BF16"] < 0.55 * size[""]
    assert size["Q8"] < 0.3 * size[""]


def test_chunks_and_frames_that_follow_each_other() -> None:
    frames = [Frame(Kind.FORWARD, i, {}, {"x": drawn(torch.float32, (n,))}) for i, n in enumerate((10, 700_000, 3))]
    stream = b"".join(whole(f) for f in frames)
    assert [len(c) for c in chunks(encode(frames[1]))] == [CHUNK, CHUNK, len(whole(frames[1])) - 2 * CHUNK]
    for step in (1 << 20, 4096, 33):
        box, found = Assembler(), []
        for at in range(0, len(stream), step):
            found += box.feed(stream[at : at + step])
        assert [f.number for f in found] == [0, 1, 2]
        assert all(torch.equal(f.tensors["x"], g.tensors["x"]) for f, g in zip(found, frames, strict=True))
        assert box.is_between


ROW = ["x", "F32", [2], ""]


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "length"),
        (b"GET / HTTP/1.1\r\n" + bytes(32), "magic"),
        (packed({}, version=2), "version"),
        (packed({}, kind=0), "kind"),
        (packed({}, kind=99), "kind"),
        (packed({}, zero=1), "kind"),
        (packed({}, table=1 << 20), "limit"),
        (packed({}, payload=1 << 40), "limit"),
        (packed({}, table=1), "length"),
        (packed({"values": {}, "tensors": [ROW]}, bytes(8), check=1), "checksum"),
        (packed({}), "table"),
        (packed([]), "table"),
        (packed(b"{"), "table"),
        (packed(b"[" * 60000), "table"),
        (packed(b'{"values": {"a": NaN}, "tensors": []}'), "table"),
        (packed({"values": [], "tensors": []}), "table"),
        (packed({"values": {}, "tensors": {}}), "limit"),
        (packed({"values": {}, "tensors": [ROW] * 65}), "limit"),
        (packed({"values": {}, "tensors": [["x"]]}), "table"),
        (packed({"values": {}, "tensors": [[1, "F32", [2], ""]]}), "table"),
        (packed({"values": {}, "tensors": [ROW, ROW]}, bytes(16)), "table"),
        (packed({"values": {}, "tensors": [["x", "F99", [2], ""]]}), "dtype"),
        (packed({"values": {}, "tensors": [["x", [], [2], ""]]}), "table"),
        (packed({"values": {}, "tensors": [["x", "I64", [2], "Q8"]]}), "dtype"),
        (packed({"values": {}, "tensors": [["x", "F32", [], "Q8"]]}), "dtype"),
        (packed({"values": {}, "tensors": [["x", "F32", [-1], ""]]}), "shape"),
        (packed({"values": {}, "tensors": [["x", "F32", [True], ""]]}), "shape"),
        (packed({"values": {}, "tensors": [["x", "F32", [1.5], ""]]}), "shape"),
        (packed({"values": {}, "tensors": [["x", "F32", [1] * 9, ""]]}), "shape"),
        (packed({"values": {}, "tensors": [["x", "F32", [1 << 39, 1 << 39], ""]]}), "shape"),
        (packed({"values": {}, "tensors": [["x", "F32", [1 << 30], ""]]}, bytes(8)), "length"),
        (packed({"values": {}, "tensors": [ROW]}, bytes(9)), "length"),
        (packed({"values": {}, "tensors": [ROW]}, bytes(7)), "length"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_frame_is_refused_by_code(data: bytes, code: str) -> None:
    with pytest.raises(FrameError) as caught:
        decode(data)
    assert caught.value.code == code


def test_limits_are_looked_at_before_anything_is_held() -> None:
    box = Assembler(Limits(payload=100))
    with pytest.raises(FrameError) as caught:
        list(box.feed(packed({"values": {}, "tensors": []}, payload=101)[: HEADER.size]))
    assert caught.value.code == "limit"
    assert len(box.whole) <= HEADER.size
    for limits, code in ((Limits(tensors=0), "limit"), (Limits(axes=0), "shape"), (Limits(table=4), "limit")):
        with pytest.raises(FrameError) as caught:
            decode(packed({"values": {}, "tensors": [ROW]}, bytes(8)), limits)
        assert caught.value.code == code


def test_what_does_not_cross_is_refused_where_it_is() -> None:
    with pytest.raises(FrameError, match="complex64"):
        encode(Frame(Kind.FORWARD, 0, {}, {"x": torch.zeros(2, dtype=torch.complex64)}))
    with pytest.raises(FrameError, match="codec"):
        encode(Frame(Kind.FORWARD), "zip")


GOOD = whole(Frame(Kind.FORWARD, 5, {"a": 1}, {"x": torch.arange(6.0).view(2, 3), "ids": torch.arange(3)}))


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_mutants_are_frames_or_typed_errors(data: st.DataObject) -> None:
    """Bytes changed, cut, repeated and put together anew; a checksum that fits makes the faults reach what is behind it."""
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
        mutant[HEADER.size - 4 : HEADER.size] = zlib.crc32(mutant[HEADER.size :]).to_bytes(4, "little")
    box = Assembler(Limits(payload=1 << 16))
    with suppress(FrameError):
        for at in range(0, len(mutant), 50):
            for frame in box.feed(bytes(mutant[at : at + 50])):
                assert sum(t.numel() for t in frame.tensors.values()) < 1 << 16
    assert len(box.whole) < (1 << 17) + HEADER.size
