"""Files and folders: which may be read, the system's errors as typed ones, permissions,
all-or-nothing writes, and sizes as text.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from regauge.errors import CheckpointError

EVERYONE, OWNER = (
    0o777,
    0o700,
)  # the most that an output may allow, before the umask; what an output made with a key allows
_CHUNK = 1 << 20


def strictest_mode(inputs: Iterable[Path]) -> int:
    """Return the permission bits that an output of these files and folders may have at most, as
    those of a folder.

    A class of users (group, others) keeps its bits only if it can read every input: a private file
    makes a private folder. The owner keeps all. A file made by this rule gets the same bits without
    those for execution (`file_mode`). The umask is honoured in addition, by the system.

    >>> oct(strictest_mode([]))
    '0o777'
    """
    mode = EVERYONE
    for path in inputs:
        with wrap_read_errors(path):
            found = path.stat().st_mode
        needed = 0o111 if stat.S_ISDIR(found) else 0o444
        allowed = stat.S_IMODE(found) & 0o777
        for shift in (0, 3):  # others, group
            bits = allowed >> shift & 0o7
            if not bits & (needed >> shift & 0o7):
                mode &= ~(0o7 << shift)
            elif stat.S_ISDIR(found):
                mode &= ~(0o7 << shift) | bits << shift
            elif not bits & 0o2:
                mode &= ~(0o2 << shift)
    return mode | OWNER


def file_mode(mode: int) -> int:
    """Return the bits of a file in a folder with these bits."""
    return mode & 0o666


def make_folder(folder: Path, mode: int = EVERYONE) -> None:
    """Make a folder and those above it that are missing, all with these bits. One that is there
    stays as it is.
    """
    for path in (*reversed(folder.parents), folder):
        if not path.is_dir():
            path.mkdir(mode=mode, exist_ok=True)


def restrict_mode(path: Path, mode: int) -> None:
    """Take away what `mode` does not allow. Nothing is ever added."""
    found = stat.S_IMODE(path.stat().st_mode)
    if found & ~mode:
        path.chmod(found & mode)


def copy_file(source: Path, target: Path, mode: int) -> bytes:
    """Copy a regular file to a new name, with these bits from its first moment, and flush it.
    Returns the SHA-256 of the bytes that were written.
    """
    require_file(source)
    digest = hashlib.sha256()
    with (
        source.open("rb") as file,
        open(target, "xb", opener=lambda name, flags: os.open(name, flags, file_mode(mode))) as new,
    ):
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            new.write(chunk)
        new.flush()
        os.fsync(new.fileno())
    return digest.digest()


@contextlib.contextmanager
def staged_folder(out: Path, mode: int = EVERYONE, *, replace: bool = False) -> Iterator[Path]:
    """Yield a hidden folder beside `out`, for its owner only, that takes the place of `out` at the
    end: whole or not at all.

    For what other libraries write: files and folders in it get the bits of `mode`, less the umask,
    just before. An older `out` must be an empty folder, or is removed with `replace` once the new
    one is in its place.
    """
    partial = temp_sibling(out)
    with wrap_write_errors(out):
        try:
            make_folder(partial.parent)
            partial.mkdir(mode=OWNER)
            yield partial
            mode &= _read_umask(partial)
            for path in partial.rglob("*"):
                path.chmod(mode if path.is_dir() else file_mode(mode))
                _fsync(path)
            partial.chmod(mode)
            if not replace and out.is_dir():
                out.rmdir()
            replace_folder(partial, out) if replace else partial.rename(out)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    fsync_folder(out.absolute().parent)


def _read_umask(folder: Path) -> int:
    """Return what the umask leaves of all bits, read off a new folder: `os.umask` can only be read
    by changing it, for all threads at once.
    """
    probe = folder / f".{os.urandom(6).hex()}"
    probe.mkdir()
    try:
        return stat.S_IMODE(probe.stat().st_mode) & EVERYONE
    finally:
        probe.rmdir()


def _fsync(path: Path) -> None:
    if path.is_dir():
        fsync_folder(path)
        return
    with path.open("rb") as file:
        os.fsync(file.fileno())


def require_file(path: Path) -> None:
    """Refuse what is there and is no regular file: opening a pipe would wait for its other end.
    What is absent is left to whoever opens it.
    """
    # these take names that are too long for the system
    if os.path.exists(path) and not os.path.isfile(path):  # noqa: PTH110, PTH113
        raise CheckpointError(
            f"{path} is no regular file",
            hint="name a file on the disk: pipes and devices cannot be read twice",
        )


def require_inside(path: Path, folder: Path) -> None:
    """Refuse a link in a model folder that leads out of it, or nowhere: what it names would be
    copied into the output.

    A snapshot in the cache of the Hugging Face hub (models--OWNER--NAME/snapshots/REVISION) has
    links to the blobs of its repository, beside the snapshots; they may lead anywhere in that
    repository's folder.
    """
    root = folder.resolve()
    if root.parent.name == "snapshots" and root.parent.parent.name.startswith("models--"):
        root = root.parent.parent
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError) as error:  # dangling, or a loop
        raise CheckpointError(
            f"{path} is a link that leads nowhere", hint="remove it, or fetch the model again"
        ) from error
    if not real.is_relative_to(root):
        raise CheckpointError(
            f"{path} must stay within the model folder, but is a link to {real}",
            hint="replace the link by a copy of the file, if you trust it",
        )


@contextlib.contextmanager
def wrap_read_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


@contextlib.contextmanager
def wrap_write_errors(path: Path) -> Iterator[None]:
    """Turn what the system says into one error that names the file and the way out."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CheckpointError(
                f"no space left on the device while writing {path}; nothing was kept",
                hint="free some space, or write to another disk",
            ) from error
        raise CheckpointError(
            f"{path} cannot be written: {error.strerror or error}",
            hint="check that the folder exists and is writable",
        ) from error


