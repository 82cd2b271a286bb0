"""Options that several commands share, each said once."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer


class GroupKind(StrEnum):
    permutation = "permutation"
    signed = "signed"
    orthogonal = "orthogonal"
    full = "full"


class Part(StrEnum):
    embed = "embed"
    backbone = "backbone"
    head = "head"


def seed_option(words: str) -> Any:
    """`--seed N`; the command says what it draws. numpy takes no seed below 0, scikit-learn none
    beyond 32 bits.
    """
    return typer.Option("--seed", min=0, max=2**32 - 1, metavar="N", help=words)


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A folder, a .safetensors file, or a hub id (owner/name)."
    ),
]
LockedModel = Annotated[
    str, typer.Argument(metavar="LOCKED", help="A locked folder or .safetensors file.")
]
Out = Annotated[
    Path,
    typer.Option("-o", "--output", metavar="OUT", help="The new folder (or .safetensors file)."),
]
SpecFile = Annotated[
    Path | None,
    typer.Option(
        "--spec",
        metavar="FILE",
        help="A spec file (TOML) for a module of your own; see docs/formats.md.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
JsonFile = Annotated[
    Path | None,
    typer.Option("--json", metavar="F", help="Write the results here, as JSON; - for stdout."),
]
Report = Annotated[
    Path | None,
    typer.Option("--report", metavar="page.html", help="Write one self-contained page."),
]
# Of an element, not of numbers: any whole number will do.
Seed = Annotated[
    int | None,
    typer.Option(
        "--seed",
        metavar="N",
        help="A public seed, for experiments. Without it: the system's randomness.",
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything, write nothing.")]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        min=1,
        max=256,
        metavar="N",
        help="Threads that compute. Default: one per core but one, at most four.",
    ),
]
Batch = Annotated[int, typer.Option("--batch-size", min=1, metavar="N", help="Examples at a time.")]
Device = Annotated[
    str, typer.Option("--device", metavar="D", help="Where to compute: cpu, cuda, cuda:1, mps.")
]
Verbose = Annotated[
    int,
    typer.Option("-v", count=True, help="Say more; twice: show tracebacks.", show_default=False),
]
KeyFile = Annotated[
    Path, typer.Option("-k", "--key", metavar="KEY", help="A key file; regauge keygen makes one.")
]
PassphraseFile = Annotated[
    Path | None,
    typer.Option(
        "--passphrase-file",
        metavar="F",
        help="The key's passphrase, on the first line. Also: REGAUGE_PASSPHRASE. Otherwise it "
        "is asked for.",
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
        help="Exit code 3 if an attack gets further than this share.",
    ),
]
ImageReport = Annotated[
    Path | None,
    typer.Option(
        "--report",
        metavar="page.html",
        help="Write one self-contained page. It shows images of the data.",
    ),
]
Resize = Annotated[
    bool, typer.Option("--resize", help="Make images of another size fit the model.")
]
