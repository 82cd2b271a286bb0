"""Small files that would take much memory or time to read: checkpoints and data. Each builder
returns the bytes of a file.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping
from types import MappingProxyType

MIB = 1 << 20
ONE = MappingProxyType({"0": bytes(4)})  # a storage of one float32


def text(value: str) -> bytes:
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def number(value: int) -> bytes:
    if 0 <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def numbers(values: tuple[int, ...]) -> bytes:
    return b"(" + b"".join(map(number, values)) + b"t"


def tensor(
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    *,
    key: str = "0",
    numel: int = 1,
    offset: int = 0,
    view: bytes = b"",
) -> bytes:
    """The opcodes that rebuild a float32 tensor."""
    pid = (
        b"("
        + text("storage")
        + b"ctorch\nFloatStorage\n"
        + text(key)
        + text("cpu")
        + number(numel)
        + view
        + b"tQ"
    )
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n("
        + pid
        + number(offset)
        + numbers(shape)
        + numbers(stride)
        + b"\x89ccollections\nOrderedDict\n)RtR"
    )


def state(**tensors: bytes) -> bytes:
    """The pickle of a dictionary of tensors."""
    return b"\x80\x02}(" + b"".join(text(name) + value for name, value in tensors.items()) + b"u."


def archive(
    pickle: bytes,
    storages: Mapping[str, bytes] = ONE,
    compression: int = zipfile.ZIP_STORED,
    order: str = "little",
) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as file:
        file.writestr("archive/data.pkl", pickle)
        file.writestr("archive/byteorder", order)
        for key, raw in storages.items():
            file.writestr(f"archive/data/{key}", raw)
        file.writestr("archive/version", "3\n")
    return out.getvalue()


GOOD = state(a=tensor((1,), (1,)))
DEFLATED = zipfile.ZIP_DEFLATED


def old_format(pickle: bytes, numel: int = 1, raw: bytes = bytes(4)) -> bytes:
    """The format before torch 1.6."""
    magic = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
    return (
        magic
        + b"\x80\x02M\xe9\x03."
        + b"\x80\x02}."
        + pickle
        + b"\x80\x02]("
        + text("0")
        + b"e."
        + struct.pack("<q", numel)
        + raw
    )


def patched(raw: bytes, name: bytes, central: Callable[[bytearray, int], None]) -> bytes:
    """Change the entry of a file in the zip's directory."""
    data = bytearray(raw)
    at = data.index(b"PK\x01\x02")
    while data[at + 46 : at + 46 + len(name)] != name:
        at = data.index(b"PK\x01\x02", at + 4)
    central(data, at)
    return bytes(data)


def _size(size: int) -> Callable[[bytearray, int], None]:
    def change(data: bytearray, at: int) -> None:
        struct.pack_into("<I", data, at + 24, size)

    return change


def _flags(data: bytearray, at: int) -> None:
    data[at + 8] |= 1


def _overlapping(data: bytearray, at: int) -> None:
    """The entry's data are those of the first."""
    struct.pack_into("<I", data, at + 42, 0)


def _zip64(data: bytearray, at: int) -> None:
    """The entry begins at 2**63 + 1, by a field of zip64."""
    extra = struct.pack("<HHQ", 1, 8, (1 << 63) + 1)
    length = struct.unpack_from("<H", data, at + 28)[0]
    struct.pack_into("<H", data, at + 30, len(extra))
    struct.pack_into("<I", data, at + 42, 0xFFFFFFFF)
    data[at + 46 + length : at + 46 + length] = extra
    end = data.index(b"PK\x05\x06")
    struct.pack_into("<I", data, end + 12, struct.unpack_from("<I", data, end + 12)[0] + len(extra))


def flipped() -> bytes:
    """A checkpoint with one bit changed in a storage."""
    data = bytearray(
        archive(state(a=tensor((256,), (1,), numel=256)), {"0": bytes(range(256)) * 4})
    )
    data[data.index(bytes(range(256))) + 100] ^= 1
    return bytes(data)


def many_windows() -> bytes:
    """40 tensors that each look at nearly the whole of one storage."""
    n = MIB
    windows = {f"w{i}": tensor((n - 40,), (1,), numel=n, offset=i) for i in range(40)}
    return archive(state(**windows), {"0": bytes(4 * n)})


def directory() -> bytes:
    """A zip directory of 400,000 entries."""
    entry = (
        struct.pack(
            "<4s4B4HL2L5H2L", b"PK\x01\x02", 20, 0, 20, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0
        )
        + b"x"
    )
    raw = entry * 400_000
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 65535, 65535, len(raw), 31, 0)
    return b"PK\x03\x04" + bytes(26) + b"x" + raw + end


