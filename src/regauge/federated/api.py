"""`run`: federated learning on what users hold, on every engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from regauge.checkpoints.reader import Checkpoint
from regauge.core.options import require_device, resolve_options
from regauge.core.progress import Progress
from regauge.core.threads import within_threads
from regauge.data.sources import DataSource, source_of
from regauge.data.tasks import Examples
from regauge.errors import FederatedError
from regauge.federated.deployment import FlowerOptions, submit
from regauge.federated.outputs import FederatedRun
from regauge.federated.rounds import describe_measures, describe_round
from regauge.federated.runs import Source, run_federated
from regauge.federated.settings import Settings
from regauge.federated.state_store import Round
from regauge.models.load import load_model

if TYPE_CHECKING:
    from regauge.models import sources

DataInput: TypeAlias = str | Path | DataSource | Examples
ENGINES = ("process", "simulation", "deployment")
# The options of a run that describe how model and data are read.
READING = (
    "split",
    "fields",
    "tokenizer",
    "length",
    "mean",
    "std",
    "test_split",
    "fresh",
    "device",
)


@within_threads
def run(
    model: sources.Source,
    data: DataInput,
    *,
    clients: int | None = None,
    rounds: int | None = None,
    strategy: str | None = None,
    aggregation: str | None = None,
    settings: Settings | None = None,
    folder: str | Path | None = None,
    test: DataInput | None = None,
    engine: str = "process",
    flower: FlowerOptions | None = None,
    record: bool = False,
    facts: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    **reading: Any,
) -> FederatedRun:
    """Train a model on data that stay with their clients; a server averages their updates.

    Args:
        model: The model to train: a path, a hub id, a checkpoint or a module, which is not changed.
        data: Labelled data to partition among the clients: a URI, a `DataSource` or examples.
        clients: The number of clients; like the next three, in place of that of the settings.
        rounds: The number of rounds. A larger number extends a finished run.
        strategy: The rule from contributions to the next model: "fedavg", "fedprox", "fedadam" or
            "matched", which aligns clients with different initializations.
        aggregation: The rule that combines contributions: "mean", "median", "trimmed-mean" or
            "clipped-mean".
        settings: All settings: partition, local training, defences, secure sums, limits, seed.
        folder: The folder of the run. An existing one is resumed. None: nothing is saved.
        test: The test data of the server, read like `data`; None: a tenth of the data, withheld
            from the clients.
        engine: "process", or Flower's "simulation" or "deployment".
        flower: Options of Flower's engines.
        record: Whether to record what the server receives in the folder, for audits.
        facts: Further facts for the description of the run.
        progress: The progress callback, called with the round and a description of it.
        reading: How model and data are read: `split`, `fields`, `tokenizer`, `length`, `mean`,
            `std` and `test_split`, where a `DataSource` does not set them; `fresh`, `device`.

    Returns:
        The run, with `model`, `history`, `save(folder)` and `to_html()`.

    Raises:
        DataError: The data cannot be read, or are of another type.
        FederatedError: Settings are invalid or contradict each other, an option is unknown, the
            folder holds another run, or a round is void too often. What was finished is in the
            folder.

    Example:
        >>> trained = regauge.federated.run(vit, images, clients=2, rounds=1, test=images)
        >>> trained.history[-1].contributed
        (0, 1)
        >>> trained.save("trained")
    """
    chosen = _choose_settings(settings, clients, rounds, strategy, aggregation)
    source = _open_source(model, data, test, reading)
    chosen = chosen.with_learning_rate(from_scratch=source.fresh or chosen.independent)
    require_device(source.device)
    place, options = (
        None if folder is None else Path(folder),
        resolve_options(flower, FlowerOptions()),
    )
    _require_engine(engine, source, place, record)

    def on_round(finished: Round) -> None:
        if progress is not None:
            progress(finished.number, chosen.rounds, describe_round(finished))

    def on_start(measures: Mapping[str, float]) -> None:
        if progress is not None:
            progress(0, chosen.rounds, f"before training: {describe_measures(measures)}")

    if place is None or engine == "process":
        return run_federated(
            source,
            chosen,
            place,
            on_round=on_round,
            on_start=on_start,
            record=record,
            about=facts,
        )
    if engine == "simulation":
        from regauge.federated.flower import simulate

        return simulate(
            source,
            chosen,
            place,
            on_round=on_round,
            on_start=on_start,
            record=record,
            about=facts,
            workers=options.workers,
            wait=options.wait,
            gather=options.gather,
        )
    return submit(source, chosen, place, options, record=record)


def _choose_settings(settings: Settings | None, *given: Any) -> Settings:
    """Return the settings with the values that are given in place of theirs."""
    names = ("clients", "rounds", "strategy", "aggregation")
    values = {n: value for n, value in zip(names, given, strict=True) if value is not None}
    if settings is not None:
        return replace(settings, **values)
    missing = [name for name in names[:2] if name not in values]
    if missing:
        raise FederatedError(
            f"{' and '.join(missing)} must be given without settings, got None",
            hint="pass clients=4, rounds=10, or settings=Settings(...)",
        )
    return Settings(**values)


def _open_source(
    model: sources.Source,
    data: DataInput,
    test: DataInput | None,
    reading: Mapping[str, Any],
) -> Source:
    """Return model and data as a source, on disk or in memory."""
    memory: dict[str, Any] = {}
    if isinstance(model, Checkpoint):
        model = model.path if model.sources else load_model(model, "float32")
    if isinstance(model, Mapping):
        raise FederatedError(
            "a model must be a path, a hub id, a checkpoint or a module to be trained, got a state "
            "dict",
            hint="load the state dict into a module",
        )
    if isinstance(model, torch.nn.Module):
        memory["module"] = model
    if isinstance(data, Examples):
        memory["examples"] = data
    if isinstance(test, Examples):
        memory["test_examples"] = test
    unknown = sorted(reading.keys() - set(READING))
    if unknown:
        raise FederatedError(
            f'options of run must be among {", ".join(READING)}, got "{unknown[0]}"',
            hint="settings of the training belong into settings=Settings(...)",
        )
    options = dict(reading)
    return Source(
        type(model).__name__ if "module" in memory else str(model),
        _read_source(data, options, "split"),
        test=None if test is None else _read_source(test, options, "test_split"),
        **memory,
        **options,
    )


def _read_source(data: DataInput, options: dict[str, Any], split: str) -> str:
    """Return the name of data, and add to the options how a `DataSource` is to be read."""
    if isinstance(data, Examples):
        return f"{len(data)} examples in memory"
    source = source_of(data)
    if not isinstance(data, DataSource):
        return source.uri
    if data.samples is not None or data.attributes:
        raise FederatedError(
            "a DataSource must have no samples and no attributes for a run: all examples are read",
            hint="pass Examples, or write the examples to a file",
        )
    given: dict[str, Any] = {
        split: data.split,
        "fields": dict(data.fields),
        "mean": data.mean,
        "std": data.std,
    }
    given |= {"tokenizer": data.tokenizer, "length": data.length}
    for name, value in given.items():
        if not value:
            continue
        value = list(value) if isinstance(value, tuple) else value
        known = options.get(name)
        if known is None:
            options[name] = value
        elif (list(known) if isinstance(known, tuple) else known) != value:
            raise FederatedError(
                f"{name} must be the same for all data of a run, got {known} and {value}",
                hint="set it once, or convert one of the datasets",
            )
    return source.uri


def _require_engine(engine: str, source: Source, folder: Path | None, record: bool) -> None:
    """Raise unless the engine can run on this model, data and folder."""
    if engine not in ENGINES:
        raise FederatedError(f'engine must be one of {", ".join(ENGINES)}, got "{engine}"')
    if engine == "process" and not record:
        return
    use = "to be recorded" if record else f'with the engine "{engine}"'
    if folder is None:
        raise FederatedError(f"folder must be set {use}, got None", hint='pass folder="RUN"')
    if source.in_memory:
        raise FederatedError(
            f"model and data must be paths, hub ids or URIs {use}, got objects in memory",
            hint="save the model and pass its folder: others have to load it again",
        )
