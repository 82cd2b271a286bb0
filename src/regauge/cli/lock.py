"""`regauge lock`, `unlock` and `rekey`: obfuscate a model with a key, restore it,
change the key.
"""

from __future__ import annotations

import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regauge.cli import options
from regauge.cli.console import info, print_json
from regauge.cli.run import set_threads

if TYPE_CHECKING:
    from regauge.locking.locked_checkpoints import Job

VERSION = 1
_NOT_ENCRYPTION = (
    "a lock is obfuscation, not encryption: docs/lock.md lists attacks that undo it without the key"
)
_GROUP_NAMES = {
    "permutation": "permutations",
    "signed": "signed permutations",
    "rotation": "rotations",
}

Resume = Annotated[bool, typer.Option("--resume", help="Resume an interrupted run.")]
Retrained = Annotated[
    bool,
    typer.Option(
        "--retrained",
        help="The model was trained after locking: check its structure, not its data.",
    ),
]


class Group(StrEnum):
    """Groups that a lock may sample from."""

    permutation = "permutation"
    signed = "signed"
    rotation = "rotation"


def lock(
    model: options.Model,
    key: options.KeyFile,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="OUT", help="New folder (or .safetensors file)."),
    ] = None,
    group: Annotated[
        Group | None,
        typer.Option("--group", help="Subgroup to sample the element from. Default: signed."),
    ] = None,
    spaces: Annotated[
        str | None,
        typer.Option(
            "--spaces", metavar="A,B", help="Spaces to transform. Default: all of the backbone."
        ),
    ] = None,
    reseal: Annotated[
        bool,
        typer.Option(
            "--reseal",
            help="Renew the commitment of a locked MODEL that was trained since, in place or to "
            "OUT.",
        ),
    ] = False,
    passphrase_file: options.PassphraseFile = None,
    spec: options.SpecFile = None,
    resume: Resume = False,
    dry_run: options.DryRun = False,
    json: options.Json = False,
    threads: options.Threads = None,
    verbose: options.Verbose = 0,
) -> int:
    """Lock a model: transform its backbone by a secret element, so that only the key holder can use
    it. Obfuscation, not encryption.
    """
    if reseal and (group is not None or spaces is not None):
        raise typer.BadParameter("--group and --spaces apply to a new lock, not to --reseal")
    if not reseal and out is None:
        raise typer.BadParameter("pass -o OUT, the new locked model")
    if out is None and resume:
        raise typer.BadParameter("--resume requires -o OUT")
    started = time.monotonic()

    from regauge.cli.keygen import read_key, require_outside
    from regauge.cli.model import open_model
    from regauge.locking import locked_checkpoints
    from regauge.locking.lock import DEFAULT_GROUP, LOCKS

    secret = read_key(key, "lock", passphrase_file)
    checkpoint, model_spec = open_model(model, spec)
    require_outside(key, checkpoint.path, *([] if out is None else [out]))
    if reseal:
        if out is not None:
            job = locked_checkpoints.plan_reseal(
                checkpoint, model_spec, out, secret, threads=threads
            )
            return _write_job(job, "lock --reseal", started, resume, dry_run, json, threads)
        record = locked_checkpoints.reseal(
            checkpoint, model_spec, secret, threads=threads, dry_run=dry_run
        )
        action = "dry run: this would renew" if dry_run else "renewed"
        info(f"{action} the commitment of {checkpoint.path}, locked by the key {record.key}")
        if json:
            report = {
                "version": VERSION,
                "command": "lock --reseal",
                "out": str(checkpoint.path),
                "record": record.to_dict(),
                "dry_run": dry_run,
            }
            print_json(report)
        return 0
    assert out is not None
    group_name = (group or Group(DEFAULT_GROUP)).value
    space_names = (
        [s.strip() for s in spaces.split(",") if s.strip()] if spaces is not None else None
    )
    if LOCKS[group_name].fold:
        set_threads(threads)
    job = locked_checkpoints.plan_lock(
        checkpoint, model_spec, out, secret, group=group_name, spaces=space_names, threads=threads
    )
    if LOCKS[group_name].fold:
        unlocking = "norms are folded first, and unlocking" if job.record.folded else "unlocking"
        narrow = sorted(
            n
            for n in job.element.members
            if n.split(".")[0].startswith("stream")
            and job.element.spec.spaces[n].group.name == "permutation"
        )
        info(
            f"rotations: {unlocking} is exact up to "
            f"rounding{f'; {narrow[0]}: permutations only' if narrow else ''}"
        )
    code = _write_job(job, "lock", started, resume, dry_run, json, threads)
    info(_NOT_ENCRYPTION)
    return code


