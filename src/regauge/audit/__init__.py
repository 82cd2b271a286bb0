"""Attacks on what regauge protects, on the user's own case, and scored.

regauge.audit.lock("locked", base="base", key=key).to_html("page.html")
regauge.audit.split(model, "images.npz", ["rows", "noise=0.5"]).verdict
regauge.audit.gradients(model, "images.npz", ["mjp=0.5"])
regauge.audit.recorded("run")
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from regauge.core.lazy import lazy_names

if TYPE_CHECKING:
    from regauge.audit.api import GradientOptions as GradientOptions
    from regauge.audit.api import LockOptions as LockOptions
    from regauge.audit.api import SplitOptions as SplitOptions
    from regauge.audit.api import gradients as gradients
    from regauge.audit.api import lock as lock
    from regauge.audit.api import recorded as recorded
    from regauge.audit.api import split as split
    from regauge.audit.report import AuditReport as AuditReport

_HOME = {
    "AuditReport": "audit.report",
    "GradientOptions": "audit.api",
    "LockOptions": "audit.api",
    "SplitOptions": "audit.api",
    "gradients": "audit.api",
    "lock": "audit.api",
    "recorded": "audit.api",
    "split": "audit.api",
}

__all__ = sorted(_HOME)
__getattr__, __dir__ = lazy_names(__name__, _HOME)
