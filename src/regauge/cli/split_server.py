"""`regauge split serve`: a backbone behind a port."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regauge.cli import options
from regauge.cli.console import info, print_report
from regauge.cli.run import start_run

if TYPE_CHECKING:
    from rich.status import Status

    from regauge.split import OptimizerConfig, SplitServer

_LIMITS = "Limits of clients"
STATUS_INTERVAL = 10.0  # seconds between status lines without a terminal


Schedule = StrEnum("Schedule", ["constant", "linear", "cosine"])
Precision = StrEnum("Precision", ["bf16", "fp16"])
LearningRate = Annotated[
    float | None,
    typer.Option(
        "--lr", min=0.0, metavar="R", help="Learning rate.", rich_help_panel=options.TRAINING
    ),
]
WeightDecay = Annotated[
    float | None,
    typer.Option(
        "--weight-decay",
        min=0.0,
        metavar="X",
        help="Weight decay.",
        rich_help_panel=options.TRAINING,
    ),
]
Momentum = Annotated[
    float | None,
    typer.Option(
        "--momentum",
        min=0.0,
        max=1.0,
        metavar="X",
        help="Momentum of sgd.",
        rich_help_panel=options.TRAINING,
    ),
]
Warmup = Annotated[
    int | None,
    typer.Option(
        "--warmup",
        min=0,
        metavar="N",
        help="Warm-up steps of the learning rate.",
        rich_help_panel=options.TRAINING,
    ),
]
Clip = Annotated[
    float | None,
    typer.Option(
        "--clip",
        min=0.0,
        metavar="X",
        help="Largest norm of the gradient.",
        rich_help_panel=options.TRAINING,
    ),
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
            rich_help_panel=_LIMITS,
        ),
    ] = None,
    quota: Annotated[
        str,
        typer.Option(
            "--quota",
            metavar="Q",
            help='Quota of each client: "sessions=2 requests=50 bytes=100M", requests per '
            "second and bytes per minute.",
            rich_help_panel=_LIMITS,
        ),
    ] = "",
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory",
            metavar="SIZE",
            help="Memory for all clients, as in 8G. Default: half of the available memory.",
            rich_help_panel=_LIMITS,
        ),
    ] = None,
    client_memory: Annotated[
        str | None,
        typer.Option(
            "--client-memory",
            metavar="SIZE",
            help="Memory for each client with a certificate. Default: half of --memory.",
            rich_help_panel=_LIMITS,
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
        int,
        typer.Option(
            "--every",
            min=1,
            metavar="N",
            help="Steps between checkpoints.",
            rich_help_panel=options.ADVANCED,
        ),
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
            rich_help_panel=options.TRAINING,
        ),
    ] = None,
    optimizer: Annotated[
        options.Optimizer | None,
        typer.Option(
            "--optimizer",
            help="Optimizer of the backbone. Default: adamw.",
            rich_help_panel=options.TRAINING,
        ),
    ] = None,
    schedule: Annotated[
        Schedule | None,
        typer.Option(
            "--schedule",
            help="Learning rate schedule after the warm-up. Default: constant.",
            rich_help_panel=options.TRAINING,
        ),
    ] = None,
    warmup: Warmup = None,
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps",
            min=1,
            metavar="N",
            help="Step at which the schedule ends.",
            rich_help_panel=options.TRAINING,
        ),
    ] = None,
    clip: Clip = None,
    accumulate: Annotated[
        int | None,
        typer.Option(
            "--accumulate",
            min=1,
            metavar="N",
            help="Losses per optimizer step. Default: 1.",
            rich_help_panel=options.TRAINING,
        ),
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
            rich_help_panel=options.ADVANCED,
        ),
    ] = 0,
    precision: Annotated[
        Precision | None,
        typer.Option(
            "--precision",
            help="Compute precision, over weights in float32.",
            rich_help_panel=options.ADVANCED,
        ),
    ] = None,
    compiled: Annotated[
        bool,
        typer.Option(
            "--compile",
            help="Compile the blocks with torch.compile.",
            rich_help_panel=options.ADVANCED,
        ),
    ] = False,
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype",
            metavar="D",
            help="Dtype of the weights in memory; must equal the clients'.",
            rich_help_panel=options.ADVANCED,
        ),
    ] = "float32",
    seed: Annotated[int, options.seed_option("Seed of dropout.")] = 0,
    metrics: Annotated[
        str | None,
        typer.Option(
            "--metrics",
            metavar="ADDR",
            help="Address of Prometheus metrics over HTTP, as in 127.0.0.1:9100.",
            rich_help_panel=options.ADVANCED,
        ),
    ] = None,
    device: options.Device = "cpu",
    threads: options.Threads = None,
    json: options.Json = False,
    verbose: options.Verbose = 0,
) -> int:
    """Serve the backbone of a model to clients.

    The clients hold its embedding and head, their data and their labels. Ctrl-C or SIGTERM
    stops the server after the requests under way, and a checkpoint is written. A second one
    stops waiting for clients.
    """
    training = _build_optimizer(
        lr,
        optimizer,
        schedule=schedule,
        warmup=warmup,
        steps=steps,
        clip=clip,
        accumulate=accumulate,
        weight_decay=weight_decay,
        momentum=momentum,
    )
    if out is not None and training is None and checkpoint is None:
        raise typer.BadParameter(
            "requires --lr R: without training there is nothing to write", param_hint="--output"
        )
    if clients is not None and tls is None:
        raise typer.BadParameter(
            "requires --tls: clients are identified by their certificates", param_hint="--clients"
        )
    start_run(threads=threads, device=device)
    from regauge.split import ServerOptions
    from regauge.split import serve as run

    settings = ServerOptions(
        clients=clients,
        quota=quota,
        memory=memory,
        client_memory=client_memory,
        insecure=insecure,
        save_every=every,
        average=average,
        precision="" if precision is None else precision.value,
        compiler="inductor" if compiled else "",
        dtype=dtype,
        device=device,
        seed=seed,
        metrics=metrics,
    )
    with log_to_stderr(verbose), _status_line() as status:
        server = run(
            backbone,
            address=listen,
            tls=tls,
            training=training,
            checkpoint=checkpoint,
            out=out,
            options=settings,
            on_poll=status,
        )
    if json:
        print_report("split serve", server.to_dict())
    return 0


def _build_optimizer(
    lr: float | None, optimizer: options.Optimizer | None, **settings: Any
) -> OptimizerConfig | None:
    """Return the optimizer of the backbone, or None if it is not trained."""
    passed = {name: value for name, value in settings.items() if value is not None}
    if lr is None:
        if passed or optimizer is not None:
            name = "optimizer" if optimizer is not None else min(passed)
            raise typer.BadParameter(
                "requires --lr R, without which nothing is trained",
                param_hint=f"--{name}".replace("_", "-"),
            )
        return None
    from regauge.split import OptimizerConfig

    values: dict[str, Any] = {k: str(v) if isinstance(v, StrEnum) else v for k, v in passed.items()}
    return OptimizerConfig("adamw" if optimizer is None else optimizer.value, lr, **values)


class _StderrHandler(logging.Handler):
    """A log handler that writes to stderr like any other message."""

    def emit(self, record: logging.LogRecord) -> None:
        info(f"{'warning: ' if record.levelno >= logging.WARNING else ''}{record.getMessage()}")


@contextmanager
def log_to_stderr(verbose: int) -> Iterator[None]:
    """Print what a run does on stderr, and the engine's log: its warnings, or all if verbose.

    It contains no tensors and no keys.
    """
    log, handler = logging.getLogger("regauge.split"), _StderrHandler()
    log.addHandler(handler)
    log.setLevel(logging.INFO if verbose else logging.WARNING)
    logging.getLogger("regauge.split.run").setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)


class _Status:
    """The progress of a server: a changing line on a terminal, otherwise a line now and then if
    something changed.
    """

    def __init__(self, live: Status | None) -> None:
        self.live, self.window, self.printed_at = live, (0.0, 0), 0.0
        self.printed: tuple[int, int] | None = None

    def __call__(self, server: SplitServer) -> None:
        step, now = server.host.step, time.monotonic()
        if self.printed is None:
            self.window, self.printed = (now, step), (step, 0)
            if self.live is not None:
                self.live.start()
        current = (step, sum(server.host.requests.values()))
        if self.live is not None and server.host.requests:
            from rich.text import Text

            self.live.update(Text(self.line(server)))  # clients' names are not markup
        elif self.live is None and current != self.printed and now >= self.printed_at:
            info(self.line(server))
            self.printed, self.printed_at = current, now + STATUS_INTERVAL

    def line(self, server: SplitServer) -> str:
        """Return the line."""
        from regauge.checkpoints.files import format_bytes

        host, network = server.host, server.network
        assert network is not None
        seconds, steps = time.monotonic() - self.window[0], host.step - self.window[1]
        if seconds > 30:
            self.window = (time.monotonic(), host.step)
        sessions = list(host.sessions.values())
        names = sorted({s.peer for s in sessions if s.peer})
        return (
            f"step {host.step}, {steps / max(seconds, 1e-9):.1f} a second, {len(sessions)} "
            f"session{'s' * (len(sessions) != 1)}{f' ({chr(44).join(names[:4])})' if names else ''}"
            f", {format_bytes(network.received)} in, {format_bytes(network.sent)} out"
        )


@contextmanager
def _status_line() -> Iterator[_Status]:
    """Yield a callback that shows a server's progress."""
    if not sys.stderr.isatty():
        yield _Status(None)
        return
    from rich.console import Console
    from rich.status import Status

    status = Status("waiting for clients", console=Console(stderr=True))
    try:
        yield _Status(status)
    finally:
        status.stop()
