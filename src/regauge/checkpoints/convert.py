"""Pickled checkpoints, read for conversion without torch and without running code.

`regauge.checkpoints.pickles` reads the pickle and `regauge.checkpoints.archives` the zip; both are
bounded. The file is mapped, and its tensors are passed to the writer one by one. Declared sizes are
compared with those in the file, and every byte of a zip with its CRC-32.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regauge.checkpoints.archives import SPARE, Archive, open_archive
from regauge.checkpoints.files import (
    format_bytes,
    require_file,
    require_inside,
    strictest_mode,
    wrap_read_errors,
)
from regauge.checkpoints.headers import DTYPE_NAMES
from regauge.checkpoints.outputs import Job, Output
from regauge.checkpoints.pickles import (
    MAX_BYTES,
    PickledTensor,
    Storage,
    UnsupportedTensor,
    read_pickle,
)
from regauge.checkpoints.plan import (
    File,
    Plan,
    check_target,
    index_of,
    is_file_name,
    other_files,
)
from regauge.checkpoints.reader import (
    INDEX,
    PICKLES,
    WEIGHTS,
    read_index,
    read_json,
    require_matching_index,
)
from regauge.errors import CheckpointError, Hint

_INDEX = "pytorch_model.bin.index.json"
MAX_EXPANSION = 4  # bytes of all tensors of a file, written out, over the bytes of their storages
_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001  # of the format before torch 1.6
_WRAPPERS = ("state_dict", "model_state_dict", "model", "module", "params")


@dataclass(frozen=True, eq=False)
class Source:
    """The bytes of one storage: a range of the mapped file, or an inflated copy.

    Attributes:
        path: The file.
        buffer: The mapped file, or the inflated bytes.
        start: Offset of the storage in the buffer.
        size: Size of the file in bytes.
        order: Byte order, "<" or ">".
    """

    path: Path
    buffer: mmap.mmap | bytes
    start: int
    size: int
    order: str = "<"

    def bits(self, tensor: PickledTensor) -> Any:
        """Return a tensor as a numpy array of unsigned integers: a view, unless bytes are
        swapped.
        """
        import numpy as np

        if not tensor.numel:
            return np.empty(tensor.shape, f"<u{tensor.itemsize}")
        # Reading a map beyond the end of a truncated file would kill the process (SIGBUS).
        if isinstance(self.buffer, mmap.mmap) and self.buffer.size() != self.size:
            raise CheckpointError(
                f"{self.path} changed while it was read: it had {self.size} bytes, now it has "
                f"{self.buffer.size()}",
                hint="start again",
            )
        strides = tuple(
            step * tensor.itemsize if n > 1 else 0
            for n, step in zip(tensor.shape, tensor.stride, strict=True)
        )
        view = np.ndarray(
            tensor.shape,
            f"{self.order}u{tensor.itemsize}",
            self.buffer,
            self.byte_offset(tensor),
            strides,
        )
        return view.astype(f"<u{tensor.itemsize}") if self.order == ">" else view

    def byte_offset(self, tensor: PickledTensor) -> int:
        """Return the offset of a tensor's first byte in the buffer."""
        return (
            self.start
            + tensor.storage.offset * tensor.storage.itemsize
            + tensor.offset * tensor.itemsize
        )


@dataclass(frozen=True)
class MappedTensor:
    """A tensor of a pickled file: its metadata and the bytes of its storage."""

    tensor: PickledTensor
    source: Source

    @property
    def location(self) -> tuple[Any, ...]:
        """The memory that the tensor covers; equal for tensors that share all of it."""
        return (
            id(self.source.buffer),
            self.source.byte_offset(self.tensor),
            self.tensor.shape,
            self.tensor.stride,
            self.tensor.dtype,
        )

    def bits(self) -> Any:
        """Return the tensor as a numpy array of unsigned integers."""
        return self.source.bits(self.tensor)


