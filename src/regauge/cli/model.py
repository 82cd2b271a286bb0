"""A model on the command line: its checkpoint and its spec, checked against each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from regauge.errors import RegaugeError, SpecError

if TYPE_CHECKING:
    from regauge.checkpoint import Checkpoint
    from regauge.spec import Fault, Spec


def open_model(source: str, spec_file: Path | None) -> tuple[Checkpoint, Spec]:
    """The checkpoint, and the spec of its file or family. Not yet checked against each other."""
    from regauge.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(source)
    return checkpoint, spec_of(checkpoint, spec_file)


def spec_of(checkpoint: Checkpoint, spec_file: Path | None) -> Spec:
    if spec_file is not None:
        from regauge.specfile import load_spec

        return load_spec(spec_file)
    if checkpoint.config is None:
        raise SpecError(
            f"{checkpoint.path} has no config.json, so its family is not known",
            hint="put config.json beside it, or describe the model in a spec file and give it with --spec",
        )
    from regauge.families import spec_from

    try:
        return spec_from(checkpoint.config, checkpoint.names)
    except RegaugeError:
        raise
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        raise SpecError(
            f"{checkpoint.config_path} cannot be understood as a {checkpoint.config.get('model_type')}: {error}",
            hint="compare it with the model's original config.json",
        ) from error


def faults_of(checkpoint: Checkpoint, spec: Spec) -> list[Fault]:
    """Every misfit. Headers suffice, unless the spec holds tensors to a value."""
    from regauge.spec import check

    return check(spec, checkpoint if spec.fixed else checkpoint.entries)


def require_fit(checkpoint: Checkpoint, spec: Spec, faults: Sequence[Fault] | None = None) -> None:
    from regauge.spec import require

    require(
        faults_of(checkpoint, spec) if faults is None else faults,
        f'{checkpoint.path} does not fit the spec "{spec.family}"',
        hint="its config contradicts its weights, or the spec is not this model's: regauge inspect shows both",
    )
