"""Keys: 32 secret bytes, key files, and key derivation.

A key is generated once, by the operating system's random generator, for one purpose. All other
secrets are derived: `key.derive(label, salt)` is HKDF-SHA256 of the secret with info "regauge/1/" +
label, and a salt that binds it to one model or file. The id of a key is the first 8 bytes of the
SHA-256 of "regauge key ", the purpose, a zero byte and the secret. It identifies the key and does
not reveal it.

A key file is a small JSON file (`docs/formats-keys.md`), readable by its owner only and optionally
wrapped by a passphrase (scrypt, ChaCha20-Poly1305). No repr, pickle, message or argument ever
contains a secret byte.
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
from typing import Any, Literal, NoReturn, TypeAlias, get_args

from regauge.checkpoints.files import write_bytes
from regauge.checkpoints.plan import find_enclosing
from regauge.core.canonical import canonical_json
from regauge.core.rng import hkdf
from regauge.errors import Hint, KeyFileError, PassphraseError

VERSION = 2
Purpose = Literal["lock", "seal", "receive"]
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)
# The version of a key file: readers of version 1 do not know the purpose "receive".
_VERSIONS: dict[Purpose, int] = {"lock": 1, "seal": 1, "receive": 2}

# scrypt: 128 MiB and about half a second. The parameters of a file are capped: memory is 128 n r
# bytes, time is proportional to n r p.
SCRYPT = {"n": 1 << 17, "r": 8, "p": 1}
_MAX_MEMORY, _MAX_WORK = 1 << 22, 1 << 23  # n r, n r p
_MAX_FILE_BYTES = 1 << 16  # bytes of a key file
_MAX_PASSPHRASE = 4096  # bytes of a passphrase
PASSPHRASE_VARIABLE = "REGAUGE_PASSPHRASE"

_PLAIN_FIELDS = {"regauge", "version", "purpose", "id", "created", "key"}
_WRAPPED_FIELDS = {"regauge", "version", "purpose", "id", "created", "scrypt", "nonce", "wrapped"}
_KEYGEN_HINT = Hint(
    "pass a key or the file of one; regauge.generate_key() generates a new key, for models that "
    "are not locked yet",
    cli="pass the file that keygen wrote; regauge keygen -o KEY generates a new key, for models "
    "that are not locked yet",
)

Passphrase = str | Callable[[], str] | None


class _BadFieldError(ValueError):
    """A fault of a key file, with a message that quotes nothing of the file."""


class Key:
    """A secret for one purpose.

    It prints as its id, compares in constant time, and cannot be pickled.

    Args:
        secret: 32 random bytes.
        purpose: "lock", "seal" or "receive".
        created: The time of creation, in ISO format.
        path: The file that it was read from.

    Raises:
        KeyFileError: The secret is not 32 bytes, or the purpose is unknown.

    Example:
        >>> regauge.Key(bytes(32), "lock")
        Key(lock, 35f322c179f8fd31)
    """

    __slots__ = ("__secret", "created", "path", "purpose")

    def __init__(
        self,
        secret: bytes,
        purpose: Purpose = "lock",
        created: str = "",
        *,
        path: Path | None = None,
    ) -> None:
        if not isinstance(secret, bytes) or len(secret) != 32:
            raise KeyFileError("a key must be 32 bytes", hint=_KEYGEN_HINT)
        if purpose not in PURPOSES:
            raise KeyFileError(
                f'the purpose of a key must be one of {", ".join(PURPOSES)}, got "{purpose!s:.40}"',
                hint=Hint(f'pass purpose="{PURPOSES[0]}"', cli=f"pass --purpose {PURPOSES[0]}"),
            )
        self.__secret, self.purpose, self.created, self.path = secret, purpose, created, path

    @property
    def id(self) -> str:
        """16 hexadecimal digits that identify the key."""
        return hashlib.sha256(
            b"regauge key " + self.purpose.encode() + b"\0" + self.__secret
        ).hexdigest()[:16]

    @property
    def recipient(self) -> str:
        """The public string to seal files to; only an identity (purpose "receive") has one.

        Example:
            >>> regauge.generate_key("receive").recipient[:8]
            'regauge1'
        """
        from regauge.locking.recipients import encode_recipient

        return encode_recipient(self)

    def derive(self, label: str, salt: bytes = b"") -> bytes:
        """Derive 32 bytes for one use.

        The result is HKDF-SHA256 of the secret, with this salt and info "regauge/1/" + label.
        """
        return hkdf(self.__secret, b"regauge/1/" + label.encode(), salt)

    def require(self, purpose: Purpose) -> None:
        """Raise if the key has another purpose."""
        if self.purpose != purpose:
            raise KeyFileError(
                f'the purpose of key {self.id} must be "{purpose}", got "{self.purpose}"',
                hint=Hint(
                    f'regauge.generate_key("{purpose}") generates one',
                    cli=f"regauge keygen --purpose {purpose} -o KEY creates one",
                ),
            )

    def _serialize(self, passphrase: str | None, scrypt: dict[str, int]) -> str:
        """Return the text of the key file."""
        fields: dict[str, Any] = {
            "regauge": "key",
            "version": _VERSIONS[self.purpose],
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
            hint="save it with regauge.locking.keys.save_key, and load it in the other process",
        )


KeySource: TypeAlias = Key | str | Path


def generate_key(purpose: Purpose = "lock") -> Key:
    """Generate a key with the operating system's random generator.

    Args:
        purpose: "lock" to obfuscate models in use, "seal" to encrypt files at rest, "receive" for
            an identity: the private key that opens files sealed to its `recipient`.

    Returns:
        The key.

    Raises:
        KeyFileError: The purpose is unknown.

    Example:
        >>> regauge.generate_key("seal").purpose
        'seal'
    """
    return Key(os.urandom(32), purpose, datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"))


def resolve_key(key: KeySource, purpose: Purpose) -> Key:
    """Return a key for a purpose: the key itself, or that of a key file.

    The passphrase of a file is that of the environment variable REGAUGE_PASSPHRASE; `load_key`
    takes another one.

    Raises:
        KeyFileError: The key has another purpose, or its file is not usable.
    """
    if isinstance(key, Key):
        key.require(purpose)
        return key
    if not isinstance(key, str | Path):
        raise KeyFileError(
            f"a key must be a Key or the path of a key file, got {type(key).__name__}",
            hint="regauge.generate_key generates a key, regauge.load_key reads a file",
        )
    return load_key(key, purpose, read_passphrase())


def require_outside(key: Key, *places: Path) -> None:
    """Raise if the file of a key lies in a folder that is published or written."""
    enclosing = None if key.path is None else find_enclosing(key.path, *places)
    if enclosing is not None:
        raise KeyFileError(
            f"the key {key.path} lies in {enclosing}, and would be published with it",
            hint="keep keys in a separate folder",
        )


def save_key(
    key: Key,
    path: Path | str,
    passphrase: str | None = None,
    *,
    scrypt: dict[str, int] | None = None,
) -> None:
    """Write a new key file, atomically and readable by the owner only.

    Args:
        key: The key.
        path: The file; it must not exist.
        passphrase: Wraps the secret if given.
        scrypt: The cost parameters n, r and p. Default: `SCRYPT`.

    Raises:
        KeyFileError: The file exists, or the path is not usable.
        PassphraseError: The passphrase is empty.

    Example:
        >>> regauge.save_key(regauge.generate_key(), "my.key", passphrase="correct horse")
    """
    path = Path(path)
    if passphrase is not None and not passphrase:
        raise PassphraseError(
            "the passphrase must not be empty", hint="pass None to store the key without one"
        )
    try:
        exists = os.path.lexists(path)
    except ValueError as error:
        raise KeyFileError(
            f"{str(path)[:100]!r} is not a usable path", hint="check its spelling"
        ) from error
    if exists:
        raise KeyFileError(
            f"{path} exists already", hint="a lost key cannot be recovered: pass a new file"
        )
    write_bytes(path, key._serialize(passphrase, scrypt or SCRYPT).encode(), mode=0o600, new=True)


def create_key(path: Path | str, purpose: Purpose = "lock", passphrase: Passphrase = None) -> Key:
    """Generate a key and save it to a new file.

    Args:
        path: The file; it must not exist.
        purpose: The purpose of the key.
        passphrase: Wraps the secret if given: a text, or a function that returns it.

    Raises:
        KeyFileError: The file exists, or the path is not usable.
    """
    if os.path.lexists(path):
        raise KeyFileError(
            f"{path} exists already", hint="a key cannot be recreated: name a new file"
        )
    key = generate_key(purpose)
    save_key(key, path, passphrase() if callable(passphrase) else passphrase)
    return key


def load_key(path: Path | str, purpose: Purpose, passphrase: Passphrase = None) -> Key:
    """Read a key file.

    Args:
        path: The file.
        purpose: The purpose that the key must have.
        passphrase: The passphrase of a wrapped key, or a function that returns it when needed.

    Returns:
        The key.

    Raises:
        KeyFileError: The file is damaged, readable by others, or has another purpose or a newer
            format.
        PassphraseError: The passphrase is missing or wrong.

    Example:
        >>> key = regauge.generate_key()
        >>> regauge.save_key(key, "my.key")
        >>> regauge.load_key("my.key", "lock") == key
        True
    """
    path = Path(path)
    data, mode = read_regular(path, "key file", _MAX_FILE_BYTES, _KEYGEN_HINT)
    try:
        fields = json.loads(data.decode("utf-8"), object_pairs_hook=_reject_duplicates)
        if not isinstance(fields, dict) or fields.get("regauge") != "key":
            raise _BadFieldError('its field "regauge" is not "key"')
        _require_private(path, mode)
        version = fields.get("version")
        if type(version) is int and version > VERSION:
            raise KeyFileError(
                f"{path} has format version {version}; this regauge reads up to {VERSION}",
                hint="upgrade regauge",
            )
        if version not in _VERSIONS.values() or fields.keys() not in (
            _PLAIN_FIELDS,
            _WRAPPED_FIELDS,
        ):
            raise _BadFieldError("its fields are not those of a key file")
        stored_purpose, created, key_id = fields["purpose"], fields["created"], fields["id"]
        if (
            stored_purpose not in PURPOSES
            or version != _VERSIONS[stored_purpose]
            or not isinstance(created, str)
            or len(created) > 40
            or not created.isascii()
            or not created.isprintable()
            or not isinstance(key_id, str)
            or not key_id.isascii()
        ):
            raise _BadFieldError("its purpose, date or id is invalid")
        if stored_purpose != purpose:
            hint = (
                f"pass the key that was used; regauge keygen --purpose {purpose} -o KEY generates "
                "a new one"
            )
            raise KeyFileError(
                f'the purpose of the key {path} must be "{purpose}", got "{stored_purpose}"',
                hint=hint,
            )
        secret = (
            _parse_hex(fields["key"], 32)
            if "key" in fields
            else _unwrap_secret(path, fields, passphrase)
        )
    except (ValueError, RecursionError, TypeError) as error:
        # The message of a parser may quote the file.
        reason = str(error) if isinstance(error, _BadFieldError) else "it is not valid JSON"
        raise KeyFileError(
            f"{path} is not a usable key file: {reason}",
            hint=Hint(
                f"restore it from a copy; {_KEYGEN_HINT}",
                cli=f"restore it from a copy; {_KEYGEN_HINT.cli}",
            ),
        ) from None
    key = Key(secret, stored_purpose, created, path=path)
    if not hmac.compare_digest(key.id.encode(), key_id.encode()):
        raise KeyFileError(
            f"{path} is damaged: its key does not match its id",
            hint="restore it from a copy",
        )
    return key


def read_private(path: Path | str, kind: str, limit: int = _MAX_FILE_BYTES) -> bytes:
    """Read a file that holds a secret: a key, a passphrase, the private key of a certificate.

    Args:
        path: The file.
        kind: Its kind, for messages: "passphrase file".
        limit: The largest size in bytes.

    Raises:
        KeyFileError: It cannot be read, is not a regular file, is larger than `limit`, or its group
            or others may access it.
    """
    path = Path(path)
    data, mode = read_regular(path, kind, limit, f"pass a {kind}")
    _require_private(path, mode)
    return data


def read_passphrase(file: Path | None = None) -> str | None:
    """Return the passphrase on the first line of a file, or that of the environment variable
    REGAUGE_PASSPHRASE; None if neither is given.
    """
    if file is None:
        return os.environ.get(PASSPHRASE_VARIABLE) or None
    first = read_private(file, "passphrase file").split(b"\n")[0].removesuffix(b"\r")
    if not first or len(first) > _MAX_PASSPHRASE:
        raise PassphraseError(
            f"the first line of {file} must be a passphrase of 1 to {_MAX_PASSPHRASE} bytes, got "
            f"{len(first)}",
            hint="write the passphrase on the first line",
        )
    try:
        return first.decode("utf-8")
    except UnicodeDecodeError:
        raise PassphraseError(
            f"the passphrase in {file} must be UTF-8 text", hint="write it on the first line"
        ) from None


def _require_private(path: Path, mode: int) -> None:
    """Raise if the group or others may access a file that holds a secret."""
    if os.name == "posix" and mode & 0o077:
        raise KeyFileError(
            f"{path} can be read by others (mode {mode:04o})", hint=f"chmod 600 {path}"
        )


def read_regular(path: Path, kind: str, limit: int, hint: str) -> tuple[bytes, int]:
    """Return the bytes and the mode of a regular file.

    Kind, size and mode are those of the opened file, so that it cannot be exchanged in between.
    """
    try:
        # Non-blocking: opening a pipe would wait for its other end.
        fd = os.open(
            path,
            os.O_RDONLY
            | getattr(os, "O_NONBLOCK", 0)
            | getattr(os, "O_CLOEXEC", 0)
            | getattr(os, "O_BINARY", 0),
        )
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a usable path"
        raise KeyFileError(f"{str(path)[:200]} cannot be read: {reason}", hint=hint) from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise KeyFileError(f"{path} is not a regular file", hint="pass a file on disk")
        if status.st_size > limit:
            raise KeyFileError(
                f"{path} must have at most {limit} bytes as a {kind}, got {status.st_size}",
                hint=hint,
            )
        return os.read(fd, limit), stat.S_IMODE(status.st_mode)
    except OSError as error:
        raise KeyFileError(f"{path} cannot be read: {error.strerror}") from error
    finally:
        os.close(fd)


def _unwrap_secret(path: Path, fields: dict[str, Any], passphrase: Passphrase) -> bytes:
    """Decrypt the secret of a wrapped key file."""
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    costs = fields["scrypt"]
    if not isinstance(costs, dict) or costs.keys() != {"n", "r", "p", "salt"}:
        raise _BadFieldError("its scrypt parameters are invalid")
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
        raise _BadFieldError("its scrypt parameters are invalid")
    if n * r > _MAX_MEMORY or n * r * p > _MAX_WORK:
        raise KeyFileError(
            f"{path} needs {128 * n * r // 2**20} MiB and {n * r * p / (1 << 20):.0f} times "
            "the usual work to unwrap",
            hint="regauge does not write such files: restore it from a copy",
        )
    text = passphrase() if callable(passphrase) else passphrase
    if text is None:
        raise PassphraseError(
            f"{path} is protected by a passphrase",
            hint=Hint(
                "pass passphrase=, or set REGAUGE_PASSPHRASE",
                cli="enter it at the prompt, in REGAUGE_PASSPHRASE or with --passphrase-file",
            ),
        )
    associated = canonical_json(
        {name: value for name, value in fields.items() if name != "wrapped"}
    )
    try:
        return ChaCha20Poly1305(_stretch_passphrase(text, salt, {"n": n, "r": r, "p": p})).decrypt(
            nonce, wrapped, associated
        )
    except MemoryError:
        raise KeyFileError(
            f"unwrapping {path} needs {128 * n * r // 2**20} MiB of memory, which are not free",
            hint="free some memory",
        ) from None
    except InvalidTag:
        raise PassphraseError(
            f"the passphrase does not unwrap {path}, or the file was changed",
            hint="try again, or restore the file from a copy",
        ) from None


def _stretch_passphrase(passphrase: str, salt: bytes, costs: dict[str, int]) -> bytes:
    """Derive a wrapping key with scrypt from the NFC form of a passphrase."""
    from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

    text = unicodedata.normalize("NFC", passphrase).encode("utf-8", "surrogatepass")
    return bytes(Scrypt(salt=salt, length=32, **costs).derive(text))


def _parse_hex(text: Any, n: int) -> bytes:
    """Parse exactly n bytes in lower-case hexadecimal."""
    if not isinstance(text, str) or len(text) != 2 * n or not set(text) <= set("0123456789abcdef"):
        raise _BadFieldError("its key, salt or nonce is invalid")
    return bytes.fromhex(text)


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object; raise if a field occurs twice."""
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise _BadFieldError("a field occurs twice")
    return fields
