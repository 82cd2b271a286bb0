"""Plots: findings as dots between what is allowed and a control, and the kinds of figures that
results can hold.

Findings are drawn in percentages, so that they follow the width of the page. The charts are
matplotlib's SVG without its global state: colours are stand-ins that become the page's own, which
follow its light and dark, and ids get a prefix, since many charts share one page.
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

# stand-ins in matplotlib's SVG, and what they become on the page
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
_HUGE = 1e300  # from here on sums overflow
# units; the text is 12 of them, so that it can be read on a phone that shows the whole in 330
# pixels
_WIDTH = 440


class Dot(NamedTuple):
    """A finding's place in its panel, in percent; None where there is no such number."""

    number: int
    finding: Finding
    value: float | None
    floor: float | None
    ceiling: float | None


class Panel(NamedTuple):
    section: str
    measure: str
    start: float  # of what is allowed
    ticks: list[tuple[float, str]]
    dots: list[Dot]


def build_panels(findings: Sequence[Finding]) -> list[Panel]:
    """The findings that have something to stand between, by section and measure: errors on a log
    axis, all else on a linear one.
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

    def along(t: float) -> float:
        return round(first + (last - first) * (t - low) / (high - low), 2)

    def place(x: float) -> float:
        """On the axis; zero on a log axis stands left of it, what is not finite right of it."""
        if not math.isfinite(x) or (log and x <= 0):
            return 97.0 if math.isnan(x) or x > 0 else 3.0
        return along(math.log10(x) if log else max(min(x, _HUGE), -_HUGE))

    if log:
        ticks = [
            (along(k), f"1e{k}" if k else "1")
            for k in range(int(low), int(high) + 1)
            if k % step == 0
        ]
    else:
        ticks = [
            (along(k * step), f"{k * step:.4g}")
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
    """A figure's markup, and how many of its numbers could not be drawn (nan, inf; on a log axis
    also what is not positive).
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
            f'the figure "{figure.title}" is of the unknown kind {figure.kind!r}',
            hint=f"known kinds: {', '.join(sorted(kinds))}",
        )
    try:
        markup, skipped = kinds[figure.kind](figure, prefix)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        said = f'"{error.args[0]}" is missing' if isinstance(error, KeyError) else str(error)
        raise FindingsError(
            f'the figure "{figure.title}" ({figure.kind}) cannot be drawn: {said}',
            hint="regauge.results.findings.Figure says what each kind holds",
        ) from error
    return Markup(markup), skipped


