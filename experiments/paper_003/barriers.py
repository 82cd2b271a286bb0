"""The benchmark of Theus et al. (2506.22712): whole-model barriers between independently trained
models, as nats and as a share of the vanilla one.

The mean is over pairs, with the 95 % interval of Student's t. Vanilla is the straight line between
the models as they were trained. Everything stays in the class and the head size of the ends;
folding unties a head.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from experiments.paper_003.matchers import SAID, WAYS
from experiments.paper_003.pair_catalog import Ends, load, look
from experiments.paper_003.pair_cells import Bench
from experiments.paper_003.pair_models import bigram, examples_of
from experiments.paper_003.pair_results import SAME, facts, numbers
from experiments.shared.runner import Lab
from regauge.results.findings import Figure, Finding, Results, Table, spread_of

KINDS = {
    "small": ("gpt2-longer", "llama-longer", "vit-longer"),
    "paper": ("gpt2", "llama", "vit"),
    "pico": ("gpt2", "llama", "vit", "bert"),
}
# The ways that are compared: what the benchmark calls them, and the entry of `matchers.WAYS`. None
# of them reads data: language models generate their text, and other models are refined on noise.
VARIANTS: dict[str, str] = {
    "vanilla": "none",
    "permutations only": "permutations",
    "by weights": "ours",
    "default": "default",
    "refined": "default refined",
}
# Beside these, for models that generate no text: what unlabelled training data give.
SILENT: dict[str, str] = {"refined on data": "refined longer"}
WRITERS = frozenset({"gpt2", "llama"})  # language models
# The variants after which other averages are measured as well.
AVERAGED = ("default", "refined")
# Other averages than that of the weights: "grown" ones can be built of some families only.
AVERAGES = {"products": "products averaged", "grown": "attention of both"}
GROWABLE = frozenset({"gpt2", "llama", "vit"})
# What is aimed at: the largest share of the vanilla barrier, or the largest mean in nats; and of
# how many pairs.
GOALS: dict[tuple[str, str], Mapping[str, float]] = {
    ("gpt2", "default"): {"share": 0.10, "pairs": 5},
    ("llama", "default"): {"share": 0.25, "pairs": 5},
    ("vit", "default"): {"share": 0.15, "pairs": 5},
    ("gpt2", "refined"): {"nats": 0.015, "pairs": 5},
    ("llama", "refined"): {"nats": 0.05, "pairs": 5},
    ("vit", "refined"): {"nats": 0.02, "pairs": 5},
}
# Table 2 of the paper: ViT on CIFAR-10, GPT-2 on Tiny Shakespeare. Its weight matching multiplies
# queries and keys out: attention grows by the heads.
PUBLISHED = {
    "vit": {"vanilla": 1.69, "by weights": 0.36, "permutations only": 0.45, "refined": 0.00},
    "gpt2": {"vanilla": 2.02, "by weights": 0.34, "permutations only": 0.63, "refined": 0.02},
}


def interval(values: Sequence[float]) -> float | None:
    """Half the width of the 95 % interval of a mean, by Student's t; None for a single value."""
    if len(values) < 2:
        return None
    return (
        float(stats.t.ppf(0.975, len(values) - 1))
        * statistics.stdev(values)
        / math.sqrt(len(values))
    )


def family(kind: str) -> str:
    """The family of a kind of pairs: "gpt2" of "gpt2-longer"."""
    return kind.split("-")[0]


def variants(kind: str) -> dict[str, str]:
    """The ways that a kind of models is matched in."""
    return VARIANTS if family(kind) in WRITERS else {**VARIANTS, **SILENT}


def averages(kind: str) -> dict[str, tuple[str, str]]:
    """The other averages of a kind: after which way, and which average."""
    return {
        f"{variant}, {said}": (VARIANTS[variant], average)
        for variant in AVERAGED
        for average, said in AVERAGES.items()
        if average != "grown" or family(kind) in GROWABLE
    }


