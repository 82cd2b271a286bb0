"""`regauge audit gradients --from RUN`: attacks on what a recorded run of federated learning sent."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from regauge.cli.console import step_bar
from regauge.cli.leaking import text_of
from regauge.cli.run import deliver, facts_of_run


def audit_recorded(
    run: Path, rounds: Sequence[int], attacks: Sequence[str] | None, budget: Any, gallery: int, json: Path | None, report: Path | None
) -> int:
    """Attack the rounds of a run, counted from 1, and tell accuracy and leakage side by side."""
    from regauge.federated.auditing import audit_run

    started = time.monotonic()
    with step_bar("audit") as progress:
        found = audit_run(run, rounds=[n - 1 for n in rounds], attacks=attacks, budget=budget, pictures=gallery, progress=progress)
    results = replace(found, facts={**facts_of_run(), **found.facts, "seconds": round(time.monotonic() - started, 1)})
    return deliver(results, text_of(results), json, report)
