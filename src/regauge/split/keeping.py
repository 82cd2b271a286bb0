"""The server's checkpoint: one safetensors file that appears whole or not at all.

It holds the backbone's weights, the optimizer's state, gradients that wait for their step, and for every session the number of its last request with
the reply to it, and the requests of passes that are open. Numbers and names are JSON in the file's metadata. There is no pickle in it, and no random
state: dropout is drawn from the session and the request's number.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from regauge.errors import CheckpointError
from regauge.files import beside, fsync_folder, writing

Tensor = torch.Tensor
FILE = "split.safetensors"
VERSION = 2


@dataclass(frozen=True)
class Kept:
    """What a server is after some requests."""

    digest: str  # of the model's description
    step: int
    waiting: int  # backward passes since the last step
    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Mapping[str, Tensor]]  # by parameter, then by name
    gradients: Mapping[str, Tensor]
    sessions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # what is no tensor
    frames: Mapping[str, bytes] = field(default_factory=dict)  # session/reply: to its last request; session/number: requests whose pass is open


def save(folder: Path, kept: Kept) -> None:
    from safetensors.torch import save_file

    tensors = {f"weight/{n}": t for n, t in kept.weights.items()} | {f"gradient/{n}": t for n, t in kept.gradients.items()}
    tensors |= {f"optimizer/{n}/{k}": t for n, found in kept.optimizer.items() for k, t in found.items()}
    tensors |= {f"frame/{s}": torch.frombuffer(bytearray(data), dtype=torch.uint8) for s, data in kept.frames.items()}
    about = {"digest": kept.digest, "step": kept.step, "waiting": kept.waiting, "sessions": {k: dict(v) for k, v in kept.sessions.items()}}
    metadata = {"regauge": "split", "version": str(VERSION), "about": json.dumps(about)}
    path = folder / FILE
    with writing(path):
        folder.mkdir(parents=True, exist_ok=True)
        partial = beside(path)
        try:
            save_file({k: t.detach().cpu().contiguous().clone() for k, t in tensors.items()}, partial, metadata)
            with partial.open("rb") as file:
                os.fsync(file.fileno())
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
        fsync_folder(folder)


def load(folder: Path) -> Kept | None:
    """What was kept here, or None where nothing was."""
    from safetensors import SafetensorError, safe_open

    path = folder / FILE
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors: dict[str, Tensor] = {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118 (not a dict)
        if metadata.get("regauge") != "split" or int(metadata["version"]) != VERSION:
            raise CheckpointError(f"{path} is no checkpoint of a split server of version {VERSION}", hint="name another folder")
        about = json.loads(metadata["about"])
        groups: dict[str, dict[str, Tensor]] = {"weight": {}, "gradient": {}, "optimizer": {}, "frame": {}}
        for key, tensor in tensors.items():
            kind, _, name = key.partition("/")
            groups[kind][name] = tensor
        optimizer: dict[str, dict[str, Tensor]] = {}
        for key, tensor in groups["optimizer"].items():
            name, _, entry = key.rpartition("/")
            optimizer.setdefault(name, {})[entry] = tensor
        frames = {place: tensor.numpy().tobytes() for place, tensor in groups["frame"].items()}
        return Kept(about["digest"], about["step"], about["waiting"], groups["weight"], optimizer, groups["gradient"], about["sessions"], frames)
    except (SafetensorError, OSError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read as a checkpoint of a split server: {error}", hint="restore it from a copy") from error
