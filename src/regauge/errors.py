"""Every error that regauge raises on purpose. Each names the thing; `hint` is the way out."""

from __future__ import annotations


class RegaugeError(Exception):
    """The root of regauge's errors. The command line prints `error:` and `hint:` lines from it and exits with 1."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class AxesError(RegaugeError):
    """An axes string that cannot be read; the message points at the place."""


class SpecError(RegaugeError):
    """A spec that contradicts itself, or a state that does not fit its spec."""


class ElementError(RegaugeError):
    """A group element that its spec does not allow, or that belongs to another model."""


class CheckpointError(RegaugeError):
    """A checkpoint that cannot be read or written."""


class CutError(RegaugeError):
    """A model that cannot be cut or routed here, or a crossing that does not fit its boundary."""


class UnknownModelError(RegaugeError):
    """No family describes this model."""
