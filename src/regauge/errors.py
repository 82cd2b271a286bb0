"""The exception tree of regauge. A message names the fault; `hint` states the way out.

RegaugeError
├── ModelError              a model that cannot be used as asked
│   ├── SpecError           AxesError, PatternError
│   ├── ElementError
│   ├── UnknownModelError   CustomCodeError
│   ├── DiscoveryError
│   ├── CutError
│   ├── RecordError
│   └── AuthorizeError
├── FileError               a file or folder that cannot be read or written
│   └── CheckpointError, DataError, FindingsError, CacheError, KeyFileError, PassphraseError
├── LockError               WrongKeyError, TamperedModelError, TamperedFileError
├── MatchError              PathError
├── MergeError              RecipeError, DensityError, StatisticsError, SoftTransportError
├── JigsawError
├── DefenceError
├── SplitError              TransportError, FrameError, QuotaError, BudgetError, ...
├── FederatedError          NonFiniteError
├── AuditError              UpdateError, MetricError
└── MissingExtraError, DeviceError, StoppedError
"""

from __future__ import annotations


class Hint(str):
    """A hint with a form for each caller: it is the text for Python, and holds that for commands.

    Args:
        text: The hint in terms of functions and arguments.
        cli: The hint in terms of commands and options.

    Example:
        >>> hint = regauge.errors.Hint("pass align=True", cli="pass --align")
        >>> hint, hint.cli
        ('pass align=True', 'pass --align')
    """

    cli: str

    def __new__(cls, text: str, *, cli: str | None = None) -> Hint:
        hint = super().__new__(cls, text)
        hint.cli = text if cli is None else cli
        return hint


class RegaugeError(Exception):
    """Base class of all errors of regauge.

    The command line prints it as `error:` and `hint:` lines and exits with code 1. In Python the
    hint is a note of the exception, which tracebacks and notebooks show below the message.

    Args:
        message: The fault, with the names and values involved.
        hint: What the user can do about it.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint
        if hint:
            self.add_note(f"hint: {hint}")

    @property
    def cli_hint(self) -> str | None:
        """The hint in terms of commands and options."""
        return self.hint.cli if isinstance(self.hint, Hint) else self.hint


# Models and specs


class ModelError(RegaugeError):
    """A model that cannot be used as asked."""


class SpecError(ModelError):
    """A spec that contradicts itself, or a state that does not fit its spec."""


class AxesError(SpecError):
    """An axes string that cannot be parsed; the message points at the character."""


class PatternError(SpecError):
    """A pattern of tensor names that is malformed, too large, or uses unsupported syntax."""


class ElementError(ModelError):
    """A group element that its spec does not allow, or that belongs to another model."""


class UnknownModelError(ModelError):
    """No family describes this model."""


class CustomCodeError(UnknownModelError):
    """A model, tokenizer or processor that needs code from its checkpoint. regauge never runs such
    code.
    """


class DiscoveryError(ModelError):
    """A module's symmetry cannot be inferred from its graph."""


class CutError(ModelError):
    """A model that cannot be cut or routed, or activations that do not fit the cut's boundary."""


class RecordError(ModelError):
    """A model whose activations cannot be recorded, or that has none."""


class AuthorizeError(ModelError):
    """A model that cannot be authorized, or an optimizer step that would train it differently from
    the plain model.
    """


# Files


class FileError(RegaugeError):
    """A file or folder that cannot be read or written."""


class CheckpointError(FileError):
    """A checkpoint that cannot be read or written."""


class DataError(FileError):
    """A dataset that cannot be read or does not fit its use."""


class FindingsError(FileError):
    """A results file that cannot be read."""


class CacheError(FileError):
    """Saved state that belongs to another computation, or values that cannot be saved."""


class KeyFileError(FileError):
    """A key file that cannot be read or written, or a key for another purpose. No message contains
    bytes of a key.
    """


class PassphraseError(KeyFileError):
    """A wrong or missing passphrase."""


# Locks and seals


class LockError(RegaugeError):
    """A model that cannot be locked, unlocked or sealed, for instance because it is locked
    already.
    """


