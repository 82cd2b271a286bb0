"""Zip archives from untrusted sources: every entry is checked and bounded before it is used.

`open_archive` parses the directory once and rejects what a writer of checkpoints or arrays never
produces: encrypted entries, duplicate names, overlapping entries, compression other than deflate,
and archives that inflate beyond a stated bound. Uncompressed entries can be mapped
(`Record.start`); `Archive.chunks` streams any entry and compares its CRC-32 with the directory.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import BinaryIO

from regauge.checkpoints.files import format_bytes
from regauge.errors import CheckpointError

# bytes of the zip directory: about 150,000 entries with the names that torch writes
MAX_DIRECTORY = 1 << 24
MAX_RATIO = 8  # all entries, inflated, over the size of the archive
SPARE = 1 << 26  # bytes allowed beyond every ratio, for small archives
_CHUNK = 1 << 20
_LOCAL_HEADER = struct.Struct(
    "<4s22xHH"
)  # signature, ..., length of the name, length of the extra field
_ENCRYPTED = 0x1 | 0x40 | 0x2000


@dataclass(frozen=True)
class Record:
    """One entry: the place of its bytes in the archive, and their inflated size and checksum."""

    name: str
    start: int
    stored: int  # bytes in the archive
    size: int  # bytes when inflated
    crc: int
    deflated: bool


@dataclass(frozen=True)
class Archive:
    """An open zip archive whose entries have been checked.

    `checksums` is False if the writer omitted every CRC-32.
    """

    file: BinaryIO
    label: str
    records: Mapping[str, Record]
    checksums: bool

    def chunks(self, record: Record) -> Iterator[bytes]:
        """Yield an entry in pieces of at most 1 MiB.

        Raises:
            CheckpointError: At the end, if size or CRC-32 differ from the directory.
        """
        crc, size, at = 0, 0, record.start
        inflate = zlib.decompressobj(-15) if record.deflated else None
        stop = record.start + record.stored
        pending = b""
        while True:
            if not pending and at < stop:
                self.file.seek(at)
                pending = self.file.read(min(_CHUNK, stop - at))
                at += len(pending)
                if not pending:
                    raise self.damage_error(f'entry "{record.name}" ends early')
            if inflate is None:
                piece, pending = pending, b""
            else:
                try:
                    piece = inflate.decompress(pending, _CHUNK)
                except zlib.error as error:
                    raise self.damage_error(
                        f'entry "{record.name}" cannot be inflated ({error})'
                    ) from error
                pending = inflate.unconsumed_tail
            size += len(piece)
            if size > record.size:
                raise self.damage_error(
                    f'entry "{record.name}" must have {record.size} bytes, got more'
                )
            if piece:
                crc = zlib.crc32(piece, crc)
                yield piece
            if not pending and at >= stop and (not piece or inflate is None or inflate.eof):
                break
        if size != record.size:
            raise self.damage_error(
                f'entry "{record.name}" must have {record.size} bytes, got {size}'
            )
        if self.checksums and crc != record.crc:
            raise self.damage_error(
                f'the CRC-32 of entry "{record.name}" must be {record.crc:08x}, got {crc:08x}'
            )

    def read(self, record: Record, limit: int) -> bytes:
        """Read an entry of at most `limit` bytes."""
        if record.size > limit:
            raise CheckpointError(
                f'{self.label}: entry "{record.name}" must have at most {format_bytes(limit)}, got '
                f"{format_bytes(record.size)}",
                hint="no checkpoint needs this much beside its tensors; fetch the file from a "
                "source you trust",
            )
        return b"".join(self.chunks(record))

    def damage_error(self, reason: str) -> CheckpointError:
        """Return the error for a damaged archive."""
        return CheckpointError(f"{self.label} is damaged: {reason}", hint="fetch the file again")


class _BoundedReader:
    """A file handle for `zipfile` that rejects reads larger than the directory may be."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.seek, self.tell = file.seek, file.tell

    def seekable(self) -> bool:
        return True

    def read(self, n: int = -1) -> bytes:
        if n > MAX_DIRECTORY:
            raise zipfile.BadZipFile(
                f"the zip directory must have at most {format_bytes(MAX_DIRECTORY)}, "
                f"got {format_bytes(n)}"
            )
        return self._file.read(MAX_DIRECTORY if n < 0 else n)


