"""`regauge audit`: every attack on one's own case, and what it comes to."""

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
    from regauge.locking.keys import Key
    from regauge.results.findings import Results

app = typer.Typer(
    name="audit",
    help="Attack what regauge protects, on your own case, and say what it is worth.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _root() -> None:
    """Attack what regauge protects, on your own case, and say what it is worth."""


@app.command()
def lock(
    model: options.LockedModel,
    key: Annotated[
        Path | None,
        typer.Option(
            "-k",
            "--key",
            metavar="KEY",
            help="Its key, to score the attacks by. They do not get it.",
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option("--against", metavar="BASE", help="A public model that it may descend from."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            metavar="URI",
            help="Examples of its task: for theft, features and accuracies.",
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
            "--samples", min=16, metavar="N", help="Examples that models are tested on, at most."
        ),
    ] = 1000,
    labels: Annotated[
        str, typer.Option("--labels", metavar="N,N", help="How many labels a thief has.")
    ] = "50,200,1000",
    steps: Annotated[
        int, typer.Option("--steps", min=1, metavar="N", help="Steps that a thief trains.")
    ] = 300,
    rates: Annotated[
        str, typer.Option("--rates", metavar="R,R", help="At these rates; the best counts.")
    ] = "3e-4,3e-3",
    fail_above: options.FailAbove = None,
    seed: Annotated[int, options.seed_option("The seed of samples and trainings.")] = 0,
    passphrase_file: options.PassphraseFile = None,
    json: options.JsonFile = None,
    report: options.Report = None,
    threads: options.Threads = None,
    verbose: options.Verbose = 0,
) -> int:
    """What is this lock worth? Attacks it with what an adversary would have: a public base, a few
    labels, features that it sees.
    """
    started = time.monotonic()
    check_outputs(json, report)
    counts, tried = parse_counts(labels, "--labels", "50,200"), _parse_lrs(rates)
    if not counts:
        raise typer.BadParameter("say how many, as in 50,200", param_hint="--labels")
    from regauge.attacks.theft import Budget
    from regauge.audit.lock import audit_lock
    from regauge.cli.keygen import read_key

    set_threads(threads)
    secret = None if key is None else read_key(key, "lock", passphrase_file)
    source = (
        None if data is None else sample.Sample(data, field, split, tokenizer, length, mean, std)
    )
    case, about = _build_case(model, secret, against, source, samples, max(counts), seed)
    with step_bar("audit") as progress:
        found = audit_lock(
            case,
            labels=counts,
            budget=Budget(steps, lrs=tried, seed=seed),
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
        **found.facts,
        "seed": seed,
    }
    results = replace(found, facts={**facts, "seconds": round(time.monotonic() - started, 1)})
    return deliver(results, text_of(results), json, report)


app.command("split")(split)
app.command("gradients")(gradients)


def _parse_lrs(text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(p) for p in text.split(",") if p.strip())
    except ValueError:
        found = ()
    if not found or not all(0 < rate < math.inf for rate in found):
        raise typer.BadParameter(f"{text!r} are no rates, as in 3e-4,3e-3", param_hint="--rates")
    return found


def _build_case(
    model: str,
    key: Key | None,
    against: str | None,
    source: sample.Sample | None,
    samples: int,
    most: int,
    seed: int,
) -> tuple[LockCase, dict[str, Any]]:
    """The case as attacks and scores need it. With data the model is loaded; without, its file is
    read as it is.
    """
    from regauge.audit.lock import LockCase
    from regauge.cli.model import open_model
    from regauge.core.fold import fold_norms
    from regauge.locking.lock import LOCKS, element_spec, locked_element, require_locked
    from regauge.locking.lock_files import check_files
    from regauge.models.load import load_model
    from regauge.models.resolve import spec_of

    checkpoint, spec = open_model(model, None)
    record = require_locked(checkpoint, model)
    check_files(checkpoint)
    live, state = (
        None,
        {
            n: checkpoint[n].float() if checkpoint[n].is_floating_point() else checkpoint[n]
            for n in checkpoint
        },
    )
    if source is not None:
        live = load_model(checkpoint, "float32")
        spec, state = spec_of(live), dict(live.state_dict())
    truth = None if key is None else locked_element(spec, record, key)
    base = None
    if against is not None:
        other, theirs = open_model(against, None)
        plain: dict[str, Any] = {
            n: other[n].float() if other[n].is_floating_point() else other[n] for n in other
        }
        if live is not None:  # the names in memory may be others than those in the file
            public = load_model(other, "float32")
            theirs, plain = spec_of(public), dict(public.state_dict())
        base = align_names(
            element_spec(spec, record.folded),
            fold_norms(theirs, plain)[1] if record.folded else plain,
            against,
        )
    train = test = None
    if source is not None and live is not None:
        import numpy as np

        examples, _ = source.read(live, checkpoint)
        order = np.random.default_rng(seed).permutation(len(examples))
        kept = min(most, len(examples) // 2)
        test, train = (
            examples.only(np.sort(order[kept : kept + samples])),
            examples.only(np.sort(order[:kept])),
        )
        info(f"{len(train)} examples for a thief, {len(test)} to test on")
    case = LockCase(
        element_spec(spec, record.folded),
        state,
        LOCKS[record.group].within,
        truth,
        base,
        model=live,
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
    """The backbone of another model of the family, by this one's names: a head on top puts a prefix
    before them.
    """
    from regauge.audit.lock import AuditError

    out: dict[str, Any] = {}
    for name in (n for n, part in spec.parts.items() if part == "backbone"):
        found = (
            name
            if name in state
            else next((n for n in state if n.endswith("." + name) or name.endswith("." + n)), None)
        )
        if found is None:
            raise AuditError(
                f'{where} has no "{name}"', hint="a base is a model of the same family and size"
            )
        out[name] = state[found]
    return out


def text_of(results: Results) -> str:
    """Results as a terminal shows them: what each attack gets, what was not tried, and the
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
