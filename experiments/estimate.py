"""The cost of an experiment before it starts: trainings, steps, time, memory and disk.

Nothing is looked up. Parameters and floating-point operations are counted on the model itself, the
rate of the device and the loading of examples are timed on a few of the real examples, and
activations are what autograd keeps of them. Tests and attacks are not part of the estimate.
"""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from experiments.paper_002.jigsaw_cells import RATIOS, subjects_of
from experiments.shared.models import fresh
from experiments.shared.presets import From, Subject
from experiments.shared.runner import Lab
from experiments.shared.train_cells import parameters_of, uri_of
from regauge.checkpoints.files import format_bytes
from regauge.data.tasks import Examples, prepare
from regauge.data.train import compute_gradients, count_steps, move_batch
from regauge.errors import DataError
from regauge.results.findings import Results, Table

TIMED = 4  # examples in a timed step
REPEATS = 3  # of which the fastest counts
MOMENTS = {"sgd": 1, "adam": 2, "adamw": 2}  # tensors of the optimizer per weight
# Ways of training per subject of the tables of 000.
WAYS = {"table2": 1, "table3": 3, "table4": 1, "table5": 2, "table7": 5, "figure5": 4, "figure6": 5}
# Trainings per backbone of 002.
BACKBONES: dict[str, Mapping[str, int]] = {
    "table1": {"vit": 2, "swin": 2, "resnet": 2},
    "table2": {"vit": 10},
    "table3": {"vit": 1 + len(RATIOS)},
    "table4": {"vit": 2, "resnet": 1},
    "table5": {"vit": 3},
    "table9": {"vit": 2, "resnet": 1},
    "figure2": {"vit": 2 + len(RATIOS), "swin": 2},
    "figure6": {"vit": 2},
}


@dataclass(frozen=True)
class Cost:
    """The cost of training one model once.

    Attributes:
        parameters: Weights of the model.
        examples: Training examples.
        steps: Steps of the recipe.
        flops: Floating-point operations of the forward and backward pass of one example.
        rate: Floating-point operations per second of the device, timed on a few examples.
        loading: Seconds to load and prepare one example.
        state: Bytes of weights, gradients and the optimizer's moments.
        activations: Bytes that autograd keeps for a batch.
        checkpoint: Bytes of the trained weights on disk.
        batch: Examples of a step.
    """

    parameters: int
    examples: int
    steps: int
    flops: float
    rate: float
    loading: float
    state: int
    activations: int
    checkpoint: int
    batch: int

    @property
    def seconds(self) -> float:
        """The time of all steps: loading and computing take turns."""
        return self.steps * self.batch * (self.flops / self.rate + self.loading)


def estimate(name: str, lab: Lab) -> Results:
    """Estimate the cost of an experiment from its preset and data.

    Raises:
        DataError: The experiment has no estimate, or its data or models are missing.
    """
    planned = trainings(name, lab)
    costs = [cost_of(lab, subject) for subject, _ in planned]
    rows: list[tuple[Any, ...]] = []
    for (subject, count), cost in zip(planned, costs, strict=True):
        rows.append(
            (
                subject.name,
                count,
                f"{cost.parameters / 1e6:.2f} M",
                f"{cost.examples:,}",
                f"{cost.steps:,}",
                f"{cost.steps * cost.batch * cost.flops:.3g}",
                f"{cost.rate / 1e9:.3g} GFLOP/s",
                f"{1e3 * cost.loading:.3g} ms",
                _duration(count * cost.seconds),
                format_bytes(cost.state + cost.activations),
                format_bytes(count * cost.checkpoint + cost.state),
            )
        )
    total = sum(count * cost.seconds for (_, count), cost in zip(planned, costs, strict=True))
    heads = (
        "model",
        "trainings",
        "parameters",
        "examples",
        "steps each",
        "FLOP each",
        "measured rate",
        "loading per example",
        "time of all",
        "memory",
        "disk",
    )
    note = (
        f"About {_duration(total)} of training on {lab.device}, plus tests and attacks, which are "
        "not estimated. The rate was timed on "
        f"{TIMED} examples in a step: larger batches may be faster. Memory is weights, gradients, "
        "moments and activations of a batch; disk is all trained weights and the state of one "
        f"running training. Data: {_data_sizes(lab, [s for s, _ in planned])}. Finished trainings "
        f"in {lab.cache} are reused, and an interrupted one resumes."
    )
    table = Table(f"Estimate of {name}, preset {lab.preset_name}", heads, tuple(rows), note)
    return Results(f"Estimate of {name}", (), (table,), (), {"device": lab.device})


