"""A server's whole life in one call: the model loaded, hosted, served, saved and written."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge.checkpoints.files import exclusive_folder, format_bytes
from regauge.checkpoints.plan import check_new
from regauge.core.options import require_device, resolve_options
from regauge.core.threads import limited_threads
from regauge.data.optimizer_config import OptimizerConfig
from regauge.errors import CheckpointError, TrainingError, TransportError, need
from regauge.locking.lock import record_of
from regauge.models.load import load_part
from regauge.models.sources import open_source
from regauge.split.parts import write_part
from regauge.split.protocol.certificates import CLIENTS
from regauge.split.protocol.channel import Tls, load_tls
from regauge.split.server.client_list import ClientFile
from regauge.split.server.host import Host
from regauge.split.server.memory import read_size
from regauge.split.server.metrics import Metrics
from regauge.split.server.network import Server
from regauge.split.server.quotas import Quotas, read_quota

if TYPE_CHECKING:
    from regauge.models.sources import Source

GRACE_SECONDS = 30.0  # for requests under way when the server stops
POLL_SECONDS = 0.2
_log = logging.getLogger("regauge.split.run")  # what a run does; the engine logs to its parent


@dataclass(frozen=True)
class ServerOptions:
    """Options of `serve`.

    Attributes:
        clients: File of accepted clients, one name per line with an optional quota, which is
            reloaded on change. Default: clients.txt beside the certificates, if there is one.
        quota: Quota of each client, as in "sessions=2 requests=50 bytes=100M".
        memory: Bytes for all clients, as a number or as in "8G". Default: half of what is free.
        client_memory: Bytes for each client with a certificate. Default: half of `memory`.
        insecure: Accept other addresses than loopback without TLS.
        save_every: Steps between checkpoints.
        average: Train a copy for each client, averaged after so many steps of each; 0 trains one
            backbone for all.
        precision: Mixed precision over float32 weights: "bf16" or "fp16".
        compiler: Backend of torch.compile, such as "inductor".
        dtype: Dtype of the weights in memory; it must equal the clients'.
        device: Device that computes.
        seed: Seed of dropout.
        metrics: HOST:PORT of Prometheus metrics over HTTP.

    Example:
        >>> options = regauge.split.ServerOptions(quota="sessions=2", save_every=10)
        >>> how = {"address": "127.0.0.1:0", "options": options, "background": True}
        >>> with regauge.split.serve("model", **how) as server:
        ...     remote = regauge.split.connect("model", server.address)
    """

    clients: Path | str | None = None
    quota: str = ""
    memory: int | str | None = None
    client_memory: int | str | None = None
    insecure: bool = False
    save_every: int = 100
    average: int = 0
    precision: str = ""
    compiler: str = ""
    dtype: str = "float32"
    device: str = "cpu"
    seed: int = 0
    metrics: str | None = None


def serve(
    backbone: Source,
    *,
    address: str = "127.0.0.1:7000",
    tls: Tls | Path | str | None = None,
    training: OptimizerConfig | None = None,
    checkpoint: Path | str | None = None,
    out: Path | str | None = None,
    options: ServerOptions | None = None,
    background: bool = False,
    on_poll: Callable[[SplitServer], object] | None = None,
) -> SplitServer:
    """Serve the backbone of a model to clients that hold its embedding and head.

    Blocks until Ctrl-C or SIGTERM, which finish the requests under way and write checkpoint and
    output; a second one ends the wait for clients, and SIGHUP reloads the list of clients. Progress
    is logged to "regauge.split.run".

    Args:
        backbone: The model: a path, a hub id, a checkpoint, or a module, whose weights are then
            trained in place. It may be locked: no key is needed.
        address: HOST:PORT to listen on; port 0 chooses a free one.
        tls: Certificates, required beyond loopback: a folder of `make_certificates`, three files
            "authority,certificate,key", or a `Tls`.
        training: Optimizer of the backbone; without it the server only runs the backbone.
        checkpoint: Folder to save checkpoints in, and to resume from.
        out: New folder for the trained backbone, written when the server stops.
        options: Further options.
        background: Return once the server listens, for a `with` block or `stop()`.
        on_poll: Called with the server several times a second, while it blocks.

    Returns:
        The server: stopped, or listening if `background` is set.

    Raises:
        CheckpointError: The model, the checkpoint or a certificate is missing or damaged, or `out`
            exists.
        TransportError: The address is invalid, in use, or needs TLS.
        TrainingError: `out` is set without `training` or `checkpoint`.

    Example:
        >>> with regauge.split.serve("model", address="127.0.0.1:0", background=True) as server:
        ...     remote = regauge.split.connect("model", server.address)
    """
    server = SplitServer(
        backbone, address, load_tls(tls, "server"), training, checkpoint, out, options
    )
    if background:
        return server.start()
    with limited_threads(), stop_requests(server.reload_clients) as requests, server.start():
        while not requests.stop.wait(POLL_SECONDS):
            if on_poll is not None:
                on_poll(server)
        server.stop(skip_grace=requests.skip_grace)
    return server


class SplitServer:
    """A split server, returned by `serve`: a context manager that stops it.

    Attributes:
        host: The backbone, its sessions and counts.
        network: The port; None before it listens.

    Example:
        >>> with regauge.split.serve("model", address="127.0.0.1:0", background=True) as server:
        ...     remote = regauge.split.connect("model", server.address)
    """

    def __init__(
        self,
        backbone: Source,
        address: str,
        tls: Tls | None,
        training: OptimizerConfig | None,
        checkpoint: Path | str | None,
        out: Path | str | None,
        options: ServerOptions | None,
    ) -> None:
        need("grpc", "split")
        options = resolve_options(options, ServerOptions())
        require_device(options.device)
        self.tls, self.options = tls, options
        self.checkpoint = None if checkpoint is None else Path(checkpoint)
        self.out = None if out is None else Path(out)
        self.network: Server | None = None
        self.requested_address, self.started = address, time.monotonic()
        sizes = [
            read_size(size) if isinstance(size, str) else size
            for size in (options.memory, options.client_memory)
        ]
        if self.out is not None:
            check_new(self.out)
            if training is None and checkpoint is None:
                raise TrainingError(
                    "out requires training: without it there is nothing to write",
                    hint="pass training=OptimizerConfig(...)",
                )
        self.clients, quotas = self._load_clients()
        self.source, module = open_source(backbone)
        self.record = record_of(self.source)
        if module is None:
            _log.info("loading %s", self.source.path)
        self.model = module or load_part(self.source, "backbone", options.dtype, options.device)
        with ExitStack() as stack:
            if self.checkpoint is not None:
                stack.enter_context(exclusive_folder(self.checkpoint, "server"))
            self.host = Host(
                self.model,
                training,
                folder=checkpoint,
                save_every=options.save_every,
                config=self.source.config,
                key="" if self.record is None else self.record.key,
                seed=options.seed,
                precision=options.precision,
                compiler=options.compiler,
                average=options.average,
                quotas=quotas,
                memory=sizes[0],
                client_memory=sizes[1],
            )
            self._resources = stack.pop_all()
        self._log_host()

    def _load_clients(self) -> tuple[ClientFile | None, Quotas]:
        """Return the list of accepted clients, and their quotas."""
        default, path = read_quota(self.options.quota), self.options.clients
        if self.tls is None:
            if path is not None:
                raise TransportError(
                    "a list of clients requires TLS: clients are identified by their certificates",
                    hint="pass tls=",
                )
            return None, Quotas(default)
        beside = self.tls.certificate.parent / CLIENTS
        if path is None and not beside.is_file():
            return None, Quotas(default)
        clients = ClientFile(path or beside, default)
        return clients, Quotas(default, clients.quotas)

    def _log_host(self) -> None:
        """Log what the server hosts, trains and saves."""
        host, budget = self.host, self.host.budget
        count = sum(p.numel() for p in host.main.parameters.values())
        _log.info(
            "%s: %d blocks, %s weights in %s%s",
            type(self.model).__name__,
            len(host.blocks),
            f"{count:,}",
            host.model_description["dtype"],
            "" if self.record is None else f", locked by the key {self.record.key}",
        )
        if host.training is None:
            _log.info(
                "frozen backbone: gradients pass through, nothing is trained; --lr R trains it"
            )
        else:
            average, precision = host.rounds.average, host.executor.precision
            _log.info(
                "training with %s at %g, %s%s%s",
                host.training.optimizer,
                host.training.lr,
                host.training.schedule,
                f", averaged every {average} steps" if average else "",
                f", in {precision}" if precision else "",
            )
        _log.info(
            "memory: %s for all clients, %s for each with a certificate (--memory, "
            "--client-memory)",
            format_bytes(budget.total),
            format_bytes(budget.client),
        )
        if self.checkpoint is None and host.training is not None:
            _log.info(
                "no checkpoint: sessions are lost if the server dies; --checkpoint DIR saves them"
            )
        elif host.step or host.sessions:
            _log.info(
                "resuming from %s: step %d, %d sessions",
                self.checkpoint,
                host.step,
                len(host.sessions),
            )

    def start(self) -> SplitServer:
        """Listen; requests are answered in the background."""
        with ExitStack() as stack:
            stack.push(self._resources)
            network = Server(
                self.host,
                self.requested_address,
                tls=self.tls,
                clients=self.clients,
                insecure=self.options.insecure,
            )
            stack.callback(network.stop, 0.0)
            metrics = self.options.metrics
            if metrics is not None:
                self._resources.callback(Metrics(self.host, network, metrics).close)
            self.network = network
            stack.pop_all()
        _log.info(
            "listening on %s, %s%s; Ctrl-C stops it",
            self.address,
            "without TLS"
            if self.tls is None
            else f"with TLS, for {', '.join(sorted(self.clients.quotas))}"
            if self.clients is not None
            else "with TLS, for all of its authority",
            "" if metrics is None else f"; metrics at http://{metrics}/metrics",
        )
        return self

    @property
    def address(self) -> str:
        """HOST:PORT of the server."""
        if self.network is None:
            return self.requested_address
        return f"{self.requested_address.rpartition(':')[0]}:{self.network.port}"

    def reload_clients(self) -> None:
        """Reload the list of clients soon, changed or not."""
        if self.clients is not None:
            self.clients.reload()

    def stop(self, grace: float = GRACE_SECONDS, skip_grace: threading.Event | None = None) -> None:
        """Finish the requests under way, then write checkpoint and output. A second call does
        nothing.

        Args:
            grace: Seconds to wait for requests.
            skip_grace: Ends this wait when it is set.

        Raises:
            CheckpointError: The checkpoint could not be written; the output is, nevertheless.
        """
        if self.network is None or self.network.is_stopping:
            return
        _log.info("stopping: no new requests, finishing those under way")
        failed: CheckpointError | None = None
        with self._resources:
            try:
                self.network.stop(grace, skip_grace)
            except CheckpointError as error:  # the trained weights can still be written below
                failed = error
            if self.checkpoint is not None and failed is None:
                _log.info(
                    "saved step %d in %s; the same command resumes from it",
                    self.host.step,
                    self.checkpoint,
                )
            if self.out is not None:
                steps, state = {"steps": self.host.step}, self.host.backbone()
                write_part(self.out, self.model, self.source, "backbone", state, steps)
                _log.info(
                    "wrote the backbone to %s; regauge split join joins it with a client's part",
                    self.out,
                )
        _log.info(
            "stopped at step %d after %d requests, %.0f s",
            self.host.step,
            self.answered,
            time.monotonic() - self.started,
        )
        if failed is not None:
            raise failed

    @property
    def answered(self) -> int:
        """Requests that were answered without an error."""
        return sum(n for (_, result), n in self.host.requests.items() if result == "ok")

    def to_dict(self) -> dict[str, Any]:
        """Return steps, requests, bytes received and sent, and outputs."""
        network = self.network
        return {
            "steps": self.host.step,
            "requests": self.answered,
            "out": None if self.out is None else str(self.out),
            "checkpoint": None if self.checkpoint is None else str(self.checkpoint),
            "bytes": [0, 0] if network is None else [network.received, network.sent],
        }

    def __repr__(self) -> str:
        return f"<split server at {self.address}: step {self.host.step}>"

    def __enter__(self) -> SplitServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


@dataclass
class StopRequests:
    """The requests that signals have made of a server."""

    stop: threading.Event = field(default_factory=threading.Event)
    skip_grace: threading.Event = field(default_factory=threading.Event)  # stop waiting for clients


@contextmanager
def stop_requests(reload_clients: Callable[[], None] | None = None) -> Iterator[StopRequests]:
    """Let SIGTERM and Ctrl-C stop a server in order, however often they come, and SIGHUP reload the
    list of clients.

    A second signal ends the wait for clients; the checkpoint is written in any case. Only a third
    Ctrl-C interrupts that.
    """
    requests = StopRequests()

    def stop(number: int, frame: object) -> None:
        if requests.skip_grace.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        (requests.skip_grace if requests.stop.is_set() else requests.stop).set()

    def reload(number: int, frame: object) -> None:
        if reload_clients is not None:
            reload_clients()

    hangup = (signal.SIGHUP,) if hasattr(signal, "SIGHUP") else ()
    with signal_handlers((signal.SIGINT, signal.SIGTERM), stop), signal_handlers(hangup, reload):
        yield requests


@contextmanager
def signal_handlers(
    numbers: Sequence[signal.Signals], handler: Callable[[int, object], None]
) -> Iterator[None]:
    """Install a signal handler, and restore the previous ones. Without effect in other threads than
    the main one.
    """
    previous_handlers: dict[signal.Signals, Any] = {}
    with suppress(ValueError):
        for number in numbers:
            previous_handlers[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for handled, previous in previous_handlers.items():
            signal.signal(handled, previous)
