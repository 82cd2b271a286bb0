"""`regauge audit split`: what the server of split learning learns about a client's
images or texts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from regauge.cli import options, sample
from regauge.cli.console import info, step_bar
from regauge.cli.run import (
    check_outputs,
    deliver,
    facts_of_run,
    saved_steps,
    set_threads,
    state_of,
)
from regauge.core.options import require_device


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
    is_random: Annotated[
        bool,
        typer.Option(
            "--random-weights",
            help="Start from random weights instead of the model's.",
            rich_help_panel=options.ADVANCED,
        ),
    ] = False,
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
    """Measure what the server of split learning learns.

    Trains the model by split learning under each combination of defences, and attacks the
    features and gradients that the server receives: images by decoders and inversions that adapt
    to shuffles, texts token by token. Reports utility against privacy, and a verdict.
    """
    check_outputs(json, report)
    noise_levels, radius_levels = (
        _parse_numbers(noises, "--noises"),
        _parse_numbers(radii, "--radii"),
    )
    if not 0 < lr < math.inf:
        raise typer.BadParameter(f"must be > 0 and finite, got {lr}", param_hint="--lr")
    source = sample.read_options(
        data,
        field,
        data_split,
        tokenizer,
        length,
        mean,
        std,
        attributes=tuple(parse_names(attributes)),
    )
    hidden, depth, most_epochs = _parse_attacker(attacker)
    require_device(device)
    set_threads(threads)
    from regauge import audit
    from regauge.audit.split_audit.attempts import Budget

    options = audit.SplitOptions(
        attacks=parse_names(attacks),
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
        budget=Budget(hidden, depth, most_epochs),
        noises=noise_levels,
        radii=radius_levels,
    )
    state = state_of("audit-split", json, report)
    with saved_steps(state), step_bar("audit") as progress, unknown_attacks():
        result = audit.split(
            model,
            source,
            defence or None,
            options=options,
            fail_above=fail_above,
            seed=seed,
            facts=facts_of_run(),
            on_loaded=lambda kind, sizes: info(sizes),
            state=state,
            resume=resume,
            progress=progress,
        )
    code = deliver(result.results, str(result), json, report, must_decide=True)
    result.delete_state()
    return code


@contextmanager
def unknown_attacks() -> Iterator[None]:
    """Report the name of an unknown attack as a wrong value of --attacks."""
    from regauge.errors import AttackNameError

    try:
        yield
    except AttackNameError as error:
        raise typer.BadParameter(f"{error}; {error.hint}", param_hint="--attacks") from error


def parse_names(text: str | None) -> list[str]:
    """Split a comma-separated list of names."""
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def _parse_numbers(text: str, name: str) -> list[float]:
    """Parse comma-separated numbers; an empty text gives an empty list."""
    return sample.parse_numbers(text, name) or [] if text.strip() else []


def _parse_attacker(text: str) -> list[int]:
    """Parse WIDTH,DEPTH,EPOCHS."""
    numbers = text.split(",")
    if len(numbers) != 3 or not all(p.strip().isdecimal() and int(p) > 0 for p in numbers):
        raise typer.BadParameter(
            f"must be WIDTH,DEPTH,EPOCHS, as in 128,2,200, got {text!r}", param_hint="--attacker"
        )
    return [int(p) for p in numbers]
