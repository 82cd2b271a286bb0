"""One hostile client of eight: test accuracy under attacks, without checks, with the default
checks, and with each robust rule by itself; and the spread of the norms of honest clients, on which
the default of `norm_factor` is based.

    python -m benchmarks hostile          # some minutes; digits, a perceptron, three seeds

The hostile client trains honestly and then changes what it sends, in every round. "No checks" and
the robust rules bypass `validation`: they show what a rule does by itself. A table in
docs/guides/federated.md quotes the output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from regauge.data.tasks import Examples
from regauge.federated import (
    Contribution,
    InProcess,
    Settings,
    partition_examples,
    run_rounds,
    state_of,
)
from regauge.federated.aggregation import COMBINE, DEFAULT_LRS, STEPS, Memory
from regauge.federated.runs import make_measure, server_limits
from regauge.federated.states import Absence, State, norm_of
from regauge.federated.validation import expected_norms
from regauge.results.findings import spread_of

SEEDS, HOSTILE = (0, 1, 2), 7
SETTINGS = Settings(clients=8, rounds=10, batch=16, optimizer="sgd", lr=0.05, momentum=0.9)
RULES = ("mean", "median", "trimmed-mean", "clipped-mean")
Change = Callable[[Contribution], Contribution]


def scale(by: float) -> Change:
    return lambda c: replace(c, tensors={n: by * t for n, t in c.tensors.items()})


def noise(c: Contribution) -> Contribution:
    """Send Gaussian noise of the honest norm, and claim 10**12 examples."""
    generator = torch.Generator().manual_seed(c.round)
    normals = {n: torch.randn(t.shape, generator=generator) for n, t in c.tensors.items()}
    scale = norm_of(c.tensors) / norm_of(normals)
    return replace(c, tensors={n: scale * t for n, t in normals.items()}, examples=10**12)


def huge(c: Contribution) -> Contribution:
    return replace(c, tensors={n: torch.full_like(t, 3e38) for n, t in c.tensors.items()})


ATTACKS: Mapping[str, tuple[str, Change | None]] = {
    "none": ("fedavg", None),
    "noise, claims 10^12 examples": ("fedavg", noise),
    "sign-flipped x10": ("fedavg", scale(-10.0)),
    "sign-flipped x4, near the norm limit": ("fedavg", scale(-4.0)),
    "every value 3e38": ("fedavg", huge),
    "none, FedAdam": ("fedadam", None),
    "every value 3e38, FedAdam": ("fedadam", huge),
}


class Attacked(InProcess):
    """Clients in this process, one of which changes its contributions."""

    attack: Change | None = None

    def ask(
        self, number: int, clients: Sequence[int], state: State
    ) -> Iterable[Contribution | Absence]:
        for c in super().ask(number, clients, state):
            yield (
                self.attack(c)
                if self.attack and isinstance(c, Contribution) and c.client == HOSTILE
                else c
            )


class Perceptron(torch.nn.Module):
    """64 pixels, 64 hidden units, 10 classes: small, so that 105 runs take minutes."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = torch.nn.Linear(64, 64), torch.nn.Linear(64, 10)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(pixel_values.flatten(1)).relu())


def model_of(seed: int) -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Perceptron().eval()


def digits(split: str) -> Examples:
    from regauge.data.datasets import open_data

    data = open_data("digits", split=split).fields
    images = (torch.from_numpy(data["image"]).float().reshape(-1, 1, 8, 8) / 255 - 0.3) / 0.38
    labels = torch.from_numpy(data["label"]).long()
    return Examples(len(labels), 10, lambda rows: ({"pixel_values": images[rows]}, labels[rows]))


def unchecked(engine: Attacked, state: State, settings: Settings) -> State:
    """Run all rounds without checks of contributions or of the result."""
    memory, lr = Memory(), DEFAULT_LRS.get(settings.strategy, 1.0)
    for number in range(settings.rounds):
        sent = [
            c
            for c in engine.ask(number, range(settings.clients), state)
            if isinstance(c, Contribution)
        ]
        state, memory = STEPS[settings.strategy](
            state, COMBINE[settings.aggregation](sent, settings), memory, lr
        )
    return state


