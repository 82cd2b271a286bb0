"""The installation: versions, devices, and libraries that are missing, too old or vulnerable."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from regauge.checkpoints.environment import default_cache
from regauge.results.advisories import (
    VulnerableLibrary,
    find_vulnerable,
    installed_version,
    normalize_name,
    satisfies,
)
from regauge.results.findings import Claim, Finding, Results, Table
from regauge.results.views import ResultView

VERSION = 1
_PURPOSES = {
    "models": "transformers checkpoints as live models: verify, merge by data, split, jigsaw",
    "hub": "models and data by hub id (owner/name)",
    "timm": "timm checkpoints as live models",
    "report": "pages: --report, regauge report",
    "data": "--data from images and parquet",
    "transport": "merging by optimal transport: ot_wts, ot_acts",
    "split": "regauge split over a network",
    "audit": "regauge audit split: image metrics",
    "federated": "regauge federate on Flower: --engine simulation, deployment",
    "privacy": "privacy accounting (epsilon) of noise",
    "studies": "regauge jigsaw study",
    "experiments": "regauge demo, and python -m experiments in a clone",
    "dev": "tests and checks of regauge itself",
}
_INSTALL_NOTES = {  # side effects of an installation
    "timm": "add 'torch==VERSION' of the installed torch, or pip upgrades it for torchvision",
    "federated": "use a separate environment: Flower requires older versions of typer, rich and "
    "packaging",
}


@dataclass(frozen=True)
class Library:
    """A library that regauge requires: the versions in pyproject.toml, and the installed one."""

    name: str
    wanted: str
    found: str | None
    loads: str = ""  # why it does not load; empty if it does or was not tried

    @property
    def state(self) -> str:
        """ok, missing, too old, too new, or does not load."""
        if self.found is None:
            return "missing"
        if not satisfies(self.found, self.wanted):
            return (
                "too old"
                if ">=" in self.wanted and not satisfies(self.found, _lower_bound(self.wanted))
                else "too new"
            )
        return "does not load" if self.loads else "ok"


@dataclass(frozen=True, eq=False, repr=False)
class Installation(ResultView):
    """What is installed, and whether regauge works with it.

    Attributes:
        facts: Versions, devices, libraries by extra, the cache folder and environment variables.
    """

    facts: Mapping[str, Any]

    @property
    def healthy(self) -> bool:
        """Whether every required library works, and none has a known vulnerability."""
        return bool(self.facts["healthy"])

    @property
    def results(self) -> Results:
        """One finding, and a table of the extras."""
        rows = [
            (extra["name"], extra["complete"], extra["brings"], extra["get"])
            for extra in self.facts["extras"]
        ]
        table = Table("Extras", ("extra", "complete", "provides", "install"), tuple(rows))
        statement = "every required library is installed, works and is safe"
        finding = Finding("installation", statement, self.healthy, sentence=_conclude(self.facts))
        text = "Every required library is installed and works"
        if not self.healthy:
            text = "regauge will not work: a required library is missing, broken or unsafe"
        claim = Claim(text, "good" if self.healthy else "bad")
        facts = dict(self.facts)
        return Results(
            "The installation of regauge", (finding,), (table,), facts=facts, claim=claim
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the facts, as `regauge doctor --json` prints them."""
        return dict(self.facts)

    def to_json(self) -> str:
        """Return the facts as JSON."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False)

    def __str__(self) -> str:
        return _format(self.facts)


def check_installation(*, load: bool = False) -> Installation:
    """Check what is installed. Works without torch, and with a torch that does not load.

    Args:
        load: Also import every installed library, which may take a minute.

    Returns:
        The installation: `healthy`, and as text, JSON or a page.

    Example:
        >>> check_installation().facts["torch"]["version"] > "2"
        True
    """
    from regauge import __version__

    needs = {
        extra: [_check_library(*pair, load) for pair in pairs]
        for extra, pairs in requirements().items()
    }
    required = needs.pop("", [])
    extras = [
        {
            "name": extra,
            "brings": _PURPOSES.get(extra, ""),
            "complete": all(library.state == "ok" for library in libraries),
            "libraries": [_to_dict(library) for library in libraries],
            "get": f"pip install 'regauge[{extra}]'",
            "mind": _INSTALL_NOTES.get(extra, ""),
        }
        for extra, libraries in needs.items()
    ]
    torch, works = _check_torch()
    unsafe = find_vulnerable()
    cache = default_cache()
    facts = {
        "version": VERSION,
        "regauge": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "executable": sys.executable,
        "torch": torch,
        "libraries": [_to_dict(library) for library in required],
        "extras": extras,
        "vulnerable": [asdict(library) for library in unsafe],
        "cache": {
            "path": str(cache),
            "writable": _is_writable(cache),
            "free_bytes": shutil.disk_usage(_nearest_existing(cache)).free,
        },
        "environment": {
            name: os.environ[name]
            for name in ("REGAUGE_ASSETS", "REGAUGE_CACHE", "REGAUGE_DEBUG", "NO_COLOR")
            if name in os.environ
        },
        "healthy": works and not unsafe and all(library.state == "ok" for library in required),
    }
    return Installation(facts)


def requirements() -> dict[str, list[tuple[str, str]]]:
    """Return (library, versions) by extra from the metadata of the installed package, "" for
    required ones. Extras of extras are expanded.
    """
    try:
        lines = metadata.requires("regauge") or []
    except metadata.PackageNotFoundError:  # not installed
        return {}
    direct: dict[str, list[tuple[str, str]]] = {}
    nested: dict[str, list[str]] = {}
    for line in lines:
        requirement, _, marker = line.partition(";")
        match = re.search(r"""extra\s*==\s*['"]([\w-]+)['"]""", marker)
        extra = match.group(1) if match else ""
        parsed = re.fullmatch(
            r"\s*([\w.-]+)\s*(?:\[([\w,\s-]+)\])?\s*\(?([^()]*?)\)?\s*", requirement
        )
        assert parsed is not None, line
        name, extras, versions = parsed.groups()
        if name == "regauge":
            nested.setdefault(extra, []).extend(o.strip() for o in extras.split(","))
        else:
            direct.setdefault(extra, []).append((name, versions.replace(" ", "")))
    return {
        extra: sorted(set(_expand_extra(extra, direct, nested)), key=lambda p: p[0].lower())
        for extra in dict.fromkeys([*direct, *nested])
    }


