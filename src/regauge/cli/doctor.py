"""`regauge doctor`: what is installed, what is missing, and how to install it."""

from __future__ import annotations

from typing import Annotated

import typer

from regauge.cli import options
from regauge.cli.console import print_json, print_result


def doctor(
    load: Annotated[
        bool,
        typer.Option(
            "--load", help="Also import every installed library, which may take a minute."
        ),
    ] = False,
    json: options.Json = False,
    verbose: options.Verbose = 0,
) -> int:
    """Show what is installed, and how to install what is missing.

    Shows versions, devices, and extras with their install commands. Exit code 1 if a required
    library is missing, too old or does not load, or if an installed library has a known
    vulnerability.
    """
    from regauge.results.installation import check_installation

    installation = check_installation(load=load)
    if json:
        print_json(installation.to_dict())
    else:
        print_result(str(installation))
    return 0 if installation.healthy else 1