def accuracy(
    attack: str, rule: str, checks: bool, seed: int, train: Examples, test: Examples
) -> float:
    """Return the test accuracy after a run under an attack."""
    strategy, change = ATTACKS[attack]
    settings = replace(SETTINGS, strategy=strategy, aggregation=rule, seed=seed)
    model = model_of(seed)
    engine, state = Attacked(model, partition_examples(train, settings), settings), state_of(model)
    engine.attack = change
    if checks:
        after = run_rounds(
            engine, state, settings, limits=server_limits(model, train, settings)
        ).state
    else:
        after = unchecked(engine, state, settings)
    return float(make_measure(model, test)(after)["accuracy"])


HONEST: Mapping[str, Mapping[str, Any]] = {
    "even parts, momentum": {},
    "even parts, SGD": {"momentum": 0.0},
    "even parts, AdamW": {"momentum": 0.0, "optimizer": "adamw", "lr": 2e-3},
    "Dirichlet 0.3, momentum": {"partition": "dirichlet", "alpha": 0.3},
    "Dirichlet 0.1, momentum": {"partition": "dirichlet", "alpha": 0.1},
    "Dirichlet 0.1, AdamW": {
        "partition": "dirichlet",
        "alpha": 0.1,
        "momentum": 0.0,
        "optimizer": "adamw",
        "lr": 2e-3,
    },
    "Dirichlet 0.1, 2 to 8 steps": {
        "partition": "dirichlet",
        "alpha": 0.1,
        "steps": 8,
        "step_jitter": 0.8,
    },
    "Dirichlet 0.05, 20 clients": {"partition": "dirichlet", "alpha": 0.05, "clients": 20},
}


def largest_ratio(overrides: Mapping[str, Any], train: Examples) -> float:
    """Return the largest norm of an honest contribution, as a multiple of the norm that
    `validation` compares it with.
    """
    settings, model = replace(SETTINGS, **overrides), model_of(0)
    ratios: list[float] = []

    def record(number: int, state: State, sent: Sequence[Contribution]) -> None:
        expected = expected_norms(sent)
        ratios.extend(norm_of(c.tensors) / expected[c.client] for c in sent if c.client in expected)

    run_rounds(
        InProcess(model, partition_examples(train, settings), settings),
        state_of(model),
        replace(settings, norm_factor=0.0),
        recorder=record,
    )
    return max(ratios)


def main() -> int:
    torch.set_num_threads(1)
    train, test = digits("train"), digits("test")
    print(
        "largest norm of an honest contribution, as a multiple of the expected one of its round",
        flush=True,
    )
    for name, overrides in HONEST.items():
        print(f"{name}: {largest_ratio(overrides, train):.2f}", flush=True)
    columns = [
        ("mean, no checks", "mean", False),
        ("mean, default checks", "mean", True),
        *((rule, rule, False) for rule in RULES[1:]),
    ]
    print(
        f"accuracy in %, mean (standard deviation) of {len(SEEDS)} seeds; {SETTINGS.clients} "
        f"clients, {SETTINGS.rounds} rounds",
        flush=True,
    )
    print(
        f"| the hostile client sends | {' | '.join(name for name, _, _ in columns)} "
        f"|\n|---|{'---|' * len(columns)}",
        flush=True,
    )
    for attack in ATTACKS:
        cells = []
        for _, rule, checks in columns:
            scores = [100 * accuracy(attack, rule, checks, seed, train, test) for seed in SEEDS]
            cells.append(f"{sum(scores) / len(scores):.1f} ({spread_of(scores):.1f})")
        print(f"| {attack} | {' | '.join(cells)} |", flush=True)
    return 0
