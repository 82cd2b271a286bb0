"""`regauge fingerprint`: what no element changes, for lineage and for finding the same model
twice.
"""

from __future__ import annotations

from regauge.cli import options
from regauge.cli.console import print_json, print_result


def fingerprint(
    model: options.Model,
    spec: options.SpecFile = None,
    json: options.Json = False,
    verbose: options.Verbose = 0,
) -> int:
    """Show what no element changes: a moved or locked model has the fingerprint of the plain one, a
    retrained one has not.
    """
    from regauge.cli.model import open_model, require_fit
    from regauge.matching.fingerprint import fingerprint as take

    checkpoint, described = open_model(model, spec)
    require_fit(checkpoint, described)
    found = take(described, checkpoint)
    if json:
        print_json({"command": "fingerprint", "family": described.family, **found.to_dict()})
        return 0
    width = max(len(row[0]) for row in found.rows)
    print_result(f"{described.family}  {found.digests[0]}  {found.digests[1]}")
    print_result(f"{'root mean square of':{width}}  count     least      mean      most")
    for name, count, least, mean, most in found.rows:
        print_result(f"{name:{width}}  {count:5}  {least:8.4g}  {mean:8.4g}  {most:8.4g}")
    return 0
