"""Checkpoints, written: one engine for all that makes a new checkpoint out of an old one, tensor by tensor.

What is written goes into a hidden folder beside the output, `.NAME.partial`, is flushed to the disk, and is then renamed: the output is there whole
or not at all. A few threads make tensors and write each in its place, piece by piece where it is made so; finished shards are flushed by another, so
that computing, copying and the disk work at once; at most two of the largest tensors are in memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge.blocks import Blocks, bits_of
from regauge.checkpoint import DTYPE_NAMES, DTYPES, FLOATS, INDEX, PICKLES, WEIGHTS, Checkpoint, read_header
from regauge.errors import CheckpointError
from regauge.files import alone, amount, fsync_folder, write_bytes, writing
from regauge.keys import is_key_file

if TYPE_CHECKING:
    import torch

    Tensor = torch.Tensor

# What makes each tensor: a torch tensor, a numpy array of its bits, or blocks.
Thunks = Mapping[str, Callable[[], Any]]

Progress = Callable[[int, int], None]

_JOURNAL = ".regauge.json"  # in the partial folder: the plan's digest, and the shards that are done
_FLUSH = 1 << 27  # bytes written between two flushes of a shard
_CHUNK = 1 << 18  # bytes handed to the system at once: as cp does; whole tensors at once took longer here
_SMALL = 1 << 24  # memory for tensors in flight that is always allowed

# Weights in other formats are not carried over: they would be the old ones.
_OTHER_WEIGHTS = (*PICKLES, ".safetensors", ".gguf", ".h5", ".msgpack", ".onnx", ".onnx_data", ".ot", ".tflite", ".mlmodel", ".npz", ".pkl")


@dataclass(frozen=True)
class File:
    """One safetensors file to be written: tensors in order, as (name, dtype, shape)."""

    name: str
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]
    metadata: Mapping[str, str] | None = None

    def header(self) -> bytes:
        """The header's bytes, the length in front included; padded to 8, as the format asks."""
        entries: dict[str, Any] = {} if self.metadata is None else {"__metadata__": dict(self.metadata)}
        at = 0
        for name, dtype, shape in self.tensors:
            entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + nbytes(dtype, shape)]}
            at += nbytes(dtype, shape)
        raw = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        raw += b" " * (-len(raw) % 8)
        return len(raw).to_bytes(8, "little") + raw

    @property
    def size(self) -> int:
        return len(self.header()) + sum(nbytes(dtype, shape) for _, dtype, shape in self.tensors)


@dataclass(frozen=True)
class Plan:
    """What a run writes: safetensors files, small files by their bytes, and files to copy. `digest` tells one plan from another.

    `was_finite` says whether what a tensor is made of holds neither NaN nor Inf. Without it, nobody minds either. `finish` makes what depends on all
    that was written: given the SHA-256 of every tensor, small files in place of those of the plan, and headers as long as those of its files.
    `known` holds those of tensors that are written as they are read.
    """

    files: tuple[File, ...]
    small: Mapping[str, bytes] = field(default_factory=dict)
    copies: Mapping[str, Path] = field(default_factory=dict)
    left: tuple[str, ...] = ()
    recipe: bytes = b""
    was_finite: Callable[[str], bool] | None = None
    finish: Callable[[Mapping[str, bytes]], Mapping[str, bytes]] | None = None
    known: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return sum(f.size for f in self.files) + sum(map(len, self.small.values())) + sum(p.stat().st_size for p in self.copies.values())

    def digest(self) -> str:
        whole = hashlib.sha256(self.recipe)
        for file in self.files:
            whole.update(file.name.encode() + b"\0" + file.header())
        return whole.hexdigest()


@dataclass(frozen=True)
class Written:
    """What was written. `nonfinite` names tensors that hold NaN or Inf; `left` the files of the source that were not carried over."""

    path: Path
    files: tuple[str, ...]
    bytes: int
    nonfinite: tuple[str, ...]
    left: tuple[str, ...]
    resumed: tuple[str, ...]


def nbytes(dtype: str, shape: Sequence[int]) -> int:
    total = DTYPES[dtype][1]
    for n in shape:
        total *= n
    return total


