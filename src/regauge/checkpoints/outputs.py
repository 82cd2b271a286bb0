"""Checkpoints to be written: the results of `lock`, `unlock`, `move`, `fold_norms`, `convert`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from regauge.checkpoints.plan import Plan
from regauge.checkpoints.writer import WriteResult, write_plan
from regauge.core.progress import Progress
from regauge.core.threads import limited_threads


@dataclass(frozen=True)
class Job:
    """A checked output, ready to write.

    Attributes:
        out: The output.
        plan: The files to write.
        thunks: Functions that compute the tensors.
        facts: What is written, for reports in JSON.
        notes: Remarks for the user.
        warnings: Remarks on what may be unexpected.
    """

    out: Path
    plan: Plan
    thunks: Mapping[str, Callable[[], Any]]
    facts: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    notes: tuple[str, ...] = field(default=(), kw_only=True)
    warnings: tuple[str, ...] = field(default=(), kw_only=True)

    def write(
        self,
        *,
        progress: Progress | None = None,
        resume: bool = False,
        threads: int | None = None,
    ) -> WriteResult:
        """Write the output; the arguments are those of `write_plan`."""
        with limited_threads(threads):
            return write_plan(
                self.out, self.plan, self.thunks, progress=progress, resume=resume, threads=threads
            )

    def __repr__(self) -> str:
        return f"<output {self.out}: {len(self.thunks)} tensors>"


class Output:
    """Base of results that become a checkpoint. Nothing is written before `save`."""

    def plan(self, out: str | Path, *, threads: int | None = None) -> Job:
        """Check everything that `save` checks, and return what it would write.

        Args:
            out: The output folder or .safetensors file.
            threads: Number of threads.
        """
        raise NotImplementedError

    def save(
        self,
        out: str | Path,
        *,
        progress: Progress | None = None,
        resume: bool = False,
        threads: int | None = None,
    ) -> WriteResult:
        """Write a new folder or .safetensors file; it appears when it is complete.

        Args:
            out: The output.
            progress: Called with the bytes written and the total.
            resume: Keep the shards that an interrupted run of the same output has finished.
            threads: Number of threads.

        Raises:
            CheckpointError: The output exists, overlaps an input, or cannot be written.
        """
        return self.plan(out, threads=threads).write(
            progress=progress, resume=resume, threads=threads
        )


def format_spaces(names: Mapping[str, Any]) -> str:
    """Format the spaces that an element transforms, by their roots: `stream, ffn (4)`."""
    roots: dict[str, int] = {}
    for name in names:
        roots[name.split(".")[0]] = roots.get(name.split(".")[0], 0) + 1
    return ", ".join(f"{root} ({n})" if n > 1 else root for root, n in roots.items()) or "nothing"
