"""The folder of a run: the history grows by appending, and a kill at any moment loses nothing."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import support.federations as fed
from regauge.checkpoints.tensor_files import read_tensors, write_tensors
from regauge.errors import CheckpointError
from regauge.federated import Settings, state_store
from regauge.federated.aggregation import Memory
from regauge.federated.state_store import HISTORY_FILE, STATE_FILE, Round, RunState
from support import forks

SETTINGS = Settings(clients=3, rounds=3, steps=1, strategy="fedadam")
STATE = {"w": torch.arange(3.0)}


def saved(folder: Path, *numbers: int, voids: int = 0) -> RunState:
    """Save a run round by round, with void attempts at the next round."""
    history: tuple[Round, ...] = ()
    for number in numbers:
        history = (*history, Round(number, (0,), {"1": "gone"}, 0.5, {"accuracy": 0.25}))
        state_store.save(folder, RunState(STATE, Memory({}, len(history)), history))
    for _ in range(voids):
        history = (*history, Round(len(numbers), (), {}, void=True))
        state_store.save(folder, RunState(STATE, Memory({}, len(numbers)), history))
    run_state = state_store.load(folder)
    assert run_state is not None
    assert run_state.history == history
    return run_state


def test_the_history_is_appended_and_a_void_round_writes_no_state(tmp_path: Path) -> None:
    saved(tmp_path, 0, 1)
    before = (tmp_path / HISTORY_FILE).read_bytes()
    state = (tmp_path / STATE_FILE).stat()
    saved_again = state_store.load(tmp_path)
    assert saved_again is not None
    void = Round(2, (), void=True)
    state_store.save(tmp_path, replace(saved_again, history=(*saved_again.history, void)))
    assert (tmp_path / HISTORY_FILE).read_bytes().startswith(before)
    assert (tmp_path / STATE_FILE).stat() == state
    loaded = state_store.load(tmp_path)
    assert loaded is not None
    assert loaded.history[-1] == void


def test_a_round_without_its_state_does_not_count(tmp_path: Path) -> None:
    run_state = saved(tmp_path, 0, voids=1)
    path = tmp_path / HISTORY_FILE
    good = path.read_bytes()
    later = json.loads(good.splitlines()[0]) | {"number": 1}
    for rest in (json.dumps(later) + "\n", json.dumps(later)[:20], ""):
        path.write_bytes(good + rest.encode())
        loaded = state_store.load(tmp_path)
        assert loaded is not None
        assert loaded.history == run_state.history
    third = Round(1, (0, 1))
    path.write_bytes(good + b'{"number": 1, "contri')
    state_store.save(
        tmp_path, RunState(STATE, Memory({}, 2), (*run_state.history, third))
    )  # drops the interrupted line
    loaded = state_store.load(tmp_path)
    assert loaded is not None
    assert loaded.history == (*run_state.history, third)


@pytest.mark.parametrize("damage", ["missing", "short", "changed", "not JSON", "lines", "negative"])
def test_a_damaged_history_is_one_typed_error(damage: str, tmp_path: Path) -> None:
    saved(tmp_path, 0, 1)
    path = tmp_path / HISTORY_FILE
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage in ("lines", "negative"):
        tensors, metadata = read_tensors(tmp_path / STATE_FILE, "federated state", 2)
        metadata["lines"] = "two" if damage == "lines" else "-1"
        write_tensors(tmp_path / STATE_FILE, tensors, metadata)
    else:
        bad = {
            "short": content.splitlines(keepends=True)[0],
            "changed": content.replace(b"0.25", b"0.75"),
            "not JSON": b"{\n{\n",
        }
        path.write_bytes(bad[damage])
    with pytest.raises(CheckpointError, match="must hold the state of a run"):
        state_store.load(tmp_path)


def test_a_run_of_version_1_goes_on(tmp_path: Path) -> None:
    """Its history is in the metadata of its state."""
    whole = fed.run_rounds(SETTINGS)
    state_store.begin(tmp_path, SETTINGS, "l", {})
    first = fed.run_rounds(replace(SETTINGS, rounds=2), folder=tmp_path)
    tensors, _ = read_tensors(tmp_path / STATE_FILE, "federated state", 2)
    lines = (tmp_path / HISTORY_FILE).read_text().splitlines()
    about = {"regauge": "federated state", "version": "1", "rounds": "2"}
    history = json.dumps([json.loads(line) for line in lines])
    write_tensors(tmp_path / STATE_FILE, tensors, {**about, "history": history})
    (tmp_path / HISTORY_FILE).unlink()
    loaded = state_store.load(tmp_path)
    assert loaded is not None
    assert loaded.history == first.history
    again = fed.run_rounds(SETTINGS, folder=tmp_path)
    assert torch.equal(again.state["classifier.weight"], whole.state["classifier.weight"])
    assert (tmp_path / HISTORY_FILE).read_text().splitlines()[:2] == lines
    resumed = state_store.load(tmp_path)
    assert resumed is not None
    assert resumed.history == again.history


def kill(folder: Path, *options: str) -> tuple[int, str, str]:
    code = "import runpy; runpy.run_module('support.kills', run_name='__main__')"
    return forks.run(code, folder, *options)


def test_a_run_that_is_killed_at_any_moment_goes_on(tmp_path: Path) -> None:
    """A sample of the moments; `make soak` kills at each of them."""
    code, out, err = kill(tmp_path, "7")
    assert code == 0, err
    assert re.search(r"new: \d+ kills, after \[0, 1, 2\] rounds", out)
    assert re.search(r"extended: \d+ kills, after \[1, 2\] rounds", out)


@pytest.mark.slow
def test_a_run_that_is_killed_at_every_moment_goes_on(tmp_path: Path) -> None:
    code, _, err = kill(tmp_path)
    assert code == 0, err


@pytest.mark.slow
def test_kills_notice_a_model_that_is_deleted_first(tmp_path: Path) -> None:
    code, _, err = kill(tmp_path, "--broken")
    assert code != 0
    assert "model.safetensors" in err
