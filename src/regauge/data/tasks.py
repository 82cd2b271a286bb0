"""Tasks: from data to batches, and from logits to losses and metrics. Everything is a function of a
task's parameters and its data.

A task's parameters are plain JSON: {"kind": "images", ...}. `prepare` turns them and the data into
examples; a batch is the arguments of a model's forward, and the labels of its logits.
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
from regauge.data.class_names import labels_of, number_folders, renumber
from regauge.data.datasets import Data, EncodedImages, text_of
from regauge.data.tokenizers import decode as decode
from regauge.data.tokenizers import encode as encode
from regauge.data.tokenizers import special_tokens, surrounding_tokens
from regauge.errors import DataError, Hint

Tensor = torch.Tensor
Parameters = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Examples:
    """Examples by index. By default, logits have one row per example.

    Args:
        count: The number of examples.
        classes: The number of classes.
        batch: Maps indices to (arguments of forward by name, labels).
        dense: Whether logits are per pixel, with classes as the second axis.
        causal: Whether each token predicts the next.
        tokens: Whether each token has a label.
        multi_label: Whether an example has `classes` binary labels. Accuracy is their mean.
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

    @property
    def classifies(self) -> bool:
        """Whether labels are of whole examples."""
        return not (self.causal or self.tokens or self.dense)

    def only(self, rows: Any) -> Examples:
        """Return the examples at these indices, in this order."""
        selected = np.asarray(rows)
        return replace(self, count=len(selected), batch=lambda i: self.batch(selected[i]))


