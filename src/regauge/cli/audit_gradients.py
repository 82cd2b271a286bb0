"""`regauge audit gradients`: what the updates of federated training leak about the samples behind
them.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from regauge.cli import options, sample
from regauge.cli.audit_split import parse_names, unknown_attacks
from regauge.cli.console import info, step_bar
from regauge.cli.option_guard import passed_options, reject_options
from regauge.cli.run import (
    check_outputs,
    deliver,
    facts_of_run,
    parse_counts,
    saved_steps,
    set_threads,
    state_of,
)
from regauge.core.options import require_device

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
    "resume",
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
            "--batches",
            metavar="N,N",
            help="Batch sizes of the leakage curve; empty: no curve.",
            rich_help_panel=options.ADVANCED,
        ),
    ] = "1,2,4,8",
    stages: Annotated[
        str,
        typer.Option(
            "--train",
            metavar="N,N",
            help="Train for N steps and attack again: leakage against training.",
            rich_help_panel=options.ADVANCED,
        ),
    ] = "",
    attacks: Annotated[
        str | None,
        typer.Option(
            "--attacks",
            metavar="A,A",
            help="Attacks by name, or all. Default: all but optimization, which takes minutes.",
        ),
    ] = None,
    optimized: Annotated[
        int,
        typer.Option(
            "--optimized",
            min=1,
            metavar="N",
            help="Updates per combination to attack by optimization.",
            rich_help_panel=options.ADVANCED,
        ),
    ] = 2,
    budget: Annotated[
        str,
        typer.Option(
            "--budget",
            metavar="STEPS,RESTARTS",
            help="Steps and restarts of attacks by optimization.",
            rich_help_panel=options.ADVANCED,
        ),
    ] = "300,1",
    practice: Annotated[
        int,
        typer.Option(
            "--practice",
            min=10,
            metavar="N",
            help="Training updates for learned attacks, made from the attacker's images.",
            rich_help_panel=options.ADVANCED,
        ),
    ] = 100,
    updates: Annotated[
        int,
        typer.Option(
            "--updates",
            min=1,
            metavar="N",
            help="Updates to attack per combination.",
            rich_help_panel=options.ADVANCED,
        ),
    ] = 8,
    is_random: Annotated[
        bool,
        typer.Option(
            "--random-weights",
            help="Start from random weights instead of the model's.",
            rich_help_panel=options.ADVANCED,
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
            "--samples",
            min=4,
            metavar="N",
            help="Examples of the data to use. Default: all.",
            rich_help_panel=options.DATA,
        ),
    ] = None,
    lpips: Annotated[
        Path | None,
        typer.Option(
            "--lpips",
            metavar="FILE",
            help="AlexNet weights with the LPIPS heads.",
            rich_help_panel=options.ADVANCED,
        ),
    ] = None,
    gallery: options.Gallery = 6,
    fail_above: options.FailAbove = None,
    seed: Annotated[int, options.seed_option("Seed of samples, random numbers and attacks.")] = 0,
    resume: options.Resume = False,
    json: options.JsonFile = None,
    report: options.ImageReport = None,
    device: options.Device = "cpu",
    threads: options.Threads = None,
    verbose: options.Verbose = 0,
) -> int:
    """Measure what gradients of federated training leak.

    Computes updates as a federated client does, under each combination of defences, and attacks
    them in closed form, by spans of gradients and by optimization. Trains nothing. Ends with a
    verdict.
    """
    check_outputs(json, report)
    passed = passed_options(context)
    restarts = _parse_budget(budget)
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
            "must not be given with --from: the run sets it",
        )
        set_threads(threads)
        return audit_recorded(
            run,
            parse_counts(rounds, "--rounds", "1,2,4"),
            parse_names(attacks),
            (*restarts, practice, seed),
            gallery,
            resume,
            json,
            report,
            passed,
        )
    reject_options(passed, ["rounds"], "requires --from RUN")
    if model is None or data is None:
        raise typer.BadParameter("pass MODEL and --data, or --from RUN")
    if not 0 < lr < math.inf:
        raise typer.BadParameter(f"must be > 0 and finite, got {lr}", param_hint="--lr")
    source = sample.read_options(data, field, data_split, tokenizer, length, mean, std)
    require_device(device)
    set_threads(threads)
    from regauge import audit
    from regauge.audit.gradient_audit.attempts import Budget

    options = audit.GradientOptions(
        attacks=parse_names(attacks),
        samples=samples,
        fresh=is_random,
        resize=resize,
        lpips=lpips,
        gallery=gallery,
        device=device,
        updates=updates,
        batch_size=batch,
        steps=steps,
        lr=lr,
        batches=parse_counts(batches, "--batches", "1,2,4"),
        train_steps=parse_counts(stages, "--train", "100,1000"),
        budget=Budget(*restarts, practice=practice),
        optimized=optimized,
    )

    def check(kind: str, sizes: str) -> None:
        other, foreign = ("images", IMAGE_OPTIONS) if kind == "texts" else ("texts", TEXT_OPTIONS)
        reject_options(passed, foreign, f"requires a model of {other}; {model} reads {kind}")
        info(sizes)

    state = state_of("audit-gradients", json, report)
    with saved_steps(state), step_bar("audit") as progress, unknown_attacks():
        result = audit.gradients(
            model,
            source,
            defence or None,
            options=options,
            fail_above=fail_above,
            seed=seed,
            facts=facts_of_run(),
            on_loaded=check,
            state=state,
            resume=resume,
            progress=progress,
        )
    code = deliver(result.results, str(result), json, report, must_decide=True)
    result.delete_state()
    return code


def _parse_budget(text: str) -> tuple[int, int]:
    """Parse STEPS,RESTARTS."""
    numbers = text.split(",")
    if len(numbers) != 2 or not all(p.strip().isdigit() and int(p) > 0 for p in numbers):
        raise typer.BadParameter(
            f"must be STEPS,RESTARTS, as in 300,2, got {text!r}", param_hint="--budget"
        )
    return int(numbers[0]), int(numbers[1])
