"""`regauge split train` and `predict`: the client's side, with data, embedding and head."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regauge.cli import options, sample
from regauge.cli.console import info, print_report, print_result, step_bar
from regauge.cli.keygen import read_key
from regauge.cli.run import start_run
from regauge.cli.split_server import (
    Clip,
    Insecure,
    LearningRate,
    Momentum,
    Schedule,
    TlsFiles,
    Warmup,
    WeightDecay,
    log_to_stderr,
)

if TYPE_CHECKING:
    from regauge.core.progress import Progress
    from regauge.defences.split import Defence
    from regauge.split import ConnectOptions


Codec = StrEnum("Codec", ["bf16", "f16", "q8"])
Source = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Folder or .safetensors file with embedding and head: a whole model, or an "
        "output of train.",
    ),
]
Data = Annotated[
    str,
    typer.Option(
        "--data",
        metavar="URI",
        help="npz, parquet, csv, tsv, txt, jsonl, a folder of images, a hub id or digits (of "
        "scikit-learn). Stays here.",
    ),
]
Server = Annotated[
    str,
    typer.Option(
        "--server", metavar="ADDR", help="Address of the server, as in server.example:7000."
    ),
]
ClientName = Annotated[
    str | None,
    typer.Option(
        "--client-name",
        metavar="NAME",
        help="Client whose certificate in the folder to use. Default: its only one.",
    ),
]
KeyOption = Annotated[
    Path | None,
    typer.Option(
        "-k",
        "--key",
        metavar="KEY",
        help="Key that locks MODEL and the server's backbone.",
    ),
]
RowsOption = Annotated[
    options.Unit | None,
    typer.Option("--rows", help="Shuffle the tokens of every batch, or of every sample."),
]
DefenceOption = Annotated[
    list[str] | None,
    typer.Option(
        "--defence",
        metavar="D[+D]",
        help="Defence for outgoing features: noise=0.5, low-pass=0.05+rows, ... "
        "(docs/guides/split.md). Repeatable.",
    ),
]
KeepCls = Annotated[
    bool,
    typer.Option(
        "--keep-cls",
        help="With --rows: leave the first token in its place.",
        rich_help_panel=options.ADVANCED,
    ),
]
CodecOption = Annotated[
    Codec | None,
    typer.Option(
        "--codec",
        help="Lossy codec for features: half the bytes, or a quarter.",
        rich_help_panel=options.ADVANCED,
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        "--dtype",
        metavar="D",
        help="Dtype of the weights in memory; must equal the server's.",
        rich_help_panel=options.ADVANCED,
    ),
]
Patience = Annotated[
    float,
    typer.Option(
        "--patience",
        min=1.0,
        metavar="S",
        help="Seconds to retry while the server does not answer.",
        rich_help_panel=options.ADVANCED,
    ),
]


def train(
    model: Source,
    data: Data,
    server: Server,
    out: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            metavar="OUT",
            help="New folder for the trained embedding and head.",
        ),
    ],
    tls: TlsFiles = None,
    client_name: ClientName = None,
    insecure: Insecure = False,
    key: KeyOption = None,
    passphrase_file: options.PassphraseFile = None,
    rows: RowsOption = None,
    keep_cls: KeepCls = False,
    defence: DefenceOption = None,
    codec: CodecOption = None,
    journal: Annotated[
        Path | None,
        typer.Option(
            "--journal",
            metavar="DIR",
            help="Folder for the state to resume from after a kill. Contains secrets.",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume the run of the journal.")
    ] = False,
    every: Annotated[
        int,
        typer.Option(
            "--every",
            min=1,
            metavar="N",
            help="Steps between checkpoints in the journal.",
            rich_help_panel=options.ADVANCED,
        ),
    ] = 50,
    epochs: Annotated[
        int | None,
        typer.Option(
            "--epochs",
            min=1,
            metavar="N",
            help="Passes over the data. Default: 1.",
            rich_help_panel=options.TRAINING,
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps",
            min=1,
            metavar="N",
            help="Training steps, instead of epochs.",
            rich_help_panel=options.TRAINING,
        ),
    ] = None,
    batch: options.Batch = 16,
    lr: LearningRate = None,
    optimizer: Annotated[
        options.Optimizer | None,
        typer.Option(
            "--optimizer",
            help="Optimizer of embedding and head. Default: the server's.",
            rich_help_panel=options.TRAINING,
        ),
    ] = None,
    schedule: Annotated[
        Schedule | None,
        typer.Option(
            "--schedule",
            help="Learning rate schedule, to 0 at the last step or constant.",
            rich_help_panel=options.TRAINING,
        ),
    ] = None,
    warmup: Warmup = None,
    clip: Clip = None,
    weight_decay: WeightDecay = None,
    momentum: Momentum = None,
    seed: Annotated[
        int, options.seed_option("Seed of the order of examples and of local dropout.")
    ] = 0,
    field: sample.Field = None,
    split: sample.Split = "train",
    tokenizer: sample.Tokenizer = None,
    length: sample.Length = None,
    mean: sample.Mean = None,
    std: sample.Std = None,
    dtype: Dtype = "float32",
    patience: Patience = 120.0,
    device: options.Device = "cpu",
    threads: options.Threads = None,
    json: options.Json = False,
    verbose: options.Verbose = 0,
) -> int:
    """Train embedding and head with a backbone on a server.

    The data stay here. Training options default to the server's.
    """
    started = time.monotonic()
    if epochs is not None and steps is not None:
        raise typer.BadParameter("pass either --epochs or --steps, not both")
    if resume and journal is None:
        raise typer.BadParameter("requires the --journal DIR of the run", param_hint="--resume")
    source = sample.read_options(data, field, split, tokenizer, length, mean, std)
    start_run(threads=threads, device=device)
    connection = _connect_options(
        key,
        passphrase_file,
        _parse_defences(rows, keep_cls, defence),
        codec,
        tls=tls,
        client_name=client_name,
        insecure=insecure,
        patience=patience,
        dtype=dtype,
        device=device,
    )
    from regauge.split import TrainOptions
    from regauge.split import train as run

    training = TrainOptions(
        epochs=epochs,
        steps=steps,
        batch_size=batch,
        seed=seed,
        save_every=every,
        lr=lr,
        optimizer=None if optimizer is None else optimizer.value,
        schedule=None if schedule is None else schedule.value,
        warmup=warmup,
        clip=clip,
        weight_decay=weight_decay,
        momentum=momentum,
    )
    with (
        log_to_stderr(verbose),
        _stop_signals() as stop,
        step_bar("train") as progress,
    ):
        result = run(
            model,
            server,
            source,
            out=out,
            journal=journal,
            resume=resume,
            options=training,
            connection=connection,
            on_step=_count_steps(progress),
            stop=stop.is_set,
        )
    last = f", last loss {result.losses[-1]:.4f}" if result.losses else ""
    info(
        f"wrote embedding and head to {out} after {result.steps} steps{last}, "
        f"{time.monotonic() - started:.0f} s"
    )
    info(
        "the backbone stays on the server: its --output writes it, and regauge split join joins "
        "both"
    )
    if json:
        report = {"out": str(out), "steps": result.steps, "losses": result.losses}
        print_report("split train", report)
    return 0


def predict(
    model: Source,
    data: Data,
    server: Server,
    tls: TlsFiles = None,
    client_name: ClientName = None,
    insecure: Insecure = False,
    key: KeyOption = None,
    passphrase_file: options.PassphraseFile = None,
    rows: RowsOption = None,
    keep_cls: KeepCls = False,
    defence: DefenceOption = None,
    codec: CodecOption = None,
    samples: Annotated[
        int | None,
        typer.Option("--samples", min=1, metavar="N", help="First N examples only. Default: all."),
    ] = None,
    batch: options.Batch = 16,
    field: sample.Field = None,
    split: sample.Split = "test",
    tokenizer: sample.Tokenizer = None,
    length: sample.Length = None,
    mean: sample.Mean = None,
    std: sample.Std = None,
    dtype: Dtype = "float32",
    patience: Patience = 120.0,
    device: options.Device = "cpu",
    threads: options.Threads = None,
    json: options.Json = False,
    verbose: options.Verbose = 0,
) -> int:
    """Evaluate a model whose backbone is on a server.

    Runs the model over local data, and reports loss and accuracy, or loss and perplexity of a
    language model.
    """
    source = sample.read_options(data, field, split, tokenizer, length, mean, std)
    start_run(threads=threads, device=device)
    connection = _connect_options(
        key,
        passphrase_file,
        _parse_defences(rows, keep_cls, defence),
        codec,
        tls=tls,
        client_name=client_name,
        insecure=insecure,
        patience=patience,
        dtype=dtype,
        device=device,
    )
    from regauge.split import predict as run

    with log_to_stderr(verbose), step_bar("predict") as progress:
        report = _count_steps(progress)
        result = run(
            model,
            server,
            source,
            samples=samples,
            batch_size=batch,
            connection=connection,
            progress=lambda done, total, _: report(done, total, None),
        )
    if json:
        print_report("split predict", {"data": source.uri, **result.metrics})
    else:
        print_result(str(result))
    return 0


def _connect_options(
    key: Path | None,
    passphrase_file: Path | None,
    defences: Sequence[Defence],
    codec: Codec | None,
    **others: Any,
) -> ConnectOptions:
    """Return the options of the connection, with the key that is read from its file."""
    from regauge.split import ConnectOptions

    secret = None if key is None else read_key(key, "lock", passphrase_file)
    encoding = "" if codec is None else codec.value.upper()
    return ConnectOptions(key=secret, defences=defences, codec=encoding, **others)


@contextmanager
def _stop_signals() -> Iterator[threading.Event]:
    """Yield an event that Ctrl-C and SIGTERM set, with a message. A second signal interrupts."""
    from regauge.split.server.service import signal_handlers

    stop = threading.Event()

    def handle(number: int, frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        info("stopping after this step; repeat to stop at once")

    with signal_handlers((signal.SIGINT, signal.SIGTERM), handle):
        yield stop


def _parse_defences(
    rows: options.Unit | None, keep_cls: bool, texts: Sequence[str] | None
) -> tuple[Defence, ...]:
    """Return the defences in the order they apply. `--rows` is short for the defence of
    that name.
    """
    from regauge.defences.split import Rows, parse_defences

    if keep_cls and rows is None:
        raise typer.BadParameter(
            "requires --rows; in a defence write rows=batch,keep_cls",
            param_hint="--keep-cls",
        )
    return parse_defences([*(texts or ()), *([] if rows is None else [Rows(rows.value, keep_cls)])])


def _count_steps(progress: Progress) -> Callable[[int, int, float | None], None]:
    """Return a callback for finished steps. Lines, unlike a bar, name the step under way."""
    ahead = 0 if sys.stderr.isatty() else 1

    def report(done: int, total: int, loss: float | None) -> None:
        progress(done - ahead, total, "examples" if loss is None else f"loss {loss:.4f}")

    return report
