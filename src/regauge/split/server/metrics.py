"""Metrics of a server in the Prometheus text format, on a separate HTTP port.

They are numbers only: no names of clients, no tensors, no keys.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

from regauge.errors import TransportError
from regauge.split.server.host import Host

if TYPE_CHECKING:
    from regauge.split.server.network import Server

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def render_metrics(host: Host, server: Server | None = None) -> str:
    """Return all metrics as text.

    The host's lock is not taken, so that a long step does not delay the scraper.
    """
    return "".join(
        f"# HELP {name} {help_text}\n# TYPE {name} {kind}\n{rows}"
        for name, kind, help_text, rows in _iter_metrics(host, server)
    )


def _iter_metrics(host: Host, server: Server | None) -> Iterator[tuple[str, str, str, str]]:
    """Yield name, type, help text and samples of each metric."""

    def metric(name: str, kind: str, help_text: str, value: float) -> tuple[str, str, str, str]:
        return (
            f"regauge_split_{name}",
            kind,
            help_text,
            f"regauge_split_{name} {value:g}\n"
            if value % 1
            else f"regauge_split_{name} {int(value)}\n",
        )

    sessions = list(host.sessions.values())
    rows = sorted(dict(host.requests).items())
    lines = "".join(
        f'regauge_split_requests_total{{kind="{kind}",result="{result}"}} {n}\n'
        for (kind, result), n in rows
    )
    yield metric("steps_total", "counter", "Optimizer steps.", host.step)
    yield (
        "regauge_split_requests_total",
        "counter",
        "Requests answered, by kind and result (ok, or the error code).",
        lines,
    )
    yield metric(
        "compute_seconds_total", "counter", "Seconds spent on requests.", host.compute_seconds
    )
    yield metric("sessions", "gauge", "Open sessions.", len(sessions))
    yield metric(
        "passes_open",
        "gauge",
        "Forward passes that await their backward pass.",
        sum(len(s.pending) for s in sessions),
    )
    costs = list(host.charges())
    yield metric(
        "memory_budget_bytes", "gauge", "Memory budget of all clients together.", host.budget.total
    )
    yield metric(
        "memory_client_budget_bytes", "gauge", "Memory budget of each client.", host.budget.client
    )
    yield metric(
        "memory_reserved_bytes",
        "gauge",
        "Memory charged for open passes, caches, copies and replies, with the working memory of "
        "the largest pass.",
        sum(c.held for _, c in costs) + max((c.working for _, c in costs), default=0),
    )
    yield metric("checkpoint_step", "gauge", "Step of the last checkpoint.", host.saved_step)
    if server is not None:
        yield metric(
            "received_bytes_total", "counter", "Bytes received in frames.", server.received
        )
        yield metric("sent_bytes_total", "counter", "Bytes sent in frames.", server.sent)
        yield metric("streams", "gauge", "Open streams.", server.streams)
    memory = _resident_bytes()
    if memory:
        yield (
            "process_resident_memory_bytes",
            "gauge",
            "Resident memory of the process.",
            f"process_resident_memory_bytes {memory}\n",
        )


def _resident_bytes() -> int:
    """Return the resident memory of this process, or 0 if it is unknown."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


class Metrics:
    """An HTTP server of `/metrics`.

    Args:
        host: The server's backbone.
        server: Its network side, if there is one.
        address: HOST:PORT to listen on; port 0 chooses a free one, which is then in `port`.

    Raises:
        TransportError: The address is invalid or in use.
    """

    def __init__(self, host: Host, server: Server | None, address: str = "127.0.0.1:0") -> None:
        host_name, _, port = address.rpartition(":")
        if not port.isdigit():
            raise TransportError(
                f"the address of metrics must be HOST:PORT, got {address!r}",
                hint="write HOST:PORT, as in 127.0.0.1:9100",
            )

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                is_metrics = self.path.partition("?")[0] == "/metrics"
                body = render_metrics(host, server).encode() if is_metrics else b"see /metrics\n"
                self.send_response(200 if is_metrics else 404)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: object) -> None:
                """Log nothing: one line per scrape would flood the log."""

        try:
            self.http = ThreadingHTTPServer(
                (host_name.strip("[]") or "127.0.0.1", int(port)), Handler
            )
        except (OSError, OverflowError) as error:
            raise TransportError(
                f"cannot listen on {address} for metrics: {error}",
                hint="name another port with --metrics",
            ) from error
        self.http.daemon_threads = True
        self.port = int(self.http.server_address[1])
        threading.Thread(
            target=self.http.serve_forever, name="regauge-metrics", daemon=True
        ).start()

    def close(self) -> None:
        """Stop listening."""
        self.http.shutdown()
        self.http.server_close()