class WrongKeyError(LockError):
    """A key that is not the one that locked this model or sealed this file."""


class TamperedModelError(LockError):
    """A locked model that was changed after locking: names, shapes, dtypes, data, or the metadata
    of the lock.
    """


class TamperedFileError(LockError):
    """A sealed file that was changed, truncated or reordered after sealing."""


# Matching and merging


class MatchError(RegaugeError):
    """Two models that cannot be matched, or options that contradict the model."""


class PathError(MatchError):
    """Two models that no straight line joins, or a path on which nothing can be measured."""


class MergeError(RegaugeError):
    """Models that cannot be merged by this recipe."""


class RecipeError(MergeError):
    """An invalid recipe. The message has the file and the line."""


class DensityError(MergeError):
    """A density that a method does not support."""


class StatisticsError(MergeError):
    """A model without predictions, or with no layer reached."""


class SoftTransportError(MergeError):
    """Two models between which no optimal transport can be computed."""


# Training with puzzles, split and federated


class JigsawError(RegaugeError):
    """An invalid puzzle, or a model that cannot be trained or evaluated with puzzles."""


class DefenceError(RegaugeError):
    """An invalid defence, or one that does not fit the model or the batch."""


class SplitError(RegaugeError):
    """A fault of split learning."""


class TransportError(SplitError):
    """A failed exchange: the connection is broken, or the server does not answer."""


class FrameError(SplitError):
    """A malformed or inadmissible frame. `code` identifies the fault for the other side."""

    def __init__(self, code: str, message: str, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.code = code


class RefusedError(FrameError):
    """An error that the other side reports about a frame it received intact."""


class QuotaError(SplitError):
    """An invalid quota, or list of clients."""


class BudgetError(SplitError):
    """An invalid memory budget."""


class TrainingError(SplitError):
    """Invalid options of training."""


class RunError(SplitError):
    """A run that cannot be resumed with these options."""


class JournalError(SplitError):
    """A journal that cannot be read, or belongs to another run."""


class StepError(SplitError):
    """A step whose result is not finite.

    Weights and optimizer state are rolled back. The gradients of the step are dropped.
    """


class FederatedError(RegaugeError):
    """An invalid run, or one that cannot continue."""


class NonFiniteError(FederatedError):
    """An aggregated state or optimizer state with NaN or Inf."""


# Audits


class AuditError(RegaugeError):
    """A case that cannot be audited."""


class UpdateError(AuditError):
    """An update that does not fit the model or carries no information, or a model without the
    layers that an attack needs.
    """


class AttackNameError(UpdateError):
    """A name that is not in a table of attacks."""


class MetricError(AuditError):
    """Images that cannot be compared."""


# The environment


class MissingExtraError(RegaugeError):
    """A required optional library that is not installed."""


class DeviceError(RegaugeError):
    """A device that torch does not have."""


class StoppedError(RegaugeError):
    """An interrupt or SIGTERM while an output was written. The message states what became of it."""


class RegaugeWarning(UserWarning):
    """A note on a valid result. The command line prints it to stderr as `note:`."""


class QualityWarning(RegaugeWarning):
    """A warning that a model became worse. The command line prints it as `warning:`."""


# Names on the package index, where they differ from the names to import.
_PACKAGES = {
    "PIL": "Pillow",
    "dp_accounting": "dp-accounting",
    "flwr": "Flower",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "ot": "POT",
    "prometheus_client": "prometheus-client",
    "sklearn": "scikit-learn",
    "umap": "umap-learn",
}


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
        package = _PACKAGES.get(module, module)
        name = package if package == module else f"{package} (imported as {module})"
        hint = f"pip install 'regauge[{extra}]'"
        if extra == "federated":
            hint += (
                f"; {FLOWER_PINS}: where other packages need newer ones, make an environment of "
                "its own with python -m venv flower, then flower/bin/pip install "
                "'regauge[federated,models,data]'"
            )
        raise MissingExtraError(
            f'{name} is required but not installed: it is in the extra "{extra}"', hint=hint
        )


FLOWER_PINS = "Flower 1.41 pins typer < 0.21, rich < 15, packaging < 26 and protobuf < 7"
