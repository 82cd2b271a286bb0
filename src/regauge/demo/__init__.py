"""A demonstration on what is made on the spot: models, training, checks, and one page that shows it
all. Nothing is downloaded.

Each chapter is a function that says a few lines and returns its results; together they are the
page.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from regauge.demo.digits import digits
from regauge.demo.gradients import given
from regauge.demo.jigsaw import puzzled
from regauge.demo.leakage import watched
from regauge.demo.lock import locked
from regauge.demo.merge import averaging
from regauge.demo.move import moving, symmetry
from regauge.demo.split import apart
from regauge.demo.stage import Bar, Stage
from regauge.results.findings import Results

Chapter = Callable[[Stage], Results]

CHAPTERS: tuple[Chapter, ...] = (
    symmetry,
    moving,
    digits,
    averaging,
    locked,
    apart,
    watched,
    given,
    puzzled,
)


def run(
    say: Callable[[str], None],
    bar: Bar,
    out: Path | None = None,
    seed: int = 0,
    chapters: Sequence[Chapter] = CHAPTERS,
) -> Results:
    """Play the chapters. With `out` the models are kept there."""
    import torch

    torch.set_num_threads(1)  # models this small only wait for each other's threads
    with tempfile.TemporaryDirectory(prefix="regauge-demo-") as temporary:
        folder = Path(temporary) if out is None else out
        played = []
        for number, chapter in enumerate(chapters, 1):
            say(f"{number}. {(chapter.__doc__ or '').splitlines()[0]}\n")
            played.append(chapter(Stage(folder, seed, say, bar)))
            say("")
    return Results(
        "regauge: the demonstration",
        tuple(f for r in played for f in r.findings),
        tuple(t for r in played for t in r.tables),
        tuple(f for r in played for f in r.figures),
        {"seed": seed, **{k: v for r in played for k, v in r.facts.items()}},
        tuple(u for r in played for u in r.unchecked),
    )
