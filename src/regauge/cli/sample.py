"""A sample of data on the command line, as a model reads it: the options of every command that
takes data, and what reads them.
"""

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
        metavar="NAME=THEIRS",
        help="text, image or label as the data call it. May be repeated.",
    ),
]
Split = Annotated[
    str, typer.Option("--split", metavar="S", help="The split of a data set of the hub.")
]
Tokenizer = Annotated[
    str | None,
    typer.Option(
        "--tokenizer", metavar="FILE", help="For texts. Default: the one beside the (first) model."
    ),
]
Length = Annotated[
    int | None,
    typer.Option("--length", min=2, metavar="N", help="Tokens of a window or text. Default: 256."),
]
Mean = Annotated[
    str | None,
    typer.Option(
        "--mean", metavar="X[,X,X]", help="Of pixels in 0..1. Default: preprocessor_config.json."
    ),
]
Std = Annotated[str | None, typer.Option("--std", metavar="X[,X,X]", help="Likewise.")]
SelfWritten = Annotated[
    bool,
    typer.Option(
        "--self-written",
        help="Match language models by what they do on text that they write themselves: no data "
        "are needed.",
    ),
]


@dataclass(frozen=True)
class Sample:
    """Where examples come from, and how they are read."""

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
        """The examples as this model reads them, and its task. Labels are not even looked for where
        they are not wanted.
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

        opened = open_data(self.uri, fields=fields, split=self.split)
        beside = checkpoint.path if checkpoint.is_folder else checkpoint.path.parent
        return read_examples(
            model,
            opened,
            beside=beside,
            tokenizer=self.tokenizer,
            length=self.length,
            mean=channels[0],
            std=channels[1],
            labelled=labelled,
            attributes=self.attributes,
        )


def parse_fields(given: list[str] | None) -> dict[str, str] | None:
    """NAME=THEIRS, ... as a mapping; what is not named keeps its own name."""
    if not given:
        return None
    pairs = [text.partition("=") for text in given]
    for text, (name, equals, theirs) in zip(given, pairs, strict=True):
        if not (name and equals and theirs):
            raise typer.BadParameter(f"{text!r} is not NAME=THEIRS", param_hint="--field")
    return {name: theirs for name, _, theirs in pairs}


def parse_numbers(text: str | None, name: str) -> list[float] | None:
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(
            f"{text!r} is no number, nor numbers with commas", param_hint=name
        ) from error


def inputs_of(examples: Examples, count: int, seed: int, batch: int = 16) -> list[dict[str, Any]]:
    """The inputs of some examples, without their labels, in batches."""
    from regauge.data.tasks import sample_batches

    return [inputs for inputs, _ in sample_batches(examples, count, seed, batch)]
