"""Certificates for a server and its clients, signed by a private authority.

All files are readable by their owner only. Existing files are not overwritten.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge.checkpoints.files import OWNER, staged_folder, wrap_write_errors, write_bytes
from regauge.errors import CheckpointError
from regauge.split.protocol.channel import Tls

if TYPE_CHECKING:
    from cryptography import x509


CLIENTS = "clients.txt"  # the list of clients beside the certificates


def check_client_name(name: str) -> str:
    """Return the name of a client; raise CheckpointError if a certificate cannot carry it."""
    is_valid = re.fullmatch(r"[\w][\w.@-]{0,63}", name) and len(name.encode()) <= 64
    if not is_valid or name in ("server", "authority"):
        raise CheckpointError(
            "must consist of letters, digits, . @ - and _, and not be server or authority, got "
            f"{name!r}"
        )
    return name


def check_host_name(name: str) -> str:
    """Return a host name or address; raise CheckpointError if a certificate cannot carry it."""
    pattern = r"[A-Za-z0-9*][A-Za-z0-9.*_-]{0,252}|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*"
    if not re.fullmatch(pattern, name):
        raise CheckpointError(
            f"must be a host name or address, got {name!r}; write names of other letters as xn--..."
        )
    return name


def make_certificates(
    folder: Path | str,
    names: Sequence[str] = ("localhost", "127.0.0.1", "::1"),
    clients: Sequence[str] = ("client",),
    days: int = 365,
) -> dict[str, Tls]:
    """Create a certificate authority and sign certificates for a server and its clients.

    The authority's private key is discarded: no further certificates can be issued in secret, and
    another client needs a new set for all. All files are written, or none.

    Args:
        folder: New or empty folder of the PEM files and of `clients.txt`, which names the clients.
        names: Host names and IP addresses of the server.
        clients: Names of the clients, which become their common names.
        days: Validity.

    Returns:
        The files by name, "server" and each client.

    Raises:
        CheckpointError: The folder has files, or a name is invalid or repeated.

    Example:
        >>> sorted(regauge.split.make_certificates("certs", ["server.example"], ["ann"]))
        ['ann', 'server']
    """
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

    folder = Path(folder)
    for check, checked in ((check_client_name, clients), (check_host_name, names)):
        for name in checked:
            check(name)
    if len(set(clients)) < len(clients):
        raise CheckpointError(f"clients must be unique, got {', '.join(clients)}")
    with wrap_write_errors(folder):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise CheckpointError(
                f"{folder} must be new or empty",
                hint="certificates belong together: name a new folder",
            )
    authority_key = ec.generate_private_key(ec.SECP256R1())
    root = _sign_certificate(
        "regauge split",
        authority_key.public_key(),
        "regauge split",
        authority_key,
        days,
        [(x509.BasicConstraints(ca=True, path_length=0), True)],
    )
    key_usage = x509.oid.ExtendedKeyUsageOID
    requested: dict[str, list[tuple[Any, bool]]] = {
        "server": [
            (x509.SubjectAlternativeName([_alternative_name(n) for n in names]), False),
            (x509.ExtendedKeyUsage([key_usage.SERVER_AUTH]), False),
        ],
        **{client: [(x509.ExtendedKeyUsage([key_usage.CLIENT_AUTH]), False)] for client in clients},
    }
    with staged_folder(folder, OWNER) as partial:
        write_bytes(partial / "authority.pem", _to_pem(root))
        if clients:
            write_bytes(partial / CLIENTS, "".join(f"{client}\n" for client in clients).encode())
        for name, extensions in requested.items():
            private_key = ec.generate_private_key(ec.SECP256R1())
            certificate = _sign_certificate(
                name,
                private_key.public_key(),
                "regauge split",
                authority_key,
                days,
                [(x509.BasicConstraints(ca=False, path_length=None), True), *extensions],
            )
            write_bytes(partial / f"{name}.pem", _to_pem(certificate))
            write_bytes(partial / f"{name}.key", _to_pem(private_key), 0o600)
    return {
        name: Tls(folder / "authority.pem", folder / f"{name}.pem", folder / f"{name}.key")
        for name in requested
    }


def _sign_certificate(
    name: str,
    public_key: Any,
    issuer: str,
    key: Any,
    days: int,
    extensions: Sequence[tuple[Any, bool]],
) -> x509.Certificate:
    """Return a certificate signed by the issuer's key; extensions are (value, is critical)."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    def common_name(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, text)])

    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(common_name(name))
        .issuer_name(common_name(issuer))
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
    )
    builder = builder.not_valid_before(now - timedelta(minutes=5)).not_valid_after(
        now + timedelta(days=days)
    )
    for extension, critical in extensions:
        builder = builder.add_extension(extension, critical)
    return builder.sign(key, hashes.SHA256())


def _alternative_name(text: str) -> Any:
    """Return an IP address or a DNS name for a certificate."""
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _to_pem(key_or_certificate: Any) -> bytes:
    """Encode a private key or a certificate as PEM."""
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    if hasattr(key_or_certificate, "private_bytes"):
        encoding = Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
        return bytes(key_or_certificate.private_bytes(*encoding))
    return bytes(key_or_certificate.public_bytes(Encoding.PEM))
