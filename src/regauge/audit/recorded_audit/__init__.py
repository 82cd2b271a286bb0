"""The audit of a recorded federated run: attack the contributions that the server received."""

from __future__ import annotations

from regauge.attacks.updates import Update
from regauge.federated.recorder import RecordedUpdate


def to_update(record: RecordedUpdate) -> Update:
    """Return a recorded update as an attack gets it."""
    return Update(record.tensors, "change", record.steps, record.lr)
