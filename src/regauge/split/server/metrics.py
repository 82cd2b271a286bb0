"""Metrics of a server in the Prometheus text format, on a separate HTTP port.

They are numbers only: no names of clients, no tensors, no keys.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from regauge.errors import Hint, TransportError, need
from regauge.split.server.host import Host

if TYPE_CHECKING:
    from regauge.split.server.network import Server


def render_metrics(host: Host, server: Server | None = None) -> str:
    """Return all metrics as text."""
    need("prometheus_client", "split")
    from prometheus_client import generate_latest

    return generate_latest(_registry(host, server)).decode()


def _registry(host: Host, server: Server | None) -> Any:
    """Return a registry of a server's metrics and of its process."""
    from prometheus_client import CollectorRegistry, ProcessCollector
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector

    class HostCollector(Collector):
        """The metrics of a host.

        The host's lock is not taken, so that a long step does not delay the scraper.
        """

        def collect(self) -> Iterable[Metric]:
            requests = CounterMetricFamily(
                "regauge_split_requests_total",
                "Requests answered, by kind and result (ok, or the error code).",
                labels=("kind", "result"),
            )
            for labels, count in sorted(dict(host.requests).items()):
                requests.add_metric(labels, count)
            yield requests
            for name, help_text, value in _values(host, server):
                family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
                yield family(f"regauge_split_{name}", help_text, value=value)

    registry = CollectorRegistry()
    registry.register(HostCollector())
    ProcessCollector(registry=registry)
    return registry


def _values(host: Host, server: Server | None) -> Iterable[tuple[str, str, float]]:
    """Yield name, help text and value of each metric without labels."""
    sessions, costs = list(host.sessions.values()), [cost for _, cost in host.charges()]
    reserved = sum(c.held for c in costs) + max((c.working for c in costs), default=0)
    yield "steps_total", "Optimizer steps.", host.step
    yield "compute_seconds_total", "Seconds spent on requests.", host.compute_seconds
    yield "sessions", "Open sessions.", len(sessions)
    yield (
        "passes_open",
        "Forward passes that await their backward pass.",
        sum(len(s.pending) for s in sessions),
    )
    yield "memory_budget_bytes", "Memory budget of all clients together.", host.budget.total
    yield "memory_client_budget_bytes", "Memory budget of each client.", host.budget.client
    yield (
        "memory_reserved_bytes",
        "Memory charged for passes, caches, copies and replies, and to compute the largest pass.",
        reserved,
    )
    yield "checkpoint_step", "Step of the last checkpoint.", host.saved_step
    if server is not None:
        yield "received_bytes_total", "Bytes received in frames.", server.received
        yield "sent_bytes_total", "Bytes sent in frames.", server.sent
        yield "streams", "Open streams.", server.streams


class Metrics:
    """An HTTP server of metrics.

    Args:
        host: The server's backbone.
        server: Its network side, if there is one.
        address: HOST:PORT to listen on; port 0 chooses a free one, which is then in `port`.

    Raises:
        TransportError: The address is invalid or in use.
    """

    def __init__(self, host: Host, server: Server | None, address: str = "127.0.0.1:0") -> None:
        need("prometheus_client", "split")
        from prometheus_client import start_http_server

        host_name, _, port = address.rpartition(":")
        if not port.isdigit():
            raise TransportError(
                f"the address of metrics must be HOST:PORT, got {address!r}",
                hint="write HOST:PORT, as in 127.0.0.1:9100",
            )
        try:
            self.http, _ = start_http_server(
                int(port), host_name.strip("[]") or "127.0.0.1", _registry(host, server)
            )
        except (OSError, OverflowError) as error:
            raise TransportError(
                f"cannot listen on {address} for metrics: {error}",
                hint=Hint("pass another port as metrics", cli="pass another port with --metrics"),
            ) from error
        self.port = int(self.http.server_port)

    def close(self) -> None:
        """Stop listening."""
        self.http.shutdown()
        self.http.server_close()
