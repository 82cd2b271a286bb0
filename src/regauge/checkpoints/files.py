"""Files and folders: typed errors, permissions, atomic writes, link checks and sizes as text.

Every output is written beside its place, flushed and renamed (`staged_file`, `staged_folder`), or
streamed by `regauge.checkpoints.writer`, which ends in the same `publish_folder`. No other module
renames or flushes outputs.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from regauge.errors import CheckpointError

EVERYONE = 0o777  # the loosest mode of an output, before the umask
OWNER = 0o700  # the mode of an output that was made with a key
_CHUNK = 1 << 20


def strictest_mode(inputs: Iterable[Path]) -> int:
    """Return the loosest folder mode for an output that is made of these files and folders.

    A class of users (group, others) keeps its bits only if it can read every input: a private file
    makes a private folder. The owner keeps all bits. A file gets the same bits without those for
    execution (`file_mode`). The system applies the umask in addition.

    >>> oct(strictest_mode([]))
    '0o777'
    """
    mode = EVERYONE
    for path in inputs:
        with wrap_read_errors(path):
            input_mode = path.stat().st_mode
        needed = 0o111 if stat.S_ISDIR(input_mode) else 0o444
        allowed = stat.S_IMODE(input_mode) & 0o777
        for shift in (0, 3):  # others, group
            bits = allowed >> shift & 0o7
            if not bits & (needed >> shift & 0o7):
                mode &= ~(0o7 << shift)
            elif stat.S_ISDIR(input_mode):
                mode &= ~(0o7 << shift) | bits << shift
            elif not bits & 0o2:
                mode &= ~(0o2 << shift)
    return mode | OWNER


def file_mode(mode: int) -> int:
    """Return the mode of a file in a folder with this mode."""
    return mode & 0o666


def make_folder(folder: Path, mode: int = EVERYONE) -> None:
    """Create a folder and its missing parents with this mode; existing folders stay unchanged."""
    for path in (*reversed(folder.parents), folder):
        if not path.is_dir():
            path.mkdir(mode=mode, exist_ok=True)


def restrict_mode(path: Path, mode: int) -> None:
    """Remove the permission bits that are not in `mode`; never add any."""
    current = stat.S_IMODE(path.stat().st_mode)
    if current & ~mode:
        path.chmod(current & mode)


def copy_file(source: Path, target: Path, mode: int) -> bytes:
    """Copy a regular file to a new name and flush it.

    The copy is created with the mode, not changed to it later.

    Returns:
        The SHA-256 of the bytes that were written.
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
def staged_folder(
    out: Path, mode: int | None = EVERYONE, *, replace: bool = False
) -> Iterator[Path]:
    """Yield a hidden folder beside `out` that atomically becomes `out` at the end.

    The folder is readable by the owner only until it is complete; then its files and folders get
    `mode`, less the umask.

    Args:
        out: The output folder. It must not exist, or be empty, unless `replace` is set.
        mode: The mode of the folder and, without the bits for execution, of its files. None leaves
            all modes as they were written, and the folder to its owner.
        replace: Remove an existing `out` once the new one is in place.
    """
    partial = temp_sibling(out)
    with wrap_write_errors(out):
        try:
            make_folder(partial.parent)
            partial.mkdir(mode=OWNER)
            yield partial
            if mode is not None:
                mode &= _read_umask(partial)
                for path in partial.rglob("*"):
                    path.chmod(mode if path.is_dir() else file_mode(mode))
                partial.chmod(mode)
            publish_folder(partial, out, replace=replace)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def publish_folder(partial: Path, out: Path, *, replace: bool = False) -> None:
    """Flush a folder with everything in it, and rename it to its place beside it.

    Args:
        partial: The complete folder.
        out: Its place. It must not exist, or be an empty folder, unless `replace` is set.
        replace: Replace an existing `out`; one of the two is in place at every moment.
    """
    for path in (*partial.rglob("*"), partial):
        fsync_folder(path) if path.is_dir() else fsync_file(path)
    if replace:
        replace_folder(partial, out)
    else:
        partial.rename(out)
        fsync_folder(out.absolute().parent)


