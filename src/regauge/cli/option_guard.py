"""A guard against options that have no effect: an option ignored silently looks like
one applied.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import typer


def passed_options(context: typer.Context) -> dict[str, str]:
    """Return the parameters that were passed to a command, each with its name on the
    command line.
    """
    sources = {
        p.name or "": context.get_parameter_source(p.name or "") for p in context.command.params
    }
    displayed = {
        p.name or "": p.opts[0] if p.opts[0].startswith("-") else p.opts[0].upper()
        for p in context.command.params
    }
    return {
        name: displayed[name]
        for name, source in sources.items()
        if source is not None and "DEFAULT" not in source.name
    }


def reject_options(passed: Mapping[str, str], names: Iterable[str], reason: str) -> None:
    """Raise if one of these parameters was passed."""
    rejected = [passed[name] for name in names if name in passed]
    if rejected:
        raise typer.BadParameter(reason, param_hint=", ".join(rejected))
