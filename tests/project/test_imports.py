"""Imports go only downwards, attacks know neither keys nor locks nor the truth, the core stays
small: docs/architecture.md, held to its word.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src"

# From the bottom up: a part imports what stands before it, and nothing after it. Parts on one line
# are one part.
ORDER = """
errors
patterns
files
documents
archives
headers
tensorfiles
environment
advisories
memory
blocks
streams
members
drawing
gathering
fitting
steps
bits
axes
groups
spec
elements
elementfiles
action
live
fold
families
specfile
trust
checkpoint
vocabularies
testing
sources cutting loading discovery
adapters
adapted
keys
planning
writing
pickles
converting
parquet
data
tokenizing
tasks
matching invariance
moved
fingerprints
facts
findings
metrics
report
locking
lockfiles
sealing
guarding
edge
permuting
verification
barriers
connectivity
merging
jigsaw
split
attacks
audit
leakage
gradients
federated
experiments
demo
cli
__main__
"""
RANK = {name: rank for rank, line in enumerate(ORDER.split("\n")) for name in line.split()}
SECRETS = {
    "keys",
    "locking",
    "lockfiles",
    "sealing",
    "guarding",
    "edge",
    "audit",
    "leakage",
    "split",
    "findings",
}
CORE = ("axes", "groups", "spec", "elements", "action")
CORE_LINES = 1000


def part(module: str) -> str:
    names = module.split(".")
    return names[1] if len(names) > 1 else ""


def imports(source: str) -> Iterator[tuple[int, str]]:
    """(line, module) of everything of regauge that a file imports, in functions too; what is for
    types alone does not count.
    """
    tree = ast.parse(source)
    typed = {
        id(n)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for n in ast.walk(node)
    }
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


def parts() -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for path in sorted((SOURCES / "regauge").rglob("*.py")):
        names = path.relative_to(SOURCES / "regauge").with_suffix("").parts
        if names != ("__init__",):
            found.setdefault(names[0], []).append(path)
    return found


PARTS = parts()
USES = {
    name: {part(module) for path in paths for _, module in imports(path.read_text())} & set(PARTS)
    for name, paths in PARTS.items()
}


def upwards(name: str, source: str) -> list[str]:
    """What a part imports and must not."""
    found = []
    for line, module in imports(source):
        other = part(module)
        if (
            other in RANK
            and RANK[other] >= RANK[name]
            and other != name
            and RANK[other] != RANK[name]
        ):
            found.append(f"line {line}: {module}")
    return found


def test_every_part_has_its_place() -> None:
    assert set(PARTS) == set(RANK) - {""}, "say in ORDER where a new part stands"


@pytest.mark.parametrize("name", sorted(PARTS))
def test_imports_go_only_downwards(name: str) -> None:
    for path in PARTS[name]:
        assert upwards(name, path.read_text()) == [], path


def test_an_import_upwards_is_seen() -> None:
    assert upwards("groups", "def f():\n    from regauge.locking.lock import lock\n") == [
        "line 2: regauge.locking.lock.lock"
    ]
    assert upwards("groups", "from regauge import keys") == ["line 1: regauge.locking.keys"]
    assert (
        upwards(
            "groups",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from regauge.locking.lock "
            "import lock\n",
        )
        == []
    )
    assert upwards("locking", "from regauge.core.groups import Group") == []


def reached(name: str) -> set[str]:
    """All parts that a part needs, however indirectly."""
    found, todo = {name}, {name}
    while todo:
        todo = set().union(*(USES[one] for one in todo)) - found
        found |= todo
    return found - {name}


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted((SOURCES / "regauge").rglob("*.py")):
        names = path.relative_to(SOURCES).with_suffix("").parts
        found[".".join(names[:-1] if names[-1] == "__init__" else names)] = path
    return found


def reached_modules(start: str) -> set[str]:
    """All modules that those of a part need, however indirectly, file by file: of a part that is
    used, only what is used.
    """
    files = modules()
    todo = {name for name in files if name == start or name.startswith(f"{start}.")}
    found: set[str] = set()
    while todo:
        name = todo.pop()
        found.add(name)
        for _, module in imports(files[name].read_text()):
            names = module.split(".")
            own = next(
                (
                    ".".join(names[:n])
                    for n in range(len(names), 0, -1)
                    if ".".join(names[:n]) in files
                ),
                None,
            )
            around = (
                []
                if own is None
                else [".".join(own.split(".")[:n]) for n in range(2, len(own.split(".")) + 1)]
            )
            todo |= {one for one in around if one in files} - found
    return found


def test_attacks_know_neither_keys_nor_locks_nor_the_truth() -> None:
    """Not even indirectly: whatever an attack imports cannot hand it a key. (Puzzles are part of a
    public model: attacks know how those are made.)
    """
    assert {part(module) for module in reached_modules("regauge.attacks")} & SECRETS == set()
    assert {"matching", "action"} <= reached("attacks")
    assert {"keys", "locking"} <= reached("audit"), "who scores them does"


def test_applications_do_not_know_each_other() -> None:
    """Lock, match, merge, jigsaw and verify stand beside each other. Verify trains through the
    edge, which also authorises locked models.
    """
    apart = {
        "locking",
        "merging",
        "jigsaw",
        "split",
        "verification",
        "attacks",
        "audit",
        "leakage",
        "cli",
    }
    for name in ("locking", "matching", "merging", "jigsaw", "verification"):
        assert reached(name) & apart == ({"locking"} if name == "verification" else set()), name


def lines_of_code(source: str) -> int:
    """Lines with something on them that is neither a comment nor a docstring."""
    told: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        body: list[ast.stmt] = getattr(node, "body", [])
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and ast.get_docstring(node) is not None
        ):
            told |= set(range(body[0].lineno, (body[0].end_lineno or 0) + 1))
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
    return len({line for t in tokens for line in range(t.start[0], t.end[0] + 1)} - told)


def test_lines_of_code_are_counted() -> None:
    assert (
        lines_of_code(
            '"""Told."""\n\n# a comment\ndef f():\n    """Told,\n    twice."""\n    return '
            '"""not\n    told"""\n'
        )
        == 3
    )


def test_the_core_is_small() -> None:
    counted = {
        name: lines_of_code((SOURCES / "regauge" / f"{name}.py").read_text()) for name in CORE
    }
    assert sum(counted.values()) < CORE_LINES, counted


def test_the_architecture_page_has_the_same_order() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    for name in RANK.keys() - {"", "__main__", "memory", "blocks", "gathering"}:
        assert f"`{name}`" in page or f"`{name}/`" in page or f"`{name}.py`" in page, name