# What is refused, and a part of the message.
CONVERT: dict[str, tuple[Callable[[], bytes], str]] = {
    "memo index": (
        lambda: archive(b"\x80\x02}r\xff\xff\xff\x0fctorch\nSize\n."),
        "memo index must be <= 2,000,000, got 268,435,455",
    ),
    "memo index, old format": (
        lambda: old_format(b"\x80\x02}r\xff\xff\xff\x0f."),
        "memo index must be",
    ),
    "stride 0": (lambda: archive(state(a=tensor((3_125_000_000,), (0,)))), "got 12,500.0 MB"),
    "stride 0, old format": (
        lambda: old_format(state(a=tensor((3_125_000_000,), (0,), view=b"N"))),
        "got 12,500.0 MB",
    ),
    "overlapping strides": (
        lambda: archive(
            state(a=tensor((20_000, 20_000), (1, 1), numel=40_000)), {"0": bytes(160_000)}
        ),
        "got 1,600.0 MB",
    ),
    "many windows": (many_windows, "times the 4.2 MB that it stores"),
    "beyond the storage": (
        lambda: archive(state(a=tensor((2,), (1,)))),
        "must lie within its storage",
    ),
    "dimensions": (
        lambda: archive(state(a=tensor((1,) * 1000, (1,) * 1000))),
        "at most 32 dimensions",
    ),
    "deflated storage": (
        lambda: archive(
            state(a=tensor((32 * MIB,), (1,), numel=32 * MIB)), {"0": bytes(128 * MIB)}, DEFLATED
        ),
        "must inflate to at most",
    ),
    "deflated text": (
        lambda: archive(b"\x80\x02}(" + text("a" * 60 * MIB) + b"Nu.", compression=DEFLATED),
        "must have at most 33.6 MB, got 62.9 MB",
    ),
    "opcodes": (
        lambda: archive(b"\x80\x02" + b"}" * 2_000_000 + b".", compression=DEFLATED),
        "at most 2,000,000 opcodes",
    ),
    "marks": (lambda: archive(b"\x80\x02" + b"(" * 1000 + b"."), "at most 512 levels"),
    "text of 4 GB": (lambda: archive(b"\x80\x02}(X\xff\xff\xff\xff."), "is truncated"),
    "copied lists": (
        lambda: archive(
            b"\x80\x02]("
            + b"NN\x86" * 20_000
            + b"eq\x00"
            + b"ccollections\nOrderedDict\nh\x00\x85R" * 100
            + b"."
        ),
        "at most 2,000,000 opcodes",
    ),
    "storage of 2**40": (
        lambda: archive(state(a=tensor((1,), (1,), numel=1 << 40))),
        "must have 4398046511104 bytes, got 4",
    ),
    "storage of 2**40, old format": (
        lambda: old_format(state(a=tensor((1,), (1,), numel=1 << 40, view=b"N")), 1 << 40),
        "must have 1099511627776 elements",
    ),
    "storage of 2**200": (
        lambda: archive(state(a=tensor((1,), (1,), numel=1 << 200))),
        "is invalid at byte",
    ),
    "wrong inflated size": (
        lambda: patched(archive(GOOD, {"0": bytes(MIB)}, DEFLATED), b"archive/data/0", _size(4)),
        "must have 4 bytes, got more",
    ),
    "overlapping entries": (
        lambda: patched(archive(GOOD), b"archive/version", _overlapping),
        "overlaps another one",
    ),
    "entry behind the end": (
        lambda: patched(archive(GOOD), b"archive/version", _zip64),
        "lies outside the archive",
    ),
    "encrypted entry": (lambda: patched(archive(GOOD), b"archive/version", _flags), "is encrypted"),
    "bzip2 entry": (
        lambda: archive(GOOD, compression=zipfile.ZIP_BZIP2),
        "must be stored or deflated",
    ),
    "stored size": (
        lambda: patched(archive(GOOD), b"archive/data/0", _size(1 << 30)),
        "is stored as 4 bytes, but declares 1073741824",
    ),
    "huge directory": (directory, "the zip directory must have at most 16.8 MB"),
    "flipped bit": (flipped, 'CRC-32 of entry "archive/data/0"'),
    "code": (
        lambda: archive(b"\x80\x02cos\nsystem\n" + text("true") + b"\x85R."),
        "names 'os'.'system'",
    ),
    "code by a stack global": (
        lambda: archive(b"\x80\x02" + text("os") + text("system") + b"\x93."),
        "opcode 0x93",
    ),
    "tar": (lambda: bytes(257) + b"ustar" + bytes(500), "tar file"),
    "TorchScript": (
        lambda: archive(GOOD).replace(b"archive/data.pkl", b"archive/constant"),
        "no data.pkl",
    ),
}

