"""Headers of safetensors files: dtypes, shapes and where the bytes lie, checked whole before a
tensor is read. No torch is loaded.
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

# The dtypes that regauge moves, then those that only buffers have; with their torch names and
# sizes.
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
    """One tensor of a file: dtype by the format's name, shape, and where its bytes lie in the
    file.
    """

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
    """One safetensors file: its tensors in the order of their bytes, its metadata (None where the
    file has none), its size.
    """

    path: Path
    entries: Mapping[str, Entry]
    metadata: Mapping[str, str] | None
    size: int


def read_header(path: Path) -> Shard:
    """Read and check a safetensors header: every size, offset and shape. Dtypes are not judged
    here.
    """

    def damaged(what: str) -> CheckpointError:
        return CheckpointError(f"{path} is damaged: {what}", hint="fetch the file again")

    require_file(path)
    with wrap_read_errors(path), path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        first = file.read(8)
        if first[:8] == b"version ":
            raise CheckpointError(
                f"{path} is a Git LFS pointer, not the file itself", hint="git lfs pull"
            )
        length = int.from_bytes(first, "little")
        if HEADER_BYTES < length <= size - 8:
            raise CheckpointError(
                f"the header of {path} must have at most {format_bytes(HEADER_BYTES)}, got "
                f"{format_bytes(length)}",
                hint="split the model into shards",
            )
        if len(first) < 8 or length > HEADER_BYTES:
            raise damaged(f"it does not begin like a safetensors file ({size} bytes)")
        if length > size - 8:
            raise CheckpointError(
                f"{path} is truncated: it has {size} bytes, its header alone {8 + length}",
                hint="fetch the file again",
            )
        raw = file.read(length)
    try:
        header = json.loads(
            raw.decode("utf-8"), object_pairs_hook=_reject_duplicates
        )  # bytes would pass as UTF-16 too
    except (ValueError, RecursionError) as error:
        raise damaged(f"its header is not JSON ({str(error)[:80]})") from error
    if not isinstance(header, dict):
        raise damaged("its header is no JSON object")
    metadata = header.pop("__metadata__", None)
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())
    ):
        raise damaged("its metadata are not strings")
    for text in [*header, *(metadata or {}), *(metadata or {}).values()]:
        if any("\ud800" <= c <= "\udfff" for c in text):
            raise damaged("its header has text that is not Unicode")
    entries = {
        name: _parse_entry(name, value, 8 + length, damaged) for name, value in header.items()
    }
    ordered = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)))
    at = 8 + length
    for name, entry in ordered.items():
        if entry.start != at:
            raise damaged(
                f'the bytes of "{name}" begin at {entry.start}, not where the tensor before '
                f"ends, at {at}"
            )
        at = entry.stop
    if at > size:
        raise CheckpointError(
            f"{path} is truncated: it has {size} bytes, its header says {at}",
            hint="fetch the file again",
        )
    if at < size:
        raise damaged(f"it has {size} bytes, its header says {at}")
    return Shard(path, ordered, metadata, size)


def _parse_entry(name: str, value: Any, base: int, damaged: Any) -> Entry:
    def numbers(key: str) -> list[int] | None:
        found = value.get(key)
        return (
            found
            if isinstance(found, list) and all(type(n) is int and 0 <= n < 2**63 for n in found)
            else None
        )

    if not isinstance(value, dict) or not isinstance(value.get("dtype"), str):
        raise damaged(f'the header entry of "{name}" has no dtype')
    shape, offsets = numbers("shape"), numbers("data_offsets")
    if (
        shape is None
        or len(shape) > 32
        or offsets is None
        or len(offsets) != 2
        or offsets[0] > offsets[1]
        or max(shape, default=0) >= 2**48
    ):
        raise damaged(f'the header entry of "{name}" has no usable shape and offsets')
    known, given = DTYPES.get(value["dtype"]), offsets[1] - offsets[0]
    if known and prod(shape) * known[1] != given:
        raise damaged(
            f'"{name}" of shape {shape} and dtype {value["dtype"]} needs '
            f"{prod(shape) * known[1]} bytes, the header gives {given}"
        )
    return Entry(value["dtype"], tuple(shape), base + offsets[0], base + offsets[1])


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a name occurs twice")
    return out
