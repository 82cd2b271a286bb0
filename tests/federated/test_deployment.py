"""Flower's real engine as separate processes on loopback, with TLS and node authentication:
minutes, so that these are `slow`.

Nothing here is given a fixed time: a wait ends when no process has said anything new for `PATIENCE`
seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("flwr")

import support.federations as fed
from regauge.federated import (
    Contribution,
    InProcess,
    Settings,
    partition_examples,
    run_rounds,
    state_of,
    state_store,
)
from regauge.federated.deployment import (
    Loopback,
    loopback,
    make_node_key,
    superlink_command,
    supernode_command,
    write_bundle,
)
from regauge.federated.local_state import LocalState
from regauge.federated.runs import Source
from regauge.federated.state_store import RunState
from regauge.federated.states import Absence, State

SETTINGS = Settings(clients=4, rounds=2, batch=16, steps=2)
PATIENCE = 300.0
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    folder = tmp_path_factory.mktemp("deployment") / "start"
    fed.vit(num_labels=10).save_pretrained(folder)  # type: ignore[operator]
    return Source(str(folder), "digits", mean=[0.3], std=[0.38], test="digits")


@pytest.fixture(scope="module")
def net(source: Source, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loopback]:
    folder = tmp_path_factory.mktemp("network")
    shared = {
        "model": source.model,
        "shared-data": "digits",
        "mean": "0.3",
        "std": "0.38",
        "test": "digits",
    }
    with loopback(
        folder, [{"partition-id": i, "keep": str(folder / f"keep-{i}"), **shared} for i in range(4)]
    ) as made:
        yield made


def until(net: Loopback, what: Callable[[], bool], patience: float = PATIENCE) -> None:
    """Wait for something, for as long as a log of any process still grows."""
    sizes: dict[Path, int] = {}
    at = time.monotonic()
    while not what():
        now = {
            path: path.stat().st_size
            for path in net.folder.glob("*.log")
            if path.name != "superlink.log"
        }  # which tells of every poll
        if now != sizes:
            sizes, at = now, time.monotonic()
        assert time.monotonic() - at < patience, "\n".join(
            f"{path.name}: {path.read_text()[-1500:]}" for path in sizes
        )
        time.sleep(0.5)


def end_process(net: Loopback, bundle: Path, log: str) -> int:
    """Submit a bundle and follow it to its end; Flower's code."""
    process = net.run(bundle, log)
    until(net, lambda: process.poll() is not None)
    return int(process.returncode)


def rounds(folder: Path) -> int:
    run_state = state_store.load(folder)
    return 0 if run_state is None else len(run_state.history)


def wait_for_run(folder: Path) -> RunState:
    run_state = state_store.load(folder)
    assert run_state is not None
    return run_state


class Absent(InProcess):
    """In this process, with those missing who were missing there."""

    there: Sequence[Sequence[int]] = ()

    def ask(
        self, number: int, clients: Sequence[int], state: State
    ) -> Iterable[Contribution | Absence]:
        return super().ask(number, [c for c in clients if c in self.there[number]], state)


def distance(source: Source, settings: Settings, merged_state: RunState) -> float:
    """How far the run in this process, with the same contributions, is from one on nodes."""
    model = source.build_model(settings)
    engine = Absent(model, partition_examples(source.load_examples(model)[0], settings), settings)
    engine.there = [r.contributed for r in merged_state.history if not r.void]
    here = run_rounds(engine, state_of(model), settings)
    return max(
        float((here.state[n] - merged_state.state[n]).abs().max()) for n in merged_state.state
    )


def test_four_nodes_are_a_run_in_this_process_and_keep_what_they_withhold(
    net: Loopback, source: Source, tmp_path: Path
) -> None:
    settings = replace(SETTINGS, defences=("withhold=embedding",))
    write_bundle(
        tmp_path / "bundle", source.to_dict(), settings, tmp_path / "run", wait=900, gather=300
    )
    assert end_process(net, tmp_path / "bundle", "first") == 0, net.log("first")
    run_state = wait_for_run(tmp_path / "run")
    assert [r.contributed for r in run_state.history] == [(0, 1, 2, 3)] * 2
    assert distance(source, settings, run_state) <= 1e-6
    assert distance(source, SETTINGS, run_state) > 1e-6  # the bar can be missed
    name = state_store.load_about(tmp_path / "run")["name"]
    assert [LocalState(net.folder / f"keep-{i}" / name).clients() for i in range(4)] == [
        [0],
        [1],
        [2],
        [3],
    ]


def test_a_killed_node_and_a_restarted_superlink_lose_no_round(
    net: Loopback, source: Source, tmp_path: Path
) -> None:
    settings, folder = replace(SETTINGS, rounds=3), tmp_path / "run"
    marks = {name: len(net.log(name)) for name in ("node-0", "node-3")}
    write_bundle(tmp_path / "bundle", source.to_dict(), settings, folder, wait=900, gather=15)
    net.run(tmp_path / "bundle", "second")
    until(net, lambda: "ROUND 1]" in net.log("node-3")[marks["node-3"] :])
    net.kill("node-3")  # which has the message of the second round, and has not answered
    until(net, lambda: rounds(folder) >= 2)
    until(net, lambda: "ROUND 2]" in net.log("node-0")[marks["node-0"] :])
    net.kill("superlink")  # in the third, and with it the server of the run
    assert [r.contributed for r in wait_for_run(folder).history] == [(0, 1, 2, 3), (0, 1, 2)]
    assert "3" in wait_for_run(folder).history[1].absent
    net.start_link()
    came = net.log("node-3").count("SuperNode ID")
    net.start_node(3)
    until(net, lambda: net.log("node-3").count("SuperNode ID") > came)
    assert end_process(net, tmp_path / "bundle", "third") == 0, net.log("third")
    run_state = wait_for_run(folder)
    assert [r.number for r in run_state.history if not r.void] == [0, 1, 2]
    assert [r.contributed for r in run_state.history[:2]] == [
        (0, 1, 2, 3),
        (0, 1, 2),
    ]  # as they were counted
    assert 3 in run_state.history[-1].contributed
    assert distance(source, settings, run_state) <= 1e-6


def test_a_node_whose_key_is_not_registered_is_not_let_in(net: Loopback, tmp_path: Path) -> None:
    make_node_key(tmp_path / "stranger")
    command = supernode_command(
        net.address, net.folder / "certificates", tmp_path / "stranger", 1, {"partition-id": 9}
    )
    stranger = net._start("stranger", command)
    until(net, lambda: stranger.poll() is not None or "SuperNode ID" in net.log("stranger"))
    assert "SuperNode ID" not in net.log("stranger")
    assert "SuperNode ID" in net.log("node-0")


def test_commands_are_quiet_and_install_nothing(tmp_path: Path) -> None:
    command = superlink_command(tmp_path, 1, tmp_path / "db")
    assert "--disable-runtime-dependency-installation" in command
    assert "--enable-supernode-auth" in command
    assert "--insecure" not in command
