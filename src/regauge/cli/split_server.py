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
CLIENTS = "clients.txt"  # the list of clients that `certs` puts beside the certificates
STATUS_INTERVAL = 10.0  # seconds between two lines where there is no terminal


class Optimizer(StrEnum):
    sgd = "sgd"
    adam = "adam"
    adamw = "adamw"


class Schedule(StrEnum):
    constant = "constant"
    linear = "linear"
    cosine = "cosine"


class Precision(StrEnum):
    bf16 = "bf16"
    fp16 = "fp16"


LearningRate = Annotated[
    float | None, typer.Option("--lr", min=0.0, metavar="R", help="The learning rate.")
]
WeightDecay = Annotated[
    float | None, typer.Option("--weight-decay", min=0.0, metavar="X", help="Weight decay.")
]
Momentum = Annotated[
    float | None, typer.Option("--momentum", min=0.0, max=1.0, metavar="X", help="Of sgd.")
]
Warmup = Annotated[
    int | None, typer.Option("--warmup", min=0, metavar="N", help="Steps from 0 up to the rate.")
]
Clip = Annotated[
    float | None,
    typer.Option("--clip", min=0.0, metavar="X", help="Bound the norm of the gradient."),
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
        help="Without TLS beyond this machine: anyone on the way reads and changes what crosses.",
    ),
]


def serve(
    backbone: Annotated[
        str,
        typer.Argument(
            metavar="BACKBONE",
            help="A folder, a .safetensors file, or a hub id. It may be locked: no key is needed.",
        ),
    ],
    listen: Annotated[
        str,
        typer.Option(
            "--listen", metavar="ADDR", help="Where to listen. 0.0.0.0:7000 is for all machines."
        ),
    ] = "127.0.0.1:7000",
    tls: TlsFiles = None,
    clients: Annotated[
        Path | None,
        typer.Option(
            "--clients",
            metavar="FILE",
            help="Clients to accept: a name on each line, perhaps with a quota. Read again on "
            "change. Default: clients.txt beside the certificates.",
        ),
    ] = None,
    quota: Annotated[
        str,
        typer.Option(
            "--quota",
            metavar="Q",
            help='For each client: "sessions=2 requests=50 bytes=100M", a second and a minute.',
        ),
    ] = "",
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory",
            metavar="SIZE",
            help="What all clients may hold, as in 8G. Default: half of the memory available.",
        ),
    ] = None,
    client_memory: Annotated[
        str | None,
        typer.Option(
            "--client-memory",
            metavar="SIZE",
            help="What each client with a certificate may hold. Default: half of --memory.",
        ),
    ] = None,
    insecure: Insecure = False,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            "--checkpoint", metavar="DIR", help="Keep everything here, and go on from here."
        ),
    ] = None,
    every: Annotated[
        int, typer.Option("--every", min=1, metavar="N", help="Steps between two checkpoints.")
    ] = 100,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="OUT",
            help="Write the trained backbone here when the server stops.",
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            "--lr",
            min=0.0,
            metavar="R",
            help="Train the backbone at this rate. Without it, it only serves.",
        ),
    ] = None,
    optimizer: Annotated[
        Optimizer | None, typer.Option("--optimizer", help="Default: adamw.")
    ] = None,
    schedule: Annotated[
        Schedule | None,
        typer.Option(
            "--schedule", help="How the rate goes on after the warm-up. Default: constant."
        ),
    ] = None,
    warmup: Warmup = None,
    steps: Annotated[
        int | None,
        typer.Option("--steps", min=1, metavar="N", help="The step at which the schedule ends."),
    ] = None,
    clip: Clip = None,
    accumulate: Annotated[
        int | None,
        typer.Option("--accumulate", min=1, metavar="N", help="Losses of a step. Default: 1."),
    ] = None,
    decay: WeightDecay = None,
    momentum: Momentum = None,
    average: Annotated[
        int,
        typer.Option(
            "--average",
            min=0,
            metavar="N",
            help="A copy for each client, averaged after N steps of each. Default: one for all.",
        ),
    ] = 0,
    precision: Annotated[
        Precision | None,
        typer.Option("--precision", help="Compute in fewer bits, over weights in float32."),
    ] = None,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Compile the blocks with torch.compile.")
    ] = False,
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype", metavar="D", help="Of the weights in memory; the clients' must be the same."
        ),
    ] = "float32",
    seed: Annotated[int, options.seed_option("What dropout is drawn from.")] = 0,
    metrics: Annotated[
        str | None,
        typer.Option(
            "--metrics", metavar="ADDR", help="Prometheus metrics over HTTP, as in 127.0.0.1:9100."
        ),
    ] = None,
    device: options.Device = "cpu",
    threads: options.Threads = None,
    json: options.Json = False,
    verbose: options.Verbose = 0,
) -> int:
    """Host the backbone of a model for clients that have its embedding and head, their data and
    their labels. Ctrl-C or SIGTERM stops it: what is under way is finished, and a checkpoint
    written. A second one waits for no client.
    """
    started = time.monotonic()
    given = {
        "schedule": schedule,
        "warmup": warmup,
        "steps": steps,
        "clip": clip,
        "accumulate": accumulate,
        "decay": decay,
        "momentum": momentum,
    }
    training = _build_optimizer(rate, optimizer, given)
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
                "nothing is trained, so that there is nothing to write; --lr R trains the backbone",
                param_hint="--output",
            )
    files = read_tls(tls, "server")
    listed, quotas = _load_clients(tls, clients, quota, files is not None)
    source = open_checkpoint(backbone)
    record = record_of(source)
    info(f"loads {backbone}")
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
            server_signals(None if listed is None else listed.reload) as asked,
            Server(host, listen, tls=files, clients=listed, insecure=insecure) as server,
        ):
            page = None if metrics is None else Metrics(host, server, metrics)
            where = f"{listen.rpartition(':')[0]}:{server.port}"
            who = (
                "without TLS"
                if files is None
                else f"with TLS, for {', '.join(sorted(listed.quotas))}"
                if listed is not None
                else "with TLS, for all of its authority"
            )
            info(
                f"listens on {where}, "
                f"{who}{f'; metrics at http://{metrics}/metrics' if page else ''}; Ctrl-C stops it"
            )
            _show_status(host, server, asked.stop)
            info("stops: takes no more, and finishes what is under way")
            try:
                server.stop(30.0, asked.skip_drain)
            except CheckpointError as error:  # what was trained can still be written below
                failed = error
            if page is not None:
                page.close()
            if checkpoint is not None and failed is None:
                info(f"step {host.step} is in {checkpoint}; the same command goes on from there")
            if out is not None:
                from regauge.split.parts import write_part

                write_part(out, model, source, "backbone", host.backbone(), {"steps": host.step})
                info(
                    f"wrote the backbone to {out}; with a client's part, regauge split join "
                    "makes a whole model of it"
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
    rate: float | None, optimizer: Optimizer | None, given: dict[str, Any]
) -> OptimizerConfig | None:
    said = {name: value for name, value in given.items() if value is not None}
    if rate is None:
        if said or optimizer is not None:
            what = "--optimizer" if optimizer is not None else f"--{min(said)}"
            raise typer.BadParameter(
                "this belongs to training, and without --lr R nothing is trained", param_hint=what
            )
        return None
    from regauge.split import OptimizerConfig

    plain: dict[str, Any] = {k: str(v) if isinstance(v, StrEnum) else v for k, v in said.items()}
    name = "adamw" if optimizer is None else optimizer.value
    return OptimizerConfig.from_dict({"optimizer": name, "rate": rate, **plain})


