"""`regauge inspect`: what a model's symmetry is, as a table or as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from regauge.cli import options
from regauge.cli.console import print_json, print_result

if TYPE_CHECKING:
    from regauge.core.spec import Spec
    from regauge.models.discovery import Discovery

Discover = Annotated[
    bool,
    typer.Option(
        "--discover", help="Read the symmetry off the model's graph, even where a family is known."
    ),
]
Explain = Annotated[
    str | None,
    typer.Option(
        "--explain",
        metavar="SPACE",
        help="Why this space has its group and no larger one, operator by operator. Discovers.",
    ),
]


def inspect(
    model: options.Model,
    spec: options.SpecFile = None,
    discover: Discover = False,
    explain: Explain = None,
    json: options.Json = False,
    verbose: options.Verbose = 0,
) -> int:
    """Show a model's symmetry: its parts, its spaces with their groups, what holds, what does not
    and why.
    """
    from regauge.cli.model import discover_checkpoint, find_faults, open_model, require_fit
    from regauge.models.summary import format_summary, summarize, tensor_rows

    found: Discovery | None = None
    if discover or explain is not None:
        from regauge.checkpoints.reader import open_checkpoint

        checkpoint = open_checkpoint(model)
        found = discover_checkpoint(checkpoint)
        described = found.spec
    else:
        checkpoint, described = open_model(model, spec)
    faults = find_faults(checkpoint, described)
    if explain is not None and found is not None:
        told = explain_space(found, explain)
        print_json(told) if json else print_result(_format_explanation(told))
        return 0
    facts = summarize(checkpoint, described)
    facts["faults"] = [str(f) for f in faults]
    if found is not None:
        facts["discovered"] = {
            "error": found.error,
            "folded_error": found.folded_error,
            "verified_on": found.verified_on,
            "dropped": list(found.dropped),
        }
    if json:
        print_json(facts)
    elif not faults:
        print_result(
            format_summary(facts, [] if verbose == 0 else list(tensor_rows(described, checkpoint)))
        )
        if found is not None:
            folded = (
                ""
                if found.folded_error is None
                else f", {found.folded_error:.1e} with its norms folded"
            )
            print_result(
                f"discovered, and verified on {found.verified_on}: a random element of every "
                f"space changes its outputs by {found.error:.1e}{folded}"
            )
    require_fit(checkpoint, described, faults)
    return 0


def explain_space(found: Discovery, name: str) -> dict[str, Any]:
    """Why a space has its group, or why an axis of a parameter ("name[0]", or all of a name) has
    none.
    """
    from regauge.errors import SpecError

    spec = found.spec
    frozen = {
        axis: rs for axis, rs in found.frozen.items() if name in (axis, axis.rpartition("[")[0])
    }
    if name in spec.spaces:
        return {
            "name": name,
            "group": _describe_group(spec, name),
            "reasons": [_reason_to_dict(r) for r in found.reasons.get(name, ())],
        }
    if frozen:
        return {
            "name": name,
            "group": "nothing acts",
            "reasons": [_reason_to_dict(r) for rs in frozen.values() for r in rs],
        }
    raise SpecError(
        f'there is no space "{name}", and no axis of a parameter of that name on which nothing '
        "acts",
        hint=f"spaces are {', '.join(list(spec.spaces)[:8])}, ...; an axis is written as "
        "h.0.weight[1]",
    )


def _describe_group(spec: Spec, name: str) -> str:
    space = spec.spaces[name]
    over = f", one for each place of {space.over}" if space.over else ""
    folded = f"; with the norms folded, {space.folded}" if space.folded else ""
    return f"{space.group} on {space.size}{over}{folded}"


def _reason_to_dict(reason: Any) -> dict[str, Any]:
    places = [
        {"file": p.file, "line": p.line, "code": p.code, "module": p.module}
        for p in reason.locations
    ]
    return {
        "operator": reason.operator_name,
        "does": reason.effect,
        "keeps": reason.preserves,
        "places": places,
        "text": str(reason),
    }


def _format_explanation(told: dict[str, Any]) -> str:
    lines = [f"  {r['text']}" for r in told["reasons"]] or [
        "  nothing but linear layers and products touches it: it cannot be larger"
    ]
    return "\n".join([f"{told['name']}: {told['group']}", *dict.fromkeys(lines)])
