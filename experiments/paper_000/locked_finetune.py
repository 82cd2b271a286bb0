"""Table 7 and Figures 4 to 6 of the permutation-equivariance paper: fine-tuning a locked model with
and without its key.

With the key, fine-tuning equals plain fine-tuning: the same losses step by step, the same weights
once unlocked. Without it, the locked weights are trained unchanged. The paper compares with
training from scratch; here is one more control, `edges`: embedding and head, which a lock leaves in
plain, around a randomly initialized backbone. A thief's gain over it is the leak of the locked
backbone.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.paper_000.claims import (
    KNOWS,
    KNOWS_TEXT,
    SAME,
    TOLERANCE,
    Column,
    Scores,
    column_head,
    columns_of,
    distance,
)
from experiments.shared.finetune_cells import WAYS
from experiments.shared.presets import Subject
from experiments.shared.runner import Lab
from experiments.shared.verdicts import compare, require_seeds
from regauge.checkpoints.resume import Outcome
from regauge.results.findings import Figure, Finding, Results, Table, spread_of

NAMES = {
    "plain": "plain",
    "authorized": "locked, with the key",
    "unauthorized": "locked, without the key",
    "edges": "embedding and head kept, random backbone",
    "scratch": "from scratch",
}
PAPER = {
    "image": {"plain": 97.74, "authorized": 97.94, "unauthorized": 78.03},
    "bert": {"plain": 94.00, "authorized": 93.72, "unauthorized": 77.25},
    "gpt2": {"plain": 94.03, "authorized": 93.66, "unauthorized": 86.16},
}
FOUR = ("plain", "authorized", "unauthorized", "scratch")  # the ways of the paper's figures
GENERATION: dict[str, Any] = {
    "prompts": ["ROMEO:", "KING HENRY:"],
    "tokens": 48,
    "temperature": 0.8,
    "dtype": "float32",
}
SHORT = {**GENERATION, "tokens": 8, "dtype": "float64"}
MARKS = set("|/\\<>`*_[]&$#~")  # what a table or a page could take for its own
POINTS = 40


def table7(lab: Lab) -> Results:
    """Fine-tuning a locked model, with its key and without: ViT, BERT and GPT-2 (with Figure 4's
    curves).
    """
    subjects = lab.preset.tables["table7"]
    lab.total = sum(_cells(lab, s, WAYS) for s in subjects.values())
    findings, figures, columns = [], [], []
    for key, subject in subjects.items():
        column, trained = _tuned(lab, key, subject, WAYS)
        columns.append(column)
        findings += _claims(column, trained, "000 Tab. 7")
        figures.append(_curves(subject, trained, "000 Fig. 4"))
    title = "Table 7: fine-tuning locked models, with the key and without"
    return Results(
        title,
        tuple(findings),
        (_table(title, columns, WAYS),),
        tuple(figures),
        _facts(lab, "table7"),
        _unchecked(lab),
    )


def figure5(lab: Lab) -> Results:
    """Fine-tuning a locked ViT to convergence, with augmentation and a cosine schedule: the loss on
    validation data.
    """
    (subject,) = lab.preset.tables["figure5"].values()
    lab.total = _cells(lab, subject, FOUR)
    column, trained = _tuned(lab, "image", subject, FOUR)
    findings = [*_claims(column, trained, "000 Fig. 5"), *_validated(subject, trained)]
    title = "Figure 5: fine-tuning a locked ViT to convergence"
    figures = (_seen(subject, trained), _curves(subject, trained, "000 Fig. 5"))
    tables = (_table(title, [column], FOUR, paper=False), _losses(trained))
    return Results(title, tuple(findings), tables, figures, _facts(lab, "figure5"), _unchecked(lab))


def figure6(lab: Lab) -> Results:
    """A locked GPT-2 that writes, and that is fine-tuned: with the key as the plain one; without it
    as a random one, at first.
    """
    writer, reader = (lab.preset.tables["figure6"][key] for key in ("shakespeare", "wikitext"))
    count = _trials(lab, writer)
    lab.total = _cells(lab, reader, WAYS) + count * (len(FOUR) + (writer.start is not None))
    generated: Scores = {way: [] for way in FOUR}
    for trial in range(count):
        begun = lab.begin(writer, trial)
        for way in FOUR:
            generated[way].append(
                lab.speak(
                    writer, trial, way, begun, SHORT if lab.preset_name == "pico" else GENERATION
                )
            )
    column, trained = _tuned(lab, "wikitext", reader, WAYS)
    title = "Figure 6: a locked GPT-2 generates text and is fine-tuned"
    findings = [*_generated(writer, generated), *_claims(column, trained, "000 Fig. 6")]
    figures = (_curves(reader, trained, "000 Fig. 6"), _seen(reader, trained))
    tables = (_samples(generated), _table(title, [column], WAYS, paper=False))
    return Results(title, tuple(findings), tables, figures, _facts(lab, "figure6"), _unchecked(lab))


def _trials(lab: Lab, subject: Subject) -> int:
    return lab.seeds or len(subject.sources) or lab.trials


def _facts(lab: Lab, table: str) -> dict[str, Any]:
    return lab.facts(
        f"000/{table}", {s.name: _trials(lab, s) for s in lab.preset.tables[table].values()}
    )


def _cells(lab: Lab, subject: Subject, ways: Sequence[str]) -> int:
    return _trials(lab, subject) * (2 * len(ways) + (subject.start is not None))


def _tuned(lab: Lab, key: str, subject: Subject, ways: Sequence[str]) -> tuple[Column, Scores]:
    """A subject fine-tuned and tested in every way, trial by trial."""
    trained: Scores = {way: [] for way in ways}
    scores: Scores = {way: [] for way in ways}
    for trial in range(_trials(lab, subject)):
        begun = lab.begin(subject, trial)
        for way in ways:
            outcome = lab.tune(subject, trial, way, begun)
            trained[way].append(outcome)
            scores[way].append(lab.tuned(subject, trial, way, outcome))
    return columns_of(key, subject, scores)[0], trained


def _claims(c: Column, trained: Scores, source: str) -> list[Finding]:
    assert c.subject.recipe is not None
    name, dtype = c.subject.name, c.subject.recipe["dtype"]
    exact, trials = dtype == "float64", len(trained["plain"])
    text = c.measure == "perplexity"
    gaps = [
        abs(a - b) / (b if text else 1)
        for a, b in zip(c.values("authorized"), c.values("plain"), strict=True)
    ]
    detail = (
        "the same in every trial"
        if max(gaps) == 0
        else f"the largest difference in a trial is {max(gaps):.1e}"
    )
    return [
        Finding(
            f"{c.key}/with key",
            f"Fine-tuning the locked {name} with its key equals plain fine-tuning ({c.measure}).",
            max(gaps) <= SAME,
            c.mean("authorized"),
            c.chance,
            c.mean("plain"),
            detail,
            source,
            c.measure,
            spread=c.spread("authorized"),
            trials=trials,
        ),
        Finding(
            f"{c.key}/with key/losses",
            f"Every training loss of the {name} with its key equals that of the plain one.",
            _stray(trained, "authorized") <= TOLERANCE[dtype] if exact else None,
            _stray(trained, "authorized"),
            TOLERANCE[dtype],
            _stray(trained, "unauthorized"),
            f"{dtype}, {trained['plain'][0].values['steps']} steps; the control has no key"
            + ("" if exact else ROUNDING),
            source,
            "largest difference of a loss",
            trials=trials,
        ),
        Finding(
            f"{c.key}/with key/weights",
            f"The weights of the {name} trained with its key, unlocked afterwards, equal those of "
            "plain training.",
            _apart(trained, "authorized", max) <= TOLERANCE[dtype] if exact else None,
            _apart(trained, "authorized", max),
            TOLERANCE[dtype],
            _apart(trained, "unauthorized", min),
            f"{dtype}; the control has no key" + ("" if exact else ROUNDING),
            source,
            trials=trials,
        ),
        _thief(c, source),
    ]


ROUNDING = "; in float32, rounding accumulates over many steps"


def _thief(c: Column, source: str) -> Finding:
    """Report fine-tuning without the key, between training from scratch and the plain model."""
    text = c.measure == "perplexity"
    verdict = compare(c.values("unauthorized"), c.values("plain"), 1 if text else -1)
    easy = (
        not text and min(*c.values("unauthorized"), *c.values("plain")) == 1.0
    )  # every model has all of it right: the task distinguishes none
    kept = _kept(c)
    knows = bool(kept)
    short = (
        f"perplexity {c.mean('unauthorized') / c.mean('plain'):.2f} times the plain one's"
        if text
        else _points(c)
    )
    detail = (
        f"{short}; a thief keeps {kept['unauthorized']} of the gain from pre-training"
        if knows
        else "pre-training gives little"
    )
    detail += f", and {kept['edges']} with embedding and head alone" if "edges" in kept else ""
    detail = f"{verdict.reason}; {detail}" if verdict.holds is None else detail
    return Finding(
        f"{c.key}/without key",
        f"Fine-tuned without the key, the locked {c.subject.name} is worse than the plain one by "
        f"more than the seeds' spread ({c.measure}).",
        verdict.holds if knows and not easy else None,
        c.mean("unauthorized"),
        c.mean("scratch"),
        c.mean("plain"),
        detail,
        source,
        c.measure,
        spread=c.spread("unauthorized"),
        trials=len(c.values("unauthorized")),
    )


def _kept(c: Column) -> dict[str, str]:
    """Return the share of the gain from pre-training, in accuracy or nats, that is left without the
    key; empty if pre-training gains little.
    """
    gained = _worth(c, "plain") - _worth(c, "scratch")
    if gained <= (KNOWS_TEXT / 4 if c.measure == "perplexity" else KNOWS):
        return {}
    ways = [way for way in ("unauthorized", "edges") if way in c.scores]
    return {way: f"{100 * (_worth(c, way) - _worth(c, 'scratch')) / gained:.0f} %" for way in ways}


def _points(c: Column) -> str:
    return f"{100 * (c.mean('plain') - c.mean('unauthorized')):.1f} points below"


def _worth(c: Column, way: str) -> float:
    """More is better: accuracy, or minus the nats of a token."""
    return -math.log(c.mean(way)) if c.measure == "perplexity" else c.mean(way)


def _stray(trained: Scores, way: str) -> float:
    """The largest difference of a loss of training from the plain run's, over steps and trials."""
    pairs = zip(trained[way], trained["plain"], strict=True)
    return float(
        max(
            abs(a - b)
            for one, plain in pairs
            for a, b in zip(one.values["losses"], plain.values["losses"], strict=True)
        )
    )


