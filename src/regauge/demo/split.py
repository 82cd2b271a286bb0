"""A chapter on split learning: the backbone on a server, the digits, their labels, the embedding
and the head with a client.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from regauge.demo.digits import BATCH, LR, accuracy, load_images, make_vit, train
from regauge.demo.merge import SPLIT
from regauge.demo.stage import DemoContext
from regauge.errors import need
from regauge.results.findings import Finding, Results, Table

EPOCHS, TOLERANCE = 2, 1e-9


def show_split(stage: DemoContext) -> Results:
    """A ViT whose backbone is on a server: it learns from digits that never leave their owner, as
    it would in one place.
    """
    need("transformers", "experiments")
    need("sklearn", "experiments")
    from regauge import apply, element, spec_of
    from regauge.models.summary import format_columns
    from regauge.split import Host, OptimizerConfig, connect

    images, labels = load_images()
    test, answers = images[SPLIT:], labels[SPLIT:]
    plain = make_vit(stage.seed + 30)
    mine, theirs = copy.deepcopy(plain), copy.deepcopy(plain)
    g = element(spec_of(plain), stage.seed + 31, within="permutation")
    theirs.load_state_dict(apply(g, plain.state_dict(), part="backbone"))
    with stage.bar("train, in one place") as tick:
        expected = train(
            plain, images[:SPLIT], labels[:SPLIT], stage.seed + 32, tick, epochs=EPOCHS
        )
    host = Host(theirs, OptimizerConfig("adamw", LR, weight_decay=0.01))
    with _serve(host, stage) as network, connect(mine, network, element=g, rows="batch"):
        with stage.bar("train, with the backbone on a server") as tick:
            losses = train(
                mine, images[:SPLIT], labels[:SPLIT], stage.seed + 32, tick, epochs=EPOCHS
            )
        found = {
            "trained in one place": accuracy(plain, test, answers),
            "trained split, used split": accuracy(mine, test, answers),
        }
    state: dict[str, Any] = {**mine.state_dict(), **host.backbone()}
    joined = copy.deepcopy(plain)
    joined.load_state_dict(state)
    found["both parts, without the key"] = accuracy(joined, test, answers)
    joined.load_state_dict(apply(~g, state, part="backbone"))
    found["both parts, put back by the key"] = accuracy(joined, test, answers)
    stage.echo(
        format_columns(
            [
                ("digits", "accuracy"),
                *((name, f"{100 * value:.1f} %") for name, value in found.items()),
            ],
            right=(1,),
        )
    )
    off = max(abs(a - b) / expected[0] for a, b in zip(losses, expected, strict=True))
    stage.echo(
        f"\n{host.step} steps with columns locked and rows shuffled; the losses are off by "
        f"{off:.0e} of the first"
    )
    findings = (
        Finding(
            "split/trained",
            "Split training, with columns locked and rows shuffled, follows the losses of a "
            "training in one place.",
            off <= TOLERANCE and host.step == len(expected),
            off,
            TOLERANCE,
            1.0,
            f"{len(expected)} steps of AdamW in float64, off by {off:.0e} of the first loss",
            "000 Alg. 1",
        ),
        Finding(
            "split/joined",
            "Put together and put back by the key, the two parts read as the model that was "
            "trained in one place.",
            found["both parts, put back by the key"] == found["trained in one place"],
            found["both parts, put back by the key"],
            found["both parts, without the key"],
            found["trained in one place"],
            "the same number of digits is read right",
            "000 sec. 5.3",
            measure="accuracy",
        ),
    )
    note = (
        f"{len(expected)} steps of {BATCH} digits. What crosses is obfuscated, not "
        "encrypted: see the threat model."
    )
    return Results(
        "split",
        findings,
        (
            Table(
                "A ViT whose backbone is on a server", ("", "accuracy"), tuple(found.items()), note
            ),
        ),
        (),
        {},
        (),
    )


@contextmanager
def _serve(host: Any, stage: DemoContext) -> Iterator[Any]:
    """A way to the host: over loopback, with certificates on both sides, where gRPC is installed;
    otherwise the same bytes in one process.
    """
    if find_spec("grpc") is None:
        from regauge.split import InProcess

        stage.echo("grpcio is not installed: the same bytes cross within one process")
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
            stage.echo(
                f"over mutual TLS on loopback: {server.received / 1e6:.0f} MB to the server, "
                f"{server.sent / 1e6:.0f} MB back\n"
            )
