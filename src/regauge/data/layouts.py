"""Folders of datasets as their authors distribute them, so that data of the hub can be given by
path: the same fields and labels as on the hub.

| dataset | folder |
|---|---|
| any | `Dataset.save_to_disk` of the datasets library, its cache (`NAME-test.arrow`) |
| any | parquet of the hub: `CONFIG/test/0000.parquet`, `data/test-*.parquet`, `test.parquet` |
| any | `test.csv`, `test.tsv`, `test.jsonl`, `test.npz` or `test.txt` |
| any | images: `test/CLASS/*.png` |
| CelebA | `img_align_celeba/` with `list_attr_celeba.txt` or `.csv` |
| IMDB | `test/pos/*.txt`, `test/neg/*.txt` |
| SNLI | `snli_1.0_test.jsonl` |
| WikiText | `wiki.test.raw` or `wiki.test.tokens` |
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from regauge.checkpoints.documents import load_json
from regauge.checkpoints.files import format_bytes
from regauge.data import datasets as d
from regauge.errors import DataError, RegaugeError, need

ALIASES = {"validation": ("validation", "valid", "val", "dev")}
SNLI = ("entailment", "neutral", "contradiction")  # in the order of the hub's labels
# The last training image and the last validation image of CelebA, where no partition file says so.
CELEBA_ENDS = (162_770, 182_637)
PARTITIONS = ("train", "validation", "test")


class Request(NamedTuple):
    """The part of a folder that is opened."""

    split: str
    config: str | None
    size: d.Size | None

    @property
    def names(self) -> tuple[str, ...]:
        """The names that a split goes by in files."""
        return next((names for names in ALIASES.values() if self.split in names), (self.split,))


Columns = tuple[dict[str, Any], str]  # with the digest of their files
Reader = Callable[[Path, Request], Columns | None]


def read_layout(
    folder: Path, split: str, config: str | None = None, size: d.Size | None = None
) -> Columns | None:
    """Read a split of a folder in one of the known layouts.

    Args:
        folder: The folder.
        split: The split.
        config: The config, if the folder has several.
        size: Resize images to this height and width.

    Returns:
        The fields and the digest of their files; None if the layout is unknown.

    Raises:
        DataError: The layout is known, but it has no such split, or a file is damaged.
    """
    request = Request(split, config, size)
    choices = [] if config is None else [folder / config, folder / config.removesuffix("-v1")]
    folder = next((p for p in choices if p.is_dir()), folder)
    for name, read in LAYOUTS.items():
        if name == "parquet" and _holds_images(folder):  # no need to look into 1,000 classes
            return None
        try:
            found = read(folder, request)
        except RegaugeError:
            raise
        # json, pyarrow and numpy raise errors of many types for damaged files
        except Exception as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise DataError(
                f"{folder} cannot be read as {name}: {reason}", hint="download it again"
            ) from error
        if found is not None:
            return found
    return None


def _read_saved(folder: Path, request: Request) -> Columns | None:
    """Read what the datasets library has saved, or its cache: Arrow streams."""
    if (folder / "dataset_dict.json").is_file():
        splits = load_json((folder / "dataset_dict.json").read_text("utf-8"))["splits"]
        name = next((n for n in request.names if n in splits), None)
        if name is None:
            raise _no_split(folder, request, splits)
        folder = folder / name
    if (folder / "state.json").is_file():
        state = load_json((folder / "state.json").read_text("utf-8"))
        if state.get("_indices_data_files"):
            raise DataError(
                f"{folder} must be saved without an index of rows",
                hint="call flatten_indices() before save_to_disk()",
            )
        files = [_inside(folder, entry["filename"]) for entry in state["_data_files"]]
    else:
        files = _first(folder, [f"*-{n}{end}.arrow" for n in request.names for end in ("", "-*")])
        if not files and any(folder.glob("*.arrow")):
            raise _no_split(folder, request, [p.stem for p in sorted(folder.glob("*.arrow"))])
    if not files:
        return None
    return _joined(files, lambda raw, path: _read_arrow(raw, path, request.size))


def _inside(folder: Path, name: str) -> Path:
    path = folder / name
    if path.parent != folder or not path.is_file():
        raise DataError(f"{folder}/state.json must name files of its folder, got {name!r}")
    return path


def _read_arrow(raw: bytes, path: Path, size: d.Size | None) -> dict[str, Any]:
    need("pyarrow", "data")
    import pyarrow as pa

    columns: dict[str, list[Any]] = {}
    limit, taken = d.MAX_RATIO * len(raw) + d.SPARE, 0
    with pa.ipc.open_stream(io.BytesIO(raw)) as reader:
        for batch in reader:
            taken += batch.nbytes
            if taken > limit:
                raise DataError(
                    f"{path} must decompress to at most {format_bytes(limit)}, got more",
                    hint="if you trust the file, split it into smaller ones",
                )
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                columns.setdefault(name, []).extend(d.arrow_values(column))
    return {name: d.convert_column(values, size) for name, values in columns.items()}


def _read_parquets(folder: Path, request: Request) -> Columns | None:
    """Read the parquet files of a split, as on the hub."""
    known = [
        pattern
        for name in request.names
        for pattern in (
            f"{name}/*.parquet",
            f"{name}-*.parquet",
            f"*-{name}.parquet",
            f"*-{name}-*.parquet",
            f"{name}.parquet",
            f"data/{name}-*.parquet",
            f"data/{name}.parquet",
        )
    ]
    files = _first(folder, known)
    if not files:  # one config, which need not be named
        for inner in sorted(p for p in folder.iterdir() if p.is_dir() and p.name != "data"):
            found = _first(inner, known)
            if found and files:
                raise DataError(
                    f"{folder} has several configs",
                    hint=f"pass config=, such as {inner.name}",
                )
            files = files or found
    if not files:
        others = [p for depth in ("", "*/", "*/*/") for p in folder.glob(f"{depth}*.parquet")]
        if others:
            names = sorted({str(p.relative_to(folder)) for p in others})
            raise _no_split(folder, request, names)
        return None
    return _joined(files, lambda raw, path: d.read_file(raw, path, request.size))


def _read_celeba(folder: Path, request: Request) -> Columns | None:
    """Read CelebA: aligned images, their 40 attributes (1 or -1), and the split of each."""
    listed = next(
        (p for p in (folder / f"list_attr_celeba.{s}" for s in ("txt", "csv")) if p.is_file()), None
    )
    if listed is None:
        return None
    outer = folder / "img_align_celeba"
    images = outer / "img_align_celeba" if (outer / "img_align_celeba").is_dir() else outer
    if not images.is_dir():
        raise DataError(f"{outer} does not exist", hint="unpack img_align_celeba.zip there")
    raw = d.read_bytes(listed)
    names, rows = _celeba_rows(raw.decode("utf-8-sig"), listed)
    wanted = _celeba_split(folder, request)
    present = {p.name for p in d.list_images(images)}
    chosen = [row for row in rows if row[0] in present and wanted(row[0])]
    if not chosen:
        raise DataError(
            f"{images} has no images of the split {request.split}",
            hint=f"{listed.name} lists {len(rows)} images, of which {len(present)} are there",
        )
    paths = [images / row[0] for row in chosen]
    numbers = np.array([[int(v) for v in row[1:]] for row in chosen], np.int64)
    columns = {name: numbers[:, i] for i, name in enumerate(names)}
    digest = d.digest_parts(raw, d.digest_files(images, paths).encode())
    return {"image": d.EncodedImages(tuple(paths), request.size), **columns}, digest


def _celeba_rows(text: str, path: Path) -> tuple[list[str], list[list[str]]]:
    """Return the attributes and the rows [file, 1 or -1, ...] of a .txt or .csv."""
    if path.suffix == ".csv":
        (_, *names), *rows = list(csv.reader(io.StringIO(text)))
    else:  # the number of images, the names, and a line for each
        _, head, *lines = text.splitlines()
        names, rows = head.split(), [line.split() for line in lines if line.strip()]
    wrong = next((n for n, row in enumerate(rows) if len(row) != len(names) + 1), None)
    if wrong is not None:
        raise ValueError(
            f"row {wrong + 1} has {len(rows[wrong]) - 1} values for {len(names)} names"
        )
    return names, rows


def _celeba_split(folder: Path, request: Request) -> Callable[[str], bool]:
    """Return whether an image is of the split: by the partition file, or by its number."""
    number = next((i for i, n in enumerate(PARTITIONS) if n in request.names), None)
    if number is None:
        raise _no_split(folder, request, PARTITIONS)
    for suffix in ("txt", "csv"):
        path = folder / f"list_eval_partition.{suffix}"
        if path.is_file():
            text = path.read_text("utf-8-sig").replace(",", " ")
            parts = dict(line.split()[:2] for line in text.splitlines() if line.strip())
            return lambda name: parts.get(name) == str(number)
    return lambda name: sum(int(Path(name).stem) > end for end in CELEBA_ENDS) == number


def _read_imdb(folder: Path, request: Request) -> Columns | None:
    """Read IMDB's folders of reviews: negative is 0, positive 1."""
    inner = folder / "aclImdb"
    part = (inner if inner.is_dir() else folder) / request.split
    if not all((part / name).is_dir() and any((part / name).glob("*.txt")) for name in _SIGNS):
        return None
    files = [(p, i) for i, name in enumerate(_SIGNS) for p in sorted((part / name).glob("*.txt"))]
    raws = [d.read_bytes(p) for p, _ in files]
    texts = [raw.decode("utf-8") for raw in raws]
    names = [f"{p.parent.name}/{p.name}".encode() for p, _ in files]
    digest = d.digest_parts(*(part for pair in zip(names, raws, strict=True) for part in pair))
    return {"text": texts, "label": np.array([i for _, i in files])}, digest


