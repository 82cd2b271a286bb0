"""`regauge demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from regauge.cli import options
from regauge.cli.console import data


def demo(
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Keep the models here, in a new folder. Default: a temporary folder.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="The seed of the models and elements.")] = 0,
    json: options.Json = False,
    verbose: options.Verbose = 0,
) -> int:
    """Show what regauge does, on small models made on the spot. Nothing is downloaded."""
    from regauge.demo import run
    from regauge.files import writing
    from regauge.writing import check_new

    if out is not None:
        check_new(out)
        with writing(out):
            out.mkdir(exist_ok=True)
    run(data, out, seed, as_json=json)
    return 0
