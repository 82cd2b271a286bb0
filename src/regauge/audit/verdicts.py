"""Verdicts: what an attack recovers, judged by its interval against a guess.

A recovered quantity counts if its 99 % interval lies above the guess, or if an example is recovered
with certainty, which chance does not explain. The size of the gain then decides the wording; where
too few examples were attacked to decide, the verdict says so.
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
MIN_BOOTSTRAP = 20  # examples from which skewed differences may widen Student's interval
# If none of n trials leaks, the share of trials that do is at 99 % confidence at most
# 1 - 0.01^(1/n): less than half from 7 on. Fewer, even with equal results, exclude too little.
MIN_TRIALS = 7
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
        count: The number of independent trials behind it, such as updates.
        interval: The 99 % interval of the value, given the guess; None for a single trial.
        least: The smallest measurement of one trial; None for shares of a count.
        examples: The measurement of each example; empty if chance can reach certainty on one.
        reach: What a guess may reach on one example.
    """

    value: float
    guess: float
    count: int
    interval: tuple[float, float] | None = None
    least: float | None = None
    examples: tuple[float, ...] = ()
    reach: float = 0.0

    def certain_examples(self, margin: float, certain: float) -> int:
        """Count the examples that are recovered with certainty, beyond the reach of a guess."""
        return sum(value >= max(certain, self.reach + margin) for value in self.examples)

    def beats_guess(self, margin: float, certain: float) -> bool | None:
        """Return whether the measurement exceeds a guess; None if undecided.

        It agrees with `level`, and also exceeds a guess if that of every trial does.
        """
        level = self.level(margin, certain)
        if level == "unclear":
            return True if self.least is not None and self.least > self.guess else None
        return level != "none"

    def level(self, margin: float, certain: float) -> Level:
        """Judge the measurement.

        Args:
            margin: A gain over the guess up to this is negligible.
            certain: From this value on the quantity counts as revealed.
        """
        if self.least is not None and self.least >= max(certain, self.guess + margin):
            return "leak"  # of every example: chance does not reach this once
        low, high = self.interval or (-math.inf, math.inf)
        if low > self.guess and self.value > self.guess + margin:
            return "leak" if self.value >= certain else "partial"
        if self.certain_examples(margin, certain):
            return "partial"
        is_enough = self.count >= MIN_TRIALS and high <= self.guess + margin
        return "none" if is_enough else "unclear"


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

    The interval is Student's, of the differences. Many examples also have the bootstrap's, which
    follows their skewness but is too narrow for few: the interval encloses both.

    Args:
        values: The measurement of each example.
        guesses: The guess of each example, or of all.
        group: The number of successive examples that are one trial, such as those of an update.

    Example:
        >>> evidence_of_mean([30.0, 31.0, 29.0], [12.0, 13.0, 12.0]).level(0.5, 20.0)
        'leak'
    """
    from scipy.stats import t

    pairs = np.broadcast_to(np.asarray(guesses, float), (len(values),))
    parts = np.split(np.asarray(values, float) - pairs, range(group, len(values), group))
    differences = np.array([part.mean() for part in parts])
    count, base = len(differences), float(pairs.mean())
    value, gain = float(np.mean(values)), float(differences.mean())
    least = base + float(differences.min())
    each = tuple(float(v) for v in values)
    reach = 2 * float(pairs.max()) - base  # as far above the best guess as that is above the mean
    if count < 2:
        return Evidence(value, base, count, None, least, each, reach)
    width = t.ppf((1 + CONFIDENCE) / 2, count - 1) * differences.std(ddof=1) / math.sqrt(count)
    low, high = gain - width, gain + width
    if count >= MIN_BOOTSTRAP:
        rng = np.random.default_rng(0)
        means = differences[rng.integers(0, count, (RESAMPLES, count))].mean(1)
        tails = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
        low, high = min(low, tails[0]), max(high, tails[1])
    interval = (base + float(low), base + float(high))
    return Evidence(value, base, count, interval, least, each, reach)


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
        examples: What the measurement of one example is of; its plural.
    """

    name: str
    measure: str
    margin: float
    certain: float
    unit: str = ""
    units: str = "images"
    digits: int = 2
    examples: str = ""

    def level(self, evidence: Evidence) -> Level:
        """Judge some evidence."""
        return evidence.level(self.margin, self.certain)

    def beats_guess(self, evidence: Evidence) -> bool | None:
        """Return whether some evidence exceeds a guess; None if undecided."""
        return evidence.beats_guess(self.margin, self.certain)

    def describe_certain(self, measured: Sequence[Evidence]) -> str:
        """Describe the examples that are recovered with certainty; empty if none is."""
        counts = [e.certain_examples(self.margin, self.certain) for e in measured]
        most = max(counts, default=0)
        if not most:
            return ""
        evidence = measured[counts.index(most)]
        subject = f"{most} of {len(evidence.examples)} {self.examples or self.name}"
        best = self.format(max(max(e.examples) for e in measured if e.examples))
        upto = "up to " if len(set(counts)) > 1 else ""
        verb = "is" if most == 1 else "are"
        return f"; {upto}{subject} {verb} recovered with certainty, the best at {best}"

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
    limit: str = "",
) -> list[Verdict]:
    """Return a sentence for each level that occurs, with the cases that have it.

    Args:
        quantity: What is recovered.
        measured: The name of each case, its evidence, and the attack.
        under: Describe some cases, which are combinations of defences by default.
        limit: Why the attacks do not suffice to exclude a leak; empty if they do.
    """
    under = under or _under_defences
    by_level: dict[Level, list[tuple[str, Evidence, str]]] = {}
    for case in measured:
        level = quantity.level(case[1])
        level = "unclear" if limit and level == "none" else level
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
            reason = limit or f"{few} too few to distinguish it from a guess"
            text = f"Inconclusive for {quantity.name} {where}: {values} ({guess}); {reason}."
        elif level == "none":
            text = f"{subject} are not revealed {where}: {values}, about as a guess ({guess})."
        else:
            certain = quantity.describe_certain(found) if level == "partial" else ""
            text = f"{subject} are {WORDS[level]} {where}: {values}{by} ({guess}){certain}."
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
