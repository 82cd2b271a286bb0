"""The folder of a run, from which it goes on after whatever ended it.

    RUN/run.json                  version, settings, the model's layout and where it came from:
    written once
    RUN/global.safetensors        the state after the last round that counts, the strategy's memory,
    the history of all rounds
    RUN/model/                    the trained model, when the last round is done: a plain checkpoint
    RUN/results.json              accuracy over rounds
    RUN/seen/, RUN/kept/          on request: what the server saw, and what clients kept (`spying`)
    RUN/own/                      of clients on this machine: what they withhold (`withholding`)

State and history are one file that is replaced at once: a round is in both or in neither, so that
none is counted twice.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from regauge.checkpoints.documents import CONFIG_BYTES, load_json, parse_json, read_document
from regauge.checkpoints.files import exclusive_lock, wrap_write_errors, write_bytes
from regauge.checkpoints.tensor_files import read_tensors, remove_partials, write_tensors
from regauge.errors import CheckpointError
from regauge.federated.aggregation import Memory
from regauge.federated.settings import VERSION, FederatedError, Settings, read_settings

Tensor = torch.Tensor
STATE_FILE, RUN_FILE = "global.safetensors", "run.json"


@dataclass(frozen=True)
class Round:
    """What became of a round. `contributed` are clients; `absent` are those that were asked in
    vain, with the reason; `seconds` are of the clock. A round that is `void` had too few
    contributions, or a result that is not finite (`fault`), and changed nothing. `rejected` has the
    reason of each client whose contribution failed a check (`validation.REASONS`).
    """

    number: int
    contributed: tuple[int, ...]
    absent: Mapping[str, str] = field(default_factory=dict)
    loss: float | None = None
    measures: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    void: bool = False
    rejected: Mapping[str, str] = field(default_factory=dict)
    fault: str = ""


@dataclass(frozen=True, eq=False)
class RunState:
    """A run after some rounds."""

    state: Mapping[str, Tensor]
    memory: Memory
    history: tuple[Round, ...] = ()


@contextlib.contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Hold a run's folder, which is made if need be: two servers of one run would count rounds
    twice. It is free when its holder is gone.
    """
    with wrap_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with exclusive_lock(
        folder,
        f"another process is at work on the run in {folder}",
        "wait for it, or end it: the same command then goes on",
    ):
        yield


def begin(folder: Path, settings: Settings, layout: str, about: Mapping[str, Any]) -> str:
    """Make a run's folder, or find that it is this run's. Another's is refused; one that is to be
    longer is told its new end. Returns the run's name, a random one, by which clients know it
    again.
    """
    path = folder / RUN_FILE
    with wrap_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        remove_partials(folder / STATE_FILE)
    name = os.urandom(8).hex()
    if path.exists():
        found = load_about(folder)
        name = str(found.get("name", name))
        if read_settings(found["settings"]).digest != settings.digest or found["layout"] != layout:
            raise FederatedError(
                f"{folder} holds a run with other settings or another model",
                hint="go on with the same ones, or name a new folder",
            )
    elif any(folder.iterdir()):
        raise FederatedError(f"{folder} holds something else than a run", hint="name a new folder")
    document = {
        "regauge": "federated run",
        "version": VERSION,
        "name": name,
        "settings": settings.to_dict(),
        "layout": layout,
        "about": dict(about),
    }
    write_bytes(path, json.dumps(document, indent=1).encode())
    return name


def load_about(folder: Path) -> dict[str, Any]:
    """A run's description; another version's is refused by name."""
    path = folder / RUN_FILE
    try:
        data = read_document(path, CONFIG_BYTES, FederatedError)
    except CheckpointError as error:
        raise FederatedError(
            f"{folder} is no run: {error}", hint="give the folder that regauge federate -o made"
        ) from error
    found = parse_json(data, path, FederatedError, "restore it from a copy")
    if not isinstance(found, dict) or found.get("regauge") != "federated run":
        raise FederatedError(f"{path} describes no run of federated learning")
    if found.get("version") != VERSION:
        raise FederatedError(
            f"{path} has version {found.get('version')}; this regauge reads {VERSION}",
            hint="install a newer regauge",
        )
    if not isinstance(found.get("settings"), dict) or not isinstance(found.get("layout"), str):
        raise FederatedError(
            f"{path} must have settings and a layout", hint="restore it from a copy"
        )
    return found


def save(folder: Path, kept: RunState) -> None:
    tensors = {f"state/{n}": t for n, t in kept.state.items()} | {
        f"memory/{n}": t for n, t in kept.memory.tensors.items()
    }
    history = [asdict(r) for r in kept.history]
    metadata = {
        "regauge": "federated state",
        "version": str(VERSION),
        "rounds": str(kept.memory.rounds),
        "history": json.dumps(history),
    }
    write_tensors(folder / STATE_FILE, tensors, metadata)


def load(folder: Path) -> RunState | None:
    """What was kept, or None before the first round is done. It changes nothing there: the run may
    be at work.
    """
    path = folder / STATE_FILE
    if not path.exists():
        return None
    tensors, metadata = read_tensors(path, "federated state", VERSION)
    groups: dict[str, dict[str, Tensor]] = {"state": {}, "memory": {}}
    try:
        history, rounds = (
            tuple(read_round(r) for r in load_json(metadata["history"])),
            int(metadata["rounds"]),
        )
        for key, t in tensors.items():
            kind, _, name = key.partition("/")
            groups[kind][name] = t
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} must hold the state of a run, got {type(error).__name__}: {error}",
            hint="restore it from a copy",
        ) from error
    numbers = [r.number for r in history if not r.void]
    if numbers != list(range(len(numbers))) or rounds != len(numbers):
        raise CheckpointError(
            f"{path} must hold every round once, got {len(numbers)} rounds and a memory of "
            f"{rounds}",
            hint="restore it from a copy",
        )
    bad = next((key for key, t in tensors.items() if not bool(torch.isfinite(t).all())), None)
    if bad is not None:
        raise CheckpointError(
            f'{path} must be finite, got NaN or Inf in "{bad}"', hint="restore it from a copy"
        )
    for name, t in groups["memory"].items():
        own = groups["state"].get(name.partition("/")[2])
        if own is None or own.shape != t.shape or own.dtype != t.dtype:
            raise CheckpointError(
                f'{path} must have an optimizer state like its tensors, got "{name}"',
                hint="restore it from a copy",
            )
    return RunState(groups["state"], Memory(groups["memory"], rounds), history)


def read_round(found: Mapping[str, Any]) -> Round:
    """Return a round from JSON, as `save` writes it; raise KeyError, TypeError or ValueError for
    anything else.
    """
    made = Round(**{**found, "contributed": tuple(found["contributed"])})
    texts = [x for one in (made.absent, made.rejected) for pair in one.items() for x in pair]
    counts, reals = (
        [made.number, *made.contributed],
        [made.seconds, *made.measures.values(), *([] if made.loss is None else [made.loss])],
    )
    if not all(isinstance(x, int) and x >= 0 for x in counts) or not all(
        isinstance(x, float | int) for x in reals
    ):
        raise ValueError("the numbers of a round must be numbers")
    if not all(isinstance(x, str) for x in [*texts, made.fault]) or not isinstance(made.void, bool):
        raise ValueError("the reasons of a round must be texts")
    return made
