"""Cells of attacks: they compute on the device of the run, and with as many images as there are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.paper_000 import reconstruction
from experiments.paper_002 import gradient_leakage, positions
from experiments.paper_002.jigsaw_cells import how, model_of, parameters_with
from experiments.shared.presets import From
from experiments.shared.runner import Lab
from regauge.errors import RegaugeError


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def gradients(lab: Lab) -> Any:
    subject, images = gradient_leakage.gradient_subjects(lab)
    return gradient_leakage._attacked(lab, subject, "A", "none", "least squares", images, 2)


def features(lab: Lab) -> Any:
    subject = lab.preset.tables["table6"]["image"]
    attacks = reconstruction.select_attacks(["decoder"], reconstruction.ATTACKS)
    return reconstruction._row(lab, subject, "none", 0, attacks)[2]


def tables(lab: Lab) -> Any:
    subject = positions.looked_at(lab)
    data = {"weights": model_of(lab, subject, how("A"), 0), "test": lab.open(subject.test)}
    return lab.run(positions.LOOK, {**parameters_with(subject, how("A")), "umap": False}, data, "")


@pytest.mark.filterwarnings("ignore:for .*copying from a non-meta parameter")
@pytest.mark.parametrize("attack", [gradients, features, tables])
def test_attacks_compute_on_the_device_of_the_run(cache: Path, attack: Any) -> None:
    """No accelerator is at hand: the device without memory, on which nothing can be read."""
    lab = Lab("pico", cache=cache)
    outcome = attack(lab)  # trains too, what the other device finds in the cache
    assert outcome.values
    for path in cache.glob("*.safetensors"):
        if not path.name.startswith(("victim", "jigsaw-train")):
            path.unlink()
    with pytest.raises((NotImplementedError, RuntimeError, RegaugeError), match="meta"):
        attack(Lab("pico", cache=cache, device="meta"))


def test_a_few_images_are_divided_among_victims_and_attacker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez(tmp_path / "few.npz", image=np.zeros((9, 8, 8), np.uint8), label=np.zeros(9, np.int64))
    lab = Lab("pico", assets=tmp_path)
    assert gradient_leakage.attacked_count(lab) == 2  # there are enough
    few = gradient_leakage.gradient_subjects(lab)[0], From("few.npz")
    monkeypatch.setattr(gradient_leakage, "gradient_subjects", lambda lab: few)
    lab.preset_name = "paper"
    assert gradient_leakage.attacked_count(lab) == 6


def test_metrics_without_their_network_are_named(tmp_path: Path) -> None:
    lab = Lab("pico", assets=tmp_path)
    (named, *_) = reconstruction._left(lab)
    assert named == "F-SIM and LPIPS: lpips_alex.safetensors is not in the assets"
    (tmp_path / reconstruction.LPIPS).write_bytes(b"")
    assert not any("LPIPS" in text for text in reconstruction._left(lab))
