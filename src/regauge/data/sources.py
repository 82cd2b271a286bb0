"""Data as users name them: a source and how a model reads it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
        split: the split of a dataset of the hub.
        tokenizer: the tokenizer file, for texts; by default the one beside the model.
        length: tokens per window or text.
        mean: mean of the pixels in 0..1; by default that of preprocessor_config.json.
        std: standard deviation of the pixels.
        labels: use the data's labels where a method could do without.
        attributes: fields that are read along as attributes of an image.

    Example:
        >>> DataSource("dev.tsv", fields=(("text", "sentence"),)).split
        'test'
    """

    uri: str
    samples: int | None = None
    fields: tuple[tuple[str, str], ...] = ()
    split: str = "test"
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
        return open_data(self.uri, fields=fields or None, split=self.split)

    def read(
        self,
        model: torch.nn.Module,
        beside: Checkpoint | Path | None,
        *,
        labelled: bool = True,
        data: Data | None = None,
    ) -> tuple[Examples, dict[str, Any]]:
        """Return the examples as inputs of a model, and its task.

        Args:
            model: the model; its weights are not used.
            beside: the checkpoint of the model, or a folder with its tokenizer or preprocessor.
            labelled: require labels.
            data: the dataset, if it was opened before.
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
        )
