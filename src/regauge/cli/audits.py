"""The end of every audit: its steps are saved while it runs, and deleted once its outputs are
written.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from regauge.cli.console import step_bar
from regauge.cli.run import deliver, facts_of_run, report_saved
from regauge.errors import AttackNameError

if TYPE_CHECKING:
    from regauge.audit.report import AuditReport


def run_audit(
    audit: Callable[..., AuditReport],
    subject: str,
    json: Path | None,
    report: Path | None,
    resume: bool,
    *,
    must_decide: bool = True,
) -> int:
    """Run an audit, write its outputs, and return the exit code.

    Args:
        audit: Runs the audit; gets facts, state, resume and progress.
        subject: What is audited, for the name of the folder of saved steps.
        json: Where to write the results as JSON.
        report: Where to write the page.
        resume: Whether to use the saved steps.
        must_decide: Whether an inconclusive finding fails.
    """
    state = _state_folder(subject, json, report)

    def describe_saved() -> str:
        count = 0 if state is None else len(list(state.glob("*.safetensors")))
        noun = "finished step is" if count == 1 else "finished steps are"
        return f"{count} {noun} saved in {state}" if count else ""

    hint = "to continue, repeat the command with --resume"
    with report_saved(describe_saved, hint), step_bar("audit") as progress:
        try:
            result = audit(facts=facts_of_run(), state=state, resume=resume, progress=progress)
        except AttackNameError as error:
            raise typer.BadParameter(f"{error}; {error.hint}", param_hint="--attacks") from error
    code = deliver(result.results, str(result), json, report, must_decide=must_decide)
    result.delete_state()
    return code


def _state_folder(subject: str, json: Path | None, report: Path | None) -> Path | None:
    """Return the folder for the saved steps: beside the first output, or in the working folder.
    None if that cannot be written.
    """
    outs = [out for out in (json, report) if out is not None and str(out) != "-"]
    folder = (
        outs[0].with_name(f".{outs[0].name}.state") if outs else Path(f".audit-{subject}.state")
    )
    return folder if os.access(folder.absolute().parent, os.W_OK) else None
