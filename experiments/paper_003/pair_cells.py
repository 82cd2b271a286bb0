"""What is measured after two models were matched in a way: the path between them, merges, the plane
around them. Every answer is a cell.

A merge method is a function (`METHODS`); adding one is one line. What a way finds is kept as an
element, so that every measure after it moves A again rather than searching again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from experiments.paper_003.matchers import FINDERS, READ, How, Request, describe
from experiments.paper_003.pair_catalog import Pair
from experiments.shared.cells import Cell
from experiments.shared.models import build
from experiments.shared.runner import Lab
from regauge.checkpoints.element_files import arrays_of, element_of
from regauge.checkpoints.resume import Outcome, ResumeState, canonical_values
from regauge.core.action import State, apply
from regauge.core.element import Element, identity
from regauge.core.fold import fold_norms
from regauge.core.members import Soft
from regauge.core.spec import Spec
from regauge.data.tasks import Examples, prepare
from regauge.matching.barriers import Curve, Path, interpolate, measure_path, measure_plane, score
from regauge.matching.costs import Costs
from regauge.merging import merge_states
from regauge.merging.data_pass import compute_statistic
from regauge.merging.methods import METHODS as MERGES
from regauge.models.resolve import spec_of

Tensor = torch.Tensor
Parameters = Mapping[str, Any]


@dataclass(frozen=True)
class Merging:
    """What a merge method is given: two states of one module, the first moved next to the second,
    and examples, of which those that look at data look at so many.
    """

    module: torch.nn.Module
    spec: Spec
    a: State
    b: State
    examples: Callable[[], Examples]
    samples: int


Method = Callable[[Merging], dict[str, Tensor]]


def _merged(m: Merging, method: str, **parameters: Any) -> dict[str, Tensor]:
    """B and the moved A in one of `regauge merge`'s ways. What data say is computed here, of A as
    it was moved: never of A before.
    """
    states, kind = [m.b, m.a], MERGES[method].statistic
    if not kind:
        return merge_states(states, method, spec=m.spec, **parameters)
    some = m.examples()  # once: opening them tokenises
    known = [compute_statistic(kind, m.module, some, m.samples, state=state) for state in states]
    return merge_states(states, method, statistics=known, spec=m.spec, **parameters)


# The six baselines of paper 003, by its names, with its factor of RegMean. Its Fisher is the
# empirical one, ours that of the model's predictions.
METHODS: dict[str, Method] = {
    "Simple": lambda m: interpolate(m.a, m.b, 0.5),
    "Fisher": lambda m: _merged(m, "fisher"),
    "RegMean": lambda m: _merged(m, "regmean", alpha=0.1),
    "OT-WTS": lambda m: _merged(m, "ot_wts"),
    "OT-ACTS": lambda m: _merged(m, "ot_acts"),
    "OT-ACTS-EMD": lambda m: _merged(m, "ot_acts_emd"),
}
LOOKING = ("Fisher", "RegMean", "OT-ACTS", "OT-ACTS-EMD")  # the methods that look at training data
ENDS: dict[str, Method] = {
    "A": lambda m: dict(m.a),
    "B": lambda m: dict(m.b),
}  # no merges: the ends themselves, measured in the same way


def find(p: Parameters, data: Mapping[str, Any], work: ResumeState) -> Outcome:
    """Search in one way: the element as arrays, and the distances before and after it, in the form
    (folded or not) that the way compares.
    """
    module, spec, a, b = ends_of(p, data)
    found = FINDERS[p["way"]["by"]](
        Request(spec, a, b, p["way"], module, lambda: examples_of(p, data, "train"))
    )
    costs = Costs(spec, a, b)
    before, after = (list(costs.distances(g).values()) for g in (identity(spec), found.element))
    arrays, kinds = arrays_of(found.element)
    values = {
        "before": sum(d for d, _ in before) ** 0.5,
        "after": sum(d for d, _ in after) ** 0.5,
        "size": sum(s for _, s in before) ** 0.5,
        "kinds": kinds,
        "soft": found.soft,
        "notes": list(found.notes),
    }
    return Outcome(
        values,
        {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()},
    )


def walk(p: Parameters, data: Mapping[str, Any], work: ResumeState) -> Outcome:
    """The path from the moved A to B, with temperatures fitted on what was kept for validation."""
    module, a, b = moved(p, data)
    test, other = examples_of(p, data, "test"), examples_of(p, data, "validation")
    path = measure_path(
        module,
        a,
        b,
        test,
        points=p["points"],
        calibration=other,
        batch_size=p["batch"],
        device=work.device,
    )
    values = {
        "t": path.ts,
        "loss": path.losses,
        "accuracy": path.accuracies,
        "temperature": path.temperatures,
        "examples": len(test),
    }
    values |= {"calibrated": path.calibrated.losses if path.calibrated else ()}
    return Outcome({k: list(v) if isinstance(v, tuple) else v for k, v in values.items()})


def walk_averages(p: Parameters, data: Mapping[str, Any], work: ResumeState) -> Outcome:
    """The same path, of other averages than that of the weights: of `products`, or of `grown`
    models, which have the attention of both ends (`grown_attention`).
    """
    from experiments.paper_003.grown_attention import grow

    module, a, b = moved(p, data)
    spec, test = ends_of(p, data)[1], examples_of(p, data, "test")
    scores = []
    for t in p["ts"]:
        model = module
        if p["average"] == "grown":
            model = grow(module, a, b, t)
            state = model.state_dict()
        else:
            state = merge_states([a, b], spec=spec, weight=[1 - t, t], products=True)
        scores.append(score(model, state, test, batch_size=p["batch"], device=work.device))
    return Outcome(
        {
            "t": list(p["ts"]),
            "loss": [s.loss for s in scores],
            "accuracy": [s.accuracy for s in scores],
            "examples": len(test),
        }
    )


def merge(p: Parameters, data: Mapping[str, Any], work: ResumeState) -> Outcome:
    """One model out of the moved A and B, by one method: its loss and accuracy on the test data."""
    module, a, b = moved(p, data)
    spec = ends_of(p, data)[1]
    state = {**METHODS, **ENDS}[p["method"]](
        Merging(module, spec, a, b, lambda: examples_of(p, data, "train"), p.get("samples", 0))
    )
    test = examples_of(p, data, "test")
    found = score(module, state, test, batch_size=p["batch"], device=work.device)
    return Outcome(
        {
            "loss": found.loss,
            "accuracy": found.accuracy,
            "examples": len(test),
            "classes": test.classes,
        }
    )


def landscape(p: Parameters, data: Mapping[str, Any], work: ResumeState) -> Outcome:
    """The losses on the plane through A, B and the moved A."""
    module, a, b = moved(p, data)
    _, _, first, _ = ends_of(p, data)
    corners = {"A": first, "B": b, "A, moved": a}
    found = measure_plane(
        module,
        corners,
        examples_of(p, data, "test"),
        points=p["points"],
        batch_size=p["batch"],
        device=work.device,
    )
    return Outcome(
        {
            "x": list(found.xs),
            "y": list(found.ys),
            "losses": [list(r) for r in found.losses],
            "points": {k: list(v) for k, v in found.points.items()},
        }
    )


MATCH, WALK, WALK_AVERAGES, MERGE, PLANE = (
    Cell("match", 1, find),
    Cell("walk", 1, walk),
    Cell("walk averages", 1, walk_averages),
    Cell("merge", 1, merge),
    Cell("plane", 1, landscape),
)


def moved(p: Parameters, data: Mapping[str, Any]) -> tuple[torch.nn.Module, State, State]:
    """The module, A as the way moves it, and B."""
    module, spec, a, b = ends_of(p, data)
    found: Outcome = data["match"]
    g = element_of(
        spec, {name: t.numpy() for name, t in found.tensors.items()}, found.values["kinds"]
    )
    if found.values["soft"]:
        g = Element(spec, {name: Soft(m.matrix()) for name, m in g.members.items()})
    return module, apply(g, a, force=found.values["soft"]), b


def ends_of(p: Parameters, data: Mapping[str, Any]) -> tuple[torch.nn.Module, Spec, State, State]:
    """The module and both states, with their norms folded if the way says so."""
    module = build(p["model"], 0, data["source"].uri if "source" in data else None).eval()
    spec = spec_of(module)
    a, b = (
        {n: t.float() if t.is_floating_point() else t for n, t in data[name].tensors.items()}
        for name in ("a", "b")
    )
    if p["way"].get("fold"):
        (folded, a), (_, b) = fold_norms(spec, a), fold_norms(spec, b)
        spec = folded
    return module, spec, a, b


def examples_of(p: Parameters, data: Mapping[str, Any], which: str) -> Examples:
    tokenizer = data["tokenizer"].uri if "tokenizer" in data else None
    found = prepare(p["tasks"][which], data["test" if which == "test" else "train"], tokenizer)
    rows = p["rows"].get(which)
    if rows is None or rows >= len(found):
        return found
    return found.only(np.unique(np.linspace(0, len(found) - 1, rows).astype(int)))


# How much is measured: rows of the test and of what temperatures are fitted on (None: all), points
# on a path, on a side of a plane, runs of a clock, examples that merges look at, and how many steps
# a refinement takes at most.
EFFORT: dict[str, dict[str, Any]] = {
    "small": {
        "rows": {"test": 2000, "validation": 200},
        "text": {"test": None, "validation": 16},
        "points": 11,
        "grid": 7,
        "runs": 5,
        "samples": 128,
    },
    "paper": {
        "rows": {"test": None, "validation": 1000},
        "text": {"test": None, "validation": 64},
        "points": 25,
        "grid": 21,
        "runs": 5,
        "samples": 1000,
    },
    "pico": {
        "rows": {"test": 60, "validation": 20},
        "text": {"test": 8, "validation": 4},
        "points": 3,
        "grid": 3,
        "runs": 1,
        "samples": 8,
        "steps": 20,
    },
}

# The same of single kinds, which have many pairs.
POINTS = {"gpt2-longer": 5, "llama-longer": 5, "vit-longer": 5}
ROWS = {"gpt2-longer": {"test": 80}, "llama-longer": {"test": 80}}


class Bench:
    """One pair in a lab: what a way finds between its ends, and what is measured after it. Every
    answer is a cell.
    """

    def __init__(self, lab: Lab, pair: Pair) -> None:
        self.lab, self.pair = lab, pair
        about, effort = pair.about, EFFORT[lab.preset_name]
        assert about.train is not None
        self.effort = effort
        tasks = {
            "train": dict(about.task),
            "validation": {**about.task, **about.validated},
            "test": {**about.task, **about.tested},
        }
        rows = effort["text" if about.task["kind"] == "text" else "rows"]
        rows = {**rows, **ROWS.get(pair.kind, {})}
        self.parameters = {"model": about.model, "tasks": tasks, "rows": rows, "batch": about.batch}
        self.data: dict[str, Any] = {"a": pair.a, "b": pair.b, **lab.sources(about, 0)}
        self.found: dict[bytes, Outcome] = {}
        self.examples = {"train": lab.open(about.train), "test": lab.open(about.test)}

    def match(self, how: How) -> Outcome:
        """What a way finds. One that reads no data is known by the two models alone."""
        key = canonical_values(how)
        if key not in self.found:
            reads = how["by"] in READ
            if "steps" in how and "steps" in self.effort:
                how = {**how, "steps": min(how["steps"], self.effort["steps"])}
            p = {
                **(self.parameters if reads else {"model": self.parameters["model"]}),
                "way": dict(how),
            }
            self.found[key] = self.lab.run(
                MATCH,
                p,
                {**self.data, **(self.examples if reads else {})},
                f"match {self.pair.label}: {describe(how)}",
            )
        return self.found[key]

    def walk(self, how: How) -> Path:
        points = POINTS.get(self.pair.kind, self.effort["points"])
        v = self._after(WALK, how, {"points": points}, "walk").values
        ts, calibrated = tuple(v["t"]), Curve(tuple(v["t"]), tuple(v["calibrated"]))
        return Path(ts, tuple(v["loss"]), tuple(v["accuracy"]), calibrated, tuple(v["temperature"]))

    def walk_averages(self, how: How, average: str) -> Path:
        """The path of "grown" models or of averaged "products", at every second point of `walk`."""
        ts = self.walk(how).ts
        some = {"ts": sorted({*ts[::2], ts[-1], 0.5}), "average": average}
        v = self._after(WALK_AVERAGES, how, some, f"walk, {average},").values
        return Path(tuple(v["t"]), tuple(v["loss"]), tuple(v["accuracy"]))

    def merge(self, how: How, method: str) -> Mapping[str, Any]:
        looked = {"samples": self.effort["samples"]} if method in LOOKING else {}
        return self._after(MERGE, how, {"method": method, **looked}, "merge").values

    def plane(self, how: How) -> Mapping[str, Any]:
        return self._after(PLANE, how, {"points": self.effort["grid"]}, "plane").values

    def _after(self, cell: Cell, how: How, more: Mapping[str, Any], what: str) -> Outcome:
        found = self.match(how)
        p = {**self.parameters, "way": dict(how), **more}
        return self.lab.run(
            cell,
            p,
            {**self.data, **self.examples, "match": found},
            f"{what} {self.pair.label}: {describe(how)}",
        )
