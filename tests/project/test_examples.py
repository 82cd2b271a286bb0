"""Every example runs as it is written, from another folder, and leaves nothing behind. Each holds
itself to what it shows.
"""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

from support import forks

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SEPARATE = {"federated_loopback"}  # minutes, and an environment of its own
PROGRAMS = sorted(p.stem for p in EXAMPLES.glob("*.py") if p.stem not in SEPARATE)
NEEDS = {"lock_and_finetune": "peft", "split_trainer": "accelerate", "jigsaw_timm": "timm"}
QUICK: tuple[str, ...] = ()


def run_code(code: str, tmp_path: Path) -> str:
    """What a program prints, in a process and a folder of its own."""
    status, out, err = forks.run(code, cwd=tmp_path)
    assert status == 0, err[-3000:]
    assert list(tmp_path.iterdir()) == []
    return out


def is_marked(name: str) -> object:
    return pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)


@pytest.mark.parametrize("name", [is_marked(name) for name in PROGRAMS])
def test_a_program_runs(name: str, tmp_path: Path) -> None:
    library = NEEDS.get(name)
    first = (
        "import support.torchvision_ops; " if library == "timm" else ""
    )  # tests see timm in a folder of its own
    if library == "timm":
        pytest.importorskip("timm")
    elif library and importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    output = run_code(
        f"{first}import runpy; runpy.run_path({str(EXAMPLES / f'{name}.py')!r}, "
        "run_name='__main__')",
        tmp_path,
    )
    assert output.strip()


def test_there_are_enough_and_all_are_listed() -> None:
    assert len(PROGRAMS) >= 8
    listed = (EXAMPLES / "README.md").read_text()
    for name in (f"{p}.py" for p in PROGRAMS):
        assert f"]({name})" in listed, name


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_says_what_it_is_and_how_it_is_run(name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text()
    docstring = ast.get_docstring(ast.parse(text)) or ""
    assert f"examples/{name}.py" in docstring
    assert len(text.splitlines()) <= 100, "short enough to be read from top to bottom"
