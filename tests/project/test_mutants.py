"""Deliberate faults in the core, one at a time. The suite must kill every one: a test that cannot
fail proves nothing.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from support import forks
from support.mutants import MUTANTS

TESTS = Path(__file__).parents[1]


def _run_child(mutant: str | None, tests: str, log: str) -> None:
    """Install a mutant and run a test file, in a process of its own."""
    sys.path.insert(0, str(TESTS))
    with Path(log).open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        if mutant is not None:
            MUTANTS[mutant].install()
        code = pytest.main(
            [
                "-x",
                "-q",
                "-p",
                "no:cacheprovider",
                "-p",
                "no:xdist",
                f"--rootdir={TESTS}",
                str(TESTS / tests),
            ]
        )
        sys.stdout.flush()
        os._exit(int(code))


def run_tests(mutant: str | None, tests: str, folder: Path) -> tuple[int | None, str]:
    """Return the exit code of pytest, and the end of its output."""
    log = folder / "log"
    process = forks.start(_run_child, mutant, tests, str(log))
    process.join(300)
    process.kill()
    return process.exitcode, log.read_text()[-3000:]


# Each is a run of a test file: one in eight is tried in every run of the suite, all of them in
# `make soak`.
SHARE = [
    pytest.param(name, marks=() if place % 8 == 0 else pytest.mark.slow)
    for place, name in enumerate(MUTANTS)
]
CONTROL = "core/test_axes.py"  # the quickest; the others are controlled in `make soak`


@pytest.mark.parametrize("name", SHARE)
def test_the_suite_kills(name: str, tmp_path: Path) -> None:
    code, printed = run_tests(name, MUTANTS[name].tests, tmp_path)
    assert code == 1, f"this mutant lives:\n{printed}"
    assert "has no attribute" not in printed, f"the mutant itself is broken:\n{printed}"
    assert " failed" in printed or "FAILED" in printed, f"not a failing test:\n{printed}"


@pytest.mark.parametrize(
    "tests",
    [
        pytest.param(tests, marks=() if tests == CONTROL else pytest.mark.slow)
        for tests in sorted({m.tests for m in MUTANTS.values()})
    ],
)
def test_the_suite_spares_the_original(tests: str, tmp_path: Path) -> None:
    """The same run without a mutant passes, so what kills the mutants is the fault and not the
    set-up.
    """
    code, printed = run_tests(None, tests, tmp_path)
    assert code == 0, printed
