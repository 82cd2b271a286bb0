"""`regauge match` and `regauge compare`: align one model with another, or measure whether they
share a basis.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regauge.cli import options, sample
from regauge.cli.console import info, output_progress, step_bar
from regauge.cli.pair import parse_layers, parse_names, parse_weights, report_discoveries
from regauge.cli.run import check_outputs, deliver, facts_of_run, set_threads

if TYPE_CHECKING:
    from regauge.data.sources import DataSource


ModelA = Annotated[
    str,
    typer.Argument(metavar="A", help="Model to align: a folder, a .safetensors file or a hub id."),
]
ModelB = Annotated[str, typer.Argument(metavar="B", help="Model to align to.")]
FirstModel = Annotated[
    str, typer.Argument(metavar="A", help="First model: a folder, a .safetensors file or a hub id.")
]
SecondModel = Annotated[str, typer.Argument(metavar="B", help="Second model.")]
Spaces = Annotated[
    str | None,
    typer.Option(
        "--spaces",
        metavar="A,B",
        help="Spaces to match: stream, head, qk, vo, ffn, ... Default: all.",
        rich_help_panel=options.ADVANCED,
    ),
]
Layers = Annotated[
    str | None,
    typer.Option(
        "--layers",
        metavar="0-5,11",
        help="Layers to match, of spaces that belong to a layer. Default: all.",
        rich_help_panel=options.ADVANCED,
    ),
]
Group = Annotated[
    options.GroupKind,
    typer.Option("--group", help="Largest group to search; orthogonal: rotations of heads."),
]
Anchors = Annotated[
    str | None,
    typer.Option(
        "--anchors",
        metavar="A,B",
        help="Tensors for the first estimate of a space; * is a wildcard.",
        rich_help_panel=options.ADVANCED,
    ),
]
Weight = Annotated[
    list[str] | None,
    typer.Option(
        "--weight",
        metavar="NAME=W",
        help="Weight of a tensor, 1 otherwise; * is a wildcard. Repeatable.",
        rich_help_panel=options.ADVANCED,
    ),
]
Sweeps = Annotated[
    int,
    typer.Option(
        "--sweeps",
        min=0,
        metavar="N",
        help="Largest number of sweeps after the first pass.",
        rich_help_panel=options.ADVANCED,
    ),
]
SharedTokens = Annotated[
    bool,
    typer.Option(
        "--shared-tokens",
        help="Match by the shared tokens of two different vocabularies.",
        rich_help_panel=options.ADVANCED,
    ),
]


def match(
    a: ModelA,
    b: ModelB,
    out: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            metavar="OUT",
            help="New folder for the aligned A and match.json.",
        ),
    ],
    spaces: Spaces = None,
    layers: Layers = None,
    stream: options.Stream = options.StreamKind.auto,
    group: Group = options.GroupKind.full,
    method: Annotated[
        str | None,
        typer.Option(
            "--preset",
            metavar="NAME",
            help="A published method in place of the options of the search: git-re-basin or "
            "rotation-symmetry.",
            rich_help_panel=options.ADVANCED,
        ),
    ] = None,
    anchors: Anchors = None,
    weight: Weight = None,
    rescale: Annotated[
        bool,
        typer.Option(
            "--rescale",
            help="With --group orthogonal: also one factor per head.",
            rich_help_panel=options.ADVANCED,
        ),
    ] = False,
    sweeps: Sweeps = 10,
    nearest: Annotated[
        bool,
        typer.Option(
            "--nearest/--anchored",
            help="Refit the stream in sweeps; or keep its first estimate where token tables "
            "determine it.",
            rich_help_panel=options.ADVANCED,
        ),
    ] = True,
    shared_tokens: SharedTokens = False,
    self_written: sample.SelfWritten = False,
    sample_data: Annotated[
        str | None,
        typer.Option(
            "--data",
            metavar="URI",
            help="Match by activations on a sample of data. Default: by the weights.",
        ),
    ] = None,
    samples: Annotated[
        int,
        typer.Option(
            "--samples",
            min=1,
            metavar="N",
            help="Examples of the sample, or texts to generate.",
            rich_help_panel=options.ADVANCED,
        ),
    ] = 64,
    field: sample.Field = None,
    split: sample.Split = "test",
    tokenizer: sample.Tokenizer = None,
    length: sample.Length = None,
    mean: sample.Mean = None,
    std: sample.Std = None,
    seed: Annotated[int, options.seed_option("Seed of the sample.")] = 0,
    refine: Annotated[
        str | None,
        typer.Option(
            "--refine",
            metavar="URI|self|noise",
            help="Refine the element by gradient descent on unlabelled data, on text that the "
            "models generate (self), or on noise.",
        ),
    ] = None,
    refine_steps: Annotated[
        int,
        typer.Option(
            "--refine-steps",
            min=1,
            metavar="N",
            help="Steps of the refinement.",
            rich_help_panel=options.ADVANCED,
        ),
    ] = 200,
    workers: Annotated[
        int,
        typer.Option(
            "--workers",
            min=1,
            metavar="N",
            help="Worker processes of the search.",
            rich_help_panel=options.ADVANCED,
        ),
    ] = 1,
    test: Annotated[
        str | None,
        typer.Option(
            "--test",
            metavar="URI",
            help="Labelled data, or a text, on which to evaluate A, OUT, B and their averages.",
            rich_help_panel=options.DATA,
        ),
    ] = None,
    save_element: Annotated[
        Path | None,
        typer.Option("--save-element", metavar="F", help="New file for the element."),
    ] = None,
    spec: options.SpecFile = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume an interrupted run of the same match.")
    ] = False,
    dry_run: options.DryRun = False,
    json: options.JsonFile = None,
    report: options.Report = None,
    threads: options.Threads = None,
    verbose: options.Verbose = 0,
) -> int:
    """Align model A with model B, without changing what A computes.

    Writes A in the basis nearest to B and with B's norms; B stays as it is. Any merging tool can
    take the result.
    """
    started = time.monotonic()
    if self_written and sample_data is not None:
        raise typer.BadParameter("pass either --data or --self-written, not both")
    check_outputs(json, report)
    import regauge
    from regauge.checkpoints.files import format_bytes
    from regauge.cli.write import report_written, summary
    from regauge.matching.presets import preset

    set_threads(threads)
    chosen = regauge.MatchOptions(
        spaces=parse_names(spaces),
        layers=parse_layers(layers),
        stream=stream.value,
        within=group.value,
        weights=parse_weights(weight) or None,
        anchors=parse_names(anchors),
        sweeps=sweeps,
        nearest=nearest,
        rescale=rescale,
        workers=workers,
        samples=samples,
        seed=seed,
        refine_steps=refine_steps,
    )
    if method is not None:
        if chosen.for_search() != regauge.MatchOptions(workers=workers).for_search():
            raise typer.BadParameter("--preset replaces the options of the search: drop them")
        chosen = replace(
            preset(method), workers=workers, samples=samples, seed=seed, refine_steps=refine_steps
        )
    read = partial(_read_options, field, split, tokenizer, length, mean, std)
    tested = None
    if test is not None:
        tested = sample.read_options(test, field, split, tokenizer, length, mean, std)
        tested.open()  # so that unreadable data fail before the search
    with step_bar("match") as progress:
        result = regauge.match(
            a,
            b,
            spec=spec,
            shared_tokens=shared_tokens,
            data="self" if self_written else read(sample_data),
            refine=read(refine),
            options=chosen,
            out=out,
            outputs=[path for path in (save_element,) if path is not None],
            resume=None if dry_run else resume,
            facts=facts_of_run(),
            progress=progress,
        )
    report_discoveries(result.pair.discoveries)
    refined = result.refined
    if refined is not None:
        info(
            f"refined in {refined.best_step} of {refine_steps} steps: divergence from the ends "
            f"{refined.initial_loss:.4f}, now {refined.loss:.4f}"
        )
    if not dry_run:
        with output_progress(out, "matching") as progress:
            written = result.save(out, resume=resume, threads=threads, progress=progress)
        report_written(written)
        info(
            f"wrote {out}: {format_bytes(written.bytes)} in {time.monotonic() - started:.1f} s; "
            f"transforms {summary(result.element)}"
        )
        if save_element is not None:
            result.save_element(save_element)
    results, text = result.results, str(result)
    if tested is not None and not dry_run:
        with step_bar("evaluate") as progress:
            evaluation = result.evaluate(out, tested, progress=progress)
        text += f"\n\n{evaluation}"
        results = replace(results, tables=(*evaluation.results.tables, *results.tables))
    return deliver(results, text, json, report)


def _read_options(
    field: list[str] | None,
    split: str,
    tokenizer: str | None,
    length: int | None,
    mean: str | None,
    std: str | None,
    uri: str | None,
) -> DataSource | str | None:
    """Return the data that an option names; `self` and `noise` stand for generated inputs."""
    if uri is None or uri in {"self", "noise"}:
        return uri
    return sample.read_options(uri, field, split, tokenizer, length, mean, std)


def compare(
    a: FirstModel,
    b: SecondModel,
    spaces: Spaces = None,
    stream: options.Stream = options.StreamKind.auto,
    group: Group = options.GroupKind.full,
    sweeps: Sweeps = 3,
    deep: Annotated[
        bool,
        typer.Option(
            "--deep", help="Also match models that already share a basis, with a control."
        ),
    ] = False,
    shared_tokens: SharedTokens = False,
    spec: options.SpecFile = None,
    seed: Annotated[int, options.seed_option("Seed of the control.")] = 0,
    json: options.JsonFile = None,
    report: options.Report = None,
    threads: options.Threads = None,
    verbose: options.Verbose = 0,
) -> int:
    """Check whether two models share a basis.

    Compares them directly and after matching. Check this before merging.
    """
    check_outputs(json, report)
    import regauge

    set_threads(threads)
    with step_bar("compare") as progress:
        result = regauge.compare(
            a,
            b,
            spec=spec,
            shared_tokens=shared_tokens,
            options=regauge.MatchOptions(
                spaces=parse_names(spaces),
                stream=stream.value,
                within=group.value,
                sweeps=sweeps,
            ),
            deep=deep,
            seed=seed,
            facts=facts_of_run(),
            progress=progress,
        )
    report_discoveries(result.pair.discoveries)
    return deliver(result.results, str(result), json, report)
