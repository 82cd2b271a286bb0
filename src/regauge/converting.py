"""Pickled checkpoints, read for conversion: `torch.load` with `weights_only`, memory-mapped, shared tensors found by their storage."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge.checkpoint import DTYPE_NAMES, INDEX, PICKLES, WEIGHTS, read_index, read_json
from regauge.errors import CheckpointError
from regauge.writing import File, Plan, is_file_name, nbytes, other_files

if TYPE_CHECKING:
    import torch

    Tensor = torch.Tensor

_WRAPPERS = ("state_dict", "model_state_dict", "model", "module", "params")


@dataclass(frozen=True)
class Pickles:
    """The tensors of pickled files, by file. `aliases` maps a name to the tensor it repeats; `dropped` are entries that are no tensors."""

    path: Path
    files: Mapping[str, Mapping[str, Tensor]]
    aliases: Mapping[str, str]
    dropped: tuple[str, ...]
    metadata: Mapping[str, Any]


def open_pickles(source: Path) -> Pickles:
    """Open one pickled file or a folder of them. Names that share all their memory with an earlier one become aliases."""
    if not source.exists():
        raise CheckpointError(f"{source} does not exist")
    folder = source if source.is_dir() else None
    paths, metadata = _paths(source)
    config = read_json(folder / "config.json") if folder and (folder / "config.json").is_file() else {}
    files: dict[str, dict[str, Tensor]] = {}
    aliases: dict[str, str] = {}
    dropped: list[str] = []
    for path in paths:
        tensors = files.setdefault(path.name, {})
        seen: dict[tuple[Any, ...], str] = {}
        for name, value in _load(path).items():
            if not hasattr(value, "untyped_storage"):
                dropped.append(str(name))
                continue
            place = (value.untyped_storage().data_ptr(), value.storage_offset(), tuple(value.shape), value.stride(), value.dtype)
            if value.numel() and place in seen and config.get("tie_word_embeddings") is not False:
                aliases[name] = seen[place]
            else:
                seen[place] = name
                tensors[name] = value
    if not any(files.values()):
        raise CheckpointError(f"{source} holds no tensors", hint="a checkpoint is a dictionary of tensors, as model.state_dict() gives it")
    return Pickles(source, files, aliases, tuple(dropped), metadata)


def _paths(source: Path) -> tuple[list[Path], dict[str, Any]]:
    if source.is_file():
        if source.suffix == ".safetensors":
            raise CheckpointError(f"{source} is a safetensors file already", hint="regauge move reads it as it is")
        return [source], {}
    index = source / "pytorch_model.bin.index.json"
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


def _load(path: Path) -> Mapping[str, Any]:
    import torch

    try:
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except (RuntimeError, ValueError) as error:
            if "mmap" not in str(error):
                raise
            loaded = torch.load(path, map_location="cpu", weights_only=True)  # files from before torch 1.6 cannot be mapped
    except pickle.UnpicklingError as error:
        first = re.sub(r"\s+", " ", str(error)).split(". ")[0][:160]
        raise CheckpointError(
            f"{path} holds more than tensors, or is damaged, and is not read: {first}", hint="save model.state_dict() alone, where you trust the file"
        ) from error
    except (RuntimeError, ValueError, EOFError, OSError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} cannot be read as a torch checkpoint: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
            hint="fetch the file again",
        ) from error
    for wrapper in _WRAPPERS:
        inner = loaded.get(wrapper) if isinstance(loaded, Mapping) else None
        if isinstance(inner, Mapping):
            loaded = inner
    if not isinstance(loaded, Mapping):
        raise CheckpointError(f"{path} holds a {type(loaded).__name__}, not a dictionary of tensors", hint="save model.state_dict()")
    for name, value in loaded.items():
        if not isinstance(name, str) or any("\ud800" <= c <= "\udfff" for c in name):
            raise CheckpointError(f"{path} has the key {name!r}, which cannot name a tensor", hint="save model.state_dict()")
        if isinstance(value, torch.Tensor) and (value.layout != torch.strided or value.is_meta):
            raise CheckpointError(f'"{name}" of {path} is sparse or has no data, and cannot be written', hint="save dense tensors")
    return loaded


def plan_conversion(out: Path, pickles: Pickles) -> tuple[Plan, dict[str, Callable[[], Tensor]]]:
    """The plan of the safetensors files, and the thunks that fill it. Shards stay shards."""
    single = len(pickles.files) == 1
    if is_file_name(out) and not single:
        raise CheckpointError(f"{pickles.path} has {len(pickles.files)} shards and cannot become the one file {out}", hint="name a folder with -o")
    files: list[File] = []
    thunks: dict[str, Callable[[], Tensor]] = {}
    for file, tensors in pickles.files.items():
        name = (out.name if is_file_name(out) else WEIGHTS) if single else re.sub(r"^pytorch_model", "model", Path(file).stem) + ".safetensors"
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
        small[INDEX] = _index(files, pickles.metadata)
    copies, left = other_files(pickles.path, {*small, *pickles.files}) if pickles.path.is_dir() and not is_file_name(out) else ({}, ())
    return Plan(tuple(files), small, copies, left), thunks


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _index(files: list[File], index: Mapping[str, Any]) -> bytes:
    where = {name: file.name for file in files for name, _, _ in file.tensors}
    total = sum(nbytes(dtype, shape) for file in files for _, dtype, shape in file.tensors)
    metadata = index.get("metadata") if isinstance(index.get("metadata"), dict) else {}
    return (json.dumps({"metadata": {**(metadata or {}), "total_size": total}, "weight_map": where}, indent=2) + "\n").encode()
