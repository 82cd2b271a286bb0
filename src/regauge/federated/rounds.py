"""The rounds of a run, on any engine: ask, check, aggregate, measure, keep.

An engine is one method, `ask`: a state and the clients that are to train it go in, contributions
and absences come out, in any order. What is sent is checked (`validation`); a contribution that
fails is rejected and the round goes on without it. A round with fewer than `least` contributions,
or whose result is not finite, is void: it changes nothing, and is tried again under its own number,
`PATIENCE` times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from regauge.core.rng import seed_key
from regauge.data.tasks import Examples
from regauge.federated import state_store
from regauge.federated.aggregation import Fuse, Memory, NonFiniteError, aggregate
from regauge.federated.client import contribute
from regauge.federated.defences import apply_defences, frozen_names, read_defences
from regauge.federated.local_state import LocalState, next_local, withheld_names
from regauge.federated.settings import FederatedError, Settings
from regauge.federated.state_store import Round, RunState
from regauge.federated.states import Absence, Contribution, State, digest_of, layout_of
from regauge.federated.validation import Call, Limits, collect

MAX_VOID_ROUNDS = 3  # void rounds in a row, after which a run stops; it can go on from its folder
Measure = Callable[[State], Mapping[str, float]]
Recorder = Callable[
    [int, State, Sequence[Contribution]], None
]  # the round, what the server sent out, what came back and was not refused


class Engine(Protocol):
    def ask(
        self, number: int, clients: Sequence[int], state: State
    ) -> Iterable[Contribution | Absence]:
        """Have clients train a state. Whoever cannot is an absence, with the reason; an engine
        raises only where nothing can go on.
        """
        ...


class InProcess:
    """Clients in this process, one after the other, on one model. `settings.drop` of the
    contributions are lost on purpose, by the seed, from which the noise of defences is drawn too.
    What clients withhold is kept in `own`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        parts: Sequence[Examples],
        settings: Settings,
        local_state: LocalState | None = None,
    ) -> None:
        if len(parts) != settings.clients:
            raise FederatedError(
                f"there are {len(parts)} parts of data for {settings.clients} clients"
            )
        if settings.secure:
            raise FederatedError(
                "secure sums are Flower's, between processes",
                hint="--engine simulation or deployment",
            )
        self.model, self.parts, self.settings = model, parts, settings
        self.defences = read_defences(settings.defences)
        self.frozen, self.withheld = (
            frozen_names(model, self.defences),
            withheld_names(model, self.defences),
        )
        self.local_state = local_state or LocalState()
        self.attempts: dict[int, int] = {}

    def ask(
        self, number: int, clients: Sequence[int], state: State
    ) -> Iterable[Contribution | Absence]:
        tried = self.attempts[number] = self.attempts.get(number, -1) + 1
        for client in clients:
            if is_dropped(self.settings, number, client, tried):
                yield Absence(client, "it dropped out")
                continue
            try:
                own = self.local_state.load_before(client, number) if self.withheld else {}
                sent = contribute(
                    self.model,
                    state,
                    self.parts[client],
                    self.settings,
                    number,
                    client,
                    frozen=self.frozen,
                    local=own,
                )
                if self.withheld:
                    self.local_state.save(
                        client, number, next_local(sent, state, own, self.withheld)
                    )
                yield apply_defences(sent, self.model, self.defences, seed_key(self.settings.seed))
            except FederatedError as error:
                yield Absence(client, str(error))


def is_dropped(settings: Settings, number: int, client: int, tried: int) -> bool:
    return bool(
        settings.drop
        and np.random.default_rng([settings.seed, 107, number, client, tried]).random()
        < settings.drop
    )


def select_clients(settings: Settings, number: int) -> tuple[int, ...]:
    """The clients of a round, drawn by the seed."""
    count = max(settings.min_clients, round(settings.participation * settings.clients))
    drawn = np.random.default_rng([settings.seed, 108, number]).permutation(settings.clients)[
        :count
    ]
    return tuple(sorted(int(i) for i in drawn))


def run(
    engine: Engine,
    state: State,
    settings: Settings,
    *,
    folder: Path | None = None,
    measure: Measure | None = None,
    on_round: Callable[[Round], None] | None = None,
    recorder: Recorder | None = None,
    fuse: Fuse | None = None,
    stop: Callable[[], bool] | None = None,
    limits: Limits | None = None,
) -> RunState:
    """All rounds, or those that are missing in `folder`, which `keeping.begin` has made. `stop` is
    asked before each; `on_round` is told of each; `fuse` averages weights that clients began apart;
    `limits` bound what clients may claim and send.
    """
    kept = None if folder is None else state_store.load(folder)
    kept = kept or RunState(dict(state), Memory(), ())
    digest = digest_of(layout_of(state))
    if digest_of(layout_of(kept.state)) != digest:
        raise FederatedError(
            f"{folder} holds another model's run",
            hint="go on with the same MODEL, or name a new folder",
        )
    voids = 0
    while (number := len(completed_rounds(kept.history))) < settings.rounds and not (
        stop and stop()
    ):
        started = time.monotonic()
        selected = select_clients(settings, number)
        got = collect(
            engine.ask(number, selected, kept.state),
            Call(number, selected, kept.state, digest, limits or Limits()),
            settings,
        )
        made, fault = None, ""
        if len(got.sent) >= settings.min_clients:
            if recorder is not None:
                recorder(number, kept.state, got.sent)
            try:
                made = aggregate(kept.state, got.sent, kept.memory, settings, fuse)
            except NonFiniteError as error:
                fault = str(error)
        contributed = tuple(c.client for c in got.sent)
        if made is None:
            seconds = round(time.monotonic() - started, 3)
            void = Round(
                number,
                contributed,
                got.absent,
                seconds=seconds,
                void=True,
                rejected=got.rejected,
                fault=fault,
            )
            kept = RunState(kept.state, kept.memory, (*kept.history, void))
            voids += 1
        else:
            averaged, memory = made
            examples = sum(c.examples for c in got.sent)
            loss = sum(c.loss * c.examples for c in got.sent) / examples
            measures = dict(measure(averaged)) if measure else {}
            seconds = round(time.monotonic() - started, 3)
            told = Round(
                number, contributed, got.absent, loss, measures, seconds, rejected=got.rejected
            )
            kept = RunState(averaged, memory, (*kept.history, told))
            voids = 0
        if folder is not None:
            state_store.save(folder, kept)
        if on_round is not None:
            on_round(kept.history[-1])
        if voids >= MAX_VOID_ROUNDS:
            raise FederatedError(
                f"round {number + 1} {describe_void(kept.history[-1], settings.min_clients)}",
                hint="nothing is lost: the same command goes on from the last round"
                if folder
                else "fewer may be enough: --min-clients",
            )
    return kept


def completed_rounds(history: Sequence[Round]) -> list[Round]:
    """The rounds that count."""
    return [r for r in history if not r.void]


def describe_void(last: Round, least: int) -> str:
    """Return why a run stops at a round that was void `PATIENCE` times."""
    if last.fault:
        return f"failed {MAX_VOID_ROUNDS} times: {last.fault}"
    reasons = (
        "; ".join(f"client {c}: {why}" for c, why in list(last.absent.items())[:3])
        or "no client is there"
    )
    return f"had too few contributions {MAX_VOID_ROUNDS} times ({least} are needed): {reasons}"