def barriers(lab: Lab) -> Results:
    """Barriers between independently trained models (Theus et al.): vanilla, permutations only,
    ours; mean over pairs with a 95 % interval.
    """
    ends = look(lab, KINDS[lab.preset_name])
    lab.total = ends.steps + sum(
        2 * len(variants(ready.kind)) + len(averages(ready.kind)) for ready in ends.ready
    )
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    names: dict[str, str] = {}
    curves: dict[str, dict[str, list[tuple[float, ...]]]] = {}
    floors: dict[str, tuple[str, float]] = {}
    notes: dict[str, dict[str, list[str]]] = {}  # what was said of a search, by pair
    for ready in ends.ready:
        bench = Bench(lab, load(lab, ready))
        kind, about = ready.kind, bench.pair.about
        names[kind] = about.name
        if kind not in floors:
            floors[kind] = _floor(lab, bench)
        paths = {variant: bench.walk(WAYS[way]) for variant, way in variants(kind).items()}
        detail = {
            variant: said
            for variant, way in variants(kind).items()
            if (said := bench.match(WAYS[way]).values["notes"])
        }
        if detail:
            notes[bench.pair.label] = detail
        paths |= {
            name: bench.walk_averages(WAYS[way], average)
            for name, (way, average) in averages(kind).items()
        }
        plain = paths["vanilla"]
        for variant, path in paths.items():
            change = max(abs(path.losses[i] - plain.losses[i]) for i in (0, -1))
            share = {"share": path.barrier / plain.barrier} if plain.barrier > 0 else {}
            found.setdefault(kind, {}).setdefault(variant, []).append(
                {**numbers(path), **share, "change": change}
            )
            if path.ts == plain.ts:
                curves.setdefault(kind, {}).setdefault(variant, []).append(path.losses)
        points = plain.ts
    findings = [
        f
        for kind in ends.kinds
        for f in _findings(lab, kind, names[kind], found[kind], floors[kind])
    ]
    rows = [row for kind in ends.kinds for row in _rows(kind, names[kind], found[kind])]
    figures = [_figure(names[kind], points, curves[kind]) for kind in ends.kinds]
    heads = (
        "models",
        "matching",
        "pairs",
        "barrier (nats)",
        "± 95 %",
        "share of vanilla",
        "± 95 %",
        "calibrated (nats)",
        "midpoint (nats)",
        "accuracy drop",
        "Theus et al. (nats)",
    )
    note = (
        "Means over pairs on held-out data, with 95 % intervals. Barrier: the largest excess of "
        "the loss on the path over the linear interpolation of the endpoints' losses; it may be "
        "negative. The share is the ratio of the means, its interval that of the ratios of the "
        "pairs. Calibrated: with a temperature per point, fitted on other examples. Midpoint: the "
        "loss of the midpoint minus that of the better endpoint. Accuracy drop: the largest on the "
        "path. Default: language models by text that they generate, ViTs by the weights. Refined: "
        "from there, on such text or on noise. Products averaged: `merge --set products=true`. "
        "Attention of both: an average that keeps the heads of both ends, as Theus et al. average "
        "products; it is not a model of their class. Each of "
        "the five endpoints of a family is in two pairs, so that pairs are not independent and the "
        "intervals may be too narrow. Theus et al. report means over their own models, whose "
        "training lengths and attention scale differ, and learn their permutations from data."
    )
    title = "Barriers between independently trained models"
    tables = (Table(title, heads, tuple(rows), note), _table_of_ends(ends, names, found, floors))
    own = (
        ()
        if lab.preset_name == "paper"
        else ("the sizes and data of Theus et al. (--preset paper)",)
    )
    return Results(
        title,
        tuple(findings),
        tables,
        tuple(figures),
        {**facts(lab, "barriers", ends), "notes": notes},
        (*own, *ends.list_absent()),
    )


def _floor(lab: Lab, bench: Bench) -> tuple[str, float]:
    """The loss of whoever knows next to nothing: a bigram tuned on the test, or the share of each
    class.
    """
    train, test = (examples_of(lab, bench.pair.about, which) for which in ("train", "test"))
    if test.causal:
        return "bigram model", bigram(train, test)
    labels = test.batch(np.arange(len(test)))[1].numpy()
    shares = np.bincount(labels, minlength=test.classes) / len(labels)
    return "random guess", float(-(shares[shares > 0] * np.log(shares[shares > 0])).sum())


def _mean(found: Sequence[Mapping[str, float]], column: str) -> float:
    return statistics.fmean(f[column] for f in found)


def _share(by: Mapping[str, Sequence[Mapping[str, float]]], variant: str) -> float | None:
    """The mean barrier over the mean vanilla barrier."""
    plain = _mean(by["vanilla"], "barrier")
    return _mean(by[variant], "barrier") / plain if plain > 0 else None


def _rows(
    kind: str, name: str, by: Mapping[str, Sequence[Mapping[str, float]]]
) -> list[tuple[Any, ...]]:
    rows = []
    for variant, found in by.items():
        shares = [f["share"] for f in found if "share" in f]
        values = (
            _mean(found, "barrier"),
            interval([f["barrier"] for f in found]),
            _share(by, variant),
            interval(shares),
        )
        rest = tuple(
            _mean(found, column) if column in found[0] else None
            for column in ("calibrated", "midpoint", "accuracy")
        )
        rows.append(
            (
                name,
                _describe(kind, variant),
                len(found),
                *values,
                *rest,
                PUBLISHED.get(family(kind), {}).get(variant),
            )
        )
    return rows


def _describe(kind: str, variant: str) -> str:
    """A variant with its way in words."""
    way = variants(kind).get(variant)
    return variant if way is None else f"{variant}: {SAID[way]}"


