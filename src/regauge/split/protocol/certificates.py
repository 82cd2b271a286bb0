"""Certificates for a server and its clients, of a small authority of one's own. Keys are for their
owner only; nothing is overwritten.
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
    """An authority, a server that answers to `names` (hosts or addresses), and clients, as PEM
    files in a folder. The authority's key is thrown away: more clients need new certificates for
    all, and nobody can make any in secret.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

    folder = Path(folder)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    root = _sign_certificate(
        "regauge split",
        key.public_key(),
        "regauge split",
        key,
        days,
        [(x509.BasicConstraints(ca=True, path_length=0), True)],
    )
    _write(folder / "authority.pem", _to_pem(root), 0o644)
    out: dict[str, Tls] = {}
    usage = x509.oid.ExtendedKeyUsageOID
    wanted: list[tuple[str, list[tuple[Any, bool]]]] = [
        (
            "server",
            [
                (x509.SubjectAlternativeName([_alternative_name(n) for n in names]), False),
                (x509.ExtendedKeyUsage([usage.SERVER_AUTH]), False),
            ],
        )
    ]
    wanted += [
        (client, [(x509.ExtendedKeyUsage([usage.CLIENT_AUTH]), False)]) for client in clients
    ]
    for name, more in wanted:
        own = ec.generate_private_key(ec.SECP256R1())
        made = _sign_certificate(
            name,
            own.public_key(),
            "regauge split",
            key,
            days,
            [(x509.BasicConstraints(ca=False, path_length=None), True), *more],
        )
        _write(folder / f"{name}.pem", _to_pem(made), 0o644)
        _write(folder / f"{name}.key", _to_pem(own), 0o600)
        out[name] = Tls(folder / "authority.pem", folder / f"{name}.pem", folder / f"{name}.key")
    return out


def _sign_certificate(
    name: str, public: Any, issuer: str, key: Any, days: int, extensions: Sequence[tuple[Any, bool]]
) -> x509.Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    def named(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, text)])

    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(named(name))
        .issuer_name(named(issuer))
        .public_key(public)
        .serial_number(x509.random_serial_number())
    )
    made = made.not_valid_before(now - timedelta(minutes=5)).not_valid_after(
        now + timedelta(days=days)
    )
    for extension, critical in extensions:
        made = made.add_extension(extension, critical)
    return made.sign(key, hashes.SHA256())


def _alternative_name(text: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _to_pem(thing: Any) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    if hasattr(thing, "private_bytes"):
        return thing.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())  # type: ignore[no-any-return]
    return thing.public_bytes(Encoding.PEM)  # type: ignore[no-any-return]


def _write(path: Path, data: bytes, mode: int) -> None:
    write_bytes(path, data, mode=mode, new=True)
