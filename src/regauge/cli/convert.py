"""`regauge convert`: from pickles to safetensors."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from regauge.cli import options
from regauge.cli.write import write_job


def convert(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="IN",
            help=".bin or .pt file, or a folder with pytorch_model.bin (one file or shards).",
        ),
    ],
    out: options.Out,
    dry_run: options.DryRun = False,
    json: options.Json = False,
    threads: options.Threads = None,
    verbose: options.Verbose = 0,
) -> int:
    """Convert a pickled checkpoint to safetensors, safely.

    Pickles are read without running code. Tied tensors are stored once.
    """
    started = time.monotonic()
    from regauge.checkpoints.convert import convert as run

    return write_job(
        run(source).plan(out),
        "convert",
        started=started,
        dry_run=dry_run,
        json=json,
        threads=threads,
        fields=("bytes", "files"),
    )
