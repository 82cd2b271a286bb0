"""Data by uri: every format gives the same rows, the digest says what was read, and what is wrong
is named.
"""

from __future__ import annotations

import json
import re
import struct
import sys
import zlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import support.bombs as bombs
from regauge.data.datasets import Data, EncodedImages, open_data, text_of
from regauge.errors import DataError

TEXTS = ["one, two", 'a "quoted" word', "007"]
LABELS = [1, 0, 1]


def write(folder: Path, kind: str) -> Path:
    path = folder / f"rows.{kind}"
    match kind:
        case "csv":
            path.write_text('text,label\n"one, two",1\n"a ""quoted"" word",0\n007,1\n')
        case "tsv":
            path.write_text('text\tlabel\none, two\t1\na "quoted" word\t0\n007\t1\n')
        case "jsonl":
            path.write_text(
                "".join(
                    json.dumps({"text": t, "label": y}) + "\n"
                    for t, y in zip(TEXTS, LABELS, strict=True)
                )
            )
        case "parquet":
            import pyarrow as pa
            import pyarrow.parquet as pq

            pq.write_table(pa.table({"text": TEXTS, "label": LABELS}), path)
    return path


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl", "parquet"])
def test_every_table_gives_the_same_rows(tmp_path: Path, kind: str) -> None:
    data = open_data(write(tmp_path, kind))
    assert list(data["text"]) == TEXTS  # letter by letter: 007 is not a number in a text column
    assert data["label"].dtype.kind == "i"
    assert data["label"].tolist() == LABELS
    assert len(data) == 3
    renamed = open_data(write(tmp_path, kind), fields={"y": "label"})
    assert list(renamed) == [
        "y",
        "text",
    ]  # who calls one field by another name need not mention those that are called as usual
    assert list(renamed["text"]) == TEXTS
    assert list(open_data(write(tmp_path, kind), fields={"text": "label"})) == ["text"]
    assert renamed.digest != data.digest


def test_npz_and_fields_of_different_lengths(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "a.npz",
        X_train=np.zeros((4, 2, 2), np.uint8),
        y_train=np.arange(4),
        y_test=np.arange(3),
    )
    with pytest.raises(DataError, match='"y_train" has 4, "y_test" has 3'):
        open_data(tmp_path / "a.npz")
    data = open_data(tmp_path / "a.npz", fields={"image": "X_train", "label": "y_train"})
    assert data["label"].tolist() == [0, 1, 2, 3]
    np.savez(tmp_path / "b.npz", X=np.zeros((4, 2, 2), np.uint8), label=np.arange(3))
    assert list(open_data(tmp_path / "b.npz", fields={"image": "X"})) == [
        "image"
    ]  # these labels belong to something else
    with pytest.raises(DataError, match='no field "y_val"') as caught:
        open_data(tmp_path / "a.npz", fields={"label": "y_val"})
    assert "'y_test'" in str(caught.value.hint)


def test_a_text_is_what_it_was(tmp_path: Path) -> None:
    whole = "first\r\nsecond\n\n  last\u2028line"
    (tmp_path / "a.txt").write_bytes(whole.encode())
    assert text_of(open_data(tmp_path / "a.txt")) == whole


