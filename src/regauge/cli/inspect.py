"""`regauge inspect`: a model's symmetry as a table or as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from regauge.cli import options
from regauge.cli.console import print_json, print_result

if TYPE_CHECKING:
    from regauge.core.spec import Spec
    from regauge.models.discovery import Discovery
    from regauge.models.discovery.explain import Reason

Discover = Annotated[
    bool,
    typer.Option(
        "--discover", help="Infer the symmetry from the model's graph, even for a known family."
    ),
]
Explain = Annotated[
    str | None,
    typer.Option(
        "--explain",
        metavar="SPACE",
        help="Explain the group of this space, operator by operator. Implies --discover.",
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
    """Show a model's symmetry: its parts, its spaces with their groups, and the reasons why the
    groups are not larger.
    """
    from regauge.cli.model import discover_checkpoint, open_model
    from regauge.models.sources import find_faults, require_fit
    from regauge.models.summary import format_summary, summarize, tensor_rows

    discovery: Discovery | None = None
    if discover or explain is not None:
        from regauge.checkpoints.reader import open_checkpoint

        checkpoint = open_checkpoint(model)
        discovery = discover_checkpoint(checkpoint)
        model_spec = discovery.spec
    else:
        checkpoint, model_spec = open_model(model, spec)
    faults = find_faults(checkpoint, model_spec)
    if explain is not None and discovery is not None:
        explanation = explain_space(discovery, explain)
        print_json(explanation) if json else print_result(_format_explanation(explanation))
        return 0
    facts = summarize(checkpoint, model_spec)
    facts["faults"] = [str(f) for f in faults]
    if discovery is not None:
        facts["discovered"] = {
            "error": discovery.error,
            "folded_error": discovery.folded_error,
            "verified_on": discovery.verified_on,
            "dropped": list(discovery.dropped),
        }
    if json:
        print_json(facts)
    elif not faults:
        print_result(
            format_summary(facts, [] if verbose == 0 else list(tensor_rows(model_spec, checkpoint)))
        )
        if discovery is not None:
            folded = (
                ""
                if discovery.folded_error is None
                else f", {discovery.folded_error:.1e} with its norms folded"
            )
            print_result(
                f"discovered, and verified on {discovery.verified_on}: a random element of every "
                f"space changes its outputs by {discovery.error:.1e}{folded}"
            )
    require_fit(checkpoint, model_spec, faults)
    return 0


def explain_space(discovery: Discovery, name: str) -> dict[str, Any]:
    """Explain the group of a space, or why nothing acts on an axis of a parameter ("name[0]", or
    all axes of a name).
    """
    from regauge.errors import SpecError

    spec = discovery.spec
    frozen = {
        axis: reasons
        for axis, reasons in discovery.frozen.items()
        if name in (axis, axis.rpartition("[")[0])
    }
    if name in spec.spaces:
        return {
            "name": name,
            "group": _describe_group(spec, name),
            "reasons": [_reason_to_dict(r) for r in discovery.reasons.get(name, ())],
        }
    if frozen:
        return {
            "name": name,
            "group": "nothing acts",
            "reasons": [_reason_to_dict(r) for reasons in frozen.values() for r in reasons],
        }
    raise SpecError(
        f'--explain must name a space or an axis without a group, got "{name}"',
        hint=f"spaces are {', '.join(list(spec.spaces)[:8])}, ...; an axis is written as "
        "h.0.weight[1]",
    )


def _describe_group(spec: Spec, name: str) -> str:
    """Describe the group of a space in a few words."""
    space = spec.spaces[name]
    over = f", one for each position of {space.over}" if space.over else ""
    folded = f"; with the norms folded, {space.folded}" if space.folded else ""
    return f"{space.group} on {space.size}{over}{folded}"


def _reason_to_dict(reason: Reason) -> dict[str, Any]:
    """Return a reason as a dict for JSON."""
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


def _format_explanation(explanation: dict[str, Any]) -> str:
    """Format an explanation for a terminal."""
    lines = [f"  {r['text']}" for r in explanation["reasons"]] or [
        "  only linear layers and products touch it: the group is the largest possible"
    ]
    return "\n".join([f"{explanation['name']}: {explanation['group']}", *dict.fromkeys(lines)])
