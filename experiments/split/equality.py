"""Split training against local training: the same batches, one run on one machine, one with the
backbone behind gRPC and mutual TLS on loopback.

Columns are locked and rows shuffled for every batch. Both runs are in float32, so that they agree
to rounding, which adds up over the steps. Biases of keys are left out of the comparison of weights:
softmax does not feel them, their gradient is rounding, and Adam makes whole steps of it. They are
compared through the outputs. The control is a client that has no key.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from experiments.shared.cells import Cell
from experiments.shared.models import build, draw
from experiments.shared.presets import Subject
from experiments.shared.runner import Lab
from experiments.shared.train_cells import parameters_of, uri_of
from regauge.checkpoints.resume import Outcome, ResumeState
from regauge.core.action import apply
from regauge.data.optimizer_config import OptimizerConfig
from regauge.data.tasks import Examples, logits_of, prepare
from regauge.data.train import ScheduledOptimizer, backward_on, descend
from regauge.errors import need
from regauge.results.findings import Finding, Results, Table

Tensor = torch.Tensor
STEPS = {"small": 100, "paper": 100, "pico": 10}
RATE, WITHOUT = 1e-3, 10  # of AdamW; and how many steps the client without a key takes
NEAR, NEAR_OUTPUTS, MORE = 1e-5, 1e-4, 1.05  # relative, relative, and of the four streams


def equality(lab: Lab) -> Results:
    """Split training equals local training: losses, weights and outputs of ViT, BERT and GPT-2 over
    mutual TLS, and the bytes of a step.
    """
    tables = lab.preset.tables
    subjects = {
        "image": tables["table3"]["image"],
        "bert": tables["table5"]["bert"],
        "gpt2": tables["table5"]["gpt2"],
    }
    trials = range(lab.trials)
    lab.total = len(subjects) * len(trials)
    findings: list[Finding] = []
    rows: list[tuple[Any, ...]] = []
    for key, subject in subjects.items():
        found = [_ran(lab, subject, trial) for trial in trials]
        findings += _claims(key, subject.name, found)
        one = found[0]
        rows.append(
            (
                subject.name,
                one["steps"],
                one["first"],
                one["last"],
                one["bytes"] / 1e6,
                one["budget"] / 1e6,
                one["bytes"] / one["budget"],
            )
        )
    columns = (
        "model",
        "steps",
        "first loss",
        "last loss",
        "MB per step",
        "four streams (MB)",
        "ratio",
    )
    note = (
        "A step sends the stream and the output's gradient, and receives the output and the "
        "stream's gradient; the rest is masks and tables."
    )
    facts = lab.facts("split/equality", len(trials))
    return Results(
        "Split training equals local training",
        tuple(findings),
        (Table("Traffic", columns, tuple(rows), note),),
        (),
        facts,
    )


def _ran(lab: Lab, subject: Subject, trial: int) -> Mapping[str, Any]:
    assert subject.train is not None
    assert subject.recipe is not None
    parameters = {
        "model": subject.model,
        "task": subject.task,
        "batch": subject.recipe["batch"],
        "seed": trial,
        "steps": STEPS[lab.preset_name],
    }
    data: dict[str, Any] = {"train": lab.open(subject.train), **lab.sources(subject, 0)}
    outcome = lab.run(SPLIT, parameters, data, f"train {subject.name} here and split, seed {trial}")
    found = outcome.values
    lab.sizes[subject.name] = {
        "parameters": found["parameters"],
        "trained on": f"{found['examples']:,} of {data['train'].name}",
    }
    return found


def _claims(key: str, name: str, found: Sequence[Mapping[str, Any]]) -> list[Finding]:
    def worst(what: str) -> float:
        return max(float(one[what]) for one in found)

    steps, trials = found[0]["steps"], len(found)
    detail = f"float32, {steps} steps of AdamW, columns locked and rows shuffled, over mutual TLS"
    share = max(one["bytes"] / one["budget"] for one in found)
    return [
        Finding(
            f"{key}/losses",
            f"Every loss of the split {name} equals that of the local one.",
            worst("losses") <= NEAR,
            worst("losses"),
            NEAR,
            min(float(one["losses without"]) for one in found),
            f"{detail}; the control is a client without the key",
            measure="largest relative difference of a loss",
            trials=trials,
        ),
        Finding(
            f"{key}/weights",
            f"The weights of the split {name}, unlocked, equal those of the local one.",
            worst("weights") <= NEAR,
            worst("weights"),
            NEAR,
            min(float(one["weights locked"]) for one in found),
            f"{detail}; without biases of keys; the control is the locked backbone",
            measure="relative difference of all weights together",
            trials=trials,
        ),
        Finding(
            f"goal/{key}/tensors",
            f"Each tensor of the split {name} equals that of the local one.",
            worst("tensors") <= NEAR,
            worst("tensors"),
            NEAR,
            None,
            f"the worst is {max(found, key=lambda one: float(one['tensors']))['worst']}; Adam "
            "makes steps of rounding where a gradient is almost 0: "
            "local training on the same batches in reverse order is "
            f"{worst('tensors by rounding'):.1e} from itself",
            measure="relative difference of the worst tensor",
            trials=trials,
        ),
        Finding(
            f"{key}/outputs",
            f"The outputs of the trained split {name} equal those of the local one.",
            worst("outputs") <= NEAR_OUTPUTS,
            worst("outputs"),
            NEAR_OUTPUTS,
            min(float(one["outputs before"]) for one in found),
            f"{detail}; the control is the model before its training",
            trials=trials,
        ),
        Finding(
            f"{key}/traffic",
            f"A step of {name} transfers four streams and little else.",
            share <= MORE,
            share,
            1.0,
            None,
            f"{found[0]['bytes']:,} bytes of frames, four streams are {found[0]['budget']:,}",
            measure="share of four streams",
            trials=trials,
        ),
    ]


def split(p: Mapping[str, Any], data: Mapping[str, Any], work: ResumeState) -> Outcome:
    """Train once here and once split, and compare."""
    need("grpc", "split")
    seed, steps = int(p["seed"]), int(p["steps"])
    examples = prepare(p["task"], data["train"], uri_of(data, "tokenizer"))
    start = build(p["model"], seed, uri_of(data, "source")).float().train()
    eager = getattr(start, "set_attn_implementation", None)
    if eager is not None:
        eager("eager")  # a causal mask is then a tensor, and moves with the rows
    g = draw(start, seed)
    rows = [
        np.random.default_rng([seed, step]).choice(len(examples), int(p["batch"]), replace=False)
        for step in range(steps)
    ]
    local = copy.deepcopy(start)
    expected = _descend(local, examples, rows)
    again = copy.deepcopy(start)
    _descend(
        again, examples, [some[::-1].copy() for some in rows]
    )  # the same sums in another order
    mine, losses, backbone, crossed, budget = _remote(start, g, g, examples, rows, seed)
    _, without, *_ = _remote(start, g, None, examples, rows[:WITHOUT], seed)
    locked = {**mine.state_dict(), **backbone}
    whole = dict(apply(~g, locked, part="backbone"))
    mine.load_state_dict(whole)
    apart = {n: _distance({n: whole[n]}, {n: t}) for n, t in local.state_dict().items()}
    worst = max(apart, key=lambda n: apart[n])
    outputs = [_outputs(model, examples, rows[0]) for model in (mine, local, start)]
    values = {
        "losses": _apart(losses, expected),
        "losses without": _apart(without, expected[:WITHOUT]),
        "weights": _distance(whole, local.state_dict()),
        "weights locked": _distance(locked, local.state_dict()),
        "tensors": apart[worst],
        "worst": worst,
        "tensors by rounding": max(
            _distance({n: t}, {n: local.state_dict()[n]}) for n, t in again.state_dict().items()
        ),
        "outputs": float((outputs[0] - outputs[1]).norm() / outputs[1].norm()),
        "outputs before": float((outputs[2] - outputs[1]).norm() / outputs[1].norm()),
        "first": expected[0],
        "last": expected[-1],
        "bytes": crossed,
        "budget": budget,
        "steps": steps,
        "examples": len(examples),
        "parameters": parameters_of(start),
    }
    return Outcome(values)


SPLIT = Cell("split", 3, split)


def _remote(
    start: torch.nn.Module, g: Any, known: Any, examples: Examples, rows: Sequence[Any], seed: int
) -> tuple[torch.nn.Module, list[float], dict[str, Tensor], int, int]:
    """Train behind gRPC: the client's model, its losses, the server's backbone, the most bytes that
    a step moved, and four streams.
    """
    from regauge.split import Host, connect
    from regauge.split.protocol.certificates import make_certificates
    from regauge.split.protocol.frames import Bytes, Kind, decode
    from regauge.split.server.network import Grpc, Server

    mine, served = copy.deepcopy(start), copy.deepcopy(start)
    served.load_state_dict(apply(g, start.state_dict(), part="backbone"))
    host = Host(served, OptimizerConfig("adamw", lr=RATE))
    streams: list[int] = []
    crossed = [0]

    class Counted(Grpc):
        def exchange(self, request: Sequence[memoryview]) -> Bytes:
            reply = super().exchange(request)
            crossed[0] += sum(map(len, request)) + len(reply)
            if not streams:
                frame = decode(reply)
                streams.extend(
                    t.numel() * t.element_size()
                    for t in frame.tensors.values()
                    if frame.kind is Kind.OUTPUT
                )
            return reply

    counts = [0]
    with tempfile.TemporaryDirectory() as folder:
        tls = make_certificates(folder)
        with (
            Server(host, tls=tls["server"]) as server,
            Counted(f"localhost:{server.port}", tls=tls["client"]) as network,
            connect(mine, network, element=known, rows="batch", secret=seed),
        ):
            counts[0] = crossed[0]
            losses = _descend(mine, examples, rows, lambda: counts.append(crossed[0]))
    return mine, losses, host.backbone(), max(b - a for a, b in pairwise(counts)), 4 * streams[0]


def _descend(
    model: torch.nn.Module, examples: Examples, rows: Sequence[Any], after: Any = None
) -> list[float]:
    optimizer = ScheduledOptimizer(
        [p for p in model.parameters() if p.requires_grad], OptimizerConfig("adamw", RATE)
    )
    losses = []
    backward = backward_on(model, examples, lambda n: rows[n])
    for _, loss in descend(optimizer, backward, range(len(rows))):
        losses.append(loss)
        if after is not None:
            after()
    return losses


def _outputs(model: torch.nn.Module, examples: Examples, rows: Any) -> Tensor:
    with torch.no_grad():
        return logits_of(model.eval(), examples.batch(rows)[0])


def _apart(found: Sequence[float], expected: Sequence[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def _distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """The relative difference of weights, biases of keys apart."""
    pairs = [
        (_felt(name, a[name]).double(), _felt(name, t).double())
        for name, t in b.items()
        if t.is_floating_point()
    ]
    return float(
        (
            sum(float((x - y).square().sum()) for x, y in pairs)
            / max(sum(float(y.square().sum()) for _, y in pairs), 1e-300)
        )
        ** 0.5
    )


def _felt(name: str, value: Tensor) -> Tensor:
    if name.endswith("c_attn.bias"):
        q, _, v = value.chunk(3)
        return torch.cat([q, v])
    return value[:0] if name.endswith(("key.bias", "k_proj.bias")) else value
