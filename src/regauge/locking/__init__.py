"""Keys, locks, sealed files, and models that run and train with locked weights.

`regauge.lock`, `unlock`, `authorize`, `seal` and `open_sealed` work on models and files; the
functions here complete them. Names are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from regauge.core.lazy import lazy_names

if TYPE_CHECKING:
    from regauge.locking.api import rekey as rekey
    from regauge.locking.api import reseal as reseal
    from regauge.locking.authorize import save_trained as save_trained
    from regauge.locking.lock import lock_state as lock_state
    from regauge.locking.lock import unlock_state as unlock_state

_HOME = {
    "lock_state": "locking.lock",
    "rekey": "locking.api",
    "reseal": "locking.api",
    "save_trained": "locking.authorize",
    "unlock_state": "locking.lock",
}

__all__ = sorted(_HOME)
__getattr__, __dir__ = lazy_names(__name__, _HOME)
