"""SVG of matplotlib with the colours of the page, and what all charts share: labels and numbers."""

from __future__ import annotations

import html
import math
import re
import warnings
from typing import Any

from regauge.errors import need
from regauge.results.findings import Figure
from regauge.results.report.numbers import HUGE, format_number

# placeholders in matplotlib's SVG, and the colours of the page that replace them
INK, RULE = "#010101", "#010102"
SERIES = tuple(f"#0101{16 + i:02d}" for i in range(6))
_COLOURS = {
    INK: "currentColor",
    RULE: "var(--rule)",
    **{c: f"var(--s{i})" for i, c in enumerate(SERIES)},
}
SMALL_WIDTH = 310  # of a card in a summary
WIDTH = 420  # the text has 12 of these units, readable on a phone that is 330 pixels wide


def draw_chart(figure: Figure, prefix: str, size: tuple[float, float], paint: Any) -> str:
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
    is_wide = size[0] > 1.3 * WIDTH  # it then scrolls in its own box
    largest = size[0] * (1.5 if size[0] == WIDTH else 1.15)
    style_width = f"stroke-linejoin:round;stroke-linecap:butt;width:100%;max-width:{largest:.0f}px"
    style_width += f";min-width:{size[0] * 0.7:.0f}px" * is_wide
    about = f'<desc id="{prefix}desc">{html.escape(figure.caption)}</desc>' * bool(figure.caption)
    described = f' aria-describedby="{prefix}desc"' * bool(figure.caption)
    head = (
        f'<svg role="img" aria-labelledby="{prefix}title"{described} viewBox="0 0 {size[0]:g} '
        f'{size[1]:g}" style="{style_width}">'
    )
    box = '<div class="scroll" tabindex="0" role="group">' if is_wide else '<div class="scroll">'
    title = f'<title id="{prefix}title">{html.escape(figure.title)}</title>'
    return f"{box}{head}{title}{about}{inner}</div>"


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
    "xtick.labelsize": 12,
    "ytick.labelsize": 12,
    "legend.frameon": False,
    "legend.fontsize": 12,
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), INK),
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color", "grid.color"), RULE),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "none"),
}


def add_legend(axes: Any, series: int) -> None:
    if series > 1:
        room = int(axes.figure.get_figwidth() * 72 / 7)  # in characters
        longest = max(len(text) for text in axes.get_legend_handles_labels()[1])
        axes.figure.legend(
            loc="outside upper left",
            ncols=max(1, min(series, room // (longest + 8))),
            handlelength=2.4,
        )


def set_log_labels(axis: Any) -> None:
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


def clean_label(value: Any, longest: int = 60) -> str:
    text = "".join(c if c.isprintable() else " " for c in str(value))
    text = f"\u200b{text}" if text.startswith("_") else text  # matplotlib omits such labels
    return text if len(text) <= longest else text[: longest - 1] + "…"


def as_numbers(values: Any, log: bool = False) -> tuple[Any, int]:
    """Return values as an array with nan for numbers that cannot be drawn, and their count.

    In JSON nan and inf are strings.
    """
    import numpy as np

    array = np.asarray(values, dtype=np.float64)
    bad = ~(np.abs(array) < HUGE) | (log & (array <= 0))
    return np.where(bad, np.nan, array), int(bad.sum())
