"""Writing of checkpoints, shared by `move`, `lock`, `convert`, `match` and `merge`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from regauge.cli.console import info, output_progress, print_report, print_result, warn

if TYPE_CHECKING:
    from pathlib import Path

    from regauge.checkpoints.outputs import Job
    from regauge.checkpoints.writer import WriteResult
    from regauge.evaluation.report import Evaluation


def write_job(
    job: Job,
    command: str,
    *,
    started: float,
    resume: bool = False,
    dry_run: bool = False,
    json: bool = False,
    threads: int | None = None,
    fields: Sequence[str] = ("bytes", "files", "left", "seconds"),
    extra: Mapping[str, Any] = MappingProxyType({}),
    place: str = "",
    evaluate: Callable[[], Evaluation] | None = None,
) -> int:
    """Write what a public function planned, and print its remarks and what was written.

    Args:
        job: The planned output.
        command: The name of the command.
        started: When the command started.
        resume: Keep the shards of an interrupted run.
        dry_run: Check only.
        json: Print the facts as JSON.
        threads: Number of threads.
        fields: Fields of the JSON document about the written files.
        extra: Further fields of it.
        place: Further places that were written, for the last message.
        evaluate: Evaluate the output and the input, after writing.
    """
    report = {**job.facts, "dry_run": dry_run}
    for note in job.notes:
        info(note)
    for warning in job.warnings:
        warn(warning)
    if dry_run:
        info(f"dry run: {len(job.thunks)} tensors would be written to {job.out}")
    else:
        action = f"{command.partition(' ')[0].removesuffix('e')}ing"
        write = partial(job.write, resume=resume, threads=threads)
        tensors = None if "seconds" in fields else len(job.thunks)
        written, seconds = write_output(job.out, action, write, place, started, tensors)
        facts = {
            "bytes": written.bytes,
            "files": list(written.files),
            "nonfinite": list(written.nonfinite),
            "left": list(written.skipped),
            **extra,
            "seconds": seconds,
        }
        report |= {name: facts[name] for name in facts if name in fields or name in extra}
    evaluation = evaluate() if evaluate is not None else None
    if json:
        print_report(command, report | ({"evaluation": evaluation.to_dict()} if evaluation else {}))
    elif evaluation is not None:
        print_result(str(evaluation))
    return 0


def write_output(
    out: Path,
    action: str,
    write: Callable[..., WriteResult],
    about: str,
    started: float,
    tensors: int | None = None,
) -> tuple[WriteResult, float]:
    """Write an output with a progress bar, and report it.

    Args:
        out: The output.
        action: What is done, for the bar.
        write: Writes the output; gets the progress callback.
        about: What the last message adds.
        started: When the command started.
        tensors: The number of tensors, to be reported in place of the time.

    Returns:
        What was written, and the seconds since the start.
    """
    from regauge.checkpoints.files import format_bytes

    with output_progress(out, action) as progress:
        written = write(progress=progress)
    report_written(written)
    seconds = time.monotonic() - started
    size = format_bytes(written.bytes)
    amount = f"{size} in {seconds:.1f} s" if tensors is None else f"{tensors} tensors, {size}"
    info(f"wrote {out}: {amount}{about}")
    return written, round(seconds, 3)


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
