"""Locks on checkpoints: lock, unlock, rekey and reseal, streamed through the one engine that writes
(`regauge.checkpoints.writer`).

A `Job` is a plan that was checked against the key and the file's tags: nothing is written before
that, and the output appears whole or not at all. The record of the lock is the last thing that is
made, out of the digests of all that was written.

The bytes that are checked are the bytes that are used, even if a file is rewritten in the meantime.
Where the plain weights are known bit for bit, what `unlock` has written is compared with their
digest before it appears; otherwise each tensor is copied, hashed and compared when it is read.

The record binds the other files of the folder: none may be changed, removed or added since. Hidden
files and those that nothing loads (`is_free`) are not bound.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from regauge.checkpoints.files import OWNER, wrap_read_errors, write_bytes
from regauge.checkpoints.headers import DTYPES
from regauge.checkpoints.plan import File, Plan, check_target, files_of, is_file_name
from regauge.checkpoints.reader import INDEX, Checkpoint
from regauge.checkpoints.transform import TransformSource, prepare_source
from regauge.checkpoints.writer import WriteResult, digest_of, digests_of, write_plan
from regauge.core.action import tensor_transforms
from regauge.core.canonical import canonical_json
from regauge.core.check import check, require
from regauge.core.element import Element, identity
from regauge.core.progress import Progress
from regauge.core.spec import Spec
from regauge.errors import LockError, TamperedModelError
from regauge.locking.keys import Key
from regauge.locking.lock import (
    DEFAULT_GROUP,
    FIELD,
    UNKNOWN,
    VERSION,
    Record,
    add_tags,
    draft_record,
    element_spec,
    header_of,
    locked_element,
    model_digest,
    record_of,
    renew_tags,
    require_locked,
    require_plain,
    verify_tags,
)

if TYPE_CHECKING:
    import torch

CONFIG = "config.json"
_UNBOUND_SUFFIXES = (
    ".md",
    ".rst",
    ".pdf",
    ".html",
    ".png",
    ".jpg",
    ".jpeg",
    ".gif",
    ".svg",
    ".log",
)
_UNBOUND_STEMS = ("readme", "license", "licence", "notice", "copying", "authors", "citation")
_ADDED_HINT = "remove it, or bind it with regauge lock --reseal if you have put it there"


@dataclass(frozen=True)
class Job:
    """What is to be written, by which element, and the record that it will have (its tags still to
    come), or that it had.
    """

    out: Path
    plan: Plan
    thunks: Mapping[str, Callable[[], Any]]
    element: Element
    record: Record
    locked_dtype: str | None = None  # the dtype it was locked in, where training has changed that

    def write(
        self,
        *,
        progress: Progress | None = None,
        resume: bool = False,
        threads: int | None = None,
    ) -> WriteResult:
        return write_plan(
            self.out, self.plan, self.thunks, progress=progress, resume=resume, threads=threads
        )


def plan_lock(
    checkpoint: Checkpoint,
    spec: Spec,
    out: Path,
    key: Key,
    *,
    group: str = DEFAULT_GROUP,
    spaces: Iterable[str] | None = None,
    threads: int | None = None,
) -> Job:
    """Plan to write a locked checkpoint. The plain one is read once, for its digest."""
    key.require("lock")
    check_target(out, checkpoint.path)
    require_plain(checkpoint, checkpoint.path)
    _require_fit(checkpoint, spec)
    draft_record(
        spec, key, "0" * 64, group, spaces
    )  # what can be refused is refused before all is read
    digests = digests_of(checkpoint.bits, threads)
    described, record = draft_record(
        spec, key, model_digest(header_of(checkpoint), digests), group, spaces
    )
    g = locked_element(described, record, key, tags=False)
    source = prepare_source(_VerifiedCheckpoint(checkpoint, digests), spec, record.folded)
    return _build_job(out, source, g, record, key, {} if record.folded else digests)


def plan_unlock(
    checkpoint: Checkpoint,
    spec: Spec,
    out: Path,
    key: Key,
    *,
    retrained: bool = False,
    threads: int | None = None,
) -> Job:
    """Plan to write the plain checkpoint. The key and the file's tags are checked here: all of it
    is read, unless it was `retrained`.
    """
    key.require("lock")
    check_target(out, checkpoint.path)
    record, g, digests, cast = _open_locked(checkpoint, spec, key, retrained, threads)
    compared = (
        not retrained and record.plain != UNKNOWN
    )  # what is written is compared; otherwise what is read
    source = _locked_source(checkpoint, spec, g, {} if compared else digests)
    job = _build_job(out, source, ~g, record, None, {})
    header = {
        name: (dtype, shape) for file in job.plan.files for name, dtype, shape in file.tensors
    }

    def finish(written: Mapping[str, bytes], copied: Mapping[str, bytes]) -> dict[str, bytes]:
        if compared and model_digest(header, written) != record.plain:
            raise _changed_error(checkpoint)
        if not retrained:
            _require_copied(checkpoint, record, copied)
        return {}

    known = {} if compared else dict.fromkeys(header, b"")  # nobody asks for these digests
    return replace(
        job, plan=replace(job.plan, finish=finish, known_digests=known), locked_dtype=cast
    )


def plan_rekey(
    checkpoint: Checkpoint,
    spec: Spec,
    out: Path,
    old: Key,
    new: Key,
    *,
    retrained: bool = False,
    threads: int | None = None,
) -> Job:
    """Plan to write the checkpoint locked by another key, in one move from one locked form to the
    other: the plain model is never written.
    """
    new.require("lock")
    check_target(out, checkpoint.path)
    record, g, digests, cast = _open_locked(checkpoint, spec, old, retrained, threads)
    if new == old:
        raise LockError(
            f"the model is locked by the key {new.id} already",
            hint="make another one with regauge keygen",
        )
    changed = replace(
        record, key=new.id, version=VERSION, plain=UNKNOWN if retrained else record.plain
    )
    to = locked_element(spec, changed, new, tags=False) @ ~g
    job = _build_job(
        out,
        _locked_source(checkpoint, spec, g, digests),
        to,
        changed,
        new,
        digests,
        None if retrained else partial(_require_copied, checkpoint, record),
    )
    return replace(job, locked_dtype=cast)


def plan_reseal(
    checkpoint: Checkpoint, spec: Spec, out: Path, key: Key, *, threads: int | None = None
) -> Job:
    """Plan to write the same locked checkpoint, trained since it was locked, with tags that fit its
    data.
    """
    check_target(out, checkpoint.path)
    record, g, _, cast = _open_locked(checkpoint, spec, key, True, threads)
    job = _build_job(
        out,
        _locked_source(checkpoint, spec, g, {}),
        identity(g.spec),
        record,
        key,
        {},
        tag=partial(renew_tags, record),
    )
    return replace(job, locked_dtype=cast)


def reseal(
    checkpoint: Checkpoint,
    spec: Spec,
    key: Key,
    *,
    threads: int | None = None,
    dry_run: bool = False,
) -> Record:
    """Renew the tags of a locked folder that was trained, in place: its config.json is replaced,
    whole or not at all. A dry run only checks.
    """
    record, g, _, _ = _open_locked(checkpoint, spec, key, True, threads)
    if (
        checkpoint.config is None
        or checkpoint.config_path is None
        or FIELD not in checkpoint.config
    ):
        raise LockError(
            f"{checkpoint.path} keeps its lock record in the weights' file, which is not "
            "rewritten in place",
            hint="give -o OUT",
        )
    bound = replace(record, version=VERSION, files=bound_files(checkpoint))
    sealed = renew_tags(
        record, bound, key, g.spec, header_of(checkpoint), digests_of(checkpoint.bits, threads)
    )
    if not dry_run:
        write_bytes(
            checkpoint.config_path, _config_bytes({**checkpoint.config, FIELD: sealed.to_dict()})
        )
    return sealed


def verify_files(
    checkpoint: Checkpoint, spec: Spec, key: Key, *, threads: int | None = None
) -> Record:
    """Refuse a locked checkpoint that is not, in every number and file, as it was locked (or
    resealed) by this key. Nothing is written.
    """
    return _open_locked(checkpoint, spec, key, False, threads)[0]


def verify_loaded(
    model: torch.nn.Module,
    checkpoint: Checkpoint,
    spec: Spec,
    key: Key,
    *,
    threads: int | None = None,
) -> Record:
    """Check the files of a locked model (`verify_files`), and that the model in memory has their
    numbers, rounded to its own dtype.

    A file may have been rewritten after it was loaded, or before it was checked. Tensors that the
    files do not have (another head) are not compared.
    """
    import torch

    record, _, digests, _ = _open_locked(checkpoint, spec, key, False, threads)
    stored = _VerifiedCheckpoint(checkpoint, digests)
    live = model.state_dict()
    prefix = f"{getattr(model, 'base_model_prefix', '') or ''}."
    compared = 0
    for name in stored:
        found = next(
            (live[n] for n in (name, prefix + name, name.removeprefix(prefix)) if n in live), None
        )
        if found is None or found.is_meta:
            continue
        compared += 1
        expected = stored[name].to(found.dtype)
        if expected.shape != found.shape or not torch.equal(
            _raw_bytes(expected), _raw_bytes(found.detach().cpu().contiguous())
        ):
            raise TamperedModelError(
                f'"{name}" in memory is not what {checkpoint.path} holds',
                hint="load the model again; leave out files= for one that was trained since",
            )
    if not compared:
        raise TamperedModelError(
            f"no tensor in memory has a name of {checkpoint.path}",
            hint="name the folder that the model was loaded from",
        )
    return record


def check_files(
    checkpoint: Checkpoint, record: Record | None = None, *, retrained: bool = True
) -> None:
    """Refuse a locked folder whose files beside the weights are not those that its record lists.

    Args:
        checkpoint: The locked model.
        record: Its record, if the caller has checked that it is genuine. Default: as it is stored,
        which finds additions but no forgery.
        retrained: Whether the model may have been saved again since, with other files. Then only
        new files are refused that change what is loaded:
            adapters and code.
    """
    record = record or record_of(checkpoint)
    if record is None or record.files is None:
        return
    found = bound_files(checkpoint)
    added = [name for name in found if name not in record.files]
    if retrained:
        added = [
            name
            for name in added
            if "/" not in name and (name.startswith("adapter_") or name.endswith(".py"))
        ]
    changed = (
        []
        if retrained
        else [
            name for name, digest in record.files.items() if name in found and found[name] != digest
        ]
    )
    missing = [] if retrained else [name for name in record.files if name not in found]
    for names, what, hint in (
        (added, "was added to the folder since", _ADDED_HINT),
        (changed, "was changed", "restore it from a copy"),
        (missing, "is missing", "restore it from a copy"),
    ):
        if names:
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise TamperedModelError(
                f"the model is not as it was locked: {names[0]}{more} {what}", hint=hint
            )


def bound_files(checkpoint: Checkpoint) -> dict[str, str]:
    """The SHA-256 of every file of a locked model that its record binds, by name; of config and
    index, that of their contents as canonical JSON.
    """
    out = {} if checkpoint.config is None else {CONFIG: _json_digest(checkpoint.config)}
    if checkpoint.index is not None:
        out[INDEX] = _json_digest(checkpoint.index)
    if checkpoint.is_folder:
        for name, path in files_of(checkpoint.path):
            if name not in out and name not in checkpoint.files and not is_unbound(name):
                with wrap_read_errors(path), path.open("rb") as file:
                    out[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return out


def is_unbound(name: str) -> bool:
    """May this file be added to a locked folder, or changed? Nothing loads it: a page about the
    model, a licence, a picture.
    """
    path = PurePosixPath(name.lower())
    return path.suffix in _UNBOUND_SUFFIXES or (
        path.stem in _UNBOUND_STEMS and path.suffix in ("", ".txt")
    )


def _json_digest(value: Mapping[str, Any]) -> str:
    """Of a config or an index without the lock's record. (Not `canonical`, since configs may hold
    NaN and Infinity.)
    """
    plain = {name: field for name, field in value.items() if name != FIELD}
    return hashlib.sha256(
        json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


class _VerifiedCheckpoint(Checkpoint):
    """A checkpoint whose tensors are copied, hashed and compared with known digests each time they
    are read.
    """

    as_stored = False

    def __init__(self, source: Checkpoint, digests: Mapping[str, bytes]) -> None:
        super().__init__(
            source.path, source.files.values(), source.config, source.config_path, source.index
        )
        self.digests = digests

    def _read_bits(self, name: str) -> Any:
        import numpy as np

        array = np.array(super()._read_bits(name))  # a copy: under a map the file may change
        if digest_of(array) != self.digests[name]:
            raise _changed_error(self, name)
        return array

    def __getitem__(self, name: str) -> torch.Tensor:
        import numpy as np
        import torch

        entry = self.entries[name]
        if not entry.nbytes:
            return super().__getitem__(name)
        flat = self._read_bits(name).reshape(-1).view(np.uint8)
        return torch.frombuffer(flat, dtype=getattr(torch, DTYPES[entry.dtype][0])).view(
            entry.shape
        )


def _changed_error(checkpoint: Checkpoint, name: str = "") -> TamperedModelError:
    what = f'"{name}" of {checkpoint.path}' if name else str(checkpoint.path)
    return TamperedModelError(
        f"{what} changed while it was read, after it was checked; nothing was written",
        hint="keep others from writing there, and start again",
    )


def _require_copied(checkpoint: Checkpoint, record: Record, copied: Mapping[str, bytes]) -> None:
    """Hold the files that were copied to the record: they may have changed since it was checked."""
    if record.files is None:
        return
    expected = {name for name in record.files if name not in (CONFIG, INDEX)}
    bound = {name: digest.hex() for name, digest in copied.items() if not is_unbound(name)}
    for name in sorted(expected | bound.keys()):
        if bound.get(name) != record.files.get(name):
            raise _changed_error(checkpoint, name)


def _raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor: NaN is equal to itself here."""
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _locked_source(
    checkpoint: Checkpoint, spec: Spec, g: Element, digests: Mapping[str, bytes]
) -> TransformSource:
    """A locked checkpoint that is to be moved, held to its digests where there are any."""
    read = _VerifiedCheckpoint(checkpoint, digests) if digests else checkpoint
    return TransformSource(read, spec, g.spec, read)


