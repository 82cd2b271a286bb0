"""Pickled checkpoints, read for conversion: `torch.load` with `weights_only`, memory-mapped, shared tensors found by their storage.

torch believes what a file's pickle says about the size of its storages, and a mapped file's records to be stored as they are. Both are checked here
against the zip's directory: else a damaged or repacked file is read as garbage, without an error.
"""

from __future__ import annotations

import pickle
import re
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge.checkpoint import INDEX, PICKLES, WEIGHTS, read_index, read_json, require_placed
from regauge.errors import CheckpointError
from regauge.files import require_file, require_inside, strictest_mode
from regauge.headers import DTYPE_NAMES
from regauge.planning import File, Plan, index_of, is_file_name, other_files

if TYPE_CHECKING:
    import torch

    Tensor = torch.Tensor

_INDEX = "pytorch_model.bin.index.json"
# torch's storage classes: asked for their dtype, they warn
_ITEM_SIZES = {
    **{f"{name}Storage": 1 for name in ("Untyped", "Byte", "Char", "Bool", "QUInt8", "QInt8", "QUInt4x2", "QUInt2x4")},
    **{f"{name}Storage": 2 for name in ("Half", "BFloat16", "Short")},
    **{f"{name}Storage": 4 for name in ("Float", "Int", "QInt32")},
    **{f"{name}Storage": 8 for name in ("Double", "Long", "ComplexFloat")},
    "ComplexDoubleStorage": 16,
}
_WRAPPERS = ("state_dict", "model_state_dict", "model", "module", "params")


@dataclass(frozen=True)
class Pickles:
    """The tensors of pickled files, by file. `aliases` maps a name to the tensor it repeats; `dropped` an entry that is left out to the reason."""

    path: Path
    files: Mapping[str, Mapping[str, Tensor]]
    aliases: Mapping[str, str]
    dropped: Mapping[str, str]
    metadata: Mapping[str, Any]


def open_pickles(source: Path) -> Pickles:
    """Open one pickled file or a folder of them. Names that share all their memory with an earlier one become aliases."""
    if not source.exists():
        raise CheckpointError(f"{source} does not exist", hint="name a pickled file, or a folder with one")
    folder = source if source.is_dir() else None
    paths, metadata = _paths(source)
    for path in paths if folder else ():
        require_inside(path, source)
    config = read_json(folder / "config.json") if folder and (folder / "config.json").is_file() else {}
    files: dict[str, dict[str, Tensor]] = {}
    aliases: dict[str, str] = {}
    dropped: dict[str, str] = {}
    names: dict[str, list[str]] = {}
    for path in paths:
        tensors = files.setdefault(path.name, {})
        seen: dict[tuple[Any, ...], str] = {}
        loaded, beside = _load(path)
        dropped |= beside
        for name, value in loaded.items():
            if not hasattr(value, "untyped_storage"):
                dropped[name] = "is no tensor"
                continue
            names.setdefault(path.name, []).append(name)
            place = (value.untyped_storage().data_ptr(), value.storage_offset(), tuple(value.shape), value.stride(), value.dtype)
            if value.numel() and place in seen and config.get("tie_word_embeddings") is not False:
                aliases[name] = seen[place]
            else:
                seen[place] = name
                tensors[name] = value
    if metadata:
        require_placed(source / _INDEX, metadata["weight_map"], {path.name: names.get(path.name, []) for path in paths})
    if not any(files.values()):
        raise CheckpointError(f"{source} holds no tensors", hint="a checkpoint is a dictionary of tensors, as model.state_dict() gives it")
    return Pickles(source, files, aliases, dropped, metadata)


def _paths(source: Path) -> tuple[list[Path], dict[str, Any]]:
    if not source.is_dir():
        require_file(source)
        if source.suffix == ".safetensors":
            raise CheckpointError(f"{source} is a safetensors file already", hint="regauge move reads it as it is")
        return [source], {}
    index = source / _INDEX
    if (source / "pytorch_model.bin").is_file():
        return [source / "pytorch_model.bin"], {}
    if index.is_file():
        read = read_index(index)
        names = sorted(set(read["weight_map"].values()))
        missing = [n for n in names if not (source / n).is_file()]
        if missing:
            raise CheckpointError(
                f"{source} lacks {len(missing)} of its {len(names)} shards: {', '.join(missing[:5])}", hint=f"fetch what {index.name} names"
            )
        return [source / n for n in names], read
    if (source / WEIGHTS).exists() or (source / INDEX).exists():
        raise CheckpointError(f"{source} has safetensors files already", hint="regauge move reads it as it is")
    found = sorted(p for p in source.iterdir() if p.suffix in PICKLES and p.name != "training_args.bin")
    if len(found) == 1:
        return found, {}
    raise CheckpointError(f"{source} has {'no' if not found else len(found)} pickled checkpoints", hint="name one file")


