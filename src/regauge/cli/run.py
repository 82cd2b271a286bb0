"""Start and end of commands that measure: facts of the run, checks of options, outputs,
exit code.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from regauge.checkpoints.files import check_writable, write_bytes
from regauge.cli.console import info, print_result
from regauge.core.options import require_device
from regauge.errors import StoppedError, need

if TYPE_CHECKING:
    from regauge.models.discovery import Discovery
    from regauge.results.findings import Results

EXIT_FAILED = 3  # exit code if a symmetry that should hold does not


def facts_of_run() -> dict[str, Any]:
    """Return the command and the versions, to repeat the run."""
    from regauge.checkpoints.environment import versions

    return {
        "command": shlex.join(["regauge", *sys.argv[1:]]),
        "versions": versions("sklearn", "numpy"),
    }


def start_run(
    json: Path | None = None,
    report: Path | None = None,
    *,
    threads: int | None = None,
    device: str | None = None,
) -> None:
    """Check outputs and device before the work starts, and set the number of threads."""
    if report is not None:
        need("jinja2", "report")
        need("matplotlib", "report")
        if str(report) == "-" or (json is not None and json.absolute() == report.absolute()):
            raise typer.BadParameter("--report must be a file other than stdout and --json")
    for out in (json, report):
        if out is not None and str(out) != "-":
            check_writable(out)
    if device is not None:
        require_device(device)
    if threads is not None:
        import torch

        from regauge.core.threads import set_threads

        set_threads(threads)
        torch.set_num_threads(threads)


def report_discoveries(discoveries: Iterable[Discovery]) -> None:
    """Report the models whose symmetry was inferred."""
    from regauge.models.sources import describe_discovery

    for discovery in discoveries:
        info(*describe_discovery(discovery))


@contextmanager
def report_saved(describe: Callable[[], str], hint: str) -> Iterator[None]:
    """Report on an interrupt what is saved, and how to continue.

    Args:
        describe: Return what is saved; empty for nothing.
        hint: How to continue.
    """
    try:
        yield
    except KeyboardInterrupt as stop:
        saved = describe()
        if not saved:
            raise
        raise StoppedError(f"interrupted; {saved}", hint=hint) from stop


def saved_rounds(folder: Path, rounds: int) -> AbstractContextManager[None]:
    """Report on an interrupt how many rounds of a federated run are saved in its folder."""
    history = folder / "history.jsonl"

    def describe() -> str:
        count = len(history.read_bytes().splitlines()) if history.is_file() else 0
        verb = "is" if count == 1 else "are"
        return f"{count} of {rounds} rounds {verb} saved in {folder}" if count else ""

    return report_saved(describe, "to continue, repeat the same command")


def deliver(
    results: Results,
    text: str,
    json: Path | None,
    report: Path | None,
    page_results: Results | None = None,
    *,
    must_decide: bool = False,
) -> int:
    """Print the text (or the JSON in its place), write the outputs, and return the exit code.

    Args:
        results: the results.
        text: the results as text.
        json: where to write them as JSON; - prints them instead of the text.
        report: where to write the page.
        page_results: the results of the page, if it contains more.
        must_decide: whether an inconclusive finding fails.
    """
    from regauge.results.findings import to_json

    print_result(to_json(results) if str(json) == "-" else text)
    if json is not None and str(json) != "-":
        write_bytes(json, to_json(results).encode())
        info(f"results: {json}")
    if report is not None:
        from regauge.results.report import page

        write_bytes(report, page(page_results or results).encode())
        info(f"report: {report}")
    is_open = must_decide and results.inconclusive
    return EXIT_FAILED if results.failed or is_open else 0
