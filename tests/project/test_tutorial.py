"""The notebooks of the tutorial run, keep what they claim, and are stored with their outputs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import notebooks  # noqa: E402

NAMES = sorted(p.name for p in notebooks.TUTORIAL.glob("*.ipynb"))


# They train for longer than the others; the commands they show are run by the test of the README.
LONG = ("4-audit.ipynb", "5-train.ipynb")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in LONG else n for n in NAMES]
)
def test_a_notebook_runs(name: str) -> None:
    """In this process, so that all share the models that digits.py trains."""
    notebook = notebooks.load_notebook(notebooks.TUTORIAL / name)
    with notebooks.tutorial_folder():
        printed = [outputs for _, outputs in notebooks.run_cells(notebook)]
    assert any(printed)


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_stored_and_shown(name: str) -> None:
    notebook = notebooks.load_notebook(notebooks.TUTORIAL / name)
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    text = "".join("".join(o.get("text", "")) for cell in cells for o in cell["outputs"])
    page = notebooks.convert(notebook)
    assert text.strip()
    assert all(line.strip() in page for line in text.splitlines())
    assert ".ipynb" not in page.replace("`", "")


def test_a_claim_that_fails_fails_the_run() -> None:
    cell = {"cell_type": "code", "source": ["assert 1 > 2"]}
    with pytest.raises(AssertionError):
        list(notebooks.run_cells({"cells": [cell]}))


def test_there_is_one_for_every_use_case() -> None:
    assert len(NAMES) == 5
    index = (notebooks.TUTORIAL / "index.md").read_text()
    assert all(f"]({name})" in index for name in NAMES)
