"""The package: what it exports, how little it imports, and one version."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import regauge
from support import forks

ROOT = Path(__file__).parents[2]


def test_every_exported_name_exists_and_is_not_a_module() -> None:
    """A module named like a function would take the function's place as soon as it is imported."""
    for path in (ROOT / "src" / "regauge").glob("*.py"):
        importlib.import_module(f"regauge.{path.stem}")
    for name in regauge.__all__:
        exported = getattr(regauge, name)
        assert callable(exported), name
        assert exported.__module__ == f"regauge.{regauge._HOME[name]}", name
    assert not hasattr(regauge, "nothing")
    assert set(regauge.__all__) <= set(dir(regauge))


def test_the_table_and_the_typed_imports_agree() -> None:
    tree = ast.parse((ROOT / "src" / "regauge" / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    typed = {
        a.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for a in node.names
    }
    assert typed == {name: f"regauge.{home}" for name, home in regauge._HOME.items()}


def loaded_modules(code: str) -> set[str]:
    script = f"import sys; {code}; print(*sorted(m for m in sys.modules if '.' not in m))"
    return set(
        subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True
        ).stdout.split()
    )


def test_import_and_help_load_nothing_heavy() -> None:
    heavy = {"torch", "transformers", "numpy", "scipy", "cryptography"}
    assert not loaded_modules("import regauge") & heavy
    assert not loaded_modules("from regauge.cli import main; main(['--help'])") & heavy


PACKAGES = ("audit", "federated", "jigsaw", "locking", "matching", "merging", "split")


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_works_after_importing_regauge_alone(name: str) -> None:
    """In a fresh process, since any import of a package makes it an attribute."""
    script = (
        "import sys; assert 'regauge' not in sys.modules; "
        f"import regauge; package = regauge.{name}; "
        "print(*(n for n in package.__all__ if getattr(package, n) is None)); "
        f"print({name!r} in dir(regauge)); "
        f"print(sorted(dir(package)) == sorted(package.__all__))"
    )
    code, out, err = forks.run(script)
    assert code == 0, err
    is_lazy = name not in ("matching", "merging")
    assert out.splitlines() == ["", "True", str(is_lazy)]


def test_moving_by_a_permutation_loads_no_torch(tmp_path: Path) -> None:
    from support.picos import build

    build("llama").save_pretrained(tmp_path / "in")
    moved = loaded_modules(
        f"from regauge.cli import main; main(['move', {str(tmp_path / 'in')!r}, '--random', "
        f"'-o', {str(tmp_path / 'out')!r}])"
    )
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert "numpy" in moved
    assert not moved & {"torch", "transformers"}


def test_one_version() -> None:
    """It is written in regauge/__init__.py alone; the newest section of the changelog is its
    own.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in project["project"]["dynamic"]
    assert "version" not in project["project"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "regauge.__version__"}
    changes = re.search(r"^## \[(\d[^\]]*)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert changes is not None
    assert changes.group(1) == regauge.__version__
    assert f"\nversion: {regauge.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_package_is_a_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "regauge", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == f"regauge {regauge.__version__}"
