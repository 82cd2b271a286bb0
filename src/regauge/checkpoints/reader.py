"""Lazily read checkpoints: a Hugging Face folder, sharded or not, a safetensors file or a hub id.

A `Checkpoint` is a mapping of memory-mapped tensors. The map is private: a write to a tensor never
reaches the file. All headers are checked before the first tensor is read, so a damaged file raises
when it is opened. `regauge.checkpoints.writer` writes checkpoints.
"""

from __future__ import annotations

import mmap
import os
import re
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge.checkpoints.documents import CONFIG_BYTES, INDEX_BYTES, parse_json, read_document
from regauge.checkpoints.files import require_inside, strictest_mode, wrap_read_errors
from regauge.checkpoints.headers import DTYPES, FLOATS, Entry, Shard, read_header
from regauge.errors import CheckpointError, Hint

if TYPE_CHECKING:
    import torch

    Tensor = torch.Tensor

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
LOCK_FIELD = "regauge_lock"  # of configs and of file metadata
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_HUB_FILES = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.md", "*.py", "LICENSE*")


class LazyState(Mapping[str, Any]):
    """A state dict whose tensors are computed at every access and never cached.

    Attributes:
        names: the names of the tensors.
        read: computes a tensor.
        entries: headers of those tensors whose shape is known without computing them.
    """

    def __init__(
        self,
        names: Collection[str],
        read: Callable[[str], Any],
        entries: Mapping[str, Entry] | None = None,
    ) -> None:
        self.names, self.read, self.entries = names, read, entries or {}

    @classmethod
    def from_thunks(cls, thunks: Mapping[str, Callable[[], Any]]) -> LazyState:
        """Return the state whose tensors these thunks compute."""
        return cls(thunks, partial(_call_thunk, thunks))

    def __getitem__(self, name: str) -> Any:
        return self.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self.names


def _call_thunk(thunks: Mapping[str, Callable[[], Any]], name: str) -> Any:
    return thunks[name]()


