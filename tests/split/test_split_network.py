"""Over gRPC: the same bytes, the same weights; who may not come is refused; a server that dies and
comes back is found again.
"""

from __future__ import annotations

import struct
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("grpc")

from regauge.errors import CheckpointError, KeyFileError, RefusedError
from regauge.split import Host, InProcess, TransportError, connect
from regauge.split.protocol.certificates import make_certificates
from regauge.split.protocol.channel import Tls, is_loopback
from regauge.split.protocol.frames import HEADER, Frame, Kind, Limits, decode, encode
from regauge.split.server.network import Grpc, Server
from support.ports import free_port
from support.split_pairs import (
    ADAMW,
    assemble_state,
    columns,
    lock_backbone,
    make_model,
    optimizer_of,
    same,
    train,
)

STEPS = range(4)


def reference_run() -> dict[str, torch.Tensor]:
    mine = make_model("gpt2")
    g = columns(mine)
    host = Host(lock_backbone(mine, g), ADAMW)
    with connect(mine, InProcess(host), element=g, rows="batch", secret=5):
        train("gpt2", mine, optimizer_of(mine), STEPS)
    return assemble_state(mine, host, g)


def test_training_over_mutual_tls_is_training_in_process(tmp_path: Path) -> None:
    tls = make_certificates(tmp_path, clients=("ann", "bob"))
    mine = make_model("gpt2")
    g = columns(mine)
    host = Host(lock_backbone(mine, g), ADAMW)
    with Server(host, tls=tls["server"], clients=["ann"]) as server:
        with (
            Grpc(f"localhost:{server.port}", tls=tls["ann"]) as network,
            connect(mine, network, element=g, rows="batch", secret=5),
        ):
            train("gpt2", mine, optimizer_of(mine), STEPS)
        assert [s.peer for s in host.sessions.values()] == ["ann"]
        with (
            Grpc(f"localhost:{server.port}", tls=tls["bob"]) as network,
            pytest.raises(RefusedError, match="not on the server's list"),
        ):
            connect(make_model("gpt2"), network, patience=3)
        stranger = make_certificates(tmp_path / "other")["client"]
        for tls_or_none in (stranger, None):
            with (
                Grpc(f"localhost:{server.port}", tls=tls_or_none) as network,
                pytest.raises(TransportError),
            ):
                connect(make_model("gpt2"), network, patience=0.3)
    assert same(assemble_state(mine, host, g), reference_run())
    assert all(f.stat().st_mode & 0o077 == 0 for f in tmp_path.glob("*.key"))


def test_large_frames_cross_in_chunks_and_nonsense_is_answered() -> None:
    with Server(Host(make_model("gpt2"), ADAMW)) as server:
        for data in (b"x" * 100, b"x" * 5_000_000):
            with Grpc(f"127.0.0.1:{server.port}") as network:
                reply = decode(network.exchange([memoryview(data)]))
                assert (reply.kind, reply.values["code"]) == (Kind.ERROR, "magic")
        large = Frame(
            Kind.FORWARD,
            1,
            {"session": "0" * 32},
            {"z": torch.zeros(1_000_000, dtype=torch.float64)},
        )
        with Grpc(f"127.0.0.1:{server.port}") as network:
            for _ in range(2):  # on one stream
                assert decode(network.exchange(encode(large))).values["code"] == "session"


def test_certificates_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    """gRPC says the same of a bad file and of a port that is taken."""
    from cryptography.hazmat.primitives.serialization import (
        BestAvailableEncryption,
        Encoding,
        PrivateFormat,
        load_pem_private_key,
    )

    tls = make_certificates(tmp_path)
    good, host = tls["server"], Host(make_model("gpt2"))
    (bad := tmp_path / "bad.pem").write_text(
        "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
    )
    secret = load_pem_private_key(good.key.read_bytes(), None).private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"x")
    )
    (closed := tmp_path / "closed.key").write_bytes(secret)
    for path in (bad, closed):
        path.chmod(0o600)
    for files, words in (
        (Tls(bad, good.certificate, good.key), "bad.pem must be a certificate"),
        (Tls(good.authority, bad, good.key), "bad.pem must be a certificate"),
        (Tls(good.authority, good.key, good.key), "server.key must be a certificate"),
        (Tls(good.authority, good.certificate, bad), "bad.pem must be a private key"),
        (
            Tls(good.authority, good.certificate, closed),
            "closed.key must be a private key without a passphrase",
        ),
        (
            Tls(good.authority, good.certificate, tls["client"].key),
            r"client.key must be the private key of .*server.pem",
        ),
        (Tls(good.authority, good.certificate, tmp_path / "none.key"), "none.key cannot be read"),
    ):
        with pytest.raises((CheckpointError, KeyFileError), match=words):
            Server(host, tls=files)
        with (
            pytest.raises((CheckpointError, KeyFileError), match=words),
            Grpc("127.0.0.1:1", tls=files) as network,
        ):
            connect(make_model("gpt2"), network, patience=0.1)
    Server(host, tls=good).stop()


