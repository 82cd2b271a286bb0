"""`lock`, `unlock`, `rekey` and `reseal` of models: paths, checkpoints, modules or state dicts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, overload

from regauge.checkpoints.outputs import Output, format_spaces
from regauge.checkpoints.transform import prepare_adapter
from regauge.core.threads import within_threads
from regauge.locking import locked_checkpoints
from regauge.locking.keys import KeySource, require_outside, resolve_key
from regauge.locking.lock import (
    DEFAULT_GROUP,
    UNKNOWN,
    Record,
    draft_record,
    lock_state,
    locked_element,
    require_locked,
    require_plain,
    unlock_state,
)
from regauge.models.sources import resolve
from regauge.models.transforms import TransformedModel

if TYPE_CHECKING:
    import torch

    from regauge.core.spec import Spec
    from regauge.locking.keys import Key
    from regauge.locking.locked_checkpoints import LockJob
    from regauge.models.sources import Model, Source

_GROUP_NAMES = {
    "permutation": "permutations",
    "signed": "signed permutations",
    "rotation": "rotations",
}


@dataclass(frozen=True, eq=False)
class LockOutput(Output):
    """A model that `save` writes locked, unlocked, or locked by another key.

    Attributes:
        action: "lock", "unlock", "rekey" or "lock --reseal".
        model: The input.
        key: The key of the output; for `unlock`, that of the input.
        make: Plans the output, given its path and a number of threads.
        outside: Keys whose files must not lie in the output.
    """

    action: str
    model: Model
    key: Key
    make: Callable[..., LockJob]
    outside: tuple[Key, ...] = ()

    def plan(self, out: str | Path, *, threads: int | None = None) -> LockJob:
        out = Path(out)
        for key in self.outside:
            require_outside(key, out)
        job = self.make(out=out, threads=threads)
        facts = {
            "family": job.element.spec.family,
            "out": str(out),
            "group": job.record.group,
            "key": job.record.key,
            "moved": list(job.element.members),
            "folded": job.record.folded,
            "tensors": len(job.thunks),
        }
        return replace(job, facts=facts, notes=(*self.model.notes, *_notes(self.action, job)))

    def __repr__(self) -> str:
        return f"<{self.action} of {self.model.name}, key {self.key.id}>"


@dataclass(frozen=True, eq=False, repr=False)
class LockStateOutput(LockOutput):
    """A model to be locked or unlocked, on disk or in memory.

    Attributes:
        compute: Computes the state.
    """

    compute: Callable[[], dict[str, torch.Tensor]] = dict

    def state(self) -> dict[str, torch.Tensor]:
        """Return the output as a state dict; `lock_state` also returns its spec and record."""
        return self.compute()


@dataclass(frozen=True, eq=False, repr=False)
class ResealOutput(LockOutput):
    """A locked model with a new commitment, written to a new place or in place."""

    def renew(self, *, dry_run: bool = False, threads: int | None = None) -> Record:
        """Renew the commitment in place, in config.json, and return the new record.

        Args:
            dry_run: Check only.
            threads: Number of threads that hash.

        Raises:
            LockError: The record is in the file of the weights, which is not rewritten in place.
        """
        checkpoint, spec = self.model.checkpoint, self.model.spec
        return locked_checkpoints.reseal(
            checkpoint, spec, self.key, threads=threads, dry_run=dry_run
        )


def _notes(action: str, job: LockJob) -> Iterable[str]:
    """Yield remarks on a lock, its group and its limits."""
    record, spec = job.record, job.element.spec
    if action == "unlock" and record.files is None:
        yield (
            "this lock commits to the weights only: the tokenizer and other files are not "
            "verified (regauge lock --reseal adds them)"
        )
    if record.group == "rotation" and action == "lock":
        unlocking = "norms are folded first, and unlocking" if record.folded else "unlocking"
        narrow = sorted(
            name
            for name in job.element.members
            if name.split(".")[0].startswith("stream")
            and spec.spaces[name].group.name == "permutation"
        )
        only = f"; {narrow[0]}: permutations only" if narrow else ""
        yield f"rotations: {unlocking} is exact up to rounding{only}"
    if record.group == "rotation" and action == "unlock":
        folded = ", with folded norms" if record.folded else ""
        yield f"locked by rotations: the plain weights are restored up to rounding{folded}"
    if job.locked_dtype is not None:
        yield f"locked in {job.locked_dtype}, and trained in another dtype since"
    if job.element.members:
        yield (
            f"{spec.family}: {action}s the backbone by {_GROUP_NAMES[record.group]} of "
            f"{format_spaces(job.element.members)}; key {record.key}"
        )


@within_threads
def lock(
    source: Source,
    key: KeySource,
    *,
    group: str = DEFAULT_GROUP,
    spaces: Iterable[str] | None = None,
    spec: Spec | str | Path | None = None,
) -> LockStateOutput:
    """Lock a model: only the key holder can use it. Obfuscation, not encryption.

    The backbone is transformed by the element of the key, so that embedding and head no longer fit
    it. `regauge.locking.lock_state` is the pure function of a spec and a state.

    Args:
        source: The plain model: a path, a hub id, a checkpoint, a module, or a state dict with
            `spec`.
        key: A key for locks, or its file.
        group: The group to sample from: "permutation", "signed" or "rotation".
        spaces: Lock only these spaces. Default: all of the backbone.
        spec: A spec or spec file. Default: that of the model's family.

    Returns:
        The locked model, with `save(out)` and `state()`.

    Raises:
        LockError: The model is locked already, or the lock would have no effect.
        KeyFileError: The key has another purpose, or its file lies in the model or the output.

    Example:
        >>> key = regauge.generate_key()
        >>> _ = regauge.lock("model", key).save("locked")
        >>> _ = regauge.unlock("locked", key).save("plain")
    """
    secret, model = resolve_key(key, "lock"), resolve(source, spec)
    checkpoint = model.checkpoint
    require_outside(secret, checkpoint.path)
    require_plain(checkpoint, checkpoint.path)
    named = None if spaces is None else tuple(spaces)
    draft_record(model.spec, secret, UNKNOWN, group, named)
    make = partial(
        locked_checkpoints.plan_lock, checkpoint, model.spec, key=secret, group=group, spaces=named
    )

    def compute() -> dict[str, torch.Tensor]:
        return lock_state(model.spec, checkpoint, secret, group=group, spaces=named).state

    return LockStateOutput("lock", model, secret, make, (secret,), compute)


@overload
def unlock(
    source: Source,
    key: KeySource,
    *,
    retrained: bool = False,
    adapter: None = None,
    spec: Spec | str | Path | None = None,
) -> LockStateOutput: ...


@overload
def unlock(
    source: Source,
    key: KeySource,
    *,
    retrained: bool = False,
    adapter: str | Path,
    spec: Spec | str | Path | None = None,
) -> TransformedModel: ...


@within_threads
def unlock(
    source: Source,
    key: KeySource,
    *,
    retrained: bool = False,
    adapter: str | Path | None = None,
    spec: Spec | str | Path | None = None,
) -> LockStateOutput | TransformedModel:
    """Unlock a model, or a LoRA adapter that was trained on it.

    The key and the whole model are checked before anything is written. Of an adapter's model, only
    the key and the lock record are checked.

    Args:
        source: The locked model: a path, a checkpoint, or a module.
        key: The key that locked it, or its file.
        retrained: Accept weights that training has changed, and other files beside them.
        adapter: A LoRA adapter that was trained on the locked model (a folder of PEFT, or a file),
            which is brought to the basis of the plain model instead of the model.
        spec: A spec or spec file. Default: that of the model's family.

    Returns:
        The plain model or adapter, with `save(out)` and `state()`.

    Raises:
        WrongKeyError: Another key locked the model.
        TamperedModelError: The model was changed since it was locked; raised by `save` if only the
            data were.
        SpecError: The adapter does not fit the model, or is not a LoRA adapter.

    Example:
        >>> key = regauge.generate_key()
        >>> _ = regauge.lock("model", key).save("locked")
        >>> _ = regauge.unlock("locked", key).save("plain")
        >>> # regauge.unlock("locked", key, adapter="adapter").save("plain-adapter")
    """
    model, secret, record = _open_locked(source, key, spec)
    if adapter is not None:
        return _unlock_adapter(model, secret, record, str(adapter))
    make = partial(
        locked_checkpoints.plan_unlock,
        model.checkpoint,
        model.spec,
        key=secret,
        retrained=retrained,
    )

    def compute() -> dict[str, torch.Tensor]:
        return unlock_state(model.spec, model.checkpoint, record, secret, retrained=retrained)

    return LockStateOutput("unlock", model, secret, make, (), compute)


@within_threads
def rekey(
    source: Source,
    old: KeySource,
    new: KeySource,
    *,
    retrained: bool = False,
    spec: Spec | str | Path | None = None,
) -> LockOutput:
    """Change the key of a locked model in one pass: the plain model is never written.

    Args:
        source: The locked model.
        old: The key that locked it, or its file.
        new: The key of the output, or its file.
        retrained: Accept weights that training has changed.
        spec: A spec or spec file. Default: that of the model's family.

    Returns:
        The model under the new key, with `save(out)`.

    Raises:
        LockError: The two keys are equal.
        WrongKeyError: Another key than `old` locked the model.
        TamperedModelError: The model was changed since it was locked.

    Example:
        >>> # regauge.locking.rekey("locked", "old.key", "new.key").save("relocked")
    """
    model, secret, _ = _open_locked(source, old, spec)
    new = resolve_key(new, "lock")
    require_outside(new, model.checkpoint.path)
    make = partial(
        locked_checkpoints.plan_rekey,
        model.checkpoint,
        model.spec,
        old=secret,
        new=new,
        retrained=retrained,
    )
    return LockOutput("rekey", model, new, make, (secret, new))


@within_threads
def reseal(
    source: Source, key: KeySource, *, spec: Spec | str | Path | None = None
) -> ResealOutput:
    """Renew the commitment of a locked model that was trained since.

    Args:
        source: The locked model.
        key: The key that locked it, or its file.
        spec: A spec or spec file. Default: that of the model's family.

    Returns:
        The model with new tags: `renew()` writes them in place, `save(out)` a new model.

    Raises:
        WrongKeyError: Another key locked the model.

    Example:
        >>> # regauge.locking.reseal("trained", key).renew()
    """
    model, secret, _ = _open_locked(source, key, spec)
    require_outside(secret, model.checkpoint.path)
    make = partial(locked_checkpoints.plan_reseal, model.checkpoint, model.spec, key=secret)
    return ResealOutput("lock --reseal", model, secret, make, (secret,))


def _unlock_adapter(model: Model, key: Key, record: Record, adapter: str) -> TransformedModel:
    """Return an adapter of a locked model in the basis of the plain one."""
    g = ~locked_element(model.spec, record, key)
    prepared, h = prepare_adapter(adapter, g)
    mode = model.checkpoint.mode & prepared.checkpoint.mode
    unlocked = TransformedModel(prepared, h, "backbone", model.checkpoint, mode, adapter=adapter)
    notes = [*model.notes, str(unlocked)]
    if record.folded:
        notes.append(
            "locked with folded norms: the adapter fits the output of regauge unlock, but not the "
            "original model, whose norms are not folded"
        )
    return replace(unlocked, notes=tuple(notes))


def _open_locked(
    source: Source, key: KeySource, spec: Spec | str | Path | None
) -> tuple[Model, Key, Record]:
    """Open a locked model, and check its key and its record."""
    secret, model = resolve_key(key, "lock"), resolve(source, spec)
    record = require_locked(model.checkpoint, model.checkpoint.path)
    locked_element(model.spec, record, secret)
    return model, secret, record
