"""Verdicts: what an attack recovers, judged by its interval against a guess.

A recovered quantity counts only if its 99 % interval lies above the guess. The size of the gain
then decides the wording; where too few examples were attacked to decide, the verdict says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np

from regauge.defences.parser import NONE
from regauge.results.findings import Claim, Results

Level: TypeAlias = Literal["leak", "partial", "unclear", "none", "note"]
ORDER: tuple[Level, ...] = ("leak", "partial", "unclear", "none", "note")
CONFIDENCE = 0.99
RESAMPLES = 4000  # of the bootstrap
MIN_BOOTSTRAP = 20  # examples from which the bootstrap replaces Student's t
WORDS = {
    "leak": "revealed",
    "partial": "partly revealed",
    "unclear": "inconclusive",
    "none": "not revealed",
}


@dataclass(frozen=True)
class Verdict:
    """A conclusion for the user of a protection.

    Attributes:
        text: One sentence.
        level: "leak", "partial", "unclear" (too few examples), "none" (no more than a guess), or
            "note" for the context of the others.
    """

    text: str
    level: Level = "note"


@dataclass(frozen=True)
class Evidence:
    """A measurement beside a guess.

    Attributes:
        value: The measurement.
        guess: The measurement of a guess.
        count: The number of examples behind it.
        interval: The 99 % interval of the value, given the guess; None for a single example.
        least: The smallest measurement of one example; None for shares of a count.
    """

    value: float
    guess: float
    count: int
    interval: tuple[float, float] | None = None
    least: float | None = None

    def level(self, margin: float, certain: float) -> Level:
        """Judge the measurement.

        Args:
            margin: A gain over the guess up to this is negligible.
            certain: From this value on the quantity counts as revealed.
        """
        if self.least is not None and self.least >= max(certain, self.guess + margin):
            return "leak"  # of every example: chance does not reach this once
        if self.interval is None:  # one example, without a spread
            return "unclear"
        low, high = self.interval
        if low > self.guess and self.value > self.guess + margin:
            return "leak" if self.value >= certain else "partial"
        return "none" if high <= self.guess + margin or low > self.guess else "unclear"


def evidence_of_share(share: float, guess: float, count: int) -> Evidence:
    """Return the evidence of a share of `count` independent units, by the exact binomial interval.

    Example:
        >>> evidence_of_share(0.23, 0.20, 100).level(0.0, 0.9)
        'unclear'
        >>> evidence_of_share(0.60, 0.20, 100).level(0.0, 0.9)
        'partial'
    """
    from scipy.stats import binomtest

    interval = binomtest(round(share * count), count).proportion_ci(CONFIDENCE)
    return Evidence(share, guess, count, (float(interval.low), float(interval.high)))


def evidence_of_mean(
    values: Sequence[float], guesses: Sequence[float] | float, group: int = 1
) -> Evidence:
    """Return the evidence of a mean over examples, each beside its own guess.

    The interval is that of the differences: Student's, or the bootstrap's for many examples.

    Args:
        values: The measurement of each example.
        guesses: The guess of each example, or of all.
        group: The number of successive examples that are one trial, such as those of an update.

    Example:
        >>> evidence_of_mean([30.0, 31.0, 29.0], [12.0, 13.0, 12.0]).level(0.5, 20.0)
        'leak'
    """
    guess = np.asarray(guesses, float)
    pairs = guess[: len(values)] if guess.ndim else np.full(len(values), float(guess))
    differences = np.asarray(values, float)[: len(pairs)] - pairs
    differences = np.array(
        [d.mean() for d in np.split(differences, range(group, len(pairs), group))]
    )
    count, gain, base = len(differences), float(differences.mean()), float(pairs.mean())
    value = base + gain
    if count < 2:
        return Evidence(value, base, count, least=value)
    if count >= MIN_BOOTSTRAP:
        rng = np.random.default_rng(0)
        means = differences[rng.integers(0, count, (RESAMPLES, count))].mean(1)
        low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    else:
        from scipy.stats import t

        width = t.ppf((1 + CONFIDENCE) / 2, count - 1) * differences.std(ddof=1) / math.sqrt(count)
        low, high = gain - width, gain + width
    least = base + float(differences.min())
    return Evidence(value, base, count, (base + float(low), base + float(high)), least)


@dataclass(frozen=True)
class Quantity:
    """Something that attacks recover, and how much of it counts.

    Attributes:
        name: The subject of the sentence, in the plural: "images", "labels".
        measure: The measure of the values, such as "PSNR", or empty for shares.
        margin: A gain over a guess up to this is negligible.
        certain: From this value on the quantity counts as revealed.
        unit: The unit of the values.
        units: What is counted: "images", "labels", "updates".
        digits: Digits after the point.
    """

    name: str
    measure: str
    margin: float
    certain: float
    unit: str = ""
    units: str = "images"
    digits: int = 2

    def format(self, *values: float) -> str:
        """Format a value, or the range of several."""
        low, high = (
            f"{v:.0%}" if self.unit == "%" else f"{v:.{self.digits}f}"
            for v in (min(values), max(values))
        )
        unit = f" {self.unit}" if self.unit and self.unit != "%" else ""
        return f"{low}{unit}" if low == high else f"{low} to {high}{unit}"


def write_verdicts(
    quantity: Quantity,
    measured: Iterable[tuple[str, Evidence, str]],
    under: Callable[[Sequence[str]], str] | None = None,
) -> list[Verdict]:
    """Return a sentence for each level that occurs, with the cases that have it.

    Args:
        quantity: What is recovered.
        measured: The name of each case, its evidence, and the attack.
        under: Describe some cases, which are combinations of defences by default.
    """
    under = under or _under_defences
    by_level: dict[Level, list[tuple[str, Evidence, str]]] = {}
    for case in measured:
        level = case[1].level(quantity.margin, quantity.certain)
        by_level.setdefault(level, []).append(case)
    verdicts = []
    for level in ORDER:
        cases = by_level.get(level, [])
        if not cases:
            continue
        found = [e for _, e, _ in cases]
        attacks = [a for a in dict.fromkeys(a for _, _, a in cases) if a]
        subject = quantity.name[:1].upper() + quantity.name[1:]
        values = " ".join(
            part for part in (quantity.measure, quantity.format(*(e.value for e in found))) if part
        )
        by = f" by {'; '.join(attacks)}" if attacks and level in ("leak", "partial") else ""
        guess = f"a guess: {quantity.format(*(e.guess for e in found))}"
        fewest = min(e.count for e in found)
        where = under([name for name, _, _ in cases])
        if level == "unclear":
            few = f"{fewest} {quantity.units} are" if fewest > 1 else f"1 {quantity.units[:-1]} is"
            text = (
                f"Inconclusive for {quantity.name} {where}: {values} ({guess}); {few} too few to "
                "distinguish it from a guess."
            )
        elif level == "none":
            text = f"{subject} are not revealed {where}: {values}, about as a guess ({guess})."
        else:
            text = f"{subject} are {WORDS[level]} {where}: {values}{by} ({guess})."
        verdicts.append(Verdict(text, level))
    return verdicts


def _under_defences(names: Sequence[str]) -> str:
    return f"under {', '.join('no defence' if name == NONE else name for name in names)}"


def order_verdicts(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """Return the verdicts, leaks first and notes last."""
    return sorted(verdicts, key=lambda v: ORDER.index(v.level))


def with_verdicts(results: Results, verdicts: Iterable[Verdict]) -> Results:
    """Return results with verdicts: the worst is their claim, all are in `facts["verdict"]`."""
    ordered = order_verdicts(verdicts)
    first = ordered[0]
    tones = {"leak": "bad", "partial": "mixed", "none": "good"}
    return replace(
        results,
        claim=Claim(first.text, tones.get(first.level, "none")),
        facts={**results.facts, "verdict": [v.text for v in ordered]},
    )
