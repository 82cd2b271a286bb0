"""What a new checkpoint will be, before anything is written: its files and their headers, the
config, what is carried over; and whether it may be.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from regauge.checkpoints.files import (
    EVERYONE,
    format_bytes,
    is_key_file,
    require_inside,
    strictest_mode,
    wrap_write_errors,
)
from regauge.checkpoints.headers import DTYPE_NAMES, DTYPES, FLOATS, read_header
from regauge.checkpoints.reader import INDEX, PICKLES, WEIGHTS, Checkpoint, open_checkpoint
from regauge.errors import CheckpointError

if TYPE_CHECKING:
    import torch

    Tensor = torch.Tensor

# What makes each tensor: a torch tensor, a numpy array of its bits, or blocks.
Thunks = Mapping[str, Callable[[], Any]]

# Weights in other formats are not carried over: they would be the old ones.
_OTHER_WEIGHTS = (
    *PICKLES,
    ".safetensors",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
    ".onnx_data",
    ".ot",
    ".tflite",
    ".mlmodel",
    ".npz",
    ".pkl",
)


@dataclass(frozen=True)
class File:
    """One safetensors file to be written: tensors in order, as (name, dtype, shape)."""

    name: str
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]
    metadata: Mapping[str, str] | None = None

    def header(self) -> bytes:
        """The header's bytes, the length in front included; padded to 8, as the format asks."""
        entries: dict[str, Any] = (
            {} if self.metadata is None else {"__metadata__": dict(self.metadata)}
        )
        at = 0
        for name, dtype, shape in self.tensors:
            entries[name] = {
                "dtype": dtype,
                "shape": list(shape),
                "data_offsets": [at, at + nbytes(dtype, shape)],
            }
            at += nbytes(dtype, shape)
        raw = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        raw += b" " * (-len(raw) % 8)
        return len(raw).to_bytes(8, "little") + raw

    @property
    def size(self) -> int:
        return len(self.header()) + sum(nbytes(dtype, shape) for _, dtype, shape in self.tensors)


@dataclass(frozen=True)
class Plan:
    """What a run writes: safetensors files, small files by their bytes, and files to copy. `digest`
    tells one plan from another.

    `was_finite` says whether what a tensor is made of holds neither NaN nor Inf. Without it, nobody
    minds either. `finish` makes what depends on all that was written: given the SHA-256 of every
    tensor and of every copied file, small files in place of those of the plan, and headers as long
    as those of its files. It may also refuse what was written, which then never appears. `known`
    holds those of tensors that are written as they are read. `mode` has the permission bits that
    the output may have at most, beside what the copied files allow (`output_mode`).
    """

    files: tuple[File, ...]
    small: Mapping[str, bytes] = field(default_factory=dict)
    copies: Mapping[str, Path] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()
    recipe: bytes = b""
    was_finite: Callable[[str], bool] | None = None
    finish: Callable[[Mapping[str, bytes], Mapping[str, bytes]], Mapping[str, bytes]] | None = None
    known_digests: Mapping[str, bytes] = field(default_factory=dict)
    mode: int = EVERYONE

    @property
    def output_mode(self) -> int:
        """The bits of every folder of the output, and (without those for execution) of every file:
        never looser than the strictest input.
        """
        return self.mode & copies_mode(self.copies)

    @property
    def size(self) -> int:
        return (
            sum(f.size for f in self.files)
            + sum(map(len, self.small.values()))
            + sum(p.stat().st_size for p in self.copies.values())
        )

    def digest(self) -> str:
        whole = hashlib.sha256(self.recipe)
        for file in self.files:
            whole.update(file.name.encode() + b"\0" + file.header())
        return whole.hexdigest()


def copies_mode(copies: Mapping[str, Path]) -> int:
    """Return the permission bits that an output with these files copied into it may have at most:
    those files count, and the folders they lie in.
    """
    return strictest_mode({p for path in copies.values() for p in (path, path.parent)})


def nbytes(dtype: str, shape: Sequence[int]) -> int:
    total = DTYPES[dtype][1]
    for n in shape:
        total *= n
    return total


