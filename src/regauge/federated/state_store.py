"""The folder of a run, from which it is resumed after an interruption.

    RUN/run.json             version, settings, layout and source of the model
    RUN/global.safetensors   the state after the last valid round, and the strategy's memory
    RUN/history.jsonl        one line for each round, appended
    RUN/model/               the trained model after the last round: a plain checkpoint
    RUN/results.json         accuracy over rounds
    RUN/seen/, RUN/kept/     with --record: contributions, and example indices (`recorder`)
    RUN/own/                 withheld tensors of clients on this machine (`local_state`)

The state is replaced atomically, and states how many lines of the history belong to it. A round is
in both or in neither, so that none is counted twice.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from regauge.checkpoints.documents import (
    CONFIG_BYTES,
    RESULTS_BYTES,
    load_json,
    parse_json,
    read_document,
)
from regauge.checkpoints.files import (
    append_bytes,
    exclusive_lock,
    remove_unfinished,
    wrap_write_errors,
    write_bytes,
)
from regauge.checkpoints.tensor_files import read_tensors, write_tensors
from regauge.errors import CheckpointError, FederatedError, Hint
from regauge.federated.aggregation import Memory
from regauge.federated.settings import LIMITS, VERSION, Settings, read_settings

Tensor = torch.Tensor
STATE_FILE, RUN_FILE, HISTORY_FILE = "global.safetensors", "run.json", "history.jsonl"
STATE_VERSION = 2  # of the state; version 1 holds the history itself


@dataclass(frozen=True)
class Round:
    """The history of one round.

    Attributes:
        number: The round, from 0.
        contributed: The clients whose contributions count.
        absent: The reasons of clients without a valid contribution, by client.
        loss: The mean loss of the clients.
        measures: The evaluation of the next state.
        seconds: The wall time.
        void: Whether the round changed nothing, for too few contributions or a `fault`.
        rejected: The failed check of each rejected contribution (`validation.REASONS`), by client.
        fault: Why the aggregated state is not valid.
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
    """A run after some rounds: the state, the memory of the strategy, and the history."""

    state: Mapping[str, Tensor]
    memory: Memory
    history: tuple[Round, ...] = ()


