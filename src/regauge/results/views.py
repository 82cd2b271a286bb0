"""What every result object can do: become a dict, JSON, a page, or a cell of a notebook."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

from regauge.results.findings import Results, to_json


class ResultView:
    """Base of result objects. Subclasses define `results`, and `__str__` as their text."""

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
        return to_json(self.results)

    def to_html(self, path: str | Path | None = None) -> str:
        """Return the page of the results, and write it to a file if one is named.

        Requires the extra `report`.
        """
        from regauge.results.report import page

        text = page(self.results)
        if path is not None:
            from regauge.checkpoints.files import write_bytes

            write_bytes(Path(path), text.encode())
        return text

    def _repr_html_(self) -> str:
        """Show the text and the tables in a notebook, without further libraries."""
        parts = [f"<pre>{html.escape(str(self))}</pre>"]
        for table in self.results.tables[:1]:
            rows = "".join(
                "<tr>" + "".join(f"<td>{html.escape(_format_cell(c))}</td>" for c in row) + "</tr>"
                for row in table.rows[:20]
            )
            head = "".join(f"<th>{html.escape(c)}</th>" for c in table.columns)
            more = (
                f"<p>... and {len(table.rows) - 20} more rows</p>" if len(table.rows) > 20 else ""
            )
            parts.append(f"<h4>{html.escape(table.title)}</h4><table><tr>{head}</tr>{rows}</table>")
            parts.append(more)
        return "".join(parts)


def _format_cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