def plan_checkpoint(
    out: Path,
    source: Checkpoint,
    thunks: Thunks,
    *,
    origins: Mapping[str, str] | None = None,
    config_changes: Mapping[str, Any] | None = None,
    recipe: bytes = b"",
) -> Plan:
    """Plan to write the tensors that thunks make, as the source is laid out: same shards, order, dtypes and metadata, and all its other files.

    `out` is a folder, or a .safetensors file if the source is one file. Tensors that the source lacks go to the end of the last shard; tensors
    without a thunk are left out. `origins` names the tensor of the source that one is made of, where that has another name: if it was finite and
    the new one is not, writing fails. `config_changes` are merged into config.json. `recipe` is whatever, besides the source, determines the values.
    What can be refused before the first byte is refused here.
    """
    check_target(out, source.path)
    plan = replace(_plan(out, source, thunks, dict(config_changes or {}), recipe), was_finite=partial(_was_finite, source, origins or {}))
    _check_space(_real(out).parent, plan.size)
    return plan


def check_target(out: Path, source: Path) -> None:
    """Refuse an output that is there already, or that overlaps the source."""
    with writing(out):
        here, there = _real(out), source.resolve()
    if here == there:
        raise CheckpointError(f"the output {out} is the input", hint="name another folder with -o")
    if here.is_relative_to(there) or there.is_relative_to(here):
        inside = "inside" if here.is_relative_to(there) else "around"
        raise CheckpointError(f"the output {out} lies {inside} the input {source}", hint="name a folder beside it with -o")
    check_new(out)


def check_new(out: Path) -> None:
    """Refuse an output that is there already, or that has no place to be."""
    if out.name in ("", ".."):
        raise CheckpointError(f"the output {out} has no name of its own", hint="name a new folder")
    with writing(out):
        out.is_dir()  # looks at more than the next line does: a name may be too long
        taken = is_taken(out)
    if taken:
        raise CheckpointError(f"the output {out} exists already", hint="name a new one, or remove this one first")
    config = out.with_name(f"{out.stem}.config.json")
    if is_file_name(out) and os.path.lexists(config):
        raise CheckpointError(f"{config} exists already, and the output's config would take its place", hint="name another file with -o")
    parent = _real(out).parent
    if not parent.is_dir():
        raise CheckpointError(f"the folder {parent} for the output does not exist", hint="make it first")


def is_taken(out: Path) -> bool:
    """Is there something at an output's place? An empty folder is nothing; what is written appears there all at once."""
    return os.path.lexists(out) and not (out.is_dir() and not out.is_symlink() and not any(out.iterdir()))


def _real(path: Path) -> Path:
    return path.parent.resolve() / path.name if path.name not in ("", "..") else path.resolve()


def is_file_name(out: Path) -> bool:
    return out.suffix == ".safetensors"


def _plan(out: Path, source: Checkpoint, thunks: Thunks, changes: dict[str, Any], recipe: bytes) -> Plan:
    files: list[File] = []
    for shard in source.files.values():
        kept = tuple((name, e.dtype, e.shape) for name, e in shard.entries.items() if name in thunks)
        files.append(File(shard.path.name, kept, shard.metadata))
    new = tuple((name, *_described(name, thunks[name]())) for name in thunks if name not in source)
    files[-1] = File(files[-1].name, files[-1].tensors + new, files[-1].metadata)
    config = _config(source, changes)
    stamps = [(n, s.size, s.path.stat().st_mtime_ns) for n, s in source.files.items()]
    recipe = json.dumps([stamps, changes]).encode() + recipe
    if is_file_name(out):
        if len(files) > 1:
            raise CheckpointError(f"{source.path} has {len(files)} shards and cannot become the one file {out}", hint="name a folder with -o")
        small = {} if config is None else {f"{out.stem}.config.json": config}
        return Plan((File(out.name, files[0].tensors, files[0].metadata),), small, recipe=recipe)
    small = {} if config is None else {"config.json": config}
    if source.is_folder:
        if source.index is not None:
            small[INDEX] = _index(source.index, files)
        copies, left = other_files(source.path, {*small, *source.files})
        return Plan(tuple(files), small, copies, left, recipe)
    return Plan((File(WEIGHTS, files[0].tensors, files[0].metadata),), small, recipe=recipe)


def _described(name: str, tensor: Tensor) -> tuple[str, tuple[int, ...]]:
    dtype = DTYPE_NAMES.get(str(tensor.dtype).removeprefix("torch."))
    if dtype is None:
        raise CheckpointError(f'"{name}" is {tensor.dtype}, which cannot be written')
    return dtype, tuple(tensor.shape)


def _config(source: Checkpoint, changes: Mapping[str, Any]) -> bytes | None:
    """config.json byte for byte, unless something in it changes."""
    if source.config is None or source.config_path is None:
        return None
    if all(key in source.config and source.config[key] == value for key, value in changes.items()):
        return source.config_path.read_bytes()
    return (json.dumps({**source.config, **changes}, indent=2, ensure_ascii=False) + "\n").encode()