def plan_checkpoint(
    out: Path,
    source: Checkpoint,
    thunks: Thunks,
    *,
    origins: Mapping[str, str] | None = None,
    config_changes: Mapping[str, Any] | None = None,
    recipe: bytes = b"",
) -> Plan:
    """Plan to write the tensors that thunks make, as the source is laid out: same shards, order,
    dtypes and metadata, and all its other files.

    `out` is a folder, or a .safetensors file if the source is one file. Tensors that the source
    lacks go to the end of the last shard; tensors without a thunk are left out. `origins` names the
    tensor of the source that one is made of, where that has another name: if it was finite and the
    new one is not, writing fails. `config_changes` are merged into config.json. `recipe` is
    whatever, besides the source, determines the values. What can be refused before the first byte
    is refused here.
    """
    check_target(out, source.path)
    plan = replace(
        _build_plan(out, source, thunks, dict(config_changes or {}), recipe),
        was_finite=partial(_was_finite, source, origins or {}),
        mode=source.mode,
    )
    check_space(real_path(out).parent, plan.size)
    return plan


def model_mode(source: Path | None, copied: Iterable[Path] = ()) -> int:
    """Return the permission bits that a model made of the one at `source` (None: in memory) may
    have at most, with these files copied.
    """
    mode = EVERYONE
    if source is not None and source.exists():
        try:
            mode = open_checkpoint(source).mode
        except CheckpointError:  # it changed since it was read: what is left of it still counts
            mode = strictest_mode([source])
    return mode & strictest_mode(copied)


def check_target(out: Path, source: Path) -> None:
    """Refuse an output that is there already, or that overlaps the source."""
    with wrap_write_errors(out):
        here, there = real_path(out), source.resolve()
    if here == there:
        raise CheckpointError(f"the output {out} is the input", hint="name another folder with -o")
    if here.is_relative_to(there) or there.is_relative_to(here):
        inside = "inside" if here.is_relative_to(there) else "around"
        raise CheckpointError(
            f"the output {out} lies {inside} the input {source}",
            hint="name a folder beside it with -o",
        )
    check_new(out)


def check_new(out: Path) -> None:
    """Refuse an output that is there already, or that has no place to be."""
    if out.name in ("", ".."):
        raise CheckpointError(f"the output {out} has no name of its own", hint="name a new folder")
    with wrap_write_errors(out):
        out.is_dir()  # looks at more than the next line does: a name may be too long
        taken = is_taken(out)
    if taken:
        raise CheckpointError(
            f"the output {out} exists already", hint="name a new one, or remove this one first"
        )
    config = out.with_name(f"{out.stem}.config.json")
    if is_file_name(out) and os.path.lexists(config):
        raise CheckpointError(
            f"{config} exists already, and the output's config would take its place",
            hint="name another file with -o",
        )
    parent = real_path(out).parent
    if not parent.is_dir():
        raise CheckpointError(
            f"the folder {parent} for the output does not exist", hint="make it first"
        )


def is_taken(out: Path) -> bool:
    """Is there something at an output's place? An empty folder is nothing; what is written appears
    there all at once.
    """
    return os.path.lexists(out) and not (
        out.is_dir() and not out.is_symlink() and not any(out.iterdir())
    )


def real_path(path: Path) -> Path:
    return path.parent.resolve() / path.name if path.name not in ("", "..") else path.resolve()


def is_file_name(out: Path) -> bool:
    return out.suffix == ".safetensors"


def _build_plan(
    out: Path, source: Checkpoint, thunks: Thunks, changes: dict[str, Any], recipe: bytes
) -> Plan:
    files: list[File] = []
    for shard in source.files.values():
        kept = tuple(
            (name, e.dtype, e.shape) for name, e in shard.entries.items() if name in thunks
        )
        files.append(File(shard.path.name, kept, shard.metadata))
    new = tuple(
        (name, *_describe_tensor(name, thunks[name]())) for name in thunks if name not in source
    )
    files[-1] = File(files[-1].name, files[-1].tensors + new, files[-1].metadata)
    config = _config_bytes(source, changes)
    stamps = [(n, s.size, s.path.stat().st_mtime_ns) for n, s in source.files.items()]
    recipe = json.dumps([stamps, changes]).encode() + recipe
    if is_file_name(out):
        if len(files) > 1:
            raise CheckpointError(
                f"{source.path} has {len(files)} shards and cannot become the one file {out}",
                hint="name a folder with -o",
            )
        small = {} if config is None else {f"{out.stem}.config.json": config}
        return Plan((File(out.name, files[0].tensors, files[0].metadata),), small, recipe=recipe)
    small = {} if config is None else {"config.json": config}
    if source.is_folder:
        if source.index is not None:
            small[INDEX] = index_of(files, source.index)
        copies, left = other_files(source.path, {*small, *source.files})
        return Plan(tuple(files), small, copies, left, recipe)
    return Plan((File(WEIGHTS, files[0].tensors, files[0].metadata),), small, recipe=recipe)


