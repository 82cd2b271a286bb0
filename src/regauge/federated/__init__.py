"""Federated learning: clients train on their own data, a server aggregates their contributions.

    settings = Settings(clients=4, rounds=10)
    model = prepare_model(load_model("MODEL"), settings)
    engine = InProcess(model, partition_examples(examples, settings), settings)
    run_state = run(engine, state_of(model), settings)

The core does not depend on an engine: `settings`, `partitions`, `states`, `client`, `aggregation`,
`rounds` and `state_store` are functions and frozen data. `flower` and `flower_secure` are the only
modules that import Flower, and nothing here imports them.
"""

from regauge.errors import FederatedError as FederatedError
from regauge.federated.aggregation import aggregate as aggregate
from regauge.federated.client import contribute as contribute
from regauge.federated.client import prepare_model as prepare_model
from regauge.federated.partitions import partition_examples as partition_examples
from regauge.federated.rounds import InProcess as InProcess
from regauge.federated.rounds import run as run
from regauge.federated.settings import Settings as Settings
from regauge.federated.states import Contribution as Contribution
from regauge.federated.states import load_state as load_state
from regauge.federated.states import state_of as state_of