@contextlib.contextmanager
def staged_file(path: Path, mode: int = 0o666, *, new: bool = False) -> Iterator[Path]:
    """Yield an empty hidden file beside `path` that atomically becomes `path` at the end.

    Args:
        path: The file.
        mode: Its mode, less the umask.
        new: Raise if the file exists instead of replacing it.
    """
    partial = temp_sibling(path)
    with wrap_write_errors(path):
        try:
            os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
            yield partial
            fsync_file(partial)
            _link_new(partial, path) if new else partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
        fsync_folder(path.absolute().parent)


def _link_new(partial: Path, path: Path) -> None:
    """Give a file its final name, which must be free."""
    try:
        os.link(partial, path)
    except FileExistsError as error:
        raise CheckpointError(
            f"{path} exists already", hint="name a new file, or remove this one first"
        ) from error


def _read_umask(folder: Path) -> int:
    """Return the mode that the umask allows, read from a new folder.

    `os.umask` can only be read by changing it, for all threads at once.
    """
    probe = folder / f".{os.urandom(6).hex()}"
    probe.mkdir()
    try:
        return stat.S_IMODE(probe.stat().st_mode) & EVERYONE
    finally:
        probe.rmdir()


def fsync_file(path: Path) -> None:
    """Flush a file to disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def require_file(path: Path) -> None:
    """Raise if a path exists and is not a regular file: opening a pipe would block.

    A missing file passes; opening it raises.
    """
    # os.path accepts names that are too long for the system; Path raises.
    if os.path.exists(path) and not os.path.isfile(path):  # noqa: PTH110, PTH113
        raise CheckpointError(
            f"{path} is not a regular file",
            hint="pass a file on disk: pipes and devices cannot be read twice",
        )


def require_inside(path: Path, folder: Path) -> None:
    """Raise if a link in a model folder points outside of it or is dangling.

    Its target would be copied into the output. A snapshot in the Hugging Face cache
    (models--OWNER--NAME/snapshots/REVISION) links to blobs beside the snapshots, so its links may
    point anywhere in the folder of its repository.
    """
    root = folder.resolve()
    if root.parent.name == "snapshots" and root.parent.parent.name.startswith("models--"):
        root = root.parent.parent
    try:
        target = path.resolve(strict=True)
    except (OSError, RuntimeError) as error:  # dangling, or a loop
        raise CheckpointError(
            f"{path} is a dangling link", hint="remove it, or fetch the model again"
        ) from error
    if not target.is_relative_to(root):
        raise CheckpointError(
            f"{path} must stay within the model folder, but is a link to {target}",
            hint="replace the link by a copy of the file, if you trust it",
        )


@contextlib.contextmanager
def wrap_read_errors(path: Path) -> Iterator[None]:
    """Raise CheckpointError in place of OSError, with the name of the file that was read."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


@contextlib.contextmanager
def wrap_write_errors(path: Path) -> Iterator[None]:
    """Raise CheckpointError in place of OSError, with the name of the file and a hint."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CheckpointError(
                f"no space left on the device while writing {path}; the partial output was removed",
                hint="free some space, or write to another disk",
            ) from error
        raise CheckpointError(
            f"{path} cannot be written: {error.strerror or error}",
            hint="check that the folder exists and is writable",
        ) from error


@contextlib.contextmanager
def exclusive_lock(folder: Path, message: str, hint: str) -> Iterator[None]:
    """Hold an exclusive lock on a folder.

    The system releases the lock when the process ends, however it ends. Without effect on systems
    that cannot lock folders.

    Args:
        folder: The folder.
        message: The message of the error.
        hint: The hint of the error.

    Raises:
        CheckpointError: Another process holds the lock.
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


@contextlib.contextmanager
def exclusive_folder(folder: Path, user: str) -> Iterator[None]:
    """Create a private folder if needed and lock it for one process: two would overwrite each
    other's state.

    Args:
        folder: The folder.
        user: What the process is, for the error.

    Raises:
        CheckpointError: Another process holds the lock.
    """
    with wrap_write_errors(folder):
        folder.mkdir(mode=OWNER, parents=True, exist_ok=True)
    hint = "wait until it has ended, or name another folder"
    with exclusive_lock(folder, f"another {user} is using {folder}", hint):
        yield


