"""The spy: what a server sees of a run, kept on request, so that it can be attacked as it was sent.

    RUN/seen/round-00003/before.safetensors      the state that clients were given
    RUN/seen/round-00003/client-00002.safetensors  what one sent back; in its metadata kind, steps,
    rate, batch, examples
    RUN/kept/round-00003/client-00002.json       what the client kept, for scoring: the rows of its
    part, step by step

Under `seen` is nothing that the server was not sent. `kept` is numbers only: whoever scores an
attack needs the data too.
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
from regauge.federated.client import sample_rows
from regauge.federated.rounds import Recorder
from regauge.federated.settings import VERSION, FederatedError, Settings
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
    """A spy that writes into a run's folder."""

    def spy(number: int, state: State, sent: Sequence[Contribution]) -> None:
        seen, kept = (folder / name / f"round-{number:05}" for name in ("seen", "kept"))
        write_tensors(
            seen / "before.safetensors",
            state,
            {"regauge": "federated seen", "version": str(VERSION), "round": str(number)},
        )
        kept.mkdir(parents=True, exist_ok=True)
        for c in sent:
            about = {
                "client": c.client,
                "round": c.round,
                "kind": c.kind,
                "steps": c.steps,
                "rate": c.lr,
                "batch": c.batch,
                "examples": c.examples,
            }
            metadata = {
                "regauge": "federated update",
                "version": str(VERSION),
                "about": json.dumps(about),
            }
            write_tensors(seen / f"client-{c.client:05}.safetensors", c.tensors, metadata)
            truth = {
                "regauge": "federated kept",
                "version": VERSION,
                "rows": sample_rows(c.examples, settings, number, c.client),
            }
            write_bytes(kept / f"client-{c.client:05}.json", json.dumps(truth).encode())

    return spy


def recorded_rounds(folder: Path) -> dict[int, list[int]]:
    """The rounds that were recorded, and of which clients."""
    out = {}
    for path in sorted((folder / "seen").glob("round-*")):
        out[int(path.name.partition("-")[2])] = [
            int(p.stem.partition("-")[2]) for p in sorted(path.glob("client-*.safetensors"))
        ]
    if not out:
        raise FederatedError(
            f"{folder} has nothing that the server saw",
            hint="record a run with regauge federate --record",
        )
    return out


def load_update(folder: Path, number: int, client: int) -> RecordedUpdate:
    """One contribution, as it was sent. Its changes are those of local steps of SGD; whole weights
    are no update.
    """
    there = folder / "seen" / f"round-{number:05}"
    state, _ = read_tensors(there / "before.safetensors", "federated seen", VERSION)
    tensors, metadata = read_tensors(
        there / f"client-{client:05}.safetensors", "federated update", VERSION
    )
    try:
        about: dict[str, Any] = load_json(metadata["about"])
        if about["kind"] != "change":
            raise FederatedError(
                f"client {client} sent whole weights in round {number + 1}: there is no update "
                "in them",
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
            f"the record of client {client} in {there} is damaged: {error!r}",
            hint="restore it from a copy",
        ) from error


def load_rows(folder: Path, number: int, client: int) -> tuple[tuple[int, ...], ...]:
    """The rows of a client's part, step by step."""
    path = folder / "kept" / f"round-{number:05}" / f"client-{client:05}.json"
    try:
        found = load_json(path.read_text())
        return tuple(tuple(int(i) for i in rows) for rows in found["rows"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FederatedError(
            f"{path} does not say what the client kept: {error}",
            hint="without it attacks cannot be scored",
        ) from error
