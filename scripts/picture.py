"""The picture of the README and the architecture page: `python scripts/picture.py [OUT.svg]`.

The output is deterministic, byte for byte.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

INK, SOFT, BLUE, GREEN, RED = "#1b1f24", "#57606a", "#dbe9fb", "#dcf3e3", "#fbe3e0"
CODE = "DejaVu Sans Mono"


def draw_box(
    ax: Axes,
    x: float,
    y: float,
    w: float,
    h: float,
    title: str,
    below: str = "",
    colour: str = "white",
) -> None:
    """Draw a rounded box with a title and a line below it."""
    ax.add_patch(
        FancyBboxPatch(
            (x, y),
            w,
            h,
            boxstyle="round,pad=0,rounding_size=0.9",
            linewidth=1.1,
            edgecolor=INK,
            facecolor=colour,
        )
    )
    middle = x + w / 2
    ax.text(
        middle,
        y + h * (0.66 if below else 0.5),
        title,
        ha="center",
        va="center",
        fontsize=11,
        weight="bold",
        color=INK,
    )
    if below:
        ax.text(middle, y + h * 0.29, below, ha="center", va="center", fontsize=8.2, color=SOFT)


def draw_arrow(
    ax: Axes, start: tuple[float, float], end: tuple[float, float], style: str = "-|>"
) -> None:
    """Draw an arrow between two points."""
    ax.add_patch(
        FancyArrowPatch(
            start,
            end,
            arrowstyle=style,
            mutation_scale=11,
            linewidth=1.1,
            color=INK,
            shrinkA=0,
            shrinkB=0,
        )
    )


def draw_picture() -> plt.Figure:
    """Draw the whole picture."""
    figure, ax = plt.subplots(figsize=(10.4, 6.0))
    ax.set_xlim(0, 104)
    ax.set_ylim(0, 60)
    ax.axis("off")
    draw_box(ax, 2, 49, 28, 9, "axes strings", '"(head.0 qk.0) stream*"', BLUE)
    draw_box(ax, 38, 49, 28, 9, "groups", "permute, flip, scale, rotate", BLUE)
    draw_box(ax, 74, 49, 28, 9, "a key, or a fit", "random, or nearest to a model", BLUE)
    draw_box(ax, 14, 36, 30, 8, "Spec", "symmetries of a model, and why", BLUE)
    draw_box(ax, 60, 36, 30, 8, "Element", "g, ~g, g @ h: another basis", BLUE)
    draw_box(
        ax,
        22,
        25.5,
        60,
        6.5,
        "apply(g, weights) · act(g, tensor, axes)",
        "one rule for weights, gradients, activations, masks, optimizers",
        BLUE,
    )
    for x, end in ((16, 24), (52, 34)):
        draw_arrow(ax, (x, 49), (end, 44))
    draw_arrow(ax, (88, 49), (80, 44))
    draw_arrow(ax, (44, 40), (60, 40))
    draw_arrow(ax, (75, 36), (66, 32))
    draw_arrow(ax, (29, 36), (38, 32))
    uses = (
        ("verify", "do the laws hold?"),
        ("match · merge", "into one basis"),
        ("lock · seal", "by a key"),
        ("split", "backbone on a server"),
        ("jigsaw", "mask positions"),
    )
    for i, (name, what) in enumerate(uses):
        x = 2 + i * 20.5
        draw_box(ax, x, 14.5, 18, 7, name, what, GREEN)
        draw_arrow(ax, (30 + i * 11, 25.5), (x + 9, 21.5))
        draw_arrow(ax, (x + 9, 14.5), (34 + i * 9, 10.2))
    draw_box(
        ax,
        24,
        3,
        56,
        7.2,
        "views → attacks → findings → report",
        "what each adversary recovers, from a guess to no defence",
        RED,
    )
    return figure


def main() -> None:
    """Write the picture as SVG."""
    out = Path(
        sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1] / "docs" / "picture.svg"
    )
    mpl.rcParams.update(
        {"svg.hashsalt": "regauge", "svg.fonttype": "path", "font.family": "DejaVu Sans"}
    )
    draw_picture().savefig(
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
