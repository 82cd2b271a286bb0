"""Cells: the cached units of experiments. A cell is a pure function of JSON-able parameters and
data; its outcome is computed once.

The key of an outcome is the hash of the cell's name and version, its parameters and the digests of
its data. The outcome is a safetensors file of that name: values in the metadata, tensors (a trained
checkpoint), and a digest of both. A file that does not match its digest is computed again. A long
cell saves its state beside the file (`ResumeState.save`) and resumes from it. Files are written
atomically, so that processes may share a cache; with file locks, a second process waits for the
first and reads its result.

    outcome = run(TRAIN, {"seed": 0, "steps": 200}, cache, {"train": data})
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from regauge.checkpoints.environment import versions
from regauge.checkpoints.files import wrap_write_errors
from regauge.checkpoints.resume import (
    FORMAT,
    SAVE_INTERVAL,
    Outcome,
    ResumeState,
    canonical_values,
    read_outcome,
    write_outcome,
)
from regauge.errors import CacheError


class Digested(Protocol):
    """Data with a digest of its content."""

    @property
    def digest(self) -> str: ...


@dataclass(frozen=True)
class Cell:
    """A function with a name and a version. Raise the version if the outcome of the function
    changes.
    """

    name: str
    version: int
    compute: Callable[[Mapping[str, Any], Mapping[str, Any], ResumeState], Outcome]


def run(
    cell: Cell,
    parameters: Mapping[str, Any],
    cache: Path,
    data: Mapping[str, Digested] | None = None,
    *,
    device: str = "cpu",
) -> Outcome:
    """Return the outcome of a cell: from the cache if it is there and intact, else computed and
    saved.
    """
    data = data or {}
    path = place(cell, parameters, cache, data)
    with wrap_write_errors(cache):
        cache.mkdir(parents=True, exist_ok=True)
    if found := read_outcome(path):
        return found
    with _lock(path):
        if found := read_outcome(path):  # another process was quicker
            return found
        work = ResumeState(path.with_suffix(".working"), SAVE_INTERVAL, device)
        started = time.monotonic()
        outcome = cell.compute(parameters, data, work)
        outcome = Outcome(
            outcome.values, outcome.tensors, round(time.monotonic() - started, 3), versions()
        )
        write_outcome(path, outcome)
        work.path.unlink(missing_ok=True)
    found = read_outcome(path)
    if found is None:
        raise CacheError(
            f"{path} differs from the outcome that was just written to it",
            hint="check the disk, or set REGAUGE_CACHE to another folder",
        )
    return found


def place(
    cell: Cell,
    parameters: Mapping[str, Any],
    cache: Path,
    data: Mapping[str, Digested] | None = None,
) -> Path:
    """Return the path of an outcome in the cache."""
    return cache / f"{cell.name}-{key_of(cell, parameters, data)[:40]}.safetensors"


def key_of(
    cell: Cell, parameters: Mapping[str, Any], data: Mapping[str, Digested] | None = None
) -> str:
    """Return the hash of a cell, its parameters and its data."""
    digests = {name: item.digest for name, item in (data or {}).items()}
    return hashlib.sha256(
        canonical_values([FORMAT, cell.name, cell.version, parameters, digests])
    ).hexdigest()


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold the lock of a cell, if the system has file locks. Without them two processes may compute
    the same cell, with the same result.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    with wrap_write_errors(path):
        file = path.with_suffix(".lock").open("a")
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
