"""What a run of federated learning is a function of, beside its model, its data and what breaks on
the way.

    settings = Settings(clients=4, rounds=10, strategy="fedadam", partition="dirichlet", alpha=0.5,
    steps=5)

Settings are plain JSON on their way to the nodes and in a run's folder: `told` and `read_settings`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from regauge.core.canonical import canonical_json
from regauge.errors import RegaugeError
from regauge.split.server.optimizer_config import OptimizerConfig, TrainingError

VERSION = 1  # of settings, messages and run folders
STRATEGIES = ("fedavg", "fedprox", "fedadam", "matched")
PARTITIONS = ("iid", "dirichlet")
WEIGHTS = ("examples", "clients")
AGGREGATIONS = ("mean", "median", "trimmed-mean", "clipped-mean")
RULES = ("aggregation", "trim", "clipping_norm")
LIMITS = ("max_examples", "max_norm", "norm_factor")  # of what counts: a run may go on with others


class FederatedError(RegaugeError):
    """A run that cannot be, or cannot go on."""


# Fields whose key in run folders, messages and digests differs from their name.
STORED_KEYS = {
    "participation": "asked",
    "min_clients": "least",
    "lr": "rate",
    "weight_decay": "decay",
    "step_jitter": "uneven",
    "server_lr": "server_rate",
}


@dataclass(frozen=True)
class Settings:
    """Clients and rounds, how they are aggregated, what data each client has, and what a client
    does in a round.

    `asked` is the share of clients that a round asks, `least` how many must answer for it to count.
    A client takes `steps` local steps, or goes `epochs` times through its data where steps is 0;
    with `uneven` it takes fewer, by up to that share, drawn every round. `proximal` is FedProx's
    mu. `server_rate` is the server's step; by default 1, and 0.01 for fedadam. `jigsaw` is the
    ratio of masked jigsaw puzzles on the clients, 0 for none. With `independent` every client draws
    its own weights for its first round, and sends them whole. `drop` is the share of contributions
    that a run in one process loses on purpose. With `secure` the server sees their mean only
    (Flower's SecAgg+). `weigh` counts "examples" or "clients" in the mean.

    The server's checks and its rule of aggregation (`validation`, `aggregating`):

    Args:
        aggregation: "mean"; "median" or "trimmed-mean" by coordinate, in which every client counts
        once; or "clipped-mean".
        trim: share of the values of a coordinate that trimmed-mean drops at each end; at least one
        of three or more.
        clipping_norm: norm that clipped-mean scales larger contributions down to; 0 takes the
        median norm of the round.
        max_examples: largest count of examples that a client may claim; 0 takes the largest part of
        the server's data.
        max_norm: largest norm of a contribution; 0 sets no absolute limit.
        norm_factor: largest norm of a contribution as a multiple of the round's median, from three
        contributions on; 0 switches it off.
    """

    clients: int
    rounds: int
    strategy: str = "fedavg"
    partition: str = "iid"
    alpha: float = 0.5
    participation: float = 1.0
    min_clients: int = 1
    epochs: int = 1
    steps: int = 0
    batch: int = 32
    optimizer: str = "sgd"
    lr: float = 0.05
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float = 0.0
    proximal: float = 0.0
    step_jitter: float = 0.0
    server_lr: float | None = None
    weigh: str = "examples"
    jigsaw: float = 0.0
    probability: float = 0.5
    independent: bool = False
    secure: bool = False
    drop: float = 0.0
    defences: tuple[str, ...] = ()
    seed: int = 0
    aggregation: str = "mean"
    trim: float = 0.2
    clipping_norm: float = 0.0
    max_examples: int = 0
    max_norm: float = 0.0
    norm_factor: float = 5.0

    def __post_init__(self) -> None:
        faults = [text for wrong, text in self._faults() if wrong]
        if not faults:
            try:
                self.training.build(
                    [torch.nn.Parameter(torch.zeros(1))]
                )  # its rules are its own: it is asked before a run's folder is made
            except (ValueError, TrainingError) as error:
                faults.append(str(error))
        if faults:
            raise FederatedError(
                "these settings cannot be:\n" + "\n".join(f"  {text}" for text in faults),
                hint="regauge federate --help",
            )

    def _faults(self) -> list[tuple[bool, str]]:
        return [
            (self.clients < 1, f"{self.clients} clients are none"),
            (self.rounds < 1, f"{self.rounds} rounds are none"),
            (
                self.strategy not in STRATEGIES,
                f'there is no strategy "{self.strategy}": {", ".join(STRATEGIES)}',
            ),
            (
                self.partition not in PARTITIONS,
                f'there is no partition "{self.partition}": {", ".join(PARTITIONS)}',
            ),
            (
                self.weigh not in WEIGHTS,
                f'a mean does not weigh "{self.weigh}": {" or ".join(WEIGHTS)}',
            ),
            (
                not 0 < self.alpha < math.inf,
                f"an alpha of {self.alpha:g} is no Dirichlet distribution's",
            ),
            (
                not 0 < self.participation <= 1,
                f"a share of {self.participation:g} of the clients is not in (0, 1]",
            ),
            (
                not 1 <= self.min_clients <= max(self.clients, 1),
                f"{self.min_clients} of {self.clients} clients cannot be the least",
            ),
            (self.epochs < 1 and self.steps < 1, "a client takes no step: give epochs or steps"),
            (self.steps < 0, f"{self.steps} steps are none"),
            (self.batch < 1, f"a batch of {self.batch} is none"),
            (not 0 < self.lr < math.inf, f"{self.lr:g} is no rate"),
            (
                self.server_lr is not None and not 0 < self.server_lr < math.inf,
                f"{self.server_lr} is no rate of a server",
            ),
            (not 0 <= self.proximal < math.inf, f"a mu of {self.proximal:g} is none"),
            (
                self.strategy == "fedprox" and self.proximal == 0,
                "fedprox without a mu is fedavg: give proximal, as 0.01",
            ),
            (not 0 <= self.step_jitter < 1, f"uneven {self.step_jitter:g} is not in [0, 1)"),
            (not 0 <= self.drop < 1, f"a share of {self.drop:g} dropped is not in [0, 1)"),
            (not 0 <= self.jigsaw < 1, f"a ratio of {self.jigsaw:g} is not in [0, 1)"),
            (
                not 0 <= self.probability <= 1,
                f"a probability of {self.probability:g} is not in [0, 1]",
            ),
            (
                self.secure and self.clients < 3,
                f"a secure sum of {self.clients} hides nothing: it takes 3",
            ),
            (
                self.secure and self.independent,
                "weights of clients that begin apart must be seen one by one: leave out secure",
            ),
            (
                self.strategy == "matched" and not self.independent,
                "matched is for clients that begin apart: set independent",
            ),
            *self._faults_of_checks(),
        ]

    def _faults_of_checks(self) -> list[tuple[bool, str]]:
        robust = self.aggregation != "mean"
        return [
            (
                self.aggregation not in AGGREGATIONS,
                f'aggregation must be one of {", ".join(AGGREGATIONS)}, got "{self.aggregation}"',
            ),
            (not 0 < self.trim < 0.5, f"trim must be in (0, 0.5), got {self.trim:g}"),
            (
                not 0 <= self.clipping_norm < math.inf,
                f"clipping_norm must be >= 0 and finite, got {self.clipping_norm:g}",
            ),
            (self.max_examples < 0, f"max_examples must be >= 0, got {self.max_examples}"),
            (
                not 0 <= self.max_norm < math.inf,
                f"max_norm must be >= 0 and finite, got {self.max_norm:g}",
            ),
            (
                self.norm_factor != 0 and not 1 < self.norm_factor < math.inf,
                f"norm_factor must be 0 or > 1 and finite, got {self.norm_factor:g}",
            ),
            (
                self.secure and robust,
                (
                    f'aggregation must be "mean" with secure sums, got "{self.aggregation}": the '
                    "server sees only their sum, not single contributions"
                ),
            ),
            (
                self.secure and self.max_norm > 0,
                (
                    f"max_norm must be 0 with secure sums, got {self.max_norm:g}: the server sees "
                    "only their sum, not single contributions"
                ),
            ),
            (
                self.independent and robust,
                (
                    f'aggregation must be "mean" with independent, got "{self.aggregation}": whole '
                    "weights are aligned with a running mean"
                ),
            ),
        ]

    @property
    def training(self) -> OptimizerConfig:
        """The client's optimizer."""
        return OptimizerConfig(
            self.optimizer, self.lr, self.weight_decay, self.momentum, clip=self.clip
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the settings under their stored keys."""
        values = {STORED_KEYS.get(name, name): value for name, value in asdict(self).items()}
        return {**values, "defences": list(self.defences)}

    @property
    def digest(self) -> str:
        """Of all but the number of rounds and the limits: a run may be made longer, or go on with
        others. Rules at their defaults are left out, so that runs from before there were any go on
        too.
        """
        left = {"rounds", *LIMITS} | {
            f.name for f in fields(self) if f.name in RULES and getattr(self, f.name) == f.default
        }
        return hashlib.sha256(
            canonical_json({k: v for k, v in self.to_dict().items() if k not in left})
        ).hexdigest()


def read_settings(given: Mapping[str, Any]) -> Settings:
    """Settings from JSON; what is not known is refused by name."""
    if not isinstance(given, Mapping):
        raise FederatedError(f"settings must be an object, got {given!r:.80}")
    stored = {f.name: STORED_KEYS.get(f.name, f.name) for f in fields(Settings)}
    unknown = sorted(given.keys() - set(stored.values()))
    if unknown:
        raise FederatedError(
            f'there is no setting "{unknown[0]}" here', hint="is the other side's regauge newer?"
        )
    kinds: dict[str, Any] = {
        "int": int,
        "float": float | int,
        "float | None": float | int | None,
        "str": str,
        "bool": bool,
    }
    for f in fields(Settings):
        key = stored[f.name]
        value = given.get(key, f.default)
        wanted = kinds.get(str(f.type))  # of defences there is none
        if (
            key in given
            and wanted
            and (not isinstance(value, wanted) or isinstance(value, bool) != (wanted is bool))
        ):
            raise FederatedError(
                f'the setting "{key}" must be of the type {f.type}, got {type(value).__name__}'
            )
    defences = given.get("defences", ())
    if not isinstance(defences, list | tuple) or not all(
        isinstance(text, str) for text in defences
    ):
        raise FederatedError('the setting "defences" must be a list of texts')
    try:
        values = {name: given[key] for name, key in stored.items() if key in given}
        return Settings(**{**values, "defences": tuple(defences)})
    except TypeError as error:
        raise FederatedError(f"these settings cannot be read: {error}") from error
