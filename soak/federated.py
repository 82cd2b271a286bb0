"""Mutated contributions of federated clients, and mutated saved runs. The run must continue, and
its state must be that of the honest clients.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from regauge.errors import RegaugeError
from regauge.federated import Contribution, Settings, run_rounds, state_store
from regauge.federated.states import Absence, State, digest_of, layout_of, norm_of
from regauge.federated.validation import Limits
from soak.harness import Counter, Outcome, mutants

START: State = {
    "w": torch.linspace(-1, 1, 12).reshape(4, 3),
    "b": torch.zeros(3),
    "scale": torch.tensor(1.0),
}
DIGEST = digest_of(layout_of(START))
CLIENTS, ROUNDS, HOSTILE = 5, 3, 2
LIMITS = Limits(max_examples=100)
STRATEGIES, RULES = (
    ("fedavg", "fedprox", "fedadam"),
    ("mean", "median", "trimmed-mean", "clipped-mean"),
)
DTYPES = (
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
)
ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    10**12,
    10**400,
    10**5000,
    1.5,
    float("nan"),
    float("inf"),
    -float("inf"),
    1e308,
    "",
    "x" * 10**6,
    "\x1b[2J\ud800",
    b"bytes",
    [],
    [1],
    {},
    object(),
    torch.zeros(2),
    torch.tensor(3),
    np.zeros(3),
    np.int64(5),
    np.float32("nan"),
    lambda: 0,
)


def honest(client: int, number: int) -> Contribution:
    """Return the contribution of an honest client in a round."""
    rng = torch.Generator().manual_seed(1000 * number + client)
    tensors = {n: 0.1 * (1 + 0.1 * torch.randn(t.shape, generator=rng)) for n, t in START.items()}
    return Contribution(client, number, DIGEST, tensors, 50 + client, 1, 8, 0.1, 0.5)


def damage_tensors(tensors: State, rng: random.Random) -> Any:
    """Return tensors with one fault."""
    name = rng.choice(sorted(tensors, key=str))
    t = tensors[name]
    new: Any
    match rng.randrange(9):
        case 0:
            new = t.to(rng.choice(DTYPES))
        case 1:
            new = rng.choice(
                [
                    t[None],
                    torch.zeros(0),
                    torch.zeros(7, 5),
                    torch.zeros(()),
                    t.flatten()[:1],
                    t.expand(2, *t.shape),
                ]
            )
        case 2:
            new = torch.full_like(t, rng.choice([float("nan"), float("inf"), -float("inf")]))
        case 3:
            new = torch.full_like(t, rng.choice([-1, 1]) * 10.0 ** rng.uniform(0, 38.5))
        case 4:
            return {**tensors, rng.choice(["", "w.", "../w", "\x1b[0m", "n" * 10**5, "state/w"]): t}
        case 5:
            return rng.choice(
                [{}, {name: t}, None, list(tensors.values()), {name: t.tolist()}, {5: t}, "tensors"]
            )
        case 6:
            new = rng.choice([t.to_sparse(), t.to("meta"), t.clone().requires_grad_()])
        case 7:
            new = -(10.0 ** rng.uniform(-3, 3)) * t
        case _:
            return {n: 10.0 ** rng.uniform(-40, 38) * x for n, x in tensors.items()}
    return {**tensors, name: new}


def damage_contribution(c: Contribution, rng: random.Random) -> Any:
    """Return a contribution with one fault or more."""
    if rng.random() < 0.03:
        return rng.choice([*ODD, Absence(c.client, "x" * 10**5)])
    for _ in range(rng.choice((1, 1, 2))):
        if rng.random() < 0.5:
            has_tensors = (
                isinstance(c.tensors, dict)
                and c.tensors
                and all(isinstance(t, torch.Tensor) for t in c.tensors.values())
            )
            tensors = damage_tensors(c.tensors, rng) if has_tensors else rng.choice(ODD)
            c = replace(c, tensors=tensors)
        else:
            field = rng.choice(
                ("client", "round", "layout", "examples", "steps", "batch", "lr", "loss", "kind")
            )
            value = rng.choice((*ODD, 3, 100, "weights", DIGEST))
            # An engine identifies the client of a contribution, so no other client's number.
            if field != "client" or not (type(value) is int and 0 <= value < CLIENTS):
                c = replace(c, **{field: value})
    return c


class HostileEngine:
    """An engine with one client that sends damaged contributions, sometimes more than once."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def ask(
        self, number: int, clients: Sequence[int], state: State
    ) -> Iterable[Contribution | Absence]:
        contributions: list[Any] = [honest(c, number) for c in clients if c != HOSTILE]
        damaged: list[Any] = []
        for _ in range(self.rng.choice((1, 1, 3))):
            try:
                damaged.append(damage_contribution(honest(HOSTILE, number), self.rng))
            except (RuntimeError, TypeError, NotImplementedError):  # torch cannot make this one
                continue
        contributions += damaged
        self.rng.shuffle(contributions)
        return contributions