def open_archive(
    file: BinaryIO, label: str, *, max_ratio: int = MAX_RATIO, spare: int = SPARE
) -> Archive:
    """Parse and check the directory of a zip archive; no entry is inflated.

    Args:
        file: The archive, seekable. It stays open, and must outlive the result.
        label: The name of the archive in errors.
        max_ratio: Bound on the inflated size of all entries, relative to the size of the archive.
        spare: Bytes that are allowed in addition.

    Raises:
        CheckpointError: The archive is damaged, or exceeds a bound.
    """

    def rejection(reason: str) -> CheckpointError:
        return CheckpointError(
            f"{label} cannot be read: {reason}",
            hint="fetch the file again, from a source you trust",
        )

    try:
        with zipfile.ZipFile(_BoundedReader(file)) as opened:
            infos, directory = opened.infolist(), opened.start_dir
    except (
        zipfile.BadZipFile,
        OSError,
        ValueError,
        NotImplementedError,
        struct.error,
        UnicodeError,
        OverflowError,
    ) as error:
        raise rejection(f"not a valid zip archive ({error})") from error
    records: dict[str, Record] = {}
    end, total = 0, 0
    for info in sorted(infos, key=lambda info: info.header_offset):
        name = info.filename
        if info.flag_bits & _ENCRYPTED:
            raise rejection(f'entry "{name}" is encrypted')
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise rejection(
                f'entry "{name}" must be stored or deflated, got compression method '
                f"{info.compress_type}"
            )
        if name in records:
            raise rejection(f'two entries are named "{name}"')
        start = _data_start(file, info, end, directory)
        if start is None or start + info.compress_size > directory:
            raise rejection(f'entry "{name}" overlaps another one, or lies outside the archive')
        deflated = info.compress_type == zipfile.ZIP_DEFLATED
        if not deflated and info.compress_size != info.file_size:
            raise rejection(
                f'entry "{name}" is stored as {info.compress_size} bytes, but declares '
                f"{info.file_size}"
            )
        records[name] = Record(name, start, info.compress_size, info.file_size, info.CRC, deflated)
        end = start + info.compress_size
        total += info.file_size
    size = file.seek(0, 2)
    limit = max_ratio * size + spare
    if total > limit:
        raise CheckpointError(
            f"{label} must inflate to at most {format_bytes(limit)} ({max_ratio} times its size "
            f"plus {format_bytes(spare)}), got {format_bytes(total)}",
            hint="if you trust the file, repack it without compression (unzip, then zip -0)",
        )
    return Archive(
        file,
        label,
        {info.filename: records[info.filename] for info in infos},
        any(r.crc for r in records.values()),
    )


def _data_start(file: BinaryIO, info: zipfile.ZipInfo, end: int, directory: int) -> int | None:
    """Return the start of an entry's data, from its local header.

    None unless the header lies between `end` and the directory, and names the same entry.
    """
    if not end <= info.header_offset < directory:
        return None
    file.seek(info.header_offset)
    raw = file.read(_LOCAL_HEADER.size)
    if len(raw) < _LOCAL_HEADER.size:
        return None
    signature, length, extra = _LOCAL_HEADER.unpack(raw)
    name = file.read(length)
    if signature != b"PK\x03\x04" or name != info.orig_filename.encode(
        "utf-8" if info.flag_bits & 0x800 else "cp437"
    ):
        return None
    return int(info.header_offset + _LOCAL_HEADER.size + length + extra)
