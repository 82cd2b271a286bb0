"""`regauge barrier`: the loss on the straight line between two models, unmatched and matched."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from regauge.cli import options, sample
from regauge.cli.console import step_bar
from regauge.cli.run import deliver, facts_of_run, start_run


def barrier(
    a: Annotated[
        str,
        typer.Argument(metavar="A", help="Folder, .safetensors file or hub id (owner/name)."),
    ],
    b: Annotated[
        str, typer.Argument(metavar="B", help="Another model of the same class and size.")
    ],
    data: sample.Data,
    field: sample.Field = None,
    split: sample.Split = "test",
    samples: Annotated[
        int | None,
        typer.Option("--samples", min=5, metavar="N", help="Examples to measure on. Default: all."),
    ] = None,
    tokenizer: sample.Tokenizer = None,
    length: sample.Length = None,
    mean: sample.Mean = None,
    std: sample.Std = None,
    points: Annotated[
        int,
        typer.Option(
            "--points",
            min=3,
            max=1001,
            metavar="N",
            help="Points of the path, ends included.",
            rich_help_panel=options.ADVANCED,
        ),
    ] = 11,
    align: Annotated[
        options.AlignKind,
        typer.Option(
            "--align",
            help="Also measure after matching A to B: by the weights, by text that both generate "
            "(self), or as match does (auto). none: the unaligned path only.",
        ),
    ] = options.AlignKind.auto,
    element: Annotated[
        Path | None,
        typer.Option(
            "-g", "--element", metavar="G", help="Move A by this element instead of matching."
        ),
    ] = None,
    stream: options.Stream = options.StreamKind.auto,
    plane: Annotated[
        bool,
        typer.Option(
            "--plane",
            help="Also measure the plane through A, B and the moved A.",
            rich_help_panel=options.ADVANCED,
        ),
    ] = False,
    grid: Annotated[
        int,
        typer.Option(
            "--grid",
            min=3,
            max=101,
            metavar="N",
            help="Points per side of that plane.",
            rich_help_panel=options.ADVANCED,
        ),
    ] = 9,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate/--no-calibrate",
            help="Also measure with a temperature fitted at each point.",
            rich_help_panel=options.ADVANCED,
        ),
    ] = True,
    batch: options.Batch = 16,
    json: options.JsonFile = None,
    report: options.Report = None,
    seed: Annotated[int, options.seed_option("Seed of the sample of --data.")] = 0,
    device: options.Device = "cpu",
    threads: options.Threads = None,
    verbose: options.Verbose = 0,
) -> int:
    """Measure the loss on the straight line between two models.

    Measures loss and accuracy before and after matching. The barrier is the largest excess,
    inside the path, over the straight line between the losses of the two ends. Exit code 3 if
    moving A changed what it computes.
    """
    source = sample.read_options(data, field, split, tokenizer, length, mean, std)
    start_run(json, report, threads=threads)
    import regauge

    with step_bar("barrier") as progress:
        result = regauge.barrier(
            a,
            b,
            source,
            align=element or (None if align.value == "none" else align.value),
            stream=stream.value,
            options=regauge.BarrierOptions(
                points=points,
                samples=samples,
                grid=grid if plane else 0,
                calibrate=calibrate,
                batch_size=batch,
                seed=seed,
                device=device,
            ),
            facts=facts_of_run(),
            progress=progress,
        )
    return deliver(result.results, str(result), json, report)
