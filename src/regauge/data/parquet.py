"""Footers and page headers of parquet files: the values and bytes that a file decompresses to.

Arrow allocates what a page's header declares, and reads a page as a whole. The sums in the file's
footer may be smaller, so that a file of 535 bytes can take gigabytes: the headers must be counted
first. The footer is parsed here too, since pyarrow can abort the process on a damaged one.

References:
    - Apache Parquet, parquet.thrift: FileMetaData, ColumnMetaData, PageHeader.
    - Apache Thrift, thrift-compact-protocol.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

MAX_FIELDS = 2_000_000  # fields of a footer: about 100,000 column chunks
_MAX_HEADER = 1 << 20  # bytes of a page header: its statistics contain two values
_BYTE_ARRAY = 6  # the physical type of texts and images


@dataclass(frozen=True)
class Chunk:
    """A column of one row group, as the footer declares it.

    Args:
        path: The name of the column.
        is_bytes: Whether its physical type is a byte array.
        width: The bytes per value of fixed length.
        rows: The rows of the row group.
        values: The values of the column.
        start: The first byte of its pages.
        stop: The byte after its pages.
    """

    path: str
    is_bytes: bool
    width: int
    rows: int
    values: int
    start: int
    stop: int


def read_chunks(raw: bytes) -> list[Chunk]:
    """Read the column chunks that a footer declares.

    Raises:
        ValueError: The footer is damaged, or has more than `MAX_FIELDS` fields.
    """
    if len(raw) < 12 or raw[-4:] != b"PAR1":
        raise ValueError("it does not end with the magic bytes of parquet")
    length = int.from_bytes(raw[-8:-4], "little")
    if length > len(raw) - 12:
        raise ValueError(f"its footer must have at most {len(raw) - 12} bytes, got {length}")
    footer = _CompactReader(raw, len(raw) - 8 - length, len(raw) - 8).struct(0)
    # The widths of schema elements without children.
    leaves = [_get_ints(element, 2)[0] for element in _get_structs(footer, 2) if not element.get(5)]
    return [
        chunk for group in _get_structs(footer, 4) for chunk in _row_group_chunks(group, leaves)
    ]


def _row_group_chunks(group: dict[int, Any], leaves: list[int]) -> Iterator[Chunk]:
    """Yield the column chunks of a row group, given the widths of the columns."""
    columns = [_get_struct(column, 3) for column in _get_structs(group, 1)]
    if len(columns) != len(leaves):
        raise ValueError(f"a row group must have {len(leaves)} columns, got {len(columns)}")
    for column, width in zip(columns, leaves, strict=True):
        kind, values, stored, data, dictionary = _get_ints(column, 1, 5, 7, 9, 11)
        start = min(data, dictionary or data)
        path = b".".join(name for name in column.get(3, ()) if isinstance(name, bytes)).decode()
        yield Chunk(
            path,
            kind == _BYTE_ARRAY,
            max(8, width),
            _get_ints(group, 3)[0],
            values,
            start,
            start + stored,
        )


def count_pages(raw: bytes, chunk: Chunk) -> tuple[int, int]:
    """Count the values in the data pages that a reader of a chunk decodes, and the decompressed
    bytes of all its pages.

    Raises:
        ValueError: A page is damaged, or lies outside of the chunk.
    """
    values, size, at = 0, 0, chunk.start
    if not 0 <= chunk.start <= chunk.stop <= len(raw):
        raise ValueError("a column lies outside of the file")
    # A reader stops at the page that reaches the footer's number of values.
    while values < chunk.values and at < chunk.stop:
        reader = _CompactReader(raw, at, min(chunk.stop, at + _MAX_HEADER))
        header = reader.struct(0)
        inflated, stored = _get_ints(header, 2, 3)
        if stored > chunk.stop - reader.at:
            raise ValueError(f"the page at byte {at} lies outside of its column")
        # Data pages of version 1 or 2.
        count = _get_ints(_get_struct(header, 5), 1)[0] + _get_ints(_get_struct(header, 8), 1)[0]
        values, size, at = values + count, size + inflated, reader.at + stored
    return values, size


def _get_ints(fields: dict[int, Any], *which: int) -> list[int]:
    """Return integer fields by number; a missing one is 0."""
    numbers = [fields.get(i, 0) for i in which]
    if not all(type(n) is int and 0 <= n < 1 << 60 for n in numbers):
        raise ValueError("it declares a size that is not a number, or negative")
    return numbers


def _get_struct(fields: dict[int, Any], which: int) -> dict[int, Any]:
    """Return a struct field by number; a missing one is empty."""
    struct = fields.get(which, {})
    if not isinstance(struct, dict):
        raise ValueError(f"field {which} of its metadata must be a struct")
    return struct


def _get_structs(fields: dict[int, Any], which: int) -> list[dict[int, Any]]:
    """Return a field that is a list of structs by number; a missing one is empty."""
    structs = fields.get(which, [])
    if not isinstance(structs, list) or not all(isinstance(s, dict) for s in structs):
        raise ValueError(f"field {which} of its metadata must be a list of structs")
    return structs


class _CompactReader:
    """A reader of Thrift's compact protocol. Structs are dictionaries by field number."""

    def __init__(self, raw: bytes, at: int, stop: int) -> None:
        self.raw, self.at, self.stop, self.left = raw, at, stop, MAX_FIELDS

    def take(self, n: int) -> bytes:
        start = self.at
        if start + n > self.stop:
            raise ValueError("its metadata are truncated")
        self.at = start + n
        return self.raw[start : start + n]

    def varint(self) -> int:
        out = 0
        for shift in range(0, 70, 7):
            byte = self.take(1)[0]
            out |= (byte & 0x7F) << shift
            if not byte & 0x80:
                return out
        raise ValueError("its metadata have a number of more than 10 bytes")

    def zigzag(self) -> int:
        n = self.varint()
        return (n >> 1) ^ -(n & 1)

    def struct(self, depth: int) -> dict[int, Any]:
        out: dict[int, Any] = {}
        number = 0
        while head := self.take(1)[0]:
            number = number + (head >> 4) if head >> 4 else self.zigzag()
            out[number] = head & 15 == 1 if head & 15 in (1, 2) else self.value(head & 15, depth)
        return out

    def value(self, kind: int, depth: int) -> Any:
        self.left -= 1
        if self.left < 0 or depth > 16:
            raise ValueError(f"its metadata must have at most {MAX_FIELDS:,} fields in 16 levels")
        match kind:
            case 1 | 2 | 3:  # in a list, a boolean takes a byte
                return self.take(1)[0]
            case 4 | 5 | 6:
                return self.zigzag()
            case 7:
                return self.take(8)
            case 8:
                return self.take(self.varint())
            case 9 | 10:
                head = self.take(1)[0]
                return [
                    self.value(head & 15, depth + 1)
                    for _ in range(head >> 4 if head >> 4 < 15 else self.varint())
                ]
            case 12:
                return self.struct(depth + 1)
        raise ValueError(f"its metadata have a field of type {kind}")
