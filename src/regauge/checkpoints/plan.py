"""The plan of a new checkpoint, made and checked before anything is written.

A plan lists the safetensors files with their headers, the config, and the files to copy.
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
from regauge.errors import CheckpointError, Hint

if TYPE_CHECKING:
    import torch

    Tensor = torch.Tensor

# Functions that compute each tensor: a torch tensor, a numpy array of its bits, or blocks.
Thunks = Mapping[str, Callable[[], Any]]

# Weights in other formats are not copied: they would be the old ones.
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
        """Return the length and the header, padded to 8 bytes as the format requires."""
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
    """The files that a run writes.

    Attributes:
        files: The safetensors files.
        small: The content of small files, by name.
        copies: The files to copy, by name in the output.
        skipped: Files of the source that are not copied.
        recipe: Digest of everything besides the source that determines the values; part of
            `digest`, which identifies the plan.
        was_finite: Returns whether the origin of a tensor holds neither NaN nor Inf. If None, NaN
            and Inf are not checked.
        finish: Computes content that depends on all that was written. Called with the SHA-256 of
            every tensor and of every copied file; returns small files that replace those of the
            plan, and headers of the same length as those of `files`. If it raises, the output does
            not appear.
        known_digests: The SHA-256 of tensors that are written unchanged.
        mode: The loosest mode of the output, besides the modes of the copied files
            (`output_mode`).
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
        """The mode of every folder of the output and, without execution, of every file.

        It is never looser than the strictest input.
        """
        return self.mode & copies_mode(self.copies)

    @property
    def size(self) -> int:
        """The size of the output in bytes."""
        return (
            sum(f.size for f in self.files)
            + sum(map(len, self.small.values()))
            + sum(p.stat().st_size for p in self.copies.values())
        )

    def digest(self) -> str:
        """Return the SHA-256 that identifies the plan when a run is resumed."""
        digest = hashlib.sha256(self.recipe)
        for file in self.files:
            digest.update(file.name.encode() + b"\0" + file.header())
        return digest.hexdigest()


def copies_mode(copies: Mapping[str, Path]) -> int:
    """Return the loosest mode of an output into which these files are copied.

    The files count, and the folders they lie in.
    """
    return strictest_mode({p for path in copies.values() for p in (path, path.parent)})


def nbytes(dtype: str, shape: Sequence[int]) -> int:
    """Return the size of a tensor in bytes."""
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
    """Plan a checkpoint with the source's layout: shards, order, dtypes, metadata, other files.

    Args:
        out: The output folder, or a .safetensors file if the source is one file.
        source: The checkpoint whose layout is kept.
        thunks: Functions that compute the tensors. Tensors that the source lacks go to the end of
            the last shard; tensors without a thunk are left out.
        origins: Name of a new tensor -> name of the source tensor it is computed from, if it
            differs. Writing fails if the origin was finite and the new tensor is not.
        config_changes: Fields that are merged into config.json.
        recipe: Digest of everything besides the source that determines the values.

    Raises:
        CheckpointError: The output exists or overlaps the source, or the disk is too small.
    """
    for path in source.sources:
        check_target(out, path)
    check_new(out)
    plan = replace(
        _build_plan(out, source, thunks, dict(config_changes or {}), recipe),
        was_finite=partial(_was_finite, source, origins or {}),
        mode=source.mode,
    )
    check_space(real_path(out).parent, plan.size)
    return plan


def model_mode(source: Path | None, copied: Iterable[Path] = ()) -> int:
    """Return the loosest mode of a model derived from another.

    Args:
        source: The path of the other model, or None for a model in memory.
        copied: Files that are copied into the output.
    """
    mode = EVERYONE
    if source is not None and source.exists():
        try:
            mode = open_checkpoint(source).mode
        except CheckpointError:  # changed since it was read: the mode of the path still counts
            mode = strictest_mode([source])
    return mode & strictest_mode(copied)


