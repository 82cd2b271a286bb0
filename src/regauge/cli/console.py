"""How the command line talks: stdout is data, stderr is talk. Errors are `regauge: error:` and
`regauge: hint:` lines.
"""

from __future__ import annotations

import json
import os
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from regauge.errors import RegaugeError


class StoppedError(RegaugeError):
    """Ctrl-C, or a polite kill, while an output was written. The message says what became of it."""


def escape(text: str) -> str:
    """Return text that is safe on a terminal and in a log: control characters (but newline and
    tab), characters that change the direction of writing, and lone surrogates as \\u001b, \\u202e,
    \\udcff, as JSON has them too. Names of files, tensors and clients come from others.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c in "\n\t" or not _is_unsafe(c) else f"\\u{ord(c):04x}" for c in text)


def _is_unsafe(c: str) -> bool:
    return unicodedata.category(c) in ("Cc", "Cs") or c in _DIRECTIONS


_DIRECTIONS = frozenset(
    "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u2028\u2029"
)


def print_result(text: str) -> None:
    if getattr(sys, "stdout", None) is None:
        raise RegaugeError(
            "stdout is closed, so the result cannot be shown", hint="send stdout to a file"
        )
    sys.stdout.write(escape(text) + "\n")


def print_json(value: Any) -> None:
    print_result(json.dumps(value, indent=2, ensure_ascii=False))


def info(text: str) -> None:
    """Talk. Where nobody can hear it, it is lost: that is no error."""
    try:
        sys.stderr.write("".join(f"regauge: {line}\n" for line in escape(text).splitlines()))
        sys.stderr.flush()
    except (OSError, ValueError):
        discard_stream(sys.stderr)


def discard_stream(stream: Any) -> None:
    """Send what a broken stream still holds, and whatever comes after it, nowhere."""
    with suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def warn(text: str) -> None:
    info(f"warning: {text}")


def print_error(error: RegaugeError) -> None:
    first, *rest = escape(str(error)).splitlines() or [type(error).__name__]
    info("\n".join([f"error: {first}", *rest]))
    if error.hint:
        info(f"hint: {error.hint}")


@contextmanager
def output_progress(out: Path, what: str) -> Iterator[Any]:
    """A progress bar for the writing of an output. An interrupt is told with what became of it."""
    from regauge.checkpoints.plan import is_taken

    try:
        with progress_bar(escape(f"{what} to {out.name}")) as progress:
            yield progress
    except KeyboardInterrupt as stop:
        raise StoppedError(
            f"interrupted; {out} was {'' if is_taken(out) else 'not '}written"
        ) from stop


@contextmanager
def progress_bar(what: str) -> Iterator[Any]:
    """A function of (done, total) bytes that draws a bar on stderr; silent where stderr is no
    terminal.
    """
    if not sys.stderr.isatty():
        yield lambda done, total, message: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task(what, total=None)
        yield lambda done, total, message: bars.update(task, completed=done, total=total)


@contextmanager
def step_bar(what: str) -> Iterator[Any]:
    """A function of (done, total, what now) that draws a bar on stderr, or says each step where
    stderr is no terminal.
    """
    if not sys.stderr.isatty():

        def plainly(done: int, total: int, now: str) -> None:
            if now:
                info(f"{what} {done + 1}/{total}: {now}")

        yield plainly
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[now]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task(what, total=None, now="")
        yield lambda done, total, now: bars.update(
            task, completed=done, total=total, now=escape(now)
        )