class Checkpoint(Mapping[str, "Tensor"]):
    """The tensors of a checkpoint by name, read at access.

    Attributes:
        path: The folder or file that was opened.
        config: The content of config.json, or None.
        config_path: The path of config.json, or None.
        index: The content of the index file of a sharded folder, or None.
        files: The safetensors files by name.
        entries: Dtype, shape and byte range of each tensor.
    """

    # Whether the tensors are those at `path`, so that another library may read them there.
    as_stored = True

    def __init__(
        self,
        path: Path,
        shards: Iterable[Shard],
        config: Mapping[str, Any] | None,
        config_path: Path | None,
        index: Mapping[str, Any] | None = None,
    ) -> None:
        self.path, self.config, self.config_path, self.index = path, config, config_path, index
        self.files: dict[str, Shard] = {shard.path.name: shard for shard in shards}
        self.entries: dict[str, Entry] = {}
        self._shards: dict[str, Shard] = {}
        for shard in self.files.values():
            for name, entry in shard.entries.items():
                if name in self.entries:
                    raise CheckpointError(
                        f'"{name}" is in two shards, {self._shards[name].path.name} and '
                        f"{shard.path.name}",
                        hint="remove the folder's stray shard",
                    )
                self.entries[name], self._shards[name] = entry, shard
        self._maps: dict[Path, mmap.mmap] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> Any:
        """Pickle the path only: another process opens the files itself, a map cannot be sent."""
        return open_checkpoint, (self.path,)

    def __getitem__(self, name: str) -> Tensor:
        import torch

        entry, shard = self.entries[name], self._shards[name]
        dtype = getattr(torch, DTYPES[entry.dtype][0])
        if not entry.nbytes:
            return torch.empty(entry.shape, dtype=dtype)
        data = self._map(shard)
        if entry.start % dtype.itemsize:
            return torch.frombuffer(bytearray(data[entry.start : entry.stop]), dtype=dtype).view(
                entry.shape
            )
        return torch.frombuffer(
            data, dtype=dtype, count=entry.nbytes // dtype.itemsize, offset=entry.start
        ).view(entry.shape)

    @property
    def bits(self) -> Mapping[str, Any]:
        """The tensors as numpy arrays of unsigned integers, without importing torch."""
        return LazyState(self.entries, self._read_bits)

    def _read_bits(self, name: str) -> Any:
        import numpy as np

        entry = self.entries[name]
        size = DTYPES[entry.dtype][1]
        if not entry.nbytes:
            return np.empty(entry.shape, f"<u{size}")
        data = self._map(self._shards[name])
        return np.frombuffer(data, f"<u{size}", entry.nbytes // size, entry.start).reshape(
            entry.shape
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, {len(self)} tensors in {len(self.files)} files)"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.entries)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: entry.shape for name, entry in self.entries.items()}

    @property
    def dtypes(self) -> dict[str, str]:
        """The dtypes by name, as safetensors names them."""
        return {name: entry.dtype for name, entry in self.entries.items()}

    @property
    def is_folder(self) -> bool:
        """Whether a folder was opened, not a file."""
        return self.path.is_dir()

    @property
    def sources(self) -> tuple[Path, ...]:
        """The paths that are read; no output may lie there."""
        return (self.path,)

    @property
    def mode(self) -> int:
        """The loosest mode of an output derived from this checkpoint."""
        index = [self.path / INDEX] if self.index is not None else []
        config = [self.config_path] if self.config_path is not None else []
        return strictest_mode(
            [*self.sources, *(shard.path for shard in self.files.values()), *config, *index]
        )

    def lock_records(self) -> list[Any]:
        """Return the lock records, unchecked: a mapping from the config, texts from the files."""
        records = [(shard.metadata or {}).get(LOCK_FIELD) for shard in self.files.values()]
        return [r for r in ((self.config or {}).get(LOCK_FIELD), *records) if r is not None]

    @property
    def stamps(self) -> list[tuple[str, int, Any]]:
        """Name, size and time of each file, which identify the tensors when a run is resumed."""
        return [(n, s.size, s.path.stat().st_mtime_ns) for n, s in self.files.items()]

    def _map(self, shard: Shard) -> mmap.mmap:
        with self._lock:
            if shard.path not in self._maps:
                with wrap_read_errors(shard.path), shard.path.open("rb") as file:
                    _require_size(shard, os.fstat(file.fileno()).st_size)
                    self._maps[shard.path] = _private_map(file.fileno())
            mapped = self._maps[shard.path]
        # The size of the file, not of the map: reading a map beyond the end of a truncated file
        # would kill the process (SIGBUS).
        _require_size(shard, mapped.size())
        return mapped


def _require_size(shard: Shard, size: int) -> None:
    if size != shard.size:
        raise CheckpointError(
            f"{shard.path} changed while it was read: it had {shard.size} bytes, now it has {size}",
            hint="start again",
        )


def _private_map(fd: int) -> mmap.mmap:
    """Map a file copy-on-write, because torch requires writable memory.

    No swap space is reserved for the map, on systems that support the flag.
    """
    reserve = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
    if not reserve:
        return mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)
    return mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE | reserve, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def open_checkpoint(source: str | Path) -> Checkpoint:
    """Open a checkpoint without reading tensors.

    Args:
        source: A folder, a .safetensors file, or a hub id ("owner/name", "owner/name@revision").

    Returns:
        The checkpoint, a mapping from names to tensors that are read on access.

    Raises:
        CheckpointError: The path does not exist, a file is damaged or incomplete, or the format is
            not supported.

    Example:
        >>> checkpoint = regauge.open_checkpoint("model")
        >>> checkpoint["transformer.wte.weight"].shape
        torch.Size([30, 12])
    """
    try:
        path = Path(source).expanduser()
        path.is_dir()
        path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # too long, no such user, a NUL
        raise CheckpointError(
            f"{str(source)[:100]!r} is not a usable path: {error.__class__.__name__}",
            hint="check its spelling",
        ) from error
    if path.is_dir():
        return _open_folder(path)
    if path.exists():
        return _open_file(path)
    if (
        re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*(@[\w./-]+)?", str(source))
        and path.suffix != ".safetensors"
        and not path.parent.exists()
    ):
        return _open_folder(_download(str(source)))
    raise CheckpointError(
        f"{source} does not exist",
        hint="a model is a folder with safetensors files, one .safetensors file, or a hub id of "
        "the form owner/name",
    )


