"""The report of a recorded run: accuracy and leakage over rounds, and a verdict on each."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from regauge.audit.engine import CAVEAT, Attack
from regauge.audit.gradient_audit.report import IMAGES, SHARES, TEXTS
from regauge.audit.scores import Row, mean_score
from regauge.audit.tables import gallery, line_figure
from regauge.audit.verdicts import (
    Evidence,
    Quantity,
    Verdict,
    evidence_of_mean,
    with_verdicts,
    write_verdicts,
)
from regauge.results.findings import Finding, Results, Table

Means = Mapping[str, float | None]


@dataclass(frozen=True, eq=False)
class Target:
    """An attacked contribution.

    Attributes:
        round: The number of the round, from 0.
        client: The client; under secure sums, the first of all clients of the round.
        row: The scores of the attacks.
        shown: The true images for the gallery.
    """

    round: int
    client: int
    row: Row
    shown: torch.Tensor | None = None


@dataclass(frozen=True)
class LeakFormat:
    """The presentation of leakage in the report.

    Attributes:
        subject: What is recovered: "images", "texts".
        metric: The metric of leakage.
        measure: Its name with its unit.
        floor: The title of the baseline.
        columns: Titles of further columns, by kind of share or metric.
        quantity: How a verdict on the subject is written.
    """

    subject: str
    metric: str
    measure: str
    floor: str
    columns: Mapping[str, str]
    quantity: Quantity


def build_results(
    targets: Sequence[Target],
    accuracy: Mapping[int, float | None],
    attacks: Sequence[Attack],
    is_text: bool,
    optimizer: str = "sgd",
) -> Results:
    """Return accuracy and leakage over rounds.

    Args:
        targets: The attacked contributions.
        accuracy: The accuracy after each completed round.
        attacks: The attacks.
        is_text: Whether they recover texts.
        optimizer: The optimizer of the clients. The attacks invert SGD: with another one they do
            not show that nothing is revealed.
    """
    limit = ""
    if optimizer != "sgd":
        limit = f"the attacks invert steps of SGD, and the clients trained with {optimizer}"
    leak = TEXT_FORMAT if is_text else IMAGE_FORMAT
    ordered = {a.name for a in attacks if a.is_ordered}
    numbers = sorted({target.round for target in targets})
    scores = [{"round": t.round, **measure(t.row, leak, ordered)} for t in targets]
    keys = ("leak", "floor", *leak.columns)
    means: dict[int, Means] = {
        n: {key: _average([s[key] for s in scores if s["round"] == n]) for key in keys}
        for n in numbers
    }
    columns = (
        "round",
        "accuracy",
        f"the best attack, {leak.measure}",
        leak.floor,
        *leak.columns.values(),
        "updates attacked",
    )
    counts = {n: sum(t.round == n for t in targets) for n in numbers}
    body = tuple((n + 1, accuracy.get(n), *means[n].values(), counts[n]) for n in numbers)
    reasons = sorted({text for t in targets for text in t.row.reasons.values()})
    note = "Each update is attacked as it was sent. " + " ".join(
        f"{text[:1].upper()}{text[1:]}." for text in reasons
    )
    x = [n + 1 for n in numbers]
    leaks, floors = ([means[n][key] for n in numbers] for key in ("leak", "floor"))
    figures = [
        line_figure(
            "Accuracy over rounds",
            [n + 1 for n in accuracy],
            {"accuracy": list(accuracy.values())},
            "round",
            "accuracy",
            log=False,
        ),
        line_figure(
            "Leakage over rounds",
            x,
            {"the best attack": leaks, leak.floor: floors},
            "round",
            leak.measure,
            f"The server's best attack against the {leak.subject} of a client. At the "
            "baseline it recovers nothing.",
            log=False,
        ),
    ]
    if any(means[n].get("patches") is not None for n in numbers):
        aucs = [means[n]["patches"] for n in numbers]
        y: dict[str, list[float | None]] = {"the best attack": aucs, "a guess": [0.5] * len(x)}
        figures.append(line_figure("Was this patch in the batch?", x, y, "round", "AUC", log=False))
    figures += gallery("First and last", [pair for t in targets for pair in _pictures(t, leak)])
    evidence = {n: gather_evidence(n, scores, targets, leak, ordered) for n in numbers}
    verdicts = []
    for kind, quantity in {"leak": leak.quantity, **SHARES}.items():
        found = [(str(n + 1), e[kind], "") for n, e in evidence.items() if kind in e]
        verdicts += write_verdicts(quantity, found, _in_rounds, limit)
    if not any("leak" in e for e in evidence.values()):
        none = f"No verdict on whole {leak.subject}: none of the selected attacks applies."
        verdicts.append(Verdict(none, "unclear"))
    width = len(str(max(x)))  # so that ids sort by round
    findings = tuple(
        Finding(
            f"round-{n + 1:0{width}}/leak",
            f"The updates of round {n + 1} do not reveal their {leak.subject}.",
            None,
            means[n]["leak"],
            means[n]["floor"],
            None,
            " ".join(
                v.text
                for v in write_verdicts(leak.quantity, [(str(n + 1), e, "")], _in_rounds, limit)
            ),
            measure=leak.measure,
            trials=e.count,
            interval=e.interval,
        )
        for n in numbers
        if (e := evidence[n].get("leak")) is not None
    )
    results = Results(
        "What a server recovers from a federated run",
        findings,
        (Table("Rounds", columns, body, note),),
        tuple(figures),
    )
    return with_verdicts(results, [*verdicts, Verdict(CAVEAT)])


def gather_evidence(
    number: int,
    scores: Sequence[Means],
    targets: Sequence[Target],
    leak: LeakFormat,
    ordered: set[str],
) -> dict[str, Evidence]:
    """Return the evidence of a round, over its updates, by kind."""
    chosen = [(s, t.row) for s, t in zip(scores, targets, strict=True) if t.round == number]
    evidence: dict[str, Evidence | None] = {}
    pairs = [(s["leak"], s["floor"], row) for s, row in chosen]
    known = [(x, floor, row) for x, floor, row in pairs if x is not None and floor is not None]
    if known:
        over_updates = evidence_of_mean([x for x, _, _ in known], [floor for _, floor, _ in known])
        rows = [row for _, _, row in known]
        each = [v for r in rows for v in r.by_attack[best_of(r, leak, ordered)].scores[leak.metric]]
        guesses = [v for row in rows for v in (row.floor or {})[leak.metric]]
        reach = 2 * max(guesses) - statistics.fmean(guesses)
        evidence["leak"] = replace(over_updates, examples=tuple(each), reach=reach)
    for kind in SHARES:
        rows = [row for _, row in chosen if row.shares.get(kind)]
        if rows:
            merged = Row(
                "",
                {},
                shares={kind: [share for row in rows for share in row.shares[kind]]},
                guesses={kind: statistics.fmean(row.guesses.get(kind, 0.0) for row in rows)},
                counts={kind: n} if (n := sum(row.counts.get(kind, 0) for row in rows)) else {},
            )
            evidence[kind] = merged.evidence(kind)
    return {kind: e for kind, e in evidence.items() if e is not None}


def _in_rounds(names: Sequence[str]) -> str:
    return f"in round{'s' if len(names) > 1 else ''} {', '.join(names)}"


def measure(row: Row, leak: LeakFormat, ordered: set[str]) -> dict[str, float | None]:
    """Return the leak of the best attack with an order, the floor, and what else is recovered."""
    best = best_of(row, leak, ordered)
    further = {
        key: row.value(best, key) if key == "exact" else row.share(key) for key in leak.columns
    }
    floor = None if row.floor is None else mean_score(row.floor, leak.metric)
    return {"leak": row.value(best, leak.metric), "floor": floor, **further}


def best_of(row: Row, leak: LeakFormat, ordered: set[str]) -> str:
    """Return the best attack with an order; empty without one."""
    values = {n: s.value(leak.metric) or 0.0 for n, s in row.by_attack.items() if n in ordered}
    return max(values, key=lambda n: values[n], default="")


def _average(values: Sequence[float | None]) -> float | None:
    numbers = [v for v in values if v is not None]
    return statistics.fmean(numbers) if numbers else None


def _pictures(target: Target, leak: LeakFormat) -> list[tuple[str, torch.Tensor | None]]:
    """Return the labelled images of a target, and the best reconstruction."""
    values = {name: s.value(leak.metric) or 0.0 for name, s in target.row.by_attack.items()}
    if target.shown is None or not values:
        return []
    best = target.row.by_attack[max(values, key=lambda n: values[n])]
    label = f"round {target.round + 1}, client {target.client}: the client's"
    return [(label, target.shown), ("the server's reconstruction", best.images)]


IMAGE_FORMAT = LeakFormat(
    "images",
    "PSNR",
    "PSNR, dB",
    "the mean image, dB",
    {"patches": "patches, AUC", "labels": "labels recovered", "mask": "mask recovered"},
    IMAGES,
)
TEXT_FORMAT = LeakFormat(
    "texts",
    "ROUGE-L",
    "ROUGE-L",
    "another text",
    {"exact": "texts exactly", "texts": "words recovered", "labels": "labels recovered"},
    TEXTS,
)
