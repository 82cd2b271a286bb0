"""What gradients give away: clients that make updates, defences on them, attacks on what the server
is sent, scores against what the client kept.

    results = audit_gradients(GradientCase(model, victims, own, mean, std), ("mjp=0.5",
    "withhold=embedding", "noise=0.1"))
    results.facts["verdict"]

`clients` makes updates, `defences` has what a client can do, `attacking` the table of attacks,
`scoring` the metrics, `telling` tables, figures and verdict.
"""

from regauge.audit.gradients.clients import contribute, prepared, view_of
from regauge.audit.gradients.engine import GradientCase, audit_gradients
from regauge.defences.gradients import plan_of

__all__ = ["GradientCase", "audit_gradients", "contribute", "plan_of", "prepared", "view_of"]
