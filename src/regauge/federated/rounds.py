"""The rounds of a run, on any engine: train, validate, aggregate, evaluate, save.

An engine has one method, `ask`: it takes a state and the selected clients, and returns
contributions and absences in any order. Contributions are validated (`validation`); one that fails
is rejected and the round continues without it. A round with fewer than `min_clients` contributions,
or with a result that is not finite, is void: it changes nothing and is repeated under the same
number, at most `MAX_VOID_ROUNDS` times.
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
from regauge.errors import FederatedError, Hint, NonFiniteError
from regauge.federated import state_store
from regauge.federated.aggregation import Fuse, Memory, aggregate
from regauge.federated.client import contribute
from regauge.federated.defences import apply_defences, frozen_names, read_defences
from regauge.federated.local_state import LocalState, next_local, withheld_names
from regauge.federated.settings import Settings
from regauge.federated.state_store import Round, RunState
from regauge.federated.states import Absence, Contribution, State, digest_of, layout_of
from regauge.federated.validation import Call, Limits, collect

MAX_VOID_ROUNDS = 3  # void rounds in a row, after which a run stops; it can be resumed
Measure = Callable[[State], Mapping[str, float]]
# Called with the round, the state that was sent out, and the valid contributions.
Recorder = Callable[[int, State, Sequence[Contribution]], None]


class Engine(Protocol):
    """A way to reach clients: in this process, simulated, or over a network."""

    def ask(
        self, number: int, clients: Sequence[int], state: State
    ) -> Iterable[Contribution | Absence]:
        """Train a state on some clients.

        A client that fails is an absence with the reason; an engine raises only if the run cannot
        continue.
        """
        ...


class InProcess:
    """Clients in this process, one after the other, on one model.

    A share `settings.drop` of the contributions is dropped at random. Drops and the noise of
    defences depend on the seed.

    Args:
        model: The model of all clients.
        parts: The examples of each client.
        settings: The settings of the run.
        local_state: The withheld tensors of the clients; None: in memory.

    Raises:
        FederatedError: The number of parts is wrong, or the settings have secure sums.

    Example:
        >>> settings = regauge.federated.Settings(clients=2, rounds=1)
        >>> parts = regauge.federated.partition_examples(images, settings)
        >>> engine = regauge.federated.InProcess(vit, parts, settings)
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
                f"parts must be {settings.clients}, one for each client, got {len(parts)}"
            )
        if settings.secure:
            raise FederatedError(
                "secure sums must run on Flower's engines, got a run in one process",
                hint=Hint(
                    'pass engine="simulation" or "deployment"',
                    cli="pass --engine simulation or deployment",
                ),
            )
        self.model, self.parts, self.settings = model, parts, settings
        self.defences = read_defences(settings.defences)
        self.frozen = frozen_names(model, self.defences)
        self.withheld = withheld_names(model, self.defences)
        self.local_state = local_state or LocalState()
        self.attempts: dict[int, int] = {}

    def ask(
        self, number: int, clients: Sequence[int], state: State
    ) -> Iterable[Contribution | Absence]:
        """Train a state on some clients, see `Engine`."""
        attempt = self.attempts[number] = self.attempts.get(number, -1) + 1
        for client in clients:
            if is_dropped(self.settings, number, client, attempt):
                yield Absence(client, "it dropped out")
                continue
            try:
                local = self.local_state.load_before(client, number) if self.withheld else {}
                contribution = contribute(
                    self.model,
                    state,
                    self.parts[client],
                    self.settings,
                    number,
                    client,
                    frozen=self.frozen,
                    local=local,
                )
                if self.withheld:
                    self.local_state.save(
                        client, number, next_local(contribution, state, local, self.withheld)
                    )
                yield apply_defences(
                    contribution, self.model, self.defences, seed_key(self.settings.seed)
                )
            except FederatedError as error:
                yield Absence(client, str(error))


def is_dropped(settings: Settings, number: int, client: int, attempt: int) -> bool:
    """Return whether a contribution is dropped at random."""
    return bool(
        settings.drop
        and np.random.default_rng([settings.seed, 107, number, client, attempt]).random()
        < settings.drop
    )


def select_clients(settings: Settings, number: int) -> tuple[int, ...]:
    """Return the clients of a round, sampled by the seed."""
    count = max(settings.min_clients, round(settings.participation * settings.clients))
    sampled = np.random.default_rng([settings.seed, 108, number]).permutation(settings.clients)[
        :count
    ]
    return tuple(sorted(int(i) for i in sampled))


