"""`regauge audit lock`: every attack on the user's own locked model, scored."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from regauge.cli import options, sample
from regauge.cli.audits import run_audit
from regauge.cli.console import info
from regauge.cli.parsers import bad_value, parse_counts, parse_lrs
from regauge.cli.run import start_run

_THIEF = "Theft"


def lock(
    model: options.LockedModel,
    key: Annotated[
        Path | None,
        typer.Option(
            "-k",
            "--key",
            metavar="KEY",
            help="Key to score the attacks with. Attacks never receive it.",
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            "--against", metavar="BASE", help="Public model that LOCKED may descend from."
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            metavar="URI",
            help="Examples of the model's task, for attacks on features and for theft: training "
            "from LOCKED.",
        ),
    ] = None,
    field: sample.Field = None,
    split: sample.Split = "test",
    tokenizer: sample.Tokenizer = None,
    length: sample.Length = None,
    mean: sample.Mean = None,
    std: sample.Std = None,
    samples: Annotated[
        int,
        typer.Option(
            "--samples",
            min=16,
            metavar="N",
            help="Largest number of test examples.",
            rich_help_panel=_THIEF,
        ),
    ] = 1000,
    labels: Annotated[
        str,
        typer.Option(
            "--labels",
            metavar="N,N",
            help="Numbers of labels that the attacker has.",
            rich_help_panel=_THIEF,
        ),
    ] = "50,200,1000",
    steps: Annotated[
        int,
        typer.Option(
            "--steps",
            min=1,
            metavar="N",
            help="Training steps of the attacker.",
            rich_help_panel=_THIEF,
        ),
    ] = 300,
    lr_text: Annotated[
        str,
        typer.Option(
            "--rates",
            metavar="R,R",
            help="Learning rates of the attacker; the best counts.",
            rich_help_panel=_THIEF,
        ),
    ] = "3e-4,3e-3",
    fail_above: options.FailAbove = None,
    seed: Annotated[int, options.seed_option("Seed of samples and training.")] = 0,
    passphrase_file: options.PassphraseFile = None,
    resume: options.Resume = False,
    json: options.JsonFile = None,
    report: options.Report = None,
    threads: options.Threads = None,
    verbose: options.Verbose = 0,
) -> int:
    """Attack a locked model and report what its lock is worth.

    Each attack gets what one adversary may have: the file alone, a public base, a few labelled
    examples, or observed features.
    """
    counts, lrs = parse_counts(labels, "--labels", "50,200"), parse_lrs(lr_text, "--rates")
    if not counts:
        raise bad_value("--labels", "one or more numbers, as in 50,200", labels)
    start_run(json, report, threads=threads)
    from regauge import audit
    from regauge.attacks.theft import Budget
    from regauge.cli.keygen import read_key

    secret = None if key is None else read_key(key, "lock", passphrase_file)
    examples = sample.read_optional(data, field, split, tokenizer, length, mean, std)
    return run_audit(
        lambda **run: audit.lock(
            model,
            key=secret,
            base=against,
            data=examples,
            options=audit.LockOptions(counts, Budget(steps, lrs=lrs), samples),
            fail_above=fail_above,
            seed=seed,
            on_loaded=lambda kind, sizes: info(sizes),
            **run,
        ),
        "lock",
        json,
        report,
        resume,
    )