def prepare(task: Parameters, data: Data, tokenizer: Path | str | None = None) -> Examples:
    """Prepare the examples of a task.

    Args:
        task: Its parameters. `kind` is images, scenes, maps, reviews, text or masked.
        data: The dataset.
        tokenizer: For texts: a tokenizer.json, a folder or a hub id.
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
        "the kind of a task must be one of images, scenes, maps, reviews, text, masked, got "
        f'"{task["kind"]}"'
    )


def conform_images(task: Parameters, data: Data) -> Data:
    """Convert encoded images to the task's colours and size.

    They become RGB if the task has three means, and of the task's size if their sizes differ. They
    are still decoded on access.
    """
    images = data["image"]
    if not isinstance(images, EncodedImages):
        return data
    if images.colour is None and len(task["mean"]) == 3:
        images = replace(images, colour="RGB")
    if images.size is None and task.get("size") is not None and len(images.sizes) > 1:
        images = replace(images, size=height_and_width(task["size"]))
    return replace(data, fields={**data.fields, "image": images})


def match_channels(module: torch.nn.Module, data: Data) -> Data:
    """Convert images to the number of channels that the model reads, if known: grey to RGB, or RGB
    to grey.
    """
    images, channels = data.fields.get("image"), channels_of(module)
    if images is None or channels not in (1, 3):
        return data
    if isinstance(images, EncodedImages):
        images = replace(images, colour="L" if channels == 1 else "RGB")
    elif isinstance(images, np.ndarray):
        if images.ndim == 3 and channels == 3:
            images = np.broadcast_to(images[..., None], (*images.shape, 3))  # a view, not a copy
        elif images.ndim == 4 and images.shape[-1] == 3 and channels == 1:
            luma = np.array([0.299, 0.587, 0.114], np.float32)  # ITU-R 601, as in PIL
            images = np.round(images @ luma).astype(np.uint8)
    return replace(data, fields={**data.fields, "image": images})


def _image_examples(task: Parameters, data: Data) -> Examples:
    """Prepare image classification.

    `mean` and `std` are per channel, of values in [0, 1]. `size` (one number, or height and width)
    resizes every image. Labels that are words are numbered by their place in `names`; `folders` has
    the numbers of class folders, which otherwise must be all classes in their order. `attributes`
    are fields of binary labels (1; 0 or -1): each image then has all of them as its label, as it
    has if the labels are rows of such numbers.
    """
    images = conform_images(task, data)["image"]
    is_labelled = task.get("labelled", True)
    numbers = _load_labels(task, data) if is_labelled else np.zeros(len(data), np.int64)
    multi_label = numbers.ndim == 2
    labels = torch.from_numpy(numbers > 0).float() if multi_label else torch.from_numpy(numbers)
    selected = _select_part(task, len(data))

    def batch(rows: Any) -> tuple[dict[str, Tensor], Tensor]:
        rows = selected[rows]
        pixels = images.to_array(rows) if isinstance(images, EncodedImages) else images[rows]
        return {"pixel_values": _normalize(pixels, task)}, labels[rows]

    return Examples(len(selected), int(task["classes"]), batch, multi_label=multi_label)


def _load_labels(task: Parameters, data: Data) -> Any:
    if task.get("attributes"):
        return np.stack([np.asarray(data[name]).astype(np.int64) for name in task["attributes"]], 1)
    labels = np.asarray(data["label"])
    if data.folders and labels.dtype.kind not in "US":
        return renumber(labels, data.folders, int(task["classes"]), task.get("folders"))
    if labels.dtype.kind in "US":
        number = {name: i for i, name in enumerate(task.get("names", ()))}
        unknown = sorted(set(labels.tolist()) - number.keys())
        if unknown:
            known = ", ".join(number) or "none"
            raise DataError(
                f'{data.name} has the label "{unknown[0]}", which is not a class of the model',
                hint=f"its classes by name: {known}",
            )
        return np.array([number[name] for name in labels.tolist()], np.int64)
    return labels.astype(np.int64)


def _select_part(task: Parameters, n: int) -> Any:
    """Return the rows of a task's `part` = [from, to], as fractions of the rows in a fixed random
    order; without a part, all rows.
    """
    if "part" not in task:
        return np.arange(n)
    begin, end = (round(fraction * n) for fraction in task["part"])
    return np.sort(np.random.default_rng(0).permutation(n)[begin:end])


def _normalize(pixels: Any, task: Parameters) -> Tensor:
    """Convert bytes to normalized pixel values [n, channels, height, width] of the task's size."""
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
    """Prepare segmentation of scenes that are composed of labelled images.

    A scene is a grid of tiles, some of which contain one image, `piece` pixels wide and at a random
    place. A pixel's class is that of its image (+1) if the pixel is brighter than a quarter; all
    others are background, 0.
    """
    tiles, side, piece, count = task["tiles"], task["side"], task["piece"], task["count"]
    images = torch.from_numpy(np.asarray(data["image"])).float()[:, None] / 255
    small = F.interpolate(images, (piece, piece), mode="area")[:, 0].numpy()
    rng = np.random.default_rng(task["seed"])
    span = side // tiles
    scenes, maps = (
        np.zeros((count, side, side), np.float32),
        np.zeros((count, side, side), np.int64),
    )
    for scene, truth in zip(scenes, maps, strict=True):
        for row in range(tiles):
            for column in range(tiles):
                if rng.random() < task["empty"]:
                    continue
                i = rng.integers(len(small))
                top = row * span + rng.integers(span - piece + 1)
                left = column * span + rng.integers(span - piece + 1)
                window = np.s_[top : top + piece, left : left + piece]
                scene[window] = small[i]
                truth[window] = np.where(small[i] > 0.25, int(data["label"][i]) + 1, 0)
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
    """Prepare segmentation of images with label maps of the same size (ADE20k), in the fields
    "image" and "map". A 0 in the map means no class and is ignored.
    """
    images, maps = conform_images(task, data)["image"], data["map"]

    def batch(rows: Any) -> tuple[dict[str, Tensor], Tensor]:
        labels = torch.from_numpy(maps.to_array(rows).astype(np.int64)) - 1
        pixels = _normalize(images.to_array(rows), task)
        return {"pixel_values": pixels}, torch.where(labels < 0, -100, labels)

    return Examples(len(data), int(task["classes"]), batch, dense=True)


