"""`regauge verify`: the theorems on a model of one's own."""

from __future__ import annotations

import time
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regauge.cli import options
from regauge.cli.console import info, step_bar
from regauge.cli.run import check_device, check_outputs, deliver, facts_of_run
from regauge.errors import CheckpointError
from regauge.results.text import format_verdict

if TYPE_CHECKING:
    from regauge.results.findings import Results


SMALL_MODEL = 5_000_000  # parameters below which threads wait for each other more than they compute
GENERAL_PREFIXES = ("operator/", "optimizer/")


class Dtype(StrEnum):
    float64 = "float64"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Optimizer(StrEnum):
    sgd = "sgd"
    adamw = "adamw"


def verify(
    model: options.Model,
    dtype: Annotated[
        Dtype | None,
        typer.Option("--dtype", help="Compute in this dtype. Default: that of the stored weights."),
    ] = None,
    steps: Annotated[
        int,
        typer.Option(
            "--steps", min=0, metavar="N", help="Steps of training to compare; 0 for none."
        ),
    ] = 3,
    optimizer: Annotated[
        Optimizer, typer.Option("--optimizer", help="What trains.")
    ] = Optimizer.sgd,
    inputs: Annotated[
        Path | None,
        typer.Option(
            "--inputs",
            metavar="FILE",
            help="Inputs by name (.npz or .safetensors). Default: random ones.",
        ),
    ] = None,
    general: Annotated[
        bool,
        typer.Option(
            "--general/--no-general", help="Also check Theorem 4.7, operator by operator."
        ),
    ] = True,
    optimizers: Annotated[
        bool,
        typer.Option(
            "--optimizers",
            help="Also measure which optimizers keep which symmetry (half a minute).",
        ),
    ] = False,
    spec: options.SpecFile = None,
    json: options.JsonFile = None,
    report: options.Report = None,
    seed: Annotated[int, options.seed_option("The seed of inputs, targets and elements.")] = 0,
    device: options.Device = "cpu",
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads",
            min=1,
            max=256,
            metavar="N",
            help="Threads that compute. Default: torch's own, one for small models.",
        ),
    ] = None,
    verbose: options.Verbose = 0,
) -> int:
    """Check that permuting tokens and channels commutes with forward, backward and training. Exit
    code 3 if a law that should hold does not.
    """
    started = time.monotonic()
    check_outputs(json, report)
    check_device(device)
    import torch

    from regauge.cli.model import resolve_spec
    from regauge.models.load import load_model
    from regauge.verification import verify as check
    from regauge.verification.general import add_general_findings

    info(f"loads {model}")
    module = load_model(model, dtype.value if dtype else None).to(device)
    small = sum(p.numel() for p in module.parameters()) < SMALL_MODEL
    if threads is not None or small:
        torch.set_num_threads(threads or 1)
    given = None if inputs is None else read_inputs(inputs, module)
    if spec is not None:
        from regauge.checkpoints.spec_files import load_spec

        described = load_spec(spec)
    else:
        described = resolve_spec(module)
    with step_bar("verify") as progress:
        results = check(
            module,
            given,
            spec=described,
            steps=steps,
            optimizer=optimizer.value,
            seed=seed,
            progress=progress,
        )
    if general or optimizers:
        results = add_general_findings(
            results,
            next(p.dtype for p in module.parameters() if p.is_floating_point()),
            seed,
            operators=general,
            optimizers=optimizers,
        )
    results = replace(
        results,
        facts={
            **collect_facts(module, model, seed, steps, optimizer.value),
            "seconds": round(time.monotonic() - started, 1),
        },
    )
    return deliver(results, text_of(results, verbose), json, report)


def collect_facts(module: Any, model: str, seed: int, steps: int, optimizer: str) -> dict[str, Any]:
    """What is needed to repeat a run, and to know what it was of."""
    return {
        **facts_of_run(),
        "model": model,
        "class": type(module).__name__,
        "parameters": sum(p.numel() for p in module.parameters()),
        "dtype": str(
            next(p.dtype for p in module.parameters() if p.is_floating_point())
        ).removeprefix("torch."),
        "seed": seed,
        "training": f"{steps} steps of {optimizer}",
    }


def read_inputs(path: Path, module: Any) -> dict[str, Any]:
    """Inputs by name; floating-point ones in the model's dtype."""
    import torch

    try:
        if path.suffix == ".npz":
            from regauge.data.datasets import read_arrays

            found = {
                name: torch.from_numpy(array)
                for name, array in read_arrays(path.read_bytes(), str(path)).items()
            }
        else:
            from safetensors.torch import load_file

            found = load_file(path)
    # numpy and safetensors raise errors of many kinds for files that are none of theirs
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be read as inputs: {error}",
            hint="a .npz or .safetensors file of arrays by the names of the forward's arguments",
        ) from error
    first = next(p for p in module.parameters() if p.is_floating_point())
    return {
        name: value.to(first.device, first.dtype)
        if value.is_floating_point()
        else value.to(first.device)
        for name, value in found.items()
    }


def text_of(results: Results, verbose: int = 0) -> str:
    """Results as a terminal shows them."""
    from regauge.models.summary import format_columns

    rows = [("", "check", "error", "allowed", "control", "")]
    general = [f for f in results.findings if f.id.startswith(GENERAL_PREFIXES) and f.holds]
    for f in results.findings:
        if f not in general or verbose:
            rows.append(
                (
                    format_verdict(f),
                    f.id,
                    _format_number(f.value),
                    _format_number(f.floor),
                    _format_number(f.ceiling),
                    "" if f.holds else f.sentence,
                )
            )
    if general and not verbose:
        rows.append(
            ("holds", f"{len(general)} of networks in general (-v lists them)", "", "", "", "")
        )
    held, told = (
        sum(f.holds is True for f in results.findings),
        sum(f.holds is not None for f in results.findings),
    )
    lines = [results.title, "", format_columns(rows, right=(2, 3, 4)), ""]
    lines += [f"not checked: {text}" for text in results.unchecked]
    last = f"{held} of {told} checks hold"
    last += f"; {len(results.inconclusive)} cannot be told" if results.inconclusive else ""
    last += f"; {len(results.failed)} FAILED" if results.failed else ""
    return "\n".join([*lines, last])


def _format_number(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"
