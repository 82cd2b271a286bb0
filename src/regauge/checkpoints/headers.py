"""Headers of safetensors files: dtypes, shapes and byte ranges, without importing torch.

A header is checked completely before a tensor is read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from regauge.checkpoints.documents import HEADER_BYTES
from regauge.checkpoints.files import format_bytes, require_file, wrap_read_errors
from regauge.errors import CheckpointError

# The dtypes of weights, then those of buffers, with their torch names and sizes in bytes.
FLOATS = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
}
DTYPES = FLOATS | {
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
DTYPE_NAMES = {torch_name: name for name, (torch_name, _) in DTYPES.items()}


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: dtype by the format's name, shape, and byte range in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Shard:
    """One safetensors file.

    Attributes:
        path: The file.
        entries: Its tensors by name, in the order of their bytes.
        metadata: Its metadata, or None if it has none.
        size: Its size in bytes.
    """

    path: Path
    entries: Mapping[str, Entry]
    metadata: Mapping[str, str] | None
    size: int


def read_header(path: Path) -> Shard:
    """Read a safetensors header and check every size, offset and shape, but not the dtypes.

    Raises:
        CheckpointError: The file is damaged, truncated, or not a safetensors file.
    """

    def damage_error(reason: str) -> CheckpointError:
        return CheckpointError(f"{path} is damaged: {reason}", hint="fetch the file again")

    require_file(path)
    with wrap_read_errors(path), path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        if prefix[:8] == b"version ":
            raise CheckpointError(
                f"{path} is a Git LFS pointer, not the file itself", hint="git lfs pull"
            )
        length = int.from_bytes(prefix, "little")
        if HEADER_BYTES < length <= size - 8:
            raise CheckpointError(
                f"the header of {path} must have at most {format_bytes(HEADER_BYTES)}, got "
                f"{format_bytes(length)}",
                hint="split the model into shards",
            )
        if len(prefix) < 8 or length > HEADER_BYTES:
            raise CheckpointError(
                f"{path} is damaged: it does not start like a safetensors file ({size} bytes)",
                hint="pass a model's folder or its .safetensors file; if it is one, fetch it again",
            )
        if length > size - 8:
            raise CheckpointError(
                f"{path} is truncated: it must have at least {8 + length} bytes, got {size}",
                hint="fetch the file again",
            )
        raw = file.read(length)
    try:
        # Decoded first: json.loads would also accept bytes in UTF-16.
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_reject_duplicates)
    except (ValueError, RecursionError) as error:
        raise damage_error(f"its header is not JSON ({str(error)[:80]})") from error
    if not isinstance(header, dict):
        raise damage_error("its header is not a JSON object")
    metadata = header.pop("__metadata__", None)
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())
    ):
        raise damage_error("its metadata are not strings")
    for text in [*header, *(metadata or {}), *(metadata or {}).values()]:
        if any("\ud800" <= c <= "\udfff" for c in text):
            raise damage_error("its header has text that is not Unicode")
    entries = {
        name: _parse_entry(name, value, 8 + length, damage_error) for name, value in header.items()
    }
    ordered = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)))
    at = 8 + length
    for name, entry in ordered.items():
        if entry.start != at:
            raise damage_error(
                f'the bytes of "{name}" must start at {at}, where the previous tensor ends, got '
                f"{entry.start}"
            )
        at = entry.stop
    if at > size:
        raise CheckpointError(
            f"{path} is truncated: it must have {at} bytes according to its header, got {size}",
            hint="fetch the file again",
        )
    if at < size:
        raise damage_error(f"it must have {at} bytes according to its header, got {size}")
    return Shard(path, ordered, metadata, size)


def _parse_entry(name: str, value: Any, base: int, damage_error: Any) -> Entry:
    """Build the entry of one tensor; `base` is the offset of the data in the file."""

    def read_integers(key: str) -> list[int] | None:
        items = value.get(key)
        return (
            items
            if isinstance(items, list) and all(type(n) is int and 0 <= n < 2**63 for n in items)
            else None
        )

    if not isinstance(value, dict) or not isinstance(value.get("dtype"), str):
        raise damage_error(f'the header entry of "{name}" has no dtype')
    shape, offsets = read_integers("shape"), read_integers("data_offsets")
    if (
        shape is None
        or len(shape) > 32
        or offsets is None
        or len(offsets) != 2
        or offsets[0] > offsets[1]
        or max(shape, default=0) >= 2**48
    ):
        raise damage_error(f'the header entry of "{name}" has no usable shape and offsets')
    known, nbytes = DTYPES.get(value["dtype"]), offsets[1] - offsets[0]
    if known and prod(shape) * known[1] != nbytes:
        raise damage_error(
            f'"{name}" of shape {shape} and dtype {value["dtype"]} must have '
            f"{prod(shape) * known[1]} bytes, got {nbytes}"
        )
    return Entry(value["dtype"], tuple(shape), base + offsets[0], base + offsets[1])


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object; raise if a name occurs twice."""
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a name occurs twice")
    return fields


def unsigned_dtype(dtype: str) -> Any:
    """Return torch's unsigned integers of the size of a dtype, to read its bits."""
    import torch

    return {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}[DTYPES[dtype][1]]
