"""`regauge federate`: clients train on data that stay with them, a server averages what they
send.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regauge.cli import options, sample
from regauge.cli.console import info, step_bar
from regauge.cli.console import print_result as out_data
from regauge.cli.run import check_device, check_outputs, deliver, facts_of_run, set_threads

if TYPE_CHECKING:
    from regauge.federated.runs import RunResult
    from regauge.federated.state_store import Round


class Strategy(StrEnum):
    fedavg = "fedavg"
    fedprox = "fedprox"
    fedadam = "fedadam"
    matched = "matched"


class Partition(StrEnum):
    iid = "iid"
    dirichlet = "dirichlet"


class Optimizer(StrEnum):
    sgd = "sgd"
    adam = "adam"
    adamw = "adamw"


class EngineName(StrEnum):
    process = "process"
    simulation = "simulation"
    deployment = "deployment"


class Weigh(StrEnum):
    examples = "examples"
    clients = "clients"


class Aggregation(StrEnum):
    mean = "mean"
    median = "median"
    trimmed_mean = "trimmed-mean"
    clipped_mean = "clipped-mean"


def federate(
    model: options.Model,
    data: Annotated[
        str,
        typer.Option(
            "--data",
            metavar="URI",
            help="What the clients share out among themselves: examples with labels.",
        ),
    ],
    clients: Annotated[int, typer.Option("--clients", metavar="N", help="How many there are.")],
    rounds: Annotated[
        int,
        typer.Option(
            "--rounds",
            metavar="R",
            help="How often they are asked. More than a run has had makes it longer.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            metavar="RUN",
            help="The run's folder. One that is there goes on where it stood.",
        ),
    ],
    strategy: Annotated[
        Strategy, typer.Option("--strategy", help="How contributions become the next model.")
    ] = Strategy.fedavg,
    partition: Annotated[
        Partition,
        typer.Option("--partition", help="Even parts, or classes shared out by a Dirichlet draw."),
    ] = Partition.iid,
    alpha: Annotated[
        float,
        typer.Option(
            "--alpha", metavar="A", help="Of the Dirichlet draw: the smaller, the more unlike."
        ),
    ] = 0.5,
    asked: Annotated[
        float,
        typer.Option(
            "--participation", metavar="X", help="The share of clients that a round asks."
        ),
    ] = 1.0,
    least: Annotated[
        int,
        typer.Option(
            "--min-clients", metavar="N", help="Contributions without which a round does not count."
        ),
    ] = 1,
    epochs: Annotated[
        int,
        typer.Option(
            "--epochs", metavar="N", help="Times that a client goes through its data in a round."
        ),
    ] = 1,
    steps: Annotated[
        int, typer.Option("--steps", metavar="N", help="Local steps in place of epochs.")
    ] = 0,
    batch: Annotated[
        int, typer.Option("--batch-size", metavar="N", help="Examples of a local step.")
    ] = 32,
    optimizer: Annotated[
        Optimizer, typer.Option("--optimizer", help="The clients'.")
    ] = Optimizer.sgd,
    rate: Annotated[float, typer.Option("--lr", metavar="X", help="Its rate.")] = 0.05,
    momentum: Annotated[float, typer.Option("--momentum", metavar="X", help="Of sgd.")] = 0.0,
    decay: Annotated[
        float, typer.Option("--weight-decay", metavar="X", help="Its weight decay.")
    ] = 0.0,
    clip: Annotated[
        float,
        typer.Option("--clip", metavar="X", help="The largest norm of a local gradient; 0: any."),
    ] = 0.0,
    proximal: Annotated[
        float,
        typer.Option(
            "--proximal",
            metavar="MU",
            help="FedProx: how strongly clients are held to the server's weights.",
        ),
    ] = 0.0,
    server_rate: Annotated[
        float | None,
        typer.Option(
            "--server-lr", metavar="X", help="The server's step. Default: 1; of fedadam 0.01."
        ),
    ] = None,
    weigh: Annotated[
        Weigh, typer.Option("--weigh", help="What counts in the mean.")
    ] = Weigh.examples,
    aggregation: Annotated[
        Aggregation,
        typer.Option(
            "--aggregation",
            help="Rule that combines contributions; the last three bound the influence of one "
            "client.",
        ),
    ] = Aggregation.mean,
    trim: Annotated[
        float,
        typer.Option(
            "--trim", metavar="X", help="Share that trimmed-mean drops at each end of a coordinate."
        ),
    ] = 0.2,
    clipping_norm: Annotated[
        float,
        typer.Option(
            "--clipping-norm",
            metavar="X",
            help="Norm that clipped-mean scales down to. 0: the round's median.",
        ),
    ] = 0.0,
    max_examples: Annotated[
        int,
        typer.Option(
            "--max-examples",
            metavar="N",
            help="Largest count of examples a client may claim. 0: the largest part of --data.",
        ),
    ] = 0,
    max_norm: Annotated[
        float,
        typer.Option(
            "--max-norm",
            metavar="X",
            help="Reject contributions of a larger norm. 0: no absolute limit.",
        ),
    ] = 0.0,
    norm_factor: Annotated[
        float,
        typer.Option(
            "--norm-factor",
            metavar="X",
            help="Reject contributions beyond X times the round's median norm. 0: never.",
        ),
    ] = 5.0,
    uneven: Annotated[
        float,
        typer.Option(
            "--step-jitter",
            metavar="X",
            help="Clients take fewer local steps, by up to this share.",
        ),
    ] = 0.0,
    drop: Annotated[
        float,
        typer.Option("--drop", metavar="X", help="Lose this share of contributions on purpose."),
    ] = 0.0,
    jigsaw: Annotated[
        float,
        typer.Option(
            "--jigsaw", metavar="R", help="Clients train with masked jigsaw puzzles of this ratio."
        ),
    ] = 0.0,
    probability: Annotated[
        float,
        typer.Option(
            "--probability", metavar="P", help="The share of local steps that have puzzles."
        ),
    ] = 0.5,
    independent: Annotated[
        bool,
        typer.Option(
            "--independent", help="Clients begin apart, from weights that each draws itself."
        ),
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Draw the server's weights anew: train from scratch.")
    ] = False,
    defence: Annotated[
        list[str] | None,
        typer.Option(
            "--defence",
            metavar="D",
            help="What clients do to what they send: clip=1, private=1.0,norm=0.5, "
            "freeze=embedding, prune=0.9.",
        ),
    ] = None,
    secure: Annotated[
        bool,
        typer.Option(
            "--secure",
            help="The server sees the mean of contributions only: Flower's SecAgg+, on its "
            "engines.",
        ),
    ] = False,
    spy: Annotated[
        bool,
        typer.Option(
            "--record", help="Keep what the server sees, for regauge audit gradients --from RUN."
        ),
    ] = False,
    engine: Annotated[
        EngineName,
        typer.Option(
            "--engine",
            help="In this process, Flower's simulation, or nodes that are connected to a "
            "SuperLink.",
        ),
    ] = EngineName.process,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers", min=1, metavar="N", help="Of a simulation. Default: one per core."
        ),
    ] = None,
    superlink: Annotated[
        str | None, typer.Option("--superlink", metavar="HOST:PORT", help="Of a deployment.")
    ] = None,
    authority: Annotated[
        Path | None,
        typer.Option("--authority", metavar="PEM", help="Who signed the SuperLink's certificate."),
    ] = None,
    wait: Annotated[
        float,
        typer.Option(
            "--wait",
            min=1.0,
            metavar="S",
            help="Seconds that a round of Flower's waits for its clients.",
        ),
    ] = 600.0,
    gather: Annotated[
        float,
        typer.Option(
            "--gather",
            min=0.0,
            metavar="S",
            help="Seconds that it waits for those that are not connected.",
        ),
    ] = 60.0,
    test: Annotated[
        str | None,
        typer.Option(
            "--test",
            metavar="URI",
            help="To measure on. Default: a tenth of the data, which no client has.",
        ),
    ] = None,
    test_split: Annotated[
        str, typer.Option("--test-split", metavar="S", help="The split of --test.")
    ] = "test",
    field: sample.Field = None,
    split: sample.Split = "train",
    tokenizer: sample.Tokenizer = None,
    length: sample.Length = None,
    mean: sample.Mean = None,
    std: sample.Std = None,
    seed: Annotated[int, options.seed_option("The seed of all draws.")] = 0,
    device: options.Device = "cpu",
    threads: options.Threads = None,
    json: options.JsonFile = None,
    verbose: options.Verbose = 0,
) -> int:
    """Train a model on data that stay with their clients. The run's folder holds the model, its
    history, and what it needs to go on after any end.
    """
    started = time.monotonic()
    check_device(device)
    check_outputs(json, None)
    if json is not None and engine is EngineName.deployment:
        raise typer.BadParameter(
            "the results of a deployment are on the SuperLink's machine, in the run's folder",
            param_hint="--json",
        )

    from regauge.federated.defences import read_defences
    from regauge.federated.runs import Source
    from regauge.federated.settings import Settings

    set_threads(threads)
    given: dict[str, Any] = {
        "clients": clients,
        "rounds": rounds,
        "alpha": alpha,
        "participation": asked,
        "min_clients": least,
        "epochs": epochs,
        "steps": steps,
    }
    given |= {
        "batch": batch,
        "lr": rate,
        "momentum": momentum,
        "weight_decay": decay,
        "clip": clip,
        "proximal": proximal,
        "server_lr": server_rate,
    }
    given |= {
        "step_jitter": uneven,
        "drop": drop,
        "jigsaw": jigsaw,
        "probability": probability,
        "independent": independent,
        "seed": seed,
        "secure": secure,
    }
    given |= {
        "trim": trim,
        "clipping_norm": clipping_norm,
        "max_examples": max_examples,
        "max_norm": max_norm,
        "norm_factor": norm_factor,
    }
    given |= {"aggregation": aggregation.value}
    given |= {
        "strategy": strategy.value,
        "partition": partition.value,
        "optimizer": optimizer.value,
        "weigh": weigh.value,
    }
    settings = Settings(**given, defences=tuple(defence or ()))
    read_defences(settings.defences)
    means, stds = sample.parse_numbers(mean, "--mean"), sample.parse_numbers(std, "--std")
    source = Source(
        model,
        data,
        split,
        sample.parse_fields(field),
        tokenizer,
        length,
        means,
        stds,
        test,
        test_split,
        fresh,
        device,
    )
    if engine is EngineName.deployment:
        if superlink is None or authority is None:
            raise typer.BadParameter(
                "a deployment needs --superlink HOST:PORT and --authority PEM",
                param_hint="--engine",
            )
        for line in _run_deployment(source, settings, out, superlink, authority, wait, gather, spy):
            out_data(line)
        code = 0
    else:
        options_ = (
            {"workers": workers, "wait": wait, "gather": gather}
            if engine is EngineName.simulation
            else {}
        )
        found = _run_locally(
            engine, source, settings, out, record=spy, about=facts_of_run(), **options_
        )
        code = deliver(found.results, "\n".join(found.lines), json, None)
    info(f"run: {out} ({time.monotonic() - started:.1f} s)")
    return code


def _run_locally(
    engine: EngineName, source: Any, settings: Any, out: Path, **more: Any
) -> RunResult:
    run: Callable[..., RunResult]
    if engine is EngineName.simulation:
        from regauge.federated.flower import simulate

        run = simulate
    else:
        from regauge.federated.runs import run_federated

        run = run_federated
    with step_bar("round") as progress:

        def on_round(one: Round) -> None:
            progress(one.number, settings.rounds, describe_round(one))

        return run(source, settings, out, on_round=on_round, **more)


def _run_deployment(
    source: Any,
    settings: Any,
    out: Path,
    superlink: str,
    authority: Path,
    wait: float,
    gather: float,
    spy: bool,
) -> tuple[str, ...]:
    """Submit the run to a SuperLink and follow it. What its server says goes to stderr."""
    import subprocess
    import sys
    import tempfile

    from regauge.errors import RegaugeError
    from regauge.federated import deployment as deploying

    if not authority.is_file():
        raise typer.BadParameter(f"there is no {authority}", param_hint="--authority")
    with tempfile.TemporaryDirectory() as place:
        home, bundle = Path(place) / "home", Path(place) / "bundle"
        deploying.write_connection(home, superlink, authority)
        deploying.write_bundle(
            bundle, source.to_dict(), settings, out, wait=wait, gather=gather, record=spy
        )
        ended = subprocess.run(
            deploying.submit_command(bundle),
            env=deploying.build_environment(home),
            stdout=sys.stderr,
            check=False,
        )
    if ended.returncode:
        raise RegaugeError(
            f"Flower ended with code {ended.returncode}",
            hint="what it says is above; the same command goes on from the last round",
        )
    return (f"{out}: on the SuperLink's machine",)


def describe_round(one: Round) -> str:
    """A round in a line."""
    shown = [f"{len(one.contributed)} contributed"]
    shown += [f"{len(one.rejected)} rejected"] if one.rejected else []
    shown += [f"client {c}: {why}" for c, why in list(one.absent.items())[:3]]
    shown += [f"and {len(one.absent) - 3} more are absent"] if len(one.absent) > 3 else []
    shown += [] if one.loss is None else [f"loss {one.loss:.4f}"]
    shown += [f"accuracy {one.measures['accuracy']:.4f}"] if "accuracy" in one.measures else []
    shown += [
        f"{name} {value:.4f}"
        for name, value in one.measures.items()
        if name == "accuracy of clients"
    ]
    shown += [one.fault] if one.fault else []
    return ", ".join(["void: nothing changed", *shown] if one.void else shown)
