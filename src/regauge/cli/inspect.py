"""`regauge inspect`: a model's symmetry as a table or as JSON."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from regauge.cli import options
from regauge.cli.console import info, print_json, print_result


def inspect(
    model: options.Model,
    spec: options.SpecFile = None,
    discover: Annotated[
        bool,
        typer.Option(
            "--discover", help="Infer the symmetry from the model's graph, even for a known family."
        ),
    ] = False,
    explain: Annotated[
        str | None,
        typer.Option(
            "--explain",
            metavar="SPACE",
            help="Explain the group of this space, operator by operator. Implies --discover.",
        ),
    ] = None,
    json: options.Json = False,
    verbose: options.Verbose = 0,
) -> int:
    """Show the symmetries of a model: its spaces and their groups.

    Shows the parts of the model, its spaces with their groups, and the reasons why the groups
    are not larger.
    """
    from regauge.models.summary import inspect as run

    inspection = run(model, spec=spec, discover=discover or explain is not None)
    if explain is not None:
        explanation = inspection.explain(explain)
        print_json(explanation) if json else print_result(_format_explanation(explanation))
        return 0
    for note in () if discover else inspection.model.notes:
        info(note)
    if json:
        print_json(inspection.to_dict())
    elif not inspection.faults:
        print_result(inspection.format(verbose=verbose > 0))
    inspection.require_fit()
    return 0


def _format_explanation(explanation: dict[str, Any]) -> str:
    """Format an explanation for a terminal."""
    lines = [f"  {r['text']}" for r in explanation["reasons"]] or [
        "  only linear layers and products touch it: the group is the largest possible"
    ]
    return "\n".join([f"{explanation['name']}: {explanation['group']}", *dict.fromkeys(lines)])
