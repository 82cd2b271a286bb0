"""Charts of figures: all kinds, as SVG of matplotlib without its global state."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from regauge.errors import FindingsError
from regauge.results.findings import Figure
from regauge.results.report.numbers import format_number
from regauge.results.report.pictures import draw_images
from regauge.results.report.svg import (
    INK,
    SERIES,
    SMALL_WIDTH,
    WIDTH,
    add_legend,
    as_numbers,
    clean_label,
    draw_chart,
    set_log_labels,
)

_DASHES, _MARKS, _HATCHES = (
    ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2))),
    "osD^vP",
    ("", "////", "....", "\\\\\\\\", "xxxx", "----"),
)


def draw_figure(figure: Figure, prefix: str, compact: bool = False) -> tuple[Any, int]:
    """Draw a figure.

    Args:
        figure: The figure.
        prefix: The prefix of all ids in its markup.
        compact: Draw lines, points, bars and images smaller, for a summary.

    Returns:
        The markup, and the number of values that could not be drawn: nan, inf, and on a log axis
        values that are not positive.

    Raises:
        FindingsError: The kind is unknown, or the data do not fit it.
    """
    from markupsafe import Markup

    kinds: dict[str, Callable[[Figure, str, bool], tuple[str, int]]] = {
        "lines": _lines,
        "net": _net,
        "bars": _bars,
        "images": draw_images,
        "matrix": _matrix,
        "plane": _plane,
        "points": _points,
    }
    if not isinstance(figure.kind, str) or figure.kind not in kinds:
        raise FindingsError(
            f'the figure "{figure.title}" has the unknown kind {figure.kind!r}',
            hint=f"known kinds: {', '.join(sorted(kinds))}",
        )
    try:
        markup, skipped = kinds[figure.kind](figure, prefix, compact)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        reason = f'"{error.args[0]}" is missing' if isinstance(error, KeyError) else str(error)
        raise FindingsError(
            f'the figure "{figure.title}" ({figure.kind}) cannot be drawn: {reason}',
            hint="regauge.results.findings.Figure documents the data of each kind",
        ) from error
    return Markup(markup), skipped


def _size(compact: bool, height: float, series: int = 0) -> tuple[float, float]:
    """Return the size of a chart with a legend of some series."""
    return (SMALL_WIDTH, 0.7 * height + 10 * series) if compact else (WIDTH, height + 8 * series)


def _show_percent(axis: Any) -> None:
    """Show the shares of an axis in percent."""
    from matplotlib.ticker import FuncFormatter

    axis.set_major_formatter(FuncFormatter(lambda v, _: f"{format_number(100 * float(v), 3)} %"))


def _lines(figure: Figure, prefix: str, compact: bool) -> tuple[str, int]:
    data, log = figure.data, bool(figure.data.get("log"))
    x, skipped = as_numbers(data["x"])
    has_markers = len(x) <= 30

    def paint(axes: Any) -> None:
        nonlocal skipped
        for i, (label, values) in enumerate(data["y"].items()):
            y, missing = as_numbers(values, log)
            skipped += missing
            mark = _MARKS[i % 6] if has_markers else None
            if (spread := data.get("spread", {}).get(label)) is not None:
                width, missing = as_numbers(spread)
                skipped += missing
                low, high = y - width, y + width
                at = x[: len(y)]
                axes.fill_between(at, low, high, color=SERIES[i % 6], alpha=0.18, linewidth=0)
            axes.plot(
                x[: len(y)],
                y,
                color=SERIES[i % 6],
                linestyle=_DASHES[i % 4],
                marker=mark,
                markersize=4 if compact else 6,
                linewidth=2.2,
                label=clean_label(label),
            )
        axes.set_xlabel(clean_label(data.get("xlabel", "")))
        axes.set_ylabel(clean_label(data.get("ylabel", "")))
        if len(x) and all(float(value).is_integer() for value in x):
            axes.xaxis.get_major_locator().set_params(integer=True)
        if log:
            axes.set_yscale("log")
            set_log_labels(axes.yaxis)
        elif data.get("percent"):
            _show_percent(axes.yaxis)
            low, high = axes.get_ylim()
            if high > 1 >= axes.dataLim.y1:  # no axis to 104 %
                axes.set_ylim(low, 1 + 0.04 * (1 - low))
        add_legend(axes, len(data["y"]))

    return draw_chart(figure, prefix, _size(compact, 280, len(data["y"])), paint), skipped


def _points(figure: Figure, prefix: str, compact: bool) -> tuple[str, int]:
    """Draw named points, joined in order within a series, or a scatter plot."""
    data, skipped = figure.data, 0
    is_scatter = bool(data.get("scatter"))

    def paint(axes: Any) -> None:
        nonlocal skipped
        for i, (label, points) in enumerate(data["series"].items()):
            coordinates, missing = as_numbers([point[:2] for point in points])
            skipped += missing
            style: dict[str, Any] = {
                "color": SERIES[i % 6],
                "linestyle": "none" if is_scatter else _DASHES[i % 4],
                "markersize": 4.5 if is_scatter or compact else 7,
                "linewidth": 1.8,
            }
            # the seventh series has the colour of the first, and another marker
            style["marker"] = _MARKS[(i + i // 6) % 6]
            if is_scatter:
                style["zorder"] = 3 - 0.1 * i  # the first series is on top
            axes.plot(coordinates[:, 0], coordinates[:, 1], label=clean_label(label), **style)
            for position, point in zip(coordinates, () if is_scatter else points, strict=False):
                axes.annotate(
                    clean_label(point[2], 12),
                    position,
                    xytext=(6, 5),
                    textcoords="offset points",
                    fontsize=12,
                    color=INK,
                )
        axes.margins(0.06 if is_scatter else 0.12)
        if is_scatter:
            axes.axline((0, 0), (1, 1), color=INK, linewidth=0.8, zorder=0)
        if data.get("percent"):
            _show_percent(axes.yaxis)
        axes.set_xlabel(clean_label(data.get("xlabel", "")))
        axes.set_ylabel(clean_label(data.get("ylabel", "")))
        add_legend(axes, len(data["series"]))

    return draw_chart(figure, prefix, _size(compact, 300, len(data["series"])), paint), skipped


def _net(figure: Figure, prefix: str, compact: bool) -> tuple[str, int]:
    """Draw one line for each series of points, all in the same style."""
    skipped = 0

    def paint(axes: Any) -> None:
        nonlocal skipped
        for series in figure.data["lines"].values():
            points, missing = as_numbers(series)
            skipped += missing
            axes.plot(
                points[:, 0],
                points[:, 1],
                color=SERIES[0],
                marker="o",
                markersize=3,
                linewidth=0.8,
            )
        axes.set_aspect("equal", adjustable="datalim")

    return draw_chart(figure, prefix, (WIDTH, 360), paint), skipped


def _bars(figure: Figure, prefix: str, compact: bool) -> tuple[str, int]:
    data, skipped = figure.data, 0
    labels, series = [clean_label(x, 26) for x in data["labels"]], data["y"]
    thickness = 0.8 / max(1, len(series))
    is_share = bool(data.get("percent"))

    def paint(axes: Any) -> None:
        nonlocal skipped
        for i, (label, values) in enumerate(series.items()):
            y, missing = as_numbers(values)
            skipped += missing
            if y.shape != (len(labels),):
                raise ValueError(f'"{label}" has {y.size} values for {len(labels)} labels')
            centres = [k - 0.4 + thickness * (i + 0.5) for k in range(len(labels))]
            width = None
            if (spread := data.get("spread", {}).get(label)) is not None:
                width, missing = as_numbers([0.0 if v is None else v for v in spread])
                skipped += missing
            bars = axes.barh(
                centres,
                y,
                thickness * 0.9,
                xerr=width,
                error_kw={"ecolor": INK, "elinewidth": 1.4, "capsize": 3},
                color=SERIES[i % 6],
                hatch=_HATCHES[i % 6],
                edgecolor=INK,
                linewidth=0,
                label=clean_label(label),
            )
            texts = [f"{100 * v:.1f} %" if is_share else format_number(v) for v in map(float, y)]
            shown = [t if math.isfinite(v) else "" for t, v in zip(texts, y, strict=True)]
            axes.bar_label(bars, shown, padding=4, fontsize=12)
        axes.set_yticks(range(len(labels)), labels)
        axes.invert_yaxis()
        axes.margins(x=0.16)
        axes.grid(False, axis="y")
        axes.tick_params(axis="y", length=0)
        if is_share:
            _show_percent(axes.xaxis)
            axes.set_xlim(0, 1.2)
            axes.set_xticks([0, 0.5, 1] if compact else [0, 0.25, 0.5, 0.75, 1])
        axes.set_xlabel(clean_label(data.get("ylabel", "")))
        add_legend(axes, len(series))

    height = 80 + len(labels) * (14 + 16 * len(series)) + 8 * len(series)
    return draw_chart(figure, prefix, (SMALL_WIDTH if compact else WIDTH, height), paint), skipped


def _matrix(figure: Figure, prefix: str, compact: bool) -> tuple[str, int]:
    data, log = figure.data, bool(figure.data.get("log"))
    values, skipped = as_numbers(data["values"], log)
    rows, columns = (
        [clean_label(x, 22) for x in data["rows"]],
        [clean_label(x, 22) for x in data["columns"]],
    )
    if values.shape != (len(rows), len(columns)) or not values.size:
        raise ValueError(
            f"the values are {' x '.join(map(str, values.shape))}, the labels {len(rows)} x "
            f"{len(columns)}"
        )
    has_numbers = len(columns) <= 14 and len(rows) <= 40
    cell, longest = 46 if has_numbers else min(20, 640 / max(values.shape)), max(map(len, columns))
    size = (max(WIDTH, 150 + cell * len(columns)), 110 + (26 if has_numbers else cell) * len(rows))

    def paint(axes: Any) -> None:
        import numpy as np
        from matplotlib import colormaps
        from matplotlib.colors import LogNorm, Normalize

        valid = values[values == values]
        low, high = (float(valid.min()), float(valid.max())) if valid.size else (1.0, 10.0)
        norm = (LogNorm if log else Normalize)(
            low, high if high > low else low + (abs(low) / 10 or 1)
        )
        image = axes.imshow(values, cmap="cividis", norm=norm, aspect="auto", interpolation="none")
        for (i, j), value in ((p, float(v)) for p, v in np.ndenumerate(values) if has_numbers):
            shade = sum(colormaps["cividis"](norm(value))[:3]) if value == value else -1
            raw = data["values"][i][j]
            colour = INK if shade < 0 else "#000000" if shade > 1.35 else "#ffffff"
            axes.text(
                j,
                i,
                format_number(value if value == value else raw, 2),
                ha="center",
                va="center",
                fontsize=10,
                color=colour,
            )
        is_slanted = longest * 7 > cell if has_numbers else longest > 3
        slanted: dict[str, Any] = (
            {"rotation": 35, "ha": "right", "rotation_mode": "anchor"} if is_slanted else {}
        )
        for axis, names, room, style in (
            (axes.xaxis, columns, 14 if is_slanted else 9 * longest, slanted),
            (axes.yaxis, rows, 14, {}),
        ):
            every = 1 if has_numbers else math.ceil(room / cell)
            axis.set_ticks(range(0, len(names), every), names[::every], **style)
        axes.grid(False)
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
        if not has_numbers:
            bar = axes.figure.colorbar(image, ax=axes, fraction=0.05, pad=0.03)
            bar.outline.set_visible(False)
            if log:
                set_log_labels(bar.ax.yaxis)

    return draw_chart(figure, prefix, size, paint), skipped


def _plane(figure: Figure, prefix: str, compact: bool) -> tuple[str, int]:
    """Draw a landscape as filled contours, with named points.

    Contours are denser at low values, where the models are.
    """
    data = figure.data
    x, skipped_x = as_numbers(data["x"])
    y, skipped_y = as_numbers(data["y"])
    values, skipped = as_numbers(data["values"])
    if values.shape != (len(y), len(x)) or min(len(x), len(y)) < 2:
        raise ValueError(
            f"the values are {' x '.join(map(str, values.shape))}, the grid {len(y)} x {len(x)}"
        )
    points = {
        clean_label(name, 22): as_numbers(point)[0]
        for name, point in data.get("points", {}).items()
    }

    def paint(axes: Any) -> None:
        import numpy as np

        valid = values[values == values]
        low, high = (float(valid.min()), float(valid.max())) if valid.size else (0.0, 1.0)
        levels = low + (high - low if high > low else 1.0) * np.linspace(0, 1, 15) ** 1.5
        filled = axes.contourf(x, y, np.ma.masked_invalid(values), levels=levels, cmap="cividis")
        for name, (px, py) in points.items():
            axes.plot([px], [py], "o", color="#ffffff", markeredgecolor="#000000", markersize=8)
            axes.annotate(
                name,
                (px, py),
                xytext=(7, 7),
                textcoords="offset points",
                color="#ffffff",
                fontsize=12,
                fontweight="bold",
            )
        for start, end in data.get("joined", ()):
            (ax, ay), (bx, by) = points[clean_label(start, 22)], points[clean_label(end, 22)]
            axes.plot([ax, bx], [ay, by], color="#ffffff", linewidth=1.5, linestyle=(0, (4, 3)))
        axes.set_aspect("equal")
        axes.grid(False)
        axes.set_xlabel(clean_label(data.get("xlabel", "")))
        axes.set_ylabel(clean_label(data.get("ylabel", "")))
        bar = axes.figure.colorbar(
            filled,
            ax=axes,
            fraction=0.05,
            pad=0.03,
            label=clean_label(data.get("unit", "")),
            format=lambda v, _: format_number(float(v), 3),
        )
        bar.outline.set_visible(False)

    ratio = (y[-1] - y[0]) / (x[-1] - x[0])
    height = min(620.0, max(220.0, 90 + 330 * ratio))
    chart = draw_chart(figure, prefix, (WIDTH, height), paint)
    return chart, skipped_x + skipped_y + skipped
