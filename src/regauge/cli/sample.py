"""A sample of data on the command line: its options, and their parsers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import torch

    from regauge.checkpoints.reader import Checkpoint
    from regauge.data.tasks import Examples

Field = Annotated[
    list[str] | None,
    typer.Option(
        "--field",
        metavar="NAME=COLUMN",
        help="Column of the text, image or label, as label=class. Repeatable.",
    ),
]
Split = Annotated[str, typer.Option("--split", metavar="S", help="Split of a hub dataset.")]
Tokenizer = Annotated[
    str | None,
    typer.Option(
        "--tokenizer",
        metavar="FILE",
        help="Tokenizer file, for texts. Default: the one beside the (first) model.",
    ),
]
Length = Annotated[
    int | None,
    typer.Option("--length", min=2, metavar="N", help="Tokens per window or text. Default: 256."),
]
Mean = Annotated[
    str | None,
    typer.Option(
        "--mean",
        metavar="X[,X,X]",
        help="Mean of the pixels in 0..1. Default: preprocessor_config.json.",
    ),
]
Std = Annotated[
    str | None,
    typer.Option(
        "--std",
        metavar="X[,X,X]",
        help="Standard deviation of the pixels. Default: preprocessor_config.json.",
    ),
]
SelfWritten = Annotated[
    bool,
    typer.Option(
        "--self-written",
        help="Match language models by activations on text that they generate, without data.",
    ),
]


@dataclass(frozen=True)
class Sample:
    """The source of examples, and the options to read them."""

    uri: str
    field: list[str] | None = None
    split: str = "test"
    tokenizer: str | None = None
    length: int | None = None
    mean: str | None = None
    std: str | None = None

    attributes: tuple[str, ...] = ()

    def read(
        self, model: torch.nn.Module, checkpoint: Checkpoint, labelled: bool = True
    ) -> tuple[Examples, dict[str, Any]]:
        """Return the examples as inputs of this model, and its task. Without `labelled`, labels are
        not required.
        """
        fields = parse_fields(self.field)
        if self.attributes:
            fields = {
                "image": "image",
                **(fields or {}),
                **{name: name for name in self.attributes},
            }
        channels = [
            parse_numbers(text, name) for text, name in ((self.mean, "--mean"), (self.std, "--std"))
        ]
        from regauge.data.datasets import open_data
        from regauge.data.tasks import read_examples

        dataset = open_data(self.uri, fields=fields, split=self.split)
        folder = checkpoint.path if checkpoint.is_folder else checkpoint.path.parent
        return read_examples(
            model,
            dataset,
            beside=folder,
            tokenizer=self.tokenizer,
            length=self.length,
            mean=channels[0],
            std=channels[1],
            labelled=labelled,
            attributes=self.attributes,
        )


def parse_fields(values: list[str] | None) -> dict[str, str] | None:
    """Parse NAME=COLUMN pairs. Fields that are not named keep their own names."""
    if not values:
        return None
    pairs = [text.partition("=") for text in values]
    for text, (name, equals, column) in zip(values, pairs, strict=True):
        if not (name and equals and column):
            raise typer.BadParameter(f"must be NAME=COLUMN, got {text!r}", param_hint="--field")
    return {name: column for name, _, column in pairs}


def parse_numbers(text: str | None, name: str) -> list[float] | None:
    """Parse comma-separated numbers; None stays None."""
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(
            f"must be comma-separated numbers, got {text!r}", param_hint=name
        ) from error


def inputs_of(examples: Examples, count: int, seed: int, batch: int = 16) -> list[dict[str, Any]]:
    """Return the inputs of some examples, without their labels, in batches."""
    from regauge.data.tasks import sample_batches

    return [inputs for inputs, _ in sample_batches(examples, count, seed, batch)]
