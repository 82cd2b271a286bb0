"""Data as users name them: one source, the same in every function that reads data."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import regauge
import support.federations as fed
from regauge.audit import GradientOptions
from regauge.audit.engine import resolve_attacks
from regauge.audit.gradient_audit.attempts import ATTACKS
from regauge.audit.inputs import load_examples
from regauge.core.names import items_of
from regauge.data.sources import source_of
from regauge.defences.parser import parse_combination
from regauge.defences.split import DEFENCES
from regauge.errors import DataError
from regauge.federated import Settings
from regauge.merging.recipe_yaml import parse_recipe

NORMALIZED = {"mean": (0.3,), "std": (0.4,)}


def test_the_function_that_reads_a_source_sets_its_default_split() -> None:
    assert source_of("digits", "train") == source_of(regauge.DataSource("digits"), "train")
    assert source_of(regauge.DataSource("digits")).split == "test"
    assert source_of(regauge.DataSource("digits", split="test"), "train").split == "test"


def test_jigsaw_trains_on_the_training_split_of_a_source() -> None:
    def weights(split: str | None) -> torch.Tensor:
        options = regauge.jigsaw.JigsawOptions(epochs=1, batch_size=512)
        source = regauge.DataSource("digits", split=split, **NORMALIZED)
        trained = regauge.jigsaw.train(fed.vit(num_labels=10), source, options=options)
        return trained.model.state_dict()["classifier.weight"]

    default = weights(None)
    assert torch.equal(default, weights("train"))
    assert not torch.equal(default, weights("test"))


def test_the_split_of_a_recipe_is_explicit_so_that_its_digest_does_not_change() -> None:
    recipe = "merge_method: fisher\nmodels: [{model: A}, {model: B}]\ndata: digits\n"
    data = parse_recipe(recipe, "recipe").data
    assert data is not None
    assert "split='test'" in repr(data)


@pytest.mark.parametrize(
    "call",
    [
        lambda model, data: regauge.audit.gradients(model, data),
        lambda model, data: regauge.audit.split(model, data, ["rows"]),
        lambda model, data: regauge.jigsaw.train(model, data),
        lambda model, data: regauge.barrier(model, model, data),
        lambda model, data: regauge.federated.run(model, data, clients=2, rounds=1),
    ],
)
@pytest.mark.parametrize(
    ("data", "kind"), [(torch.zeros(2), "Tensor"), (([0], [1]), "tuple"), ({}, "dict")]
)
def test_data_of_another_type_are_a_data_error(
    call: Callable[[Any, Any], Any], data: Any, kind: str
) -> None:
    message = f"must be a path, a hub id, a DataSource or Examples, got {kind}"
    with pytest.raises(DataError, match=message):
        call(fed.vit(), data)


def test_a_loaded_module_is_normalized_as_the_preprocessor_of_its_folder_says(
    tmp_path: Path,
) -> None:
    model = fed.vit(num_labels=10)
    assert isinstance(model, transformers.PreTrainedModel)
    model.save_pretrained(tmp_path)
    live = transformers.ViTForImageClassification.from_pretrained(tmp_path)
    source = regauge.DataSource("digits", split="test")
    with pytest.raises(DataError) as caught:
        source.read(live, None)
    assert "regauge.DataSource(uri, mean=(0.5,), std=(0.5,))" in str(caught.value.hint)
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"image_mean": [0.3], "image_std": [0.4]})
    )
    assert source.read(live, None)[1]["mean"] == [0.3]
    with pytest.raises(DataError, match="normalization"):
        source.read(model, None)  # it was never loaded


def test_the_normalization_of_audit_options_applies_to_sources() -> None:
    options, model = GradientOptions(mean=[0.3], std=[0.4]), fed.vit(num_labels=10)
    pixels = (options.mean, options.std)
    assert load_examples("digits", model, None, pixels=pixels)[1]["std"] == [0.4]
    source = regauge.DataSource("digits", mean=(0.1,), std=(0.2,))
    assert load_examples(source, model, None, pixels=pixels)[1]["std"] == [0.2]


def test_one_name_stands_for_a_list_of_one() -> None:
    assert items_of("dlg") == items_of(["dlg"]) == ["dlg"]
    assert parse_combination("noise=0.5", DEFENCES) == parse_combination(["noise=0.5"], DEFENCES)
    assert Settings(2, 1, defences="noise=0.5") == Settings(2, 1, defences=("noise=0.5",))
    labels = resolve_attacks("labels", ATTACKS, ATTACKS, "images")
    assert [attack.name for attack in labels] == ["labels"]
    defended = regauge.split.InProcess(regauge.split.Host(fed.vit()))
    with regauge.split.connect(fed.vit(), defended, defences="noise=0.5") as remote:
        assert [type(d).__name__ for d in remote.defences] == ["Noise"]
