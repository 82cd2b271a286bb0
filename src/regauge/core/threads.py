"""The number of threads of numerical libraries: one setting for torch, OpenMP and BLAS.

Threads of OpenMP and BLAS spin while they wait. More of them than free cores can slow small
products down by a factor of 50. So `limited_threads` holds every public function within one
setting: `set_threads(n)`, or else the environment variable REGAUGE_THREADS, or else
OMP_NUM_THREADS, or else the number of physical cores that the process may use.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
_setting: int | None = None
_depth = 0


def set_threads(count: int | None) -> None:
    """Set the number of threads for everything regauge computes; None restores the default.

    Args:
        count: The number of threads, or None.

    Raises:
        ValueError: The number is not positive.

    Example:
        >>> regauge.set_threads(2)
        >>> regauge.set_threads(None)
    """
    if count is not None and count < 1:
        raise ValueError(f"threads must be >= 1, got {count}")
    global _setting
    _setting = count


def is_set() -> bool:
    """Return whether the number of threads was set by `set_threads`."""
    return _setting is not None


def thread_count() -> int:
    """Return the number of threads that regauge uses."""
    if _setting is not None:
        return _setting
    for name in ("REGAUGE_THREADS", "OMP_NUM_THREADS"):
        text = os.environ.get(name, "").partition(",")[0].strip()
        if text.isdecimal() and int(text) > 0:
            return int(text)
    return physical_cores()


@functools.cache
def physical_cores() -> int:
    """Return the number of physical cores that this process may use.

    Hyper-threads of one core count once, where the system describes them.
    """
    try:
        allowed: list[int] = sorted(os.sched_getaffinity(0))
    except AttributeError:  # not on this system
        return os.cpu_count() or 1
    cores = set()
    for cpu in allowed:
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        try:
            core = tuple(
                (topology / name).read_text() for name in ("physical_package_id", "core_id")
            )
        except OSError:
            core = (str(cpu),)
        cores.add(core)
    return max(1, len(cores))


@contextmanager
def limited_threads(count: int | None = None) -> Iterator[int]:
    """Limit torch, OpenMP and BLAS to a number of threads, and restore their own afterwards.

    Nested limits without a count leave the outer one in place.

    Args:
        count: The number of threads. Default: the outer limit, or `thread_count()`.
    """
    from threadpoolctl import threadpool_limits

    global _depth
    if _depth and count is None:
        yield thread_count()
        return
    limit = count or thread_count()
    torch = sys.modules.get("torch")  # torch counts its own threads, and is not loaded for this
    before = torch.get_num_threads() if torch is not None else None
    _depth += 1
    try:
        with threadpool_limits(limit):
            if torch is not None:
                torch.set_num_threads(limit)
            yield limit
    finally:
        _depth -= 1
        if torch is not None and before is not None:
            torch.set_num_threads(before)


def within_threads(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function within the limit on threads; for public functions that compute."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with limited_threads():
            return function(*args, **kwargs)

    return run
