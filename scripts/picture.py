"""The picture of README and architecture page: `python scripts/picture.py [docs/picture.svg]`. The
same bytes every time.
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


def box(
    ax: Axes,
    x: float,
    y: float,
    w: float,
    h: float,
    title: str,
    below: str = "",
    colour: str = "white",
) -> None:
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


def arrow(
    ax: Axes, start: tuple[float, float], end: tuple[float, float], style: str = "-|>"
) -> None:
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


def picture() -> plt.Figure:
    figure, ax = plt.subplots(figsize=(10.4, 6.0))
    ax.set_xlim(0, 104)
    ax.set_ylim(0, 60)
    ax.axis("off")
    box(ax, 2, 49, 28, 9, "axes strings", '"(head.0 qk.0) stream*"', BLUE)
    box(ax, 38, 49, 28, 9, "groups", "permute, flip, scale, turn", BLUE)
    box(ax, 74, 49, 28, 9, "a key, or a fit", "random, or nearest to a model", BLUE)
    box(ax, 14, 36, 30, 8, "Spec", "what a model permits, and why", BLUE)
    box(ax, 60, 36, 30, 8, "Element", "g, ~g, g @ h: another description", BLUE)
    box(
        ax,
        22,
        25.5,
        60,
        6.5,
        "apply(g, weights) · act(g, anything, axes)",
        "one rule for weights, gradients, activations, masks, optimizers",
        BLUE,
    )
    for x, end in ((16, 24), (52, 34)):
        arrow(ax, (x, 49), (end, 44))
    arrow(ax, (88, 49), (80, 44))
    arrow(ax, (44, 40), (60, 40))
    arrow(ax, (75, 36), (66, 32))
    arrow(ax, (29, 36), (38, 32))
    uses = (
        ("verify", "do the laws hold?"),
        ("match · merge", "into one basis"),
        ("lock · seal", "by a key"),
        ("split", "backbone elsewhere"),
        ("jigsaw", "mind places less"),
    )
    for i, (name, what) in enumerate(uses):
        x = 2 + i * 20.5
        box(ax, x, 14.5, 18, 7, name, what, GREEN)
        arrow(ax, (30 + i * 11, 25.5), (x + 9, 21.5))
        arrow(ax, (x + 9, 14.5), (34 + i * 9, 10.2))
    box(
        ax,
        24,
        3,
        56,
        7.2,
        "views → attacks → findings → report",
        "what each adversary gets, from a guess to no defence",
        RED,
    )
    return figure


def main() -> None:
    out = Path(
        sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1] / "docs" / "picture.svg"
    )
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
