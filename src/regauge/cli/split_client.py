"""`regauge split train` and `predict`: the client's side, with data, embedding and head."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regauge.cli import options, sample
from regauge.cli.console import info, print_json, print_result, step_bar, warn
from regauge.cli.split_server import (
    Clip,
    Insecure,
    LearningRate,
    Momentum,
    Optimizer,
    Schedule,
    TlsFiles,
    Warmup,
    WeightDecay,
    exclusive_folder,
    read_tls,
    stop_signals,
)
from regauge.errors import StoppedError

if TYPE_CHECKING:
    import torch

    from regauge.checkpoints.reader import Checkpoint
    from regauge.core.element import Element
    from regauge.core.progress import Progress
    from regauge.data.sources import DataSource
    from regauge.data.tasks import Examples
    from regauge.defences.split import Defence
    from regauge.split import OptimizerConfig, RemoteBackbone
    from regauge.split.protocol.channel import Tls

VERSION = 1
FIRST_CONTACT_SECONDS = 10.0  # the first contact must succeed within


class Rows(StrEnum):
    """How often the tokens are shuffled."""

    batch = "batch"
    sample = "sample"


class Codec(StrEnum):
    """Codecs for features."""

    bf16 = "bf16"
    f16 = "f16"
    q8 = "q8"


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
        help="npz, parquet, csv, tsv, txt, jsonl, a folder of images or a hub id. Stays here.",
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
    Rows | None,
    typer.Option("--rows", help="Shuffle the tokens of every batch, or of every sample."),
]
DefenceOption = Annotated[
    list[str] | None,
    typer.Option(
        "--defence",
        metavar="D[+D]",
        help="Defence for outgoing features: noise=0.5, low-pass=0.05+rows, ... "
        "(docs/split.md). Repeatable.",
    ),
]
KeepCls = Annotated[
    bool, typer.Option("--keep-cls", help="With --rows: leave the first token in its place.")
]
CodecOption = Annotated[
    Codec | None,
    typer.Option("--codec", help="Lossy codec for features: half the bytes, or a quarter."),
]
Dtype = Annotated[
    str,
    typer.Option(
        "--dtype", metavar="D", help="Dtype of the weights in memory; must equal the server's."
    ),
]
Patience = Annotated[
    float,
    typer.Option(
        "--patience",
        min=1.0,
        metavar="S",
        help="Seconds to retry while the server does not answer.",
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
            "--every", min=1, metavar="N", help="Steps between checkpoints in the journal."
        ),
    ] = 50,
    epochs: Annotated[
        int | None,
        typer.Option("--epochs", min=1, metavar="N", help="Passes over the data. Default: 1."),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option("--steps", min=1, metavar="N", help="Training steps, instead of epochs."),
    ] = None,
    batch: options.Batch = 16,
    lr: LearningRate = None,
    optimizer: Annotated[
        Optimizer | None,
        typer.Option("--optimizer", help="Optimizer of embedding and head. Default: the server's."),
    ] = None,
    schedule: Annotated[
        Schedule | None,
        typer.Option(
            "--schedule", help="Learning rate schedule, to 0 at the last step or constant."
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
    """Train embedding and head on local data, together with the server's backbone. Training options
    default to the server's.
    """
    started = time.monotonic()
    if epochs is not None and steps is not None:
        raise typer.BadParameter("pass either --epochs or --steps, not both")
    if resume and journal is None:
        raise typer.BadParameter("requires the --journal DIR of the run", param_hint="--resume")
    from regauge.checkpoints.plan import check_new
    from regauge.split.client.train import CHECKPOINT_FOLDER, Run
    from regauge.split.client.train import train as run_training
    from regauge.split.parts import write_part

    check_new(out)
    _require_journal(journal, resume)
    defences = _parse_defences(rows, keep_cls, defence)
    source = sample.read_options(data, field, split, tokenizer, length, mean, std)
    case = _load_case(model, source, key, passphrase_file, defences, device, dtype, threads)
    exclusive = nullcontext() if journal is None else exclusive_folder(journal, "run")
    connection = _connect(
        case, server, read_tls(tls, client_name), insecure, defences, codec, journal, patience
    )
    with (
        exclusive,
        connection as backbone,
        stop_signals("stopping after this step; repeat to stop at once") as stop,
    ):
        server_config = _check_server_config(backbone.server_info)
        losses_per_step = server_config["accumulate"] if server_config.get("trains") else 1
        count = steps or (epochs or 1) * -(-len(case.examples) // (batch * losses_per_step))
        training_options = {
            "schedule": schedule,
            "warmup": warmup,
            "clip": clip,
            "decay": weight_decay,
            "momentum": momentum,
        }
        optimizer_config = _client_optimizer(server_config, count, lr, optimizer, training_options)
        server_action = (
            f"{server_config['optimizer']} at {server_config['rate']:g}"
            if server_config.get("trains")
            else "nothing: its backbone is frozen"
        )
        info(
            f"{len(case.examples)} examples, {count} steps; here {optimizer_config.optimizer} at "
            f"{optimizer_config.lr:g}, on the server {server_action}"
        )
        with step_bar("train") as progress:
            reporter = _StepReporter(progress, count)
            losses = run_training(
                case.module,
                backbone,
                case.examples,
                optimizer_config,
                Run(count, batch, seed),
                folder=journal,
                save_every=every,
                on_step=reporter,
                stop=stop.is_set,
            )
        if stop.is_set() and reporter.done < count:
            resume_note = (
                f"; the same command with --resume resumes from {journal}"
                if journal is not None
                else ", and nothing is saved; --journal DIR saves a run"
            )
            raise StoppedError(f"stopped after step {reporter.done} of {count}{resume_note}")
        write_part(out, case.module, case.checkpoint, "edges", extra_fields={"steps": count})
        backbone.end()
        _clear_journal(journal, CHECKPOINT_FOLDER)
    loss = losses[-1] if losses else None
    last = "" if loss is None else f", last loss {loss:.4f}"
    info(
        f"wrote embedding and head to {out} after {count} steps{last}, "
        f"{time.monotonic() - started:.0f} s"
    )
    info(
        "the backbone stays on the server: its --output writes it, and regauge split join joins "
        "both"
    )
    if json:
        print_json(
            {
                "version": VERSION,
                "command": "split train",
                "out": str(out),
                "steps": count,
                "losses": losses,
            }
        )
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
    """Run the model over local data, and report loss and accuracy, or loss and perplexity of a
    language model.
    """
    from regauge.split.client.train import measure

    defences = _parse_defences(rows, keep_cls, defence)
    source = sample.read_options(data, field, split, tokenizer, length, mean, std)
    case = _load_case(model, source, key, passphrase_file, defences, device, dtype, threads)
    examples = (
        case.examples
        if samples is None
        else case.examples.only(range(min(samples, len(case.examples))))
    )
    with (
        _connect(
            case, server, read_tls(tls, client_name), insecure, defences, codec, None, patience
        ) as backbone,
        step_bar("predict") as progress,
    ):
        reporter = _StepReporter(progress, len(examples))
        metrics = measure(case.module, examples, batch, lambda done, *_: reporter(done, None))
        backbone.end()
    metrics["examples"] = int(metrics["examples"])
    if json:
        print_json({"version": VERSION, "command": "split predict", "data": source.uri, **metrics})
    else:
        _print_metrics(metrics)
    return 0


def _parse_defences(
    rows: Rows | None, keep_cls: bool, texts: Sequence[str] | None
) -> tuple[Defence, ...]:
    """Return the defences in the order they apply. `--rows` is short for the defence of
    that name.
    """
    from regauge.defences.split import Rows as Shuffled
    from regauge.defences.split import parse_defences

    if keep_cls and rows is None:
        raise typer.BadParameter(
            "requires --rows; in a defence write rows=batch,keep_cls",
            param_hint="--keep-cls",
        )
    return parse_defences(
        [*(texts or ()), *([] if rows is None else [Shuffled(rows.value, keep_cls)])]
    )


def _print_metrics(metrics: dict[str, float]) -> None:
    """Print metrics as a table."""
    from regauge.models.summary import format_columns

    print_result(
        format_columns(
            [
                (name, f"{value:.4f}" if isinstance(value, float) else str(value))
                for name, value in metrics.items()
            ],
            right=(1,),
        )
    )


@dataclass(frozen=True, eq=False)
class _Case:
    """What the client has: a model without blocks, its data, and the element of its lock."""

    checkpoint: Checkpoint
    module: torch.nn.Module
    examples: Examples
    element: Element | None
    key: str


def _load_case(
    model: str,
    source: DataSource,
    key: Path | None,
    passphrase_file: Path | None,
    defences: Sequence[Defence],
    device: str,
    dtype: str,
    threads: int | None,
) -> _Case:
    """Load the client's model and data, and derive the element of its lock from the key."""
    from regauge.errors import LockError, need

    need("grpc", "split")
    from regauge.checkpoints.reader import open_checkpoint
    from regauge.cli.keygen import read_key
    from regauge.cli.run import check_device, set_threads
    from regauge.defences.split import Rows as Shuffled
    from regauge.locking.lock import locked_element, record_of
    from regauge.models.load import load_part
    from regauge.models.resolve import spec_of

    set_threads(threads)
    check_device(device)
    secret = None if key is None else read_key(key, "lock", passphrase_file)
    checkpoint = open_checkpoint(model)
    record = record_of(checkpoint)
    if record is None and secret is not None:
        raise LockError(
            f"--key requires a locked model, and {model} is not locked",
            hint="pass the locked model, whose embedding and head are plain; the server has the "
            "same one",
        )
    if record is not None and secret is None:
        raise LockError(f"{model} is locked by the key {record.key}", hint="pass it with --key")
    info(f"loading embedding and head of {model}")
    module = load_part(checkpoint, "edges", dtype, device)
    element = None
    if record is not None and secret is not None:
        element = locked_element(spec_of(module, config=checkpoint.config), record, secret)
    config = getattr(module, "config", None)
    if config is not None:
        config.use_cache = False
    if any(isinstance(d, Shuffled) for d in defences) and hasattr(
        module, "set_attn_implementation"
    ):
        # masks that a fused kernel builds do not follow the shuffled rows
        module.set_attn_implementation("eager")  # type: ignore[operator]
    examples, _ = source.read(module, checkpoint)
    return _Case(checkpoint, module, examples, element, "" if record is None else record.key)


