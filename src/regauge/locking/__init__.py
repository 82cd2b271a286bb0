"""Keys, locks, sealed files, and models that run and train with locked weights.

`regauge.lock`, `unlock`, `authorize`, `seal` and `open_sealed` work on models and files; the
functions here complete them. Names are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regauge.locking.api import rekey as rekey
    from regauge.locking.api import reseal as reseal
    from regauge.locking.authorize import save_trained as save_trained
    from regauge.locking.lock import lock_state as lock_state
    from regauge.locking.lock import unlock_state as unlock_state

_HOME = {
    "lock_state": "lock",
    "rekey": "api",
    "reseal": "api",
    "save_trained": "authorize",
    "unlock_state": "lock",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"regauge.locking.{_HOME[name]}"), name)
    raise AttributeError(f"module 'regauge.locking' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
