"""Locks on checkpoints: lock, unlock, rekey and reseal, streamed through the one engine that writes (`regauge.writing`).

A `Job` is a plan that was checked against the key and the file's tags: nothing is written before that, and the output appears whole or not at all.
The record of the lock is the last thing that is made, out of the digests of all that was written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from regauge.action import moves
from regauge.checkpoint import Checkpoint
from regauge.elements import Element, identity
from regauge.errors import LockError
from regauge.files import OWNER, write_bytes
from regauge.keys import Key, canonical
from regauge.locking import (
    DEFAULT,
    FIELD,
    Record,
    described_spec,
    draft,
    header_of,
    locked_element,
    model_digest,
    require_locked,
    require_plain,
    tagged,
    verify_tags,
)
from regauge.moved import Moving, moving
from regauge.planning import File, Plan, check_target, is_file_name
from regauge.spec import Spec, check, require
from regauge.writing import Written, digests_of, write_plan


@dataclass(frozen=True)
class Job:
    """What is to be written, by which element, and the record that it will have (its tags still to come), or that it had."""

    out: Path
    plan: Plan
    thunks: Mapping[str, Callable[[], Any]]
    element: Element
    record: Record
    cast: str | None = None  # the dtype it was locked in, where training has changed that

    def write(self, *, progress: Callable[[int, int], None] | None = None, resume: bool = False, threads: int | None = None) -> Written:
        return write_plan(self.out, self.plan, self.thunks, progress=progress, resume=resume, threads=threads)


def plan_lock(
    checkpoint: Checkpoint,
    spec: Spec,
    out: Path,
    key: Key,
    *,
    group: str = DEFAULT,
    spaces: Iterable[str] | None = None,
    threads: int | None = None,
) -> Job:
    """Plan to write a locked checkpoint. The plain one is read once, for its digest."""
    key.require("lock")
    check_target(out, checkpoint.path)
    require_plain(checkpoint, checkpoint.path)
    _require_fit(checkpoint, spec)
    draft(spec, key, "0" * 64, group, spaces)  # what can be refused is refused before all is read
    digests = digests_of(checkpoint.bits, threads)
    described, record = draft(spec, key, model_digest(header_of(checkpoint), digests), group, spaces)
    g = locked_element(described, record, key, tags=False)
    source = moving(checkpoint, spec, record.folded)
    return _job(out, source, g, record, key, {} if record.folded else digests)


def plan_unlock(checkpoint: Checkpoint, spec: Spec, out: Path, key: Key, *, retrained: bool = False, threads: int | None = None) -> Job:
    """Plan to write the plain checkpoint. The key and the file's tags are checked here: all of it is read, unless it was `retrained`."""
    key.require("lock")
    check_target(out, checkpoint.path)
    record, g, _, cast = _opened(checkpoint, spec, key, retrained, threads)
    source = Moving(checkpoint, spec, g.spec, checkpoint)
    return replace(_job(out, source, ~g, record, None, {}), cast=cast)


def plan_rekey(checkpoint: Checkpoint, spec: Spec, out: Path, old: Key, new: Key, *, retrained: bool = False, threads: int | None = None) -> Job:
    """Plan to write the checkpoint locked by another key, in one move from one locked form to the other: the plain model is never written."""
    new.require("lock")
    check_target(out, checkpoint.path)
    record, g, digests, cast = _opened(checkpoint, spec, old, retrained, threads)
    if new == old:
        raise LockError(f"the model is locked by the key {new.id} already", hint="make another one with regauge keygen")
    changed = replace(record, key=new.id)
    to = locked_element(spec, changed, new, tags=False) @ ~g
    source = Moving(checkpoint, spec, g.spec, checkpoint)
    return replace(_job(out, source, to, changed, new, digests), cast=cast)


def plan_reseal(checkpoint: Checkpoint, spec: Spec, out: Path, key: Key, *, threads: int | None = None) -> Job:
    """Plan to write the same locked checkpoint, trained since it was locked, with tags that fit its data."""
    check_target(out, checkpoint.path)
    record, g, digests, cast = _opened(checkpoint, spec, key, True, threads)
    source = Moving(checkpoint, spec, g.spec, checkpoint)
    return replace(_job(out, source, identity(g.spec), record, key, digests), cast=cast)