def _download(repo: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise CheckpointError(
            f'"{repo}" is a hub id, but huggingface_hub is not installed',
            hint="pip install 'regauge[hub]'",
        ) from error
    name, _, revision = repo.partition("@")
    try:
        return Path(
            snapshot_download(name, revision=revision or None, allow_patterns=list(_HUB_FILES))
        )
    except Exception as error:  # the hub's client raises errors of many libraries
        first = next(
            (line for line in str(error).splitlines() if line.strip()), type(error).__name__
        )
        raise CheckpointError(
            f"{repo} could not be fetched from the hub: {first}",
            hint="check the name, the network and HF_TOKEN",
        ) from error


def _open_file(path: Path) -> Checkpoint:
    if path.suffix == ".gguf":
        raise _gguf_error(path)
    if path.suffix in PICKLES:
        raise _pickle_error(path)
    shard = read_header(path)
    for config_path in (path.with_name(f"{path.stem}.config.json"), path.with_name("config.json")):
        if config_path.is_file():
            require_inside(config_path, path.parent)
            return _build_checkpoint(path, [shard], config_path)
    return _build_checkpoint(path, [shard], None)


def _open_folder(folder: Path) -> Checkpoint:
    config_path = folder / "config.json" if (folder / "config.json").is_file() else None
    for path in (folder / "config.json", folder / WEIGHTS, folder / INDEX):
        if os.path.lexists(path):
            require_inside(path, folder)
    if (folder / WEIGHTS).exists():
        return _build_checkpoint(folder, [read_header(folder / WEIGHTS)], config_path)
    if (folder / INDEX).exists():
        index = read_index(folder / INDEX)
        return _build_checkpoint(
            folder, _read_shards(folder, index["weight_map"]), config_path, index
        )
    with wrap_read_errors(folder):
        paths = sorted(p for p in folder.iterdir() if p.is_file())
    weights = [p for p in paths if p.suffix == ".safetensors"]
    if len(weights) == 1 and not re.search(r"-of-\d+$", weights[0].stem):
        require_inside(weights[0], folder)
        return _build_checkpoint(folder, [read_header(weights[0])], config_path)
    if weights:
        raise CheckpointError(
            f"{folder} has {len(weights)} safetensors files ({weights[0].name}, ...) but no "
            f"{INDEX}",
            hint="fetch the index file too, or pass one file",
        )
    if any(p.suffix == ".gguf" for p in paths):
        raise _gguf_error(next(p for p in paths if p.suffix == ".gguf"))
    if any(p.suffix in PICKLES for p in paths):
        raise _pickle_error(next(p for p in paths if p.suffix in PICKLES))
    state = "is empty" if not paths else "has no weights"
    raise CheckpointError(
        f"{folder} {state}", hint=f"a model folder has {WEIGHTS}, or {INDEX} and its shards"
    )


def _pickle_error(path: Path) -> CheckpointError:
    source = path.parent if (path.parent / "config.json").is_file() else path
    return CheckpointError(
        f"{path} is a pickle, which can run code when it is read",
        hint=Hint(
            f"regauge.checkpoints.convert.convert({str(source)!r}).save(out) reads it safely and "
            "writes safetensors",
            cli=f"regauge convert {source} -o OUT reads it safely and writes safetensors",
        ),
    )


def _gguf_error(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} is GGUF, which regauge does not support",
        hint="start from the safetensors checkpoint that it was converted from",
    )