@dataclass(frozen=True)
class PickledCheckpoint:
    """The tensors of one or several pickled files.

    Attributes:
        path: The file or folder that was opened.
        files: The tensors by file and name.
        aliases: Name of a tensor that shares all its memory with another -> name of the other.
        dropped: Entry that is left out -> the reason.
        metadata: The index of a sharded folder, or empty.
        unchecked: The files without checksums.
    """

    path: Path
    files: Mapping[str, Mapping[str, MappedTensor]]
    aliases: Mapping[str, str]
    dropped: Mapping[str, str]
    metadata: Mapping[str, Any]
    unchecked: tuple[str, ...]


def open_pickles(source: Path) -> PickledCheckpoint:
    """Open one pickled file or a folder of them.

    Tensors that share all their memory with an earlier one become aliases.

    Raises:
        CheckpointError: A file is damaged, exceeds a bound, or holds more than a checkpoint needs.
    """
    if not source.exists():
        raise CheckpointError(
            f"{source} does not exist", hint="pass a pickled file, or a folder with one"
        )
    folder = source if source.is_dir() else None
    paths, metadata = _find_files(source)
    for path in paths if folder else ():
        require_inside(path, source)
    config = (
        read_json(folder / "config.json") if folder and (folder / "config.json").is_file() else {}
    )
    files: dict[str, dict[str, MappedTensor]] = {}
    aliases: dict[str, str] = {}
    dropped: dict[str, str] = {}
    names: dict[str, dict[str, None]] = {path.name: {} for path in paths}
    unchecked: list[str] = []
    for path in paths:
        tensors = files.setdefault(path.name, {})
        first_names: dict[tuple[Any, ...], str] = {}
        loaded, siblings, checked = _load(path)
        dropped |= siblings
        if not checked:
            unchecked.append(path.name)
        for name, value in loaded.items():
            if value is None:
                dropped[name] = "is not a tensor"
                continue
            names[path.name][name] = None
            if (
                value.tensor.numel
                and value.location in first_names
                and config.get("tie_word_embeddings") is not False
            ):
                aliases[name] = first_names[value.location]
            else:
                first_names[value.location] = name
                tensors[name] = value
    if metadata:
        require_matching_index(source / _INDEX, metadata["weight_map"], names)
    if not any(files.values()):
        raise CheckpointError(
            f"{source} holds no tensors",
            hint="a checkpoint is a dictionary of tensors, as model.state_dict() returns it",
        )
    return PickledCheckpoint(source, files, aliases, dropped, metadata, tuple(unchecked))


def _find_files(source: Path) -> tuple[list[Path], dict[str, Any]]:
    """Return the pickled files of a path, and the index if they are shards."""
    if not source.is_dir():
        require_file(source)
        if source.suffix == ".safetensors":
            raise CheckpointError(
                f"{source} is a safetensors file already",
                hint="it needs no conversion: pass it to any other command or function",
            )
        return [source], {}
    index_path = source / _INDEX
    if (source / "pytorch_model.bin").is_file():
        return [source / "pytorch_model.bin"], {}
    if index_path.is_file():
        index = read_index(index_path)
        names = sorted(set(index["weight_map"].values()))
        missing = [n for n in names if not (source / n).is_file()]
        if missing:
            raise CheckpointError(
                f"{source} lacks {len(missing)} of its {len(names)} shards: "
                f"{', '.join(missing[:5])}",
                hint=f"fetch all files of {index_path.name}",
            )
        return [source / n for n in names], index
    if (source / WEIGHTS).exists() or (source / INDEX).exists():
        raise CheckpointError(
            f"{source} has safetensors files already",
            hint="it needs no conversion: pass it to any other command or function",
        )
    pickles = sorted(
        p for p in source.iterdir() if p.suffix in PICKLES and p.name != "training_args.bin"
    )
    if len(pickles) == 1:
        return pickles, {}
    raise CheckpointError(
        f"{source} has {'no' if not pickles else len(pickles)} pickled checkpoints",
        hint="pass one file",
    )


