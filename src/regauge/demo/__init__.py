"""A demonstration on small models that are created and trained locally, without downloads.

Each chapter is a function that measures one claim; all chapters together are one page.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from regauge.checkpoints.files import wrap_write_errors, write_bytes
from regauge.checkpoints.plan import check_new
from regauge.demo.basis import show_basis
from regauge.demo.context import DemoContext, OpenProgressBar
from regauge.demo.gradients import show_gradients
from regauge.demo.jigsaw import show_jigsaw
from regauge.demo.leakage import show_split
from regauge.demo.lock import show_lock
from regauge.demo.merge import show_merge
from regauge.errors import need
from regauge.results.findings import Claim, Results

Chapter = Callable[[DemoContext], Results]

CHAPTERS: tuple[Chapter, ...] = (
    show_basis,
    show_merge,
    show_lock,
    show_split,
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

    Returns:
        The results of the chapters, as `chapters` of one result.
    """
    started = time.monotonic()
    for library, extra in (
        ("jinja2", "experiments"),
        ("matplotlib", "experiments"),
        ("transformers", "experiments"),
        ("sklearn", "experiments"),
        ("torchmetrics", "audit"),
        ("dp_accounting", "privacy"),
    ):
        need(library, extra)
    if out is not None:
        check_new(out)
        with wrap_write_errors(out):
            out.mkdir(exist_ok=True)
    import torch

    from regauge.results import report

    torch.set_num_threads(1)  # more threads slow down models as small as these
    with tempfile.TemporaryDirectory(prefix="regauge-demo-") as temporary:
        context = DemoContext(Path(temporary) if out is None else out, seed, bar)
        parts = []
        for number, chapter in enumerate(chapters, 1):
            part = chapter(context)
            echo(f"{number}. {format_claim(part)}\n")
            parts.append(part)
    seconds = time.monotonic() - started
    results = Results(
        "regauge demo",
        facts={**facts(), "seed": seed, "seconds": round(seconds, 1)},
        claim=Claim(
            "What the symmetries of a Transformer's weights allow, and what they do not protect",
            sentence="The channels, heads and neurons of a Transformer can be permuted or rotated "
            "without changing what it computes: the same model in another basis. regauge uses this "
            "freedom, and attacks protections that rest on it. All numbers below were measured by "
            f"this run, on small models that it trained on 8 x 8 digits, in {seconds:.0f} seconds.",
        ),
        chapters=tuple(parts),
    )
    if page is not None:
        write_bytes(page, report.page(results).encode())
    return results


def format_claim(results: Results) -> str:
    """Format the claim of a chapter for a terminal."""
    claim = results.headline
    amount = claim.number.replace("→", "to")  # a terminal may lack the arrow
    number = f"\n   {amount} {claim.label}" if claim.number else ""
    command = claim.command.replace("\n", "\n        ")
    return f"{claim.text}{number}" + (f"\n   try: {command}" if command else "")
