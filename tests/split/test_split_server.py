"""What a server does beside answering: quotas, metrics, health, mixed precision, compiled blocks,
copies that are averaged, a quiet end.
"""

from __future__ import annotations

import logging
import math
import re
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from regauge.errors import CheckpointError, FrameError, QuotaError, RefusedError, TrainingError
from regauge.split import Host, InProcess, OptimizerConfig, RemoteBackbone, TransportError, connect
from regauge.split.client.journal import MemoryJournal
from regauge.split.protocol.frames import Kind, decode
from regauge.split.server.backbone import compute_gradients, weighted_mean
from regauge.split.server.metrics import render_metrics
from regauge.split.server.quotas import Quota, Quotas, read_clients, read_quota
from support.split_pairs import ADAMW, batch, distance, make_model, optimizer_of, same, train


def named_journal(letter: str) -> MemoryJournal:
    journal = MemoryJournal()
    journal.session = letter * 32
    return journal


# Quotas


def test_quotas_are_read_and_refused_by_line() -> None:
    assert read_quota("sessions=2 requests=0.5, bytes=1.5M") == Quota(2, 0.5, 1_500_000)
    clients = read_clients(
        "# who may come\nann\n\nbob\tsessions=3  # of the other team\n", Quota(requests=9)
    )
    assert clients == {"ann": Quota(requests=9), "bob": Quota(3, 9)}
    for text in ("requests", "sessions=1.5", "bytes=-1", "speed=3"):
        with pytest.raises(QuotaError, match="a quota must be"):
            read_quota(text)
    with pytest.raises(QuotaError, match="line 2 repeats the client ann"):
        read_clients("ann\nann requests=3\n")


def test_requests_and_bytes_are_counted_over_time() -> None:
    now = [0.0]
    quotas = Quotas(Quota(requests=2, bytes=600), {"bob": Quota()}, clock=lambda: now[0])

    def busy(client: str, size: int) -> bool:
        try:
            quotas.take(client, size)
        except FrameError as error:
            return error.code == "busy"
        return False

    assert [busy("ann", 10) for _ in range(3)] == [False, False, True]
    assert [busy("bob", 10**9) for _ in range(3)] == [False] * 3
    now[0] = 0.6
    assert [busy("ann", 1000), busy("ann", 1)] == [
        False,
        True,
    ]  # a large one passes, and is waited for
    now[0] = 30.0
    assert busy("ann", 1)  # 580 + 294 - 1000 is less than nothing
    now[0] = 60.0
    assert not busy("ann", 1)


def test_a_client_that_is_too_fast_waits_and_trains_as_ever() -> None:
    now = [0.0]
    host = Host(make_model("gpt2"), ADAMW, quotas=Quotas(Quota(requests=2), clock=lambda: now[0]))
    calm = Host(make_model("gpt2"), ADAMW)
    for h in (host, calm):
        mine = make_model("gpt2")
        network = InProcess(h)
        with connect(mine, network, journal=named_journal("a")) as link:
            link.log.sleep = lambda seconds: now.__setitem__(0, now[0] + seconds)
            train("gpt2", mine, optimizer_of(mine), range(4))
    assert host.requests["forward", "busy"] + host.requests["backward", "busy"] > 4
    assert same(host.backbone(), calm.backbone())


def test_sessions_of_one_client_are_counted() -> None:
    host = Host(make_model("gpt2"), quotas=Quotas(Quota(sessions=1), {"bob": Quota(sessions=2)}))
    connect(make_model("gpt2"), InProcess(host, "ann"))
    with pytest.raises(RefusedError, match="ann has 1 sessions, and its quota is 1"):
        connect(make_model("gpt2"), InProcess(host, "ann"))
    for _ in range(2):
        connect(make_model("gpt2"), InProcess(host, "bob"))
    assert host.requests["hello", "quota"] == 1


# Mixed precision and compiled blocks


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_is_close_and_reported(precision: str) -> None:
    losses = []
    for chosen in ("", precision):
        mine = make_model("gpt2", torch.float32)
        host = Host(make_model("gpt2", torch.float32), ADAMW, precision=chosen)
        with connect(mine, InProcess(host)) as link:
            assert link.server_info["precision"] == chosen
            losses.append(train("gpt2", mine, optimizer_of(mine), range(6)))
            assert all(t.dtype == torch.float32 for t in host.backbone().values())
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