_SIGNS = ("neg", "pos")


def _read_snli(folder: Path, request: Request) -> Columns | None:
    """Read SNLI's own .jsonl. A pair without a label has -1, as on the hub."""
    files = _first(folder, [f"snli_1.0_{n}.jsonl" for n in request.names])
    files = files or _first(folder / "snli_1.0", [f"snli_1.0_{n}.jsonl" for n in request.names])
    if not files:
        return None
    raw = d.read_bytes(files[0])
    rows = [json.loads(line) for line in raw.decode("utf-8").split("\n") if line.strip()]
    number = {name: i for i, name in enumerate(SNLI)}
    columns = {
        "premise": [str(row["sentence1"]) for row in rows],
        "hypothesis": [str(row["sentence2"]) for row in rows],
        "label": np.array([number.get(row["gold_label"], -1) for row in rows]),
    }
    return columns, d.digest_parts(raw)


def _read_wikitext(folder: Path, request: Request) -> Columns | None:
    """Read a split of WikiText as its lines."""
    names = [f"wiki.{n}.{end}" for end in ("raw", "tokens") for n in request.names]
    files = _first(folder, names)
    if not files:
        return None
    raw = d.read_bytes(files[0])
    return {"text": raw.decode("utf-8").split("\n")}, d.digest_parts(raw)


