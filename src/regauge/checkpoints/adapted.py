"""A checkpoint merged with a LoRA adapter while it is read.

The tensors are those of PEFT's `merge_and_unload`, without loading either checkpoint:

    open_adapted("base+adapter")      # a Checkpoint; an adapted layer is read as W + s B A

The scale s is lora_alpha / r (or / sqrt(r) with `use_rslora`); `alpha_pattern` of
adapter_config.json overrides lora_alpha for single layers. Sums are computed in float32 and rounded
once, to the dtype of the model. DoRA magnitudes, biases of B, full tensors (`modules_to_save`) and
adapted embeddings follow PEFT.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge.checkpoints.adapters import LORA, find_tensor, require_lora, unwrap_name
from regauge.checkpoints.headers import unsigned_dtype
from regauge.checkpoints.reader import Checkpoint, open_checkpoint, read_json
from regauge.core.patterns import compile_pattern
from regauge.errors import CheckpointError, PatternError

if TYPE_CHECKING:
    import torch

    Tensor = torch.Tensor


_REFETCH_HINT = "copy the adapter's own files again"
_MAX_PATTERNS = 1000  # per adapter: each pattern is matched against every layer


@dataclass
class Change:
    """The change of one model tensor by an adapter.

    Attributes:
        scale: Factor of the product B A.
        names: Names of the adapter's tensors, by kind ("lora_A", "lora_B", "whole", ...).
    """

    scale: float = 1.0
    names: dict[str, str] = field(default_factory=dict)


class AdaptedCheckpoint(Checkpoint):
    """A checkpoint whose tensors are read with the changes of an adapter."""

    as_stored = False

    def __init__(self, model: Checkpoint, adapter: Checkpoint) -> None:
        super().__init__(
            model.path, model.files.values(), model.config, model.config_path, model.index
        )
        self.model, self.adapter = model, adapter
        self.changes, self.transposed = _collect_changes(self, adapter)
        self.files |= {f"adapter/{name}": shard for name, shard in adapter.files.items()}

    def __reduce__(self) -> Any:
        return _open_pair, (self.model.path, self.adapter.path)

    def __getitem__(self, name: str) -> Tensor:
        base = super().__getitem__(name)
        change = self.changes.get(name)
        return (
            base
            if change is None
            else _apply_change(base, change, self.adapter, self.transposed).to(base.dtype)
        )

    @property
    def sources(self) -> tuple[Path, ...]:
        return self.model.path, self.adapter.path

    def _read_bits(self, name: str) -> Any:
        return (
            super()._read_bits(name)
            if name not in self.changes
            else self[name].view(unsigned_dtype(self.entries[name].dtype)).numpy()
        )


def is_adapted(source: str) -> bool:
    """Return whether `source` has the form "model+adapter" and is not an existing path."""
    return "+" in source and not Path(source).expanduser().exists()


def open_adapted(source: str) -> Checkpoint:
    """Open "model+adapter", or a model alone.

    Names and shapes are checked; no tensor is read.

    Raises:
        CheckpointError: The adapter is incomplete, or belongs to another model.
    """
    if not is_adapted(source):
        return open_checkpoint(source)
    model, _, adapter = source.partition("+")
    return _open_pair(model, adapter)


def _open_pair(model: str | Path, adapter: str | Path) -> AdaptedCheckpoint:
    return AdaptedCheckpoint(open_checkpoint(model), open_checkpoint(adapter))


def _collect_changes(model: Checkpoint, adapter: Checkpoint) -> tuple[dict[str, Change], bool]:
    """Return the changes by name of the model tensor, and whether weights are stored transposed."""
    folder = adapter.path if adapter.is_folder else adapter.path.parent
    require_lora(folder)
    path = folder / "adapter_config.json"
    config: Mapping[str, Any] = read_json(path) if path.is_file() else {}
    changes: dict[str, Change] = {}
    for name, entry in adapter.entries.items():
        lora = LORA.fullmatch(name)
        if lora is None:
            target, kind = find_tensor(model.entries, unwrap_name(name)), "whole"
        else:
            layer, kind = (
                unwrap_name(lora["layer"]),
                lora["kind"] + (".bias" if lora["what"] == "bias" else ""),
            )
            target = find_tensor(
                model.entries, f"{layer}.bias" if kind == "lora_B.bias" else f"{layer}.weight"
            )
        if target is None:
            raise CheckpointError(
                f'{adapter.path} has "{name}", but {model.path} has no such layer',
                hint="check that the adapter belongs to this model",
            )
        change = changes.setdefault(target[1], Change())
        change.names[kind] = name
        if kind in ("lora_A", "lora_embedding_A"):
            if len(entry.shape) < 2 or not entry.shape[0]:
                raise CheckpointError(
                    f'"{name}" of {adapter.path} must be [rank, size] with a rank above 0, got '
                    f"{list(entry.shape)}",
                    hint=_REFETCH_HINT,
                )
            change.scale = _lora_scale(
                config, path, target[1].removesuffix(".weight"), entry.shape[0]
            )
    for name, change in changes.items():
        _require_complete(model, adapter, name, change, bool(config.get("fan_in_fan_out")))
    for name, change in changes.items():  # a bias has the scale of its layer
        if "lora_B.bias" in change.names:
            weight = changes.get(f"{name.removesuffix('.bias')}.weight")
            if weight is None or "lora_A" not in weight.names:
                raise CheckpointError(
                    f'{adapter.path} has "{change.names["lora_B.bias"]}", but no A and B of '
                    "that layer",
                    hint="fetch the complete adapter",
                )
            change.scale = weight.scale
    return changes, bool(config.get("fan_in_fan_out"))


def _lora_scale(config: Mapping[str, Any], path: Path, layer: str, rank: int) -> float:
    if "lora_alpha" not in config:
        raise CheckpointError(
            f'{path} has no "lora_alpha", which sets the scale of the adapter',
            hint="copy the adapter's own adapter_config.json next to it",
        )
    try:
        alpha = float(
            _match_pattern(config.get("alpha_pattern") or {}, layer, config["lora_alpha"])
        )
    except (
        TypeError,
        ValueError,
        AttributeError,
        OverflowError,
        PatternError,
    ) as error:  # null, a word, not a mapping, not a pattern
        raise CheckpointError(
            f'"lora_alpha" or "alpha_pattern" of {path} gives no number for "{layer}": {error}',
            hint="copy the adapter's own adapter_config.json",
        ) from error
    if not math.isfinite(alpha):
        raise CheckpointError(
            f'"lora_alpha" or "alpha_pattern" of {path} must be finite for "{layer}", got {alpha}',
            hint=_REFETCH_HINT,
        )
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _match_pattern(patterns: Mapping[str, Any], layer: str, default: Any) -> Any:
    """Return the value of the first pattern that matches the end of a layer's name, as in PEFT."""
    if len(patterns) > _MAX_PATTERNS:
        raise PatternError(
            f"the number of patterns must be at most {_MAX_PATTERNS}, got {len(patterns)}"
        )
    return next(
        (
            value
            for pattern, value in patterns.items()
            if compile_pattern(rf"(.*\.)?({pattern})$").matches(layer)
        ),
        default,
    )