def test_the_digest_says_what_was_read_and_not_where(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    second.mkdir()
    one, other = open_data(write(first, "tsv")), open_data(write(second, "tsv"))
    assert one.digest == other.digest
    (second / "rows.tsv").write_text("text\tlabel\nelse\t1\n")
    assert open_data(second / "rows.tsv").digest != one.digest
    assert one.take(2).digest != one.digest
    assert one.take(2, seed=1).digest != one.take(2).digest
    assert one.take(2)["text"] == TEXTS[:2]
    assert one.take(9) is one


def test_a_folder_of_images(tmp_path: Path) -> None:
    from PIL import Image

    for i, name in enumerate(("cat/x.png", "cat/y.png", "dog/z.png")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (4 + i, 4), (50 * i, 0, 0)).save(tmp_path / name)
    data = open_data(tmp_path)
    assert data["label"].tolist() == [0, 0, 1]
    assert data["class"] == ["cat", "cat", "dog"]
    with pytest.raises(DataError, match="different sizes"):
        data["image"].to_array()
    sized = open_data(tmp_path, size=4)["image"].to_array()
    assert sized.shape == (3, 4, 4, 3)
    assert sized[2, 0, 0].tolist() == [100, 0, 0]
    (tmp_path / "cat" / "x.png").write_bytes(b"no image")
    assert open_data(tmp_path).digest != data.digest
    with pytest.raises(DataError, match="cannot be read as an image"):
        open_data(tmp_path)["image"][0]


def test_grey_among_colours_is_given_three_channels(tmp_path: Path) -> None:
    from PIL import Image

    Image.new("RGB", (4, 4), (10, 20, 30)).save(tmp_path / "a.png")
    Image.new("L", (4, 4), 40).save(tmp_path / "b.png")
    pictures = open_data(tmp_path)["image"]
    assert pictures.to_array()[:, 0, 0].tolist() == [[10, 20, 30], [40, 40, 40]]
    assert pictures.to_array([1]).shape == (1, 4, 4)  # alone it is what it is
    assert replace(pictures, colour="RGB").to_array([1]).shape == (1, 4, 4, 3)
    assert replace(pictures, colour="L").to_array()[:, 0, 0].tolist() == [18, 40]
    assert (
        pictures.sizes
        == EncodedImages(tuple(p.read_bytes() for p in pictures.sources)).sizes
        == {(4, 4)}
    )
    Image.new("L", (6, 5)).save(tmp_path / "c.png")
    (tmp_path / "d.png").write_bytes(b"no image")  # looking at it says so, and only then
    pictures = open_data(tmp_path)["image"]
    assert pictures.sizes == {(4, 4), (5, 6)}
    with pytest.raises(DataError, match="different sizes, 4 x 4 and 5 x 6 among them"):
        pictures.to_array([1, 2])


def test_digests_stay_what_they_were(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "x.png").write_bytes(b"no image")
    assert (
        open_data(tmp_path).digest
        == "cdbfc59f5c4bd5a48f0925fb77f0bf8f8932abaf94279f281addc96900a5e277"
    )
    assert (
        open_data(tmp_path, size=4).digest
        == "1b3edc71bd399e0d86d11520bbe271b81e88a3ca6d276ba2c07c6149f42dfe00"
    )  # cached experiments are found by it


def test_a_folder_without_images_is_not_a_class(tmp_path: Path) -> None:
    from PIL import Image

    def put(name: str) -> None:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("L", (4, 4)).save(tmp_path / name)

    put("x.png")
    (tmp_path / "aside").mkdir()
    assert set(open_data(tmp_path)) == {"image", "name"}  # loose images, beside an empty folder
    for name in (".ipynb_checkpoints/x.png", "cat/x.png", "dog/y.png"):
        put(name)
    data = open_data(tmp_path)
    assert data["label"].tolist() == [0, 1]
    assert data["class"] == ["cat", "dog"]


def test_lines_of_json_end_where_lines_end(tmp_path: Path) -> None:
    texts = ["one\u2028two", "three\u0085four", "five"]
    lines = "\r\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts)
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + lines.encode())
    assert open_data(tmp_path / "a.jsonl")["text"] == texts


def test_digits_are_bundled_with_a_separate_test_set() -> None:
    train, test = open_data("digits"), open_data("digits", split="test")
    assert train["image"].shape[1:] == (8, 8)
    assert train["image"].max() == 255
    assert len(train) + len(test) == 1797
    assert train.digest != test.digest
    with pytest.raises(DataError, match='no split "dev"'):
        open_data("digits", split="dev")


