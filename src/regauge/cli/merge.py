"""`regauge merge`: merge several models, by a recipe or by the options."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regauge.cli import options, sample
from regauge.cli.console import info, print_json, step_bar, warn

if TYPE_CHECKING:
    from regauge.merging.engine import Merge
    from regauge.merging.recipes import Recipe

VERSION = 1


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
            help="linear (default), slerp, ties, ...; all in docs/merge.md.",
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
            help="Weight of a model, in their order; once: for each. Default: 1.",
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
    align: Annotated[
        bool,
        typer.Option("--align", help="Align every model with the base, or with A, before merging."),
    ] = False,
    data: Annotated[
        str | None,
        typer.Option("--data", metavar="URI", help="Data for fisher, regmean and ot_acts."),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            "--samples", min=1, metavar="N", help="Examples of the data to use. Default: 256."
        ),
    ] = None,
    labels: Annotated[
        bool,
        typer.Option(
            "--labels", help="fisher: use the data's labels, not the model's predictions."
        ),
    ] = False,
    field: sample.Field = None,
    split: Annotated[
        str | None,
        typer.Option("--split", metavar="S", help="Split of a hub dataset. Default: test."),
    ] = None,
    data_tokenizer: Annotated[
        str | None,
        typer.Option(
            "--data-tokenizer",
            metavar="FILE",
            help="Tokenizer file, for texts. Default: the one beside each model.",
        ),
    ] = None,
    length: sample.Length = None,
    mean: sample.Mean = None,
    std: sample.Std = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Merge models that share no basis, or of different kinds, unaligned."
        ),
    ] = False,
    seed: Annotated[int, options.seed_option("Seed of randomized methods.")] = 0,
    shard_size: Annotated[
        str,
        typer.Option(
            "--shard-size",
            metavar="SIZE",
            help="Largest size of an output file: 500MB, 2GB.",
        ),
    ] = "2GB",
    resume: Annotated[
        bool,
        typer.Option(
            "--resume/--anew",
            help="Resume an interrupted run of the same merge, or start over.",
        ),
    ] = True,
    dry_run: options.DryRun = False,
    json: options.Json = False,
    threads: options.Threads = None,
    verbose: options.Verbose = 0,
) -> int:
    """Merge models tensor by tensor, with mergekit's recipes and methods. Checks first whether the
    models share a basis.
    """
    started = time.monotonic()
    shard_bytes = _parse_size(shard_size)
    is_recipe = len(models) == 1 and models[0].lower().endswith((".yaml", ".yml"))
    if is_recipe and any(
        value is not None for value in (method, base, weight, parameter, dtype, tokenizer)
    ):
        raise typer.BadParameter(
            "the recipe defines the merge: set --method, --base, --weight, --set, --dtype or "
            "--tokenizer there"
        )
    data_section = _build_data_section(
        data, samples, labels, field, split, data_tokenizer, length, mean, std
    )
    if is_recipe and data_section:
        raise typer.BadParameter(
            "the recipe defines the data: write data: there, instead of --data"
        )
    from dataclasses import replace

    from regauge.checkpoints.allocator import reuse_memory
    from regauge.checkpoints.files import format_bytes
    from regauge.checkpoints.plan import check_new
    from regauge.cli.run import set_threads
    from regauge.cli.write import write_moved
    from regauge.merging.engine import align as align_models
    from regauge.merging.engine import open_merge, plan_merge, require_basis, serialize_inputs
    from regauge.merging.methods import METHODS
    from regauge.merging.recipe_yaml import read_recipe
    from regauge.merging.recipes import AlignConfig
    from regauge.merging.state_store import MergeStateStore
    from regauge.models.sources import require_unlocked

    recipe = (
        read_recipe(Path(models[0]))
        if is_recipe
        else _build_recipe(
            models, method, base, weight, parameter, dtype, tokenizer, align, data_section
        )
    )
    if align and recipe.align is None:
        recipe = replace(recipe, align=AlignConfig(), text=f"{recipe.text.rstrip()}\nalign: true\n")
    for note in recipe.notes:
        warn(f"{recipe.origin}, {note}")
    check_new(out)
    job = open_merge(recipe, seed=seed, force=force)
    for model in job.models.values():
        require_unlocked(model.checkpoint)
    plan_merge(job, out, shard_bytes=shard_bytes)  # rejects a bad output before anything is read
    set_threads(threads)
    needs_data = METHODS[recipe.method].statistic or METHODS[recipe.method].is_transport
    if needs_data:
        from regauge.merging.data_pass import collect_statistics, open_samples

        samples_by_model = open_samples(job)
        digests = tuple(dataset.digest for _, dataset in samples_by_model.values())
        job = replace(job, digests=digests)
    state = None if dry_run else MergeStateStore(out, serialize_inputs(job))
    with step_bar("basis") as progress:
        job = require_basis(job, state, progress)
    _report_verdicts(job)
    with step_bar("align") as progress:
        job = align_models(job, state, progress)
    if needs_data and state is not None:
        with step_bar("statistics") as progress:
            job = collect_statistics(job, samples_by_model, out, state, progress)
        for note in job.notes:
            info(note)
    for verdict in job.verdicts.values():
        if verdict.moved:
            (warn if "still far" in verdict.moved else info)(f"{verdict.model} was {verdict.moved}")
    plan, thunks = plan_merge(job, out, shard_bytes=shard_bytes)
    report: dict[str, Any] = {
        "version": VERSION,
        "command": "merge",
        "method": recipe.method,
        "models": list(job.models),
        "base": recipe.base,
        "out": str(out),
        "tensors": len(thunks),
        "bytes": plan.size,
        "files": [f.name for f in plan.files],
        "basis": [v.to_dict() for v in job.verdicts.values()],
        "seed": seed,
        "dry_run": dry_run,
    }
    if dry_run:
        info(
            f"dry run: {len(thunks)} tensors, {format_bytes(plan.size)}, would be written to {out}"
        )
    else:
        set_threads(1)  # tensors are computed in parallel, each by one thread
        reuse_memory()
        written = write_moved(out, plan, thunks, "merging", resume, threads)
        if state is not None:
            state.delete()
        seconds = time.monotonic() - started
        info(
            f"wrote {out}: {format_bytes(written.bytes)} in {seconds:.1f} s, by {recipe.method} of "
            f"{len(job.models)} models"
        )
        report |= {
            "nonfinite": list(written.nonfinite),
            "resumed": sorted(written.resumed),
            "seconds": round(seconds, 3),
        }
    if json:
        print_json(report)
    return 0


def _report_verdicts(merge: Merge) -> None:
    """Print for each model whether it shares the basis."""
    for verdict in merge.verdicts.values():
        if not verdict.shared and merge.recipe.align is None and merge.force:
            warn(
                f"{verdict.model} and {verdict.anchor} {verdict.words}; merged unaligned, by force"
            )
        elif verdict.seen == "a sample":
            info(f"{verdict.model} and {verdict.anchor} {verdict.words}")
        else:
            info(f"{verdict.model} and {verdict.anchor}: {verdict.words}")


def _build_recipe(
    models: list[str],
    method: str | None,
    base: str | None,
    weight: list[float] | None,
    parameter: list[str] | None,
    dtype: str | None,
    tokenizer: str | None,
    align: bool,
    data_section: dict[str, Any],
) -> Recipe:
    """Return the recipe that the options stand for, as text that can be run again."""
    if len(models) < 2 and base is None:
        raise typer.BadParameter("pass two or more models, or a recipe (RECIPE.yaml)")
    weights = (weight or [1.0]) * (len(models) if len(weight or [1.0]) == 1 else 1)
    if len(weights) != len(models):
        raise typer.BadParameter(
            f"must be one weight, or one per model, got {len(weights)} for {len(models)} models",
            param_hint="--weight",
        )
    import yaml

    from regauge.merging.methods import METHODS
    from regauge.merging.recipe_yaml import parse_recipe

    method_name = method or "linear"
    if base is None and method_name == "slerp" and len(models) == 2:
        base = models[0]
    is_weighted = method_name in METHODS and "weight" in METHODS[method_name].per_model
    entries = [
        {"model": m, **({"parameters": {"weight": w}} if is_weighted else {})}
        for m, w in zip(models, weights, strict=True)
        if m != base or not is_weighted
    ]
    if is_weighted and not METHODS[method_name].needs_base and base in models:
        entries = [
            {"model": m, "parameters": {"weight": w}} for m, w in zip(models, weights, strict=True)
        ]
    if weight is not None and not is_weighted and method_name in METHODS:
        raise typer.BadParameter(f"{method_name} takes no weights", param_hint="--weight")
    document: dict[str, Any] = {"merge_method": method_name, "models": entries}
    settings = _parse_settings(parameter)
    document |= {"base_model": base} if base is not None else {}
    document |= {"parameters": settings} if settings else {}
    document |= {"dtype": dtype} if dtype is not None else {}
    document |= {"tokenizer_source": tokenizer} if tokenizer is not None else {}
    document |= {"align": True} if align else {}
    document |= {"data": data_section} if data_section else {}
    return parse_recipe(
        yaml.safe_dump(document, sort_keys=False, allow_unicode=True), "the command line"
    )


def _build_data_section(
    data: str | None,
    samples: int | None,
    labels: bool,
    field: list[str] | None,
    split: str | None,
    tokenizer: str | None,
    length: int | None,
    mean: str | None,
    std: str | None,
) -> dict[str, Any]:
    """Return the options of the data as the section of a recipe."""
    numbers = {
        name: sample.parse_numbers(text, f"--{name}")
        for name, text in (("mean", mean), ("std", std))
    }
    values: dict[str, Any] = {
        "samples": samples,
        "fields": sample.parse_fields(field),
        "split": split,
        "tokenizer": tokenizer,
        "length": length,
    }
    values |= {**numbers, "labels": labels or None}
    section = {name: value for name, value in values.items() if value is not None}
    if section and data is None:
        names = {"fields": "field", "tokenizer": "data-tokenizer"}
        raise typer.BadParameter(
            f"--{names.get(next(iter(section)), next(iter(section)))} requires --data"
        )
    return section if data is None else {"uri": data, **section}


def _parse_settings(pairs: list[str] | None) -> dict[str, Any]:
    """Parse NAME=VALUE parameters of a method."""
    import yaml

    settings: dict[str, Any] = {}
    for text in pairs or ():
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise typer.BadParameter(f"must be NAME=VALUE, got {text!r}", param_hint="--set")
        try:
            settings[name] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise typer.BadParameter(
                f"must be a number or a list of numbers, got {value!r}", param_hint="--set"
            ) from error
    return settings


def _parse_size(text: str) -> int:
    """Parse a size such as 500MB into bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMGT]?)B?", text.strip(), re.IGNORECASE)
    if not match or float(match[1]) <= 0:
        raise typer.BadParameter(
            f"must be a size such as 500MB or 2GB, got {text!r}", param_hint="--shard-size"
        )
    return max(int(float(match[1]) * 1000 ** " kmgt".index(match[2].lower() or " ")), 1)