def _index(index: Mapping[str, Any], files: Sequence[File]) -> bytes:
    where = {name: file.name for file in files for name, _, _ in file.tensors}
    total = sum(nbytes(dtype, shape) for file in files for _, dtype, shape in file.tensors)
    ordered = {name: where[name] for name in [*index["weight_map"], *where] if name in where}
    metadata = index.get("metadata") if isinstance(index.get("metadata"), Mapping) else {}
    changed = {**index, "metadata": {**(metadata or {}), "total_size": total}, "weight_map": ordered}
    return (json.dumps(changed, indent=2, ensure_ascii=False) + "\n").encode()


def other_files(folder: Path, written: set[str]) -> tuple[dict[str, Path], tuple[str, ...]]:
    """The files of a folder to carry over, and those to leave: other weights and their indices, elements and keys. Hidden files count as absent."""
    copies: dict[str, Path] = {}
    left: list[str] = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if any(part.startswith(".") for part in Path(name).parts) or not path.is_file() or name in written:
            continue
        if _is_weights(path) or _is_element(path) or is_key_file(path):
            left.append(name)
        else:
            copies[name] = path
    return copies, tuple(left)


def _is_weights(path: Path) -> bool:
    indices, others = (".index.json", ".safetensors.json"), ("tf_model", "flax_model")
    return path.suffix in _OTHER_WEIGHTS or path.name.endswith(indices) or path.name.startswith(others)


def _is_element(path: Path) -> bool:
    """Is this an element, whatever its name? It is a secret, and could undo the output that it would lie in."""
    try:
        return (read_header(path).metadata or {}).get("regauge") == "element"
    except CheckpointError:
        return False


def write_plan(
    out: Path, plan: Plan, thunks: Thunks, *, progress: Progress | None = None, resume: bool = False, threads: int | None = None
) -> Written:
    """Write a plan beside the output and rename it into place. The output has been checked.

    With `resume`, shards that an interrupted run of the same plan has finished are kept.
    """
    parent = _real(out).parent
    partial = parent / f".{out.name}.partial"
    with writing(out):
        size = plan.size
    with _staged(partial, plan, resume) as done:
        _check_space(parent, size - sum(f.size for f in plan.files if f.name in done))
        run = _Run(partial, plan, thunks, done, progress, threads or min(4, max(1, (os.cpu_count() or 1) - 1)))  # one core is the disk's
        with writing(out):
            run.write()
            for name, path in plan.copies.items():
                (partial / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, partial / name)
                _fsync(partial / name)
            for name, data in {**plan.small, **_finishing(partial, plan, run.digests, done)}.items():
                write_bytes(partial / name, data)
            _finish(partial, out)
    files = (*(f.name for f in plan.files), *plan.small, *plan.copies)
    return Written(out, files, size, tuple(run.nonfinite), plan.left, tuple(done))


def _finishing(partial: Path, plan: Plan, digests: Mapping[str, bytes], done: set[str]) -> dict[str, bytes]:
    """The small files that are made last. Headers that are made last are put in their places here."""
    if plan.finish is None:
        return {}
    late = dict(plan.finish({**digests, **_digests_of(partial / name for name in done)}))
    for file in plan.files:
        header = late.pop(file.name, None)
        if header is not None:
            assert len(header) == len(file.header()), "a header that is made last has its place kept free"
            with (partial / file.name).open("r+b") as opened:
                opened.write(header)
                opened.flush()
                os.fsync(opened.fileno())
    return late


def _digests_of(paths: Iterable[Path]) -> dict[str, bytes]:
    """The SHA-256 of every tensor of files that an interrupted run has finished."""
    out: dict[str, bytes] = {}
    for path in paths:
        shard = read_header(path)
        out |= digests_of(Checkpoint(path, [shard], None, None).bits)
    return out


def digests_of(bits: Mapping[str, Any], threads: int | None = None) -> dict[str, bytes]:
    """The SHA-256 of every tensor's bytes, as they are stored. hashlib lets other threads run meanwhile."""
    with ThreadPoolExecutor(threads or min(4, os.cpu_count() or 1), "regauge-hash") as pool:
        return dict(zip(bits, pool.map(lambda name: digest_of(bits[name]), bits), strict=True))


def digest_of(array: Any) -> bytes:
    """The SHA-256 of the bytes of an array or of a torch tensor."""
    import numpy as np

    if not isinstance(array, np.ndarray):
        array = bits_of(array)
    flat: Any = np.ascontiguousarray(array).reshape(-1)
    return hashlib.sha256(flat.view(np.uint8) if flat.size else b"").digest()


