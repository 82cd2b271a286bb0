"""`regauge inspect`: what a model's symmetry is, as a table or as JSON."""

from __future__ import annotations

from regauge.cli import options
from regauge.cli.console import data, data_json


def inspect(model: options.Model, spec: options.SpecFile = None, json: options.Json = False, verbose: options.Verbose = 0) -> int:
    """Show a model's symmetry: its parts, its spaces with their groups, what holds, what does not and why."""
    from regauge.cli.model import faults_of, open_model, require_fit
    from regauge.facts import facts_of, rows_of_tensors, text_of

    checkpoint, described = open_model(model, spec)
    faults = faults_of(checkpoint, described)
    facts = facts_of(checkpoint, described)
    facts["faults"] = [str(f) for f in faults]
    if json:
        data_json(facts)
    elif not faults:
        data(text_of(facts, [] if verbose == 0 else list(rows_of_tensors(described, checkpoint))))
    require_fit(checkpoint, described, faults)
    return 0
