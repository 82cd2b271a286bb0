"""Cells: what experiments are made of. A cell is a pure function of JSON-able parameters and data;
its outcome is kept and never computed twice.

An outcome is known by the hash of the cell's name and version, its parameters and the digests of
its data, and lies in one safetensors file of that name: values in the metadata, tensors (a trained
checkpoint) as they are, and a digest of both. A file that does not match its digest is computed
again. While a long cell works it leaves its state beside it (`ResumeState.save`), and goes on from
there after an interruption. Files appear whole or not at all, so that processes may share a cache;
where the system has file locks, the second waits for the first and reads what it found.

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
    """Data that a cell reads: whatever has a digest of all that matters in it."""

    @property
    def digest(self) -> str: ...


@dataclass(frozen=True)
class Cell:
    """A function with a name and a version. The version is raised by whoever changes what the
    function finds.
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
    """The cell's outcome for these parameters and data: from the cache if it is there and whole, or
    computed and kept.
    """
    data = data or {}
    path = place(cell, parameters, cache, data)
    with wrap_write_errors(cache):
        cache.mkdir(parents=True, exist_ok=True)
    if found := read_outcome(path):
        return found
    with _alone(path):
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
            f"{path} does not hold what was just written to it",
            hint="look at the disk, or set REGAUGE_CACHE to another folder",
        )
    return found


def place(
    cell: Cell,
    parameters: Mapping[str, Any],
    cache: Path,
    data: Mapping[str, Digested] | None = None,
) -> Path:
    """Where an outcome lies, once it is there."""
    return cache / f"{cell.name}-{key_of(cell, parameters, data)[:40]}.safetensors"


def key_of(
    cell: Cell, parameters: Mapping[str, Any], data: Mapping[str, Digested] | None = None
) -> str:
    """The hash that an outcome is known by."""
    digests = {name: one.digest for name, one in (data or {}).items()}
    return hashlib.sha256(
        canonical_values([FORMAT, cell.name, cell.version, parameters, digests])
    ).hexdigest()


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold the cell's lock where the system has such. Without it two processes may compute the same
    cell, to the same end.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    with wrap_write_errors(path):
        lock = path.with_suffix(".lock").open("a")
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