@contextlib.contextmanager
def exclusive_lock(folder: Path, message: str, hint: str) -> Iterator[None]:
    """Refuse whoever comes second to a folder. It is free again when its holder is gone, however
    that ended. Where the system cannot lock folders, nothing is refused.
    """
    try:
        import fcntl

        fd = os.open(folder, os.O_RDONLY)
    except (ImportError, OSError):
        yield
        return
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise CheckpointError(message, hint=hint) from error
        yield
    finally:
        os.close(fd)


def fsync_folder(folder: Path) -> None:
    """Make the names in a folder durable, where the system can."""
    with contextlib.suppress(OSError):
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def check_writable(path: Path) -> None:
    """Refuse a file that cannot be written before the work that it is for."""
    with wrap_write_errors(path):
        _require_replaceable(path)
        if not path.absolute().parent.is_dir() or not os.access(path.absolute().parent, os.W_OK):
            raise CheckpointError(
                f"{path} cannot be written: its folder does not exist, or is not yours",
                hint="check that the folder exists and is writable",
            )


def _require_replaceable(path: Path) -> None:
    """A target is a regular file or nothing: a rename over a device or a pipe would take its
    place.
    """
    if path.is_dir():
        raise CheckpointError(f"{path} is a folder", hint="name a file")
    require_file(path)


def temp_sibling(path: Path) -> Path:
    """A hidden name beside a file, for what is not whole yet. It is random: in a container every
    process may have the same number, and would meet what a killed one has left.
    """
    return path.with_name(f".{path.name}.partial-{os.urandom(6).hex()}")


def replace_folder(new: Path, old: Path) -> None:
    """Put the folder `new` in the place of `old`, which is removed. Where the system can exchange
    two names (Linux), one of the two is in place at every moment; elsewhere `old` is moved aside
    first, and back if the second rename fails.
    """
    aside = temp_sibling(old)
    if not old.exists():
        new.rename(old)
    elif _exchange(new, old):
        aside = new
    else:
        old.rename(aside)
        try:
            new.rename(old)
        except OSError:
            aside.rename(old)
            raise
    fsync_folder(old.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _exchange(a: Path, b: Path) -> bool:
    """Exchange two names in one step; False where the system or the file system cannot."""
    try:
        rename = ctypes.CDLL(None).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    here, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return bool(rename(here, os.fsencode(a), here, os.fsencode(b), swap) == 0)


def write_bytes(
    path: Path, data: bytes | bytearray | memoryview, mode: int = 0o666, *, new: bool = False
) -> None:
    """Write one file so that it appears whole or not at all, in place of an older one of that name,
    or refusing to if it must be `new`.

    It is never looser than the file that it replaces.
    """
    with wrap_write_errors(path):
        _require_replaceable(path)
        if not new and path.exists():
            mode &= stat.S_IMODE(path.stat().st_mode) | 0o600
    partial = temp_sibling(path)
    with wrap_write_errors(path):
        try:
            with open(partial, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.link(partial, path) if new else partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    fsync_folder(path.parent)


def format_bytes(n: int) -> str:
    """A number of bytes as people say it: 12 B, 3.4 kB, 1,234.5 MB."""
    return f"{n} B" if n < 1_000 else f"{n / 1e3:.1f} kB" if n < 1_000_000 else f"{n / 1e6:,.1f} MB"


_MAX_KEY_FILE_BYTES = 1 << 16


def is_key_file(path: Path) -> bool:
    """Return whether a file is a regauge key file, whatever its name and mode. A key is never
    copied along with a model.
    """
    try:
        if not path.is_file() or path.stat().st_size > _MAX_KEY_FILE_BYTES:
            return False
        fields = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(fields, dict) and fields.get("regauge") == "key"
