"""Options that several commands share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

# Groups of options in the help that several commands have.
TRAINING, DATA, GENERAL, ADVANCED = "Training", "Data", "General", "Advanced"


# A class where the library's parameter is a Literal, so that mypy compares the values.
Optimizer = StrEnum("Optimizer", ["sgd", "adam", "adamw"])


class StreamKind(StrEnum):
    """How the residual stream is matched."""

    auto = "auto"
    permutation = "permutation"


class AlignKind(StrEnum):
    """How a model is aligned before a path to another one is measured."""

    auto = "auto"
    weights = "weights"
    self = "self"
    none = "none"


class GroupKind(StrEnum):
    """Subgroups that an element is limited to."""

    permutation = "permutation"
    signed = "signed"
    orthogonal = "orthogonal"
    full = "full"


class Part(StrEnum):
    """Parts of a model."""

    embed = "embed"
    backbone = "backbone"
    head = "head"


class Unit(StrEnum):
    """What is shuffled alike: all samples of a batch, or each sample by itself."""

    batch = "batch"
    sample = "sample"


def seed_option(help_text: str) -> Any:
    """Build the `--seed N` option with a help text. numpy rejects seeds below 0, scikit-learn seeds
    of more than 32 bits.
    """
    return typer.Option(
        "--seed", min=0, max=2**32 - 1, metavar="N", help=help_text, rich_help_panel=GENERAL
    )


Model = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="Folder, .safetensors file or hub id (owner/name)."),
]
LockedModel = Annotated[
    str, typer.Argument(metavar="LOCKED", help="Locked folder or .safetensors file.")
]
Out = Annotated[
    Path,
    typer.Option("-o", "--output", metavar="OUT", help="New folder (or .safetensors file)."),
]
SpecFile = Annotated[
    Path | None,
    typer.Option(
        "--spec",
        metavar="FILE",
        help="Spec file (TOML) for a custom module; see docs/formats.md.",
        rich_help_panel=ADVANCED,
    ),
]
Stream = Annotated[
    StreamKind,
    typer.Option(
        "--stream",
        help="permutation: permute the residual stream, as Git Re-Basin does. auto: rotate it "
        "where the model allows it.",
        rich_help_panel=ADVANCED,
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print JSON on stdout.", rich_help_panel=GENERAL)
]
JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="F",
        help="Write the results as JSON; - for stdout.",
        rich_help_panel=GENERAL,
    ),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume", help="Resume an interrupted run of the same command.", rich_help_panel=GENERAL
    ),
]
Report = Annotated[
    Path | None,
    typer.Option(
        "--report",
        metavar="page.html",
        help="Write a self-contained HTML page.",
        rich_help_panel=GENERAL,
    ),
]
# Seeds an element, so any whole number is valid.
Seed = Annotated[
    int | None,
    typer.Option(
        "--seed",
        metavar="N",
        help="Public seed, for experiments. Without it: the system's randomness.",
        rich_help_panel=GENERAL,
    ),
]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Check everything, write nothing.", rich_help_panel=GENERAL),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        min=1,
        max=256,
        metavar="N",
        help="Compute threads. Default: REGAUGE_THREADS, OMP_NUM_THREADS, or the physical cores.",
        rich_help_panel=GENERAL,
    ),
]
Batch = Annotated[int, typer.Option("--batch-size", min=1, metavar="N", help="Examples per batch.")]
Device = Annotated[
    str,
    typer.Option(
        "--device",
        metavar="D",
        help="Compute device: cpu, cuda, cuda:1, mps.",
        rich_help_panel=GENERAL,
    ),
]
Verbose = Annotated[
    int,
    typer.Option(
        "-v",
        count=True,
        help="Verbose output; -vv: also tracebacks.",
        show_default=False,
        rich_help_panel=GENERAL,
    ),
]
KeyFile = Annotated[
    Path, typer.Option("-k", "--key", metavar="KEY", help="Key file, made by regauge keygen.")
]
PassphraseFile = Annotated[
    Path | None,
    typer.Option(
        "--passphrase-file",
        metavar="F",
        help="File with the key's passphrase on its first line. Also: REGAUGE_PASSPHRASE. "
        "Otherwise a prompt.",
        rich_help_panel=GENERAL,
    ),
]
Gallery = Annotated[
    int,
    typer.Option(
        "--gallery", min=0, max=64, metavar="N", help="Images to show with their reconstructions."
    ),
]
FailAbove = Annotated[
    float | None,
    typer.Option(
        "--fail-above",
        min=0.0,
        max=1.0,
        metavar="X",
        help="Exit with code 3 if an attack scores above X, on a scale from 0 (a guess) to 1 (no "
        "defence).",
    ),
]
ImageReport = Annotated[
    Path | None,
    typer.Option(
        "--report",
        metavar="page.html",
        help="Write a self-contained HTML page. It shows images of the data.",
        rich_help_panel=GENERAL,
    ),
]
Resize = Annotated[
    bool,
    typer.Option("--resize", help="Resize images to the model's input size.", rich_help_panel=DATA),
]
RandomWeights = Annotated[
    bool,
    typer.Option(
        "--random-weights",
        help="Start from random weights instead of the model's.",
        rich_help_panel=ADVANCED,
    ),
]
RefineSteps = Annotated[
    int,
    typer.Option(
        "--refine-steps",
        min=1,
        metavar="N",
        help="Steps of the refinement.",
        rich_help_panel=ADVANCED,
    ),
]
