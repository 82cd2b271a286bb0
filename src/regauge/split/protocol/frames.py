"""Frames: the binary format of named tensors and a few JSON values.

Nothing that is read is executed, and memory is allocated only as the header declares.

    header   44 bytes, little-endian: "rgsp", version, kind, two zero bytes, length of the table,
             length of the payload, number, checksum of all else (XXH3-128)
    table    JSON: {"values": {...}, "tensors": [[name, dtype, shape, codec], ...]}, padded with
             blanks so that the payload starts at a multiple of 64 bytes
    payload  the tensors' bytes in the order of the table

Float tensors may be sent as bfloat16, as float16, or as int8 with one float32 scale for each row of
the last axis (`codec`); they are returned in their original dtype. A mask with at most two distinct
values is sent as those two and one bit per entry ("BITS"), without loss. A frame is sent in chunks
of about 1 MiB; `Assembler` puts them together, and checks the limits as soon as the header has
arrived. Malformed bytes raise a `FrameError`, with a code to send back.
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

from regauge.errors import FrameError

Tensor = torch.Tensor
Bytes = bytes | bytearray | memoryview
Value = str | int | float | bool | None | list["Value"]
MAGIC, VERSION = b"rgsp", 3  # 2 had another checksum (GHASH)
HEADER = struct.Struct("<4sBBHIQQ16s")
UNCHECKED_SIZE = HEADER.size - 16  # the header without its checksum
ALIGN = 64
CHUNK = 1 << 20
PIECE = CHUNK + (1 << 16)  # a tensor of 1 MiB fits into one, with its header
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
CODECS = ("", "BF16", "F16", "Q8")  # float32 unchanged, in half the bytes, in a quarter
BITS = "BITS"  # lossless; chosen automatically
# Integers that hold the bits of any dtype, by its size.
_INTEGER_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Kind(IntEnum):
    """Kinds of frames. Requests are HELLO, FORWARD, BACKWARD, STEP and BYE."""

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
    """Largest frame that one side accepts.

    Attributes:
        payload: Bytes of the payload, packed and unpacked.
        table: Bytes of the table.
        tensors: Tensors in a frame.
        axes: Axes of a tensor.
    """

    payload: int = 1 << 30
    table: int = 1 << 16
    tensors: int = 64
    axes: int = 8


@dataclass(frozen=True, eq=False)
class Frame:
    """One message.

    Attributes:
        kind: What the message is.
        number: Number of the request that it is or answers; 0 outside the numbered ones.
        values: JSON values.
        tensors: Tensors by name; those of a received frame are unpacked on lookup.
        check: Checksum of a received frame. It distinguishes a repetition of a request from another
            request of the same number.
    """

    kind: Kind
    number: int = 0
    values: Mapping[str, Value] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    check: int = 0


class PackedTensors(Mapping[str, Tensor]):
    """Tensors of a received frame, unpacked on lookup.

    Names, dtypes and shapes are read from the table, so that a frame can be rejected before its
    payload is unpacked: a "BITS" tensor of 16 MB takes 1 GB unpacked.
    """

    def __init__(self, rows: Mapping[str, tuple[str, tuple[int, ...], str, memoryview]]) -> None:
        self._rows = dict(rows)
        self._unpacked: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._unpacked:
            dtype, shape, codec, data = self._rows[name]
            self._unpacked[name] = _unpack_tensor(data, dtype, shape, codec)
            self._rows[name] = (dtype, shape, codec, memoryview(b""))  # free the packed bytes
        return self._unpacked[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def to_meta(self) -> dict[str, Tensor]:
        """Return tensors of the declared dtypes and shapes on the meta device."""
        return {
            name: torch.empty(shape, dtype=DTYPES[dtype], device="meta")
            for name, (dtype, shape, _, _) in self._rows.items()
        }


def declared_tensors(frame: Frame) -> dict[str, Tensor]:
    """Return a frame's tensors on the meta device, without unpacking them."""
    if isinstance(frame.tensors, PackedTensors):
        return frame.tensors.to_meta()
    return {
        name: torch.empty(t.shape, dtype=t.dtype, device="meta")
        for name, t in frame.tensors.items()
    }


def nbytes(frame: Frame) -> int:
    """Return the size of a frame's unpacked tensors, without unpacking them."""
    return sum(t.numel() * t.element_size() for t in declared_tensors(frame).values())


def checksum(*parts: Bytes) -> bytes:
    """Return a 16-byte checksum that identifies a frame and detects corruption: XXH3-128.

    It is computed at the speed of memory, and is wide enough that two requests never collide by
    chance. It is not a signature, which is the task of TLS.
    """
    from xxhash import xxh3_128

    digest = xxh3_128()
    for part in parts:
        digest.update(part)
    return bytes(digest.digest())


