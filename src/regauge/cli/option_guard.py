"""Options that were given where they say nothing: what is ignored in silence is taken for done."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import typer


def passed_options(context: typer.Context) -> dict[str, str]:
    """The parameters of a command that were given, each with the name that users know it by."""
    sources = {
        p.name or "": context.get_parameter_source(p.name or "") for p in context.command.params
    }
    shown = {
        p.name or "": p.opts[0] if p.opts[0].startswith("-") else p.opts[0].upper()
        for p in context.command.params
    }
    return {
        name: shown[name]
        for name, source in sources.items()
        if source is not None and "DEFAULT" not in source.name
    }


def reject_options(found: Mapping[str, str], names: Iterable[str], why: str) -> None:
    """Refuse these parameters where they were given."""
    wrong = [found[name] for name in names if name in found]
    if wrong:
        raise typer.BadParameter(why, param_hint=", ".join(wrong))
