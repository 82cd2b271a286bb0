"""Every error that regauge raises on purpose. Each names the thing; `hint` is the way out."""

from __future__ import annotations


class RegaugeError(Exception):
    """The root of regauge's errors. The command line prints `error:` and `hint:` lines from it and
    exits with 1.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class AxesError(RegaugeError):
    """An axes string that cannot be read; the message points at the place."""


class PatternError(RegaugeError):
    """A pattern of tensor names that is malformed, too large, or uses what is not supported."""


class SpecError(RegaugeError):
    """A spec that contradicts itself, or a state that does not fit its spec."""


class ElementError(RegaugeError):
    """A group element that its spec does not allow, or that belongs to another model."""


class CheckpointError(RegaugeError):
    """A checkpoint that cannot be read or written."""


class CutError(RegaugeError):
    """A model that cannot be cut or routed here, or a crossing that does not fit its boundary."""


class EdgeError(RegaugeError):
    """A model that cannot be authorised, or a step that would train it otherwise than the plain
    one.
    """


class UnknownModelError(RegaugeError):
    """No family describes this model."""


class CustomCodeError(UnknownModelError):
    """A model, tokenizer or processor that only code of its checkpoint can build. regauge never
    runs such code.
    """


class FindingsError(RegaugeError):
    """A file of results that cannot be read."""


class KeyFileError(RegaugeError):
    """A key that cannot be read or written, or that is for another purpose. No message ever holds a
    byte of a key.
    """


class PassphraseError(KeyFileError):
    """A passphrase that is wrong, or that is needed and was not given."""


class WrongKeyError(RegaugeError):
    """A key that is not the one that locked this model or sealed this file."""


class TamperedModelError(RegaugeError):
    """A locked model that is not as it was locked: names, shapes, dtypes, data, or the record of
    the lock itself.
    """


class TamperedFileError(RegaugeError):
    """A sealed file that is not as it was sealed: changed, cut short, or in another order."""


class LockError(RegaugeError):
    """A model that cannot be locked, unlocked or sealed as asked: it is locked already, or it is
    not.
    """


class UpdateError(RegaugeError):
    """An update that does not belong to the model or holds no information, or a model without the
    layers that an attack reads.
    """


class MissingExtraError(RegaugeError):
    """A library that is needed here and not installed."""


class RegaugeWarning(UserWarning):
    """A note on a result that is right. The command line prints it on stderr as `note:`."""


def need(module: str, extra: str) -> None:
    """Raise the error that names the extra, unless the library is there."""
    from importlib.util import find_spec

    if find_spec(module) is None:
        message = f'{module} is needed for this and not installed: it is in the extra "{extra}"'
        raise MissingExtraError(message, hint=f"pip install 'regauge[{extra}]'")