def run_rounds(
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
    """Run all rounds, or those that are missing in `folder`.

    Args:
        engine: The clients.
        state: The initial state.
        settings: The settings of the run.
        folder: The folder of the run, created by `state_store.begin`; None: nothing is saved.
        measure: Evaluate a state after each round.
        on_round: Callback after each round.
        recorder: Record the contributions of each round.
        fuse: Average whole weights of independent clients (`fusion`).
        stop: Called before each round; the run stops if it returns True.
        limits: Bounds of what clients may claim and send.

    Returns:
        The state, the memory of the strategy, and the history.

    Raises:
        FederatedError: The folder has another model's run, or a round is void too often.

    Example:
        >>> settings = regauge.federated.Settings(clients=2, rounds=1)
        >>> parts = regauge.federated.partition_examples(images, settings)
        >>> engine = regauge.federated.InProcess(vit, parts, settings)
        >>> end = regauge.federated.run_rounds(engine, regauge.federated.state_of(vit), settings)
    """
    run_state = None if folder is None else state_store.load(folder)
    run_state = run_state or RunState(dict(state), Memory(), ())
    digest = digest_of(layout_of(state))
    if digest_of(layout_of(run_state.state)) != digest:
        raise FederatedError(
            f"{folder} holds the run of another model",
            hint="continue with the same MODEL, or pass a new folder",
        )
    voids = 0
    while (number := len(completed_rounds(run_state.history))) < settings.rounds and not (
        stop and stop()
    ):
        started = time.monotonic()
        selected = select_clients(settings, number)
        collected = collect(
            engine.ask(number, selected, run_state.state),
            Call(number, selected, run_state.state, digest, limits or Limits()),
            settings,
        )
        aggregated, fault = None, ""
        if len(collected.sent) >= settings.min_clients:
            if recorder is not None:
                recorder(number, run_state.state, collected.sent)
            try:
                aggregated = aggregate(
                    run_state.state, collected.sent, run_state.memory, settings, fuse
                )
            except NonFiniteError as error:
                fault = str(error)
        next_state, memory = aggregated or (run_state.state, run_state.memory)
        loss, measures = None, {}
        if aggregated is not None:
            examples = sum(c.examples for c in collected.sent)
            loss = sum(c.loss * c.examples for c in collected.sent) / examples
            measures = dict(measure(next_state)) if measure else {}
        finished = Round(
            number,
            tuple(c.client for c in collected.sent),
            collected.absent,
            loss,
            measures,
            round(time.monotonic() - started, 3),
            aggregated is None,
            collected.rejected,
            fault,
        )
        run_state = RunState(next_state, memory, (*run_state.history, finished))
        voids = voids + 1 if finished.void else 0
        if folder is not None:
            state_store.save(folder, run_state)
        if on_round is not None:
            on_round(finished)
        if voids >= MAX_VOID_ROUNDS:
            raise FederatedError(
                f"round {number + 1} {describe_void(finished, settings.min_clients)}",
                hint=Hint(
                    "nothing is lost: the same call continues after the last round",
                    cli="nothing is lost: the same command continues after the last round",
                )
                if folder
                else Hint(
                    "require fewer contributions with min_clients",
                    cli="require fewer contributions with --min-clients",
                ),
            )
    return run_state


def completed_rounds(history: Sequence[Round]) -> list[Round]:
    """Return the rounds that are not void."""
    return [r for r in history if not r.void]


def describe_void(last: Round, min_clients: int) -> str:
    """Describe why a run stops at a round that was void `MAX_VOID_ROUNDS` times."""
    if last.fault:
        return f"failed {MAX_VOID_ROUNDS} times: {last.fault}"
    reasons = (
        "; ".join(f"client {client}: {reason}" for client, reason in list(last.absent.items())[:3])
        or "no client is connected"
    )
    return (
        f"had too few contributions {MAX_VOID_ROUNDS} times ({min_clients} are needed): {reasons}"
    )


def describe_measures(measures: Mapping[str, float]) -> str:
    """Describe the evaluation of a state on the server's test data."""
    order = {"loss": "test loss", "perplexity": "test perplexity", "accuracy": "test accuracy"}
    order |= {name: name for name in measures if name not in (*order, "examples")}
    return ", ".join(
        f"{label} {measures[name]:.4f}" for name, label in order.items() if name in measures
    )


def describe_round(finished: Round) -> str:
    """Describe a round in one line."""
    parts = [f"{len(finished.contributed)} contributed"]
    parts += [f"{len(finished.rejected)} rejected"] if finished.rejected else []
    parts += [f"client {c}: {why}" for c, why in list(finished.absent.items())[:3]]
    parts += [f"and {len(finished.absent) - 3} more absent"] if len(finished.absent) > 3 else []
    parts += [] if finished.loss is None else [f"training loss {finished.loss:.4f}"]
    parts += [describe_measures(finished.measures)] if finished.measures else []
    parts += [finished.fault] if finished.fault else []
    return ", ".join(["void: nothing changed", *parts] if finished.void else parts)
