"""`regauge fingerprint`: invariants of a model under every element, to trace its lineage."""

from __future__ import annotations

from regauge.cli import options
from regauge.cli.console import print_json, print_result


def fingerprint(
    model: options.Model,
    spec: options.SpecFile = None,
    json: options.Json = False,
    verbose: options.Verbose = 0,
) -> int:
    """Show a model's invariants: a moved or locked model has the fingerprint of the original, a
    retrained one does not.
    """
    from regauge.cli.model import open_model
    from regauge.matching.fingerprint import fingerprint_state as compute
    from regauge.models.sources import require_fit

    checkpoint, model_spec = open_model(model, spec)
    require_fit(checkpoint, model_spec)
    result = compute(model_spec, checkpoint)
    if json:
        print_json({"command": "fingerprint", "family": model_spec.family, **result.to_dict()})
        return 0
    width = max(len(row[0]) for row in result.rows)
    print_result(f"{model_spec.family}  {result.digests[0]}  {result.digests[1]}")
    print_result(f"{'root mean square of':{width}}  count       min      mean       max")
    for name, count, low, mean, high in result.rows:
        print_result(f"{name:{width}}  {count:5}  {low:8.4g}  {mean:8.4g}  {high:8.4g}")
    return 0
