"""`regauge extract-lora`: the difference of a fine-tuned model from its base as a LoRA adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from regauge.cli import options
from regauge.cli.console import info, step_bar, warn
from regauge.cli.parsers import parse_names
from regauge.cli.run import deliver, start_run


def extract_lora(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Fine-tuned model: folder, file or hub id.")
    ],
    base: Annotated[str, typer.Argument(metavar="BASE", help="Model that it was fine-tuned from.")],
    out: Annotated[
        Path, typer.Option("-o", "--output", metavar="ADAPTER", help="New folder of the adapter.")
    ],
    rank: Annotated[
        int | None,
        typer.Option(
            "--rank",
            min=1,
            metavar="R",
            help="Largest rank of a layer. Default: 16; with --energy: no limit.",
        ),
    ] = None,
    energy: Annotated[
        float | None,
        typer.Option(
            "--energy",
            min=0.0,
            max=1.0,
            metavar="X",
            help="Choose for each layer the smallest rank that keeps this share of its difference.",
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            metavar="NAMES",
            help="Suffixes of layers: q_proj,v_proj. Default: all linear layers.",
        ),
    ] = None,
    save_modules: Annotated[
        bool,
        typer.Option(
            "--save-modules",
            help="Also save norms, biases and embeddings that differ, if PEFT supports them.",
        ),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Extract even if the models do not share a basis.")
    ] = False,
    json: options.JsonFile = None,
    report: options.Report = None,
    threads: options.Threads = None,
    verbose: options.Verbose = 0,
) -> int:
    """Extract a LoRA adapter from a fine-tuned model.

    Decomposes the difference of each linear layer from the base by a truncated SVD, and writes
    PEFT's files.
    """
    start_run(json, report, threads=threads)
    import regauge

    with step_bar("extract") as progress:
        result = regauge.extract_lora(
            model,
            base,
            rank=rank,
            energy=energy,
            target=parse_names(target),
            save_modules=save_modules,
            force=force,
            out=out,
            progress=progress,
        )
    result.save(out)
    info(f"wrote {out}: {len(result.tensors)} tensors of {len(result.layers)} layers")
    if not result.verdict.shared:
        warn(f"{model} and {base} {result.verdict.words}; extracted by force")
    code = deliver(result.results, str(result), json, report)
    if result.lost:
        warn(f"the differences of {len(result.lost)} tensors are not in the adapter")
    return code
