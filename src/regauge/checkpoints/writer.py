"""The checkpoint writer: streams the tensors of a plan to disk, atomically and resumably.

Files are written to a hidden folder beside the output, `.NAME.partial`, flushed to disk, and then
renamed. A few threads compute tensors and write each at its offset, block by block if it is
computed in blocks. Another thread flushes finished shards, so that computing, copying and the disk
overlap. At most two of the largest tensors are in memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge.checkpoints.blocks import Blocks, bits_of
from regauge.checkpoints.files import (
    copy_file,
    exclusive_lock,
    file_mode,
    fsync_file,
    fsync_folder,
    make_folder,
    publish_folder,
    restrict_mode,
    wrap_write_errors,
    write_bytes,
)
from regauge.checkpoints.headers import DTYPE_NAMES, DTYPES, FLOATS, read_header
from regauge.checkpoints.plan import (
    File,
    Plan,
    Thunks,
    check_space,
    is_file_name,
    is_finite,
    nbytes,
    real_path,
)
from regauge.checkpoints.reader import Checkpoint
from regauge.core.progress import Progress
from regauge.errors import CheckpointError

if TYPE_CHECKING:
    import torch

    Tensor = torch.Tensor


_JOURNAL = ".regauge.json"  # in the partial folder: the digest of the plan, the finished shards
_FLUSH_BYTES = 1 << 27  # bytes written between two flushes of a shard
_CHUNK = 1 << 18  # bytes per write, as cp does; writing full tensors at once was slower
_MIN_BUDGET = 1 << 24  # bytes of tensors in flight that are always allowed


@dataclass(frozen=True)
class WriteResult:
    """The result of a write.

    Attributes:
        path: The output.
        files: Names of the files.
        bytes: Total size.
        nonfinite: Names of the tensors that hold NaN or Inf.
        skipped: Files of the source that were not copied.
        resumed: Shards that an interrupted run had finished.
    """

    path: Path
    files: tuple[str, ...]
    bytes: int
    nonfinite: tuple[str, ...]
    skipped: tuple[str, ...]
    resumed: tuple[str, ...]


def write_plan(
    out: Path,
    plan: Plan,
    thunks: Thunks,
    *,
    progress: Progress | None = None,
    resume: bool = False,
    threads: int | None = None,
) -> WriteResult:
    """Write a plan beside the output and rename it into place.

    Args:
        out: The output, already checked (`plan_checkpoint`).
        plan: The plan.
        thunks: Functions that compute the tensors.
        progress: Called with the bytes written and the total.
        resume: Keep the shards that an interrupted run of the same plan has finished.
        threads: Number of threads that compute. Default: one less than the cores, at most 4.

    Raises:
        CheckpointError: The output cannot be written, or a tensor does not match the plan.
    """
    parent = real_path(out).parent
    partial = parent / f".{out.name}.partial"
    with wrap_write_errors(out):
        size, mode = plan.size, plan.output_mode
    with _stage_folder(partial, plan, resume, mode) as done:
        check_space(parent, size - sum(f.size for f in plan.files if f.name in done))
        run = _TensorWriter(
            partial,
            plan,
            mode,
            thunks,
            done,
            progress,
            threads or min(4, max(1, (os.cpu_count() or 1) - 1)),  # one core is left to the disk
        )
        with wrap_write_errors(out):
            run.write()
            copied: dict[str, bytes] = {}
            for name, path in plan.copies.items():
                make_folder((partial / name).parent, mode)
                copied[name] = copy_file(path, partial / name, mode)
            for name, data in {
                **plan.small,
                **_finish_files(partial, plan, run.digests, done, copied),
            }.items():
                write_bytes(partial / name, data, mode=file_mode(mode))
            _publish(partial, out)
    files = (*(f.name for f in plan.files), *plan.small, *plan.copies)
    return WriteResult(out, files, size, tuple(run.nonfinite), plan.skipped, tuple(done))


def _finish_files(
    partial: Path,
    plan: Plan,
    digests: Mapping[str, bytes],
    done: set[str],
    copied: Mapping[str, bytes],
) -> dict[str, bytes]:
    """Write the headers that `plan.finish` returns into their files; return its small files."""
    if plan.finish is None:
        return {}
    late = dict(plan.finish({**digests, **_hash_files(partial / name for name in done)}, copied))
    for file in plan.files:
        header = late.pop(file.name, None)
        if header is not None:
            assert len(header) == len(file.header()), "a late header must have its planned length"
            with (partial / file.name).open("r+b") as opened:
                opened.write(header)
                opened.flush()
                os.fsync(opened.fileno())
    return late


def _hash_files(paths: Iterable[Path]) -> dict[str, bytes]:
    """Return the SHA-256 of every tensor of some files, which an interrupted run has finished."""
    digests: dict[str, bytes] = {}
    for path in paths:
        shard = read_header(path)
        digests |= digests_of(Checkpoint(path, [shard], None, None).bits)
    return digests


def digests_of(bits: Mapping[str, Any], threads: int | None = None) -> dict[str, bytes]:
    """Return the SHA-256 of the stored bytes of every tensor.

    Uses threads: hashlib releases the GIL.
    """
    with ThreadPoolExecutor(threads or min(4, os.cpu_count() or 1), "regauge-hash") as pool:
        return dict(zip(bits, pool.map(lambda name: digest_of(bits[name]), bits), strict=True))


def digest_of(array: Any) -> bytes:
    """Return the SHA-256 of the bytes of an array or of a torch tensor."""
    import numpy as np

    if not isinstance(array, np.ndarray):
        array = bits_of(array)
    flat: Any = np.ascontiguousarray(array).reshape(-1)
    return hashlib.sha256(flat.view(np.uint8) if flat.size else b"").digest()


def _publish(partial: Path, out: Path) -> None:
    """Flush the partial folder and rename it to the output."""
    (partial / _JOURNAL).unlink(missing_ok=True)
    if not is_file_name(out):
        publish_folder(partial, out)
        return
    # The config first: once the weights appear, the output is complete.
    for path in sorted(partial.iterdir(), key=lambda p: p.name == out.name):
        path.replace(out.with_name(path.name))
    partial.rmdir()
    fsync_folder(out.absolute().parent)


@contextlib.contextmanager
def _stage_folder(partial: Path, plan: Plan, resume: bool, mode: int) -> Iterator[set[str]]:
    """Create or reuse the partial folder, and yield the names of its finished shards.

    An error removes the folder. Its mode is restricted, because an interrupted run may have had
    inputs with looser modes.
    """
    digest = plan.digest()
    if partial.is_symlink() or (partial.is_dir() and not _is_partial_output(partial, plan)):
        raise CheckpointError(
            f"{partial} exists and was not written by regauge", hint="remove or rename it first"
        )
    with wrap_write_errors(partial):
        partial.mkdir(mode=mode, exist_ok=True)
        restrict_mode(partial, mode)
    with exclusive_lock(
        partial, f"another run is writing {partial}", "wait for it, or pass another folder with -o"
    ):
        done = _finished_shards(partial, plan, digest) if resume else set()
        try:
            with wrap_write_errors(partial):
                for path in partial.iterdir():
                    if path.name not in done:
                        shutil.rmtree(path) if path.is_dir() else path.unlink()
                    else:
                        restrict_mode(path, file_mode(mode))
                _write_journal(partial, digest, done)
            yield done
        except Exception:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        except BaseException:  # interrupted: finished shards stay for a later resume
            if not resume:
                shutil.rmtree(partial, ignore_errors=True)
            raise


def _is_partial_output(partial: Path, plan: Plan) -> bool:
    """Return whether an interrupted run has left this folder.

    It has a journal, unless the run was killed before the journal existed (then there are only
    incomplete journals), or after it was removed (then all files of the plan are complete).
    """
    names = {path.name for path in partial.iterdir()}
    is_new = all(name.startswith(f".{_JOURNAL}.partial-") for name in names)
    is_complete = bool(plan.files) and all(
        (partial / f.name).is_file() and (partial / f.name).stat().st_size == f.size
        for f in plan.files
    )
    return (partial / _JOURNAL).is_file() or is_new or is_complete


def _write_journal(partial: Path, digest: str, done: set[str]) -> None:
    write_bytes(
        partial / _JOURNAL, json.dumps({"plan": digest, "done": sorted(done)}).encode(), mode=0o600
    )


def _finished_shards(partial: Path, plan: Plan, digest: str) -> set[str]:
    """Return the shards that the journal of the same plan lists and that have their full size."""
    try:
        journal = json.loads((partial / _JOURNAL).read_bytes())
        names = set(journal["done"]) if journal["plan"] == digest else set()
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return set()
    return {
        f.name
        for f in plan.files
        if f.name in names
        and (partial / f.name).is_file()
        and (partial / f.name).stat().st_size == f.size
    }


class _TensorWriter:
    """A writer that computes the tensors of a plan into the partial folder."""

    def __init__(
        self,
        folder: Path,
        plan: Plan,
        mode: int,
        thunks: Thunks,
        done: set[str],
        progress: Progress | None,
        threads: int,
    ) -> None:
        self.folder, self.plan, self.mode, self.thunks, self.threads = (
            folder,
            plan,
            mode,
            thunks,
            threads,
        )
        self.done, self.digest = set(done), plan.digest()
        self.files = [f for f in plan.files if f.name not in done]
        self.nonfinite: list[str] = []
        self.digests: dict[str, bytes] = dict(plan.known_digests)
        self.total = sum(f.size for f in plan.files)
        self.written = self.total - sum(f.size for f in self.files)
        self.progress = progress

    def write(self) -> None:
        """Write all tensors, within the memory budget."""
        sizes = [nbytes(dtype, shape) for file in self.files for _, dtype, shape in file.tensors]
        budget = max(2 * max(sizes, default=0), _MIN_BUDGET)
        waiting = deque(zip(self._places(), sizes, strict=True))
        running: deque[tuple[Future[bool], int]] = deque()
        in_flight = 0
        with (
            ThreadPoolExecutor(self.threads, "regauge-compute") as pool,
            ThreadPoolExecutor(1, "regauge-flush") as flusher,
        ):
            flushes: deque[Future[None]] = deque()

            def submit_pending() -> None:
                nonlocal in_flight
                while waiting and (
                    not running
                    or (in_flight + waiting[0][1] <= budget and len(running) < 4 * self.threads)
                ):
                    place, n = waiting.popleft()
                    running.append((pool.submit(self._write, *place), n))
                    in_flight += n

            try:
                for file in self.files:
                    unflushed = self._count(len(file.header()))
                    for name, _, _ in file.tensors:
                        submit_pending()
                        future, n = running.popleft()
                        if not future.result():
                            self.nonfinite.append(name)
                        unflushed += self._count(n)
                        in_flight -= n
                        if unflushed >= _FLUSH_BYTES:
                            flushes.append(flusher.submit(fsync_file, self.folder / file.name))
                            unflushed = 0
                    flushes.append(flusher.submit(self._close, file))
                    while flushes and flushes[0].done():
                        flushes.popleft().result()
                for flush in flushes:
                    flush.result()
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                flusher.shutdown(wait=True)
                raise

    def _places(self) -> Iterator[tuple[File, int, str, str, tuple[int, ...]]]:
        """Yield the file, offset, name, dtype and shape of every tensor."""
        for file in self.files:
            at = len(file.header())
            for name, dtype, shape in file.tensors:
                yield file, at, name, dtype, shape
                at += nbytes(dtype, shape)

    def _write(self, file: File, at: int, name: str, dtype: str, shape: tuple[int, ...]) -> bool:
        """Compute a tensor and write it at its offset; return whether it is finite."""
        fd = os.open(self.folder / file.name, os.O_WRONLY | os.O_CREAT, file_mode(self.mode))
        try:
            os.lseek(fd, at, os.SEEK_SET)
            return self._put(fd, name, dtype, shape)
        finally:
            os.close(fd)

    def _put(self, fd: int, name: str, dtype: str, shape: tuple[int, ...]) -> bool:
        """Compute a tensor, check it against the plan, and write it to an open file."""
        import numpy as np

        tensor, size, finite = self.thunks[name](), 0, True
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f'"{name}" must have the planned shape {list(shape)}, got {list(tensor.shape)}'
            )
        digest = (
            hashlib.sha256() if self.plan.finish is not None and name not in self.digests else None
        )
        for piece in _iter_bits(tensor, name, dtype):
            bits = np.ascontiguousarray(piece).reshape(-1)
            if finite and dtype in FLOATS and not is_finite(bits, dtype):
                finite = False
                self._require_nonfinite(name, dtype)
            view = bits.view(np.uint8).data if bits.size else memoryview(b"")
            size += len(view)
            _write_all(fd, view, digest)
        if size != nbytes(dtype, shape):
            raise CheckpointError(
                f'"{name}" must have {nbytes(dtype, shape)} bytes ({dtype} {list(shape)}), got '
                f"{size}"
            )
        if digest is not None:
            self.digests[name] = digest.digest()
        return finite

    def _require_nonfinite(self, name: str, dtype: str) -> None:
        """Raise if the origin of a tensor with NaN or Inf had neither."""
        if self.plan.was_finite is not None and self.plan.was_finite(name):
            raise CheckpointError(
                f'"{name}" would hold NaN or Inf, but its origin is finite',
                hint=f"either its new values overflow {dtype} (store the model in a wider dtype "
                "first, or sample another element), or a tensor folded into it holds NaN or Inf",
            )

    def _count(self, n: int) -> int:
        """Add n bytes to the progress and return n."""
        self.written += n
        if self.progress:
            self.progress(self.written, self.total, "")
        return n

    def _close(self, file: File) -> None:
        """Write the header after the tensors, and record the file as finished."""
        path = self.folder / file.name
        if not file.tensors:
            path.touch(mode=file_mode(self.mode))
        with path.open("r+b") as opened:
            opened.write(file.header())
            opened.flush()
            os.fsync(opened.fileno())
        self.done.add(file.name)
        _write_journal(self.folder, self.digest, self.done)


def _write_all(fd: int, view: memoryview, digest: Any = None) -> None:
    """Write all bytes, and hash them.

    Hashed bytes are copied first: a mapped file may change between writing and hashing.
    """
    while len(view):
        chunk = view[:_CHUNK] if digest is None else bytes(view[:_CHUNK])
        n = os.write(fd, chunk)
        if digest is not None:
            digest.update(memoryview(chunk)[:n])
        view = view[n:]


def _iter_bits(tensor: Any, name: str, dtype: str) -> Iterator[Any]:
    """Yield the bits of a computed tensor as numpy arrays, in order."""
    import numpy as np

    if isinstance(tensor, np.ndarray):
        if tensor.itemsize != DTYPES[dtype][1]:
            raise CheckpointError(
                f'"{name}" must have {DTYPES[dtype][1]} bytes per value ({dtype}), got '
                f"{tensor.itemsize}"
            )
        yield tensor
        return
    if DTYPE_NAMES.get(str(tensor.dtype).removeprefix("torch.")) != dtype:
        raise CheckpointError(f'"{name}" must have the planned dtype {dtype}, got {tensor.dtype}')
    yield from tensor.make() if isinstance(tensor, Blocks) else (bits_of(tensor),)
