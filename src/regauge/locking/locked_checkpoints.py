"""Lock, unlock, rekey and reseal checkpoints, streamed by `regauge.checkpoints.writer`.

A `LockJob` is a plan that was checked against the key and the tags of the file. Nothing is written
before these checks, and the output appears atomically. The record of the lock is computed last,
from the digests of all that was written.

The checked bytes are the used bytes, even if a file is rewritten in the meantime. If the digest of
the plain weights is known, the output of `unlock` is compared with it before it appears; otherwise
each tensor is copied, hashed and compared when it is read.

The record binds the other files of the folder: none may be changed, removed or added. Hidden files,
and files that are never loaded (`is_unbound`), are not bound.
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
from regauge.checkpoints.outputs import Job
from regauge.checkpoints.plan import File, Plan, check_target, files_of, is_file_name
from regauge.checkpoints.reader import INDEX, LOCK_FIELD, Checkpoint
from regauge.checkpoints.transform import TransformSource, prepare_source
from regauge.checkpoints.writer import digest_of, digests_of
from regauge.core.action import tensor_transforms
from regauge.core.canonical import canonical_json
from regauge.core.check import check, require
from regauge.core.element import Element, identity
from regauge.core.spec import Spec
from regauge.errors import Hint, LockError, TamperedModelError
from regauge.locking.keys import Key
from regauge.locking.lock import (
    DEFAULT_GROUP,
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
_ADDED_HINT = Hint(
    "remove it, or bind it with regauge.locking.reseal if you added it yourself",
    cli="remove it, or bind it with regauge lock --reseal if you added it yourself",
)


@dataclass(frozen=True, repr=False)
class LockJob(Job):
    """A checked operation on a locked checkpoint, ready to write.

    Attributes:
        element: The element that transforms the backbone.
        record: The record of the output without its tags; for `plan_unlock`, that of the input.
        locked_dtype: The dtype of the locked weights, if training has changed it.
    """

    element: Element
    record: Record
    locked_dtype: str | None = None


def plan_lock(
    checkpoint: Checkpoint,
    spec: Spec,
    out: Path,
    key: Key,
    *,
    group: str = DEFAULT_GROUP,
    spaces: Iterable[str] | None = None,
    threads: int | None = None,
) -> LockJob:
    """Plan a locked checkpoint. The plain one is read once, for its digest.

    Args:
        checkpoint: The plain checkpoint.
        spec: Its spec.
        out: The output folder or .safetensors file.
        key: A key for locks.
        group: The group to sample from: "permutation", "signed" or "rotation".
        spaces: Lock only these spaces. Default: all of the backbone.
        threads: Number of threads that hash.

    Raises:
        LockError: The checkpoint is locked already, or the lock would have no effect.
    """
    key.require("lock")
    check_target(out, checkpoint.path)
    require_plain(checkpoint, checkpoint.path)
    _require_fit(checkpoint, spec)
    draft_record(spec, key, "0" * 64, group, spaces)  # raises before the checkpoint is read
    digests = digests_of(checkpoint.bits, threads)
    locked_spec, record = draft_record(
        spec, key, model_digest(header_of(checkpoint), digests), group, spaces
    )
    g = locked_element(locked_spec, record, key, tags=False)
    source = prepare_source(_verify_reads(checkpoint, digests), spec, record.folded)
    return _build_job(out, source, g, record, key, {} if record.folded else digests)


def plan_unlock(
    checkpoint: Checkpoint,
    spec: Spec,
    out: Path,
    key: Key,
    *,
    retrained: bool = False,
    threads: int | None = None,
) -> LockJob:
    """Plan the plain checkpoint of a locked one, after checking the key and the tags.

    Args:
        checkpoint: The locked checkpoint.
        spec: Its spec.
        out: The output folder or .safetensors file.
        key: The key that locked it.
        retrained: Accept weights that training has changed. Otherwise all data are read and
            compared with the tags.
        threads: Number of threads that hash.

    Raises:
        WrongKeyError: Another key locked the checkpoint.
        TamperedModelError: The checkpoint was changed since it was locked.
    """
    key.require("lock")
    check_target(out, checkpoint.path)
    record, g, digests, locked_dtype = _open_locked(checkpoint, spec, key, retrained, threads)
    # Compare the output with its known digest; otherwise compare each tensor that is read.
    compare_output = not retrained and record.plain != UNKNOWN
    source = _locked_source(checkpoint, spec, g, {} if compare_output else digests)
    job = _build_job(out, source, ~g, record, None, {})
    header = {
        name: (dtype, shape) for file in job.plan.files for name, dtype, shape in file.tensors
    }

    def finish(written: Mapping[str, bytes], copied: Mapping[str, bytes]) -> dict[str, bytes]:
        if compare_output and model_digest(header, written) != record.plain:
            raise _changed_error(checkpoint)
        if not retrained:
            _require_copied(checkpoint, record, copied)
        return {}

    known = {} if compare_output else dict.fromkeys(header, b"")  # these digests are not used
    return replace(
        job, plan=replace(job.plan, finish=finish, known_digests=known), locked_dtype=locked_dtype
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
) -> LockJob:
    """Plan the same checkpoint locked by another key.

    One element maps the old locked form to the new one: the plain model is never written.

    Args:
        checkpoint: The locked checkpoint.
        spec: Its spec.
        out: The output folder or .safetensors file.
        old: The key that locked it.
        new: The key of the output.
        retrained: Accept weights that training has changed.
        threads: Number of threads that hash.

    Raises:
        LockError: The two keys are equal.
        WrongKeyError: Another key than `old` locked the checkpoint.
        TamperedModelError: The checkpoint was changed since it was locked.
    """
    new.require("lock")
    check_target(out, checkpoint.path)
    record, g, digests, locked_dtype = _open_locked(checkpoint, spec, old, retrained, threads)
    if new == old:
        raise LockError(
            f"the model is locked by the key {new.id} already",
            hint=Hint(
                "generate another key with regauge.generate_key()",
                cli="generate another key with regauge keygen",
            ),
        )
    new_record = replace(
        record, key=new.id, version=VERSION, plain=UNKNOWN if retrained else record.plain
    )
    transition = locked_element(spec, new_record, new, tags=False) @ ~g
    job = _build_job(
        out,
        _locked_source(checkpoint, spec, g, digests),
        transition,
        new_record,
        new,
        digests,
        None if retrained else partial(_require_copied, checkpoint, record),
    )
    return replace(job, locked_dtype=locked_dtype)


def plan_reseal(
    checkpoint: Checkpoint, spec: Spec, out: Path, key: Key, *, threads: int | None = None
) -> LockJob:
    """Plan the same locked checkpoint with new tags, after training.

    Args:
        checkpoint: The locked checkpoint, trained since it was locked.
        spec: Its spec.
        out: The output folder or .safetensors file.
        key: The key that locked it.
        threads: Number of threads that hash.
    """
    check_target(out, checkpoint.path)
    record, g, _, locked_dtype = _open_locked(checkpoint, spec, key, True, threads)
    job = _build_job(
        out,
        _locked_source(checkpoint, spec, g, {}),
        identity(g.spec),
        record,
        key,
        {},
        tag=partial(renew_tags, record),
    )
    return replace(job, locked_dtype=locked_dtype)


def reseal(
    checkpoint: Checkpoint,
    spec: Spec,
    key: Key,
    *,
    threads: int | None = None,
    dry_run: bool = False,
) -> Record:
    """Renew the tags of a locked folder in place, after training.

    Its config.json is replaced atomically.

    Args:
        checkpoint: The locked checkpoint.
        spec: Its spec.
        key: The key that locked it.
        threads: Number of threads that hash.
        dry_run: Check only.

    Returns:
        The new record.

    Raises:
        LockError: The record is in the file of the weights, which is not rewritten in place.
    """
    record, g, _, _ = _open_locked(checkpoint, spec, key, True, threads)
    if (
        checkpoint.config is None
        or checkpoint.config_path is None
        or LOCK_FIELD not in checkpoint.config
    ):
        raise LockError(
            f"{checkpoint.path} stores its lock record in the file of the weights, which is not "
            "rewritten in place",
            hint=Hint("pass out", cli="pass -o OUT"),
        )
    bound = replace(record, version=VERSION, files=bound_files(checkpoint))
    resealed = renew_tags(
        record, bound, key, g.spec, header_of(checkpoint), digests_of(checkpoint.bits, threads)
    )
    if not dry_run:
        write_bytes(
            checkpoint.config_path,
            _config_bytes({**checkpoint.config, LOCK_FIELD: resealed.to_dict()}),
        )
    return resealed


def verify_files(
    checkpoint: Checkpoint, spec: Spec, key: Key, *, threads: int | None = None
) -> Record:
    """Raise if a tensor or file of a locked checkpoint was changed since it was locked or resealed.

    Nothing is written.

    Returns:
        The record of the lock.

    Raises:
        WrongKeyError: Another key locked the checkpoint.
        TamperedModelError: A tensor or file was changed.
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
    """Verify the files of a locked model, and compare the model in memory with them.

    A file may have been rewritten after it was loaded, or before it was checked. Tensors are
    compared in the dtype of the model. Tensors that the files lack (another head) are skipped.

    Args:
        model: The model that was loaded from the files.
        checkpoint: The locked checkpoint.
        spec: Its spec.
        key: The key that locked it.
        threads: Number of threads that hash.

    Returns:
        The record of the lock.

    Raises:
        WrongKeyError: Another key locked the checkpoint.
        TamperedModelError: The files were changed, or the model differs from them.
    """
    import torch

    record, _, digests, _ = _open_locked(checkpoint, spec, key, False, threads)
    verified = _VerifiedCheckpoint(checkpoint, digests)
    state = model.state_dict()
    prefix = f"{getattr(model, 'base_model_prefix', '') or ''}."
    n_compared = 0
    for name in verified:
        tensor = next(
            (state[n] for n in (name, prefix + name, name.removeprefix(prefix)) if n in state), None
        )
        if tensor is None or tensor.is_meta:
            continue
        n_compared += 1
        expected = verified[name].to(tensor.dtype)
        if expected.shape != tensor.shape or not torch.equal(
            _raw_bytes(expected), _raw_bytes(tensor.detach().cpu().contiguous())
        ):
            raise TamperedModelError(
                f'"{name}" in memory differs from {checkpoint.path}',
                hint="load the model again; omit files= for a model that was trained since",
            )
    if not n_compared:
        raise TamperedModelError(
            f"no tensor in memory has a name from {checkpoint.path}",
            hint="pass the folder that the model was loaded from",
        )
    return record


