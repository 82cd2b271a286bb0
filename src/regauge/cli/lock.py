"""`regauge lock`, `unlock` and `rekey`: obfuscate a model with a key, restore it,
change the key.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from regauge.cli import options, sample
from regauge.cli.console import info, print_report, step_bar
from regauge.cli.keygen import read_key
from regauge.cli.parsers import parse_names
from regauge.cli.write import write_job

if TYPE_CHECKING:
    from regauge.data.sources import DataSource
    from regauge.evaluation.report import Evaluation
    from regauge.locking.api import ResealOutput

Evaluate: TypeAlias = "Callable[..., Evaluation]"
_NOT_ENCRYPTION = (
    "a lock is obfuscation, not encryption: docs/guides/audit-lock.md lists the attacks that undo "
    "it without the key"
)

Resume = Annotated[bool, typer.Option("--resume", help="Resume an interrupted run.")]
Retrained = Annotated[
    bool,
    typer.Option(
        "--retrained",
        help="The model was trained after locking: check its structure, not its data.",
    ),
]


Group = StrEnum("Group", ["permutation", "signed", "rotation"])


def lock(
    model: options.Model,
    key: options.KeyFile,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="OUT", help="New folder (or .safetensors file)."),
    ] = None,
    group: Annotated[
        Group | None,
        typer.Option(
            "--group",
            help="Subgroup to sample the element from. Default: signed.",
            rich_help_panel=options.ADVANCED,
        ),
    ] = None,
    spaces: Annotated[
        str | None,
        typer.Option(
            "--spaces",
            metavar="A,B",
            help="Spaces to transform. Default: all of the backbone.",
            rich_help_panel=options.ADVANCED,
        ),
    ] = None,
    reseal: Annotated[
        bool,
        typer.Option(
            "--reseal",
            help="Update the record of a locked MODEL that was trained since, in place or to OUT.",
        ),
    ] = False,
    data: sample.Evaluated = None,
    samples: sample.Samples = None,
    field: sample.Field = None,
    split: sample.Split = "test",
    tokenizer: sample.Tokenizer = None,
    length: sample.Length = None,
    mean: sample.Mean = None,
    std: sample.Std = None,
    passphrase_file: options.PassphraseFile = None,
    spec: options.SpecFile = None,
    resume: Resume = False,
    dry_run: options.DryRun = False,
    json: options.Json = False,
    threads: options.Threads = None,
    verbose: options.Verbose = 0,
) -> int:
    """Obfuscate a model with a key; this is not encryption.

    Transforms the backbone by an element that is derived from the key. `regauge audit lock`
    measures what the lock of your model is worth.
    """
    if reseal and (group is not None or spaces is not None):
        raise typer.BadParameter("--group and --spaces apply to a new lock, not to --reseal")
    if not reseal and out is None:
        raise typer.BadParameter("pass -o OUT, the new locked model")
    if out is None and resume:
        raise typer.BadParameter("--resume requires -o OUT")
    if reseal and data is not None:
        raise typer.BadParameter("--data applies to a new lock, not to --reseal")
    started = time.monotonic()
    source = sample.read_optional(data, field, split, tokenizer, length, mean, std, samples)
    from regauge.locking import api

    secret = read_key(key, "lock", passphrase_file)
    if reseal:
        return _reseal(
            api.reseal(model, secret, spec=spec), out, started, resume, dry_run, json, threads
        )
    assert out is not None
    locked = api.lock(
        model,
        secret,
        group=(group or Group.signed).value,
        spaces=parse_names(spaces),
        spec=spec,
    )
    plan = locked.plan(out, threads=threads)
    evaluate = _compare(
        source,
        dry_run,
        lambda run: run({"plain": model}),
        lambda run: run({"locked": out}, key=secret, control=True),
    )
    started = started if source is None else time.monotonic()
    code = write_job(
        plan,
        "lock",
        started=started,
        resume=resume,
        dry_run=dry_run,
        json=json,
        threads=threads,
        evaluate=evaluate,
    )
    info(_NOT_ENCRYPTION)
    return code


def _reseal(
    sealed: ResealOutput,
    out: Path | None,
    started: float,
    resume: bool,
    dry_run: bool,
    json: bool,
    threads: int | None,
) -> int:
    """Renew a commitment in place, or in a new output."""
    if out is not None:
        return write_job(
            sealed.plan(out, threads=threads),
            "lock --reseal",
            started=started,
            resume=resume,
            dry_run=dry_run,
            json=json,
            threads=threads,
        )
    record = sealed.renew(dry_run=dry_run, threads=threads)
    place = str(sealed.model.checkpoint.path)
    action = "dry run: this would renew" if dry_run else "renewed"
    info(f"{action} the commitment of {place}, locked by the key {record.key}")
    if json:
        fields = {"out": place, "record": record.to_dict(), "dry_run": dry_run}
        print_report("lock --reseal", fields)
    return 0


def unlock(
    model: options.LockedModel,
    key: options.KeyFile,
    out: options.Out,
    adapter: Annotated[
        str | None,
        typer.Option(
            "--adapter",
            metavar="ADAPTER",
            help="LoRA adapter trained on LOCKED (PEFT folder or file) to unlock instead of it.",
        ),
    ] = None,
    retrained: Retrained = False,
    data: sample.Evaluated = None,
    samples: sample.Samples = None,
    field: sample.Field = None,
    split: sample.Split = "test",
    tokenizer: sample.Tokenizer = None,
    length: sample.Length = None,
    mean: sample.Mean = None,
    std: sample.Std = None,
    passphrase_file: options.PassphraseFile = None,
    spec: options.SpecFile = None,
    resume: Resume = False,
    dry_run: options.DryRun = False,
    json: options.Json = False,
    threads: options.Threads = None,
    verbose: options.Verbose = 0,
) -> int:
    """Restore a locked model with its key.

    Checks the key and all files before writing anything.
    """
    if adapter is not None and (data is not None or retrained):
        raise typer.BadParameter("--data and --retrained do not apply to --adapter")
    started = time.monotonic()
    source = sample.read_optional(data, field, split, tokenizer, length, mean, std, samples)
    from regauge.locking import api

    secret = read_key(key, "lock", passphrase_file)
    if adapter is not None:
        moved = api.unlock(model, secret, adapter=adapter, spec=spec)
        return write_job(
            moved.plan(out, threads=threads),
            "unlock --adapter",
            started=started,
            resume=resume,
            dry_run=dry_run,
            json=json,
            threads=threads,
        )
    plain = api.unlock(model, secret, retrained=retrained, spec=spec)
    plan = plain.plan(out, threads=threads)
    evaluate = _compare(
        source,
        dry_run,
        lambda run: run({"locked": model}, key=secret, control=True, retrained=retrained),
        lambda run: run({"unlocked": out}),
    )
    started = started if source is None else time.monotonic()
    return write_job(
        plan,
        "unlock",
        started=started,
        resume=resume,
        dry_run=dry_run,
        json=json,
        threads=threads,
        evaluate=evaluate,
    )


def _compare(
    source: DataSource | None,
    dry_run: bool,
    before: Callable[[Evaluate], Evaluation],
    after: Callable[[Evaluate], Evaluation],
) -> Callable[[], Evaluation] | None:
    """Evaluate the input, and return the function that evaluates the output; None without data."""
    if source is None:
        return None
    import regauge

    def evaluate(models: Mapping[str, str | Path], **keyed: Any) -> Evaluation:
        with step_bar("evaluate") as progress:
            return regauge.evaluate(models, source, progress=progress, **keyed)

    first = before(evaluate)
    return lambda: first if dry_run else first.joined(after(evaluate))


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
    """Change the key of a locked model in one pass.

    The plain model is never written.
    """
    started = time.monotonic()
    from regauge.locking import api

    old = read_key(key, "lock", passphrase_file)
    new = read_key(new_key_file, "lock", to_passphrase_file)
    relocked = api.rekey(model, old, new, retrained=retrained, spec=spec)
    return write_job(
        relocked.plan(out, threads=threads),
        "rekey",
        started=started,
        resume=resume,
        dry_run=dry_run,
        json=json,
        threads=threads,
    )
