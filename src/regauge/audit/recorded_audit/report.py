"""The report of a recorded run: accuracy and leakage over rounds, and a verdict on each."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from regauge.audit.engine import Attack
from regauge.audit.scores import Row, mean_score
from regauge.audit.tables import gallery, line_figure
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
        plain: Whether a round reveals the subject plainly, by leak and floor.
        describe: Describe a round by its mean scores.
    """

    subject: str
    metric: str
    measure: str
    floor: str
    columns: Mapping[str, str]
    plain: Callable[[float, float], bool]
    describe: Callable[[Means], str]


def build_results(
    targets: Sequence[Target],
    accuracy: Mapping[int, float | None],
    attacks: Sequence[Attack],
    is_text: bool,
) -> Results:
    """Return accuracy and leakage over rounds.

    Args:
        targets: The attacked contributions.
        accuracy: The accuracy after each completed round.
        attacks: The attacks.
        is_text: Whether they recover texts.
    """
    leak = TEXTS if is_text else IMAGES
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
            f"The server's best attack against the {leak.subject} of a client. At the floor it "
            "recovers nothing.",
            log=False,
        ),
    ]
    if any(means[n].get("patches") is not None for n in numbers):
        aucs = [means[n]["patches"] for n in numbers]
        y: dict[str, list[float | None]] = {"the best attack": aucs, "a guess": [0.5] * len(x)}
        figures.append(line_figure("Was this patch in the batch?", x, y, "round", "AUC", log=False))
    figures += gallery("First and last", [pair for t in targets for pair in _pictures(t, leak)])
    sentences = [leak.describe(means[n]) for n in numbers]
    plain = sum(
        a is not None and b is not None and leak.plain(a, b)
        for a, b in zip(leaks, floors, strict=True)
    )
    summary = (
        f"{leak.subject.capitalize()} come back from contributions in {plain} of {len(numbers)} "
        "attacked rounds."
    )
    width = len(str(max(x)))  # so that ids sort by round
    findings = tuple(
        Finding(
            f"round-{number:0{width}}/leak",
            f"Leakage of the updates of round {number}",
            None,
            value,
            floor,
            None,
            text,
            measure=leak.measure,
        )
        for number, value, floor, text in zip(x, leaks, floors, sentences, strict=True)
        if value is not None
    )
    lines = [f"round {n}: {text}" for n, text in zip(x, sentences, strict=True)]
    return Results(
        "What a server recovers from a federated run",
        findings,
        (Table("Rounds", columns, body, note),),
        tuple(figures),
        {"verdict": [summary, *lines]},
    )


def measure(row: Row, leak: LeakFormat, ordered: set[str]) -> dict[str, float | None]:
    """Return the leak of the best attack with an order, the floor, and what else is recovered."""
    values = {n: s.value(leak.metric) or 0.0 for n, s in row.by_attack.items() if n in ordered}
    best = max(values, key=lambda n: values[n], default="")
    further = {
        key: row.value(best, key) if key == "exact" else row.share(key) for key in leak.columns
    }
    floor = None if row.floor is None else mean_score(row.floor, leak.metric)
    return {"leak": values.get(best), "floor": floor, **further}


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


PLAIN_DB, PARTIAL_DB = 10.0, 1.0  # dB above the mean image
PLAIN_ROUGE, PARTIAL_ROUGE = 0.9, 0.1  # ROUGE-L: of recovered texts; above the floor, in part


def _describe_images(means: Means) -> str:
    leak, floor, membership, labels = (means[key] for key in ("leak", "floor", "patches", "labels"))
    if leak is None or floor is None:
        images = "none of the attacks on images applies"
    else:
        head = (
            "images come back"
            if leak > floor + PLAIN_DB
            else "something of the images comes back"
            if leak > floor + PARTIAL_DB
            else "images do not come back"
        )
        images = f"{head} ({leak:.1f} dB, the mean image {floor:.1f})"
    if membership is not None:
        hardly = "" if membership > 0.75 else "hardly "
        images += f"; patches can {hardly}be recognised (AUC {membership:.2f})"
    return images + ("" if labels is None else f"; {labels:.0%} of the labels are revealed")


def _describe_texts(means: Means) -> str:
    leak, floor, bag, labels, exact = (
        means[key] for key in ("leak", "floor", "texts", "labels", "exact")
    )
    if leak is None or floor is None:
        texts = "none of the attacks on whole texts applies"
    else:
        head = (
            "texts come back"
            if leak >= PLAIN_ROUGE
            else "something of the texts comes back"
            if leak > floor + PARTIAL_ROUGE
            else "texts do not come back"
        )
        texts = f"{head} (ROUGE-L {leak:.2f}, another text {floor:.2f}; {exact or 0.0:.0%} exactly)"
    words = "" if bag is None else f"; {bag:.0%} of the words are revealed"
    return texts + words + ("" if labels is None else f"; {labels:.0%} of the labels are revealed")


IMAGES = LeakFormat(
    "images",
    "PSNR",
    "PSNR, dB",
    "the mean image, dB",
    {"patches": "patches, AUC", "labels": "labels recovered", "mask": "mask recovered"},
    lambda leak, floor: leak > floor + PLAIN_DB,
    _describe_images,
)
TEXTS = LeakFormat(
    "texts",
    "ROUGE-L",
    "ROUGE-L",
    "another text",
    {"exact": "texts exactly", "texts": "words recovered", "labels": "labels recovered"},
    lambda leak, floor: leak >= PLAIN_ROUGE,
    _describe_texts,
)