def _lines(figure: Figure, prefix: str) -> tuple[str, int]:
    data, log = figure.data, bool(figure.data.get("log"))
    x, skipped = _numbers(data["x"])
    few = len(x) <= 30

    def paint(axes: Any) -> None:
        nonlocal skipped
        for i, (label, values) in enumerate(data["y"].items()):
            y, missing = _numbers(values, log)
            skipped += missing
            mark = _MARKS[i % 6] if few else None
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
    """Named points, those of a series joined in their order."""
    data, skipped = figure.data, 0

    def paint(axes: Any) -> None:
        nonlocal skipped
        for i, (label, points) in enumerate(data["series"].items()):
            places, missing = _numbers([point[:2] for point in points])
            skipped += missing
            style: dict[str, Any] = {
                "color": _SERIES[i % 6],
                "linestyle": _DASHES[i % 4],
                "markersize": 7,
                "linewidth": 1.5,
            }
            style["marker"] = _MARKS[
                (i + i // 6) % 6
            ]  # the seventh has the first's colour, and another mark
            axes.plot(places[:, 0], places[:, 1], label=_label(label), **style)
            for place, point in zip(places, points, strict=True):
                axes.annotate(
                    _label(point[2], 12),
                    place,
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
    """Points of a plane, joined as they are given: a line for each series, all alike."""
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
    tall = 0.8 / max(1, len(series))

    def paint(axes: Any) -> None:
        nonlocal skipped
        for i, (label, values) in enumerate(series.items()):
            y, missing = _numbers(values)
            skipped += missing
            if y.shape != (len(labels),):
                raise ValueError(f'"{label}" has {y.size} values for {len(labels)} labels')
            places = [k - 0.4 + tall * (i + 0.5) for k in range(len(labels))]
            bars = axes.barh(
                places,
                y,
                tall * 0.9,
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
    written = len(columns) <= 14 and len(rows) <= 40
    cell, longest = 46 if written else min(20, 640 / max(values.shape)), max(map(len, columns))
    size = (max(_WIDTH, 150 + cell * len(columns)), 110 + (26 if written else cell) * len(rows))

    def paint(axes: Any) -> None:
        import numpy as np
        from matplotlib import colormaps
        from matplotlib.colors import LogNorm, Normalize

        known = values[values == values]
        low, high = (float(known.min()), float(known.max())) if known.size else (1.0, 10.0)
        norm = (LogNorm if log else Normalize)(
            low, high if high > low else low + (abs(low) / 10 or 1)
        )
        image = axes.imshow(values, cmap="cividis", norm=norm, aspect="auto", interpolation="none")
        for (i, j), value in ((p, float(v)) for p, v in np.ndenumerate(values) if written):
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
        steep = longest * 7 > cell if written else longest > 3
        slanted: dict[str, Any] = (
            {"rotation": 35, "ha": "right", "rotation_mode": "anchor"} if steep else {}
        )
        for axis, names, room, how in (
            (axes.xaxis, columns, 14 if steep else 9 * longest, slanted),
            (axes.yaxis, rows, 14, {}),
        ):
            every = 1 if written else math.ceil(room / cell)
            axis.set_ticks(range(0, len(names), every), names[::every], **how)
        axes.grid(False)
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
        if not written:
            bar = axes.figure.colorbar(image, ax=axes, fraction=0.05, pad=0.03)
            bar.outline.set_visible(False)
            if log:
                _log_labels(bar.ax.yaxis)

    return _chart(figure, prefix, size, paint), skipped


def _plane(figure: Figure, prefix: str) -> tuple[str, int]:
    """A landscape as filled contours, with named places. The contours stand closer where it is low,
    for that is where the models are.
    """
    data = figure.data
    x, skipped = _numbers(data["x"])
    y, more = _numbers(data["y"])
    values, most = _numbers(data["values"])
    if values.shape != (len(y), len(x)) or min(len(x), len(y)) < 2:
        raise ValueError(
            f"the values are {' x '.join(map(str, values.shape))}, the grid {len(y)} x {len(x)}"
        )
    places = {
        _label(name, 22): _numbers(place)[0] for name, place in data.get("points", {}).items()
    }

    def paint(axes: Any) -> None:
        import numpy as np

        known = values[values == values]
        low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 1.0)
        levels = low + (high - low if high > low else 1.0) * np.linspace(0, 1, 15) ** 1.5
        filled = axes.contourf(x, y, np.ma.masked_invalid(values), levels=levels, cmap="cividis")
        for name, (px, py) in places.items():
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
        for one, other in data.get("joined", ()):
            (ax, ay), (bx, by) = places[_label(one, 22)], places[_label(other, 22)]
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

    tall = (y[-1] - y[0]) / (x[-1] - x[0])
    return _chart(
        figure, prefix, (_WIDTH, min(620.0, max(220.0, 90 + 330 * tall))), paint
    ), skipped + more + most


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
                    f"an image has the shape {pixels.shape}; it is [height, width] or [height, "
                    "width, 3]"
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
    """Bytes [height, width] or [height, width, 3] as a PNG."""

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
    """What `paint` draws on one pair of axes, as SVG that takes its colours from the page."""
    need("matplotlib", "report")
    import io

    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure as Canvas

    out = io.StringIO()
    # the defaults first: a matplotlibrc of the user's must not show on the page
    style: dict[Any, Any] = {
        k: v
        for k, v in matplotlib.rcParamsDefault.items()
        if not k.startswith(("backend", "interactive"))
    } | _STYLE
    with matplotlib.rc_context(style), warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # on glyphs that matplotlib's font lacks: the browser draws the text
        canvas = Canvas(figsize=(size[0] / 72, size[1] / 72), layout="constrained")
        FigureCanvasSVG(canvas)
        paint(canvas.subplots())
        canvas.savefig(
            out, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
        )
    whole = out.getvalue()

    def adapt(tag: re.Match[str]) -> str:
        text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}", tag[0])
        return re.sub(r"#0101\d\d", lambda colour: _COLOURS.get(colour[0], colour[0]), text)

    inner = re.sub(r"<[^>]+>", adapt, whole[whole.index(">", whole.index("<svg")) + 1 :])
    wide = size[0] > 1.3 * _WIDTH  # it then scrolls in its own box
    shown = (
        f"width:100%;max-width:{size[0] * 1.15:.0f}px" + f";min-width:{size[0] * 0.7:.0f}px" * wide
    )
    head = (
        f'<svg role="img" aria-labelledby="{prefix}title" viewBox="0 0 {size[0]:g} '
        f'{size[1]:g}" style="{shown}">'
    )
    box = '<div class="scroll" tabindex="0" role="group">' if wide else '<div class="scroll">'
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
    text = f"\u200b{text}" if text.startswith("_") else text  # matplotlib leaves such a label out
    return text if len(text) <= longest else text[: longest - 1] + "…"


def _numbers(values: Any, log: bool = False) -> tuple[Any, int]:
    """Values as an array where what cannot be drawn is nan, and how many those are. JSON has nan
    and inf as their names.
    """
    import numpy as np

    array = np.asarray(values, dtype=np.float64)
    bad = ~(np.abs(array) < _HUGE) | (log & (array <= 0))
    return np.where(bad, np.nan, array), int(bad.sum())
