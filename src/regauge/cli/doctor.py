"""`regauge doctor`: what this installation has, what it lacks, and how to get it."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Annotated, Any

import typer

from regauge.cli import options
from regauge.cli.advisories import (
    VulnerableLibrary,
    find_vulnerable,
    installed_version,
    normalize_name,
    satisfies,
)
from regauge.cli.console import print_json, print_result

VERSION = 1
_PURPOSES = {
    "models": "checkpoints of the transformers library as live models: verify, merge by data, "
    "split, jigsaw",
    "hub": "models and data by hub id (owner/name)",
    "timm": "timm's checkpoints as live models",
    "report": "pages: --report, regauge report",
    "data": "--data from images and parquet",
    "transport": "merging by optimal transport: ot_wts, ot_acts",
    "split": "regauge split over a network",
    "audit": "regauge audit split: image metrics",
    "federated": "regauge federate on Flower: --engine simulation, deployment",
    "privacy": "the privacy accountant of noise with an epsilon",
    "studies": "regauge jigsaw study",
    "experiments": "regauge demo, and python -m experiments in a clone",
    "dev": "the tests and checks of regauge itself",
}
_INSTALL_NOTES = {  # what an installation changes beside what it brings
    "timm": "with 'torch==VERSION' of the torch that is here: pip would take a newer one, for "
    "its torchvision",
    "federated": "in an environment of its own: Flower wants older versions of typer, rich and "
    "packaging",
}


@dataclass(frozen=True)
class Library:
    """A library that regauge asks for: where it stands in pyproject.toml, and what is here."""

    name: str
    wanted: str
    found: str | None
    loads: str = ""  # empty: it was not tried or it loads; otherwise why not

    @property
    def state(self) -> str:
        if self.found is None:
            return "missing"
        if not satisfies(self.found, self.wanted):
            return (
                "too old"
                if ">=" in self.wanted and not satisfies(self.found, _lower_bound(self.wanted))
                else "too new"
            )
        return "does not load" if self.loads else "ok"


def doctor(
    load: Annotated[
        bool,
        typer.Option(
            "--load", help="Also import every library that is here, which may take a minute."
        ),
    ] = False,
    json: options.Json = False,
    verbose: options.Verbose = 0,
) -> int:
    """Show versions, devices, and which extras are here or missing, with the way to get each. Exit
    code 1 if something that regauge always needs is missing, too old or does not load, or if an
    installed library has a known vulnerability.
    """
    found = collect_facts(load)
    if json:
        print_json(found)
    else:
        print_result(text_of(found))
    return 0 if found["healthy"] else 1


def collect_facts(load: bool = False) -> dict[str, Any]:
    """All that doctor tells."""
    from regauge import __version__
    from regauge.checkpoints.environment import default_cache

    needs = {
        extra: [_check_library(*pair, load) for pair in pairs]
        for extra, pairs in requirements().items()
    }
    always = needs.pop("", [])
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
    return {
        "version": VERSION,
        "regauge": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "executable": sys.executable,
        "torch": torch,
        "libraries": [_to_dict(library) for library in always],
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
        "healthy": works and not unsafe and all(library.state == "ok" for library in always),
    }


def requirements() -> dict[str, list[tuple[str, str]]]:
    """(library, versions) by extra, "" for what is always needed, as the installed package says it.
    Extras of extras are spelled out.
    """
    try:
        lines = metadata.requires("regauge") or []
    except metadata.PackageNotFoundError:  # run from its sources
        return {}
    found: dict[str, list[tuple[str, str]]] = {}
    inside: dict[str, list[str]] = {}
    for line in lines:
        what, _, marker = line.partition(";")
        named = re.search(r"""extra\s*==\s*['"]([\w-]+)['"]""", marker)
        extra = named.group(1) if named else ""
        parsed = re.fullmatch(r"\s*([\w.-]+)\s*(?:\[([\w,\s-]+)\])?\s*\(?([^()]*?)\)?\s*", what)
        assert parsed is not None, line
        name, others, versions = parsed.groups()
        if name == "regauge":
            inside.setdefault(extra, []).extend(o.strip() for o in others.split(","))
        else:
            found.setdefault(extra, []).append((name, versions.replace(" ", "")))
    return {
        extra: sorted(set(_expand_extra(extra, found, inside)), key=lambda p: p[0].lower())
        for extra in dict.fromkeys([*found, *inside])
    }


