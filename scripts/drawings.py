"""Drawings of the README and of docs/concepts.md: `python scripts/drawings.py [docs]`.

Plain SVG with text as text and two palettes, for light and dark mode. The same bytes every time.
Drawings are narrow and tall, so that their text is readable on a phone.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

import numpy as np

ROOT = Path(__file__).parents[1]
LIGHT = {
    "page": "#ffffff",
    "card": "#f3f5f8",
    "rule": "#b6bfca",
    "ink": "#1b1f24",
    "soft": "#4a525b",
    "blue": "#dbe9fb",
    "grey": "#eceff2",
    "green": "#dcf3e3",
    "red": "#fbe3e0",
    "yellow": "#fdf3d0",
}
DARK = {
    "page": "#0d1117",
    "card": "#1b222c",
    "rule": "#4a5563",
    "ink": "#e8edf3",
    "soft": "#a9b4c0",
    "blue": "#152a47",
    "grey": "#262d36",
    "green": "#14341f",
    "red": "#43201d",
    "yellow": "#3b310f",
}
BANDS = ("blue", "grey", "green", "red", "yellow")
WIDTH = 560  # of every drawing: text of 14 units has 9 pixels on a phone that is 390 pixels wide
MARGIN = 16
ACCENT = {"blue": "#3b78c9", "orange": "#d9822b", "green": "#2f8f5b", "red": "#c4493d"}
NEGATIVE, ZERO, POSITIVE = (
    (47, 103, 177),
    (236, 239, 243),
    (214, 118, 28),
)  # safe for colour blindness


class Drawing:
    """An SVG under construction: shapes and text in a coordinate system of pixels."""

    def __init__(self, height: float, title: str) -> None:
        self.width, self.height, self.title = WIDTH, height, title
        self.parts: list[str] = []

    def band(self, y: float, height: float, colour: str) -> None:
        """Draw the background of some boxes."""
        x, width = MARGIN / 2, self.width - MARGIN
        self.parts.append(
            f'<rect class="band-{colour}" x="{x:g}" y="{y:g}" width="{width:g}" '
            f'height="{height:g}" rx="8"/>'
        )

    def box(self, x: float, y: float, width: float, height: float, accent: str = "") -> None:
        """Draw a rounded card, with a coloured edge on top if an accent is given."""
        self.parts.append(
            f'<rect class="card" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="8"/>'
        )
        if accent:
            self.parts.append(
                f'<rect x="{x + 10:g}" y="{y:g}" width="{width - 20:g}" height="3" '
                f'fill="{ACCENT[accent]}"/>'
            )

    def text(
        self, x: float, y: float, line: str, kind: str = "body", anchor: str = "middle"
    ) -> None:
        """Write one line; `kind` is a class of the style sheet."""
        self.parts.append(
            f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(line)}</text>'
        )

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """Draw an arrow from one point to another."""
        angle = math.atan2(to_y - y, to_x - x)
        tip = [(to_x, to_y)]
        tip += [
            (to_x - 9 * math.cos(angle + s), to_y - 9 * math.sin(angle + s)) for s in (0.4, -0.4)
        ]
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in tip)
        self.parts.append(f'<path class="line" d="M{x:g} {y:g}L{to_x:g} {to_y:g}"/>')
        self.parts.append(f'<polygon class="tip" points="{points}"/>')

    def matrix(self, x: float, y: float, cell: float, values: np.ndarray) -> None:
        """Draw a matrix as a heat map: blue is negative, orange is positive."""
        scale = 2.2
        for i, row in enumerate(values):
            for j, value in enumerate(row):
                share = min(1.0, abs(float(value)) / scale)
                end = POSITIVE if value > 0 else NEGATIVE
                colour = [round(z + share * (e - z)) for z, e in zip(ZERO, end, strict=True)]
                self.parts.append(
                    f'<rect x="{x + j * cell:g}" y="{y + i * cell:g}" width="{cell - 1:g}" '
                    f'height="{cell - 1:g}" fill="#{bytes(colour).hex()}"/>'
                )

    def curve(self, points: Sequence[tuple[float, float]], colour: str = "blue") -> None:
        """Draw a line through points."""
        path = "L".join(f"{a:g} {b:.1f}" for a, b in points)
        self.parts.append(
            f'<path d="M{path}" fill="none" stroke="{ACCENT[colour]}" stroke-width="2.5"/>'
        )

    def svg(self) -> str:
        """Return the file."""
        style = [
            'text{font-family:system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif}',
            ".head{font-size:16px;font-weight:600}.body{font-size:15px}.small{font-size:14px}",
            ".code,.name{font-size:14px;font-family:ui-monospace,Menlo,Consolas,monospace}",
            ".name,.title{font-weight:600}.title{font-size:14px}",
            _palette(LIGHT),
            f"@media (prefers-color-scheme:dark){{{_palette(DARK)}}}",
        ]
        start = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height:g}" '
            f'width="{self.width}" height="{self.height:g}" role="img">'
        )
        page = f'<rect class="page" width="{self.width}" height="{self.height:g}" rx="10"/>'
        title = f"<title>{escape(self.title)}</title>"
        return "\n".join(
            [start, title, "<style>", *style, "</style>", page, *self.parts, "</svg>\n"]
        )


def _palette(colours: dict[str, str]) -> str:
    c = colours
    bands = "".join(f".band-{name}{{fill:{c[name]}}}" for name in BANDS)
    return bands + (
        f".page{{fill:{c['page']}}}.card{{fill:{c['card']};stroke:{c['rule']}}}"
        f".head,.title,.body,.code,.name{{fill:{c['ink']}}}.small{{fill:{c['soft']}}}"
        f".line{{stroke:{c['soft']};stroke-width:1.6;fill:none}}.tip{{fill:{c['soft']}}}"
    )


def _bases() -> list[tuple[str, str, str, np.ndarray, np.ndarray]]:
    """One pair of adjacent linear maps in three bases: as trained, permuted, rotated."""
    rng = np.random.default_rng(4)
    out, into = rng.normal(size=(6, 6)), rng.normal(size=(6, 6))
    order = np.array([3, 0, 5, 1, 4, 2])
    permuted = np.eye(6)[order]
    rotated, _ = np.linalg.qr(rng.normal(size=(6, 6)))
    named = (
        ("as trained", "W_out", "W_in", np.eye(6)),
        ("channels permuted", "W_out P⁻¹", "P W_in", permuted),
        ("channels rotated", "W_out R⁻¹", "R W_in", rotated),
    )
    return [(name, left, right, out @ m.T, m @ into) for name, left, right, m in named]


USES = (
    ("aligned with another", "match, merge", "blue"),
    ("shared by two models?", "compare", "blue"),
    ("chosen by a secret key", "lock", "orange"),
    ("new for every batch", "split, jigsaw", "green"),
    ("attacked, and scored", "audit", "red"),
)


def draw_idea() -> Drawing:
    """Draw one function in three bases, and what choosing the basis is good for."""
    d = Drawing(438, "Three sets of weights compute one function. regauge chooses which set.")
    for i, (name, left, right, out, into) in enumerate(_bases()):
        x = MARGIN + 184 * i
        d.box(x, 16, 160, 146)
        d.text(x + 80, 42, name, "title")
        d.matrix(x + 9, 56, 11, out)
        d.matrix(x + 86, 56, 11, into)
        d.text(x + 80, 94, "·", "head")
        d.text(x + 43, 146, left, "code")
        d.text(x + 119, 146, right, "code")
        d.arrow(x + 80, 164, x + 80, 190)
        if i < 2:
            d.arrow(x + 162, 89, x + 182, 89)
            d.text(x + 172, 76, "g" if i == 0 else "h", "code")
    d.box(MARGIN, 192, 528, 70)
    d.text(32, 222, "One function", "head", "start")
    d.text(32, 245, "the same output for every input", "small", "start")
    d.curve([(290 + 2.3 * t, 229 - 24 * math.sin(t / 9) * math.exp(-t / 90)) for t in range(106)])
    width = (528 - 2 * 8) / 3
    d.text(MARGIN + 4, 308, "regauge chooses", "head", "start")
    d.text(MARGIN + 4, 330, "the basis:", "head", "start")
    for i, (why, commands, colour) in enumerate(USES, 1):
        x, y = MARGIN + i % 3 * (width + 8), 278 + i // 3 * 76
        d.box(x, y, width, 64, colour)
        d.text(x + width / 2, y + 28, commands, "head")
        d.text(x + width / 2, y + 50, why, "small")
    return d


WEIGHTS = (
    (16, 16, 168, "embedding", "_ stream", "blue"),
    (376, 16, 168, "head", "_ stream*", "blue"),
    (26, 168, 162, "q_proj", "(head qk) stream*", "orange"),
    (198, 168, 162, "k_proj", "(head qk*) stream*", "orange"),
    (26, 236, 162, "v_proj", "(head vo) stream*", "orange"),
    (198, 236, 162, "o_proj", "stream (head vo)*", "orange"),
    (394, 168, 140, "up", "ffn stream*", "green"),
    (394, 236, 140, "down", "stream ffn*", "green"),
)
SPACES = (
    ("stream", "the residual stream", "limited by the norms", "blue"),
    (
        "head, qk, vo",
        "the heads, and the inside of a head",
        "qk, vo: any invertible matrix",
        "orange",
    ),
    ("ffn", "the neurons", "limited by the activation function", "green"),
)


def draw_block() -> Drawing:
    """Draw a Transformer block with the axes of its weights, and its spaces below."""
    d = Drawing(528, "The spaces of a Transformer block, and the axes of its weights.")
    d.text(280, 90, "residual stream", "head")
    d.curve([(16, 102), (544, 102)])
    for x, width, name, colour in ((16, 354, "attention", "orange"), (384, 160, "FFN", "green")):
        d.box(x, 132, width, 178, colour)
        d.text(x + width / 2, 157, name, "head")
        d.arrow(x + 36, 104, x + 36, 130)
        d.arrow(x + width - 36, 130, x + width - 36, 106)
    for x, y, width, name, axes, colour in WEIGHTS:
        d.box(x, y, width, 60, colour)
        d.text(x + width / 2, y + 25, name)
        d.text(x + width / 2, y + 47, axes, "code")
    d.arrow(100, 78, 100, 100)
    d.arrow(460, 100, 460, 78)
    for i, (names, about, group, colour) in enumerate(SPACES):
        y = 326 + 66 * i
        d.box(16, y, 528, 56, colour)
        d.text(32, y + 33, names, "code", "start")
        d.text(160, y + 25, about, "body", "start")
        d.text(160, y + 46, group, "small", "start")
    return d


DRAWINGS = {"idea.svg": draw_idea, "block.svg": draw_block}


def main() -> None:
    """Write the drawings to the folder of the command line, or to docs/."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs"
    for name, draw in DRAWINGS.items():
        (folder / name).write_text(draw().svg())


if __name__ == "__main__":
    main()
