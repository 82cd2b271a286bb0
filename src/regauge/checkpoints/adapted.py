"""A checkpoint with a LoRA adapter added to it, as it is read: what PEFT's `merge_and_unload` would
give, without loading either.

    open_adapted("base+adapter")      # a Checkpoint like any other: its layers are W + s B A when
    they are touched

The scale s is lora_alpha / r (or / sqrt(r), with `use_rslora`), with the patterns that
adapter_config.json has for single layers. Sums are computed in float32 and rounded once, to the
dtype that the model stores. DoRA's magnitudes, biases of B, whole tensors (`modules_to_save`) and
adapted embeddings are read as PEFT reads them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge.checkpoints.adapters import LORA, find_tensor, require_lora, unwrap_name
from regauge.checkpoints.headers import DTYPES
from regauge.checkpoints.reader import Checkpoint, open_checkpoint, read_json
from regauge.core.patterns import compile_pattern
from regauge.errors import CheckpointError, PatternError

if TYPE_CHECKING:
    import torch

    Tensor = torch.Tensor


_REFETCH_HINT = "copy the adapter's own files again"
_MAX_PATTERNS = 1000  # of one adapter: each is held against every layer


@dataclass
class Change:
    """What an adapter does to one tensor of the model: the names of its own tensors by their kind,
    and the scale of what is added.
    """

    scale: float = 1.0
    names: dict[str, str] = field(default_factory=dict)


class AdaptedCheckpoint(Checkpoint):
    """A checkpoint whose tensors are read with the adapter's changes."""

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
        plain = super().__getitem__(name)
        change = self.changes.get(name)
        return (
            plain
            if change is None
            else _apply_change(plain, change, self.adapter, self.transposed).to(plain.dtype)
        )

    @property
    def sources(self) -> tuple[Path, ...]:
        return self.model.path, self.adapter.path

    def _read_bits(self, name: str) -> Any:
        return (
            super()._read_bits(name)
            if name not in self.changes
            else self[name].view(_unsigned_dtype(self.entries[name].dtype)).numpy()
        )


def is_adapted(source: str) -> bool:
    """Does this name a model and an adapter, as "model+adapter"?"""
    return "+" in source and not Path(source).expanduser().exists()


def open_adapted(source: str) -> Checkpoint:
    """Open "model+adapter", or a model alone. Names of tensors are compared; none is read."""
    if not is_adapted(source):
        return open_checkpoint(source)
    model, _, adapter = source.partition("+")
    return _open_pair(model, adapter)


def _open_pair(model: str | Path, adapter: str | Path) -> AdaptedCheckpoint:
    return AdaptedCheckpoint(open_checkpoint(model), open_checkpoint(adapter))


def _collect_changes(model: Checkpoint, adapter: Checkpoint) -> tuple[dict[str, Change], bool]:
    folder = adapter.path if adapter.is_folder else adapter.path.parent
    require_lora(folder)
    path = folder / "adapter_config.json"
    config: Mapping[str, Any] = read_json(path) if path.is_file() else {}
    out: dict[str, Change] = {}
    for name, entry in adapter.entries.items():
        found = LORA.fullmatch(name)
        if found is None:
            target, kind = find_tensor(model.entries, unwrap_name(name)), "whole"
        else:
            layer, kind = (
                unwrap_name(found["layer"]),
                found["kind"] + (".bias" if found["what"] == "bias" else ""),
            )
            target = find_tensor(
                model.entries, f"{layer}.bias" if kind == "lora_B.bias" else f"{layer}.weight"
            )
        if target is None:
            raise CheckpointError(
                f'{adapter.path} has "{name}", and {model.path} no such layer',
                hint="is the adapter of this model?",
            )
        change = out.setdefault(target[1], Change())
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
    for name, change in out.items():
        _require_complete(model, adapter, name, change, bool(config.get("fan_in_fan_out")))
    for name, change in out.items():  # a bias is scaled as its layer is
        if "lora_B.bias" in change.names:
            weight = out.get(f"{name.removesuffix('.bias')}.weight")
            if weight is None or "lora_A" not in weight.names:
                raise CheckpointError(
                    f'{adapter.path} has "{change.names["lora_B.bias"]}", and no A and B of '
                    "that layer",
                    hint="fetch the whole adapter",
                )
            change.scale = weight.scale
    return out, bool(config.get("fan_in_fan_out"))


