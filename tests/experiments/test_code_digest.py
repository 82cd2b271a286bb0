"""The digest of the code that a function runs: what changes it, and what does not."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from experiments.shared.code_digest import dependencies, digest_of

COUNT = itertools.count()
STEPS = '''
"""Steps of a computation."""
SCALE = 2.0
UNUSED = 3.0


class Model:
    """A model."""

    def step(self, x: float) -> float:
        return x * SCALE

    def other(self, x: float) -> float:
        return x + UNUSED


def check(x: float) -> None:
    if x < 0:
        raise ValueError(f"x must be >= 0, got {x}")
'''
CELLS = """
from steps_{n}.inner import Model, check


def compute(x: float, model: Model) -> float:
    check(x)  # first
    return model.step(x)


def another(x: float) -> float:
    return x
"""


@pytest.fixture
def digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Return the digest of `compute` in a package of these sources."""
    monkeypatch.syspath_prepend(str(tmp_path))
    made: list[str] = []

    def of(steps: str = STEPS, cells: str = CELLS, function: str = "compute") -> str:
        name = f"steps_{next(COUNT)}"  # a new one, because sources are parsed once
        made.append(name)
        folder = tmp_path / name
        folder.mkdir()
        (folder / "__init__.py").write_text("")
        (folder / "inner.py").write_text(steps)
        (folder / "cells.py").write_text(cells.replace("{n}", name.removeprefix("steps_")))
        importlib.invalidate_caches()
        return digest_of(getattr(importlib.import_module(f"{name}.cells"), function))

    yield of
    for name in [m for m in sys.modules if m.split(".")[0] in made]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("x * SCALE", "x * SCALE + 1"),  # a method that is called
        ("SCALE = 2.0", "SCALE = 2.5"),  # a constant that it reads
        ("SCALE = 2.0", "SCALE = 2.0\nSCALE += 1"),  # and what changes it
        ("x < 0", "x <= 0"),  # a function in another module
        ("raise ValueError", "raise KeyError"),
    ],
)
def test_a_change_of_code_that_runs_changes_the_digest(
    digest: Callable[..., str], before: str, after: str
) -> None:
    assert before in STEPS
    assert digest() != digest(STEPS.replace(before, after))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("UNUSED = 3.0", "UNUSED = 4.0"),  # read by a method that is not called
        ("x + UNUSED", "x - UNUSED"),
        ("A model.", "A model of one step."),
        ("x must be >= 0", "x must not be negative"),
        ("return x * SCALE", "return (\n            x * SCALE  # scaled\n        )"),
        ("x: float) -> float", "x: int) -> int"),
    ],
)
def test_other_code_and_prose_leave_the_digest(
    digest: Callable[..., str], before: str, after: str
) -> None:
    assert before in STEPS
    assert digest() == digest(STEPS.replace(before, after))


def test_a_method_counts_once_its_name_is_used(digest: Callable[..., str]) -> None:
    cells = CELLS.replace("model.step(x)", "model.other(x)")
    assert digest(STEPS.replace("x + UNUSED", "x - UNUSED"), cells) != digest(STEPS, cells)


def test_imports_within_a_function_are_followed(digest: Callable[..., str]) -> None:
    lines = "from steps_{n}.inner import Model, check\n"
    cells = (
        CELLS.replace(lines, "")
        .replace("    check(x)", f"    {lines}    check(x)")
        .replace("model: Model", "model: object")
        .replace("model.step", "Model().step")
    )
    assert digest(STEPS, cells) != digest(STEPS.replace("x * SCALE", "x / SCALE"), cells)


def test_functions_of_one_module_have_digests_of_their_own(digest: Callable[..., str]) -> None:
    assert digest() != digest(function="another")
    changed = STEPS.replace("x * SCALE", "x / SCALE")
    assert digest(function="another") == digest(changed, function="another")


def test_a_function_without_source_is_rejected() -> None:
    with pytest.raises(ValueError, match="must be defined in a module's source"):
        digest_of(len)


def test_a_training_with_puzzles_covers_the_wrapper_and_not_the_attacks() -> None:
    from experiments.paper_002 import jigsaw_cells

    covered = {module for module, _ in dependencies(jigsaw_cells.TRAIN.compute)}
    assert {"regauge.jigsaw.wrapper", "regauge.jigsaw.localizer", "regauge.data.train"} <= covered
    assert not any(module.startswith("regauge.attacks") for module in covered)