def _load(path: Path) -> tuple[dict[str, MappedTensor | None], dict[str, str], bool]:
    """Read the dictionary of a file.

    Returns:
        The tensors by name (None for any other value), the entries beside a nested state dict with
        the reason why they are left out, and whether the file has checksums.
    """
    require_file(path)
    data = _map_file(path)
    loaded, sources, checked = (_load_zip if data[:4] == b"PK\x03\x04" else _load_legacy)(
        path, data
    )
    siblings: dict[str, str] = {}
    for wrapper in _WRAPPERS:
        inner = loaded.get(wrapper) if isinstance(loaded, dict) else None
        if isinstance(inner, dict):
            siblings |= {
                str(name): f'is stored beside "{wrapper}"' for name in loaded if name != wrapper
            }
            loaded = inner
    if not isinstance(loaded, dict):
        raise CheckpointError(
            f"{path} must hold a dictionary of tensors, got {type(loaded).__name__}",
            hint="save model.state_dict()",
        )
    for name, value in loaded.items():
        if not isinstance(name, str) or any("\ud800" <= c <= "\udfff" for c in name):
            raise CheckpointError(
                f"{path} has the key {name!r}, which cannot name a tensor",
                hint="save model.state_dict()",
            )
        if isinstance(value, UnsupportedTensor):
            raise CheckpointError(
                f'"{name}" of {path} is {value.kind}, which cannot be written',
                hint="save dense tensors",
            )
        if isinstance(value, PickledTensor) and name == "__metadata__":
            raise CheckpointError(
                f'{path} has a tensor named "{name}", a name that safetensors reserves',
                hint="rename it",
            )
    dense = [value for value in loaded.values() if isinstance(value, PickledTensor)]
    _require_bounded(path, dense)
    mapped = {
        n: MappedTensor(v, sources[v.storage.key]) if isinstance(v, PickledTensor) else None
        for n, v in loaded.items()
    }
    return mapped, siblings, checked


def _require_bounded(path: Path, tensors: list[PickledTensor]) -> None:
    """Raise if views expand too far: overlapping tensors or zero strides can exceed the file."""
    stored = sum({t.storage.key: t.storage.nbytes for t in tensors}.values())
    total = sum(
        {
            (t.storage.key, t.storage.offset, t.offset, t.shape, t.stride): t.nbytes
            for t in tensors
        }.values()
    )
    limit = MAX_EXPANSION * stored + SPARE
    if total > limit:
        largest = max(tensors, key=lambda t: t.nbytes)
        raise CheckpointError(
            f"the tensors of {path} must have at most {format_bytes(limit)} ({MAX_EXPANSION} times "
            f"the {format_bytes(stored)} that it stores, plus {format_bytes(SPARE)}), got "
            f"{format_bytes(total)}: one has shape {list(largest.shape)} and strides "
            f"{list(largest.stride)}",
            hint="if you trust the file, save its expanded tensors with .contiguous()",
        )


