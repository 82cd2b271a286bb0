"""`regauge audit gradients --from RUN`: attacks on what a recorded run of federated learning
sent.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from regauge.cli.audit_split import text_of
from regauge.cli.console import step_bar
from regauge.cli.option_guard import reject_options
from regauge.cli.run import deliver, facts_of_run

IMAGE_OPTIONS = ("budget", "practice", "gallery", "seed")


def audit_recorded(
    run: Path,
    rounds: Sequence[int],
    attacks: Sequence[str] | None,
    budget: Any,
    gallery: int,
    json: Path | None,
    report: Path | None,
    given: Mapping[str, str],
) -> int:
    """Attack the rounds of a run, counted from 1, and tell accuracy and leakage side by side.
    `given` are the options that were.
    """
    from regauge.audit.recorded import engine

    started = time.monotonic()
    opened = engine.open_run(run, [n - 1 for n in rounds])
    if opened.task["kind"] != "images":
        reject_options(
            given, IMAGE_OPTIONS, f"it is for runs on images, and that in {run} is on texts"
        )
    with step_bar("audit") as progress:
        found = engine.audit_recorded(
            opened, attacks=attacks, budget=budget, pictures=gallery, progress=progress
        )
    results = replace(
        found,
        facts={**facts_of_run(), **found.facts, "seconds": round(time.monotonic() - started, 1)},
    )
    return deliver(results, text_of(results), json, report)
