"""`regauge jigsaw`: train with masked jigsaw puzzles, evaluate models on puzzles, study position
embeddings.
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
from regauge.cli.console import info, print_json, print_result, step_bar
from regauge.cli.run import check_device, check_outputs, deliver, facts_of_run, set_threads

if TYPE_CHECKING:
    from regauge.core.progress import Progress
    from regauge.data.tasks import Examples
    from regauge.jigsaw.wrapper import MaskedJigsaw
    from regauge.results.findings import Results

VERSION = 1

app = typer.Typer(
    name="jigsaw",
    help="Masked Jigsaw Puzzles: make an image model less sensitive to the positions of its "
    "patches, and measure it.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class PuzzlesPer(StrEnum):
    """The unit that shares a puzzle."""

    batch = "batch"
    sample = "sample"


class Schedule(StrEnum):
    """Schedules of lambda."""

    constant = "constant"
    reference = "reference"


Data = Annotated[
    str,
    typer.Option(
        "--data",
        metavar="URI",
        help="npz, parquet, a folder of images or a hub id: images with labels.",
    ),
]
Seed = Annotated[int, options.seed_option("Random seed of the run.")]
Ratios = Annotated[
    str,
    typer.Option("--ratios", metavar="R,R", help="Shares of patches to shuffle at inference."),
]
Batch = Annotated[int, typer.Option("--batch-size", min=1, metavar="N", help="Images per batch.")]
Patch = Annotated[
    int | None,
    typer.Option(
        "--patch",
        min=1,
        metavar="N",
        help="Patch size for models without patches. Default: that of the other models, or 16.",
    ),
]


@app.callback()
def _root() -> None:
    """Masked Jigsaw Puzzles: make an image model less sensitive to the positions of its patches,
    and measure it.
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
            help="New folder for the plain checkpoint and the puzzles' parameters.",
        ),
    ],
    ratio: Annotated[
        float,
        typer.Option("--ratio", metavar="R", help="Share of patches to shuffle in training."),
    ] = 0.1,
    variant: Annotated[
        str | None,
        typer.Option(
            "--variant",
            metavar="A-J",
            help="Variant of the paper's Table 2. Default: J, or the nearest that applies.",
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
        typer.Option("--probability", metavar="P", help="Share of steps with puzzles."),
    ] = 0.5,
    warmup: Annotated[
        float,
        typer.Option(
            "--warmup",
            min=0.0,
            max=1.0,
            metavar="X",
            help="Share of warm-up steps: no puzzles, and a rising learning rate.",
        ),
    ] = 1 / 15,
    weight: Annotated[
        float,
        typer.Option(
            "--lambda", min=0.0, metavar="L", help="Weight of the position regression loss."
        ),
    ] = 0.01,
    schedule: Annotated[
        Schedule,
        typer.Option(
            "--schedule", help="Schedule of lambda: as in the paper's text, or as in its code."
        ),
    ] = Schedule.constant,
    until: Annotated[
        float | None,
        typer.Option(
            "--until",
            min=0.0,
            max=1.0,
            metavar="X",
            help="Share of the steps after which puzzles end.",
        ),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Train from scratch, with randomly initialized weights.")
    ] = False,
    epochs: Annotated[
        int, typer.Option("--epochs", min=1, metavar="N", help="Passes over the data.")
    ] = 1,
    batch: Batch = 64,
    lr: Annotated[
        float,
        typer.Option("--lr", metavar="X", help="Peak learning rate of AdamW."),
    ] = 1e-4,
    weight_decay: Annotated[
        float, typer.Option("--weight-decay", metavar="X", help="Weight decay of AdamW.")
    ] = 0.05,
    flip: Annotated[
        bool, typer.Option("--flip", help="Flip half of the images horizontally.")
    ] = False,
    shift: Annotated[
        int,
        typer.Option("--shift", min=0, metavar="N", help="Shift images by up to N pixels."),
    ] = 0,
    strong: Annotated[
        bool,
        typer.Option(
            "--strong",
            help="DeiT's augmentation: crops, RandAugment, erasing, mixup and CutMix, label "
            "smoothing.",
        ),
    ] = False,
    patch: Annotated[
        int | None,
        typer.Option(
            "--patch",
            min=1,
            metavar="N",
            help="Patch size for models without patches. Default: 16.",
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
    """Train a model with masked jigsaw puzzles. The result loads with from_pretrained like any
    other; `regauge jigsaw evaluate` measures it. Repeating the command resumes an interrupted
    training.
    """
    started = time.monotonic()
    check_device(device)
    check_outputs(None, report)

    from regauge.checkpoints.plan import check_new
    from regauge.checkpoints.reader import open_checkpoint
    from regauge.checkpoints.resume import SAVE_INTERVAL, ResumeState
    from regauge.data.augment import DEIT_AUGMENTATION
    from regauge.data.train import train_model
    from regauge.errors import JigsawError
    from regauge.jigsaw.folder import FOLDER, save_wrapped
    from regauge.jigsaw.masks import check_ratio
    from regauge.jigsaw.wrapper import wrap
    from regauge.models.load import load_model, reinitialize

    check_ratio(ratio)
    for name, value in (("--lr", lr), ("--weight-decay", weight_decay)):
        if not 0 <= value < math.inf:
            raise typer.BadParameter(f"must be >= 0 and finite, got {value:g}", param_hint=name)
    check_new(out)
    set_threads(threads)
    checkpoint = open_checkpoint(model)
    module = load_model(checkpoint, "float32")
    if getattr(module, "main_input_name", "pixel_values") != "pixel_values":
        raise JigsawError(
            f"MODEL must be an image model, got {type(module).__name__}",
            hint="for texts use regauge.jigsaw.TextJigsaw in Python",
        )
    if (checkpoint.path / FOLDER).is_dir():
        info(
            f"{model} was trained with puzzles: training starts from its plain weights, with a "
            "new unknown embedding"
        )
    if fresh:
        module = reinitialize(module, seed)
    nonfinite = next(
        (
            name
            for name, t in module.state_dict().items()
            if t.is_floating_point() and not bool(t.isfinite().all())
        ),
        None,
    )
    if nonfinite is not None:
        raise JigsawError(
            f'"{nonfinite}" of {model} is not finite',
            hint="restore it from a copy, or train from scratch with --fresh",
        )
    examples, task = sample.read_options(data, field, split, None, None, mean, std).read(
        module, checkpoint
    )
    total = max(1, len(examples) // batch) * epochs
    settings: dict[str, Any] = {
        "variant": variant,
        "ratio": ratio,
        "per": per.value,
        "probability": probability,
        "warmup": warmup,
        "weight": weight,
    }
    settings |= {"schedule": "reference"} if schedule is Schedule.reference else {}
    settings |= {"patch": patch} if patch is not None else {}
    settings |= {"until": until} if until is not None else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # wrap warns about what the next line prints
        wrapped = wrap(module.to(device), settings, total, seed)
    if wrapped.layout.note:
        info(wrapped.layout.note)
    info(f"{wrapped.extra_repr()}: {total} steps of {batch} images")
    augmentation: dict[str, Any] = {"flip": flip, "shift": shift} if flip or shift else {}
    if strong:
        augmentation |= {**DEIT_AUGMENTATION, "mean": task["mean"], "std": task["std"]}
    augment = {"augment": augmentation} if augmentation else {}
    recipe = {
        "optimizer": "adamw",
        "rate": lr,
        "more": {"weight_decay": weight_decay},
        "batch": batch,
        "epochs": epochs,
        "dtype": "float32",
        "clip": 5.0,
    }
    recipe |= {"warmup": warmup, **augment}
    state = ResumeState(
        out.with_name(f".{out.name}.training"),
        SAVE_INTERVAL,
        device,
        _digest(wrapped, examples, recipe, settings, seed),
    )
    with step_bar("train") as bar:
        losses, _ = train_model(
            wrapped, examples, recipe, seed, state, on_step=partial(_report_step, bar)
        )
    save_wrapped(wrapped, out, checkpoint.path)
    state.path.unlink(missing_ok=True)
    recent = losses[-max(1, total // 10) :]
    first_loss, last_loss = losses[0], sum(recent) / len(recent)
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
        summary = {
            "out": str(out),
            "variant": wrapped.variant.name,
            "steps": total,
            "first_loss": first_loss,
            "last_loss": last_loss,
        }
        print_json({"version": VERSION, "command": "jigsaw train", **summary})
    else:
        print_result(
            f"{out}: {wrapped.variant.name}, {total} steps, loss {first_loss:.4f} at the start, "
            f"{last_loss:.4f} at the end"
        )
    return 0


def _report_step(bar: Progress, step: int, total: int, loss: float) -> None:
    """Report about fifty steps of a training, and raise if a loss is not finite."""
    from regauge.errors import JigsawError

    if not math.isfinite(loss):
        raise JigsawError(
            f"the loss must be finite, got {loss} at step {step}",
            hint="lower --lr, or check --mean, --std and the labels",
        )
    if step % max(1, total // 50) == 0 or step == total:
        bar(step - 1, total, f"loss {loss:.4f}")


def _digest(wrapped: MaskedJigsaw, examples: Examples, *settings: Any) -> str:
    """Return a digest of a training (initial weights, a sample of its data, all settings), so that
    it never resumes from the state of another.
    """
    import hashlib

    import numpy as np

    digest = hashlib.sha256(dumps([len(examples), *settings], sort_keys=True).encode())
    inputs, labels = examples.batch(np.unique(np.linspace(0, len(examples) - 1, 64).astype(int)))
    for t in (*wrapped.state_dict().values(), *inputs.values(), labels):
        digest.update(t.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


@app.command()
def evaluate(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...", help="Folders: plain models, or outputs of `regauge jigsaw train`."
        ),
    ],
    data: Data,
    ratios: Ratios = "0.1,0.3,0.5,0.7,0.9",
    samples: Annotated[
        int | None,
        typer.Option("--samples", min=1, metavar="N", help="Images to measure on. Default: all."),
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
    """Evaluate models on puzzles: top-1 without puzzles, and for every ratio top-1, agreement with
    the unshuffled prediction, and distance of the features.
    """
    started = time.monotonic()
    check_outputs(json, report)
    check_device(device)
    set_threads(threads)
    ratio_list = sample.parse_numbers(ratios, "--ratios") or []
    import numpy as np

    from regauge.checkpoints.reader import open_checkpoint
    from regauge.jigsaw.figures import PuzzleGrid, check_puzzle_grids, report_evaluations
    from regauge.jigsaw.folder import load_together, rewrap_plain
    from regauge.jigsaw.masks import check_ratio, check_size
    from regauge.jigsaw.metrics import evaluate as measure
    from regauge.jigsaw.variants import resolve_variant
    from regauge.results.findings import Results

    for ratio in ratio_list:
        check_ratio(ratio)
    source = sample.read_options(data, field, split, None, None, mean, std)
    loaded = load_together(models, patch)
    datasets, grids = {}, {}
    for name, wrapped in loaded.items():
        examples, _ = source.read(wrapped.model, open_checkpoint(name))
        if samples is not None and samples < len(examples):
            examples = examples.only(
                np.sort(np.random.default_rng(seed).permutation(len(examples))[:samples])
            )
        datasets[name] = examples
        height, width = examples.batch(np.arange(1))[0]["pixel_values"].shape[-2:]
        grids[name] = PuzzleGrid(
            wrapped.layout.patch,
            check_size((height, width), wrapped.layout.patch),
            wrapped.layout.table is not None,
        )
    if patch is None:
        check_puzzle_grids(grids)
    metrics, unwrapped = {}, {}
    marked = [name for name, wrapped in loaded.items() if wrapped.unknown is not None]
    for name, wrapped in loaded.items():
        with step_bar(Path(name).name) as progress:
            metrics[name] = measure(
                wrapped.to(device),
                datasets[name],
                ratio_list,
                seed=seed,
                batch=batch,
                device=device,
                progress=progress,
            )
        if name in marked:
            module = rewrap_plain(wrapped)
            with step_bar(f"{Path(name).name}, unwrapped") as progress:
                unwrapped[name] = measure(
                    module,
                    datasets[name],
                    ratio_list,
                    seed=seed,
                    batch=batch,
                    device=device,
                    progress=progress,
                )
        elif wrapped.variant != resolve_variant("A"):
            unwrapped[name] = metrics[name]  # shuffled patches are not marked
        wrapped.to("cpu")  # free the memory for the next model
    if marked:
        info(
            f"the unknown embedding marks shuffled patches for: {', '.join(marked)}; rows "
            '"unwrapped" measure the plain checkpoints, without it'
        )
    tables, figures = report_evaluations(metrics, grids, unwrapped)
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
            metavar="MODEL...", help="Folders: plain models, or outputs of `regauge jigsaw train`."
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
            help="Also measure errors under the corruptions of ImageNet-C; mCE relative to the "
            "first model.",
        ),
    ] = False,
    hard: Annotated[
        str | None,
        typer.Option(
            "--hard",
            metavar="URI",
            help="Hard images with labels, as ImageNet-A: accuracy and AURRA.",
        ),
    ] = None,
    outside: Annotated[
        str | None,
        typer.Option(
            "--outside",
            metavar="URI",
            help="Out-of-distribution images, as ImageNet-O: AUPR against --data.",
        ),
    ] = None,
    umap: Annotated[bool, typer.Option("--umap", help="Also project positions with UMAP.")] = False,
    samples: Annotated[
        int, typer.Option("--samples", min=1, metavar="N", help="Images to corrupt.")
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
    """Study the position embeddings of models: explained variance, eigenvalues, projections, and
    how well positions can be predicted from them. With data also the attention of CLS in the last
    layer, errors under corruptions, and results on hard and out-of-distribution images.
    """
    started = time.monotonic()
    check_outputs(json, report)
    check_device(device)
    set_threads(threads)
    if corruptions and data is None:
        raise typer.BadParameter("--corruptions requires --data with labels")
    if outside is not None and data is None:
        raise typer.BadParameter(
            "requires --data to compare with",
            param_hint="--outside",
        )
    from regauge.checkpoints.reader import open_checkpoint
    from regauge.errors import JigsawError
    from regauge.jigsaw import figures as report_figures
    from regauge.jigsaw.folder import load_together
    from regauge.jigsaw.robustness import aupr, aurra, evaluate_corruptions, score_predictions
    from regauge.jigsaw.studies import attention_maps, study_positions
    from regauge.results.findings import Results

    loaded = {name: model.to(device) for name, model in load_together(models, patch).items()}
    studies: dict[str, Any] = {}
    unchecked: list[str] = []  # a model that lacks a part is skipped for that part only
    with step_bar("study") as progress:
        for i, (name, model) in enumerate(loaded.items()):
            progress(i, len(loaded), Path(name).name)
            try:
                studies[name] = study_positions(model, seed=seed, umap=umap)
            except JigsawError as error:
                unchecked.append(f"positions of {name}: {error}")
    tables, figures = report_figures.report_studies(studies)
    if data is not None:
        source = sample.read_options(data, field, split, None, None, mean, std)
        datasets = {
            name: source.read(model.model, open_checkpoint(name), labelled=corruptions)
            for name, model in loaded.items()
        }
        maps: dict[str, Any] = {}
        for name, model in loaded.items():
            examples = datasets[name][0]
            images = examples.batch(range(min(6, len(examples))))[0]["pixel_values"]
            try:
                maps[name] = attention_maps(model, images.to(device)).mean(1).tolist()
            except JigsawError as error:
                unchecked.append(f"attention of {name}: {error}")
        if maps:
            examples, task = datasets[next(iter(maps))]
            figures = (
                *figures,
                report_figures.plot_attention(
                    examples.batch(range(min(6, len(examples))))[0]["pixel_values"], task, maps
                ),
            )
        if corruptions:
            from regauge.data.datasets import open_data

            subset = open_data(data, fields=sample.parse_fields(field), split=split).take(
                samples, seed=seed
            )
            errors = {}
            for name, model in loaded.items():
                with step_bar(f"corruptions, {Path(name).name}") as progress:
                    errors[name] = evaluate_corruptions(
                        model.unwrap(),
                        subset,
                        datasets[name][1],
                        batch=batch,
                        device=device,
                        progress=progress,
                    )
            corruption_tables, corruption_figures, skipped = report_figures.report_corruptions(
                errors
            )
            tables, figures, unchecked = (
                (*tables, *corruption_tables),
                (*figures, *corruption_figures),
                [*unchecked, *skipped],
            )
        if outside is not None:
            outside_source = replace(source, uri=outside)
            areas = {}
            for name, model in loaded.items():
                outliers, _ = outside_source.read(
                    model.model, open_checkpoint(name), labelled=False
                )
                confidence, outlier_confidence = (
                    score_predictions(model.unwrap(), inputs, batch, device)[0]
                    for inputs in (datasets[name][0], outliers)
                )
                areas[name] = (
                    aupr(confidence, outlier_confidence),
                    len(confidence),
                    len(outlier_confidence),
                )
            tables = (*tables, report_figures.tabulate_outliers(areas))
    if hard is not None:
        hard_scores = {}
        for name, model in loaded.items():
            examples, _ = sample.read_options(hard, field, split, None, None, mean, std).read(
                model.model, open_checkpoint(name)
            )
            confidence, correct = score_predictions(model.unwrap(), examples, batch, device)
            hard_scores[name] = (float(correct.mean()), aurra(confidence, correct), len(correct))
        tables = (*tables, report_figures.tabulate_hard_images(hard_scores))
    if not tables and not figures:
        raise JigsawError(
            "\n".join(unchecked),
            hint="pass a model with CLS or absolute positions (ViT, DeiT), or --data with "
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
    """Format results for a terminal: tables, and what was not checked."""
    from regauge.results.text import format_results

    tables = format_results(results).partition("  finding")[0].rstrip()
    return "\n".join(
        [
            tables,
            *([""] if results.unchecked else []),
            *(f"not checked: {text}" for text in results.unchecked),
        ]
    ).lstrip()