def _apart(trained: Scores, way: str, which: Any) -> float:
    return float(
        which(
            distance(a.tensors, b.tensors)
            for a, b in zip(trained[way], trained["plain"], strict=True)
        )
    )


def _validated(subject: Subject, trained: Scores) -> list[Finding]:
    """The losses on validation data where training ended, and whether it had come to rest."""
    ends = {way: [o.values["seen"][-1][1] for o in found] for way, found in trained.items()}
    least = {
        way: [min(loss for _, loss in o.values["seen"]) for o in found]
        for way, found in trained.items()
    }
    mean = {way: statistics.fmean(values) for way, values in ends.items()}
    verdict = compare(least["unauthorized"], least["authorized"])
    before = [o.values["seen"][-2][1] for o in trained["authorized"]]
    still = max(abs(a - b) / b for a, b in zip(ends["authorized"], before, strict=True))
    gained = statistics.fmean(least["scratch"]) - statistics.fmean(least["plain"])
    left = (
        (statistics.fmean(least["scratch"]) - statistics.fmean(least["unauthorized"])) / gained
        if gained > 0
        else math.nan
    )
    detail = (
        f"the lowest loss during training; a thief keeps {100 * left:.0f} % of the gain from "
        "pre-training"
        if gained > 0
        else ""
    )
    return [
        Finding(
            "image/validation",
            f"Trained to the end without the key, the {subject.name} has a higher loss on "
            "validation data than with the key, by more than the seeds' spread.",
            verdict.holds if gained > 0 else None,
            statistics.fmean(least["unauthorized"]),
            statistics.fmean(least["scratch"]),
            statistics.fmean(least["authorized"]),
            f"{verdict.reason}; {detail}" if gained > 0 else "pre-training gains nothing here",
            "000 Fig. 5",
            "validation loss",
            spread=spread_of(least["unauthorized"]),
            trials=len(ends["plain"]),
        ),
        Finding(
            "image/converged",
            f"The loss on validation data of the {subject.name} with its key has converged.",
            None,
            mean["authorized"],
            sentence=f"changes by at most {100 * still:.1f} % between the last two evaluations",
            source="000 Fig. 5",
            measure="validation loss",
            trials=len(ends["plain"]),
        ),
    ]


