"""The saved steps of an audit, from which an interrupted one resumes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from regauge.checkpoints.resume import Outcome, StateStore
from regauge.data.tasks import Examples

SAMPLED = 64  # examples whose content identifies the data


def open_store(state: str | Path | None, resume: bool, *inputs: Any) -> StateStore | None:
    """Return the store of an audit; None if its steps are not saved.

    Args:
        state: The folder of the saved steps.
        resume: Whether to use what an interrupted audit has saved there. Otherwise it is deleted.
        inputs: Everything that determines the findings: models, states, examples, options.
    """
    from regauge import __version__

    if state is None:
        return None
    label = json.dumps([__version__, torch.__version__, *inputs], default=_describe)
    store = StateStore(Path(state), label.encode())
    if not resume:
        store.delete()
    return store


def _describe(value: Any) -> Any:
    """Describe an input by its content."""
    if isinstance(value, torch.nn.Module):
        return [type(value).__name__, Outcome({}, dict(value.state_dict())).digest]
    if isinstance(value, torch.Tensor):
        return Outcome({}, {"": value}).digest
    if isinstance(value, Mapping):
        return Outcome({}, dict(value)).digest
    if isinstance(value, Examples):
        rows = np.unique(np.linspace(0, len(value) - 1, SAMPLED).astype(int))
        inputs, labels = value.batch(rows)
        return [len(value), Outcome({}, {**inputs, "labels": labels}).digest]
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return hashlib.sha256(value).hexdigest() if isinstance(value, bytes) else str(value)