def _review_examples(task: Parameters, data: Data, tokenizer: Path | str | None) -> Examples:
    """Prepare text classification, padded to the longest text of a batch.

    `first` is a token before the text (BERT classifies at its position), `pad` the padding. Two
    texts (`premise` and `hypothesis`) are joined with `pad` between. With `special` the tokenizer
    adds its special tokens, and texts truncated to `length` keep those at the end (BART classifies
    there). Rows with a negative label are skipped, as the page of SNLI requests. If the task is not
    `labelled`, labels are not read.
    """
    numbers = data["label"] if task.get("labelled", True) else [0] * len(data)
    labelled_rows = [i for i in _select_part(task, len(data)) if int(numbers[i]) >= 0]
    texts = [data["text"]] if "text" in data.fields else [data["premise"], data["hypothesis"]]
    parts = [
        encode(
            tokenizer,
            [field[i] for i in labelled_rows],
            add_special_tokens=bool(task.get("special")),
        )
        for field in texts
    ]
    first = [] if task.get("first") is None else [task["first"]]
    pad, length = task["pad"], task["length"]
    ids = [first + _join_with(pad, row) for row in zip(*parts, strict=True)]
    too_long = next((i for i, row in enumerate(ids) if len(row) > length), None)
    end = (
        surrounding_tokens(tokenizer, texts[-1][labelled_rows[too_long]])[1]
        if task.get("special") and too_long is not None
        else []
    )
    ids = [row if len(row) <= length else row[: max(length - len(end), 0)] + end for row in ids]
    labels = torch.tensor([int(numbers[i]) for i in labelled_rows])

    def batch(rows: Any) -> tuple[dict[str, Tensor], Tensor]:
        sequences = [ids[i] or [pad] for i in rows]
        longest = max(map(len, sequences))
        tokens = torch.tensor([row + [pad] * (longest - len(row)) for row in sequences])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in sequences])
        return {"input_ids": tokens, "attention_mask": mask}, labels[rows]

    return Examples(len(ids), int(task["classes"]), batch)


def _join_with(separator: int, texts: tuple[list[int], ...]) -> list[int]:
    """Concatenate texts with a token between them."""
    joined = list(texts[0])
    for text in texts[1:]:
        joined += [separator, *text]
    return joined


def _text_examples(task: Parameters, data: Data, tokenizer: Path | str | None) -> Examples:
    """Prepare language modelling of one text in windows of `length` tokens, one every `stride` (by
    default `length`). `part` = [from, to] selects a fraction of its characters. All tokens but the
    first of a window are predicted.
    """
    windows = _tokenize_windows(task, data, tokenizer, task["length"])
    return Examples(
        len(windows),
        int(task["classes"]),
        lambda rows: ({"input_ids": windows[rows]}, windows[rows]),
        causal=True,
    )


