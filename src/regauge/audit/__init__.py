"""Attacks on what regauge protects, on the user's own case, and scored.

regauge.audit.lock("locked", base="base", key=key).to_html("page.html")
regauge.audit.split(model, "images.npz", ["rows", "noise=0.5"]).verdict
regauge.audit.gradients(model, "images.npz", ["mjp=0.5"])
regauge.audit.recorded("run")
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

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
    "AuditReport": "report",
    "GradientOptions": "api",
    "LockOptions": "api",
    "SplitOptions": "api",
    "gradients": "api",
    "lock": "api",
    "recorded": "api",
    "split": "api",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    """Import a public name on first use: the audits load torch."""
    if name in _HOME:
        return getattr(import_module(f"regauge.audit.{_HOME[name]}"), name)
    raise AttributeError(f"module 'regauge.audit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
