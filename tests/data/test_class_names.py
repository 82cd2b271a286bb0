"""Class folders: images are labelled by the names of the model's classes, or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from regauge.data.class_names import number_folders
from regauge.data.datasets import open_data
from regauge.data.tasks import prepare, read_examples
from regauge.errors import DataError
from support import stand_ins


def vit(labels: int | list[str], **more: Any) -> torch.nn.Module:
    import transformers

    names = (
        {"num_labels": labels} if isinstance(labels, int) else {"id2label": dict(enumerate(labels))}
    )
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        image_size=8,
        patch_size=4,
        **names,
    )
    return transformers.ViTForImageClassification(config)


def read(folder: Path, module: torch.nn.Module, **more: Any) -> list[int]:
    examples, _ = read_examples(module, open_data(folder), mean=[0.5], std=[0.5], **more)
    return examples.batch(range(len(examples)))[1].tolist()


def test_folders_are_numbered_by_the_models_labels(tmp_path: Path) -> None:
    """And not by their own order, in which these would be 0 and 1."""
    stand_ins.image_folder(tmp_path, ["b", "d"], 2, 8)
    assert read(tmp_path, vit(["a", "b", "c", "d"])) == [1, 1, 3, 3]
    assert read(tmp_path, vit(["d", "b"])) == [1, 1, 0, 0]
    assert read(tmp_path, vit(2)) == [0, 0, 1, 1]  # without names: all classes, in order
    with pytest.raises(DataError, match=r'the folder "b" of .* is not a class of the model'):
        read(tmp_path, vit(["a", "c", "d"]))
    with pytest.raises(DataError, match="a folder for each of the model's 4 classes, got 2"):
        read(tmp_path, vit(4))


def test_wordnet_ids_of_some_classes(tmp_path: Path) -> None:
    some = stand_ins.image_folder(tmp_path / "hard", stand_ins.WNIDS[1::2], 1, 8)
    assert read(some, vit(list(stand_ins.WNIDS))) == [1, 3]
    words = vit(["tench, Tinca tinca", "goldfish", "white shark", "tiger shark"])
    with pytest.raises(DataError, match="is not a class of the model") as caught:
        read(some, words)
    assert "timm" in (caught.value.hint or "")
    assert read(some, words, folders=stand_ins.WNIDS) == [1, 3]  # of images that have all classes
    all_of_them = stand_ins.image_folder(tmp_path / "all", stand_ins.WNIDS, 1, 8)
    assert read(all_of_them, words) == [0, 1, 2, 3]


def test_names_are_found_as_they_are_written() -> None:
    labels = [
        "tench, Tinca tinca",
        "great white shark, white shark",
        "crane",
        "crane",
        "rock, crane",
    ]
    assert number_folders(["white_shark", "Tench"], 5, labels) == {"Tench": 0, "white_shark": 1}
    assert number_folders(["tench, Tinca tinca"], 5, labels) == {"tench, Tinca tinca": 0}
    assert number_folders(["10", "2"], 11, [f"class {i}" for i in range(11)]) == {"10": 10, "2": 2}
    with pytest.raises(DataError, match='"crane" of the data is the name of 2 classes'):
        number_folders(["crane"], 5, labels)
    with pytest.raises(DataError, match='"12" of the data is not a class'):
        number_folders(["12", "2"], 11, [f"class {i}" for i in range(11)])


def test_a_task_without_names_wants_all_classes(tmp_path: Path) -> None:
    folder = stand_ins.image_folder(tmp_path, ["b", "d"], 1, 8)
    task = {"kind": "images", "classes": 2, "size": 8, "mean": [0.5] * 3, "std": [0.5] * 3}
    assert prepare(task, open_data(folder)).batch([0, 1])[1].tolist() == [0, 1]
    with pytest.raises(DataError, match="a folder for each of 4 classes, got 2"):
        prepare({**task, "classes": 4}, open_data(folder))
    named = {**task, "classes": 4, "folders": {"b": 1, "d": 3}}
    assert prepare(named, open_data(folder)).batch([0, 1])[1].tolist() == [1, 3]
    stand_ins.image_folder(tmp_path, ["e"], 1, 8)
    with pytest.raises(DataError, match='the folder "e" must be one of b, d'):
        prepare(named, open_data(folder))
    unlabelled = prepare({**task, "classes": 4, "labelled": False}, open_data(folder))
    assert len(unlabelled) == 3


def test_hard_images_are_scored_by_the_models_labels(tmp_path: Path) -> None:
    import regauge

    labels = ["a", "b", "c", "d"]
    stand_ins.image_folder(tmp_path / "hard", ["b", "d"], 3, 8)
    model = vit(labels)
    with torch.no_grad():
        model.classifier.weight.zero_()
        model.classifier.bias.copy_(torch.tensor([0.0, 0.0, 0.0, 9.0]))  # always "d"
    hard = regauge.DataSource(str(tmp_path / "hard"), mean=(0.5,), std=(0.5,))
    found = regauge.jigsaw.study(model, hard=hard)
    (row,) = next(t for t in found.results.tables if "Hard" in t.title).rows
    assert row[1] == pytest.approx(50.0) or row[1] == pytest.approx(0.5)