def _generated(subject: Subject, said: Scores) -> list[Finding]:
    """Check that a locked model with its key generates the text of the plain one, and that without
    it its perplexity is that of an untrained model.
    """
    trials = len(said["plain"])
    other = {
        way: statistics.fmean(
            _different(a, b) for a, b in zip(said[way], said["plain"], strict=True)
        )
        for way in ("authorized", "unauthorized")
    }
    perplexity = {way: _perplexity(found) for way, found in said.items()}
    gaps = [
        abs(math.expm1(a.values["nats"] - b.values["nats"]))
        for a, b in zip(said["authorized"], said["plain"], strict=True)
    ]
    random, frequencies = perplexity["scratch"], math.exp(said["plain"][0].values["frequencies"])
    left = math.log(random / perplexity["unauthorized"]) / math.log(random / perplexity["plain"])
    detail = (
        f"{100 * left:.0f} % of the way from random weights to the plain model, in nats; the "
        f"frequencies alone give {frequencies:.0f}"
    )
    knows = perplexity["plain"] < 0.8 * frequencies
    verdict = require_seeds(perplexity["unauthorized"] >= frequencies, trials, "model")
    detail = f"{verdict.reason}; {detail}" if verdict.reason else detail
    return [
        Finding(
            "shakespeare/with key/text",
            f"The locked {subject.name} with its key generates the tokens of the plain one.",
            other["authorized"] == 0,
            other["authorized"],
            0.0,
            other["unauthorized"],
            "by generate, sampled with the same random numbers; the control is the locked model "
            "without its key",
            "000 Fig. 6",
            "share of other tokens",
            trials=trials,
        ),
        Finding(
            "shakespeare/with key",
            f"The locked {subject.name} with its key has the perplexity of the plain one.",
            max(gaps) <= SAME,
            perplexity["authorized"],
            random,
            perplexity["plain"],
            f"the largest difference in a trial is {max(gaps):.1e} of it",
            "000 Fig. 6",
            "perplexity",
            trials=trials,
        ),
        Finding(
            "shakespeare/without key",
            f"The locked {subject.name} without its key predicts the next token no better than "
            "token frequencies do.",
            verdict.holds if knows else None,
            perplexity["unauthorized"],
            random,
            perplexity["plain"],
            detail if knows else f"{detail}, and the plain model is hardly better",
            "000 Fig. 6",
            "perplexity",
            trials=trials,
        ),
    ]


