"""The figures of the pages of results: what is drawn, from stored results alone, as SVG files for
light and dark mode.

A figure of the catalog is one that a result stores (`Stored`), or made of its tables (`Bars`,
`Lines`, `Front`). Rows are named by their leading cells, as in `catalog`.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from experiments.former_words import renamed
from regauge.results.findings import Figure, Results, Table
from regauge.results.report.plots import draw_figure

COLOURS = {  # of the HTML reports (regauge/results/report/page.css): ink, rules, page, series
    "light": ("#1b1e23", "#b9bec6", "#ffffff"),
    "dark": ("#e8eaed", "#565d66", "#14171a"),
}
SERIES = {
    "light": ("#0072b2", "#d55e00", "#007f5f", "#b0518a", "#946b00", "#41464e"),
    "dark": ("#56b4e9", "#f28a45", "#2fc79a", "#e29ac7", "#f0e442", "#c6cbd2"),
}
SCALE = 1.33  # of a figure on a wide page; on a phone it has the width of the page


@dataclass(frozen=True)
class Stored:
    """A figure that the results store, by its position, with a title of its own.

    `series` selects some of it, in order, and `axes` replaces the labels of its axes.
    """

    position: int
    caption: str
    title: str
    series: tuple[str, ...] = ()
    axes: tuple[str, str] | None = None


@dataclass(frozen=True)
class Bars:
    """Bars of a table: one group for each label.

    Attributes:
        title: The heading.
        caption: The text below the figure.
        groups: For each label, the names of the rows of the series; or with `columns`, of one row.
        series: The names of the series.
        columns: The column of values: one for all series, or one for each.
        spreads: The columns of standard deviations, if there are any.
        unit: What the values are.
        table: The position of the table.
    """

    title: str
    caption: str
    groups: Mapping[str, tuple[str, ...]]
    series: tuple[str, ...]
    columns: tuple[int, ...]
    spreads: tuple[int, ...] = ()
    unit: str = ""
    table: int = 0


@dataclass(frozen=True)
class Columns:
    """Bars of a table whose series are rows: one group for each of some columns.

    Attributes:
        title: The heading.
        caption: The text below the figure.
        groups: For each label, its column and that of its standard deviation, if there is one.
        series: For each name of a series, the name of its row.
        unit: What the values are.
        table: The position of the table.
    """

    title: str
    caption: str
    groups: Mapping[str, tuple[int, int | None]]
    series: Mapping[str, str]
    unit: str
    table: int = 0


@dataclass(frozen=True)
class Lines:
    """Curves of a table with bands of a standard deviation; the first column is the x axis."""

    title: str
    caption: str
    curves: Mapping[str, tuple[int, int | None]]
    xlabel: str
    ylabel: str
    table: int = 0


@dataclass(frozen=True)
class Front:
    """Rows of a table as points: a trade-off."""

    title: str
    caption: str
    x: int
    y: int
    xlabel: str
    ylabel: str
    names: Mapping[str, str] = field(default_factory=dict)
    table: int = 0


Drawn = Stored | Bars | Columns | Lines | Front


def figure_of(drawn: Drawn, results: Results) -> Figure:
    """Return a figure of the catalog as data."""
    makers: dict[type, Callable[[Any, Results], Figure]] = {
        Stored: _stored,
        Bars: _bars,
        Columns: _columns,
        Lines: _lines,
        Front: _front,
    }
    return makers[type(drawn)](drawn, results)


def _stored(drawn: Stored, results: Results) -> Figure:
    figure = results.figures[drawn.position]
    data = dict(figure.data)
    for part in ("y", "series"):
        if part in data and isinstance(data[part], dict):
            data[part] = {renamed(label): values for label, values in data[part].items()}
            if drawn.series:
                data[part] = {label: data[part][label] for label in drawn.series}
    if drawn.axes is not None:
        data["xlabel"], data["ylabel"] = drawn.axes
    if "labels" in data:
        data["labels"] = [renamed(label) for label in data["labels"]]
    return Figure(drawn.title, figure.kind, data, drawn.caption)


def _bars(drawn: Bars, results: Results) -> Figure:
    table = results.tables[drawn.table]

    def cells(columns: Sequence[int]) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {name: [] for name in drawn.series}
        for rows in drawn.groups.values():
            for i, name in enumerate(drawn.series):
                row = row_of(table, rows[i % len(rows)])
                found[name].append(row[columns[i % len(columns)]])
        return found

    data = {
        "labels": list(drawn.groups),
        "y": cells(drawn.columns),
        "ylabel": drawn.unit,
        **({"spread": cells(drawn.spreads)} if drawn.spreads else {}),
    }
    return Figure(drawn.title, "bars", data, drawn.caption)


def _columns(drawn: Columns, results: Results) -> Figure:
    table = results.tables[drawn.table]
    rows = {name: row_of(table, row) for name, row in drawn.series.items()}
    spreads = [spread for _, spread in drawn.groups.values() if spread is not None]
    data = {
        "labels": list(drawn.groups),
        "y": {name: [row[c] for c, _ in drawn.groups.values()] for name, row in rows.items()},
        "ylabel": drawn.unit,
        **(
            {"spread": {name: [row[c] for c in spreads] for name, row in rows.items()}}
            if spreads
            else {}
        ),
    }
    return Figure(drawn.title, "bars", data, drawn.caption)


def _lines(drawn: Lines, results: Results) -> Figure:
    rows = results.tables[drawn.table].rows
    data = {
        "x": [row[0] for row in rows],
        "y": {name: [row[c] for row in rows] for name, (c, _) in drawn.curves.items()},
        "spread": {
            name: [row[s] for row in rows] for name, (_, s) in drawn.curves.items() if s is not None
        },
        "xlabel": drawn.xlabel,
        "ylabel": drawn.ylabel,
    }
    return Figure(drawn.title, "lines", data, drawn.caption)


def _front(drawn: Front, results: Results) -> Figure:
    series = {
        f"{n}: {name}": [[row_of(table, row)[drawn.x], row_of(table, row)[drawn.y], str(n)]]
        for table in (results.tables[drawn.table],)
        for n, (row, name) in enumerate(drawn.names.items(), 1)
    }
    data = {"series": series, "xlabel": drawn.xlabel, "ylabel": drawn.ylabel}
    return Figure(drawn.title, "points", data, drawn.caption)


def row_of(table: Table, name: str) -> tuple[Any, ...]:
    """Return the row whose leading cells, joined by slashes, are a name.

    Raises:
        KeyError: There is no such row.
    """
    for row in table.rows:
        for count in range(1, len(row) + 1):
            if "/".join(str(cell) for cell in row[:count]) == name:
                return row
    raise KeyError(f"{table.title}: no row {name}")


PATTERN = re.compile(r'<pattern id="([^"]+)".*?</pattern>', re.S)
FILL = re.compile(r'fill="(var\(--s\d\))"')
FONTS = re.compile(r"font-family: [^;]*;")
TAG = re.compile(r"<[^>]+>")


def _compact(inner: str) -> str:
    """Shorten the SVG of matplotlib: no hatches, the fonts of the page, two decimals in tags."""
    for found in list(PATTERN.finditer(inner)):
        if colour := FILL.search(found[0]):
            inner = inner.replace(found[0], "").replace(f"url(#{found[1]})", colour[1])
    inner = re.sub(r"<title.*?</title>|<!--.*?-->|<defs>\s*</defs>", "", inner, flags=re.S)
    inner = TAG.sub(lambda tag: re.sub(r"(\d\.\d{2})\d+", r"\1", FONTS.sub("", tag[0])), inner)
    return re.sub(r"\s*\n\s*", "\n", inner)


def render_svg(figure: Figure, name: str) -> str:
    """Render a figure as an SVG file with its own colours for light and dark mode."""
    markup, _ = draw_figure(replace(figure, caption=""), f"{name}-")
    found = re.search(r'<svg [^>]*viewBox="0 0 ([\d.]+) ([\d.]+)"[^>]*>(.*)</svg>', markup, re.S)
    if found is None:
        raise ValueError(f"{name}: a figure of kind {figure.kind} is not drawn as SVG")
    width, height, inner = float(found[1]), float(found[2]), found[3]
    inner = _compact(inner)
    modes = {
        mode: f"svg{{color:{ink};--rule:{rule};--paper:{paper};"
        + "".join(f"--s{i}:{colour};" for i, colour in enumerate(SERIES[mode]))
        + "}"
        for mode, (ink, rule, paper) in COLOURS.items()
    }
    style = (
        f"{modes['light']}@media (prefers-color-scheme:dark){{{modes['dark']}}}"
        ".paper{fill:var(--paper)}text{font-family:system-ui,sans-serif}"
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="0 0 {width:g} {height:g}" width="{SCALE * width:.0f}" '
        f'height="{SCALE * height:.0f}" role="img" '
        'style="stroke-linejoin:round;stroke-linecap:butt">'
    )
    title = f"<title>{html.escape(figure.title)}</title>"
    page = f'<rect class="paper" width="{width:g}" height="{height:g}" rx="6"/>'
    return f"{head}\n{title}<style>{style}</style>\n{page}{inner.strip()}</svg>\n"
