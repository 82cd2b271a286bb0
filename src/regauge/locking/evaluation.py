"""`evaluate`: what models are worth on data, with the keys of those that are locked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from regauge.core.progress import Progress
from regauge.core.threads import within_threads
from regauge.errors import LockError
from regauge.evaluation.models import DataInput, Subject, evaluate_subjects, open_subjects
from regauge.evaluation.report import Evaluation

if TYPE_CHECKING:
    from regauge.locking.keys import Key, KeySource
    from regauge.models.sources import Source

WITHOUT_KEY = ", without its key"


@within_threads
def evaluate(
    models: Source | Sequence[Source] | Mapping[str, Source],
    data: DataInput,
    *,
    key: KeySource | None = None,
    control: bool = False,
    retrained: bool = False,
    batch_size: int = 32,
    seed: int = 0,
    device: str | None = None,
    facts: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Measure loss, and accuracy or perplexity, of one model or several on the same data.

    Each number has a standard error over examples, and beside it stands the same number of a guess
    that reads no input.

    Args:
        models: A model, a sequence of models, or names with models: paths, hub ids,
            "model+adapter", checkpoints, modules, or results with a trained `model`. Modules are
            not changed.
        data: Labelled images or texts, or a text for language models: a path, a hub id, a
            `DataSource`, or `Examples`.
        key: The key of locked models, or its file. Without it, a locked model is evaluated as it
            is.
        control: Evaluate locked models without the key too.
        retrained: Accept locked models whose weights training has changed.
        batch_size: Examples per forward pass.
        seed: The seed of the sample, if the data source is limited to a number of samples.
        device: The device to compute on. Default: that of a module, the CPU for others.
        facts: Facts of the run, for the report.
        progress: The progress callback, in examples of all models.

    Returns:
        The scores by name, with `scores`, `best`, `to_html()`.

    Raises:
        DataError: The data cannot be read, do not fit a model, or have no labels.
        WrongKeyError: Another key locked a model.
        LockError: A key was given, and no model is locked.

    Example:
        >>> evaluation = regauge.evaluate(["vit", vit], images)
        >>> evaluation.scores["vit"].accuracy >= 0
        True
    """
    subjects, notes = _authorize_all(open_subjects(models), key, control, retrained)
    return evaluate_subjects(
        subjects,
        data,
        batch_size=batch_size,
        seed=seed,
        device=device,
        facts=facts,
        progress=progress,
        notes=notes,
    )


def _authorize_all(
    subjects: Sequence[Subject], key: KeySource | None, control: bool, retrained: bool
) -> tuple[list[Subject], list[str]]:
    """Return the models with the key applied where they are locked, and remarks."""
    from regauge.locking.authorize import is_authorized
    from regauge.locking.keys import resolve_key
    from regauge.locking.lock import locked_element, record_of
    from regauge.models.resolve import spec_of

    secret = None if key is None else resolve_key(key, "lock")
    chosen: list[Subject] = []
    notes: list[str] = []
    locked = 0
    for subject in subjects:
        held = subject.checkpoint if subject.module is None else subject.module
        if subject.module is not None and is_authorized(subject.module):
            chosen.append(subject)
            continue
        record = record_of(held)
        if record is None:
            chosen.append(subject)
            continue
        locked += 1
        if secret is None:
            notes.append(
                f"{subject.name} is locked by the key {record.key} and was evaluated without it: "
                "pass the key with -k (in Python: key=)"
            )
            chosen.append(subject)
            continue
        locked_element(spec_of(held), record, secret)  # raises before the weights are loaded
        chosen.append(replace(subject, load=partial(_load_authorized, subject, secret, retrained)))
        if control:
            chosen.append(replace(subject, name=subject.name + WITHOUT_KEY))
    if secret is not None and not locked:
        raise LockError(
            f"none of {', '.join(s.name for s in subjects)} is locked, and a key was given",
            hint="drop the key",
        )
    return chosen, notes


def _load_authorized(subject: Subject, key: Key, retrained: bool) -> torch.nn.Module:
    """Return a locked model that computes the plain function; a live module is copied."""
    import copy

    from regauge.locking.authorize import authorize

    if subject.module is None:
        return authorize(subject.checkpoint, key, retrained=retrained, dtype="float32")
    return authorize(copy.deepcopy(subject.module), key)
