"""`regauge barrier`: the loss on the straight line between two models, unmatched and matched."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regauge.cli import options, sample
from regauge.cli.console import info, step_bar
from regauge.cli.run import check_outputs, deliver, facts_of_run, set_threads
from regauge.results.text import format_verdict

if TYPE_CHECKING:
    from regauge.results.findings import Results


def barrier(
    a: Annotated[
        str,
        typer.Argument(metavar="A", help="Folder, .safetensors file or hub id (owner/name)."),
    ],
    b: Annotated[
        str, typer.Argument(metavar="B", help="Another model of the same class and size.")
    ],
    data: Annotated[
        str,
        typer.Option(
            "--data",
            metavar="URI",
            help="npz, parquet, csv, tsv, txt, jsonl, a folder of images or a hub id.",
        ),
    ],
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
            "--points", min=3, max=1001, metavar="N", help="Points of the path, ends included."
        ),
    ] = 11,
    do_match: Annotated[
        bool, typer.Option("--match/--no-match", help="Also measure after matching A to B.")
    ] = True,
    self_written: sample.SelfWritten = False,
    element: Annotated[
        Path | None,
        typer.Option(
            "-g", "--element", metavar="G", help="Move A by this element instead of matching."
        ),
    ] = None,
    fold: Annotated[
        bool,
        typer.Option(
            "--fold/--no-fold",
            help="Fold norms first, so that the stream can be rotated. Unties heads.",
        ),
    ] = True,
    plane: Annotated[
        bool,
        typer.Option("--plane", help="Also measure the plane through A, B and the moved A."),
    ] = False,
    grid: Annotated[
        int,
        typer.Option("--grid", min=3, max=101, metavar="N", help="Points per side of that plane."),
    ] = 9,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate/--no-calibrate",
            help="Also measure with a temperature fitted at each point.",
        ),
    ] = True,
    batch: options.Batch = 16,
    json: options.JsonFile = None,
    report: options.Report = None,
    seed: Annotated[int, options.seed_option("Seed of the sample.")] = 0,
    device: options.Device = "cpu",
    threads: options.Threads = None,
    verbose: options.Verbose = 0,
) -> int:
    """Measure loss and accuracy on the straight line between two models, before and after matching.
    The barrier is the largest excess, inside the path, over the straight line between the losses of
    the two ends. Exit code 3 if moving A changed what it computes.
    """
    started = time.monotonic()
    check_outputs(json, report)
    if self_written and (element is not None or not do_match):
        raise typer.BadParameter("--self-written requires matching: drop --element and --no-match")
    source = sample.Sample(data, field, split, tokenizer, length, mean, std)

    from regauge.checkpoints.element_files import load_element
    from regauge.checkpoints.reader import open_checkpoint
    from regauge.matching.activations import generate_text
    from regauge.matching.barriers import require_interpolable
    from regauge.matching.connectivity import align_by_activations, align_by_weights, connect
    from regauge.models.load import load_empty, load_model

    set_threads(threads)
    checkpoints = [open_checkpoint(source) for source in (a, b)]
    # Before the weights are loaded, so that unreadable data fail at once.
    examples, task = source.read(load_empty(checkpoints[0]), checkpoints[0])
    info(f"loading {a} and {b}")
    first, second = (load_model(c, "float32").to(device) for c in checkpoints)
    require_interpolable(first.state_dict(), second.state_dict(), (a, b))
    aligner: Any = align_by_weights if do_match else None
    if element is not None:
        aligner = partial(_load_given_element, load_element, element)
    elif self_written:
        info("A and B generate the text to match them on")
        aligner = align_by_activations(first, second, generate_text([first, second], seed=seed))
    with step_bar("barrier") as progress:
        results = connect(
            first,
            second,
            examples,
            samples=samples,
            points=points,
            aligner=aligner,
            label="matched" if element is None else "moved",
            fold=fold,
            grid=grid if plane else 0,
            calibrate=calibrate,
            batch_size=batch,
            seed=seed,
            device=device,
            progress=progress,
        )
    facts = {
        **facts_of_run(),
        "A": a,
        "B": b,
        "data": data,
        "task": task,
        "matched by": "self-written text" if self_written else "weights",
        **results.facts,
        "seconds": round(time.monotonic() - started, 1),
    }
    results = replace(results, facts=facts)
    return deliver(results, text_of(results), json, report)


def text_of(results: Results) -> str:
    """Format results for a terminal: one line per path, and the checks."""
    from regauge.models.summary import format_columns

    (table,) = results.tables
    rows = [
        table.columns,
        *(
            tuple("" if c is None else c if isinstance(c, str) else f"{c:.4f}" for c in row)
            for row in table.rows
        ),
    ]
    lines = [
        f"{results.facts['class']}: the loss on the straight line from A to B",
        "",
        format_columns(rows, right=tuple(range(1, len(table.columns)))),
        "",
    ]
    lines += [f"barrier: {results.facts['barrier']}, in nats", *map(str, results.facts["notes"])]
    for f in results.findings:
        if f.holds is not None:
            lines.append(
                f"{format_verdict(f)}  {f.statement.lower()[0] + f.statement[1:]} (change "
                f"{f.value:.1e}, allowed {f.floor:.0e})"
            )
    return "\n".join(lines)


def _load_given_element(load: Any, path: Path, spec: Any, *_: Any) -> Any:
    """Load an element in place of matching."""
    return load(path, spec)