def _lora_scale(config: Mapping[str, Any], path: Path, layer: str, rank: int) -> float:
    if "lora_alpha" not in config:
        raise CheckpointError(
            f'{path} does not say "lora_alpha", so that the adapter\'s scale is not known',
            hint="copy adapter_config.json beside it",
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
    ) as error:  # null, a word, no mapping, no pattern
        raise CheckpointError(
            f'the "lora_alpha" or "alpha_pattern" of {path} gives no number for "{layer}": {error}',
            hint="copy the adapter's own adapter_config.json",
        ) from error
    if not math.isfinite(alpha):
        raise CheckpointError(
            f'the "lora_alpha" or "alpha_pattern" of {path} must be finite for "{layer}", got '
            f"{alpha}",
            hint=_REFETCH_HINT,
        )
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _match_pattern(patterns: Mapping[str, Any], layer: str, default: Any) -> Any:
    """A layer's own value: the first pattern that its name ends with, as PEFT reads them."""
    if len(patterns) > _MAX_PATTERNS:
        raise PatternError(f"there must be at most {_MAX_PATTERNS} patterns, got {len(patterns)}")
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
    """A and B are both there, and what they add has the shape of the weight."""
    shapes = {kind: adapter.entries[n].shape for kind, n in change.names.items()}
    for first, second in (("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B")):
        if (first in shapes) != (second in shapes):
            raise CheckpointError(
                f'{adapter.path} has only one of {first} and {second} for "{name}"',
                hint="fetch the whole adapter",
            )
    for second in ("lora_B", "lora_embedding_B"):
        if second in shapes and len(shapes[second]) < 2:
            raise CheckpointError(
                f'{second} of "{name}" in {adapter.path} must be [size, rank], got '
                f"{list(shapes[second])}",
                hint=_REFETCH_HINT,
            )
    shape = model.entries[name].shape
    if "lora_A" in shapes:
        added = (*shapes["lora_B"][:1], *shapes["lora_A"][1:])
        added = added[::-1] if transposed and len(added) == 2 else added
        inner = shapes["lora_A"][0] == shapes["lora_B"][1]
    elif "lora_embedding_A" in shapes:
        added, inner = (
            (shapes["lora_embedding_A"][1], shapes["lora_embedding_B"][0]),
            shapes["lora_embedding_A"][0] == shapes["lora_embedding_B"][1],
        )
    elif "lora_magnitude_vector" in shapes:
        raise CheckpointError(
            f'{adapter.path} has a magnitude for "{name}", and no A and B',
            hint="fetch the whole adapter",
        )
    else:
        added, inner = next(iter(shapes.values())), True
    if "lora_magnitude_vector" in shapes and "whole" not in shapes:
        length = shapes["lora_embedding_B" if "lora_embedding_B" in shapes else "lora_B"][0]
        if math.prod(shapes["lora_magnitude_vector"]) != length:
            raise CheckpointError(
                f'the magnitudes of "{name}" in {adapter.path} must be {length} numbers, got '
                f"{list(shapes['lora_magnitude_vector'])}",
                hint=_REFETCH_HINT,
            )
    if added != shape or not inner:
        raise CheckpointError(
            f'{adapter.path} changes "{name}" as if it were {list(added)}, and it is {list(shape)}',
            hint="is the adapter of this model?",
        )


def _apply_change(plain: Tensor, change: Change, adapter: Checkpoint, transposed: bool) -> Tensor:
    import torch

    work = torch.float64 if plain.dtype == torch.float64 else torch.float32
    own = {kind: adapter[name].to(work) for kind, name in change.names.items()}
    weight = own["whole"] if "whole" in own else plain.to(work)
    if "lora_B.bias" in own:
        return weight + change.scale * own["lora_B.bias"]
    if "lora_embedding_A" in own:
        weight = weight + change.scale * (own["lora_embedding_B"] @ own["lora_embedding_A"]).T
        return (
            weight * own["lora_magnitude_vector"] / weight.norm(dim=0)
            if "lora_magnitude_vector" in own
            else weight
        )  # columns of this length
    if "lora_A" not in own:
        return weight
    a, b = own["lora_A"], own["lora_B"]
    added = (b.flatten(1) @ a.flatten(1)).view(b.shape[0], *a.shape[1:])
    flip = transposed and plain.dim() == 2
    weight = (weight.T if flip else weight) + change.scale * added
    if "lora_magnitude_vector" in own:  # DoRA: rows of this length
        length = weight.flatten(1).norm(dim=1).view(-1, *[1] * (weight.dim() - 1))
        weight = weight * own["lora_magnitude_vector"].view_as(length) / length
    return weight.T.contiguous() if flip else weight


def _unsigned_dtype(dtype: str) -> Any:
    import torch

    return {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}[DTYPES[dtype][1]]