def _open_locked(
    checkpoint: Checkpoint, spec: Spec, key: Key, retrained: bool, threads: int | None
) -> tuple[Record, Element, dict[str, bytes], str | None]:
    """The record of a locked checkpoint, its element and its digests (none if retrained), after
    every check.
    """
    record = require_locked(checkpoint, checkpoint.path)
    g = locked_element(spec, record, key)
    digests = {} if retrained else digests_of(checkpoint.bits, threads)
    cast = verify_tags(record, key, g.spec, header_of(checkpoint), None if retrained else digests)
    check_files(checkpoint, record, retrained=retrained)
    _require_fit(checkpoint, element_spec(spec, record.folded))
    return record, g, digests, cast


def _require_fit(checkpoint: Checkpoint, spec: Spec) -> None:
    faults = check(spec, checkpoint if spec.fixed else checkpoint.entries)
    require(
        faults,
        f'{checkpoint.path} does not fit the spec "{spec.family}"',
        hint="regauge inspect shows what does not fit",
    )


CopyCheck = Callable[[Mapping[str, bytes]], None]  # of the digests of copied files


def _build_job(
    out: Path,
    source: TransformSource,
    g: Element,
    record: Record,
    key: Key | None,
    digests: Mapping[str, bytes],
    copied: CopyCheck | None = None,
    tag: Callable[[Record, Key, Spec, Mapping[str, Any], Mapping[str, bytes]], Record] = add_tags,
) -> Job:
    """The plan of a move of the backbone; locked by `key` afterwards, or plain if there is none.
    `copied` checks the files that were copied.
    """
    thunks = source.thunks(g, "backbone")
    plan = source.plan(
        out, g, thunks, "backbone", OWNER
    )  # a key is for its owner only, and so is what is made with it
    moved = {m.name for m in tensor_transforms(g, "backbone")}
    plan = replace(
        plan, known_digests={name: digest for name, digest in digests.items() if name not in moved}
    )
    config = (
        None
        if source.checkpoint.config is None
        else {**source.checkpoint.config, **source.state_spec.config}
    )
    return Job(
        out,
        _add_record(out, plan, config, record, source.state_spec, key, copied, tag),
        thunks,
        g,
        record,
    )