def fsync_folder(folder: Path) -> None:
    """Flush the directory entries of a folder to disk, on systems that support it."""
    with contextlib.suppress(OSError):
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def check_writable(path: Path) -> None:
    """Raise if a file cannot be written, before the work that produces it."""
    with wrap_write_errors(path):
        _require_replaceable(path)
        if not path.absolute().parent.is_dir() or not os.access(path.absolute().parent, os.W_OK):
            raise CheckpointError(
                f"{path} cannot be written: its folder does not exist or is not writable",
                hint="check that the folder exists and is writable",
            )


def _require_replaceable(path: Path) -> None:
    """Raise unless a target is absent or a regular file: a rename would replace a pipe."""
    if path.is_dir():
        raise CheckpointError(f"{path} is a folder", hint="pass a file")
    require_file(path)


def temp_sibling(path: Path) -> Path:
    """Return a hidden, random name beside a file, for its incomplete content.

    Process ids do not suffice: they repeat in containers, and would collide with the files of a
    killed process.
    """
    return path.with_name(f".{path.name}.partial-{os.urandom(6).hex()}")


def replace_folder(new: Path, old: Path) -> None:
    """Replace the folder `old` by `new`.

    On Linux the two names are exchanged in one step, so one of the two is always in place.
    Elsewhere `old` is moved aside first, and back if the second rename fails.
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
    """Exchange two names in one step; return False if the (file) system does not support it."""
    try:
        rename = ctypes.CDLL(None).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    at_fdcwd, rename_exchange = -100, 2
    return bool(rename(at_fdcwd, os.fsencode(a), at_fdcwd, os.fsencode(b), rename_exchange) == 0)


def write_bytes(
    path: Path, data: bytes | bytearray | memoryview, mode: int = 0o666, *, new: bool = False
) -> None:
    """Write a file atomically, in place of an existing one.

    Args:
        path: The file.
        data: Its content.
        mode: Its mode, restricted to that of the file it replaces.
        new: Raise if the file exists instead of replacing it.
    """
    with wrap_write_errors(path):
        _require_replaceable(path)
        if not new and path.exists():
            mode &= stat.S_IMODE(path.stat().st_mode) | 0o600
    with staged_file(path, mode, new=new) as partial, partial.open("r+b") as file:
        file.write(data)


def append_bytes(path: Path, data: bytes, after: int) -> None:
    """Append to a file after its first `after` bytes, and flush it to disk.

    For logs whose committed length is known elsewhere: what follows it is the rest of an
    interrupted append, and is dropped.

    Args:
        path: The file; created if it is missing.
        data: What to append.
        after: The committed length.
    """
    with wrap_write_errors(path):
        _require_replaceable(path)
        with open(
            path, "r+b", opener=lambda name, flags: os.open(name, flags | os.O_CREAT, 0o666)
        ) as file:
            file.truncate(after)
            file.seek(after)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    fsync_folder(path.parent)


def remove_unfinished(folder: Path) -> None:
    """Remove what killed processes have left of unfinished writes, anywhere in a folder.

    Call this only from the single writer of the folder: another write may be in progress.
    """
    for partial in list(folder.rglob(".*.partial-*")):
        if partial.is_dir() and not partial.is_symlink():
            shutil.rmtree(partial, ignore_errors=True)
        else:
            partial.unlink(missing_ok=True)


def format_bytes(n: int) -> str:
    """Format a number of bytes: 12 B, 3.4 kB, 1,234.5 MB."""
    return f"{n} B" if n < 1_000 else f"{n / 1e3:.1f} kB" if n < 1_000_000 else f"{n / 1e6:,.1f} MB"


def parse_bytes(text: str) -> int | None:
    """Return the bytes of a size such as 500M, 2 GB or 8GiB; None if the text is none."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", text.strip(), re.IGNORECASE)
    if match is None or (match[3] and not match[2]):
        return None
    return int(
        float(match[1]) * (1024 if match[3] else 1000) ** " kmgt".index(match[2].lower() or " ")
    )


_MAX_KEY_FILE_BYTES = 1 << 16


def is_key_file(path: Path) -> bool:
    """Return whether a file is a regauge key file, whatever its name and mode.

    A key is never copied along with a model.
    """
    try:
        if not path.is_file() or path.stat().st_size > _MAX_KEY_FILE_BYTES:
            return False
        fields = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(fields, dict) and fields.get("regauge") == "key"
