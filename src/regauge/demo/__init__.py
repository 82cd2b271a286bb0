"""A demonstration on small models that are created and trained locally, without downloads.

Each chapter is a function that prints a few lines and returns its results; all results together are
one page.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from regauge.checkpoints.files import wrap_write_errors, write_bytes
from regauge.checkpoints.plan import check_new
from regauge.demo.context import DemoContext, OpenProgressBar
from regauge.demo.digits import show_training
from regauge.demo.gradients import show_gradients
from regauge.demo.jigsaw import show_jigsaw
from regauge.demo.leakage import show_leakage
from regauge.demo.lock import show_lock
from regauge.demo.merge import show_merge
from regauge.demo.move import show_symmetry, show_transforms
from regauge.demo.split import show_split
from regauge.errors import need
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
    *,
    page: Path | None = None,
    facts: Callable[[], Mapping[str, Any]] = dict,
) -> Results:
    """Run the chapters.

    Args:
        echo: Prints a line.
        bar: Opens a progress bar.
        out: A new folder for the models and images; by default they are temporary.
        seed: The seed of the models and elements.
        chapters: The chapters to run, in order.
        page: The HTML page to write.
        facts: Returns further facts of the run, called at its end.
    """
    started = time.monotonic()
    for library in ("jinja2", "matplotlib", "transformers", "sklearn"):
        need(library, "experiments")
    if out is not None:
        check_new(out)
        with wrap_write_errors(out):
            out.mkdir(exist_ok=True)
    import torch

    from regauge.results import report

    torch.set_num_threads(1)  # more threads slow down models as small as these
    with tempfile.TemporaryDirectory(prefix="regauge-demo-") as temporary:
        folder = Path(temporary) if out is None else out
        parts = []
        for number, chapter in enumerate(chapters, 1):
            echo(f"{number}. {(chapter.__doc__ or '').splitlines()[0]}\n")
            parts.append(chapter(DemoContext(folder, seed, echo, bar)))
            echo("")
    measured = {"seed": seed, **{k: v for r in parts for k, v in r.facts.items()}}
    results = Results(
        "regauge: the demonstration",
        tuple(f for r in parts for f in r.findings),
        tuple(t for r in parts for t in r.tables),
        tuple(f for r in parts for f in r.figures),
        {**facts(), **measured, "seconds": round(time.monotonic() - started, 1)},
        tuple(u for r in parts for u in r.unchecked),
    )
    if page is not None:
        write_bytes(page, report.page(results).encode())
    return results