# What is read, or refused, without stalling or crashing.
SLOW: dict[str, Callable[[], bytes]] = {
    "equal hashes": lambda: archive(
        b"\x80\x02}(" + b"".join(number(k * (2**61 - 1)) + b"N" for k in range(1, 100_000)) + b"u."
    ),
    "deep tuple as a key": lambda: archive(b"\x80\x02})" + b"\x85" * 1_000_000 + b"Ns."),
    "deep list": lambda: archive(b"\x80\x02" + b"]" * 500_000 + b"a" * 499_999 + b"."),
}


def png(width: int, height: int) -> bytes:
    """A grey image of one value."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    deflate = zlib.compressobj(1)
    rows = b"".join([*(deflate.compress(bytes(width + 1)) for _ in range(height)), deflate.flush()])
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">2I5B", width, height, 8, 0, 0, 0, 0))
        + chunk(b"IDAT", rows)
        + chunk(b"IEND", b"")
    )


def npy(shape: str, data: bytes = b"", dtype: str = "<f8") -> bytes:
    """An array whose header declares any shape."""
    header = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + data


def npz(arrays: Mapping[str, bytes], compression: int = DEFLATED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as file:
        for name, raw in arrays.items():
            file.writestr(f"{name}.npy", raw)
    return out.getvalue()


def parquet(columns: Mapping[str, object], **options: object) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    out = io.BytesIO()
    pq.write_table(pa.table(dict(columns)), out, **options)
    return out.getvalue()


def repeated_rows() -> bytes:
    """100 million equal numbers."""
    import pyarrow as pa

    rows = pa.chunked_array([pa.array([0] * 1_000_000)] * 100)
    return parquet({"label": rows}, row_group_size=1_000_000)


def repeated_text(n: int = 100_000) -> bytes:
    """A text of 1 MB in every one of many rows."""
    import pyarrow as pa

    return parquet(
        {
            "text": pa.DictionaryArray.from_arrays(
                pa.array([0] * n, pa.int32()), pa.array(["x" * MIB])
            )
        },
        compression="zstd",
    )


def _varint(n: int) -> bytes:
    """A number as Thrift's compact protocol writes it."""
    n, out = 2 * n, b""
    while n >= 128:
        out, n = out + bytes([n & 127 | 128]), n >> 7
    return out + bytes([n])


def lying_footer(n: int = 60_000_000) -> bytes:
    """A list of many equal numbers, of which the footer declares fewer than its page holds."""
    import pyarrow as pa

    rows = pa.ListArray.from_arrays(
        pa.array([0, n], pa.int32()), pa.repeat(pa.scalar(0, pa.int64()), n)
    )
    raw = parquet({"a": rows}, data_page_size=1 << 30, write_batch_size=n, write_statistics=False)
    footer = len(raw) - 8 - int.from_bytes(raw[-8:-4], "little")
    return raw[:footer] + raw[footer:].replace(_varint(n), _varint(1_100_000))


# What is refused, by the name of a file, with a part of the message. Images are looked at.
DATA: dict[str, tuple[Callable[[], bytes], str]] = {
    "400-megapixel.png": (
        lambda: png(20_000, 20_000),
        "must have at most 100 million pixels, got 400,000,000 pixels",
    ),
    "121-megapixel.png": (
        lambda: png(11_000, 11_000),
        "must have at most 100 million pixels, got 11000 x 11000",
    ),
    "zeros.npz": (
        lambda: npz({"a": npy("(67108864,)", bytes(512 * MIB))}),
        "must inflate to at most",
    ),
    "shape.npz": (
        lambda: npz({"a": npy("(1000000000000,)", bytes(8))}),
        "must have 8000000000000 bytes, got 8",
    ),
    "negative.npz": (lambda: npz({"a": npy("(-1, -1)", bytes(8))}), "got 8"),
    "objects.npz": (
        lambda: npz({"a": npy("(1,)", b"cos\nsystem\n", "|O")}),
        "holds Python objects",
    ),
    "rows.parquet": (repeated_rows, "must have at most 33,554,432 values"),
    "footer.parquet": (lying_footer, "must have at most 33,554,432 values"),
    "zeros.parquet": (
        lambda: parquet({"a": [bytes(600 * MIB)]}, compression="zstd", use_dictionary=False),
        "must decompress to at most",
    ),
}
