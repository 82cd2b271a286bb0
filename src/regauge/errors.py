"""The exception tree of regauge. A message names the fault; `hint` states the way out."""

from __future__ import annotations


class RegaugeError(Exception):
    """Base class of all errors of regauge.

    The command line prints it as `error:` and `hint:` lines and exits with code 1.

    Args:
        message: The fault, with the names and values involved.
        hint: What the user can do about it.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class AxesError(RegaugeError):
    """An axes string that cannot be parsed; the message points at the character."""


class PatternError(RegaugeError):
    """A pattern of tensor names that is malformed, too large, or uses unsupported syntax."""


class SpecError(RegaugeError):
    """A spec that contradicts itself, or a state that does not fit its spec."""


class ElementError(RegaugeError):
    """A group element that its spec does not allow, or that belongs to another model."""


class CheckpointError(RegaugeError):
    """A checkpoint that cannot be read or written."""


class CutError(RegaugeError):
    """A model that cannot be cut or routed, or activations that do not fit the cut's boundary."""


class EdgeError(RegaugeError):
    """A model that cannot be authorized, or an optimizer step that would train it differently from
    the plain model.
    """


class UnknownModelError(RegaugeError):
    """No family describes this model."""


class CustomCodeError(UnknownModelError):
    """A model, tokenizer or processor that needs code from its checkpoint. regauge never runs such
    code.
    """


class FindingsError(RegaugeError):
    """A results file that cannot be read."""


class KeyFileError(RegaugeError):
    """A key file that cannot be read or written, or a key for another purpose. No message contains
    bytes of a key.
    """


class PassphraseError(KeyFileError):
    """A wrong or missing passphrase."""


class WrongKeyError(RegaugeError):
    """A key that is not the one that locked this model or sealed this file."""


class TamperedModelError(RegaugeError):
    """A locked model that was changed after locking: names, shapes, dtypes, data, or the metadata
    of the lock.
    """


class TamperedFileError(RegaugeError):
    """A sealed file that was changed, truncated or reordered after sealing."""


class LockError(RegaugeError):
    """A model that cannot be locked, unlocked or sealed, for instance because it is locked
    already.
    """


class UpdateError(RegaugeError):
    """An update that does not fit the model or carries no information, or a model without the
    layers that an attack needs.
    """


class MissingExtraError(RegaugeError):
    """A required optional library that is not installed."""


class RegaugeWarning(UserWarning):
    """A note on a valid result. The command line prints it to stderr as `note:`."""


def need(module: str, extra: str) -> None:
    """Require an optional library.

    Args:
        module: The module to look for.
        extra: The extra of regauge that installs it.

    Raises:
        MissingExtraError: The module is not installed.
    """
    from importlib.util import find_spec

    if find_spec(module) is None:
        message = f'{module} is required but not installed: it is in the extra "{extra}"'
        raise MissingExtraError(message, hint=f"pip install 'regauge[{extra}]'")
