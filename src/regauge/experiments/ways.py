"""Ways to match two models, and what is measured after each: the cells that Figures 3 to 6 of paper 003 and the benchmark of Theus et al. share.

A way is a literal: who finds it (`by`, one of `FINDERS`), and how. A merge method is a function (`METHODS`). Adding either is one line. What a way
finds is kept as an element, so that every measure after it moves A again rather than searching again.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from regauge.action import State, apply
from regauge.barriers import Curve, Path, along, interpolate, plane, score
from regauge.elementfiles import arrays_of, element_of
from regauge.elements import Element, identity
from regauge.experiments import rotations
from regauge.experiments.cells import Cell, Outcome, Work, canonical
from regauge.experiments.ends import Pair
from regauge.experiments.lab import Lab
from regauge.experiments.models import build
from regauge.fold import fold_norms
from regauge.groups import Permutation, Scaling
from regauge.matching import match
from regauge.matching.costs import Costs
from regauge.matching.recording import drawn, record, written
from regauge.matching.refining import refine
from regauge.members import Member, Monomial, Soft
from regauge.merging import merge as merge_states
from regauge.merging.looking import computed
from regauge.merging.methods import METHODS as MERGES
from regauge.merging.transport import plan
from regauge.sources import spec_of
from regauge.spec import Spec
from regauge.streams import Floats
from regauge.tasks import Examples, prepare

Tensor = torch.Tensor
Parameters = Mapping[str, Any]
How = Mapping[str, Any]

# Paper 003's own matcher: rotations of heads as they stand, one factor each, neurons; biases as stored; each part on its own, so that no sweep helps.
PAPER: dict[str, Any] = {
    "by": "match",
    "spaces": ["qk", "vo", "ffn"],
    "within": "orthogonal",
    "rescale": True,
    "whole": True,
    "sweeps": 0,
}
HEADS = ["head", "kv", "rep"]
WAYS: dict[str, dict[str, Any]] = {
    "none": {"by": "none"},
    "folded": {"by": "none", "fold": True},
    "paper": PAPER,
    "without rescaling": {**PAPER, "rescale": False},
    "without FFN": {**PAPER, "spaces": ["qk", "vo"]},
    "without attention": {**PAPER, "spaces": ["ffn"]},
    "with heads": {**PAPER, "spaces": [*HEADS, *PAPER["spaces"]]},
    "with stream": {"by": "match", "within": "orthogonal", "rescale": True, "whole": True, "nearest": True},
    "neurons": {"by": "match", "within": "permutation", "spaces": ["ffn"]},
    "permutations": {"by": "match", "within": "permutation", "nearest": True},
    "transport": {"by": "transport"},
    "soft transport": {"by": "transport", "soft": 0.05},
    "ours": {"by": "match", "fold": True, "nearest": True},
    "seen": {"by": "seen", "fold": True, "texts": 64, "sweeps": 10, "nearest": False},
    "refined": {"by": "refine", "fold": True, "texts": 256, "sweeps": 10, "steps": 200},
    "refined longer": {"by": "refine", "fold": True, "texts": 4096, "sweeps": 10, "steps": 1200},
    "drawn": {"by": "seen", "fold": True, "texts": 64, "sweeps": 10, "noise": True},
}
SAID = {
    "none": "not matched",
    "folded": "folded, not moved",
    "paper": "003: rotations, rescaling, FFN",
    "without rescaling": "003 without rescaling",
    "without FFN": "003 without FFN (attention only)",
    "without attention": "003 without attention (FFN only)",
    "with heads": "003 + heads",
    "with stream": "003 + heads + stream, as they stand",
    "neurons": "Git Re-Basin, FFN only (as 003 had it)",
    "permutations": "Git Re-Basin, all permutations",
    "transport": "OT-Fusion, FFN, exact transport",
    "soft transport": "OT-Fusion, FFN, Sinkhorn (no element)",
    "ours": "ours: everything, norms folded",
    "seen": "ours, first by what the two do (language models: on text that they write; others: on unlabelled training data), then by weights",
    "refined": "the same to the nearest weights, and 200 learned steps on such inputs",
    "refined longer": "the same to the nearest weights, and 1,200 learned steps on unlabelled training data",
    "drawn": "ours, first by what the two do on noise, then by weights",
}


@dataclass(frozen=True)
class Request:
    """What a finder is given. `examples` are of the training data, and opened only where they are asked for."""

    spec: Spec
    a: State
    b: State
    how: How
    module: torch.nn.Module
    examples: Callable[[], Examples]


@dataclass(frozen=True)
class Found:
    element: Element
    soft: bool = False
    notes: Sequence[str] = ()


def _not_moved(r: Request) -> Found:
    return Found(identity(r.spec))


def _by_match(r: Request) -> Found:
    given = {k: v for k, v in r.how.items() if k not in ("by", "fold")}
    if "spaces" in given:  # a family without heads that move, or without grouped queries, has no such space
        roots = {s.split(".")[0] for s in r.spec.spaces}
        given["spaces"] = [s for s in given["spaces"] if s in roots]
    found = match(r.spec, r.a, r.b, **given)
    return Found(found.element, notes=found.notes)


def _by_seen(r: Request) -> Found:
    """By what the two do: language models on text that they write themselves, others on training data without labels, or on noise."""
    return Found(_seen(r, _inputs(r)))


def _by_refine(r: Request) -> Found:
    """The same, and then learned steps on the group, towards what the ends predict on such inputs."""
    inputs = _inputs(r)
    g, steps = _seen(r, inputs[: min(8, max(1, len(inputs) // 4))]), int(r.how["steps"])
    refined = refine(r.spec, r.a, r.b, g, r.module, inputs, steps=steps, held=min(0.1, 8 / len(inputs)), every=max(1, steps // 10))
    said = f"divergence from the ends {refined.start:.4f} before learning, {refined.loss:.4f} after {refined.step} steps"
    return Found(refined.g, notes=(said,))


def _seen(r: Request, inputs: Sequence[Mapping[str, Tensor]]) -> Element:
    seen = record(r.module, r.a, r.spec, inputs), record(r.module, r.b, r.spec, inputs)
    return match(r.spec, r.a, r.b, seen=seen, sweeps=int(r.how["sweeps"]), nearest=bool(r.how.get("nearest", True))).element


def _inputs(r: Request, batch: int = 8) -> list[dict[str, Tensor]]:
    count = int(r.how["texts"])
    if getattr(r.module, "can_generate", lambda: False)():
        ends = []
        for state in (r.a, r.b):
            ends.append(copy.deepcopy(r.module).eval())
            ends[-1].load_state_dict(dict(state))
        return written(ends, count=count, batch=batch)
    if r.how.get("noise"):
        return drawn(r.module, count=4 * count, batch=4 * batch)
    examples = r.examples()
    rows = np.random.default_rng(0).permutation(len(examples))[: 4 * count]  # a picture has fewer tokens than a text
    return [examples.batch(np.sort(rows[i : i + 4 * batch]))[0] for i in range(0, len(rows), 4 * batch)]


def _by_transport(r: Request) -> Found:
    """OT-Fusion's matching of neurons (Singh and Jaggi 2020): transport between the two layers' neurons with uniform marginals, by the Euclidean
    distance of their incoming weights and biases. Exact transport ends in a vertex, which is a permutation. With `soft`, Sinkhorn's plan at that
    share of the mean cost, used as a barycentric map: it mixes neurons, and the moved model is another function."""
    members: dict[str, Member] = {}
    costs = Costs(r.spec, r.a, r.b)
    for space in r.spec.spaces:
        if space.split(".")[0] == "ffn" and isinstance(r.spec.spaces[space].group, Permutation | Scaling):
            found = plan(*_incoming(costs, space), r.how.get("soft"))
            members[space] = Soft(found[None]) if r.how.get("soft") else Monomial(found.argmax(1)[None])
    return Found(Element(r.spec, members), bool(r.how.get("soft")))


def _incoming(costs: Costs, space: str) -> tuple[Floats, Floats]:
    """What each neuron reads, in b and in a: rows of weights and biases."""
    rows: list[tuple[Floats, Floats]] = []
    for y, x in costs.each(space, identity(costs.spec), lambda block: True):
        place = y.places(space)[0]
        leaf = y.dims[place]
        if leaf is not None and not leaf.star:
            rows.append((y.unfolded(place), x.unfolded(place)))
    there, here = (np.concatenate([np.asarray(pair[i], np.float64) for pair in rows], 1) for i in (0, 1))
    return there, here


FINDERS: dict[str, Callable[[Request], Found]] = {
    "none": _not_moved,
    "match": _by_match,
    "transport": _by_transport,
    "seen": _by_seen,
    "refine": _by_refine,
}
READ = frozenset({"seen", "refine"})  # the finders that look at data, where models do not write their own


@dataclass(frozen=True)
class Merging:
    """What a merge method is given: two states of one module, the first moved next to the second, and examples, of which those that look at data look
    at so many."""

    module: torch.nn.Module
    spec: Spec
    a: State
    b: State
    examples: Callable[[], Examples]
    samples: int


Method = Callable[[Merging], dict[str, Tensor]]


def _merged(m: Merging, method: str, **parameters: Any) -> dict[str, Tensor]:
    """B and the moved A in one of `regauge merge`'s ways. What data say is computed here, of A as it was moved: never of A before."""
    states, kind = [m.b, m.a], MERGES[method].statistic
    if not kind:
        return merge_states(states, method, spec=m.spec, **parameters)
    some = m.examples()  # once: opening them tokenises
    known = [computed(kind, m.module, some, m.samples, state=state) for state in states]
    return merge_states(states, method, statistics=known, spec=m.spec, **parameters)


