"""How much each client may ask: sessions at once, requests a second, bytes a minute.

A client that asks too fast is told "busy", and comes again by itself a little later. One that opens
too many sessions is refused. Clients are known by their certificates' names; without TLS all of
them are one.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from regauge.errors import RegaugeError
from regauge.split.protocol.frames import FrameError

_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}


class QuotaError(RegaugeError):
    """A list of clients, or a quota, that cannot be read."""


@dataclass(frozen=True)
class Quota:
    """What one client may have; 0 is without limit. A second's requests, and a minute's bytes, may
    come at once.
    """

    sessions: int = 0
    requests: float = 0.0
    bytes: float = 0.0


@dataclass
class _Bucket:
    """What is left, filled up as time goes by. The last request may take more than there is: the
    next one waits for it.
    """

    tokens: float
    updated_at: float

    def refill(self, rate: float, most: float, now: float) -> float:
        self.tokens, self.updated_at = min(most, self.tokens + (now - self.updated_at) * rate), now
        return 0.0 if self.tokens > 0 else -self.tokens / rate


@dataclass
class Quotas:
    """The quota of every client, by name; `default` is for those that have none of their own."""

    default: Quota = field(default_factory=Quota)
    by_client: Mapping[str, Quota] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic
    buckets: dict[tuple[str, str], _Bucket] = field(default_factory=dict)
    lock: threading.Lock = field(
        default_factory=threading.Lock, repr=False, compare=False
    )  # requests and streams ask from threads of their own

    def for_client(self, client: str) -> Quota:
        return self.by_client.get(client, self.default)

    def take(self, client: str, size: int) -> None:
        """Count a request of so many bytes, or refuse it."""
        with self.lock:
            for what, limit, each, _, wait in self._refill_buckets(client):
                if wait is not None:
                    raise FrameError(
                        "busy",
                        f"{client or 'a client'} has used its {limit:g} {what} {each}",
                        hint=f"come again in {wait:.1f} s",
                    )
        self.charge(client, size)

    def charge(self, client: str, size: int) -> None:
        """Count so many bytes that have crossed, request or not."""
        with self.lock:
            for what, _, _, bucket, _ in self._refill_buckets(client):
                bucket.tokens -= 1.0 if what == "requests" else size

    def is_exhausted(self, client: str) -> bool:
        """Has this client used what it may for now?"""
        quota = self.for_client(client)
        if not quota.requests and not quota.bytes:
            return False
        with self.lock:
            return any(wait is not None for *_, wait in self._refill_buckets(client))

    def _refill_buckets(
        self, client: str
    ) -> Iterator[tuple[str, float, str, _Bucket, float | None]]:
        """What is counted, its limit, its bucket, and for how long that is empty yet."""
        quota, now = self.for_client(client), self.clock()
        for what, limit, rate, most, each in (
            ("requests", quota.requests, quota.requests, max(quota.requests, 1.0), "a second"),
            ("bytes", quota.bytes, quota.bytes / 60, quota.bytes, "a minute"),
        ):
            if rate:
                bucket = self.buckets.setdefault((client, what), _Bucket(most, now))
                wait = bucket.refill(rate, most, now)
                yield what, limit, each, bucket, wait if wait > 0 or bucket.tokens <= 0 else None


def require_session_quota(client: str, sessions: int, most: int) -> None:
    """Refuse one more session than a client may have; 0 is without limit."""
    if most and sessions >= most:
        raise FrameError(
            "quota",
            f"{client or 'a client'} has {sessions} sessions, and may have {most}",
            hint="end one, or ask the server's owner",
        )


def read_quota(text: str, default: Quota | None = None) -> Quota:
    """`sessions=2 requests=50 bytes=100M`, in any order; what is not said is as in the default."""
    found: dict[str, float] = {}
    for part in text.replace(",", " ").split():
        matched = re.fullmatch(r"(sessions|requests|bytes)=(\d+(?:\.\d+)?)([kMG]?)", part)
        if matched is None or (matched[1] == "sessions" and "." in matched[2]):
            raise QuotaError(
                f"{part!r} is no quota",
                hint="write sessions=2 requests=50 bytes=100M (a second, a minute), or some of "
                "them",
            )
        found[matched[1]] = float(matched[2]) * _UNITS[matched[3]]
    return replace(
        default or Quota(),
        **{name: int(n) if name == "sessions" else n for name, n in found.items()},  # type: ignore[arg-type]
    )


def read_clients(text: str, default: Quota | None = None) -> dict[str, Quota]:
    """A list of clients: a name on each line, perhaps with a quota behind it. `#` begins a
    remark.
    """
    out: dict[str, Quota] = {}
    for number, line in enumerate(text.splitlines(), 1):
        name, *rest = line.partition("#")[0].split(None, 1) or [""]
        if not name:
            continue
        if name in out:
            raise QuotaError(
                f"line {number} names {name} a second time", hint="one line for each client"
            )
        out[name] = read_quota(" ".join(rest), default)
    return out
