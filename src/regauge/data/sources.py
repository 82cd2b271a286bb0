"""Data as users name them: a source and how a model reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from regauge.core.options import require_at_least
from regauge.errors import DataError

if TYPE_CHECKING:
    import torch

    from regauge.checkpoints.reader import Checkpoint
    from regauge.data.datasets import Data
    from regauge.data.tasks import Examples


@dataclass(frozen=True)
class DataSource:
    """A dataset, and how a model reads it.

    Attributes:
        uri: a file, a folder of images, a dataset of the hub (`owner/name`), or "digits".
        samples: the number of examples to use; the default is that of the function that reads it.
        fields: pairs of a field's name and its column; other fields keep their names.
        split: the split of "digits" or of a dataset of the hub; the default is that of the function
            that reads it: "train" to train, "test" to evaluate.
        tokenizer: the tokenizer file, for texts; by default the one beside the model.
        length: tokens per window or text.
        mean: mean of the pixels in 0..1; by default that of preprocessor_config.json.
        std: standard deviation of the pixels.
        labels: use the data's labels where a method could do without.
        attributes: fields that are read along as attributes of an image.

    Example:
        >>> data = regauge.DataSource("digits", split="test", samples=50, mean=(0.3,), std=(0.4,))
        >>> report = regauge.barrier("vit", "vit", data)
    """

    uri: str
    samples: int | None = None
    fields: tuple[tuple[str, str], ...] = ()
    split: str | None = None
    tokenizer: str | None = None
    length: int | None = None
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    labels: bool = False
    attributes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_at_least(DataError, 1, samples=self.samples)

    def open(self) -> Data:
        """Open the dataset.

        Raises:
            DataError: it does not exist or cannot be read.
        """
        from regauge.data.datasets import open_data

        fields = dict(self.fields)
        if self.attributes:
            fields = {"image": "image", **fields, **{name: name for name in self.attributes}}
        return open_data(self.uri, fields=fields or None, split=self.split or "test")

    def read(
        self,
        model: torch.nn.Module,
        beside: Checkpoint | Path | None,
        *,
        labelled: bool = True,
        data: Data | None = None,
        folders: Sequence[str] = (),
    ) -> tuple[Examples, dict[str, Any]]:
        """Return the examples as inputs of a model, and its task.

        Args:
            model: the model; its weights are not used.
            beside: the checkpoint of the model, or a folder with its tokenizer or preprocessor.
            labelled: require labels.
            data: the dataset, if it was opened before.
            folders: the class folders, in order, of data that have all classes of the model.
        """
        from regauge.data.tasks import read_examples

        if not (beside is None or isinstance(beside, Path)):
            folder = beside.path if beside.is_folder else beside.path.parent
            beside = folder if beside.sources else None  # none is beside a model in memory
        return read_examples(
            model,
            self.open() if data is None else data,
            beside=beside,
            tokenizer=self.tokenizer,
            length=self.length,
            mean=list(self.mean) or None,
            std=list(self.std) or None,
            labelled=labelled,
            attributes=self.attributes,
            folders=folders,
        )


def sample_examples(examples: Examples, data: object, seed: int) -> Examples:
    """Return the sample that a data source is limited to, in its order; all of other data."""
    samples = data.samples if isinstance(data, DataSource) else None
    if samples is None or samples >= len(examples):
        return examples
    return examples.only(np.sort(np.random.default_rng(seed).permutation(len(examples))[:samples]))


def source_of(
    data: Any, split: str = "test", *, kinds: str = "a DataSource or Examples"
) -> DataSource:
    """Return data that a user named as a source, with its split.

    Args:
        data: a path, a hub id or a `DataSource`.
        split: the split of a source that names none.
        kinds: the objects that the caller accepts besides names, for the error message.

    Raises:
        DataError: the data are something else.
    """
    source = DataSource(str(data)) if isinstance(data, str | Path) else data
    if not isinstance(source, DataSource):
        raise DataError(
            f"data must be a path, a hub id, {kinds}, got {type(data).__name__}",
            hint='name a dataset, for example regauge.DataSource("digits", mean=(0.5,), '
            "std=(0.5,)), or wrap tensors as regauge.data.tasks.Examples",
        )
    return source if source.split else replace(source, split=split)