@contextlib.contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Lock the folder of a run, creating it if needed: two servers would count rounds twice.

    The lock is released when its process ends.
    """
    with wrap_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with exclusive_lock(
        folder,
        f"another process is at work on the run in {folder}",
        "wait for it, or end it: the same command then resumes the run",
    ):
        yield


def begin(folder: Path, settings: Settings, layout: str, about: Mapping[str, Any]) -> str:
    """Create the folder of a run, or resume it with an updated number of rounds.

    Args:
        folder: The folder of the run.
        settings: The settings of the run.
        layout: The layout digest of the model.
        about: Further facts, such as the source.

    Returns:
        The random name of the run, by which clients identify it.

    Raises:
        FederatedError: The folder has another run, or something else.
    """
    path = folder / RUN_FILE
    with wrap_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        remove_unfinished(folder)
    name = os.urandom(8).hex()
    if path.exists():
        existing = load_about(folder)
        name = str(existing.get("name", name))
        before = read_settings(existing["settings"])
        if before.digest != settings.digest or existing["layout"] != layout:
            changes = [
                f"{f.name} {getattr(before, f.name)}, now {getattr(settings, f.name)}"
                for f in fields(Settings)
                if f.name not in ("rounds", *LIMITS)
                and getattr(before, f.name) != getattr(settings, f.name)
            ]
            details = f" ({'; '.join(changes)})" if changes else ""
            raise FederatedError(
                f"{folder} holds a run with other settings or another model{details}",
                hint="continue with the same ones, or pass a new folder",
            )
    elif any(folder.iterdir()):
        raise FederatedError(
            f"{folder} must be empty or hold a run, got other files", hint="pass a new folder"
        )
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
    """Load the description of a run.

    Raises:
        FederatedError: The folder is not a run, damaged, or of another version.
    """
    path = folder / RUN_FILE
    try:
        data = read_document(path, CONFIG_BYTES, FederatedError)
    except CheckpointError as error:
        raise FederatedError(
            f"{folder} is not a run: {error}",
            hint=Hint(
                "pass the folder of regauge.federated.run",
                cli="pass the output folder of regauge federate",
            ),
        ) from error
    about = parse_json(data, path, FederatedError, "restore it from a copy")
    if not isinstance(about, dict) or about.get("regauge") != "federated run":
        raise FederatedError(f"{path} is not the description of a federated run")
    if about.get("version") != VERSION:
        raise FederatedError(
            f"the version of {path} must be {VERSION}, got version {about.get('version')}",
            hint="install a newer regauge",
        )
    if not isinstance(about.get("settings"), dict) or not isinstance(about.get("layout"), str):
        raise FederatedError(
            f"{path} must have settings and a layout", hint="restore it from a copy"
        )
    return about


def save(folder: Path, run_state: RunState) -> None:
    """Save a run after its last round: append the round, then replace the state.

    The state counts the lines of the history that belong to it, so that a round whose state was not
    written is not in the history either. A void round is only appended: it changes no state.
    """
    path, history = folder / HISTORY_FILE, run_state.history
    known = _read_lines(path)[: max(len(history) - 1, 0)]
    lines = [*known, *(_encode_round(r) for r in history[len(known) :])]
    append_bytes(path, b"".join(lines[len(known) :]), sum(map(len, known)))
    if history and history[-1].void and (folder / STATE_FILE).exists():
        return
    tensors = {f"state/{n}": t for n, t in run_state.state.items()} | {
        f"memory/{n}": t for n, t in run_state.memory.tensors.items()
    }
    metadata = {
        "regauge": "federated state",
        "version": str(STATE_VERSION),
        "rounds": str(run_state.memory.rounds),
        "lines": str(len(lines)),
        "history": hashlib.sha256(b"".join(lines)).hexdigest(),
    }
    write_tensors(folder / STATE_FILE, tensors, metadata)


def _encode_round(finished: Round) -> bytes:
    return json.dumps(asdict(finished)).encode() + b"\n"


def _read_lines(path: Path) -> list[bytes]:
    """Return the complete lines of a history; none without a file."""
    if not path.exists():
        return []
    content = read_document(path, RESULTS_BYTES, CheckpointError)
    return [line for line in content.splitlines(keepends=True) if line.endswith(b"\n")]


def _read_history(folder: Path, metadata: Mapping[str, str]) -> tuple[Round, ...]:
    """Return the history that belongs to a state, and the void rounds after it.

    Raises:
        KeyError, TypeError, ValueError: The history is not that of the state.
    """
    if metadata["version"] == "1":
        return tuple(read_round(r) for r in load_json(metadata["history"]))
    lines, count = _read_lines(folder / HISTORY_FILE), int(metadata["lines"])
    digest = hashlib.sha256(b"".join(lines[:count])).hexdigest()
    if not 0 <= count <= len(lines) or digest != metadata["history"]:
        raise ValueError(f"{HISTORY_FILE} is not the history of this state")
    rounds = [read_round(load_json(line)) for line in lines[:count]]
    later = (read_round(load_json(line)) for line in lines[count:])
    return (*rounds, *itertools.takewhile(lambda r: r.void, later))


def load(folder: Path) -> RunState | None:
    """Load the state of a run; None before the end of the first round.

    The folder is only read, since the run may be active.

    Raises:
        CheckpointError: The file is damaged.
    """
    path = folder / STATE_FILE
    if not path.exists():
        return None
    tensors, metadata = read_tensors(path, "federated state", STATE_VERSION, 1)
    groups: dict[str, dict[str, Tensor]] = {"state": {}, "memory": {}}
    try:
        history, rounds = _read_history(folder, metadata), int(metadata["rounds"])
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
    nonfinite = next((key for key, t in tensors.items() if not bool(torch.isfinite(t).all())), None)
    if nonfinite is not None:
        raise CheckpointError(
            f'{path} must be finite, got NaN or Inf in "{nonfinite}"', hint="restore it from a copy"
        )
    for name, t in groups["memory"].items():
        expected = groups["state"].get(name.partition("/")[2])
        if expected is None or expected.shape != t.shape or expected.dtype != t.dtype:
            raise CheckpointError(
                f'{path} must have an optimizer state like its tensors, got "{name}"',
                hint="restore it from a copy",
            )
    return RunState(groups["state"], Memory(groups["memory"], rounds), history)


def read_round(document: Mapping[str, Any]) -> Round:
    """Parse a round from JSON, as `save` writes it.

    Raises:
        KeyError, TypeError, ValueError: The document is not a round.
    """
    parsed = Round(**{**document, "contributed": tuple(document["contributed"])})
    texts = [
        value
        for texts_by_client in (parsed.absent, parsed.rejected)
        for pair in texts_by_client.items()
        for value in pair
    ]
    counts, numbers = (
        [parsed.number, *parsed.contributed],
        [
            parsed.seconds,
            *parsed.measures.values(),
            *([] if parsed.loss is None else [parsed.loss]),
        ],
    )
    if not all(isinstance(value, int) and value >= 0 for value in counts) or not all(
        isinstance(value, float | int) for value in numbers
    ):
        raise ValueError("the numbers of a round must be numbers")
    if not all(isinstance(value, str) for value in [*texts, parsed.fault]) or not isinstance(
        parsed.void, bool
    ):
        raise ValueError("the reasons of a round must be texts")
    return parsed
