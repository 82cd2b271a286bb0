"""Keys: 32 secret bytes, the files that hold them, and what is derived from them.

A key is made once, from the system's randomness, for one purpose. Everything else is derived:
`key.derive(label, salt)` is HKDF-SHA256 of the secret with info "regauge/1/" and the label, and a
salt that binds it to one model or file. The key's id is the first 8 bytes of SHA-256 of "regauge
key ", the purpose, a zero byte and the secret: it names a key and gives nothing of it away.

A key file is a small JSON text (`docs/formats.md`), for its owner only; perhaps wrapped by a
passphrase (scrypt, ChaCha20-Poly1305). No repr, pickle, message or argument ever holds a secret
byte.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import stat
import unicodedata
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args

from regauge.checkpoints.files import write_bytes
from regauge.core.canonical import canonical_json
from regauge.core.rng import hkdf
from regauge.errors import KeyFileError, PassphraseError

VERSION = 1
Purpose = Literal["lock", "seal"]
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)

# scrypt: 128 MiB and about half a second. What a file asks for is capped: memory is 128 n r bytes,
# time goes with n r p.
SCRYPT = {"n": 1 << 17, "r": 8, "p": 1}
_MAX_MEMORY, _MAX_WORK = 1 << 22, 1 << 23  # n r, n r p
_MAX_FILE_BYTES = 1 << 16  # bytes of a key file

_PLAIN_FIELDS = {"regauge", "version", "purpose", "id", "created", "key"}
_WRAPPED_FIELDS = {"regauge", "version", "purpose", "id", "created", "scrypt", "nonce", "wrapped"}
_KEYGEN_HINT = (
    "give the file that keygen wrote; regauge keygen -o KEY makes a new key, for what is "
    "not locked yet"
)

Passphrase = str | Callable[[], str] | None


class _BadFieldError(ValueError):
    """What is wrong with a key file, in words that quote nothing of it."""


class Key:
    """A secret for one purpose. It prints as its id; it is compared in constant time; it cannot be
    pickled.

    >>> Key(bytes(32), "lock")
    Key(lock, 35f322c179f8fd31)
    """

    __slots__ = ("__secret", "created", "purpose")

    def __init__(self, secret: bytes, purpose: Purpose = "lock", created: str = "") -> None:
        if not isinstance(secret, bytes) or len(secret) != 32:
            raise KeyFileError("a key is 32 bytes", hint=_KEYGEN_HINT)
        if purpose not in PURPOSES:
            raise KeyFileError(
                f'there is no purpose "{purpose!s:.40}"', hint=f"purposes are {', '.join(PURPOSES)}"
            )
        self.__secret, self.purpose, self.created = secret, purpose, created

    @property
    def id(self) -> str:
        """16 hexadecimal digits that name the key."""
        return hashlib.sha256(
            b"regauge key " + self.purpose.encode() + b"\0" + self.__secret
        ).hexdigest()[:16]

    def derive(self, label: str, salt: bytes = b"") -> bytes:
        """32 bytes for one use: HKDF-SHA256 of the secret, with this salt and info "regauge/1/" +
        label.
        """
        return hkdf(self.__secret, b"regauge/1/" + label.encode(), salt)

    def require(self, purpose: Purpose) -> None:
        """Refuse a key that was made for another purpose."""
        if self.purpose != purpose:
            raise KeyFileError(
                f'the key {self.id} is for "{self.purpose}", and this needs one for "{purpose}"',
                hint=f"regauge keygen --purpose {purpose} -o KEY",
            )

    def _serialize(self, passphrase: str | None, scrypt: dict[str, int]) -> str:
        fields: dict[str, Any] = {
            "regauge": "key",
            "version": VERSION,
            "purpose": self.purpose,
            "id": self.id,
            "created": self.created,
        }
        if passphrase is None:
            fields["key"] = self.__secret.hex()
        else:
            from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

            salt, nonce = os.urandom(16), os.urandom(12)
            fields |= {"scrypt": {**scrypt, "salt": salt.hex()}, "nonce": nonce.hex()}
            fields["wrapped"] = (
                ChaCha20Poly1305(_stretch_passphrase(passphrase, salt, scrypt))
                .encrypt(nonce, self.__secret, canonical_json(fields))
                .hex()
            )
        return json.dumps(fields, indent=2) + "\n"

    def __repr__(self) -> str:
        return f"Key({self.purpose}, {self.id})"

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Key)
            and self.purpose == other.purpose
            and hmac.compare_digest(self.__secret, other.__secret)
        )

    def __hash__(self) -> int:
        return hash(self.id)

    def __copy__(self) -> Key:
        return self

    def __deepcopy__(self, memo: object) -> Key:
        return self

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise KeyFileError(
            f"the key {self.id} cannot be pickled",
            hint="save it with regauge.locking.keys.save_key, and load it where it is needed",
        )


def generate_key(purpose: Purpose = "lock") -> Key:
    """A new key, from the system's randomness."""
    return Key(os.urandom(32), purpose, datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"))


def save_key(
    key: Key,
    path: Path | str,
    passphrase: str | None = None,
    *,
    scrypt: dict[str, int] | None = None,
) -> None:
    """Write a key file: new, whole or not at all, and for its owner only. With a passphrase the
    secret is wrapped.
    """
    path = Path(path)
    if passphrase is not None and not passphrase:
        raise PassphraseError("the passphrase is empty", hint="give one, or none")
    try:
        taken = os.path.lexists(path)
    except ValueError as error:
        raise KeyFileError(
            f"{str(path)[:100]!r} is no usable path", hint="check its spelling"
        ) from error
    if taken:
        raise KeyFileError(
            f"{path} exists already", hint="a key cannot be made again: name a new file"
        )
    write_bytes(path, key._serialize(passphrase, scrypt or SCRYPT).encode(), mode=0o600, new=True)


def load_key(path: Path | str, purpose: Purpose, passphrase: Passphrase = None) -> Key:
    """Read the key of a file, for a purpose. A file that others can read is refused. `passphrase`
    may be a function that asks for it if need be.
    """
    path = Path(path)
    data, mode = _read(path, "key file", _MAX_FILE_BYTES, _KEYGEN_HINT)
    try:
        fields = json.loads(data.decode("utf-8"), object_pairs_hook=_reject_duplicates)
        if not isinstance(fields, dict) or fields.get("regauge") != "key":
            raise _BadFieldError("it does not say that it is a key")
        _require_private(path, mode)
        version = fields.get("version")
        if type(version) is int and version > VERSION:
            raise KeyFileError(
                f"{path} has format version {version}; this regauge reads up to {VERSION}",
                hint="upgrade regauge",
            )
        if version != VERSION or fields.keys() not in (_PLAIN_FIELDS, _WRAPPED_FIELDS):
            raise _BadFieldError("its fields are not those of a key file")
        wanted, created, name = fields["purpose"], fields["created"], fields["id"]
        if (
            wanted not in PURPOSES
            or not isinstance(created, str)
            or len(created) > 40
            or not created.isascii()
            or not created.isprintable()
            or not isinstance(name, str)
            or not name.isascii()
        ):
            raise _BadFieldError("its purpose, date or id is none")
        if wanted != purpose:
            hint = (
                f"give the key that it was made with; regauge keygen --purpose {purpose} -o "
                "KEY makes a new one"
            )
            raise KeyFileError(
                f'{path} is a key for "{wanted}", and this needs one for "{purpose}"', hint=hint
            )
        secret = (
            _parse_hex(fields["key"], 32)
            if "key" in fields
            else _unwrap_secret(path, fields, passphrase)
        )
    except (ValueError, RecursionError, TypeError) as error:
        said = (
            str(error) if isinstance(error, _BadFieldError) else "it is not the text of a key"
        )  # what a parser says may quote the file
        raise KeyFileError(
            f"{path} is no usable key file: {said}", hint=f"restore it from a copy; {_KEYGEN_HINT}"
        ) from None
    key = Key(secret, wanted, created)
    if not hmac.compare_digest(key.id.encode(), name.encode()):
        raise KeyFileError(
            f"{path} is damaged: its key does not have the id that it names",
            hint="restore it from a copy",
        )
    return key


def read_private(path: Path | str, what: str, limit: int = _MAX_FILE_BYTES) -> bytes:
    """Read a file that holds a secret: a key, a passphrase, the private key of a certificate.

    Args:
        path: The file.
        what: Its kind, for messages: "passphrase file".
        limit: The most bytes that such a file may have.

    Raises:
        KeyFileError: It cannot be read, is not a regular file, is larger than `limit`, or its group
        or others may access it.
    """
    path = Path(path)
    data, mode = _read(path, what, limit, f"name a {what}")
    _require_private(path, mode)
    return data


def _require_private(path: Path, mode: int) -> None:
    """The one rule for files that hold a secret: no access for the group or for others."""
    if os.name == "posix" and mode & 0o077:
        raise KeyFileError(
            f"{path} can be read by others (mode {mode:04o})", hint=f"chmod 600 {path}"
        )


def _read(path: Path, what: str, limit: int, hint: str) -> tuple[bytes, int]:
    """Return the bytes and the mode of a file. Kind, size and mode are those of the opened file, so
    that it cannot be exchanged in between.
    """
    try:
        # Not blocking: opening a pipe would wait for its other end.
        fd = os.open(
            path,
            os.O_RDONLY
            | getattr(os, "O_NONBLOCK", 0)
            | getattr(os, "O_CLOEXEC", 0)
            | getattr(os, "O_BINARY", 0),
        )
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "no usable path"
        raise KeyFileError(f"{str(path)[:200]} cannot be read: {why}", hint=hint) from error
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise KeyFileError(f"{path} is no regular file", hint="name a file on the disk")
        if found.st_size > limit:
            raise KeyFileError(f"{path} is no {what}: it has {found.st_size} bytes", hint=hint)
        return os.read(fd, limit), stat.S_IMODE(found.st_mode)
    except OSError as error:
        raise KeyFileError(f"{path} cannot be read: {error.strerror}") from error
    finally:
        os.close(fd)


def _unwrap_secret(path: Path, fields: dict[str, Any], passphrase: Passphrase) -> bytes:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    costs = fields["scrypt"]
    if not isinstance(costs, dict) or costs.keys() != {"n", "r", "p", "salt"}:
        raise _BadFieldError("its scrypt parameters are none")
    salt, nonce, wrapped = (
        _parse_hex(costs["salt"], 16),
        _parse_hex(fields["nonce"], 12),
        _parse_hex(fields["wrapped"], 48),
    )
    n, r, p = (costs[x] for x in "nrp")
    if (
        not all(type(x) is int and 1 <= x <= 1 << 20 for x in (n, r, p))
        or n & (n - 1)
        or n < 2
        or n.bit_length() > 16 * r
    ):  # RFC 7914, 2
        raise _BadFieldError("its scrypt parameters are none")
    if n * r > _MAX_MEMORY or n * r * p > _MAX_WORK:
        raise KeyFileError(
            f"{path} asks for {128 * n * r // 2**20} MiB and {n * r * p / (1 << 20):.0f} times "
            "the usual work to unwrap",
            hint="regauge writes no such file: restore it from a copy",
        )
    asked = passphrase() if callable(passphrase) else passphrase
    if asked is None:
        raise PassphraseError(
            f"{path} is protected by a passphrase",
            hint="give it at the prompt, in REGAUGE_PASSPHRASE or with --passphrase-file",
        )
    bound = canonical_json({name: value for name, value in fields.items() if name != "wrapped"})
    try:
        return ChaCha20Poly1305(_stretch_passphrase(asked, salt, {"n": n, "r": r, "p": p})).decrypt(
            nonce, wrapped, bound
        )
    except MemoryError:
        raise KeyFileError(
            f"unwrapping {path} takes {128 * n * r // 2**20} MiB of memory, which are not free",
            hint="free some memory",
        ) from None
    except InvalidTag:
        raise PassphraseError(
            f"the passphrase does not open {path}, or the file was changed",
            hint="try again, or restore the file from a copy",
        ) from None


def _stretch_passphrase(passphrase: str, salt: bytes, costs: dict[str, int]) -> bytes:
    from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

    text = unicodedata.normalize("NFC", passphrase).encode("utf-8", "surrogatepass")
    return bytes(Scrypt(salt=salt, length=32, **costs).derive(text))


def _parse_hex(text: Any, n: int) -> bytes:
    """Exactly n bytes, in lower-case hexadecimal."""
    if not isinstance(text, str) or len(text) != 2 * n or not set(text) <= set("0123456789abcdef"):
        raise _BadFieldError("its key, salt or nonce is none")
    return bytes.fromhex(text)


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise _BadFieldError("it names a field twice")
    return out
