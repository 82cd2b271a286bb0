"""`regauge federate`: clients train on their own data, a server averages their updates."""

from __future__ import annotations

import time
from contextlib import nullcontext
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from regauge.cli import options, sample
from regauge.cli.console import info, step_bar
from regauge.cli.run import check_outputs, deliver, facts_of_run, saved_rounds, set_threads
from regauge.core.options import require_device

_AGGREGATION = "Aggregation"
_FLOWER = "Flower"
Strategy = StrEnum("Strategy", ["fedavg", "fedprox", "fedadam", "matched"])
Partition = StrEnum("Partition", ["iid", "dirichlet"])
Optimizer = StrEnum("Optimizer", ["sgd", "adam", "adamw"])
Engine = StrEnum("Engine", ["process", "simulation", "deployment"])
Weigh = StrEnum("Weigh", ["examples", "clients"])
Aggregation = StrEnum("Aggregation", ["mean", "median", "trimmed-mean", "clipped-mean"])


def federate(
    model: options.Model,
    data: Annotated[
        str,
        typer.Option(
            "--data",
            metavar="URI",
            help="Labelled examples to partition among the clients.",
        ),
    ],
    clients: Annotated[int, typer.Option("--clients", metavar="N", help="Number of clients.")],
    rounds: Annotated[
        int,
        typer.Option(
            "--rounds",
            metavar="R",
            help="Number of rounds. A larger number extends a finished run.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            metavar="RUN",
            help="Run folder. An existing one is resumed.",
        ),
    ],
    strategy: Annotated[
        Strategy, typer.Option("--strategy", help="Rule from contributions to the next model.")
    ] = Strategy("fedavg"),
    partition: Annotated[
        Partition,
        typer.Option(
            "--partition", help="Even parts, or classes distributed by a Dirichlet distribution."
        ),
    ] = Partition("iid"),
    alpha: Annotated[
        float,
        typer.Option(
            "--alpha",
            metavar="A",
            help="Concentration of the Dirichlet distribution: the smaller, the more skewed.",
        ),
    ] = 0.5,
    participation: Annotated[
        float,
        typer.Option("--participation", metavar="X", help="Share of clients sampled per round."),
    ] = 1.0,
    min_clients: Annotated[
        int,
        typer.Option(
            "--min-clients", metavar="N", help="Contributions required for a round to count."
        ),
    ] = 1,
    epochs: Annotated[
        int,
        typer.Option(
            "--epochs",
            metavar="N",
            help="Local epochs per round.",
            rich_help_panel=options.TRAINING,
        ),
    ] = 1,
    steps: Annotated[
        int,
        typer.Option(
            "--steps",
            metavar="N",
            help="Local steps, instead of epochs.",
            rich_help_panel=options.TRAINING,
        ),
    ] = 0,
    batch: Annotated[
        int, typer.Option("--batch-size", metavar="N", help="Examples per local step.")
    ] = 32,
    optimizer: Annotated[
        Optimizer,
        typer.Option(
            "--optimizer", help="Optimizer of the clients.", rich_help_panel=options.TRAINING
        ),
    ] = Optimizer("adamw"),
    lr: Annotated[
        float | None,
        typer.Option(
            "--lr",
            metavar="X",
            help="Learning rate of the clients. Default: 0.0001, and 0.005 for sgd; ten times "
            "that with --fresh.",
            rich_help_panel=options.TRAINING,
        ),
    ] = None,
    momentum: Annotated[
        float,
        typer.Option(
            "--momentum", metavar="X", help="Momentum of sgd.", rich_help_panel=options.TRAINING
        ),
    ] = 0.0,
    weight_decay: Annotated[
        float,
        typer.Option(
            "--weight-decay",
            metavar="X",
            help="Weight decay of the clients.",
            rich_help_panel=options.TRAINING,
        ),
    ] = 0.0,
    clip: Annotated[
        float,
        typer.Option(
            "--clip",
            metavar="X",
            help="Largest norm of a local gradient; 0: unlimited.",
            rich_help_panel=options.TRAINING,
        ),
    ] = 1.0,
    proximal: Annotated[
        float,
        typer.Option(
            "--proximal",
            metavar="MU",
            help="FedProx: weight of the proximal term.",
            rich_help_panel=options.TRAINING,
        ),
    ] = 0.0,
    server_lr: Annotated[
        float | None,
        typer.Option(
            "--server-lr",
            metavar="X",
            help="Learning rate of the server. Default: 1; for fedadam 0.01.",
            rich_help_panel=options.TRAINING,
        ),
    ] = None,
    weigh: Annotated[
        Weigh,
        typer.Option(
            "--weigh",
            help="Weights of the mean: numbers of examples, or equal for all clients.",
            rich_help_panel=_AGGREGATION,
        ),
    ] = Weigh("examples"),
    aggregation: Annotated[
        Aggregation,
        typer.Option(
            "--aggregation",
            help="Aggregation rule; the last three bound the influence of one client.",
            rich_help_panel=_AGGREGATION,
        ),
    ] = Aggregation("mean"),
    trim: Annotated[
        float,
        typer.Option(
            "--trim",
            metavar="X",
            help="Share that trimmed-mean drops at each end of a coordinate.",
            rich_help_panel=_AGGREGATION,
        ),
    ] = 0.2,
    clipping_norm: Annotated[
        float,
        typer.Option(
            "--clipping-norm",
            metavar="X",
            help="Norm that clipped-mean clips to. 0: the round's median.",
            rich_help_panel=_AGGREGATION,
        ),
    ] = 0.0,
    max_examples: Annotated[
        int,
        typer.Option(
            "--max-examples",
            metavar="N",
            help="Largest number of examples a client may claim. 0: the largest part of --data.",
            rich_help_panel=_AGGREGATION,
        ),
    ] = 0,
    max_norm: Annotated[
        float,
        typer.Option(
            "--max-norm",
            metavar="X",
            help="Reject contributions of a larger norm. 0: no absolute limit.",
            rich_help_panel=_AGGREGATION,
        ),
    ] = 0.0,
    norm_factor: Annotated[
        float,
        typer.Option(
            "--norm-factor",
            metavar="X",
            help="Reject contributions beyond X times the round's median norm. 0: never.",
            rich_help_panel=_AGGREGATION,
        ),
    ] = 5.0,
    step_jitter: Annotated[
        float,
        typer.Option(
            "--step-jitter",
            metavar="X",
            help="Reduce the local steps of clients by up to this share.",
            rich_help_panel=options.ADVANCED,
        ),
    ] = 0.0,
    drop: Annotated[
        float,
        typer.Option(
            "--drop",
            metavar="X",
            help="Share of contributions to drop, to simulate failing clients.",
            rich_help_panel=options.ADVANCED,
        ),
    ] = 0.0,
    jigsaw: Annotated[
        float,
        typer.Option(
            "--jigsaw",
            metavar="R",
            help="Train clients with masked jigsaw puzzles of this ratio.",
            rich_help_panel=options.ADVANCED,
        ),
    ] = 0.0,
    probability: Annotated[
        float,
        typer.Option(
            "--probability",
            metavar="P",
            help="Share of local steps with puzzles.",
            rich_help_panel=options.ADVANCED,
        ),
    ] = 0.5,
    independent: Annotated[
        bool,
        typer.Option(
            "--independent",
            help="Initialize each client with random weights of its own.",
            rich_help_panel=options.ADVANCED,
        ),
    ] = False,
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh",
            help="Train from scratch, with randomly initialized weights.",
            rich_help_panel=options.TRAINING,
        ),
    ] = False,
    defence: Annotated[
        list[str] | None,
        typer.Option(
            "--defence",
            metavar="D",
            help="Defence that clients apply to what they send: clip=1, private=1.0,norm=0.5, "
            "freeze=embedding, prune=0.9.",
        ),
    ] = None,
    secure: Annotated[
        bool,
        typer.Option(
            "--secure",
            help="Reveal only the mean of contributions to the server: Flower's SecAgg+, on its "
            "engines.",
            rich_help_panel=_FLOWER,
        ),
    ] = False,
    record: Annotated[
        bool,
        typer.Option(
            "--record",
            help="Record what the server receives, for regauge audit gradients --from RUN.",
        ),
    ] = False,
    engine: Annotated[
        Engine,
        typer.Option(
            "--engine",
            help="This process, Flower's simulation, or nodes connected to a SuperLink.",
            rich_help_panel=_FLOWER,
        ),
    ] = Engine("process"),
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            min=1,
            metavar="N",
            help="Workers of a simulation. Default: one per core.",
            rich_help_panel=_FLOWER,
        ),
    ] = None,
    superlink: Annotated[
        str | None,
        typer.Option(
            "--superlink",
            metavar="HOST:PORT",
            help="Address of a deployment's SuperLink.",
            rich_help_panel=_FLOWER,
        ),
    ] = None,
    authority: Annotated[
        Path | None,
        typer.Option(
            "--authority",
            exists=True,
            dir_okay=False,
            metavar="PEM",
            help="Certificate authority of the SuperLink.",
            rich_help_panel=_FLOWER,
        ),
    ] = None,
    wait: Annotated[
        float,
        typer.Option(
            "--wait",
            min=1.0,
            metavar="S",
            help="Seconds that a Flower round waits for its clients.",
            rich_help_panel=_FLOWER,
        ),
    ] = 600.0,
    gather: Annotated[
        float,
        typer.Option(
            "--gather",
            min=0.0,
            metavar="S",
            help="Seconds to wait for clients to connect.",
            rich_help_panel=_FLOWER,
        ),
    ] = 60.0,
    test: Annotated[
        str | None,
        typer.Option(
            "--test",
            metavar="URI",
            help="Test data. Default: a tenth of the data, withheld from the clients.",
            rich_help_panel=options.DATA,
        ),
    ] = None,
    test_split: Annotated[
        str,
        typer.Option(
            "--test-split", metavar="S", help="Split of --test.", rich_help_panel=options.DATA
        ),
    ] = "test",
    field: sample.Field = None,
    split: sample.Split = "train",
    tokenizer: sample.Tokenizer = None,
    length: sample.Length = None,
    mean: sample.Mean = None,
    std: sample.Std = None,
    seed: Annotated[int, options.seed_option("Random seed of the run.")] = 0,
    device: options.Device = "cpu",
    threads: options.Threads = None,
    json: options.JsonFile = None,
    report: options.Report = None,
    verbose: options.Verbose = 0,
) -> int:
    """Train a model on data that stay with their clients.

    The run's folder holds the model, its history, and the state to resume from.
    Exit code 3 if training made the model worse.
    """
    started = time.monotonic()
    require_device(device)
    check_outputs(json, report)
    deployed = engine == "deployment"
    if deployed and (json is not None or report is not None):
        raise typer.BadParameter(
            "the results of a deployment are on the SuperLink's machine, in the run's folder",
            param_hint="--report" if json is None else "--json",
        )
    if deployed and None in (superlink, authority):
        raise typer.BadParameter(
            "deployment requires --superlink HOST:PORT and --authority PEM", param_hint="--engine"
        )
    from regauge.federated import FlowerOptions, Settings, run

    set_threads(threads)
    settings = Settings(
        clients=clients,
        rounds=rounds,
        alpha=alpha,
        participation=participation,
        min_clients=min_clients,
        epochs=epochs,
        steps=steps,
        batch=batch,
        lr=lr,
        momentum=momentum,
        weight_decay=weight_decay,
        clip=clip,
        proximal=proximal,
        server_lr=server_lr,
        step_jitter=step_jitter,
        drop=drop,
        jigsaw=jigsaw,
        probability=probability,
        independent=independent,
        seed=seed,
        secure=secure,
        trim=trim,
        clipping_norm=clipping_norm,
        max_examples=max_examples,
        max_norm=max_norm,
        norm_factor=norm_factor,
        aggregation=aggregation.value,
        strategy=strategy.value,
        partition=partition.value,
        optimizer=optimizer.value,
        weigh=weigh.value,
        defences=tuple(defence or ()),
    )
    flower = FlowerOptions(workers, wait, gather, superlink, authority)
    # Flower prints the rounds of a deployment itself.
    bar = nullcontext() if deployed else step_bar("round")
    with saved_rounds(out, rounds), bar as progress:
        finished = run(
            model,
            data,
            settings=settings,
            folder=out,
            test=test,
            engine=engine.value,
            flower=flower,
            record=record,
            facts=facts_of_run(),
            progress=progress,
            split=split,
            fields=sample.parse_fields(field),
            tokenizer=tokenizer,
            length=length,
            mean=sample.parse_numbers(mean, "--mean"),
            std=sample.parse_numbers(std, "--std"),
            test_split=test_split,
            fresh=fresh,
            device=device,
        )
    code = deliver(finished.results, str(finished), json, report)
    info(f"run: {out} ({time.monotonic() - started:.1f} s)")
    return code
