"""Models and data as users name them, opened and scored one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from regauge.checkpoints.adapted import open_adapted
from regauge.checkpoints.reader import Checkpoint
from regauge.core.options import require_at_least, require_device, require_type
from regauge.core.progress import Progress
from regauge.data.evaluate import Score, score_model
from regauge.data.sources import DataSource, sample_examples, source_of
from regauge.data.tasks import Examples
from regauge.errors import DataError, UnknownModelError
from regauge.evaluation.report import Evaluation
from regauge.models.load import load_empty, load_model
from regauge.models.sources import open_source
from regauge.results.views import ResultView

if TYPE_CHECKING:
    from regauge.models.sources import Source

DataInput: TypeAlias = str | Path | DataSource | Examples
Load: TypeAlias = Callable[[], torch.nn.Module]


@dataclass(frozen=True)
class Subject:
    """A model to be evaluated.

    Attributes:
        name: Its name in the report.
        checkpoint: Its tensors, and what lies beside them.
        module: The live module, if it is one; it is not changed.
        load: Loads the model to evaluate; None: the checkpoint in float32, or the module.
    """

    name: str
    checkpoint: Checkpoint
    module: torch.nn.Module | None = None
    load: Load | None = None

    def build(self) -> torch.nn.Module:
        """Return the model to evaluate."""
        if self.load is not None:
            return self.load()
        return load_model(self.checkpoint, "float32") if self.module is None else self.module


def open_subjects(models: Any) -> list[Subject]:
    """Open models: one, a sequence, or a mapping of names to models.

    A result with a trained `model` stands for that model.

    Raises:
        UnknownModelError: There is none, or a state dict, which cannot compute.
    """
    if isinstance(models, Mapping) and not isinstance(models, Checkpoint):
        if any(isinstance(value, torch.Tensor) for value in models.values()):
            raise UnknownModelError(
                "a model must be a path, a hub id, a checkpoint or a module, got a state dict",
                hint="load the state dict into a module",
            )
        named = {str(name): source for name, source in models.items()}
        return [_open(source, name) for name, source in _require_any(named).items()]
    if isinstance(models, str | Path | Checkpoint | torch.nn.Module | ResultView):
        models = [models]
    require_type(models, Sequence, "models")
    opened = [_open(source, None) for source in _require_any(models)]
    return [replace(s, name=name) for s, name in zip(opened, _name_all(opened), strict=True)]


def _name_all(subjects: Sequence[Subject]) -> list[str]:
    """Return names that differ: the last part of a path, or all of it, or one with a number."""
    names = [Path(s.name).name for s in subjects]
    names = [n if names.count(n) == 1 else s.name for n, s in zip(names, subjects, strict=True)]
    return [
        n if names[:i].count(n) == 0 else f"{n} ({names[:i].count(n) + 1})"
        for i, n in enumerate(names)
    ]


def _require_any(models: Any) -> Any:
    if not models:
        raise UnknownModelError("models must not be empty", hint="pass one model or several")
    return models


def _open(source: Any, name: str | None) -> Subject:
    trained = getattr(source, "model", None)
    if isinstance(source, ResultView) and isinstance(trained, torch.nn.Module):
        source = trained
    if isinstance(source, str | Path):
        return Subject(name or str(source), open_adapted(str(source)))
    checkpoint, module = open_source(source)
    if isinstance(source, Mapping) and not isinstance(source, Checkpoint):
        raise UnknownModelError(
            "a model must be a path, a hub id, a checkpoint or a module, got a state dict",
            hint="load the state dict into a module",
        )
    return Subject(name or checkpoint.path.name, checkpoint, module)


def evaluate_sources(
    models: Mapping[str, Source] | Sequence[Source] | Source,
    data: DataInput,
    *,
    batch_size: int = 32,
    seed: int = 0,
    device: str | None = None,
    facts: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Evaluate models that are not locked. `regauge.evaluate` describes the arguments."""
    return evaluate_subjects(
        open_subjects(models),
        data,
        batch_size=batch_size,
        seed=seed,
        device=device,
        facts=facts,
        progress=progress,
    )


def evaluate_subjects(
    subjects: Sequence[Subject],
    data: DataInput,
    *,
    batch_size: int = 32,
    seed: int = 0,
    device: str | None = None,
    facts: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    notes: Sequence[str] = (),
) -> Evaluation:
    """Evaluate open models. All data are read before the first model is loaded."""
    started = time.monotonic()
    require_at_least(DataError, 1, batch_size=batch_size)
    if device is not None:
        require_device(device)
    examples, tasks = _read_all(subjects, data, seed)
    total = sum(map(len, examples))
    scores: dict[str, Score] = {}
    done = 0
    for subject, own in zip(subjects, examples, strict=True):
        if progress is not None:
            progress(done, total, subject.name)
        model = subject.build()
        with unchanged(model, device):
            scores[subject.name] = score_model(
                model, own, batch_size, _offset(progress, done, total)
            )
        done += len(own)
        del model
    about = {
        "models": list(scores),
        "data": "data in memory" if isinstance(data, Examples) else source_of(data).uri,
        "task": tasks[0],
        "examples": len(examples[0]),
        "seconds": round(time.monotonic() - started, 1),
    }
    return Evaluation(scores, {**(facts or {}), **about}, (*notes, *_remarks(scores)))


def evaluate_modules(
    modules: Mapping[str, torch.nn.Module],
    examples: Examples,
    *,
    batch_size: int = 32,
    facts: Mapping[str, Any] | None = None,
) -> Evaluation:
    """Evaluate live modules on examples, in their dtype and on their device."""
    scores = {}
    for name, module in modules.items():
        with unchanged(module, None):
            scores[name] = score_model(module, examples, batch_size)
    return Evaluation(scores, {"examples": len(examples), **(facts or {})})


@contextmanager
def unchanged(model: torch.nn.Module, device: str | None) -> Iterator[None]:
    """Restore a module's training flags and device."""
    flags = {module: module.training for module in model.modules()}
    home = next((p.device for p in model.parameters() if not p.is_meta), None)
    try:
        if device is not None:
            model.to(device)
        yield
    finally:
        for module, flag in flags.items():
            module.training = flag
        if device is not None and home is not None:
            model.to(home)


def _read_all(
    subjects: Sequence[Subject], data: DataInput, seed: int
) -> tuple[list[Examples], list[dict[str, Any]]]:
    """Return the examples of each model, as it reads them, and its task."""
    if isinstance(data, Examples):
        return [data] * len(subjects), [{}] * len(subjects)
    source = source_of(data)
    opened = source.open()
    read = [
        source.read(
            load_empty(s.checkpoint) if s.module is None else s.module, s.checkpoint, data=opened
        )
        for s in subjects
    ]
    return [sample_examples(e, source, seed) for e, _ in read], [task for _, task in read]


def _offset(progress: Progress | None, start: int, total: int) -> Progress | None:
    if progress is None:
        return None
    return lambda done, _, message: progress(start + done, total, message)


def _remarks(scores: Mapping[str, Score]) -> Iterator[str]:
    """Yield remarks on scores that cannot be compared."""
    first, *others = scores
    for name in others:
        if not scores[name].is_comparable(scores[first]):
            yield (
                f"{name} has {scores[name].labels.sum():,.0f} labels and {first} "
                f"{scores[first].labels.sum():,.0f}: their labels differ, as with different "
                "tokenizers, and their numbers cannot be compared"
            )
