"""`regauge merge`: merge several models, by a recipe or by the options."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regauge.cli import options, sample
from regauge.cli.console import info, print_json, print_result, step_bar, warn
from regauge.cli.parsers import parse_settings, parse_size
from regauge.cli.run import start_run

if TYPE_CHECKING:
    from regauge.merging.api import MergeResult


def merge(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE.yaml | A B ...",
            help="Recipe, or the models: folders, files or hub ids.",
        ),
    ],
    out: Annotated[Path, typer.Option("-o", "--output", metavar="OUT", help="New folder.")],
    method: Annotated[
        str | None,
        typer.Option(
            "--method",
            metavar="M",
            help="linear (default), slerp, ties, ...; all in docs/guides/merge-methods.md.",
        ),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            "--base",
            metavar="X",
            help="Base model, for methods that add differences from one.",
        ),
    ] = None,
    weight: Annotated[
        list[float] | None,
        typer.Option(
            "--weight",
            metavar="W",
            help="Weight of each model, in order; a single weight applies to all. Default: 1.",
        ),
    ] = None,
    parameter: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Parameter of the method: density=0.5, t=0.3, ... Repeatable.",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            metavar="D",
            help="Dtype of the output. Default: that of the base or of A.",
            rich_help_panel=options.ADVANCED,
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer",
            metavar="base|union|MODEL",
            help="Vocabulary of the output, if vocabularies differ.",
        ),
    ] = None,
    chat_template: Annotated[
        str | None,
        typer.Option(
            "--chat-template",
            metavar="auto|chatml|FILE",
            help="Chat template of the output; auto: the models' most common. Default: the base's.",
            rich_help_panel=options.ADVANCED,
        ),
    ] = None,
    align: Annotated[
        bool,
        typer.Option("--align", help="Align every model with the base, or with A, before merging."),
    ] = False,
    refine: Annotated[
        str | None,
        typer.Option(
            "--refine",
            metavar="URI|self|noise",
            help="Refine the alignment by gradient descent on unlabelled data, on text that the "
            "models generate (self), or on noise.",
        ),
    ] = None,
    refine_steps: options.RefineSteps = 200,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            metavar="URI",
            help="Data for fisher, regmean and ot_acts. Labelled data also measure the result.",
        ),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            "--samples",
            min=1,
            metavar="N",
            help="Examples of the data to use. Default: 256; of --refine: 64.",
            rich_help_panel=options.ADVANCED,
        ),
    ] = None,
    labels: Annotated[
        bool,
        typer.Option(
            "--labels",
            help="fisher: use the data's labels, not the model's predictions.",
            rich_help_panel=options.ADVANCED,
        ),
    ] = False,
    field: sample.Field = None,
    split: Annotated[
        str | None,
        typer.Option(
            "--split",
            metavar="S",
            help="Split of a hub dataset. Default: test.",
            rich_help_panel=options.DATA,
        ),
    ] = None,
    data_tokenizer: Annotated[
        str | None,
        typer.Option(
            "--data-tokenizer",
            metavar="FILE",
            help="Tokenizer file, for texts. Default: the one beside each model.",
            rich_help_panel=options.DATA,
        ),
    ] = None,
    length: sample.Length = None,
    mean: sample.Mean = None,
    std: sample.Std = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Merge unaligned, even if the models do not share a basis or are of different "
            "kinds.",
        ),
    ] = False,
    seed: Annotated[int, options.seed_option("Seed of randomized methods.")] = 0,
    shard_size: Annotated[
        str,
        typer.Option(
            "--shard-size",
            metavar="SIZE",
            help="Largest size of an output file: 500MB, 2GB.",
            rich_help_panel=options.ADVANCED,
        ),
    ] = "2GB",
    resume: Annotated[
        bool,
        typer.Option(
            "--resume/--anew",
            help="Resume an interrupted run of the same merge, or start over.",
            rich_help_panel=options.ADVANCED,
        ),
    ] = True,
    dry_run: options.DryRun = False,
    json: options.Json = False,
    threads: options.Threads = None,
    verbose: options.Verbose = 0,
) -> int:
    """Merge models with mergekit's recipes and methods.

    Merges tensor by tensor. Checks first whether the models share a basis; --align aligns those
    that do not.
    """
    started = time.monotonic()
    shard_bytes = parse_size(shard_size, "--shard-size")
    is_recipe = len(models) == 1 and models[0].lower().endswith((".yaml", ".yml"))
    if is_recipe and any(
        value is not None
        for value in (method, base, weight, parameter, dtype, tokenizer, chat_template, data)
    ):
        raise typer.BadParameter(
            "the recipe defines the merge: set --method, --base, --weight, --set, --dtype, "
            "--tokenizer, --chat-template or --data there"
        )
    if not is_recipe and len(models) < 2 and base is None:
        raise typer.BadParameter("pass two or more models, or a recipe (RECIPE.yaml)")
    if weight is not None and len(weight) not in (1, len(models)):
        raise typer.BadParameter(
            f"must be one weight, or one per model, got {len(weight)} for {len(models)} models",
            param_hint="--weight",
        )
    about_data = {
        "--samples": samples,
        "--labels": labels or None,
        "--field": field,
        "--split": split,
        "--data-tokenizer": data_tokenizer,
        "--length": length,
        "--mean": mean,
        "--std": std,
    }
    passed = [name for name, value in about_data.items() if value is not None]
    if passed and data is None and refine is None:
        raise typer.BadParameter(f"{passed[0]} requires --data or --refine")
    if refine is not None and not align:
        raise typer.BadParameter("--refine requires --align")
    reading = (field, split or "test", data_tokenizer, length, mean, std, samples)
    source = sample.read_optional(data, *reading, labels)
    unlabelled = sample.read_optional(refine, *reading)
    start_run(threads=threads)
    import regauge
    from regauge.checkpoints.allocator import reuse_memory
    from regauge.checkpoints.files import format_bytes
    from regauge.cli.write import write_output

    with step_bar("merge") as progress:
        result = regauge.merge(
            Path(models[0]) if is_recipe else models,
            method=method,
            base=base,
            weights=weight,
            align=align,
            refine=unlabelled,
            data=source,
            options=regauge.MergeOptions(
                parameters=parse_settings(parameter),
                dtype=dtype,
                tokenizer=tokenizer,
                chat_template=chat_template,
                seed=seed,
                force=force,
                refine_steps=refine_steps,
                shard_bytes=shard_bytes,
            ),
            out=out,
            resume=resume,
            dry_run=dry_run,
            progress=progress,
        )
    _report_verdicts(result)
    report = result.to_dict() | {"dry_run": dry_run}
    if dry_run:
        size = format_bytes(report["bytes"])
        info(f"dry run: {report['tensors']} tensors, {size}, would be written to {out}")
    else:
        reuse_memory()
        written, seconds = write_output(
            out,
            "merging",
            partial(result.save, resume=resume, threads=threads),
            f", by {report['method']} of {len(report['models'])} models",
            started,
        )
        report |= {
            "nonfinite": list(written.nonfinite),
            "resumed": sorted(written.resumed),
            "seconds": seconds,
        }
        report |= _measure(result, out, json)
    for warning in result.warnings:  # last, to be seen
        warn(warning)
    if json:
        print_json(report)
    return 0


def _measure(result: MergeResult, out: Path, json: bool) -> dict[str, Any]:
    """Measure the output beside its inputs, if there are labelled data, and print the table."""
    from regauge.errors import DataError

    if result.recipe.data is None:
        return {}
    with step_bar("evaluate") as progress:
        try:
            evaluation = result.evaluate(out, progress=progress)
        except DataError as error:
            warn(f"the result was not measured: {error}")
            return {}
    if not json:
        print_result(str(evaluation))
    if all(evaluation.is_worse(str(out), name) for name in result.job.models):
        warn(f"{out} is worse than each of the models that it was merged from")
    return {"evaluation": {name: score.to_dict() for name, score in evaluation.scores.items()}}


def _report_verdicts(result: MergeResult) -> None:
    """Print notes, and for each model whether it shares the basis, and how it was aligned."""
    for note in result.recipe.notes:
        warn(f"{result.recipe.origin}, {note}")
    for v in result.verdicts:
        if not v.shared and result.recipe.align is None and result.options.force:
            warn(f"{v.model} and {v.anchor} {v.words}; merged unaligned, by force")
        else:
            info(f"{v.model} and {v.anchor}{'' if v.seen == 'a sample' else ':'} {v.words}")
    for note in result.job.notes:
        info(note)
    for v in result.verdicts:
        if v.moved:
            info(f"{v.model} was {v.moved}")
