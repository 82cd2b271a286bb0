"""Where a chapter plays."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Opens a bar, and gives the function of (done, total, what now) that draws it.
OpenProgressBar = Callable[[str], AbstractContextManager[Callable[[int, int, str], Any]]]


@dataclass(frozen=True)
class DemoContext:
    """A chapter's folder and seed, how it speaks, and how it shows that it is not idle."""

    folder: Path
    seed: int
    echo: Callable[[str], None]
    bar: OpenProgressBar
