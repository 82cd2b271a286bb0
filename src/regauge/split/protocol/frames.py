"""Frames: named tensors and a few values as bytes, and back. Nothing that is read is ever executed,
and nothing is allocated that was not declared.

    header   44 bytes, little-endian: "rgsp", version, kind, two zero bytes, length of the table,
    length of the payload, number, checksum of all else
    table    JSON: {"values": {...}, "tensors": [[name, dtype, shape, codec], ...]}, and blanks up
    to a multiple of 64 bytes
    payload  the tensors' bytes, one after the other, in the order of the table

A tensor of floats may cross as bfloat16, as float16, or as int8 with one float32 scale for each row
of its last axis (`codec`); it comes out in the dtype it had. A mask that has no more than two
different values crosses as those two and one bit for each entry ("BITS"), and comes out bit for
bit. A frame is cut into chunks of about 1 MiB; `Assembler` puts them together again, within limits
that are looked at as soon as the header is there. Whatever is wrong with the bytes is a
`FrameError` with a code that can be sent back.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import pairwise
from math import isfinite, prod
from typing import Any

import numpy as np
import torch

from regauge.errors import RegaugeError

Tensor = torch.Tensor
Bytes = bytes | bytearray | memoryview
Value = str | int | float | bool | None | list["Value"]
MAGIC, VERSION = b"rgsp", 2
HEADER = struct.Struct("<4sBBHIQQ16s")
UNCHECKED_SIZE = HEADER.size - 16  # the header without its checksum
ALIGN = 64
CHUNK = 1 << 20
PIECE = CHUNK + (1 << 16)  # so that a tensor of 1 MiB crosses in one, with its header
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
CODECS = ("", "BF16", "F16", "Q8")  # as they are; in half the bytes; in a quarter
BITS = "BITS"  # chosen by itself, where nothing is lost
_INTEGER_DTYPES = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
}  # the bits of any dtype, by its size


class FrameError(RegaugeError):
    """Bytes that are no frame, or none that may come here. `code` says which fault it is, for the
    other side.
    """

    def __init__(self, code: str, message: str, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.code = code


class RefusedError(FrameError):
    """What the other side says was wrong with a frame that reached it whole."""


class Kind(IntEnum):
    HELLO = 1
    WELCOME = 2
    FORWARD = 3
    OUTPUT = 4
    BACKWARD = 5
    GRADIENT = 6
    STEP = 7
    ACKNOWLEDGE = 8
    ERROR = 9
    BYE = 10


@dataclass(frozen=True)
class Limits:
    """What one side is ready to take: bytes of a payload and of a table, tensors in a frame, axes
    of a tensor.
    """

    payload: int = 1 << 30
    table: int = 1 << 16
    tensors: int = 64
    axes: int = 8


@dataclass(frozen=True, eq=False)
class Frame:
    """One message. `number` is what its step, or whatever else it belongs to, is known by."""

    kind: Kind
    number: int = 0
    values: Mapping[str, Value] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(
        default_factory=dict
    )  # of a frame that came: unpacked when they are looked up
    # of a frame that came: the checksum of its bytes, by which a second one of its number is told
    # from the same one again
    check: int = 0


class PackedTensors(Mapping[str, Tensor]):
    """Tensors of a received frame, unpacked on lookup.

    Names, dtypes and shapes are known from the table, so that a frame can be rejected before memory
    is allocated for its payload: a tensor of 16 MB in "BITS" has 1 GB when it is unpacked.
    """

    def __init__(self, rows: Mapping[str, tuple[str, tuple[int, ...], str, memoryview]]) -> None:
        self._rows = dict(rows)
        self._unpacked: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._unpacked:
            dtype, shape, codec, data = self._rows[name]
            self._unpacked[name] = _unpack_tensor(data, dtype, shape, codec)
            self._rows[name] = (
                dtype,
                shape,
                codec,
                memoryview(b""),
            )  # the packed bytes are not needed any more
        return self._unpacked[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def to_meta(self) -> dict[str, Tensor]:
        """Return tensors of the declared dtypes and shapes on the meta device, without
        unpacking.
        """
        return {
            name: torch.empty(shape, dtype=DTYPES[dtype], device="meta")
            for name, (dtype, shape, _, _) in self._rows.items()
        }


def declared_tensors(frame: Frame) -> dict[str, Tensor]:
    """Return the dtypes and shapes of a frame's tensors as tensors on the meta device."""
    if isinstance(frame.tensors, PackedTensors):
        return frame.tensors.to_meta()
    return {
        name: torch.empty(t.shape, dtype=t.dtype, device="meta")
        for name, t in frame.tensors.items()
    }


