"""The progress callback that every long operation accepts."""

from __future__ import annotations

from collections.abc import Callable

# Called with the number of units done, their total, and a short message on the current one (empty
# if there is nothing to add). Units are steps, layers or bytes, as the operation documents.
# Callbacks that deliver data are named after their event instead: `on_step`, `on_round`, `on_mark`.
Progress = Callable[[int, int, str], None]
