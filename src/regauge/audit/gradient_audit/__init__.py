"""The audit of gradients: make defended updates, attack them, score by the client's data.

    case = GradientCase(model, victims, own, mean, std)
    results = audit_gradients(case, ("mjp=0.5", "withhold=embedding", "noise=0.1"))
    results.facts["verdict"]

`clients` makes updates, `attempts` has the tables of attacks on images and texts, `engine` runs and
scores them, `report` has tables, figures and the verdict. The defences are in
`regauge.defences.gradients`.
"""

from regauge.audit.gradient_audit.clients import build_view, contribute, prepare_model
from regauge.audit.gradient_audit.engine import GradientCase, audit_gradients
from regauge.defences.gradients import parse_plan

__all__ = [
    "GradientCase",
    "audit_gradients",
    "contribute",
    "parse_plan",
    "prepare_model",
    "build_view",
]
