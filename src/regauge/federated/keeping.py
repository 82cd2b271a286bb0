"""The folder of a run, from which it goes on after whatever ended it.

    RUN/run.json                  version, settings, the model's layout and where it came from: written once
    RUN/global.safetensors        the state after the last round that counts, the strategy's memory, the history of all rounds
    RUN/model/                    the trained model, when the last round is done: a plain checkpoint
    RUN/results.json              accuracy over rounds
    RUN/seen/, RUN/kept/          on request: what the server saw, and what clients kept (`spying`)

State and history are one file that is replaced at once: a round is in both or in neither, so that none is counted twice.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from regauge.errors import CheckpointError
from regauge.federated.aggregating import Memory
from regauge.federated.settings import VERSION, FederatedError, Settings, read_settings
from regauge.files import beside, fsync_folder, write_bytes, writing

Tensor = torch.Tensor
FILE, ABOUT = "global.safetensors", "run.json"


@dataclass(frozen=True)
class Round:
    """What became of a round. `contributed` are clients; `absent` are those that were asked in vain, with the reason; `seconds` are of the clock.
    A round that is `void` had too few contributions and changed nothing."""

    number: int
    contributed: tuple[int, ...]
    absent: Mapping[str, str] = field(default_factory=dict)
    loss: float | None = None
    measures: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    void: bool = False


@dataclass(frozen=True, eq=False)
class Kept:
    """A run after some rounds."""

    state: Mapping[str, Tensor]
    memory: Memory
    history: tuple[Round, ...] = ()


def begin(folder: Path, settings: Settings, layout: str, about: Mapping[str, Any]) -> None:
    """Make a run's folder, or find that it is this run's. Another's is refused; one that is to be longer is told its new end."""
    path = folder / ABOUT
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    if path.exists():
        found = about_of(folder)
        if read_settings(found["settings"]).digest != settings.digest or found["layout"] != layout:
            raise FederatedError(f"{folder} holds a run with other settings or another model", hint="go on with the same ones, or name a new folder")
    elif any(folder.iterdir()):
        raise FederatedError(f"{folder} holds something else than a run", hint="name a new folder")
    document = {"regauge": "federated run", "version": VERSION, "settings": settings.told(), "layout": layout, "about": dict(about)}
    write_bytes(path, json.dumps(document, indent=1).encode())


def about_of(folder: Path) -> dict[str, Any]:
    """A run's description; another version's is refused by name."""
    path = folder / ABOUT
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise FederatedError(f"{folder} is no run: {error.strerror or error}", hint="give the folder that regauge federate -o made") from error
    except ValueError as error:
        raise FederatedError(f"{path} is damaged: {error}") from error
    if not isinstance(found, dict) or found.get("regauge") != "federated run":
        raise FederatedError(f"{path} describes no run of federated learning")
    if found.get("version") != VERSION:
        raise FederatedError(f"{path} has version {found.get('version')}; this regauge reads {VERSION}", hint="install a newer regauge")
    return found


def save(folder: Path, kept: Kept) -> None:
    tensors = {f"state/{n}": t for n, t in kept.state.items()} | {f"memory/{n}": t for n, t in kept.memory.tensors.items()}
    history = [asdict(r) for r in kept.history]
    metadata = {"regauge": "federated state", "version": str(VERSION), "rounds": str(kept.memory.rounds), "history": json.dumps(history)}
    write_tensors(folder / FILE, tensors, metadata)


def load(folder: Path) -> Kept | None:
    """What was kept, or None before the first round is done."""
    path = folder / FILE
    for partial in folder.glob(f".{FILE}.partial-*"):  # of a write that a kill has ended
        partial.unlink(missing_ok=True)
    if not path.exists():
        return None
    tensors, metadata = read_tensors(path, "federated state")
    try:
        history = tuple(Round(**{**r, "contributed": tuple(r["contributed"])}) for r in json.loads(metadata["history"]))
        groups: dict[str, dict[str, Tensor]] = {"state": {}, "memory": {}}
        for key, t in tensors.items():
            kind, _, name = key.partition("/")
            groups[kind][name] = t
        return Kept(groups["state"], Memory(groups["memory"], int(metadata["rounds"])), history)
    except (KeyError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read as the state of a run: {error!r}", hint="restore it from a copy") from error


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """One safetensors file, whole or not at all."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = beside(path)
        try:
            save_file({k: t.detach().cpu().contiguous().clone() for k, t in tensors.items()}, partial, dict(metadata))
            with partial.open("rb") as file:
                os.fsync(file.fileno())
            partial.replace(path)
        except SafetensorError as error:  # what the system said is in its text only
            raise CheckpointError(f"{path} cannot be written: {error}", hint="is the disk full? What was there before is as it was") from error
        finally:
            partial.unlink(missing_ok=True)
        fsync_folder(path.parent)


def read_tensors(path: Path, what: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file and its metadata, if it is `what` it should be, of this version."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            tensors: dict[str, Tensor] = {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}", hint="restore it from a copy") from error
    if metadata.get("regauge") != what or metadata.get("version") != str(VERSION):
        raise CheckpointError(f"{path} is no {what} of version {VERSION}", hint="name another folder, or upgrade")
    return tensors, metadata


def told(history: Sequence[Round]) -> list[dict[str, Any]]:
    return [asdict(r) for r in history]
