"""Sealed files: authenticated encryption of files and folders at rest. (A lock is obfuscation; this
is encryption.)

    "regauge sealed 1\\n"  ·  4 bytes: the header's length, little-endian  ·  the header, JSON  ·
    32 bytes: HMAC-SHA256 of all before  ·  chunks

The header names the key's id, whether a file or a folder is inside, and 32 random bytes, which are
the salt of the two keys that are derived from the key: one for the HMAC, one for the chunks. A
chunk is 256 KiB of plaintext (the last one less, or as much) under ChaCha20-Poly1305 with the nonce
(11 bytes: the chunk's number, big-endian; 1 byte: 1 for the last chunk, 0 for others) and the HMAC
as associated data: STREAM (Hoang et al. 2015). So a change anywhere, a chunk left out or in another
place, an end cut off or appended to are all found. `docs/formats.md` says what the plaintext is.

What is opened is written beside its place and renamed when the last chunk is authenticated.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any

from regauge.checkpoints.files import (
    OWNER,
    file_mode,
    fsync_folder,
    require_inside,
    temp_sibling,
    wrap_read_errors,
    wrap_write_errors,
)
from regauge.core.canonical import canonical_json
from regauge.errors import CheckpointError, LockError, TamperedFileError, WrongKeyError
from regauge.locking.keys import Key

VERSION = 1
MAGIC = b"regauge sealed "
CHUNK = 1 << 18
_TAG = 16
_MAX_HEADER_BYTES, _MAX_ENTRY_BYTES = 1 << 12, 1 << 16


def seal(source: Path | str, key: Key, out: Path | str) -> int:
    """Encrypt a file, or a folder with all that is in it, into one new file. Returns its size.
    Links within it are sealed as files.
    """
    source, out = Path(source), Path(out)
    key.require("seal")
    _require_new(out)
    kind, entries = _list_entries(source)
    here, there = out.absolute().parent.resolve() / out.name, source.resolve()
    if here == there or here.is_relative_to(there):
        raise LockError(
            f"the output {out} lies inside {source}", hint="name a file beside it with -o"
        )
    salt = os.urandom(32)
    header = canonical_json({"version": VERSION, "key": key.id, "kind": kind, "salt": salt.hex()})
    start = MAGIC + b"%d\n" % VERSION + len(header).to_bytes(4, "little") + header
    tag = _header_tag(key, salt, start)
    partial = temp_sibling(out)
    with wrap_write_errors(out):
        try:
            # for its owner only, as the key is
            with open(
                partial, "xb", opener=lambda name, flags: os.open(name, flags, file_mode(OWNER))
            ) as file:
                file.write(start + tag)
                chunks = _Sealer(file, key.derive("seal/chunks", salt), tag)
                for path, name in entries:
                    _write_entry(chunks, path, name)
                chunks.write(bytes(4))  # an entry without a name: the end
                chunks.close()
                file.flush()
                os.fsync(file.fileno())
                size = file.tell()
            os.link(partial, out)
        finally:
            partial.unlink(missing_ok=True)
    fsync_folder(out.absolute().parent)
    return size


def open_sealed(source: Path | str, key: Key, out: Path | str) -> list[str]:
    """Decrypt a sealed file to a new file or folder, which appears when all of it has been
    authenticated. Returns the names of the files.

    All of it is for its owner only, as the key is.
    """
    source, out = Path(source), Path(out)
    key.require("seal")
    _require_new(out)
    with _open_chunks(source, key) as (kind, chunks):
        partial = temp_sibling(out)
        with wrap_write_errors(out):
            partial.mkdir(mode=OWNER)
            try:
                names = list(_extract_entries(source, chunks, partial))
                chunks.end()
                if kind == "file" and names != ["data"]:
                    raise _tampered_error(source)
                for folder in [partial, *(p for p in partial.rglob("*") if p.is_dir())]:
                    fsync_folder(folder)
                if kind == "file":
                    os.link(partial / "data", out)
                else:
                    partial.rename(out)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
        fsync_folder(out.absolute().parent)
    return [out.name] if kind == "file" else names


class _Sealer:
    """Chunks on their way to a file. A full chunk waits until more comes, since the last one has
    another nonce.
    """

    def __init__(self, file: IO[bytes], key: bytes, bound: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

        self.file, self.cipher, self.bound = file, ChaCha20Poly1305(key), bound
        self.held, self.number = bytearray(), 0

    def write(self, data: bytes) -> None:
        self.held += data
        while len(self.held) > CHUNK:
            self._put(bytes(self.held[:CHUNK]), last=False)
            del self.held[:CHUNK]

    def close(self) -> None:
        self._put(bytes(self.held), last=True)

    def _put(self, chunk: bytes, last: bool) -> None:
        self.file.write(self.cipher.encrypt(_nonce(self.number, last), chunk, self.bound))
        self.number += 1


class _Opener:
    """The plaintext of a file's chunks. A chunk is handed out once it is authenticated, and never
    before.
    """

    def __init__(self, path: Path, file: IO[bytes], key: bytes, bound: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

        self.path, self.file, self.cipher, self.bound = path, file, ChaCha20Poly1305(key), bound
        self.held, self.number, self.done = bytearray(), 0, False
        self.next = file.read(CHUNK + _TAG)

    def read(self, n: int) -> bytes:
        while len(self.held) < n:
            if self.done:
                raise _tampered_error(self.path)
            self._more()
        taken = bytes(self.held[:n])
        del self.held[:n]
        return taken

    def end(self) -> None:
        if self.held or not self.done:
            raise _tampered_error(self.path)

    def _more(self) -> None:
        from cryptography.exceptions import InvalidTag

        with wrap_read_errors(self.path):
            chunk, self.next = self.next, self.file.read(CHUNK + _TAG)
        self.done = not self.next
        try:
            self.held += self.cipher.decrypt(_nonce(self.number, self.done), chunk, self.bound)
        except (InvalidTag, ValueError):
            raise _tampered_error(self.path) from None
        self.number += 1


def _nonce(number: int, last: bool) -> bytes:
    return number.to_bytes(11, "big") + bytes([last])


def _header_tag(key: Key, salt: bytes, start: bytes) -> bytes:
    return hmac.digest(key.derive("seal/header", salt), start, "sha256")


def _tampered_error(path: Path) -> TamperedFileError:
    return TamperedFileError(
        f"{path} is not as it was sealed: it was changed or cut short; nothing was kept",
        hint="restore it from a copy",
    )


@contextlib.contextmanager
def _open_chunks(path: Path, key: Key) -> Iterator[tuple[str, _Opener]]:
    """What a sealed file holds, and its chunks, after its header has been checked."""
    with wrap_read_errors(path):
        if path.exists() and not path.is_file():
            raise CheckpointError(
                f"{path} is no regular file", hint="name a sealed file on the disk"
            )
        file = path.open("rb")
    with file:
        with wrap_read_errors(path):
            start = file.read(len(MAGIC) + 16)
            line, newline, _ = start.partition(b"\n")
            if not line.startswith(MAGIC) or not newline or not line[len(MAGIC) :].isdigit():
                raise LockError(
                    f"{path} is not a sealed file", hint="regauge seal PATH -k KEY -o OUT makes one"
                )
            version = int(line[len(MAGIC) :])
            if version > VERSION:
                raise LockError(
                    f"{path} has format version {version}; this regauge reads up to {VERSION}",
                    hint="upgrade regauge",
                )
            file.seek(len(line) + 1)
            length = file.read(4)
            size = int.from_bytes(length, "little")
            if version != VERSION or size > _MAX_HEADER_BYTES:
                raise _tampered_error(path)
            raw, tag = file.read(size), file.read(32)
        try:
            header = json.loads(raw.decode("ascii"))
            fields = {
                "version": VERSION,
                "key": str(header["key"]),
                "kind": header["kind"],
                "salt": header["salt"],
            }
            salt = bytes.fromhex(header["salt"])
            sealed_by = fields["key"].encode()  # fails on a lone surrogate, which JSON can hold
            if (
                canonical_json(fields) != raw
                or len(salt) != 32
                or len(tag) != 32
                or header["kind"] not in ("file", "folder")
            ):
                raise ValueError
        except (ValueError, TypeError, KeyError, RecursionError):
            raise _tampered_error(path) from None
        if not hmac.compare_digest(key.id.encode(), sealed_by):
            raise WrongKeyError(
                f"{path} was sealed by the key {fields['key'][:16]}, and this is {key.id}",
                hint="give the key that sealed it",
            )
        if not hmac.compare_digest(_header_tag(key, salt, line + b"\n" + length + raw), tag):
            raise _tampered_error(path)
        yield header["kind"], _Opener(path, file, key.derive("seal/chunks", salt), tag)


def _require_new(out: Path) -> None:
    with wrap_write_errors(out):
        if out.name in ("", "..") or os.path.lexists(out):
            raise LockError(
                f"the output {out} exists already", hint="name a new one, or remove this one first"
            )
        if not out.absolute().parent.is_dir():
            raise LockError(
                f"the folder {out.absolute().parent} for the output does not exist",
                hint="make it first",
            )


def _list_entries(source: Path) -> tuple[str, list[tuple[Path, str]]]:
    """What is to be sealed: files and folders by their names inside, a folder before what is in
    it.
    """
    with wrap_read_errors(source):
        if source.is_file():
            return "file", [(source, "data")]
        if not source.is_dir():
            kind = "is neither a file nor a folder" if os.path.lexists(source) else "does not exist"
            raise CheckpointError(f"{source} {kind}", hint="name a file or a folder")
    found: list[tuple[Path, str]] = []
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
        found.append((path, name))
    return "folder", found


def _walk(folder: Path) -> Iterator[Path]:
    """All that is in a folder. One that cannot be read is an error (`rglob` would pass over it, and
    what is in it would be missing).
    """
    with wrap_read_errors(folder):
        inside = sorted(folder.iterdir())
    for path in inside:
        yield path
        if path.is_dir() and not path.is_symlink():
            yield from _walk(path)


def _write_entry(chunks: _Sealer, path: Path, name: str) -> None:
    """One entry: the length of its head, its head as JSON, and as many bytes as that says."""
    if path.is_dir():
        head = canonical_json({"name": name, "folder": True})
        chunks.write(len(head).to_bytes(4, "little") + head)
        return
    with wrap_read_errors(path):
        file = path.open("rb")
    with file:
        found = os.fstat(file.fileno())
        head = canonical_json(
            {"name": name, "size": found.st_size, "mode": stat.S_IMODE(found.st_mode) & 0o777}
        )
        chunks.write(len(head).to_bytes(4, "little") + head)
        left = found.st_size
        while left:
            with wrap_read_errors(path):
                data = file.read(min(left, CHUNK))
            if not data:
                break
            chunks.write(data)
            left -= len(data)
        if left or file.read(1):
            raise CheckpointError(f"{path} changed while it was read", hint="start again")


def _extract_entries(source: Path, chunks: _Opener, folder: Path) -> Iterator[str]:
    """Every entry, put into a folder; the names of files."""
    while length := int.from_bytes(chunks.read(4), "little"):
        if length > _MAX_ENTRY_BYTES:
            raise _tampered_error(source)
        try:
            head: dict[str, Any] = json.loads(chunks.read(length))
            name = head["name"]
            path = folder / _parse_name(name)
            if head.get("folder"):
                path.mkdir(mode=OWNER)
                continue
            size, mode = int(head["size"]), int(head["mode"])
        except (ValueError, TypeError, KeyError, RecursionError):
            raise _tampered_error(source) from None
        with open(
            path,
            "xb",
            opener=lambda p, flags, mode=mode: os.open(p, flags, (mode & OWNER) | file_mode(OWNER)),  # type: ignore[misc]
        ) as file:
            while size:
                data = chunks.read(min(size, CHUNK))
                file.write(data)
                size -= len(data)
            file.flush()
            os.fsync(file.fileno())
        yield name


def _parse_name(name: Any) -> PurePosixPath:
    """A name that stays in its folder. Who sealed it had the key; a name is still looked at."""
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
