"""Results as plain text for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from regauge.results.findings import Finding, Results


def format_results(results: Results) -> str:
    """Format results as text: the tables, then the findings."""
    from regauge.models.summary import format_columns
    from regauge.results.report import format_number

    lines: list[str] = []
    for table in results.tables:
        rows = [
            table.columns,
            *(
                tuple("" if cell is None else format_number(cell) for cell in row)
                for row in table.rows
            ),
        ]
        lines += [
            table.title,
            "",
            format_columns(
                [tuple(map(str, row)) for row in rows], right=tuple(range(1, len(table.columns)))
            ),
            "",
        ]
    findings = [("", "finding", "value", "baseline", "control", "")]
    for f in results.findings:
        findings.append(
            (
                format_verdict(f),
                f.id,
                _format_value(f.value),
                _format_value(f.floor),
                _format_value(f.ceiling),
                "" if f.holds else f.sentence,
            )
        )
    held = sum(f.holds is True for f in results.findings)
    checked = sum(f.holds is not None for f in results.findings)
    lines += [
        format_columns(findings, right=(2, 3, 4)),
        "",
        *(f"not checked: {text}" for text in results.unchecked),
    ]
    return "\n".join(
        [
            *lines,
            f"{held} of {checked} findings hold"
            + (f"; {len(results.failed)} FAILED" if results.failed else ""),
        ]
    )


def _format_value(value: float | None) -> str:
    return (
        ""
        if value is None
        else f"{value:.4g}"
        if value == 0 or 1e-3 <= abs(value) < 1e6
        else f"{value:.1e}"
    )


def format_verdict(f: Finding) -> str:
    """Return the verdict of a finding as one word, or "-" without one."""
    return {True: "holds", False: "FAILS", None: "-"}[f.holds]
