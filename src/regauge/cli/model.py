"""A model on the command line: its checkpoint and its spec, checked against each other."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from regauge.checkpoints.reader import Checkpoint
    from regauge.core.check import Fault
    from regauge.core.spec import Spec
    from regauge.models.discovery import Discovery

_NUMBER = re.compile(r"(?<=\.)\d+\b")


def open_model(source: str, spec_file: Path | None) -> tuple[Checkpoint, Spec]:
    """Return the checkpoint, and the spec of its file or family. They are not yet checked against
    each other.
    """
    from regauge.checkpoints.reader import open_checkpoint

    checkpoint = open_checkpoint(source)
    return checkpoint, spec_of(checkpoint, spec_file)


def spec_of(checkpoint: Checkpoint, spec_file: Path | None) -> Spec:
    """Return the spec of a spec file, of the model's family, or of its graph."""
    if spec_file is not None:
        from regauge.checkpoints.files import require_file
        from regauge.checkpoints.spec_files import load_spec

        require_file(spec_file)
        return load_spec(spec_file)
    return resolve_spec(checkpoint)


def resolve_spec(source: Checkpoint | torch.nn.Module) -> Spec:
    """Return the spec of a model's family, or else the one inferred from its graph,
    with a message.
    """
    from regauge.cli.console import info
    from regauge.errors import UnknownModelError
    from regauge.models import resolve

    try:
        return resolve.spec_of(source, discover=False)
    except UnknownModelError as unknown:
        discovery = resolve.discover_unknown(source, unknown)
    info(
        "no family describes this model: its symmetry was inferred from its graph, and verified to "
        f"{discovery.error:.1e} on {discovery.verified_on}"
    )
    return discovery.spec


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


def find_faults(checkpoint: Checkpoint, spec: Spec) -> list[Fault]:
    """Return every mismatch of checkpoint and spec. Headers suffice, unless the spec fixes the
    values of tensors.
    """
    from regauge.core.check import check

    return check(spec, checkpoint if spec.fixed else checkpoint.entries)


def require_fit(checkpoint: Checkpoint, spec: Spec, faults: Sequence[Fault] | None = None) -> None:
    """Raise unless a checkpoint matches its spec."""
    from regauge.core.check import require

    require(
        group_faults(find_faults(checkpoint, spec) if faults is None else faults),
        f'{checkpoint.path} does not fit the spec "{spec.family}"',
        hint="its config contradicts its weights, or the spec is of another model: regauge "
        "inspect shows both",
    )


def require_unlocked(checkpoint: Checkpoint) -> None:
    """Raise for a locked model: transformed again, it would match no key."""
    from regauge.errors import LockError
    from regauge.locking.lock import record_of

    record = record_of(checkpoint)
    if record is not None:
        raise LockError(
            f"{checkpoint.path} is locked by the key {record.key}, which would no longer fit "
            "after another transform",
            hint="unlock it first with regauge unlock",
        )


def group_faults(faults: Sequence[Fault]) -> list[Fault]:
    """Merge faults that differ only in the numbers in their names into the first, with their count
    and layers.
    """
    alike: dict[str, list[Fault]] = {}
    for fault in faults:
        alike.setdefault(_NUMBER.sub("#", fault.text), []).append(fault)
    return [
        first
        if not rest
        else replace(
            first, text=f"{first.text} (and {len(rest)} more like it{_format_layers(rest)})"
        )
        for first, *rest in alike.values()
    ]


def _format_layers(faults: Sequence[Fault]) -> str:
    """Format `, layers 1-11` for names that differ in their first number only."""
    numbers = [[int(n) for n in _NUMBER.findall(fault.name)] for fault in faults]
    if not all(numbers) or len({tuple(rest) for _, *rest in numbers}) > 1:
        return ""
    runs: list[list[int]] = []
    for layer in sorted({first for first, *_ in numbers}):
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ", layers " + ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
