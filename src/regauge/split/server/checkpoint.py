"""The server's checkpoint: one safetensors file that appears whole or not at all.

It holds the backbone's weights, the optimizer's state, gradients that wait for their step, and for
every session the number of its last request with the reply to it, the requests of passes that are
open, and its copy of the backbone if it has one. Numbers and names are JSON in the file's metadata.
There is no pickle in it, and no random state: dropout is drawn from the session and the request's
number.

The client's own checkpoint is of the same kind: embedding and head in place of the backbone, and
its one session.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from regauge.checkpoints.documents import load_json
from regauge.checkpoints.tensor_files import read_tensors, remove_partials, write_tensors
from regauge.errors import CheckpointError

Tensor = torch.Tensor
FILE = "split.safetensors"
VERSION = 2


@dataclass(frozen=True)
class TrainingState:
    """Weights, and what trains them."""

    step: int
    losses_since_step: int  # losses since the last step
    steps_since_mean: int  # steps since the last average
    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Mapping[str, Tensor]]  # by parameter, then by name
    gradients: Mapping[str, Tensor]
    masters: Mapping[str, Tensor] = field(
        default_factory=dict
    )  # float32 weights of half-precision parameters

    @property
    def counters(self) -> list[int]:
        return [self.step, self.losses_since_step, self.steps_since_mean]


@dataclass(frozen=True)
class SplitCheckpoint:
    """What a server is after some requests."""

    digest: str  # of the model's description
    step: int
    main: TrainingState
    copies: Mapping[str, TrainingState] = field(default_factory=dict)  # by session
    departed: Mapping[str, tuple[int, Mapping[str, Tensor]]] = field(
        default_factory=dict
    )  # of those who are gone, for the average to come
    sessions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # what is no tensor
    frames: Mapping[str, bytes] = field(
        default_factory=dict
    )  # session/reply: to its last request; session/number: requests whose pass is open
    ended_sessions: Mapping[str, str] = field(
        default_factory=dict
    )  # sessions that have ended, and whose they were
    optimizer_name: str = (
        ""  # the optimizer's name; of a server that only serves, and in older files, ""
    )


def save(folder: Path, kept: SplitCheckpoint) -> None:
    tensors = _flatten(kept.main)
    for name, one in kept.copies.items():
        tensors |= {f"copy/{name}/{k}": t for k, t in _flatten(one).items()}
    tensors |= {
        f"left/{name}/{k}": t
        for name, (_, weights) in kept.departed.items()
        for k, t in weights.items()
    }
    tensors |= {
        f"frame/{s}": torch.frombuffer(bytearray(data), dtype=torch.uint8)
        for s, data in kept.frames.items()
    }
    about = {
        "digest": kept.digest,
        "step": kept.step,
        "main": kept.main.counters,
        "copies": {name: one.counters for name, one in kept.copies.items()},
        "left": {name: n for name, (n, _) in kept.departed.items()},
        "sessions": {k: dict(v) for k, v in kept.sessions.items()},
        "gone": dict(kept.ended_sessions),
        "trainer": kept.optimizer_name,
    }
    metadata = {"regauge": "split", "version": str(VERSION), "about": json.dumps(about)}
    write_tensors(folder / FILE, tensors, metadata, mode=0o600)  # it holds what crossed


def _flatten(one: TrainingState) -> dict[str, Tensor]:
    out = {f"weight/{n}": t for n, t in one.weights.items()} | {
        f"gradient/{n}": t for n, t in one.gradients.items()
    }
    out |= {f"master/{n}": t for n, t in one.masters.items()}
    return out | {
        f"optimizer/{n}/{k}": t for n, found in one.optimizer.items() for k, t in found.items()
    }


def load(folder: Path) -> SplitCheckpoint | None:
    """What was kept here, or None where nothing was."""
    path = folder / FILE
    remove_partials(path)
    if not path.exists():
        return None
    tensors, metadata = read_tensors(path, "split", VERSION)
    try:
        about = load_json(metadata["about"])
        groups: dict[str, dict[str, Tensor]] = {
            kind: {}
            for kind in ("weight", "master", "gradient", "optimizer", "frame", "copy", "left")
        }
        for key, tensor in tensors.items():
            kind, _, name = key.partition("/")
            _require(kind in groups, f'unexpected tensor "{key[:100]}"')
            groups[kind][name] = tensor
        _require(isinstance(about, dict), "its metadata must be an object")
        for name, kind_of in (
            ("copies", dict),
            ("left", dict),
            ("sessions", dict),
            ("digest", str),
            ("trainer", str),
        ):
            _require(
                isinstance(about.get(name, "" if name == "trainer" else None), kind_of),
                f'"{name}" has the wrong type',
            )
        _require(_is_count(about["step"]), '"step" must be a number >= 0')
        _require(
            all(isinstance(s, dict) for s in about["sessions"].values()),
            "a session must be an object",
        )
        _require(
            all(_is_count(n) and n > 0 for n in about["left"].values()),
            '"left" must hold numbers > 0',
        )
        _require(
            all(t.dtype == torch.uint8 and t.dim() == 1 for t in groups["frame"].values()),
            "frames must be bytes",
        )
        for group, names in (("copy", about["copies"]), ("left", about["left"])):
            stray = next((key for key in groups[group] if key.partition("/")[0] not in names), None)
            _require(stray is None, f'unexpected tensor "{group}/{str(stray)[:100]}"')
        frames = {place: tensor.numpy().tobytes() for place, tensor in groups["frame"].items()}
        copies = {
            name: _unflatten(_select_prefix(groups["copy"], name), found)
            for name, found in about["copies"].items()
        }
        left = {
            name: (n, _select_prefix(groups["left"], name)) for name, n in about["left"].items()
        }
        gone, trainer = about.get("gone", {}), about.get("trainer", "")
        gone = (
            dict.fromkeys(gone, "") if isinstance(gone, list) else gone
        )  # older files name no client
        _require(
            isinstance(gone, dict) and all(isinstance(peer, str) for peer in gone.values()),
            '"gone" must map sessions to clients',
        )
        return SplitCheckpoint(
            about["digest"],
            about["step"],
            _unflatten(tensors, about["main"]),
            copies,
            left,
            about["sessions"],
            frames,
            gone,
            trainer,
        )
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} cannot be read as a checkpoint of a split server: {error}",
            hint="restore it from a copy",
        ) from error


def _select_prefix(tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    return {
        key.removeprefix(f"{name}/"): t for key, t in tensors.items() if key.startswith(f"{name}/")
    }


def _unflatten(tensors: Mapping[str, Tensor], numbers: list[int]) -> TrainingState:
    """What `_flat` made flat. Other kinds are passed over."""
    optimizer: dict[str, dict[str, Tensor]] = {}
    for key, tensor in _select_prefix(tensors, "optimizer").items():
        name, _, entry = key.rpartition("/")
        optimizer.setdefault(name, {})[entry] = tensor
    step, waiting, since = numbers
    _require(all(_is_count(n) for n in numbers), "steps must be numbers >= 0")
    return TrainingState(
        step,
        waiting,
        since,
        _select_prefix(tensors, "weight"),
        optimizer,
        _select_prefix(tensors, "gradient"),
        _select_prefix(tensors, "master"),
    )


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)