def test_small_gradients_do_not_vanish_in_half_precision() -> None:
    weight = torch.randn(8, 8, requires_grad=True)
    x = torch.randn(4, 8)
    grad = torch.randn(4, 8) * 1e-9
    with torch.autocast("cpu", dtype=torch.float16):
        y = (torch.nn.functional.gelu(x @ weight) @ weight).float()
    plain = torch.autograd.grad(y, [weight], grad, retain_graph=True)[0]
    (scaled,) = compute_gradients(y, [weight], grad, "fp16")
    exact = torch.autograd.grad(torch.nn.functional.gelu(x @ weight) @ weight, [weight], grad)[0]
    assert scaled is not None
    assert float((scaled - exact).norm() / exact.norm()) < 0.01
    assert float((plain - exact).norm() / exact.norm()) > 0.05
    (huge,) = compute_gradients(y, [weight], grad * 1e12, "fp16")
    assert huge is not None
    assert bool(torch.isfinite(huge).all())


def test_mixed_precision_is_over_float32() -> None:
    with pytest.raises(TrainingError, match="must be float32 for mixed precision"):
        Host(make_model("gpt2"), precision="bf16")
    with pytest.raises(TrainingError, match="precision must be bf16 or fp16"):
        Host(make_model("gpt2", torch.float32), precision="fp8")


@pytest.mark.slow
def test_compiled_blocks_compute_the_same_and_fall_back(caplog: pytest.LogCaptureFixture) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler here")

    found = []
    compilers: tuple[Any, ...] = ("", "aot_eager", broken)
    for compiler in compilers:
        mine = make_model("gpt2", torch.float32)
        host = Host(make_model("gpt2", torch.float32), ADAMW, compiler=compiler)
        with connect(mine, InProcess(host)), caplog.at_level(logging.WARNING, "regauge.split"):
            train("gpt2", mine, optimizer_of(mine), range(1))
        found.append(host.backbone())
        assert bool(host.executor.compiler) == (compiler == "aot_eager")
        torch._dynamo.reset()
    assert "torch.compile failed" in caplog.text
    assert distance(found[1], found[0]) < 1e-4
    assert same(found[2], found[0])


# Copies that are averaged


def train_steps(mine: torch.nn.Module, steps: range, optimizer: torch.optim.Optimizer) -> None:
    train("gpt2", mine, optimizer, steps)


def test_the_average_of_one_is_plain_training() -> None:
    found = []
    for average in (0, 2):
        mine = make_model("gpt2", dropout=0.1)
        host = Host(make_model("gpt2", dropout=0.1), ADAMW, average=average)
        with connect(mine, InProcess(host), journal=named_journal("a")) as link:
            assert link.server_info["average"] == average
            torch.manual_seed(0)
            train_steps(mine, range(5), optimizer_of(mine))
        found.append(host.backbone())
        assert host.step == 5
    assert same(*found)


def test_copies_become_their_mean_after_steps_of_each() -> None:
    alone = []
    for first in (0, 10):
        mine = make_model("gpt2")
        host = Host(make_model("gpt2"), ADAMW)
        with connect(mine, InProcess(host)):
            train_steps(mine, range(first, first + 2), optimizer_of(mine))
        alone.append(host.backbone())
    host = Host(make_model("gpt2"), ADAMW, average=2)
    start = host.backbone()
    ann, bob = make_model("gpt2"), make_model("gpt2")
    with (
        connect(ann, InProcess(host), journal=named_journal("a")),
        connect(bob, InProcess(host), journal=named_journal("b"), patience=0.0) as link,
    ):
        optimizers = optimizer_of(ann), optimizer_of(bob)
        train_steps(ann, range(1), optimizers[0])
        train_steps(bob, range(10, 12), optimizers[1])
        assert same(host.main.state(), start)  # the round is not over
        with pytest.raises(
            TransportError, match="the round ends when 1 more sessions have taken 2 steps"
        ):
            train_steps(bob, range(12, 13), optimizers[1])
        with torch.no_grad():
            bob(**batch("gpt2", 0))  # a prediction has no turn
        train_steps(ann, range(1, 2), optimizers[0])
        expected = weighted_mean([(1, alone[0]), (1, alone[1])])
        assert same(dict(host.main.state()), expected)
        assert all(
            same(dict(s.backbone.state()), expected) for s in host.sessions.values() if s.backbone
        )
        link.log.patience = 60.0
        train_steps(bob, range(12, 13), optimizers[1])
        assert host.step == 5
        assert [s.backbone.steps_since_mean for s in host.sessions.values() if s.backbone] == [0, 1]


