"""Options that name data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from regauge.cli import options
from regauge.cli.parsers import parse_fields, parse_numbers

if TYPE_CHECKING:
    from regauge.data.sources import DataSource

Data = Annotated[
    str,
    typer.Option(
        "--data",
        metavar="URI",
        help="npz, parquet, csv, tsv, txt, jsonl, a folder of images, a hub id or digits (of "
        "scikit-learn).",
    ),
]
Evaluated = Annotated[
    str | None,
    typer.Option(
        "--data",
        metavar="URI",
        help="Labelled data, or a text, on which to evaluate the model before and after.",
        rich_help_panel=options.DATA,
    ),
]
Samples = Annotated[
    int | None,
    typer.Option(
        "--samples",
        min=1,
        metavar="N",
        help="Examples to sample. Default: all.",
        rich_help_panel=options.DATA,
    ),
]
Field = Annotated[
    list[str] | None,
    typer.Option(
        "--field",
        metavar="NAME=COLUMN",
        help="Column of the text, image or label, as label=class. Repeatable.",
        rich_help_panel=options.DATA,
    ),
]
Split = Annotated[
    str,
    typer.Option(
        "--split", metavar="S", help="Split of a hub dataset.", rich_help_panel=options.DATA
    ),
]
Attributes = Annotated[
    str | None,
    typer.Option(
        "--attributes",
        metavar="F,F",
        help="Yes/no columns, for a multi-label model.",
        rich_help_panel=options.DATA,
    ),
]
Tokenizer = Annotated[
    str | None,
    typer.Option(
        "--tokenizer",
        metavar="FILE",
        help="Tokenizer file, for texts. Default: the one beside the (first) model.",
        rich_help_panel=options.DATA,
    ),
]
Length = Annotated[
    int | None,
    typer.Option(
        "--length",
        min=2,
        metavar="N",
        help="Tokens per window or text. Default: 256.",
        rich_help_panel=options.DATA,
    ),
]
Mean = Annotated[
    str | None,
    typer.Option(
        "--mean",
        metavar="X[,X,X]",
        help="Mean of the pixels in 0..1. Default: preprocessor_config.json.",
        rich_help_panel=options.DATA,
    ),
]
Std = Annotated[
    str | None,
    typer.Option(
        "--std",
        metavar="X[,X,X]",
        help="Standard deviation of the pixels. Default: preprocessor_config.json.",
        rich_help_panel=options.DATA,
    ),
]


def read_optional(uri: str | None, *options: Any, **named: Any) -> DataSource | None:
    """Return the source that the options name; None without data."""
    return None if uri is None else read_options(uri, *options, **named)


def read_options(
    uri: str,
    field: list[str] | None = None,
    split: str = "test",
    tokenizer: str | None = None,
    length: int | None = None,
    mean: str | None = None,
    std: str | None = None,
    samples: int | None = None,
    labels: bool = False,
    attributes: tuple[str, ...] = (),
) -> DataSource:
    """Return the source that the options name."""
    from regauge.data.sources import DataSource

    return DataSource(
        uri,
        samples=samples,
        labels=labels,
        fields=tuple((parse_fields(field) or {}).items()),
        split=split,
        tokenizer=tokenizer,
        length=length,
        mean=tuple(parse_numbers(mean, "--mean") or ()),
        std=tuple(parse_numbers(std, "--std") or ()),
        attributes=attributes,
    )