def _perplexity(found: Sequence[Outcome]) -> float:
    return math.exp(min(statistics.fmean(o.values["nats"] for o in found), 700.0))


def _different(a: Outcome, b: Outcome) -> float:
    pairs = [
        (x, y)
        for one, two in zip(a.values["tokens"], b.values["tokens"], strict=True)
        for x, y in zip(one, two, strict=True)
    ]
    return statistics.fmean(x != y for x, y in pairs)


def _samples(said: Scores) -> Table:
    rows = tuple(
        (
            NAMES[way].replace("from scratch", "random weights"),
            _perplexity(found),
            shown(found[0].values["texts"][0]),
        )
        for way, found in said.items()
    )
    note = (
        f"Continuations of “{GENERATION['prompts'][0]}” in the first trial, sampled at temperature "
        f"{GENERATION['temperature']} with the same random numbers. "
    )
    note += (
        "Perplexities are on held-out text, geometric means over trials. ¶ is a line break, · a "
        "character that cannot be shown in a table."
    )
    return Table("Generated text", ("model", "perplexity", "sample"), rows, note)


def shown(text: str) -> str:
    """A text in one line of a table: nothing in it is taken for a mark of the table or the page."""
    return "".join(
        "¶"
        if c == "\n"
        else c
        if c == " " or (c.isprintable() and c not in MARKS and c != "\ufffd")
        else "·"
        for c in text
    )