@contextmanager
def _connect(
    case: _Case,
    server: str,
    tls: Tls | None,
    insecure: bool,
    defences: Sequence[Defence],
    codec: Codec | None,
    journal: Path | None,
    patience: float,
) -> Iterator[RemoteBackbone]:
    """Connect to the server, check its key, and report waits."""
    from regauge.errors import LockError, RegaugeError
    from regauge.split import TransportError, connect
    from regauge.split.server.network import Grpc

    info(f"connecting to {server}{'' if tls else ', without TLS'}")
    with Grpc(server, tls=tls, insecure=insecure) as network:
        backbone = connect(
            case.module,
            _ReportingTransport(network, server, patience),
            element=case.element,
            defences=defences,
            codec="" if codec is None else codec.value.upper(),
            journal=journal,
            key=case.key,
            config=case.checkpoint.config,
            patience=min(FIRST_CONTACT_SECONDS, patience),
        )
        with backbone:
            server_key = str(backbone.server_info.get("key") or "")
            backbone.log.patience = patience
            if server_key != case.key:
                server_state = f"locked by the key {server_key}" if server_key else "not locked"
                client_state = f"locked by the key {case.key}" if case.key else "not locked"
                raise LockError(
                    f"the server's backbone is {server_state}, and this model is {client_state}",
                    hint="both sides need the same model, locked or plain",
                )
            try:
                yield backbone
            except RegaugeError as error:
                # Without a journal the session cannot be resumed: free its place on the server.
                if journal is None and not isinstance(error, TransportError):
                    backbone.log.patience = 0.5
                    backbone.log.abandon_session()
                raise


