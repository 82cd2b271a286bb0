"""Tables 2 to 5 of the permutation-equivariance paper: permuted inference and training equal plain
ones; without the key, models are no better than a random guess.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.paper_000.claims import (
    Column,
    Scores,
    agree,
    column_head,
    columns_of,
    in_distribution,
    lost,
    outputs,
    outputs_of,
    same,
)
from experiments.shared.presets import Subject
from experiments.shared.runner import Lab
from regauge.results.findings import Figure, Finding, Results, Table

TEST = {
    "plain": "plain",
    "rows": "rows permuted",
    "columns": "columns permuted",
    "moved": "permuted weights, plain input",
    "wrong": "permuted weights, wrong key",
}
TRAINED = {way: TEST[way] for way in ("plain", "rows", "columns")}
# The numbers of the paper, in its units (percent, or perplexity).
PAPER: dict[str, dict[str, dict[str, dict[str, Any]]]] = {
    "table2": {
        "image": {
            "accuracy": {"plain": 97.65, "rows": 97.65, "columns": 97.65, "moved": "about 10"}
        },
        "scene": {
            "aAcc": {"plain": 83.12, "rows": 83.12, "columns": 83.12},
            "mIoU": {"plain": 48.75, "rows": 48.75, "columns": 48.75},
            "mAcc": {"plain": 60.09, "rows": 60.09, "columns": 60.09},
        },
    },
    "table3": {
        "image": {"accuracy": {"plain": 97.75, "rows": 97.73, "columns": 97.94}},
        "text": {"accuracy": {"plain": 76.4, "rows": 76.5}},
    },
    "table4": {
        "bert": {"accuracy": {"plain": 94.00, "columns": 94.00, "moved": "about 50"}},
        "gpt2": {"accuracy": {"plain": 94.03, "columns": 94.03, "moved": "about 50"}},
        "shakespeare": {"perplexity": {"plain": 48.55, "columns": 48.55, "moved": "order of 1e7"}},
    },
    "table5": {
        "bert": {"accuracy": {"plain": 94.00, "columns": 93.72}},
        "gpt2": {"accuracy": {"plain": 94.03, "columns": 93.66}},
    },
}


def table2(lab: Lab) -> Results:
    """Inference with rows and columns permuted: image classification, and segmentation with a dense
    head.
    """
    return _inference(
        lab,
        "table2",
        "Table 2: inference of a ViT with rows and columns permuted",
        ("rows", "columns"),
    )


def table4(lab: Lab) -> Results:
    """Inference with columns permuted: BERT and GPT-2 on text classification, GPT-2 on text; rows
    too, with their masks.
    """
    return _inference(
        lab,
        "table4",
        "Table 4: inference of BERT and GPT-2 with columns permuted",
        ("rows", "columns"),
    )


def table3(lab: Lab) -> Results:
    """Training with rows and columns permuted: ViT and BERT."""
    return _training(
        lab,
        "table3",
        "Table 3: training a ViT and a BERT with rows and columns permuted",
        ("rows", "columns"),
    )


def table5(lab: Lab) -> Results:
    """Training with columns permuted: BERT and GPT-2."""
    return _training(
        lab, "table5", "Table 5: training BERT and GPT-2 with columns permuted", ("columns",)
    )


def _inference(lab: Lab, table: str, title: str, ways: Sequence[str]) -> Results:
    subjects = lab.preset.tables[table]
    each = 1 + len(ways) + 2 * lab.preset.keys
    lab.total = sum(lab.trials_of(s) * (each + (s.recipe is not None)) for s in subjects.values())
    columns = [
        c
        for key, subject in subjects.items()
        for c in columns_of(key, subject, _tested(lab, subject, ways))
    ]
    findings: list[Finding] = []
    for column in columns:
        findings += [same(column, way, table) for way in ways] + [
            lost(column, way, table) for way in ("moved", "wrong")
        ]
    for column in {c.key: c for c in columns}.values():
        findings += [outputs(column, way, table) for way in ways]
    shown = ("plain", *ways, "moved", "wrong")
    note = "Means over trials (geometric for perplexity); the findings list the spreads. "
    note += (
        f"Rows with permuted weights are also means over {lab.preset.keys} keys per trial."
        if lab.preset.keys > 1
        else ""
    )
    percent = [c for c in columns if c.measure != "perplexity"]
    bars = {
        "labels": [TEST[w] for w in shown],
        "y": {_head(c): [round(c.shown(w), 3) for w in shown] for c in percent},
        "ylabel": "percent",
    }
    figures = (
        Figure(
            "With the key the scores are unchanged, without it they are those of a guess",
            "bars",
            bars,
            "Means over trials.",
        ),
    )
    unchecked = (
        ("the paper's own models and data (--preset paper)",) if lab.preset_name != "paper" else ()
    )
    facts = lab.facts(f"000/{table}", {s.name: lab.trials_of(s) for s in subjects.values()})
    return Results(
        title,
        tuple(findings),
        (_table(title, table, columns, TEST, shown, note),),
        figures,
        facts,
        unchecked,
    )


def _tested(lab: Lab, subject: Subject, ways: Sequence[str]) -> Scores:
    scores: Scores = {}
    for trial in range(lab.trials_of(subject)):
        weights = lab.train(subject, trial, "plain") if subject.recipe is not None else None
        for way in ("plain", *ways):
            scores.setdefault(way, []).append(
                lab.score(subject, trial, way, key=trial, weights=weights)
            )
        for way in ("moved", "wrong"):
            for i in range(lab.preset.keys):
                scores.setdefault(way, []).append(
                    lab.score(subject, trial, way, key=100 * trial + i, weights=weights)
                )
    return scores


def _training(lab: Lab, table: str, title: str, ways: Sequence[str]) -> Results:
    subjects = lab.preset.tables[table]
    allowed = {key: ("rows",) if key == "dropout" else tuple(ways) for key in subjects}
    lab.total = 2 * lab.trials * sum(1 + len(allowed[key]) for key in subjects)
    columns, findings, figures = [], [], []
    for key, subject in subjects.items():
        assert subject.recipe is not None
        trained: Scores = {
            way: [lab.train(subject, i, way) for i in range(lab.trials)]
            for way in ("plain", *allowed[key])
        }
        dtype = subject.recipe["dtype"]
        scores: Scores = {
            w: [
                lab.score(subject, i, "plain", weights=t, dtype=dtype, trained=w)
                for i, t in enumerate(found)
            ]
            for w, found in trained.items()
        }
        column = columns_of(key, subject, scores)[0]
        columns.append(column)
        if key == "dropout":
            findings += [in_distribution(column, way, table) for way in allowed[key]]
            continue
        for way in allowed[key]:
            findings.append(same(column, way, table, exact=dtype == "float64"))
            findings.append(agree(column, way, table, "outputs", scores, dtype, outputs_of))
            findings.append(
                agree(column, way, table, "weights", trained, dtype, lambda o: o.tensors)
            )
        figures.append(_losses(subject, trained))
    note = "Means over seeds; the findings list the spreads. "
    note += (
        "Dropout is off, so that the runs can agree to rounding; with dropout they agree in "
        "distribution only."
    )
    unchecked = (
        ["the paper's own models and data (--preset paper)"] if lab.preset_name != "paper" else []
    )
    return Results(
        title,
        tuple(findings),
        (_table(title, table, columns, TRAINED, ("plain", *ways), note),),
        tuple(figures),
        lab.facts(f"000/{table}", lab.trials),
        tuple(unchecked),
    )


def _losses(subject: Subject, trained: Scores) -> Figure:
    """Plot the difference of the loss from plain training by step: by rounding, and by another
    seed.
    """
    plain = trained["plain"][0].values["losses"]
    steps = sorted({round(i * (len(plain) - 1) / 39) for i in range(40)})
    others = {f"permuted {way}": trained[way][0] for way in trained if way != "plain"}
    others |= {"another seed": trained["plain"][1]} if len(trained["plain"]) > 1 else {}
    y = {
        label: [max(abs(o.values["losses"][i] - plain[i]), 1e-17) for i in steps]
        for label, o in others.items()
    }
    data = {
        "x": [i + 1 for i in steps],
        "y": y,
        "xlabel": "step",
        "ylabel": "difference of the loss",
        "log": True,
    }
    return Figure(
        f"{subject.name}: permuted training and plain training, step by step",
        "lines",
        data,
        "Seed 0. A difference of 0 is shown as 1e-17.",
    )


def _table(
    title: str,
    table: str,
    columns: Sequence[Column],
    names: Mapping[str, str],
    ways: Sequence[str],
    note: str,
) -> Table:
    heads: list[str] = ["inference" if names is TEST else "training"]
    for c in columns:
        heads += [_head(c), "paper"]
    rows = []
    for way in ways:
        cells: list[Any] = [names[way]]
        for c in columns:
            cells += [
                round(c.shown(way), 4) if way in c.scores else None,
                PAPER[table].get(c.key, {}).get(c.measure, {}).get(way),
            ]
        rows.append(tuple(cells))
    if names is TEST:
        rows.append(
            (
                "random guess",
                *(
                    cell
                    for c in columns
                    for cell in (
                        round(c.chance * (1 if c.measure == "perplexity" else 100), 4),
                        None,
                    )
                ),
            )
        )
    return Table(title, tuple(heads), tuple(rows), note)


def _head(c: Column) -> str:
    return column_head(c)
