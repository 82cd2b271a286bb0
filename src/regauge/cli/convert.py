"""`regauge convert`: from pickles to safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from regauge.cli import options
from regauge.cli.console import info, output_progress, print_json, warn

VERSION = 1


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
    """Convert a pickled checkpoint to safetensors. Pickles are read without running code; tied
    tensors are stored once.
    """
    from regauge.checkpoints.convert import open_pickles, plan_conversion
    from regauge.checkpoints.files import format_bytes
    from regauge.checkpoints.plan import check_target
    from regauge.checkpoints.writer import write_plan

    check_target(out, source)
    pickles = open_pickles(source)
    plan, thunks = plan_conversion(out, pickles)
    for alias, stored in pickles.aliases.items():
        info(f"{alias} is tied to {stored} and stored once")
    for name, why in pickles.dropped.items():
        warn(f'"{name}" {why} and is left out')
    for file in pickles.unchecked:
        info(f"{file} carries no checksums: changed bytes cannot be detected")
    report = {
        "version": VERSION,
        "command": "convert",
        "out": str(out),
        "tensors": len(thunks),
        "aliases": dict(pickles.aliases),
        "dropped": list(pickles.dropped),
        "dry_run": dry_run,
    }
    if dry_run:
        info(f"dry run: {len(thunks)} tensors would be written to {out}")
    else:
        with output_progress(out, "converting") as progress:
            written = write_plan(out, plan, thunks, progress=progress, threads=threads)
        if written.nonfinite:
            warn(
                f"NaN or Inf in {len(written.nonfinite)} tensors: "
                f"{', '.join(written.nonfinite[:5])}"
            )
        info(f"wrote {out}: {len(thunks)} tensors, {format_bytes(written.bytes)}")
        report |= {"bytes": written.bytes, "files": list(written.files)}
    if json:
        print_json(report)
    return 0