def _masked_examples(task: Parameters, data: Data, tokenizer: Path | str | None) -> Examples:
    """Prepare masked language modelling of one text in windows between the tokenizer's special
    tokens. A fixed random `share` (0.15) of the tokens of every window is replaced by the mask and
    predicted.
    """
    before, after, mask = special_tokens(tokenizer)
    inner = _tokenize_windows(task, data, tokenizer, task["length"] - len(before) - len(after))
    generator = torch.Generator().manual_seed(int(task.get("seed", 0)))
    hidden = torch.rand(inner.shape, generator=generator) < task.get("share", 0.15)
    hidden[~hidden.any(1), 0] = True  # at least one token of each window
    ends = [
        torch.tensor(tokens, dtype=torch.long).expand(len(inner), -1) for tokens in (before, after)
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
    """Tokenize a text into windows, [windows, length]."""
    text = text_of(data)
    begin, end = (round(fraction * len(text)) for fraction in task.get("part", (0, 1)))
    ids = encode(tokenizer, [text[begin:end]])[0][: task.get("tokens")]
    if len(ids) < length:
        raise DataError(
            f"{data.name} has {len(ids)} tokens, fewer than one window of {length}",
            hint="use more text, or a smaller length",
        )
    if max(ids) >= task["classes"]:
        raise DataError(
            f"token ids must be below the model's vocabulary size {task['classes']}, got "
            f"{max(ids)}",
            hint="check that the tokenizer belongs to the model",
        )
    return torch.tensor(ids).unfold(0, length, task.get("stride", length))


def logits_of(model: torch.nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    """Compute the logits, [examples, classes, ...]. Images are passed by position, because timm
    names the argument x.
    """
    return logits_and_extra_loss(model, inputs)[0]


def logits_and_extra_loss(
    model: torch.nn.Module, inputs: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor | None]:
    """Compute the logits, and the extra loss of a model that is wrapped for training, or None."""
    out = model(inputs["pixel_values"]) if "pixel_values" in inputs else model(**inputs)
    return (out, None) if isinstance(out, Tensor) else (out.logits, getattr(out, "extra", None))


def loss_of(examples: Examples, logits: Tensor, labels: Tensor) -> Tensor:
    """Compute the mean cross entropy of examples, pixels, tokens or binary labels."""
    return _cross_entropy(examples, logits, labels, "mean")


def losses_of(examples: Examples, logits: Tensor, labels: Tensor) -> Tensor:
    """Compute the cross entropy of every label, [examples, ...]; 0 for labels that are ignored."""
    losses = _cross_entropy(examples, logits, labels, "none")
    return losses.reshape(len(labels), -1)


def _cross_entropy(examples: Examples, logits: Tensor, labels: Tensor, reduction: str) -> Tensor:
    if examples.causal:
        logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return F.cross_entropy(logits, labels, reduction=reduction)
    if examples.tokens:
        logits, labels = logits.flatten(0, 1), labels.flatten()
    if examples.multi_label:
        labels = labels.to(logits.dtype)
        return F.binary_cross_entropy_with_logits(logits, labels, reduction=reduction)
    return F.cross_entropy(logits, labels, ignore_index=-100, reduction=reduction)


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
    folders: Sequence[str] = (),
) -> tuple[dict[str, Any], Path | str | None]:
    """Infer the task of a model on data from its class and config.

    A language model needs texts; a classifier of texts or images needs labels too.

    Args:
        module: The model.
        data: The dataset.
        beside: The folder of the model. Its tokenizer and preprocessor_config.json are the
            defaults of the next arguments. None: for images, the folder that it was loaded from.
        tokenizer: The tokenizer for texts.
        length: The largest number of tokens.
        mean: The mean of the images per channel.
        std: The standard deviation of the images per channel.
        labelled: Whether a loss is needed. Without, any model will do and labels are not read.
        attributes: Fields of binary labels.
        folders: The class folders, in order, of data that have all classes of the model, for data
            that have some of them.

    Returns:
        The task's parameters, and the tokenizer for texts.

    Raises:
        DataError: The data do not fit the model, or a tokenizer or normalization is missing.
    """
    config, name = getattr(module, "config", None), type(module).__name__
    if reads_images(module):
        classes = getattr(module, "num_classes", None) if config is None else config.num_labels
        if labelled and (
            not classes or (config is not None and not name.endswith("ForImageClassification"))
        ):
            raise DataError(
                f"{name} does not classify images, so it has no loss",
                hint="pass a model ...ForImageClassification",
            )
        _require_fields(data, name, "image", *(attributes or ["label"] if labelled else []))
        beside = _loaded_from(module) if beside is None else beside
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
                    f"attributes must name the {classes} outputs of the model, got "
                    f"{len(attributes)} names",
                    hint="check that the data belong to the model",
                )
            return task | {"attributes": list(attributes)}, None
        if labelled and np.asarray(data["label"]).dtype.kind in "US":
            id2label = getattr(config, "id2label", None) or {}
            return task | {"names": [str(id2label[i]) for i in sorted(id2label)]}, None
        if labelled and data.folders:
            numbers = number_folders(
                data.folders, int(classes or 0), labels_of(module), folders, data.name
            )
            return task | ({} if numbers is None else {"folders": numbers}), None
        if labelled:
            _require_labels(data, int(classes or 0))
            _require_all_labels(data)
        return task | ({} if labelled else {"labelled": False}), None
    if tokenizer is None:
        candidates = (
            [] if beside is None else [beside / "tokenizer.json", beside / "tokenizer_config.json"]
        )
        tokenizer = next(
            (p if p.name == "tokenizer.json" else p.parent for p in candidates if p.exists()), None
        )
    if tokenizer is None:
        raise DataError(
            f"{name} needs a tokenizer, and its folder contains none",
            hint=Hint(
                "pass tokenizer=: a tokenizer.json, a folder or a hub id",
                cli="pass --tokenizer: a tokenizer.json, a folder or a hub id",
            ),
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
        task = {
            "kind": "reviews",
            "classes": int(config.num_labels),
            "length": length,
            "pad": int(pad),
            "special": True,
        }
        return task | ({} if labelled else {"labelled": False}), tokenizer
    raise DataError(
        f"no loss is defined for {name}",
        hint="use a language model, or a classifier of texts or images",
    )


# Model types whose positions start after the padding token's id: that many rows of their position
# tables are not used.
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
    """Return the largest number of tokens that a model has positions for."""
    rows = int(getattr(config, "max_position_embeddings", None) or 512)
    return (
        rows - (config.pad_token_id or 0) - 1
        if getattr(config, "model_type", None) in _OFFSET_POSITIONS
        else rows
    )


def read_examples(
    module: torch.nn.Module, data: Data, **options: Any
) -> tuple[Examples, dict[str, Any]]:
    """Return the data as examples for a model, and its task. `options` are those of `task_of`."""
    if reads_images(module):
        data = match_channels(module, data)
    task, tokenizer = task_of(module, data, **options)
    return prepare(task, data, tokenizer), task


def sample_batches(
    examples: Examples, count: int, seed: int, batch: int = 16
) -> list[tuple[dict[str, Tensor], Tensor]]:
    """Sample `count` examples with a seed, in batches of inputs and labels."""
    rows = np.sort(np.random.default_rng(seed).permutation(len(examples))[:count])
    return [examples.batch(rows[i : i + batch]) for i in range(0, len(rows), batch)]


def _require_fields(data: Data, name: str, *fields: str) -> None:
    missing = [f for f in fields if f not in data.fields]
    if missing:
        raise DataError(
            f"a {name} needs the field{'s' * (len(missing) > 1)} "
            f"{' and '.join(repr(f) for f in missing)}, which {data.name} does not have",
            hint=Hint(
                f"it has {', '.join(map(repr, data.fields))}; map one with "
                f"fields={{'{missing[0]}': name}}",
                cli=f"it has {', '.join(map(repr, data.fields))}; map one with "
                f"--field {missing[0]}=NAME",
            ),
        )


def _require_labels(data: Data, classes: int) -> None:
    try:
        labels = np.asarray(data["label"]).astype(np.int64)
    except ValueError as error:
        raise DataError(
            f'the field "label" of {data.name} must contain numbers',
            hint="labels are 0, 1, ... in the order of the model's classes",
        ) from error
    if labels.ndim == 2 and labels.shape[1] != classes:
        raise DataError(
            f"the labels of {data.name} must have {classes} values per example, got "
            f"{labels.shape[1]}",
            hint="check that the data belong to the model",
        )
    if labels.size and ((labels.ndim == 1 and labels.max() >= classes) or labels.min() < -1):
        raise DataError(
            f"the labels of {data.name} must be between -1 and {classes - 1}, got {labels.min()} "
            f"to {labels.max()}",
            hint="check that the data belong to the model",
        )


def _require_all_labels(data: Data) -> None:
    """Raise a DataError if a label is -1, by which datasets mark unlabelled rows.

    Of texts such rows are skipped (`_review_examples`); in rows of binary labels -1 means no.
    """
    labels = np.asarray(data["label"]).astype(np.int64)
    unlabelled = np.flatnonzero(labels == -1) if labels.ndim == 1 else labels[:0]
    if len(unlabelled):
        raise DataError(
            f"{len(unlabelled)} of {len(labels)} rows of {data.name} have the label -1 (no label), "
            f"the first is row {unlabelled[0]}",
            hint="remove these rows",
        )


def _loaded_from(module: torch.nn.Module) -> Path | None:
    """Return the local folder that transformers loaded a model from; None if it is unknown."""
    name = getattr(getattr(module, "config", None), "_name_or_path", None)
    return Path(name) if name and isinstance(name, str) and Path(name).is_dir() else None


def _load_normalization(
    beside: Path | None, mean: Any, std: Any, module: torch.nn.Module
) -> list[list[float]]:
    """Return mean and std: the arguments, or else those of the model's preprocessor_config.json or
    of timm's pretrained_cfg.
    """
    timm = getattr(module, "pretrained_cfg", None)
    defaults, source = dict(timm) if timm else {}, "the {} in the model's pretrained_cfg"
    path = None if beside is None else beside / "preprocessor_config.json"
    if path is not None and path.exists() and not (mean and std):
        try:
            preprocessor = load_json(path.read_text())
            defaults = (
                {"mean": preprocessor["image_mean"], "std": preprocessor["image_std"]}
                if preprocessor.get("do_normalize", True)
                else {"mean": [0.0], "std": [1.0]}
            )
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path} must define image_mean and image_std: {error!r}",
                hint=Hint("pass both mean and std", cli="pass both --mean and --std"),
            ) from error
        source = f"the image_{{}} of {path}"
    names = ["--mean" if mean else source.format("mean"), "--std" if std else source.format("std")]
    mean, std = mean or defaults.get("mean"), std or defaults.get("std")
    if mean is None or std is None:
        raise DataError(
            "the normalization of the model's images is unknown",
            hint=Hint(
                "pass regauge.DataSource(uri, mean=(0.5,), std=(0.5,)), for example, "
                "or add preprocessor_config.json to the model's folder",
                cli="pass --mean 0.5 --std 0.5, for example, or add "
                "preprocessor_config.json to the model's folder",
            ),
        )
    mean, std = ([x] if isinstance(x, int | float) else list(x) for x in (mean, std))
    channels = channels_of(module)
    for name, numbers in zip(names, (mean, std), strict=True):
        if channels is not None and len(numbers) not in (1, channels):
            raise DataError(
                f"{name} must have one number for each channel ({channels}), or one for all, got "
                f"{len(numbers)}",
                hint=Hint(
                    "pass mean and std with one number, or one for each channel",
                    cli="pass --mean and --std with one number, or one for each channel",
                ),
            )
        if not np.isfinite(numbers).all():
            raise DataError(
                f"{name} must be finite, got {', '.join(map(str, numbers))}",
                hint=Hint(
                    "pixels are in [0, 1]: mean=(0.5,), std=(0.5,), for example",
                    cli="pixels are in [0, 1]: --mean 0.5 --std 0.5, for example",
                ),
            )
    if min(std) <= 0:
        raise DataError(
            f"{names[1]} must be positive, got {', '.join(map(str, std))}",
            hint=Hint(
                "pixels are divided by it: std=(0.5,), for example",
                cli="pixels are divided by it: --std 0.5, for example",
            ),
        )
    longest = max(len(mean), len(std))
    return [x * longest if len(x) == 1 and longest > 1 else x for x in (mean, std)]


