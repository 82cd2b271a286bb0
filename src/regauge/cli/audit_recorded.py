"""`regauge audit gradients --from RUN`: attacks on the updates of a recorded federated run."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from regauge.cli.audit_split import text_of
from regauge.cli.console import step_bar
from regauge.cli.option_guard import reject_options
from regauge.cli.run import deliver, facts_of_run

if TYPE_CHECKING:
    from regauge.audit.gradient_audit.attempts import Budget

IMAGE_OPTIONS = ("budget", "practice", "gallery", "seed")


def audit_recorded(
    run: Path,
    rounds: Sequence[int],
    attacks: Sequence[str] | None,
    budget: Budget,
    gallery: int,
    json: Path | None,
    report: Path | None,
    passed: Mapping[str, str],
) -> int:
    """Attack the rounds of a recorded run, and report accuracy and leakage side by side.

    Args:
        run: the run's folder.
        rounds: the rounds to attack, counted from 1; empty for all.
        attacks: names of the attacks.
        budget: the budget of attacks by optimisation.
        gallery: how many images to show.
        json: where to write the results.
        report: where to write the page.
        passed: the options that were passed, by parameter.
    """
    from regauge.audit.recorded_audit import engine

    started = time.monotonic()
    recorded = engine.open_run(run, [n - 1 for n in rounds])
    if recorded.task["kind"] != "images":
        reject_options(passed, IMAGE_OPTIONS, f"only for runs on images; {run} is on texts")
    with step_bar("audit") as progress:
        audit = engine.audit_recorded(
            recorded, attacks=attacks, budget=budget, pictures=gallery, progress=progress
        )
    results = replace(
        audit,
        facts={**facts_of_run(), **audit.facts, "seconds": round(time.monotonic() - started, 1)},
    )
    return deliver(results, text_of(results), json, report)
