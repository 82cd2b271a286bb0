"""What both ends of a gRPC channel share: its options, certificates, the event loop, addresses, and
the size of pieces.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regauge.checkpoints.files import wrap_read_errors
from regauge.errors import CheckpointError
from regauge.locking.keys import read_private
from regauge.split.protocol.frames import CHUNK, PIECE, chunks
from regauge.split.protocol.transport import TransportError

MIN_PIECE, PIECE_SECONDS = (
    1 << 16,
    0.5,
)  # bytes of the smallest piece, and seconds that a larger one may take

# Without a ping time-out a process that was stopped is not found at all (measured; keepalive alone
# does not).
OPTIONS = [
    ("grpc.max_receive_message_length", 2 * CHUNK),
    ("grpc.max_send_message_length", 2 * CHUNK),
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 3000),
    ("grpc.http2.ping_timeout_ms", 3000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
    (
        "grpc.http2.bdp_probe",
        0,
    ),  # with it there is room for 4 MiB in flight, which pings then wait behind
    ("grpc.so_reuseport", 0),
    ("grpc.enable_retries", 0),
]
CLIENT_OPTIONS = [
    *OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", 100),
    (
        "grpc.min_reconnect_backoff_ms",
        3000,
    ),  # is what a handshake may take, whatever its name says: several round trips of a slow link
    ("grpc.max_reconnect_backoff_ms", 1000),
]


@dataclass(frozen=True)
class Tls:
    """Files in PEM: the authority that both sides trust, one's own certificate, and its key."""

    authority: Path
    certificate: Path
    key: Path

    def read(self) -> tuple[bytes, bytes, bytes]:
        """The bytes of the three. Looked into, because gRPC does not say what is wrong with which
        of them.
        """
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
        from cryptography.x509 import load_pem_x509_certificates

        found, made = [], []
        for path, what in (
            (self.authority, "certificate"),
            (self.certificate, "certificate"),
            (self.key, "private key"),
        ):
            with wrap_read_errors(path):
                found.append(
                    Path(path).read_bytes() if what == "certificate" else read_private(path, what)
                )
            try:
                made.append(
                    load_pem_x509_certificates(found[-1])[0]
                    if what == "certificate"
                    else load_pem_private_key(found[-1], None)
                )
            except TypeError as error:
                raise CheckpointError(
                    f"{path} is a private key with a passphrase, and gRPC asks for none",
                    hint="name the key without it",
                ) from error
            except (ValueError, UnsupportedAlgorithm) as error:
                raise CheckpointError(
                    f"{path} is no {what} in PEM",
                    hint="regauge split certs --to FOLDER makes all three",
                ) from error
        if made[1].public_key() != made[2].public_key():
            raise CheckpointError(
                f"{self.key} is not the key of {self.certificate}",
                hint="name the two that were made together",
            )
        return found[0], found[1], found[2]


class Loop:
    """One event loop for all that this process serves and asks, in a thread of its own: grpc.aio is
    happiest with one.
    """

    _loop: asyncio.AbstractEventLoop | None = None
    _lock = threading.Lock()

    @classmethod
    def get(cls) -> asyncio.AbstractEventLoop:
        with cls._lock:
            if cls._loop is None:
                cls._loop = asyncio.new_event_loop()
                threading.Thread(
                    target=cls._loop.run_forever, name="regauge-split", daemon=True
                ).start()
            return cls._loop

    @classmethod
    def run(cls, work: Any, seconds: float | None = None) -> Any:
        return asyncio.run_coroutine_threadsafe(work, cls.get()).result(seconds)


class Pace:
    """How large the pieces of a frame are: as much as the way carries in half a second, by the
    pieces before; small ones at first.

    A message is in flight as a whole, since its reader makes room for all of it, and a ping waits
    behind what is in flight.
    """

    def __init__(self) -> None:
        self.size, self.sent, self.seconds = MIN_PIECE, 0.0, 0.0

    def pieces(self, parts: Sequence[memoryview]) -> Iterator[bytes]:
        """The bytes in pieces. The time that a piece took is the time until the next one is asked
        for.
        """
        for part in chunks(parts, PIECE):
            at = 0
            while at < len(part):
                piece = part[at : at + self.size] if at or len(part) > self.size else part
                began = time.monotonic()
                yield piece
                # Recent pieces count most. Some take no time at all, because there was room for
                # them; what counts is the sum.
                self.sent, self.seconds = (
                    self.sent / 2 + len(piece),
                    self.seconds / 2 + time.monotonic() - began,
                )
                at += len(piece)
                fits = int(PIECE_SECONDS * self.sent / max(self.seconds, 1e-9))
                self.size = max(MIN_PIECE, min(PIECE, 2 * self.size, fits))


def is_loopback(address: str) -> bool:
    if address.startswith("unix:"):
        return True
    name = address.rpartition(":")[0].strip("[]")
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def require_private_address(address: str, tls: Tls | None, insecure: bool) -> None:
    port = re.search(r".:(\d{1,5})$", address)
    if not address.startswith("unix:") and (
        port is None or int(port[1]) > 65535
    ):  # gRPC would take 99999 for 34463
        raise TransportError(
            f"{address!r} is no address", hint="write HOST:PORT, as in 127.0.0.1:7000 or [::1]:7000"
        )
    if tls is None and not insecure and not is_loopback(address):
        raise TransportError(
            f"{address} is not this machine, and without TLS anyone on the way reads and "
            "changes what crosses",
            hint="give certificates (--tls; regauge split certs makes some), or insecure=True "
            "(--insecure) where another layer protects the network",
        )
