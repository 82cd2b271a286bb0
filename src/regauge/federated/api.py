"""`run`: federated learning on what users hold, on every engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from regauge.checkpoints.reader import Checkpoint
from regauge.core.options import require_device, resolve_options
from regauge.core.progress import Progress
from regauge.core.threads import within_threads
from regauge.data.tasks import Examples
from regauge.errors import FederatedError
from regauge.federated.deployment import FlowerOptions, submit
from regauge.federated.outputs import FederatedRun
from regauge.federated.rounds import describe_round
from regauge.federated.runs import Source, run_federated
from regauge.federated.settings import Settings
from regauge.federated.state_store import Round
from regauge.models.load import load_model

if TYPE_CHECKING:
    from regauge.models import sources

ENGINES = ("process", "simulation", "deployment")


@within_threads
def run(
    model: sources.Source,
    data: str | Examples,
    *,
    clients: int | None = None,
    rounds: int | None = None,
    strategy: str | None = None,
    aggregation: str | None = None,
    settings: Settings | None = None,
    folder: str | Path | None = None,
    test: str | Examples | None = None,
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
        data: Labelled examples to partition among the clients, or their URI.
        clients: The number of clients; like the next three, in place of that of the settings.
        rounds: The number of rounds. A larger number extends a finished run.
        strategy: The rule from contributions to the next model: "fedavg", "fedprox", "fedadam" or
            "matched", which aligns clients with different initialisations.
        aggregation: The rule that combines contributions: "mean", "median", "trimmed-mean" or
            "clipped-mean".
        settings: All settings: partition, local training, defences, secure sums, limits, seed.
        folder: The folder of the run. An existing one is resumed. None: nothing is saved.
        test: The test data of the server; None: a tenth of the data, withheld from the clients.
        engine: "process", or Flower's "simulation" or "deployment".
        flower: Options of Flower's engines.
        record: Whether to record what the server receives in the folder, for audits.
        facts: Further facts for the description of the run.
        progress: The progress callback, called with the round and a description of it.
        reading: How model and data are read; the further fields of `runs.Source`: `split`,
            `fields`, `tokenizer`, `length`, `mean`, `std`, `test_split`, `fresh`, `device`.

    Returns:
        The run, with `model`, `history`, `save(folder)` and `to_html()`.

    Raises:
        FederatedError: Settings are invalid or contradict each other, the folder holds another run,
            or a round is void too often. What was finished is in the folder.

    Example:
        >>> trained = regauge.federated.run(vit, images, clients=2, rounds=1, test=images)
        >>> trained.history[-1].contributed
        (0, 1)
        >>> trained.save("trained")
    """
    chosen = _choose_settings(settings, clients, rounds, strategy, aggregation)
    source = _open_source(model, data, test, reading)
    require_device(source.device)
    place, options = (
        None if folder is None else Path(folder),
        resolve_options(flower, FlowerOptions()),
    )
    _require_engine(engine, source, place, record)

    def on_round(finished: Round) -> None:
        if progress is not None:
            progress(finished.number, chosen.rounds, describe_round(finished))

    if place is None or engine == "process":
        return run_federated(source, chosen, place, on_round=on_round, record=record, about=facts)
    if engine == "simulation":
        from regauge.federated.flower import simulate

        return simulate(
            source,
            chosen,
            place,
            on_round=on_round,
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
    data: str | Examples,
    test: str | Examples | None,
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
    return Source(
        type(model).__name__ if "module" in memory else str(model),
        f"{len(data)} examples in memory" if isinstance(data, Examples) else data,
        test=f"{len(test)} examples in memory" if isinstance(test, Examples) else test,
        **memory,
        **reading,
    )


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