def nbytes(frame: Frame) -> int:
    """Return the bytes of a frame's tensors when they are unpacked, without unpacking them."""
    return sum(t.numel() * t.element_size() for t in declared_tensors(frame).values())


def checksum(*parts: Bytes) -> bytes:
    """16 bytes by which a frame is known, and by which one that was garbled is told. It is GHASH,
    the sum over GF(2^128) that AES-GCM is made of, because processors do it as fast as memory is
    read: four times as fast as CRC-32 here, and wide enough that two requests never share it by
    chance.

    A change within 16 bytes at a multiple of 16 is always found. Others (longer bursts, words that
    were swapped, bytes that are gone or too many) are found but for one in 2^128 for each 16 bytes
    of the frame. Its key is zero and known to all, so that it is no signature: that is TLS's
    business.
    """
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import AES
    from cryptography.hazmat.primitives.ciphers.modes import GCM

    made = Cipher(AES(bytes(16)), GCM(bytes(12))).encryptor()
    for part in parts:
        for at in range(0, len(part), 1 << 30):  # OpenSSL counts in 32 bits
            made.authenticate_additional_data(
                part[at : at + (1 << 30)] if len(part) > 1 << 30 else part
            )
    made.finalize()
    return made.tag


def encode(frame: Frame, codec: str = "", exact: Collection[str] = ()) -> list[memoryview]:
    """The bytes of a frame, as views: tensors that need no other form are not copied.

    `codec` is for tensors of float32 and float64, except those named in `exact` (masks, which hold
    numbers that no shorter form has). Those of two values cross as bits, and so do tensors of
    booleans.
    """
    if codec not in CODECS:
        raise FrameError(
            "codec",
            f"there is no codec {codec!r}",
            hint=f"choose from {', '.join(c or '(none)' for c in CODECS)}",
        )
    rows: list[list[Any]] = []
    parts: list[memoryview] = []
    for name, tensor in frame.tensors.items():
        if tensor.dtype not in DTYPE_NAMES:
            raise FrameError(
                "dtype",
                f'"{name}" is {str(tensor.dtype).removeprefix("torch.")}, which does not cross',
            )
        plain = tensor.detach().cpu()
        halves = _pack_bits(plain) if name in exact or tensor.dtype is torch.bool else None
        used = (
            codec
            if name not in exact and tensor.dtype in (torch.float32, torch.float64) and tensor.dim()
            else ""
        )
        rows.append(
            [name, DTYPE_NAMES[tensor.dtype], list(tensor.shape), used if halves is None else BITS]
        )
        parts += [
            _tensor_bytes(t) for t in (_pack_tensor(plain, used) if halves is None else halves)
        ]
    table = json.dumps(
        {"values": dict(frame.values), "tensors": rows}, separators=(",", ":"), allow_nan=False
    ).encode()
    table += b" " * (-(HEADER.size + len(table)) % ALIGN)
    bare = HEADER.pack(
        MAGIC, VERSION, int(frame.kind), 0, len(table), sum(map(len, parts)), frame.number, b""
    )[:UNCHECKED_SIZE]
    return [memoryview(bare + checksum(bare, table, *parts) + table), *(p for p in parts if len(p))]