def _expand_extra(
    extra: str, direct: dict[str, list[tuple[str, str]]], nested: dict[str, list[str]]
) -> list[tuple[str, str]]:
    """Return the requirements of an extra and of the extras it includes."""
    return [
        *direct.get(extra, []),
        *(
            pair
            for included in nested.get(extra, [])
            for pair in _expand_extra(included, direct, nested)
        ),
    ]


def _lower_bound(wanted: str) -> str:
    """Return the lower bounds of a version specifier."""
    return ",".join(c for c in wanted.split(",") if c.startswith(">="))


def _check_library(name: str, wanted: str, load: bool) -> Library:
    """Look up a library, and import it on demand."""
    version = installed_version(name)
    return Library(
        name, wanted, version, _import_error(name) if load and version is not None else ""
    )


def _import_error(name: str) -> str:
    """Return why the modules of a distribution cannot be imported, or "" if they can."""
    from importlib import import_module

    distributions = metadata.packages_distributions().items()
    for module in (
        m
        for m, names in distributions
        if normalize_name(name) in map(normalize_name, names)
        and m.isidentifier()
        and not m.startswith("_")
    ):
        try:
            import_module(module)
        except Exception as error:  # a broken build may raise anything
            return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


def _to_dict(library: Library) -> dict[str, Any]:
    """Return a library as a dict for JSON."""
    return {**asdict(library), "state": library.state}


def _check_torch() -> tuple[dict[str, Any], bool]:
    """Return torch's version and devices, and whether it computes."""
    try:
        import torch

        works = bool(
            (torch.ones(2, 2, dtype=torch.float64) @ torch.ones(2, dtype=torch.float64)).sum() == 4
        )
    except Exception as error:  # a broken build may raise anything
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}, False
    devices = [
        {
            "name": "cpu",
            "what": f"{os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads",
        }
    ]
    devices += [
        {"name": f"cuda:{i}", "what": torch.cuda.get_device_name(i)}
        for i in range(torch.cuda.device_count())
    ]
    if torch.backends.mps.is_available():
        devices.append({"name": "mps", "what": "Apple GPU, without float64"})
    return {"version": torch.__version__, "devices": devices}, works


def _nearest_existing(path: Path) -> Path:
    """Return a path or its nearest existing parent."""
    return next(p for p in (path, *path.absolute().parents) if p.exists())


def _is_writable(path: Path) -> bool:
    return os.access(_nearest_existing(path), os.W_OK)


def _format(facts: Mapping[str, Any]) -> str:
    """Format the facts for a terminal."""
    from regauge.checkpoints.files import format_bytes
    from regauge.models.summary import format_columns

    lines = [f"regauge {facts['regauge']}, python {facts['python']}, {facts['platform']}"]
    torch = facts["torch"]
    lines.append(
        f"torch does not work: {torch['error']}"
        if "error" in torch
        else f"torch {torch['version']}"
    )
    rows = [("device", d["name"], d["what"]) for d in torch.get("devices", [])]
    rows += [
        (
            "cache",
            facts["cache"]["path"],
            f"{format_bytes(facts['cache']['free_bytes'])} free"
            + ("" if facts["cache"]["writable"] else "; NOT writable"),
        )
    ]
    rows += [("variable", name, value) for name, value in facts["environment"].items()]
    lines += [format_columns(rows), ""]
    faulty = [entry for entry in facts["libraries"] if entry["state"] != "ok"]
    required = ", ".join(
        f"{entry['name']} {entry['found']}"
        for entry in facts["libraries"]
        if entry["state"] == "ok"
    )
    lines.append(f"required: {required or 'unknown, since regauge is not installed'}")
    lines += [f"  {_describe_fault(entry)}; pip install --upgrade regauge" for entry in faulty]
    lines += [str(VulnerableLibrary(**entry)) for entry in facts["vulnerable"]]
    table = [("", "extra", "provides", "missing")]
    for extra in facts["extras"]:
        missing = ", ".join(
            _describe_fault(entry) for entry in extra["libraries"] if entry["state"] != "ok"
        )
        table.append(
            ("yes" if extra["complete"] else "no", extra["name"], extra["brings"], missing)
        )
    lines += ["", format_columns(table)]
    for extra in facts["extras"]:
        if not extra["complete"]:
            lines.append(
                f"to install {extra['name']}: {extra['get']}"
                + (f"  # {extra['mind']}" if extra["mind"] else "")
            )
    return "\n".join([*lines, "", _conclude(facts)])


def _conclude(facts: Mapping[str, Any]) -> str:
    return (
        "all required libraries are installed"
        if facts["healthy"]
        else "regauge will NOT work: see above"
    )


def _describe_fault(entry: dict[str, Any]) -> str:
    """Describe what is wrong with a library."""
    if entry["state"] == "missing":
        return f"{entry['name']}{entry['wanted']}"
    if entry["state"] == "does not load":
        return f"{entry['name']} {entry['found']} does not load ({entry['loads']})"
    return f"{entry['name']} {entry['found']} is {entry['state']} ({entry['wanted']})"
