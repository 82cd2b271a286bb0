"""Quotas of clients: sessions at once, requests per second, bytes per minute.

A client above its rate receives "busy", and retries automatically a little later. One that opens
too many sessions is rejected. Clients are identified by the names in their certificates; without
TLS all of them share one quota.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from regauge.errors import FrameError, QuotaError

_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}


@dataclass(frozen=True)
class Quota:
    """Limits of one client; 0 is unlimited.

    Attributes:
        sessions: Sessions at once.
        requests: Requests per second, which may arrive in one burst.
        bytes: Bytes per minute, which may arrive in one burst.
    """

    sessions: int = 0
    requests: float = 0.0
    bytes: float = 0.0


@dataclass
class _Bucket:
    """A token bucket. A request may take more than is left; the next one then has to wait."""

    tokens: float
    updated_at: float

    def refill(self, rate: float, capacity: float, now: float) -> float:
        """Add the tokens since the last call; return the seconds until the bucket is not empty."""
        self.tokens, self.updated_at = (
            min(capacity, self.tokens + (now - self.updated_at) * rate),
            now,
        )
        return 0.0 if self.tokens > 0 else -self.tokens / rate


@dataclass
class Quotas:
    """Quotas by client, and the current usage.

    Attributes:
        default: Quota of clients without their own.
        by_client: Quotas by the clients' names.
        clock: Returns the time in seconds.
        buckets: Token buckets by client and kind.
        lock: Guards the buckets: requests and streams use them from several threads.
    """

    default: Quota = field(default_factory=Quota)
    by_client: Mapping[str, Quota] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic
    buckets: dict[tuple[str, str], _Bucket] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def for_client(self, client: str) -> Quota:
        """Return the quota of a client."""
        return self.by_client.get(client, self.default)

    def take(self, client: str, size: int) -> None:
        """Count a request of `size` bytes.

        Raises:
            FrameError: "busy" if the client's quota is used up for now.
        """
        with self.lock:
            for kind, limit, period, _, wait in self._refill_buckets(client):
                if wait is not None:
                    raise FrameError(
                        "busy",
                        f"{client or 'a client'} has used its {limit:g} {kind} per {period}",
                        hint=f"retry in {wait:.1f} s",
                    )
        self.charge(client, size)

    def charge(self, client: str, size: int) -> None:
        """Count a transfer of `size` bytes, even if it was not a valid request."""
        with self.lock:
            for kind, _, _, bucket, _ in self._refill_buckets(client):
                bucket.tokens -= 1.0 if kind == "requests" else size

    def is_exhausted(self, client: str) -> bool:
        """Return whether a client has used up its quota for now."""
        quota = self.for_client(client)
        if not quota.requests and not quota.bytes:
            return False
        with self.lock:
            return any(wait is not None for *_, wait in self._refill_buckets(client))

    def _refill_buckets(
        self, client: str
    ) -> Iterator[tuple[str, float, str, _Bucket, float | None]]:
        """Yield kind, limit, period, refilled bucket, and the seconds to wait if it is empty."""
        quota, now = self.for_client(client), self.clock()
        for kind, limit, rate, capacity, period in (
            ("requests", quota.requests, quota.requests, max(quota.requests, 1.0), "second"),
            ("bytes", quota.bytes, quota.bytes / 60, quota.bytes, "minute"),
        ):
            if rate:
                bucket = self.buckets.setdefault((client, kind), _Bucket(capacity, now))
                wait = bucket.refill(rate, capacity, now)
                yield kind, limit, period, bucket, wait if wait > 0 or bucket.tokens <= 0 else None


def require_session_quota(client: str, sessions: int, limit: int) -> None:
    """Raise FrameError if a client has no further session left; a limit of 0 is unlimited."""
    if limit and sessions >= limit:
        raise FrameError(
            "quota",
            f"{client or 'a client'} has {sessions} sessions, and its quota is {limit}",
            hint="end one, or ask the server's owner for a larger quota",
        )


def read_quota(text: str, default: Quota | None = None) -> Quota:
    """Parse a quota such as `sessions=2 requests=50 bytes=100M`, in any order.

    Args:
        text: The quota.
        default: Values of what the text leaves out.

    Raises:
        QuotaError: The text is not a quota.
    """
    values: dict[str, float] = {}
    for part in text.replace(",", " ").split():
        match = re.fullmatch(r"(sessions|requests|bytes)=(\d+(?:\.\d+)?)([kMG]?)", part)
        if match is None or (match[1] == "sessions" and "." in match[2]):
            raise QuotaError(
                f"a quota must be sessions=N, requests=N or bytes=N, got {part!r}",
                hint="write some of sessions=2 requests=50 bytes=100M (requests per second, bytes "
                "per minute)",
            )
        values[match[1]] = float(match[2]) * _UNITS[match[3]]
    default = default or Quota()
    return Quota(
        sessions=int(values.get("sessions", default.sessions)),
        requests=values.get("requests", default.requests),
        bytes=values.get("bytes", default.bytes),
    )


def read_clients(text: str, default: Quota | None = None) -> dict[str, Quota]:
    """Parse a list of clients: one name per line, with an optional quota; `#` starts a comment.

    Raises:
        QuotaError: A quota is invalid, or a name is repeated.
    """
    quotas: dict[str, Quota] = {}
    for number, line in enumerate(text.splitlines(), 1):
        name, *rest = line.partition("#")[0].split(None, 1) or [""]
        if not name:
            continue
        if name in quotas:
            raise QuotaError(
                f"line {number} repeats the client {name}", hint="write one line for each client"
            )
        quotas[name] = read_quota(" ".join(rest), default)
    return quotas