# The six baselines of paper 003, by its names, with its factor of RegMean. Its Fisher is the empirical one, ours that of the model's predictions.
METHODS: dict[str, Method] = {
    "Simple": lambda m: interpolate(m.a, m.b, 0.5),
    "Fisher": lambda m: _merged(m, "fisher"),
    "RegMean": lambda m: _merged(m, "regmean", alpha=0.1),
    "OT-WTS": lambda m: _merged(m, "ot_wts"),
    "OT-ACTS": lambda m: _merged(m, "ot_acts"),
    "OT-ACTS-EMD": lambda m: _merged(m, "ot_acts_emd"),
}
LOOKING = ("Fisher", "RegMean", "OT-ACTS", "OT-ACTS-EMD")  # the methods that look at training data
ENDS: dict[str, Method] = {"A": lambda m: dict(m.a), "B": lambda m: dict(m.b)}  # no merges: the ends themselves, measured in the same way


def find(p: Parameters, data: Mapping[str, Any], work: Work) -> Outcome:
    """Search in one way: the element as arrays, and the distances before and after it, in the form (folded or not) that the way compares."""
    module, spec, a, b = _ends(p, data)
    found = FINDERS[p["way"]["by"]](Request(spec, a, b, p["way"], module, lambda: _examples(p, data, "train")))
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
    return Outcome(values, {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()})


