"""Small stand-ins of the papers' datasets, in the formats in which they are distributed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

WNIDS = ("n01440764", "n01443537", "n01484850", "n01491361")
ATTRIBUTES = 40
GOOD, BAD = ("fine", "bright", "lovely"), ("dull", "grim", "stale")


def picture(number: int, side: int, channels: int = 3) -> Any:
    """Return an image as PIL has it."""
    from PIL import Image

    rng = np.random.default_rng(number)
    coarse = rng.integers(0, 256, (4, 4, channels), np.uint8).squeeze()
    return Image.fromarray(coarse).resize((side, side))


def write_image(path: Path, number: int, side: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    picture(number, side).save(path)


def image_folder(
    folder: Path, classes: Sequence[str], each: int, side: int, suffix: str = "JPEG"
) -> Path:
    """Write images in a folder per class, as ImageNet's."""
    for c, name in enumerate(classes):
        for i in range(each):
            write_image(folder / name / f"{name}_{i}.{suffix}", 1000 * c + i, side + 3 * i % 5)
    return folder


def celeba(
    folder: Path, names: Sequence[str], splits: Sequence[int], side: int, suffix: str = "txt"
) -> Path:
    """Write CelebA: aligned images, attributes, and the split of each image."""
    rng = np.random.default_rng(0)
    files = [f"{i + 1:06d}.jpg" for i in range(len(splits))]
    inner = folder / "img_align_celeba"
    inner = inner / "img_align_celeba" if suffix == "csv" else inner  # as on Kaggle
    for i, file in enumerate(files):
        write_image(inner / file, i, side)
    values = rng.choice([-1, 1], (len(files), len(names)))
    if suffix == "txt":
        lines = [str(len(files)), " ".join(names) + " "]
        lines += [
            f"{f} " + " ".join(f"{v:2d}" for v in row) for f, row in zip(files, values, strict=True)
        ]
        parts = [f"{f} {s}" for f, s in zip(files, splits, strict=True)]
    else:
        lines = ["image_id," + ",".join(names)]
        lines += [",".join([f, *map(str, row)]) for f, row in zip(files, values, strict=True)]
        parts = ["image_id,partition", *(f"{f},{s}" for f, s in zip(files, splits, strict=True))]
    (folder / f"list_attr_celeba.{suffix}").write_text("\n".join(lines) + "\n")
    (folder / f"list_eval_partition.{suffix}").write_text("\n".join(parts) + "\n")
    return folder


def ade20k(folder: Path, count: int, side: int) -> Path:
    """Write ADE20k's scene parsing: images, and maps of class numbers in which 0 is none."""
    from PIL import Image

    for split, part in (("train", "training"), ("val", "validation")):
        for i in range(count):
            name = f"ADE_{split}_{i + 1:08d}"
            write_image(folder / "images" / part / f"{name}.jpg", i, side + i)
            path = folder / "annotations" / part / f"{name}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            values = np.random.default_rng(i).integers(0, 151, (4, 4), np.uint8)
            size = (side + i, side + i)
            Image.fromarray(values).resize(size, Image.Resampling.NEAREST).save(path)
    return folder


def reviews(count: int) -> list[tuple[str, int]]:
    rng = np.random.default_rng(0)
    return [
        (f"the film is {rng.choice((BAD, GOOD)[i % 2])} and the plot {i}", i % 2)
        for i in range(count)
    ]


def imdb(folder: Path, count: int) -> Path:
    """Write IMDB as its archive has it."""
    for split in ("train", "test"):
        for i, (text, label) in enumerate(reviews(count)):
            path = folder / "aclImdb" / split / ("neg", "pos")[label] / f"{i}_{1 + 8 * label}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    (folder / "aclImdb" / "train" / "unsup").mkdir()
    return folder


def snli(folder: Path, count: int) -> Path:
    """Write SNLI as its archive has it; one pair has no label."""
    kinds = ("entailment", "neutral", "contradiction", "-")
    inner = folder / "snli_1.0"
    inner.mkdir(parents=True)
    for split in ("train", "dev", "test"):
        rows = [
            {"gold_label": kinds[i % 4], "sentence1": f"the film {i}", "sentence2": "a plot"}
            for i in range(count)
        ]
        lines = "\n".join(json.dumps({"annotator_labels": [], **row}) for row in rows)
        (inner / f"snli_1.0_{split}.jsonl").write_text(lines + "\n")
    return folder


def wiki_lines(count: int) -> list[str]:
    return [" ", " = The film = ", *(f" the plot of film {i} is fine . " for i in range(count))]


def wikitext(folder: Path, count: int) -> Path:
    """Write WikiText-2 as its archive has it."""
    (folder / "wikitext-2-raw").mkdir(parents=True)
    for split in ("train", "valid", "test"):
        text = "\n".join(wiki_lines(count)) + "\n"
        (folder / "wikitext-2-raw" / f"wiki.{split}.raw").write_text(text)
    return folder


def saved(folder: Path, splits: Mapping[str, Mapping[str, Any]]) -> Path:
    """Write what `DatasetDict.save_to_disk` of the datasets library writes."""
    import pyarrow as pa

    folder.mkdir(parents=True)
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}))
    for split, columns in splits.items():
        inner = folder / split
        inner.mkdir()
        table = pa.table(dict(columns))
        name = "data-00000-of-00001.arrow"
        with pa.OSFile(str(inner / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as w:
            w.write_table(table, max_chunksize=3)
        state = {"_data_files": [{"filename": name}], "_indices_data_files": None, "_split": split}
        (inner / "state.json").write_text(json.dumps(state))
        (inner / "dataset_info.json").write_text(json.dumps({"features": {}}))
    return folder


def parquet(path: Path, columns: Mapping[str, Any]) -> Path:
    """Write one parquet file of the hub."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(dict(columns)), path)
    return path


def encoded(count: int, side: int) -> list[dict[str, Any]]:
    """Return images as columns of the hub hold them."""
    import io

    out = []
    for i in range(count):
        file = io.BytesIO()
        picture(i, side).save(file, "PNG")
        out.append({"bytes": file.getvalue(), "path": f"{i}.png"})
    return out
