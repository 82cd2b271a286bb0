"""What users hold, resolved: a path, a hub id, an open checkpoint, a live module, or a state dict
with a spec.

    model = resolve("path/to/model")            # or "owner/name", or a transformers or timm module
    model = resolve(state_dict, spec=spec)
    model.spec, model.checkpoint                # its symmetry, and its tensors by name
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from regauge.checkpoints.reader import Checkpoint, open_checkpoint
from regauge.core.check import Fault, check, require
from regauge.core.spec import Spec
from regauge.errors import Hint, LockError, SpecError, UnknownModelError
from regauge.models.resolve import config_of, discover_unknown, spec_of

if TYPE_CHECKING:
    import torch

    from regauge.models.discovery import Discovery

    Source: TypeAlias = str | Path | Checkpoint | torch.nn.Module | Mapping[str, torch.Tensor]

_NUMBER = re.compile(r"(?<=\.)\d+\b")


@dataclass(frozen=True)
class Model:
    """A model and its spec.

    Attributes:
        checkpoint: the tensors by name, on disk or in memory, and the config.
        spec: the spec.
        module: the live module, if the source was one.
        discovery: how the spec was discovered, if no family describes the model.
    """

    checkpoint: Checkpoint
    spec: Spec
    module: torch.nn.Module | None = None
    discovery: Discovery | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks on how the spec was found."""
        return describe_discovery(self.discovery)

    @property
    def name(self) -> str:
        """The name of the model: that of its folder or file, or of its class."""
        return self.checkpoint.path.name


def describe_discovery(discovery: Discovery | None) -> tuple[str, ...]:
    """Return the remark that a spec was inferred from a graph; nothing without a discovery."""
    if discovery is None:
        return ()
    text = (
        "no family describes this model: its symmetry was inferred from its graph, and "
        f"verified to {discovery.error:.1e} on {discovery.verified_on}"
    )
    return (text,)


def resolve(source: Source, spec: Spec | str | Path | None = None) -> Model:
    """Resolve what a user holds to a model. Only headers are read.

    Args:
        source: a folder, a .safetensors file, a hub id, an open checkpoint, a live module of
            transformers or timm, or a state dict.
        spec: the spec or a spec file; by default that of the model's family, or else one that is
            discovered from its graph. A state dict requires it.

    Raises:
        CheckpointError: the checkpoint is missing, damaged or not a model.
        UnknownModelError: no family describes the model, and it cannot be discovered.
        SpecError: the config contradicts its family or the tensors, or a state dict has no spec.
    """
    checkpoint, module = open_source(source)
    if spec is not None:
        return Model(checkpoint, load_spec_file(spec), module)
    if module is None and checkpoint.config is None and not isinstance(source, str | Path):
        raise SpecError(
            f"{checkpoint.path} has no config, so its family is unknown",
            hint="pass its spec with spec=",
        )
    described = checkpoint if module is None else module
    try:
        return Model(checkpoint, spec_of(described, discover=False), module)
    except UnknownModelError as unknown:
        discovery = discover_unknown(described, unknown)
    return Model(checkpoint, discovery.spec, module, discovery)


def discover_source(source: Source) -> Model:
    """Resolve a model to a spec that is discovered from its graph, even for a known family."""
    checkpoint, module = open_source(source)
    unknown = UnknownModelError(
        f"{checkpoint.path} has no config.json that names a model class",
        hint="put config.json beside it; for a custom module call regauge.discover(module, "
        "example_inputs) in Python",
    )
    discovery = discover_unknown(checkpoint if module is None else module, unknown)
    return Model(checkpoint, discovery.spec, module, discovery)


def open_source(source: Source) -> tuple[Checkpoint, torch.nn.Module | None]:
    """Return the tensors of a source as a checkpoint, and its module if it is one."""
    if isinstance(source, str | Path):
        return open_checkpoint(source), None
    if isinstance(source, Checkpoint):
        return source, None
    import torch

    from regauge.checkpoints.memory import StateCheckpoint

    if isinstance(source, torch.nn.Module):
        try:
            config = config_of(source)
        except UnknownModelError:  # a module of the user's own, described by a spec
            config = None
        return StateCheckpoint(source.state_dict(), config, type(source).__name__), source
    if isinstance(source, Mapping):
        return StateCheckpoint(source, None, "the state dict"), None
    raise UnknownModelError(
        f"a model must be a path, a hub id, a checkpoint, a module or a state dict, got "
        f"{type(source).__name__}",
        hint="open files with regauge.open_checkpoint, or load a module with regauge.load_model",
    )


def load_spec_file(spec: Spec | str | Path) -> Spec:
    """Return a spec, read from its file if it is a path."""
    if isinstance(spec, Spec):
        return spec
    from regauge.checkpoints.files import require_file
    from regauge.checkpoints.spec_files import load_spec

    require_file(Path(spec))
    return load_spec(spec)


def find_faults(checkpoint: Checkpoint, spec: Spec) -> list[Fault]:
    """Return every mismatch of checkpoint and spec. Headers suffice, unless the spec fixes the
    values of tensors.
    """
    return check(spec, checkpoint if spec.fixed else checkpoint.entries)


def require_fit(checkpoint: Checkpoint, spec: Spec, faults: Sequence[Fault] | None = None) -> None:
    """Raise unless a checkpoint matches its spec."""
    require(
        group_faults(find_faults(checkpoint, spec) if faults is None else faults),
        f'{checkpoint.path} does not fit the spec "{spec.family}"',
        hint="its config.json contradicts its weights, or the spec is of another "
        "model: use the config.json that belongs to the weights",
    )


def require_unlocked(checkpoint: Checkpoint) -> None:
    """Raise for a locked model: transformed again, it would match no key."""
    for record in checkpoint.lock_records():
        with contextlib.suppress(ValueError, RecursionError):  # reading it is up to locking
            record = json.loads(record) if isinstance(record, str) else record
        key = record.get("key") if isinstance(record, Mapping) else "of a damaged record"
        raise LockError(
            f"{checkpoint.path} is locked by the key {key}, which would no longer fit after "
            "another transform",
            hint=Hint(
                "unlock it first with regauge.unlock(model, key)",
                cli="unlock it first: regauge unlock LOCKED -k KEY -o MODEL",
            ),
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