def _require_complete(
    model: Checkpoint, adapter: Checkpoint, name: str, change: Change, transposed: bool
) -> None:
    """Raise unless A and B are both present and their product has the shape of the weight."""
    shapes = {kind: adapter.entries[n].shape for kind, n in change.names.items()}
    for a, b in (("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B")):
        if (a in shapes) != (b in shapes):
            raise CheckpointError(
                f'{adapter.path} has only one of {a} and {b} for "{name}"',
                hint="fetch the complete adapter",
            )
    for b in ("lora_B", "lora_embedding_B"):
        if b in shapes and len(shapes[b]) < 2:
            raise CheckpointError(
                f'{b} of "{name}" in {adapter.path} must be [size, rank], got {list(shapes[b])}',
                hint=_REFETCH_HINT,
            )
    shape = model.entries[name].shape
    if "lora_A" in shapes:
        added = (*shapes["lora_B"][:1], *shapes["lora_A"][1:])
        added = added[::-1] if transposed and len(added) == 2 else added
        ranks_match = shapes["lora_A"][0] == shapes["lora_B"][1]
    elif "lora_embedding_A" in shapes:
        added, ranks_match = (
            (shapes["lora_embedding_A"][1], shapes["lora_embedding_B"][0]),
            shapes["lora_embedding_A"][0] == shapes["lora_embedding_B"][1],
        )
    elif "lora_magnitude_vector" in shapes:
        raise CheckpointError(
            f'{adapter.path} has a magnitude for "{name}", but no A and B',
            hint="fetch the complete adapter",
        )
    else:
        added, ranks_match = next(iter(shapes.values())), True
    if "lora_magnitude_vector" in shapes and "whole" not in shapes:
        length = shapes["lora_embedding_B" if "lora_embedding_B" in shapes else "lora_B"][0]
        if math.prod(shapes["lora_magnitude_vector"]) != length:
            raise CheckpointError(
                f'the magnitudes of "{name}" in {adapter.path} must have {length} elements, got '
                f"shape {list(shapes['lora_magnitude_vector'])}",
                hint=_REFETCH_HINT,
            )
    if added != shape or not ranks_match:
        raise CheckpointError(
            f'{adapter.path} changes "{name}" with shape {list(added)}, but the model has '
            f"{list(shape)}",
            hint="check that the adapter belongs to this model",
        )


def _apply_change(base: Tensor, change: Change, adapter: Checkpoint, transposed: bool) -> Tensor:
    """Return a tensor of the model with its change, in float32 (float64 stays float64)."""
    import torch

    dtype = torch.float64 if base.dtype == torch.float64 else torch.float32
    lora = {kind: adapter[name].to(dtype) for kind, name in change.names.items()}
    weight = lora["whole"] if "whole" in lora else base.to(dtype)
    if "lora_B.bias" in lora:
        return weight + change.scale * lora["lora_B.bias"]
    if "lora_embedding_A" in lora:
        weight = weight + change.scale * (lora["lora_embedding_B"] @ lora["lora_embedding_A"]).T
        return (
            weight * lora["lora_magnitude_vector"] / weight.norm(dim=0)
            if "lora_magnitude_vector" in lora
            else weight
        )  # DoRA on an embedding normalizes columns
    if "lora_A" not in lora:
        return weight
    a, b = lora["lora_A"], lora["lora_B"]
    added = (b.flatten(1) @ a.flatten(1)).view(b.shape[0], *a.shape[1:])
    flip = transposed and base.dim() == 2
    weight = (weight.T if flip else weight) + change.scale * added
    if "lora_magnitude_vector" in lora:  # DoRA normalizes rows
        norms = weight.flatten(1).norm(dim=1).view(-1, *[1] * (weight.dim() - 1))
        weight = weight * lora["lora_magnitude_vector"].view_as(norms) / norms
    return weight.T.contiguous() if flip else weight
