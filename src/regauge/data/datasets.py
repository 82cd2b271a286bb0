"""Data by uri: one way to open what experiments, audits and users bring.

    open_data("digits", split="test")                                # scikit-learn's handwritten
    digits: nothing is downloaded
    open_data("mnist.npz", fields={"image": "X_train", "label": "y_train"})
    open_data("reviews.parquet")         open_data("train.tsv")       open_data("notes.jsonl")
    open_data("book.txt")
    open_data("photos/")                                             # a folder per class, or images
    alone
    open_data("stanfordnlp/imdb", split="test")                      # a data set of the hub, as
    parquet

`fields` maps the names that you want to those in the source; text, image and label need no mention
where the source calls them so. Without it every field keeps its own name. Numbers come as numpy
arrays, texts as lists, encoded images as `Pictures`, which are decoded when they are looked at. The
digest says what was read, wherever it lay.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from regauge.checkpoints.archives import open_archive
from regauge.checkpoints.files import format_bytes
from regauge.data.parquet import Chunk, count_pages, read_chunks
from regauge.errors import CheckpointError, RegaugeError, need

Size = int | tuple[int, int]  # of both sides, or height and width
DEFAULT_FIELDS = ("text", "image", "label")
_IMAGE_FORMATS = (
    "PNG",
    "JPEG",
    "BMP",
    "GIF",
    "WEBP",
    "TIFF",
    "PPM",
)  # by content: of an EPS file, Pillow would run Ghostscript
MAX_PIXELS = 100_000_000  # of one image
MAX_RATIO, SPARE = (
    32,
    1 << 28,
)  # a compressed file may become so many times its size, plus so many bytes
MAX_VALUES = (
    1 << 25
)  # of a parquet file that is smaller than its values: columns of one repeated value take no space
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".pgm", ".ppm")


class DataError(RegaugeError):
    """A data set that cannot be read, or has not what was asked of it."""


@dataclass(frozen=True)
class EncodedImages(Sequence[Any]):
    """Encoded images: bytes, or paths of files. Looking at one decodes it, to a `size` and a
    `colour` (L or RGB) if given. A size is one number of pixels for both sides, or height and
    width.
    """

    sources: tuple[bytes | Path, ...]
    size: Size | None = None
    nearest: bool = False  # for label maps, whose values must not be mixed
    colour: str | None = None

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return replace(self, sources=self.sources[i])
        need("PIL", "data")
        from PIL import Image

        source = self.sources[i]
        label = str(source) if isinstance(source, Path) else f"image {i}"
        try:
            with Image.open(
                io.BytesIO(source) if isinstance(source, bytes) else source, formats=_IMAGE_FORMATS
            ) as opened:
                if opened.width * opened.height > MAX_PIXELS:
                    raise _too_large(label, f"{opened.width} x {opened.height}")
                image: Image.Image = (
                    opened
                    if self.nearest
                    else opened.convert("L" if opened.mode in ("1", "L", "LA", "I;16") else "RGB")
                )
                if self.colour is not None and image.mode != self.colour:
                    image = image.convert(self.colour)
                height, width = (
                    (self.size, self.size)
                    if isinstance(self.size, int)
                    else self.size or (image.height, image.width)
                )
                if image.size != (width, height):
                    image = image.resize(
                        (width, height),
                        Image.Resampling.NEAREST if self.nearest else Image.Resampling.BILINEAR,
                    )
                return np.asarray(image)
        except RegaugeError:
            raise
        except Image.DecompressionBombError as error:  # raised before the size can be asked for
            digits = re.search(r"[0-9]+", str(error))
            raise _too_large(label, f"{int(digits[0]):,} pixels" if digits else "more") from error
        except Exception as error:  # decoders raise errors of many kinds for damaged files
            first = (str(error) or type(error).__name__).splitlines()[0]
            raise DataError(
                f"{label} cannot be read as an image: {first}", hint="mend it, or leave it out"
            ) from error

    def to_array(self, rows: Sequence[int] | None = None) -> Any:
        """Those rows, or all, as one array [n, height, width(, channels)]. Grey ones among others
        are given three channels.
        """
        found = [self[i] for i in (range(len(self)) if rows is None else rows)]
        if len({f.ndim for f in found}) > 1:
            found = [f if f.ndim == 3 else np.repeat(f[..., None], 3, -1) for f in found]
        sizes = sorted({f.shape[:2] for f in found})
        if len(sizes) > 1:
            told = " and ".join(f"{h} x {w}" for h, w in (sizes[0], sizes[-1]))
            raise DataError(
                f"the images have different sizes, {told} among them",
                hint="make them one size, or give open_data a size",
            )
        return np.stack(found)

    @cached_property
    def sizes(self) -> frozenset[tuple[int, int]]:
        """Every (height, width) that the files have, by their headers. What cannot be read is no
        matter here: looking at it says so.
        """
        need("PIL", "data")
        from PIL import Image

        found = set()
        for source in self.sources:
            with (
                contextlib.suppress(Exception),
                Image.open(
                    io.BytesIO(source) if isinstance(source, bytes) else source,
                    formats=_IMAGE_FORMATS,
                ) as opened,
            ):
                found.add((opened.height, opened.width))
        return frozenset(found)


def _too_large(label: str, size: str) -> DataError:
    return DataError(
        f"{label} must have at most {MAX_PIXELS / 1e6:.0f} million pixels, got {size}",
        hint="scale it down first, or leave it out",
    )


@dataclass(frozen=True, eq=False)
class Data:
    """Fields of equal length, by name, and the digest of what they were read from."""

    name: str
    fields: Mapping[str, Any]
    digest: str

    def __len__(self) -> int:
        return len(next(iter(self.fields.values())))

    def __getitem__(self, field: str) -> Any:
        if field not in self.fields:
            raise DataError(
                f'{self.name} has no field "{field}"',
                hint=f"it has {', '.join(map(repr, self.fields))}; name one with --field "
                f"NAME=THEIRS, or fields={{...}}",
            )
        return self.fields[field]

    def __iter__(self) -> Iterator[str]:
        return iter(self.fields)

    def take(self, n: int | None, seed: int | None = None) -> Data:
        """The first n rows, or n drawn by a seed; all of them for None."""
        if n is None or n >= len(self):
            return self
        rows = (
            np.arange(n)
            if seed is None
            else np.sort(np.random.default_rng(seed).permutation(len(self))[:n])
        )
        return Data(
            self.name,
            {k: _take_rows(v, rows) for k, v in self.fields.items()},
            _digest(self.digest.encode(), f"take {n} {seed}".encode()),
        )


def open_data(
    uri: str | Path,
    *,
    fields: Mapping[str, str] | None = None,
    split: str = "train",
    config: str | None = None,
    size: Size | None = None,
) -> Data:
    """The data at a path, or of the hub (`owner/name`, with its `config` and `split`). `size` is
    for images of different sizes.
    """
    path = Path(uri).expanduser()
    if str(uri) == "digits":
        found, digest = _read_digits(split)
    elif path.is_dir():
        found, digest = _read_folder(path, size)
    elif path.is_file():
        raw = _read_bytes(path)
        found, digest = _find_reader(path)(raw, path, size), _digest(raw)
    elif str(uri).count("/") == 1 and not path.suffix and not str(uri).startswith((".", "/", "~")):
        found, digest = _read_hub(str(uri), config, split, size)
    else:
        raise DataError(
            f"there is no {uri}",
            hint=f"give a file ({', '.join(READERS)}), a folder of images, a hub id "
            "(owner/name), or digits",
        )
    if fields is not None:
        whole = Data(str(uri), found, "")
        named = {name: whole[source] for name, source in fields.items()}
        count = len(next(iter(named.values()), ()))
        own = [
            name
            for name in DEFAULT_FIELDS
            if name in found
            and name not in named
            and name not in fields.values()
            and len(found[name]) == count
        ]
        found = named | {name: found[name] for name in own}
    lengths = {name: len(values) for name, values in found.items()}
    if not lengths or not all(lengths.values()):
        raise DataError(f"{uri} is empty", hint="is it the right file, and the right split?")
    if len(set(lengths.values())) > 1:
        told = ", ".join(f'"{name}" has {n}' for name, n in lengths.items())
        raise DataError(
            f"the fields of {uri} have different lengths: {told}",
            hint="choose those that belong together with --field, or fields={...}",
        )
    return Data(path.name, found, _digest(digest.encode(), json.dumps([fields, size]).encode()))


def text_of(data: Data, field: str = "text") -> str:
    """All of a text file, character by character as it was."""
    return "\n".join(data[field])


def _read_npz(raw: bytes, path: Path, size: Size | None) -> dict[str, Any]:
    return read_arrays(raw, str(path))


def read_arrays(raw: bytes, label: str) -> dict[str, Any]:
    """Read the arrays of an .npz file.

    Headers are compared with the bytes behind them before memory is allocated; object arrays,
    which are pickles, are rejected.

    Args:
        raw: The bytes of the file.
        label: The name of the file in errors.

    Raises:
        DataError: The archive is damaged, or inflates beyond `MAX_RATIO` times its size plus
        `SPARE`.
        ValueError: An array is damaged.
    """
    try:
        archive = open_archive(io.BytesIO(raw), label, max_ratio=MAX_RATIO, spare=SPARE)
        return {
            name.removesuffix(".npy"): _read_npy(archive.read(record, record.size), name)
            for name, record in archive.records.items()
        }
    except CheckpointError as error:
        raise DataError(str(error), hint=error.hint) from error


def _read_npy(raw: bytes, name: str) -> Any:
    from numpy.lib import format as npy

    file = io.BytesIO(raw)
    version = npy.read_magic(file)
    shape, _, dtype = (
        npy.read_array_header_1_0(file) if version == (1, 0) else npy.read_array_header_2_0(file)
    )
    if dtype.hasobject:
        raise ValueError(
            f'array "{name}" holds Python objects, which can run code when they are read'
        )
    needed, found = prod(shape) * dtype.itemsize, len(raw) - file.tell()
    if min(shape, default=0) < 0 or needed != found:
        raise ValueError(
            f'array "{name}" of shape {list(shape)} and dtype {dtype} must have {needed} bytes, '
            f"got {found}"
        )
    file.seek(0)
    return npy.read_array(file, allow_pickle=False)


def _read_parquet(raw: bytes, path: Path, size: Size | None) -> dict[str, Any]:
    need("pyarrow", "data")
    import pyarrow.parquet as pq

    chunks = read_chunks(raw)
    _require_bounded(chunks, path, raw)
    table = pq.read_table(
        io.BytesIO(raw), read_dictionary=sorted({c.path for c in chunks if c.is_bytes})
    )
    return {
        name: _convert_column(
            [v for chunk in table[name].chunks for v in _arrow_values(chunk)], size
        )
        for name in table.column_names
    }


def _arrow_values(array: Any) -> list[Any]:
    """The values of an Arrow array. Those that the file stores once and refers to often are one
    object.
    """
    import pyarrow as pa

    if pa.types.is_dictionary(array.type):
        stored = array.dictionary.to_pylist()
        return [None if i is None else stored[i] for i in array.indices.to_pylist()]
    if pa.types.is_struct(array.type):
        columns = {field.name: _arrow_values(array.field(i)) for i, field in enumerate(array.type)}
        return [
            {name: column[i] for name, column in columns.items()} if valid else None
            for i, valid in enumerate(array.is_valid().to_pylist())
        ]
    if pa.types.is_list(array.type):
        items, ends = _arrow_values(array.values), array.offsets.to_pylist()
        return [
            items[ends[i] : ends[i + 1]] if valid else None
            for i, valid in enumerate(array.is_valid().to_pylist())
        ]
    return list(array.to_pylist())


def _require_bounded(chunks: Sequence[Chunk], path: Path, raw: bytes) -> None:
    """Bound the values of a parquet file, and their bytes when decompressed, by what its pages
    declare.
    """
    values, inflated, size, hint = (
        0,
        0,
        len(raw),
        "if you trust the file, split it into smaller ones",
    )
    for chunk in chunks:
        found, uncompressed = count_pages(raw, chunk)
        values += max(found, chunk.values, chunk.rows) * chunk.width // 8
        inflated += uncompressed
    if inflated > MAX_RATIO * size + SPARE:
        limit = (
            f"{format_bytes(MAX_RATIO * size + SPARE)} ({MAX_RATIO} times its size plus "
            f"{format_bytes(SPARE)})"
        )
        raise DataError(
            f"{path} must decompress to at most {limit}, got {format_bytes(inflated)}", hint=hint
        )
    if values > max(size, MAX_VALUES):
        raise DataError(
            f"{path} must have at most {max(size, MAX_VALUES):,} values for its "
            f"{format_bytes(size)}, "
            f"got {values:,}",
            hint=hint,
        )


def _read_table(raw: bytes, path: Path, size: Size | None) -> dict[str, Any]:
    """With a line of names first. Tabs need no quotes, so that quotes in a .tsv are text."""
    lines = io.StringIO(raw.decode("utf-8-sig"), newline="")
    reader = (
        csv.reader(lines)
        if path.suffix == ".csv"
        else csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
    )
    names, *rows = list(reader) or [[]]
    for number, row in enumerate(rows, 2):
        if len(row) != len(names):
            raise ValueError(f"line {number} has {len(row)} fields, the first line {len(names)}")
    return {name: _parse_numbers([row[i] for row in rows]) for i, name in enumerate(names)}


def _read_jsonl(raw: bytes, path: Path, size: Size | None) -> dict[str, Any]:
    rows = [
        json.loads(line) for line in raw.decode("utf-8-sig").split("\n") if line.strip()
    ]  # splitlines also cuts at U+2028, inside of a text
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict) or row.keys() != rows[0].keys():
            raise ValueError(f"object {number} has other fields than the first")
    return {
        name: _convert_column([row[name] for row in rows], size)
        for name in (rows[0] if rows else ())
    }


def _read_txt(raw: bytes, path: Path, size: Size | None) -> dict[str, Any]:
    return {"text": raw.decode().split("\n")}


READERS: dict[str, Callable[[bytes, Path, Size | None], dict[str, Any]]] = {
    ".npz": _read_npz,
    ".parquet": _read_parquet,
    ".csv": _read_table,
    ".tsv": _read_table,
    ".jsonl": _read_jsonl,
    ".txt": _read_txt,
}


def _find_reader(path: Path) -> Callable[[bytes, Path, Size | None], dict[str, Any]]:
    read = READERS.get(path.suffix)
    if read is None:
        raise DataError(
            f"{path} has an ending that is not known here",
            hint=f"known are {', '.join(READERS)}, and folders of images",
        )

    def named(raw: bytes, path: Path, size: Size | None) -> dict[str, Any]:
        try:
            return read(raw, path, size)
        except RegaugeError:
            raise
        # numpy, pyarrow and zipfile raise errors of many kinds for files that are none of theirs
        except Exception as error:
            first = (str(error) or type(error).__name__).splitlines()[0]
            raise DataError(
                f"{path} cannot be read as {path.suffix}: {first}",
                hint="the ending says how a file is read; is it the right one?",
            ) from error

    return named


def _read_folder(path: Path, size: Size | None) -> tuple[dict[str, Any], str]:
    """A folder per class, or images alone (then their names are a field, by which label maps find
    their images).
    """
    classes = sorted(
        p for p in path.iterdir() if p.is_dir() and not p.name.startswith(".") and _list_images(p)
    )  # .ipynb_checkpoints is no class
    found = [(p, i) for i, folder in enumerate(classes) for p in _list_images(folder)] or [
        (p, 0) for p in _list_images(path)
    ]
    if not found:
        raise DataError(
            f"{path} holds no images",
            hint="a folder per class, or images alone; known endings are "
            f"{', '.join(IMAGE_SUFFIXES)}",
        )
    digest = hashlib.sha256()
    for p, _ in found:
        digest.update(_digest(str(p.relative_to(path)).encode(), _read_bytes(p)).encode())
    pictures = EncodedImages(tuple(p for p, _ in found), size)
    labels = (
        {"label": np.array([i for _, i in found]), "class": [classes[i].name for _, i in found]}
        if classes
        else {}
    )
    return {"image": pictures, "name": [p.stem for p, _ in found], **labels}, digest.hexdigest()


def _list_images(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.suffix.lower() in IMAGE_SUFFIXES)


def _read_digits(split: str) -> tuple[dict[str, Any], str]:
    """scikit-learn's digits come in the order of their writers: the last fifth, other hands, is the
    test.
    """
    if split not in ("train", "test"):
        raise DataError(f'digits has no split "{split}"', hint="train or test")
    need("sklearn", "experiments")
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images, labels = (
        np.round(bunch.images * (255 / 16)).astype(np.uint8),
        bunch.target.astype(np.int64),
    )
    part = slice(0, 1440) if split == "train" else slice(1440, None)
    images, labels = images[part], labels[part]
    return {"image": images, "label": labels}, _digest(images.tobytes(), labels.tobytes())


def _read_hub(
    uri: str, config: str | None, split: str, size: Size | None
) -> tuple[dict[str, Any], str]:
    """The hub keeps every public data set as parquet too, in its own branch:
    `config/split/0000.parquet`, and so on.
    """
    need("huggingface_hub", "hub")
    import huggingface_hub as hub

    branch = "refs/convert/parquet"
    try:
        files = sorted(
            f
            for f in hub.list_repo_files(uri, repo_type="dataset", revision=branch)
            if f.endswith(".parquet")
        )
        configs = sorted({f.split("/")[0] for f in files})
        if config is None and len(configs) > 1:
            raise DataError(
                f"the data set {uri} has several configs: {', '.join(configs)}",
                hint="give open_data a config",
            )
        chosen = [f for f in files if f.startswith(f"{config or ''.join(configs)}/{split}/")]
        if not chosen:
            known = ", ".join(sorted({"/".join(f.split("/")[:2]) for f in files})) or "none"
            raise DataError(
                f'the data set {uri} has no split "{split}"' + (f" of {config}" if config else ""),
                hint=f"config/split: {known}",
            )
        paths = [
            Path(hub.hf_hub_download(uri, f, repo_type="dataset", revision=branch)) for f in chosen
        ]
    except RegaugeError:
        raise
    except (
        Exception
    ) as error:  # no network, no such data set, no rights: the hub's library has an error for each
        first = (str(error) or type(error).__name__).splitlines()[0]
        raise DataError(
            f"there is no {uri} on the disk, and the hub did not give it: {first}",
            hint="give a path, or connect; HF_TOKEN opens gated data",
        ) from error
    raws = [_read_bytes(p) for p in paths]
    parts = [_find_reader(p)(raw, p, size) for p, raw in zip(paths, raws, strict=True)]
    return {name: _concatenate([part[name] for part in parts]) for name in parts[0]}, _digest(*raws)


def _convert_column(values: list[Any], size: Size | None) -> Any:
    """A column as what it is: numbers, encoded images, or texts."""
    if values and all(
        isinstance(v, Mapping) and isinstance(v.get("bytes"), bytes) for v in values
    ):  # how the hub stores images
        values = [v["bytes"] for v in values]
    if values and all(isinstance(v, bytes) for v in values):
        return EncodedImages(tuple(values), size)
    if values and all(isinstance(v, int | float) for v in values):
        return np.array(values)
    return [
        v
        if isinstance(v, str)
        else json.dumps(v)
        if isinstance(v, list | dict)
        else ""
        if v is None
        else str(v)
        for v in values
    ]


def _parse_numbers(texts: list[str]) -> Any:
    """A column of a table as numbers where all of it is; otherwise letter by letter as it was."""
    for kind in (int, float):
        try:
            return np.array([kind(text) for text in texts])
        except (ValueError, OverflowError):
            continue
    return texts


def _concatenate(parts: list[Any]) -> Any:
    if isinstance(parts[0], EncodedImages):
        return replace(parts[0], sources=tuple(s for p in parts for s in p.sources))
    return (
        np.concatenate(parts)
        if isinstance(parts[0], np.ndarray)
        else [v for part in parts for v in part]
    )


def _take_rows(values: Any, rows: Any) -> Any:
    if isinstance(values, EncodedImages):
        return replace(values, sources=tuple(values.sources[i] for i in rows))
    return values[rows] if isinstance(values, np.ndarray) else [values[i] for i in rows]


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def _digest(*parts: bytes) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8, "big"))
        found.update(part)
    return found.hexdigest()