def check_target(out: Path, source: Path) -> None:
    """Raise if an output exists, or overlaps the source."""
    with wrap_write_errors(out):
        target, origin = real_path(out), source.resolve()
    if target == origin:
        raise CheckpointError(
            f"the output {out} is the input",
            hint=Hint("pass another folder as out", cli="pass another folder with -o"),
        )
    if target.is_relative_to(origin) or origin.is_relative_to(target):
        relation = "inside" if target.is_relative_to(origin) else "around"
        raise CheckpointError(
            f"the output {out} lies {relation} the input {source}",
            hint=Hint("pass a folder beside it as out", cli="pass a folder beside it with -o"),
        )
    check_new(out)


def check_new(out: Path) -> None:
    """Raise if an output exists, or if its parent folder does not."""
    if out.name in ("", ".."):
        raise CheckpointError(f"the output {out} has no name of its own", hint="pass a new folder")
    with wrap_write_errors(out):
        out.is_dir()  # raises for a name that is too long; lexists does not
        taken = is_taken(out)
    if taken:
        raise CheckpointError(
            f"the output {out} exists already", hint="pass a new path, or remove this one first"
        )
    config = out.with_name(f"{out.stem}.config.json")
    if is_file_name(out) and os.path.lexists(config):
        raise CheckpointError(
            f"{config} exists already, and the output's config would replace it",
            hint=Hint("pass another file as out", cli="pass another file with -o"),
        )
    parent = real_path(out).parent
    if not parent.is_dir():
        raise CheckpointError(
            f"the folder {parent} for the output does not exist", hint="create it first"
        )


def find_enclosing(file: Path, *places: Path) -> Path | None:
    """Return the first of some models or outputs that contains a file or whose files it would
    overwrite; None if there is none.
    """
    resolved = file.resolve()
    for place in places:
        base = place.resolve()
        taken = (
            base,
            base.with_name(f"{base.stem}.config.json"),
            base.with_name(f".{base.name}.partial"),
        )
        if any(resolved.is_relative_to(p) for p in taken):
            return place
    return None


def is_taken(out: Path) -> bool:
    """Return whether an output path exists. An empty folder counts as absent: it is replaced."""
    return os.path.lexists(out) and not (
        out.is_dir() and not out.is_symlink() and not any(out.iterdir())
    )


def real_path(path: Path) -> Path:
    """Resolve the links of a path, except for its last component."""
    return path.parent.resolve() / path.name if path.name not in ("", "..") else path.resolve()


def is_file_name(out: Path) -> bool:
    """Return whether an output is a single file, by its suffix."""
    return out.suffix == ".safetensors"


def _build_plan(
    out: Path, source: Checkpoint, thunks: Thunks, changes: dict[str, Any], recipe: bytes
) -> Plan:
    files: list[File] = []
    for shard in source.files.values():
        tensors = tuple(
            (name, e.dtype, e.shape) for name, e in shard.entries.items() if name in thunks
        )
        files.append(File(shard.path.name, tensors, shard.metadata))
    new = tuple(
        (name, *_describe_tensor(name, thunks[name]())) for name in thunks if name not in source
    )
    files[-1] = File(files[-1].name, files[-1].tensors + new, files[-1].metadata)
    config = _config_bytes(source, changes)
    recipe = json.dumps([source.stamps, changes]).encode() + recipe
    if is_file_name(out):
        if len(files) > 1:
            raise CheckpointError(
                f"{source.path} has {len(files)} shards and cannot become the one file {out}",
                hint=Hint("pass a folder as out", cli="pass a folder with -o"),
            )
        small = {} if config is None else {f"{out.stem}.config.json": config}
        return Plan((File(out.name, files[0].tensors, files[0].metadata),), small, recipe=recipe)
    small = {} if config is None else {"config.json": config}
    if source.is_folder:
        if source.index is not None:
            small[INDEX] = index_of(files, source.index)
        copies, skipped = other_files(source.path, {*small, *source.files})
        return Plan(tuple(files), small, copies, skipped, recipe)
    return Plan((File(WEIGHTS, files[0].tensors, files[0].metadata),), small, recipe=recipe)


def _describe_tensor(name: str, tensor: Tensor) -> tuple[str, tuple[int, ...]]:
    """Return the dtype, by the format's name, and the shape of a tensor."""
    dtype = DTYPE_NAMES.get(str(tensor.dtype).removeprefix("torch."))
    if dtype is None:
        raise CheckpointError(
            f'"{name}" must be one of {", ".join(DTYPE_NAMES)}, got {tensor.dtype}',
            hint="convert it to one of these dtypes",
        )
    return dtype, tuple(tensor.shape)


