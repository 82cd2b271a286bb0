"""The layers of docs/architecture.md: packages import only those before them, attacks reach no
secrets, the core stays small.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "regauge"

# Each package imports only packages before it.
ORDER = (
    "errors",
    "core",
    "testing",
    "checkpoints",
    "models",
    "data",
    "results",
    "evaluation",
    "matching",
    "merging",
    "locking",
    "verification",
    "jigsaw",
    "defences",
    "split",
    "federated",
    "attacks",
    "audit",
    "demo",
    "cli",
    "__main__",
)
TOP_FILES = {"__init__.py", "__main__.py", "errors.py", "testing.py", "py.typed"}
SECRET = (
    "regauge.locking",
    "regauge.audit",
    "regauge.split",
    "regauge.federated",
    "regauge.results.findings",
)
CORE = ("axes", "groups", "spec", "element", "action")
CORE_LINES = 1000


def imports(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, module) of every import of regauge, in functions too; imports for type checkers
    do not count.
    """
    tree = ast.parse(source)
    guards = (
        n
        for n in ast.walk(tree)
        if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)
    )
    typed = {id(n) for guard in guards for n in ast.walk(guard)}
    for node in ast.walk(tree):
        if id(node) in typed:
            continue
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.split(".")[0] == "regauge"
        ):
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "regauge":
                    yield node.lineno, alias.name


def package_of(module: str) -> str:
    return [*module.split("."), ""][1]


def misplaced_imports(package: str, source: str) -> list[str]:
    """List the imports of a file that point against the order."""
    rank = ORDER.index(package)
    return [
        f"line {line}: {module}"
        for line, module in imports(source)
        if package_of(module) in ORDER and ORDER.index(package_of(module)) > rank
    ]


def files() -> dict[str, Path]:
    """Map the name of every module to its file."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        names = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(names[:-1] if names[-1] == "__init__" else names)] = path
    return found


FILES = files()


@cache
def modules_imported_by(name: str) -> list[str]:
    return [module for _, module in imports(FILES[name].read_text())]


def reachable_modules(start: str) -> set[str]:
    """Return every module that a package needs, however indirectly, file by file."""
    todo = {name for name in FILES if name == start or name.startswith(f"{start}.")}
    packages: set[str] = set()
    while todo:
        name = todo.pop()
        packages.add(name)
        for module in modules_imported_by(name):
            names = module.split(".")
            own = next(
                (
                    ".".join(names[:n])
                    for n in range(len(names), 0, -1)
                    if ".".join(names[:n]) in FILES
                ),
                "",
            )
            parents = {".".join(own.split(".")[:n]) for n in range(2, len(own.split(".")) + 1)}
            todo |= (parents & FILES.keys()) - packages
    return packages


def test_only_five_files_at_the_top() -> None:
    assert {p.name for p in PACKAGE.iterdir() if p.is_file()} == TOP_FILES


def test_every_package_is_in_the_order() -> None:
    assert {package_of(name) for name in FILES} - {""} == set(ORDER)


@pytest.mark.parametrize("package", ORDER)
def test_imports_follow_the_order(package: str) -> None:
    for name, path in FILES.items():
        if package_of(name) == package:
            assert misplaced_imports(package, path.read_text()) == [], path


def test_a_misplaced_import_is_found() -> None:
    assert misplaced_imports("core", "def f():\n    from regauge.locking.lock import lock\n") == [
        "line 2: regauge.locking.lock.lock"
    ]
    assert misplaced_imports("core", "from regauge import cli") == ["line 1: regauge.cli"]
    assert (
        misplaced_imports(
            "core",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from regauge.locking.lock "
            "import lock\n",
        )
        == []
    )
    assert misplaced_imports("locking", "from regauge.core.groups import Group") == []


def test_attacks_reach_neither_keys_nor_locks_nor_the_truth() -> None:
    """Not even indirectly: nothing that an attack imports can give it a key. Puzzles are part of a
    public model.
    """
    modules = reachable_modules("regauge.attacks")
    assert [name for name in sorted(modules) if name.startswith(SECRET)] == []
    assert {"regauge.matching", "regauge.core.action"} <= modules
    assert {"regauge.locking.keys", "regauge.locking.lock"} <= reachable_modules("regauge.audit"), (
        "the audit that scores attacks does"
    )


def test_applications_do_not_import_each_other() -> None:
    """Verification trains through the wrapper that also authorises locked models."""
    applications = {
        "locking",
        "merging",
        "jigsaw",
        "split",
        "federated",
        "verification",
        "attacks",
        "audit",
        "cli",
    }
    for name in ("locking", "matching", "merging", "jigsaw", "verification"):
        others = {
            package_of(module) for module in reachable_modules(f"regauge.{name}")
        } & applications - {name}
        assert others == ({"locking"} if name == "verification" else set()), name


def lines_of_code(source: str) -> int:
    """Count the lines that hold something other than comments and docstrings."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        body: list[ast.stmt] = getattr(node, "body", [])
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and ast.get_docstring(node) is not None
        ):
            docstrings |= set(range(body[0].lineno, (body[0].end_lineno or 0) + 1))
    quiet = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
    tokens = [
        t for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type not in quiet
    ]
    return len({line for t in tokens for line in range(t.start[0], t.end[0] + 1)} - docstrings)


def test_lines_of_code_are_counted() -> None:
    assert (
        lines_of_code(
            '"""Doc."""\n\n# a comment\ndef f():\n    """Doc,\n    twice."""\n    return '
            '"""no\n    doc"""\n'
        )
        == 3
    )


def test_the_core_is_small() -> None:
    counted = {name: lines_of_code((PACKAGE / "core" / f"{name}.py").read_text()) for name in CORE}
    assert sum(counted.values()) < CORE_LINES, counted


def test_the_architecture_page_lists_every_package() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert [name for name in ORDER if name != "__main__" and f"`{name}" not in page] == []