def size_of(module: torch.nn.Module) -> tuple[int, int] | None:
    """Return the height and width of the images that a model reads, or None if unknown.

    The size of the model itself precedes that in timm's pretrained_cfg, which describes the weights
    that were loaded.
    """
    declared = getattr(getattr(module, "config", None), "image_size", None) or getattr(
        getattr(module, "patch_embed", None), "img_size", None
    )
    size = declared or (getattr(module, "pretrained_cfg", None) or {}).get("input_size")
    return height_and_width(size) if size else None


def height_and_width(size: int | Sequence[int]) -> tuple[int, int]:
    """Return height and width, from one number for both or a list that ends in them."""
    height, width = size[-2:] if isinstance(size, Sequence) else (size, size)
    return int(height), int(width)


def _preprocessor_size(beside: Path | None, data: Data) -> tuple[int, int] | None:
    """Return the size in preprocessor_config.json, to which a model of any size resizes images of
    different sizes; None if the images have one size.
    """
    images = data["image"]
    if not isinstance(images, EncodedImages) or images.size is not None or len(images.sizes) < 2:
        return None
    path = None if beside is None else beside / "preprocessor_config.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        preprocessor = load_json(path.read_text()) if path is not None else {}
        size: Any = preprocessor.get("crop_size") or preprocessor.get("size")
        return (
            height_and_width(
                (size["height"], size["width"]) if "height" in size else size["shortest_edge"]
            )
            if isinstance(size, dict)
            else height_and_width(size)
        )
    extremes = " and ".join(f"{h} x {w}" for h, w in (min(images.sizes), max(images.sizes)))
    raise DataError(
        f"the images of {data.name} have different sizes ({extremes}), and the model does not "
        "define one",
        hint='resize them, or add preprocessor_config.json with "size" to the model\'s folder',
    )


def reads_images(module: torch.nn.Module) -> bool:
    """Return whether a model reads images. Models of timm, which have no config, all do."""
    return (
        getattr(module, "config", None) is None
        or "pixel_values" in inspect.signature(module.forward).parameters
    )


def channels_of(module: torch.nn.Module) -> int | None:
    """Return the number of channels that a model reads, or None if unknown: that of its config, or
    of the first convolution, unless this reads more than images have (TResNet's reads blocks of
    pixels).
    """
    declared = getattr(getattr(module, "config", None), "num_channels", None)
    if declared:
        return int(declared)
    first = next((m.in_channels for m in module.modules() if isinstance(m, torch.nn.Conv2d)), None)
    return first if first is None or first <= 4 else None