def test_strangers_and_expired_certificates_are_refused(tmp_path: Path) -> None:
    tls = make_certificates(tmp_path / "good")
    with Server(Host(make_model("gpt2")), tls=tls["server"]) as server:
        for other in (
            make_certificates(tmp_path / "other"),
            make_certificates(tmp_path / "expired", days=0),
        ):
            if other["client"].certificate.parent.name == "expired":
                time.sleep(1.1)  # they end in the second that they are made in
            mixed = Tls(tls["server"].authority, other["client"].certificate, other["client"].key)
            for shown in (mixed, other["client"]):
                with (
                    Grpc(f"localhost:{server.port}", tls=shown) as network,
                    pytest.raises(TransportError, match="certificate"),
                ):
                    connect(make_model("gpt2"), network, patience=0.5)
        connect(make_model("gpt2"), Grpc(f"localhost:{server.port}", tls=tls["client"])).end()


def _exchange(network: Grpc, data: bytes) -> Any:
    """The reply, as a client gets it: a stream that the server ends is asked on until another one
    is open.
    """
    for _ in range(50):
        try:
            return network.exchange([memoryview(data)])
        except TransportError:
            time.sleep(0.05)
    raise AssertionError("no reply")


def test_invalid_frames_are_rejected_over_the_wire() -> None:
    good = bytearray(b"".join(encode(Frame(Kind.HELLO, 0, {}))))
    with Server(Host(make_model("gpt2"), limits=Limits(payload=1 << 20, table=1 << 10))) as server:
        for at, data, code in (
            (4, b"\x63", "version"),
            (5, b"\x63", "kind"),
            (8, struct.pack("<I", 1 << 20), "limit"),
            (12, struct.pack("<Q", 1 << 60), "limit"),
            (HEADER.size, b"?", "checksum"),
        ):
            bad = bytearray(good)
            bad[at : at + len(data)] = data
            with Grpc(f"127.0.0.1:{server.port}") as network:
                reply = decode(network.exchange([memoryview(bytes(bad))]))
                assert (reply.kind, reply.values["code"]) == (Kind.ERROR, code)
                again = decode(_exchange(network, bytes(good)))  # on a new stream
                assert again.values["code"] == "version"  # a HELLO that says no protocol


def test_plaintext_is_for_loopback() -> None:
    host = Host(make_model("gpt2"))
    for address in ("0.0.0.0:0", "192.168.1.5:7000", "example.org:7000", "[::]:0"):
        with pytest.raises(TransportError, match="without TLS"):
            Server(host, address)
        with pytest.raises(TransportError, match="without TLS"):
            Grpc(address)
    assert all(is_loopback(a) for a in ("127.0.0.1:1", "[::1]:1", "localhost:1", "unix:/tmp/s"))


def test_a_server_that_is_gone_for_a_while_is_found_again(tmp_path: Path) -> None:
    mine = make_model("gpt2")
    g = columns(mine)
    start = lock_backbone(mine, g)
    port = free_port()

    def served() -> Server:
        return Server(
            Host(lock_backbone(start, None), ADAMW, folder=tmp_path, save_every=2),
            f"127.0.0.1:{port}",
        )

    servers = [served()]
    timers: list[threading.Timer] = []

    def after(step: int) -> None:
        if step in (0, 2):
            servers[-1].host.folder = None  # a server that is killed keeps nothing more
            servers[-1].stop(0)
            timers.append(threading.Timer(0.3, lambda: servers.append(served())))
            timers[-1].start()

    with (
        Grpc(f"127.0.0.1:{port}") as network,
        connect(mine, network, element=g, rows="batch", secret=5),
    ):
        train("gpt2", mine, optimizer_of(mine), STEPS, after)
    for timer in timers:
        timer.join()
    servers[-1].stop()
    assert len(servers) == 3
    assert same(assemble_state(mine, servers[-1].host, g), reference_run())


def test_clients_at_once() -> None:
    host = Host(make_model("gpt2"), ADAMW)
    faults: list[BaseException] = []

    def one(seed: int) -> None:
        try:
            mine = make_model("gpt2")
            with Grpc(f"127.0.0.1:{server.port}") as network, connect(mine, network, rows="batch"):
                optimizer = optimizer_of(mine)
                for step in range(3):
                    optimizer.zero_grad()
                    mine(
                        input_ids=torch.full((1, 4), 3 + seed), labels=torch.full((1, 4), 3 + step)
                    ).loss.backward()
                    optimizer.step()
        except BaseException as error:
            faults.append(error)

    with Server(host) as server:
        threads = [threading.Thread(target=one, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert faults == []
    assert host.step == 12