def test_absent_clients_count_by_their_completed_steps() -> None:
    for how in ("leaves", "is away"):
        host = Host(make_model("gpt2"), ADAMW, average=2, away=0.0 if how == "is away" else 60.0)
        ann, bob = make_model("gpt2"), make_model("gpt2")
        with (
            connect(ann, InProcess(host), journal=named_journal("a")),
            connect(bob, InProcess(host), journal=named_journal("b")) as link,
        ):
            optimizer, other = optimizer_of(ann), optimizer_of(bob)
            train_steps(bob, range(10, 11), other)
            train_steps(ann, range(2), optimizer)
            copies = {
                n: {k: t.clone() for k, t in s.backbone.state().items()}
                for n, s in host.sessions.items()
                if s.backbone
            }
            expected = weighted_mean([(2, copies["a" * 32]), (1, copies["b" * 32])])
            if how == "leaves":
                link.end()
            else:
                loss = ann(**batch("gpt2", 2)).loss  # who waits finds that the other is away
                assert same(dict(host.main.state()), expected)
                loss.backward()
                train_steps(bob, range(11, 12), other)  # and is a member again when it comes back
                assert [
                    s.backbone.steps_since_mean for s in host.sessions.values() if s.backbone
                ] == [1, 1]
                continue
        assert same(host.backbone(), expected)


def test_averaging_needs_training_and_its_own_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="0 without training"):
        Host(make_model("gpt2"), average=3)
    mine = make_model("gpt2")
    host = Host(make_model("gpt2"), ADAMW, folder=tmp_path, average=2)
    with connect(mine, InProcess(host)):
        train_steps(mine, range(1), optimizer_of(mine))
    host.save()
    with pytest.raises(CheckpointError, match="was trained with averaged copies"):
        Host(make_model("gpt2"), ADAMW, folder=tmp_path)


class Restarting:
    """A server that is lost, with all since its checkpoint, after every so many requests that it
    has answered, eight times at most.
    """

    def __init__(self, started: Callable[[], Host], after: int) -> None:
        self.started, self.after, self.count, self.hosts, self.lock = (
            started,
            after,
            0,
            [started()],
            threading.Lock(),
        )

    def exchange(self, request: Any) -> bytes:
        with self.lock:
            reply = InProcess(self.hosts[-1]).exchange(request)
            self.count += decode(reply).kind is not Kind.ERROR
            if self.after and self.count >= self.after and len(self.hosts) < 9:
                self.hosts.append(self.started())
                self.count = 0
            return reply


