"""Each command calls one function of the library: the table of the docs, held to the code."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import pytest
import typer

from regauge.cli import menu
from regauge.cli.app import build_app

TABLE = {**menu.FUNCTIONS, **menu.MODES}


def commands() -> dict[str, Callable[..., int]]:
    """Return the function of every command, by its full name."""
    leaves: dict[str, Callable[..., int]] = {}

    def walk(prefix: str, command: Any) -> None:
        for name, below in command.commands.items():
            full = f"{prefix} {name}".strip()
            if hasattr(below, "commands"):
                walk(full, below)
            else:
                leaves[full] = inspect.unwrap(below.callback)

    walk("", typer.main.get_command(build_app([])))
    return leaves


COMMANDS = commands()


def resolve(path: str) -> Any:
    """Return the object of a dotted path, through lazy packages."""
    first, *rest = path.split(".")
    found: Any = import_module(first)
    walked = first
    for name in rest:
        walked = f"{walked}.{name}"
        try:
            found = getattr(found, name)
        except AttributeError:
            found = import_module(walked)
    return found


def aliases(tree: ast.AST) -> dict[str, str]:
    """Map the names that a piece of code imports to their dotted paths."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        elif isinstance(node, ast.Import):
            names |= {a.asname or a.name.split(".")[0]: a.asname or a.name for a in node.names}
    return names


def calls(source: str, others: dict[str, str]) -> Iterator[Any]:
    """Yield every object of regauge that a function of the command line calls."""
    tree = ast.parse(textwrap.dedent(source))
    names = {**others, **aliases(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            head, *rest = ast.unparse(node.func).split(".")
            path = ".".join([names.get(head, ""), *rest])
            if path.startswith("regauge.") and "(" not in path:
                try:
                    yield resolve(path)
                except (ImportError, AttributeError):  # an attribute of a value
                    continue


def public_calls(command: Callable[..., int]) -> set[str]:
    """Return the functions of the table that a command calls, itself or through its helpers."""
    module = import_module(command.__module__)
    top = aliases(ast.parse(inspect.getsource(module)))
    public = {resolve(path): path for path in TABLE.values()}
    todo, seen, found = [command], set(), set()
    while todo:
        function = todo.pop()
        seen.add(function)
        source = inspect.getsource(function)
        for called in calls(source, top):
            if inspect.isfunction(called) and called in public:
                found.add(public[called])
        own = {
            node.func.id
            for node in ast.walk(ast.parse(textwrap.dedent(source)))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        todo += [
            helper
            for name in own
            if inspect.isfunction(helper := vars(module).get(name))
            and helper.__module__ == command.__module__
            and helper not in seen
            and helper not in COMMANDS.values()
        ]
    return found


def test_every_command_has_a_function() -> None:
    assert sorted(menu.FUNCTIONS) == sorted(COMMANDS)
    assert {name.rpartition(" --")[0] for name in menu.MODES} <= COMMANDS.keys()


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_a_command_calls_its_function_and_no_other(name: str) -> None:
    modes = {path for mode, path in menu.MODES.items() if mode.startswith(f"{name} --")}
    assert public_calls(COMMANDS[name]) - modes == {menu.FUNCTIONS[name]}


def test_another_call_is_noticed() -> None:
    module = aliases(ast.parse("import regauge"))
    source = (
        "def command():\n    from regauge import audit as a\n    a.lock(1)\n    regauge.match(2)"
    )
    found = list(calls(source, module))
    assert found == [resolve("regauge.audit.lock"), resolve("regauge.match")]