def _config_bytes(source: Checkpoint, changes: Mapping[str, Any]) -> bytes | None:
    """Return config.json byte for byte, unless a field changes."""
    if source.config is None:
        return None
    if source.config_path is not None and all(
        key in source.config and source.config[key] == value for key, value in changes.items()
    ):
        return source.config_path.read_bytes()
    return (json.dumps({**source.config, **changes}, indent=2, ensure_ascii=False) + "\n").encode()


def index_of(files: Sequence[File], index: Mapping[str, Any] = MappingProxyType({})) -> bytes:
    """Return the index of these files, in the order and with the metadata of an older index."""
    file_names = {name: file.name for file in files for name, _, _ in file.tensors}
    total = sum(nbytes(dtype, shape) for file in files for _, dtype, shape in file.tensors)
    weight_map = {
        name: file_names[name]
        for name in [*index.get("weight_map", ()), *file_names]
        if name in file_names
    }
    metadata = index.get("metadata") if isinstance(index.get("metadata"), Mapping) else {}
    new_index = {
        **index,
        "metadata": {**(metadata or {}), "total_size": total},
        "weight_map": weight_map,
    }
    return (json.dumps(new_index, indent=2, ensure_ascii=False) + "\n").encode()


def files_of(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the names and paths of all files below a model folder, except hidden ones."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if any(part.startswith(".") for part in Path(name).parts):
            continue
        if path.is_symlink():
            require_inside(path, folder)
        if path.is_file():
            yield name, path


def other_files(folder: Path, written: set[str]) -> tuple[dict[str, Path], tuple[str, ...]]:
    """Sort the remaining files of a model folder into those to copy and those to skip.

    Weights in other formats and their indices, elements and keys are skipped. Hidden files are
    ignored.

    Args:
        folder: The model folder.
        written: Names of the files that the output has anyway.

    Returns:
        The files to copy by name, and the names of the skipped ones.
    """
    copies: dict[str, Path] = {}
    skipped: list[str] = []
    for name, path in files_of(folder):
        if name in written:
            continue
        if _is_weights(path) or _is_element(path) or is_key_file(path):
            skipped.append(name)
        else:
            copies[name] = path
    return copies, tuple(skipped)


def existing_files(folder: Path, names: Iterable[str]) -> list[Path]:
    """Return the paths of those named files that exist in a model folder."""
    paths = [folder / name for name in names if (folder / name).is_file()]
    for path in paths:
        require_inside(path, folder)
    return paths


def _is_weights(path: Path) -> bool:
    indices, others = (".index.json", ".safetensors.json"), ("tf_model", "flax_model")
    return (
        path.suffix in _OTHER_WEIGHTS or path.name.endswith(indices) or path.name.startswith(others)
    )


def _is_element(path: Path) -> bool:
    """Return whether a file is an element, whatever its name.

    An element is a secret that could undo the output that it would lie in.
    """
    try:
        return (read_header(path).metadata or {}).get("regauge") == "element"
    except CheckpointError:
        return False


def check_space(parent: Path, need: int) -> None:
    """Raise if a disk has fewer free bytes than needed."""
    free = shutil.disk_usage(parent).free
    if need > free:
        raise CheckpointError(
            f"no space left on the device: {parent} has {format_bytes(free)} free, the output "
            f"needs {format_bytes(need)}",
            hint="free some space, or write to another disk",
        )


_NOT_FINITE = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000, "F64": 0x7FF0000000000000}


def is_finite(bits: Any, dtype: str) -> bool:
    """Return whether no value is NaN or Inf, from the bits of a tensor.

    As integers, NaN and Inf are the largest values of their sign. Ten times as fast as
    torch.isfinite.
    """
    first = _NOT_FINITE[dtype]
    last = first + (1 << (8 * bits.itemsize - 1))
    signed, unsigned = bits.view(f"<i{bits.itemsize}"), bits.view(f"<u{bits.itemsize}")
    step = 1 << 17  # stays in the CPU cache between the two passes
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