def _build_checkpoint(
    path: Path,
    shards: Iterable[Shard],
    config_path: Path | None,
    index: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Build a checkpoint from its parts; raise if it is quantized or has an unsupported dtype."""
    config = None if config_path is None else read_json(config_path)
    checkpoint = Checkpoint(path, shards, config, config_path, index)
    if config is not None and config.get("quantization_config"):
        quantization = config["quantization_config"]
        method = (
            quantization.get("quant_method", "quantized")
            if isinstance(quantization, Mapping)
            else quantization
        )
        raise CheckpointError(
            f"{path} is quantized ({method})",
            hint="start from the unquantized weights: quantized ones have no symmetry but "
            "permutations",
        )
    for dtype in sorted(set(checkpoint.dtypes.values()) - DTYPES.keys()):
        names = [n for n, d in checkpoint.dtypes.items() if d == dtype]
        others = f" and {len(names) - 1} more tensors" if len(names) > 1 else ""
        raise CheckpointError(
            f'"{names[0]}"{others} of {path} must be one of {", ".join(FLOATS)}, got {dtype}',
            hint="start from the unquantized checkpoint",
        )
    return checkpoint


def read_json(path: Path, limit: int = CONFIG_BYTES) -> dict[str, Any]:
    """Read a JSON file that holds an object."""
    value = parse_json(read_document(path, limit), path)
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object", hint="fetch the file again")
    return value


def read_index(path: Path) -> dict[str, Any]:
    """Read the index of a sharded folder, and check that its weight_map names possible shards."""
    index = read_json(path, INDEX_BYTES)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map", hint="fetch the file again")
    for name, file in weight_map.items():
        if not _is_shard_name(file):
            shown = repr(file) if len(repr(file)) <= 80 else f"{repr(file)[:80]}..."
            raise CheckpointError(
                f'{path} places "{name}" in {shown}, which is not a valid name of a shard',
                hint="fetch the file again",
            )
    return index


def _is_shard_name(file: Any) -> bool:
    """Return whether a name is a plain file name, not hidden and not that of a JSON file."""
    if (
        not isinstance(file, str)
        or not file
        or Path(file).name != file
        or file.startswith(".")
        or file.endswith(".json")
    ):
        return False
    return file.isprintable() and len(os.fsencode(file)) <= 255


def _read_shards(folder: Path, weight_map: Mapping[str, str]) -> list[Shard]:
    """Read the headers of all shards, and compare them with the index."""
    files = list(dict.fromkeys(weight_map.values()))
    missing = [f for f in files if not (folder / f).is_file()]
    if missing:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} of its {len(files)} shards: "
            f"{', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}",
            hint=f"fetch all files of {INDEX}",
        )
    for file in files:
        require_inside(folder / file, folder)
    shards = {f: read_header(folder / f) for f in sorted(files)}
    require_matching_index(
        folder / INDEX, weight_map, {file: shard.entries for file, shard in shards.items()}
    )
    return list(shards.values())


def require_matching_index(
    index: Path, weight_map: Mapping[str, str], names: Mapping[str, Collection[str]]
) -> None:
    """Raise unless every tensor is in the shard that the index names, and in no other.

    Args:
        index: The path of the index, for errors.
        weight_map: Tensor name -> shard, from the index.
        names: The tensor names of each shard.
    """
    hint = "index and shards are from different saves: fetch both again"
    for name, file in weight_map.items():
        if name not in names[file]:
            raise CheckpointError(
                f'{index.name} places "{name}" in {file}, which does not have it', hint=hint
            )
    for file, stored in names.items():
        for name in stored:
            if weight_map.get(name) != file:
                raise CheckpointError(
                    f'{file} has "{name}", which {index.name} does not place there', hint=hint
                )