class _ReportingTransport:
    """A transport that reports when the server stops answering, and when it answers again."""

    def __init__(self, inner: Any, server: str, patience: float) -> None:
        self.inner, self.server, self.patience = inner, server, patience
        self.was_reached = self.is_lost = False

    def exchange(self, request: Sequence[memoryview]) -> Any:
        """Send a request and return the reply."""
        from regauge.split import TransportError

        try:
            reply = self.inner.exchange(request)
        except TransportError as error:
            if self.was_reached and not self.is_lost:
                warn(f"no answer ({error}); retrying for up to {self.patience:g} s")
                self.is_lost = True
            raise
        if self.is_lost:
            info(f"{self.server} answers again")
        self.was_reached, self.is_lost = True, False
        return reply


class _StepReporter:
    """A reporter of every step on a bar, or, without a terminal, of about twenty lines."""

    def __init__(self, progress: Progress, total: int) -> None:
        self.progress, self.total, self.done = progress, total, 0
        self.interval = 1 if sys.stderr.isatty() else max(1, total // 20)
        self.reported = 0

    def __call__(self, done: int, loss: float | None) -> None:
        self.done = done
        if done - self.reported >= self.interval or done == self.total:
            self.reported = done
            message = "" if loss is None else f"loss {loss:.4f}"
            self.progress(
                done if sys.stderr.isatty() else done - 1, self.total, message or "examples"
            )


def _check_server_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return a server's training options, or raise if they are malformed."""
    from regauge.errors import FrameError

    if config.get("trains"):
        invalid = [
            n
            for n in ("rate", "decay", "momentum", "clip")
            if type(config.get(n)) not in (int, float)
        ]
        invalid += [n for n in ("warmup", "steps", "accumulate") if type(config.get(n)) is not int]
        invalid += [n for n in ("optimizer", "schedule") if not isinstance(config.get(n), str)]
        if invalid or config["accumulate"] < 1:
            raise FrameError(
                "hello",
                f'the server sent an invalid "{(*invalid, "accumulate")[0]}"',
                hint="check that both sides run the same version of regauge",
            )
    return config


def _client_optimizer(
    server_config: dict[str, Any],
    steps: int,
    lr: float | None,
    optimizer: Optimizer | None,
    training_options: dict[str, Any],
) -> OptimizerConfig:
    """Return the optimizer of embedding and head: the server's options, overridden by those that
    were passed. A schedule that was passed ends with the run.
    """
    from regauge.split import OptimizerConfig

    names = (  # as on the wire
        "optimizer",
        "rate",
        "decay",
        "momentum",
        "schedule",
        "warmup",
        "steps",
        "clip",
        "accumulate",
    )
    server_options = {
        n: server_config[n] for n in names if n in server_config and server_config.get("trains")
    }
    passed = {
        "rate": lr,
        "optimizer": optimizer,
        **training_options,
        "steps": None if training_options["schedule"] is None else steps,
    }
    return OptimizerConfig.from_dict(
        {
            **server_options,
            **{
                n: str(v) if isinstance(v, StrEnum) else v
                for n, v in passed.items()
                if v is not None
            },
        }
    )


def _require_journal(journal: Path | None, resume: bool) -> None:
    """Raise if the journal's state and --resume contradict each other."""
    from regauge.errors import JournalError

    if journal is None:
        return
    has_run = (journal / "session.json").exists()
    if has_run and not resume:
        raise JournalError(
            f"{journal} contains an interrupted run",
            hint="pass --resume to resume it, or name an empty folder",
        )
    if resume and not has_run:
        raise JournalError(f"{journal} contains no run to resume", hint="start it without --resume")


def _clear_journal(journal: Path | None, client: str) -> None:
    """Delete the journal of a finished run, which contains secrets."""
    if journal is None:
        return
    import shutil

    for path in journal.iterdir():
        # left by a write that was killed
        is_partial = path.name.startswith(".") and ".partial-" in path.name
        if (
            is_partial
            or path.name == "session.json"
            or (path.stem.isdigit() and path.suffix in (".request", ".reply"))
        ):
            path.unlink(missing_ok=True)
    shutil.rmtree(journal / client, ignore_errors=True)
