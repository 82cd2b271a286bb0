"""The models and data of audits: loaded, checked and divided among clients, attacker and test."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from regauge.data.datasets import Data, EncodedImages
from regauge.data.sources import DataSource, source_of
from regauge.data.tasks import Examples, size_of
from regauge.errors import AuditError, DataError, Hint, LockError
from regauge.locking.lock import record_of
from regauge.models.load import load_model, reinitialize
from regauge.models.sources import open_source

if TYPE_CHECKING:
    from regauge.models.sources import Source

AuditData: TypeAlias = str | Path | DataSource | Examples


def name_of(source: Any) -> str:
    """Return the name of a model or of data in reports."""
    if isinstance(source, str | Path):
        return str(source)
    return source.uri if isinstance(source, DataSource) else type(source).__name__


def load_plain_model(
    source: Source, is_fresh: bool = False, seed: int = 0
) -> tuple[torch.nn.Module, Path | None]:
    """Load the unlocked model that clients and server start from.

    Args:
        source: The model. A live module is copied.
        is_fresh: Whether to start from newly initialized weights.
        seed: The random seed of these weights.

    Returns:
        The model in evaluation mode, and its folder if it has one.

    Raises:
        LockError: The model is locked.
    """
    checkpoint, module = open_source(source)
    record = record_of(checkpoint if module is None else module)
    if record is not None:
        raise LockError(
            f"{name_of(source)} is locked by the key {record.key}",
            hint=Hint(
                "audit the plain model; regauge.audit.lock measures what the lock adds",
                cli="audit the plain model; regauge audit lock measures what the lock adds",
            ),
        )
    if module is None:
        folder = checkpoint.path if checkpoint.is_folder else checkpoint.path.parent
        module, beside = load_model(checkpoint, "float32"), folder
    else:
        module, beside = copy.deepcopy(module).float().eval(), None
    return (reinitialize(module, seed) if is_fresh else module), beside


def reads_texts(module: torch.nn.Module) -> bool:
    """Return whether a model reads token ids."""
    return "input_ids" in inspect.signature(module.forward).parameters


def load_examples(
    data: AuditData,
    module: torch.nn.Module,
    beside: Path | None,
    *,
    split: str = "train",
    resize: bool = True,
    pixels: tuple[Sequence[float], Sequence[float]] = ((), ()),
) -> tuple[Examples, dict[str, Any]]:
    """Return examples as inputs of a model, and how it reads them.

    Args:
        data: A URI, a path, a `DataSource`, or examples.
        module: The model.
        beside: The folder with its tokenizer or preprocessor.
        split: The split of data that name none.
        resize: Whether images of another size than the model's are resized.
        pixels: Mean and deviation of the normalization of images, where `data` have none.

    Raises:
        DataError: The data cannot be read, or images have another size.
    """
    mean, std = (tuple(numbers) for numbers in pixels)
    if isinstance(data, Examples):
        kind = "texts" if reads_texts(module) else "images"
        return data, {"kind": kind, "mean": mean or (0.0,), "std": std or (1.0,)}
    source = source_of(data, split)
    source = replace(source, mean=source.mean or mean, std=source.std or std)
    opened = source.open()
    if not resize and not reads_texts(module):
        require_size(opened, module)
    return source.read(module, beside, data=opened)


def require_size(data: Data, module: torch.nn.Module) -> None:
    """Raise unless the images have the model's input size."""
    size = size_of(module)
    if size is None or "image" not in data.fields:
        return
    images = data["image"]
    shapes = images.sizes if isinstance(images, EncodedImages) else {np.asarray(images).shape[1:3]}
    mismatched = sorted(shapes - {size})
    if mismatched:
        amount = "all" if len(shapes) > 1 else "the"
        raise DataError(
            f"{amount} images of {data.name} must be {size[0]} x {size[1]}, got "
            f"{' x '.join(map(str, mismatched[0]))}",
            hint=Hint(
                "pass resize=True in the options to resize them", cli="pass --resize to resize them"
            ),
        )


def cast_inputs(
    model: torch.nn.Module, inputs: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Convert inputs to the model's dtype and device."""
    parameter = next(p for p in model.parameters() if p.is_floating_point())
    return {
        k: v.to(parameter) if v.is_floating_point() else v.to(parameter.device)
        for k, v in inputs.items()
    }


def divide_examples(
    examples: Examples, shares: Sequence[float], samples: int | None, seed: int
) -> list[Examples]:
    """Divide random examples without overlap: a part for each share, and the rest.

    Args:
        examples: The examples.
        shares: The shares of the parts but the last.
        samples: The number of examples to use; None for all.
        seed: The random seed.
    """
    order = np.random.default_rng(seed).permutation(len(examples))[:samples]
    ends = [round(sum(shares[:i]) * len(order)) for i in range(1, len(shares) + 1)]
    return [examples.only(part) for part in np.split(order, ends)]


def align_names(spec: Any, state: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the backbone of another model of the family under this model's names.

    A head on top adds a prefix to the names.

    Raises:
        AuditError: The other model lacks a tensor.
    """
    renamed: dict[str, Any] = {}
    for name in (n for n, part in spec.parts.items() if part == "backbone"):
        source = (
            name
            if name in state
            else next((n for n in state if n.endswith("." + name) or name.endswith("." + n)), None)
        )
        if source is None:
            raise AuditError(
                f'{where} has no "{name}"', hint="the base must be of the same family and size"
            )
        renamed[name] = state[source]
    return renamed
