"""Recipes of the paper presets: as the papers state them, and those of `small` as they were."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import transformers

from experiments import paper_recipes
from experiments.paper_000.reconstruction import scale_rates
from experiments.paper_002 import jigsaw_cells
from experiments.paper_002.jigsaw_cells import how, parameters_with
from experiments.paper_003.pair_models import PAIRS
from experiments.shared.presets import PRESETS, vit_config
from regauge.data import train as loop
from regauge.defences.gradients import part_parameters
from regauge.errors import TrainingError
from regauge.jigsaw.localizer import Localizer
from regauge.jigsaw.wrapper import wrap


def plain(value: Any) -> Any:
    """Return what cells are known by: all but where data come from."""
    if dataclasses.is_dataclass(value):
        names = (f.name for f in dataclasses.fields(value) if f.name not in ("test", "train"))
        return {name: plain(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, list | tuple) else value


def test_the_recipes_of_small_stay_what_they_were() -> None:
    """Their cells are published, and days of computing."""
    whole = [PRESETS["small"]().tables, jigsaw_cells.subjects_of("small"), PAIRS["small"]()]
    text = json.dumps(plain(whole), sort_keys=True)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "7b873b8daaae68c9"


def rates(recipe: Mapping[str, Any], steps: int) -> list[float]:
    model = torch.nn.Linear(1, 1)
    optimizer = loop._build_optimizer(model, recipe, steps)
    found = []
    for step in range(steps):
        optimizer.step(step)
        found.append(optimizer.optimizer.param_groups[0]["lr"])
    return found


def test_a_rate_is_fixed_or_falls() -> None:
    recipe = {"optimizer": "sgd", "rate": 0.5}
    assert rates({**recipe, "schedule": "constant"}, 4) == [0.5] * 4
    assert rates({**recipe, "schedule": "constant", "warmup": 0.5}, 4) == [0.25, 0.5, 0.5, 0.5]
    assert rates({**recipe, "schedule": "cosine"}, 4) == rates(recipe, 4)
    assert rates(recipe, 4)[-1] < 0.2
    with pytest.raises(TrainingError, match='must be "cosine" or "constant", got "linear"'):
        rates({**recipe, "schedule": "linear"}, 4)


def test_the_papers_tables_train_at_fixed_rates() -> None:
    tables = PRESETS["paper"]().tables
    for table in ("table2", "table3", "table4", "table5", "table7"):
        for subject in tables[table].values():
            assert subject.recipe is None or subject.recipe["schedule"] == "constant"
    assert tables["figure5"]["image"].recipe["epochs"] == 200
    tuned = tables["figure6"]["wikitext"].recipe
    assert (tuned["rate"], tuned["epochs"]) == (1e-5, 1)
    faces = tables["table6"]["celeba"]
    assert faces.recipe["rates"] == {"head": 0.05}
    assert (faces.plan["budget"]["rate"], faces.plan["budget"]["epochs"]) == (1e-4, 30)


def vit() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**vit_config(8, 4, 16, 1, num_labels=3))
    return transformers.ViTForImageClassification(config)


def test_the_head_learns_at_a_rate_of_its_own() -> None:
    recipe = {"optimizer": "sgd", "rate": 0.01, "rates": {"head": 1.0}}
    pixels, labels = torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 2, 0])
    grouped, scaled = vit(), vit()
    scale_rates(scaled, recipe)
    names = set(part_parameters(grouped, "head"))
    assert "classifier.weight" in names
    heads = [p for n, p in grouped.named_parameters() if n in names]
    others = [p for n, p in grouped.named_parameters() if n not in names]
    optimizers = (
        torch.optim.SGD([{"params": heads, "lr": 1.0}, {"params": others}], 0.01, momentum=0.9),
        torch.optim.SGD(scaled.parameters(), 0.01, momentum=0.9),
    )
    before = copy.deepcopy(scaled.state_dict())
    for _ in range(3):
        for model, optimizer in zip((grouped, scaled), optimizers, strict=True):
            optimizer.zero_grad()
            model(pixels, labels=labels).loss.backward()
            optimizer.step()
    for name, tensor in grouped.state_dict().items():
        assert torch.allclose(tensor, scaled.state_dict()[name], atol=1e-6), name
    moved = (scaled.classifier.weight - before["classifier.weight"]).abs().max()
    assert moved > 0.05
    with pytest.raises(ValueError, match="sgd without decay"):
        scale_rates(vit(), {**recipe, "optimizer": "adam"})


def test_the_papers_regression_has_three_layers_and_adds_both_coordinates() -> None:
    deit = jigsaw_cells.subjects_of("paper")["vit"]
    given = parameters_with(deit, how("J"))["how"]
    wrapped = wrap(vit(), given, 10, 0)
    assert sum(isinstance(m, torch.nn.Linear) for m in wrapped.localizer.modules()) == 3
    assert wrap(vit(), how("J"), 10, 0).localizer.kind == "mlp"  # the reference's two layers
    assert wrap(vit(), {**given, **how("I")}, 10, 0).localizer.kind == "linear"
    localizer = Localizer("mlp3", 16, (2, 2))
    table, keep = torch.randn(4, 16), torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    off = (localizer.project(table) - localizer.targets).abs().sum(1)[:3].mean()  # Eq. 4
    assert torch.allclose(0.01 * off, given["weight"] * localizer(table, keep))


def test_a_plain_swin_has_no_absolute_positions() -> None:
    swin = jigsaw_cells.subjects_of("paper")["swin"]
    assert parameters_with(swin, how("A"))["model"]["config"]["use_absolute_embeddings"] is False
    assert parameters_with(swin, how("J"))["model"]["config"]["use_absolute_embeddings"] is True
    small = jigsaw_cells.subjects_of("small")["swin"]
    assert parameters_with(small, how("A"))["model"] == small.model


def test_every_parameter_of_the_paper_presets_is_listed_with_its_source() -> None:
    listed = {(row[1], row[2]): row for row in paper_recipes.rows()}
    for (_, name), (_, subject) in paper_recipes.subjects().items():
        for parameter in (subject.recipe or {}).keys() - {"more", "augment", "rates"}:
            if parameter not in paper_recipes.HIDDEN:
                assert (name, parameter) in listed
    assert listed["CelebA", "rates: head"][3:] == (
        "0.05",
        "App. 11: head from 0.05 (to 2e-4; here to 0)",
    )
    assert listed["BERT", "batch"][4] == "ours"
    names = {(row[0][:3], row[1], row[2]) for row in paper_recipes.rows()}
    for paper, name, parameter in paper_recipes.SOURCES:  # no source of a parameter that is gone
        assert any(p == paper and q == parameter and name in ("*", n) for p, n, q in names), (
            paper,
            name,
            parameter,
        )
