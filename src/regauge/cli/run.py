"""What every command that measures says of its run, and how it ends."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from regauge.checkpoints.files import check_writable, write_bytes
from regauge.cli.console import info, print_result
from regauge.errors import RegaugeError, need

if TYPE_CHECKING:
    from regauge.results.findings import Results

EXIT_FAILED = 3  # the exit code where a law that should hold does not


def facts_of_run() -> dict[str, Any]:
    """The command and the versions: what is needed to repeat a run."""
    from regauge.checkpoints.environment import versions

    return {
        "command": shlex.join(["regauge", *sys.argv[1:]]),
        "versions": versions("sklearn", "numpy"),
    }


class DeviceError(RegaugeError):
    """A device that torch does not have here."""


def check_device(name: str) -> None:
    """Refuse a device on which nothing can be computed, before anything is loaded."""
    import torch

    try:
        torch.zeros(1, device=name).item()
    except (
        RuntimeError,
        AssertionError,
        NotImplementedError,
    ) as error:  # torch built without it, no such device, no such word
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DeviceError(
            f'nothing can be computed on the device "{name}": {first}',
            hint="cpu, or what torch.accelerator names here",
        ) from error


def set_threads(count: int | None) -> None:
    """Compute with this many threads, if it is said how many."""
    if count is not None:
        import torch

        torch.set_num_threads(count)


def find_enclosing(file: Path, *places: Path) -> Path | None:
    """The first of some models or outputs that a file lies in, or in whose way it is; None if it is
    apart from all.
    """
    here = file.resolve()
    for place in places:
        whole = place.resolve()
        taken = (
            whole,
            whole.with_name(f"{whole.stem}.config.json"),
            whole.with_name(f".{whole.name}.partial"),
        )
        if any(here.is_relative_to(p) for p in taken):
            return place
    return None


def parse_counts(text: str, name: str, like: str) -> list[int]:
    """Whole numbers from 1, with commas between them: each once, in order. `like` is an example.
    There may be none.
    """
    parts = [p.strip() for p in text.split(",") if p.strip()]
    if not all(p.isdecimal() and int(p) > 0 for p in parts):
        raise typer.BadParameter(
            f"{text!r} are no whole numbers from 1, as in {like}", param_hint=name
        )
    return sorted({int(p) for p in parts})


def check_outputs(json: Path | None, report: Path | None) -> None:
    """Refuse what could not be written, before the work that it is for."""
    if report is not None:
        need("jinja2", "report")
        need("matplotlib", "report")
        if str(report) == "-" or (json is not None and json.absolute() == report.absolute()):
            raise typer.BadParameter("a page needs a file of its own")
    for out in (json, report):
        if out is not None and str(out) != "-":
            check_writable(out)


def deliver(
    results: Results,
    text: str,
    json: Path | None,
    report: Path | None,
    shown: Results | None = None,
) -> int:
    """Say the text, or the JSON in its place, write what was asked for, and return the exit code.
    `shown` is for a page that has more in it.
    """
    from regauge.results.findings import to_json

    print_result(to_json(results) if str(json) == "-" else text)
    if json is not None and str(json) != "-":
        write_bytes(json, to_json(results).encode())
        info(f"results: {json}")
    if report is not None:
        from regauge.results.report import page

        write_bytes(report, page(shown or results).encode())
        info(f"report: {report}")
    return EXIT_FAILED if results.failed else 0
