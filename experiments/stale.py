"""List stored results that are older than the code they depend on.

python -m experiments.stale docs/results            # lists them
python -m experiments.stale docs/results --strict   # and exits with 1 if there are any

A result names the digests of its experiment and of the functions of its cells (`facts["code"]`):
it is stale if one of them has changed. A result without digests is compared through the history of
git: the modules that its experiment depends on, with those of the commit that last touched the
result. Comments, docstrings and formatting count in neither case.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.shared.code_digest import dependencies, digest_of
from regauge.cli.console import print_result
from regauge.results.findings import load_results

ROOT = Path(__file__).parents[1]
PACKAGES = {"experiments": "experiments", "regauge": "src/regauge"}
LENGTH = 16  # stored characters of a digest

Function = Callable[..., object]


@dataclass(frozen=True)
class Stale:
    """A result that is older than its code, or of unknown age, and the reason."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


def code_of(experiment: Function, cells: Iterable[Function]) -> dict[str, str]:
    """Return the digests of an experiment and of the functions of its cells."""
    functions = {name_of(function): function for function in (experiment, *cells)}
    return {name: digest_of(functions[name])[:LENGTH] for name in sorted(functions)}


def name_of(function: Function) -> str:
    """Return the name under which the digest of a function is stored."""
    return f"{function.__module__}.{function.__qualname__}"


def find_stale(folder: Path, experiments: Mapping[str, Function]) -> Iterator[Stale]:
    """Iterate over the stale results of a folder."""
    for path in sorted(folder.glob("*.json")):
        facts = load_results(path).facts
        experiment = experiments.get(facts["experiment"])
        if experiment is None:
            reason = f"experiment {facts['experiment']} no longer exists"
        elif code := facts.get("code"):
            reason = compare_digests(code)
        else:
            reason = compare_history(path, modules_of(experiment))
        if reason:
            yield Stale(path.stem, reason)


def compare_digests(code: Mapping[str, str]) -> str:
    """Return which functions have another digest than the stored one; empty if none has."""
    reasons = []
    for name, digest in code.items():
        function = _function(name)
        if function is None:
            reasons.append(f"{name} no longer exists")
        elif (now := digest_of(function)[:LENGTH]) != digest:
            reasons.append(f"{name} has digest {now}, stored with {digest}")
    return "; ".join(reasons)


def modules_of(experiment: Function) -> list[str]:
    """Return the paths of the modules that an experiment depends on, below the root."""
    names = {module for module, _ in dependencies(experiment)}
    paths = (path for name in names for path in _paths(name) if (ROOT / path).is_file())
    return sorted(paths)


def compare_history(result: Path, modules: Iterable[str], root: Path = ROOT) -> str:
    """Return which modules are newer than the commit of a result; empty if none is."""
    modules = list(modules)
    commit = _git(root, "log", "-1", "--format=%h %cs", "--", str(result.resolve())).split()
    if not commit:
        return "stored without digests of its code, and not in the history of git"
    former = _texts(root, commit[0], modules)
    newer = [path for path in modules if _bare((root / path).read_text()) != _bare(former[path])]
    if not newer:
        return ""
    last = _git(root, "log", "-1", "--no-merges", "--format=%h of %cs: %s", "--", *newer)
    return (
        f"stored in {commit[0]} of {commit[1]}, older than {len(newer)} of the {len(modules)} "
        f"modules it depends on; newest: {last or 'not committed'}"
    )


def _paths(module: str) -> tuple[str, str]:
    package, *rest = module.split(".")
    base = "/".join([PACKAGES.get(package, package), *rest])
    return f"{base}.py", f"{base}/__init__.py"


def _function(name: str) -> Function | None:
    import importlib

    module, _, attribute = name.rpartition(".")
    try:
        found: Function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError):
        return None
    return found


def _bare(text: str) -> str:
    """Return a module without comments, docstrings and formatting."""
    if text not in _BARE:
        tree = ast.parse(text)
        for node in ast.walk(tree):
            body: Any = getattr(node, "body", None)
            first = body[0] if isinstance(body, list) and body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                body.pop(0)
        _BARE[text] = ast.dump(tree)
    return _BARE[text]


_BARE: dict[str, str] = {}


def _texts(root: Path, commit: str, paths: Iterable[str]) -> dict[str, str]:
    """Return the texts of files at a commit; empty where a file did not exist."""
    asked = [path for path in paths if (commit, path) not in _FORMER]
    answer = _run(root, ["cat-file", "--batch"], "".join(f"{commit}:./{path}\n" for path in asked))
    for path in asked:
        head, _, answer = answer.partition(b"\n")
        size = int(head.rsplit(b" ", 1)[1]) if b" blob " in head else -1
        _FORMER[commit, path] = answer[: max(size, 0)].decode("utf-8", "replace")
        answer = answer[size + 1 :]
    return {path: _FORMER[commit, path] for path in paths}


_FORMER: dict[tuple[str, str], str] = {}


def _git(root: Path, *arguments: str) -> str:
    return _run(root, arguments).decode("utf-8", "replace").strip()


def _run(root: Path, arguments: Iterable[str], given: str = "") -> bytes:
    """Run git; the output is empty if it fails or is not installed."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments],
            input=given.encode(),
            capture_output=True,
            check=False,
        )
    except OSError:
        return b""
    return done.stdout if done.returncode == 0 else b""


def main(arguments: list[str]) -> int:
    """List the stale results of a folder; 1 if there are any and `--strict` is given."""
    from experiments import EXPERIMENTS

    strict = "--strict" in arguments
    folders = [Path(argument) for argument in arguments if argument != "--strict"]
    folder = folders[0] if folders else ROOT / "docs" / "results"
    stale = list(find_stale(folder, EXPERIMENTS))
    count = len(list(folder.glob("*.json")))
    head = f"{len(stale)} of {count} results are older than the code they depend on"
    print_result("\n".join([head, *(f"  {found}" for found in stale)]))
    return 1 if stale and strict else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