def run_survives(seed: int) -> bool:
    """Run with a hostile client. Return whether all rounds are complete, all honest clients
    contributed, and the state is within reach of an honest fifth client.
    """
    rng = random.Random(seed)
    settings = Settings(
        clients=CLIENTS,
        rounds=ROUNDS,
        strategy=rng.choice(STRATEGIES),
        proximal=0.1,
        aggregation=rng.choice(RULES),
    )
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) if seed % 10 == 0 else None
        result = run_rounds(HostileEngine(seed), START, settings, folder=folder, limits=LIMITS)
        if folder is not None:
            saved = state_store.load(folder)
            assert saved is not None
            json.dumps([r.absent for r in saved.history])
    others = {c for c in range(CLIENTS) if c != HOSTILE}
    complete = [r.number for r in result.history] == list(range(ROUNDS)) and all(
        others <= set(r.contributed) for r in result.history
    )
    tensors = {**result.state, **result.memory.tensors}
    sane = all(
        t.dtype == torch.float32 and bool(torch.isfinite(t).all()) and not t.requires_grad
        for t in tensors.values()
    )
    distance = norm_of({n: result.state[n] - t for n, t in START.items()})
    honest_norm = norm_of(honest(0, 0).tensors)
    # For the mean, a factor of 5 at a weight of at most 100 / (100 + 4 x 50).
    return complete and sane and distance <= ROUNDS * honest_norm * 4


def contributions(scale: float) -> Iterator[Outcome]:
    """Run with hostile clients, with damaged Flower replies, and from damaged folders."""
    count = Counter("federated contributions")
    for seed in range(max(1, int(10_000 * scale))):
        count.trial(partial(run_survives, seed), f"seed {seed}".encode())
    yield count.outcome()
    if find_spec("flwr") is not None:
        yield _replies(scale)
    yield _folders(scale)


def _replies(scale: float) -> Outcome:
    """Parse Flower messages with damaged records: each is a contribution or an absence."""
    from flwr.app import Array, ConfigRecord, Message, MetricRecord, RecordDict
    from flwr.supercore.task_identity import TaskIdentity

    from regauge.federated import flower

    TaskIdentity._run_id = TaskIdentity._node_id = TaskIdentity._task_id = 1  # messages need a run
    count = Counter("federated Flower replies")
    request = Message(RecordDict(), 1, "train")
    good = Array(np.zeros(3, np.float32))

    def trial(seed: int) -> bool:
        rng = random.Random(seed)
        content = flower.to_reply(honest(HOSTILE, 0))
        odd: tuple[Any, ...] = (
            -1,
            0,
            10**12,
            2**63 - 1,
            1.5,
            float("nan"),
            float("inf"),
            [1, 2],
            [0.5],
        )
        match rng.randrange(4):
            case 0:
                content["metrics"][
                    rng.choice(["num-examples", "steps", "batch", "rate", "loss"])
                ] = rng.choice(odd)
            case 1:
                content["about"][
                    rng.choice(["regauge", "client", "round", "layout", "kind", "refused"])
                ] = rng.choice((*odd, "x" * 10**5, b"x", True))
            case 2:
                data = next(mutants(good.data, seed, 1))
                content["arrays"]["b"] = Array(
                    rng.choice(["float32", "object", ""]),
                    (3,),
                    rng.choice(["numpy.ndarray", "x"]),
                    data,
                )
            case _:
                key = rng.choice(["arrays", "metrics", "about"])
                content[key] = rng.choice([MetricRecord({"a": 1}), ConfigRecord({"a": "b"})])

        class Once:
            def ask(
                self, number: int, clients: Sequence[int], state: State
            ) -> Iterable[Contribution | Absence]:
                return [
                    *(honest(c, 0) for c in clients if c != HOSTILE),
                    flower.from_reply(Message(content, reply_to=request), HOSTILE),
                ]

        result = run_rounds(Once(), START, Settings(clients=CLIENTS, rounds=1), limits=LIMITS)
        return len(result.history[0].contributed) >= CLIENTS - 1

    for seed in range(max(1, int(5_000 * scale))):
        count.trial(lambda seed=seed: trial(seed), f"seed {seed}".encode())  # type: ignore[misc]
    return count.outcome()


def _folders(scale: float) -> Outcome:
    """Load mutated files of a run: each loads with finite values, or raises one typed error."""
    count = Counter("federated run folders")
    settings = Settings(clients=CLIENTS, rounds=ROUNDS, strategy="fedadam")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        state_store.begin(folder, settings, DIGEST, {})
        run_rounds(HostileEngine(1), START, settings, folder=folder, limits=LIMITS)
        for name, focus in ((state_store.STATE_FILE, 2500), (state_store.RUN_FILE, None)):
            path = folder / name
            good = path.read_bytes()

            def read() -> bool:
                state_store.begin(folder, settings, DIGEST, {})
                saved = state_store.load(folder)
                return saved is not None and all(
                    bool(torch.isfinite(t).all()) for t in saved.state.values()
                )

            for data in mutants(good, seed=3, count=max(1, int(5_000 * scale)), focus=focus):
                path.write_bytes(data)
                count.trial(read, data)
            path.write_bytes(good)
            try:
                count.add("accepted" if read() else "lost")
            except RegaugeError as error:
                count.add("lost", str(error))
    return count.outcome()
