"""`regauge jigsaw`: train with masked jigsaw puzzles, measure what puzzles do to a model, look at
its positions.
"""

from __future__ import annotations

import math
import time
import warnings
from dataclasses import replace
from enum import StrEnum
from functools import partial
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regauge.cli import options, sample
from regauge.cli.console import info, print_json, step_bar
from regauge.cli.console import print_result as out_data
from regauge.cli.run import check_device, check_outputs, deliver, facts_of_run, set_threads

if TYPE_CHECKING:
    from regauge.results.findings import Results

VERSION = 1

app = typer.Typer(
    name="jigsaw",
    help="Masked Jigsaw Puzzles: train a model of images to mind less where its patches are, "
    "and measure it.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class PuzzlesPer(StrEnum):
    batch = "batch"
    sample = "sample"


class Schedule(StrEnum):
    constant = "constant"
    reference = "reference"


Data = Annotated[
    str,
    typer.Option(
        "--data",
        metavar="URI",
        help="npz, parquet, a folder of images or a hub id: images and labels.",
    ),
]
Seed = Annotated[int, options.seed_option("The seed of all draws.")]
Ratios = Annotated[
    str,
    typer.Option(
        "--ratios", metavar="R,R", help="Shares of patches that are shuffled at inference."
    ),
]
Batch = Annotated[int, typer.Option("--batch-size", min=1, metavar="N", help="Images at a time.")]
Patch = Annotated[
    int | None,
    typer.Option(
        "--patch",
        min=1,
        metavar="N",
        help="For models without patches of their own. Default: the others', or 16.",
    ),
]


@app.callback()
def _root() -> None:
    """Masked Jigsaw Puzzles: train a model of images to mind less where its patches are, and
    measure it.
    """


@app.command()
def train(
    model: options.Model,
    data: Data,
    out: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            metavar="OUT",
            help="A new folder: the plain checkpoint, and what the puzzles learned.",
        ),
    ],
    ratio: Annotated[
        float,
        typer.Option(
            "--ratio", metavar="R", help="The share of patches that are shuffled in training."
        ),
    ] = 0.1,
    variant: Annotated[
        str | None,
        typer.Option(
            "--variant",
            metavar="A-J",
            help="A letter of the paper's Table 2. Default: J, or what fits.",
        ),
    ] = None,
    per: Annotated[
        PuzzlesPer,
        typer.Option(
            "--per", help="One puzzle per batch, as in the paper's code, or one per image."
        ),
    ] = PuzzlesPer.batch,
    probability: Annotated[
        float,
        typer.Option("--probability", metavar="P", help="The share of steps that have puzzles."),
    ] = 0.5,
    warmup: Annotated[
        float,
        typer.Option(
            "--warmup",
            min=0.0,
            max=1.0,
            metavar="X",
            help="A share of the steps: no puzzles yet, and a rising rate.",
        ),
    ] = 1 / 15,
    weight: Annotated[
        float,
        typer.Option(
            "--lambda", min=0.0, metavar="L", help="The weight of the regression of positions."
        ),
    ] = 0.01,
    schedule: Annotated[
        Schedule,
        typer.Option("--schedule", help="Lambda as in the paper's text, or as in its code."),
    ] = Schedule.constant,
    until: Annotated[
        float | None,
        typer.Option(
            "--until",
            min=0.0,
            max=1.0,
            metavar="X",
            help="Puzzles in this share of the steps only, and then none.",
        ),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Draw all weights anew: train from scratch.")
    ] = False,
    epochs: Annotated[
        int, typer.Option("--epochs", min=1, metavar="N", help="Times through the data.")
    ] = 1,
    batch: Batch = 64,
    rate: Annotated[
        float,
        typer.Option("--lr", metavar="X", help="The largest rate of AdamW; it rises and falls."),
    ] = 1e-4,
    decay: Annotated[
        float, typer.Option("--weight-decay", metavar="X", help="Its weight decay.")
    ] = 0.05,
    flip: Annotated[bool, typer.Option("--flip", help="Mirror half of the images.")] = False,
    shift: Annotated[
        int,
        typer.Option("--shift", min=0, metavar="N", help="Move images by up to so many pixels."),
    ] = 0,
    strong: Annotated[
        bool,
        typer.Option(
            "--strong",
            help="DeiT's augmentation: crops, RandAugment, erasing, mixup and CutMix, smoothed "
            "labels.",
        ),
    ] = False,
    patch: Annotated[
        int | None,
        typer.Option(
            "--patch",
            min=1,
            metavar="N",
            help="For models without patches of their own. Default: 16.",
        ),
    ] = None,
    field: sample.Field = None,
    split: sample.Split = "train",
    mean: sample.Mean = None,
    std: sample.Std = None,
    seed: Seed = 0,
    device: options.Device = "cpu",
    threads: options.Threads = None,
    json: options.Json = False,
    report: options.Report = None,
    verbose: options.Verbose = 0,
) -> int:
    """Train a model with masked jigsaw puzzles. Loads with from_pretrained like any other; `regauge
    jigsaw evaluate` says what it has become. An interrupted training goes on where it was if the
    command is given again.
    """
    started = time.monotonic()
    check_device(device)
    check_outputs(None, report)

    from regauge.checkpoints.plan import check_new
    from regauge.checkpoints.reader import open_checkpoint
    from regauge.checkpoints.resume import SAVE_INTERVAL, ResumeState
    from regauge.data.augment import DEIT_AUGMENTATION
    from regauge.data.train import train_model
    from regauge.jigsaw.folder import FOLDER, save_wrapped
    from regauge.jigsaw.masks import JigsawError, check_ratio
    from regauge.jigsaw.wrapper import wrap
    from regauge.models.load import load_model, reinitialize

    check_ratio(ratio)
    for name, value in (("--lr", rate), ("--weight-decay", decay)):
        if not 0 <= value < math.inf:
            raise typer.BadParameter(f"{value:g} is not 0 or more, and finite", param_hint=name)
    check_new(out)
    set_threads(threads)
    checkpoint = open_checkpoint(model)
    live = load_model(checkpoint, "float32")
    if getattr(live, "main_input_name", "pixel_values") != "pixel_values":
        raise JigsawError(
            f"{type(live).__name__} is no model of images",
            hint="puzzles of texts are in Python: regauge.jigsaw.TextJigsaw",
        )
    if (checkpoint.path / FOLDER).is_dir():
        info(
            f"{model} was trained with puzzles: it goes on as a plain model, with an unknown "
            "embedding of its own"
        )
    if fresh:
        live = reinitialize(live, seed)
    broken = next(
        (
            name
            for name, t in live.state_dict().items()
            if t.is_floating_point() and not bool(t.isfinite().all())
        ),
        None,
    )
    if broken is not None:
        raise JigsawError(
            f'"{broken}" of {model} is not finite',
            hint="restore it from a copy, or train from scratch: --fresh",
        )
    examples, task = sample.Sample(data, field, split, None, None, mean, std).read(live, checkpoint)
    total = max(1, len(examples) // batch) * epochs
    given: dict[str, Any] = {
        "variant": variant,
        "ratio": ratio,
        "per": per.value,
        "probability": probability,
        "warmup": warmup,
        "weight": weight,
    }
    given |= {"schedule": "reference"} if schedule is Schedule.reference else {}
    given |= {"patch": patch} if patch is not None else {}
    given |= {"until": until} if until is not None else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says what is left of MJP, as does the next line
        wrapped = wrap(live.to(device), given, total, seed)
    if wrapped.layout.note:
        info(wrapped.layout.note)
    info(f"{wrapped.extra_repr()}: {total} steps of {batch} images")
    change: dict[str, Any] = {"flip": flip, "shift": shift} if flip or shift else {}
    if strong:
        change |= {**DEIT_AUGMENTATION, "mean": task["mean"], "std": task["std"]}
    augment = {"augment": change} if change else {}
    recipe = {
        "optimizer": "adamw",
        "rate": rate,
        "more": {"weight_decay": decay},
        "batch": batch,
        "epochs": epochs,
        "dtype": "float32",
        "clip": 5.0,
    }
    recipe |= {"warmup": warmup, **augment}
    work = ResumeState(
        out.with_name(f".{out.name}.training"),
        SAVE_INTERVAL,
        device,
        _digest(wrapped, examples, recipe, given, seed),
    )
    with step_bar("train") as bar:
        losses, _ = train_model(
            wrapped, examples, recipe, seed, work, on_step=partial(_report_step, bar)
        )
    save_wrapped(wrapped, out, checkpoint.path)
    work.path.unlink(missing_ok=True)
    last = losses[-max(1, total // 10) :]
    first_loss, last_loss = losses[0], sum(last) / len(last)
    if report is not None:
        from regauge.checkpoints.files import write_bytes
        from regauge.jigsaw.figures import report_training
        from regauge.results.report import page

        facts = {
            **facts_of_run(),
            "model": model,
            "data": data,
            "images": len(examples),
            "training": wrapped.extra_repr(),
            **recipe,
            "seed": seed,
        }
        write_bytes(
            report,
            page(
                report_training(losses, {**facts, "seconds": round(time.monotonic() - started, 1)})
            ).encode(),
        )
        info(f"report: {report}")
    if json:
        told = {
            "out": str(out),
            "variant": wrapped.variant.name,
            "steps": total,
            "first_loss": first_loss,
            "last_loss": last_loss,
        }
        print_json({"version": VERSION, "command": "jigsaw train", **told})
    else:
        out_data(
            f"{out}: {wrapped.variant.name}, {total} steps, loss {first_loss:.4f} at first, "
            f"{last_loss:.4f} at last"
        )
    return 0


def _report_step(bar: Any, step: int, total: int, loss: float) -> None:
    """A step of a training: about fifty of them are shown, and one whose loss is no number ends
    it.
    """
    from regauge.jigsaw.masks import JigsawError

    if not math.isfinite(loss):
        raise JigsawError(
            f"the loss of step {step} is {loss}",
            hint="a smaller --lr, or look at --mean, --std and the labels",
        )
    if step % max(1, total // 50) == 0 or step == total:
        bar(step - 1, total, f"loss {loss:.4f}")


def _digest(wrapped: Any, examples: Any, *settings: Any) -> str:
    """What a training is known by, so that it goes on with no other's state: the weights that it
    begins with, some of its data, all settings.
    """
    import hashlib

    import numpy as np

    found = hashlib.sha256(dumps([len(examples), *settings], sort_keys=True).encode())
    inputs, labels = examples.batch(np.unique(np.linspace(0, len(examples) - 1, 64).astype(int)))
    for t in (*wrapped.state_dict().values(), *inputs.values(), labels):
        found.update(t.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


@app.command()
def evaluate(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...", help="Folders: plain, or what `regauge jigsaw train` wrote."
        ),
    ],
    data: Data,
    ratios: Ratios = "0.1,0.3,0.5,0.7,0.9",
    samples: Annotated[
        int | None,
        typer.Option(
            "--samples", min=1, metavar="N", help="Measure on this many images. Default: all."
        ),
    ] = None,
    patch: Patch = None,
    batch: Batch = 100,
    field: sample.Field = None,
    split: sample.Split = "test",
    mean: sample.Mean = None,
    std: sample.Std = None,
    json: options.JsonFile = None,
    report: options.Report = None,
    seed: Seed = 0,
    device: options.Device = "cpu",
    threads: options.Threads = None,
    verbose: options.Verbose = 0,
) -> int:
    """What puzzles do to models: top-1 as it is, and for every ratio top-1, how often the answer
    stays the same, and how far the features move.
    """
    started = time.monotonic()
    check_outputs(json, report)
    check_device(device)
    set_threads(threads)
    shares = sample.parse_numbers(ratios, "--ratios") or []
    import numpy as np

    from regauge.checkpoints.reader import open_checkpoint
    from regauge.jigsaw.figures import PuzzleGrid, check_puzzle_grids, report_evaluations
    from regauge.jigsaw.folder import load_together, rewrap_plain
    from regauge.jigsaw.masks import check_ratio, check_size
    from regauge.jigsaw.metrics import evaluate as measure
    from regauge.jigsaw.variants import resolve_variant
    from regauge.results.findings import Results

    for share in shares:
        check_ratio(share)
    source = sample.Sample(data, field, split, None, None, mean, std)
    loaded = load_together(models, patch)
    read, cuts = {}, {}
    for name, wrapped in loaded.items():
        examples, _ = source.read(wrapped.model, open_checkpoint(name))
        if samples is not None and samples < len(examples):
            examples = examples.only(
                np.sort(np.random.default_rng(seed).permutation(len(examples))[:samples])
            )
        read[name] = examples
        height, width = examples.batch(np.arange(1))[0]["pixel_values"].shape[-2:]
        cuts[name] = PuzzleGrid(
            wrapped.layout.patch,
            check_size((height, width), wrapped.layout.patch),
            wrapped.layout.table is not None,
        )
    if patch is None:
        check_puzzle_grids(cuts)
    found, bare = {}, {}
    told = [name for name, wrapped in loaded.items() if wrapped.unknown is not None]
    for name, wrapped in loaded.items():
        with step_bar(Path(name).name) as progress:
            found[name] = measure(
                wrapped.to(device),
                read[name],
                shares,
                seed=seed,
                batch=batch,
                device=device,
                progress=progress,
            )
        if name in told:
            plain = rewrap_plain(wrapped)
            with step_bar(f"{Path(name).name}, unwrapped") as progress:
                bare[name] = measure(
                    plain,
                    read[name],
                    shares,
                    seed=seed,
                    batch=batch,
                    device=device,
                    progress=progress,
                )
        elif wrapped.variant != resolve_variant("A"):
            bare[name] = found[name]  # nothing marks what was shuffled
        wrapped.to("cpu")  # the next one may need the room
    if told:
        info(
            f"told which patches were shuffled, by the unknown embedding: {', '.join(told)}; "
            "the plain checkpoint is not: unwrapped"
        )
    tables, figures = report_evaluations(found, cuts, bare)
    facts = {
        **facts_of_run(),
        "models": list(models),
        "data": data,
        "images": len(examples),
        "seconds": round(time.monotonic() - started, 1),
    }
    results = Results("Puzzles at inference", (), tables, figures, facts)
    return deliver(results, _format_results(results), json, report)


@app.command()
def study(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...", help="Folders: plain, or what `regauge jigsaw train` wrote."
        ),
    ],
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            metavar="URI",
            help="Images, for attention maps; with labels, for --corruptions.",
        ),
    ] = None,
    corruptions: Annotated[
        bool,
        typer.Option(
            "--corruptions",
            help="Also errors under the corruptions of ImageNet-C; mCE relative to the first.",
        ),
    ] = False,
    hard: Annotated[
        str | None,
        typer.Option(
            "--hard",
            metavar="URI",
            help="Images that are hard to tell, with labels: accuracy and AURRA, as of ImageNet-A.",
        ),
    ] = None,
    outside: Annotated[
        str | None,
        typer.Option(
            "--outside",
            metavar="URI",
            help="Images of none of the classes: AUPR against --data, as of ImageNet-O.",
        ),
    ] = None,
    umap: Annotated[bool, typer.Option("--umap", help="Also lay positions out by UMAP.")] = False,
    samples: Annotated[
        int, typer.Option("--samples", min=1, metavar="N", help="Images that are corrupted.")
    ] = 100,
    patch: Patch = None,
    batch: Batch = 100,
    field: sample.Field = None,
    split: sample.Split = "test",
    mean: sample.Mean = None,
    std: sample.Std = None,
    json: options.JsonFile = None,
    report: options.Report = None,
    seed: Seed = 0,
    device: options.Device = "cpu",
    threads: options.Threads = None,
    verbose: options.Verbose = 0,
) -> int:
    """What the position embeddings of models hold: explained variance, eigenvalues, projections,
    how well places can be read off them. With data also where CLS looks in the last layer, errors
    under corruptions, and how a model does on hard images and on images that show none of its
    classes.
    """
    started = time.monotonic()
    check_outputs(json, report)
    check_device(device)
    set_threads(threads)
    if corruptions and data is None:
        raise typer.BadParameter("corruptions need images and labels: --data")
    if outside is not None and data is None:
        raise typer.BadParameter(
            "images of no class are told from those of --data, which is missing",
            param_hint="--outside",
        )
    from regauge.checkpoints.reader import open_checkpoint
    from regauge.jigsaw import figures as reporting
    from regauge.jigsaw.folder import load_together
    from regauge.jigsaw.masks import JigsawError
    from regauge.jigsaw.robustness import aupr, aurra, evaluate_corruptions, score_predictions
    from regauge.jigsaw.studies import attention_maps
    from regauge.jigsaw.studies import study_positions as look
    from regauge.results.findings import Results

    wrapped = {name: one.to(device) for name, one in load_together(models, patch).items()}
    found: dict[str, Any] = {}
    unchecked: list[
        str
    ] = []  # what a model lacks is no reason to leave the others, nor the rest of it
    with step_bar("study") as progress:
        for i, (name, one) in enumerate(wrapped.items()):
            progress(i, len(wrapped), Path(name).name)
            try:
                found[name] = look(one, seed=seed, umap=umap)
            except JigsawError as error:
                unchecked.append(f"positions of {name}: {error}")
    tables, figures = reporting.report_studies(found)
    if data is not None:
        source = sample.Sample(data, field, split, None, None, mean, std)
        read = {
            name: source.read(one.model, open_checkpoint(name), labelled=corruptions)
            for name, one in wrapped.items()
        }
        maps: dict[str, Any] = {}
        for name, one in wrapped.items():
            examples = read[name][0]
            images = examples.batch(range(min(6, len(examples))))[0]["pixel_values"]
            try:
                maps[name] = attention_maps(one, images.to(device)).mean(1).tolist()
            except JigsawError as error:
                unchecked.append(f"attention of {name}: {error}")
        if maps:
            examples, task = read[next(iter(maps))]
            figures = (
                *figures,
                reporting.plot_attention(
                    examples.batch(range(min(6, len(examples))))[0]["pixel_values"], task, maps
                ),
            )
        if corruptions:
            from regauge.data.datasets import open_data

            some = open_data(data, fields=sample.parse_fields(field), split=split).take(
                samples, seed=seed
            )
            errors = {}
            for name, one in wrapped.items():
                with step_bar(f"corruptions, {Path(name).name}") as progress:
                    errors[name] = evaluate_corruptions(
                        one.unwrap(),
                        some,
                        read[name][1],
                        batch=batch,
                        device=device,
                        progress=progress,
                    )
            more, drawn, missing = reporting.report_corruptions(errors)
            tables, figures, unchecked = (
                (*tables, *more),
                (*figures, *drawn),
                [*unchecked, *missing],
            )
        if outside is not None:
            strange = replace(source, uri=outside)
            areas = {}
            for name, one in wrapped.items():
                others, _ = strange.read(one.model, open_checkpoint(name), labelled=False)
                sure, unsure = (
                    score_predictions(one.unwrap(), some, batch, device)[0]
                    for some in (read[name][0], others)
                )
                areas[name] = (aupr(sure, unsure), len(sure), len(unsure))
            tables = (*tables, reporting.tabulate_outliers(areas))
    if hard is not None:
        told = {}
        for name, one in wrapped.items():
            examples, _ = sample.Sample(hard, field, split, None, None, mean, std).read(
                one.model, open_checkpoint(name)
            )
            sure, right = score_predictions(one.unwrap(), examples, batch, device)
            told[name] = (float(right.mean()), aurra(sure, right), len(right))
        tables = (*tables, reporting.tabulate_hard_images(told))
    if not tables and not figures:
        raise JigsawError(
            "\n".join(unchecked),
            hint="give a model with CLS or absolute positions (ViT, DeiT), or --data with "
            "--corruptions",
        )
    facts = {
        **facts_of_run(),
        "models": list(models),
        "data": data,
        "hard": hard,
        "outside": outside,
        "seconds": round(time.monotonic() - started, 1),
    }
    results = Results("Positions", (), tables, figures, facts, tuple(unchecked))
    return deliver(results, _format_results(results), json, report)


def _format_results(results: Results) -> str:
    from regauge.results.text import format_results

    shown = format_results(results).partition("  finding")[0].rstrip()
    return "\n".join(
        [
            shown,
            *([""] if results.unchecked else []),
            *(f"not checked: {text}" for text in results.unchecked),
        ]
    ).lstrip()
