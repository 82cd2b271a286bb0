"""Progress on stderr: a bar with rate and time left in a terminal or a notebook, otherwise a line
now and then.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from regauge.core.progress import Progress

LINES = 20  # lines about a run without a terminal, if its steps are fast
INTERVAL = 10.0  # seconds after which there is a further line


@contextmanager
def progress_bar(
    description: str,
    *,
    unit: Literal["steps", "bytes"] = "steps",
    print_line: Callable[[str], None] | None = None,
) -> Iterator[Progress]:
    """Show the progress of a long function on stderr.

    In a terminal or a notebook this is a bar with rate and time left; elsewhere about twenty lines,
    and none for bytes.

    Args:
        description: What runs, in a word or two.
        unit: Whether the callback counts steps or bytes.
        print_line: Prints a line where there is no terminal. Default: on stderr.

    Returns:
        A context manager whose value is the callback to pass as `progress=`.

    Example:
        >>> with regauge.progress_bar("match") as progress:
        ...     _ = regauge.verify("model", progress=progress)
    """
    bars = _bars(unit)
    if bars is None:
        yield (
            SparseLines(description, print_line or _print_line).report
            if unit == "steps"
            else (lambda done, total, message: None)
        )
        return
    with bars:
        task = bars.add_task(description, total=None, message="")
        yield lambda done, total, message: bars.update(
            task, completed=done, total=total, message=message
        )


class SparseLines:
    """Lines about the progress of a run: about twenty, and one after ten seconds without any.

    Args:
        description: What runs.
        print_line: Prints a line.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        description: str,
        print_line: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.description, self.print_line, self.clock = description, print_line, clock
        self.started = self.printed_at = clock()
        self.printed: int | None = None

    def report(self, done: int, total: int, message: str) -> None:
        """Print a line if it is due; calls without a message print none."""
        now = self.clock()
        is_due = (
            self.printed is None
            or total <= LINES
            or done - self.printed >= total / LINES
            or done + 1 >= total
            or now - self.printed_at >= INTERVAL
        )
        if not message or not is_due:
            return
        left = self._left(done, total, now)
        about = f", {left} left" if left and " left" not in message else ""
        self.print_line(f"{self.description} {done + 1}/{total}: {message}{about}")
        self.printed, self.printed_at = done, now

    def _left(self, done: int, total: int, now: float) -> str:
        """Return the time left, after two seconds."""
        elapsed = now - self.started
        if done < 1 or elapsed < 2:
            return ""
        left = elapsed / done * (total - done)
        return f"about {format_seconds(left)}" if left >= 2 else ""


def format_seconds(seconds: float) -> str:
    """Format a duration: "40 s", "12 min", "3.5 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _print_line(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _bars(unit: str) -> Any:
    """Return rich's progress display, or None where nothing can be redrawn."""
    if not (sys.stderr.isatty() or "ipykernel" in sys.modules):
        return None
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        Task,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.table import Column
    from rich.text import Text

    class Rate(ProgressColumn):
        """Steps per second, or seconds per step."""

        def render(self, task: Task) -> Text:
            rate = task.finished_speed or task.speed
            if not rate:
                return Text("")
            return Text(f"{rate:.1f}/s" if rate >= 1 else f"{1 / rate:.1f} s each")

    class Message(ProgressColumn):
        """The message of the current step, which is not markup."""

        def __init__(self) -> None:
            super().__init__(Column(ratio=1, no_wrap=True, overflow="ellipsis"))

        def render(self, task: Task) -> Text:
            return Text(str(task.fields["message"]), overflow="ellipsis", no_wrap=True)

    console = Console(stderr=True)
    first = [TextColumn("{task.description}", markup=False), BarColumn(bar_width=16)]
    if unit == "bytes":
        columns = [*first, DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()]
        return Progress(*columns, console=console, transient=True)
    left = TimeRemainingColumn(compact=True, elapsed_when_finished=True)
    if console.width < 60:  # no room for more
        return Progress(first[0], MofNCompleteColumn(), left, console=console, transient=True)
    columns = [*first, MofNCompleteColumn(), Rate(), left, Message()]
    return Progress(*columns, console=console, expand=True, transient=True)