def _describe_tensor(name: str, tensor: Tensor) -> tuple[str, tuple[int, ...]]:
    dtype = DTYPE_NAMES.get(str(tensor.dtype).removeprefix("torch."))
    if dtype is None:
        raise CheckpointError(f'"{name}" is {tensor.dtype}, which cannot be written')
    return dtype, tuple(tensor.shape)


def _config_bytes(source: Checkpoint, changes: Mapping[str, Any]) -> bytes | None:
    """config.json byte for byte, unless something in it changes."""
    if source.config is None or source.config_path is None:
        return None
    if all(key in source.config and source.config[key] == value for key, value in changes.items()):
        return source.config_path.read_bytes()
    return (json.dumps({**source.config, **changes}, indent=2, ensure_ascii=False) + "\n").encode()


def index_of(files: Sequence[File], index: Mapping[str, Any] = MappingProxyType({})) -> bytes:
    """The index of these files: their own, or an older one with what changed, in its order."""
    where = {name: file.name for file in files for name, _, _ in file.tensors}
    total = sum(nbytes(dtype, shape) for file in files for _, dtype, shape in file.tensors)
    ordered = {
        name: where[name] for name in [*index.get("weight_map", ()), *where] if name in where
    }
    metadata = index.get("metadata") if isinstance(index.get("metadata"), Mapping) else {}
    changed = {
        **index,
        "metadata": {**(metadata or {}), "total_size": total},
        "weight_map": ordered,
    }
    return (json.dumps(changed, indent=2, ensure_ascii=False) + "\n").encode()


def files_of(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the files of a model folder by name, those of its folders too. Hidden files count as
    absent.
    """
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if any(part.startswith(".") for part in Path(name).parts):
            continue
        if path.is_symlink():
            require_inside(path, folder)
        if path.is_file():
            yield name, path


def other_files(folder: Path, written: set[str]) -> tuple[dict[str, Path], tuple[str, ...]]:
    """The files of a folder to carry over, and those to leave: other weights and their indices,
    elements and keys. Hidden files count as absent.
    """
    copies: dict[str, Path] = {}
    left: list[str] = []
    for name, path in files_of(folder):
        if name in written:
            continue
        if _is_weights(path) or _is_element(path) or is_key_file(path):
            left.append(name)
        else:
            copies[name] = path
    return copies, tuple(left)


def existing_files(folder: Path, names: Iterable[str]) -> list[Path]:
    """Return those of some files of a model folder that are there, to be copied."""
    found = [folder / name for name in names if (folder / name).is_file()]
    for path in found:
        require_inside(path, folder)
    return found


def _is_weights(path: Path) -> bool:
    indices, others = (".index.json", ".safetensors.json"), ("tf_model", "flax_model")
    return (
        path.suffix in _OTHER_WEIGHTS or path.name.endswith(indices) or path.name.startswith(others)
    )


def _is_element(path: Path) -> bool:
    """Is this an element, whatever its name? It is a secret, and could undo the output that it
    would lie in.
    """
    try:
        return (read_header(path).metadata or {}).get("regauge") == "element"
    except CheckpointError:
        return False


def check_space(parent: Path, need: int) -> None:
    free = shutil.disk_usage(parent).free
    if need > free:
        raise CheckpointError(
            f"no space left on the device: {parent} has {format_bytes(free)} free, the output "
            "needs "
            f"{format_bytes(need)}",
            hint="free some space, or write to another disk",
        )


_NOT_FINITE = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000, "F64": 0x7FF0000000000000}


def is_finite(bits: Any, dtype: str) -> bool:
    """Is no value NaN or Inf? Read off the bits: those are the largest of their sign, as integers.
    Ten times as fast as torch.isfinite.
    """
    first = _NOT_FINITE[dtype]
    last = first + (1 << (8 * bits.itemsize - 1))
    signed, unsigned = bits.view(f"<i{bits.itemsize}"), bits.view(f"<u{bits.itemsize}")
    step = 1 << 17  # what the cache holds between the two passes
    for at in range(0, bits.size, step):
        if signed[at : at + step].max() >= first or unsigned[at : at + step].max() >= last:
            return False
    return True


def _was_finite(source: Checkpoint, origins: Mapping[str, str], name: str) -> bool:
    import numpy as np

    entry = source.entries.get(origins.get(name, name))
    return (
        entry is None
        or entry.dtype not in FLOATS
        or is_finite(np.ravel(source.bits[origins.get(name, name)]), entry.dtype)
    )
