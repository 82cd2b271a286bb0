"""The recorder: save what a server receives in a run, so that it can be audited.

    RUN/seen/round-00003/before.safetensors        the state that was sent out
    RUN/seen/round-00003/client-00002.safetensors  a contribution, with its metadata
    RUN/kept/round-00003/client-00002.json         the example indices of each step, for scoring

`seen` has only what the server received. `kept` has only indices: scoring needs the data too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regauge.checkpoints.documents import load_json
from regauge.checkpoints.files import write_bytes
from regauge.checkpoints.tensor_files import read_tensors, write_tensors
from regauge.errors import FederatedError, Hint
from regauge.federated.client import sample_rows
from regauge.federated.rounds import Recorder
from regauge.federated.settings import VERSION, Settings
from regauge.federated.states import Contribution, State


@dataclass(frozen=True, eq=False)
class RecordedUpdate:
    """One contribution as the server received it, and the state that it started from."""

    round: int
    client: int
    state: State
    tensors: State
    steps: int
    lr: float
    batch: int
    examples: int


def make_recorder(folder: Path, settings: Settings) -> Recorder:
    """Return a recorder that writes into the folder of a run."""

    def record(number: int, state: State, contributions: Sequence[Contribution]) -> None:
        seen_folder, kept_folder = (
            folder / name / f"round-{number:05}" for name in ("seen", "kept")
        )
        write_tensors(
            seen_folder / "before.safetensors",
            state,
            {"regauge": "federated seen", "version": str(VERSION), "round": str(number)},
        )
        kept_folder.mkdir(parents=True, exist_ok=True)
        for contribution in contributions:
            about = {
                "client": contribution.client,
                "round": contribution.round,
                "kind": contribution.kind,
                "steps": contribution.steps,
                "rate": contribution.lr,
                "batch": contribution.batch,
                "examples": contribution.examples,
            }
            metadata = {
                "regauge": "federated update",
                "version": str(VERSION),
                "about": json.dumps(about),
            }
            write_tensors(
                seen_folder / f"client-{contribution.client:05}.safetensors",
                contribution.tensors,
                metadata,
            )
            truth = {
                "regauge": "federated kept",
                "version": VERSION,
                "rows": sample_rows(contribution.examples, settings, number, contribution.client),
            }
            write_bytes(
                kept_folder / f"client-{contribution.client:05}.json", json.dumps(truth).encode()
            )

    return record


def recorded_rounds(folder: Path) -> dict[int, list[int]]:
    """Return the clients of each recorded round.

    Raises:
        FederatedError: Nothing was recorded.
    """
    rounds = {}
    for path in sorted((folder / "seen").glob("round-*")):
        rounds[int(path.name.partition("-")[2])] = [
            int(p.stem.partition("-")[2]) for p in sorted(path.glob("client-*.safetensors"))
        ]
    if not rounds:
        raise FederatedError(
            f"{folder} must be a recorded run, got no recorded rounds",
            hint=Hint(
                "record a run with regauge.federated.run(..., record=True)",
                cli="record a run with regauge federate --record",
            ),
        )
    return rounds


def recorded_files(folder: Path, number: int) -> list[Path]:
    """Return the files of a recorded round."""
    folders = [folder / name / f"round-{number:05}" for name in ("seen", "kept")]
    return [path for part in folders for path in sorted(part.iterdir())]


def load_update(folder: Path, number: int, client: int) -> RecordedUpdate:
    """Load one recorded contribution.

    Raises:
        FederatedError: The contribution is whole weights instead of a change, or damaged.
    """
    round_folder = folder / "seen" / f"round-{number:05}"
    state, _ = read_tensors(round_folder / "before.safetensors", "federated seen", VERSION)
    tensors, metadata = read_tensors(
        round_folder / f"client-{client:05}.safetensors", "federated update", VERSION
    )
    try:
        about: dict[str, Any] = load_json(metadata["about"])
        if about["kind"] != "change":
            raise FederatedError(
                f"the contribution of client {client} to round {number + 1} must be a change of "
                "weights, got whole weights",
                hint="choose a later round",
            )
        return RecordedUpdate(
            number,
            client,
            state,
            tensors,
            int(about["steps"]),
            float(about["rate"]),
            int(about["batch"]),
            int(about["examples"]),
        )
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise FederatedError(
            f"the record of client {client} in {round_folder} is damaged: {error!r}",
            hint="restore it from a copy",
        ) from error


def load_rows(folder: Path, number: int, client: int) -> tuple[tuple[int, ...], ...]:
    """Load the example indices of a client's part, for each step.

    Raises:
        FederatedError: The file is missing or damaged.
    """
    path = folder / "kept" / f"round-{number:05}" / f"client-{client:05}.json"
    try:
        document = load_json(path.read_text())
        return tuple(tuple(int(i) for i in rows) for rows in document["rows"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FederatedError(
            f"{path} must have the example indices of the client: {error}",
            hint="attacks cannot be scored without it",
        ) from error
