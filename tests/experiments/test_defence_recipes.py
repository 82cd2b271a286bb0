"""The experiment on recipes of defences: through the same code as the real run, on digits and a
model of a few thousand weights.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.shared.models import build
from experiments.shared.runner import Lab
from experiments.split import defence_recipes
from experiments.split.defended_client import Client
from experiments.split.leakage import leaks
from regauge.defences.split import parse_defences
from regauge.models.cut import cut


def client(*defences: str, blocks: int = 0) -> Any:
    model = build(defence_recipes.PICO.model, 0).float().eval()
    return Client(model, parse_defences(defences), blocks)


def test_a_client_without_defences_is_its_model_wherever_it_is_cut() -> None:
    x = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    for blocks in (0, 1):
        one = client(blocks=blocks)
        with torch.no_grad():
            plain = one.model(x).logits
            with one.serving():
                torch.testing.assert_close(one.model(x).logits, plain)
        deep = cut(one.model).embed(pixel_values=x).stream if not blocks else None
        sent = one.features(x, in_order=True)
        assert (deep is None) or torch.equal(sent, deep)
    assert not torch.allclose(
        client(blocks=1).features(x, in_order=True), client().features(x, in_order=True)
    )


def test_what_the_attacker_sees_is_what_leaves() -> None:
    x = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    one = client("bottleneck=2", "round=1", "rows=sample")
    seen, own = one.features(x, in_order=False), one.features(x, in_order=True)
    assert not seen[..., 2:].any()
    assert not torch.equal(seen, own), "the attacker's own are in order"
    torch.testing.assert_close(seen.sort(1).values, own.sort(1).values)


def test_recipes_are_measured_and_the_best_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = replace(
        defence_recipes.PICO,
        recipes=defence_recipes._recipes("", "noise=2 rows=sample", "batch-shuffle=0.5"),
        parts=(100, 60, 50),
    )
    scene = replace(scene, attack={**scene.attack, "targets": 50, "passes": 2})
    monkeypatch.setitem(defence_recipes.SCENES, "pico", (scene,))
    found = defence_recipes.recipes(Lab("pico", 1, cache=tmp_path))
    leaks = {f.id: f for f in found.findings if f.id.startswith("identified/")}
    assert leaks["identified/digits/none"].value == 1.0, "without a defence every image comes back"
    assert (
        leaks["identified/digits/none"].value > leaks["identified/digits/batch-shuffle=0.5"].value
    )  # type: ignore[operator]
    assert {f.id for f in found.findings if f.id.startswith("best/")} == {
        f"best/digits/{b:g}" for b in defence_recipes.BUDGETS
    }
    assert [row[0] for row in found.tables[0].rows] == [
        "none",
        "noise=2 + rows=sample",
        "batch-shuffle=0.5",
    ]
    assert "averaged" in str(found.tables[0].rows[1][-1]) or found.tables[0].rows[1][4] is not None
    again = defence_recipes.recipes(Lab("pico", 1, cache=tmp_path))
    assert again.tables == found.tables, "kept, and not computed twice"


def test_leaks_are_measured_between_a_guess_and_all(tmp_path: Path) -> None:
    found = {
        f.id.removeprefix("leak/digits/"): f for f in leaks(Lab("pico", 1, cache=tmp_path)).findings
    }
    assert found["labels, epoch 1"].value > 0.9 > found["labels, epoch 1"].floor  # type: ignore[operator]
    assert found["links from before training to after it, noise 0"].value > 0.9  # type: ignore[operator]
    assert found["columns (permutation) from 8 known images"].value == 1.0
    loud = [f"links from before training to after it, noise {n:g}" for n in (0, 2)]
    assert found[loud[1]].value < found[loud[0]].value  # type: ignore[operator]
    assert all(f.value >= 0 and f.ceiling == 1.0 for f in found.values())  # type: ignore[operator]
