"""`regauge audit`: every attack on the user's own case, scored. `regauge audit lock` is defined
here.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regauge.cli import options, sample
from regauge.cli.audit_gradients import gradients
from regauge.cli.audit_split import split
from regauge.cli.console import info, step_bar
from regauge.cli.run import check_outputs, deliver, facts_of_run, parse_counts, set_threads

if TYPE_CHECKING:
    from regauge.audit.lock import LockCase
    from regauge.data.sources import DataSource
    from regauge.locking.keys import Key
    from regauge.results.findings import Results

app = typer.Typer(
    name="audit",
    help="Attack what regauge protects, on your own case, and report what the protection is worth.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _root() -> None:
    """Attack what regauge protects, on your own case, and report what the protection is worth."""


@app.command()
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
        typer.Option("--against", metavar="BASE", help="Public model that it may descend from."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            metavar="URI",
            help="Examples of its task, for theft, features and accuracies.",
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
        typer.Option("--samples", min=16, metavar="N", help="Largest number of test examples."),
    ] = 1000,
    labels: Annotated[
        str, typer.Option("--labels", metavar="N,N", help="Numbers of labels that a thief has.")
    ] = "50,200,1000",
    steps: Annotated[
        int, typer.Option("--steps", min=1, metavar="N", help="Training steps of a thief.")
    ] = 300,
    lr_text: Annotated[
        str,
        typer.Option("--rates", metavar="R,R", help="Learning rates of a thief; the best counts."),
    ] = "3e-4,3e-3",
    fail_above: options.FailAbove = None,
    seed: Annotated[int, options.seed_option("Seed of samples and training.")] = 0,
    passphrase_file: options.PassphraseFile = None,
    json: options.JsonFile = None,
    report: options.Report = None,
    threads: options.Threads = None,
    verbose: options.Verbose = 0,
) -> int:
    """Measure what a lock is worth. Attacks it with what an adversary may have: a public base, a
    few labels, observed features.
    """
    started = time.monotonic()
    check_outputs(json, report)
    counts, lrs = parse_counts(labels, "--labels", "50,200"), _parse_lrs(lr_text)
    if not counts:
        raise typer.BadParameter(
            f"must be one or more numbers, as in 50,200, got {labels!r}", param_hint="--labels"
        )
    from regauge.attacks.theft import Budget
    from regauge.audit.lock import audit_lock
    from regauge.cli.keygen import read_key

    set_threads(threads)
    secret = None if key is None else read_key(key, "lock", passphrase_file)
    source = (
        None
        if data is None
        else sample.read_options(data, field, split, tokenizer, length, mean, std)
    )
    case, about = _build_case(model, secret, against, source, samples, max(counts), seed)
    with step_bar("audit") as progress:
        audit = audit_lock(
            case,
            labels=counts,
            budget=Budget(steps, lrs=lrs, seed=seed),
            seed=seed,
            fail_above=fail_above,
            progress=progress,
        )
    facts = {
        **facts_of_run(),
        "model": model,
        "against": against,
        "data": data,
        **about,
        **audit.facts,
        "seed": seed,
    }
    results = replace(audit, facts={**facts, "seconds": round(time.monotonic() - started, 1)})
    return deliver(results, text_of(results), json, report)


app.command("split")(split)
app.command("gradients")(gradients)


def _parse_lrs(text: str) -> tuple[float, ...]:
    """Parse a comma-separated list of positive learning rates."""
    try:
        lrs = tuple(float(p) for p in text.split(",") if p.strip())
    except ValueError:
        lrs = ()
    if not lrs or not all(0 < lr < math.inf for lr in lrs):
        raise typer.BadParameter(
            f"must be positive learning rates, as in 3e-4,3e-3, got {text!r}", param_hint="--rates"
        )
    return lrs


def _build_case(
    model: str,
    key: Key | None,
    against: str | None,
    source: DataSource | None,
    samples: int,
    max_labels: int,
    seed: int,
) -> tuple[LockCase, dict[str, Any]]:
    """Build the case for attacks and scoring. With data the model is loaded; without, its file is
    read directly.
    """
    from regauge.audit.lock import LockCase
    from regauge.cli.model import open_model
    from regauge.core.fold import fold_norms
    from regauge.locking.lock import LOCKS, element_spec, locked_element, require_locked
    from regauge.locking.locked_checkpoints import check_files
    from regauge.models.load import load_model
    from regauge.models.resolve import spec_of

    checkpoint, spec = open_model(model, None)
    record = require_locked(checkpoint, model)
    check_files(checkpoint)
    module, state = (
        None,
        {
            n: checkpoint[n].float() if checkpoint[n].is_floating_point() else checkpoint[n]
            for n in checkpoint
        },
    )
    if source is not None:
        module = load_model(checkpoint, "float32")
        spec, state = spec_of(module), dict(module.state_dict())
    truth = None if key is None else locked_element(spec, record, key)
    base = None
    if against is not None:
        base_checkpoint, base_spec = open_model(against, None)
        base_state: dict[str, Any] = {
            n: base_checkpoint[n].float()
            if base_checkpoint[n].is_floating_point()
            else base_checkpoint[n]
            for n in base_checkpoint
        }
        if module is not None:  # names in memory may differ from those in the file
            base_module = load_model(base_checkpoint, "float32")
            base_spec, base_state = spec_of(base_module), dict(base_module.state_dict())
        base = align_names(
            element_spec(spec, record.folded),
            fold_norms(base_spec, base_state)[1] if record.folded else base_state,
            against,
        )
    train = test = None
    if source is not None and module is not None:
        import numpy as np

        examples, _ = source.read(module, checkpoint)
        order = np.random.default_rng(seed).permutation(len(examples))
        split_at = min(max_labels, len(examples) // 2)
        test, train = (
            examples.only(np.sort(order[split_at : split_at + samples])),
            examples.only(np.sort(order[:split_at])),
        )
        info(f"{len(train)} training examples for a thief, {len(test)} test examples")
    case = LockCase(
        element_spec(spec, record.folded),
        state,
        LOCKS[record.group].within,
        truth,
        base,
        model=module,
        train=train,
        test=test,
        record=record,
        key=key,
    )
    return case, {
        "family": record.family,
        "group": record.group,
        "key": record.key,
        "scored by the key": key is not None,
    }


def align_names(spec: Any, state: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the backbone of another model of the family under this model's names. A head on top
    adds a prefix to the names.
    """
    from regauge.errors import AuditError

    renamed: dict[str, Any] = {}
    for name in (n for n, part in spec.parts.items() if part == "backbone"):
        source = (
            name
            if name in state
            else next((n for n in state if n.endswith("." + name) or name.endswith("." + n)), None)
        )
        if source is None:
            raise AuditError(
                f'{where} has no "{name}"', hint="the base must be of the same family and size"
            )
        renamed[name] = state[source]
    return renamed


def text_of(results: Results) -> str:
    """Format results for a terminal: one line per attack, the attacks that were not tried, and the
    verdict.
    """
    from regauge.models.summary import format_columns
    from regauge.results.report import format_number

    rows = [("attack", "floor", "value", "ceiling", "seconds")]
    for name, floor, value, ceiling, _, seconds in results.tables[0].rows:
        rows.append(
            (
                str(name).removeprefix("lock/"),
                format_number(floor),
                format_number(value),
                format_number(ceiling),
                format_number(seconds),
            )
        )
    lines = [results.title, "", format_columns(rows, right=(1, 2, 3, 4)), ""]
    lines += [f"not tried: {u}" for u in results.unchecked]
    lines += [
        f"holds  {f.id.removeprefix('lock/')}: {f.statement}"
        for f in results.findings
        if f.holds and "/handling/" in f.id
    ]
    lines += [f"FAILS  {f.id.removeprefix('lock/')}: {f.sentence}" for f in results.failed]
    return "\n".join([*lines, "", *results.facts["verdict"]])
