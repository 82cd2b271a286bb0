"""Output of the command line: results on stdout, messages on stderr.

Errors are `regauge: error:` and `regauge: hint:` lines.
"""

from __future__ import annotations

import json
import os
import sys
import unicodedata
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge.errors import RegaugeError, StoppedError

if TYPE_CHECKING:
    from regauge.core.progress import Progress

REPORT_VERSION = 1  # of the JSON documents of commands


def escape(text: str) -> str:
    """Return text that is safe on a terminal and in a log.

    Control characters (except newline and tab), characters that change the direction of writing,
    and lone surrogates become \\u001b, \\u202e, \\udcff, as in JSON. Names of files, tensors and
    clients are untrusted.
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
    """Write a result to stdout."""
    if getattr(sys, "stdout", None) is None:
        raise RegaugeError(
            "stdout is closed, so the result cannot be shown", hint="send stdout to a file"
        )
    sys.stdout.write(escape(text) + "\n")


def print_json(value: Any) -> None:
    """Write a value to stdout as JSON."""
    print_result(json.dumps(value, indent=2, ensure_ascii=False))


def print_report(command: str, fields: Mapping[str, Any]) -> None:
    """Write the JSON document of a command to stdout."""
    print_json({"version": REPORT_VERSION, "command": command, **fields})


def info(text: str) -> None:
    """Write a message to stderr. Dropped silently if stderr is closed."""
    try:
        sys.stderr.write("".join(f"regauge: {line}\n" for line in escape(text).splitlines()))
        sys.stderr.flush()
    except (OSError, ValueError):
        discard_stream(sys.stderr)


def discard_stream(stream: Any) -> None:
    """Redirect a broken stream, with what it still buffers, to the null device."""
    with suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def warn(text: str) -> None:
    """Write a warning to stderr."""
    info(f"warning: {text}")


def print_error(error: RegaugeError) -> None:
    """Write an error and its hint to stderr."""
    first, *rest = escape(str(error)).splitlines() or [type(error).__name__]
    info("\n".join([f"error: {first}", *rest]))
    if error.cli_hint:
        info(f"hint: {error.cli_hint}")


@contextmanager
def output_progress(out: Path, action: str) -> Iterator[Progress]:
    """Show a progress bar while an output is written. An interrupt states whether it
    was written.
    """
    from regauge.checkpoints.plan import is_taken
    from regauge.results.progress import progress_bar

    try:
        with progress_bar(escape(f"{action} to {out.name}"), unit="bytes") as progress:
            yield progress
    except KeyboardInterrupt as stop:
        raise StoppedError(
            f"interrupted; {out} was {'' if is_taken(out) else 'not '}written"
        ) from stop


@contextmanager
def step_bar(description: str) -> Iterator[Progress]:
    """Yield a progress callback for steps, as `regauge.progress_bar` shows them."""
    from regauge.results.progress import progress_bar

    with progress_bar(description, print_line=info) as progress:
        yield lambda done, total, message: progress(done, total, escape(message))
