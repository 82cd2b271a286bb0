"""`regauge split train` and `predict`: what a client does with its data, its embedding and its
head.
"""

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
from regauge.cli.console import StoppedError, info, print_json, print_result, step_bar, warn
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

if TYPE_CHECKING:
    import torch

    from regauge.checkpoints.reader import Checkpoint
    from regauge.data.tasks import Examples
    from regauge.defences.split import Defence
    from regauge.split import OptimizerConfig, RemoteBackbone

VERSION = 1
FIRST_CONTACT_SECONDS = 10.0  # seconds in which the first contact must succeed


class Rows(StrEnum):
    batch = "batch"
    sample = "sample"


class Codec(StrEnum):
    bf16 = "bf16"
    f16 = "f16"
    q8 = "q8"


Source = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A folder or .safetensors file with embedding and head: a whole model, or what "
        "train has written.",
    ),
]
Data = Annotated[
    str,
    typer.Option(
        "--data",
        metavar="URI",
        help="npz, parquet, csv, tsv, txt, jsonl, a folder of images or a hub id. It stays here.",
    ),
]
Server = Annotated[
    str,
    typer.Option(
        "--server", metavar="ADDR", help="Where the backbone is, as in server.example:7000."
    ),
]
ClientName = Annotated[
    str | None,
    typer.Option(
        "--client-name",
        metavar="NAME",
        help="Whose certificate of the folder. Default: its only client's.",
    ),
]
KeyOption = Annotated[
    Path | None,
    typer.Option(
        "-k",
        "--key",
        metavar="KEY",
        help="The key that MODEL and the server's backbone are locked with.",
    ),
]
RowsOption = Annotated[
    Rows | None,
    typer.Option("--rows", help="Shuffle the tokens afresh for every batch, or for every sample."),
]
DefenceOption = Annotated[
    list[str] | None,
    typer.Option(
        "--defence",
        metavar="D[+D]",
        help="noise=0.5, low-pass=0.05+rows, ...: what is done to what leaves (docs/split.md). "
        "May be repeated.",
    ),
]
KeepCls = Annotated[
    bool, typer.Option("--keep-cls", help="With --rows: leave the first token in its place.")
]
CodecOption = Annotated[
    Codec | None,
    typer.Option("--codec", help="Features in half the bytes, or a quarter. It rounds."),
]
Dtype = Annotated[
    str,
    typer.Option(
        "--dtype", metavar="D", help="Of the weights in memory; the server's must be the same."
    ),
]
Patience = Annotated[
    float,
    typer.Option(
        "--patience",
        min=1.0,
        metavar="S",
        help="Seconds to go on trying while the server does not answer.",
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
            help="The new folder of the trained embedding and head.",
        ),
    ],
    tls: TlsFiles = None,
    name: ClientName = None,
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
            help="Keep what is needed to go on after a kill. It is secret.",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run of the journal.")
    ] = False,
    every: Annotated[
        int,
        typer.Option(
            "--every", min=1, metavar="N", help="Steps between two checkpoints in the journal."
        ),
    ] = 50,
    epochs: Annotated[
        int | None,
        typer.Option(
            "--epochs", min=1, metavar="N", help="How often to go through the data. Default: once."
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option("--steps", min=1, metavar="N", help="How many steps, in place of epochs."),
    ] = None,
    batch: options.Batch = 16,
    rate: LearningRate = None,
    optimizer: Annotated[
        Optimizer | None,
        typer.Option(
            "--optimizer", help="Of embedding and head. What is not said is as the server's."
        ),
    ] = None,
    schedule: Annotated[
        Schedule | None, typer.Option("--schedule", help="Down to 0 at the last step, or not.")
    ] = None,
    warmup: Warmup = None,
    clip: Clip = None,
    decay: WeightDecay = None,
    momentum: Momentum = None,
    seed: Annotated[int, options.seed_option("The order of the examples, and dropout here.")] = 0,
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
    """Train embedding and head on data that stay here, and with them the server's backbone, which
    stays there. Options of training that are not given are as the server's.
    """
    started = time.monotonic()
    if epochs is not None and steps is not None:
        raise typer.BadParameter("give --epochs or --steps")
    if resume and journal is None:
        raise typer.BadParameter("it needs the --journal DIR of the run", param_hint="--resume")
    from regauge.checkpoints.plan import check_new
    from regauge.split.client.train import CHECKPOINT_FOLDER, Run
    from regauge.split.client.train import train as trained
    from regauge.split.parts import write_part

    check_new(out)
    _require_journal(journal, resume)
    defences = _parse_defences(rows, keep_cls, defence)
    source = sample.Sample(data, field, split, tokenizer, length, mean, std)
    case = _load_case(model, source, key, passphrase_file, defences, device, dtype, threads)
    alone = nullcontext() if journal is None else exclusive_folder(journal, "run")
    linked = _connect(
        case, server, read_tls(tls, name), insecure, defences, codec, journal, patience
    )
    with (
        alone,
        linked as link,
        stop_signals("stops after this step; once more stops at once") as stop,
    ):
        told = _check_server_config(link.server_info)
        losses_of_a_step = told["accumulate"] if told.get("trains") else 1
        count = steps or (epochs or 1) * -(-len(case.examples) // (batch * losses_of_a_step))
        given = {
            "schedule": schedule,
            "warmup": warmup,
            "clip": clip,
            "decay": decay,
            "momentum": momentum,
        }
        own = _client_optimizer(told, count, rate, optimizer, given)
        does = (
            f"{told['optimizer']} at {told['rate']:g}"
            if told.get("trains")
            else "nothing: its backbone stays as it is"
        )
        info(
            f"{len(case.examples)} examples, {count} steps; here {own.optimizer} at "
            f"{own.lr:g}, on the server {does}"
        )
        with step_bar("train") as progress:
            ticker = _StepReporter(progress, count)
            losses = trained(
                case.module,
                link,
                case.examples,
                own,
                Run(count, batch, seed),
                folder=journal,
                save_every=every,
                on_step=ticker,
                stop=stop.is_set,
            )
        if stop.is_set() and ticker.done < count:
            kept = (
                f"; the same command with --resume goes on from {journal}"
                if journal is not None
                else ", and nothing is kept: --journal DIR keeps a run"
            )
            raise StoppedError(f"stopped after step {ticker.done} of {count}{kept}")
        write_part(out, case.module, case.checkpoint, "edges", extra_fields={"steps": count})
        link.end()
        _clear_journal(journal, CHECKPOINT_FOLDER)
    loss = losses[-1] if losses else None
    last = "" if loss is None else f", last loss {loss:.4f}"
    info(
        f"wrote embedding and head to {out} after {count} steps{last}, "
        f"{time.monotonic() - started:.0f} s"
    )
    info(
        "the backbone is with the server: its --output writes it, and regauge split join makes "
        "a whole model of both"
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
    name: ClientName = None,
    insecure: Insecure = False,
    key: KeyOption = None,
    passphrase_file: options.PassphraseFile = None,
    rows: RowsOption = None,
    keep_cls: KeepCls = False,
    defence: DefenceOption = None,
    codec: CodecOption = None,
    samples: Annotated[
        int | None,
        typer.Option(
            "--samples", min=1, metavar="N", help="On the first N examples. Default: all."
        ),
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
    """Run the model over data that stay here, and measure: loss and accuracy, or loss and
    perplexity of a language model.
    """
    from regauge.split.client.train import measure

    defences = _parse_defences(rows, keep_cls, defence)
    source = sample.Sample(data, field, split, tokenizer, length, mean, std)
    case = _load_case(model, source, key, passphrase_file, defences, device, dtype, threads)
    examples = (
        case.examples
        if samples is None
        else case.examples.only(range(min(samples, len(case.examples))))
    )
    with (
        _connect(
            case, server, read_tls(tls, name), insecure, defences, codec, None, patience
        ) as link,
        step_bar("predict") as progress,
    ):
        ticker = _StepReporter(progress, len(examples))
        found = measure(case.module, examples, batch, lambda done, *_: ticker(done, None))
        link.end()
    found["examples"] = int(found["examples"])
    if json:
        print_json({"version": VERSION, "command": "split predict", "data": source.uri, **found})
    else:
        _print_metrics(found)
    return 0


def _parse_defences(
    rows: Rows | None, keep_cls: bool, given: Sequence[str] | None
) -> tuple[Defence, ...]:
    """What is done to what leaves, in its order. `--rows` is short for the defence of that name."""
    from regauge.defences.split import Rows as Shuffled
    from regauge.defences.split import parse_defences

    if keep_cls and rows is None:
        raise typer.BadParameter(
            "it belongs to --rows; a defence says it itself: rows=batch,keep_cls",
            param_hint="--keep-cls",
        )
    return parse_defences(
        [*(given or ()), *([] if rows is None else [Shuffled(rows.value, keep_cls)])]
    )


def _print_metrics(found: dict[str, float]) -> None:
    from regauge.models.summary import format_columns

    print_result(
        format_columns(
            [
                (name, f"{value:.4f}" if isinstance(value, float) else str(value))
                for name, value in found.items()
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
    element: Any
    key: str


def _load_case(
    model: str,
    source: sample.Sample,
    key: Path | None,
    passphrase_file: Path | None,
    defences: Sequence[Defence],
    device: str,
    dtype: str,
    threads: int | None,
) -> _Case:
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
            f"{model} is not locked, so that its key has nothing to fit",
            hint="name the locked model, whose embedding and head are plain; the server has the "
            "same one",
        )
    if record is not None and secret is None:
        raise LockError(f"{model} is locked by the key {record.key}", hint="give it with --key")
    info(f"loads embedding and head of {model}")
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
        # masks that a kernel makes by itself do not follow the rows
        module.set_attn_implementation("eager")  # type: ignore[operator]
    examples, _ = source.read(module, checkpoint)
    return _Case(checkpoint, module, examples, element, "" if record is None else record.key)


@contextmanager
def _connect(
    case: _Case,
    server: str,
    tls: Any,
    insecure: bool,
    defences: Sequence[Defence],
    codec: Codec | None,
    journal: Path | None,
    patience: float,
) -> Iterator[RemoteBackbone]:
    """A link that was told who the server is, and talks when it waits."""
    from regauge.errors import LockError, RegaugeError
    from regauge.split import TransportError, connect
    from regauge.split.server.network import Grpc

    info(f"connects to {server}{'' if tls else ', without TLS'}")
    with Grpc(server, tls=tls, insecure=insecure) as network:
        link = connect(
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
        with link:
            theirs = str(link.server_info.get("key") or "")
            link.log.patience = patience
            if theirs != case.key:
                held = f"locked by the key {theirs}" if theirs else "not locked"
                mine = f"locked by the key {case.key}" if case.key else "not locked"
                raise LockError(
                    f"the server's backbone is {held}, and this model is {mine}",
                    hint="both sides need the same model, locked or plain",
                )
            try:
                yield link
            except RegaugeError as error:
                if (
                    journal is None and not isinstance(error, TransportError)
                    # nobody can go on with it: it would take up a place of this client's for
                    # nothing
                ):
                    link.log.patience = 0.5
                    link.log.abandon_session()
                raise


class _ReportingTransport:
    """A transport that says when the server does not answer, and when it does again."""

    def __init__(self, inner: Any, server: str, patience: float) -> None:
        self.inner, self.server, self.patience = inner, server, patience
        self.is_met = self.is_lost = False

    def exchange(self, request: Sequence[memoryview]) -> Any:
        from regauge.split import TransportError

        try:
            reply = self.inner.exchange(request)
        except TransportError as error:
            if self.is_met and not self.is_lost:
                warn(f"no answer ({error}); tries again for up to {self.patience:g} s")
                self.is_lost = True
            raise
        if self.is_lost:
            info(f"{self.server} answers again")
        self.is_met, self.is_lost = True, False
        return reply


class _StepReporter:
    """Every step on a bar; where there is no terminal, about twenty lines."""

    def __init__(self, progress: Any, total: int) -> None:
        self.progress, self.total, self.done = progress, total, 0
        self.each = 1 if sys.stderr.isatty() else max(1, total // 20)
        self.shown = 0

    def __call__(self, done: int, loss: float | None) -> None:
        self.done = done
        if done - self.shown >= self.each or done == self.total:
            self.shown = done
            now = "" if loss is None else f"loss {loss:.4f}"
            self.progress(done if sys.stderr.isatty() else done - 1, self.total, now or "examples")


def _check_server_config(told: dict[str, Any]) -> dict[str, Any]:
    """What a server says of its training, if it can be what a client trains by."""
    from regauge.split.protocol.frames import FrameError

    if told.get("trains"):
        wrong = [
            n
            for n in ("rate", "decay", "momentum", "clip")
            if type(told.get(n)) not in (int, float)
        ]
        wrong += [n for n in ("warmup", "steps", "accumulate") if type(told.get(n)) is not int]
        wrong += [n for n in ("optimizer", "schedule") if not isinstance(told.get(n), str)]
        if wrong or told["accumulate"] < 1:
            raise FrameError(
                "told",
                f'the server does not say its "{(*wrong, "accumulate")[0]}" as it should',
                hint="are both sides of one version?",
            )
    return told


def _client_optimizer(
    told: dict[str, Any],
    steps: int,
    rate: float | None,
    optimizer: Optimizer | None,
    given: dict[str, Any],
) -> OptimizerConfig:
    """How embedding and head are trained: as was asked for, and otherwise as the server trains. A
    schedule that was asked for ends with the run.
    """
    from regauge.split import OptimizerConfig

    names = (
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
    theirs = {n: told[n] for n in names if n in told and told.get("trains")}
    said = {
        "rate": rate,
        "optimizer": optimizer,
        **given,
        "steps": None if given["schedule"] is None else steps,
    }
    return OptimizerConfig.from_dict(
        {
            **theirs,
            **{
                n: str(v) if isinstance(v, StrEnum) else v for n, v in said.items() if v is not None
            },
        }
    )


def _require_journal(journal: Path | None, resume: bool) -> None:
    from regauge.split.client.journal import JournalError

    if journal is None:
        return
    there = (journal / "session.json").exists()
    if there and not resume:
        raise JournalError(
            f"{journal} holds a run that was interrupted",
            hint="--resume goes on with it; or name an empty folder",
        )
    if resume and not there:
        raise JournalError(
            f"{journal} holds no run to go on with", hint="start it without --resume"
        )


def _clear_journal(journal: Path | None, client: str) -> None:
    """The run is done, and what it wrote is on the disk: its journal is of no use any more, and
    holds secrets.
    """
    if journal is None:
        return
    import shutil

    for path in journal.iterdir():
        is_partial = (
            path.name.startswith(".") and ".partial-" in path.name
        )  # of a write that a kill has ended
        if (
            is_partial
            or path.name == "session.json"
            or (path.stem.isdigit() and path.suffix in (".request", ".reply"))
        ):
            path.unlink(missing_ok=True)
    shutil.rmtree(journal / client, ignore_errors=True)
