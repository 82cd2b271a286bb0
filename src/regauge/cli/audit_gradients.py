"""`regauge audit gradients`: what the updates of federated training leak about the samples behind
them.
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
from regauge.cli.run import (
    check_device,
    check_outputs,
    deliver,
    facts_of_run,
    parse_counts,
    set_threads,
)

if TYPE_CHECKING:
    import torch

    from regauge.audit.gradients.attempts import Budget
    from regauge.data.tasks import Examples

ATTACKER_SHARE = 0.5  # of the data; the rest belongs to the clients
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
    "rounds",
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
            help="Folder of the model that clients train: ViT or DeiT (transformers, timm), "
            "BERT and relatives, GPT-2.",
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            metavar="URI",
            help="Samples of the model's task. Half belong to the clients, half to the attacker.",
        ),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="RUN",
            help="Attack a run recorded by regauge federate --record. Needs no MODEL.",
        ),
    ] = None,
    rounds: Annotated[
        str,
        typer.Option(
            "--rounds",
            metavar="R,R",
            help="Rounds of --from to attack, counted from 1. Default: all.",
        ),
    ] = "",
    defence: Annotated[
        list[str] | None,
        typer.Option(
            "--defence",
            "--defences",
            metavar="D[+D]",
            help="Combination of defences, as mjp=0.5 or freeze=embedding+noise=0.1. "
            "Repeatable. Default: one of each kind.",
        ),
    ] = None,
    batch: Annotated[
        int,
        typer.Option(
            "--batch-size",
            min=1,
            metavar="N",
            help="Samples per update, unless a combination sets it.",
        ),
    ] = 1,
    steps: Annotated[
        int,
        typer.Option(
            "--steps",
            min=1,
            metavar="N",
            help="Local SGD steps per update, unless a combination sets it.",
        ),
    ] = 1,
    lr: Annotated[
        float, typer.Option("--lr", metavar="R", help="Learning rate of the local steps.")
    ] = 0.01,
    batches: Annotated[
        str,
        typer.Option(
            "--batches", metavar="N,N", help="Batch sizes of the leakage curve; empty: no curve."
        ),
    ] = "1,2,4,8",
    stages: Annotated[
        str,
        typer.Option(
            "--train",
            metavar="N,N",
            help="Train for N steps and attack again: leakage against training.",
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
            help="Updates per combination that descents attack.",
        ),
    ] = 2,
    budget: Annotated[
        str,
        typer.Option(
            "--budget",
            metavar="STEPS,RESTARTS",
            help="Steps and restarts of attacks by optimisation.",
        ),
    ] = "300,1",
    practice: Annotated[
        int,
        typer.Option(
            "--practice",
            min=10,
            metavar="N",
            help="Training updates for learned attacks, made from the attacker's images.",
        ),
    ] = 100,
    updates: Annotated[
        int,
        typer.Option(
            "--updates",
            min=1,
            metavar="N",
            help="Updates to attack per combination.",
        ),
    ] = 8,
    is_random: Annotated[
        bool,
        typer.Option("--random-weights", help="Start from random weights instead of the model's."),
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
            "--samples", min=4, metavar="N", help="Examples of the data to use. Default: all."
        ),
    ] = None,
    lpips: Annotated[
        Path | None,
        typer.Option("--lpips", metavar="FILE", help="AlexNet weights with the LPIPS heads."),
    ] = None,
    gallery: options.Gallery = 6,
    fail_above: options.FailAbove = None,
    seed: Annotated[int, options.seed_option("Seed of samples, random numbers and attacks.")] = 0,
    json: options.JsonFile = None,
    report: options.ImageReport = None,
    device: options.Device = "cpu",
    threads: options.Threads = None,
    verbose: options.Verbose = 0,
) -> int:
    """Measure what model updates leak. Computes updates as a client of federated learning does,
    with each combination of defences, and attacks them: closed forms, spans, optimisation. Needs no
    training; ends with a verdict in words.
    """
    started = time.monotonic()
    check_outputs(json, report)
    from regauge.errors import need

    need("torchmetrics", "audit")
    passed = passed_options(context)
    if run is not None:
        from regauge.cli.audit_recorded import audit_recorded

        reject_options(
            passed,
            ["fail_above"],
            "requires undefended updates as a reference, which a recorded run does not have; "
            "audit its MODEL",
        )
        reject_options(
            passed,
            [name for name in passed if name not in RUN_OPTIONS],
            "set by the run that --from names",
        )
        attack_budget = replace(_parse_budget(budget, seed), practice=practice)
        set_threads(threads)
        return audit_recorded(
            run,
            parse_counts(rounds, "--rounds", "1,2,4"),
            _parse_names(attacks),
            attack_budget,
            gallery,
            json,
            report,
            passed,
        )
    reject_options(passed, ["rounds"], "requires --from RUN")
    if model is None or data is None:
        raise typer.BadParameter("pass MODEL and --data, or --from RUN")
    from regauge.defences.gradients import parse_plan

    if not 0 < lr < math.inf:
        raise typer.BadParameter(f"must be > 0 and finite, got {lr}", param_hint="--lr")
    combinations, skipped = (
        (list(defence), []) if defence else default_combinations(IMAGE_DEFENCES, steps)
    )
    for combination in combinations:
        parse_plan(combination, batch, steps, lr)
    batch_sizes = parse_counts(batches, "--batches", "1,2,4")
    snapshot_steps = parse_counts(stages, "--train", "100,1000")
    attack_budget = replace(_parse_budget(budget, seed), practice=practice)
    check_device(device)
    from regauge.audit.gradients import GradientCase, audit_gradients
    from regauge.results.metrics import Lpips

    set_threads(threads)
    metric = None if lpips is None else Lpips(lpips)
    module, checkpoint = load_plain_model(model, is_random, seed)
    source = sample.read_options(data, field, data_split, tokenizer, length, mean, std)
    is_text = "input_ids" in inspect.signature(module.forward).parameters
    kind, other_kind, foreign_options = (
        ("texts", "images", IMAGE_OPTIONS) if is_text else ("images", "texts", TEXT_OPTIONS)
    )
    reject_options(
        passed, foreign_options, f"only for models of {other_kind}; {model} reads {kind}"
    )
    if not resize and not is_text:
        require_size(source, module)
    examples, task = source.read(module, checkpoint)
    attacker_examples, victims = split_examples(examples, samples, seed)
    if is_text:
        if not defence:
            combinations, skipped = default_combinations(TEXT_DEFENCES, steps)
        return _audit_text_model(
            module.to(device),
            victims,
            attacker_examples,
            combinations,
            skipped,
            attacks,
            updates,
            batch,
            steps,
            lr,
            optimised,
            fail_above,
            seed,
            model,
            data,
            started,
            json,
            report,
        )
    selected = _select_attacks(attacks, False)
    info(
        f"{len(victims)} client images, {len(attacker_examples)} attacker images; {updates} "
        "updates to attack per combination"
    )
    module = module.to(device)
    snapshots = train_snapshots(module, victims, snapshot_steps, seed) if snapshot_steps else {}
    case = GradientCase(
        module,
        victims,
        attacker_examples,
        task["mean"],
        task["std"],
        updates,
        batch,
        steps,
        lr,
        seed,
        Path(str(data)).stem,
        {f"{n} steps": m for n, m in snapshots.items()},
    )
    with step_bar("audit") as progress:
        audit = audit_gradients(
            case,
            combinations,
            attacks=selected,
            budget=attack_budget,
            optimised=optimised,
            batches=batch_sizes,
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
        "attacker's images": len(attacker_examples),
        "updates": updates,
        "batch": batch,
        "steps": steps,
        "rate": lr,
        "seed": seed,
    }
    about |= {"granted": {a.title: a.threat.describe() for a in selected}}
    facts = {
        **facts_of_run(),
        **about,
        **audit.facts,
        "seconds": round(time.monotonic() - started, 1),
    }
    results = replace(audit, facts=facts, unchecked=(*audit.unchecked, *skipped))
    return deliver(results, text_of(results, 2), json, report)


def _audit_text_model(
    module: torch.nn.Module,
    victims: Examples,
    attacker_examples: Examples,
    combinations: list[str],
    skipped: list[str],
    attacks: str | None,
    updates: int,
    batch: int,
    steps: int,
    lr: float,
    optimised: int,
    fail_above: float | None,
    seed: int,
    model: str,
    data: str,
    started: float,
    json: Path | None,
    report: Path | None,
) -> int:
    """Audit a text model."""
    from regauge.audit.gradients.text_audit import TextCase, audit_texts

    selected = _select_attacks(attacks, True)
    info(
        f"{len(victims)} client texts, {len(attacker_examples)} attacker texts; {updates} "
        "updates to attack per combination"
    )
    case = TextCase(
        module, victims, attacker_examples, updates, batch, steps, lr, seed, Path(str(data)).stem
    )
    with step_bar("audit") as progress:
        audit = audit_texts(
            case,
            combinations,
            attacks=selected,
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
        **audit.facts,
        "seconds": round(time.monotonic() - started, 1),
    }
    results = replace(audit, facts=facts, unchecked=(*audit.unchecked, *skipped))
    return deliver(results, text_of(results), json, report)


def default_combinations(combinations: Sequence[str], steps: int) -> tuple[list[str], list[str]]:
    """Return the combinations to audit if none is named, and the reasons for those left out.

    `private` is left out for updates of several steps: it is defined for gradients of one batch.
    """
    skipped = [c for c in combinations if steps > 1 and c.startswith("private")]
    return [c for c in combinations if c not in skipped], [
        f"{c}: applies to gradients of one batch; updates have {steps} steps" for c in skipped
    ]


def split_examples(examples: Examples, samples: int | None, seed: int) -> tuple[Examples, Examples]:
    """Split the examples into the attacker's and the clients'."""
    import numpy as np

    order = np.random.default_rng(seed).permutation(len(examples))[:samples]
    middle = round(ATTACKER_SHARE * len(order))
    return examples.only(order[:middle]), examples.only(order[middle:])


def train_snapshots(
    model: torch.nn.Module, examples: Examples, snapshot_steps: list[int], seed: int
) -> dict[int, torch.nn.Module]:
    """Return copies of the model after each of these numbers of training steps, with AdamW on
    batches of 32 of the clients' samples.
    """
    import copy

    import numpy as np
    import torch

    from regauge.data.tasks import logits_of, loss_of

    trained, snapshots = copy.deepcopy(model).train(), {}
    optimizer = torch.optim.AdamW(trained.parameters(), 1e-3, weight_decay=0.01)
    rng = np.random.default_rng(seed)
    like = next(p for p in trained.parameters() if p.is_floating_point())
    for step in range(1, max(snapshot_steps) + 1):
        inputs, labels = examples.batch(rng.integers(0, len(examples), min(32, len(examples))))
        loss = loss_of(
            examples,
            logits_of(trained, {k: v.to(like) for k, v in inputs.items()}),
            labels.to(like.device),
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in snapshot_steps:
            snapshots[step] = copy.deepcopy(trained).eval()
    return snapshots


def _parse_names(text: str | None) -> list[str]:
    """Split a comma-separated list of names."""
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def _select_attacks(text: str | None, is_text: bool) -> Any:
    """Return the attacks of these names, or the default ones."""
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


def _parse_budget(text: str, seed: int) -> Budget:
    """Parse STEPS,RESTARTS."""
    from regauge.audit.gradients.attempts import Budget

    numbers = text.split(",")
    if len(numbers) != 2 or not all(p.strip().isdigit() and int(p) > 0 for p in numbers):
        raise typer.BadParameter(
            f"must be STEPS,RESTARTS, as in 300,2, got {text!r}", param_hint="--budget"
        )
    return Budget(steps=int(numbers[0]), restarts=int(numbers[1]), seed=seed)
