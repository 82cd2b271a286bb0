"""A model on the command line: its checkpoint and its spec."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from regauge.cli.console import info

if TYPE_CHECKING:
    import torch

    from regauge.models.sources import Model


def open_source(source: str | torch.nn.Module, spec_file: Path | None = None) -> Model:
    """Resolve a model, with a message if its spec was inferred from its graph."""
    from regauge.models.sources import resolve

    model = resolve(source, spec_file)
    for note in model.notes:
        info(note)
    return model
