"""`regauge demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from regauge.cli import options
from regauge.cli.console import info, print_result, step_bar


def demo(
    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="DIR",
            help="New folder for the models and images, named as in the README.",
        ),
    ] = None,
    report: Annotated[
        Path, typer.Option("--report", metavar="page.html", help="HTML page to write.")
    ] = Path("regauge-demo.html"),
    seed: Annotated[int, options.seed_option("Seed of the models and elements.")] = 0,
    json: options.Json = False,
    verbose: options.Verbose = 0,
) -> int:
    """Run regauge on small models and write an HTML page.

    Measures six claims in about two minutes, and downloads nothing.
    """
    from regauge.cli.run import EXIT_FAILED, facts_of_run
    from regauge.demo import run_demo
    from regauge.results.findings import to_json

    results = run_demo(
        info if json else print_result, step_bar, out, seed, page=report, facts=facts_of_run
    )
    if json:
        print_result(to_json(results))
    print_line = info if json else print_result
    print_line(f"Page: {report} (open it in a browser)")
    if out is not None:
        print_line(f"Models and images: {out} (cd {out} to run the commands above)")
    else:
        print_line("The commands above need models: regauge demo -o DIR saves them")
    return EXIT_FAILED if results.failed else 0
