"""Cells: what experiments are made of. A cell is a pure function of JSON-able parameters and data; its outcome is kept and never computed twice.

An outcome is known by the hash of the cell's name and version, its parameters and the digests of its data, and lies in one safetensors file of that
name: values in the metadata, tensors (a trained checkpoint) as they are, and a digest of both. A file that does not match its digest is computed
again. While a long cell works it leaves its state beside it (`Work.save`), and goes on from there after an interruption. Files appear whole or not
at all, so that processes may share a cache; where the system has file locks, the second waits for the first and reads what it found.

    outcome = run(TRAIN, {"seed": 0, "steps": 200}, cache, {"train": data})
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from safetensors import safe_open
from safetensors.torch import save

from regauge.checkpoints.environment import versions
from regauge.checkpoints.files import write_bytes, writing
from regauge.errors import RegaugeError

FORMAT = "1"
KEEP_EVERY = 20.0  # seconds between two saved states of a long cell


class CacheError(RegaugeError):
    """A cache of experiments that cannot be used, or a cell that cannot be kept in one."""


class Digested(Protocol):
    """Data that a cell reads: whatever has a digest of all that matters in it."""

    @property
    def digest(self) -> str: ...


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a cell found. `made` are the versions that it was computed with, `seconds` what it took; neither is part of the digest."""

    values: Mapping[str, Any]
    tensors: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    made: Mapping[str, str] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        found = hashlib.sha256(canonical(self.values))
        for name in sorted(self.tensors):
            tensor = self.tensors[name].detach().cpu().contiguous()
            found.update(canonical([name, str(tensor.dtype), list(tensor.shape)]))
            found.update(tensor.flatten().view(_bytes()).numpy().data if tensor.numel() else b"")
        return found.hexdigest()


@dataclass(frozen=True)
class Work:
    """Where a long cell keeps its state while it works. `device` is where it computes: no parameter, since it should not matter. `of` says what
    work it is, where the path does not."""

    path: Path
    every: float = KEEP_EVERY
    device: str = "cpu"
    of: str = ""

    def load(self) -> Outcome | None:
        """The state that an interrupted run left, if there is one and it is whole. That of other work is refused: it would be gone on with."""
        found = _read(self.path)
        if found is not None and found.values.get("of", "") != self.of:
            raise CacheError(
                f"{self.path} is of other work that was interrupted", hint="finish that by the command it was begun with, or remove the file"
            )
        return found

    def save(self, values: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
        _write(self.path, Outcome({**values, "of": self.of}, tensors))


@dataclass(frozen=True)
class Cell:
    """A function with a name and a version. The version is raised by whoever changes what the function finds."""

    name: str
    version: int
    compute: Callable[[Mapping[str, Any], Mapping[str, Any], Work], Outcome]


def run(cell: Cell, parameters: Mapping[str, Any], cache: Path, data: Mapping[str, Digested] | None = None, *, device: str = "cpu") -> Outcome:
    """The cell's outcome for these parameters and data: from the cache if it is there and whole, or computed and kept."""
    data = data or {}
    path = place(cell, parameters, cache, data)
    with writing(cache):
        cache.mkdir(parents=True, exist_ok=True)
    if found := _read(path):
        return found
    with _alone(path):
        if found := _read(path):  # another process was quicker
            return found
        work = Work(path.with_suffix(".working"), KEEP_EVERY, device)
        started = time.monotonic()
        outcome = cell.compute(parameters, data, work)
        outcome = Outcome(outcome.values, outcome.tensors, round(time.monotonic() - started, 3), versions())
        _write(path, outcome)
        work.path.unlink(missing_ok=True)
    found = _read(path)
    if found is None:
        raise CacheError(f"{path} does not hold what was just written to it", hint="look at the disk, or set REGAUGE_CACHE to another folder")
    return found


def place(cell: Cell, parameters: Mapping[str, Any], cache: Path, data: Mapping[str, Digested] | None = None) -> Path:
    """Where an outcome lies, once it is there."""
    return cache / f"{cell.name}-{key_of(cell, parameters, data)[:40]}.safetensors"


def key_of(cell: Cell, parameters: Mapping[str, Any], data: Mapping[str, Digested] | None = None) -> str:
    """The hash that an outcome is known by."""
    digests = {name: one.digest for name, one in (data or {}).items()}
    return hashlib.sha256(canonical([FORMAT, cell.name, cell.version, parameters, digests])).hexdigest()


def canonical(value: Any) -> bytes:
    """JSON in one spelling. What JSON has no word for is refused: a hash must not depend on how an object prints."""
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, default=_mapping).encode()
    except (TypeError, ValueError) as error:
        raise CacheError(f"a cell's parameters and values are plain JSON: {error}", hint="give numbers, texts, lists and dicts") from error


def _mapping(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__} is not")


def _bytes() -> Any:
    import torch

    return torch.uint8


def _write(path: Path, outcome: Outcome) -> None:
    about = {"regauge": "cell", "version": FORMAT, "values": canonical(outcome.values).decode(), "digest": outcome.digest}
    about |= {"seconds": str(outcome.seconds), "made": json.dumps(dict(outcome.made))}
    write_bytes(path, save({name: t.detach().cpu().contiguous() for name, t in outcome.tensors.items()}, about))


def _read(path: Path) -> Outcome | None:
    """A whole outcome, or None for one that is absent or damaged. A damaged one is replaced when the cell has been computed again."""
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (the handle is no mapping)
        found = Outcome(json.loads(about["values"]), tensors, float(about["seconds"]), json.loads(about["made"]))
        return found if about["version"] == FORMAT and about["digest"] == found.digest else None
    except Exception:  # safetensors raises errors of many kinds for files that are none of its own
        return None


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold the cell's lock where the system has such. Without it two processes may compute the same cell, to the same end."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with writing(path):
        lock = path.with_suffix(".lock").open("a")
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
