"""A model on the command line: its checkpoint and its spec, checked against each other."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from regauge.checkpoints.reader import Checkpoint
    from regauge.core.spec import Spec
    from regauge.models.discovery import Discovery
    from regauge.models.sources import Model


def open_model(source: str, spec_file: Path | None) -> tuple[Checkpoint, Spec]:
    """Return the checkpoint, and the spec of its file or family. They are not yet checked against
    each other.
    """
    model = open_source(source, spec_file)
    return model.checkpoint, model.spec


def open_source(source: str | torch.nn.Module, spec_file: Path | None = None) -> Model:
    """Resolve a model, with a message if its spec was inferred from its graph."""
    from regauge.cli.console import info
    from regauge.models.sources import resolve

    model = resolve(source, spec_file)
    if model.discovery is not None:
        info(
            "no family describes this model: its symmetry was inferred from its graph, and "
            f"verified to {model.discovery.error:.1e} on {model.discovery.verified_on}"
        )
    return model


def discover_checkpoint(checkpoint: Checkpoint) -> Discovery:
    """Infer the symmetry of a checkpoint's model from its graph."""
    from regauge.errors import UnknownModelError
    from regauge.models import resolve

    hint = (
        "put config.json beside it; for a custom module call regauge.discover(module, "
        "example_inputs) in Python"
    )
    return resolve.discover_unknown(
        checkpoint,
        UnknownModelError(
            f"{checkpoint.path} has no config.json that names a model class", hint=hint
        ),
    )
