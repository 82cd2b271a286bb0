"""`regauge audit split`: what the server of split learning learns about a client's
images or texts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regauge.cli import options, sample
from regauge.cli.console import info, step_bar
from regauge.cli.run import check_device, check_outputs, deliver, facts_of_run, set_threads

if TYPE_CHECKING:
    import torch

    from regauge.audit.split.attempts import Budget
    from regauge.checkpoints.reader import Checkpoint
    from regauge.data.sources import DataSource
    from regauge.data.tasks import Examples
    from regauge.results.findings import Results

SHARES = (0.5, 0.3)  # of the data: the client's, the attacker's; the rest is the test set


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
        typer.Option("--noises", metavar="S,S", help="Noise levels of the default combinations."),
    ] = "0.3,1",
    radii: Annotated[
        str,
        typer.Option("--radii", metavar="R,R", help="Low-pass radii of the default combinations."),
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
        typer.Option("--random-weights", help="Start from random weights instead of the model's."),
    ] = False,
    field: sample.Field = None,
    attributes: Annotated[
        str | None,
        typer.Option(
            "--attributes",
            metavar="F,F",
            help="Yes/no columns, for a multi-label model.",
        ),
    ] = None,
    data_split: sample.Split = "train",
    tokenizer: sample.Tokenizer = None,
    length: sample.Length = None,
    mean: sample.Mean = None,
    std: sample.Std = None,
    resize: options.Resize = False,
    samples: Annotated[
        int | None,
        typer.Option(
            "--samples", min=50, metavar="N", help="Examples of the data to use. Default: all."
        ),
    ] = None,
    epochs: Annotated[
        int,
        typer.Option("--epochs", min=1, metavar="N", help="Training epochs of client and server."),
    ] = 10,
    batch: options.Batch = 32,
    lr: Annotated[
        float,
        typer.Option("--lr", metavar="R", help="Learning rate of AdamW, with a cosine schedule."),
    ] = 1e-3,
    attacked: Annotated[
        int,
        typer.Option(
            "--attacked",
            min=2,
            metavar="N",
            help="Test images or texts to attack.",
        ),
    ] = 64,
    attacker: Annotated[
        str,
        typer.Option(
            "--attacker",
            metavar="WIDTH,DEPTH,EPOCHS",
            help="Width and depth of the attacker's decoder, and its largest number of epochs.",
        ),
    ] = "128,2,200",
    lpips: Annotated[
        Path | None,
        typer.Option(
            "--lpips",
            metavar="FILE",
            help="AlexNet weights with the LPIPS heads, for LPIPS and F-SIM.",
        ),
    ] = None,
    gallery: options.Gallery = 6,
    fail_above: options.FailAbove = None,
    seed: Annotated[int, options.seed_option("Seed of samples, training and noise.")] = 0,
    json: options.JsonFile = None,
    report: options.ImageReport = None,
    device: options.Device = "cpu",
    threads: options.Threads = None,
    verbose: options.Verbose = 0,
) -> int:
    """Measure what the server learns. Trains the model split, with each combination of defences,
    and attacks the features and gradients the server received: images by the paper's decoder, and
    by decoders and inversions that expect shuffles; texts token by token. Reports utility against
    privacy, with a verdict in words.
    """
    started = time.monotonic()
    check_outputs(json, report)
    from regauge.audit.split.victims import parse_combination
    from regauge.errors import need

    noise_levels, radius_levels = (
        _parse_numbers(noises, "--noises"),
        _parse_numbers(radii, "--radii"),
    )
    for combination in defence or default_combinations(noise_levels, radius_levels):
        parse_combination(combination)
    budget = _parse_budget(attacker)
    _select_attacks(attacks)
    if not 0 < lr < math.inf:
        raise typer.BadParameter(f"must be > 0 and finite, got {lr}", param_hint="--lr")
    check_device(device)
    from regauge.audit.split import SplitCase, audit_split, audit_texts
    from regauge.results.metrics import Lpips
    from regauge.split import OptimizerConfig
    from regauge.split.client.train import Run

    set_threads(threads)
    metric = None if lpips is None else Lpips(lpips)
    module, checkpoint = load_plain_model(model, is_random, seed)
    attribute_names = tuple(part.strip() for part in (attributes or "").split(",") if part.strip())
    source = sample.read_options(
        data, field, data_split, tokenizer, length, mean, std, attributes=attribute_names
    )
    if not resize:
        require_size(source, module)
    examples, task = source.read(module, checkpoint)
    is_text = task["kind"] != "images"
    selected, kind = _select_attacks(attacks, is_text), "texts" if is_text else "images"
    if not is_text:
        need("torchmetrics", "audit")
    combinations = defence or default_combinations(noise_levels, radius_levels, is_text)
    train, attacker_examples, test = split_examples(examples, samples, seed)
    info(
        f"{len(train)} client {kind}, {len(attacker_examples)} attacker {kind}, {len(test)} test "
        f"{kind}; {min(attacked, len(test))} to attack"
    )
    steps = math.ceil(len(train) / batch) * epochs
    optimizer = OptimizerConfig(
        "adamw",
        lr,
        weight_decay=0.01,
        schedule="cosine",
        warmup=max(1, steps // 10),
        steps=steps + 1,
    )
    pixels = task.get("mean", ()), task.get("std", ())
    case = SplitCase(
        module.to(device),
        train,
        attacker_examples,
        test,
        *pixels,
        optimizer,
        Run(steps, batch, seed),
        attacked,
        Path(str(data)).stem,
    )
    with step_bar("audit") as progress:
        if is_text:
            audit = audit_texts(
                case, combinations, attacks=selected, fail_above=fail_above, progress=progress
            )
        else:
            audit = audit_split(
                case,
                combinations,
                attacks=selected,
                budget=budget,
                lpips=metric,
                pictures=gallery,
                fail_above=fail_above,
                progress=progress,
            )
    about: dict[str, Any] = {
        "model": model,
        "weights": "random" if is_random else "the model's",
        "data": data,
        "tested on": len(test),
    }
    about |= {
        f"client's {kind}": len(train),
        f"attacker's {kind}": len(attacker_examples),
        "epochs": epochs,
        "batch": batch,
        "rate": lr,
    }
    about |= {"seed": seed} if is_text else {"attacker": budget.to_dict(), "seed": seed}
    facts = {
        **facts_of_run(),
        **about,
        **audit.facts,
        "seconds": round(time.monotonic() - started, 1),
    }
    results = replace(audit, facts=facts)
    return deliver(results, text_of(results), json, report)


def default_combinations(
    noises: list[float], radii: list[float], is_text: bool = False
) -> list[str]:
    """Return the rows of paper 000's Table 6 at these noise levels and radii, each without and with
    row permutation. For texts, only those that apply.
    """
    images = [*(f"low-pass={r:g}" for r in radii), "batch-shuffle=0.5"]
    levels = ["none", *(f"noise={s:g}" for s in noises), *([] if is_text else images)]
    return [text for c in levels for text in (c, "rows" if c == "none" else f"{c}+rows")]


def split_examples(
    examples: Examples, samples: int | None, seed: int
) -> tuple[Examples, Examples, Examples]:
    """Split the examples into the client's, the attacker's and the test set, without overlap."""
    import numpy as np

    order = np.random.default_rng(seed).permutation(len(examples))[:samples]
    client_end, attacker_end = (round(sum(SHARES[:i]) * len(order)) for i in (1, 2))
    return (
        examples.only(order[:client_end]),
        examples.only(order[client_end:attacker_end]),
        examples.only(order[attacker_end:]),
    )


def _parse_numbers(text: str, name: str) -> list[float]:
    """Parse comma-separated numbers; an empty text gives an empty list."""
    return sample.parse_numbers(text, name) or [] if text.strip() else []


def _select_attacks(text: str | None, is_text: bool | None = None) -> Any:
    """Return attacks by name: on texts, on images, or (None) on either, to check the names."""
    from regauge.audit.split.attempts import ATTACKS
    from regauge.audit.split.text_audit import TEXT_ATTACKS

    candidates: Sequence[Any] = (
        [*ATTACKS, *TEXT_ATTACKS] if is_text is None else TEXT_ATTACKS if is_text else ATTACKS
    )
    names = [part.strip() for part in (text or "").split(",") if part.strip()]
    unknown = [n for n in names if n not in {"all", *(a.name for a in candidates)}]
    if unknown:
        raise typer.BadParameter(
            f'must be among {", ".join(a.name for a in candidates)}, or all, got "{unknown[0]}"',
            param_hint="--attacks",
        )
    return tuple(a for a in candidates if not names or "all" in names or a.name in names)


def _parse_budget(text: str) -> Budget:
    """Parse WIDTH,DEPTH,EPOCHS."""
    from regauge.audit.split.attempts import Budget

    numbers = text.split(",")
    if len(numbers) != 3 or not all(p.strip().isdecimal() and int(p) > 0 for p in numbers):
        raise typer.BadParameter(
            f"must be WIDTH,DEPTH,EPOCHS, as in 128,2,200, got {text!r}", param_hint="--attacker"
        )
    hidden, depth, epochs = map(int, numbers)
    return Budget(hidden, depth, epochs)


def load_plain_model(model: str, is_random: bool, seed: int) -> tuple[torch.nn.Module, Checkpoint]:
    """Load the unlocked model that client and server start from."""
    from regauge.checkpoints.reader import open_checkpoint
    from regauge.errors import LockError
    from regauge.locking.lock import record_of
    from regauge.models.load import load_model, reinitialize

    checkpoint = open_checkpoint(model)
    record = record_of(checkpoint)
    if record is not None:
        raise LockError(
            f"{model} is locked by the key {record.key}",
            hint="audit the plain model; a lock adds little privacy (regauge audit lock)",
        )
    module = load_model(checkpoint, "float32")
    return reinitialize(module, seed) if is_random else module, checkpoint


def require_size(source: DataSource, module: torch.nn.Module) -> None:
    """Raise unless the images have the model's input size."""
    import numpy as np

    from regauge.data.datasets import EncodedImages, open_data
    from regauge.data.tasks import size_of
    from regauge.errors import DataError

    fields = dict(source.fields) or None
    dataset = open_data(
        source.uri,
        fields=None
        if fields is None
        else {k: v for k, v in fields.items() if k == "image"} or None,
        split=source.split,
    )
    size = size_of(module)
    if size is None or "image" not in dataset.fields:
        return
    images = dataset["image"]
    shapes = images.sizes if isinstance(images, EncodedImages) else {np.asarray(images).shape[1:3]}
    mismatched = sorted(shapes - {size})
    if mismatched:
        amount = "all" if len(shapes) > 1 else "the"
        raise DataError(
            f"{amount} images of {dataset.name} must be {size[0]} x {size[1]}, got "
            f"{' x '.join(map(str, mismatched[0]))}",
            hint="pass --resize to resize them",
        )


def text_of(results: Results, tables: int = 1) -> str:
    """Format results for a terminal: the first tables, what was not measured, and the verdict."""
    from regauge.models.summary import format_columns
    from regauge.results.report import format_number

    lines = [results.title, ""]
    for table in results.tables[:tables]:
        rows = [
            table.columns,
            *(tuple("" if c is None else format_number(c) for c in row) for row in table.rows),
        ]
        lines += [
            format_columns(rows, right=tuple(range(1, len(table.columns)))),
            "",
            table.note,
            "",
        ]
    lines += [f"not measured: {u}" for u in results.unchecked]
    lines += [
        f"FAILS  {f.id}: {f.measure} {f.value:.3f}, floor {f.floor:.3f}, undefended {f.ceiling:.3f}"
        for f in results.failed
    ]
    return "\n".join([*lines, "", *results.facts["verdict"]])
