"""Flower's real engine as separate processes on loopback, with TLS and node authentication: minutes, so that these are `slow`."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("flwr")

import federations as fed
from regauge.federated import Settings, keeping
from regauge.federated.deploying import Loopback, loopback, make_node_key, superlink, supernode, write_bundle
from regauge.federated.running import Source, federated

SETTINGS = Settings(clients=4, rounds=2, batch=16, steps=2)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    folder = tmp_path_factory.mktemp("deployment") / "start"
    fed.vit(num_labels=10).save_pretrained(folder)  # type: ignore[operator]
    return Source(str(folder), "digits", mean=[0.3], std=[0.38], test="digits")


@pytest.fixture(scope="module")
def net(source: Source, tmp_path_factory: pytest.TempPathFactory) -> object:
    configs = [{"partition-id": i, "model": source.model, "shared-data": "digits", "mean": "0.3", "std": "0.38", "test": "digits"} for i in range(4)]
    with loopback(tmp_path_factory.mktemp("network"), configs) as made:
        yield made


def rounds(folder: Path) -> int:
    found = keeping.load(folder)
    return 0 if found is None else len(found.history)


def until(what: object, seconds: float = 600.0) -> None:
    end = time.monotonic() + seconds
    while not what():  # type: ignore[operator]
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.5)


def test_four_nodes_are_a_run_in_this_process(net: Loopback, source: Source, tmp_path: Path) -> None:
    write_bundle(tmp_path / "bundle", source.told(), SETTINGS, tmp_path / "run", wait=600, gather=300)
    assert net.run(tmp_path / "bundle", "first").wait(1200) == 0, net.log("first")
    found = keeping.load(tmp_path / "run")
    assert found is not None
    assert [r.contributed for r in found.history] == [(0, 1, 2, 3)] * 2
    here = federated(source, SETTINGS, tmp_path / "here")
    worst = max(float((here.kept.state[n] - found.state[n]).abs().max()) for n in found.state)
    assert worst <= 1e-6


def test_a_killed_node_and_a_restarted_superlink_lose_no_round(net: Loopback, source: Source, tmp_path: Path) -> None:
    settings = replace(SETTINGS, rounds=3)
    write_bundle(tmp_path / "bundle", source.told(), settings, tmp_path / "run", wait=90, gather=30)
    net.run(tmp_path / "bundle", "second")
    until(lambda: rounds(tmp_path / "run") >= 1)
    net.kill("node-3")  # in the middle of the second round
    until(lambda: rounds(tmp_path / "run") >= 2)
    net.kill("superlink")  # and with it the server of the run
    counted = rounds(tmp_path / "run")
    net.start_link()
    net.start_node(3)
    assert net.run(tmp_path / "bundle", "third").wait(1200) == 0, net.log("third")
    found = keeping.load(tmp_path / "run")
    assert found is not None
    assert [r.number for r in found.history if not r.void] == [0, 1, 2]
    assert len(found.history) >= counted
    assert any("3" in r.absent for r in found.history)


def test_a_node_whose_key_is_not_registered_is_not_let_in(net: Loopback, tmp_path: Path) -> None:
    make_node_key(tmp_path / "stranger")
    command = supernode(net.address, net.folder / "certificates", tmp_path / "stranger", 1, {"partition-id": 9})
    stranger = net._start("stranger", command)
    until(lambda: stranger.poll() is not None or "SuperNode ID" in net.log("stranger"), 120)
    assert "SuperNode ID" not in net.log("stranger")


def test_commands_are_quiet_and_install_nothing(tmp_path: Path) -> None:
    command = superlink(tmp_path, 1, tmp_path / "db")
    assert "--disable-runtime-dependency-installation" in command
    assert "--enable-supernode-auth" in command
    assert "--insecure" not in command
