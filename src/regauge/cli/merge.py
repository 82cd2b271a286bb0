"""`regauge merge`: several models into one, by a recipe or by the options."""

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
            help="A recipe, or the models: folders, files or hub ids.",
        ),
    ],
    out: Annotated[Path, typer.Option("-o", "--output", metavar="OUT", help="The new folder.")],
    method: Annotated[
        str | None,
        typer.Option(
            "--method",
            metavar="M",
            help="linear (default), slerp, ties, ...; docs/merge.md has all.",
        ),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            "--base",
            metavar="X",
            help="The base model, for methods that add up differences from one.",
        ),
    ] = None,
    weight: Annotated[
        list[float] | None,
        typer.Option(
            "--weight",
            metavar="W",
            help="A model's weight, in their order; once: of each. Default: 1.",
        ),
    ] = None,
    parameter: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="A parameter of the method: density=0.5, t=0.3, ... May be repeated.",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            metavar="D",
            help="The dtype of the output. Default: that of the base or of A.",
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer",
            metavar="base|union|MODEL",
            help="Where vocabularies differ: whose tokens the output has.",
        ),
    ] = None,
    align: Annotated[
        bool,
        typer.Option("--align", help="Move every model next to the base, or to A, before merging."),
    ] = False,
    data: Annotated[
        str | None,
        typer.Option(
            "--data", metavar="URI", help="What fisher, regmean and ot_acts look at the models on."
        ),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            "--samples", min=1, metavar="N", help="Examples that are looked at. Default: 256."
        ),
    ] = None,
    labels: Annotated[
        bool,
        typer.Option(
            "--labels", help="fisher: by the data's labels, not by the model's predictions."
        ),
    ] = False,
    field: sample.Field = None,
    split: Annotated[
        str | None,
        typer.Option(
            "--split", metavar="S", help="The split of a data set of the hub. Default: test."
        ),
    ] = None,
    data_tokenizer: Annotated[
        str | None,
        typer.Option(
            "--data-tokenizer",
            metavar="FILE",
            help="For texts. Default: the one beside each model.",
        ),
    ] = None,
    length: sample.Length = None,
    mean: sample.Mean = None,
    std: sample.Std = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Merge models that share no basis, or of different kinds, as they are."
        ),
    ] = False,
    seed: Annotated[int, options.seed_option("The seed of methods that draw.")] = 0,
    shard_size: Annotated[
        str,
        typer.Option(
            "--shard-size",
            metavar="SIZE",
            help="The size of a file of the output, at most: 500MB, 2GB.",
        ),
    ] = "2GB",
    resume: Annotated[
        bool,
        typer.Option(
            "--resume/--anew",
            help="Go on with what an interrupted run of the same merge has written.",
        ),
    ] = True,
    dry_run: options.DryRun = False,
    json: options.Json = False,
    threads: options.Threads = None,
    verbose: options.Verbose = 0,
) -> int:
    """Merge models into one, tensor by tensor: mergekit's recipes and methods, after asking whether
    the models share a basis at all.
    """
    started = time.monotonic()
    size = _parse_size(shard_size)
    by_file = len(models) == 1 and models[0].lower().endswith((".yaml", ".yml"))
    if by_file and any(
        value is not None for value in (method, base, weight, parameter, dtype, tokenizer)
    ):
        raise typer.BadParameter(
            "the recipe says what is merged and how: write --method, --base, --weight, --set, "
            "--dtype or --tokenizer into it"
        )
    sampled = _build_data_section(
        data, samples, labels, field, split, data_tokenizer, length, mean, std
    )
    if by_file and sampled:
        raise typer.BadParameter(
            "the recipe says what is looked at: write data: into it, in place of --data"
        )
    from dataclasses import replace

    from regauge.checkpoints.files import format_bytes
    from regauge.checkpoints.memory import reuse_memory
    from regauge.checkpoints.plan import check_new
    from regauge.cli.model import require_unlocked
    from regauge.cli.run import set_threads
    from regauge.cli.write import write_moved
    from regauge.merging.engine import align as moved_by
    from regauge.merging.engine import open_merge, plan_merge, require_basis, serialize_inputs
    from regauge.merging.methods import METHODS
    from regauge.merging.recipe_yaml import read_recipe
    from regauge.merging.recipes import AlignConfig
    from regauge.merging.state_store import MergeStateStore

    recipe = (
        read_recipe(Path(models[0]))
        if by_file
        else _build_recipe(
            models, method, base, weight, parameter, dtype, tokenizer, align, sampled
        )
    )
    if align and recipe.align is None:
        recipe = replace(recipe, align=AlignConfig(), text=f"{recipe.text.rstrip()}\nalign: true\n")
    for note in recipe.notes:
        warn(f"{recipe.origin}, {note}")
    check_new(out)
    opened = open_merge(recipe, seed=seed, force=force)
    for model in opened.models.values():
        require_unlocked(model.checkpoint)
    plan_merge(
        opened, out, shard_bytes=size
    )  # an output that cannot be is refused before anything is read
    set_threads(threads)
    looks = METHODS[recipe.method].statistic or METHODS[recipe.method].is_transport
    if looks:
        from regauge.merging.data_pass import collect_statistics, open_samples

        opened_data = open_samples(opened)
        opened = replace(opened, digests=tuple(found.digest for _, found in opened_data.values()))
    kept = None if dry_run else MergeStateStore(out, serialize_inputs(opened))
    with step_bar("basis") as progress:
        opened = require_basis(opened, kept, progress)
    _report_verdicts(opened)
    with step_bar("align") as progress:
        opened = moved_by(opened, kept, progress)
    if looks and kept is not None:
        with step_bar("look") as progress:
            opened = collect_statistics(opened, opened_data, out, kept, progress)
        for note in opened.notes:
            info(note)
    for verdict in opened.verdicts.values():
        if verdict.moved:
            (warn if "still far" in verdict.moved else info)(f"{verdict.model} was {verdict.moved}")
    plan, thunks = plan_merge(opened, out, shard_bytes=size)
    report: dict[str, Any] = {
        "version": VERSION,
        "command": "merge",
        "method": recipe.method,
        "models": list(opened.models),
        "base": recipe.base,
        "out": str(out),
        "tensors": len(thunks),
        "bytes": plan.size,
        "files": [f.name for f in plan.files],
        "basis": [v.to_dict() for v in opened.verdicts.values()],
        "seed": seed,
        "dry_run": dry_run,
    }
    if dry_run:
        info(
            f"dry run: {len(thunks)} tensors, {format_bytes(plan.size)}, would be written to {out}"
        )
    else:
        set_threads(1)  # tensors are computed beside each other, each by one thread
        reuse_memory()
        written = write_moved(out, plan, thunks, "merging", resume, threads)
        if kept is not None:
            kept.delete()
        seconds = time.monotonic() - started
        info(
            f"wrote {out}: {format_bytes(written.bytes)} in {seconds:.1f} s, by {recipe.method} of "
            f"{len(opened.models)} models"
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
    for verdict in merge.verdicts.values():
        if not verdict.shared and merge.recipe.align is None and merge.force:
            warn(
                f"{verdict.model} and {verdict.anchor} {verdict.words}; merged as they are, by "
                "force"
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
    sampled: dict[str, Any],
) -> Recipe:
    """The recipe that the options stand for, as a text that anybody can run again."""
    if len(models) < 2 and base is None:
        raise typer.BadParameter("a merge needs two models, or a recipe (RECIPE.yaml)")
    weights = (weight or [1.0]) * (len(models) if len(weight or [1.0]) == 1 else 1)
    if len(weights) != len(models):
        raise typer.BadParameter(
            f"there are {len(weights)} weights for {len(models)} models", param_hint="--weight"
        )
    import yaml

    from regauge.merging.methods import METHODS
    from regauge.merging.recipe_yaml import parse_recipe

    how = method or "linear"
    if base is None and how == "slerp" and len(models) == 2:
        base = models[0]
    weighted = how in METHODS and "weight" in METHODS[how].per_model
    listed = [
        {"model": m, **({"parameters": {"weight": w}} if weighted else {})}
        for m, w in zip(models, weights, strict=True)
        if m != base or not weighted
    ]
    if weighted and not METHODS[how].needs_base and base in models:
        listed = [
            {"model": m, "parameters": {"weight": w}} for m, w in zip(models, weights, strict=True)
        ]
    if weight is not None and not weighted and how in METHODS:
        raise typer.BadParameter(f"{how} has no weights", param_hint="--weight")
    document: dict[str, Any] = {"merge_method": how, "models": listed}
    settings = _parse_settings(parameter)
    document |= {"base_model": base} if base is not None else {}
    document |= {"parameters": settings} if settings else {}
    document |= {"dtype": dtype} if dtype is not None else {}
    document |= {"tokenizer_source": tokenizer} if tokenizer is not None else {}
    document |= {"align": True} if align else {}
    document |= {"data": sampled} if sampled else {}
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
    """The options of the data as a recipe has them."""
    numbers = {
        name: sample.parse_numbers(text, f"--{name}")
        for name, text in (("mean", mean), ("std", std))
    }
    given: dict[str, Any] = {
        "samples": samples,
        "fields": sample.parse_fields(field),
        "split": split,
        "tokenizer": tokenizer,
        "length": length,
    }
    given |= {**numbers, "labels": labels or None}
    out = {name: value for name, value in given.items() if value is not None}
    if out and data is None:
        names = {"fields": "field", "tokenizer": "data-tokenizer"}
        raise typer.BadParameter(
            f"--{names.get(next(iter(out)), next(iter(out)))} is about --data, which is not given"
        )
    return out if data is None else {"uri": data, **out}


def _parse_settings(given: list[str] | None) -> dict[str, Any]:
    import yaml

    out: dict[str, Any] = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise typer.BadParameter(f"{text!r} is not NAME=VALUE", param_hint="--set")
        try:
            out[name] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise typer.BadParameter(
                f"{value!r} is neither a number nor a list of numbers", param_hint="--set"
            ) from error
    return out


def _parse_size(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMGT]?)B?", text.strip(), re.IGNORECASE)
    if not found or float(found[1]) <= 0:
        raise typer.BadParameter(
            f"{text!r} is no size, as 500MB or 2GB are", param_hint="--shard-size"
        )
    return max(int(float(found[1]) * 1000 ** " kmgt".index(found[2].lower() or " ")), 1)
