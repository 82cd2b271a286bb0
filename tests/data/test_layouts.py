"""Folders of datasets as they are distributed: the same fields and labels from every format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regauge.data import datasets
from regauge.data.datasets import open_data, text_of
from regauge.errors import DataError
from support import stand_ins

NAMES = [f"attribute {i}".replace(" ", "_") for i in range(stand_ins.ATTRIBUTES)]
SPLITS = [0, 0, 0, 1, 2, 2]


def in_parquet(pattern: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        for split, numbers in (("train", [0, 1, 2]), ("test", [4, 5])):
            columns = {name: [n % 2 == 0 for n in numbers] for name in NAMES}
            images = stand_ins.encoded(len(numbers), 8)
            stand_ins.parquet(folder / pattern.format(split), {"image": images, **columns})
        return folder

    return write


def as_saved(folder: Path) -> Path:
    splits = {
        split: {
            "image": stand_ins.encoded(count, 8),
            **{name: [i % 2 for i in range(count)] for name in NAMES},
        }
        for split, count in (("train", 3), ("test", 2))
    }
    return stand_ins.saved(folder, splits)


@pytest.mark.parametrize(
    "write",
    [
        pytest.param(lambda f: stand_ins.celeba(f, NAMES, SPLITS, 8), id="folder and txt"),
        pytest.param(lambda f: stand_ins.celeba(f, NAMES, SPLITS, 8, "csv"), id="folder and csv"),
        pytest.param(in_parquet("{}.parquet"), id="parquet"),
        pytest.param(in_parquet("{}/0000.parquet"), id="folder of parquet"),
        pytest.param(in_parquet("data/{}-00000-of-00001.parquet"), id="hub"),
        pytest.param(in_parquet("img_align/{}/0000.parquet"), id="a config"),
        pytest.param(as_saved, id="datasets library"),
    ],
)
def test_celeba_is_the_same_in_every_format(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    folder = write(tmp_path / "celeba")
    train, test = open_data(folder), open_data(folder, split="test")
    assert (len(train), len(test)) == (3, 2)
    assert train["image"].to_array().shape == (3, 8, 8, 3)
    assert open_data(folder, split="test", size=4)["image"].to_array().shape == (2, 4, 4, 3)
    assert all(len(np.unique(train[name] > 0)) <= 2 and train[name].ndim == 1 for name in NAMES)
    assert train.digest != test.digest == open_data(folder, split="test").digest
    with pytest.raises(DataError, match='no split "other"'):
        open_data(folder, split="other")


def test_attributes_belong_to_their_images(tmp_path: Path) -> None:
    folder = stand_ins.celeba(tmp_path, NAMES, [2, 0, 2], 8)
    test = open_data(folder, split="test")
    lines = (folder / "list_attr_celeba.txt").read_text().splitlines()
    assert [p.name for p in test["image"].sources] == ["000001.jpg", "000003.jpg"]
    assert [test[name].tolist() for name in NAMES] == [
        [int(lines[row].split()[1 + i]) for row in (2, 4)] for i in range(len(NAMES))
    ]
    (folder / "list_eval_partition.txt").unlink()  # the official numbers: all of them are training
    assert len(open_data(folder)) == 3
    with pytest.raises(DataError, match="no images of the split test"):
        open_data(folder, split="test")
    (folder / "list_attr_celeba.txt").write_text("1\na b\n000001.jpg 1\n")
    with pytest.raises(DataError, match="row 1 has 1 values for 2 names"):
        open_data(folder)


def test_reviews_of_imdb(tmp_path: Path) -> None:
    plain = open_data(stand_ins.imdb(tmp_path / "plain", 6), split="test")
    rows = stand_ins.reviews(6)
    columns = {"text": [t for t, _ in rows], "label": [y for _, y in rows]}
    folder = stand_ins.saved(tmp_path / "saved", {"train": columns, "test": columns})
    saved = open_data(folder, split="test")

    def pairs(data: Any) -> list[tuple[str, int]]:
        return sorted(zip(data["text"], data["label"].tolist(), strict=True))

    assert pairs(plain) == pairs(saved) == sorted(rows)
    (tmp_path / "plain" / "aclImdb" / "test" / "pos" / "1_9.txt").write_text("another")
    assert open_data(tmp_path / "plain", split="test").digest != plain.digest


def test_pairs_of_snli(tmp_path: Path) -> None:
    folder = stand_ins.snli(tmp_path, 5)
    data = open_data(folder, split="test")
    assert data["label"].tolist() == [0, 1, 2, -1, 0]
    assert data["premise"][1] == "the film 1"
    assert data["hypothesis"][1] == "a plot"
    assert len(open_data(folder, split="validation")) == 5  # "dev" in its archive


def test_the_text_of_wikitext_is_the_same_in_every_format(tmp_path: Path) -> None:
    plain = open_data(
        stand_ins.wikitext(tmp_path / "plain", 4), split="test", config="wikitext-2-raw-v1"
    )
    lines = [f"{line}\n" for line in stand_ins.wiki_lines(4)]  # as rows of the hub are
    splits = {"train": {"text": lines}, "test": {"text": lines}}
    saved = open_data(stand_ins.saved(tmp_path / "saved", splits), split="test")
    old = tmp_path / "hub" / "wikitext-2-raw-v1"
    stand_ins.parquet(old / "test-00000-of-00001.parquet", {"text": lines})
    hub = open_data(tmp_path / "hub", split="test", config="wikitext-2-raw-v1")
    assert text_of(plain).rstrip("\n") == text_of(saved) == text_of(hub)
    assert "\n\n" not in text_of(saved)


def test_images_by_split_and_by_class(tmp_path: Path) -> None:
    for split, each in (("train", 2), ("val", 1)):
        stand_ins.image_folder(tmp_path / split, stand_ins.WNIDS, each, 8)
    assert len(open_data(tmp_path)) == 8
    assert open_data(tmp_path, split="validation")["class"] == list(stand_ins.WNIDS)
    with pytest.raises(DataError, match="no images"):
        open_data(tmp_path, split="test")
    alone = open_data(tmp_path / "val", split="train")  # a folder of one split has none of its own
    assert alone["class"] == list(stand_ins.WNIDS)


def test_files_that_are_named_must_be_in_the_folder(tmp_path: Path) -> None:
    folder = stand_ins.saved(tmp_path / "saved", {"train": {"text": ["a"]}})
    (tmp_path / "secret.arrow").write_bytes(
        (folder / "train/data-00000-of-00001.arrow").read_bytes()
    )
    state = folder / "train" / "state.json"
    assert open_data(folder)["text"] == ["a"]
    state.write_text(state.read_text().replace("data-00000-of-00001", "../../secret"))
    with pytest.raises(DataError, match="must name files of its folder"):
        open_data(folder)
    (folder / "dataset_dict.json").write_text("[]")
    with pytest.raises(DataError, match="cannot be read as a dataset of the datasets library"):
        open_data(folder)


def test_a_name_in_a_local_folder_is_never_looked_up_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def read_hub(uri: str, *_: Any) -> Any:
        asked.append(uri)
        return {"text": ["a stranger's"]}, "digest"

    monkeypatch.setattr(datasets, "_read_hub", read_hub)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "imagenet").mkdir()
    with pytest.raises(DataError, match="imagenet/val does not exist"):
        open_data("imagenet/val")
    assert not asked
    assert open_data("owner/name")["text"] == ["a stranger's"]
    assert asked == ["owner/name"]


def test_the_digest_of_a_large_folder_is_computed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REGAUGE_CACHE", str(tmp_path / "cache"))
    folder = stand_ins.image_folder(tmp_path / "images", stand_ins.WNIDS, 2, 8)
    small = open_data(folder).digest
    assert not (tmp_path / "cache").exists()
    monkeypatch.setattr(datasets, "LARGE", 10)
    assert open_data(folder).digest == small
    monkeypatch.setattr(datasets, "read_bytes", lambda path: pytest.fail(f"{path} is read again"))
    assert open_data(folder).digest == small
    monkeypatch.undo()
    monkeypatch.setenv("REGAUGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets, "LARGE", 10)
    stand_ins.write_image(folder / stand_ins.WNIDS[0] / f"{stand_ins.WNIDS[0]}_0.JPEG", 77, 8)
    assert open_data(folder).digest != small
