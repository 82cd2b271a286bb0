"""`regauge move`: apply an element to a checkpoint."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from regauge.cli import options
from regauge.cli.console import info
from regauge.cli.parsers import parse_names
from regauge.cli.write import write_job


def move(
    model: options.Model,
    out: options.Out,
    element: Annotated[
        Path | None, typer.Option("-g", "--element", metavar="ELEMENT", help="Element file.")
    ] = None,
    invert: Annotated[
        bool, typer.Option("--invert", help="Apply the element's inverse: undo a move.")
    ] = False,
    random: Annotated[bool, typer.Option("--random", help="Sample a random element.")] = False,
    group: Annotated[
        options.GroupKind | None,
        typer.Option("--group", help="Subgroup to sample from. Default: permutation."),
    ] = None,
    spaces: Annotated[
        str | None,
        typer.Option(
            "--spaces",
            metavar="A,B",
            help="Spaces to transform; `ffn` is ffn.0, ffn.1, ...",
            rich_help_panel=options.ADVANCED,
        ),
    ] = None,
    seed: options.Seed = None,
    save_element: Annotated[
        Path | None,
        typer.Option("--save-element", metavar="F", help="New file for the sampled element."),
    ] = None,
    part: Annotated[
        options.Part | None,
        typer.Option(
            "--part",
            help="Part to transform; the parts then no longer fit each other.",
            rich_help_panel=options.ADVANCED,
        ),
    ] = None,
    fold: Annotated[
        bool,
        typer.Option("--fold", help="Fold the norms first, which allows rotations of the stream."),
    ] = False,
    adapter: Annotated[
        str | None,
        typer.Option(
            "--adapter",
            metavar="ADAPTER",
            help="LoRA adapter of MODEL (PEFT folder or file) to transform instead of MODEL.",
        ),
    ] = None,
    spec: options.SpecFile = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume an interrupted run of the same move.")
    ] = False,
    dry_run: options.DryRun = False,
    json: options.Json = False,
    threads: options.Threads = None,
    verbose: options.Verbose = 0,
) -> int:
    """Change the basis of a model, but not its function.

    Applies an element of the model's symmetry group to a checkpoint.
    """
    if random == (element is not None):
        raise typer.BadParameter("pass either -g ELEMENT or --random")
    if not random and (seed is not None or save_element is not None or group is not None):
        raise typer.BadParameter("--seed, --group and --save-element require --random")
    if random and invert:
        raise typer.BadParameter("--invert requires -g")
    if random and resume and seed is None:
        raise typer.BadParameter(
            "--resume requires the element of the interrupted run: pass it with -g, or sample it "
            "with --seed"
        )
    if random and adapter is not None:
        raise typer.BadParameter("--adapter requires the element of its model: pass it with -g")
    started = time.monotonic()
    from regauge.models.transforms import move as run

    moved = run(
        model,
        seed if random else element,
        invert=invert,
        group=(group or options.GroupKind.permutation).value,
        spaces=parse_names(spaces),
        part=part.value if part else None,
        fold=fold,
        adapter=adapter,
        spec=spec,
    )
    job = moved.plan(out, threads=threads, element=save_element)
    if random and seed is None and save_element is None and not dry_run:
        info("the element was not saved, so this move cannot be undone; --save-element saves it")
    return write_job(
        job,
        "move",
        started=started,
        resume=resume,
        dry_run=dry_run,
        json=json,
        threads=threads,
        fields=("bytes", "files", "nonfinite", "left", "seconds"),
        extra={} if dry_run else {"element": str(save_element or element or "")},
        place=f"; the element is in {save_element}" if save_element else "",
    )
