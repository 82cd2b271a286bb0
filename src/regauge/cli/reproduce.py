"""`regauge reproduce`: the papers' tables on this machine."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regauge.cli import options
from regauge.cli.console import data, step_bar
from regauge.cli.run import check_device, check_outputs, deliver, facts_of_run, mark, set_threads
from regauge.errors import RegaugeError, need

if TYPE_CHECKING:
    from regauge.results.findings import Results


class UnknownExperimentError(RegaugeError):
    """No experiment has this id."""


def reproduce(
    id: Annotated[str | None, typer.Argument(metavar="ID", help="Which: 000/table2, say. --list names all.")] = None,  # noqa: A002
    preset: Annotated[
        str, typer.Option("--preset", metavar="small|paper", help="Minutes on two cores, or the paper's own models and data.")
    ] = "small",
    seeds: Annotated[int | None, typer.Option("--seeds", min=1, metavar="N", help="Train from this many seeds. Default: the preset's.")] = None,
    assets: Annotated[
        Path | None, typer.Option("--assets", metavar="DIR", help="Where data and models lie. Default: $REGAUGE_ASSETS, or ../shared/assets.")
    ] = None,
    json: options.JsonFile = None,
    report: options.Report = None,
    listed: Annotated[bool, typer.Option("--list", help="Name the experiments.")] = False,
    device: options.Device = "cpu",
    threads: Annotated[int | None, typer.Option("--threads", min=1, max=256, metavar="N", help="Threads that compute. Default: torch's own.")] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs",
            min=1,
            max=256,
            metavar="N",
            help="Processes, of one thread each, for parts of an experiment that do not wait for each other. Default: with preset small on the CPU "
            "as many as there are cores, up to 8.",
        ),
    ] = None,
    verbose: options.Verbose = 0,
) -> int:
    """Run a table of the papers and set its numbers beside theirs. What is computed is kept ($REGAUGE_CACHE) and not computed again: an interrupted
    run goes on where it was. Exit code 3 if a finding that should hold does not."""
    need("transformers", "experiments")
    check_outputs(json, report)
    from experiments import EXPERIMENTS
    from experiments.lab import Lab, default_assets

    if listed:
        data("\n".join(f"{name}  {(fn.__doc__ or '').splitlines()[0]}" for name, fn in EXPERIMENTS.items()))
        return 0
    if id not in EXPERIMENTS:
        what = "no experiment is named" if id is None else f'there is no experiment "{id}"'
        raise UnknownExperimentError(what, hint=f"choose from {', '.join(EXPERIMENTS)}")
    check_device(device)
    set_threads(threads)
    with step_bar(id) as progress:
        lab = Lab(preset, seeds, assets or default_assets(), device=device, progress=progress, jobs=jobs or _jobs(preset, device, threads))
        results = EXPERIMENTS[id](lab)
    results = replace(results, facts={"command": facts_of_run()["command"], **results.facts})
    return deliver(results, text_of(results), json, report, replace(results, figures=(*results.figures, *lab.pictures)))


def _jobs(preset: str, device: str, threads: int | None) -> int:
    return min(8, os.cpu_count() or 1) if preset == "small" and device == "cpu" and threads is None else 1


def text_of(results: Results) -> str:
    """Results as a terminal shows them: the tables, then what was claimed."""
    from regauge.models.summary import columns
    from regauge.results.report import number

    lines: list[str] = []
    for table in results.tables:
        rows = [table.columns, *(tuple("" if cell is None else number(cell) for cell in row) for row in table.rows)]
        lines += [table.title, "", columns([tuple(map(str, row)) for row in rows], right=tuple(range(1, len(table.columns)))), ""]
    found = [("", "finding", "value", "floor", "ceiling", "")]
    for f in results.findings:
        found.append((mark(f), f.id, _number(f.value), _number(f.floor), _number(f.ceiling), "" if f.holds else f.sentence))
    held, told = sum(f.holds is True for f in results.findings), sum(f.holds is not None for f in results.findings)
    lines += [columns(found, right=(2, 3, 4)), "", *(f"not checked: {text}" for text in results.unchecked)]
    return "\n".join([*lines, f"{held} of {told} findings hold" + (f"; {len(results.failed)} FAILED" if results.failed else "")])


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}" if value == 0 or 1e-3 <= abs(value) < 1e6 else f"{value:.1e}"
