"""Tasks: from data to batches, and from logits to numbers. Everything here is a function of a
task's parameters and its data.

A task's parameters are plain JSON: {"kind": "images", ...}. `prepare` makes examples of them; a
batch is what a model's forward is given, and the labels of its logits.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from regauge.checkpoints.documents import load_json
from regauge.data.datasets import Data, DataError, EncodedImages, text_of
from regauge.data.tokenizers import decode as decode
from regauge.data.tokenizers import encode as encode
from regauge.data.tokenizers import special_tokens, surrounding_tokens

Tensor = torch.Tensor
Parameters = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Examples:
    """Examples by number: `batch(rows)` is (arguments of forward by name, labels). `classes` is how
    many a label can be. Logits have one row for each example, or are `dense` (classes come second),
    `causal` (a token predicts the next), or of `tokens` (each its own). With `multi` a label is
    several answers, yes or no each (`classes` of them), and accuracy is their mean.
    """

    count: int
    classes: int
    batch: Callable[[Any], tuple[dict[str, Tensor], Tensor]]
    dense: bool = False
    causal: bool = False
    tokens: bool = False
    multi_label: bool = False

    def __len__(self) -> int:
        return self.count

    def only(self, rows: Any) -> Examples:
        """These examples, in this order."""
        chosen = np.asarray(rows)
        return replace(self, count=len(chosen), batch=lambda i: self.batch(chosen[i]))


def prepare(task: Parameters, data: Data, tokenizer: Path | str | None = None) -> Examples:
    """Examples of a task. Texts need a tokenizer: a tokenizer.json, or what transformers'
    AutoTokenizer knows.
    """
    match task["kind"]:
        case "images":
            return _image_examples(task, data)
        case "scenes":
            return _scene_examples(task, data)
        case "maps":
            return _map_examples(task, data)
        case "reviews":
            return _review_examples(task, data, tokenizer)
        case "text":
            return _text_examples(task, data, tokenizer)
        case "masked":
            return _masked_examples(task, data, tokenizer)
    raise DataError(
        f'there is no task "{task["kind"]}"', hint="images, scenes, maps, reviews, text or masked"
    )


def conform_images(task: Parameters, data: Data) -> Data:
    """The data with images of one colour, where the task has a mean for each of three, and of one
    size, where the task has one and they differ: they are still decoded when they are looked at.
    """
    held = data["image"]
    if not isinstance(held, EncodedImages):
        return data
    if held.colour is None and len(task["mean"]) == 3:
        held = replace(held, colour="RGB")
    if held.size is None and task.get("size") is not None and len(held.sizes) > 1:
        held = replace(held, size=height_and_width(task["size"]))
    return replace(data, fields={**data.fields, "image": held})


def match_channels(module: torch.nn.Module, data: Data) -> Data:
    """The data with images of as many channels as the model reads, if it says so: grey ones as RGB,
    and RGB as grey.
    """
    held, channels = data.fields.get("image"), channels_of(module)
    if held is None or channels not in (1, 3):
        return data
    if isinstance(held, EncodedImages):
        held = replace(held, colour="L" if channels == 1 else "RGB")
    elif isinstance(held, np.ndarray) and held.ndim == 3 and channels == 3:
        held = np.broadcast_to(
            held[..., None], (*held.shape, 3)
        )  # a view: nothing is copied before it is looked at
    elif isinstance(held, np.ndarray) and held.ndim == 4 and held.shape[-1] == 3 and channels == 1:
        held = np.round(held @ np.array([0.299, 0.587, 0.114], np.float32)).astype(
            np.uint8
        )  # ITU-R 601, as PIL has it
    return replace(data, fields={**data.fields, "image": held})


def _image_examples(task: Parameters, data: Data) -> Examples:
    """Images and one label each. `mean` and `std` per channel, of values in 0..1; `size` (one
    number, or height and width) makes every image that large. Labels that are words are numbered by
    their place in `names`. `attributes` are fields that say yes or no (1, or 0 or -1): each image
    then has all of them for a label, as it has where the labels are rows of such numbers.
    """
    pictures = conform_images(task, data)["image"]
    found = (
        _load_labels(task, data) if task.get("labelled", True) else np.zeros(len(data), np.int64)
    )
    multi = found.ndim == 2
    labels = torch.from_numpy(found > 0).float() if multi else torch.from_numpy(found)
    chosen = _select_part(task, len(data))

    def batch(rows: Any) -> tuple[dict[str, Tensor], Tensor]:
        rows = chosen[rows]
        pixels = pictures.to_array(rows) if isinstance(pictures, EncodedImages) else pictures[rows]
        return {"pixel_values": _normalize(pixels, task)}, labels[rows]

    return Examples(len(chosen), int(task["classes"]), batch, multi_label=multi)


def _load_labels(task: Parameters, data: Data) -> Any:
    if task.get("attributes"):
        return np.stack([np.asarray(data[name]).astype(np.int64) for name in task["attributes"]], 1)
    given = np.asarray(data["label"])
    if given.dtype.kind in "US":
        number = {name: i for i, name in enumerate(task.get("names", ()))}
        unknown = sorted(set(given.tolist()) - number.keys())
        if unknown:
            known = ", ".join(number) or "none"
            raise DataError(
                f'{data.name} has the label "{unknown[0]}", which the model does not know',
                hint=f"its classes by name: {known}",
            )
        return np.array([number[name] for name in given.tolist()], np.int64)
    return given.astype(np.int64)


def _select_part(task: Parameters, n: int) -> Any:
    """The rows of a task's `part` = [from, to], as shares of the rows in an order drawn once and
    for all; without one, all rows.
    """
    if "part" not in task:
        return np.arange(n)
    begin, end = (round(share * n) for share in task["part"])
    return np.sort(np.random.default_rng(0).permutation(n)[begin:end])


def _normalize(pixels: Any, task: Parameters) -> Tensor:
    x = torch.from_numpy(np.ascontiguousarray(pixels)).float() / 255
    x = x[:, None] if x.dim() == 3 else x.permute(0, 3, 1, 2)
    if x.shape[1] == 1 and len(task["mean"]) == 3:
        x = x.expand(-1, 3, -1, -1)
    mean, std = (torch.tensor(task[name]).view(1, -1, 1, 1) for name in ("mean", "std"))
    x = (x - mean) / std
    size = x.shape[-2:] if task.get("size") is None else height_and_width(task["size"])
    return (
        x if size == x.shape[-2:] else F.interpolate(x, size, mode="bilinear", align_corners=False)
    )


def _scene_examples(task: Parameters, data: Data) -> Examples:
    """Pixel labels from labelled images: each scene is a board of tiles, some of which hold one
    image, `piece` pixels wide and at a place of its own. A pixel's class is that of the image it
    belongs to (+1), where that is brighter than a quarter; all else is background, 0.
    """
    tiles, side, piece, count = task["tiles"], task["side"], task["piece"], task["count"]
    pictures = torch.from_numpy(np.asarray(data["image"])).float()[:, None] / 255
    small = F.interpolate(pictures, (piece, piece), mode="area")[:, 0].numpy()
    draw = np.random.default_rng(task["seed"])
    span, height = side // tiles, piece
    scenes, maps = (
        np.zeros((count, side, side), np.float32),
        np.zeros((count, side, side), np.int64),
    )
    for scene, truth in zip(scenes, maps, strict=True):
        for row in range(tiles):
            for column in range(tiles):
                if draw.random() < task["empty"]:
                    continue
                i, top, left = (
                    draw.integers(len(small)),
                    row * span + draw.integers(span - height + 1),
                    column * span + draw.integers(span - height + 1),
                )
                here = np.s_[top : top + height, left : left + height]
                scene[here], truth[here] = (
                    small[i],
                    np.where(small[i] > 0.25, int(data["label"][i]) + 1, 0),
                )
    pixels, labels = (
        (torch.from_numpy(scenes)[:, None] - task["mean"][0]) / task["std"][0],
        torch.from_numpy(maps),
    )
    return Examples(
        count,
        int(task["classes"]),
        lambda rows: ({"pixel_values": pixels[rows]}, labels[rows]),
        dense=True,
    )


def _map_examples(task: Parameters, data: Data) -> Examples:
    """Images and label maps of the same size (ADE20k): fields "image" and "map"; the map's 0 is no
    class and counts nowhere.
    """
    pictures, maps = conform_images(task, data)["image"], data["map"]

    def batch(rows: Any) -> tuple[dict[str, Tensor], Tensor]:
        labels = torch.from_numpy(maps.to_array(rows).astype(np.int64)) - 1
        return {"pixel_values": _normalize(pictures.to_array(rows), task)}, torch.where(
            labels < 0, -100, labels
        )

    return Examples(len(data), int(task["classes"]), batch, dense=True)


def _review_examples(task: Parameters, data: Data, tokenizer: Path | str | None) -> Examples:
    """Texts and one label each, padded to the longest of the batch. `first` is a token put in front
    (BERT reads its place), `pad` fills up. Two texts (`premise` and `hypothesis`) follow each other
    with `pad` between; with `special` the tokenizer puts its own marks, and what is cut to `length`
    keeps that of the end (BART reads its answer there). Rows whose label is negative are left out,
    as SNLI's own page asks. Where the task is not `labelled`, labels are not read.
    """
    given = data["label"] if task.get("labelled", True) else [0] * len(data)
    keep = [i for i in _select_part(task, len(data)) if int(given[i]) >= 0]
    texts = [data["text"]] if "text" in data.fields else [data["premise"], data["hypothesis"]]
    parts = [
        encode(tokenizer, [field[i] for i in keep], add_special_tokens=bool(task.get("special")))
        for field in texts
    ]
    first = [] if task.get("first") is None else [task["first"]]
    pad, length = task["pad"], task["length"]
    ids = [first + _join_with(pad, row) for row in zip(*parts, strict=True)]
    long = next((i for i, row in enumerate(ids) if len(row) > length), None)
    end = (
        surrounding_tokens(tokenizer, texts[-1][keep[long]])[1]
        if task.get("special") and long is not None
        else []
    )
    ids = [row if len(row) <= length else row[: max(length - len(end), 0)] + end for row in ids]
    labels = torch.tensor([int(given[i]) for i in keep])

    def batch(rows: Any) -> tuple[dict[str, Tensor], Tensor]:
        chosen = [ids[i] or [pad] for i in rows]
        longest = max(map(len, chosen))
        tokens = torch.tensor([row + [pad] * (longest - len(row)) for row in chosen])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in chosen])
        return {"input_ids": tokens, "attention_mask": mask}, labels[rows]

    return Examples(len(ids), int(task["classes"]), batch)


def _join_with(between: int, rows: tuple[list[int], ...]) -> list[int]:
    out = list(rows[0])
    for row in rows[1:]:
        out += [between, *row]
    return out


def _text_examples(task: Parameters, data: Data, tokenizer: Path | str | None) -> Examples:
    """One running text in windows of `length` tokens, one every `stride` (by default side by side);
    `part` = [from, to] as shares of its characters. All but a window's first are predicted.
    """
    windows = _tokenize_windows(task, data, tokenizer, task["length"])
    return Examples(
        len(windows),
        int(task["classes"]),
        lambda rows: ({"input_ids": windows[rows]}, windows[rows]),
        causal=True,
    )


def _masked_examples(task: Parameters, data: Data, tokenizer: Path | str | None) -> Examples:
    """One running text in windows, each between the tokenizer's own marks; of every window a
    `share` of tokens (0.15), drawn once and for all, is replaced by the mask, and these are
    predicted.
    """
    before, after, mask = special_tokens(tokenizer)
    inner = _tokenize_windows(task, data, tokenizer, task["length"] - len(before) - len(after))
    draw = torch.Generator().manual_seed(int(task.get("seed", 0)))
    hidden = torch.rand(inner.shape, generator=draw) < task.get("share", 0.15)
    hidden[~hidden.any(1), 0] = True  # at least one of each
    ends = [
        torch.tensor(marks, dtype=torch.long).expand(len(inner), -1) for marks in (before, after)
    ]
    ids = torch.cat([ends[0], inner.masked_fill(hidden, mask), ends[1]], 1)
    labels = torch.cat(
        [
            torch.full_like(ends[0], -100),
            inner.masked_fill(~hidden, -100),
            torch.full_like(ends[1], -100),
        ],
        1,
    )
    return Examples(
        len(ids),
        int(task["classes"]),
        lambda rows: ({"input_ids": ids[rows]}, labels[rows]),
        tokens=True,
    )


def _tokenize_windows(
    task: Parameters, data: Data, tokenizer: Path | str | None, length: int
) -> Tensor:
    """The tokens of a running text, [windows, length]."""
    whole = text_of(data)
    begin, end = (round(share * len(whole)) for share in task.get("part", (0, 1)))
    ids = encode(tokenizer, [whole[begin:end]])[0][: task.get("tokens")]
    if len(ids) < length:
        raise DataError(
            f"{data.name} has {len(ids)} tokens, fewer than one window of {length}",
            hint="give more text, or a smaller length",
        )
    if max(ids) >= task["classes"]:
        raise DataError(
            f"the tokenizer gives the token {max(ids)}, and the model knows {task['classes']}",
            hint="is it this model's tokenizer?",
        )
    return torch.tensor(ids).unfold(0, length, task.get("stride", length))


def logits_of(model: torch.nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    """The logits, [examples, classes, ...]. Images go by place: timm calls them x."""
    return logits_and_extra_loss(model, inputs)[0]


def logits_and_extra_loss(
    model: torch.nn.Module, inputs: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor | None]:
    """The logits, and what a model that is wrapped for its training adds to the loss, if it adds
    anything.
    """
    out = model(inputs["pixel_values"]) if "pixel_values" in inputs else model(**inputs)
    return (out, None) if isinstance(out, Tensor) else (out.logits, getattr(out, "extra", None))


def loss_of(examples: Examples, logits: Tensor, labels: Tensor) -> Tensor:
    """The mean cross entropy: of examples, of pixels, of next tokens, or of answers."""
    if examples.causal:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    if examples.tokens:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    if examples.multi_label:
        return F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))
    return F.cross_entropy(logits, labels, ignore_index=-100)


def compute_metrics(examples: Examples, confusion: Tensor, nats: float) -> dict[str, float]:
    """What a table reports, from the confusion matrix [truth, guess] of all examples or pixels, or
    from the mean nats of a next token.
    """
    if examples.causal:
        return {"perplexity": float(np.exp(min(nats, 700.0))), "nats": nats}
    table = confusion.double()
    right, truth, guess = table.diag(), table.sum(1), table.sum(0)
    accuracy = float(right.sum() / table.sum())
    if not examples.dense:
        return {"accuracy": accuracy}
    there = truth > 0
    return {
        "aAcc": accuracy,
        "mIoU": float((right / (truth + guess - right).clamp(min=1))[there].mean()),
        "mAcc": float((right / truth.clamp(min=1))[there].mean()),
    }


def chance_metrics(examples: Examples, confusion: Tensor) -> dict[str, float]:
    """What a guess without looking gets: the commonest class for pixels, any class for examples,
    every token alike for texts.
    """
    if examples.causal:
        return {"perplexity": float(examples.classes)}
    if not examples.dense:
        return {"accuracy": 1 / examples.classes}
    truth = confusion.double().sum(1)
    common, there = float(truth.max() / truth.sum()), int((truth > 0).sum())
    return {"aAcc": common, "mIoU": common / there, "mAcc": 1 / there}


def task_of(
    module: torch.nn.Module,
    data: Data,
    *,
    beside: Path | None = None,
    tokenizer: Path | str | None = None,
    length: int | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    labelled: bool = True,
    attributes: Sequence[str] = (),
) -> tuple[dict[str, Any], Path | str | None]:
    """What a model does with data, read off its class and config: the task's parameters, and the
    tokenizer for texts.

    A language model reads texts; a classifier of texts needs texts and labels, one of images needs
    images and labels. Where no loss is wanted, nothing need be `labelled`, and any model will do.
    `beside` is the folder that the model came from: its tokenizer and its preprocessor_config.json
    are used where nothing else is given. `length` is in tokens. `attributes` are fields with
    several answers to each image.
    """
    config, name = getattr(module, "config", None), type(module).__name__
    if reads_images(module):
        classes = getattr(module, "num_classes", None) if config is None else config.num_labels
        if labelled and (
            not classes or (config is not None and not name.endswith("ForImageClassification"))
        ):
            raise DataError(
                f"{name} gives no classes of images, so that there is no loss to measure",
                hint="give a model ...ForImageClassification",
            )
        _require_fields(data, name, "image", *(attributes or ["label"] if labelled else []))
        mean, std = _load_normalization(beside, mean, std, module)
        size = size_of(module) or _preprocessor_size(beside, data)
        side = size if size is None else size[0] if size[0] == size[1] else list(size)
        task = {
            "kind": "images",
            "classes": int(classes or 0),
            "mean": list(mean),
            "std": list(std),
            "size": side,
        }
        if labelled and attributes:
            if len(attributes) != classes:
                raise DataError(
                    f"{len(attributes)} attributes are named, and the model answers {classes}",
                    hint="is it this model's data?",
                )
            return task | {"attributes": list(attributes)}, None
        if labelled and np.asarray(data["label"]).dtype.kind in "US":
            named = getattr(config, "id2label", None) or {}
            return task | {"names": [str(named[i]) for i in sorted(named)]}, None
        if labelled:
            _require_labels(data, int(classes or 0))
            _require_all_labels(data)
        return task | ({} if labelled else {"labelled": False}), None
    if tokenizer is None:
        found = (
            [] if beside is None else [beside / "tokenizer.json", beside / "tokenizer_config.json"]
        )
        tokenizer = next(
            (p if p.name == "tokenizer.json" else p.parent for p in found if p.exists()), None
        )
    if tokenizer is None:
        raise DataError(
            f"{name} reads tokens, and there is no tokenizer beside it",
            hint="--tokenizer FILE (a tokenizer.json), a folder or a hub id",
        )
    assert config is not None
    length = min(length or 256, _max_tokens(config))
    if name.endswith(("ForCausalLM", "LMHeadModel")):
        _require_fields(data, name, "text")
        return {"kind": "text", "classes": int(config.vocab_size), "length": length}, tokenizer
    if name.endswith("ForMaskedLM") and labelled:
        _require_fields(data, name, "text")
        return {"kind": "masked", "classes": int(config.vocab_size), "length": length}, tokenizer
    if name.endswith("ForSequenceClassification") or not labelled:
        _require_fields(data, name, "text", *(["label"] if labelled else []))
        if labelled:
            _require_labels(data, int(config.num_labels))
        pad = config.pad_token_id if config.pad_token_id is not None else 0
        reads = {
            "kind": "reviews",
            "classes": int(config.num_labels),
            "length": length,
            "pad": int(pad),
            "special": True,
        }
        return reads | ({} if labelled else {"labelled": False}), tokenizer
    raise DataError(
        f"there is no loss for a {name} here",
        hint="known are language models, and classifiers of texts and of images",
    )


# Kinds of models that count places from behind the padding token's: that many rows of their tables
# are no places.
_OFFSET_POSITIONS = frozenset(
    (
        "camembert",
        "data2vec-text",
        "ibert",
        "longformer",
        "luke",
        "mpnet",
        "roberta",
        "roberta-prelayernorm",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xmod",
    )
)


def _max_tokens(config: Any) -> int:
    """How many tokens a model has places for."""
    rows = int(getattr(config, "max_position_embeddings", None) or 512)
    return (
        rows - (config.pad_token_id or 0) - 1
        if getattr(config, "model_type", None) in _OFFSET_POSITIONS
        else rows
    )


def read_examples(
    module: torch.nn.Module, data: Data, **how: Any
) -> tuple[Examples, dict[str, Any]]:
    """Data as a model reads them, and its task: `task_of`, which says what may be given, and
    `prepare`.
    """
    if reads_images(module):
        data = match_channels(module, data)
    task, reader = task_of(module, data, **how)
    return prepare(task, data, reader), task


def sample_batches(
    examples: Examples, count: int, seed: int, batch: int = 16
) -> list[tuple[dict[str, Tensor], Tensor]]:
    """Some of the examples, drawn by a seed, in batches of inputs and labels."""
    rows = np.sort(np.random.default_rng(seed).permutation(len(examples))[:count])
    return [examples.batch(rows[i : i + batch]) for i in range(0, len(rows), batch)]


def _require_fields(data: Data, name: str, *fields: str) -> None:
    missing = [f for f in fields if f not in data.fields]
    if missing:
        raise DataError(
            f"a {name} needs the field{'s' * (len(missing) > 1)} "
            f"{' and '.join(repr(f) for f in missing)}, which {data.name} has not",
            hint=f"it has {', '.join(map(repr, data.fields))}; name yours with --field "
            f"{missing[0]}=NAME",
        )


def _require_labels(data: Data, classes: int) -> None:
    try:
        labels = np.asarray(data["label"]).astype(np.int64)
    except ValueError as error:
        raise DataError(
            f'the field "label" of {data.name} holds no numbers',
            hint="labels are 0, 1, ... in the order of the model's classes",
        ) from error
    if labels.ndim == 2 and labels.shape[1] != classes:
        raise DataError(
            f"{data.name} has {labels.shape[1]} answers to each example, and the model {classes}",
            hint="is it this model's data?",
        )
    if labels.size and ((labels.ndim == 1 and labels.max() >= classes) or labels.min() < -1):
        raise DataError(
            f"{data.name} has the labels {labels.min()} to {labels.max()}, and the model "
            f"{classes} classes",
            hint="is it this model's data?",
        )


def _require_all_labels(data: Data) -> None:
    """No -1, by which data sets mark what has no label. Of texts such rows are left out
    (`_reviews`); in rows of answers it says no.
    """
    labels = np.asarray(data["label"]).astype(np.int64)
    without = np.flatnonzero(labels == -1) if labels.ndim == 1 else labels[:0]
    if len(without):
        raise DataError(
            f"{len(without)} of {len(labels)} rows of {data.name} have the label -1, row "
            f"{without[0]} the first, and there is no such class",
            hint="leave these rows out",
        )


def _load_normalization(
    beside: Path | None, mean: Any, std: Any, module: torch.nn.Module
) -> list[list[float]]:
    """Mean and std as given; what is not, from the file beside the model, or from timm's
    pretrained_cfg.
    """
    timm = getattr(module, "pretrained_cfg", None)
    found, where = dict(timm) if timm else {}, "the {} in the model's pretrained_cfg"
    path = None if beside is None else beside / "preprocessor_config.json"
    if path is not None and path.exists() and not (mean and std):
        try:
            about = load_json(path.read_text())
            found = (
                {"mean": about["image_mean"], "std": about["image_std"]}
                if about.get("do_normalize", True)
                else {"mean": [0.0], "std": [1.0]}
            )
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path} does not say how images are normalised: {error!r}",
                hint="--mean and --std say it",
            ) from error
        where = f"the image_{{}} of {path}"
    names = ["--mean" if mean else where.format("mean"), "--std" if std else where.format("std")]
    mean, std = (given or found.get(name) for given, name in ((mean, "mean"), (std, "std")))
    if mean is None or std is None:
        raise DataError(
            "nothing says how the model's images are normalised",
            hint="--mean 0.5 --std 0.5, say; or put preprocessor_config.json beside it",
        )
    mean, std = ([x] if isinstance(x, int | float) else list(x) for x in (mean, std))
    channels = channels_of(module)
    for name, numbers in zip(names, (mean, std), strict=True):
        if channels is not None and len(numbers) not in (1, channels):
            raise DataError(
                f"{name} has {len(numbers)} numbers, and the model reads {channels} "
                f"channel{'s' * (channels > 1)}",
                hint="--mean and --std take one number, or one for each channel",
            )
        if not np.isfinite(numbers).all():
            raise DataError(
                f"{name} is {', '.join(map(str, numbers))}, which is not finite",
                hint="pixels are 0 to 1: --mean 0.5 --std 0.5, say",
            )
    if min(std) <= 0:
        raise DataError(
            f"{names[1]} is {', '.join(map(str, std))}, and pixels are divided by it",
            hint="give numbers above 0: --std 0.5, say",
        )
    longest = max(len(mean), len(std))
    return [x * longest if len(x) == 1 and longest > 1 else x for x in (mean, std)]


def size_of(module: torch.nn.Module) -> tuple[int, int] | None:
    """Height and width of the images that a model reads, if it says so. timm's pretrained_cfg tells
    of the weights that it once loaded: what the model itself was made for goes before.
    """
    said = getattr(getattr(module, "config", None), "image_size", None) or getattr(
        getattr(module, "patch_embed", None), "img_size", None
    )
    size = said or (getattr(module, "pretrained_cfg", None) or {}).get("input_size")
    return height_and_width(size) if size else None


def height_and_width(size: int | Sequence[int]) -> tuple[int, int]:
    """Height and width, of one number for both or of a list that ends in them."""
    height, width = size[-2:] if isinstance(size, Sequence) else (size, size)
    return int(height), int(width)


def _preprocessor_size(beside: Path | None, data: Data) -> tuple[int, int] | None:
    """What preprocessor_config.json makes of images of different sizes, for a model that takes any;
    None where they have one.
    """
    held = data["image"]
    if not isinstance(held, EncodedImages) or held.size is not None or len(held.sizes) < 2:
        return None
    path = None if beside is None else beside / "preprocessor_config.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        about = load_json(path.read_text()) if path is not None else {}
        size: Any = about.get("crop_size") or about.get("size")
        return (
            height_and_width(
                (size["height"], size["width"]) if "height" in size else size["shortest_edge"]
            )
            if isinstance(size, dict)
            else height_and_width(size)
        )
    told = " and ".join(f"{h} x {w}" for h, w in (min(held.sizes), max(held.sizes)))
    raise DataError(
        f"the images of {data.name} have different sizes ({told}), and the model does not say "
        "which it reads",
        hint='make them one size, or put preprocessor_config.json with "size" beside the model',
    )


def reads_images(module: torch.nn.Module) -> bool:
    """Whether a model reads images: timm's, which have no config, all do."""
    return (
        getattr(module, "config", None) is None
        or "pixel_values" in inspect.signature(module.forward).parameters
    )


def channels_of(module: torch.nn.Module) -> int | None:
    """How many channels the images have that a model reads, if it says so: its config, or the first
    convolution, unless that reads more than images have (TResNet's reads whole blocks of pixels).
    """
    said = getattr(getattr(module, "config", None), "num_channels", None)
    if said:
        return int(said)
    first = next((m.in_channels for m in module.modules() if isinstance(m, torch.nn.Conv2d)), None)
    return first if first is None or first <= 4 else None
