"""Federated learning: clients train on data that stay with them, a server averages what they send.
The core knows no engine.

    settings = Settings(clients=4, rounds=10)
    model = prepared(load_model("MODEL"), settings)
    kept = run(InProcess(model, parts_of(examples, settings), settings), state_of(model), settings)

`settings`, `partitions`, `states`, `clients`, `aggregating`, `rounds` and `keeping` are functions
and frozen data; `flower` is the one module that knows Flower, and nothing here imports it.
"""

from regauge.federated.aggregation import aggregate as aggregate
from regauge.federated.client import contribute as contribute
from regauge.federated.client import prepare_model as prepare_model
from regauge.federated.partitions import partition_examples as partition_examples
from regauge.federated.rounds import InProcess as InProcess
from regauge.federated.rounds import run as run
from regauge.federated.settings import FederatedError as FederatedError
from regauge.federated.settings import Settings as Settings
from regauge.federated.states import Contribution as Contribution
from regauge.federated.states import load_state as load_state
from regauge.federated.states import state_of as state_of
