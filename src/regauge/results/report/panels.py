"""Panels: findings as dots between a baseline and a control, placed in percent of their width."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from regauge.results.findings import Finding
from regauge.results.report.numbers import HUGE, section_name


class Dot(NamedTuple):
    """The coordinates of a finding in its panel, in percent; None for a missing number."""

    number: int
    finding: Finding
    value: float | None
    floor: float | None
    ceiling: float | None


class Panel(NamedTuple):
    """The findings of one section and measure, on one axis."""

    section: str
    measure: str
    start: float  # of the allowed range
    ticks: list[tuple[float, str]]
    dots: list[Dot]


def build_panels(findings: Sequence[Finding]) -> list[Panel]:
    """Group findings with a floor or a ceiling by section and measure.

    Errors are on a logarithmic axis, all other measures on a linear one.
    """
    groups: dict[tuple[str, str], list[tuple[int, Finding]]] = {}
    for i, f in enumerate(findings):
        if f.value is not None and (f.floor is not None or f.ceiling is not None):
            groups.setdefault((section_name(f), f.measure), []).append((i, f))
    return [_panel(*key, group) for key, group in groups.items()]


def _panel(name: str, measure: str, group: list[tuple[int, Finding]]) -> Panel:
    log = "error" in measure
    numbers = [x for _, f in group for x in (f.value, f.floor, f.ceiling) if x is not None]
    scaled = [
        math.log10(x) if log else max(min(x, HUGE), -HUGE)
        for x in numbers
        if math.isfinite(x) and (x > 0 or not log)
    ]
    low, high = (
        (math.floor(min(scaled)), math.ceil(max(scaled)))
        if log and scaled
        else (min([0.0, *scaled]), max([0.0, *scaled]))
    )
    high = high if high - low > 1 / HUGE else low + 1
    step = max(1, math.ceil((high - low) / 5)) if log else _tick_step((high - low) / 4)
    if not log:
        low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    left, right = (
        any(x <= 0 if log else x == -math.inf for x in numbers),
        any(math.isnan(x) or x == math.inf for x in numbers),
    )
    first, last = 10 if left else 4, 90 if right else 96

    def to_percent(t: float) -> float:
        return round(first + (last - first) * (t - low) / (high - low), 2)

    def place(x: float) -> float:
        """Place a number: zero left of a log axis, infinite and missing numbers right of it."""
        if not math.isfinite(x) or (log and x <= 0):
            return 97.0 if math.isnan(x) or x > 0 else 3.0
        return to_percent(math.log10(x) if log else max(min(x, HUGE), -HUGE))

    if log:
        ticks = [
            (to_percent(k), f"1e{k}" if k else "1")
            for k in range(int(low), int(high) + 1)
            if k % step == 0
        ]
    else:
        ticks = [
            (to_percent(k * step), f"{k * step:.4g}")
            for k in range(round(low / step), round(high / step) + 1)
        ]
    ticks += [(3.0, "0" if log else "−∞")] * left + [(97.0, "∞")] * right
    dots = [
        Dot(i, f, *(None if x is None else place(x) for x in (f.value, f.floor, f.ceiling)))
        for i, f in group
    ]
    return Panel(name, measure, 0.0 if log else first, ticks, dots)


def _tick_step(size: float) -> float:
    power = 10.0 ** math.floor(math.log10(size))
    return next(power * n for n in (1, 2, 2.5, 5, 10) if power * n >= size * (1 - 1e-9))