def encode(frame: Frame, codec: str = "", exact: Collection[str] = ()) -> list[memoryview]:
    """Encode a frame as a list of buffers; tensors that need no conversion are not copied.

    Args:
        frame: The frame.
        codec: Compression of float32 and float64 tensors, one of `CODECS`.
        exact: Names of tensors that must not be rounded, such as masks. Those with two distinct
            values are sent as bits, and so are boolean tensors.

    Raises:
        FrameError: The codec is unknown, or a tensor has an unsupported dtype.
    """
    if codec not in CODECS:
        raise FrameError(
            "codec",
            f"unknown codec {codec!r}",
            hint=f"choose from {', '.join(c or '(none)' for c in CODECS)}",
        )
    rows: list[list[Any]] = []
    parts: list[memoryview] = []
    for name, tensor in frame.tensors.items():
        if tensor.dtype not in DTYPE_NAMES:
            raise FrameError(
                "dtype",
                f'"{name}" has the unsupported dtype {str(tensor.dtype).removeprefix("torch.")}',
            )
        on_cpu = tensor.detach().cpu()
        bits = _pack_bits(on_cpu) if name in exact or tensor.dtype is torch.bool else None
        tensor_codec = (
            codec
            if name not in exact and tensor.dtype in (torch.float32, torch.float64) and tensor.dim()
            else ""
        )
        rows.append(
            [
                name,
                DTYPE_NAMES[tensor.dtype],
                list(tensor.shape),
                tensor_codec if bits is None else BITS,
            ]
        )
        parts += [
            _tensor_bytes(t) for t in (_pack_tensor(on_cpu, tensor_codec) if bits is None else bits)
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
    """Yield the same bytes in chunks of `size`; the last one may be shorter.

    Parts that already are such a chunk are not copied.
    """
    pieces: list[memoryview] = []
    room = size
    for part in parts:
        if (
            not pieces
            and isinstance(part.obj, bytes)
            and len(part.obj) == len(part)
            and (len(part) == size or (part is parts[-1] and len(part) < size))
        ):
            yield part.obj
            continue
        start = 0
        while start < len(part):
            piece = part[start : start + room]
            pieces.append(piece)
            start, room = start + len(piece), room - len(piece)
            if not room:
                yield b"".join(pieces)
                pieces, room = [], size
    if pieces:
        yield b"".join(pieces)


class Assembler:
    """Assembles frames from chunks.

    It buffers one frame at a time, and never more than the header declares and the limits allow. It
    cannot be used after an error.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits, self.header = limits or Limits(), bytearray()
        self.buffer: memoryview | None = None  # allocated when the header is complete
        self.filled = 0

    def feed(self, chunk: bytes) -> Iterator[Frame]:
        """Yield the frames that this chunk completes, decoded."""
        for data in self.split(chunk):
            yield decode(data, self.limits)

    def split(self, chunk: bytes) -> Iterator[Bytes]:
        """Yield the bytes of the frames that this chunk completes.

        A chunk that is exactly one frame is not copied.
        """
        if self.is_empty and frame_length(chunk, self.limits) == len(chunk):
            yield chunk
            return
        view, start = memoryview(chunk), 0
        while start < len(view):
            if self.buffer is None:
                piece = view[start : start + HEADER.size - len(self.header)]
                self.header += piece
                start += len(piece)
                if len(self.header) < HEADER.size:
                    return
                # Pages are committed when they are written to: a header alone costs no memory.
                size = HEADER.size + sum(_parse_header(self.header, self.limits))
                self.buffer = np.empty(size, np.uint8).data
                self.buffer[: HEADER.size] = self.header
                self.filled, self.header = HEADER.size, bytearray()
            piece = view[start : start + len(self.buffer) - self.filled]
            self.buffer[self.filled : self.filled + len(piece)] = piece
            start, self.filled = start + len(piece), self.filled + len(piece)
            if self.filled == len(self.buffer):
                frame, self.buffer = self.buffer, None
                yield frame

    @property
    def is_empty(self) -> bool:
        """Return whether no frame is partially received."""
        return self.buffer is None and not self.header


def decode(data: Bytes, limits: Limits | None = None) -> Frame:
    """Decode the bytes of exactly one frame.

    Tensors are unpacked on lookup. They are copied from immutable bytes, and share the memory of a
    writable buffer such as an assembler's.

    Raises:
        FrameError: The bytes are malformed, corrupted or exceed the limits.
    """
    limits = limits or Limits()
    table, payload = _parse_header(data, limits)
    if len(data) != HEADER.size + table + payload:
        raise FrameError(
            "length",
            f"the frame must have {HEADER.size + table + payload} bytes by its header, got "
            f"{len(data)}",
        )
    view, (kind, number, check) = memoryview(data), (data[5], *HEADER.unpack_from(data)[6:])
    # The header is covered too: a corrupted number would be another request.
    if checksum(view[:UNCHECKED_SIZE], view[HEADER.size :]) != check:
        raise FrameError("checksum", "the frame was corrupted: its checksum does not match")
    values, rows = _parse_table(bytes(view[HEADER.size : HEADER.size + table]), limits)
    packed: dict[str, tuple[str, tuple[int, ...], str, memoryview]] = {}
    start, unpacked_size = HEADER.size + table, 0
    for name, dtype, shape, codec in rows:
        size = _packed_size(dtype, shape, codec)
        if start + size > len(data):
            raise FrameError("length", f'the payload ends before "{name}" does')
        unpacked_size += prod(shape) * DTYPES[dtype].itemsize
        if unpacked_size > limits.payload:
            raise FrameError(
                "limit",
                f"the frame's unpacked tensors must have at most {limits.payload} bytes, got more",
            )
        packed[name] = (dtype, shape, codec, view[start : start + size])
        start += size
    if start != len(data):
        raise FrameError("length", f"{len(data) - start} bytes of the payload belong to no tensor")
    return Frame(Kind(kind), number, values, PackedTensors(packed), int.from_bytes(check, "little"))


def frame_length(data: Bytes, limits: Limits) -> int | None:
    """Return the length of the frame that starts here, or None if its header is incomplete."""
    return HEADER.size + sum(_parse_header(data, limits)) if len(data) >= HEADER.size else None


def frame_identity(data: memoryview) -> tuple[int, int]:
    """Return the number and the checksum of an encoded frame, which errors about it repeat."""
    number, check = HEADER.unpack_from(data)[6:]
    return number, int.from_bytes(check, "little")


def _parse_header(data: Bytes, limits: Limits) -> tuple[int, int]:
    """Validate a header; return the lengths of table and payload."""
    if len(data) < HEADER.size:
        raise FrameError(
            "length", f"a frame must have a header of {HEADER.size} bytes, got {len(data)}"
        )
    magic, version, kind, zero, table, payload, _, _ = HEADER.unpack_from(data)
    if magic != MAGIC:
        raise FrameError(
            "magic",
            "not a regauge frame: bad magic bytes",
            hint="check that the other side is a regauge client or server",
        )
    if version != VERSION:
        raise FrameError(
            "version",
            f"the frame's version must be {VERSION}, got {version}",
            hint="update the older side",
        )
    if kind not in Kind._value2member_map_ or zero:
        raise FrameError(
            "kind",
            f"unknown kind of frame: {kind}"
            if not zero
            else f"the header's reserved bytes must be zero, got {zero}",
        )
    if table > limits.table or payload > limits.payload:
        raise FrameError(
            "limit",
            f"table and payload must have at most {limits.table} and {limits.payload} bytes, got "
            f"{table} and {payload}",
        )
    return table, payload


def _parse_table(
    text: bytes, limits: Limits
) -> tuple[dict[str, Value], list[tuple[str, str, tuple[int, ...], str]]]:
    """Validate a table; return its values and its tensors' (name, dtype, shape, codec)."""
    try:
        table = json.loads(text, parse_constant=_reject_constant, parse_float=_parse_finite)
    except (ValueError, RecursionError) as error:
        raise FrameError("table", "the frame's table must be JSON") from error
    if (
        not isinstance(table, dict)
        or table.keys() != {"values", "tensors"}
        or not isinstance(table["values"], dict)
    ):
        raise FrameError(
            "table",
            'the frame\'s table must be {"values": {...}, "tensors": [...]}',
        )
    rows = table["tensors"]
    if not isinstance(rows, list) or len(rows) > limits.tensors:
        raise FrameError("limit", f'"tensors" must be a list of at most {limits.tensors} tensors')
    tensors: list[tuple[str, str, tuple[int, ...], str]] = []
    for row in rows:
        if not (
            isinstance(row, list)
            and len(row) == 4
            and all(isinstance(row[i], str) for i in (0, 1, 3))
            and isinstance(row[2], list)
        ):
            raise FrameError(
                "table",
                "a tensor in the table must be [name, dtype, shape, codec]",
            )
        name, dtype, shape, codec = row
        if (
            dtype not in DTYPES
            or codec not in (*CODECS, BITS)
            or (codec not in ("", BITS) and (dtype not in ("F32", "F64") or not shape))
        ):
            raise FrameError(
                "dtype",
                f'"{name[:64]}" has an unsupported dtype or codec: {dtype!r:.20}, {codec!r:.20}',
            )
        if (
            len(shape) > limits.axes
            or not all(type(n) is int and 0 <= n < 1 << 40 for n in shape)
            or prod(n or 1 for n in shape) > 1 << 40
        ):
            raise FrameError(
                "shape",
                f'the shape of "{name[:64]}" must have at most {limits.axes} axes and 2^40 '
                f"entries, got {shape!r:.80}",
            )
        tensors.append((name, dtype, tuple(shape), codec))
    if any(left[0] == right[0] for left, right in pairwise(sorted(tensors))):
        raise FrameError("table", "the tensors of a frame must have distinct names, got duplicates")
    return table["values"], tensors


def _reject_constant(text: str) -> None:
    raise ValueError(text)


def _parse_finite(text: str) -> float:
    """Parse a finite number: 1e999 would become infinity, which JSON cannot represent."""
    number = float(text)
    if not isfinite(number):
        raise ValueError(text)
    return number


def _packed_size(dtype: str, shape: Sequence[int], codec: str) -> int:
    """Return the bytes of a packed tensor."""
    count = prod(shape)
    if codec == "Q8":
        return 4 * prod(shape[:-1]) + count
    if codec == BITS:
        return 2 * DTYPES[dtype].itemsize + (count + 7) // 8
    return count * DTYPES[codec or dtype].itemsize


def _pack_tensor(tensor: Tensor, codec: str) -> list[Tensor]:
    """Return the tensors that a codec sends for one: itself, or scales and integers."""
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
    """Pack a tensor of at most two distinct values as those two, and one bit per entry.

    Values are compared by their bits, so that 0 and -0 differ. Returns None if there are more, or
    if packing would save nothing.
    """
    if tensor.numel() < 64:
        return None
    flat = tensor.contiguous().view(-1).view(_INTEGER_DTYPES[tensor.element_size()])
    if len(set(flat[:256].tolist())) > 2:
        return None
    is_other = flat != flat[0]
    other = flat[is_other.to(torch.uint8).argmax()]  # the first value again if there is only one
    if not bool((~is_other | (flat == other)).all()):
        return None
    return [torch.stack([flat[0], other]), torch.from_numpy(np.packbits(is_other.numpy()))]


def _unpack_bits(data: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Reverse `_pack_bits`."""
    start = 2 * dtype.itemsize
    first, other = _read_tensor(data[:start], _INTEGER_DTYPES[dtype.itemsize], (2,))
    is_other = torch.from_numpy(
        np.unpackbits(np.frombuffer(data[start:], np.uint8), count=prod(shape))
    )
    values = torch.where(is_other.view(torch.bool), other, first).view(shape)
    return values.ne(0) if dtype is torch.bool else values.view(dtype)


def _unpack_tensor(data: memoryview, dtype: str, shape: tuple[int, ...], codec: str) -> Tensor:
    """Reverse `_pack_tensor` or `_pack_bits`."""
    if codec == BITS:
        return _unpack_bits(data, DTYPES[dtype], shape)
    if codec != "Q8":
        return _read_tensor(data, DTYPES[codec or dtype], shape).to(DTYPES[dtype])
    start = 4 * prod(shape[:-1])
    scale, rounded = (
        _read_tensor(data[:start], torch.float32, (*shape[:-1], 1)),
        _read_tensor(data[start:], torch.int8, shape),
    )
    return (rounded * scale).to(DTYPES[dtype])


def _read_tensor(data: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return bytes as a tensor, without a copy if they are writable and aligned."""
    if dtype is torch.bool:  # any byte but 0 is true; torch's own bool must be 0 or 1
        return _read_tensor(data, torch.uint8, shape).ne(0)
    if (
        len(data)
        and not data.readonly
        and np.frombuffer(data, np.uint8).__array_interface__["data"][0] % dtype.itemsize == 0
    ):
        # Safe to share: the buffer belongs to this frame alone.
        return torch.frombuffer(data, dtype=dtype).view(shape)
    tensor = torch.empty(shape, dtype=dtype)
    if len(data):
        tensor.view(-1).view(torch.uint8).numpy()[:] = data
    return tensor


def _tensor_bytes(tensor: Tensor) -> memoryview:
    """Return a view of a tensor's bytes."""
    flat = tensor.contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
