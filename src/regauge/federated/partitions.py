"""Partitions of a data set among clients, by a seed.

`iid` makes even parts. `dirichlet` samples the shares of the clients in each class (Hsu et al.
2019): with a small alpha a client has few classes, and some clients may have no example. A
partition depends only on labels, seed and settings, so that every node can compute its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from regauge.data.tasks import Examples
from regauge.errors import FederatedError
from regauge.federated.settings import Settings

Rows = Any  # an array of indices


def iid(count: int, clients: int, seed: int) -> list[Rows]:
    """Return even parts: sizes differ by at most one."""
    order = np.random.default_rng([seed, 101]).permutation(count)
    return [np.sort(part) for part in np.array_split(order, clients)]


def dirichlet(labels: Sequence[int], clients: int, alpha: float, seed: int) -> list[Rows]:
    """Divide each class by a sample of a Dirichlet distribution; parts may be empty."""
    classes = np.asarray(labels)
    rng = np.random.default_rng([seed, 102])
    parts: list[list[int]] = [[] for _ in range(clients)]
    for label in np.unique(classes):
        rows = rng.permutation(np.flatnonzero(classes == label))
        cuts = np.round(np.cumsum(rng.dirichlet(np.full(clients, alpha)))[:-1] * len(rows)).astype(
            int
        )
        for part, indices in zip(parts, np.split(rows, cuts), strict=True):
            part.extend(indices.tolist())
    return [np.sort(np.asarray(part, np.int64)) for part in parts]


def class_labels(examples: Examples, batch: int = 1024) -> Rows:
    """Return the class of every example.

    Raises:
        FederatedError: Examples do not have one class each.
    """
    if examples.multi_label or examples.dense or examples.causal or examples.tokens:
        raise FederatedError(
            "examples of a Dirichlet partition must have one class each",
            hint="use the partition iid",
        )
    return np.concatenate(
        [
            examples.batch(np.arange(i, min(i + batch, len(examples))))[1].numpy()
            for i in range(0, len(examples), batch)
        ]
    )


def partition_examples(examples: Examples, settings: Settings) -> list[Examples]:
    """Return the examples of each client.

    Args:
        examples: The examples of all clients.
        settings: The settings of the run.

    Returns:
        The examples, one entry for each client.

    Raises:
        FederatedError: There are fewer examples than clients.

    Example:
        >>> settings = regauge.federated.Settings(clients=4, rounds=1)
        >>> [len(part) for part in regauge.federated.partition_examples(images, settings)]
        [25, 25, 25, 25]
    """
    if settings.clients > len(examples):
        raise FederatedError(
            f"examples must be >= {settings.clients}, one for each client, got {len(examples)}",
            hint="pass more data, or fewer clients",
        )
    if settings.partition == "iid":
        rows = iid(len(examples), settings.clients, settings.seed)
    else:
        rows = dirichlet(class_labels(examples), settings.clients, settings.alpha, settings.seed)
    return [examples.only(part) for part in rows]
