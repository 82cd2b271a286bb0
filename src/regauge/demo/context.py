"""The context of a chapter: where it writes, prints and shows progress, and the trained models."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge.core.progress import Progress

if TYPE_CHECKING:
    from regauge.data.tasks import Examples

# Opens a progress bar with a title, and yields the callback that advances it.
OpenProgressBar = Callable[[str], AbstractContextManager[Progress]]


@dataclass(frozen=True)
class DemoContext:
    """The folder and seed of a chapter, and the function that shows progress."""

    folder: Path
    seed: int
    bar: OpenProgressBar

    @cached_property
    def models(self) -> tuple[Any, Any]:
        """Two ViTs that learned the digits from different seeds; trained on first use."""
        from regauge.demo.models import train_pair

        return train_pair(self.folder, self.seed, self.bar)

    @cached_property
    def train(self) -> Examples:
        """The digits that models are trained on."""
        from regauge.demo.digits import SPLIT, digits

        return digits(0, SPLIT)

    @cached_property
    def test(self) -> Examples:
        """The digits that models are tested on."""
        from regauge.demo.digits import SPLIT, digits

        return digits(SPLIT)
