"""`regauge federate` as a transcript: clients share the digits, the model is a plain checkpoint, a
run goes on, bad input is named.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import regauge
import support.federations as fed
from regauge.cli import main
from regauge.federated import state_store
from regauge.results.findings import load_results

HOW = [
    "--data",
    "digits",
    "--test",
    "digits",
    "--mean",
    "0.3",
    "--std",
    "0.38",
    "--steps",
    "2",
    "--batch-size",
    "16",
]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("federate") / "start"
    fed.vit(num_labels=10).save_pretrained(folder)  # type: ignore[operator]
    return folder


def test_a_run_its_model_and_going_on(
    start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert (
        main(["federate", str(start), *HOW, "--clients", "3", "--rounds", "2", "-o", str(out)]) == 0
    )
    captured = capsys.readouterr()
    assert "round 1/2: before training: test loss" in captured.err
    assert "round 2/2: 3 contributed, training loss" in captured.err
    assert f"{out / 'model'}: 2 rounds of 3 clients, fedavg; test loss" in captured.out
    assert [line.split()[0] for line in captured.out.splitlines() if "±" in line] == [
        "digits:",
        "start",
        "end",
    ]
    assert sorted(p.name for p in out.iterdir()) == [
        "global.safetensors",
        "history.jsonl",
        "model",
        "results.json",
        "run.json",
    ]
    plain = transformers.ViTForImageClassification.from_pretrained(out / "model")
    first = state_store.load(out)
    assert first is not None
    assert torch.equal(plain.classifier.weight, first.state["classifier.weight"])
    assert (
        main(["federate", str(start), *HOW, "--clients", "3", "--rounds", "3", "-o", str(out)]) == 0
    )
    assert "round 3/3" in (err := capsys.readouterr().err)
    assert "round 1/3: 3 contributed" not in err
    rows = load_results(out / "results.json").tables[0].rows
    assert [row[0] for row in rows] == [0, 1, 2, 3]
    assert rows[0][3] is None
    assert rows[0][4:6] == pytest.approx(start_measures(start))
    assert json.loads((out / "run.json").read_text())["settings"]["clients"] == 3


def start_measures(folder: Path) -> tuple[float, float]:
    source = regauge.DataSource("digits", mean=(0.3,), std=(0.38,))
    score = regauge.evaluate(folder, source).scores["start"]
    return score.loss, score.accuracy


def test_a_run_that_ruins_its_model_is_loud(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 3, a warning and a failed finding; with the defaults, none of them."""
    bars = fed.bars(120)
    inputs, labels = bars.batch(range(120))
    pixels = (60 * (inputs["pixel_values"][:, 0] + 1)).clip(0, 255).byte()
    np.savez(tmp_path / "bars.npz", image=pixels.numpy(), label=labels.numpy())
    data = regauge.DataSource(str(tmp_path / "bars.npz"), mean=(0.25,), std=(0.25,))
    learning = regauge.federated.Settings(clients=1, rounds=1, epochs=12, lr=5e-3, batch=16)
    model = fed.vit()
    trained = regauge.federated.run(model, data, settings=learning, test=data)
    assert trained.results.headline.text == "Training improved the model"
    trained.save(tmp_path / "trained")
    command = ["federate", str(tmp_path / "trained"), "--data", data.uri, "--test", data.uri]
    command += ["--mean", "0.25", "--std", "0.25", "--clients", "2", "--rounds", "2"]
    ruin = ["--optimizer", "sgd", "--lr", "3", "--clip", "0"]
    assert main([*command, *ruin, "-o", str(tmp_path / "ruined")]) == 3
    captured = capsys.readouterr()
    assert "warning: the model is worse than before training: start: accuracy" in captured.err
    assert "end is worse than start" in captured.out
    results = load_results(tmp_path / "ruined" / "results.json")
    assert [f.holds for f in results.findings] == [False]
    assert results.headline.text == "Training made the model worse"
    assert main([*command, "-o", str(tmp_path / "run")]) == 0
    assert "warning" not in capsys.readouterr().err


