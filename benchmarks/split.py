"""The protocol of `regauge.split` against raw grpc.aio, both with mutual TLS, interleaved in one
run; and the cost of a training step over a local one.

A server process has both: a handler that echoes bytes, and a regauge server whose host echoes
tensors. The raw client writes and reads messages of up to 1 MiB in the event loop's thread; ours
goes from tensor to tensor as training does: packed, journalled, sent, read, checked, unpacked.
Goals for 1 MiB: at most 3 ms over raw in the median, 10 ms in the 99th percentile; each direction
at least 150 MB/s or 60 % of raw, whichever is lower.

A training step is timed locally, in process, in process with columns and rows permuted, and over
mutual TLS; the differences are the costs of framing, permutation and network. Its bytes are
compared with the formula in docs/guides/split.md: four streams per step. Finally 32 clients in four
processes train one backbone concurrently for $REGAUGE_SECONDS (15): no error, and no request that
takes ten times the median. $REGAUGE_ROUNDS (300) is the number of timed round trips.
"""

from __future__ import annotations

import json
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from regauge.split.protocol.certificates import make_certificates
from regauge.split.protocol.channel import Loop, Tls
from regauge.split.protocol.frames import CHUNK, Bytes, Frame, Kind, Limits, Value, encode
from regauge.split.server.host import Host
from regauge.split.server.network import Grpc, Server
from regauge.split.server.quotas import Quota, Quotas

ROUNDS = int(os.environ.get("REGAUGE_ROUNDS", "300"))
SECONDS = float(os.environ.get("REGAUGE_SECONDS", "15"))
BLOCK = 20
SIZES = {"4 KB": 1 << 12, "1 MiB": 1 << 20, "8 MiB": 1 << 23}
LARGE = 1 << 25
GOAL_MEDIAN, GOAL_99, GOAL_RATE, GOAL_SHARE = 3.0, 10.0, 150.0, 0.6  # ms, ms, MB/s, of raw
GOAL_TRAFFIC, GOAL_SLOWEST = 1.05, 10.0
CLIENTS, PROCESSES = 32, 4
REQUEST = struct.Struct("<QQ")  # of a raw request: its bytes, and those of the reply


def main() -> int:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="regauge-split-") as folder:
        tls = make_certificates(folder)
        server = _process("serve", folder)
        try:
            assert server.stdout is not None
            raw, ours, train = (int(n) for n in server.stdout.readline().split())
            bench = Bench(tls["client"], raw, ours)
            bench.round_trips()
            bench.throughput()
            bench.close()
            bench.steps(Path(folder))
            bench.crowd(folder, train)
            return bench.verdict()
        finally:
            server.kill()
            server.wait()


def _process(*args: str) -> subprocess.Popen[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "GRPC_VERBOSITY": "NONE"}
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.split", *args],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
        env=env,
    )


