"""`regauge audit gradients --from RUN`: attacks on the updates of a recorded federated run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from regauge.cli.audits import run_audit
from regauge.cli.option_guard import reject_options
from regauge.errors import need

IMAGE_OPTIONS = ("budget", "practice", "gallery", "seed")


def audit_recorded(
    run: Path,
    rounds: Sequence[int],
    attacks: Sequence[str],
    budget: Sequence[int],
    gallery: int,
    resume: bool,
    json: Path | None,
    report: Path | None,
    passed: Mapping[str, str],
) -> int:
    """Attack the rounds of a recorded run, and report accuracy and leakage side by side.

    Args:
        run: the run's folder.
        rounds: the rounds to attack, counted from 1; empty for all.
        attacks: names of the attacks.
        budget: steps and restarts of attacks by optimization, rehearsals, and the seed.
        gallery: how many images to show.
        resume: whether to resume an interrupted audit.
        json: where to write the results.
        report: where to write the page.
        passed: the options that were passed, by parameter.
    """
    from regauge import audit
    from regauge.audit.gradient_audit.attempts import Budget

    need("torchmetrics", "audit")
    steps, restarts, practice, seed = budget

    def check(kind: str, sizes: str) -> None:
        if kind != "images":
            reject_options(passed, IMAGE_OPTIONS, f"requires a run on images; {run} is on texts")

    return run_audit(
        lambda **more: audit.recorded(
            run,
            rounds=rounds,
            attacks=attacks,
            budget=Budget(steps, restarts, seed=seed, practice=practice),
            gallery=gallery,
            on_loaded=check,
            **more,
        ),
        "recorded",
        json,
        report,
        resume,
        must_decide=False,
    )
