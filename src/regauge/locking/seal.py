"""Sealed files: authenticated encryption of files and folders at rest.

(A lock is obfuscation; this is encryption.)

    "regauge sealed 1\\n" (or 2)  ·  4 bytes: length of the header, little-endian  ·
    the header, JSON  ·  32 bytes: HMAC-SHA256 of everything before  ·  chunks

The header has the id of the key, the kind of content (file or folder), and a random salt of 32
bytes, from which two keys are derived: one for the HMAC, one for the chunks. A chunk is 256 KiB of
plaintext (the last one at most that) under ChaCha20-Poly1305. Its nonce is 11 bytes with the number
of the chunk, big-endian, and 1 byte that is 1 for the last chunk and 0 otherwise; the HMAC is the
associated data: STREAM (Hoang et al. 2015). This detects any change, chunks that are missing or
reordered, and an end that is truncated or extended. `docs/formats-keys.md` describes the plaintext.

Version 2 is for recipients: the key is random, and the header holds `recipients`, the key encrypted
for each of them, in place of its id.

Decrypted output is written beside its path and renamed once the last chunk is authenticated.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import stat
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, overload

from regauge.checkpoints.files import (
    OWNER,
    file_mode,
    require_inside,
    staged_file,
    staged_folder,
    wrap_read_errors,
    wrap_write_errors,
)
from regauge.core.canonical import canonical_json
from regauge.errors import (
    CheckpointError,
    Hint,
    KeyFileError,
    LockError,
    TamperedFileError,
    WrongKeyError,
)
from regauge.locking.keys import Key, KeySource, Purpose, require_outside, resolve_key
from regauge.locking.recipients import (
    MAX_RECIPIENTS,
    STANZA_BYTES,
    RecipientSource,
    resolve_recipients,
    unwrap_file_key,
    wrap_file_key,
)

VERSION = 2  # for recipients; a file for a symmetric key has version 1
_PURPOSES: dict[int, Purpose] = {1: "seal", VERSION: "receive"}
MAGIC = b"regauge sealed "
CHUNK = 1 << 18
_TAG = 16
_MAX_HEADER_BYTES = {1: 1 << 12, VERSION: 1 << 16}
_MAX_ENTRY_BYTES = 1 << 16


@overload
def seal(source: Path | str, key: KeySource, out: Path | str) -> int: ...


@overload
def seal(
    source: Path | str,
    key: None = None,
    *,
    out: Path | str,
    to: RecipientSource | Iterable[RecipientSource],
) -> int: ...


def seal(
    source: Path | str,
    key: KeySource | None = None,
    out: Path | str | None = None,
    *,
    to: RecipientSource | Iterable[RecipientSource] = (),
) -> int:
    """Encrypt a file or a folder into one new file, with a key or for recipients.

    Links within a folder are sealed as files.

    Args:
        source: The file or folder.
        key: A key for sealing, or its file. None with `to`.
        out: The sealed file; it must not exist.
        to: Recipients, instead of a key: strings, or files of them. The identity of each of them
            opens the file. Their number is visible, their identity is not.

    Returns:
        The size of the sealed file in bytes.

    Raises:
        KeyFileError: The key has another purpose, or its file lies in the source; or a recipient
            is not valid.
        LockError: The output exists, or lies inside the source.
        CheckpointError: A file cannot be read or sealed.

    Example:
        >>> key = regauge.generate_key("seal")
        >>> size = regauge.seal("model", key, "model.sealed")
        >>> names = regauge.open_sealed("model.sealed", key, "opened")
        >>> identity = regauge.generate_key("receive")
        >>> size = regauge.seal("model", out="for-you.sealed", to=identity.recipient)
    """
    if out is None:
        raise LockError("out must be a path, got None", hint='pass out="model.sealed"')
    source, out = Path(source), Path(out)
    if (key is None) == (not to):
        raise KeyFileError(
            "a file is sealed either with a key or to recipients, got "
            + ("neither" if key is None else "both"),
            hint=Hint("pass key or to", cli="pass -k or --to"),
        )
    if key is None:
        recipients = resolve_recipients(to)
        secret = os.urandom(32)
        key = Key(secret, "seal")
    else:
        key, recipients = resolve_key(key, "seal"), {}
        require_outside(key, source)
    _require_new(out)
    kind, entries = _list_entries(source)
    target, origin = out.absolute().parent.resolve() / out.name, source.resolve()
    if target == origin or target.is_relative_to(origin):
        raise LockError(
            f"the output {out} lies inside {source}",
            hint=Hint("pass a file beside it as out", cli="pass a file beside it with -o"),
        )
    salt = os.urandom(32)
    fields: dict[str, Any] = {"kind": kind, "salt": salt.hex()}
    if recipients:
        fields["version"] = VERSION
        fields["recipients"] = [wrap_file_key(secret, r, salt).hex() for r in recipients.values()]
    else:
        fields |= {"version": 1, "key": key.id}
    header = canonical_json(fields)
    start = MAGIC + b"%d\n" % fields["version"] + len(header).to_bytes(4, "little") + header
    tag = _header_tag(key, salt, start)
    # readable by the owner only, like the key
    with staged_file(out, file_mode(OWNER), new=True) as partial, partial.open("r+b") as file:
        file.write(start + tag)
        chunks = _Sealer(file, key.derive("seal/chunks", salt), tag)
        for path, name in entries:
            _write_entry(chunks, path, name)
        chunks.write(bytes(4))  # an entry without a name: the end
        chunks.close()
        return file.tell()


def open_sealed(source: Path | str, key: KeySource, out: Path | str) -> list[str]:
    """Decrypt a sealed file to a new file or folder.

    The output appears once all of it is authenticated, readable by the owner only, like the key.

    Args:
        source: The sealed file.
        key: The key that sealed it, or the identity of a recipient; or its file.
        out: The output; it must not exist.

    Returns:
        The names of the files.

    Raises:
        KeyFileError: The key has another purpose.
        WrongKeyError: Another key sealed the file, or the identity is not a recipient of it.
        TamperedFileError: The file was changed.
        LockError: The file is not a sealed file, or the output exists.

    Example:
        >>> key = regauge.generate_key("seal")
        >>> size = regauge.seal("model", key, "model.sealed")
        >>> "model.safetensors" in regauge.open_sealed("model.sealed", key, "opened")
        True
    """
    source, out = Path(source), Path(out)
    key = resolve_key(key, purpose_of(source))
    _require_new(out)
    with _open_chunks(source, key) as (kind, chunks):
        if kind == "folder":
            with staged_folder(out, mode=None) as partial:
                names = list(_extract_entries(source, chunks, partial))
                chunks.end()
            return names
        with staged_file(out, file_mode(OWNER), new=True) as partial:
            names = list(_extract_entries(source, chunks, partial, "data"))
            chunks.end()
            if names != ["data"]:
                raise _tampered_error(source)
    return [out.name]


def purpose_of(source: Path | str) -> Purpose:
    """Return the purpose of the keys that open a sealed file: "seal", or "receive" if it is sealed
    to recipients.

    Raises:
        LockError: The file is not a sealed file, or has a newer format.
        CheckpointError: It cannot be read.
    """
    with _open_file(Path(source)) as (_, version, _):
        return _PURPOSES[version]


class _Sealer:
    """A writer that encrypts a stream into chunks of a file.

    A full chunk is buffered until more data arrive, because the last chunk has another nonce.
    """

    def __init__(self, file: IO[bytes], key: bytes, associated: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

        self.file, self.cipher, self.associated = file, ChaCha20Poly1305(key), associated
        self.buffer, self.number = bytearray(), 0

    def write(self, data: bytes) -> None:
        """Add plaintext; full chunks are written."""
        self.buffer += data
        while len(self.buffer) > CHUNK:
            self._put(bytes(self.buffer[:CHUNK]), last=False)
            del self.buffer[:CHUNK]

    def close(self) -> None:
        """Write the last chunk."""
        self._put(bytes(self.buffer), last=True)

    def _put(self, chunk: bytes, last: bool) -> None:
        self.file.write(self.cipher.encrypt(_nonce(self.number, last), chunk, self.associated))
        self.number += 1


class _Opener:
    """A reader that decrypts the chunks of a file and returns only authenticated plaintext."""

    def __init__(self, path: Path, file: IO[bytes], key: bytes, associated: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

        self.path, self.file, self.cipher, self.associated = (
            path,
            file,
            ChaCha20Poly1305(key),
            associated,
        )
        self.buffer, self.number, self.done = bytearray(), 0, False
        self.next = file.read(CHUNK + _TAG)

    def read(self, n: int) -> bytes:
        """Return the next n bytes of plaintext."""
        while len(self.buffer) < n:
            if self.done:
                raise _tampered_error(self.path)
            self._read_chunk()
        data = bytes(self.buffer[:n])
        del self.buffer[:n]
        return data

    def end(self) -> None:
        """Raise unless all plaintext was read."""
        if self.buffer or not self.done:
            raise _tampered_error(self.path)

    def _read_chunk(self) -> None:
        """Decrypt the next chunk into the buffer."""
        from cryptography.exceptions import InvalidTag

        with wrap_read_errors(self.path):
            chunk, self.next = self.next, self.file.read(CHUNK + _TAG)
        self.done = not self.next
        try:
            self.buffer += self.cipher.decrypt(
                _nonce(self.number, self.done), chunk, self.associated
            )
        except (InvalidTag, ValueError):
            raise _tampered_error(self.path) from None
        self.number += 1


def _nonce(number: int, last: bool) -> bytes:
    return number.to_bytes(11, "big") + bytes([last])


def _header_tag(key: Key, salt: bytes, start: bytes) -> bytes:
    return hmac.digest(key.derive("seal/header", salt), start, "sha256")


def _tampered_error(path: Path) -> TamperedFileError:
    return TamperedFileError(
        f"{path} was changed or truncated since it was sealed; nothing was written",
        hint="restore it from a copy",
    )


@contextlib.contextmanager
def _open_file(path: Path) -> Iterator[tuple[IO[bytes], int, bytes]]:
    """Open a sealed file; yield it at its header, its version and its first line."""
    with wrap_read_errors(path):
        if path.exists() and not path.is_file():
            raise CheckpointError(
                f"{path} is not a regular file", hint="pass a sealed file on disk"
            )
        file = path.open("rb")
    with file:
        with wrap_read_errors(path):
            start = file.read(len(MAGIC) + 16)
            line, newline, _ = start.partition(b"\n")
            if not line.startswith(MAGIC) or not newline or not line[len(MAGIC) :].isdigit():
                raise LockError(
                    f"{path} is not a sealed file",
                    hint=Hint(
                        "regauge.seal(path, key, out) makes one",
                        cli="regauge seal PATH -k KEY -o OUT makes one",
                    ),
                )
            version = int(line[len(MAGIC) :])
            if version > VERSION:
                raise LockError(
                    f"{path} has format version {version}; this regauge reads up to {VERSION}",
                    hint="upgrade regauge",
                )
            if version not in _PURPOSES:
                raise _tampered_error(path)
            file.seek(len(line) + 1)
        yield file, version, line + newline


@contextlib.contextmanager
def _open_chunks(path: Path, key: Key) -> Iterator[tuple[str, _Opener]]:
    """Open a sealed file and check its header; yield the kind of content and its chunks.

    The key has the purpose of the file.
    """
    with _open_file(path) as (file, version, line):
        with wrap_read_errors(path):
            length = file.read(4)
            size = int.from_bytes(length, "little")
            if size > _MAX_HEADER_BYTES[version] or _PURPOSES[version] != key.purpose:
                raise _tampered_error(path)
            raw, tag = file.read(size), file.read(32)
        try:
            header = json.loads(raw.decode("ascii"))
            salt = bytes.fromhex(header["salt"])
            by = "key" if version == 1 else "recipients"
            fields = {"version": version, by: header[by]}
            fields |= {"kind": header["kind"], "salt": salt.hex()}
            if (
                canonical_json(fields) != raw
                or len(salt) != 32
                or len(tag) != 32
                or header["kind"] not in ("file", "folder")
            ):
                raise ValueError
            if version == 1:
                header["key"].encode()  # fails on a lone surrogate, which JSON can hold
                stanzas = []
            else:
                stanzas = _parse_stanzas(header["recipients"])
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise _tampered_error(path) from None
        if version == 1:
            _require_sealed_by(path, key, header["key"])
        else:
            key = _unwrap_key(path, key, stanzas, salt)
        if not hmac.compare_digest(_header_tag(key, salt, line + length + raw), tag):
            raise _tampered_error(path)
        yield header["kind"], _Opener(path, file, key.derive("seal/chunks", salt), tag)


def _parse_stanzas(values: Any) -> list[bytes]:
    """Parse the encrypted keys of a header; raise ValueError or TypeError if they are damaged."""
    if not isinstance(values, list) or not 1 <= len(values) <= MAX_RECIPIENTS:
        raise ValueError
    stanzas = [bytes.fromhex(value) for value in values]
    if any(
        len(stanza) != STANZA_BYTES or stanza.hex() != value
        for stanza, value in zip(stanzas, values, strict=True)
    ):
        raise ValueError
    return stanzas


def _require_sealed_by(path: Path, key: Key, sealed_by: str) -> None:
    """Raise unless this key sealed a file, by its id."""
    if not hmac.compare_digest(key.id.encode(), sealed_by.encode()):
        raise WrongKeyError(
            f"{path} was sealed by the key {sealed_by[:16]}, got {key.id}",
            hint="pass the key that sealed it",
        )


def _unwrap_key(path: Path, identity: Key, stanzas: list[bytes], salt: bytes) -> Key:
    """Decrypt the key of a file with the identity of one of its recipients."""
    for stanza in stanzas:
        secret = unwrap_file_key(stanza, identity, salt)
        if secret is not None:
            return Key(secret, "seal")
    raise WrongKeyError(
        f"the identity {identity.id} is not a recipient of {path}, or the file was changed",
        hint="pass the identity of a recipient; if this is one, ask for a new copy of the file",
    )


def _require_new(out: Path) -> None:
    """Raise if an output exists, or if its parent folder does not."""
    with wrap_write_errors(out):
        if out.name in ("", "..") or os.path.lexists(out):
            raise LockError(
                f"the output {out} exists already", hint="pass a new path, or remove this one first"
            )
        if not out.absolute().parent.is_dir():
            raise LockError(
                f"the folder {out.absolute().parent} for the output does not exist",
                hint="create it first",
            )


def _list_entries(source: Path) -> tuple[str, list[tuple[Path, str]]]:
    """List the paths to seal with their names inside, a folder before its content.

    Returns:
        The kind of content, "file" or "folder", and the entries.
    """
    with wrap_read_errors(source):
        if source.is_file():
            return "file", [(source, "data")]
        if not source.is_dir():
            problem = (
                "is neither a file nor a folder" if os.path.lexists(source) else "does not exist"
            )
            raise CheckpointError(f"{source} {problem}", hint="pass a file or a folder")
    entries: list[tuple[Path, str]] = []
    for path in sorted(_walk(source)):
        if not path.is_file() and (path.is_symlink() or not path.is_dir()):
            raise CheckpointError(
                f"{path} is neither a file nor a folder, and cannot be sealed",
                hint="remove it first",
            )
        if path.is_symlink():
            require_inside(path, source)
        name = path.relative_to(source).as_posix()
        try:
            _parse_name(name)
        except ValueError:
            raise CheckpointError(
                f"{path} has a name that could not be opened again, and cannot be sealed",
                hint="rename it first",
            ) from None
        entries.append((path, name))
    return "folder", entries


def _walk(folder: Path) -> Iterator[Path]:
    """Yield everything below a folder.

    Raises for a folder that cannot be read; `rglob` would skip it silently.
    """
    with wrap_read_errors(folder):
        paths = sorted(folder.iterdir())
    for path in paths:
        yield path
        if path.is_dir() and not path.is_symlink():
            yield from _walk(path)


def _write_entry(chunks: _Sealer, path: Path, name: str) -> None:
    """Write one entry: the length of its head, its head as JSON, and its bytes."""
    if path.is_dir():
        head = canonical_json({"name": name, "folder": True})
        chunks.write(len(head).to_bytes(4, "little") + head)
        return
    with wrap_read_errors(path):
        file = path.open("rb")
    with file:
        status = os.fstat(file.fileno())
        head = canonical_json(
            {"name": name, "size": status.st_size, "mode": stat.S_IMODE(status.st_mode) & 0o777}
        )
        chunks.write(len(head).to_bytes(4, "little") + head)
        remaining = status.st_size
        while remaining:
            with wrap_read_errors(path):
                data = file.read(min(remaining, CHUNK))
            if not data:
                break
            chunks.write(data)
            remaining -= len(data)
        if remaining or file.read(1):
            raise CheckpointError(f"{path} changed while it was read", hint="start again")


def _extract_entries(
    source: Path, chunks: _Opener, target: Path, single: str | None = None
) -> Iterator[str]:
    """Write every entry into a folder, or a single one into a file; yield the names of files."""
    while length := int.from_bytes(chunks.read(4), "little"):
        if length > _MAX_ENTRY_BYTES:
            raise _tampered_error(source)
        try:
            head: dict[str, Any] = json.loads(chunks.read(length))
            name = head["name"]
            if single is not None and (name != single or head.get("folder")):
                raise ValueError(name)
            path = target if single is not None else target / _parse_name(name)
            if head.get("folder"):
                path.mkdir(mode=OWNER)
                continue
            size, mode = int(head["size"]), int(head["mode"])
        except (ValueError, TypeError, KeyError, RecursionError):
            raise _tampered_error(source) from None
        opener = partial(os.open, mode=(mode & OWNER) | file_mode(OWNER))
        with open(path, "xb" if single is None else "r+b", opener=opener) as file:
            while size:
                data = chunks.read(min(size, CHUNK))
                file.write(data)
                size -= len(data)
        if single is not None:
            path.chmod((mode & OWNER) | file_mode(OWNER))
        yield name


def _parse_name(name: Any) -> PurePosixPath:
    """Return the relative path of a name; raise ValueError if it leaves its folder.

    The key holder wrote the name; it is checked nevertheless.
    """
    path = PurePosixPath(name)
    if (
        not isinstance(name, str)
        or not name
        or path.is_absolute()
        or ".." in path.parts
        or "\\" in name
        or str(path) != name
        or name == "."
    ):
        raise ValueError(name)
    return path