def _table(
    title: str, columns: Sequence[Column], ways: Sequence[str], *, paper: bool = True
) -> Table:
    heads: list[str] = ["fine-tuning"]
    for c in columns:
        heads += [column_head(c), "±", *(["paper"] if paper else [])]
    rows = []
    for way in ways:
        cells: list[Any] = [NAMES[way]]
        for c in columns:
            spread = c.spread(way)
            unit = 1 if c.measure == "perplexity" else 100
            cells += [round(c.shown(way), 4), None if spread is None else round(unit * spread, 4)]
            cells += [PAPER[c.key].get(way)] if paper else []
        rows.append(tuple(cells))
    note = "Means over trials (geometric for perplexity) and standard deviations, on the test data."
    note += (
        ' "Embedding and head kept" is beyond the paper: the parts that a lock leaves in plain, '
        "with a randomly initialized backbone."
        if "edges" in ways
        else ""
    )
    left = [(c.subject.name, kept) for c in columns if (kept := _kept(c))]
    detail = [
        f"{name} {kept['unauthorized']}"
        + (f" (with embedding and head alone {kept['edges']})" if "edges" in kept else "")
        for name, kept in left
    ]
    note += (
        " Share of the gain from pre-training (in accuracy or nats) that a thief without the key "
        f"keeps: {', '.join(detail)}."
        if detail
        else ""
    )
    return Table(title, tuple(heads), tuple(rows), note)


def _losses(trained: Scores) -> Table:
    """The validation loss along the way, as the figure has it."""
    looks = [int(step) for step, _ in trained["plain"][0].values["seen"]]
    chosen = sorted({round(i * (len(looks) - 1) / 5) for i in range(6)})
    rows: list[tuple[Any, ...]] = [
        (NAMES[way], *(round(_at(found, i), 4) for i in chosen)) for way, found in trained.items()
    ]
    heads = ("fine-tuning", *(f"step {looks[i]}" for i in chosen))
    return Table("Validation loss", heads, tuple(rows), "Means over trials, in nats.")


def _at(found: Sequence[Outcome], look: int) -> float:
    return statistics.fmean(o.values["seen"][look][1] for o in found)


def _curves(subject: Subject, trained: Scores, source: str) -> Figure:
    """The losses of training, as means over fortieths of it and over trials."""
    count = len(trained["plain"][0].values["losses"])
    parts = np.array_split(np.arange(count), min(POINTS, count))
    y = {NAMES[way]: _means(found, parts) for way, found in trained.items()}
    data = {
        "x": [int(p[-1]) + 1 for p in parts],
        "y": y,
        "xlabel": "step",
        "ylabel": "loss of training",
        "log": False,
    }
    return Figure(
        f"{subject.name}: fine-tuning, step by step",
        "lines",
        data,
        f"Means over trials; {source}. The run with the key coincides with the plain one.",
    )


def _means(found: Sequence[Outcome], parts: Sequence[Any]) -> list[float]:
    losses = np.mean([o.values["losses"] for o in found], axis=0)
    return [round(float(losses[p].mean()), 5) for p in parts]


def _seen(subject: Subject, trained: Mapping[str, Sequence[Outcome]]) -> Figure:
    looks = [int(step) for step, _ in trained["plain"][0].values["seen"]]
    y = {
        NAMES[way]: [round(_at(found, i), 5) for i in range(len(looks))]
        for way, found in trained.items()
    }
    data = {"x": looks, "y": y, "xlabel": "step", "ylabel": "loss on validation data", "log": False}
    return Figure(
        f"{subject.name}: the loss on validation data",
        "lines",
        data,
        "Means over trials. The run with the key coincides with the plain one.",
    )


def _unchecked(lab: Lab) -> tuple[str, ...]:
    return (
        ("the paper's own models and data (--preset paper)",) if lab.preset_name != "paper" else ()
    )
