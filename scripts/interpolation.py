"""The picture of docs/guides/align.md: `python scripts/interpolation.py [FILE]`.

Accuracy between two ViTs of the tutorial, before and after they are aligned.
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
from drawings import DARK, LIGHT, WIDTH

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs" / "tutorial"))
from digits import accuracy, new_vit, train_vit  # noqa: E402

import regauge  # noqa: E402

# placeholders, each replaced by a colour of the light and one of the dark palette
INK, SOFT, RULE, PAGE = "#010101", "#010102", "#010103", "#010104"
LINES = ("#010105", "#010106", "#010107")
PALETTE = {
    INK: (LIGHT["ink"], DARK["ink"]),
    SOFT: (LIGHT["soft"], DARK["soft"]),
    RULE: (LIGHT["rule"], DARK["rule"]),
    PAGE: (LIGHT["page"], DARK["page"]),
    LINES[0]: ("#0072b2", "#56b4e9"),  # safe for colour blindness
    LINES[1]: ("#d55e00", "#f28a45"),
    LINES[2]: ("#007f5f", "#2fc79a"),
}
STYLE = {
    "svg.fonttype": "path",
    "svg.hashsalt": "regauge",
    "font.size": 14,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "legend.frameon": False,
    **dict.fromkeys(("figure.facecolor", "savefig.facecolor"), PAGE),
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    "axes.edgecolor": RULE,
}


def adapt_colours(svg: str) -> str:
    """Return an SVG of matplotlib with two palettes, for light and dark mode, and no fixed unit."""

    def declare(mode: int) -> str:
        colours = (f"--c{name[-2:]}:{pair[mode]}" for name, pair in PALETTE.items())
        return f"svg{{{';'.join(colours)}}}"

    style = f"<style>{declare(0)}@media (prefers-color-scheme:dark){{{declare(1)}}}</style>"
    svg = re.sub(r'(width|height)="([\d.]+)pt"', r'\1="\2"', svg, count=2)
    head, root, rest = svg.partition("<svg ")
    attributes, _, body = rest.partition(">")
    body = re.sub(r"#0101(\d\d)", r"var(--c\1)", body)
    lines = f"{head}{root}{attributes}>\n{style}{body}".splitlines()
    return "\n".join(line.rstrip() for line in lines) + "\n"


def draw(path: Path) -> None:
    """Train, align and draw."""
    a, b = train_vit(0), train_vit(1)
    data = regauge.DataSource("digits", split="train", samples=100, mean=(0.5,), std=(0.5,))
    paths = {
        "A and B as trained": a.state_dict(),
        "A aligned by weights": regauge.match(a, b).state(),
        "A aligned and refined": regauge.match(a, b, refine=data).state(),
    }
    target, model = b.state_dict(), new_vit()
    points = [i / 20 for i in range(21)]
    plt.rcParams.update(STYLE)
    fig, axes = plt.subplots(figsize=(WIDTH / 72, 340 / 72), layout="constrained")
    for (name, state), style, colour in zip(paths.items(), ("o:", "s--", "D-"), LINES, strict=True):
        curve = []
        for t in points:
            model.load_state_dict({n: (1 - t) * state[n] + t * target[n] for n in target})
            curve.append(100 * accuracy(model))
        axes.plot(points, curve, style, color=colour, markersize=5, linewidth=2, label=name)
    axes.axhline(10, color=SOFT, linewidth=1)
    axes.annotate("guess", (1, 11), ha="right", color=SOFT)
    axes.set(xlabel="share of B in the weights, t", ylabel="test accuracy, %", ylim=(0, 100))
    fig.legend(loc="outside upper left", ncols=2)
    fig.get_layout_engine().set(w_pad=10 / 72, h_pad=8 / 72)
    out = io.StringIO()
    fig.savefig(out, format="svg", metadata={"Date": None})
    path.write_text(adapt_colours(out.getvalue()))


if __name__ == "__main__":
    matplotlib.use("Agg")
    default = ROOT / "docs" / "guides" / "interpolation.svg"
    draw(Path(sys.argv[1]) if sys.argv[1:] else default)
