"""`regauge fingerprint`: invariants of a model under every element, to trace its lineage."""

from __future__ import annotations

from regauge.cli import options
from regauge.cli.console import print_json, print_result
from regauge.cli.run import report_discoveries


def fingerprint(
    model: options.Model,
    spec: options.SpecFile = None,
    json: options.Json = False,
    verbose: options.Verbose = 0,
) -> int:
    """Show the invariants of a model, to trace its lineage.

    A moved or locked model has the fingerprint of the original, a retrained one does not.
    """
    import regauge

    result = regauge.fingerprint(model, spec=spec)
    report_discoveries(result.discoveries)
    if json:
        print_json({"command": "fingerprint", **result.to_dict()})
    else:
        print_result(str(result))
    return 0
