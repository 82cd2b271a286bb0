"""How the command line talks: stdout is data, stderr is talk. Errors are `regauge: error:` and `regauge: hint:` lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from regauge.errors import RegaugeError


def data(text: str) -> None:
    sys.stdout.write(text + "\n")


def data_json(value: Any) -> None:
    data(json.dumps(value, indent=2, ensure_ascii=False))


def say(text: str) -> None:
    sys.stderr.write("".join(f"regauge: {line}\n" for line in text.splitlines()))


def warn(text: str) -> None:
    say(f"warning: {text}")


def fail(error: RegaugeError) -> None:
    first, *rest = str(error).splitlines() or [type(error).__name__]
    say("\n".join([f"error: {first}", *rest]))
    if error.hint:
        say(f"hint: {error.hint}")


@contextmanager
def progress_bar(what: str) -> Iterator[Any]:
    """A function of (done, total) bytes that draws a bar on stderr; silent where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task(what, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


def columns(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Rows as aligned text; the columns in `right` are flush right, the last one is left as long as it is."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


@contextmanager
def step_bar(what: str) -> Iterator[Any]:
    """A function of (done, total, what now) that draws a bar on stderr, or says each step where stderr is no terminal."""
    if not sys.stderr.isatty():

        def plainly(done: int, total: int, now: str) -> None:
            if now:
                say(f"{what} {done + 1}/{total}: {now}")

        yield plainly
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[now]}"))
    with Progress(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task(what, total=None, now="")
        yield lambda done, total, now: bars.update(task, completed=done, total=total, now=now)
