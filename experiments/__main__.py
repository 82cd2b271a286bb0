"""`python -m experiments ID`: compute a table or figure of the papers, with the paper's numbers."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from regauge.cli import options
from regauge.cli.app import run
from regauge.cli.console import print_result, step_bar
from regauge.cli.run import deliver, facts_of_run, start_run
from regauge.errors import RegaugeError, need
from regauge.results.text import format_results


class UnknownExperimentError(RegaugeError):
    """No experiment has this id."""


def reproduce(
    id: Annotated[  # noqa: A002
        str | None,
        typer.Argument(metavar="ID", help="Experiment, such as 000/table2. --list shows all."),
    ] = None,
    preset: Annotated[
        str,
        typer.Option(
            "--preset",
            metavar="small|pretrained|paper",
            help="Small models, minutes on two cores; public pre-trained models; or the paper's "
            "models and data.",
        ),
    ] = "small",
    seeds: Annotated[
        int | None,
        typer.Option(
            "--seeds", min=1, metavar="N", help="Train from this many seeds. Default: the preset's."
        ),
    ] = None,
    assets: Annotated[
        Path | None,
        typer.Option(
            "--assets",
            metavar="DIR",
            help="Folder of data and models. Default: $REGAUGE_ASSETS, or ../shared/assets.",
        ),
    ] = None,
    json: options.JsonFile = None,
    report: options.Report = None,
    listed: Annotated[bool, typer.Option("--list", help="List the experiments.")] = False,
    estimated: Annotated[
        bool,
        typer.Option(
            "--estimate",
            help="Print the time, memory and disk that the trainings take on this device.",
        ),
    ] = False,
    device: options.Device = "cpu",
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads",
            min=1,
            max=256,
            metavar="N",
            help="Compute threads. Default: those of torch.",
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs",
            min=1,
            max=256,
            metavar="N",
            help="Processes of one thread each, for independent parts of an experiment. "
            "Default: with preset small on the CPU, one per core, up to 8.",
        ),
    ] = None,
    verbose: options.Verbose = 0,
) -> int:
    """Compute a table or figure of the papers and compare its numbers. Cells are cached in
    $REGAUGE_CACHE, so an interrupted run resumes. Exit code 3 if a finding that should hold does
    not.
    """
    need("transformers", "experiments")
    from experiments import EXPERIMENTS
    from experiments.former_words import rename_results
    from experiments.shared.pretrained import pretrained_experiments
    from experiments.shared.runner import Lab, default_assets
    from experiments.stale import code_of

    if listed:
        print_result(
            "\n".join(
                f"{name}  {(fn.__doc__ or '').splitlines()[0]}" for name, fn in EXPERIMENTS.items()
            )
        )
        return 0
    if id not in EXPERIMENTS:
        what = "no experiment is named" if id is None else f'there is no experiment "{id}"'
        raise UnknownExperimentError(what, hint=f"choose from {', '.join(EXPERIMENTS)}")
    if preset == "pretrained" and id not in pretrained_experiments():
        raise UnknownExperimentError(
            f"{id} has no preset pretrained",
            hint=f"it is there for {', '.join(pretrained_experiments())}",
        )
    start_run(json, report, threads=threads, device=device)
    if estimated:
        from experiments.estimate import estimate, format_estimate

        costs = estimate(id, Lab(preset, seeds, assets or default_assets(), device=device))
        return deliver(costs, format_estimate(costs), json, report, costs)
    with step_bar(id) as progress:
        lab = Lab(
            preset,
            seeds,
            assets or default_assets(),
            device=device,
            progress=progress,
            jobs=jobs or _jobs(preset, device, threads),
        )
        results = rename_results(EXPERIMENTS[id](lab))  # cached cells may hold former words
    facts = {"command": facts_of_run()["command"], **results.facts}
    results = replace(results, facts={**facts, "code": code_of(EXPERIMENTS[id], lab.cells)})
    return deliver(
        results,
        format_results(results),
        json,
        report,
        replace(results, figures=(*results.figures, *lab.pictures)),
    )


def _jobs(preset: str, device: str, threads: int | None) -> int:
    return (
        min(8, os.cpu_count() or 1)
        if preset == "small" and device == "cpu" and threads is None
        else 1
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one experiment; return the exit code."""

    def build(arguments: list[str]) -> typer.Typer:
        app = typer.Typer(
            pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]}
        )
        app.command()(reproduce)
        return app

    return run(list(sys.argv[1:] if argv is None else argv), build, "python -m experiments")


if __name__ == "__main__":
    sys.exit(main())
