"""What is built and installed: extras that are named where they are needed, wheel and sdist, and
the wheel in an environment of its own.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest

from regauge.errors import MissingExtraError, need
from regauge.results.advisories import ADVISORIES, Advisory, find_vulnerable

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src" / "regauge"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DISTRIBUTIONS = {
    "PIL": "pillow",
    "sklearn": "scikit-learn",
    "ot": "pot",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "prometheus_client": "prometheus-client",
    "umap": "umap-learn",
    "yaml": "pyyaml",
}


def name_of(requirement: str) -> str:
    match = re.match(r"[\w.-]+", requirement)
    assert match is not None
    return re.sub(r"[-_.]+", "-", match.group()).lower()


def libraries(extra: str) -> set[str]:
    """The distributions of an extra, those of extras inside it too."""
    names: set[str] = set()
    for line in PROJECT["optional-dependencies"][extra]:
        inside = re.fullmatch(r"regauge\[([\w,]+)\]", line)
        names |= (
            set().union(*(libraries(e) for e in inside.group(1).split(",")))
            if inside
            else {name_of(line)}
        )
    return names


ALWAYS = {name_of(line) for line in PROJECT["dependencies"]}


def distribution(module: str) -> str:
    return name_of(DISTRIBUTIONS.get(module, module))


@cache
def trees() -> dict[Path, ast.Module]:
    """The syntax tree of every source file."""
    return {path: ast.parse(path.read_text()) for path in sorted(SOURCES.rglob("*.py"))}


def needs() -> Iterator[tuple[str, str, str]]:
    """Every need(module, extra) in the sources, with loops over literals opened: (where, module,
    extra).
    """
    for path, tree in trees().items():
        nodes = list(ast.walk(tree)) if "need(" in path.read_text() else []
        loops = [node for node in nodes if isinstance(node, ast.For)]
        for node in nodes:
            if not (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id == "need"
            ):
                continue
            where = f"{path.relative_to(SOURCES)}:{node.lineno}"
            arguments = [ast.unparse(a) for a in node.args]
            scopes: list[dict[str, str]] = [{}]
            for loop in loops:
                if any(below is node for below in ast.walk(loop)):
                    names = [
                        ast.unparse(n)
                        for n in (
                            loop.target.elts
                            if isinstance(loop.target, ast.Tuple)
                            else [loop.target]
                        )
                    ]
                    rows = [
                        row if isinstance(row, tuple) else (row,)
                        for row in ast.literal_eval(loop.iter)
                    ]
                    scopes = [dict(zip(names, map(repr, row), strict=True)) for row in rows]
            for scope in scopes:
                module, extra = (ast.literal_eval(scope.get(a, a)) for a in arguments)
                yield where, module, extra


def test_every_need_names_an_extra_that_brings_it() -> None:
    found = list(needs())
    assert len(found) > 20
    for where, module, extra in found:
        assert extra in PROJECT["optional-dependencies"], f"{where}: {extra} is not an extra"
        assert distribution(module) in libraries(extra), (
            f"{where}: the extra {extra} does not bring {module}"
        )


@pytest.mark.parametrize("advisory", ADVISORIES, ids=lambda a: a.library)
def test_no_vulnerable_version_is_admitted(advisory: Advisory) -> None:
    """The oldest version that pyproject.toml admits has what an advisory says is fixed, and so has
    the pin.
    """
    lines = [
        *PROJECT["dependencies"],
        *(line for extra in PROJECT["optional-dependencies"].values() for line in extra),
    ]
    floors = {
        re.search(r">=([\w.]+)", line).group(1)
        for line in lines
        if name_of(line) == advisory.library
    }  # type: ignore[union-attr]
    assert floors
    assert not find_vulnerable([(advisory.library, floor) for floor in floors])
    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().lower().splitlines()
        if "==" in line
    )
    assert not find_vulnerable([(advisory.library, pins[advisory.library])])
    assert [v.library for v in find_vulnerable([(advisory.library.upper(), "0.9")])] == [
        advisory.library
    ]


def test_the_audit_of_installed_libraries(tmp_path: Path) -> None:
    def audited(*folders: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, ROOT / "scripts" / "audit_deps.py", *folders]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        return subprocess.run(
            list(map(str, command)), capture_output=True, text=True, env=environment, check=False
        )

    for name, version in (("Torch", "2.9.1"), ("jinja2", "3.1.6")):
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
    bad = audited(tmp_path)
    assert bad.returncode == 1
    assert "torch 2.9.1 is unsafe (CVE-2025-32434, CVE-2026-24747)" in bad.stdout
    assert "2 distributions checked against" in bad.stdout
    (tmp_path / "Torch-2.9.1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: Torch\nVersion: 2.13.0\n"
    )
    assert audited(tmp_path).returncode == 0
    (tmp_path / "empty").mkdir()
    assert audited(tmp_path / "empty").returncode == 1, "nothing checked is not a pass"
    assert audited(tmp_path / "absent").returncode == 2


def test_what_is_optional_is_imported_only_where_it_is_used() -> None:
    """No module of regauge imports an optional library when it is imported itself; but for
    Flower's, whose apps are classes of it: that one is imported by its engines alone.
    """
    optional = {
        d for extra in PROJECT["optional-dependencies"] if extra != "dev" for d in libraries(extra)
    } - ALWAYS
    assert "transformers" in optional
    for path, tree in trees().items():
        for node in () if path.name.startswith("flower") else tree.body:
            names = (
                [a.name for a in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            for name in names:
                assert distribution(name.split(".")[0]) not in optional, (
                    f"{path}:{node.lineno} imports {name}"
                )


def test_extras_are_minimal() -> None:
    """Each library of an extra is asked for somewhere, by need() or by an import in a function."""
    used = {module.split(".")[0] for _, module, _ in needs()}
    for tree in trees().values():
        for node in ast.walk(tree):
            names = (
                [a.name for a in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            used |= {name.split(".")[0] for name in names}
    brought = {
        d for extra in PROJECT["optional-dependencies"] if extra != "dev" for d in libraries(extra)
    }
    assert brought - {distribution(m) for m in used} == set()


def test_the_error_names_the_extra_and_the_command() -> None:
    need("json", "split")  # an installed module raises nothing
    with pytest.raises(
        MissingExtraError,
        match='no_such_module is required but not installed: it is in the extra "split"',
    ) as raised:
        need("no_such_module", "split")
    assert raised.value.hint == "pip install 'regauge[split]'"


def test_the_range_of_transformers_is_the_one_that_is_tested() -> None:
    """`make compat` runs the families at both ends of what pyproject.toml allows."""
    (wanted,) = PROJECT["optional-dependencies"]["models"]
    makefile = (ROOT / "Makefile").read_text()
    oldest, newest = (
        re.search(rf"^{name} := ([\d.]+)$", makefile, re.M).group(1)
        for name in ("OLDEST", "NEWEST")
    )  # type: ignore[union-attr]
    (bounds,) = re.findall(r"^transformers>=([\d.]+),<([\d.]+)$", wanted)
    least, below = bounds
    pinned = re.search(
        r"^transformers==([\d.]+)$", (ROOT / "constraints.txt").read_text(), re.M
    ).group(1)  # type: ignore[union-attr]

    def key(version: str) -> tuple[int, ...]:
        return tuple(map(int, [*version.split("."), "0", "0"][:3]))

    assert key(oldest) == key(least)
    assert key(pinned) <= key(newest) < key(below)


@pytest.mark.parametrize("target", ["real", "compat"])
def test_targets_of_hours_leave_no_test_out(target: str) -> None:
    """pytest deselects what is `slow` unless a command has markers of its own."""
    makefile = (ROOT / "Makefile").read_text()
    (recipe,) = re.findall(rf"^{target}:.*\n((?:\t.*\n)+)", makefile, re.M)
    runs = re.findall(r"-m pytest (.*)", recipe)
    assert runs
    assert all(run.startswith(("-m '' ", "-m slow ")) for run in runs), runs


def needed_extras(names: set[str]) -> set[str]:
    """Distributions with all that they need in turn, as they are installed here."""
    packages: set[str] = set()
    todo = list(names)
    while todo:
        name = todo.pop()
        if name in packages:
            continue
        try:
            lines = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # for another system
            continue
        packages.add(name)
        todo += [name_of(line) for line in lines if "extra ==" not in line]
    return packages


@pytest.fixture(scope="module")
def build_wheel(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(wheel, sdist), made of the files that are committed or about to be."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    code = (
        "import sys; out = sys.argv[1]; from setuptools import build_meta as b; "
        "b.build_sdist(out); b.build_wheel(out)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(out)], cwd=source, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return next(out.glob("*.whl")), next(out.glob("*.tar.gz"))


@pytest.mark.slow
def test_wheel_and_sdist(build_wheel: tuple[Path, Path]) -> None:
    wheel, sdist = build_wheel
    from regauge import __version__

    assert wheel.name == f"regauge-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    inside = {
        str(p.relative_to(SOURCES.parent))
        for p in SOURCES.rglob("*")
        if p.is_file() and "__pycache__" not in p.parts
    }
    assert inside <= names
    assert {n.split("/")[0] for n in names} == {"regauge", f"regauge-{__version__}.dist-info"}
    assert any(n.endswith("licenses/LICENSE") for n in names)
    with tarfile.open(sdist) as archive:
        packed = {n.partition("/")[2] for n in archive.getnames()}
    assert {f"src/{n}" for n in inside} <= packed
    assert {"README.md", "LICENSE", "pyproject.toml"} <= packed


@pytest.fixture(scope="module")
def clean(build_wheel: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel and what it always needs, and nothing else: its libraries are
    linked from here, so that nothing is fetched.
    """
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    process = subprocess.run(
        [str(python), "-c", "import site; print(site.getsitepackages()[0])"],
        capture_output=True,
        text=True,
        check=True,
    )
    site = Path(process.stdout.strip())
    for name in needed_extras(ALWAYS):
        for file in metadata.files(name) or []:
            top = file.parts[0]
            real = Path(str(metadata.distribution(name).locate_file(top)))
            if top not in ("..", "__pycache__") and real.exists() and not (site / top).exists():
                (site / top).symlink_to(real.resolve())
    command = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        f"--python={python}",
        "install",
        "-q",
        "--no-deps",
        "--no-index",
    ]
    subprocess.run([*command, str(build_wheel[0])], check=True)
    return folder


