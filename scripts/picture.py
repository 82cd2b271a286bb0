"""The picture of the architecture page: `python scripts/picture.py [docs/picture.svg]`. The same
bytes every time.

Rows are layers and boxes are packages, in the import order of tests/project/test_imports.py.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

from drawings import MARGIN, WIDTH, Drawing

ROOT = Path(__file__).parents[1]
PAD, GAP, LINE = 10.0, 10.0, 18.0  # inside a band, between boxes, and of a line of text


class Box(NamedTuple):
    """A package or a module, and one line about it."""

    name: str
    about: str


class Layer(NamedTuple):
    """Rows of boxes on one band. `arrows` join the boxes of a row, from left to right."""

    title: str
    about: str
    colour: str
    rows: tuple[tuple[Box, ...], ...]
    arrows: bool = False


LAYERS = (
    Layer(
        "core/",
        "the algebra",
        "blue",
        (
            (
                Box("axes", "(head.0 qk.0) stream*"),
                Box("Spec", "groups, axes, sizes"),
                Box("Element", "g, ~g, g @ h"),
                Box("apply, act", "weights, gradients, ..."),
            ),
        ),
        arrows=True,
    ),
    Layer(
        "Foundations",
        "files, models, data",
        "grey",
        (
            (
                Box("checkpoints/", "streamed, atomic files"),
                Box("models/", "families, discovery"),
                Box("data/", "datasets, training loop"),
            ),
            (
                Box("results/", "findings, HTML report"),
                Box("evaluation/", "accuracy, perplexity"),
            ),
        ),
    ),
    Layer(
        "Applications",
        "built on the algebra",
        "green",
        (
            (
                Box("matching/", "align two models"),
                Box("merging/", "methods, recipes"),
                Box("locking/", "keys, locks, seals"),
                Box("verification/", "theorems as checks"),
            ),
            (
                Box("jigsaw/", "masked jigsaw puzzles"),
                Box("defences/", "noise, DP, shuffling"),
                Box("split/", "backbone on a server"),
                Box("federated/", "rounds, aggregation"),
            ),
        ),
    ),
    Layer(
        "Attacks",
        "measured leakage",
        "red",
        (
            (
                Box("attacks/", "functions of an adversary's View"),
                Box("audit/", "attacks on the user's own case, scored"),
            ),
        ),
        arrows=True,
    ),
    Layer(
        "Front ends",
        "parse, call, print",
        "yellow",
        ((Box("demo/", "everything on small models"), Box("cli/", "the command regauge")),),
    ),
)


def _place(layer: Layer, row: tuple[Box, ...]) -> tuple[float, float, list[list[str]]]:
    """Return the gap between the boxes of a row, their width, and the lines about each."""
    gap = 22.0 if layer.arrows else GAP
    width = (WIDTH - MARGIN - 2 * PAD - gap * (len(row) - 1)) / len(row)
    return gap, width, [textwrap.wrap(box.about, int(width / 8)) for box in row]


def picture() -> Drawing:
    """Draw all layers, the lowest one first."""
    drawing = Drawing(0, "The packages of regauge, in layers.")
    y = MARGIN / 2
    for layer in LAYERS:
        placed = [_place(layer, row) for row in layer.rows]
        heights = [34 + LINE * max(map(len, texts)) for _, _, texts in placed]
        drawing.band(y, 36 + sum(heights) + GAP * len(heights), layer.colour)
        kind = "name" if layer.title.endswith("/") else "head"
        drawing.text(MARGIN / 2 + PAD, y + 25, layer.title, kind, "start")
        drawing.text(WIDTH - MARGIN / 2 - PAD, y + 25, layer.about, "small", "end")
        y += 36
        for row, height, (gap, width, texts) in zip(layer.rows, heights, placed, strict=True):
            for i, (box, lines) in enumerate(zip(row, texts, strict=True)):
                x = MARGIN / 2 + PAD + i * (width + gap)
                drawing.box(x, y, width, height)
                drawing.text(x + width / 2, y + 23, box.name, "name")
                for number, line in enumerate(lines, 1):
                    drawing.text(x + width / 2, y + 24 + LINE * number, line, "small")
                if layer.arrows and i:
                    drawing.arrow(x - gap + 2, y + height / 2, x - 2, y + height / 2)
            y += height + GAP
        y += GAP
    for line in (
        "Packages import only packages before them:",
        "rows above, or boxes to their left.",
    ):
        y += LINE
        drawing.text(WIDTH / 2, y, line, "small")
    drawing.height = y + MARGIN
    return drawing


def check_packages() -> None:
    """Raise SystemExit if a package of src/regauge is missing in the picture."""
    shown = {layer.title for layer in LAYERS}
    shown |= {box.name for layer in LAYERS for row in layer.rows for box in row}
    packages = {f"{init.parent.name}/" for init in (ROOT / "src/regauge").glob("*/__init__.py")}
    if missing := packages - shown:
        sys.exit(f"the picture lacks {', '.join(sorted(missing))}: add them to LAYERS")


def main() -> None:
    """Write the picture to the path of the command line, or to docs/picture.svg."""
    check_packages()
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "picture.svg"
    out.write_text(picture().svg())


if __name__ == "__main__":
    main()
