"""The withheld tensors of clients: trained from round to round, and never sent.

    RUN/own/client-00002/round-00003.safetensors

On a node the folder is KEEP/RUN/client-00002/..., with KEEP from its configuration. A round starts
with the client's tensors after the last earlier round in which it trained, or with the server's.
The tensors before and after a round are both saved, so that a repeated round starts the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from regauge.checkpoints.tensor_files import read_tensors, write_tensors
from regauge.defences.gradients import Withhold, part_parameters
from regauge.federated.settings import VERSION
from regauge.federated.states import Contribution, State


class LocalState:
    """The withheld tensors of clients, in a folder or, without one, in memory."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self.memory: dict[int, dict[int, State]] = {}

    def load_before(self, client: int, number: int) -> State:
        """Return a client's tensors at the start of a round; empty if it has never trained."""
        earlier = max((n for n in self._rounds(client) if n < number), default=None)
        if earlier is None:
            return {}
        if self.folder is None:
            return self.memory[client][earlier]
        return read_tensors(self._path(client, earlier), "federated own", VERSION)[0]

    def latest(self, client: int) -> State:
        """Return a client's tensors now."""
        return self.load_before(client, max(self._rounds(client), default=0) + 1)

    def save(self, client: int, number: int, tensors: State) -> None:
        """Save a client's tensors after a round, and delete all but those before it."""
        earlier = max((n for n in self._rounds(client) if n < number), default=None)
        if self.folder is None:
            self.memory.setdefault(client, {})[number] = dict(tensors)
        else:
            write_tensors(
                self._path(client, number),
                tensors,
                {"regauge": "federated own", "version": str(VERSION)},
            )
        for n in self._rounds(client):
            if n in (number, earlier):
                continue
            if self.folder is None:
                del self.memory[client][n]
            else:
                self._path(client, n).unlink(missing_ok=True)

    def clients(self) -> list[int]:
        """Return the clients with tensors of their own."""
        if self.folder is None:
            return sorted(self.memory)
        return sorted(int(p.name.partition("-")[2]) for p in self.folder.glob("client-*"))

    def _rounds(self, client: int) -> list[int]:
        if self.folder is None:
            return list(self.memory.get(client, {}))
        return [
            int(p.stem.partition("-")[2])
            for p in self._path(client, 0).parent.glob("round-*.safetensors")
        ]

    def _path(self, client: int, number: int) -> Path:
        assert self.folder is not None
        return self.folder / f"client-{client:05}" / f"round-{number:05}.safetensors"


def withheld_names(model: torch.nn.Module, defences: Sequence[Any]) -> set[str]:
    """Return the names of the parameters that are trained and not sent."""
    return {
        name
        for d in defences
        if type(d) is Withhold
        for part in d.parts
        for name in part_parameters(model, part)
    }


def next_local(
    contribution: Contribution, state: State, local: State, names: set[str]
) -> dict[str, torch.Tensor]:
    """Return a client's withheld tensors after a contribution, before its defences."""
    return {
        n: local.get(n, state[n]) + contribution.tensors[n]
        for n in sorted(names)
        if n in contribution.tensors
    }
