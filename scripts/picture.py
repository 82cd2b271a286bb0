"""The picture of README and architecture page: `python scripts/picture.py [docs/picture.svg]`. The
same bytes every time.

Rows are layers and boxes are packages, in the import order of tests/project/test_imports.py.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

ROOT = Path(__file__).parents[1]
INK, SOFT, RULE = "#1b1f24", "#4a525b", "#8c959f"
BLUE, GREY, GREEN, RED, YELLOW = "#dbe9fb", "#eceff2", "#dcf3e3", "#fbe3e0", "#fdf3d0"
CODE = "DejaVu Sans Mono"
LEFT, WIDTH, GAP, HEIGHT = 19.0, 84.0, 1.6, 6.6  # of the boxes, in units of a tenth of an inch


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
        BLUE,
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
        GREY,
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
        GREEN,
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
        RED,
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
        YELLOW,
        ((Box("demo/", "everything on small models"), Box("cli/", "the command regauge")),),
    ),
)


def draw_band(ax: Axes, y: float, height: float, layer: Layer) -> None:
    """Draw the background of a layer, with its title on the left."""
    band = FancyBboxPatch(
        (0.5, y),
        LEFT + WIDTH,
        height,
        boxstyle="round,pad=0,rounding_size=0.9",
        linewidth=0,
        facecolor=layer.colour,
    )
    ax.add_patch(band)
    middle = y + height / 2
    font = CODE if layer.title.endswith("/") else None
    title = {"size": 11.5, "weight": "bold", "color": INK, "family": font}
    ax.text(2.2, middle + 0.25, layer.title, va="bottom", **title)
    ax.text(2.2, middle - 0.45, layer.about, va="top", size=8.4, color=SOFT)


def draw_box(ax: Axes, x: float, y: float, width: float, box: Box) -> None:
    """Draw a box with its name, and the line about it below."""
    frame = FancyBboxPatch(
        (x, y),
        width,
        HEIGHT,
        boxstyle="round,pad=0,rounding_size=0.7",
        linewidth=0.9,
        edgecolor=RULE,
        facecolor="white",
    )
    ax.add_patch(frame)
    middle = {"x": x + width / 2, "ha": "center", "va": "center"}
    ax.text(
        y=y + 0.65 * HEIGHT, s=box.name, size=11, weight="bold", color=INK, family=CODE, **middle
    )
    ax.text(y=y + 0.27 * HEIGHT, s=box.about, size=8.4, color=SOFT, **middle)


def draw_arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    """Draw an arrow from one point to another."""
    arrow = FancyArrowPatch(
        start,
        end,
        arrowstyle="-|>",
        mutation_scale=9,
        linewidth=1.1,
        color=INK,
        shrinkA=0,
        shrinkB=0,
        zorder=3,
    )
    ax.add_patch(arrow)


def picture() -> plt.Figure:
    """Draw all layers, the lowest one first."""
    heights = [len(layer.rows) * (HEIGHT + GAP) + GAP for layer in LAYERS]
    total = sum(heights) + GAP * (len(LAYERS) - 1)
    figure, ax = plt.subplots(figsize=(10.4, (total + 4) / 10))
    ax.set_xlim(0, 104)
    ax.set_ylim(-4, total)
    ax.axis("off")
    top = total
    for layer, height in zip(LAYERS, heights, strict=True):
        draw_band(ax, top - height, height, layer)
        for number, row in enumerate(layer.rows, 1):
            y = top - number * (HEIGHT + GAP)
            gap = 2.4 if layer.arrows else GAP
            width = (WIDTH - GAP - gap * (len(row) - 1)) / len(row)
            for i, box in enumerate(row):
                x = LEFT + i * (width + gap)
                draw_box(ax, x, y, width, box)
                if layer.arrows and i:
                    draw_arrow(ax, (x - gap, y + HEIGHT / 2), (x, y + HEIGHT / 2))
        top -= height + GAP
    note = "Packages import only packages before them: rows above, or boxes to their left."
    ax.text(52, -2.6, note, ha="center", va="center", size=8.8, color=SOFT)
    return figure


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
    mpl.rcParams.update(
        {"svg.hashsalt": "regauge", "svg.fonttype": "path", "font.family": "DejaVu Sans"}
    )
    picture().savefig(
        out,
        format="svg",
        bbox_inches="tight",
        pad_inches=0.05,
        metadata={"Date": None, "Creator": None},
        facecolor="white",
    )
    text = out.read_text()
    out.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n")


if __name__ == "__main__":
    main()
