"""What every result object can do: become a dict, JSON, a file, a page, or a cell of a notebook."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from regauge.checkpoints.files import write_bytes
from regauge.errors import FindingsError
from regauge.results.text import format_results, format_verdict

if TYPE_CHECKING:
    from regauge.results.findings import Finding, Results

_ROWS, _FIGURES = 20, 2  # of a table, and of a cell; the page has all of them
# readable on white and on black
_COLOURS = {"good": "#00815c", "bad": "#cf4a12", "mixed": "#98700f", "none": "#3a83bd"}
_FINDINGS = ("", "finding", "value", "baseline", "control", "")
# The variables of the page that its figures use.
_STYLE = (
    "max-width:60em;--ink:currentColor;--soft:#80858d;--rule:#c9c7c1;--paper:transparent;"
    "--s0:#2d8fcb;--s1:#d9671a;--s2:#12936f;--s3:#b96a9c;--s4:#9a7a1a;--s5:#80868e"
)


class ResultView:
    """Base of result objects.

    Subclasses define `results`, `__str__` if a terminal shows something else than tables and
    findings, `__repr__` if the title of the results does not suffice, and `save` if they have more
    to save than their results. Dataclasses need `repr=False`.
    """

    @property
    def results(self) -> Results:
        """Findings, tables, figures and facts."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Return the results as plain data, as `--json` writes them."""
        document: dict[str, Any] = json.loads(self.to_json())
        return document

    def to_json(self) -> str:
        """Return the results as JSON."""
        from regauge.results.findings import to_json

        return to_json(self.results)

    def save(self, out: str | Path) -> Any:
        """Write the results as JSON to a new file, which `regauge report` renders.

        Raises:
            CheckpointError: The file exists or cannot be written.
        """
        from regauge.results.findings import to_json

        write_bytes(Path(out), to_json(self.results).encode(), new=True)

    @overload
    def to_html(self, path: None = None) -> str: ...

    @overload
    def to_html(self, path: str | Path) -> None: ...

    def to_html(self, path: str | Path | None = None) -> str | None:
        """Return the page of the results, or write it to a file if one is named.

        Requires the extra `report`.
        """
        from regauge.results.report import page

        text = page(self.results)
        if path is None:
            return text
        write_bytes(Path(path), text.encode())
        return None

    def __str__(self) -> str:
        return format_results(self.results)

    def __repr__(self) -> str:
        return f"<{self.results.title}>"

    def _repr_html_(self) -> str:
        """Show conclusion, findings, tables, skipped checks and figures in a notebook.

        Only the figures require further libraries; they are left out without matplotlib.
        """
        from regauge.results.headline import count_checks, remaining_verdicts

        results = self.results
        headline, lines = results.headline, remaining_verdicts(results)
        if results.findings and (count := count_checks(results)) != headline.text:
            lines.append(count)
        colour = _COLOURS[headline.tone]
        mark = f"border-left:.3em solid {colour};padding:.2em .8em;margin:.4em 0"
        about = repr(self).removeprefix("<").removesuffix(">")
        parts = [escape(results.title)]
        parts.append(f'<br><strong style="color:{colour}">{escape(headline.text)}</strong>')
        if headline.number:
            parts.append(f"<br>{escape(f'{headline.number} {headline.label}')}")
        if lines:
            parts.append(_list(lines))
        elif about != results.title:
            parts.append(f"<br>{escape(about)}")
        parts = [f'<div style="{mark}">{"".join(parts)}</div>']
        if results.findings:
            parts.append(_table(_FINDINGS, [_row(f) for f in results.findings]))
        for table in results.tables:
            parts.append(f"<h4>{escape(table.title)}</h4>" + _table(table.columns, table.rows))
        if results.unchecked:
            parts.append(f"<h4>What was not checked</h4>{_list(results.unchecked)}")
        if find_spec("matplotlib") and find_spec("jinja2"):
            parts += _draw(results, f"r{id(self):x}-")
        return f'<div style="{_STYLE}">{"".join(parts)}</div>'


def _row(f: Finding) -> tuple[object, ...]:
    return (format_verdict(f), f.id, f.value, f.floor, f.ceiling, "" if f.holds else f.sentence)


def _list(items: Iterable[object]) -> str:
    return f"<ul>{''.join(f'<li>{escape(str(item))}</li>' for item in items)}</ul>"


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    from regauge.results.report import format_number

    def line(tag: str, cells: Iterable[object]) -> str:
        texts = ("" if cell is None else escape(format_number(cell)) for cell in cells)
        return f"<tr>{''.join(f'<{tag}>{text}</{tag}>' for text in texts)}</tr>"

    body = "".join(line("td", row) for row in rows[:_ROWS])
    more = f"<p>... and {len(rows) - _ROWS} more rows</p>" if len(rows) > _ROWS else ""
    return f"<table>{line('th', columns)}{body}</table>{more}"


def _draw(results: Results, prefix: str) -> list[str]:
    from regauge.results.report.plots import draw_figure

    drawn = []
    for i, figure in enumerate(results.figures[:_FIGURES]):
        try:
            markup, _ = draw_figure(figure, f"{prefix}{i}-")
        except FindingsError:  # the page names the fault; a cell shows the rest
            continue
        drawn.append(f"<h4>{escape(figure.title)}</h4>{markup}<p>{escape(figure.caption)}</p>")
    return drawn
