"""`match --test`: A, the aligned A, B, and their averages, measured on labelled data."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import ViTForImageClassification

import regauge
from regauge.cli import main
from support.picos import vit


def test_a_match_is_measured_as_evaluate_measures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b, out, merged, json_file = (tmp_path / n for n in ("a", "b", "out", "merged", "r.json"))
    for seed, folder in enumerate((a, b)):
        torch.manual_seed(seed)
        model = ViTForImageClassification(vit(num_labels=10, num_channels=1))
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.2 * torch.randn_like(p))
        model.save_pretrained(folder)
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (24, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "images.npz", image=images, label=np.arange(24) % 10)
    pixels = ("--mean", "0.5", "--std", "0.5")
    arguments = [
        "match",
        a,
        b,
        "-o",
        out,
        "--test",
        tmp_path / "images.npz",
        *pixels,
        "--json",
        json_file,
    ]
    assert main([str(argument) for argument in arguments]) == 0
    assert "average of" in capsys.readouterr().out
    table = json.loads(json_file.read_text())["tables"][0]
    loss = {row[0]: row[table["columns"].index("loss")] for row in table["rows"]}
    regauge.merge([out, b], options=regauge.MergeOptions(force=True)).save(merged)
    data = regauge.DataSource(str(tmp_path / "images.npz"), mean=(0.5,), std=(0.5,))
    wanted = regauge.evaluate({"A": a, "OUT": out, "B": b, "merged": merged}, data).scores
    assert loss["A"] == pytest.approx(wanted["A"].loss)
    assert loss[str(out)] == pytest.approx(wanted["OUT"].loss)
    assert loss[str(out)] == pytest.approx(loss["A"], rel=1e-4)
    assert loss["B"] == pytest.approx(wanted["B"].loss)
    assert loss[f"average of {out} and B"] == pytest.approx(wanted["merged"].loss, rel=1e-4)
    assert loss["average of A and B"] != pytest.approx(wanted["merged"].loss, rel=1e-4)


def test_missing_test_data_fail_before_the_search(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    ViTForImageClassification(vit()).save_pretrained(tmp_path / "a")
    a, out = str(tmp_path / "a"), tmp_path / "out"
    assert main(["match", a, a, "-o", str(out), "--test", "missing.npz"]) == 1
    assert "missing.npz does not exist" in capsys.readouterr().err
    assert not out.exists()
