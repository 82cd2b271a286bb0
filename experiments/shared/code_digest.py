"""A digest of the code that a function runs, to find results that older code has made.

The digest covers the function and every function, class and constant of `experiments` and `regauge`
that it names, directly or not. Comments, docstrings, annotations, formatting, messages of errors
and the place of a definition do not change it. Library versions are not in it: outcomes record
those.

    digest_of(TRAIN.compute)        # of one cell
    digest_of(EXPERIMENTS[id])      # of an experiment, its cells included

Names are resolved in the source, nothing is executed. Of a class without bases only the methods
count whose names are used; of any other all of them, because a framework may call them. A
definition that is reached only by a string (`getattr`, a lazy registry) is not covered, and a name
covers all that it may refer to, so the digest may change where the outcome does not. It is
therefore not part of a cell's key: a refactoring would discard days of computing. Compare it with
the recorded one to list what may be out of date.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeGuard

ROOTS = ("experiments", "regauge")
# Syntax that does not change what a function returns, and fields that differ between versions of
# Python.
_ANNOTATIONS = {"annotation", "returns"}
_DROPPED = {
    "type_comment",
    "type_params",
    "kind",
    "ctx",
    "lineno",
    "col_offset",
    "end_lineno",
    "end_col_offset",
}

Definition = tuple[str, str]  # module and name


def digest_of(function: Callable[..., Any]) -> str:
    """Return the SHA-256 of the code that a function of a module runs.

    Raises:
        ValueError: The function has no source: a builtin, a partial, or one defined in a session.
    """
    digest = hashlib.sha256()
    for text in sorted({_text(m, n) for m, n in dependencies(function)}):
        digest.update(f"{len(text)}\0{text}".encode())
    return digest.hexdigest()


def dependencies(function: Callable[..., Any]) -> list[Definition]:
    """Return the definitions that the digest of a function covers, as (module, name)."""
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    root = module.split(".")[0]
    if not inspect.isroutine(function) or name.split(".")[0] not in _names(module):
        raise ValueError(f"function must be defined in a module's source, got {function!r}")
    waiting: list[Definition] = [(module, name)] if "." in name else []
    waiting.append((module, name.split(".")[0]))
    found: set[Definition] = set(waiting)
    attributes: set[str] = set()
    methods: dict[str, list[Definition]] = {}  # by name, of classes found, not used so far
    while waiting:
        current = waiting.pop()
        used = _Used()
        for statement in _statements(*current):
            used.visit(statement)
        reached = [*_references(*current, used, (*ROOTS, root))]
        for name in used.attributes - attributes:
            reached += methods.pop(name, [])
        attributes |= used.attributes
        for name in _methods(*current):
            method = (current[0], f"{current[1]}.{name}")
            if name in attributes:
                reached.append(method)
            else:
                methods.setdefault(name, []).append(method)
        for other in reached:
            if other not in found:
                found.add(other)
                waiting.append(other)
    return sorted(found)


@dataclass(frozen=True)
class _Module:
    """The top level of a module: statements by the name that they bind, and imported names."""

    definitions: dict[str, list[ast.stmt]] = field(default_factory=dict)
    imports: dict[str, tuple[str, str | None]] = field(default_factory=dict)


def _names(module: str) -> dict[str, list[ast.stmt]]:
    path = _path(module)
    return {} if path is None else _module(module).definitions


def _module(name: str) -> _Module:
    path = _path(name)
    return _Module() if path is None else _parsed(name, path, path.stat().st_mtime_ns)


@cache
def _path(module: str) -> Path | None:
    """Return the source of a module, without importing it or its packages."""
    root, *rest = module.split(".")
    loaded = sys.modules.get(root)
    spec = loaded.__spec__ if loaded is not None else find_spec(root)
    if spec is None or spec.origin is None:
        return None
    base = Path(spec.origin)
    if not rest:
        return base if base.suffix == ".py" else None
    inner = base.parent.joinpath(*rest)
    choices = (inner.with_name(f"{inner.name}.py"), inner / "__init__.py")
    return next((p for p in choices if p.is_file()), None)


@cache
def _parsed(name: str, path: Path, _: int) -> _Module:
    module = _Module()
    _collect(module, ast.parse(path.read_text("utf-8")).body, name, path.name == "__init__.py")
    return module


def _collect(module: _Module, body: list[ast.stmt], name: str, package: bool) -> None:
    for statement in body:
        if isinstance(statement, ast.If | ast.Try):
            inner = list(ast.iter_child_nodes(statement))
            _collect(module, [c for c in inner if isinstance(c, ast.stmt)], name, package)
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            module.imports.update(_imported(statement, name, package))
        else:
            for bound in _bound(statement):
                module.definitions.setdefault(bound, []).append(statement)


def _bound(statement: ast.stmt) -> Iterator[str]:
    """Return the names that a statement of a module's top level binds or extends."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
        return
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign | ast.AugAssign):
        targets = [statement.target]
    for target in targets:
        yield from (node.id for node in ast.walk(target) if isinstance(node, ast.Name))


def _imported(
    statement: ast.Import | ast.ImportFrom, module: str, package: bool
) -> Iterator[tuple[str, tuple[str, str | None]]]:
    """Return the names that an import binds: to a module, or to a name of one."""
    if isinstance(statement, ast.Import):
        for alias in statement.names:
            bound = alias.asname or alias.name.split(".")[0]
            yield bound, (alias.name if alias.asname else bound, None)
        return
    base = statement.module or ""
    if statement.level:
        parts = module.split(".")
        above = parts[: len(parts) - statement.level + package]
        base = ".".join([*above, *([base] if base else [])])
    for alias in statement.names:
        yield alias.asname or alias.name, (base, alias.name)


