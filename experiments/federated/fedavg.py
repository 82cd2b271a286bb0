"""Accuracy and leakage of federated training: FedAvg with and without masked jigsaw puzzles, with
frozen parts and with parts that clients keep local, on IID and non-IID data; and averages of
clients with different initializations, unmatched and matched.

Accuracy is that of the averaged model, combined with each client's local part if there is one (the
mean over clients). Leakage is measured in the first, the middle and the last round: of the updates
as sent, and of the worst case, an update of one image and one step from the same state with the
same defences. The attacker is the server.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from experiments.shared.cells import Cell
from experiments.shared.models import build
from experiments.shared.presets import From, vit_config
from experiments.shared.runner import Lab
from experiments.shared.verdicts import compare, require_seeds
from regauge.audit.gradient_audit.attempts import QUICK, Budget
from regauge.audit.gradient_audit.engine import Attacker
from regauge.audit.recorded_audit.engine import (
    MAX_OWN,
    attack_recorded,
    practise_like,
    rebuild_truth,
)
from regauge.audit.recorded_audit.report import IMAGE_FORMAT, measure
from regauge.checkpoints.resume import Outcome, ResumeState
from regauge.core.rng import seed_key
from regauge.data.tasks import Examples, prepare
from regauge.federated import (
    InProcess,
    Settings,
    contribute,
    partition_examples,
    prepare_model,
    run_rounds,
    state_of,
)
from regauge.federated.client import sample_rows
from regauge.federated.defences import apply_defences, frozen_names, read_defences
from regauge.federated.fusion import average_weights, split_test
from regauge.federated.local_state import LocalState
from regauge.federated.outputs import CLIENT_ACCURACY
from regauge.federated.recorder import RecordedUpdate
from regauge.federated.rounds import completed_rounds
from regauge.federated.runs import make_measure
from regauge.federated.settings import read_settings
from regauge.federated.states import Contribution
from regauge.results.findings import Figure, Finding, Results, Table, spread_of

Parameters = Mapping[str, Any]
PRACTICE = {"small": 60, "paper": 100, "pico": 10}  # updates of its own that the server learns from
UPDATES = 4  # attacked at each of three rounds
WAYS: Mapping[str, Mapping[str, Any]] = {
    "FedAvg": {},
    "FedAvg + MJP": {"jigsaw": 0.3},
    "FedAvg + MJP, embedding frozen": {"jigsaw": 0.3, "defences": ["freeze=embedding"]},
    "FedAvg + MJP, embedding kept local": {"jigsaw": 0.3, "defences": ["withhold=embedding"]},
    "FedAvg, embedding and first block frozen": {"defences": ["freeze=embedding,first"]},
}
PARTS: Mapping[str, Mapping[str, Any]] = {
    "IID": {"partition": "iid"},
    "non-IID": {"partition": "dirichlet", "alpha": 0.3},
}
TRAINING = {
    "small": {
        "clients": 8,
        "rounds": 40,
        "steps": 8,
        "batch": 16,
        "optimizer": "sgd",
        "momentum": 0.9,
        "rate": 0.05,
    },
    "paper": {
        "clients": 20,
        "rounds": 100,
        "steps": 20,
        "batch": 32,
        "optimizer": "sgd",
        "momentum": 0.9,
        "rate": 0.05,
    },
    "pico": {"clients": 2, "rounds": 2, "steps": 2, "batch": 8, "optimizer": "sgd", "rate": 0.05},
}
FUSION = {
    "small": {
        "clients": 3,
        "rounds": 2,
        "epochs": 40,
        "batch": 50,
        "optimizer": "adamw",
        "rate": 2e-3,
        "decay": 0.01,
    },
    "paper": {
        "clients": 4,
        "rounds": 6,
        "epochs": 60,
        "batch": 50,
        "optimizer": "adamw",
        "rate": 2e-3,
        "decay": 0.01,
    },
    "pico": {
        "clients": 2,
        "rounds": 2,
        "epochs": 2,
        "batch": 50,
        "optimizer": "adamw",
        "rate": 5e-3,
    },
}
FUSED: Mapping[str, Mapping[str, Any]] = {
    "unmatched": {"strategy": "fedavg", "looks": False},
    "matched on noise": {"strategy": "matched", "looks": False},
    "matched on the server's inputs": {"strategy": "matched", "looks": True},
}
DATA = {"train": From("digits"), "test": From("digits", split="test")}
TASK = {"kind": "images", "classes": 10, "mean": [0.3], "std": [0.38], "size": 8}
SEEDS = {"small": 3, "paper": 5, "pico": 1}
CHANCE = 0.1


def model_of(preset: str) -> dict[str, Any]:
    width, layers = {"small": (48, 2), "paper": (48, 4), "pico": (16, 1)}[preset]
    return {
        "class": "ViTForImageClassification",
        "config": vit_config(8, 2, width, layers, num_labels=10),
    }


def train(p: Parameters, data: Mapping[str, Any], work: ResumeState) -> Outcome:
    """Run federated training: the accuracy of every round, and the leakage of updates."""
    settings = read_settings({"clip": 0.0, **p["settings"], "seed": p["seed"]})
    examples, test = prepare(p["task"], data["train"]), prepare(p["task"], data["test"])
    model = prepare_model(build(p["model"], int(p["seed"])), settings).to(work.device)
    parts = partition_examples(examples, settings)
    marks = sorted({0, settings.rounds // 2, settings.rounds - 1})
    caught: dict[int, tuple[Mapping[str, torch.Tensor], Sequence[Contribution]]] = {}

    def record(
        number: int, state: Mapping[str, torch.Tensor], sent: Sequence[Contribution]
    ) -> None:
        if number in marks:
            caught[number] = (dict(state), list(sent))

    own = LocalState()
    kept = run_rounds(
        InProcess(model, parts, settings, own),
        state_of(model),
        settings,
        measure=make_measure(model, test, local_state=own),
        recorder=record,
    )
    leaks = {
        str(n): _leaks(model, parts, test, settings, p, n, *caught[n]) for n in marks if n in caught
    }
    accuracies = [
        r.measures.get(CLIENT_ACCURACY, r.measures["accuracy"])
        for r in completed_rounds(kept.history)
    ]
    return Outcome(
        {
            "accuracy": accuracies,
            "leaks": leaks,
            "examples": len(examples),
            "parameters": sum(t.numel() for t in kept.state.values()),
        }
    )


def _leaks(
    model: torch.nn.Module,
    parts: Sequence[Examples],
    test: Examples,
    settings: Settings,
    p: Parameters,
    number: int,
    state: Mapping[str, torch.Tensor],
    sent: Sequence[Contribution],
) -> dict[str, list[dict[str, Any]]]:
    budget = Budget(seed=settings.seed, practice=int(p["practice"]))
    own = test.only(np.arange(min(MAX_OWN, len(test))))
    attacker = Attacker(own, budget, p["task"]["mean"], p["task"]["std"])
    practice: dict[str, Attacker] = {}
    defences = read_defences(settings.defences)
    alone = replace(
        settings,
        batch=1,
        steps=1,
        momentum=0.0,
        probability=1.0 if settings.jigsaw else settings.probability,
    )
    out: dict[str, list[dict[str, Any]]] = {"as sent": [], "one image": []}
    for c in sent[:UPDATES]:
        one = contribute(
            model,
            state,
            parts[c.client],
            alone,
            number,
            c.client,
            frozen=frozen_names(model, defences),
        )
        for name, way, made in (
            ("as sent", settings, c),
            ("one image", alone, apply_defences(one, model, defences, seed_key(settings.seed))),
        ):
            truth = rebuild_truth(
                model,
                parts[c.client],
                sample_rows(c.examples, way, number, c.client),
                way,
                number,
                c.client,
            )
            seen = RecordedUpdate(
                number,
                c.client,
                state,
                made.tensors,
                made.steps,
                made.lr,
                made.batch,
                made.examples,
            )
            if name not in practice:
                practice[name] = practise_like(attacker, model, seen, way)
            row = attack_recorded(model, seen, truth, practice[name], QUICK)
            scores = measure(row, IMAGE_FORMAT, {a.name for a in QUICK})
            scores["AUC"] = scores.pop("patches")
            out[name].append({"images": row.samples, "steps": seen.steps, **scores})
    return out


def fuse(p: Parameters, data: Mapping[str, Any], work: ResumeState) -> Outcome:
    """Clients that begin apart: accuracy after each round, by the way in which the first is
    averaged.
    """
    settings = read_settings(
        {
            "clip": 0.0,
            **p["settings"],
            "seed": p["seed"],
            "independent": True,
            "strategy": p["strategy"],
        }
    )
    examples = prepare(p["task"], data["train"])
    test, inputs = split_test(prepare(p["task"], data["test"]))
    model = build(p["model"], int(p["seed"])).to(work.device)
    alone: list[float] = []

    def record(
        number: int, state: Mapping[str, torch.Tensor], sent: Sequence[Contribution]
    ) -> None:
        if number == 0:
            alone.extend(make_measure(model, test)(c.tensors)["accuracy"] for c in sent)

    engine = InProcess(model, partition_examples(examples, settings), settings)
    kept = run_rounds(
        engine,
        state_of(model),
        settings,
        measure=make_measure(model, test),
        recorder=record,
        fuse=partial(average_weights, model, inputs=inputs if p["looks"] else (), steps=p["steps"]),
    )
    return Outcome(
        {
            "accuracy": [r.measures["accuracy"] for r in completed_rounds(kept.history)],
            "alone": alone,
            "examples": len(examples),
        }
    )


TRAIN = Cell("federated-train", 3, train)
FUSE = Cell("federated-fuse", 2, fuse)


def training(lab: Lab) -> Results:
    """FedAvg with and without MJP and with frozen parts, on IID and non-IID data: accuracy and
    leakage.
    """
    trials = range(lab.seeds or SEEDS[lab.preset_name])
    lab.total = len(WAYS) * len(PARTS) * len(trials)
    lab.ahead(_part, [(way, part, trial) for trial in trials for part in PARTS for way in WAYS])
    found = {
        (way, part): [_trained(lab, way, part, trial) for trial in trials]
        for part in PARTS
        for way in WAYS
    }
    rows = [(way, part, *_row(many)) for (way, part), many in found.items()]
    columns = (
        "training",
        "partition",
        "accuracy",
        "accuracy ±",
        "one image: PSNR in the first round (dB)",
        "one image: PSNR in the last round (dB)",
        "the mean image (dB)",
        "one image: patch AUC, last round",
        "as sent: PSNR, last round (dB)",
        "as sent: patch AUC, last round",
        "as sent: labels recovered",
    )
    note = (
        "Means and standard deviations over seeds. One image: an update of one image in one step. "
        "As sent: the updates of the run. All attacks but the descents, including those that learn "
        "from the attacker's own updates."
    )
    findings = [
        f
        for part in PARTS
        for f in _claims(part, {way: found[(way, part)] for way in WAYS}, len(trials))
    ]
    first = next(iter(found.values()))[0]
    curves = {f"{way}, {part}": many[0]["accuracy"] for (way, part), many in found.items()}
    figure = Figure(
        "Accuracy over rounds, seed 0",
        "lines",
        {
            "x": list(range(1, len(first["accuracy"]) + 1)),
            "y": curves,
            "xlabel": "round",
            "ylabel": "accuracy",
            "log": False,
        },
    )
    facts = lab.facts("federated/training", len(trials), settings=TRAINING[lab.preset_name])
    return Results(
        "Federated training: accuracy and leakage",
        tuple(findings),
        (Table("Accuracy and leakage", columns, tuple(rows), note),),
        (figure,),
        facts,
    )


def _part(lab: Lab, item: tuple[str, str, int]) -> None:
    _trained(lab, *item)


def _trained(lab: Lab, way: str, part: str, trial: int) -> Mapping[str, Any]:
    settings = {**TRAINING[lab.preset_name], **PARTS[part], **WAYS[way]}
    parameters = {
        "model": model_of(lab.preset_name),
        "task": TASK,
        "settings": settings,
        "practice": PRACTICE[lab.preset_name],
        "seed": trial,
    }
    data = {name: lab.open(source) for name, source in DATA.items()}
    return lab.run(TRAIN, parameters, data, f"{way}, {part} data, seed {trial}").values


def _leak(many: Sequence[Mapping[str, Any]], kind: str, name: str, which: int) -> float | None:
    values = []
    for one in many:
        marks = sorted(one["leaks"], key=int)
        if marks:
            values += [
                row[name] for row in one["leaks"][marks[which]][kind] if row.get(name) is not None
            ]
    return statistics.fmean(values) if values else None


def _row(many: Sequence[Mapping[str, Any]]) -> tuple[Any, ...]:
    last = [one["accuracy"][-1] for one in many]
    return (
        statistics.fmean(last),
        spread_of(last),
        _leak(many, "one image", "leak", 0),
        _leak(many, "one image", "leak", -1),
        _leak(many, "one image", "floor", -1),
        _leak(many, "one image", "AUC", -1),
        _leak(many, "as sent", "leak", -1),
        _leak(many, "as sent", "AUC", -1),
        _leak(many, "as sent", "labels", -1),
    )


def _claims(
    part: str, found: Mapping[str, Sequence[Mapping[str, Any]]], trials: int
) -> list[Finding]:
    plain = found["FedAvg"]
    out = []
    for way, many in found.items():
        last = [one["accuracy"][-1] for one in many]
        base = statistics.fmean(one["accuracy"][-1] for one in plain)
        out.append(
            Finding(
                f"{part}/{way}/accuracy",
                f"{way} on {part} data: accuracy of the averaged model.",
                None,
                statistics.fmean(last),
                CHANCE,
                base,
                "the control is plain FedAvg",
                measure="accuracy",
                spread=spread_of(last),
                trials=trials,
            )
        )
        leak, floor = _leak(many, "one image", "leak", 0), _leak(many, "one image", "floor", 0)
        ceiling = _leak(plain, "one image", "leak", 0)
        if ceiling is not None:
            shown = floor if leak is None else leak
            detail = (
                "no attack on images applies: the tensors that it needs are not sent"
                if leak is None
                else "updates of one image in the first round"
            )
            out.append(
                Finding(
                    f"{part}/{way}/leak",
                    f"{way} on {part} data: what a server recovers from an update.",
                    None,
                    shown,
                    floor,
                    ceiling,
                    detail,
                    measure="PSNR, dB",
                    spread=spread_of(
                        [
                            a
                            for one in many
                            if (a := _leak([one], "one image", "leak", 0)) is not None
                        ]
                    ),
                    trials=trials,
                )
            )
    return out


def fusion(lab: Lab) -> Results:
    """Clients with different initializations: plain FedAvg against averaging after matching."""
    trials = range(lab.seeds or SEEDS[lab.preset_name])
    lab.total = len(FUSED) * len(trials)
    found = {way: [_fused(lab, way, trial) for trial in trials] for way in FUSED}
    rounds = len(found["unmatched"][0]["accuracy"])
    alone = statistics.fmean(a for one in found["unmatched"] for a in one["alone"])

    def at(way: str, n: int) -> list[float]:
        return [one["accuracy"][n] for one in found[way]]

    rows: list[tuple[Any, ...]] = [
        (way, *(statistics.fmean(at(way, n)) for n in range(rounds)), spread_of(at(way, 0)))
        for way in FUSED
    ]
    columns = (
        "average of the clients",
        *(f"round {n + 1}" for n in range(rounds)),
        "round 1 ±",
    )
    note = (
        "Accuracy on half of the server's examples, means over seeds; the clients "
        f"alone have {100 * alone:.1f} %. The server's inputs are the other half."
    )
    plain = statistics.fmean(at("unmatched", 0))
    findings = [
        f
        for way in list(FUSED)[1:]
        for f in _fusions(lab, way, at(way, 0), at("unmatched", 0), alone)
    ]
    detail = {"clients alone": alone, "unmatched": plain}
    facts = lab.facts("federated/fusion", len(trials), settings=FUSION[lab.preset_name]) | detail
    return Results(
        "Clients with different initializations",
        tuple(findings),
        (Table("Accuracy after each round", columns, tuple(rows), note),),
        (),
        facts,
    )


def _fusions(
    lab: Lab, way: str, matched: Sequence[float], plain: Sequence[float], alone: float
) -> list[Finding]:
    """Check the average after matching against the unmatched one and against chance."""
    mean, base = statistics.fmean(matched), statistics.fmean(plain)
    detail = (
        f"{100 * mean:.1f} % {way}, {100 * base:.1f} % unmatched, the clients alone "
        f"{100 * alone:.1f} %"
    )
    better = compare(matched, plain)
    works = require_seeds(base < 2 * CHANCE and mean > CHANCE + (alone - CHANCE) / 2, len(matched))
    judged = lab.preset_name != "pico"  # which trains too little for either
    detail = f"{better.reason}; {detail}" if better.holds is None else detail
    more: dict[str, Any] = {
        "measure": "accuracy",
        "spread": spread_of(matched),
        "trials": len(matched),
    }
    what = f"Averaged {way}: "
    return [
        Finding(
            f"goal/{way}/better",
            what + "better than unmatched, by more than the seeds' spread.",
            better.holds if judged else None,
            mean,
            base,
            alone,
            detail,
            **more,
        ),
        Finding(
            f"goal/{way}/works",
            what
            + "at least half of the clients' accuracy above chance, while the unmatched average "
            "is below twice the chance level.",
            works.holds if judged else None,
            mean,
            CHANCE,
            alone,
            detail,
            **more,
        ),
    ]


def _fused(lab: Lab, way: str, trial: int) -> Mapping[str, Any]:
    parameters = {
        "model": model_of(lab.preset_name),
        "task": TASK,
        "settings": FUSION[lab.preset_name],
        "seed": trial,
        **FUSED[way],
    }
    parameters["steps"] = 5 if lab.preset_name == "pico" else None
    data = {name: lab.open(source) for name, source in DATA.items()}
    return lab.run(
        FUSE, parameters, data, f"clients with different initializations, {way}, seed {trial}"
    ).values
