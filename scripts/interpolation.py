"""The picture of docs/guides/align.md: `python scripts/interpolation.py [FILE]`.

Accuracy between two ViTs of the tutorial, before and after they are aligned.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs" / "tutorial"))
from digits import accuracy, new_vit, train_vit  # noqa: E402

import regauge  # noqa: E402


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
    plt.rcParams.update({"svg.fonttype": "path", "svg.hashsalt": "regauge", "font.size": 11})
    fig, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
    for (name, state), style in zip(paths.items(), ("o:", "s--", "D-"), strict=True):
        curve = []
        for t in points:
            model.load_state_dict({n: (1 - t) * state[n] + t * target[n] for n in target})
            curve.append(100 * accuracy(model))
        axes.plot(points, curve, style, markersize=4, label=name)
    axes.axhline(10, color="gray", linewidth=1)
    axes.annotate("guess", (1, 11), ha="right", color="gray")
    axes.set(xlabel="share of B in the weights, t", ylabel="test accuracy, %", ylim=(0, 100))
    fig.legend(loc="outside upper center", fontsize=9, ncols=3)
    fig.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    matplotlib.use("Agg")
    default = ROOT / "docs" / "guides" / "interpolation.svg"
    draw(Path(sys.argv[1]) if sys.argv[1:] else default)
