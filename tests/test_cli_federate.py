"""`regauge federate` as a transcript: clients share the digits, the model is a plain checkpoint, a run goes on, bad input is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

import federations as fed
from regauge.cli import main
from regauge.federated import keeping
from regauge.findings import load_results

HOW = ["--data", "digits", "--test", "digits", "--mean", "0.3", "--std", "0.38", "--steps", "2", "--batch", "16"]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("federate") / "start"
    fed.vit(num_labels=10).save_pretrained(folder)  # type: ignore[operator]
    return folder


def test_a_run_its_model_and_going_on(start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert main(["federate", str(start), *HOW, "--clients", "3", "--rounds", "2", "-o", str(out)]) == 0
    said = capsys.readouterr()
    assert "round 2/2: 3 contributed, loss" in said.err
    assert f"{out / 'model'}: 2 rounds of 3 clients, fedavg; loss" in said.out
    assert sorted(p.name for p in out.iterdir()) == ["global.safetensors", "model", "results.json", "run.json"]
    plain = transformers.ViTForImageClassification.from_pretrained(out / "model")
    first = keeping.load(out)
    assert first is not None
    assert torch.equal(plain.classifier.weight, first.state["classifier.weight"])
    assert main(["federate", str(start), *HOW, "--clients", "3", "--rounds", "3", "-o", str(out)]) == 0
    assert "round 3/3" in (err := capsys.readouterr().err)
    assert "round 1/3" not in err
    assert len(load_results(out / "results.json").tables[0].rows) == 3
    assert json.loads((out / "run.json").read_text())["settings"]["clients"] == 3


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--clients", "0", "--rounds", "1"], "0 clients are none"),
        (["--clients", "2", "--rounds", "1", "--strategy", "fedprox"], "fedprox without a mu"),
        (["--clients", "2000", "--rounds", "1"], "2000 clients cannot share 1440 examples"),
        (["--clients", "2", "--rounds", "1", "--jigsaw", "1.5"], "a ratio of 1.5"),
    ],
)
def test_bad_input_is_named_and_leaves_nothing(given: list[str], said: str, start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["federate", str(start), *HOW, *given, "-o", str(tmp_path / "run")]) in (1, 2)
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