def _add_record(
    out: Path,
    plan: Plan,
    config: dict[str, Any] | None,
    record: Record,
    spec: Spec,
    key: Key | None,
    check_copied: CopyCheck | None,
    tag: Any,
) -> Plan:
    """The plan with the lock's record in its place, or in none. Its tags are made last, and the
    list of files out of what was copied.
    """
    files = tuple(replace(f, metadata=_drop_record(f.metadata)) for f in plan.files)
    name = f"{out.stem}.{CONFIG}" if is_file_name(out) else CONFIG
    small = dict(plan.small)
    if config is not None and FIELD in config:
        config = {field: value for field, value in config.items() if field != FIELD}
        small[name] = _config_bytes(config)
    if key is None:
        return replace(plan, files=files, small=small)
    header = {n: (dtype, shape) for f in files for n, dtype, shape in f.tensors}
    inside = config is not None and not is_file_name(out)
    made = {
        n: hashlib.sha256(data).hexdigest()
        for n, data in small.items()
        if n not in (name, INDEX) and not is_unbound(n)
    }
    made |= {} if config is None else {CONFIG: _json_digest(config)}
    made |= {} if INDEX not in small else {INDEX: _json_digest(json.loads(small[INDEX]))}

    def bound(copied: Mapping[str, str]) -> Record:
        return replace(
            record,
            files={**made, **{n: digest for n, digest in copied.items() if not is_unbound(n)}},
            version=VERSION,
        )

    def text(final: Record) -> bytes:
        return _config_bytes({**(config or {}), FIELD: final.to_dict()})

    def first(final: Record) -> File:
        return replace(
            files[0],
            metadata={**(files[0].metadata or {}), FIELD: canonical_json(final.to_dict()).decode()},
        )

    def finish(digests: Mapping[str, bytes], copied: Mapping[str, bytes]) -> dict[str, bytes]:
        if check_copied is not None:
            check_copied(copied)
        final = tag(
            bound({n: digest.hex() for n, digest in copied.items()}), key, spec, header, digests
        )
        return {name: text(final)} if inside else {files[0].name: first(final).header()}

    draft = bound(dict.fromkeys(plan.copies, UNKNOWN))  # as long as what takes its place
    if inside:
        return replace(plan, files=files, small={**small, name: text(draft)}, finish=finish)
    return replace(plan, files=(first(draft), *files[1:]), small=small, finish=finish)


def _drop_record(metadata: Mapping[str, str] | None) -> dict[str, str] | None:
    return (
        None
        if metadata is None
        else {name: value for name, value in metadata.items() if name != FIELD}
    )


def _config_bytes(config: Mapping[str, Any]) -> bytes:
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
