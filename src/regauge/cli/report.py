"""`regauge report`: from results to a page."""

from __future__ import annotations

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
    """Write saved results as an HTML page.

    The page opens from disk, without a network.
    """
    from regauge.results.report import write_page

    words = write_page(results, out)
    info(f"wrote {out}: {words}; {out.stat().st_size / 1e3:,.1f} kB")
    return 0