def in_clean(clean: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": str(clean / "bin"), "HOME": str(clean), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        list(map(str, arguments)),
        capture_output=True,
        text=True,
        cwd=clean,
        env=environment,
        timeout=300,
        check=False,
    )


@pytest.mark.slow
def test_the_wheel_in_a_clean_environment(clean: Path, tmp_path: Path) -> None:
    """The smoke test of a release, with no optional library at all."""
    from regauge.demo.move import LLAMA, make_checkpoint

    model, regauge = make_checkpoint(tmp_path / "llama", LLAMA, 0), clean / "bin" / "regauge"
    where = in_clean(
        clean, clean / "bin" / "python", "-c", "import regauge; print(regauge.__file__)"
    )
    assert where.stdout.startswith(str(clean)), where
    health = in_clean(clean, regauge, "doctor", "--json")
    assert health.returncode == 0, health.stdout + health.stderr
    report = json.loads(health.stdout)
    assert {extra["name"]: extra["complete"] for extra in report["extras"]}["models"] is False
    for line in (
        f"inspect {model}",
        f"move {model} --random -o {tmp_path}/moved --save-element {tmp_path}/g",
        f"move {tmp_path}/moved -g {tmp_path}/g --invert -o {tmp_path}/back",
        f"compare {model} {tmp_path}/moved",
        f"match {tmp_path}/moved {model} -o {tmp_path}/near",
        f"merge {model} {tmp_path}/near -o {tmp_path}/merged",
        f"keygen -o {tmp_path}/key",
        f"lock {model} -k {tmp_path}/key -o {tmp_path}/locked",
        f"unlock {tmp_path}/locked -k {tmp_path}/key -o {tmp_path}/unlocked",
        f"keygen --purpose seal -o {tmp_path}/sealkey",
        f"seal {model} -k {tmp_path}/sealkey -o {tmp_path}/sealed",
        f"open {tmp_path}/sealed -k {tmp_path}/sealkey -o {tmp_path}/opened",
        f"fingerprint {tmp_path}/locked",
    ):
        done = in_clean(clean, regauge, *line.split())
        assert done.returncode == 0, f"{line}: {done.stderr}"
    weights = (model / "model.safetensors").read_bytes()
    for name in ("back", "unlocked", "opened"):
        assert (tmp_path / name / "model.safetensors").read_bytes() == weights


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "extra"),
    [
        ("verify MODEL", "models"),
        ("verify MODEL --report page.html", "report"),
        ("demo", "experiments"),
        ("split serve MODEL", "split"),
        ("jigsaw train MODEL --data IMAGES -o OUT", "models"),
    ],
)
def test_what_is_missing_is_named(clean: Path, tmp_path: Path, line: str, extra: str) -> None:
    from regauge.demo.move import LLAMA, make_checkpoint

    make_checkpoint(tmp_path / "MODEL", LLAMA, 0)
    done = in_clean(
        clean,
        clean / "bin" / "regauge",
        *(str(tmp_path / w) if w.isupper() else w for w in line.split()),
    )
    assert done.returncode == 1, done
    assert f"regauge: hint: pip install 'regauge[{extra}]'\n" in done.stderr


@pytest.mark.slow
def test_every_module_can_be_imported_with_what_is_always_there(clean: Path) -> None:
    """But for the two that are about Flower and nothing else."""
    code = (
        "import importlib, pkgutil, regauge\n"
        "for m in pkgutil.walk_packages(regauge.__path__, 'regauge.'):\n"
        "    if not m.name.endswith('__main__'):\n"
        "        try:\n            importlib.import_module(m.name)\n"
        "        except Exception as error:\n            print(m.name, 'flwr' in str(error))\n"
    )
    done = in_clean(clean, clean / "bin" / "python", "-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "regauge.federated.flower True",
        "regauge.federated.flower_secure True",
    ]
