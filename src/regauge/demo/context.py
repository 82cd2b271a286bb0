"""The context of a chapter: where it writes, prints and shows progress."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from regauge.core.progress import Progress

# Opens a progress bar with a title, and yields the callback that advances it.
OpenProgressBar = Callable[[str], AbstractContextManager[Progress]]


@dataclass(frozen=True)
class DemoContext:
    """The folder and seed of a chapter, and the functions that print and show progress."""

    folder: Path
    seed: int
    echo: Callable[[str], None]
    bar: OpenProgressBar