def _expand_extra(
    extra: str, found: dict[str, list[tuple[str, str]]], inside: dict[str, list[str]]
) -> list[tuple[str, str]]:
    return [
        *found.get(extra, []),
        *(pair for other in inside.get(extra, []) for pair in _expand_extra(other, found, inside)),
    ]


def _lower_bound(wanted: str) -> str:
    return ",".join(c for c in wanted.split(",") if c.startswith(">="))


def _check_library(name: str, wanted: str, load: bool) -> Library:
    version = installed_version(name)
    return Library(
        name, wanted, version, _import_error(name) if load and version is not None else ""
    )


def _import_error(name: str) -> str:
    """Why the modules of a distribution cannot be imported; empty if they can."""
    from importlib import import_module

    brings = metadata.packages_distributions().items()
    for module in (
        m
        for m, names in brings
        if normalize_name(name) in map(normalize_name, names)
        and m.isidentifier()
        and not m.startswith("_")
    ):
        try:
            import_module(module)
        except Exception as error:  # whatever a broken build raises
            return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


def _to_dict(library: Library) -> dict[str, Any]:
    return {**asdict(library), "state": library.state}


def _check_torch() -> tuple[dict[str, Any], bool]:
    """torch's version and devices, and whether it computes."""
    try:
        import torch

        works = bool(
            (torch.ones(2, 2, dtype=torch.float64) @ torch.ones(2, dtype=torch.float64)).sum() == 4
        )
    except Exception as error:  # whatever a broken build raises
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
        devices.append({"name": "mps", "what": "Apple's GPU; without float64"})
    return {"version": torch.__version__, "devices": devices}, works


def _nearest_existing(path: Any) -> Any:
    return next(p for p in (path, *path.absolute().parents) if p.exists())


def _is_writable(path: Any) -> bool:
    return os.access(_nearest_existing(path), os.W_OK)


def text_of(found: dict[str, Any]) -> str:
    """Facts as a terminal shows them."""
    from regauge.checkpoints.files import format_bytes
    from regauge.models.summary import format_columns

    lines = [f"regauge {found['regauge']}, python {found['python']}, {found['platform']}"]
    torch = found["torch"]
    lines.append(
        f"torch does not work: {torch['error']}"
        if "error" in torch
        else f"torch {torch['version']}"
    )
    rows = [("device", d["name"], d["what"]) for d in torch.get("devices", [])]
    rows += [
        (
            "cache",
            found["cache"]["path"],
            f"{format_bytes(found['cache']['free_bytes'])} free"
            + ("" if found["cache"]["writable"] else "; NOT writable"),
        )
    ]
    rows += [("variable", name, value) for name, value in found["environment"].items()]
    lines += [format_columns(rows), ""]
    bad = [entry for entry in found["libraries"] if entry["state"] != "ok"]
    always = ", ".join(
        f"{entry['name']} {entry['found']}"
        for entry in found["libraries"]
        if entry["state"] == "ok"
    )
    lines.append(f"always needed: {always or 'not known, since regauge runs from its sources'}")
    lines += [f"  {_describe_fault(entry)}; pip install --upgrade regauge" for entry in bad]
    lines += [str(VulnerableLibrary(**entry)) for entry in found["vulnerable"]]
    table = [("", "extra", "brings", "lacks")]
    for extra in found["extras"]:
        lacks = ", ".join(
            _describe_fault(entry) for entry in extra["libraries"] if entry["state"] != "ok"
        )
        table.append(("yes" if extra["complete"] else "no", extra["name"], extra["brings"], lacks))
    lines += ["", format_columns(table)]
    for extra in found["extras"]:
        if not extra["complete"]:
            lines.append(
                f"to get {extra['name']}: {extra['get']}"
                + (f"  # {extra['mind']}" if extra["mind"] else "")
            )
    return "\n".join(
        [
            *lines,
            "",
            "all that regauge always needs is here"
            if found["healthy"]
            else "regauge will NOT work like this",
        ]
    )


def _describe_fault(entry: dict[str, Any]) -> str:
    if entry["state"] == "missing":
        return f"{entry['name']}{entry['wanted']}"
    if entry["state"] == "does not load":
        return f"{entry['name']} {entry['found']} does not load ({entry['loads']})"
    return f"{entry['name']} {entry['found']} is {entry['state']} ({entry['wanted']})"