class Hub:
    """The two functions of huggingface_hub that are called, over a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def list_repo_files(self, uri: str, *, repo_type: str, revision: str) -> list[str]:
        assert (uri, repo_type, revision) == ("owner/name", "dataset", "refs/convert/parquet")
        return [
            *(str(p.relative_to(self.folder)) for p in sorted(self.folder.rglob("*.parquet"))),
            "README.md",
        ]

    def hf_hub_download(self, uri: str, name: str, **_: Any) -> str:
        return str(self.folder / name)


def test_a_hub_id_is_read_from_its_parquet_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image

    Image.new("L", (2, 2), 7).save(tmp_path / "x.png")
    encoded = (tmp_path / "x.png").read_bytes()
    for part, labels in enumerate(([1, 2], [3])):
        path = tmp_path / "plain" / "train" / f"000{part}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(
            pa.table({"label": labels, "img": [{"bytes": encoded, "path": None}] * len(labels)}),
            path,
        )
    hub = Hub(tmp_path)
    monkeypatch.setitem(
        sys.modules,
        "huggingface_hub",
        SimpleNamespace(
            list_repo_files=hub.list_repo_files, hf_hub_download=hub.hf_hub_download, __spec__=1
        ),
    )
    data = open_data("owner/name", fields={"image": "img", "label": "label"})
    assert data["label"].tolist() == [1, 2, 3]
    assert isinstance(data["image"], EncodedImages)
    assert data["image"].to_array([2]).tolist() == [[[7, 7], [7, 7]]]
    with pytest.raises(DataError, match='no split "test"') as caught:
        open_data("owner/name", split="test")
    assert "plain/train" in str(caught.value.hint)
    (tmp_path / "other" / "train").mkdir(parents=True)
    (tmp_path / "plain" / "train" / "0001.parquet").rename(
        tmp_path / "other" / "train" / "0000.parquet"
    )
    with pytest.raises(DataError, match="several configs: other, plain"):
        open_data("owner/name")
    assert open_data("owner/name", config="other")["label"].tolist() == [3]


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("a.npz", b"no zip", "cannot be read: not a valid zip archive"),
        ("a.parquet", b"no table", "cannot be read as .parquet"),
        ("a.csv", b"x,y\n1\n", "line 2 has 1 fields, the first line 2"),
        ("a.jsonl", b'{"x": 1}\n{"y": 1}\n', "object 2 has other fields"),
        ("a.jsonl", b"", "is empty"),
        ("a.csv", b"x,y\n", "is empty"),
        ("a.txt", b"\xff\xfe\x00", "cannot be read as .txt"),
        ("a.pickle", b"", "suffix of .* must be one of"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, name: str, content: bytes, match: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=match) as caught:
        open_data(tmp_path / name)
    assert name in str(caught.value)


def test_what_is_absent_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.npz does not exist"):
        open_data(tmp_path / "none.npz")
    with pytest.raises(DataError, match="contains no images"):
        open_data(tmp_path)
    with pytest.raises(
        DataError, match="loading it from the hub failed"
    ):  # HF_HUB_OFFLINE is set for all tests
        open_data("nobody/nothing")
    with pytest.raises(DataError, match='rows has no field "y"'):
        Data("rows", {"x": [1]}, "")["y"]


@pytest.mark.parametrize("name", ["121-megapixel.png", "shape.npz", "negative.npz", "objects.npz"])
def test_data_that_would_fill_the_memory(tmp_path: Path, name: str) -> None:
    """The larger ones run in soak/."""
    build, message = bombs.DATA[name]
    (tmp_path / name).write_bytes(build())
    with pytest.raises(DataError, match=re.escape(message)) as caught:
        open_data(tmp_path if name.endswith(".png") else tmp_path / name)["image"][0]
    assert caught.value.hint


def test_bounds_of_images_and_archives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.png").write_bytes(bombs.png(30, 20))
    np.savez_compressed(tmp_path / "a.npz", a=np.zeros(100_000))
    (tmp_path / "a.parquet").write_bytes(bombs.parquet({"a": [0] * 1000}))
    assert EncodedImages((tmp_path / "a.png",))[0].shape == (20, 30)
    assert len(open_data(tmp_path / "a.npz")) == 100_000
    assert len(open_data(tmp_path / "a.parquet")) == 1000
    monkeypatch.setattr("regauge.data.datasets.MAX_PIXELS", 599)
    monkeypatch.setattr("regauge.data.datasets.SPARE", 1000)
    monkeypatch.setattr("regauge.data.datasets.MAX_VALUES", 0)
    with pytest.raises(DataError, match="got 30 x 20"):
        EncodedImages((tmp_path / "a.png",))[0]
    with pytest.raises(DataError, match=r"must inflate to at most .* got 800\.1 kB"):
        open_data(tmp_path / "a.npz")
    with pytest.raises(DataError, match="values for its"):
        open_data(tmp_path / "a.parquet")


def test_pillow_rejects_first(tmp_path: Path) -> None:
    """Pillow raises an error of its own for the largest images, before their size can be asked
    for.
    """
    header = bombs.png(1, 1).replace(struct.pack(">2I", 1, 1), struct.pack(">2I", 20_000, 20_000))
    at = header.index(b"IHDR")
    (tmp_path / "a.png").write_bytes(
        header[: at + 17] + struct.pack(">I", zlib.crc32(header[at : at + 17])) + header[at + 21 :]
    )
    with pytest.raises(
        DataError, match="at most 100 million pixels, got 400,000,000 pixels"
    ) as caught:
        open_data(tmp_path)["image"].to_array()
    assert "scale it down" in str(caught.value.hint)
    assert open_data(tmp_path)["image"].sizes == frozenset()


def test_repeated_texts_of_a_parquet_file_are_one_object(tmp_path: Path) -> None:
    import pyarrow as pa

    (tmp_path / "a.parquet").write_bytes(bombs.repeated_text(200))
    texts = open_data(tmp_path / "a.parquet")["text"]
    assert len(texts) == 200
    assert len({id(text) for text in texts}) == 1
    nested = {
        "image": pa.array([{"bytes": b"x", "path": None}, {"bytes": b"x", "path": "p"}]),
        "words": [["a", "b"], ["a"]],
    }
    (tmp_path / "b.parquet").write_bytes(bombs.parquet(nested))
    data = open_data(tmp_path / "b.parquet")
    assert data["image"].sources == (b"x", b"x")
    assert list(data["words"]) == ['["a", "b"]', '["a"]']


def test_a_parquet_footer_that_declares_too_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.parquet").write_bytes(bombs.lying_footer(8_000_000))
    monkeypatch.setattr("regauge.data.datasets.MAX_VALUES", 2_000_000)
    with pytest.raises(DataError, match=r"at most 2,000,000 values for its .*, got 8,000,000"):
        open_data(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"data_page_version": "2.0"},
        {"use_dictionary": False},
        {"compression": "zstd", "data_page_size": 64},
    ],
)
def test_parquet_pages_are_counted(tmp_path: Path, options: dict[str, Any]) -> None:
    import pyarrow.parquet as pq

    from regauge.data.parquet import count_pages, read_chunks

    columns = {
        "text": [f"row {i % 7}" for i in range(1000)],
        "label": list(range(1000)),
        "list": [[i] * (i % 3) for i in range(1000)],
    }
    raw = bombs.parquet(columns, row_group_size=300, **options)
    (tmp_path / "a.parquet").write_bytes(raw)
    data = open_data(tmp_path / "a.parquet")
    assert list(data["text"]) == columns["text"]
    assert data["label"].tolist() == columns["label"]
    metadata = pq.read_metadata(tmp_path / "a.parquet")
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    declared = [
        (group.num_rows, group.column(i)) for group in groups for i in range(group.num_columns)
    ]
    for chunk, (rows, column) in zip(read_chunks(raw), declared, strict=True):
        values, size = count_pages(raw, chunk)
        assert (chunk.path, chunk.rows, chunk.is_bytes) == (
            column.path_in_schema,
            rows,
            column.physical_type == "BYTE_ARRAY",
        )
        assert values == chunk.values == column.num_values
        assert size <= column.total_uncompressed_size  # which counts the headers too


def test_no_interpreter_runs_for_an_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow goes by the content, and would hand PostScript to Ghostscript."""
    from PIL import EpsImagePlugin

    (tmp_path / "a.png").write_bytes(
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n"
    )
    ran: list[object] = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *args: ran.append(args))
    with pytest.raises(DataError, match="cannot be read as an image"):
        open_data(tmp_path)["image"][0]
    assert not ran


def test_inputs_of_verify_are_bounded_too(tmp_path: Path) -> None:
    import torch

    from regauge.errors import CheckpointError
    from regauge.verification.inputs import read_inputs

    module = torch.nn.Linear(1, 1)
    np.savez(tmp_path / "good.npz", x=np.ones((2, 3)), ids=np.arange(3))
    loaded_inputs = read_inputs(tmp_path / "good.npz", module)
    assert loaded_inputs["x"].dtype == torch.float32
    assert loaded_inputs["ids"].tolist() == [0, 1, 2]
    (tmp_path / "shape.npz").write_bytes(bombs.DATA["shape.npz"][0]())
    with pytest.raises(CheckpointError, match="must have 8000000000000 bytes, got 8"):
        read_inputs(tmp_path / "shape.npz", module)
