"""The settings of a run of federated learning.

    settings = Settings(clients=4, rounds=10, strategy="fedadam", partition="dirichlet", steps=5)

With model and data they determine a run, apart from failures. They are JSON in messages to nodes
and in the folder of a run: `Settings.to_dict` and `read_settings`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch

from regauge.core.canonical import canonical_json
from regauge.core.names import items_of
from regauge.data.optimizer_config import OptimizerConfig
from regauge.errors import FederatedError, Hint, TrainingError

VERSION = 1  # of settings, messages and run folders
STRATEGIES = ("fedavg", "fedprox", "fedadam", "matched")
PARTITIONS = ("iid", "dirichlet")
WEIGHTS = ("examples", "clients")
AGGREGATIONS = ("mean", "median", "trimmed-mean", "clipped-mean")
RULES = ("aggregation", "trim", "clipping_norm")
# Limits of valid contributions: a run may be resumed with others.
LIMITS = ("max_examples", "max_norm", "norm_factor")


# Learning rates of the clients by optimizer: of a trained model, and of one from scratch.
LEARNING_RATES = {"sgd": (0.005, 0.05), "adam": (1e-4, 1e-3), "adamw": (1e-4, 1e-3)}

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
    """The settings of a run.

    Args:
        clients: The number of clients.
        rounds: The number of rounds.
        strategy: One of `STRATEGIES`.
        partition: One of `PARTITIONS`.
        alpha: The concentration of the Dirichlet partition.
        participation: The share of clients that is selected in a round.
        min_clients: Contributions that a round needs to count.
        epochs: Local epochs of a round, if `steps` is 0.
        steps: Local steps of a round.
        batch: Examples of a local step.
        optimizer: The optimizer of the clients.
        lr: Its learning rate. None: by the optimizer, and ten times larger for a model that is
            trained from scratch (`LEARNING_RATES`); sgd multiplies it by 1 - momentum.
        momentum: Its momentum, for sgd.
        weight_decay: Its weight decay.
        clip: The maximum gradient norm of a local step; 0 for none.
        proximal: FedProx's mu.
        step_jitter: A client skips up to this share of its steps, sampled every round.
        server_lr: The server's learning rate; None: 1, and 0.01 for fedadam.
        weigh: Whether "examples" or "clients" count in the mean.
        jigsaw: The ratio of masked jigsaw puzzles on the clients; 0 for none.
        probability: The probability of a puzzle in a step.
        independent: Whether every client initializes its own weights in its first round, and sends
            them whole.
        secure: Whether the server sees only the mean of contributions (Flower's SecAgg+).
        drop: The share of contributions that a run in one process drops at random.
        defences: The defences of the clients; a string is one of them.
        seed: The random seed.
        aggregation: "mean"; "median" or "trimmed-mean" by coordinate, in which every client counts
            once; or "clipped-mean".
        trim: The share of the values of a coordinate that trimmed-mean drops at each end; at least
            one of three or more.
        clipping_norm: The norm to which clipped-mean scales larger contributions down; 0: the
            median norm of the round.
        max_examples: The largest number of examples that a client may claim; 0: the largest part
            of the server's data.
        max_norm: The largest norm of a contribution; 0: no absolute limit.
        norm_factor: The largest norm of a contribution as a multiple of the round's median, from
            three contributions on; 0: no limit.

    Raises:
        FederatedError: Settings are invalid; the message lists all faults.

    Example:
        >>> settings = regauge.federated.Settings(clients=4, rounds=10, lr=0.1, secure=False)
        >>> trained = regauge.federated.run(vit, images, settings=settings, rounds=1, test=images)
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
    optimizer: str = "adamw"
    lr: float | None = None
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float = 1.0
    proximal: float = 0.0
    step_jitter: float = 0.0
    server_lr: float | None = None
    weigh: str = "examples"
    jigsaw: float = 0.0
    probability: float = 0.5
    independent: bool = False
    secure: bool = False
    drop: float = 0.0
    defences: Sequence[str] = ()
    seed: int = 0
    aggregation: str = "mean"
    trim: float = 0.2
    clipping_norm: float = 0.0
    max_examples: int = 0
    max_norm: float = 0.0
    norm_factor: float = 5.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "defences", tuple(items_of(self.defences)))
        faults = [text for wrong, text in self._faults() if wrong]
        if not faults:
            try:
                # Validates lr, weight_decay and momentum before a folder is created.
                self.training.build([torch.nn.Parameter(torch.zeros(1))])
            except (ValueError, TrainingError) as error:
                faults.append(str(error))
        if faults:
            raise FederatedError(
                "invalid settings:\n" + "\n".join(f"  {text}" for text in faults),
                hint=Hint(
                    "help(regauge.federated.Settings) describes each",
                    cli="regauge federate --help describes each",
                ),
            )

    def _faults(self) -> list[tuple[bool, str]]:
        return [
            (self.clients < 1, f"clients must be >= 1, got {self.clients}"),
            (self.rounds < 1, f"rounds must be >= 1, got {self.rounds}"),
            (
                self.strategy not in STRATEGIES,
                f'strategy must be one of {", ".join(STRATEGIES)}, got "{self.strategy}"',
            ),
            (
                self.partition not in PARTITIONS,
                f'partition must be one of {", ".join(PARTITIONS)}, got "{self.partition}"',
            ),
            (
                self.weigh not in WEIGHTS,
                f'weigh must be {" or ".join(WEIGHTS)}, got "{self.weigh}"',
            ),
            (
                not 0 < self.alpha < math.inf,
                f"alpha must be > 0 and finite, got {self.alpha:g}",
            ),
            (
                not 0 < self.participation <= 1,
                f"participation must be in (0, 1], got {self.participation:g}",
            ),
            (
                not 1 <= self.min_clients <= max(self.clients, 1),
                f"min_clients must be between 1 and {self.clients}, got {self.min_clients}",
            ),
            (
                self.epochs < 1 and self.steps < 1,
                f"epochs must be >= 1 without steps, got {self.epochs}",
            ),
            (
                self.momentum > 0 and self.optimizer in ("adam", "adamw"),
                f"momentum must be 0 with {self.optimizer}, got {self.momentum:g}: only sgd has it",
            ),
            (self.steps < 0, f"steps must be >= 0, got {self.steps}"),
            (self.batch < 1, f"batch must be >= 1, got {self.batch}"),
            (
                self.lr is not None and not 0 < self.lr < math.inf,
                f"lr must be > 0 and finite, got {self.lr}",
            ),
            (
                self.server_lr is not None and not 0 < self.server_lr < math.inf,
                f"server_lr must be > 0 and finite, got {self.server_lr}",
            ),
            (
                not 0 <= self.proximal < math.inf,
                f"proximal must be >= 0 and finite, got {self.proximal:g}",
            ),
            (
                self.strategy == "fedprox" and self.proximal == 0,
                "proximal must be > 0 for fedprox, got 0: set, for example, 0.01",
            ),
            (
                not 0 <= self.step_jitter < 1,
                f"step_jitter must be in [0, 1), got {self.step_jitter:g}",
            ),
            (not 0 <= self.drop < 1, f"drop must be in [0, 1), got {self.drop:g}"),
            (not 0 <= self.jigsaw < 1, f"jigsaw must be in [0, 1), got {self.jigsaw:g}"),
            (
                not 0 <= self.probability <= 1,
                f"probability must be in [0, 1], got {self.probability:g}",
            ),
            (
                self.secure and self.clients < 3,
                f"clients must be >= 3 for secure sums, got {self.clients}",
            ),
            (
                self.secure and self.independent,
                "secure must not be set with independent: the server aligns single clients",
            ),
            (
                self.strategy == "matched" and not self.independent,
                "independent must be set for the strategy matched",
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
    def learning_rate(self) -> float:
        """The learning rate of the clients, with its default for a trained model."""
        return float(self.with_learning_rate(from_scratch=self.independent).lr or 0.0)

    def with_learning_rate(self, *, from_scratch: bool) -> Settings:
        """Return the settings with a learning rate: their own, or its default.

        Args:
            from_scratch: Whether training starts from random weights.
        """
        if self.lr is not None or self.optimizer not in LEARNING_RATES:
            return self
        trained, scratch = LEARNING_RATES[self.optimizer]
        share = 1 - self.momentum if self.optimizer == "sgd" else 1.0
        return replace(self, lr=(scratch if from_scratch else trained) * share)

    @property
    def training(self) -> OptimizerConfig:
        """The client's optimizer."""
        return OptimizerConfig(
            self.optimizer, self.learning_rate, self.weight_decay, self.momentum, clip=self.clip
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the settings under their stored keys."""
        values = {STORED_KEYS.get(name, name): value for name, value in asdict(self).items()}
        return {**values, "defences": list(self.defences)}

    @property
    def digest(self) -> str:
        """The digest of all settings that must not change when a run is resumed.

        The number of rounds and the limits may. Aggregation rules with default values are left out,
        so that runs of versions without them can be resumed.
        """
        excluded = {"rounds", *LIMITS} | {
            f.name for f in fields(self) if f.name in RULES and getattr(self, f.name) == f.default
        }
        return hashlib.sha256(
            canonical_json({k: v for k, v in self.to_dict().items() if k not in excluded})
        ).hexdigest()


def read_settings(document: Mapping[str, Any]) -> Settings:
    """Parse settings from JSON.

    Raises:
        FederatedError: A setting is unknown, of the wrong type, or invalid.
    """
    if not isinstance(document, Mapping):
        raise FederatedError(f"settings must be an object, got {document!r:.80}")
    stored = {f.name: STORED_KEYS.get(f.name, f.name) for f in fields(Settings)}
    unknown = sorted(document.keys() - set(stored.values()))
    if unknown:
        raise FederatedError(
            f'unknown setting "{unknown[0]}"', hint="the other side may have a newer regauge"
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
        value = document.get(key, f.default)
        expected = kinds.get(str(f.type))  # None for defences
        if (
            key in document
            and expected
            and (not isinstance(value, expected) or isinstance(value, bool) != (expected is bool))
        ):
            raise FederatedError(
                f'the setting "{key}" must be of the type {f.type}, got {type(value).__name__}'
            )
    defences = document.get("defences", ())
    if not isinstance(defences, list | tuple) or not all(
        isinstance(text, str) for text in defences
    ):
        raise FederatedError('the setting "defences" must be a list of texts')
    try:
        values = {name: document[key] for name, key in stored.items() if key in document}
        return Settings(**{**values, "defences": tuple(defences)})
    except TypeError as error:
        raise FederatedError(f"invalid settings: {error}") from error
