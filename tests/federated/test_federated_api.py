"""`regauge.federated.run` on paths, modules and examples in memory: one call, one result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import regauge
import support.federations as fed
from regauge.data.evaluate import evaluate_model
from regauge.errors import CheckpointError, FederatedError, RegaugeError
from regauge.federated import FlowerOptions, Settings, run
from regauge.results.findings import load_results

NAME = "classifier.weight"


def test_a_module_and_examples_in_memory() -> None:
    module = fed.vit()
    before = {n: t.clone() for n, t in module.state_dict().items()}
    shown: list[tuple[int, int, str]] = []
    trained = run(
        module,
        fed.bars(),
        clients=3,
        rounds=2,
        settings=Settings(clients=9, rounds=9, lr=0.1, steps=2),
        test=fed.bars(seed=5),
        progress=lambda *about: shown.append(about),
    )
    assert all(torch.equal(t, before[n]) for n, t in module.state_dict().items())
    assert not torch.equal(trained.model.state_dict()[NAME], before[NAME])
    assert not trained.model.training
    assert [r.contributed for r in trained.history] == [(0, 1, 2)] * 2
    assert trained.history[-1].measures["examples"] == 48
    assert [(done, total) for done, total, _ in shown] == [(0, 2), (0, 2), (1, 2)]
    start = evaluate_model(fed.vit(), fed.bars(seed=5), 256)
    assert shown[0][2] == (
        f"before training: test loss {start['loss']:.4f}, test accuracy {start['accuracy']:.4f}"
    )
    assert "3 contributed, training loss" in shown[1][2]
    assert repr(trained).startswith("<federated run: the model: 2 rounds of 3 clients, fedavg")
    assert "Accuracy over rounds" in trained._repr_html_()
    assert trained.results.headline.text.startswith("Training ")
    again = run(fed.vit(), fed.bars(), settings=trained.settings, test=fed.bars(seed=5))
    assert torch.equal(again.model.state_dict()[NAME], trained.model.state_dict()[NAME])


def test_a_path_and_a_folder_that_is_extended(tmp_path: Path) -> None:
    start = tmp_path / "start"
    model = fed.vit(num_labels=10)
    assert isinstance(model, transformers.PreTrainedModel)
    model.save_pretrained(start)
    settings = Settings(clients=2, rounds=1, steps=1, strategy="fedadam")
    how = {"mean": [0.3], "std": [0.38], "test": "digits"}
    run(start, "digits", settings=settings, folder=tmp_path / "run", **how)
    trained = run(start, "digits", settings=settings, rounds=2, folder=tmp_path / "run", **how)
    whole = run(regauge.open_checkpoint(start), "digits", settings=settings, rounds=2, **how)
    assert torch.equal(whole.model.state_dict()[NAME], trained.model.state_dict()[NAME])
    assert trained.results == load_results(tmp_path / "run" / "results.json")
    trained.save(tmp_path / "saved")
    loaded = transformers.ViTForImageClassification.from_pretrained(tmp_path / "saved")
    assert torch.equal(loaded.state_dict()[NAME], trained.model.state_dict()[NAME])
    with pytest.raises(CheckpointError, match="exists already"):
        trained.save(tmp_path / "saved")
    other = run(start, "digits", clients=2, rounds=2, aggregation="median", **how)
    assert not torch.equal(other.model.state_dict()[NAME], trained.model.state_dict()[NAME])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "rounds must be given"),
        ({"rounds": 1, "engine": "cloud"}, 'engine must be one of .*, got "cloud"'),
        ({"rounds": 1, "record": True}, "folder must be set to be recorded, got None"),
        ({"rounds": 1, "record": True, "folder": "run"}, "model and data must be paths"),
        ({"rounds": 1, "engine": "simulation", "folder": "run"}, "model and data must be paths"),
        ({"rounds": 1, "strategy": "best"}, "strategy must be one of"),
    ],
)
def test_bad_calls_are_typed_errors_and_write_nothing(
    options: dict[str, Any],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FederatedError, match=message):
        run(fed.vit(), fed.bars(), clients=2, **options)
    assert not list(tmp_path.iterdir())


def test_a_deployment_needs_its_superlink_and_a_model_its_class(tmp_path: Path) -> None:
    with pytest.raises(FederatedError, match="superlink and authority must be set"):
        run("M", "digits", clients=2, rounds=1, folder=tmp_path / "run", engine="deployment")
    flower = FlowerOptions(superlink="127.0.0.1:1", authority=tmp_path / "none")
    with pytest.raises(FederatedError, match="authority must be an existing file"):
        run(
            "M",
            "digits",
            clients=2,
            rounds=1,
            folder=tmp_path / "run",
            engine="deployment",
            flower=flower,
        )
    with pytest.raises(FederatedError, match="got a state dict"):
        run(fed.vit().state_dict(), fed.bars(), clients=2, rounds=1)
    assert not list(tmp_path.iterdir())


def test_a_data_source_is_read_like_its_options(tmp_path: Path) -> None:
    start = tmp_path / "start"
    model = fed.vit(num_labels=10)
    assert isinstance(model, transformers.PreTrainedModel)
    model.save_pretrained(start)
    settings = Settings(clients=2, rounds=1, steps=1)
    plain = run(start, "digits", settings=settings, mean=[0.3], std=[0.38], test="digits")
    source = regauge.DataSource("digits", mean=(0.3,), std=(0.38,))
    named = run(start, source, settings=settings, test=source)
    assert torch.equal(named.model.state_dict()[NAME], plain.model.state_dict()[NAME])
    test = regauge.DataSource("digits", split="test", mean=(0.3,), std=(0.38,))
    other = run(start, test, settings=settings, test=test)
    assert not torch.equal(other.model.state_dict()[NAME], plain.model.state_dict()[NAME])


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (regauge.DataSource("digits", samples=5), {}, "must have no samples"),
        (regauge.DataSource("digits", mean=(0.1,)), {"mean": [0.2]}, "mean must be the same"),
        ("digits", {"sampels": 5}, 'options of run must be among split, .*, got "sampels"'),
        (torch.zeros(2), {}, "a DataSource or Examples, got Tensor"),
    ],
)
def test_unreadable_data_and_unknown_options_are_typed_errors(
    data: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RegaugeError, match=message):
        run(fed.vit(), data, clients=2, rounds=1, **options)
