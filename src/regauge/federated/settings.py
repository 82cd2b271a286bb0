"""What a run of federated learning is a function of, beside its model, its data and what breaks on the way.

    settings = Settings(clients=4, rounds=10, strategy="fedadam", partition="dirichlet", alpha=0.5, steps=5)

Settings are plain JSON on their way to the nodes and in a run's folder: `told` and `read_settings`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from regauge.errors import RegaugeError
from regauge.keys import canonical
from regauge.split.optimizing import Training, TrainingError

VERSION = 1  # of settings, messages and run folders
STRATEGIES = ("fedavg", "fedprox", "fedadam", "matched")
PARTITIONS = ("iid", "dirichlet")
WEIGHTS = ("examples", "clients")


class FederatedError(RegaugeError):
    """A run that cannot be, or cannot go on."""


@dataclass(frozen=True)
class Settings:
    """Clients and rounds, how they are aggregated, what data each client has, and what a client does in a round.

    `asked` is the share of clients that a round asks, `least` how many must answer for it to count. A client takes `steps` local steps, or goes
    `epochs` times through its data where steps is 0; with `uneven` it takes fewer, by up to that share, drawn every round. `proximal` is FedProx's
    mu. `server_rate` is the server's step; by default 1, and 0.01 for fedadam. `jigsaw` is the ratio of masked jigsaw puzzles on the clients, 0 for
    none. With `independent` every client draws its own weights for its first round, and sends them whole. `drop` is the share of contributions that
    a run in one process loses on purpose. With `secure` the server sees their mean only (Flower's SecAgg+). `weigh` counts "examples" or "clients" in
    the mean.
    """

    clients: int
    rounds: int
    strategy: str = "fedavg"
    partition: str = "iid"
    alpha: float = 0.5
    asked: float = 1.0
    least: int = 1
    epochs: int = 1
    steps: int = 0
    batch: int = 32
    optimizer: str = "sgd"
    rate: float = 0.05
    momentum: float = 0.0
    decay: float = 0.0
    clip: float = 0.0
    proximal: float = 0.0
    uneven: float = 0.0
    server_rate: float | None = None
    weigh: str = "examples"
    jigsaw: float = 0.0
    probability: float = 0.5
    independent: bool = False
    secure: bool = False
    drop: float = 0.0
    defences: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        faults = [text for wrong, text in self._faults() if wrong]
        if not faults:
            try:
                self.training.build([torch.nn.Parameter(torch.zeros(1))])  # its rules are its own: it is asked before a run's folder is made
            except (ValueError, TrainingError) as error:
                faults.append(str(error))
        if faults:
            raise FederatedError("these settings cannot be:\n" + "\n".join(f"  {text}" for text in faults), hint="regauge federate --help")

    def _faults(self) -> list[tuple[bool, str]]:
        return [
            (self.clients < 1, f"{self.clients} clients are none"),
            (self.rounds < 1, f"{self.rounds} rounds are none"),
            (self.strategy not in STRATEGIES, f'there is no strategy "{self.strategy}": {", ".join(STRATEGIES)}'),
            (self.partition not in PARTITIONS, f'there is no partition "{self.partition}": {", ".join(PARTITIONS)}'),
            (self.weigh not in WEIGHTS, f'a mean does not weigh "{self.weigh}": {" or ".join(WEIGHTS)}'),
            (not 0 < self.alpha < math.inf, f"an alpha of {self.alpha:g} is no Dirichlet distribution's"),
            (not 0 < self.asked <= 1, f"a share of {self.asked:g} of the clients is not in (0, 1]"),
            (not 1 <= self.least <= max(self.clients, 1), f"{self.least} of {self.clients} clients cannot be the least"),
            (self.epochs < 1 and self.steps < 1, "a client takes no step: give epochs or steps"),
            (self.steps < 0, f"{self.steps} steps are none"),
            (self.batch < 1, f"a batch of {self.batch} is none"),
            (not 0 < self.rate < math.inf, f"{self.rate:g} is no rate"),
            (self.server_rate is not None and not 0 < self.server_rate < math.inf, f"{self.server_rate} is no rate of a server"),
            (not 0 <= self.proximal < math.inf, f"a mu of {self.proximal:g} is none"),
            (self.strategy == "fedprox" and self.proximal == 0, "fedprox without a mu is fedavg: give proximal, as 0.01"),
            (not 0 <= self.uneven < 1, f"uneven {self.uneven:g} is not in [0, 1)"),
            (not 0 <= self.drop < 1, f"a share of {self.drop:g} dropped is not in [0, 1)"),
            (not 0 <= self.jigsaw < 1, f"a ratio of {self.jigsaw:g} is not in [0, 1)"),
            (not 0 <= self.probability <= 1, f"a probability of {self.probability:g} is not in [0, 1]"),
            (self.secure and self.clients < 3, f"a secure sum of {self.clients} hides nothing: it takes 3"),
            (self.secure and self.independent, "weights of clients that begin apart must be seen one by one: leave out secure"),
            (self.strategy == "matched" and not self.independent, "matched is for clients that begin apart: set independent"),
        ]

    @property
    def training(self) -> Training:
        """The client's optimizer."""
        return Training(self.optimizer, self.rate, self.decay, self.momentum, clip=self.clip)

    def told(self) -> dict[str, Any]:
        """As JSON."""
        return {**asdict(self), "defences": list(self.defences)}

    @property
    def digest(self) -> str:
        """Of all but the number of rounds: a run may be made longer."""
        return hashlib.sha256(canonical({k: v for k, v in self.told().items() if k != "rounds"})).hexdigest()


def read_settings(given: Mapping[str, Any]) -> Settings:
    """Settings from JSON; what is not known is refused by name."""
    if not isinstance(given, Mapping):
        raise FederatedError(f"settings must be an object, got {given!r:.80}")
    unknown = sorted(given.keys() - {f.name for f in fields(Settings)})
    if unknown:
        raise FederatedError(f'there is no setting "{unknown[0]}" here', hint="is the other side's regauge newer?")
    try:
        return Settings(**{**given, "defences": tuple(given.get("defences", ()))})
    except TypeError as error:
        raise FederatedError(f"these settings cannot be read: {error}") from error
