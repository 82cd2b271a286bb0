"""Single files: what may be read, what the system's errors mean, writing that is all or nothing, and how sizes are said."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from regauge.errors import CheckpointError


def require_file(path: Path) -> None:
    """Refuse what is there and is no regular file: opening a pipe would wait for its other end. What is absent is left to whoever opens it."""
    if os.path.exists(path) and not os.path.isfile(path):  # noqa: PTH110, PTH113 (these take names that are too long for the system)
        raise CheckpointError(f"{path} is no regular file", hint="name a file on the disk: pipes and devices cannot be read twice")


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the system says into one error that names the file and the way out."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CheckpointError(
                f"no space left on the device while writing {path}; nothing was kept", hint="free some space, or write to another disk"
            ) from error
        raise CheckpointError(f"{path} cannot be written: {error.strerror or error}", hint="check that the folder exists and is writable") from error


@contextlib.contextmanager
def alone(folder: Path, message: str, hint: str) -> Iterator[None]:
    """Refuse whoever comes second to a folder. It is free again when its holder is gone, however that ended. Where the system cannot lock folders,
    nothing is refused."""
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
    with writing(path):
        _require_plain(path)
        if not path.absolute().parent.is_dir() or not os.access(path.absolute().parent, os.W_OK):
            raise CheckpointError(
                f"{path} cannot be written: its folder does not exist, or is not yours", hint="check that the folder exists and is writable"
            )


def _require_plain(path: Path) -> None:
    """A target is a regular file or nothing: a rename over a device or a pipe would take its place."""
    if path.is_dir():
        raise CheckpointError(f"{path} is a folder", hint="name a file")
    require_file(path)


def beside(path: Path) -> Path:
    """A hidden name beside a file, for what is not whole yet. It is random: in a container every process may have the same number, and would meet
    what a killed one has left."""
    return path.with_name(f".{path.name}.partial-{os.urandom(6).hex()}")


def replace_folder(new: Path, old: Path) -> None:
    """Put the folder `new` in the place of `old`, which is removed. Where the system can exchange two names (Linux), one of the two is in place at
    every moment; elsewhere `old` is moved aside first, and back if the second rename fails."""
    aside = beside(old)
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


def write_bytes(path: Path, data: bytes | bytearray | memoryview, mode: int = 0o666, *, new: bool = False) -> None:
    """Write one file so that it appears whole or not at all, in place of an older one of that name, or refusing to if it must be `new`."""
    with writing(path):
        _require_plain(path)
    partial = beside(path)
    with writing(path):
        try:
            with open(partial, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.link(partial, path) if new else partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    fsync_folder(path.parent)


def amount(n: int) -> str:
    """A number of bytes as people say it: 12 B, 3.4 kB, 1,234.5 MB."""
    return f"{n} B" if n < 1_000 else f"{n / 1e3:.1f} kB" if n < 1_000_000 else f"{n / 1e6:,.1f} MB"
