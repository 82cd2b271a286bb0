"""Split training compared with training in one place: a check of the fourth chapter."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from regauge.demo.context import DemoContext
from regauge.demo.digits import LR, accuracy, load_images, make_vit, train
from regauge.results.findings import Finding, Table

EPOCHS, DIGITS, TOLERANCE = 1, 1000, 1e-9


def check_split_training(context: DemoContext) -> tuple[tuple[Finding, ...], Table]:
    """Train a ViT with its backbone on a server, and compare it with training in one place."""
    from regauge import apply, element, spec_of
    from regauge.split import Host, OptimizerConfig, connect

    images, labels = load_images()
    images, labels = images[:DIGITS], labels[:DIGITS]
    plain = make_vit(context.seed + 30)
    client_model, server_model = copy.deepcopy(plain), copy.deepcopy(plain)
    g = element(spec_of(plain), context.seed + 31, within="permutation")
    server_model.load_state_dict(apply(g, plain.state_dict(), part="backbone"))
    order = context.seed + 32
    with context.bar("train in one place") as progress:
        expected = train(plain, images, labels, order, progress, EPOCHS, decay=False)
    host = Host(server_model, OptimizerConfig("adamw", LR, weight_decay=0.01))
    with _serve(host) as network, connect(client_model, network, element=g, rows="batch"):
        with context.bar("train with the backbone on a server") as progress:
            losses = train(client_model, images, labels, order, progress, EPOCHS, decay=False)
        client_model.float()
    plain.float()
    state: dict[str, Any] = {**client_model.state_dict(), **host.backbone()}
    joined = copy.deepcopy(plain)
    accuracies = {"trained in one place": accuracy(plain, context.test)}
    joined.load_state_dict(state)
    accuracies["both parts, without the key"] = accuracy(joined, context.test)
    joined.load_state_dict(apply(~g, state, part="backbone"))
    accuracies["both parts, with the key"] = accuracy(joined, context.test)
    error = max(abs(a - b) / expected[0] for a, b in zip(losses, expected, strict=True))
    findings = (
        Finding(
            "split/trained",
            "Split training, with channels permuted and tokens shuffled, follows the losses of a "
            "training in one place.",
            error <= TOLERANCE and host.step == len(expected),
            error,
            TOLERANCE,
            1.0,
            f"{len(expected)} steps of AdamW in float64, off by {error:.0e} of the first loss",
            "permutation equivariance, Alg. 1",
        ),
        Finding(
            "split/joined",
            "Joined and restored by the key, the two parts are as accurate as the model that was "
            "trained in one place.",
            accuracies["both parts, with the key"] == accuracies["trained in one place"],
            accuracies["both parts, with the key"],
            accuracies["both parts, without the key"],
            accuracies["trained in one place"],
            "the same number of digits is classified correctly",
            measure="accuracy",
        ),
    )
    note = f"{len(expected)} steps. Features and gradients are obfuscated, not encrypted."
    columns = ("", "accuracy")
    table = Table("A ViT whose backbone is on a server", columns, tuple(accuracies.items()), note)
    return findings, table


@contextmanager
def _serve(host: Any) -> Iterator[Any]:
    """Yield a connection to the host: mutual TLS over loopback, or in one process without gRPC."""
    if find_spec("grpc") is None:
        from regauge.split import InProcess

        yield InProcess(host)
        return
    from regauge.split.protocol.certificates import make_certificates
    from regauge.split.server.network import Grpc, Server

    with tempfile.TemporaryDirectory(prefix="regauge-certs-") as folder:
        tls = make_certificates(folder, clients=("ann",))
        with (
            Server(host, tls=tls["server"], clients=["ann"]) as server,
            Grpc(f"localhost:{server.port}", tls=tls["ann"]) as network,
        ):
            yield network