def reseal(checkpoint: Checkpoint, spec: Spec, key: Key, *, threads: int | None = None, dry_run: bool = False) -> Record:
    """Renew the tags of a locked folder that was trained, in place: its config.json is replaced, whole or not at all. A dry run only checks."""
    record, g, _, _ = _opened(checkpoint, spec, key, True, threads)
    if checkpoint.config is None or checkpoint.config_path is None or FIELD not in checkpoint.config:
        raise LockError(f"{checkpoint.path} keeps its lock record in the weights' file, which is not rewritten in place", hint="give -o OUT")
    sealed = tagged(record, key, g.spec, header_of(checkpoint), digests_of(checkpoint.bits, threads))
    if not dry_run:
        write_bytes(checkpoint.config_path, _text({**checkpoint.config, FIELD: sealed.to_json()}))
    return sealed


def verify_files(checkpoint: Checkpoint, spec: Spec, key: Key, *, threads: int | None = None) -> Record:
    """Refuse a locked checkpoint that is not, in every number, as it was locked (or resealed) by this key. All of it is read, nothing is written."""
    return _opened(checkpoint, spec, key, False, threads)[0]


def _opened(
    checkpoint: Checkpoint, spec: Spec, key: Key, retrained: bool, threads: int | None
) -> tuple[Record, Element, dict[str, bytes], str | None]:
    """The record of a locked checkpoint, its element and its digests (none if retrained), after every check."""
    record = require_locked(checkpoint, checkpoint.path)
    g = locked_element(spec, record, key)
    digests = {} if retrained else digests_of(checkpoint.bits, threads)
    cast = verify_tags(record, key, g.spec, header_of(checkpoint), None if retrained else digests)
    _require_fit(checkpoint, described_spec(spec, record.folded))
    return record, g, digests, cast


def _require_fit(checkpoint: Checkpoint, spec: Spec) -> None:
    faults = check(spec, checkpoint if spec.fixed else checkpoint.entries)
    require(faults, f'{checkpoint.path} does not fit the spec "{spec.family}"', hint="regauge inspect shows what does not fit")


def _job(out: Path, source: Moving, g: Element, record: Record, key: Key | None, digests: Mapping[str, bytes]) -> Job:
    """The plan of a move of the backbone; locked by `key` afterwards, or plain if there is none."""
    thunks = source.thunks(g, "backbone")
    plan = source.plan(out, g, thunks, "backbone", OWNER)  # a key is for its owner only, and so is what is made with it
    moved = {m.name for m in moves(g, "backbone")}
    plan = replace(plan, known={name: digest for name, digest in digests.items() if name not in moved})
    config = None if source.checkpoint.config is None else {**source.checkpoint.config, **source.described.config}
    return Job(out, _recorded(out, plan, config, record, source.described, key), thunks, g, record)


def _recorded(out: Path, plan: Plan, config: dict[str, Any] | None, record: Record, spec: Spec, key: Key | None) -> Plan:
    """The plan with the lock's record in its place, or in none. Its tags are made last."""
    files = tuple(replace(f, metadata=_without(f.metadata)) for f in plan.files)
    name = f"{out.stem}.config.json" if is_file_name(out) else "config.json"
    small = dict(plan.small)
    if config is not None and FIELD in config:
        config = {field: value for field, value in config.items() if field != FIELD}
        small[name] = _text(config)
    if key is None:
        return replace(plan, files=files, small=small)
    header = {n: (dtype, shape) for f in files for n, dtype, shape in f.tensors}
    inside = config is not None and not is_file_name(out)

    def text(final: Record) -> bytes:
        return _text({**(config or {}), FIELD: final.to_json()})

    def first(final: Record) -> File:
        return replace(files[0], metadata={**(files[0].metadata or {}), FIELD: canonical(final.to_json()).decode()})

    def finish(digests: Mapping[str, bytes]) -> dict[str, bytes]:
        final = tagged(record, key, spec, header, digests)
        return {name: text(final)} if inside else {files[0].name: first(final).header()}

    if inside:
        return replace(plan, files=files, small={**small, name: text(record)}, finish=finish)
    return replace(plan, files=(first(record), *files[1:]), small=small, finish=finish)


def _without(metadata: Mapping[str, str] | None) -> dict[str, str] | None:
    return None if metadata is None else {name: value for name, value in metadata.items() if name != FIELD}


def _text(config: Mapping[str, Any]) -> bytes:
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