@dataclass
class Bench:
    tls: Tls
    raw_port: int
    our_port: int
    met: bool = True

    def __post_init__(self) -> None:
        self.raw, self.ours = Raw(self.raw_port, self.tls), Ours(self.our_port, self.tls)

    def close(self) -> None:
        self.raw.close()
        self.ours.network.close()

    def goal(self, is_met: bool, text: str) -> None:
        self.met = self.met and is_met
        print(f"{'PASS' if is_met else 'MISS'}  {text}")

    def verdict(self) -> int:
        print(f"goals: {'met' if self.met else 'NOT MET'}")
        return 0 if self.met else 1

    def round_trips(self) -> None:
        print(f"{'round trip':12}  {'raw':>9}  {'p99':>9}  {'regauge':>9}  {'p99':>9}")
        for name, size in SIZES.items():
            for run in (self.raw, self.ours):
                run.trips(size, size, BLOCK)  # warm
            both: list[list[float]] = [[], []]
            for _ in range(max(1, ROUNDS // BLOCK)):
                for times, run in zip(both, (self.raw, self.ours), strict=True):
                    times += run.trips(size, size, BLOCK)
            raw, ours = ([1e3 * statistics.median(t), 1e3 * _quantile(t, 0.99)] for t in both)
            print(
                f"{name:12}  {raw[0]:6.2f} ms  {raw[1]:6.2f} ms  {ours[0]:6.2f} ms  "
                f"{ours[1]:6.2f} ms"
            )
            if name == "1 MiB":
                for what, over, goal in (
                    ("median", ours[0] - raw[0], GOAL_MEDIAN),
                    ("99th percentile", ours[1] - raw[1], GOAL_99),
                ):
                    self.goal(
                        over <= goal, f"{name}, {what}: {over:.2f} ms over raw, of at most {goal:g}"
                    )

    def throughput(self) -> None:
        for direction, up, down in (("up", LARGE, 1 << 10), ("down", 1 << 10, LARGE)):
            both: list[list[float]] = [[], []]
            for turn in range(9):
                for times, run in zip(both, (self.raw, self.ours), strict=True):
                    seconds = run.trips(up, down, 1)
                    times += seconds if turn else []  # the first is a warm-up
            raw, ours = (LARGE / 1e6 / statistics.median(t) for t in both)
            goal = min(GOAL_RATE, GOAL_SHARE * raw)
            self.goal(
                ours >= goal,
                f"{LARGE >> 20} MiB {direction}: {ours:.0f} MB/s, raw {raw:.0f}, of at least "
                f"{goal:.0f}",
            )

    def steps(self, folder: Path) -> None:
        """Measure the costs of a training step of two models, and its traffic."""
        from regauge.core.element import element
        from regauge.models.resolve import spec_of
        from regauge.split import InProcess, connect

        print(f"\n{'step':6}  {'local':>9}  {'framing':>9}  {'permuting':>9}  {'wire':>9}")
        for name, (build, batch, width) in models().items():
            data = batch()
            g = element(spec_of(build()), 3, within="permutation")
            variants: dict[str, Callable[[], None]] = {"local": _make_step(build(), data)}
            plain, moved, remote = build(), build(), build()
            links = [connect(plain, InProcess(Host(build(), _training())))]
            links.append(
                connect(
                    moved,
                    InProcess(Host(_lock_backbone(build(), g), _training())),
                    element=g,
                    rows="batch",
                )
            )
            with (
                Server(
                    Host(_lock_backbone(build(), g), _training()),
                    tls=make_certificates(folder / name)["server"],
                ) as server,
                Counted(
                    f"localhost:{server.port}",
                    tls=Tls(
                        *(folder / name / f for f in ("authority.pem", "client.pem", "client.key"))
                    ),
                ) as network,
            ):
                links.append(connect(remote, network, element=g, rows="batch"))
                variants |= {
                    "framing": _make_step(plain, data),
                    "permuting": _make_step(moved, data),
                    "wire": _make_step(remote, data),
                }
                times: dict[str, list[float]] = {variant: [] for variant in variants}
                crossed: list[int] = []
                for turn in range(12):
                    for variant, step in variants.items():
                        before, start = network.bytes, time.perf_counter()
                        step()
                        if turn > 1:
                            times[variant].append(1e3 * (time.perf_counter() - start))
                            crossed += [network.bytes - before] if variant == "wire" else []
                for link in links:
                    link.close()
            medians = [statistics.median(t) for t in times.values()]
            added = [medians[0], *(b - a for a, b in pairwise(medians))]
            print(f"{name:6}  " + "  ".join(f"{t:6.1f} ms" for t in added))
            budget = 4 * width
            self.goal(
                max(crossed) <= GOAL_TRAFFIC * budget,
                f"{name}: {max(crossed) / 1e6:.2f} MB a step, {max(crossed) / budget:.4f} of "
                f"four streams ({budget / 1e6:.2f} MB)",
            )

    def crowd(self, folder: str, port: int) -> None:
        """Train one backbone from many clients at once."""
        print(f"\n{CLIENTS} clients for {SECONDS:g} s")
        processes = [
            _process("clients", folder, str(port), str(CLIENTS // PROCESSES))
            for _ in range(PROCESSES)
        ]
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()  # ready
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        reports = [json.loads(p.communicate(timeout=SECONDS + 120)[0]) for p in processes]
        by_client = [times for report in reports for times in report["times"]]
        faults = [fault for report in reports for fault in report["faults"]]
        all_times = sorted(t for times in by_client for t in times)
        self.goal(
            not faults and len(by_client) == CLIENTS,
            f"{len(all_times)} requests, {len(faults)} errors {faults[:1]}",
        )
        median = statistics.median(all_times)
        slow = max(statistics.median(times) for times in by_client)
        self.goal(
            all_times[-1] / median < GOAL_SLOWEST,
            f"median {1e3 * median:.0f} ms, slowest {1e3 * all_times[-1]:.0f} ms: "
            f"{all_times[-1] / median:.1f} times, of less than {GOAL_SLOWEST:g}; "
            f"the slowest client's median {slow / median:.2f} times",
        )


def _quantile(times: Sequence[float], fraction: float) -> float:
    return sorted(times)[min(len(times) - 1, int(fraction * len(times)))]


# The two clients


class Raw:
    """A client of grpc.aio alone."""

    def __init__(self, port: int, tls: Tls) -> None:
        self.stream, self.channel = Loop.run(self._open(port, tls))

    async def _open(self, port: int, tls: Tls) -> Any:
        import grpc

        authority, certificate, key = tls.read()
        channel = grpc.aio.secure_channel(
            f"localhost:{port}", grpc.ssl_channel_credentials(authority, key, certificate)
        )
        return channel.stream_stream("/raw/Echo")(), channel

    def trips(self, up: int, down: int, count: int) -> list[float]:
        return list(Loop.run(self._trips(up, down, count)))

    async def _trips(self, up: int, down: int, count: int) -> list[float]:
        first, rest = REQUEST.pack(up, down) + bytes(min(up, CHUNK) - REQUEST.size), bytes(CHUNK)
        times = []
        for _ in range(count):
            start = time.perf_counter()
            await self.stream.write(first)
            for _ in range(up // CHUNK - 1):
                await self.stream.write(rest)
            left = down
            while left > 0:
                left -= len(await self.stream.read())
            times.append(time.perf_counter() - start)
        return times

    def close(self) -> None:
        Loop.run(self.channel.close())


class Ours:
    """A client of regauge, from tensor to tensor as in training."""

    def __init__(self, port: int, tls: Tls) -> None:
        from regauge.split.client.journal import MemoryJournal
        from regauge.split.client.request_log import RequestLog

        self.network = Grpc(f"localhost:{port}", tls=tls)
        self.log = RequestLog(self.network, MemoryJournal(), {})
        self.log.welcome = {}

    def trips(self, up: int, down: int, count: int) -> list[float]:
        tensor, times = torch.randn(up // 4), []
        for _ in range(count):
            start = time.perf_counter()
            reply = self.log.submit(Frame(Kind.FORWARD, 0, {"down": down}, {"x": tensor}))
            times.append(time.perf_counter() - start)
            assert reply.tensors["x"].numel() == down // 4
        return times


class Counted(Grpc):
    """A network that counts the bytes of frames."""

    bytes = 0

    def exchange(self, request: Sequence[memoryview]) -> Bytes:
        reply = super().exchange(request)
        self.bytes += sum(map(len, request)) + len(reply)
        return reply


# The server


class Echo(Host):
    """A host that echoes a tensor, or returns another of the requested size."""

    zeros = torch.zeros(LARGE // 4)

    def answer(self, frame: Frame, peer: str = "") -> bytes:
        down = int(frame.values["down"])  # type: ignore[arg-type]
        x = frame.tensors["x"]
        values: dict[str, Value] = {"saved": frame.number}
        return b"".join(
            encode(
                Frame(
                    Kind.OUTPUT,
                    frame.number,
                    values,
                    {"x": x if x.numel() == down // 4 else self.zeros[: down // 4]},
                )
            )
        )


def serve(folder: str) -> None:
    torch.set_num_threads(1)
    names = (Path(folder) / f for f in ("authority.pem", "server.pem", "server.key"))
    tls = Tls(*names)
    ours = Server(Echo(small(), limits=Limits()), "127.0.0.1:0", tls=tls)
    train = Server(
        Host(small(), _training(), max_sessions=CLIENTS, quotas=Quotas(Quota(sessions=CLIENTS))),
        "127.0.0.1:0",
        tls=tls,
    )
    print(Loop.run(_raw_server(tls)), ours.port, train.port, flush=True)
    sys.stdin.read()


async def _raw_server(tls: Tls) -> int:
    import grpc

    async def echo(incoming: Any, context: Any) -> Any:
        left = down = 0
        async for message in incoming:
            if left <= 0:
                left, down = REQUEST.unpack_from(message)
            left -= len(message)
            if left > 0:
                continue
            while down > 0:
                piece = message if down == len(message) else bytes(min(down, CHUNK))
                yield piece
                down -= len(piece)

    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler(
                "raw", {"Echo": grpc.stream_stream_rpc_method_handler(echo)}
            ),
        )
    )
    authority, certificate, key = tls.read()
    port: int = server.add_secure_port(
        "127.0.0.1:0",
        grpc.ssl_server_credentials([(key, certificate)], authority, require_client_auth=True),
    )
    await server.start()
    _raw_server.server = server  # type: ignore[attr-defined]  # not garbage-collected
    return port


# Models


def _training() -> Any:
    from regauge.split import OptimizerConfig

    return OptimizerConfig("adamw", lr=1e-4)


def small() -> torch.nn.Module:
    """Build the backbone that many clients train."""
    return _gpt2(width=64, layers=2)


def _gpt2(width: int, layers: int) -> torch.nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(
        n_embd=width,
        n_layer=layers,
        n_head=4,
        vocab_size=500,
        n_positions=128,
        bos_token_id=1,
        eos_token_id=2,
        **drops,
    )
    model = GPT2LMHeadModel(config)
    model.set_attn_implementation("eager")  # its mask is a tensor, which is permuted with the rows
    return model.train()


def _vit(width: int, layers: int) -> torch.nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    size = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "intermediate_size": 4 * width,
    }
    drops = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return ViTForImageClassification(
        ViTConfig(**size, **drops, image_size=224, patch_size=16, num_labels=10)
    ).train()


def models() -> dict[
    str, tuple[Callable[[], torch.nn.Module], Callable[[], dict[str, torch.Tensor]], int]
]:
    """Return, for each model, its builder, its batch, and the bytes of its stream."""
    ids = torch.randint(3, 500, (8, 128), generator=torch.Generator().manual_seed(0))
    images = torch.randn(8, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    return {
        "GPT-2": (
            lambda: _gpt2(256, 4),
            lambda: {"input_ids": ids, "labels": ids},
            8 * 128 * 256 * 4,
        ),
        "ViT": (
            lambda: _vit(192, 4),
            lambda: {"pixel_values": images, "labels": torch.arange(8)},
            8 * 197 * 192 * 4,
        ),
    }


def _lock_backbone(model: torch.nn.Module, g: Any) -> torch.nn.Module:
    from regauge.core.action import apply

    model.load_state_dict(apply(g, model.state_dict(), part="backbone"))
    return model


def _make_step(model: torch.nn.Module, data: dict[str, torch.Tensor]) -> Callable[[], None]:
    optimizer = _training().build(p for p in model.parameters() if p.requires_grad)

    def step() -> None:
        optimizer.zero_grad()
        model(**data).loss.backward()
        optimizer.step()

    return step


def clients(folder: str, port: str, count: str) -> None:
    """Run clients in threads, each with its own connection, model and session."""
    torch.set_num_threads(1)
    from regauge.split import connect

    tls = Tls(*(Path(folder) / f for f in ("authority.pem", "client.pem", "client.key")))
    times: list[list[float]] = [[] for _ in range(int(count))]
    faults: list[str] = []

    class Timed(Grpc):
        into: list[float]

        def exchange(self, request: Sequence[memoryview]) -> Bytes:
            start = time.perf_counter()
            reply = super().exchange(request)
            self.into.append(time.perf_counter() - start)
            return reply

    ready, go = threading.Barrier(int(count) + 1), threading.Event()

    def run_client(i: int) -> None:
        try:
            network = Timed(f"localhost:{port}", tls=tls)
            network.into = []
            ids = torch.randint(
                3, 500, (4, 64), generator=torch.Generator().manual_seed(os.getpid() + i)
            )
            with network, connect(client_models[i], network, rows="batch"):
                step = _make_step(client_models[i], {"input_ids": ids, "labels": ids})
                step()
                ready.wait()
                go.wait()
                network.into = times[i]
                until = time.monotonic() + SECONDS
                while time.monotonic() < until:
                    step()
        except Exception as error:
            faults.append(f"{type(error).__name__}: {error}")
            ready.abort()

    client_models = [small() for _ in range(int(count))]
    threads = [
        threading.Thread(target=run_client, args=(i,), daemon=True) for i in range(int(count))
    ]
    for thread in threads:
        thread.start()
    try:
        ready.wait(120)
    except threading.BrokenBarrierError:
        faults.append("not all clients could connect")
    print("ready", flush=True)
    sys.stdin.readline()
    go.set()
    for thread in threads:
        thread.join(SECONDS + 60)
    print(json.dumps({"times": times, "faults": faults}))


if __name__ == "__main__":
    if sys.argv[1:]:
        {"serve": serve, "clients": clients}[sys.argv[1]](*sys.argv[2:])
    else:
        sys.exit(main())
