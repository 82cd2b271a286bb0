"""Writing of a transformed checkpoint, shared by `move`, `match` and `lock`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge.cli.console import info, output_progress, warn

if TYPE_CHECKING:
    from regauge.checkpoints.plan import Plan
    from regauge.checkpoints.writer import WriteResult
    from regauge.core.element import Element


def write_moved(
    out: Path,
    plan: Plan,
    thunks: Mapping[str, Callable[[], Any]],
    action: str,
    resume: bool,
    threads: int | None,
) -> WriteResult:
    """Write a plan under a progress bar, and report on it."""
    from regauge.checkpoints.writer import write_plan

    with output_progress(out, action) as progress:
        written = write_plan(out, plan, thunks, progress=progress, resume=resume, threads=threads)
    report_written(written)
    return written


def report_written(written: WriteResult) -> None:
    """Report NaN values, skipped files and resumed shards."""
    if written.nonfinite:
        names = ", ".join(written.nonfinite[:5]) + (
            f" and {len(written.nonfinite) - 5} more" if len(written.nonfinite) > 5 else ""
        )
        warn(f"NaN or Inf in {len(written.nonfinite)} tensors: {names}")
    if written.skipped:
        info(f"not copied (weights in other formats, keys, elements): {', '.join(written.skipped)}")
    if written.resumed:
        info(f"resumed from the interrupted run: {', '.join(sorted(written.resumed))}")


def summary(g: Element) -> str:
    """Return the spaces that an element transforms, by their roots."""
    roots: dict[str, int] = {}
    for name in g.members:
        roots[name.split(".")[0]] = roots.get(name.split(".")[0], 0) + 1
    return ", ".join(f"{root} ({n})" if n > 1 else root for root, n in roots.items()) or "nothing"
