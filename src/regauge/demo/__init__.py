"""A demonstration on small models that are created and trained locally, without downloads.

Each chapter is a function that prints a few lines and returns its results; all results together are
one page.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from regauge.demo.context import DemoContext, OpenProgressBar
from regauge.demo.digits import show_training
from regauge.demo.gradients import show_gradients
from regauge.demo.jigsaw import show_jigsaw
from regauge.demo.leakage import show_leakage
from regauge.demo.lock import show_lock
from regauge.demo.merge import show_merge
from regauge.demo.move import show_symmetry, show_transforms
from regauge.demo.split import show_split
from regauge.results.findings import Results

Chapter = Callable[[DemoContext], Results]

CHAPTERS: tuple[Chapter, ...] = (
    show_symmetry,
    show_transforms,
    show_training,
    show_merge,
    show_lock,
    show_split,
    show_leakage,
    show_gradients,
    show_jigsaw,
)


def run_demo(
    echo: Callable[[str], None],
    bar: OpenProgressBar,
    out: Path | None = None,
    seed: int = 0,
    chapters: Sequence[Chapter] = CHAPTERS,
) -> Results:
    """Run the chapters.

    Args:
        echo: Prints a line.
        bar: Opens a progress bar.
        out: A folder for the models and images; by default they are temporary.
        seed: The seed of the models and elements.
        chapters: The chapters to run, in order.
    """
    import torch

    torch.set_num_threads(1)  # more threads slow down models as small as these
    with tempfile.TemporaryDirectory(prefix="regauge-demo-") as temporary:
        folder = Path(temporary) if out is None else out
        results = []
        for number, chapter in enumerate(chapters, 1):
            echo(f"{number}. {(chapter.__doc__ or '').splitlines()[0]}\n")
            results.append(chapter(DemoContext(folder, seed, echo, bar)))
            echo("")
    return Results(
        "regauge: the demonstration",
        tuple(f for r in results for f in r.findings),
        tuple(t for r in results for t in r.tables),
        tuple(f for r in results for f in r.figures),
        {"seed": seed, **{k: v for r in results for k, v in r.facts.items()}},
        tuple(u for r in results for u in r.unchecked),
    )