def _finish(partial: Path, out: Path) -> None:
    (partial / _JOURNAL).unlink(missing_ok=True)
    for folder in {partial, *(p for p in partial.rglob("*") if p.is_dir())}:
        fsync_folder(folder)
    if is_file_name(out):
        for path in sorted(partial.iterdir(), key=lambda p: p.name == out.name):  # the config first: the weights' appearance means done
            path.replace(out.with_name(path.name))
        partial.rmdir()
    else:
        partial.rename(out)
    fsync_folder(out.parent)


def _fsync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _check_space(parent: Path, need: int) -> None:
    free = shutil.disk_usage(parent).free
    if need > free:
        raise CheckpointError(
            f"no space left on the device: {parent} has {amount(free)} free, the output needs {amount(need)}",
            hint="free some space, or write to another disk",
        )


@contextlib.contextmanager
def _staged(partial: Path, plan: Plan, resume: bool) -> Iterator[set[str]]:
    """The partial folder, empty or with the finished shards of the same plan (which are yielded). An error removes it."""
    digest = plan.digest()
    if partial.is_symlink() or (partial.is_dir() and not _is_ours(partial, plan)):
        raise CheckpointError(f"{partial} is in the way, and is not regauge's", hint="remove or rename it first")
    with writing(partial):
        partial.mkdir(exist_ok=True)
    with alone(partial, f"another run is writing {partial}", "wait for it, or name another folder with -o"):
        done = _finished(partial, plan, digest) if resume else set()
        try:
            with writing(partial):
                for path in partial.iterdir():
                    if path.name not in done:
                        shutil.rmtree(path) if path.is_dir() else path.unlink()
                _journal(partial, digest, done)
            yield done
        except Exception:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        except BaseException:  # interrupted: what is finished is kept for whoever means to go on
            if not resume:
                shutil.rmtree(partial, ignore_errors=True)
            raise


def _is_ours(partial: Path, plan: Plan) -> bool:
    """Is this what an interrupted run has left? It has a journal, unless the run was killed before that was there (then there is nothing else but the
    journal's own beginnings), or after it was removed (then all files of the plan are there, whole)."""
    names = {path.name for path in partial.iterdir()}
    begun = all(name.startswith(f".{_JOURNAL}.partial-") for name in names)
    whole = bool(plan.files) and all((partial / f.name).is_file() and (partial / f.name).stat().st_size == f.size for f in plan.files)
    return (partial / _JOURNAL).is_file() or begun or whole


def _journal(partial: Path, digest: str, done: set[str]) -> None:
    write_bytes(partial / _JOURNAL, json.dumps({"plan": digest, "done": sorted(done)}).encode())


def _finished(partial: Path, plan: Plan, digest: str) -> set[str]:
    try:
        journal = json.loads((partial / _JOURNAL).read_bytes())
        names = set(journal["done"]) if journal["plan"] == digest else set()
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return set()
    return {f.name for f in plan.files if f.name in names and (partial / f.name).is_file() and (partial / f.name).stat().st_size == f.size}


