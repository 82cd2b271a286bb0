"""Results as plain text, as a terminal shows them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from regauge.results.findings import Finding, Results


def text_of(results: Results) -> str:
    """Results as a terminal shows them: the tables, then what was claimed."""
    from regauge.models.summary import columns
    from regauge.results.report import number

    lines: list[str] = []
    for table in results.tables:
        rows = [
            table.columns,
            *(tuple("" if cell is None else number(cell) for cell in row) for row in table.rows),
        ]
        lines += [
            table.title,
            "",
            columns(
                [tuple(map(str, row)) for row in rows], right=tuple(range(1, len(table.columns)))
            ),
            "",
        ]
    found = [("", "finding", "value", "floor", "ceiling", "")]
    for f in results.findings:
        found.append(
            (
                mark(f),
                f.id,
                _number(f.value),
                _number(f.floor),
                _number(f.ceiling),
                "" if f.holds else f.sentence,
            )
        )
    held, told = (
        sum(f.holds is True for f in results.findings),
        sum(f.holds is not None for f in results.findings),
    )
    lines += [
        columns(found, right=(2, 3, 4)),
        "",
        *(f"not checked: {text}" for text in results.unchecked),
    ]
    return "\n".join(
        [
            *lines,
            f"{held} of {told} findings hold"
            + (f"; {len(results.failed)} FAILED" if results.failed else ""),
        ]
    )


def _number(value: float | None) -> str:
    return (
        ""
        if value is None
        else f"{value:.4g}"
        if value == 0 or 1e-3 <= abs(value) < 1e6
        else f"{value:.1e}"
    )


def mark(f: Finding) -> str:
    return {True: "holds", False: "FAILS", None: "-"}[f.holds]
