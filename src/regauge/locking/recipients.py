"""Recipients: public keys to seal files to, and the identities that open them.

An identity is a key for the purpose "receive". Its X25519 private key is derived from it under the
label "receive/x25519". Its recipient is public: "regauge1" and 58 base32 digits in lower case, of
the X25519 public key and the first 4 bytes of the SHA-256 of "regauge recipient " and that key.

A sealed file has a random key of its own, which is encrypted once for each recipient by HPKE (RFC
9180) in base mode, with the primitives of the cryptography package: DHKEM(X25519, HKDF-SHA256),
HKDF-SHA256, ChaCha20-Poly1305. Its info is "regauge/1/seal/recipient" and the salt of the file.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from regauge.errors import Hint, KeyFileError
from regauge.locking.keys import Key, read_regular

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.hpke import Suite

RecipientSource: TypeAlias = str | Path
PREFIX = "regauge1"
MAX_RECIPIENTS = 256
STANZA_BYTES = 32 + 32 + 16  # ephemeral public key, encrypted file key, tag
_INFO = b"regauge/1/seal/recipient"
_MAX_FILE_BYTES = 1 << 16
_HINT = Hint(
    "pass the recipient of an identity, regauge.load_key(ID, 'receive').recipient",
    cli="regauge keygen --public ID prints the recipient of an identity",
)


def encode_recipient(identity: Key) -> str:
    """Return the public string of an identity.

    Raises:
        KeyFileError: The key has another purpose.
    """
    identity.require("receive")
    public = _private_key(identity).public_key().public_bytes_raw()
    return PREFIX + base64.b32encode(public + _checksum(public)).decode().rstrip("=").lower()


def resolve_recipients(
    to: RecipientSource | Iterable[RecipientSource],
) -> dict[str, X25519PublicKey]:
    """Return public keys by their strings, in order and once each.

    Args:
        to: Recipients: strings, or text files with a recipient per line (blank lines and lines that
            start with # are skipped).

    Raises:
        KeyFileError: A recipient is damaged or a private key, a file cannot be read, or there are
            none or too many.
    """
    sources: list[Any] = [to] if isinstance(to, str | Path | Key) else list(to)
    found: dict[str, X25519PublicKey] = {}
    for source in sources:
        if isinstance(source, Key):
            raise KeyFileError(f"a recipient must be public, got the key {source.id}", hint=_HINT)
        if isinstance(source, str) and source.startswith(PREFIX):
            found[source] = _parse_recipient(source, source)
            continue
        if not isinstance(source, str | Path):
            raise KeyFileError(
                f"a recipient must be a string or a path, got {type(source).__name__}", hint=_HINT
            )
        found |= _read_recipients(Path(source))
    if not 1 <= len(found) <= MAX_RECIPIENTS:
        raise KeyFileError(
            f"the number of recipients must be from 1 to {MAX_RECIPIENTS}, got {len(found)}",
            hint=_HINT,
        )
    return found


def wrap_file_key(secret: bytes, recipient: X25519PublicKey, salt: bytes) -> bytes:
    """Encrypt the key of a file for a recipient.

    Returns:
        A stanza: the ephemeral public key and the ciphertext, 80 bytes.
    """
    return _suite().encrypt(secret, recipient, _INFO + salt)


def unwrap_file_key(stanza: bytes, identity: Key, salt: bytes) -> bytes | None:
    """Decrypt the key of a file; None if the stanza is for another identity, or was changed."""
    from cryptography.exceptions import InvalidTag

    try:
        return _suite().decrypt(stanza, _private_key(identity), _INFO + salt)
    except (InvalidTag, ValueError):  # ValueError: an ephemeral key of low order
        return None


def _read_recipients(path: Path) -> dict[str, X25519PublicKey]:
    """Read a file of recipients. Its text is never quoted: it may be a secret."""
    # A long text may be a secret that was pasted by mistake.
    shown = path if len(str(path)) < 64 else f"{str(path)[:8]}..."
    try:
        exists = path.exists()
    except (OSError, ValueError):
        exists = False
    if not exists:
        raise KeyFileError(
            f'{shown} is neither a recipient, which starts with "{PREFIX}", nor a file',
            hint=_HINT,
        )
    data, _ = read_regular(path, "file of recipients", _MAX_FILE_BYTES, _HINT)
    if b'"regauge"' in data or b"PRIVATE KEY" in data:  # a key file, whole or in part
        raise KeyFileError(
            f"{path} is a private key; a recipient must be public",
            hint=Hint(
                f"pass the recipient of the identity: regauge.load_key({str(path)!r}, "
                "'receive').recipient",
                cli=f"regauge keygen --public {path} prints the recipient of an identity",
            ),
        )
    found = {}
    for number, line in enumerate(data.decode("utf-8", "replace").splitlines(), 1):
        text = line.strip()
        if text and not text.startswith("#"):
            found[text] = _parse_recipient(text, f"line {number} of {path}")
    if not found:
        raise KeyFileError(f"{path} must hold a recipient per line, got none", hint=_HINT)
    return found


def _parse_recipient(text: str, where: str) -> X25519PublicKey:
    """Parse a recipient; `where` names it in errors."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

    digits = text.removeprefix(PREFIX)
    try:
        data = base64.b32decode(digits.upper() + "=" * (-len(digits) % 8))
        canonical = PREFIX + base64.b32encode(data).decode().rstrip("=").lower()
        if canonical != text or len(data) != 36 or data[32:] != _checksum(data[:32]):
            raise ValueError
        public = X25519PublicKey.from_public_bytes(data[:32])
        X25519PrivateKey.generate().exchange(public)  # fails on a point of low order
    except ValueError:
        raise KeyFileError(
            f"{where} is not a valid recipient: a character is wrong or missing",
            hint=Hint(f"copy it again; {_HINT}", cli=f"copy it again; {_HINT.cli}"),
        ) from None
    return public


def _checksum(public: bytes) -> bytes:
    return hashlib.sha256(b"regauge recipient " + public).digest()[:4]


def _private_key(identity: Key) -> X25519PrivateKey:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(identity.derive("receive/x25519"))


def _suite() -> Suite:
    from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite

    return Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.CHACHA20_POLY1305)
