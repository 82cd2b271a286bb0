"""Figure 6 of the rotation-symmetry paper: its matcher on one layer, the first k, the last k."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from experiments.paper_003.matchers import PAPER, WAYS
from experiments.paper_003.pair_catalog import Ends, look
from experiments.paper_003.pair_models import PAIRS
from experiments.paper_003.pair_results import EXACT, KINDS, MOST, SAME, Rows, open_pairs, results
from experiments.shared.models import build
from experiments.shared.runner import Lab
from regauge.matching import layers_of
from regauge.models.resolve import spec_of
from regauge.results.findings import Figure, Finding, Results, Table

TIE = 0.1  # the share of the effect of all layers below which a difference is not clear


def figure6(lab: Lab) -> Results:
    """Layer study: the average of two models after the paper's matcher on one layer, the first k or
    the last k.
    """
    found = look(lab, KINDS[lab.preset_name], MOST)
    depth = {kind: _depth(lab, kind, found) for kind in found.kinds}
    plans = {kind: layer_plans(n) for kind, n in depth.items()}
    ends, benches = open_pairs(
        lab,
        lambda ends: sum(
            2 * len({tuple(c) for s in plans[r.kind].values() for c in s}) for r in ends.ready
        ),
    )
    shown = Rows()
    for bench in benches:
        for chosen in sorted({tuple(c) for sets in plans[bench.pair.kind].values() for c in sets}):
            how = {**PAPER, "layers": list(chosen)} if chosen else WAYS["none"]
            share = bench.match(how).values
            score = bench.merge(how, "Simple")
            shown.add(bench.pair, chosen, {**score, "share": share["after"] / share["before"]})
    rows, figures, findings = [], [], []
    for kind in ends.kinds:
        name, plan = shown.name(kind), plans[kind]
        for label, sets in plan.items():
            for k, layers in enumerate(sets):
                mean = shown.mean(kind, tuple(layers))
                at = k if label == "layer k only" else len(layers)
                rows.append(
                    (
                        name,
                        label,
                        at,
                        mean("share"),
                        mean("loss"),
                        100 * mean("accuracy"),
                        shown.trials(kind),
                    )
                )
        for column, unit in (("loss", "nats"), ("accuracy", "accuracy")):
            y = {
                label: [shown.mean(kind, tuple(layers))(column) for layers in sets]
                for label, sets in plan.items()
                if label != "layer k only"
            }
            data = {
                "x": list(range(depth[kind] + 1)),
                "y": y,
                "xlabel": "layers that are matched",
                "ylabel": unit,
                "log": False,
            }
            figures.append(
                Figure(f"{name}: the average after matching k layers ({column})", "lines", data)
            )
        findings += _more_layers(shown, kind, name, plan, depth[kind])
    heads = (
        "models",
        "matched layers",
        "k",
        "distance, share of unmatched",
        "loss of the average (nats)",
        "accuracy (%)",
        "pairs",
    )
    note = (
        "The paper's matcher on some layers, counted from 0. Zero layers is unmatched. The paper "
        "finds that the first five layers of its DeBERTa (fine-tuned on CoLA and on STS-B) matter "
        "most; it prints no numbers, and chooses the layers of its Table 2 on validation data."
    )
    title = "Figure 6: which layers to match"
    return results(
        lab, "figure6", title, findings, Table(title, heads, tuple(rows), note), figures, ends
    )


def _depth(lab: Lab, kind: str, ends: Ends) -> int:
    about = next(r for r in ends.ready if r.kind == kind).about or PAIRS[lab.preset_name]()[kind]
    source = lab.sources(about, 0).get("source")
    spec = spec_of(
        build(about.model, 0, None if source is None or about.recipe is None else source.uri)
    )
    return max(layers_of(spec).values()) + 1


def layer_plans(depth: int) -> dict[str, list[list[int]]]:
    whole = list(range(depth))
    return {
        "layer k only": [[i] for i in whole],
        "first k layers": [whole[:k] for k in range(depth + 1)],
        "last k layers": [whole[depth - k :] for k in range(depth + 1)],
    }


def _more_layers(
    shown: Rows, kind: str, name: str, plan: Mapping[str, list[list[int]]], depth: int
) -> list[Finding]:
    """Check that matching more layers does not move the models apart: layers are independent."""
    shares = {
        label: [shown.mean(kind, tuple(layers))("share") for layers in plan[label]]
        for label in ("first k layers", "last k layers")
    }
    worst = max(later - earlier for s in shares.values() for earlier, later in pairwise(s))
    said = (
        f"Each further matched layer brings the {name}s closer, or does not change their distance"
    )
    trials = shown.trials(kind)
    nearer = Finding(
        f"{kind}/distance",
        said,
        worst <= EXACT,
        worst,
        EXACT,
        source="003 Fig. 6",
        measure="largest rise of the share",
        trials=trials,
    )
    half = max(1, depth // 2)
    first, last = (
        shown.mean(kind, tuple(plan[label][half]))("loss")
        for label in ("first k layers", "last k layers")
    )
    none, full = (shown.mean(kind, tuple(plan["first k layers"][k]))("loss") for k in (0, depth))
    more = f"the {'first' if first < last else 'last'} layers matter more"
    if abs(first - last) <= max(SAME, TIE * abs(none - full)):
        more = "no clear difference"
    detail = f"last {half} layers: {last:.4g} nats, all layers: {full:.4g} nats; {more}"
    said = f"The average of the {name}s after the first {half} of {depth} layers were matched"
    return [
        nearer,
        Finding(
            f"{kind}/first",
            said,
            None,
            first,
            None,
            none,
            detail,
            "003 Fig. 6",
            "nats",
            trials=trials,
        ),
    ]
