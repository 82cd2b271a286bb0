"""Numbers and names of findings as the page writes them."""

from __future__ import annotations

import re
from typing import Any

from regauge.results.findings import Finding

HUGE = 1e300  # sums of larger numbers overflow


def section_name(finding: Finding) -> str:
    """Return the section of a finding: its id up to the first slash."""
    return finding.id.split("/")[0]


def format_amount(value: float | None, finding: Finding) -> str:
    """Format a number of a finding: errors with two digits, small ones as powers of ten."""
    is_small = value is not None and "error" in finding.measure and 0 < abs(value) < 0.1
    return (
        _format_power(value)
        if value is not None and is_small
        else format_number(value, 2 if "error" in finding.measure else 4)
    )


def format_number(value: Any, digits: int = 4) -> str:
    """Format a cell: numbers with their significant digits, nan and inf as words."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if not isinstance(value, float):
        return "–" if value is None else str(value)
    if value == 0 or value != value or abs(value) == float("inf"):
        return "0" if value == 0 else str(value)
    if not 1e-3 <= abs(value) < 1e6:
        return _format_power(value)
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def _format_power(value: float) -> str:
    return re.sub(r"e([+-])0*(\d)", lambda m: f"e{m[1].strip('+')}{m[2]}", f"{value:.1e}")
