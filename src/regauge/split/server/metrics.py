"""What a server has done, in the text format of Prometheus, on an HTTP port of its own. Numbers
only: no names of clients, no tensors, no keys.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

from regauge.split.protocol.transport import TransportError
from regauge.split.server.host import Host

if TYPE_CHECKING:
    from regauge.split.server.network import Server

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def render_metrics(host: Host, server: Server | None = None) -> str:
    """All numbers as they are now. The host's lock is not taken: a long step does not hold up
    whoever looks.
    """
    return "".join(
        f"# HELP {name} {what}\n# TYPE {name} {kind}\n{rows}"
        for name, kind, what, rows in _iter_metrics(host, server)
    )


def _iter_metrics(host: Host, server: Server | None) -> Iterator[tuple[str, str, str, str]]:
    def one(name: str, kind: str, what: str, value: float) -> tuple[str, str, str, str]:
        return (
            f"regauge_split_{name}",
            kind,
            what,
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
    yield one("steps_total", "counter", "Steps of the optimizer.", host.step)
    yield (
        "regauge_split_requests_total",
        "counter",
        "Requests answered, by kind and result (ok, or the code of the refusal).",
        lines,
    )
    yield one(
        "compute_seconds_total", "counter", "Seconds spent on requests.", host.compute_seconds
    )
    yield one("sessions", "gauge", "Sessions that the server knows.", len(sessions))
    yield one(
        "passes_open",
        "gauge",
        "Forward passes that wait for their backward pass.",
        sum(len(s.pending) for s in sessions),
    )
    held = list(host.charges())
    yield one(
        "memory_budget_bytes", "gauge", "Memory budget of all clients together.", host.budget.total
    )
    yield one(
        "memory_client_budget_bytes", "gauge", "Memory budget of each client.", host.budget.client
    )
    yield one(
        "memory_reserved_bytes",
        "gauge",
        "Memory that open passes, caches, copies and replies are charged for, with the working "
        "memory of the largest pass.",
        sum(c.held for _, c in held) + max((c.working for _, c in held), default=0),
    )
    yield one("checkpoint_step", "gauge", "The step of the last checkpoint.", host.saved_step)
    if server is not None:
        yield one("received_bytes_total", "counter", "Bytes that came, in frames.", server.received)
        yield one("sent_bytes_total", "counter", "Bytes that went, in frames.", server.sent)
        yield one("streams", "gauge", "Streams that are open.", server.streams)
    memory = _resident_bytes()
    if memory:
        yield (
            "process_resident_memory_bytes",
            "gauge",
            "Memory of the process.",
            f"process_resident_memory_bytes {memory}\n",
        )


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


class Metrics:
    """An HTTP port that answers `/metrics`. `port` is the one it was given."""

    def __init__(self, host: Host, server: Server | None, address: str = "127.0.0.1:0") -> None:
        name, _, port = address.rpartition(":")
        if not port.isdigit():
            raise TransportError(
                f"{address} is no address to listen on",
                hint="write HOST:PORT, as in 127.0.0.1:9100",
            )

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = self.path.partition("?")[0] == "/metrics"
                body = render_metrics(host, server).encode() if found else b"look at /metrics\n"
                self.send_response(200 if found else 404)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: object) -> None:
                """Nobody wants a line for every look."""

        try:
            self.http = ThreadingHTTPServer((name.strip("[]") or "127.0.0.1", int(port)), Handler)
        except (OSError, OverflowError) as error:
            raise TransportError(
                f"{address} cannot be listened on for metrics: {error}",
                hint="name another port with --metrics",
            ) from error
        self.http.daemon_threads = True
        self.port = int(self.http.server_address[1])
        threading.Thread(
            target=self.http.serve_forever, name="regauge-metrics", daemon=True
        ).start()

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()
