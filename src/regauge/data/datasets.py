"""Datasets by URI: files, folders and the hub through one function.

    open_data("digits", split="test")            # scikit-learn's digits; nothing is downloaded
    open_data("mnist.npz", fields={"image": "X_train", "label": "y_train"})
    open_data("reviews.parquet")                 # also .tsv, .csv, .jsonl, .txt
    open_data("photos/")                         # a folder per class, or images alone
    open_data("celeba/", split="test")           # a dataset as it is distributed: `layouts`
    open_data("stanfordnlp/imdb", split="test")  # a dataset of the hub, as parquet

`fields` maps the names that you want to those in the source; text, image and label are included
without mention if the source has them. Without `fields` every field keeps its name. Numbers are
returned as numpy arrays, texts as lists, encoded images as `EncodedImages`, which are decoded on
access. The digest identifies the data, independent of their location.
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
from regauge.checkpoints.environment import default_cache
from regauge.checkpoints.files import format_bytes, write_bytes
from regauge.data.parquet import Chunk, count_pages, read_chunks
from regauge.errors import CheckpointError, DataError, Hint, RegaugeError, need

Size = int | tuple[int, int]  # height and width; one number for both
DEFAULT_FIELDS = ("text", "image", "label")
# Formats are detected by content. EPS is excluded: Pillow would run Ghostscript.
_IMAGE_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
MAX_PIXELS = 100_000_000  # pixels of one image
# A compressed file may inflate to MAX_RATIO times its size plus SPARE bytes.
MAX_RATIO, SPARE = 32, 1 << 28
# Values of a small parquet file: columns of one repeated value take almost no space.
MAX_VALUES = 1 << 25
LARGE = 1 << 30  # bytes of a folder whose digest is stored
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".pgm", ".ppm")


@dataclass(frozen=True)
class EncodedImages(Sequence[Any]):
    """Encoded images, which are decoded on access.

    Args:
        sources: The images as bytes or paths.
        size: Resize images to this height and width, in pixels.
        nearest: Resize by nearest neighbour and keep the mode: for label maps, whose values must
            not be interpolated.
        colour: Convert images to this mode, L or RGB.
    """

    sources: tuple[bytes | Path, ...]
    size: Size | None = None
    nearest: bool = False
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
        except Image.DecompressionBombError as error:  # raised before the size can be read
            digits = re.search(r"[0-9]+", str(error))
            raise _too_large(label, f"{int(digits[0]):,} pixels" if digits else "more") from error
        except Exception as error:  # decoders raise errors of many kinds for damaged files
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise DataError(
                f"{label} cannot be read as an image: {reason}", hint="repair or remove it"
            ) from error

    def to_array(self, rows: Sequence[int] | None = None) -> Any:
        """Decode these images, or all, into one array [n, height, width(, channels)].

        Grey images among coloured ones get three channels.
        """
        images = [self[i] for i in (range(len(self)) if rows is None else rows)]
        if len({image.ndim for image in images}) > 1:
            images = [x if x.ndim == 3 else np.repeat(x[..., None], 3, -1) for x in images]
        sizes = sorted({image.shape[:2] for image in images})
        if len(sizes) > 1:
            extremes = " and ".join(f"{h} x {w}" for h, w in (sizes[0], sizes[-1]))
            raise DataError(
                f"the images have different sizes, {extremes} among them",
                hint="resize them, or pass a size to open_data",
            )
        return np.stack(images)

    @cached_property
    def sizes(self) -> frozenset[tuple[int, int]]:
        """Every (height, width) of the files, by their headers.

        Files that cannot be read are skipped: decoding them raises the error.
        """
        need("PIL", "data")
        from PIL import Image

        sizes = set()
        for source in self.sources:
            with (
                contextlib.suppress(Exception),
                Image.open(
                    io.BytesIO(source) if isinstance(source, bytes) else source,
                    formats=_IMAGE_FORMATS,
                ) as opened,
            ):
                sizes.add((opened.height, opened.width))
        return frozenset(sizes)


def _too_large(label: str, size: str) -> DataError:
    return DataError(
        f"{label} must have at most {MAX_PIXELS / 1e6:.0f} million pixels, got {size}",
        hint="scale it down, or remove it",
    )


@dataclass(frozen=True, eq=False)
class Data:
    """A dataset: fields of equal length by name, and the digest of their source.

    Attributes:
        name: The name in messages.
        fields: The fields by name.
        digest: The digest of the source.
        folders: The class folders that labels number, if the source is a folder of images.
    """

    name: str
    fields: Mapping[str, Any]
    digest: str
    folders: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(next(iter(self.fields.values())))

    def __getitem__(self, field: str) -> Any:
        if field not in self.fields:
            raise DataError(
                f'{self.name} has no field "{field}"',
                hint=Hint(
                    f"it has {', '.join(map(repr, self.fields))}; map one with "
                    f"fields={{name: column}}",
                    cli=f"it has {', '.join(map(repr, self.fields))}; map one with "
                    "--field NAME=COLUMN",
                ),
            )
        return self.fields[field]

    def __iter__(self) -> Iterator[str]:
        return iter(self.fields)

    def take(self, n: int | None, seed: int | None = None) -> Data:
        """Return the first n rows, or n rows sampled with a seed; all of them if n is None."""
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
            digest_parts(self.digest.encode(), f"take {n} {seed}".encode()),
            self.folders,
        )


def open_data(
    uri: str | Path,
    *,
    fields: Mapping[str, str] | None = None,
    split: str = "train",
    config: str | None = None,
    size: Size | None = None,
) -> Data:
    """Open a dataset.

    Args:
        uri: A file, a folder of images, a dataset of the hub (`owner/name`), or "digits".
        fields: From the names that you want to those in the source. By default all fields keep
            their names.
        split: The split of a dataset of the hub, of a folder with several, or of digits.
        config: The config of a dataset of the hub, if it has several.
        size: Resize images to this height and width.

    Raises:
        DataError: The data do not exist, cannot be read, or have fields of different lengths.
    """
    path = Path(uri).expanduser()
    if str(uri) == "digits":
        columns, digest = _read_digits(split)
    elif path.is_dir():
        from regauge.data.layouts import read_layout

        columns, digest = read_layout(path, split, config, size) or read_image_folder(path, size)
    elif path.is_file():
        raw = read_bytes(path)
        columns, digest = read_file(raw, path, size), digest_parts(raw)
    elif _is_hub_id(str(uri)):
        columns, digest = _read_hub(str(uri), config, split, size)
    else:
        raise DataError(
            f"{uri} does not exist",
            hint=f"give a file ({', '.join(READERS)}), a folder of images, a hub id "
            "(owner/name), or digits",
        )
    folders = tuple(sorted(set(columns["class"]))) if _is_by_class(columns) else ()
    if fields is not None:
        source_data = Data(str(uri), columns, "")
        renamed = {name: source_data[source] for name, source in fields.items()}
        count = len(next(iter(renamed.values()), ()))
        defaults = [
            name
            for name in DEFAULT_FIELDS
            if name in columns
            and name not in renamed
            and name not in fields.values()
            and len(columns[name]) == count
        ]
        columns = renamed | {name: columns[name] for name in defaults}
    lengths = {name: len(values) for name, values in columns.items()}
    if not lengths or not all(lengths.values()):
        raise DataError(f"{uri} is empty", hint="check the file and the split")
    if len(set(lengths.values())) > 1:
        listing = ", ".join(f'"{name}" has {n}' for name, n in lengths.items())
        raise DataError(
            f"the fields of {uri} have different lengths: {listing}",
            hint=Hint(
                "choose fields of one length with fields={...}",
                cli="choose fields of one length with --field NAME=COLUMN",
            ),
        )
    digest = digest_parts(digest.encode(), json.dumps([fields, size]).encode())
    return Data(path.name, columns, digest, folders)


def _is_by_class(columns: Mapping[str, Any]) -> bool:
    """Return whether images were read from class folders."""
    images = columns.get("image")
    is_read = isinstance(images, EncodedImages) and isinstance(images.sources[0], Path)
    return is_read and {"label", "class"} <= columns.keys()


def _is_hub_id(uri: str) -> bool:
    """Return whether the name of data that do not exist is `owner/name` of the hub.

    A name in a folder that exists is local: a typo in it must not load a stranger's data.
    """
    path = Path(uri)
    return (
        uri.count("/") == 1
        and not path.suffix
        and not uri.startswith((".", "/", "~"))
        and not path.parent.exists()
    )


def text_of(data: Data, field: str = "text") -> str:
    """Join the lines of a text file into its exact text.

    Rows of the hub's WikiText end with a newline of their own.
    """
    return "\n".join(line.removesuffix("\n") for line in data[field])


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
    expected, actual = prod(shape) * dtype.itemsize, len(raw) - file.tell()
    if min(shape, default=0) < 0 or expected != actual:
        raise ValueError(
            f'array "{name}" of shape {list(shape)} and dtype {dtype} must have {expected} bytes, '
            f"got {actual}"
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
        name: convert_column([v for chunk in table[name].chunks for v in arrow_values(chunk)], size)
        for name in table.column_names
    }


def arrow_values(array: Any) -> list[Any]:
    """Return the values of an Arrow array. Dictionary-encoded values are shared objects, so that
    repeated ones take no extra memory.
    """
    import pyarrow as pa

    if pa.types.is_dictionary(array.type):
        stored = array.dictionary.to_pylist()
        return [None if i is None else stored[i] for i in array.indices.to_pylist()]
    if pa.types.is_struct(array.type):
        columns = {field.name: arrow_values(array.field(i)) for i, field in enumerate(array.type)}
        return [
            {name: column[i] for name, column in columns.items()} if valid else None
            for i, valid in enumerate(array.is_valid().to_pylist())
        ]
    if pa.types.is_list(array.type):
        items, ends = arrow_values(array.values), array.offsets.to_pylist()
        return [
            items[ends[i] : ends[i + 1]] if valid else None
            for i, valid in enumerate(array.is_valid().to_pylist())
        ]
    return list(array.to_pylist())


def _require_bounded(chunks: Sequence[Chunk], path: Path, raw: bytes) -> None:
    """Raise a DataError if the pages of a parquet file declare too many values or decompressed
    bytes.
    """
    values, inflated, size = 0, 0, len(raw)
    hint = "if you trust the file, split it into smaller ones"
    for chunk in chunks:
        page_values, page_bytes = count_pages(raw, chunk)
        values += max(page_values, chunk.values, chunk.rows) * chunk.width // 8
        inflated += page_bytes
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
    """Read a .csv or .tsv file with a header line. Quotes in a .tsv are text."""
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
    # Not splitlines, which also splits at U+2028 inside of a text.
    rows = [json.loads(line) for line in raw.decode("utf-8-sig").split("\n") if line.strip()]
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict) or row.keys() != rows[0].keys():
            raise ValueError(f"object {number} has other fields than the first")
    return {
        name: convert_column([row[name] for row in rows], size)
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


def read_file(raw: bytes, path: Path, size: Size | None) -> dict[str, Any]:
    """Read the bytes of a file by the suffix of its path."""
    read = READERS.get(path.suffix)
    if read is None:
        raise DataError(
            f'the suffix of {path} must be one of {", ".join(READERS)}, got "{path.suffix}"',
            hint="convert the file; images are read from a folder",
        )
    try:
        return read(raw, path, size)
    except RegaugeError:
        raise
    # numpy, pyarrow and zipfile raise errors of many types for files of other formats
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise DataError(
            f"{path} cannot be read as {path.suffix}: {reason}",
            hint="the suffix determines the format; check that it is right",
        ) from error


def read_image_folder(path: Path, size: Size | None) -> tuple[dict[str, Any], str]:
    """Read images in one folder per class, or without classes.

    The field "name" contains the file names, by which label maps are matched to their images.
    """
    # Hidden folders, such as .ipynb_checkpoints, are not classes.
    classes = sorted(
        p for p in path.iterdir() if p.is_dir() and not p.name.startswith(".") and list_images(p)
    )
    images = [(p, i) for i, folder in enumerate(classes) for p in list_images(folder)] or [
        (p, 0) for p in list_images(path)
    ]
    if not images:
        raise DataError(
            f"{path} contains no images",
            hint="give a folder per class, or a folder of images; their suffixes must be one of "
            f"{', '.join(IMAGE_SUFFIXES)}",
        )
    digest = digest_files(path, [p for p, _ in images])
    encoded = EncodedImages(tuple(p for p, _ in images), size)
    labels = (
        {"label": np.array([i for _, i in images]), "class": [classes[i].name for _, i in images]}
        if classes
        else {}
    )
    return {"image": encoded, "name": [p.stem for p, _ in images], **labels}, digest


def digest_files(root: Path, paths: Sequence[Path]) -> str:
    """Return the SHA-256 of files and of their paths below a folder.

    Reading 140 GB (ImageNet) takes as long as an epoch: of more than `LARGE` bytes, the digest is
    stored in the cache by the path, size and time of every file, and computed once.
    """
    stats = [p.stat() for p in paths]
    stored = None
    if sum(s.st_size for s in stats) > LARGE:
        known = (
            f"{p.resolve()}\0{s.st_size}\0{s.st_mtime_ns}".encode()
            for p, s in zip(paths, stats, strict=True)
        )
        stored = default_cache() / f"digest-{digest_parts(*known)[:40]}.txt"
        if stored.is_file() and re.fullmatch("[0-9a-f]{64}", found := stored.read_text().strip()):
            return found
    digest = hashlib.sha256()
    for p in paths:
        digest.update(digest_parts(str(p.relative_to(root)).encode(), read_bytes(p)).encode())
    if stored is not None:
        with contextlib.suppress(OSError, RegaugeError):  # a cache that cannot be written
            stored.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(stored, digest.hexdigest().encode())
    return digest.hexdigest()


def list_images(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.suffix.lower() in IMAGE_SUFFIXES)


def _read_digits(split: str) -> tuple[dict[str, Any], str]:
    """Load scikit-learn's digits. They are ordered by writer: the last fifth, by other writers, is
    the test split.
    """
    if split not in ("train", "test"):
        raise DataError(f'digits has no split "{split}"', hint="use train or test")
    need("sklearn", "experiments")
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images, labels = (
        np.round(bunch.images * (255 / 16)).astype(np.uint8),
        bunch.target.astype(np.int64),
    )
    rows = slice(0, 1440) if split == "train" else slice(1440, None)
    images, labels = images[rows], labels[rows]
    return {"image": images, "label": labels}, digest_parts(images.tobytes(), labels.tobytes())


def _read_hub(
    uri: str, config: str | None, split: str, size: Size | None
) -> tuple[dict[str, Any], str]:
    """Read a dataset of the hub, which stores every public dataset as parquet in a branch:
    `config/split/0000.parquet` and so on.
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
                f"the dataset {uri} has several configs: {', '.join(configs)}",
                hint="pass a config to open_data",
            )
        shards = [f for f in files if f.startswith(f"{config or ''.join(configs)}/{split}/")]
        if not shards:
            known = ", ".join(sorted({"/".join(f.split("/")[:2]) for f in files})) or "none"
            raise DataError(
                f'the dataset {uri} has no split "{split}"' + (f" of {config}" if config else ""),
                hint=f"config/split: {known}",
            )
        paths = [
            Path(hub.hf_hub_download(uri, f, repo_type="dataset", revision=branch)) for f in shards
        ]
    except RegaugeError:
        raise
    # The hub's library has an error type for each of: no network, no such dataset, no access.
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise DataError(
            f"{uri} does not exist on disk, and loading it from the hub failed: {reason}",
            hint="give a path, or connect to the hub; gated data need HF_TOKEN",
        ) from error
    raws = [read_bytes(p) for p in paths]
    parts = [read_file(raw, p, size) for p, raw in zip(paths, raws, strict=True)]
    return {name: concatenate([part[name] for part in parts]) for name in parts[0]}, digest_parts(
        *raws
    )


def convert_column(values: list[Any], size: Size | None) -> Any:
    """Convert a column to an array of numbers, encoded images, or a list of texts."""
    # The hub stores images as {"bytes": ..., "path": ...}.
    if values and all(isinstance(v, Mapping) and isinstance(v.get("bytes"), bytes) for v in values):
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
    """Convert a column of texts to numbers if all of them are; otherwise return it unchanged."""
    for kind in (int, float):
        try:
            return np.array([kind(text) for text in texts])
        except (ValueError, OverflowError):
            continue
    return texts


def concatenate(parts: list[Any]) -> Any:
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


def read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def digest_parts(*parts: bytes) -> str:
    """Return the SHA-256 of byte strings, each preceded by its length."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.hexdigest()
