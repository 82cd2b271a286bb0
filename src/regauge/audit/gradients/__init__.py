"""What gradients give away: clients that make updates, defences on them, attacks on what the server
is sent, scores against what the client kept.

    results = audit_gradients(GradientCase(model, victims, own, mean, std), ("mjp=0.5",
    "withhold=embedding", "noise=0.1"))
    results.facts["verdict"]

`clients` makes updates, `defences` has what a client can do, `attacking` the table of attacks,
`scoring` the metrics, `telling` tables, figures and verdict.
"""

from regauge.audit.gradients.clients import build_view, contribute, prepare_model
from regauge.audit.gradients.engine import GradientCase, audit_gradients
from regauge.defences.gradients import parse_plan

__all__ = [
    "GradientCase",
    "audit_gradients",
    "contribute",
    "parse_plan",
    "prepare_model",
    "build_view",
]
