"""`regauge report`: from results to a page."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from regauge.cli import options
from regauge.cli.console import info


def report(
    results: Annotated[
        Path,
        typer.Argument(metavar="RESULTS", help="Results written with --json."),
    ],
    out: Annotated[Path, typer.Option("-o", "--output", metavar="OUT", help="New HTML file.")],
    verbose: options.Verbose = 0,
) -> int:
    """Write results as one HTML page that opens from disk, without a network."""
    from regauge.checkpoints.files import wrap_write_errors, write_bytes
    from regauge.errors import FindingsError
    from regauge.results.findings import load_results
    from regauge.results.report import page, verdict

    with wrap_write_errors(out):
        taken = os.path.lexists(out)
    if taken:
        raise FindingsError(
            f"the output {out} exists already",
            hint="name a new file with -o, or remove this one first",
        )
    loaded = load_results(results)
    html = page(loaded).encode()
    write_bytes(out, html, new=True)
    info(f"wrote {out}: {verdict(loaded)[1].lower()}; {len(html) / 1e3:,.1f} kB")
    return 0
