"""What a client withholds is its own: saved from round to round, never sent, and the same on
every engine.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import support.federations as fed
from regauge.errors import CheckpointError
from regauge.federated import InProcess, Settings, partition_examples, state_of, state_store
from regauge.federated import rounds as federated_rounds
from regauge.federated.local_state import LocalState, withheld_names
from regauge.federated.runs import Source, run_federated
from regauge.results.findings import load_results

SETTINGS = Settings(clients=3, rounds=3, batch=8, lr=0.1, defences=("withhold=embedding",))
NAME = "vit.embeddings.position_embeddings"


def run_rounds(
    own: LocalState, settings: Settings = SETTINGS, folder: Path | None = None, **more: object
) -> state_store.RunState:
    model = fed.vit()
    return federated_rounds.run_rounds(
        InProcess(model, partition_examples(fed.bars(), settings), settings, own),
        state_of(model),
        settings,
        folder=folder,
        **more,
    )  # type: ignore[arg-type]


def test_what_is_withheld_is_each_clients_own_and_the_servers_stays() -> None:
    own, start = LocalState(), state_of(fed.vit())
    run_state = run_rounds(own)
    assert torch.equal(run_state.state[NAME], start[NAME])
    assert not torch.equal(run_state.state["classifier.weight"], start["classifier.weight"])
    mine = [own.latest(client)[NAME] for client in own.clients()]
    assert len(mine) == 3
    assert not torch.equal(mine[0], mine[1])
    first = LocalState()
    run_rounds(first, replace(SETTINGS, rounds=1))
    moved = [float((o.latest(0)[NAME] - start[NAME]).norm()) for o in (first, own)]
    assert (
        moved[1] > 1.5 * moved[0]
    )  # a round begins where the last one ended, and not where the server is
    assert (
        withheld_names(fed.vit(), InProcess(fed.vit(), [fed.bars()] * 3, SETTINGS).defences)
        == own.latest(0).keys()
    )


def test_a_repeated_round_starts_from_the_same_state(tmp_path: Path) -> None:
    whole, again = LocalState(), LocalState(tmp_path / "own")
    run_rounds(whole)
    run_rounds(again)
    model = fed.vit()
    engine = InProcess(model, partition_examples(fed.bars(), SETTINGS), SETTINGS, again)
    before = again.latest(1)[NAME]
    list(engine.ask(2, (1,), state_of(fed.vit())))  # the last round, from another state
    assert not torch.equal(again.latest(1)[NAME], before)
    run_rounds(again)
    assert all(
        torch.equal(whole.latest(c)[n], again.latest(c)[n])
        for c in range(3)
        for n in whole.latest(c)
    )
    assert sorted(p.name for p in (tmp_path / "own" / "client-00001").iterdir()) == [
        "round-00001.safetensors",
        "round-00002.safetensors",
    ]


def test_a_run_that_was_interrupted_goes_on_with_what_its_clients_have(tmp_path: Path) -> None:
    folder = tmp_path / "start"
    fed.vit(num_labels=10).save_pretrained(folder)  # type: ignore[operator]
    source = Source(str(folder), "digits", mean=[0.3], std=[0.38], test="digits")
    settings = replace(SETTINGS, steps=2)
    whole = run_federated(source, settings, tmp_path / "whole")
    run_federated(source, replace(settings, rounds=1), tmp_path / "run")
    again = run_federated(source, settings, tmp_path / "run")
    assert all(
        torch.equal(whole.run_state.state[n], again.run_state.state[n])
        for n in whole.run_state.state
    )
    table = load_results(tmp_path / "run" / "results.json").tables[0]
    assert [row[table.columns.index("accuracy of clients")] for row in table.rows] == [
        None,  # before training
        *(r.measures["accuracy of clients"] for r in again.run_state.history),
    ]
    assert not again.is_worse, "the server's copies are not trained"
    assert again.results.findings[0].holds is None
    assert [r.measures["accuracy of clients"] for r in again.run_state.history] == [
        r.measures["accuracy of clients"] for r in whole.run_state.history
    ]
    (tmp_path / "run" / "own" / "client-00000" / "round-00002.safetensors").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="round-00002"):
        run_federated(source, replace(settings, rounds=4), tmp_path / "run")


def test_without_it_there_is_nothing_of_ones_own() -> None:
    own = LocalState()
    run_state = run_rounds(own, replace(SETTINGS, defences=("freeze=embedding",)))
    assert own.clients() == []
    assert torch.equal(run_state.state[NAME], state_of(fed.vit())[NAME])