def _map_file(path: Path) -> mmap.mmap:
    """Map a file for reading; the map lives as long as a tensor refers to it."""
    with wrap_read_errors(path), path.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            raise CheckpointError(
                f"{path} cannot be read as a torch checkpoint: it is empty",
                hint="fetch the file again",
            )
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _load_zip(path: Path, data: mmap.mmap) -> tuple[Any, dict[str, Source], bool]:
    """Read the format since torch 1.6: a zip with the pickle, and an entry for every storage."""
    with wrap_read_errors(path), path.open("rb") as file:
        archive = open_archive(file, str(path))
        records = {name.partition("/")[2]: record for name, record in archive.records.items()}
        if len(records) != len(archive.records):
            raise archive.damage_error("its entries lie in more than one folder")
        if "constants.pkl" in records:
            raise CheckpointError(
                f"{path} is a TorchScript archive, not a checkpoint", hint="save model.state_dict()"
            )
        if "data.pkl" not in records:
            raise CheckpointError(
                f"{path} cannot be read as a torch checkpoint: it has no data.pkl",
                hint="fetch the file again",
            )
        value, end, storages = read_pickle(archive.read(records["data.pkl"], MAX_BYTES), str(path))
        order = archive.read(records["byteorder"], 16) if "byteorder" in records else b"little"
        if order not in (b"little", b"big"):
            raise archive.damage_error(f"its byte order must be little or big, got {order!r}")
        if end != records["data.pkl"].size:
            raise archive.damage_error("its pickle has trailing bytes")
        sources = {}
        for key, storage in storages.items():
            record = records.get(f"data/{key}")
            if record is None:
                raise archive.damage_error(
                    f'it has no entry "data/{key}" for a storage of {storage.nbytes} bytes'
                )
            if record.size != storage.nbytes:
                raise archive.damage_error(
                    f'its record "{record.name}" must have {storage.nbytes} bytes, got '
                    f"{record.size}"
                )
            buffer = b"".join(archive.chunks(record)) if record.deflated else data
            sources[key] = Source(
                path,
                buffer,
                0 if record.deflated else record.start,
                len(data),
                ">" if order == b"big" else "<",
            )
        _require_checksums(archive, {f"data/{key}" for key in storages})
    return value, sources, archive.checksums


def _require_checksums(archive: Archive, used: set[str]) -> None:
    """Compare the entries that have not been read yet with their CRC-32.

    Args:
        archive: The archive.
        used: Names of the storages; those that were compressed have been inflated and checked.
    """
    for name, record in archive.records.items():
        if not (record.deflated and name.partition("/")[2] in used):
            for _ in archive.chunks(record):
                pass


def _load_legacy(path: Path, data: mmap.mmap) -> tuple[Any, dict[str, Source], bool]:
    """Read the format before torch 1.6.

    The file holds five pickles, then each storage as its number of elements and its bytes.
    """

    def load_error(reason: str) -> CheckpointError:
        return CheckpointError(
            f"{path} cannot be read as a torch checkpoint: {reason}", hint="fetch the file again"
        )

    if data[257:262] == b"ustar":
        raise CheckpointError(
            f"{path} is a tar file of torch before 0.1.10, which cannot be read",
            hint="load and save it with an old torch first",
        )
    if data[0] != 0x80:
        raise load_error("it starts neither like a zip nor like a pickle")
    magic, at, _ = read_pickle(data, str(path))
    protocol, at, _ = read_pickle(data, str(path), at) if magic == _MAGIC else (None, at, {})
    if protocol != _PROTOCOL:
        raise load_error("it was not written by torch.save")
    _, at, _ = read_pickle(data, str(path), at)
    value, at, storages = read_pickle(data, str(path), at)
    keys, at, _ = read_pickle(data, str(path), at)
    if (
        not isinstance(keys, list)
        or len(keys) != len(storages)
        or {k for k in keys if isinstance(k, str)} != storages.keys()
    ):
        raise load_error("its list of storages differs from those that its tensors use")
    sources = {}
    for key in keys:
        storage: Storage = storages[key]
        numel = int.from_bytes(data[at : at + 8], "little")
        if numel != storage.full_numel or at + 8 + storage.nbytes > len(data):
            raise load_error(
                f'storage "{key}" must have {storage.full_numel} elements, got {numel}, with '
                f"{max(0, len(data) - at - 8)} bytes left in the file"
            )
        sources[key] = Source(path, data, at + 8, len(data))
        at += 8 + storage.nbytes
    if at != len(data):
        raise load_error(f"it has {len(data) - at} bytes after its last storage")
    return value, sources, False