def walk(p: Parameters, data: Mapping[str, Any], work: Work) -> Outcome:
    """The path from the moved A to B, with temperatures fitted on what was kept for validation."""
    module, a, b = moved(p, data)
    test, other = _examples(p, data, "test"), _examples(p, data, "validation")
    path = along(module, a, b, test, points=p["points"], calibration=other, batch=p["batch"], device=work.device)
    values = {"t": path.ts, "loss": path.losses, "accuracy": path.accuracies, "temperature": path.temperatures, "examples": len(test)}
    values |= {"calibrated": path.calibrated.losses if path.calibrated else ()}
    return Outcome({k: list(v) if isinstance(v, tuple) else v for k, v in values.items()})


def merge(p: Parameters, data: Mapping[str, Any], work: Work) -> Outcome:
    """One model out of the moved A and B, by one method: its loss and accuracy on the test data."""
    module, a, b = moved(p, data)
    spec = _ends(p, data)[1]
    state = {**METHODS, **ENDS}[p["method"]](Merging(module, spec, a, b, lambda: _examples(p, data, "train"), p.get("samples", 0)))
    test = _examples(p, data, "test")
    found = score(module, state, test, batch=p["batch"], device=work.device)
    return Outcome({"loss": found.loss, "accuracy": found.accuracy, "examples": len(test), "classes": test.classes})


def landscape(p: Parameters, data: Mapping[str, Any], work: Work) -> Outcome:
    """The losses on the plane through A, B and the moved A."""
    module, a, b = moved(p, data)
    _, _, first, _ = _ends(p, data)
    corners = {"A": first, "B": b, "A, moved": a}
    found = plane(module, corners, _examples(p, data, "test"), points=p["points"], batch=p["batch"], device=work.device)
    return Outcome(
        {"x": list(found.xs), "y": list(found.ys), "losses": [list(r) for r in found.losses], "points": {k: list(v) for k, v in found.points.items()}}
    )


