"""Both ends of a gRPC channel: options, TLS files, event loop, pacing and addresses."""

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
from regauge.errors import CheckpointError, Hint, TransportError
from regauge.locking.keys import read_private
from regauge.split.protocol.frames import CHUNK, PIECE, chunks

MIN_PIECE = 1 << 16  # bytes
PIECE_SECONDS = 0.5  # that a larger piece may take

# Without a ping timeout a stopped process is never detected; keepalive alone does not (measured).
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
    # The probe would allow 4 MiB in flight, which pings then wait behind.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.so_reuseport", 0),
    ("grpc.enable_retries", 0),
]
CLIENT_OPTIONS = [
    *OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Despite its name the timeout of a handshake, which takes several round trips of a slow link.
    ("grpc.min_reconnect_backoff_ms", 3000),
    ("grpc.max_reconnect_backoff_ms", 1000),
]


@dataclass(frozen=True)
class Tls:
    """PEM files of one side: the trusted authority, the own certificate and its private key."""

    authority: Path
    certificate: Path
    key: Path

    def read(self) -> tuple[bytes, bytes, bytes]:
        """Return the contents of authority, certificate and key.

        They are validated here, because the errors of gRPC do not name the faulty file.

        Raises:
            CheckpointError: A file is missing or invalid, or the key does not match.
        """
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
        from cryptography.x509 import load_pem_x509_certificates

        contents, parsed = [], []
        for path, kind in (
            (self.authority, "certificate"),
            (self.certificate, "certificate"),
            (self.key, "private key"),
        ):
            with wrap_read_errors(path):
                contents.append(
                    Path(path).read_bytes() if kind == "certificate" else read_private(path, kind)
                )
            try:
                parsed.append(
                    load_pem_x509_certificates(contents[-1])[0]
                    if kind == "certificate"
                    else load_pem_private_key(contents[-1], None)
                )
            except TypeError as error:
                raise CheckpointError(
                    f"{path} must be a private key without a passphrase, got an encrypted one",
                    hint="gRPC cannot decrypt keys: name a decrypted one",
                ) from error
            except (ValueError, UnsupportedAlgorithm) as error:
                raise CheckpointError(
                    f"{path} must be a {kind} in PEM format",
                    hint=Hint(
                        "regauge.split.make_certificates creates all three files",
                        cli="regauge split certs --to FOLDER creates all three files",
                    ),
                ) from error
        if parsed[1].public_key() != parsed[2].public_key():
            raise CheckpointError(
                f"{self.key} must be the private key of {self.certificate}, got another key",
                hint="name the two that were created together",
            )
        return contents[0], contents[1], contents[2]


def load_tls(source: Tls | Path | str | None, name: str | None = None) -> Tls | None:
    """Return the TLS files of one side, validated.

    Args:
        source: A folder of `make_certificates`, three files "authority,certificate,key", a `Tls`,
            or None for plaintext.
        name: "server", or the client whose files to use. Default: the folder's only client.

    Raises:
        CheckpointError: A file is missing or invalid, or the folder has several clients.
    """
    if source is None:
        return None
    parts = [Path(part).expanduser() for part in str(source).split(",")]
    if isinstance(source, Tls):
        files = source
    elif len(parts) == 3:
        files = Tls(*parts)
    else:
        folder = Path(source).expanduser()
        if not folder.is_dir():
            raise CheckpointError(
                f"tls must be a folder of certificates or three files, got {source}",
                hint=Hint(
                    "regauge.split.make_certificates creates one",
                    cli="regauge split certs --to FOLDER creates one",
                ),
            )
        names = sorted(p.stem for p in folder.glob("*.key") if p.stem != "server")
        if name is None and len(names) != 1:
            raise CheckpointError(
                f"{source} must have one client's certificate, got those of "
                f"{', '.join(names) or 'no client'}",
                hint=Hint("choose one with client_name=", cli="choose one with --client-name NAME"),
            )
        name = name or names[0]
        files = Tls(folder / "authority.pem", folder / f"{name}.pem", folder / f"{name}.key")
    for path in (files.authority, files.certificate, files.key):
        if not path.is_file():
            raise CheckpointError(
                f"{path} does not exist",
                hint="each side needs the authority's certificate, its own certificate and its key",
            )
    files.read()
    return files


class Loop:
    """The event loop of all servers and clients of this process, in its own thread.

    grpc.aio works best with a single loop.
    """

    _loop: asyncio.AbstractEventLoop | None = None
    _lock = threading.Lock()

    @classmethod
    def get(cls) -> asyncio.AbstractEventLoop:
        """Return the loop; the first call starts it."""
        with cls._lock:
            if cls._loop is None:
                cls._loop = asyncio.new_event_loop()
                threading.Thread(
                    target=cls._loop.run_forever, name="regauge-split", daemon=True
                ).start()
            return cls._loop

    @classmethod
    def run(cls, work: Any, seconds: float | None = None) -> Any:
        """Run a coroutine in the loop and wait for its result, at most so many seconds."""
        return asyncio.run_coroutine_threadsafe(work, cls.get()).result(seconds)


class Pace:
    """The size of the pieces of a frame: as much as the connection carries in half a second.

    It is estimated from the previous pieces; the first ones are small. The receiver makes room for
    a complete gRPC message, so that all of it is in flight at once, and pings wait behind it.
    """

    def __init__(self) -> None:
        self.size, self.sent, self.seconds = MIN_PIECE, 0.0, 0.0

    def pieces(self, parts: Sequence[memoryview]) -> Iterator[bytes]:
        """Yield the bytes in pieces.

        The time until the caller requests the next piece counts as the time of the previous one.
        """
        for part in chunks(parts, PIECE):
            position = 0
            while position < len(part):
                piece = (
                    part[position : position + self.size]
                    if position or len(part) > self.size
                    else part
                )
                start = time.monotonic()
                yield piece
                # Recent pieces count most. Some take no time because they fit into a buffer, so
                # that only the sums are meaningful.
                self.sent, self.seconds = (
                    self.sent / 2 + len(piece),
                    self.seconds / 2 + time.monotonic() - start,
                )
                position += len(piece)
                capacity = int(PIECE_SECONDS * self.sent / max(self.seconds, 1e-9))
                self.size = max(MIN_PIECE, min(PIECE, 2 * self.size, capacity))


def is_loopback(address: str) -> bool:
    """Return whether an address (HOST:PORT or unix:PATH) is on this machine."""
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
    """Raise TransportError for an invalid address, or one that would be used without TLS."""
    port = re.search(r".:(\d{1,5})$", address)
    # gRPC would take port 99999 for 34463.
    if not address.startswith("unix:") and (port is None or int(port[1]) > 65535):
        raise TransportError(
            f"the address must be HOST:PORT, got {address!r}",
            hint="write HOST:PORT, as in 127.0.0.1:7000 or [::1]:7000",
        )
    if tls is None and not insecure and not is_loopback(address):
        raise TransportError(
            f"{address} must be a loopback address without TLS: others on the network could read "
            "and change all traffic",
            hint=Hint(
                "pass tls= (regauge.split.make_certificates creates certificates), "
                "or insecure=True if another layer protects the network",
                cli="pass --tls FOLDER (regauge split certs creates certificates), "
                "or --insecure if another layer protects the network",
            ),
        )
