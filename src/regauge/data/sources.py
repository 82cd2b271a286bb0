"""Examples for a model, from what users hold: the URI of a dataset, a dataset, or examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from regauge.data.datasets import Data, open_data
from regauge.data.tasks import Examples, read_examples

if TYPE_CHECKING:
    import torch

DataSource: TypeAlias = str | Path | Data | Examples


@dataclass(frozen=True)
class DataOptions:
    """Options of reading data for a model. Defaults are those of the model and of its folder.

    Attributes:
        fields: Names of fields to those in the source, such as {"label": "class"}.
        split: The split of a dataset of the hub, or of digits.
        tokenizer: The tokenizer for texts.
        length: The largest number of tokens.
        mean: The mean of the images per channel, of values in [0, 1].
        std: Their standard deviation.
        attributes: Fields of binary labels.
    """

    fields: Mapping[str, str] | None = None
    split: str | None = None
    tokenizer: str | Path | None = None
    length: int | None = None
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    attributes: Sequence[str] = ()

    def open(self, data: str | Path | Data, split: str = "test") -> Data:
        """Open a dataset. `split` is the default split."""
        if isinstance(data, Data):
            return data
        fields = self.fields
        if self.attributes:
            fields = {
                "image": "image",
                **(fields or {}),
                **{name: name for name in self.attributes},
            }
        return open_data(data, fields=fields, split=self.split or split)

    def read(
        self,
        data: DataSource,
        module: torch.nn.Module,
        *,
        beside: Path | None = None,
        split: str = "test",
        labelled: bool = True,
    ) -> tuple[Examples, dict[str, Any]]:
        """Return examples as inputs of a model, and their task.

        Args:
            data: The data. Examples are returned as they are, with an empty task.
            module: The model.
            beside: The folder of the model, with the defaults of tokenizer, mean and std.
            split: The default split.
            labelled: Whether labels are required.

        Raises:
            DataError: The data do not exist, or do not fit the model.
        """
        if isinstance(data, Examples):
            return data, {}
        return read_examples(
            module,
            self.open(data, split),
            beside=beside,
            tokenizer=self.tokenizer,
            length=self.length,
            mean=self.mean,
            std=self.std,
            labelled=labelled,
            attributes=self.attributes,
        )
