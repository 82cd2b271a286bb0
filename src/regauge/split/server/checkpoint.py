"""The server's checkpoint: one safetensors file, written atomically.

It holds the backbone's weights, the optimizer state and the accumulated gradients. For every
session it holds the number of the last request with its reply, the requests of open passes, and the
session's copy of the backbone, if any. Numbers and names are JSON in the file's metadata. It needs
neither pickle nor random state: dropout is seeded by the session and the request's number.

The client's checkpoint has the same format: embedding and head in place of the backbone, and its
one session.
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
    """Weights, and the optimizer state that trains them."""

    step: int
    losses_since_step: int
    steps_since_mean: int
    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Mapping[str, Tensor]]  # by parameter, then by entry
    gradients: Mapping[str, Tensor]
    # float32 weights of half-precision parameters
    masters: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def counters(self) -> list[int]:
        """Return the counters as they are stored."""
        return [self.step, self.losses_since_step, self.steps_since_mean]


@dataclass(frozen=True)
class SplitCheckpoint:
    """The complete state of a server, or of a client, after some requests.

    Attributes:
        digest: Digest of the model's description, or of the client's run.
        step: Optimizer steps taken.
        main: State of the backbone.
        copies: States of the sessions' own copies, by session.
        departed: Steps and weights of sessions that ended in this round, for its mean.
        sessions: Fields of the sessions beside tensors and frames.
        frames: Under session/reply the reply to the last request, under session/number the requests
            whose pass is open.
        ended_sessions: Sessions that have ended, and the clients they belonged to.
        optimizer_name: Name of the optimizer; "" for a server without training and in older files.
    """

    digest: str
    step: int
    main: TrainingState
    copies: Mapping[str, TrainingState] = field(default_factory=dict)
    departed: Mapping[str, tuple[int, Mapping[str, Tensor]]] = field(default_factory=dict)
    sessions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    frames: Mapping[str, bytes] = field(default_factory=dict)
    ended_sessions: Mapping[str, str] = field(default_factory=dict)
    optimizer_name: str = (
        ""  # the optimizer's name; of a server that only serves, and in older files, ""
    )


def save(folder: Path, state: SplitCheckpoint) -> None:
    """Write a checkpoint into a folder, atomically."""
    tensors = _flatten(state.main)
    for name, copy in state.copies.items():
        tensors |= {f"copy/{name}/{k}": t for k, t in _flatten(copy).items()}
    tensors |= {
        f"left/{name}/{k}": t
        for name, (_, weights) in state.departed.items()
        for k, t in weights.items()
    }
    tensors |= {
        f"frame/{s}": torch.frombuffer(bytearray(data), dtype=torch.uint8)
        for s, data in state.frames.items()
    }
    fields = {
        "digest": state.digest,
        "step": state.step,
        "main": state.main.counters,
        "copies": {name: copy.counters for name, copy in state.copies.items()},
        "left": {name: n for name, (n, _) in state.departed.items()},
        "sessions": {k: dict(v) for k, v in state.sessions.items()},
        "gone": dict(state.ended_sessions),
        "trainer": state.optimizer_name,
    }
    metadata = {"regauge": "split", "version": str(VERSION), "about": json.dumps(fields)}
    write_tensors(folder / FILE, tensors, metadata, mode=0o600)  # it holds activations


def _flatten(state: TrainingState) -> dict[str, Tensor]:
    """Return all tensors of a training state, with their kind as a prefix."""
    tensors = {f"weight/{n}": t for n, t in state.weights.items()} | {
        f"gradient/{n}": t for n, t in state.gradients.items()
    }
    tensors |= {f"master/{n}": t for n, t in state.masters.items()}
    return tensors | {
        f"optimizer/{n}/{k}": t
        for n, entries in state.optimizer.items()
        for k, t in entries.items()
    }


def load(folder: Path) -> SplitCheckpoint | None:
    """Return the checkpoint in a folder, or None if there is none.

    Raises:
        CheckpointError: The file is damaged, or of another version.
    """
    path = folder / FILE
    remove_partials(path)
    if not path.exists():
        return None
    tensors, metadata = read_tensors(path, "split", VERSION)
    try:
        fields = load_json(metadata["about"])
        groups: dict[str, dict[str, Tensor]] = {
            kind: {}
            for kind in ("weight", "master", "gradient", "optimizer", "frame", "copy", "left")
        }
        for key, tensor in tensors.items():
            kind, _, name = key.partition("/")
            _require(kind in groups, f'unexpected tensor "{key[:100]}"')
            groups[kind][name] = tensor
        _require(isinstance(fields, dict), "its metadata must be an object")
        for name, expected_type in (
            ("copies", dict),
            ("left", dict),
            ("sessions", dict),
            ("digest", str),
            ("trainer", str),
        ):
            _require(
                isinstance(fields.get(name, "" if name == "trainer" else None), expected_type),
                f'"{name}" has the wrong type',
            )
        _require(_is_count(fields["step"]), '"step" must be a number >= 0')
        _require(
            all(isinstance(s, dict) for s in fields["sessions"].values()),
            "a session must be an object",
        )
        _require(
            all(_is_count(n) and n > 0 for n in fields["left"].values()),
            '"left" must hold numbers > 0',
        )
        _require(
            all(t.dtype == torch.uint8 and t.dim() == 1 for t in groups["frame"].values()),
            "frames must be bytes",
        )
        for group, names in (("copy", fields["copies"]), ("left", fields["left"])):
            unexpected = next(
                (key for key in groups[group] if key.partition("/")[0] not in names), None
            )
            _require(unexpected is None, f'unexpected tensor "{group}/{str(unexpected)[:100]}"')
        frames = {place: tensor.numpy().tobytes() for place, tensor in groups["frame"].items()}
        copies = {
            name: _unflatten(_select_prefix(groups["copy"], name), counters)
            for name, counters in fields["copies"].items()
        }
        departed = {
            name: (n, _select_prefix(groups["left"], name)) for name, n in fields["left"].items()
        }
        ended, optimizer_name = fields.get("gone", {}), fields.get("trainer", "")
        # Older files store no clients.
        ended = dict.fromkeys(ended, "") if isinstance(ended, list) else ended
        _require(
            isinstance(ended, dict) and all(isinstance(peer, str) for peer in ended.values()),
            '"gone" must map sessions to clients',
        )
        return SplitCheckpoint(
            fields["digest"],
            fields["step"],
            _unflatten(tensors, fields["main"]),
            copies,
            departed,
            fields["sessions"],
            frames,
            ended,
            optimizer_name,
        )
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} cannot be read as a checkpoint of a split server: {error}",
            hint="restore it from a copy",
        ) from error


def _select_prefix(tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """Return the tensors below `name/`, by the rest of their names."""
    return {
        key.removeprefix(f"{name}/"): t for key, t in tensors.items() if key.startswith(f"{name}/")
    }


def _unflatten(tensors: Mapping[str, Tensor], counters: list[int]) -> TrainingState:
    """Rebuild a training state from the names of `_flatten`; other tensors are ignored."""
    optimizer: dict[str, dict[str, Tensor]] = {}
    for key, tensor in _select_prefix(tensors, "optimizer").items():
        name, _, entry = key.rpartition("/")
        optimizer.setdefault(name, {})[entry] = tensor
    step, losses_since_step, steps_since_mean = counters
    _require(all(_is_count(n) for n in counters), "steps must be numbers >= 0")
    return TrainingState(
        step,
        losses_since_step,
        steps_since_mean,
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