@dataclass(frozen=True, eq=False)
class Conversion(Output):
    """A pickled checkpoint, to be written as safetensors.

    Attributes:
        pickles: The opened pickles.
    """

    pickles: PickledCheckpoint

    def plan(self, out: str | Path, *, threads: int | None = None) -> Job:
        out, pickles = Path(out), self.pickles
        check_target(out, pickles.path)
        plan, thunks = plan_conversion(out, pickles)
        facts = {
            "out": str(out),
            "tensors": len(thunks),
            "aliases": dict(pickles.aliases),
            "dropped": list(pickles.dropped),
        }
        notes = [f"{alias} is tied to {n} and stored once" for alias, n in pickles.aliases.items()]
        notes += [
            f"{file} carries no checksums: changed bytes cannot be detected"
            for file in pickles.unchecked
        ]
        warnings = [
            f'"{name}" {reason} and is left out' for name, reason in pickles.dropped.items()
        ]
        return Job(out, plan, thunks, facts=facts, notes=tuple(notes), warnings=tuple(warnings))

    def __repr__(self) -> str:
        return f"<conversion of {self.pickles.path.name}>"


def convert(source: str | Path) -> Conversion:
    """Open a pickled checkpoint, to be written as safetensors. No code of the pickle runs.

    Args:
        source: A .bin or .pt file, or a folder with pytorch_model.bin (one file or shards).

    Returns:
        The conversion, with `save(out)`. Tied tensors are stored once.

    Raises:
        CheckpointError: A file is damaged, or holds something else than tensors.

    Example:
        >>> # regauge.checkpoints.convert.convert("pytorch_model.bin").save("model.safetensors")
    """
    return Conversion(open_pickles(Path(source)))


def plan_conversion(
    out: Path, pickles: PickledCheckpoint
) -> tuple[Plan, dict[str, Callable[[], Any]]]:
    """Plan the safetensors files of a conversion; shards stay shards.

    Args:
        out: The output folder, or a .safetensors file if there is one pickled file.
        pickles: The opened pickles.

    Returns:
        The plan, and the thunks that compute its tensors.

    Raises:
        CheckpointError: The output cannot hold the tensors, or two files would get one name.
    """
    single = len(pickles.files) == 1
    if is_file_name(out) and not single:
        raise CheckpointError(
            f"{pickles.path} has {len(pickles.files)} shards and cannot become the one file {out}",
            hint=Hint("pass a folder as out", cli="pass a folder with -o"),
        )
    files: list[File] = []
    thunks: dict[str, Callable[[], Any]] = {}
    for file, tensors in pickles.files.items():
        name = (
            (out.name if is_file_name(out) else WEIGHTS)
            if single
            else re.sub(r"^pytorch_model", "model", Path(file).stem) + ".safetensors"
        )
        duplicate = next(
            (f for f, planned in zip(pickles.files, files, strict=False) if planned.name == name),
            None,
        )
        if duplicate is not None:
            raise CheckpointError(
                f"{duplicate} and {file} of {pickles.path} would both become {name}",
                hint="rename one of them, also in the index",
            )
        entries = []
        for key, pickled in tensors.items():
            dtype = DTYPE_NAMES.get(pickled.tensor.dtype)
            if dtype is None:
                raise CheckpointError(
                    f'"{key}" of {file} is torch.{pickled.tensor.dtype}, which regauge does not '
                    "support",
                    hint="start from the unquantized checkpoint",
                )
            entries.append((key, dtype, pickled.tensor.shape))
            thunks[key] = pickled.bits
        files.append(File(name, tuple(entries), {"format": "pt"}))
    small: dict[str, bytes] = {}
    if not single:
        small[INDEX] = index_of(files, {"metadata": pickles.metadata.get("metadata")})
    copies, skipped = (
        other_files(pickles.path, {*small, *pickles.files})
        if pickles.path.is_dir() and not is_file_name(out)
        else ({}, ())
    )
    inputs = (
        {pickles.path, *(pickles.path / name for name in pickles.files)}
        if pickles.path.is_dir()
        else {pickles.path}
    )
    return Plan(tuple(files), small, copies, skipped, mode=strictest_mode(inputs)), thunks
