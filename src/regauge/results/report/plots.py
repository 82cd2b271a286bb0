"""Plots: findings as dots between a baseline and a control, and all kinds of figures.

Dots are placed in percent, so that they follow the width of the page. Charts are SVG of matplotlib,
without its global state. Their placeholder colours are replaced by variables of the page, which
follow its light and dark themes, and ids get a prefix, since many charts share one page.
"""

from __future__ import annotations

import base64
import html
import math
import re
import struct
import warnings
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from regauge.errors import FindingsError, need
from regauge.results.findings import Figure, Finding
from regauge.results.report import format_number, section_name

# placeholders in matplotlib's SVG, and the colours of the page that replace them
_INK, _RULE = "#010101", "#010102"
_SERIES = tuple(f"#0101{16 + i:02d}" for i in range(6))
_COLOURS = {
    _INK: "currentColor",
    _RULE: "var(--rule)",
    **{c: f"var(--s{i})" for i, c in enumerate(_SERIES)},
}
_DASHES, _MARKS, _HATCHES = (
    ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2))),
    "osD^vP",
    ("", "////", "....", "\\\\\\\\", "xxxx", "----"),
)
_HUGE = 1e300  # sums of larger numbers overflow
_WIDTH = 440  # the text has 12 of these units, readable on a phone that is 330 pixels wide


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
        math.log10(x) if log else max(min(x, _HUGE), -_HUGE)
        for x in numbers
        if math.isfinite(x) and (x > 0 or not log)
    ]
    low, high = (
        (math.floor(min(scaled)), math.ceil(max(scaled)))
        if log and scaled
        else (min([0.0, *scaled]), max([0.0, *scaled]))
    )
    high = high if high - low > 1 / _HUGE else low + 1
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
        return to_percent(math.log10(x) if log else max(min(x, _HUGE), -_HUGE))

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


