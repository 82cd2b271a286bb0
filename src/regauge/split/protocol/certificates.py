"""Certificates for a server and its clients, signed by a private authority.

Private keys are readable by their owner only. Existing files are not overwritten.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge.checkpoints.files import write_bytes
from regauge.split.protocol.channel import Tls

if TYPE_CHECKING:
    from cryptography import x509


def make_certificates(
    folder: Path | str,
    names: Sequence[str] = ("localhost", "127.0.0.1"),
    clients: Sequence[str] = ("client",),
    days: int = 365,
) -> dict[str, Tls]:
    """Create a certificate authority and sign certificates for a server and its clients.

    The authority's private key is discarded: no further certificates can be issued in secret, and
    another client needs a new set for all.

    Args:
        folder: Folder of the PEM files; created if needed.
        names: Host names and IP addresses of the server.
        clients: Names of the clients, which become their common names.
        days: Validity.

    Returns:
        The files by name, "server" and each client.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

    folder = Path(folder)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    authority_key = ec.generate_private_key(ec.SECP256R1())
    root = _sign_certificate(
        "regauge split",
        authority_key.public_key(),
        "regauge split",
        authority_key,
        days,
        [(x509.BasicConstraints(ca=True, path_length=0), True)],
    )
    _write(folder / "authority.pem", _to_pem(root), 0o644)
    files: dict[str, Tls] = {}
    key_usage = x509.oid.ExtendedKeyUsageOID
    requested: list[tuple[str, list[tuple[Any, bool]]]] = [
        (
            "server",
            [
                (x509.SubjectAlternativeName([_alternative_name(n) for n in names]), False),
                (x509.ExtendedKeyUsage([key_usage.SERVER_AUTH]), False),
            ],
        )
    ]
    requested += [
        (client, [(x509.ExtendedKeyUsage([key_usage.CLIENT_AUTH]), False)]) for client in clients
    ]
    for name, extensions in requested:
        private_key = ec.generate_private_key(ec.SECP256R1())
        certificate = _sign_certificate(
            name,
            private_key.public_key(),
            "regauge split",
            authority_key,
            days,
            [(x509.BasicConstraints(ca=False, path_length=None), True), *extensions],
        )
        _write(folder / f"{name}.pem", _to_pem(certificate), 0o644)
        _write(folder / f"{name}.key", _to_pem(private_key), 0o600)
        files[name] = Tls(folder / "authority.pem", folder / f"{name}.pem", folder / f"{name}.key")
    return files


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


def _write(path: Path, data: bytes, mode: int) -> None:
    write_bytes(path, data, mode=mode, new=True)
