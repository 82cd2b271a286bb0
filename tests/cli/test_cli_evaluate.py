"""`regauge evaluate` as a transcript: models beside a guess, locked models with their key, bad
input.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import regauge
import support.federations as fed
from support.cli_runs import Run

DATA = ("--data", "digits", "--mean", "0.3", "--std", "0.38", "--samples", "40")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, the same locked, and the key."""
    folder = tmp_path_factory.mktemp("evaluate")
    fed.vit(num_labels=10).save_pretrained(folder / "vit")  # type: ignore[operator]
    key = regauge.generate_key()
    regauge.save_key(key, folder / "KEY")
    regauge.lock(folder / "vit", key).save(folder / "locked")
    return folder


def test_one_model(models: Path, run: Run) -> None:
    code, out, err = run("evaluate", models / "vit", *DATA)
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == "digits: 40 examples (± standard error)"
    assert lines[2].split() == ["model", "loss", "accuracy"]
    assert lines[3].startswith("vit ")
    assert [line.split("  ")[0] for line in lines[4:6]] == [
        "guess: label frequencies",
        "guess: uniform",
    ]
    assert lines[5].split()[-3:] == ["2.3026", "10.0", "%"]
    assert err == "regauge: evaluate 1/40: vit\n"


def test_locked_models_with_their_key_and_without(models: Path, run: Run, tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    code, out, _ = run(
        *("evaluate", models / "vit", models / "locked", *DATA, "-k", models / "KEY", "--control"),
        *("--json", results, "--report", tmp_path / "page.html"),
    )
    assert code == 0
    assert "locked, without its key" in out
    (table,) = json.loads(results.read_text())["tables"]
    loss = {row[0]: row[1] for row in table["rows"]}
    assert loss["locked"] == pytest.approx(loss["vit"], abs=1e-5)
    assert abs(loss["locked, without its key"] - loss["vit"]) > 1e-4
    assert "locked, without its key" in (tmp_path / "page.html").read_text()
    code, out, _ = run("evaluate", models / "locked", *DATA)
    assert code == 0
    assert "was evaluated without it: pass the key with -k" in out


def test_bad_input(models: Path, run: Run, tmp_path: Path) -> None:
    regauge.save_key(regauge.generate_key(), tmp_path / "OTHER")
    for arguments, code, message in (
        ((models / "vit", "--data", tmp_path / "none.npz"), 1, "none.npz does not exist"),
        ((tmp_path / "none", *DATA), 1, "none does not exist"),
        ((models / "vit", "--data", "digits"), 1, "normalization of the model's images is unknown"),
        ((models / "locked", *DATA, "-k", tmp_path / "OTHER"), 1, "was locked by the key"),
        ((models / "vit", *DATA, "-k", models / "KEY"), 1, "none of vit is locked"),
        ((models / "vit", *DATA, "--control"), 2, "require -k KEY"),
        ((models / "vit", *DATA, "--samples", "0"), 2, "--samples"),
        ((models / "vit",), 2, "--data"),
    ):
        found = run("evaluate", *arguments)
        assert (found.code, found.out) == (code, "")
        assert message in found.err


def test_lock_and_unlock_report_what_the_model_is_worth(
    models: Path, run: Run, tmp_path: Path
) -> None:
    locked, key = tmp_path / "locked", models / "KEY"
    code, out, err = run("lock", models / "vit", "-k", key, "-o", locked, *DATA)
    assert code == 0
    assert f"wrote {locked}" in err
    assert [line.split("  ")[0] for line in out.splitlines()[3:6]] == [
        "plain",
        "locked",
        "locked, without its key",
    ]
    code, out, _ = run("unlock", locked, "-k", key, "-o", tmp_path / "plain", *DATA, "--json")
    assert code == 0
    (table,) = json.loads(out)["evaluation"]["tables"]
    losses = {row[0]: row[1] for row in table["rows"]}
    assert losses["unlocked"] == pytest.approx(losses["locked"], abs=1e-5)
    assert abs(losses["locked, without its key"] - losses["locked"]) > 1e-4


def test_data_are_read_before_anything_is_written(models: Path, run: Run, tmp_path: Path) -> None:
    for command in (("lock", models / "vit"), ("unlock", models / "locked")):
        out = tmp_path / command[0]
        options = ("-k", models / "KEY", "-o", out, "--data", tmp_path / "none.npz")
        found = run(*command, *options)
        assert found.code == 1
        assert "none.npz does not exist" in found.err
        assert not out.exists()
    dry = run(
        "lock", models / "vit", "-k", models / "KEY", "-o", tmp_path / "dry", *DATA, "--dry-run"
    )
    assert dry.code == 0
    assert dry.out.splitlines()[3].startswith("plain")
    assert "locked" not in dry.out
    resealed = run("lock", models / "locked", "-k", models / "KEY", "--reseal", *DATA)
    assert resealed.code == 2
    assert "--data applies to a new lock" in resealed.err


def test_a_multi_label_model(run: Run, tmp_path: Path) -> None:
    """Attributes are columns of 0 and 1; the guess knows how frequent each is."""
    model = fed.vit(num_labels=2, problem_type="multi_label_classification")
    model.save_pretrained(tmp_path / "model")  # type: ignore[operator]
    generator = np.random.default_rng(0)
    smiles, hats = np.arange(20) % 2, np.arange(20) % 5 == 0
    images = generator.integers(0, 255, (20, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "faces.npz", image=images, smile=smiles, hat=hats.astype(np.int64))
    data = ("--data", tmp_path / "faces.npz", "--mean", "0.5", "--std", "0.5")
    code, out, _ = run("evaluate", tmp_path / "model", *data, "--attributes", "smile,hat")
    assert code == 0
    assert out.startswith(f"{tmp_path / 'faces.npz'}: 20 examples, 40 labels")
    assert "guess: label frequencies" in out
    assert "65.0 %" in out  # half of the smiles, and four of five without a hat
    wrong = run("evaluate", tmp_path / "model", *data, "--attributes", "smile")
    assert wrong.code == 1
    assert "attributes must name the 2 outputs of the model, got 1 names" in wrong.err
