"""Table 2 of the rotation-symmetry paper: six merges of two models, unmatched and matched. Its
claim: matching helps each of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from experiments.paper_003.cost import clocked
from experiments.paper_003.matchers import SAID, WAYS
from experiments.paper_003.pair_cells import METHODS
from experiments.paper_003.pair_results import PAPER_ACCURACY, Rows, open_pairs, results, slug
from experiments.shared.runner import Lab
from experiments.shared.verdicts import compare
from regauge.results.findings import Figure, Finding, Results, Table, spread_of

MATCHINGS = ("none", "paper", "ours", "refined")
# the loss of accuracy after matching that does not count as harm: 10 of 2,000 test examples
HARM = 0.005


def table2(lab: Lab) -> Results:
    """Simple, Fisher, RegMean and the three optimal-transport merges of two models: not matched,
    matched as in the paper, and matched by ours.
    """
    ends, benches = open_pairs(
        lab, lambda ends: len(ends.ready) * (len(MATCHINGS) * (2 + len(METHODS)) + 3)
    )
    shown = Rows()
    for bench in benches:
        better = max(
            (bench.merge(WAYS["none"], end) for end in ("A", "B")), key=lambda s: s["accuracy"]
        )
        seconds = clocked(bench)["cpu"]
        for way in MATCHINGS:
            found, path = bench.match(WAYS[way]).values, bench.walk(WAYS[way])
            of_way = {"share": found["after"] / found["before"], "barrier": path.barrier}
            for method in METHODS:
                score = bench.merge(WAYS[way], method)
                more = {
                    "guess": 1 / score["classes"],
                    "end": better["accuracy"],
                    "seconds": statistics.median(seconds[f"merge: {method}"]),
                }
                shown.add(bench.pair, (method, way), {**score, **more, **of_way})
    rows, findings, figures = [], [], []
    for kind in ends.kinds:
        name = shown.name(kind)
        for method in METHODS:
            for way in MATCHINGS:
                mean = shown.mean(kind, (method, way))
                paper = (
                    PAPER_ACCURACY.get(method, {}).get(way) if kind in ("vit", "imfeld") else None
                )
                spread = shown.spread(kind, (method, way), "accuracy")
                numbers = (
                    100 * mean("accuracy"),
                    None if spread is None else 100 * spread,
                    paper,
                    mean("loss"),
                    mean("share"),
                    mean("barrier"),
                )
                rows.append(
                    (name, method, SAID[way], *numbers, mean("seconds"), shown.trials(kind))
                )
            findings += [_helps(lab, shown, kind, method, way) for way in MATCHINGS[1:]]
        bars = {
            SAID[way]: [round(100 * shown.mean(kind, (m, way))("accuracy"), 3) for m in METHODS]
            for way in MATCHINGS
        }
        figures.append(
            Figure(
                f"{name}: the merged model's accuracy",
                "bars",
                {"labels": list(METHODS), "y": bars, "ylabel": "percent right"},
            )
        )
        findings += [_best(shown, kind, name)]
    heads = (
        "models",
        "merge",
        "matching",
        "accuracy (%)",
        "accuracy ±",
        "paper: accuracy (%)",
        "loss (nats)",
        "distance, share of unmatched",
        "barrier (nats)",
        "CPU seconds",
        "pairs",
    )
    note = (
        "Means over pairs, on test data; the accuracy of language models is that of the next "
        "token. "
        "The barrier is that of the straight path after matching, before merging. CPU seconds are "
        "those of the merge alone, with its statistics (003/table3). The paper's accuracies are "
        "those of its own ViT pair, with the layers that are best on its validation data; here "
        "every layer is matched. Fisher, RegMean, OT-ACTS and OT-ACTS-EMD use unlabelled training "
        "data, after the matching."
    )
    title = "Table 2: six merges, with and without matching"
    chosen = (
        "the paper's choice of layers on validation data (003/figure6 has the layers one by one)"
    )
    return results(
        lab,
        "table2",
        title,
        findings,
        Table(title, heads, tuple(rows), note),
        figures,
        ends,
        chosen,
    )


def _helps(lab: Lab, shown: Rows, kind: str, method: str, way: str) -> Finding:
    """Check by accuracy whether a matching helps a merge; pico models have no verdict."""
    here, none = shown.mean(kind, (method, way)), shown.mean(kind, (method, "none"))
    gain = here("accuracy") - none("accuracy")
    pairs: list[tuple[Mapping[str, Any], Mapping[str, Any]]] = list(
        zip(shown.values(kind, (method, way)), shown.values(kind, (method, "none")), strict=True)
    )
    worse = sum(x["accuracy"] < y["accuracy"] - HARM for x, y in pairs)
    detail = (
        f"{100 * none('accuracy'):.1f} % without, {100 * here('accuracy'):.1f} % with; a "
        f"better endpoint has {100 * none('end'):.1f} %"
    )
    detail += f"; worse in {worse} of {len(pairs)} pairs" if worse else ""
    gains = [x["accuracy"] - y["accuracy"] for x, y in pairs]
    verdict = compare(gains, [-HARM] * len(gains), unit="pair")
    detail = f"{verdict.reason}; {detail}" if verdict.holds is None else detail
    return Finding(
        f"claim/{kind}/{method}/{slug(way)}",
        f"{method}: the merged {shown.name(kind)} is no worse after matching ({SAID[way]})",
        None if lab.preset_name == "pico" else verdict.holds,
        gain,
        -HARM,
        none("end") - none("accuracy"),
        detail,
        "003 Tab. 2",
        "gain of accuracy",
        spread=spread_of(gains),
        trials=len(pairs),
    )


def _best(shown: Rows, kind: str, name: str) -> Finding:
    """The best of all merges, and what it needs."""
    method, way = max(
        ((m, w) for m in METHODS for w in MATCHINGS),
        key=lambda case: shown.mean(kind, case)("accuracy"),
    )
    mean = shown.mean(kind, (method, way))
    said, detail = (
        f"The best merge of the {name}s: {method}, {SAID[way]}",
        f"loss {mean('loss'):.4g} nats",
    )
    return Finding(
        f"{kind}/best",
        said,
        None,
        mean("accuracy"),
        mean("guess"),
        mean("end"),
        detail,
        "",
        "accuracy",
        trials=shown.trials(kind),
    )