def test_an_interrupt_says_what_is_saved(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save, saved = state_store.save, [0]

    def save_one(*args: object) -> None:
        if saved[0] == 1:
            raise KeyboardInterrupt
        save(*args)  # type: ignore[arg-type]
        saved[0] += 1

    out = tmp_path / "run"
    monkeypatch.setattr(state_store, "save", save_one)
    command = ["federate", str(start), *HOW, "--clients", "2", "--rounds", "3", "-o", str(out)]
    assert main(command) == 130
    err = " ".join(capsys.readouterr().err.split())
    assert f"error: interrupted; 1 of 3 rounds is saved in {out}" in err
    assert "hint: to continue, repeat the same command" in err


@pytest.mark.parametrize(
    ("options", "output"),
    [
        (["--clients", "0", "--rounds", "1"], "clients must be >= 1, got 0"),
        (
            ["--clients", "2", "--rounds", "1", "--strategy", "fedprox"],
            "proximal must be > 0 for fedprox",
        ),
        (
            ["--clients", "2000", "--rounds", "1"],
            "examples must be >= 2000, one for each client, got 1440",
        ),
        (
            ["--clients", "2", "--rounds", "1", "--jigsaw", "1.5"],
            "jigsaw must be in [0, 1), got 1.5",
        ),
        (["--clients", "2", "--rounds", "1", "--momentum", "-1"], "momentum"),
        (["--clients", "2", "--rounds", "1", "--weight-decay", "-1"], "decay"),
        (
            ["--clients", "2", "--rounds", "1", "--optimizer", "adamw", "--weight-decay", "-1"],
            "decay",
        ),
        (
            ["--clients", "2", "--rounds", "1", "--clip", "-1"],
            "clip must be finite and at least 0",
        ),
        (
            ["--clients", "2", "--rounds", "1", "--max-examples", "-1"],
            "max_examples must be >= 0, got -1",
        ),
        (
            ["--clients", "2", "--rounds", "1", "--norm-factor", "0.5"],
            "norm_factor must be 0 or > 1 and finite, got 0.5",
        ),
        (
            ["--clients", "2", "--rounds", "1", "--aggregation", "trimmed-mean", "--trim", "0.6"],
            "trim must be in (0, 0.5), got 0.6",
        ),
        (
            ["--clients", "2", "--rounds", "1", "--aggregation", "best"],
            "--aggregation must be one of mean, median",
        ),
        (
            ["--clients", "4", "--rounds", "1", "--aggregation", "median", "--secure"],
            "the server sees only their sum, not single contributions",
        ),
    ],
)
def test_bad_input_is_named_and_leaves_nothing(
    options: list[str], output: str, start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["federate", str(start), *HOW, *options, "-o", str(tmp_path / "run")]) in (1, 2)
    assert output in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_bundle_says_all_that_a_superlink_needs(tmp_path: Path) -> None:
    import tomllib

    from regauge.federated import Settings
    from regauge.federated.deployment import write_bundle
    from regauge.federated.settings import read_settings

    settings = Settings(clients=3, rounds=2, defences=("clip=1", 'noise=0.1,"head"'))
    write_bundle(
        tmp_path / "bundle",
        {"model": 'a "quoted" \\ path'},
        settings,
        tmp_path / "run",
        wait=60,
        gather=5,
        record=True,
    )
    project = tomllib.loads((tmp_path / "bundle" / "pyproject.toml").read_text())
    config = project["tool"]["flwr"]["app"]["config"]
    assert read_settings(json.loads(config["settings"])) == settings
    assert json.loads(config["source"]) == {"model": 'a "quoted" \\ path'}
    assert (config["wait"], config["gather"], config["record"], config["folder"]) == (
        60.0,
        5.0,
        True,
        str(tmp_path / "run"),
    )
    assert project["project"]["dependencies"] == []  # nothing to install at run time


def test_a_deployment_without_a_superlink_or_without_flower_is_named(
    start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [
        "federate",
        str(start),
        *HOW,
        "--clients",
        "2",
        "--rounds",
        "1",
        "-o",
        str(tmp_path / "run"),
        "--engine",
        "deployment",
    ]
    assert main(options) == 2
    assert "--superlink HOST:PORT and --authority PEM" in capsys.readouterr().err
    (tmp_path / "ca.pem").write_text("")
    from importlib.util import find_spec

    if find_spec("flwr") is None:
        assert (
            main([*options, "--superlink", "127.0.0.1:1", "--authority", str(tmp_path / "ca.pem")])
            == 1
        )
        assert "pip install 'regauge[federated]'" in capsys.readouterr().err


@pytest.mark.slow
def test_the_pages_commands_run_as_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but those that need Flower, which `test_flower` and `test_deployment` run."""
    page = (Path(__file__).parents[2] / "docs" / "guides" / "federated.md").read_text()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "docs" / "tutorial"))
    from digits import train_vit

    train_vit().save_pretrained("VIT")
    (tmp_path / "VIT" / "preprocessor_config.json").write_text(
        '{"image_mean": [0.5], "image_std": [0.5]}'
    )
    commands = [
        line for line in page.splitlines() if line.startswith("regauge ") and "--engine" not in line
    ]
    runs = [shlex.split(command)[1:] for command in commands]
    assert [run[0] for run in runs] == ["federate", "federate", "audit", "federate"]
    for run in runs:  # clients that start anew may end below the trained model: exit code 3
        assert main(run) in ((0, 3) if "--independent" in run else (0,)), run
    run_state = state_store.load(tmp_path / "RUN")
    assert run_state is not None
    assert run_state.history[-1].measures["accuracy"] > 0.5