def _statements(module: str, name: str) -> list[ast.stmt]:
    """Return the statements of a definition: of a class without bases, those but its methods."""
    name, _, method = name.partition(".")
    found = _module(module).definitions.get(name, [])
    if method:
        inner = [s for c in found if isinstance(c, ast.ClassDef) for s in c.body]
        return [s for s in inner if _is_method(s) and s.name == method]
    return [_shell(s) if isinstance(s, ast.ClassDef) and not s.bases else s for s in found]


def _methods(module: str, name: str) -> list[str]:
    """Return the names of the methods that `_statements` leaves out."""
    found = _module(module).definitions.get(name, [])
    shells = [s for s in found if isinstance(s, ast.ClassDef) and not s.bases]
    return [s.name for c in shells for s in c.body if _is_method(s)]


def _shell(statement: ast.ClassDef) -> ast.ClassDef:
    body = [s for s in statement.body if not _is_method(s)]
    return ast.ClassDef(
        name=statement.name,
        bases=[],
        keywords=statement.keywords,
        body=body,
        decorator_list=statement.decorator_list,
    )


def _is_method(statement: ast.stmt) -> TypeGuard[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return whether a statement is a method that runs only where its name is used."""
    return isinstance(
        statement, ast.FunctionDef | ast.AsyncFunctionDef
    ) and not statement.name.startswith("__")


def _references(
    module: str, name: str, used: _Used, roots: tuple[str, ...]
) -> Iterator[Definition]:
    """Return the definitions that one definition names."""
    found = _module(module)
    imports = dict(found.imports)
    package = (path := _path(module)) is not None and path.name == "__init__.py"
    for inner in used.imports:
        imports.update(_imported(inner, module, package))
    for used_name, attribute in used.names:
        if used_name in imports:
            yield from _resolve(*imports[used_name], attribute, roots)
        elif used_name in found.definitions:
            yield module, used_name


def _resolve(
    module: str, name: str | None, attribute: str | None, roots: tuple[str, ...], depth: int = 0
) -> Iterator[Definition]:
    """Return where an imported name is defined; of a module used as a value, all definitions."""
    if module.split(".")[0] not in roots or depth > 20:
        return
    if name is not None and _path(f"{module}.{name}") is not None:
        module, name = f"{module}.{name}", None
    if name is None:
        if attribute is not None:
            yield from _resolve(module, attribute, None, roots, depth + 1)
        else:
            yield from ((module, defined) for defined in _module(module).definitions)
        return
    found = _module(module)
    if name in found.imports:
        yield from _resolve(*found.imports[name], attribute, roots, depth + 1)
    elif name in found.definitions:
        yield module, name


class _Used(ast.NodeVisitor):
    """Collects the names that a definition uses, with the attribute taken of each, and its imports.

    Annotations name the classes whose methods it may call.
    """

    def __init__(self) -> None:
        self.names: set[tuple[str, str | None]] = set()
        self.attributes: set[str] = set()
        self.imports: list[ast.Import | ast.ImportFrom] = []

    def generic_visit(self, node: ast.AST) -> None:
        for child in _children(node):
            self.visit(child)

    def visit_Name(self, node: ast.Name) -> None:
        self.names.add((node.id, None))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.attributes.add(node.attr)
        if isinstance(node.value, ast.Name):
            self.names.add((node.value.id, node.attr))
        else:
            self.visit(node.value)

    def visit_Import(self, node: ast.Import) -> None:
        self.imports.append(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self.imports.append(node)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    for _, value in _fields(node):
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, ast.AST):
                yield item


def _fields(node: ast.AST) -> Iterator[tuple[str, Any]]:
    """Return the fields of a node that may change an outcome."""
    if isinstance(node, ast.Raise):  # its type, not its message
        raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
        yield from [("exc", raised)] if isinstance(raised, ast.Name) else []
        return
    for name, value in ast.iter_fields(node):
        if name in _DROPPED:
            continue
        if name == "body" and isinstance(value, list) and _is_documented(node):
            value = value[1:]
        if isinstance(value, list):
            value = [v for v in value if not _is_text(v)]
        yield name, value


def _is_documented(node: ast.AST) -> bool:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return isinstance(node, kinds) and ast.get_docstring(node, clean=False) is not None


def _is_text(node: Any) -> bool:
    """Return whether a statement is a string alone, as below an attribute."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _text(module: str, name: str) -> str:
    """Return a definition in a form that is the same for every layout and version of Python."""
    return f"{name}=" + "".join(_dump(s) for s in _statements(module, name))


def _dump(node: Any) -> str:
    if isinstance(node, list):
        return "[" + ",".join(_dump(item) for item in node) + "]"
    if isinstance(node, ast.Import | ast.ImportFrom):
        return ""  # the definitions behind it are covered, wherever they are
    if isinstance(node, ast.AST):
        inner = ",".join(
            f"{name}={_dump(value)}"
            for name, value in _fields(node)
            if value not in (None, []) and name not in _ANNOTATIONS
        )
        return f"{type(node).__name__}({inner})"
    return repr(node)
