"""Federated learning: clients train on their own data, a server aggregates their contributions.

    trained = run("MODEL", "digits", clients=4, rounds=10, strategy="fedadam", folder="RUN")
    trained.model, trained.history

`run` is the whole of it. Below, the core does not depend on an engine: `settings`, `partitions`,
`states`, `client`, `aggregation`, `rounds` and `state_store` are functions and frozen data:

    settings = Settings(clients=4, rounds=10)
    model = prepare_model(load_model("MODEL"), settings)
    engine = InProcess(model, partition_examples(examples, settings), settings)
    run_state = run_rounds(engine, state_of(model), settings)

`flower` and `flower_secure` are the only modules that import Flower, and they are imported only by
a run on its engines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from regauge.core.lazy import lazy_names

if TYPE_CHECKING:
    from regauge.errors import FederatedError as FederatedError
    from regauge.federated.aggregation import aggregate as aggregate
    from regauge.federated.api import run as run
    from regauge.federated.client import contribute as contribute
    from regauge.federated.client import prepare_model as prepare_model
    from regauge.federated.deployment import FlowerOptions as FlowerOptions
    from regauge.federated.outputs import FederatedRun as FederatedRun
    from regauge.federated.partitions import partition_examples as partition_examples
    from regauge.federated.rounds import InProcess as InProcess
    from regauge.federated.rounds import run_rounds as run_rounds
    from regauge.federated.settings import Settings as Settings
    from regauge.federated.states import Contribution as Contribution
    from regauge.federated.states import load_state as load_state
    from regauge.federated.states import state_of as state_of

_HOME = {
    "Contribution": "federated.states",
    "FederatedError": "errors",
    "FederatedRun": "federated.outputs",
    "FlowerOptions": "federated.deployment",
    "InProcess": "federated.rounds",
    "Settings": "federated.settings",
    "aggregate": "federated.aggregation",
    "contribute": "federated.client",
    "load_state": "federated.states",
    "partition_examples": "federated.partitions",
    "prepare_model": "federated.client",
    "run": "federated.api",
    "run_rounds": "federated.rounds",
    "state_of": "federated.states",
}

__all__ = sorted(_HOME)
__getattr__, __dir__ = lazy_names(__name__, _HOME)
