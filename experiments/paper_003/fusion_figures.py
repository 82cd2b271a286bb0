"""Figures 3 to 5 of the rotation-symmetry paper: the effect of its matcher, and of its parts, on
the average of two models.

Every figure is measured on the available pairs (`pair_catalog`) with the matchers of
`matchers.WAYS`: the paper's own, its competitors, and regauge's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.paper_003.matchers import SAID, WAYS
from experiments.paper_003.pair_cells import METHODS
from experiments.paper_003.pair_results import (
    EXACT,
    PAPER_ACCURACY,
    SAME,
    Rows,
    numbers,
    open_pairs,
    results,
    slug,
)
from experiments.shared.runner import Lab
from experiments.shared.verdicts import compare
from regauge.errors import PathError
from regauge.matching.barriers import Path
from regauge.results.findings import Figure, Finding, Results, Table

ABLATION = (
    "none",
    "paper",
    "without rescaling",
    "without FFN",
    "without attention",
    "with heads",
    "with stream",
    "ours",
)
RIVALS = (
    "none",
    "neurons",
    "transport",
    "soft transport",
    "without FFN",
    "without rescaling",
    "paper",
    "permutations",
    "with stream",
    "folded",
    "ours",
)
PATHS = ("none", "without attention", "without FFN", "paper", "ours")
# What the paper prints.
PAPER_DISTANCE = {
    "none": 651.57,
    "neurons": 625.73,
    "transport": 626.16,
    "without FFN": 639.96,
    "without rescaling": 613.68,
    "paper": 613.63,
}


def figure3(lab: Lab) -> Results:
    """Ablation: the average of two models after matching with everything, and without one part of
    it; and beyond the paper, with more.
    """
    methods = list(METHODS)
    ends, benches = open_pairs(
        lab,
        lambda ends: sum(
            len(ABLATION) + sum(len(_ablated(lab, r.kind, m)) for m in methods) + 2
            for r in ends.ready
        ),
    )
    shown, findings = Rows(), []
    for bench in benches:
        better = max(
            (bench.merge(WAYS["none"], end) for end in ("A", "B")), key=lambda s: s["accuracy"]
        )
        for way in ABLATION:
            found = bench.match(WAYS[way]).values
            for method in (m for m in methods if way in _ablated(lab, bench.pair.kind, m)):
                score = bench.merge(WAYS[way], method)
                more = {
                    "guess": 1 / score["classes"],
                    "end": better["accuracy"],
                    "share": found["after"] / found["before"],
                }
                shown.add(bench.pair, (method, way), {**score, **more})
    rows, figures = [], []
    for kind in ends.kinds:
        name = shown.name(kind)
        for method in methods:
            for way in _ablated(lab, kind, method):
                mean = shown.mean(kind, (method, way))
                paper = (
                    PAPER_ACCURACY.get(method, {}).get(way) if kind in ("vit", "imfeld") else None
                )
                rows.append(
                    (
                        name,
                        method,
                        SAID[way],
                        100 * mean("accuracy"),
                        paper,
                        mean("loss"),
                        mean("share"),
                        shown.trials(kind),
                    )
                )
                findings.append(
                    Finding(
                        f"{kind}/{method}/{slug(way)}",
                        f"The accuracy of the merged {name}, {SAID[way]}",
                        None,
                        mean("accuracy"),
                        mean("guess"),
                        mean("end"),
                        f"loss {mean('loss'):.4g} nats; {mean('share'):.3g} of the distance before",
                        "003 Fig. 3",
                        "accuracy",
                        spread=shown.spread(kind, (method, way), "accuracy"),
                        trials=shown.trials(kind),
                    )
                )
            findings.append(_better(lab, shown, kind, method))
        findings += _distances_fall(shown, kind, methods[0], name)
    for method in methods:
        kinds = [
            k
            for k in ends.kinds
            if method == "Simple" or len(_ablated(lab, k, method)) == len(ABLATION)
        ] or ends.kinds
        drawn = [w for w in ABLATION if all(w in _ablated(lab, k, method) for k in kinds)]
        bars = {
            SAID[way]: [round(100 * shown.mean(k, (method, way))("accuracy"), 3) for k in kinds]
            for way in drawn
        }
        data = {"labels": [shown.name(k) for k in kinds], "y": bars, "ylabel": "percent right"}
        figures.append(
            Figure(
                f"{method}: the accuracy of the merged model",
                "bars",
                data,
                "Of language models: of the next token.",
            )
        )
    heads = (
        "models",
        "merge",
        "matching",
        "accuracy (%)",
        "paper: accuracy (%)",
        "loss (nats)",
        "distance, share of unmatched",
        "pairs",
    )
    note = (
        "Means over pairs, on test data. The paper's column is its own ViT pair (a random guess "
        "has 10 %). The distance is a share of that of the unmatched models (with norms folded, "
        "if the matcher folds them)."
    )
    title = "Figure 3: which part of matching helps the average of two models"
    return results(
        lab, "figure3", title, findings, Table(title, heads, tuple(rows), note), figures, ends
    )


def _ablated(lab: Lab, kind: str, method: str) -> tuple[str, ...]:
    """Return the matchers of a merge. The paper ablates all six merges on its ViT; for other
    models, with and without matching is enough (Table 2).
    """
    return (
        ABLATION
        if method == "Simple" or (kind in ("vit", "imfeld") and lab.preset_name != "pico")
        else ("none", "paper", "ours")
    )


def _better(lab: Lab, shown: Rows, kind: str, method: str) -> Finding:
    ours, paper, none = (
        shown.mean(kind, (method, way))("loss") for way in ("ours", "paper", "none")
    )
    said = (
        f"{method}: the merged {shown.name(kind)} is better after our matching than after "
        "the paper's"
    )
    detail = (
        "not meaningful for models of this size"
        if lab.preset_name == "pico"
        else f"the paper's has {paper:.4g} nats"
    )
    detail_only = (
        lab.preset_name == "pico" or method != "Simple"
    )  # what other methods make of a matching is measured, and no claim of ours
    ours_each, paper_each = (
        [v["loss"] for v in shown.values(kind, (method, way))] for way in ("ours", "paper")
    )
    verdict = compare(ours_each, paper_each, -1, unit="pair")
    if not detail_only and verdict.holds is None:
        detail = f"{verdict.reason}; {detail}"
    return Finding(
        f"{kind}/{method}/loss",
        said,
        None if detail_only else verdict.holds,
        ours,
        None,
        none,
        detail,
        measure="nats",
        trials=shown.trials(kind),
    )


def _distances_fall(shown: Rows, kind: str, method: str, name: str) -> list[Finding]:
    """Check that leaving out a part of the paper's matcher does not bring the models closer: each
    part minimizes its own part of the distance.
    """
    share = {way: shown.mean(kind, (method, way))("share") for way in ABLATION}
    out = []
    more: dict[str, Any] = {
        "source": "003 Fig. 3, 4",
        "measure": "share",
        "trials": shown.trials(kind),
    }
    for way in ("none", "without rescaling", "without FFN", "without attention"):
        said = f"The paper's matching brings the {name}s at least as close as {SAID[way]}"
        nearer = share["paper"] <= share[way] * (1 + EXACT)
        out.append(
            Finding(
                f"{kind}/distance/{slug(way)}",
                said,
                nearer,
                share["paper"],
                0.0,
                share[way],
                **more,
            )
        )
    return out


def figure4(lab: Lab) -> Results:
    """The distance between two models after each matching: none, Git Re-Basin's, OT-Fusion's, the
    paper's, ours.
    """
    ends, benches = open_pairs(lab, lambda ends: len(ends.ready) * (2 * len(RIVALS) + 2))
    shown = Rows()
    for bench in benches:
        stand = bench.merge(WAYS["none"], "A")["loss"]
        for way in RIVALS:
            found = bench.match(WAYS[way]).values
            kept = bench.merge(WAYS[way], "A")["loss"] - stand if way == "soft transport" else 0.0
            values = {
                "distance": found["after"],
                "share": found["after"] / found["before"],
                "relative": found["after"] / found["size"],
            }
            shown.add(
                bench.pair,
                way,
                {**values, "broken": kept, "average": bench.merge(WAYS[way], "Simple")["loss"]},
            )
    rows, findings = [], []
    for kind in ends.kinds:
        name = shown.name(kind)
        for way in RIVALS:
            mean = shown.mean(kind, way)
            paper = PAPER_DISTANCE.get(way) if kind in ("vit", "imfeld") else None
            theirs = (paper, paper / PAPER_DISTANCE["none"]) if paper else (None, None)
            element = "no" if way == "soft transport" else "yes"
            rows.append(
                (
                    name,
                    SAID[way],
                    mean("distance"),
                    mean("share"),
                    *theirs,
                    mean("relative"),
                    mean("average"),
                    element,
                    shown.trials(kind),
                )
            )
        findings += _order(shown, kind, name)
    heads = (
        "models",
        "matching",
        "distance",
        "share of unmatched",
        "paper: distance",
        "paper: share",
        "relative to B's norm",
        "loss of the average (nats)",
        "symmetry",
        "pairs",
    )
    note = (
        "Euclidean distance of all weights, means over pairs. The paper's numbers are of its own "
        "ViT pair; it swaps the labels of attention only and FFN only, which are corrected here, "
        "and its Git Re-Basin matches the FFN only (both follow from its own numbers). Folding "
        "norms changes the weights, not the function: the distance after *regauge, by weights* is "
        "a share of that of *norms folded, unmatched*. Sinkhorn's map changes the function of the "
        "model."
    )
    title = "Figure 4: the distance of two models after each matching"
    bars = {
        SAID[way]: [shown.mean(k, way)("share") for k in ends.kinds]
        for way in ("neurons", "transport", "without FFN", "paper", "with stream", "ours")
    }
    figure = Figure(
        "The distance after matching",
        "bars",
        {"labels": [shown.name(k) for k in ends.kinds], "y": bars, "ylabel": "share of unmatched"},
    )
    return results(
        lab, "figure4", title, findings, Table(title, heads, tuple(rows), note), [figure], ends
    )


def _order(shown: Rows, kind: str, name: str) -> list[Finding]:
    """Check the order of the distances: a minimum over a larger set is not larger."""
    at = {way: shown.mean(kind, way)("distance") for way in RIVALS}
    claims = (
        ("neurons", "none", "Git Re-Basin's assignment of neurons"),
        (
            "neurons",
            "transport",
            "Git Re-Basin's assignment of neurons, by their incoming and outgoing weights,",
        ),
        ("paper", "neurons", "The paper's matching"),
        ("paper", "without rescaling", "The paper's matching"),
        ("paper", "none", "The paper's matching"),
    )
    out, trials = [], shown.trials(kind)
    more: dict[str, Any] = {"source": "003 Fig. 4", "measure": "distance", "trials": trials}
    for near, far, who in claims:
        said = f"{who} brings the {name}s at least as close as {SAID[far]}"
        holds = at[near] <= at[far] * (1 + EXACT)
        out.append(
            Finding(f"{kind}/{slug(near)}/{slug(far)}", said, holds, at[near], 0.0, at[far], **more)
        )
    share = shown.mean(kind, "ours")("share")
    said = f"Our matching of the {name}s with folded norms, as a share of the distance before"
    detail = "no verdict: a small weight distance does not imply a good merge"
    out.append(
        Finding(
            f"{kind}/by weights",
            said,
            None,
            share,
            0.0,
            1.0,
            detail,
            measure="share",
            trials=trials,
        )
    )
    broken = shown.mean(kind, "soft transport")("broken")
    detail = "not a symmetry, so that its distance is not that of an equivalent model"
    said = f"Change of the loss of the {name} by Sinkhorn's map alone"
    out.append(
        Finding(
            f"{kind}/soft/function",
            said,
            None,
            broken,
            0.0,
            None,
            detail,
            measure="change of the loss, in nats",
            trials=trials,
        )
    )
    return out


def figure5(lab: Lab) -> Results:
    """The loss on the way between two models, and on the plane around it, under four matchings of
    the paper and ours.
    """
    planes = ("paper", "ours")
    ends, benches = open_pairs(
        lab, lambda ends: 2 * len(ends.ready) * len(PATHS) + len(planes) * len(ends.kinds)
    )
    shown, figures, unchecked = Rows(), [], []
    seen: set[str] = set()
    for bench in benches:
        paths = {way: bench.walk(WAYS[way]) for way in PATHS}
        for way, path in paths.items():
            change = max(abs(path.losses[i] - paths["none"].losses[i]) for i in (0, -1))
            shown.add(bench.pair, way, {**numbers(path), "change": change})
        if bench.pair.kind in seen:
            continue
        seen.add(bench.pair.kind)
        figures.append(_curves(bench.pair.label, paths))
        for way in planes:
            try:
                figures.append(_plane(bench.pair.label, way, bench.plane(WAYS[way])))
            except PathError as error:
                unchecked.append(f"{bench.pair.label}: the plane of {SAID[way]}: {error}")
    rows, findings = [], []
    for kind in ends.kinds:
        name, plain, trials = (
            shown.name(kind),
            shown.mean(kind, "none")("barrier"),
            shown.trials(kind),
        )
        for way in PATHS:
            mean = shown.mean(kind, way)
            share = mean("barrier") / plain if plain > 0 else None
            columns = tuple(
                mean(c)
                for c in ("calibrated", "rise", "span", "midpoint", "accuracy", "first", "second")
            )
            rows.append((name, SAID[way], mean("barrier"), share, *columns, trials))
            said = f"The barrier between the {name}s, {SAID[way]}"
            spread = shown.spread(kind, way, "barrier")
            detail = "a number" if share is None else f"{share:.3g} of that of the unmatched models"
            findings.append(
                Finding(
                    f"{kind}/{slug(way)}",
                    said,
                    None,
                    mean("barrier"),
                    0.0,
                    plain,
                    detail,
                    "003 Fig. 5",
                    "nats",
                    spread=spread,
                    trials=trials,
                )
            )
        change = max(v["change"] for way in PATHS for v in shown.values(kind, way))
        said = f"The ends of every path between the {name}s compute what A and B compute"
        findings.append(
            Finding(
                f"{kind}/endpoints",
                said,
                change <= SAME,
                change,
                SAME,
                measure="change of the loss, in nats",
                trials=trials,
            )
        )
        least = min(PATHS[:4], key=lambda way: shown.mean(kind, way)("rise"))
        said = (
            "Of the paper's four matchings the complete one has the lowest barrier between "
            f"the {name}s"
        )
        detail = f"the lowest is that of: {SAID[least]}"
        rise, plain = (shown.mean(kind, way)("rise") for way in ("paper", "none"))
        findings.append(
            Finding(
                f"{kind}/complete",
                said,
                None,
                rise,
                0.0,
                plain,
                detail,
                "003 Fig. 5",
                "nats (the paper's wording)",
                trials=trials,
            )
        )
    heads = (
        "models",
        "matching",
        "barrier (nats)",
        "share of unmatched",
        "calibrated (nats)",
        "rise (nats)",
        "range (nats)",
        "midpoint (nats)",
        "accuracy drop",
        "loss of A",
        "loss of B",
        "pairs",
    )
    note = (
        "Means over pairs. Barrier: the largest excess of the loss on the path over the linear "
        "interpolation of the endpoints' losses. Calibrated: with a temperature per point, fitted "
        "on other examples. Rise: the highest loss minus the better endpoint's. Range: the highest "
        "loss minus the lowest. Midpoint: its loss minus that of the better endpoint. Accuracy "
        "drop: the largest on the path. The paper prints no numbers."
    )
    title = "Figure 5: the loss between two models under each matching"
    return results(
        lab,
        "figure5",
        title,
        findings,
        Table(title, heads, tuple(rows), note),
        figures,
        ends,
        *unchecked,
    )


def _curves(label: str, paths: Mapping[str, Path]) -> Figure:
    y = {SAID[way]: list(path.losses) for way, path in paths.items()}
    data = {
        "x": list(paths["none"].ts),
        "y": y,
        "xlabel": "t (0 is A, 1 is B)",
        "ylabel": "nats",
        "log": False,
    }
    return Figure(f"{label}: the loss on the path from A to B", "lines", data)


def _plane(label: str, way: str, found: Mapping[str, Any]) -> Figure:
    data = {
        "x": found["x"],
        "y": found["y"],
        "values": found["losses"],
        "points": found["points"],
        "joined": [["B", "A"], ["B", "A, moved"]],
    }
    data |= {
        "xlabel": "distance of weights, from B towards A",
        "ylabel": "across it",
        "unit": "nats",
    }
    return Figure(
        f"{label}: the loss around A, B and the moved A ({SAID[way]})",
        "plane",
        data,
        "Lines join the endpoints of the paths.",
    )
