"""Who has which examples: rows of a data set, dealt to clients by a seed.

`iid` deals them out evenly. `dirichlet` draws for every class how it is shared among the clients
(Hsu et al. 2019): with a small alpha a client has few classes, and some clients may have nothing at
all. A partition is a function of labels, seed and settings, so that every node can compute its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from regauge.data.tasks import Examples
from regauge.federated.settings import FederatedError, Settings

Rows = Any  # an array of numbers


def iid(count: int, clients: int, seed: int) -> list[Rows]:
    """Even parts: sizes differ by one at most."""
    order = np.random.default_rng([seed, 101]).permutation(count)
    return [np.sort(part) for part in np.array_split(order, clients)]


def dirichlet(labels: Sequence[int], clients: int, alpha: float, seed: int) -> list[Rows]:
    """Each class is shared out by one draw of a Dirichlet distribution. Every row is somebody's;
    parts may be empty.
    """
    given = np.asarray(labels)
    draw = np.random.default_rng([seed, 102])
    parts: list[list[int]] = [[] for _ in range(clients)]
    for kind in np.unique(given):
        rows = draw.permutation(np.flatnonzero(given == kind))
        cuts = np.round(np.cumsum(draw.dirichlet(np.full(clients, alpha)))[:-1] * len(rows)).astype(
            int
        )
        for part, some in zip(parts, np.split(rows, cuts), strict=True):
            part.extend(some.tolist())
    return [np.sort(np.asarray(part, np.int64)) for part in parts]


def class_labels(examples: Examples, batch: int = 1024) -> Rows:
    """The class of every example. Only its labels are looked at; several answers to each are no
    class.
    """
    if examples.multi_label or examples.dense or examples.causal or examples.tokens:
        raise FederatedError(
            "a Dirichlet partition goes by classes, and these examples have not one each",
            hint="use the partition iid",
        )
    return np.concatenate(
        [
            examples.batch(np.arange(i, min(i + batch, len(examples))))[1].numpy()
            for i in range(0, len(examples), batch)
        ]
    )


def partition_examples(examples: Examples, settings: Settings) -> list[Examples]:
    """The examples of each client."""
    if settings.clients > len(examples):
        raise FederatedError(
            f"{settings.clients} clients cannot share {len(examples)} examples",
            hint="give more data, or fewer clients",
        )
    if settings.partition == "iid":
        rows = iid(len(examples), settings.clients, settings.seed)
    else:
        rows = dirichlet(class_labels(examples), settings.clients, settings.alpha, settings.seed)
    return [examples.only(part) for part in rows]
