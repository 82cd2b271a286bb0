"""`regauge jigsaw`: train with masked jigsaw puzzles, evaluate models on puzzles, study position
embeddings.
"""

from __future__ import annotations

import math
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from regauge.cli import options, sample
from regauge.cli.console import info, print_report, print_result, step_bar
from regauge.cli.parsers import parse_numbers
from regauge.cli.run import deliver, facts_of_run, start_run


class Schedule(StrEnum):
    """Schedules of lambda."""

    constant = "constant"
    reference = "reference"


Data = Annotated[
    str,
    typer.Option(
        "--data",
        metavar="URI",
        help="npz, parquet, a folder of images, a hub id or digits (of scikit-learn): labelled "
        "images.",
    ),
]
Seed = Annotated[int, options.seed_option("Random seed of the run.")]
Batch = Annotated[int, typer.Option("--batch-size", min=1, metavar="N", help="Images per batch.")]
Patch = Annotated[
    int | None,
    typer.Option(
        "--patch",
        min=1,
        metavar="N",
        help="Patch size for models without patches. Default: that of the other models, or 16.",
        rich_help_panel=options.ADVANCED,
    ),
]


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
            help="Variant of training, see docs/guides/jigsaw.md. Default: J, or the nearest that "
            "applies.",
            rich_help_panel=options.ADVANCED,
        ),
    ] = None,
    per: Annotated[
        options.Unit,
        typer.Option(
            "--per",
            help="One puzzle per batch, as in the code of MJP, or one per image.",
            rich_help_panel=options.ADVANCED,
        ),
    ] = options.Unit.batch,
    probability: Annotated[
        float,
        typer.Option(
            "--probability",
            metavar="P",
            help="Share of steps with puzzles.",
            rich_help_panel=options.ADVANCED,
        ),
    ] = 0.5,
    warmup: Annotated[
        float,
        typer.Option(
            "--warmup",
            min=0.0,
            max=1.0,
            metavar="X",
            help="Share of warm-up steps: no puzzles, and a rising learning rate.",
            rich_help_panel=options.ADVANCED,
        ),
    ] = 1 / 15,
    weight: Annotated[
        float,
        typer.Option(
            "--lambda",
            min=0.0,
            metavar="L",
            help="Weight of the position regression loss.",
            rich_help_panel=options.ADVANCED,
        ),
    ] = 0.01,
    schedule: Annotated[
        Schedule,
        typer.Option(
            "--schedule",
            help="Schedule of lambda: as in the paper of MJP, or as in its reference code.",
            rich_help_panel=options.ADVANCED,
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
            rich_help_panel=options.ADVANCED,
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
        bool,
        typer.Option(
            "--flip", help="Flip half of the images horizontally.", rich_help_panel=options.ADVANCED
        ),
    ] = False,
    shift: Annotated[
        int,
        typer.Option(
            "--shift",
            min=0,
            metavar="N",
            help="Shift images by up to N pixels.",
            rich_help_panel=options.ADVANCED,
        ),
    ] = 0,
    strong: Annotated[
        bool,
        typer.Option(
            "--strong",
            help="DeiT's augmentation: crops, RandAugment, erasing, mixup and CutMix, label "
            "smoothing.",
            rich_help_panel=options.ADVANCED,
        ),
    ] = False,
    patch: Annotated[
        int | None,
        typer.Option(
            "--patch",
            min=1,
            metavar="N",
            help="Patch size for models without patches. Default: 16.",
            rich_help_panel=options.ADVANCED,
        ),
    ] = None,
    test: Annotated[
        str | None,
        typer.Option(
            "--test",
            metavar="URI",
            help="Images to evaluate on before and after. Default: at most 1,000 training images.",
            rich_help_panel=options.DATA,
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
    """Train an image model with masked jigsaw puzzles.

    The result loads with from_pretrained like any other; `regauge jigsaw evaluate` measures it.
    Repeating the command resumes an interrupted training.
    """
    for name, value in (("--lr", lr), ("--weight-decay", weight_decay)):
        if not 0 <= value < math.inf:
            raise typer.BadParameter(f"must be >= 0 and finite, got {value:g}", param_hint=name)
    start_run(None, report, threads=threads, device=device)
    from regauge import jigsaw

    chosen = jigsaw.JigsawOptions(
        variant=variant,
        per=per.value,
        probability=probability,
        warmup=warmup,
        weight=weight,
        schedule=schedule.value,
        until=until,
        patch=patch,
        fresh=fresh,
        epochs=epochs,
        batch_size=batch,
        lr=lr,
        weight_decay=weight_decay,
        flip=flip,
        shift=shift,
        strong=strong,
    )
    with step_bar("train") as progress:
        training = jigsaw.train(
            model,
            sample.read_options(data, field, split, mean=mean, std=std),
            ratio,
            out=out,
            test=sample.read_optional(test, field, mean=mean, std=std),
            options=chosen,
            seed=seed,
            device=device,
            facts=facts_of_run(),
            progress=progress,
            on_note=info,
        )
    if report is not None:
        training.to_html(report)
        info(f"report: {report}")
    if json:
        print_report("jigsaw train", {"out": str(out), **training.summary()})
    else:
        print_result(f"{out}: {training}")
    return 0


def evaluate(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...", help="Folders: plain models, or outputs of `regauge jigsaw train`."
        ),
    ],
    data: Data,
    ratios: Annotated[
        str,
        typer.Option("--ratios", metavar="R,R", help="Shares of patches to shuffle at inference."),
    ] = "0.1,0.3,0.5,0.7,0.9",
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
    """Measure how shuffled patches change what models predict.

    Reports top-1 accuracy without puzzles, and for every ratio top-1, agreement with the
    unshuffled prediction, and distance of the features.
    """
    start_run(json, report, threads=threads, device=device)
    from regauge import jigsaw

    with step_bar("evaluate") as progress:
        evaluation = jigsaw.evaluate(
            models,
            sample.read_options(data, field, split, mean=mean, std=std, samples=samples),
            ratios=parse_numbers(ratios, "--ratios") or (),
            patch=patch,
            batch_size=batch,
            seed=seed,
            device=device,
            facts=facts_of_run(),
            progress=progress,
            on_note=info,
        )
    return deliver(evaluation.results, str(evaluation), json, report)


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
    umap: Annotated[
        bool,
        typer.Option(
            "--umap", help="Also project positions with UMAP.", rich_help_panel=options.ADVANCED
        ),
    ] = False,
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
    """Study the position embeddings of models.

    Reports explained variance, eigenvalues, projections, and how well positions can be
    predicted from the embeddings. With data also the attention of CLS in the last layer, errors
    under corruptions, and results on hard and out-of-distribution images.
    """
    start_run(json, report, threads=threads, device=device)
    from regauge import jigsaw

    images, difficult, outliers = (
        sample.read_optional(uri, field, split, mean=mean, std=std, samples=count)
        for uri, count in ((data, samples), (hard, None), (outside, None))
    )
    with step_bar("study") as progress:
        found = jigsaw.study(
            models,
            images,
            corruptions=corruptions,
            hard=difficult,
            outside=outliers,
            umap=umap,
            patch=patch,
            batch_size=batch,
            seed=seed,
            device=device,
            facts=facts_of_run(),
            progress=progress,
        )
    return deliver(found.results, str(found), json, report)
