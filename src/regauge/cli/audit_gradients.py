"""`regauge audit gradients`: what the updates of federated training give away of the samples that
they were made of.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regauge.cli import options, sample
from regauge.cli.audit_split import load_plain_model, require_size, text_of
from regauge.cli.console import info, step_bar
from regauge.cli.option_guard import passed_options, reject_options
from regauge.cli.run import check_device, check_outputs, deliver, facts_of_run, set_threads

if TYPE_CHECKING:
    import torch

    from regauge.data.tasks import Examples

ATTACKER_SHARE = 0.5  # of the data: the attacker's own; the rest is the clients'
IMAGE_DEFENCES = (
    "rows",
    "no-positions",
    "no-positions=sent",
    "mjp=0.5,shuffle=false",
    "mjp=0.5,unknown=false",
    "mjp=0.5",
    "mjp=0.9",
    "steps=4",
    "batch=8",
    "clients=8",
    "prune=0.9",
    "noise=0.1",
    "private=1.0",
    "withhold=positions",
    "freeze=embedding",
    "freeze=embedding,first",
    "freeze=matrices",
    "mjp=0.5+freeze=embedding",
)


TEXT_DEFENCES = (
    "dropout",
    "batch=4",
    "clients=4",
    "steps=4",
    "prune=0.9",
    "noise=0.1",
    "private=1.0",
    "freeze=embedding",
    "freeze=embedding,first",
)
IMAGE_OPTIONS = (
    "batches",
    "stages",
    "budget",
    "practice",
    "lpips",
    "gallery",
    "resize",
    "mean",
    "std",
)
TEXT_OPTIONS = ("tokenizer", "length")
RUN_OPTIONS = (
    "run",
    "only",
    "attacks",
    "budget",
    "practice",
    "gallery",
    "seed",
    "json",
    "report",
    "threads",
    "verbose",
)


def gradients(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="The folder that clients train: ViT or DeiT (transformers, timm), BERT and its "
            "like, GPT-2.",
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            metavar="URI",
            help="Samples of its task. Half are the clients', half the attacker's own.",
        ),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="RUN",
            help="Attack what was sent in a run that regauge federate --record recorded. Needs "
            "no MODEL.",
        ),
    ] = None,
    only: Annotated[
        str,
        typer.Option(
            "--rounds", metavar="R,R", help="Of --from: these rounds, counted from 1. Default: all."
        ),
    ] = "",
    defence: Annotated[
        list[str] | None,
        typer.Option(
            "--defence",
            "--defences",
            metavar="D[+D]",
            help="A combination to audit, as mjp=0.5 or freeze=embedding+noise=0.1. May be "
            "repeated. Default: one of each kind.",
        ),
    ] = None,
    batch: Annotated[
        int,
        typer.Option(
            "--batch-size",
            min=1,
            metavar="N",
            help="Samples of one update, where a combination does not say.",
        ),
    ] = 1,
    steps: Annotated[
        int,
        typer.Option(
            "--steps", min=1, metavar="N", help="Local steps of SGD in an update, likewise."
        ),
    ] = 1,
    rate: Annotated[float, typer.Option("--lr", metavar="R", help="Of the local steps.")] = 0.01,
    batches: Annotated[
        str,
        typer.Option(
            "--batches", metavar="N,N", help="Sizes of the batch for the curve; empty: none."
        ),
    ] = "1,2,4,8",
    stages: Annotated[
        str,
        typer.Option(
            "--train",
            metavar="N,N",
            help="Train so many steps here, and attack again: leakage against training.",
        ),
    ] = "",
    attacks: Annotated[
        str | None,
        typer.Option(
            "--attacks",
            metavar="A,A",
            help="Attacks by name, or all. Default: all but descents, which take minutes.",
        ),
    ] = None,
    optimised: Annotated[
        int,
        typer.Option(
            "--optimised",
            min=1,
            metavar="N",
            help="Updates that descents are tried on, of each combination.",
        ),
    ] = 2,
    budget: Annotated[
        str, typer.Option("--budget", metavar="STEPS,RESTARTS", help="Of attacks by optimisation.")
    ] = "300,1",
    practice: Annotated[
        int,
        typer.Option(
            "--practice",
            min=10,
            metavar="N",
            help="Updates that attacks which learn make of the attacker's own images.",
        ),
    ] = 100,
    updates: Annotated[
        int,
        typer.Option(
            "--updates",
            min=1,
            metavar="N",
            help="Updates that are attacked under each combination.",
        ),
    ] = 8,
    is_random: Annotated[
        bool,
        typer.Option(
            "--random-weights", help="Start from random weights and not from the model's."
        ),
    ] = False,
    field: sample.Field = None,
    data_split: sample.Split = "train",
    tokenizer: sample.Tokenizer = None,
    length: sample.Length = None,
    mean: sample.Mean = None,
    std: sample.Std = None,
    resize: options.Resize = False,
    samples: Annotated[
        int | None,
        typer.Option(
            "--samples", min=4, metavar="N", help="Use N examples of the data. Default: all."
        ),
    ] = None,
    lpips: Annotated[
        Path | None,
        typer.Option("--lpips", metavar="FILE", help="AlexNet with the heads of LPIPS."),
    ] = None,
    gallery: options.Gallery = 6,
    fail_above: options.FailAbove = None,
    seed: Annotated[int, options.seed_option("The seed of samples, draws and attacks.")] = 0,
    json: options.JsonFile = None,
    report: options.ImageReport = None,
    device: options.Device = "cpu",
    threads: options.Threads = None,
    verbose: options.Verbose = 0,
) -> int:
    """What do updates give away? Makes updates of your model as a client of federated learning
    would, with each combination of defences, and attacks them: closed forms, spans, optimisation.
    Needs no training; a verdict in words.
    """
    started = time.monotonic()
    check_outputs(json, report)
    from regauge.errors import need

    need("torchmetrics", "audit")
    given = passed_options(context)
    if run is not None:
        from regauge.cli.audit_recorded import audit_recorded

        reject_options(
            given,
            ["fail_above"],
            "a run has no undefended updates that a share of the way could be measured to; "
            "audit its MODEL",
        )
        reject_options(
            given,
            [name for name in given if name not in RUN_OPTIONS],
            "the run that --from names says it",
        )
        spend = replace(_parse_budget(budget, seed), practice=practice)
        set_threads(threads)
        return audit_recorded(
            run,
            _parse_counts(only, "--rounds"),
            _parse_names(attacks),
            spend,
            gallery,
            json,
            report,
            given,
        )
    reject_options(given, ["only"], "rounds are of --from RUN")
    if model is None or data is None:
        raise typer.BadParameter("give MODEL and --data, or --from RUN")
    from regauge.defences.gradients import parse_plan

    if not 0 < rate < math.inf:
        raise typer.BadParameter(f"{rate} is no rate", param_hint="--lr")
    combinations, skipped = (
        (list(defence), []) if defence else default_combinations(IMAGE_DEFENCES, steps)
    )
    for combination in combinations:
        parse_plan(combination, batch, steps, rate)
    sizes, marks = _parse_counts(batches, "--batches"), _parse_counts(stages, "--train")
    spend = replace(_parse_budget(budget, seed), practice=practice)
    check_device(device)
    from regauge.audit.gradients import GradientCase, audit_gradients
    from regauge.results.metrics import Lpips

    set_threads(threads)
    metric = None if lpips is None else Lpips(lpips)
    module, checkpoint = load_plain_model(model, is_random, seed)
    source = sample.Sample(data, field, data_split, tokenizer, length, mean, std)
    is_text = "input_ids" in inspect.signature(module.forward).parameters
    reads, other, strange = (
        ("texts", "images", IMAGE_OPTIONS) if is_text else ("images", "texts", TEXT_OPTIONS)
    )
    reject_options(given, strange, f"it is for models of {other}, and {model} reads {reads}")
    if not resize and not is_text:
        require_size(source, module)
    examples, task = source.read(module, checkpoint)
    own, victims = split_examples(examples, samples, seed)
    if is_text:
        if not defence:
            combinations, skipped = default_combinations(TEXT_DEFENCES, steps)
        return _audit_text_model(
            module.to(device),
            victims,
            own,
            combinations,
            skipped,
            attacks,
            updates,
            batch,
            steps,
            rate,
            optimised,
            fail_above,
            seed,
            model,
            data,
            started,
            json,
            report,
        )
    chosen = _select_attacks(attacks, False)
    info(
        f"{len(victims)} images of the clients', {len(own)} of the attacker's; {updates} "
        "updates are attacked under each combination"
    )
    module = module.to(device)
    later = train_snapshots(module, victims, marks, seed) if marks else {}
    case = GradientCase(
        module,
        victims,
        own,
        task["mean"],
        task["std"],
        updates,
        batch,
        steps,
        rate,
        seed,
        Path(str(data)).stem,
        {f"{n} steps": m for n, m in later.items()},
    )
    with step_bar("audit") as progress:
        found = audit_gradients(
            case,
            combinations,
            attacks=chosen,
            budget=spend,
            optimised=optimised,
            batches=sizes,
            lpips=metric,
            pictures=gallery,
            fail_above=fail_above,
            progress=progress,
        )
    about: dict[str, Any] = {
        "model": model,
        "weights": "random" if is_random else "the model's",
        "data": data,
        "clients' images": len(victims),
    }
    about |= {
        "attacker's images": len(own),
        "updates": updates,
        "batch": batch,
        "steps": steps,
        "rate": rate,
        "seed": seed,
    }
    about |= {"granted": {a.title: a.threat.describe() for a in chosen}}
    facts = {
        **facts_of_run(),
        **about,
        **found.facts,
        "seconds": round(time.monotonic() - started, 1),
    }
    results = replace(found, facts=facts, unchecked=(*found.unchecked, *skipped))
    return deliver(results, text_of(results, 2), json, report)


def _audit_text_model(
    module: torch.nn.Module,
    victims: Examples,
    own: Examples,
    combinations: list[str],
    skipped: list[str],
    attacks: str | None,
    updates: int,
    batch: int,
    steps: int,
    rate: float,
    optimised: int,
    fail_above: float | None,
    seed: int,
    model: str,
    data: str,
    started: float,
    json: Path | None,
    report: Path | None,
) -> int:
    """The audit of a model of texts."""
    from regauge.audit.gradients.text_audit import TextCase, audit_texts

    chosen = _select_attacks(attacks, True)
    info(
        f"{len(victims)} texts of the clients', {len(own)} of others; {updates} updates are "
        "attacked under each combination"
    )
    case = TextCase(module, victims, own, updates, batch, steps, rate, seed, Path(str(data)).stem)
    with step_bar("audit") as progress:
        found = audit_texts(
            case,
            combinations,
            attacks=chosen,
            optimised=optimised,
            fail_above=fail_above,
            progress=progress,
        )
    about: dict[str, Any] = {
        "model": model,
        "data": data,
        "updates": updates,
        "batch": batch,
        "steps": steps,
        "seed": seed,
    }
    facts = {
        **facts_of_run(),
        **about,
        **found.facts,
        "seconds": round(time.monotonic() - started, 1),
    }
    results = replace(found, facts=facts, unchecked=(*found.unchecked, *skipped))
    return deliver(results, text_of(results), json, report)


def default_combinations(combinations: Sequence[str], steps: int) -> tuple[list[str], list[str]]:
    """What is audited where no combination is named, and what is left out of it, and why: `private`
    is for gradients of one batch.
    """
    out = [c for c in combinations if steps > 1 and c.startswith("private")]
    return [c for c in combinations if c not in out], [
        f"{c}: it is for gradients of one batch, and updates have {steps} steps" for c in out
    ]


def split_examples(examples: Examples, samples: int | None, seed: int) -> tuple[Examples, Examples]:
    """The attacker's own, and the clients'."""
    import numpy as np

    order = np.random.default_rng(seed).permutation(len(examples))[:samples]
    middle = round(ATTACKER_SHARE * len(order))
    return examples.only(order[:middle]), examples.only(order[middle:])


def train_snapshots(
    model: torch.nn.Module, examples: Examples, marks: list[int], seed: int
) -> dict[int, torch.nn.Module]:
    """Copies of the model after so many steps of training on the clients' samples: AdamW, batches
    of 32.
    """
    import copy

    import numpy as np
    import torch

    from regauge.data.tasks import logits_of, loss_of

    now, out = copy.deepcopy(model).train(), {}
    optimizer = torch.optim.AdamW(now.parameters(), 1e-3, weight_decay=0.01)
    draw = np.random.default_rng(seed)
    like = next(p for p in now.parameters() if p.is_floating_point())
    for step in range(1, max(marks) + 1):
        inputs, labels = examples.batch(draw.integers(0, len(examples), min(32, len(examples))))
        loss = loss_of(
            examples,
            logits_of(now, {k: v.to(like) for k, v in inputs.items()}),
            labels.to(like.device),
        )
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step in marks:
            out[step] = copy.deepcopy(now).eval()
    return out


def _parse_counts(text: str, name: str) -> list[int]:
    given = [p.strip() for p in text.split(",") if p.strip()]
    if not all(p.isdigit() and int(p) > 0 for p in given):
        raise typer.BadParameter(f"{text!r} are no numbers, as in 1,2,4", param_hint=name)
    return sorted({int(p) for p in given})


def _parse_names(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def _select_attacks(text: str | None, is_text: bool) -> Any:
    from regauge.audit.gradients import attempts, text_audit
    from regauge.errors import UpdateError

    on_texts: Any = (text_audit.ATTACKS, [a for a in text_audit.ATTACKS if not a.is_slow], "texts")
    try:
        return attempts.resolve_attacks(
            _parse_names(text),
            *(on_texts if is_text else (attempts.ATTACKS, attempts.QUICK, "images")),
        )
    except UpdateError as error:
        raise typer.BadParameter(f"{error}; {error.hint}", param_hint="--attacks") from error


def _parse_budget(text: str, seed: int) -> Any:
    from regauge.audit.gradients.attempts import Budget

    given = text.split(",")
    if len(given) != 2 or not all(p.strip().isdigit() and int(p) > 0 for p in given):
        raise typer.BadParameter(
            f"{text!r} is not STEPS,RESTARTS, as in 300,2", param_hint="--budget"
        )
    return Budget(steps=int(given[0]), restarts=int(given[1]), seed=seed)
