"""`regauge verify`: the theorems, checked on the user's own model."""

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


SMALL_MODEL = 5_000_000  # parameters; below, one thread is faster than several
GENERAL_PREFIXES = ("operator/", "optimizer/")


class Dtype(StrEnum):
    """Dtypes to compute in."""

    float64 = "float64"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Optimizer(StrEnum):
    """Optimizers of the training to compare."""

    sgd = "sgd"
    adamw = "adamw"


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
        Optimizer, typer.Option("--optimizer", help="Optimizer of the training.")
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
            "--general/--no-general", help="Also check Theorem 4.7, operator by operator."
        ),
    ] = True,
    optimizers: Annotated[
        bool,
        typer.Option(
            "--optimizers",
            help="Also measure which optimizers preserve which symmetry (half a minute).",
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

    from regauge.cli.model import open_source
    from regauge.models.load import load_model
    from regauge.verification import verify as check
    from regauge.verification.general import add_general_findings

    info(f"loading {model}")
    module = load_model(model, dtype.value if dtype else None).to(device)
    is_small = sum(p.numel() for p in module.parameters()) < SMALL_MODEL
    if threads is not None or is_small:
        torch.set_num_threads(threads or 1)
    arrays = None if inputs is None else read_inputs(inputs, module)
    if spec is not None:
        from regauge.checkpoints.spec_files import load_spec

        model_spec = load_spec(spec)
    else:
        model_spec = open_source(module).spec
    with step_bar("verify") as progress:
        results = check(
            module,
            arrays,
            spec=model_spec,
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
    """Return the facts that identify and repeat a run."""
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
    """Read inputs by name; floating-point ones are cast to the model's dtype."""
    import torch

    try:
        if path.suffix == ".npz":
            from regauge.data.datasets import read_arrays

            tensors = {
                name: torch.from_numpy(array)
                for name, array in read_arrays(path.read_bytes(), str(path)).items()
            }
        else:
            from safetensors.torch import load_file

            tensors = load_file(path)
    # numpy and safetensors raise errors of many kinds for files of other formats
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be read as inputs: {error}",
            hint="pass a .npz or .safetensors file of arrays named like the arguments of forward",
        ) from error
    parameter = next(p for p in module.parameters() if p.is_floating_point())
    return {
        name: value.to(parameter.device, parameter.dtype)
        if value.is_floating_point()
        else value.to(parameter.device)
        for name, value in tensors.items()
    }


def text_of(results: Results, verbose: int = 0) -> str:
    """Format results for a terminal."""
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
        rows.append(("holds", f"{len(general)} general checks (-v lists them)", "", "", "", ""))
    passed = sum(f.holds is True for f in results.findings)
    decided = sum(f.holds is not None for f in results.findings)
    lines = [results.title, "", format_columns(rows, right=(2, 3, 4)), ""]
    lines += [f"not checked: {text}" for text in results.unchecked]
    last = f"{passed} of {decided} checks hold"
    last += f"; {len(results.inconclusive)} inconclusive" if results.inconclusive else ""
    last += f"; {len(results.failed)} FAILED" if results.failed else ""
    return "\n".join([*lines, last])


def _format_number(value: float | None) -> str:
    """Format a number, or nothing for None."""
    return "" if value is None else f"{value:.1e}"
