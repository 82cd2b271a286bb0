"""Memory that is kept for what comes next: asked for where the C library knows how, and nowhere
else.
"""

from __future__ import annotations

import ctypes
import types

import pytest

from regauge.checkpoints.allocator import reuse_memory


def test_malloc_options(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[int, int] = {}
    monkeypatch.setattr(
        ctypes, "CDLL", lambda name: types.SimpleNamespace(mallopt=options.__setitem__)
    )
    reuse_memory()
    assert options[-8] == 1  # one arena for all threads
    assert (
        options[-3] <= 1 << 25 <= options[-1]
    )  # more than the first is refused by older libraries; what is freed is kept up to the last


@pytest.mark.parametrize(
    "library", [types.SimpleNamespace(), OSError("no library"), TypeError("None is no name here")]
)
def test_elsewhere_nothing_happens(monkeypatch: pytest.MonkeyPatch, library: object) -> None:
    def load(name: object) -> object:
        if isinstance(library, Exception):
            raise library
        return library

    monkeypatch.setattr(ctypes, "CDLL", load)
    reuse_memory()