PLAIN, PAPERS, WHOLE = "plain numpy", "ours, 003's matcher", "ours, everything"


def clock(p: Parameters, data: Mapping[str, Any], work: Work) -> Outcome:
    """Seconds of matching and merging, in turn, `runs` times, and the distance that ours and the plain transcription come to. No pure function: what
    is kept is what was measured once, on the machine that measured it. Besides wall seconds those of the processor, which others' work changes less.
    """
    module, spec, a, b = _ends({**p, "way": {}}, data)
    config = getattr(module, "config", None)
    heads = int(getattr(config, "num_attention_heads", 0))
    tasks: dict[str, Callable[[], Any]] = {PAPERS: lambda: _by_match(Request(spec, a, b, PAPER, module, _none))}
    transcribed = rotations.read(b, spec.family, heads)
    if transcribed is not None:
        tasks[PLAIN] = lambda: [rotations.matched(x, y) for x, y in zip(*_layers(spec, heads, a, b), strict=True)]
    tasks[WHOLE] = lambda: _whole_match(module, a, b)
    some = _examples(p, data, "train")  # before any clock runs: tokenising is no part of a merge
    for name, method in METHODS.items():
        given = Merging(module, spec, a, b, lambda: some, p["samples"])
        tasks[f"merge: {name}"] = lambda method=method, given=given: method(given)  # type: ignore[misc]
    wall: dict[str, list[float]] = {name: [] for name in tasks}
    cpu: dict[str, list[float]] = {name: [] for name in tasks}
    long = {f"merge: {name}" for name in METHODS if name != "Simple"}  # seconds each: once is enough, without a warm-up
    for run in range(p["runs"] + 1):
        for name, task in tasks.items():
            if name in long and run != 1:
                continue
            started = time.perf_counter(), time.process_time()
            task()
            if run:  # the first round warms up
                wall[name].append(time.perf_counter() - started[0])
                cpu[name].append(time.process_time() - started[1])
    values: dict[str, Any] = {"wall": wall, "cpu": cpu, "layers": len(transcribed or ()), "distance": {}}
    if transcribed is not None:
        costs = Costs(spec, a, b)
        rest = sum(d for d, _ in costs.distances(identity(spec)).values())
        for x, y in zip(*_layers(spec, heads, a, b), strict=True):
            rest += rotations.squared(rotations.matched(x, y), y) - rotations.squared(x, y)
        ours = _by_match(Request(spec, a, b, PAPER, module, _none)).element
        values["distance"] = {PLAIN: rest**0.5, "ours": sum(d for d, _ in costs.distances(ours).values()) ** 0.5}
    return Outcome(values)


def _none() -> Examples:
    raise AssertionError("data-free")


def _whole_match(module: torch.nn.Module, a: State, b: State) -> None:
    spec = spec_of(module)
    (folded, a), (_, b) = fold_norms(spec, a), fold_norms(spec, b)
    match(folded, a, b)


def _layers(spec: Spec, heads: int, *states: State) -> list[list[rotations.Layer]]:
    return [rotations.read(state, spec.family, heads) or [] for state in states]


MATCH, WALK, MERGE, PLANE, CLOCK = (
    Cell("match", 1, find),
    Cell("walk", 1, walk),
    Cell("merge", 1, merge),
    Cell("plane", 1, landscape),
    Cell("clock", 3, clock),
)


def moved(p: Parameters, data: Mapping[str, Any]) -> tuple[torch.nn.Module, State, State]:
    """The module, A as the way moves it, and B."""
    module, spec, a, b = _ends(p, data)
    found: Outcome = data["match"]
    g = element_of(spec, {name: t.numpy() for name, t in found.tensors.items()}, found.values["kinds"])
    if found.values["soft"]:
        g = Element(spec, {name: Soft(m.matrix()) for name, m in g.members.items()})
    return module, apply(g, a, force=found.values["soft"]), b


def _ends(p: Parameters, data: Mapping[str, Any]) -> tuple[torch.nn.Module, Spec, State, State]:
    """The module and both states, with their norms folded if the way says so."""
    module = build(p["model"], 0, data["source"].uri if "source" in data else None).eval()
    spec = spec_of(module)
    a, b = ({n: t.float() if t.is_floating_point() else t for n, t in data[name].tensors.items()} for name in ("a", "b"))
    if p["way"].get("fold"):
        (folded, a), (_, b) = fold_norms(spec, a), fold_norms(spec, b)
        spec = folded
    return module, spec, a, b


