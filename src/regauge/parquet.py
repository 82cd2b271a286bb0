"""Page headers of parquet files: how many values and bytes a column becomes, by the pages themselves.

Arrow allocates what a page's header declares, and reads a page whole. The sums in the file's footer
may be smaller, so that a file of 535 bytes takes gigabytes; the headers have to be counted first.

References:
    - Apache Parquet, parquet.thrift: PageHeader, DataPageHeader, DataPageHeaderV2.
    - Apache Thrift, thrift-compact-protocol.md.
"""

from __future__ import annotations

from typing import Any

_MAX_HEADER = 1 << 20  # bytes of a page header: statistics hold two values
_SIZE, _STORED, _DATA, _DATA_V2 = 2, 3, 5, 8  # fields of PageHeader; in both kinds of data, field 1 counts the values


def count_pages(raw: bytes, start: int, stop: int, values: int) -> tuple[int, int]:
    """Count the values and the decompressed bytes of a column chunk.

    Args:
        raw: The file.
        start: Where the first page of the chunk begins.
        stop: Where its last page ends.
        values: How many values the footer declares. A reader stops at the page that reaches them.

    Returns:
        The values of all data pages that are read, and the bytes of all pages when decompressed.

    Raises:
        ValueError: A page is damaged, or lies outside of the chunk.
    """
    found, size, at = 0, 0, start
    if not 0 <= start <= stop <= len(raw):
        raise ValueError("a column lies outside of the file")
    while found < values and at < stop:
        reader = _Compact(raw, at, min(stop, at + _MAX_HEADER))
        header = reader.struct(0)
        inflated, stored = header.get(_SIZE), header.get(_STORED)
        if not isinstance(inflated, int) or not isinstance(stored, int) or inflated < 0 or not 0 <= stored <= stop - reader.at:
            raise ValueError(f"the page at byte {at} has no usable size")
        page = header.get(_DATA) or header.get(_DATA_V2) or {}
        count = page.get(1, 0) if isinstance(page, dict) else 0
        if not isinstance(count, int) or count < 0:
            raise ValueError(f"the page at byte {at} has no usable number of values")
        found, size, at = found + count, size + inflated, reader.at + stored
    return found, size


class _Compact:
    """A reader of Thrift's compact protocol: structs as dictionaries by the number of the field."""

    def __init__(self, raw: bytes, at: int, stop: int) -> None:
        self.raw, self.at, self.stop = raw, at, stop

    def skip(self, n: int) -> int:
        """Move on by n bytes; return where they begin."""
        start = self.at
        if n < 0 or start + n > self.stop:
            raise ValueError("a page header is truncated")
        self.at = start + n
        return start

    def varint(self) -> int:
        out = 0
        for shift in range(0, 70, 7):
            byte = self.raw[self.skip(1)]
            out |= (byte & 0x7F) << shift
            if not byte & 0x80:
                return out
        raise ValueError("a page header has a number of more than 10 bytes")

    def zigzag(self) -> int:
        n = self.varint()
        return (n >> 1) ^ -(n & 1)

    def struct(self, depth: int) -> dict[int, Any]:
        if depth > 8:
            raise ValueError("a page header is nested too deeply")
        out: dict[int, Any] = {}
        number = 0
        while head := self.raw[self.skip(1)]:
            number = number + (head >> 4) if head >> 4 else self.zigzag()
            out[number] = self.value(head & 15, depth)
        return out

    def value(self, kind: int, depth: int) -> Any:
        match kind:
            case 1 | 2:
                return kind == 1
            case 3:
                return self.raw[self.skip(1)]
            case 4 | 5 | 6:
                return self.zigzag()
            case 7:
                return self.skip(8)
            case 8:
                return self.skip(self.varint())
            case 12:
                return self.struct(depth + 1)
        raise ValueError(f"a page header has a field of type {kind}")