def unlock(
    model: options.LockedModel,
    key: options.KeyFile,
    out: options.Out,
    retrained: Retrained = False,
    passphrase_file: options.PassphraseFile = None,
    spec: options.SpecFile = None,
    resume: Resume = False,
    dry_run: options.DryRun = False,
    json: options.Json = False,
    threads: options.Threads = None,
    verbose: options.Verbose = 0,
) -> int:
    """Unlock a model. Checks the key and the whole file before writing anything."""
    started = time.monotonic()
    from regauge.cli.keygen import read_key
    from regauge.cli.model import open_model
    from regauge.locking import locked_checkpoints

    secret = read_key(key, "lock", passphrase_file)
    checkpoint, model_spec = open_model(model, spec)
    job = locked_checkpoints.plan_unlock(
        checkpoint, model_spec, out, secret, retrained=retrained, threads=threads
    )
    if job.record.files is None:
        info(
            "this lock commits to the weights only: the tokenizer and other files are not "
            "verified (regauge lock --reseal adds them)"
        )
    if job.record.group == "rotation":
        set_threads(threads)
        info(
            "locked by rotations: the plain weights are restored up to "
            f"rounding{', with folded norms' if job.record.folded else ''}"
        )
    return _write_job(job, "unlock", started, resume, dry_run, json, threads)


def rekey(
    model: options.LockedModel,
    key: Annotated[Path, typer.Option("-k", "--key", metavar="OLD", help="Key that locks it now.")],
    new_key_file: Annotated[Path, typer.Option("--to", metavar="NEW", help="Key to lock it with.")],
    out: options.Out,
    retrained: Retrained = False,
    passphrase_file: options.PassphraseFile = None,
    to_passphrase_file: Annotated[
        Path | None,
        typer.Option(
            "--to-passphrase-file", metavar="F", help="File with the new key's passphrase."
        ),
    ] = None,
    spec: options.SpecFile = None,
    resume: Resume = False,
    dry_run: options.DryRun = False,
    json: options.Json = False,
    threads: options.Threads = None,
    verbose: options.Verbose = 0,
) -> int:
    """Change the key of a locked model in one pass: the plain model is never written."""
    started = time.monotonic()
    from regauge.cli.keygen import read_key, require_outside
    from regauge.cli.model import open_model
    from regauge.locking import locked_checkpoints

    old_key = read_key(key, "lock", passphrase_file)
    new_key = read_key(new_key_file, "lock", to_passphrase_file)
    checkpoint, model_spec = open_model(model, spec)
    require_outside(key, out)
    require_outside(new_key_file, checkpoint.path, out)
    job = locked_checkpoints.plan_rekey(
        checkpoint, model_spec, out, old_key, new_key, retrained=retrained, threads=threads
    )
    if job.record.group == "rotation":
        set_threads(threads)
    return _write_job(job, "rekey", started, resume, dry_run, json, threads)


def _write_job(
    job: Job,
    command: str,
    started: float,
    resume: bool,
    dry_run: bool,
    json: bool,
    threads: int | None,
) -> int:
    """Write a planned lock, unlock or rekey, and report it."""
    from regauge.checkpoints.files import format_bytes
    from regauge.cli.write import summary, write_moved

    spec, record = job.element.spec, job.record
    if job.locked_dtype is not None:
        info(f"locked in {job.locked_dtype}, and trained in another dtype since")
    report: dict[str, Any] = {
        "version": VERSION,
        "command": command,
        "family": spec.family,
        "out": str(job.out),
        "group": record.group,
        "key": record.key,
        "moved": list(job.element.members),
        "folded": record.folded,
        "tensors": len(job.thunks),
        "dry_run": dry_run,
    }
    if job.element.members:
        info(
            f"{spec.family}: {command}s the backbone by {_GROUP_NAMES[record.group]} of "
            f"{summary(job.element)}; key {record.key}"
        )
    if dry_run:
        info(f"dry run: {len(job.thunks)} tensors would be written to {job.out}")
    else:
        written = write_moved(
            job.out,
            job.plan,
            job.thunks,
            f"{command.removesuffix(' --reseal')}ing",
            resume,
            threads,
        )
        seconds = time.monotonic() - started
        info(f"wrote {job.out}: {format_bytes(written.bytes)} in {seconds:.1f} s")
        report |= {
            "bytes": written.bytes,
            "files": list(written.files),
            "left": list(written.skipped),
            "seconds": round(seconds, 3),
        }
    if json:
        print_json(report)
    return 0