def draw_figure(figure: Figure, prefix: str) -> tuple[Any, int]:
    """Draw a figure.

    Args:
        figure: The figure.
        prefix: The prefix of all ids in its markup.

    Returns:
        The markup, and the number of values that could not be drawn: nan, inf, and on a log axis
        values that are not positive.

    Raises:
        FindingsError: The kind is unknown, or the data do not fit it.
    """
    from markupsafe import Markup

    kinds = {
        "lines": _lines,
        "net": _net,
        "bars": _bars,
        "images": _images,
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
        markup, skipped = kinds[figure.kind](figure, prefix)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        reason = f'"{error.args[0]}" is missing' if isinstance(error, KeyError) else str(error)
        raise FindingsError(
            f'the figure "{figure.title}" ({figure.kind}) cannot be drawn: {reason}',
            hint="regauge.results.findings.Figure documents the data of each kind",
        ) from error
    return Markup(markup), skipped


def _lines(figure: Figure, prefix: str) -> tuple[str, int]:
    data, log = figure.data, bool(figure.data.get("log"))
    x, skipped = _numbers(data["x"])
    has_markers = len(x) <= 30

    def paint(axes: Any) -> None:
        nonlocal skipped
        for i, (label, values) in enumerate(data["y"].items()):
            y, missing = _numbers(values, log)
            skipped += missing
            mark = _MARKS[i % 6] if has_markers else None
            axes.plot(
                x[: len(y)],
                y,
                color=_SERIES[i % 6],
                linestyle=_DASHES[i % 4],
                marker=mark,
                markersize=5,
                linewidth=2,
                label=_label(label),
            )
        axes.set_xlabel(_label(data.get("xlabel", "")))
        axes.set_ylabel(_label(data.get("ylabel", "")))
        if log:
            axes.set_yscale("log")
            _log_labels(axes.yaxis)
        _legend(axes, len(data["y"]))

    return _chart(figure, prefix, (_WIDTH, 280 + 8 * len(data["y"])), paint), skipped


def _points(figure: Figure, prefix: str) -> tuple[str, int]:
    """Draw named points, joined in order within a series."""
    data, skipped = figure.data, 0

    def paint(axes: Any) -> None:
        nonlocal skipped
        for i, (label, points) in enumerate(data["series"].items()):
            coordinates, missing = _numbers([point[:2] for point in points])
            skipped += missing
            style: dict[str, Any] = {
                "color": _SERIES[i % 6],
                "linestyle": _DASHES[i % 4],
                "markersize": 7,
                "linewidth": 1.5,
            }
            # the seventh series has the colour of the first, and another marker
            style["marker"] = _MARKS[(i + i // 6) % 6]
            axes.plot(coordinates[:, 0], coordinates[:, 1], label=_label(label), **style)
            for position, point in zip(coordinates, points, strict=True):
                axes.annotate(
                    _label(point[2], 12),
                    position,
                    xytext=(6, 5),
                    textcoords="offset points",
                    fontsize=10,
                    color=_INK,
                )
        axes.margins(0.12)
        axes.set_xlabel(_label(data.get("xlabel", "")))
        axes.set_ylabel(_label(data.get("ylabel", "")))
        _legend(axes, len(data["series"]))

    return _chart(figure, prefix, (_WIDTH, 300 + 9 * len(data["series"])), paint), skipped


def _net(figure: Figure, prefix: str) -> tuple[str, int]:
    """Draw one line for each series of points, all in the same style."""
    skipped = 0

    def paint(axes: Any) -> None:
        nonlocal skipped
        for series in figure.data["lines"].values():
            points, missing = _numbers(series)
            skipped += missing
            axes.plot(
                points[:, 0],
                points[:, 1],
                color=_SERIES[0],
                marker="o",
                markersize=3,
                linewidth=0.8,
            )
        axes.set_aspect("equal", adjustable="datalim")

    return _chart(figure, prefix, (_WIDTH, 360), paint), skipped


def _bars(figure: Figure, prefix: str) -> tuple[str, int]:
    data, skipped = figure.data, 0
    labels, series = [_label(x, 26) for x in data["labels"]], data["y"]
    thickness = 0.8 / max(1, len(series))

    def paint(axes: Any) -> None:
        nonlocal skipped
        for i, (label, values) in enumerate(series.items()):
            y, missing = _numbers(values)
            skipped += missing
            if y.shape != (len(labels),):
                raise ValueError(f'"{label}" has {y.size} values for {len(labels)} labels')
            centres = [k - 0.4 + thickness * (i + 0.5) for k in range(len(labels))]
            bars = axes.barh(
                centres,
                y,
                thickness * 0.9,
                color=_SERIES[i % 6],
                hatch=_HATCHES[i % 6],
                edgecolor=_INK,
                linewidth=0,
                label=_label(label),
            )
            axes.bar_label(
                bars,
                [format_number(v) if math.isfinite(v) else "" for v in map(float, y)],
                padding=4,
                fontsize=10,
            )
        axes.set_yticks(range(len(labels)), labels)
        axes.invert_yaxis()
        axes.margins(x=0.16)
        axes.grid(False, axis="y")
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel(_label(data.get("ylabel", "")))
        _legend(axes, len(series))

    return _chart(
        figure,
        prefix,
        (_WIDTH, 80 + len(labels) * (12 + 16 * len(series)) + 8 * len(series)),
        paint,
    ), skipped


def _matrix(figure: Figure, prefix: str) -> tuple[str, int]:
    data, log = figure.data, bool(figure.data.get("log"))
    values, skipped = _numbers(data["values"], log)
    rows, columns = [_label(x, 22) for x in data["rows"]], [_label(x, 22) for x in data["columns"]]
    if values.shape != (len(rows), len(columns)) or not values.size:
        raise ValueError(
            f"the values are {' x '.join(map(str, values.shape))}, the labels {len(rows)} x "
            f"{len(columns)}"
        )
    has_numbers = len(columns) <= 14 and len(rows) <= 40
    cell, longest = 46 if has_numbers else min(20, 640 / max(values.shape)), max(map(len, columns))
    size = (max(_WIDTH, 150 + cell * len(columns)), 110 + (26 if has_numbers else cell) * len(rows))

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
            colour = _INK if shade < 0 else "#000000" if shade > 1.35 else "#ffffff"
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
                _log_labels(bar.ax.yaxis)

    return _chart(figure, prefix, size, paint), skipped


def _plane(figure: Figure, prefix: str) -> tuple[str, int]:
    """Draw a landscape as filled contours, with named points.

    Contours are denser at low values, where the models are.
    """
    data = figure.data
    x, skipped_x = _numbers(data["x"])
    y, skipped_y = _numbers(data["y"])
    values, skipped = _numbers(data["values"])
    if values.shape != (len(y), len(x)) or min(len(x), len(y)) < 2:
        raise ValueError(
            f"the values are {' x '.join(map(str, values.shape))}, the grid {len(y)} x {len(x)}"
        )
    points = {
        _label(name, 22): _numbers(point)[0] for name, point in data.get("points", {}).items()
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
            (ax, ay), (bx, by) = points[_label(start, 22)], points[_label(end, 22)]
            axes.plot([ax, bx], [ay, by], color="#ffffff", linewidth=1.5, linestyle=(0, (4, 3)))
        axes.set_aspect("equal")
        axes.grid(False)
        axes.set_xlabel(_label(data.get("xlabel", "")))
        axes.set_ylabel(_label(data.get("ylabel", "")))
        bar = axes.figure.colorbar(
            filled,
            ax=axes,
            fraction=0.05,
            pad=0.03,
            label=_label(data.get("unit", "")),
            format=lambda v, _: format_number(float(v), 3),
        )
        bar.outline.set_visible(False)

    ratio = (y[-1] - y[0]) / (x[-1] - x[0])
    height = min(620.0, max(220.0, 90 + 330 * ratio))
    chart = _chart(figure, prefix, (_WIDTH, height), paint)
    return chart, skipped_x + skipped_y + skipped


def _images(figure: Figure, prefix: str) -> tuple[str, int]:
    import numpy as np

    heads, skipped, parts = [str(c) for c in figure.data.get("columns", ())], 0, []
    for row in figure.data["rows"]:
        parts.append(
            '<div class="strip"><p '
            f'class="strip-label">{html.escape(str(row.get("label", "")))}</p><div>'
        )
        for i, values in enumerate(row["images"]):
            pixels, missing = _numbers(values)
            skipped += missing
            pixels = pixels[..., 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels
            if (
                pixels.ndim not in (2, 3)
                or (pixels.ndim == 3 and pixels.shape[2] != 3)
                or not pixels.size
            ):
                raise ValueError(
                    "an image must have the shape [height, width] or [height, width, 3], got "
                    f"{pixels.shape}"
                )
            data = _png(np.rint(np.nan_to_num(pixels).clip(0, 1) * 255).astype(np.uint8))
            head = heads[i] if i < len(heads) else ""
            alt, width = (
                ", ".join(filter(None, (figure.title, str(row.get("label", "")), head))),
                76 if pixels.shape[1] <= 48 else 144,
            )
            caption = f"<figcaption>{html.escape(head)}</figcaption>" if head else ""
            source = f"data:image/png;base64,{base64.b64encode(data).decode()}"
            parts.append(
                f'<figure style="width:{width}px"><img src="{source}" alt="{html.escape(alt)}" '
                f'width="{width}">{caption}</figure>'
            )
        parts.append("</div></div>")
    return "".join(parts), skipped


def _png(pixels: Any) -> bytes:
    """Encode bytes [height, width] or [height, width, 3] as a PNG."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(
        ">IIBBBBB", pixels.shape[1], pixels.shape[0], 8, 2 if pixels.ndim == 3 else 0, 0, 0, 0
    )
    lines = b"".join(b"\0" + line.tobytes() for line in pixels)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(lines, 9))
        + chunk(b"IEND", b"")
    )


def _chart(figure: Figure, prefix: str, size: tuple[float, float], paint: Any) -> str:
    """Render what `paint` draws on a pair of axes as SVG with the colours of the page."""
    need("matplotlib", "report")
    import io

    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure as Canvas

    out = io.StringIO()
    # the defaults first: the user's matplotlibrc must not change the page
    style: dict[Any, Any] = {
        k: v
        for k, v in matplotlib.rcParamsDefault.items()
        if not k.startswith(("backend", "interactive"))
    } | _STYLE
    with matplotlib.rc_context(style), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on missing glyphs: the browser draws the text
        canvas = Canvas(figsize=(size[0] / 72, size[1] / 72), layout="constrained")
        FigureCanvasSVG(canvas)
        paint(canvas.subplots())
        canvas.savefig(
            out, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
        )
    svg = out.getvalue()

    def adapt(tag: re.Match[str]) -> str:
        text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}", tag[0])
        return re.sub(r"#0101\d\d", lambda colour: _COLOURS.get(colour[0], colour[0]), text)

    # a style element of an inline SVG applies to the whole document: the root's style replaces it
    svg = re.sub(
        r"<style\b.*?</style>", "", svg[svg.index(">", svg.index("<svg")) + 1 :], flags=re.S
    )
    inner = re.sub(r"<[^>]+>", adapt, svg)
    is_wide = size[0] > 1.3 * _WIDTH  # it then scrolls in its own box
    style_width = (
        f"stroke-linejoin:round;stroke-linecap:butt;width:100%;max-width:{size[0] * 1.15:.0f}px"
    )
    style_width += f";min-width:{size[0] * 0.7:.0f}px" * is_wide
    head = (
        f'<svg role="img" aria-labelledby="{prefix}title" viewBox="0 0 {size[0]:g} '
        f'{size[1]:g}" style="{style_width}">'
    )
    box = '<div class="scroll" tabindex="0" role="group">' if is_wide else '<div class="scroll">'
    return f'{box}{head}<title id="{prefix}title">{html.escape(figure.title)}</title>{inner}</div>'


_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "regauge",
    "text.parse_math": False,
    "font.size": 12,
    "hatch.linewidth": 0.6,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.labelsize": 11,
    "ytick.labelsize": 11,
    "legend.frameon": False,
    "legend.fontsize": 11,
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), _INK
    ),
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color", "grid.color"), _RULE),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "none"),
}


def _legend(axes: Any, series: int) -> None:
    if series > 1:
        longest = max(len(text) for text in axes.get_legend_handles_labels()[1])
        axes.figure.legend(
            loc="outside upper left",
            ncols=max(1, min(series, 60 // (longest + 8))),
            handlelength=2.4,
        )


def _log_labels(axis: Any) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    low, high = axis.get_view_interval()
    axis.set_major_formatter(
        FuncFormatter(
            lambda x, _: (
                format_number(float(x), 2) if 0.01 < x < 100 else f"1e{round(math.log10(x))}"
            )
        )
    )
    axis.set_minor_formatter(
        FuncFormatter(lambda x, _: format_number(float(x), 2))
        if high < 20 * low
        else NullFormatter()
    )


def _label(value: Any, longest: int = 60) -> str:
    text = "".join(c if c.isprintable() else " " for c in str(value))
    text = f"\u200b{text}" if text.startswith("_") else text  # matplotlib omits such labels
    return text if len(text) <= longest else text[: longest - 1] + "…"


def _numbers(values: Any, log: bool = False) -> tuple[Any, int]:
    """Return values as an array with nan for numbers that cannot be drawn, and their count.

    In JSON nan and inf are strings.
    """
    import numpy as np

    array = np.asarray(values, dtype=np.float64)
    bad = ~(np.abs(array) < _HUGE) | (log & (array <= 0))
    return np.where(bad, np.nan, array), int(bad.sum())