def _examples(p: Parameters, data: Mapping[str, Any], which: str) -> Examples:
    tokenizer = data["tokenizer"].uri if "tokenizer" in data else None
    found = prepare(p["tasks"][which], data["test" if which == "test" else "train"], tokenizer)
    rows = p["rows"].get(which)
    if rows is None or rows >= len(found):
        return found
    return found.only(np.unique(np.linspace(0, len(found) - 1, rows).astype(int)))


# How much is measured: rows of the test and of what temperatures are fitted on (None: all), points on a path, on a side of a plane, runs of a clock,
# examples that merges look at, and how many steps a refinement takes at most.
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


def told(how: How) -> str:
    """A way in words."""
    name = next((SAID[name] for name, way in WAYS.items() if way == how), str(how["by"]))
    return f"layers {how['layers']}" if "layers" in how else name


class Bench:
    """One pair in a lab: what a way finds between its ends, and what is measured after it. Every answer is a cell."""

    def __init__(self, lab: Lab, pair: Pair) -> None:
        self.lab, self.pair = lab, pair
        about, effort = pair.about, EFFORT[lab.preset_name]
        assert about.train is not None
        self.effort = effort
        tasks = {"train": dict(about.task), "validation": {**about.task, **about.validated}, "test": {**about.task, **about.tested}}
        rows = effort["text" if about.task["kind"] == "text" else "rows"]
        self.parameters = {"model": about.model, "tasks": tasks, "rows": rows, "batch": about.batch}
        self.data: dict[str, Any] = {"a": pair.a, "b": pair.b, **lab.sources(about, 0)}
        self.found: dict[bytes, Outcome] = {}
        self.examples = {"train": lab.open(about.train), "test": lab.open(about.test)}

    def match(self, how: How) -> Outcome:
        """What a way finds. One that reads no data is known by the two models alone."""
        key = canonical(how)
        if key not in self.found:
            reads = how["by"] in READ
            if "steps" in how and "steps" in self.effort:
                how = {**how, "steps": min(how["steps"], self.effort["steps"])}
            p = {**(self.parameters if reads else {"model": self.parameters["model"]}), "way": dict(how)}
            self.found[key] = self.lab.run(MATCH, p, {**self.data, **(self.examples if reads else {})}, f"match {self.pair.label}: {told(how)}")
        return self.found[key]

    def walk(self, how: How) -> Path:
        v = self._after(WALK, how, {"points": self.effort["points"]}, "walk").values
        ts, calibrated = tuple(v["t"]), Curve(tuple(v["t"]), tuple(v["calibrated"]))
        return Path(ts, tuple(v["loss"]), tuple(v["accuracy"]), calibrated, tuple(v["temperature"]))

    def merge(self, how: How, method: str) -> Mapping[str, Any]:
        looked = {"samples": self.effort["samples"]} if method in LOOKING else {}
        return self._after(MERGE, how, {"method": method, **looked}, "merge").values

    def plane(self, how: How) -> Mapping[str, Any]:
        return self._after(PLANE, how, {"points": self.effort["grid"]}, "plane").values

    def clock(self) -> Mapping[str, Any]:
        p = {**self.parameters, "runs": self.effort["runs"], "samples": self.effort["samples"]}
        return self.lab.run(CLOCK, p, {**self.data, **self.examples}, f"time {self.pair.label}").values

    def _after(self, cell: Cell, how: How, more: Mapping[str, Any], what: str) -> Outcome:
        found = self.match(how)
        p = {**self.parameters, "way": dict(how), **more}
        return self.lab.run(cell, p, {**self.data, **self.examples, "match": found}, f"{what} {self.pair.label}: {told(how)}")


def median_ratio(one: Sequence[float], other: Sequence[float]) -> float:
    """The median over runs of one / other, which were measured in turn; where what takes long was run less often, the ratio of the medians."""
    if len(one) != len(other):
        return statistics.median(one) / max(statistics.median(other), 1e-9)
    return statistics.median(x / max(y, 1e-9) for x, y in zip(one, other, strict=True))