@contextmanager
def exclusive_folder(folder: Path, what: str) -> Iterator[None]:
    """Hold a folder, made if it is not there, for one process: two would overwrite what the other
    one has said is kept.
    """
    from regauge.checkpoints.files import exclusive_lock, wrap_write_errors

    with wrap_write_errors(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with exclusive_lock(
        folder,
        f"another {what} is using {folder}",
        "wait until it has ended, or name another folder",
    ):
        yield


def read_tls(text: str | None, name: str | None) -> Tls | None:
    """The files of one side: in a folder of `split certs`, those of this name (or of its one
    client); or three files by name.
    """
    if text is None:
        return None
    from regauge.errors import CheckpointError
    from regauge.split.protocol.channel import Tls

    parts = [Path(part).expanduser() for part in text.split(",")]
    if len(parts) == 3:
        found = Tls(*parts)
    else:
        folder = Path(text).expanduser()
        if not folder.is_dir():
            raise CheckpointError(
                f"there is no folder {text} of certificates",
                hint="regauge split certs --to FOLDER makes one; or name three files, with commas",
            )
        names = sorted(p.stem for p in folder.glob("*.key") if p.stem != "server")
        if name is None:
            if len(names) != 1:
                raise CheckpointError(
                    f"{text} has certificates of {', '.join(names) or 'no client'}",
                    hint="say whose they are with --client-name NAME",
                )
            name = names[0]
        found = Tls(folder / "authority.pem", folder / f"{name}.pem", folder / f"{name}.key")
    for path in (found.authority, found.certificate, found.key):
        if not path.is_file():
            raise CheckpointError(
                f"there is no {path}",
                hint="a side needs the authority's certificate, its own, and its key",
            )
    found.read()
    return found


def _load_clients(
    tls: str | None, clients: Path | None, quota: str, secure: bool
) -> tuple[ClientFile | None, Quotas]:
    """Who may come, and how much they may ask."""
    from regauge.split.server.client_list import ClientFile
    from regauge.split.server.quotas import Quotas, read_quota

    default: Quota = read_quota(quota)
    if clients is not None and not secure:
        raise typer.BadParameter(
            "clients are known by their certificates: it needs --tls", param_hint="--clients"
        )
    if clients is None and tls is not None and (Path(tls).expanduser() / CLIENTS).is_file():
        clients = Path(tls).expanduser() / CLIENTS
    if clients is None:
        return None, Quotas(default)
    listed = ClientFile(clients, default)
    return listed, Quotas(default, listed.quotas)


def _print_startup(host: Host, model: Any, record: Any, checkpoint: Path | None) -> None:
    from regauge.checkpoints.files import format_bytes

    count = sum(p.numel() for p in host.main.parameters.values())
    locked = "" if record is None else f", locked by the key {record.key}"
    info(
        f"{type(model).__name__}: {len(host.blocks)} blocks, {count:,} weights in "
        f"{host.model_description['dtype']}{locked}"
    )
    if host.training is None:
        info(
            "serves only: gradients pass through, and the backbone stays as it is; --lr R trains it"
        )
    else:
        more = "".join(
            [
                f", averaged every {host.rounds.average} steps" * bool(host.rounds.average),
                f", in {host.executor.precision}" * bool(host.executor.precision),
            ]
        )
        info(
            f"trains with {host.training.optimizer} at {host.training.lr:g}, "
            f"{host.training.schedule}{more}"
        )
    info(
        f"memory: {format_bytes(host.budget.total)} for all clients, "
        f"{format_bytes(host.budget.client)} for "
        "each with a certificate (--memory, --client-memory)"
    )
    if checkpoint is None and host.training is not None:
        info("keeps nothing: if it dies, so do its sessions; --checkpoint DIR keeps them")
    elif host.step or host.sessions:
        info(f"goes on from {checkpoint}: step {host.step}, {len(host.sessions)} sessions")


@contextmanager
def stop_signals(words: str = "") -> Iterator[threading.Event]:
    """An event that Ctrl-C and SIGTERM set, with a few words. A second one is an interrupt."""
    stop = threading.Event()

    def asked(number: int, frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        if words:
            info(words)

    with _signal_handlers((signal.SIGINT, signal.SIGTERM), asked):
        yield stop


@dataclass
class StopRequests:
    """What signals have asked a server for."""

    stop: threading.Event = field(default_factory=threading.Event)
    skip_drain: threading.Event = field(
        default_factory=threading.Event
    )  # waits for no client any more


@contextmanager
def server_signals(reload_clients: Callable[[], None] | None = None) -> Iterator[StopRequests]:
    """Let SIGTERM and Ctrl-C stop a server in order, however often they come, and SIGHUP read the
    list of clients again.

    A second one ends the wait for clients; the checkpoint is written in any case. Only a third
    Ctrl-C interrupts that.
    """
    asked = StopRequests()

    def stop(number: int, frame: object) -> None:
        if asked.skip_drain.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        (asked.skip_drain if asked.stop.is_set() else asked.stop).set()

    def reload(number: int, frame: object) -> None:
        if reload_clients is not None:
            reload_clients()

    hangup = (signal.SIGHUP,) if hasattr(signal, "SIGHUP") else ()
    with _signal_handlers((signal.SIGINT, signal.SIGTERM), stop), _signal_handlers(hangup, reload):
        yield asked


@contextmanager
def _signal_handlers(
    numbers: Sequence[signal.Signals], handler: Callable[[int, object], None]
) -> Iterator[None]:
    before: dict[signal.Signals, Any] = {}
    with suppress(ValueError):  # not the main thread
        for number in numbers:
            before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for held, previous in before.items():
            signal.signal(held, previous)


class _StderrHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        info(f"{'warning: ' if record.levelno >= logging.WARNING else ''}{record.getMessage()}")


@contextmanager
def _log_to_stderr(verbose: int) -> Iterator[None]:
    """What the engine logs goes where all talk goes. It holds no tensors and no keys."""
    log, handler = logging.getLogger("regauge.split"), _StderrHandler()
    log.addHandler(handler)
    log.setLevel(logging.INFO if verbose else logging.WARNING)
    try:
        yield
    finally:
        log.removeHandler(handler)


def _show_status(host: Host, server: Server, stop: threading.Event) -> None:
    """Show how far it is until somebody stops it: one line that changes on a terminal, otherwise a
    line now and then if something has changed.
    """
    from regauge.checkpoints.files import format_bytes

    began, last = (time.monotonic(), host.step), time.monotonic()

    def line() -> str:
        nonlocal began
        seconds, steps = time.monotonic() - began[0], host.step - began[1]
        if seconds > 30:
            began = (time.monotonic(), host.step)
        sessions = list(host.sessions.values())
        names = sorted({s.peer for s in sessions if s.peer})
        who = (
            f"{len(sessions)} "
            f"session{'s' * (len(sessions) != 1)}{f' ({chr(44).join(names[:4])})' if names else ''}"
        )
        return (
            f"step {host.step}, {steps / max(seconds, 1e-9):.1f} a second, {who}, "
            f"{format_bytes(server.received)} in, {format_bytes(server.sent)} out"
        )

    if sys.stderr.isatty():
        from rich.console import Console
        from rich.text import Text

        with Console(stderr=True).status("waits for clients") as status:
            while not stop.wait(0.5):
                if host.requests:
                    status.update(Text(line()))  # clients' names are no markup
        return
    shown: object = (host.step, 0)
    while not stop.wait(0.2):
        now = (host.step, sum(host.requests.values()))
        if now != shown and time.monotonic() - last >= (
            STATUS_INTERVAL if shown != (host.step, 0) else 0.0
        ):
            info(line())
            shown, last = now, time.monotonic()
