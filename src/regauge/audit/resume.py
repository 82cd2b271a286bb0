"""The saved steps of an audit, from which an interrupted one resumes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from regauge.checkpoints.resume import Outcome, StateStore
from regauge.data.tasks import Examples
from regauge.errors import AuditError

BATCH = 256  # examples that are digested at once


def open_store(state: str | Path | None, resume: bool, *inputs: Any) -> StateStore | None:
    """Return the store of an audit; None if its steps are not saved.

    Args:
        state: The folder of the saved steps.
        resume: Whether to use what an interrupted audit has saved there. Otherwise it is deleted.
        inputs: Everything that determines the findings: models, states, examples, options.

    Raises:
        AuditError: The folder holds other files.
    """
    from regauge import __version__

    if state is None:
        return None
    label = json.dumps([__version__, torch.__version__, *inputs], default=_describe)
    store = StateStore(Path(state), label.encode())
    foreign = store.foreign
    if foreign:
        raise AuditError(
            f"state must be a new folder, or one of saved steps; got {state} with {foreign[0]}",
            hint="pass a folder that does not exist yet",
        )
    if not resume:
        store.delete()
    return store


def digest_files(paths: Iterable[Path]) -> str:
    """Return a digest of the names and contents of files."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        digest.update(f"{path.parent.parent.name}/{path.parent.name}/{path.name} ".encode())
        digest.update(f"{content}\n".encode())
    return digest.hexdigest()


def _describe(value: Any) -> Any:
    """Describe an input by its content."""
    if isinstance(value, torch.nn.Module):
        config: Any = getattr(value, "config", None)
        about = config.to_dict() if callable(getattr(config, "to_dict", None)) else None
        return [repr(value), json.dumps(about, default=str), _describe(dict(value.state_dict()))]
    if isinstance(value, torch.Tensor):
        return Outcome({}, {"": value}).digest
    if isinstance(value, Mapping):
        return Outcome({}, dict(value)).digest
    if isinstance(value, Examples):
        rows = (np.arange(i, min(i + BATCH, len(value))) for i in range(0, len(value), BATCH))
        return [len(value), [_describe_batch(value, some) for some in rows]]
    if isinstance(value, Path) and value.is_file():
        return digest_files([value])
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return hashlib.sha256(value).hexdigest() if isinstance(value, bytes) else str(value)


def _describe_batch(examples: Examples, rows: np.ndarray) -> str:
    inputs, labels = examples.batch(rows)
    return Outcome({}, {**inputs, "labels": labels}).digest