def chunks(parts: Sequence[memoryview], size: int = CHUNK) -> Iterator[bytes]:
    """The same bytes in pieces of one size, but for the last. Those that are pieces already are not
    copied.
    """
    held: list[memoryview] = []
    room = size
    for part in parts:
        if (
            not held
            and isinstance(part.obj, bytes)
            and len(part.obj) == len(part)
            and (len(part) == size or (part is parts[-1] and len(part) < size))
        ):
            yield part.obj
            continue
        at = 0
        while at < len(part):
            piece = part[at : at + room]
            held.append(piece)
            at, room = at + len(piece), room - len(piece)
            if not room:
                yield b"".join(held)
                held, room = [], size
    if held:
        yield b"".join(held)


class Assembler:
    """Chunks in, frames out. Holds one frame at a time, and never more than its header declares and
    the limits allow. After an error it is done.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits, self.header = limits or Limits(), bytearray()
        self.buffer: memoryview | None = None  # of a frame whose header is here
        self.filled = 0

    def feed(self, chunk: bytes) -> Iterator[Frame]:
        """The frames that are complete with this chunk."""
        for data in self.split(chunk):
            yield decode(data, self.limits)

    def split(self, chunk: bytes) -> Iterator[Bytes]:
        """The bytes of the frames that are complete with this chunk. One that is all of a frame is
        not copied.
        """
        if self.is_empty and frame_length(chunk, self.limits) == len(chunk):
            yield chunk
            return
        view, at = memoryview(chunk), 0
        while at < len(view):
            if self.buffer is None:
                piece = view[at : at + HEADER.size - len(self.header)]
                self.header += piece
                at += len(piece)
                if len(self.header) < HEADER.size:
                    return
                # The system gives these pages when they are written to, so that a header alone
                # costs nothing.
                self.buffer = memoryview(
                    np.empty(HEADER.size + sum(_parse_header(self.header, self.limits)), np.uint8)  # type: ignore[arg-type]
                )
                self.buffer[: HEADER.size] = self.header
                self.filled, self.header = HEADER.size, bytearray()
            piece = view[at : at + len(self.buffer) - self.filled]
            self.buffer[self.filled : self.filled + len(piece)] = piece
            at, self.filled = at + len(piece), self.filled + len(piece)
            if self.filled == len(self.buffer):
                whole, self.buffer = self.buffer, None
                yield whole

    @property
    def is_empty(self) -> bool:
        """Is no frame half here?"""
        return self.buffer is None and not self.header


def decode(data: Bytes, limits: Limits | None = None) -> Frame:
    """The frame of these bytes, all of them. Its tensors are unpacked on lookup: copies of `bytes`,
    but in place in a buffer that can be written to, as an assembler's can.
    """
    limits = limits or Limits()
    table, payload = _parse_header(data, limits)
    if len(data) != HEADER.size + table + payload:
        raise FrameError(
            "length",
            f"a frame of {HEADER.size + table + payload} bytes is declared, and {len(data)} are "
            "there",
        )
    view, (kind, number, check) = memoryview(data), (data[5], *HEADER.unpack_from(data)[6:])
    if (
        checksum(view[:UNCHECKED_SIZE], view[HEADER.size :]) != check
    ):  # of all but itself: a number that was changed would be another request
        raise FrameError("checksum", "the frame's bytes are not those that were sent")
    values, rows = _parse_table(bytes(view[HEADER.size : HEADER.size + table]), limits)
    packed: dict[str, tuple[str, tuple[int, ...], str, memoryview]] = {}
    at, held = HEADER.size + table, 0
    for name, dtype, shape, codec in rows:
        size = _packed_size(dtype, shape, codec)
        if at + size > len(data):
            raise FrameError("length", f'the payload ends before "{name}" does')
        held += prod(shape) * DTYPES[dtype].itemsize
        if held > limits.payload:
            raise FrameError(
                "limit",
                f"the frame's tensors have more than {limits.payload} bytes when they are unpacked",
            )
        packed[name] = (dtype, shape, codec, view[at : at + size])
        at += size
    if at != len(data):
        raise FrameError("length", f"{len(data) - at} bytes of the payload belong to no tensor")
    return Frame(Kind(kind), number, values, PackedTensors(packed), int.from_bytes(check, "little"))


def frame_length(data: Bytes, limits: Limits) -> int | None:
    """How many bytes the frame has that begins here, or None where its header is not whole yet."""
    return HEADER.size + sum(_parse_header(data, limits)) if len(data) >= HEADER.size else None


def frame_identity(data: memoryview) -> tuple[int, int]:
    """The number and the checksum of a frame whose bytes begin here: what a reply to it is known
    by.
    """
    number, check = HEADER.unpack_from(data)[6:]
    return number, int.from_bytes(check, "little")


def _parse_header(data: Bytes, limits: Limits) -> tuple[int, int]:
    """What a header declares, if it is one that may be answered."""
    if len(data) < HEADER.size:
        raise FrameError(
            "length", f"a frame has a header of {HEADER.size} bytes, and {len(data)} are there"
        )
    magic, version, kind, zero, table, payload, _, _ = HEADER.unpack_from(data)
    if magic != MAGIC:
        raise FrameError(
            "magic",
            "the bytes are no frame of regauge's",
            hint="is something else speaking on this port?",
        )
    if version != VERSION:
        raise FrameError(
            "version",
            f"the frame is of version {version}, and this is version {VERSION}",
            hint="update the older side",
        )
    if kind not in Kind._value2member_map_ or zero:
        raise FrameError(
            "kind",
            f"there is no frame of kind {kind}"
            if not zero
            else "the header's spare bytes are not zero",
        )
    if table > limits.table or payload > limits.payload:
        raise FrameError(
            "limit",
            f"a table of {table} and a payload of {payload} bytes are declared, of at most "
            f"{limits.table} and {limits.payload}",
        )
    return table, payload


def _parse_table(
    text: bytes, limits: Limits
) -> tuple[dict[str, Value], list[tuple[str, str, tuple[int, ...], str]]]:
    try:
        found = json.loads(text, parse_constant=_reject_constant, parse_float=_parse_finite)
    except (ValueError, RecursionError) as error:
        raise FrameError("table", "the frame's table is no JSON") from error
    if (
        not isinstance(found, dict)
        or found.keys() != {"values", "tensors"}
        or not isinstance(found["values"], dict)
    ):
        raise FrameError("table", 'the frame\'s table is not {"values": {...}, "tensors": [...]}')
    rows = found["tensors"]
    if not isinstance(rows, list) or len(rows) > limits.tensors:
        raise FrameError("limit", f"a frame has a list of at most {limits.tensors} tensors")
    out: list[tuple[str, str, tuple[int, ...], str]] = []
    for row in rows:
        if not (
            isinstance(row, list)
            and len(row) == 4
            and all(isinstance(row[i], str) for i in (0, 1, 3))
            and isinstance(row[2], list)
        ):
            raise FrameError("table", "a tensor of the table is not [name, dtype, shape, codec]")
        name, dtype, shape, codec = row
        if (
            dtype not in DTYPES
            or codec not in (*CODECS, BITS)
            or (codec not in ("", BITS) and (dtype not in ("F32", "F64") or not shape))
        ):
            raise FrameError(
                "dtype", f'"{name[:64]}" is {dtype!r:.20} as {codec!r:.20}, which does not cross'
            )
        if (
            len(shape) > limits.axes
            or not all(type(n) is int and 0 <= n < 1 << 40 for n in shape)
            or prod(n or 1 for n in shape) > 1 << 40
        ):
            raise FrameError("shape", f'"{name[:64]}" has a shape that does not cross')
        out.append((name, dtype, tuple(shape), codec))
    if any(one[0] == other[0] for one, other in pairwise(sorted(out))):
        raise FrameError("table", "two tensors of the table have one name")
    return found["values"], out


def _reject_constant(text: str) -> None:
    raise ValueError(text)


def _parse_finite(text: str) -> float:
    """A number that can be written again: 1e999 is read as infinity, which is not JSON."""
    found = float(text)
    if not isfinite(found):
        raise ValueError(text)
    return found


def _packed_size(dtype: str, shape: Sequence[int], codec: str) -> int:
    count = prod(shape)
    if codec == "Q8":
        return 4 * prod(shape[:-1]) + count
    if codec == BITS:
        return 2 * DTYPES[dtype].itemsize + (count + 7) // 8
    return count * DTYPES[codec or dtype].itemsize


def _pack_tensor(tensor: Tensor, codec: str) -> list[Tensor]:
    if codec != "Q8":
        return [tensor.to(DTYPES[codec]) if codec else tensor]
    scale = (
        tensor.abs().amax(-1, keepdim=True).float() / 127
        if tensor.numel()
        else torch.zeros((*tensor.shape[:-1], 1))
    )
    rounded = (tensor / scale.clamp(min=1e-30)).round_().clamp_(-127, 127).to(torch.int8)
    return [scale, rounded]


def _pack_bits(tensor: Tensor) -> list[Tensor] | None:
    """A tensor that has no more than two different values (of bits, so that 0 and -0 are two) as
    those, and one bit for each entry. None if it has more, or if nothing would be won.
    """
    if tensor.numel() < 64:
        return None
    flat = tensor.contiguous().view(-1).view(_INTEGER_DTYPES[tensor.element_size()])
    if len(set(flat[:256].tolist())) > 2:
        return None
    is_other = flat != flat[0]
    other = flat[is_other.to(torch.uint8).argmax()]  # where there is none, the first again
    if not bool((~is_other | (flat == other)).all()):
        return None
    return [torch.stack([flat[0], other]), torch.from_numpy(np.packbits(is_other.numpy()))]


def _unpack_bits(data: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    split = 2 * dtype.itemsize
    one, other = _read_tensor(data[:split], _INTEGER_DTYPES[dtype.itemsize], (2,))
    is_other = torch.from_numpy(
        np.unpackbits(np.frombuffer(data[split:], np.uint8), count=prod(shape))
    )
    found = torch.where(is_other.view(torch.bool), other, one).view(shape)
    return found.ne(0) if dtype is torch.bool else found.view(dtype)


def _unpack_tensor(data: memoryview, dtype: str, shape: tuple[int, ...], codec: str) -> Tensor:
    if codec == BITS:
        return _unpack_bits(data, DTYPES[dtype], shape)
    if codec != "Q8":
        return _read_tensor(data, DTYPES[codec or dtype], shape).to(DTYPES[dtype])
    split = 4 * prod(shape[:-1])
    scale, rounded = (
        _read_tensor(data[:split], torch.float32, (*shape[:-1], 1)),
        _read_tensor(data[split:], torch.int8, shape),
    )
    return (rounded * scale).to(DTYPES[dtype])


def _read_tensor(data: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if dtype is torch.bool:  # whatever is not 0 is true: torch takes no other byte than 1 for it
        return _read_tensor(data, torch.uint8, shape).ne(0)
    if (
        len(data)
        and not data.readonly
        and np.frombuffer(data, np.uint8).__array_interface__["data"][0] % dtype.itemsize == 0
    ):
        return torch.frombuffer(data, dtype=dtype).view(
            shape
        )  # of a buffer that is this frame's alone
    out = torch.empty(shape, dtype=dtype)
    if len(data):
        out.view(-1).view(torch.uint8).numpy()[:] = data
    return out


def _tensor_bytes(tensor: Tensor) -> memoryview:
    flat = tensor.contiguous().view(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")  # type: ignore[arg-type]