def check_files(
    checkpoint: Checkpoint, record: Record | None = None, *, retrained: bool = True
) -> None:
    """Raise if the files beside the weights of a locked folder differ from its record.

    Args:
        checkpoint: The locked model.
        record: Its record, if the caller has authenticated it. Default: the stored one, which
            detects added files but not a forged record.
        retrained: Whether the model may have been saved again, with other files. Then only new
            adapters and new code raise, which would change the loaded model.

    Raises:
        TamperedModelError: A file was added, changed or removed.
    """
    record = record or record_of(checkpoint)
    if record is None or record.files is None or not checkpoint.sources:
        return
    current = bound_files(checkpoint)
    added = [name for name in current if name not in record.files]
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
            name
            for name, digest in record.files.items()
            if name in current and current[name] != digest
        ]
    )
    missing = [] if retrained else [name for name in record.files if name not in current]
    for names, event, hint in (
        (added, "was added to the folder", _ADDED_HINT),
        (changed, "was changed", "restore it from a copy"),
        (missing, "is missing", "restore it from a copy"),
    ):
        if names:
            others = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise TamperedModelError(
                f"the model was changed since it was locked: {names[0]}{others} {event}", hint=hint
            )


def bound_files(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the SHA-256 of every file of a locked model that its record binds, by name.

    For config and index, it is that of their content as canonical JSON.
    """
    digests = {} if checkpoint.config is None else {CONFIG: _json_digest(checkpoint.config)}
    if checkpoint.index is not None:
        digests[INDEX] = _json_digest(checkpoint.index)
    if checkpoint.is_folder:
        for name, path in files_of(checkpoint.path):
            if name not in digests and name not in checkpoint.files and not is_unbound(name):
                with wrap_read_errors(path), path.open("rb") as file:
                    digests[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def is_unbound(name: str) -> bool:
    """Return whether a file may be added to a locked folder or changed.

    Such files are never loaded: model cards, licences, pictures.
    """
    path = PurePosixPath(name.lower())
    return path.suffix in _UNBOUND_SUFFIXES or (
        path.stem in _UNBOUND_STEMS and path.suffix in ("", ".txt")
    )


def _json_digest(value: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a config or an index, without the record of the lock.

    Not `canonical_json`: configs may hold NaN and Infinity.
    """
    plain = {name: field for name, field in value.items() if name != LOCK_FIELD}
    return hashlib.sha256(
        json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


class _VerifiedCheckpoint(Checkpoint):
    """A checkpoint that hashes every tensor it reads and compares it with a known digest.

    Tensors are copied first.
    """

    as_stored = False

    def __init__(self, source: Checkpoint, digests: Mapping[str, bytes]) -> None:
        super().__init__(
            source.path, source.files.values(), source.config, source.config_path, source.index
        )
        self.digests = digests

    def _read_bits(self, name: str) -> Any:
        import numpy as np

        array = np.array(super()._read_bits(name))  # a copy: a mapped file may change
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


def _verify_reads(checkpoint: Checkpoint, digests: Mapping[str, bytes]) -> Checkpoint:
    """Return a checkpoint whose reads are verified, if its files may change and have digests."""
    in_files = bool(digests) and bool(checkpoint.sources)
    return _VerifiedCheckpoint(checkpoint, digests) if in_files else checkpoint


def _changed_error(checkpoint: Checkpoint, name: str = "") -> TamperedModelError:
    subject = f'"{name}" of {checkpoint.path}' if name else str(checkpoint.path)
    return TamperedModelError(
        f"{subject} changed while it was read, after it was checked; nothing was written",
        hint="prevent other processes from writing there, and start again",
    )


def _require_copied(checkpoint: Checkpoint, record: Record, copied: Mapping[str, bytes]) -> None:
    """Raise if the copied files differ from the record: they may have changed since the check."""
    if record.files is None:
        return
    expected = {name for name in record.files if name not in (CONFIG, INDEX)}
    bound = {name: digest.hex() for name, digest in copied.items() if not is_unbound(name)}
    for name in sorted(expected | bound.keys()):
        if bound.get(name) != record.files.get(name):
            raise _changed_error(checkpoint, name)


def _raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, among which NaN equals itself."""
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _locked_source(
    checkpoint: Checkpoint, spec: Spec, g: Element, digests: Mapping[str, bytes]
) -> TransformSource:
    """Return a locked checkpoint as the source of a transform, verified if digests are given."""
    verified = _verify_reads(checkpoint, digests)
    return TransformSource(verified, spec, g.spec, verified)


def _open_locked(
    checkpoint: Checkpoint, spec: Spec, key: Key, retrained: bool, threads: int | None
) -> tuple[Record, Element, dict[str, bytes], str | None]:
    """Check a locked checkpoint.

    Returns:
        Its record, its element, the digests of its tensors (empty if retrained), and the dtype of
        the locked weights if training has changed it.
    """
    record = require_locked(checkpoint, checkpoint.path)
    g = locked_element(spec, record, key)
    digests = {} if retrained else digests_of(checkpoint.bits, threads)
    locked_dtype = verify_tags(
        record, key, g.spec, header_of(checkpoint), None if retrained else digests
    )
    check_files(checkpoint, record, retrained=retrained)
    _require_fit(checkpoint, element_spec(spec, record.folded))
    return record, g, digests, locked_dtype


def _require_fit(checkpoint: Checkpoint, spec: Spec) -> None:
    faults = check(spec, checkpoint if spec.fixed else checkpoint.entries)
    require(
        faults,
        f'{checkpoint.path} does not fit the spec "{spec.family}"',
        hint=Hint(
            "regauge.check(spec, state) lists the differences",
            cli="regauge inspect lists the differences",
        ),
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
) -> LockJob:
    """Build the job that transforms the backbone.

    Args:
        out: The output.
        source: The checkpoint to transform.
        g: The element.
        record: The record of the output, without its tags.
        key: The key of the output; None for a plain output.
        digests: Digests of the source's tensors, for those that are not transformed.
        copied: Checks the digests of the copied files.
        tag: Adds the tags to the record.
    """
    thunks = source.thunks(g, "backbone")
    # A key is readable by its owner only, and so is an output made with it.
    plan = source.plan(out, g, thunks, "backbone", OWNER)
    transformed = {m.name for m in tensor_transforms(g, "backbone")}
    plan = replace(
        plan,
        known_digests={name: digest for name, digest in digests.items() if name not in transformed},
    )
    config = (
        None
        if source.checkpoint.config is None
        else {**source.checkpoint.config, **source.state_spec.config}
    )
    return LockJob(
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
    """Add the record of the lock to a plan, or remove it if `key` is None.

    The tags and the list of copied files are computed last (`Plan.finish`).
    """
    files = tuple(replace(f, metadata=_drop_record(f.metadata)) for f in plan.files)
    config_name = f"{out.stem}.{CONFIG}" if is_file_name(out) else CONFIG
    small = dict(plan.small)
    if config is not None and LOCK_FIELD in config:
        config = {field: value for field, value in config.items() if field != LOCK_FIELD}
        small[config_name] = _config_bytes(config)
    if key is None:
        return replace(plan, files=files, small=small)
    header = {n: (dtype, shape) for f in files for n, dtype, shape in f.tensors}
    in_config = config is not None and not is_file_name(out)
    small_digests = {
        n: hashlib.sha256(data).hexdigest()
        for n, data in small.items()
        if n not in (config_name, INDEX) and not is_unbound(n)
    }
    small_digests |= {} if config is None else {CONFIG: _json_digest(config)}
    small_digests |= {} if INDEX not in small else {INDEX: _json_digest(json.loads(small[INDEX]))}

    def bind_files(copied: Mapping[str, str]) -> Record:
        return replace(
            record,
            files={
                **small_digests,
                **{n: digest for n, digest in copied.items() if not is_unbound(n)},
            },
            version=VERSION,
        )

    def config_with(final: Record) -> bytes:
        return _config_bytes({**(config or {}), LOCK_FIELD: final.to_dict()})

    def file_with(final: Record) -> File:
        return replace(
            files[0],
            metadata={
                **(files[0].metadata or {}),
                LOCK_FIELD: canonical_json(final.to_dict()).decode(),
            },
        )

    def finish(digests: Mapping[str, bytes], copied: Mapping[str, bytes]) -> dict[str, bytes]:
        if check_copied is not None:
            check_copied(copied)
        final = tag(
            bind_files({n: digest.hex() for n, digest in copied.items()}),
            key,
            spec,
            header,
            digests,
        )
        return (
            {config_name: config_with(final)}
            if in_config
            else {files[0].name: file_with(final).header()}
        )

    placeholder = bind_files(dict.fromkeys(plan.copies, UNKNOWN))  # as long as the final record
    if in_config:
        return replace(
            plan, files=files, small={**small, config_name: config_with(placeholder)}, finish=finish
        )
    return replace(plan, files=(file_with(placeholder), *files[1:]), small=small, finish=finish)


def _drop_record(metadata: Mapping[str, str] | None) -> dict[str, str] | None:
    """Return the metadata of a file without the record of a lock."""
    return (
        None
        if metadata is None
        else {name: value for name, value in metadata.items() if name != LOCK_FIELD}
    )


def _config_bytes(config: Mapping[str, Any]) -> bytes:
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
