"""Audit of a recorded federated run: attack the updates that the server received."""

from __future__ import annotations

from regauge.attacks.updates import Update
from regauge.federated.recorder import RecordedUpdate


def to_update(record: RecordedUpdate) -> Update:
    """Return the update as the server saw it."""
    return Update(record.tensors, "change", record.steps, record.lr)