def _findings(
    lab: Lab,
    kind: str,
    name: str,
    by: Mapping[str, Sequence[Mapping[str, float]]],
    floor: tuple[str, float],
) -> list[Finding]:
    vanilla, trials = _mean(by["vanilla"], "barrier"), len(by["vanilla"])
    kind, out = family(kind), []
    worst = max(f[end] for f in by["vanilla"] for end in ("first", "second"))
    learned = None if lab.preset_name == "pico" else worst < floor[1]
    detail = "a barrier needs endpoints that have learned something"
    out.append(
        Finding(
            f"{kind}/endpoints",
            f"The worst endpoint of the {name}s is better than the {floor[0]}",
            learned,
            worst,
            None,
            floor[1],
            detail,
            measure="nats",
            trials=trials,
        )
    )
    change = max(f["change"] for found in by.values() for f in found)
    said = f"Matching and folding the {name}s do not change what the endpoints compute"
    out.append(
        Finding(
            f"{kind}/function",
            said,
            change <= SAME,
            change,
            SAME,
            measure="change of the loss, in nats",
            trials=trials,
        )
    )
    for variant, found in by.items():
        values = [f["barrier"] for f in found]
        half, share = interval(values), _share(by, variant)
        detail = (
            "one pair: no interval"
            if half is None
            else f"{statistics.fmean(values) - half:.4g} to "
            f"{statistics.fmean(values) + half:.4g} (95 %)"
        )
        detail += f"; {share:.3g} of vanilla" if share is not None else ""
        said = f"The barrier between the {name}s, {variant}"
        out.append(
            Finding(
                f"{kind}/{variant}",
                said,
                None,
                statistics.fmean(values),
                0.0,
                vanilla,
                detail,
                "Theus et al. Tab. 2",
                "nats",
                "",
                spread_of(values),
                trials,
            )
        )
        if (kind, variant) in GOALS:
            out.append(_goal(lab, kind, name, variant, by))
    return out


def _goal(
    lab: Lab, kind: str, name: str, variant: str, by: Mapping[str, Sequence[Mapping[str, float]]]
) -> Finding:
    """Whether what is aimed at was reached; judged on as many pairs as the goal asks for, and not
    on pico models.
    """
    goal, values = GOALS[kind, variant], [f["barrier"] for f in by[variant]]
    enough = len(values) >= goal["pairs"] and lab.preset_name != "pico"
    detail = (
        ""
        if enough
        else f"not judged: {len(values)} of {goal['pairs']:g} pairs"
        if lab.preset_name != "pico"
        else "not judged on pico models"
    )
    if "share" in goal:
        share, said = (
            _share(by, variant),
            f"{variant}: at most {goal['share']} of the vanilla barrier between the {name}s",
        )
        holds = share is not None and share <= goal["share"]
        return Finding(
            f"goal/{kind}/{variant}",
            said,
            holds if enough else None,
            share,
            goal["share"],
            1.0,
            detail,
            measure="share",
            trials=len(values),
        )
    mean = statistics.fmean(values)
    said = f"{variant}: a barrier of at most {goal['nats']} nats between the {name}s"
    holds = mean <= goal["nats"]
    plain = _mean(by["vanilla"], "barrier")
    return Finding(
        f"goal/{kind}/{variant}",
        said,
        holds if enough else None,
        mean,
        goal["nats"],
        plain,
        detail,
        measure="nats",
        trials=len(values),
    )


def _figure(name: str, ts: Sequence[float], by: Mapping[str, Sequence[Sequence[float]]]) -> Figure:
    y = {
        variant: [round(statistics.fmean(column), 6) for column in zip(*found, strict=True)]
        for variant, found in by.items()
    }
    data = {"x": list(ts), "y": y, "xlabel": "t (0 is A, 1 is B)", "ylabel": "nats", "log": False}
    return Figure(f"{name}: the loss on the path from A to B", "lines", data, "Means over pairs.")


def _table_of_ends(
    ends: Ends,
    names: Mapping[str, str],
    found: Mapping[str, Mapping[str, Sequence[Mapping[str, float]]]],
    floors: Mapping[str, tuple[str, float]],
) -> Table:
    rows = []
    for kind in ends.kinds:
        # an endpoint of two pairs counts once
        losses = list({round(f[e], 9) for f in found[kind]["vanilla"] for e in ("first", "second")})
        rows.append(
            (
                names[kind],
                len(losses),
                min(losses),
                statistics.fmean(losses),
                max(losses),
                *floors[kind],
            )
        )
    heads = (
        "models",
        "endpoints",
        "lowest loss (nats)",
        "mean loss",
        "highest loss",
        "baseline",
        "its loss (nats)",
    )
    return Table(
        "Endpoints",
        heads,
        tuple(rows),
        "On the test data. The smoothing of the bigram model is tuned on the test data; the guess "
        "uses the class frequencies.",
    )
