"""A chapter on split learning: the backbone on a server; digits, labels, embedding and head with a
client.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from regauge.demo.context import DemoContext
from regauge.demo.digits import BATCH, LR, accuracy, load_images, make_vit, train
from regauge.demo.merge import SPLIT
from regauge.errors import need
from regauge.results.findings import Finding, Results, Table

EPOCHS, TOLERANCE = 2, 1e-9


def show_split(context: DemoContext) -> Results:
    """Train a ViT with its backbone on a server, and compare it with training in one place."""
    need("transformers", "experiments")
    need("sklearn", "experiments")
    from regauge import apply, element, spec_of
    from regauge.models.summary import format_columns
    from regauge.split import Host, OptimizerConfig, connect

    images, labels = load_images()
    test, test_labels = images[SPLIT:], labels[SPLIT:]
    plain = make_vit(context.seed + 30)
    client_model, server_model = copy.deepcopy(plain), copy.deepcopy(plain)
    g = element(spec_of(plain), context.seed + 31, within="permutation")
    server_model.load_state_dict(apply(g, plain.state_dict(), part="backbone"))
    with context.bar("train, in one place") as progress:
        expected = train(
            plain, images[:SPLIT], labels[:SPLIT], context.seed + 32, progress, epochs=EPOCHS
        )
    host = Host(server_model, OptimizerConfig("adamw", LR, weight_decay=0.01))
    with _serve(host, context) as network, connect(client_model, network, element=g, rows="batch"):
        with context.bar("train, with the backbone on a server") as progress:
            losses = train(
                client_model,
                images[:SPLIT],
                labels[:SPLIT],
                context.seed + 32,
                progress,
                epochs=EPOCHS,
            )
        accuracies = {
            "trained in one place": accuracy(plain, test, test_labels),
            "trained split, used split": accuracy(client_model, test, test_labels),
        }
    state: dict[str, Any] = {**client_model.state_dict(), **host.backbone()}
    joined = copy.deepcopy(plain)
    joined.load_state_dict(state)
    accuracies["both parts, without the key"] = accuracy(joined, test, test_labels)
    joined.load_state_dict(apply(~g, state, part="backbone"))
    accuracies["both parts, put back by the key"] = accuracy(joined, test, test_labels)
    context.echo(
        format_columns(
            [
                ("digits", "accuracy"),
                *((name, f"{100 * value:.1f} %") for name, value in accuracies.items()),
            ],
            right=(1,),
        )
    )
    error = max(abs(a - b) / expected[0] for a, b in zip(losses, expected, strict=True))
    context.echo(
        f"\n{host.step} steps with columns locked and rows shuffled; the losses are off by "
        f"{error:.0e} of the first"
    )
    findings = (
        Finding(
            "split/trained",
            "Split training, with columns locked and rows shuffled, follows the losses of a "
            "training in one place.",
            error <= TOLERANCE and host.step == len(expected),
            error,
            TOLERANCE,
            1.0,
            f"{len(expected)} steps of AdamW in float64, off by {error:.0e} of the first loss",
            "000 Alg. 1",
        ),
        Finding(
            "split/joined",
            "Joined and restored by the key, the two parts are as accurate as the model that was "
            "trained in one place.",
            accuracies["both parts, put back by the key"] == accuracies["trained in one place"],
            accuracies["both parts, put back by the key"],
            accuracies["both parts, without the key"],
            accuracies["trained in one place"],
            "the same number of digits is classified correctly",
            "000 sec. 5.3",
            measure="accuracy",
        ),
    )
    note = (
        f"{len(expected)} steps of {BATCH} digits. Features and gradients are obfuscated, not "
        "encrypted: see the threat model."
    )
    return Results(
        "split",
        findings,
        (
            Table(
                "A ViT whose backbone is on a server",
                ("", "accuracy"),
                tuple(accuracies.items()),
                note,
            ),
        ),
        (),
        {},
        (),
    )


@contextmanager
def _serve(host: Any, context: DemoContext) -> Iterator[Any]:
    """Yield a connection to the host: mutual TLS over loopback, or in one process without gRPC."""
    if find_spec("grpc") is None:
        from regauge.split import InProcess

        context.echo("grpcio is not installed: the same bytes are exchanged within one process")
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
            context.echo(
                f"over mutual TLS on loopback: {server.received / 1e6:.0f} MB to the server, "
                f"{server.sent / 1e6:.0f} MB back\n"
            )
