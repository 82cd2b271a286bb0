"""Verdicts with a margin: a comparison of two means holds only if their difference exceeds the
spread over seeds and a stated size, with at least three seeds.

    compare([0.62, 0.61, 0.63], [0.75, 0.74, 0.76], sign=-1, size=0.01).holds   # True
    compare([0.619], [0.626], sign=-1).holds                                    # None: one seed
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from regauge.results.findings import INCONCLUSIVE, spread_of

ENOUGH = 3  # the least number from which a spread over seeds is meaningful


@dataclass(frozen=True)
class Verdict:
    """Whether a statement holds, and why; None if the measurement decides nothing.

    Attributes:
        holds: True, False, or None without a verdict.
        reason: The difference and its margin, or the reason for the absence of a verdict.
    """

    holds: bool | None
    reason: str


def compare(
    values: Sequence[float],
    base: Sequence[float],
    sign: int = 1,
    *,
    size: float = 0.0,
    unit: str = "seed",
) -> Verdict:
    """Judge whether the mean of some values is above a base (with sign -1, below it).

    Args:
        values: One value for each seed.
        base: One value of the control for each seed.
        sign: 1 or -1.
        size: The smallest difference that counts, beyond which there is a verdict.
        unit: What the values are repeated over.

    Returns:
        True or False if the means differ by more than the margin, the larger of the two standard
        deviations over seeds and the size; None within it, or with fewer than three seeds.
    """
    difference = statistics.fmean(values) - statistics.fmean(base)
    spreads = [spread_of(values), spread_of(base)]
    return judge(difference, spreads, min(len(values), len(base)), sign, size=size, unit=unit)


def judge(
    difference: float,
    spreads: Sequence[float | None],
    count: int,
    sign: int = 1,
    *,
    size: float = 0.0,
    unit: str = "seed",
) -> Verdict:
    """Judge a difference of two means, given their standard deviations over `count` seeds."""
    if count < ENOUGH:
        return Verdict(None, too_few(count, unit))
    known = [spread for spread in spreads if spread is not None]
    if len(known) < len(spreads):
        return Verdict(None, f"{INCONCLUSIVE}: the spread over {unit}s is not known")
    margin = max(*known, size, 0.0)
    detail = f"difference {difference:+.3g}, margin {margin:.2g} ({count} {unit}s)"
    if abs(difference) <= margin:
        return Verdict(None, f"{INCONCLUSIVE}, no clear difference: {detail}")
    return Verdict(sign * difference > 0, detail)


def require_seeds(holds: bool, count: int, unit: str = "seed") -> Verdict:
    """Return a verdict that stands only with three seeds; its reason is empty then."""
    return Verdict(None, too_few(count, unit)) if count < ENOUGH else Verdict(holds, "")


def too_few(count: int, unit: str = "seed") -> str:
    """Return the reason for the absence of a verdict with too few seeds."""
    return f"{INCONCLUSIVE}: {count} {unit}{'s' * (count != 1)}, a verdict needs {ENOUGH}"