def _load(path: Path) -> tuple[Mapping[str, Any], dict[str, str]]:
    """A file's dictionary, and what stands beside it where it is wrapped in another."""
    import torch

    records = _records(path)
    stored = records is not None and all(r.compress_type == zipfile.ZIP_STORED for r in records.values())
    try:
        if records is not None:
            _check_storages(path, records)
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=stored)
    except pickle.UnpicklingError as error:
        first = re.sub(r"\s+", " ", str(error)).split(". ")[0][:160]
        raise CheckpointError(
            f"{path} holds more than tensors, or is damaged, and is not read: {first}", hint="save model.state_dict() alone, where you trust the file"
        ) from error
    except (RuntimeError, ValueError, EOFError, OSError, LookupError, TypeError, AttributeError, zipfile.BadZipFile, zlib.error) as error:
        raise CheckpointError(
            f"{path} cannot be read as a torch checkpoint: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
            hint="fetch the file again",
        ) from error
    beside: dict[str, str] = {}
    for wrapper in _WRAPPERS:
        inner = loaded.get(wrapper) if isinstance(loaded, Mapping) else None
        if isinstance(inner, Mapping):
            beside |= {str(name): f'stands beside "{wrapper}"' for name in loaded if name != wrapper}
            loaded = inner
    if not isinstance(loaded, Mapping):
        raise CheckpointError(f"{path} holds a {type(loaded).__name__}, not a dictionary of tensors", hint="save model.state_dict()")
    for name, value in loaded.items():
        if not isinstance(name, str) or any("\ud800" <= c <= "\udfff" for c in name):
            raise CheckpointError(f"{path} has the key {name!r}, which cannot name a tensor", hint="save model.state_dict()")
        if not isinstance(value, torch.Tensor):
            continue
        if value.layout != torch.strided or value.is_meta or value.is_nested:
            raise CheckpointError(f'"{name}" of {path} is sparse or nested or has no data, and cannot be written', hint="save dense tensors")
        if name == "__metadata__":
            raise CheckpointError(f'{path} has a tensor named "{name}", a name that safetensors keeps for itself', hint="rename it")
    return loaded, beside


def _records(path: Path) -> dict[str, zipfile.ZipInfo] | None:
    """The directory of a zipped file, by the names that torch uses; None for files from before torch 1.6, which cannot be mapped."""
    require_file(path)
    try:
        with path.open("rb") as file:
            if file.read(4) != b"PK\x03\x04":
                return None
        with zipfile.ZipFile(path) as archive:
            found = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise CheckpointError(f"{path} cannot be read as a torch checkpoint: {error}", hint="fetch the file again") from error
    records = {info.filename.partition("/")[2]: info for info in found}
    if len(records) != len(found):
        raise CheckpointError(f"{path} is damaged: two of its records have one name", hint="fetch the file again")
    return records


def _check_storages(path: Path, records: Mapping[str, zipfile.ZipInfo]) -> None:
    """Hold the sizes that the pickle gives its storages to the records that they lie in."""
    with zipfile.ZipFile(path) as archive, archive.open(records["data.pkl"]) as file:
        scan = _Scan(file)
        scan.load()
    for key, said in scan.storages:
        record = records[f"data/{key}"]
        if record.file_size != said or (record.compress_type == zipfile.ZIP_STORED and record.compress_size != said):
            raise CheckpointError(
                f'{path} is damaged: its record "{record.filename}" has {record.file_size} bytes, the storage in it {said}',
                hint="fetch the file again",
            )


class _Scan(pickle.Unpickler):
    """A pickle, read for its storages alone. It runs no code: every class and function in it is a stand-in that does nothing."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self.storages: list[tuple[str, int]] = []

    def find_class(self, module: str, name: str) -> Any:
        return type(name, (_Nothing,), {"module": module})

    def persistent_load(self, pid: Any) -> None:
        _, kind, key, _, numel = pid
        self.storages.append((key, numel * _ITEM_SIZES[kind.__name__]))


class _Nothing(dict[Any, Any]):
    """Takes any arguments, items and state, and keeps none that matters."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__()

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)

    def __setstate__(self, state: Any) -> None:
        pass

    def append(self, item: Any) -> None:
        pass

    def extend(self, items: Any) -> None:
        pass


def plan_conversion(out: Path, pickles: Pickles) -> tuple[Plan, dict[str, Callable[[], Tensor]]]:
    """The plan of the safetensors files, and the thunks that fill it. Shards stay shards."""
    single = len(pickles.files) == 1
    if is_file_name(out) and not single:
        raise CheckpointError(f"{pickles.path} has {len(pickles.files)} shards and cannot become the one file {out}", hint="name a folder with -o")
    files: list[File] = []
    thunks: dict[str, Callable[[], Tensor]] = {}
    for file, tensors in pickles.files.items():
        name = (out.name if is_file_name(out) else WEIGHTS) if single else re.sub(r"^pytorch_model", "model", Path(file).stem) + ".safetensors"
        taken = next((f for f, made in zip(pickles.files, files, strict=False) if made.name == name), None)
        if taken is not None:
            raise CheckpointError(f"{taken} and {file} of {pickles.path} would both become {name}", hint="rename one of them, and in the index")
        described = []
        for key, tensor in tensors.items():
            dtype = DTYPE_NAMES.get(str(tensor.dtype).removeprefix("torch."))
            if dtype is None:
                raise CheckpointError(
                    f'"{key}" of {file} is {tensor.dtype}, which regauge does not move', hint="start from the unquantised checkpoint"
                )
            described.append((key, dtype, tuple(tensor.shape)))
            thunks[key] = partial(_same, tensor)
        files.append(File(name, tuple(described), {"format": "pt"}))
    small: dict[str, bytes] = {}
    if not single:
        small[INDEX] = index_of(files, {"metadata": pickles.metadata.get("metadata")})
    copies, left = other_files(pickles.path, {*small, *pickles.files}) if pickles.path.is_dir() and not is_file_name(out) else ({}, ())
    inputs = {pickles.path, *(pickles.path / name for name in pickles.files)} if pickles.path.is_dir() else {pickles.path}
    return Plan(tuple(files), small, copies, left, mode=strictest_mode(inputs)), thunks


def _same(tensor: Tensor) -> Tensor:
    return tensor
