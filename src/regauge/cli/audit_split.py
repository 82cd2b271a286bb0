"""`regauge audit split`: what the server of split learning learns about a client's
images or texts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from regauge.cli import options, sample
from regauge.cli.audits import run_audit
from regauge.cli.console import info
from regauge.cli.parsers import check_lr, parse_names, parse_numbers, parse_sizes
from regauge.cli.run import start_run


def split(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Unlocked folder that client and server start from: an image classifier (ViT, "
            "DeiT) or a text model (BERT, GPT-2).",
        ),
    ],
    data: Annotated[
        str,
        typer.Option(
            "--data",
            metavar="URI",
            help="Images or texts with labels. Half belong to the client, 30 % to the attacker.",
        ),
    ],
    defence: Annotated[
        list[str] | None,
        typer.Option(
            "--defence",
            metavar="D[+D]",
            help="Combination of defences, as noise=0.5 or low-pass=0.1+rows. Repeatable. "
            "Default: noise, low-pass and batch shuffle, each with and without rows.",
        ),
    ] = None,
    noises: Annotated[
        str,
        typer.Option(
            "--noises",
            metavar="S,S",
            help="Noise levels of the default combinations.",
            rich_help_panel=options.ADVANCED,
        ),
    ] = "0.3,1",
    radii: Annotated[
        str,
        typer.Option(
            "--radii",
            metavar="R,R",
            help="Low-pass radii of the default combinations.",
            rich_help_panel=options.ADVANCED,
        ),
    ] = "0.1,0.2",
    attacks: Annotated[
        str | None,
        typer.Option(
            "--attacks",
            metavar="A,A",
            help="Attacks by name, or all. Default: all.",
        ),
    ] = None,
    is_random: options.RandomWeights = False,
    field: sample.Field = None,
    attributes: sample.Attributes = None,
    data_split: sample.Split = "train",
    tokenizer: sample.Tokenizer = None,
    length: sample.Length = None,
    mean: sample.Mean = None,
    std: sample.Std = None,
    resize: options.Resize = False,
    samples: Annotated[
        int | None,
        typer.Option(
            "--samples",
            min=50,
            metavar="N",
            help="Examples of the data to use. Default: all.",
            rich_help_panel=options.DATA,
        ),
    ] = None,
    epochs: Annotated[
        int,
        typer.Option(
            "--epochs",
            min=1,
            metavar="N",
            help="Training epochs of client and server.",
            rich_help_panel=options.TRAINING,
        ),
    ] = 10,
    batch: options.Batch = 32,
    lr: Annotated[
        float,
        typer.Option(
            "--lr",
            metavar="R",
            help="Learning rate of AdamW, with a cosine schedule.",
            rich_help_panel=options.TRAINING,
        ),
    ] = 1e-3,
    attacked: Annotated[
        int,
        typer.Option(
            "--attacked",
            min=2,
            metavar="N",
            help="Test images or texts to attack.",
            rich_help_panel=options.ADVANCED,
        ),
    ] = 64,
    attacker: Annotated[
        str,
        typer.Option(
            "--attacker",
            metavar="WIDTH,DEPTH,EPOCHS",
            help="Width and depth of the attacker's decoder, and its largest number of epochs.",
            rich_help_panel=options.ADVANCED,
        ),
    ] = "128,2,200",
    lpips: Annotated[
        Path | None,
        typer.Option(
            "--lpips",
            metavar="FILE",
            help="AlexNet weights with the LPIPS heads, for LPIPS and F-SIM.",
            rich_help_panel=options.ADVANCED,
        ),
    ] = None,
    gallery: options.Gallery = 6,
    fail_above: options.FailAbove = None,
    seed: Annotated[int, options.seed_option("Seed of samples, training and noise.")] = 0,
    resume: options.Resume = False,
    json: options.JsonFile = None,
    report: options.ImageReport = None,
    device: options.Device = "cpu",
    threads: options.Threads = None,
    verbose: options.Verbose = 0,
) -> int:
    """Measure what features of split learning leak.

    Trains the model by split learning, with each combination of defences, and attacks the
    features and gradients that the server received. Reports the accuracy of the trained model,
    what the attacks recover, and a verdict in words.
    """
    noise_levels = parse_numbers(noises.strip() or None, "--noises") or []
    radius_levels = parse_numbers(radii.strip() or None, "--radii") or []
    check_lr(lr)
    source = sample.read_options(
        data,
        field,
        data_split,
        tokenizer,
        length,
        mean,
        std,
        attributes=tuple(parse_names(attributes) or ()),
    )
    width, depth, most_epochs = parse_sizes(
        attacker, "--attacker", "WIDTH,DEPTH,EPOCHS", "128,2,200"
    )
    start_run(json, report, threads=threads, device=device)
    from regauge import audit
    from regauge.audit.split_audit.attempts import Budget

    options = audit.SplitOptions(
        attacks=parse_names(attacks) or (),
        samples=samples,
        fresh=is_random,
        resize=resize,
        lpips=lpips,
        gallery=gallery,
        device=device,
        epochs=epochs,
        batch_size=batch,
        lr=lr,
        attacked=attacked,
        budget=Budget(width, depth, most_epochs),
        noises=noise_levels,
        radii=radius_levels,
    )
    return run_audit(
        lambda **run: audit.split(
            model,
            source,
            defence or None,
            options=options,
            fail_above=fail_above,
            seed=seed,
            on_loaded=lambda kind, sizes: info(sizes),
            **run,
        ),
        "split",
        json,
        report,
        resume,
    )