def _read_tables(folder: Path, request: Request) -> Columns | None:
    """Read one file for each split."""
    files = _first(folder, [f"{n}{suffix}" for n in request.names for suffix in d.READERS])
    return _joined(files, lambda raw, path: d.read_file(raw, path, request.size)) if files else None


def _read_split_images(folder: Path, request: Request) -> Columns | None:
    """Read a folder per split with a folder per class in each."""
    for name in request.names:
        part = folder / name
        if part.is_dir() and any(p.is_dir() and d.list_images(p) for p in part.iterdir()):
            return d.read_image_folder(part, request.size)
    return None


LAYOUTS: dict[str, Reader] = {
    "a dataset of the datasets library": _read_saved,
    "CelebA": _read_celeba,
    "parquet": _read_parquets,
    "IMDB": _read_imdb,
    "SNLI": _read_snli,
    "WikiText": _read_wikitext,
    "a file per split": _read_tables,
    "images by split and class": _read_split_images,
}


def _holds_images(folder: Path) -> bool:
    """Return whether a folder has images, or its first folder has: images by class."""
    inner = sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    return any(d.list_images(p) for p in (folder, *inner[:1]))


def _first(folder: Path, patterns: Sequence[str]) -> list[Path]:
    """Return the files of the first pattern that has any."""
    matches: Iterator[list[Path]] = (
        sorted(p for p in folder.glob(pattern) if p.is_file()) for pattern in patterns
    )
    return next((found for found in matches if found), [])


def _joined(files: Sequence[Path], read: Callable[[bytes, Path], Mapping[str, Any]]) -> Columns:
    """Read files, and append their columns."""
    raws = [d.read_bytes(p) for p in files]
    parts = [read(raw, p) for raw, p in zip(raws, files, strict=True)]
    columns = {name: d.concatenate([part[name] for part in parts]) for name in parts[0]}
    return columns, d.digest_parts(*raws)


def _no_split(folder: Path, request: Request, known: Sequence[str]) -> DataError:
    return DataError(
        f'{folder} has no split "{request.split}"', hint=f"it has {', '.join(known[:8])}"
    )
