"""`regauge verify`: the theorems, checked on the user's own model."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from regauge.cli import options
from regauge.cli.console import info, step_bar
from regauge.cli.run import deliver, facts_of_run, start_run

Dtype = StrEnum("Dtype", ["float64", "float32", "bfloat16", "float16"])
Optimizer = StrEnum("Optimizer", ["sgd", "adamw"])


def verify(
    model: options.Model,
    dtype: Annotated[
        Dtype | None,
        typer.Option("--dtype", help="Compute dtype. Default: that of the stored weights."),
    ] = None,
    steps: Annotated[
        int,
        typer.Option("--steps", min=0, metavar="N", help="Training steps to compare; 0: none."),
    ] = 3,
    optimizer: Annotated[
        Optimizer,
        typer.Option(
            "--optimizer", help="Optimizer of the training.", rich_help_panel=options.ADVANCED
        ),
    ] = Optimizer.sgd,
    inputs: Annotated[
        Path | None,
        typer.Option(
            "--inputs",
            metavar="FILE",
            help="Inputs by name (.npz or .safetensors). Default: random.",
        ),
    ] = None,
    general: Annotated[
        bool,
        typer.Option(
            "--general/--no-general",
            help="Also check single operators (Theorem 4.7 of Xu et al.).",
            rich_help_panel=options.ADVANCED,
        ),
    ] = True,
    optimizers: Annotated[
        bool,
        typer.Option(
            "--optimizers",
            help="Also measure which optimizers preserve which symmetry (half a minute).",
            rich_help_panel=options.ADVANCED,
        ),
    ] = False,
    spec: options.SpecFile = None,
    json: options.JsonFile = None,
    report: options.Report = None,
    seed: Annotated[int, options.seed_option("Seed of inputs, targets and elements.")] = 0,
    device: options.Device = "cpu",
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads",
            min=1,
            max=256,
            metavar="N",
            help="Compute threads. Default: torch's own, one for small models.",
            rich_help_panel=options.GENERAL,
        ),
    ] = None,
    verbose: options.Verbose = 0,
) -> int:
    """Check that a model's symmetries hold, on the model itself.

    Checks that permuting tokens and channels commutes with forward, backward and training. Exit
    code 3 if a symmetry that should hold does not.
    """
    start_run(json, report, threads=threads, device=device)
    from regauge.verification import verify as run

    info(f"loading {model}")
    with step_bar("verify") as progress:
        verification = run(
            model,
            inputs,
            spec=spec,
            steps=steps,
            optimizer=optimizer.value,
            seed=seed,
            dtype=dtype.value if dtype else None,
            device=device,
            general=general,
            optimizers=optimizers,
            facts=facts_of_run(),
            progress=progress,
        )
    return deliver(verification.results, verification.format(verbose=verbose > 0), json, report)