def run_average(
    folder: Path, after: int, at_once: bool
) -> tuple[dict[str, torch.Tensor], list[Host]]:
    """Two clients of six steps each, with a mean after every two; at once, or one after the
    other.
    """
    network = Restarting(
        lambda: Host(make_model("gpt2"), ADAMW, folder=folder, save_every=2, average=2), after
    )
    models = [make_model("gpt2"), make_model("gpt2")]
    links: list[RemoteBackbone] = [
        connect(m, network, journal=named_journal("ab"[i]), rows="batch", secret=5)
        for i, m in enumerate(models)
    ]
    for link in links:
        link.log.sleep = lambda seconds: time.sleep(min(seconds, 0.005))
    optimizers = [optimizer_of(m) for m in models]
    faults: list[BaseException] = []

    def run(i: int, steps: range) -> None:
        try:
            for step in steps:
                optimizers[i].zero_grad()
                models[i](**batch("gpt2", 100 * i + step)).loss.backward()
                optimizers[i].step()
            if steps.stop == 6:
                links[i].end()
        except BaseException as error:
            faults.append(error)

    for i in (0, 1):
        run(i, range(1))  # both are members before either goes on
    if at_once:
        threads = [threading.Thread(target=run, args=(i, range(1, 6))) for i in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    else:
        for step in range(1, 6):
            for i in (0, 1):
                run(i, range(step, step + 1))
    assert faults == []
    state = {f"{i}/{n}": t for i, m in enumerate(models) for n, t in m.state_dict().items()}
    return state | network.hosts[-1].backbone(), network.hosts


def test_two_clients_and_a_server_that_crashes_repeatedly(tmp_path: Path) -> None:
    calm, hosts = run_average(tmp_path / "calm", 0, at_once=False)
    assert len(hosts) == 1
    for after in (0, 5):
        found, hosts = run_average(tmp_path / str(after), after, at_once=True)
        assert (len(hosts) > 3) == bool(after)
        assert hosts[-1].step == 12
        assert same(found, calm)


# The port


# HealthCheckResponse on the wire: field 1, a number
SERVING, NOT_SERVING, UNKNOWN = b"\x08\x01", b"\x08\x02", b"\x08\x03"


def test_the_health_service_is_beside_the_server() -> None:
    grpc = pytest.importorskip("grpc")
    from regauge.split.server.network import Server

    server = Server(Host(make_model("gpt2")))
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert check(b"", timeout=20) == SERVING
        assert check(b"\n\rregauge.Split", timeout=20) == SERVING
        for asked, code in ((b"\n\x05other", "NOT_FOUND"), (b"\xff", "INVALID_ARGUMENT")):
            with pytest.raises(grpc.RpcError) as caught:
                check(asked, timeout=20)
            assert caught.value.code().name == code
        watched = channel.unary_stream("/grpc.health.v1.Health/Watch")(b"", timeout=60)
        assert next(watched) == SERVING
        assert (
            next(channel.unary_stream("/grpc.health.v1.Health/Watch")(b"\n\x05other", timeout=60))
            == UNKNOWN
        )
        threading.Thread(target=server.stop).start()
        assert next(watched) == NOT_SERVING


def test_metrics_say_what_was_done(tmp_path: Path) -> None:
    pytest.importorskip("grpc")
    from regauge.split.server.metrics import Metrics
    from regauge.split.server.network import Grpc, Server

    mine = make_model("gpt2")
    host = Host(make_model("gpt2"), ADAMW, folder=tmp_path, save_every=2)
    with Server(host) as server, Grpc(f"127.0.0.1:{server.port}") as network:
        page = Metrics(host, server)
        with connect(mine, network):
            train("gpt2", mine, optimizer_of(mine), range(3))
            open_one = mine(**batch("gpt2", 3)).loss
            with urllib.request.urlopen(
                f"http://127.0.0.1:{page.port}/metrics", timeout=20
            ) as reply:
                assert reply.headers["Content-Type"].startswith("text/plain; version=0.0.4")
                text = reply.read().decode()
            assert open_one.requires_grad
        page.close()
    numbers = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            matched = re.fullmatch(
                r'([a-z_]+(?:\{kind="[a-z]+",result="[a-z]+"\})?) ([0-9.e+-]+)', line
            )
            assert matched is not None, line
            numbers[matched[1].removeprefix("regauge_split_")] = float(matched[2])
    assert numbers["steps_total"] == 3
    assert numbers['requests_total{kind="forward",result="ok"}'] == 4
    assert numbers['requests_total{kind="backward",result="ok"}'] == 3
    assert (
        numbers["sessions"],
        numbers["passes_open"],
        numbers["checkpoint_step"],
        numbers["streams"],
    ) == (1, 1, 2, 1)
    assert min(numbers["received_bytes_total"], numbers["sent_bytes_total"]) > 1000
    assert numbers["compute_seconds_total"] > 0
    assert "regauge_split_steps_total 3.0\n" in render_metrics(host)


def test_metrics_on_a_port_that_is_taken() -> None:
    from regauge.split.server.metrics import Metrics

    page = Metrics(Host(make_model("gpt2")), None)
    try:
        with pytest.raises(TransportError, match=r"cannot listen on .* for metrics"):
            Metrics(Host(make_model("gpt2")), None, f"127.0.0.1:{page.port}")
        with pytest.raises(TransportError, match="must be HOST:PORT"):
            Metrics(Host(make_model("gpt2")), None, "9100x")
    finally:
        page.close()


def test_a_server_that_stops_finishes_what_is_under_way(tmp_path: Path) -> None:
    """The reply of a step that is being computed arrives, the checkpoint has it, and the next
    server goes on.
    """
    pytest.importorskip("grpc")
    from regauge.split.server.network import Grpc, Server
    from support.ports import free_port

    port = free_port()
    begun, release = threading.Event(), threading.Event()

    class Slow(Host):
        def answer(self, frame: Any, peer: str = "") -> bytes:
            if frame.number == 4:
                begun.set()
                release.wait(30)
            return super().answer(frame, peer)

    servers: list[Server] = [
        Server(Slow(make_model("gpt2"), ADAMW, folder=tmp_path), f"127.0.0.1:{port}")
    ]
    replies: list[int] = []

    def stop() -> None:
        begun.wait(30)
        threading.Timer(0.2, release.set).start()
        servers[0].stop(30)
        replies.append(servers[0].host.requests.get(("backward", "ok"), 0))
        servers.append(
            Server(Host(make_model("gpt2"), ADAMW, folder=tmp_path), f"127.0.0.1:{port}")
        )

    stopping = threading.Thread(target=stop)
    stopping.start()
    mine = make_model("gpt2")
    with Grpc(f"127.0.0.1:{port}") as network, connect(mine, network, journal=named_journal("a")):
        train("gpt2", mine, optimizer_of(mine), range(4))
    stopping.join()
    servers[1].stop()
    assert replies == [2]
    assert servers[1].host.requests["backward", "ok"] == 2  # nothing was asked twice of the second
    calm = make_model("gpt2")
    host = Host(make_model("gpt2"), ADAMW)
    with connect(calm, InProcess(host), journal=named_journal("a")):
        train("gpt2", calm, optimizer_of(calm), range(4))
    assert same(servers[1].host.backbone(), host.backbone())


def test_the_end_of_a_session_is_saved(tmp_path: Path) -> None:
    """A client that is done sends nothing again: what it asked for must outlive the server from
    then on.
    """
    mine = make_model("gpt2")
    host = Host(make_model("gpt2"), ADAMW, folder=tmp_path, save_every=1000)
    with connect(mine, InProcess(host)) as link:
        train("gpt2", mine, optimizer_of(mine), range(3))
        link.end()
    again = Host(make_model("gpt2"), ADAMW, folder=tmp_path)
    assert (again.step, len(again.sessions)) == (3, 0)
    assert same(again.backbone(), host.backbone())


def test_optimizer_configs_are_described() -> None:
    config = OptimizerConfig(
        "sgd",
        0.1,
        weight_decay=0.2,
        momentum=0.9,
        schedule="linear",
        warmup=1,
        steps=9,
        clip=0.5,
        accumulate=2,
    ).to_dict()
    assert config == {
        "optimizer": "sgd",
        "rate": 0.1,
        "decay": 0.2,
        "momentum": 0.9,
        "schedule": "linear",
        "warmup": 1,
        "steps": 9,
        "clip": 0.5,
        "accumulate": 2,
    }


def test_a_checkpoint_of_another_version_is_refused(tmp_path: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    host = Host(make_model("gpt2"), OptimizerConfig("sgd", 0.1), folder=tmp_path)
    host.save()
    path = tmp_path / "split.safetensors"
    with safe_open(path, "pt") as file:
        about = file.metadata()["about"]
    for version in ("1", "3"):
        save_file(load_file(path), path, {"regauge": "split", "version": version, "about": about})
        with pytest.raises(CheckpointError, match="of version 2"):
            Host(make_model("gpt2"), host.training, folder=tmp_path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": -0.1}, "lr must be .* got -0.1"),
        ({"lr": math.nan}, "lr must be .* got nan"),
        ({"lr": math.inf}, "lr must be .* got inf"),
        ({"weight_decay": -1.0}, "weight_decay must be .* got -1"),
        ({"momentum": -1.0}, "momentum must be .* got -1"),
        ({"clip": -1.0}, "clip must be .* got -1"),
        ({"clip": math.nan}, "clip must be .* got nan"),
        ({"warmup": -5}, "warmup must be .* got -5"),
        ({"steps": -5}, "steps must be .* got -5"),
        ({"accumulate": 0}, "accumulate must be .* got 0"),
    ],
)
def test_an_invalid_optimizer_config_names_the_fault(options: dict[str, Any], words: str) -> None:
    with pytest.raises(TrainingError, match=words) as caught:
        OptimizerConfig("sgd", **{"lr": 0.1, **options})
    assert "or more" in (caught.value.hint or "")
    assert OptimizerConfig("sgd", lr=0.0, clip=0.0, accumulate=1).lr == 0.0
