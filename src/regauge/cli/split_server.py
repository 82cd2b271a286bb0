"""`regauge split serve`: a backbone behind a port."""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regauge.cli import options
from regauge.cli.console import info, print_json

if TYPE_CHECKING:
    from regauge.split import Host, OptimizerConfig
    from regauge.split.protocol.channel import Tls
    from regauge.split.server.client_list import ClientFile
    from regauge.split.server.network import Server
    from regauge.split.server.quotas import Quota, Quotas

VERSION = 1
CLIENTS = "clients.txt"  # list of clients that `certs` writes beside the certificates
STATUS_INTERVAL = 10.0  # seconds between status lines without a terminal


class Optimizer(StrEnum):
    """Optimizers of either side."""

    sgd = "sgd"
    adam = "adam"
    adamw = "adamw"


class Schedule(StrEnum):
    """Learning rate schedules."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"


class Precision(StrEnum):
    """Precisions of mixed-precision computation."""

    bf16 = "bf16"
    fp16 = "fp16"


LearningRate = Annotated[
    float | None, typer.Option("--lr", min=0.0, metavar="R", help="Learning rate.")
]
WeightDecay = Annotated[
    float | None, typer.Option("--weight-decay", min=0.0, metavar="X", help="Weight decay.")
]
Momentum = Annotated[
    float | None, typer.Option("--momentum", min=0.0, max=1.0, metavar="X", help="Momentum of sgd.")
]
Warmup = Annotated[
    int | None,
    typer.Option("--warmup", min=0, metavar="N", help="Warm-up steps of the learning rate."),
]
Clip = Annotated[
    float | None,
    typer.Option("--clip", min=0.0, metavar="X", help="Largest norm of the gradient."),
]
TlsFiles = Annotated[
    str | None,
    typer.Option(
        "--tls",
        metavar="FOLDER",
        help="Certificates: a folder of split certs, or three files: authority,certificate,key.",
    ),
]
Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure",
        help="Allow plaintext beyond this machine: anyone on the network can read and "
        "change the traffic.",
    ),
]


def serve(
    backbone: Annotated[
        str,
        typer.Argument(
            metavar="BACKBONE",
            help="Folder, .safetensors file or hub id. May be locked: no key is needed.",
        ),
    ],
    listen: Annotated[
        str,
        typer.Option(
            "--listen",
            metavar="ADDR",
            help="Address to listen on. 0.0.0.0:7000 accepts all machines.",
        ),
    ] = "127.0.0.1:7000",
    tls: TlsFiles = None,
    clients: Annotated[
        Path | None,
        typer.Option(
            "--clients",
            metavar="FILE",
            help="File of accepted clients: one name per line, optionally with a quota. "
            "Reloaded on change. Default: clients.txt beside the certificates.",
        ),
    ] = None,
    quota: Annotated[
        str,
        typer.Option(
            "--quota",
            metavar="Q",
            help='Quota of each client: "sessions=2 requests=50 bytes=100M", requests per '
            "second and bytes per minute.",
        ),
    ] = "",
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory",
            metavar="SIZE",
            help="Memory for all clients, as in 8G. Default: half of the available memory.",
        ),
    ] = None,
    client_memory: Annotated[
        str | None,
        typer.Option(
            "--client-memory",
            metavar="SIZE",
            help="Memory for each client with a certificate. Default: half of --memory.",
        ),
    ] = None,
    insecure: Insecure = False,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            "--checkpoint", metavar="DIR", help="Folder to save checkpoints in, and to resume from."
        ),
    ] = None,
    every: Annotated[
        int, typer.Option("--every", min=1, metavar="N", help="Steps between checkpoints.")
    ] = 100,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="OUT",
            help="Folder for the trained backbone, written when the server stops.",
        ),
    ] = None,
    lr: Annotated[
        float | None,
        typer.Option(
            "--lr",
            min=0.0,
            metavar="R",
            help="Learning rate of the backbone. Without it, the backbone is not trained.",
        ),
    ] = None,
    optimizer: Annotated[
        Optimizer | None,
        typer.Option("--optimizer", help="Optimizer of the backbone. Default: adamw."),
    ] = None,
    schedule: Annotated[
        Schedule | None,
        typer.Option(
            "--schedule", help="Learning rate schedule after the warm-up. Default: constant."
        ),
    ] = None,
    warmup: Warmup = None,
    steps: Annotated[
        int | None,
        typer.Option("--steps", min=1, metavar="N", help="Step at which the schedule ends."),
    ] = None,
    clip: Clip = None,
    accumulate: Annotated[
        int | None,
        typer.Option("--accumulate", min=1, metavar="N", help="Losses per step. Default: 1."),
    ] = None,
    weight_decay: WeightDecay = None,
    momentum: Momentum = None,
    average: Annotated[
        int,
        typer.Option(
            "--average",
            min=0,
            metavar="N",
            help="Train a copy per client, averaged after N steps of each. Default: one for all.",
        ),
    ] = 0,
    precision: Annotated[
        Precision | None,
        typer.Option("--precision", help="Compute precision, over weights in float32."),
    ] = None,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Compile the blocks with torch.compile.")
    ] = False,
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype", metavar="D", help="Dtype of the weights in memory; must equal the clients'."
        ),
    ] = "float32",
    seed: Annotated[int, options.seed_option("Seed of dropout.")] = 0,
    metrics: Annotated[
        str | None,
        typer.Option(
            "--metrics",
            metavar="ADDR",
            help="Address of Prometheus metrics over HTTP, as in 127.0.0.1:9100.",
        ),
    ] = None,
    device: options.Device = "cpu",
    threads: options.Threads = None,
    json: options.Json = False,
    verbose: options.Verbose = 0,
) -> int:
    """Host the backbone of a model for clients that hold its embedding and head, their data and
    their labels. Ctrl-C or SIGTERM stops it after the requests under way, and a checkpoint is
    written. A second one stops waiting for clients.
    """
    started = time.monotonic()
    training_options = {
        "schedule": schedule,
        "warmup": warmup,
        "steps": steps,
        "clip": clip,
        "accumulate": accumulate,
        "weight_decay": weight_decay,
        "momentum": momentum,
    }
    training = _build_optimizer(lr, optimizer, training_options)
    from regauge.errors import CheckpointError, need

    need("grpc", "split")
    from regauge.checkpoints.plan import check_new
    from regauge.checkpoints.reader import open_checkpoint
    from regauge.cli.run import check_device, set_threads
    from regauge.locking.lock import record_of
    from regauge.models.load import load_part
    from regauge.split import Host
    from regauge.split.server.memory import read_size
    from regauge.split.server.metrics import Metrics
    from regauge.split.server.network import Server

    sizes = [None if text is None else read_size(text) for text in (memory, client_memory)]
    set_threads(threads)
    check_device(device)
    if out is not None:
        check_new(out)
        if training is None and checkpoint is None:
            raise typer.BadParameter(
                "requires --lr R: without training there is nothing to write",
                param_hint="--output",
            )
    files = read_tls(tls, "server")
    accepted, quotas = _load_clients(tls, clients, quota, files is not None)
    source = open_checkpoint(backbone)
    record = record_of(source)
    info(f"loading {backbone}")
    model = load_part(source, "backbone", dtype, device)
    failed: CheckpointError | None = None
    with nullcontext() if checkpoint is None else exclusive_folder(checkpoint, "server"):
        host = Host(
            model,
            training,
            folder=checkpoint,
            save_every=every,
            config=source.config,
            key="" if record is None else record.key,
            seed=seed,
            precision="" if precision is None else precision.value,
            compiler="inductor" if compiled else "",
            average=average,
            quotas=quotas,
            memory=sizes[0],
            client_memory=sizes[1],
        )
        _print_startup(host, model, record, checkpoint)
        with (
            _log_to_stderr(verbose),
            server_signals(None if accepted is None else accepted.reload) as requests,
            Server(host, listen, tls=files, clients=accepted, insecure=insecure) as server,
        ):
            metrics_server = None if metrics is None else Metrics(host, server, metrics)
            address = f"{listen.rpartition(':')[0]}:{server.port}"
            audience = (
                "without TLS"
                if files is None
                else f"with TLS, for {', '.join(sorted(accepted.quotas))}"
                if accepted is not None
                else "with TLS, for all of its authority"
            )
            info(
                f"listening on {address}, {audience}"
                f"{f'; metrics at http://{metrics}/metrics' if metrics_server else ''}; "
                "Ctrl-C stops it"
            )
            _show_status(host, server, requests.stop)
            info("stopping: no new requests, finishing those under way")
            try:
                server.stop(30.0, requests.skip_drain)
            except CheckpointError as error:  # the trained weights can still be written below
                failed = error
            if metrics_server is not None:
                metrics_server.close()
            if checkpoint is not None and failed is None:
                info(f"saved step {host.step} in {checkpoint}; the same command resumes from it")
            if out is not None:
                from regauge.split.parts import write_part

                write_part(out, model, source, "backbone", host.backbone(), {"steps": host.step})
                info(
                    f"wrote the backbone to {out}; regauge split join joins it with a client's part"
                )
    answered = sum(n for (_, result), n in host.requests.items() if result == "ok")
    info(
        f"stopped at step {host.step} after {answered} requests, {time.monotonic() - started:.0f} s"
    )
    if failed is not None:
        raise failed
    if json:
        report = {
            "version": VERSION,
            "command": "split serve",
            "steps": host.step,
            "requests": answered,
            "out": None if out is None else str(out),
        }
        print_json(
            {
                **report,
                "checkpoint": None if checkpoint is None else str(checkpoint),
                "bytes": [server.received, server.sent],
            }
        )
    return 0


def _build_optimizer(
    lr: float | None, optimizer: Optimizer | None, training_options: dict[str, Any]
) -> OptimizerConfig | None:
    """Return the optimizer of the backbone, or None if it is not trained."""
    passed = {name: value for name, value in training_options.items() if value is not None}
    if lr is None:
        if passed or optimizer is not None:
            option = (
                "--optimizer" if optimizer is not None else f"--{min(passed)}".replace("_", "-")
            )
            raise typer.BadParameter(
                "requires --lr R, without which nothing is trained", param_hint=option
            )
        return None
    from regauge.split import OptimizerConfig

    settings: dict[str, Any] = {
        k: str(v) if isinstance(v, StrEnum) else v for k, v in passed.items()
    }
    return OptimizerConfig("adamw" if optimizer is None else optimizer.value, lr, **settings)


@contextmanager
def exclusive_folder(folder: Path, user: str) -> Iterator[None]:
    """Create a folder if needed and lock it for one process: two would overwrite each other's
    state.
    """
    from regauge.checkpoints.files import exclusive_lock, wrap_write_errors

    with wrap_write_errors(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with exclusive_lock(
        folder,
        f"another {user} is using {folder}",
        "wait until it has ended, or name another folder",
    ):
        yield


def read_tls(source: str | None, name: str | None) -> Tls | None:
    """Return the TLS files of one side: from a folder of `split certs`, by name (or its only
    client's), or three files.
    """
    if source is None:
        return None
    from regauge.errors import CheckpointError
    from regauge.split.protocol.channel import Tls

    parts = [Path(part).expanduser() for part in source.split(",")]
    if len(parts) == 3:
        files = Tls(*parts)
    else:
        folder = Path(source).expanduser()
        if not folder.is_dir():
            raise CheckpointError(
                f"--tls must be a folder of certificates or three files, got {source}",
                hint="regauge split certs --to FOLDER creates one",
            )
        names = sorted(p.stem for p in folder.glob("*.key") if p.stem != "server")
        if name is None:
            if len(names) != 1:
                raise CheckpointError(
                    f"{source} must have one client's certificate, got those of "
                    f"{', '.join(names) or 'no client'}",
                    hint="choose one with --client-name NAME",
                )
            name = names[0]
        files = Tls(folder / "authority.pem", folder / f"{name}.pem", folder / f"{name}.key")
    for path in (files.authority, files.certificate, files.key):
        if not path.is_file():
            raise CheckpointError(
                f"{path} does not exist",
                hint="each side needs the authority's certificate, its own certificate and its key",
            )
    files.read()
    return files


def _load_clients(
    tls: str | None, clients: Path | None, quota: str, secure: bool
) -> tuple[ClientFile | None, Quotas]:
    """Return the list of accepted clients, and their quotas."""
    from regauge.split.server.client_list import ClientFile
    from regauge.split.server.quotas import Quotas, read_quota

    default: Quota = read_quota(quota)
    if clients is not None and not secure:
        raise typer.BadParameter(
            "requires --tls: clients are identified by their certificates", param_hint="--clients"
        )
    if clients is None and tls is not None and (Path(tls).expanduser() / CLIENTS).is_file():
        clients = Path(tls).expanduser() / CLIENTS
    if clients is None:
        return None, Quotas(default)
    accepted = ClientFile(clients, default)
    return accepted, Quotas(default, accepted.quotas)


def _print_startup(host: Host, model: Any, record: Any, checkpoint: Path | None) -> None:
    """Print what the server hosts, trains and saves."""
    from regauge.checkpoints.files import format_bytes

    count = sum(p.numel() for p in host.main.parameters.values())
    locked = "" if record is None else f", locked by the key {record.key}"
    info(
        f"{type(model).__name__}: {len(host.blocks)} blocks, {count:,} weights in "
        f"{host.model_description['dtype']}{locked}"
    )
    if host.training is None:
        info("frozen backbone: gradients pass through, nothing is trained; --lr R trains it")
    else:
        details = "".join(
            [
                f", averaged every {host.rounds.average} steps" * bool(host.rounds.average),
                f", in {host.executor.precision}" * bool(host.executor.precision),
            ]
        )
        info(
            f"training with {host.training.optimizer} at {host.training.lr:g}, "
            f"{host.training.schedule}{details}"
        )
    info(
        f"memory: {format_bytes(host.budget.total)} for all clients, "
        f"{format_bytes(host.budget.client)} for each with a certificate (--memory, "
        "--client-memory)"
    )
    if checkpoint is None and host.training is not None:
        info("no checkpoint: sessions are lost if the server dies; --checkpoint DIR saves them")
    elif host.step or host.sessions:
        info(f"resuming from {checkpoint}: step {host.step}, {len(host.sessions)} sessions")


@contextmanager
def stop_signals(message: str = "") -> Iterator[threading.Event]:
    """Yield an event that Ctrl-C and SIGTERM set, with a message. A second signal interrupts."""
    stop = threading.Event()

    def handle(number: int, frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        if message:
            info(message)

    with _signal_handlers((signal.SIGINT, signal.SIGTERM), handle):
        yield stop


@dataclass
class StopRequests:
    """The requests that signals have made of a server."""

    stop: threading.Event = field(default_factory=threading.Event)
    skip_drain: threading.Event = field(default_factory=threading.Event)  # stop waiting for clients


@contextmanager
def server_signals(reload_clients: Callable[[], None] | None = None) -> Iterator[StopRequests]:
    """Let SIGTERM and Ctrl-C stop a server in order, however often they come, and SIGHUP reload the
    list of clients.

    A second signal ends the wait for clients; the checkpoint is written in any case. Only a third
    Ctrl-C interrupts that.
    """
    requests = StopRequests()

    def stop(number: int, frame: object) -> None:
        if requests.skip_drain.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        (requests.skip_drain if requests.stop.is_set() else requests.stop).set()

    def reload(number: int, frame: object) -> None:
        if reload_clients is not None:
            reload_clients()

    hangup = (signal.SIGHUP,) if hasattr(signal, "SIGHUP") else ()
    with _signal_handlers((signal.SIGINT, signal.SIGTERM), stop), _signal_handlers(hangup, reload):
        yield requests


@contextmanager
def _signal_handlers(
    numbers: Sequence[signal.Signals], handler: Callable[[int, object], None]
) -> Iterator[None]:
    """Install a signal handler, and restore the previous ones."""
    previous_handlers: dict[signal.Signals, Any] = {}
    with suppress(ValueError):  # not the main thread
        for number in numbers:
            previous_handlers[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for handled, previous in previous_handlers.items():
            signal.signal(handled, previous)


class _StderrHandler(logging.Handler):
    """A log handler that writes to stderr like any other message."""

    def emit(self, record: logging.LogRecord) -> None:
        info(f"{'warning: ' if record.levelno >= logging.WARNING else ''}{record.getMessage()}")


@contextmanager
def _log_to_stderr(verbose: int) -> Iterator[None]:
    """Print the engine's log on stderr. It contains no tensors and no keys."""
    log, handler = logging.getLogger("regauge.split"), _StderrHandler()
    log.addHandler(handler)
    log.setLevel(logging.INFO if verbose else logging.WARNING)
    try:
        yield
    finally:
        log.removeHandler(handler)


def _show_status(host: Host, server: Server, stop: threading.Event) -> None:
    """Show the progress until the server stops: a changing line on a terminal, otherwise a line now
    and then if something changed.
    """
    from regauge.checkpoints.files import format_bytes

    window, last = (time.monotonic(), host.step), time.monotonic()

    def line() -> str:
        nonlocal window
        seconds, steps = time.monotonic() - window[0], host.step - window[1]
        if seconds > 30:
            window = (time.monotonic(), host.step)
        sessions = list(host.sessions.values())
        names = sorted({s.peer for s in sessions if s.peer})
        sessions_text = (
            f"{len(sessions)} "
            f"session{'s' * (len(sessions) != 1)}{f' ({chr(44).join(names[:4])})' if names else ''}"
        )
        return (
            f"step {host.step}, {steps / max(seconds, 1e-9):.1f} a second, {sessions_text}, "
            f"{format_bytes(server.received)} in, {format_bytes(server.sent)} out"
        )

    if sys.stderr.isatty():
        from rich.console import Console
        from rich.text import Text

        with Console(stderr=True).status("waiting for clients") as status:
            while not stop.wait(0.5):
                if host.requests:
                    status.update(Text(line()))  # clients' names are not markup
        return
    printed: object = (host.step, 0)
    while not stop.wait(0.2):
        current = (host.step, sum(host.requests.values()))
        if current != printed and time.monotonic() - last >= (
            STATUS_INTERVAL if printed != (host.step, 0) else 0.0
        ):
            info(line())
            printed, last = current, time.monotonic()
