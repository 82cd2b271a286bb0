"""`regauge audit split`: what a server of split learning learns of the images or texts that a
client trains and predicts with.
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

    from regauge.checkpoints.reader import Checkpoint
    from regauge.data.tasks import Examples
    from regauge.results.findings import Results

SHARES = (0.5, 0.3)  # of the data: the client's, the attacker's; the rest is tested on


def split(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A classifier of images (ViT, DeiT), or a model of texts (BERT, GPT-2), plain: "
            "the folder that client and server start from.",
        ),
    ],
    data: Annotated[
        str,
        typer.Option(
            "--data",
            metavar="URI",
            help="Images or texts, and labels of its task. Half is the client's, some the "
            "attacker's.",
        ),
    ],
    defence: Annotated[
        list[str] | None,
        typer.Option(
            "--defence",
            metavar="D[+D]",
            help="A combination to audit, as noise=0.5 or low-pass=0.1+rows. May be repeated. "
            "Default: noise, low-pass and batch shuffle, each with "
            "and without rows.",
        ),
    ] = None,
    noises: Annotated[
        str,
        typer.Option(
            "--noises", metavar="S,S", help="Levels of the default's noise on the stream."
        ),
    ] = "0.3,1",
    radii: Annotated[
        str, typer.Option("--radii", metavar="R,R", help="Radii of the default's low-pass filter.")
    ] = "0.1,0.2",
    attacks: Annotated[
        str | None,
        typer.Option(
            "--attacks",
            metavar="A,A",
            help="Some of the attacks, by name, or all, which is the default.",
        ),
    ] = None,
    is_random: Annotated[
        bool,
        typer.Option(
            "--random-weights", help="Start from random weights and not from the model's."
        ),
    ] = False,
    field: sample.Field = None,
    attributes: Annotated[
        str | None,
        typer.Option(
            "--attributes",
            metavar="F,F",
            help="Fields that say yes or no, for a model that answers several at once.",
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
            "--samples", min=50, metavar="N", help="Use N examples of the data. Default: all."
        ),
    ] = None,
    epochs: Annotated[
        int,
        typer.Option(
            "--epochs", min=1, metavar="N", help="Of the client's and the server's training."
        ),
    ] = 10,
    batch: options.Batch = 32,
    rate: Annotated[
        float, typer.Option("--lr", metavar="R", help="Of their optimizer, AdamW, along a cosine.")
    ] = 1e-3,
    attacked: Annotated[
        int,
        typer.Option(
            "--attacked",
            min=2,
            metavar="N",
            help="Test images or texts that the attacker is after.",
        ),
    ] = 64,
    attacker: Annotated[
        str,
        typer.Option(
            "--attacker",
            metavar="WIDTH,DEPTH,EPOCHS",
            help="Its decoder, and the most that it trains.",
        ),
    ] = "128,2,200",
    lpips: Annotated[
        Path | None,
        typer.Option(
            "--lpips", metavar="FILE", help="AlexNet with the heads of LPIPS, for LPIPS and F-SIM."
        ),
    ] = None,
    gallery: options.Gallery = 6,
    fail_above: options.FailAbove = None,
    seed: Annotated[int, options.seed_option("The seed of samples, trainings and draws.")] = 0,
    json: options.JsonFile = None,
    report: options.ImageReport = None,
    device: options.Device = "cpu",
    threads: options.Threads = None,
    verbose: options.Verbose = 0,
) -> int:
    """What does the server learn? Trains the model split, with each combination of defences, and
    attacks what the server was sent: images by the paper's decoder, and by decoders and inversions
    that expect shuffles; texts token by token. Utility against privacy, with a verdict in words.
    """
    started = time.monotonic()
    check_outputs(json, report)
    from regauge.audit.split.victims import parse_combination
    from regauge.errors import need

    levels, radiuses = _parse_numbers(noises, "--noises"), _parse_numbers(radii, "--radii")
    for combination in defence or default_combinations(levels, radiuses):
        parse_combination(combination)
    budget = _parse_budget(attacker)
    _select_attacks(attacks)
    if not 0 < rate < math.inf:
        raise typer.BadParameter(f"{rate} is no rate", param_hint="--lr")
    check_device(device)
    from regauge.audit.split import SplitCase, audit_split, audit_texts
    from regauge.results.metrics import Lpips
    from regauge.split import OptimizerConfig
    from regauge.split.client.train import Run

    set_threads(threads)
    metric = None if lpips is None else Lpips(lpips)
    module, checkpoint = load_plain_model(model, is_random, seed)
    named = tuple(part.strip() for part in (attributes or "").split(",") if part.strip())
    source = sample.Sample(data, field, data_split, tokenizer, length, mean, std, named)
    if not resize:
        require_size(source, module)
    examples, task = source.read(module, checkpoint)
    reads = task["kind"] != "images"
    chosen, what = _select_attacks(attacks, reads), "texts" if reads else "images"
    if not reads:
        need("torchmetrics", "audit")
    combinations = defence or default_combinations(levels, radiuses, reads)
    train, own, test = split_examples(examples, samples, seed)
    info(
        f"{len(train)} {what} of the client's, {len(own)} of the attacker's, {len(test)} to "
        f"test on; {min(attacked, len(test))} are attacked"
    )
    steps = math.ceil(len(train) / batch) * epochs
    how = OptimizerConfig(
        "adamw",
        rate,
        weight_decay=0.01,
        schedule="cosine",
        warmup=max(1, steps // 10),
        steps=steps + 1,
    )
    pixels = task.get("mean", ()), task.get("std", ())
    case = SplitCase(
        module.to(device),
        train,
        own,
        test,
        *pixels,
        how,
        Run(steps, batch, seed),
        attacked,
        Path(str(data)).stem,
    )
    with step_bar("audit") as progress:
        if reads:
            found = audit_texts(
                case, combinations, attacks=chosen, fail_above=fail_above, progress=progress
            )
        else:
            found = audit_split(
                case,
                combinations,
                attacks=chosen,
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
        f"client's {what}": len(train),
        f"attacker's {what}": len(own),
        "epochs": epochs,
        "batch": batch,
        "rate": rate,
    }
    about |= {"seed": seed} if reads else {"attacker": budget.to_dict(), "seed": seed}
    facts = {
        **facts_of_run(),
        **about,
        **found.facts,
        "seconds": round(time.monotonic() - started, 1),
    }
    results = replace(found, facts=facts)
    return deliver(results, text_of(results), json, report)


def default_combinations(noises: list[float], radii: list[float], reads: bool = False) -> list[str]:
    """The rows of 000's Table 6, over levels of noise and radii: each without row permutation, and
    with it. Of them, what fits texts.
    """
    images = [*(f"low-pass={r:g}" for r in radii), "batch-shuffle=0.5"]
    levels = ["none", *(f"noise={s:g}" for s in noises), *([] if reads else images)]
    return [text for c in levels for text in (c, "rows" if c == "none" else f"{c}+rows")]


def split_examples(
    examples: Examples, samples: int | None, seed: int
) -> tuple[Examples, Examples, Examples]:
    """The client's, the attacker's, and those to test on: none is in two."""
    import numpy as np

    order = np.random.default_rng(seed).permutation(len(examples))[:samples]
    first, second = (round(sum(SHARES[:i]) * len(order)) for i in (1, 2))
    return (
        examples.only(order[:first]),
        examples.only(order[first:second]),
        examples.only(order[second:]),
    )


def _parse_numbers(text: str, name: str) -> list[float]:
    return sample.parse_numbers(text, name) or [] if text.strip() else []


def _select_attacks(text: str | None, reads: bool | None = None) -> Any:
    """Attacks by name: those on texts, on images, or (None) any, only to see that there are
    such.
    """
    from regauge.audit.split.attempts import ATTACKS
    from regauge.audit.split.text_audit import TEXT_ATTACKS

    known: Sequence[Any] = (
        [*ATTACKS, *TEXT_ATTACKS] if reads is None else TEXT_ATTACKS if reads else ATTACKS
    )
    names = [part.strip() for part in (text or "").split(",") if part.strip()]
    unknown = [n for n in names if n not in {"all", *(a.name for a in known)}]
    if unknown:
        raise typer.BadParameter(
            f'there is no attack "{unknown[0]}"; there are: {", ".join(a.name for a in known)}, '
            "or all",
            param_hint="--attacks",
        )
    return tuple(a for a in known if not names or "all" in names or a.name in names)


def _parse_budget(text: str) -> Any:
    from regauge.audit.split.attempts import Budget

    given = text.split(",")
    if len(given) != 3 or not all(p.strip().isdecimal() and int(p) > 0 for p in given):
        raise typer.BadParameter(
            f"{text!r} is not WIDTH,DEPTH,EPOCHS, as in 128,2,200", param_hint="--attacker"
        )
    hidden, depth, epochs = map(int, given)
    return Budget(hidden, depth, epochs)


def load_plain_model(model: str, is_random: bool, seed: int) -> tuple[torch.nn.Module, Checkpoint]:
    """The model as client and server start from it."""
    from regauge.checkpoints.reader import open_checkpoint
    from regauge.errors import LockError
    from regauge.locking.lock import record_of
    from regauge.models.load import load_model, reinitialize

    checkpoint = open_checkpoint(model)
    record = record_of(checkpoint)
    if record is not None:
        raise LockError(
            f"{model} is locked by the key {record.key}",
            hint="audit the plain model: columns under one key hide little (audit lock)",
        )
    module = load_model(checkpoint, "float32")
    return reinitialize(module, seed) if is_random else module, checkpoint


def require_size(source: sample.Sample, module: torch.nn.Module) -> None:
    """Refuse images that would have to be made another size."""
    import numpy as np

    from regauge.data.datasets import DataError, EncodedImages, open_data
    from regauge.data.tasks import size_of

    fields = sample.parse_fields(source.field)
    pictures = open_data(
        source.uri,
        fields=None
        if fields is None
        else {k: v for k, v in fields.items() if k == "image"} or None,
        split=source.split,
    )
    size = size_of(module)
    if size is None or "image" not in pictures.fields:
        return
    held = pictures["image"]
    shapes = held.sizes if isinstance(held, EncodedImages) else {np.asarray(held).shape[1:3]}
    other = sorted(shapes - {size})
    if other:
        told = (
            f"some images of {pictures.name}"
            if len(shapes) > 1
            else f"the images of {pictures.name}"
        )
        raise DataError(
            f"{told} are {' x '.join(map(str, other[0]))}, and the model reads {size[0]} x "
            f"{size[1]}",
            hint="--resize makes them fit",
        )


def text_of(results: Results, tables: int = 1) -> str:
    """Results as a terminal shows them: the first tables, what was not tried, and the verdict."""
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
