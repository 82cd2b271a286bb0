"""The limit on threads: one setting for torch, OpenMP and BLAS, restored afterwards."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from threadpoolctl import threadpool_info

from regauge.core import threads
from regauge.core.threads import limited_threads, set_threads, thread_count, within_threads


@pytest.fixture(autouse=True)
def default_setting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("REGAUGE_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    before = torch.get_num_threads()
    set_threads(None)  # a command of another test may have set it
    yield
    set_threads(None)
    torch.set_num_threads(before)


def blas_threads() -> set[int]:
    return {pool["num_threads"] for pool in threadpool_info()}


def test_the_setting_precedes_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert thread_count() == threads.physical_cores() >= 1
    monkeypatch.setenv("OMP_NUM_THREADS", "3,1")
    assert thread_count() == 3
    monkeypatch.setenv("REGAUGE_THREADS", "5")
    assert thread_count() == 5
    set_threads(2)
    assert thread_count() == 2
    set_threads(None)
    monkeypatch.setenv("REGAUGE_THREADS", "many")
    assert thread_count() == 3
    with pytest.raises(ValueError, match="threads must be >= 1, got 0"):
        set_threads(0)


def test_a_limit_holds_for_every_library_and_is_restored() -> None:
    torch.set_num_threads(3)
    before = blas_threads()
    with limited_threads(1) as count:
        assert (count, torch.get_num_threads(), blas_threads()) == (1, 1, {1})
    assert torch.get_num_threads() == 3
    assert blas_threads() == before != {1}


def test_the_outer_limit_holds_within_public_functions() -> None:
    @within_threads
    def count() -> int:
        return torch.get_num_threads()

    set_threads(2)
    assert count() == 2
    with limited_threads(1):
        assert count() == 1


def test_an_error_restores_the_threads() -> None:
    torch.set_num_threads(3)

    @within_threads
    def fail() -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert torch.get_num_threads() == 3


def test_cores_are_counted_without_torch() -> None:
    code = (
        "import sys, regauge.core.threads as t; t.physical_cores(); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
