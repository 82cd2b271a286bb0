"""Drawings of the README and of docs/concepts.md: `python scripts/drawings.py [docs]`.

Plain SVG with text as text and two palettes, for light and dark mode. The same bytes every time.
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
}
DARK = {
    "page": "#0d1117",
    "card": "#1b222c",
    "rule": "#4a5563",
    "ink": "#e8edf3",
    "soft": "#a9b4c0",
}
ACCENT = {"blue": "#3b78c9", "orange": "#d9822b", "green": "#2f8f5b", "red": "#c4493d"}
NEGATIVE, ZERO, POSITIVE = (
    (47, 103, 177),
    (236, 239, 243),
    (214, 118, 28),
)  # safe for colour blindness


class Drawing:
    """An SVG under construction: shapes and text in a coordinate system of pixels."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self.parts: list[str] = []

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
            ".head{font-size:17px;font-weight:600}.body{font-size:14px}.small{font-size:13px}",
            ".code{font-size:13px;font-family:ui-monospace,Menlo,Consolas,monospace}",
            _palette(LIGHT),
            f"@media (prefers-color-scheme:dark){{{_palette(DARK)}}}",
        ]
        start = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" role="img">'
        )
        page = f'<rect class="page" width="{self.width}" height="{self.height}" rx="10"/>'
        title = f"<title>{escape(self.title)}</title>"
        return "\n".join(
            [start, title, "<style>", *style, "</style>", page, *self.parts, "</svg>\n"]
        )


def _palette(colours: dict[str, str]) -> str:
    c = colours
    return (
        f".page{{fill:{c['page']}}}.card{{fill:{c['card']};stroke:{c['rule']}}}"
        f".head,.body,.code{{fill:{c['ink']}}}.small{{fill:{c['soft']}}}"
        f".line{{stroke:{c['soft']};stroke-width:1.6;fill:none}}.tip{{fill:{c['soft']}}}"
    )


def _bases() -> list[tuple[str, str, np.ndarray, np.ndarray]]:
    """One pair of adjacent linear maps in three bases: as trained, permuted, rotated."""
    rng = np.random.default_rng(4)
    out, into = rng.normal(size=(6, 6)), rng.normal(size=(6, 6))
    order = np.array([3, 0, 5, 1, 4, 2])
    permuted = np.eye(6)[order]
    rotated, _ = np.linalg.qr(rng.normal(size=(6, 6)))
    named = (
        ("as trained", "W_out · W_in", np.eye(6)),
        ("channels permuted", "W_out P⁻¹ · P W_in", permuted),
        ("channels rotated", "W_out R⁻¹ · R W_in", rotated),
    )
    return [(name, formula, out @ m.T, m @ into) for name, formula, m in named]


USES = (
    ("aligned with another", "match, merge", "blue"),
    ("shared by two models?", "compare", "blue"),
    ("chosen by a secret key", "lock", "orange"),
    ("new for every batch", "split, jigsaw", "green"),
    ("attacked, and scored", "audit", "red"),
)


def draw_idea() -> Drawing:
    """Draw one function in three bases, and what choosing the basis is good for."""
    d = Drawing(960, 440, "Three sets of weights compute one function. regauge chooses which set.")
    for i, (name, formula, out, into) in enumerate(_bases()):
        x = 24 + 316 * i
        d.box(x, 20, 280, 172)
        d.text(x + 140, 46, name, "head")
        d.matrix(x + 46, 64, 14, out)
        d.matrix(x + 152, 64, 14, into)
        d.text(x + 141, 110, "·", "head")
        d.text(x + 140, 176, formula, "code")
        d.arrow(x + 140, 194, x + 140, 224)
        if i < 2:
            d.arrow(x + 282, 106, x + 314, 106)
            d.text(x + 298, 96, "g" if i == 0 else "h", "code")
    d.box(24, 226, 912, 74)
    d.text(44, 258, "One function", "head", "start")
    d.text(44, 280, "the same output for every input", "small", "start")
    d.curve([(500 + 4 * t, 265 - 24 * math.sin(t / 9) * math.exp(-t / 90)) for t in range(106)])
    d.text(24, 334, "regauge chooses the basis:", "head", "start")
    width = (912 - 4 * 14) / 5
    for i, (why, commands, colour) in enumerate(USES):
        x = 24 + i * (width + 14)
        d.box(x, 350, width, 70, colour)
        d.text(x + width / 2, 380, commands, "head")
        d.text(x + width / 2, 404, why, "small")
    return d


WEIGHTS = (
    (28, 84, "embedding", "_ stream", "blue"),
    (212, 122, "q_proj", "(head qk) stream*", "orange"),
    (382, 122, "k_proj", "(head qk*) stream*", "orange"),
    (212, 188, "v_proj", "(head vo) stream*", "orange"),
    (382, 188, "o_proj", "stream (head vo)*", "orange"),
    (590, 122, "up", "ffn stream*", "green"),
    (590, 188, "down", "stream ffn*", "green"),
    (782, 84, "head", "_ stream*", "blue"),
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
    d = Drawing(960, 410, "The spaces of a Transformer block, and the axes of its weights.")
    d.text(480, 30, "residual stream", "head")
    d.curve([(20, 46), (940, 46)])
    for x, width, name, colour in ((198, 352, "attention", "orange"), (576, 182, "FFN", "green")):
        d.box(x, 84, width, 176, colour)
        d.text(x + width / 2, 110, name, "head")
        d.arrow(x + 40, 48, x + 40, 82)
        d.arrow(x + width - 40, 82, x + width - 40, 50)
    for x, y, name, axes, colour in WEIGHTS:
        d.box(x, y, 154, 56, colour)
        d.text(x + 77, y + 24, name)
        d.text(x + 77, y + 44, axes, "code")
    d.arrow(105, 82, 105, 50)
    d.arrow(859, 48, 859, 82)
    for i, (names, about, group, colour) in enumerate(SPACES):
        left = 28 + 308 * i
        d.box(left, 284, 288, 102, colour)
        d.text(left + 144, 312, names, "code")
        d.text(left + 144, 338, about)
        d.text(left + 144, 364, group, "small")
    return d


DRAWINGS = {"idea.svg": draw_idea, "block.svg": draw_block}


def main() -> None:
    """Write the drawings to the folder of the command line, or to docs/."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs"
    for name, draw in DRAWINGS.items():
        (folder / name).write_text(draw().svg())


if __name__ == "__main__":
    main()