class _Run:
    """The tensors of a plan on their way to the disk."""

    def __init__(self, folder: Path, plan: Plan, thunks: Thunks, done: set[str], progress: Progress | None, threads: int) -> None:
        self.folder, self.plan, self.thunks, self.threads = folder, plan, thunks, threads
        self.done, self.digest = set(done), plan.digest()
        self.files = [f for f in plan.files if f.name not in done]
        self.nonfinite: list[str] = []
        self.digests: dict[str, bytes] = dict(plan.known)
        self.total = sum(f.size for f in plan.files)
        self.written = self.total - sum(f.size for f in self.files)
        self.progress = progress

    def write(self) -> None:
        sizes = [nbytes(dtype, shape) for file in self.files for _, dtype, shape in file.tensors]
        budget = max(2 * max(sizes, default=0), _SMALL)
        waiting = deque(zip(self._places(), sizes, strict=True))
        running: deque[tuple[Future[bool], int]] = deque()
        held = 0
        with ThreadPoolExecutor(self.threads, "regauge-compute") as pool, ThreadPoolExecutor(1, "regauge-flush") as flusher:
            flushes: deque[Future[None]] = deque()

            def ahead() -> None:
                nonlocal held
                while waiting and (not running or (held + waiting[0][1] <= budget and len(running) < 4 * self.threads)):
                    place, n = waiting.popleft()
                    running.append((pool.submit(self._write, *place), n))
                    held += n

            try:
                for file in self.files:
                    unflushed = self._count(len(file.header()))
                    for name, _, _ in file.tensors:
                        ahead()
                        future, n = running.popleft()
                        if not future.result():
                            self.nonfinite.append(name)
                        unflushed += self._count(n)
                        held -= n
                        if unflushed >= _FLUSH:
                            flushes.append(flusher.submit(_fsync, self.folder / file.name))
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
        """Every tensor with where it goes: its file, where it begins there, and what it is."""
        for file in self.files:
            at = len(file.header())
            for name, dtype, shape in file.tensors:
                yield file, at, name, dtype, shape
                at += nbytes(dtype, shape)

    def _write(self, file: File, at: int, name: str, dtype: str, shape: tuple[int, ...]) -> bool:
        """Make a tensor and write it where it belongs. Is it finite?"""
        fd = os.open(self.folder / file.name, os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            os.lseek(fd, at, os.SEEK_SET)
            return self._put(fd, name, dtype, shape)
        finally:
            os.close(fd)

    def _put(self, fd: int, name: str, dtype: str, shape: tuple[int, ...]) -> bool:
        import numpy as np

        made, written, finite = self.thunks[name](), 0, True
        if tuple(made.shape) != shape:
            raise CheckpointError(f'"{name}" became {list(made.shape)}, but {list(shape)} was announced')
        digest = hashlib.sha256() if self.plan.finish is not None and name not in self.digests else None
        for piece in _pieces(made, name, dtype):
            bits = np.ascontiguousarray(piece).reshape(-1)
            if finite and dtype in FLOATS and not is_finite(bits, dtype):
                finite = False
                self._require_nonfinite(name, dtype)
            view = memoryview(bits.tobytes() if not bits.size else bits.view(np.uint8))  # type: ignore[arg-type]
            written += len(view)
            if digest is not None:
                digest.update(view)
            _write_all(fd, view)
        if written != nbytes(dtype, shape):
            raise CheckpointError(f'"{name}" became {written} bytes, but {dtype} {list(shape)} was announced')
        if digest is not None:
            self.digests[name] = digest.digest()
        return finite

    def _require_nonfinite(self, name: str, dtype: str) -> None:
        """Refuse NaN or Inf, unless there was one before."""
        if self.plan.was_finite is not None and self.plan.was_finite(name):
            raise CheckpointError(
                f'"{name}" would hold NaN or Inf, which what it is made of does not',
                hint=f"its new values are too large for {dtype} (store the model in a wider dtype first, or draw another element), "
                "or something that is folded into it holds NaN or Inf",
            )

    def _count(self, n: int) -> int:
        self.written += n
        if self.progress:
            self.progress(self.written, self.total)
        return n

    def _close(self, file: File) -> None:
        """Write the header, now that all the rest is there, and take note that the file is whole."""
        with (self.folder / file.name).open("r+b" if file.tensors else "wb") as opened:
            opened.write(file.header())
            opened.flush()
            os.fsync(opened.fileno())
        self.done.add(file.name)
        _journal(self.folder, self.digest, self.done)


def _write_all(fd: int, view: memoryview) -> None:
    while len(view):
        view = view[os.write(fd, view[:_CHUNK]) :]


def _pieces(made: Any, name: str, dtype: str) -> Iterator[Any]:
    """The bits of what a thunk has made, as numpy arrays, in order."""
    import numpy as np

    if isinstance(made, np.ndarray):
        if made.itemsize != DTYPES[dtype][1]:
            raise CheckpointError(f'"{name}" became {made.itemsize} bytes a value, but {dtype} was announced')
        yield made
        return
    if DTYPE_NAMES.get(str(made.dtype).removeprefix("torch.")) != dtype:
        raise CheckpointError(f'"{name}" became {made.dtype}, but {dtype} was announced')
    yield from made.make() if isinstance(made, Blocks) else (bits_of(made),)


# The first bit pattern that is not finite, by dtype.
_NOT_FINITE = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000, "F64": 0x7FF0000000000000}


def is_finite(bits: Any, dtype: str) -> bool:
    """Is no value NaN or Inf? Read off the bits: those are the largest of their sign, as integers. Ten times as fast as torch.isfinite."""
    first = _NOT_FINITE[dtype]
    last = first + (1 << (8 * bits.itemsize - 1))
    signed, unsigned = bits.view(f"<i{bits.itemsize}"), bits.view(f"<u{bits.itemsize}")
    step = 1 << 17  # what the cache holds between the two passes
    for at in range(0, bits.size, step):
        if signed[at : at + step].max() >= first or unsigned[at : at + step].max() >= last:
            return False
    return True


def _was_finite(source: Checkpoint, origins: Mapping[str, str], name: str) -> bool:
    import numpy as np

    entry = source.entries.get(origins.get(name, name))
    return entry is None or entry.dtype not in FLOATS or is_finite(np.ravel(source.bits[origins.get(name, name)]), entry.dtype)