def format_estimate(results: Results) -> str:
    """Format an estimate for a terminal: a block per model, then the note."""
    (table,) = results.tables
    width = max(map(len, table.columns))
    blocks = [
        "\n".join(f"{head:{width}}  {cell}" for head, cell in zip(table.columns, row, strict=True))
        for row in table.rows
    ]
    return "\n\n".join([table.title, *blocks, textwrap.fill(table.note, 100)])


def trainings(name: str, lab: Lab) -> list[tuple[Subject, int]]:
    """Return the models that an experiment trains, and how often.

    Raises:
        DataError: The experiment has no estimate.
    """
    paper, _, key = name.partition("/")
    if paper == "000" and key in WAYS:
        subjects = [s for s in lab.preset.tables[key].values() if s.recipe is not None]
        return [(s, WAYS[key] * lab.trials_of(s)) for s in subjects]
    if paper == "000" and key in lab.preset.tables:  # split learning: one victim per combination
        return [
            (s, len(s.plan["combinations"]) * (lab.seeds or 1))
            for s in lab.preset.tables[key].values()
        ]
    if paper == "002" and key in BACKBONES:
        backbones, seeds = subjects_of(lab.preset_name), lab.seeds or 1
        return [(backbones[n], seeds * count) for n, count in BACKBONES[key].items()]
    known = [*(f"000/{k}" for k in lab.preset.tables), *(f"002/{k}" for k in BACKBONES)]
    raise DataError(f"{name} has no estimate", hint=f"choose from {', '.join(known)}")


def cost_of(lab: Lab, subject: Subject) -> Cost:
    """Count and time what one training of a subject costs on the device of the run."""
    assert subject.train is not None
    assert subject.recipe is not None
    recipe = subject.recipe
    data: dict[str, Any] = {"train": lab.open(subject.train), **lab.sources(subject, 0)}
    examples = prepare(subject.task, data["train"], uri_of(data, "tokenizer"))
    dtype = getattr(torch, recipe.get("dtype", "float32"))
    model = fresh(subject.model, 0, uri_of(data, "source")).to(lab.device, dtype).train()
    rows = np.arange(min(TIMED, len(examples)))
    loading = _fastest(lambda: examples.batch(rows)) / len(rows)
    flops, kept = count_pass(model, examples, rows, lab.device)
    seconds = _fastest(lambda: _pass(model, examples, rows, lab.device)) - loading * len(rows)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    moments = MOMENTS[recipe["optimizer"]]
    batch = int(recipe["batch"])
    return Cost(
        parameters_of(model),
        len(examples),
        count_steps(recipe, len(examples)),
        flops / len(rows),
        flops / max(seconds, 1e-9),
        loading,
        size * (2 + moments),
        round(kept / len(rows) * batch),
        size,
        batch,
    )


def count_pass(
    model: torch.nn.Module, examples: Examples, rows: Any, device: str
) -> tuple[float, int]:
    """Return the floating-point operations of a forward and backward pass, and the bytes that
    autograd keeps for it, weights excluded.
    """
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with (
        FlopCounterMode(display=False) as counter,
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        _pass(model, examples, rows, device)
    return float(counter.get_total_flops()), sum(kept.values())


def _pass(model: torch.nn.Module, examples: Examples, rows: Any, device: str) -> None:
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    inputs, labels = move_batch(examples.batch(rows), device, dtype)
    compute_gradients(model, examples, inputs, labels)
    model.zero_grad(set_to_none=True)
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def _fastest(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def _data_sizes(lab: Lab, subjects: Sequence[Subject]) -> str:
    """Return the size on disk of the data of some subjects, by name."""
    found: dict[str, str] = {}
    for subject in subjects:
        for source in (subject.train, subject.test):
            if source is not None and source.uri not in found:
                found[source.uri] = _size(lab, source)
    return ", ".join(f"{uri} {size}" for uri, size in found.items())


def _size(lab: Lab, source: From) -> str:
    names = [source.uri, source.uri.rpartition("/")[2]] if source.hub else [source.uri]
    path = next((p for n in names if (p := lab.assets / n).exists()), None)
    if path is None:
        return "(of the hub's cache)" if source.hub else "(bundled)"
    files = [path] if path.is_file() else [p for p in Path(path).rglob("*") if p.is_file()]
    return format_bytes(sum(p.stat().st_size for p in files))


def _duration(seconds: float) -> str:
    for unit, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.1f} {name}"
    return f"{max(seconds, 0.0):.1f} seconds" if math.isfinite(seconds) else "unknown"
