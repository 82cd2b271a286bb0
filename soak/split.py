"""Attacks on a live split server: memory bombs, floods of connections and health streams, mutated
frames.
"""

from __future__ import annotations

import asyncio
import random
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from soak.harness import HANG_SECONDS, Counter, Outcome

MB = 1 << 20
BUDGET_MB = 1024
FRAMES_MB = 96  # growth of a process with pico-models: buffers, graphs, memory of allocators
FLOOD_MB = 64  # growth by connections and streams that are rejected


@dataclass
class ServerProcess:
    """A `regauge split serve` in a child process, and its resident memory."""

    process: subprocess.Popen[str]
    address: str
    lines: list[str] = field(default_factory=list)
    idle_mb: float = 0.0

    def memory_mb(self, name: str = "VmRSS") -> float:
        field = re.search(
            rf"{name}:\s+(\d+) kB", Path(f"/proc/{self.process.pid}/status").read_text()
        )
        return int(field[1]) / 1024 if field else 0.0

    @contextmanager
    def peak(self) -> Iterator[list[float]]:
        """Measure the peak growth of resident memory in MB over that before the first measurement
        (Linux: VmHWM, reset before).
        """
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")
        self.idle_mb, out = self.idle_mb or self.memory_mb(), [0.0]
        yield out
        out[0] = max(0.0, self.memory_mb("VmHWM") - self.idle_mb)


@contextmanager
def serve(folder: Path, *options: str, files: int | None = None) -> Iterator[ServerProcess]:
    """Start a server on loopback, with at most `files` open files."""
    command = [
        sys.executable,
        "-m",
        "regauge",
        "split",
        "serve",
        str(folder),
        "--listen",
        "127.0.0.1:0",
        *options,
    ]
    if files is not None:
        command = ["sh", "-c", f'ulimit -n {files}; exec "$@"', "sh", *command]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    lines: list[str] = []
    try:
        for line in process.stderr:
            lines.append(line.rstrip())
            address = re.search(r"listening on (127\.0\.0\.1:\d+)", line)
            if address:
                threading.Thread(
                    target=lambda: lines.extend(map(str.rstrip, process.stderr or ())), daemon=True
                ).start()
                yield ServerProcess(process, address[1], lines)
                return
        raise RuntimeError("\n".join(lines))
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(60)
        process.kill()
        process.wait()


def minilm() -> Any:
    """Build a BERT of MiniLM's size from a config."""
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {
        "num_hidden_layers": 6,
        "hidden_size": 384,
        "num_attention_heads": 12,
        "intermediate_size": 1536,
    }
    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(vocab_size=30522, max_position_embeddings=8192, **sizes)
    )


def small_gpt2() -> Any:
    """Build a GPT-2 of MiniLM's size from a config."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(
        GPT2Config(n_layer=6, n_embd=384, n_head=12, vocab_size=1000, n_positions=8192, **ends)
    )


@contextmanager
def save_server(model: Any) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        yield Path(folder)


def ids(batch: int, tokens: int) -> torch.Tensor:
    return torch.randint(5, 900, (batch, tokens), generator=torch.Generator().manual_seed(1))


def forward(model: Any, batch: int, tokens: int) -> Any:
    return model(
        input_ids=ids(batch, tokens), attention_mask=torch.ones(batch, tokens, dtype=torch.long)
    )


@contextmanager
def connect_model(
    model: Any, address: str, patience: float = 5.0, tls: Any = None
) -> Iterator[Any]:
    from regauge.split import connect
    from regauge.split.server.network import Grpc

    with Grpc(address, tls=tls) as network:
        link = connect(model, network, patience=patience)
        try:
            yield link
        finally:
            link.end()


Bomb = Callable[[Any, ServerProcess], bool]


def _pass(batch: int, tokens: int) -> Bomb:
    """Return a bomb: one forward pass of this size, and its backward pass if admitted."""

    def run(model: Any, server: ServerProcess) -> bool:
        with connect_model(model, server.address, 120.0):
            forward(model, batch, tokens).logits.sum().backward()
        return True

    return run


def _prediction(batch: int, tokens: int) -> Bomb:
    def run(model: Any, server: ServerProcess) -> bool:
        with connect_model(model, server.address, 120.0), torch.no_grad():
            forward(model, batch, tokens)
        return True

    return run


def _open_passes(count: int, batch: int, tokens: int) -> Bomb:
    """Return a bomb: forward passes without backward passes."""

    def run(model: Any, server: ServerProcess) -> bool:
        with connect_model(model, server.address, 120.0):
            graphs = [forward(model, batch, tokens).logits for _ in range(count)]
            return len(graphs) == count

    return run


def _bits(elements: int, with_session: bool) -> Bomb:
    """Return a bomb: a mask of one bit per entry, which unpacks to eight bytes per entry."""

    def run(model: Any, server: ServerProcess) -> bool:
        from regauge.split.protocol.frames import Frame, Kind, decode, encode
        from regauge.split.server.network import Grpc

        mask = torch.zeros(1, dtype=torch.float64).expand(elements).contiguous()
        values = {
            "boundary": "",
            "training": True,
            "plain": [],
            "layouts": [],
            "order": [],
            "wants": [],
            "release": [],
        }
        if with_session:
            with connect_model(model, server.address) as link:
                link.log.ask(Frame(Kind.FORWARD, 0, values, {"x": mask}), exact=("x",))
        with Grpc(server.address) as network:
            frame = Frame(Kind.FORWARD, 1, {**values, "session": "0" * 32}, {"x": mask})
            reply = decode(network.exchange(list(encode(frame, exact=("x",)))))
        raise _error_of(reply)

    return run


def _error_of(reply: Any) -> Exception:
    from regauge.errors import RefusedError
    from regauge.split.protocol.frames import Kind

    return (
        RefusedError(str(reply.values.get("code")), "")
        if reply.kind is Kind.ERROR
        else RuntimeError(f"the server replied {reply.kind.name}")
    )


def _generations(count: int, batch: int, tokens: int) -> Bomb:
    """Return a bomb: texts whose keys and values stay on the server."""

    def run(model: Any, server: ServerProcess) -> bool:
        with connect_model(model, server.address, 120.0), torch.no_grad():
            caches = [
                model(input_ids=ids(batch, tokens), use_cache=True).past_key_values
                for _ in range(count)
            ]
            return len(caches) == count

    return run


def _sessions(count: int, batch: int, tokens: int) -> Bomb:
    """Return a bomb: sessions whose last reply the server stores, to send it again."""

    def run(model: Any, server: ServerProcess) -> bool:
        from regauge.split import connect
        from regauge.split.server.network import Grpc

        with Grpc(server.address) as network:
            links = []
            try:
                for _ in range(count):
                    links.append(connect(model, network, patience=120.0))
                    forward(model, batch, tokens).logits.sum().backward()
                    links[-1].close()
            finally:
                for link in links:
                    link.end()
        return True

    return run


def _half_frames(count: int, size: int) -> Bomb:
    """Return a bomb: streams that each send most of a frame and wait."""

    def run(model: Any, server: ServerProcess) -> bool:
        from regauge.errors import RefusedError
        from regauge.split.protocol.channel import Loop
        from regauge.split.protocol.frames import Frame, Kind, chunks, encode
        from regauge.split.server.network import Grpc

        frame = Frame(Kind.FORWARD, 1, {"session": "0" * 32}, {"x": torch.zeros(size // 4)})
        pieces = list(chunks(encode(frame)))[:-1]

        async def send(stream: Any) -> None:
            for piece in pieces:
                await stream.write(piece)

        async def flood(network: Any) -> None:
            streams = [network._open_stream() for _ in range(count)]
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.gather(*map(send, streams)), 5)
            for stream in streams:
                stream.cancel()

        with Grpc(server.address) as network:
            Loop.run(flood(network), 60)
        raise RefusedError("waits", "streams past the client's share are not read")

    return run


BERT_BOMBS: dict[str, Bomb] = {
    "8 x 256 tokens, which fit": _pass(8, 256),
    "6.3 MB frame (8 x 512 tokens)": _pass(8, 512),
    "25 MB frame (32 x 512 tokens)": _pass(32, 512),
    "one text of 8192 tokens": _pass(1, 8192),
    "prediction of 1024 x 128 tokens": _prediction(1024, 128),
    "16 open passes of 8 x 128 tokens": _open_passes(16, 8, 128),
    "16.8 MB of BITS, no session": _bits(1 << 27, with_session=False),
    "16.8 MB of BITS, in a session": _bits(1 << 27, with_session=True),
    "last replies of 16 sessions": _sessions(16, 8, 128),
    "64 streams with 30 MB of a frame each": _half_frames(64, 32 * MB),
}
GPT2_BOMBS: dict[str, Bomb] = {
    "8 texts of 16 x 256 tokens, generated": _generations(8, 16, 256),
    "8 texts of 32 x 512 tokens, generated": _generations(8, 32, 512),
    "a text of 8192 tokens, generated": _generations(1, 1, 8192),
}


def memory_bombs(
    scale: float,
    options: tuple[str, ...] = ("--memory", f"{BUDGET_MB}M", "--client-memory", f"{BUDGET_MB}M"),
) -> Iterator[Outcome]:
    """Send requests that need far more memory than the server's budget, and measure the peak of
    its resident memory.
    """
    for build, bombs in ((minilm, BERT_BOMBS), (small_gpt2, GPT2_BOMBS)):
        model = build()
        model.train()
        with save_server(model) as folder, serve(folder, "--lr", "1e-4", *options) as server:
            with connect_model(model, server.address):
                # Allocates weights, gradients and moments before the measurement.
                forward(model, 2, 16).logits.sum().backward()
            for name, bomb in list(bombs.items())[
                : max(1, round(len(bombs) * min(1.0, scale * 10)))
            ]:
                # A bomb is several requests; a single one takes far less.
                count = Counter(f"split memory: {name}", 12 * HANG_SECONDS)
                with server.peak() as peak:
                    count.trial(partial(bomb, model, server))
                count.peak(peak[0], BUDGET_MB)
                yield count.outcome()


def frames(scale: float) -> Iterator[Outcome]:
    """Deliver mutated requests to a live host. Each must get a reply, a request must run at most
    once, and the weights must not change.
    """
    from regauge.errors import RefusedError
    from regauge.split import TransportError
    from regauge.split.protocol.frames import Kind, decode
    from regauge.split.protocol.transport import deliver
    from support.frame_mutants import SESSION, mutate, requests

    for name in ("gpt2", "llama"):
        count, rng = Counter(f"split frames: {name}"), random.Random(11)
        host, good = requests(name)
        weights, before = host.backbone(), 0.0
        trials = max(100, round(50_000 * scale))
        for i in range(trials):
            if SESSION not in host.sessions:  # a BYE that got through
                host, _ = requests(name)
            if i == min(1000, trials // 2):
                before = resident_mb()
            session, current = host.sessions[SESSION], host
            data, size = mutate(good, rng, session.done), rng.choice((17, 1000, 1 << 20))

            def run(
                data: bytes = data, size: int = size, host: Any = current, done: int = session.done
            ) -> bool:
                try:
                    reply = decode(
                        deliver(host, [data[at : at + size] for at in range(0, len(data), size)])
                    )
                except TransportError as error:  # half a frame is never answered
                    raise RefusedError("half", str(error)) from error
                session = host.sessions.get(SESSION)
                if session is not None and session.done not in (done, done + 1):
                    return False
                if reply.kind is Kind.ERROR:
                    raise _error_of(reply)
                return True

            count.trial(run, data)
            if len(session.pending) > 32:
                session.pending.clear()  # as if their gradients had arrived
        if any(not torch.equal(t, weights[n]) for n, t in host.backbone().items()):
            count.add("lost", "the weights have changed at a learning rate of 0")
        count.peak(max(0.0, resident_mb() - before), FRAMES_MB)
        yield count.outcome()


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / MB


def idle_connections(scale: float) -> Iterator[Outcome]:
    """Open TCP connections without a TLS handshake to a server with at most 1,024 open files. A
    client must still be able to train.
    """
    from regauge.split.protocol.certificates import make_certificates

    number = max(100, round(1200 * min(1.0, scale)))
    count = Counter(f"split flood: {number:,} idle connections", 6 * HANG_SECONDS)
    model = small_gpt2()
    with save_server(model) as folder:
        tls = make_certificates(folder / "certs", ["127.0.0.1"], ["ann"])["ann"]
        with serve(folder, "--lr", "1e-4", "--tls", str(folder / "certs"), files=1024) as server:
            host, _, port = server.address.rpartition(":")
            # Allocates weights, gradients and moments before the measurement.
            _trains(model, server, patience=50.0, tls=tls)
            with ExitStack() as stack, server.peak() as peak:
                for _ in range(number):
                    stack.enter_context(socket.create_connection((host, int(port)), 5))
                count.trial(lambda: _trains(model, server, patience=50.0, tls=tls))
            count.trial(lambda: _trains(model, server, patience=5.0, tls=tls))
            count.peak(peak[0], FLOOD_MB)
    yield count.outcome()


def watch_streams(scale: float) -> Iterator[Outcome]:
    """Open health streams of one client. Those beyond the limit must be rejected with
    RESOURCE_EXHAUSTED, and training must continue at its pace.
    """
    import grpc

    from regauge.errors import RefusedError

    number = max(100, round(10_000 * min(1.0, scale)))
    count = Counter(f"split flood: {number:,} Watch streams")
    model = small_gpt2()
    with save_server(model) as folder, serve(folder, "--lr", "1e-4") as server:
        alone = _step_seconds(model, server)
        with server.peak() as peak, grpc.insecure_channel(server.address) as channel:
            watch, streams = channel.unary_stream("/grpc.health.v1.Health/Watch"), []

            def opened() -> bool:
                stream = watch(b"", timeout=HANG_SECONDS)
                try:
                    next(stream)
                except grpc.RpcError as error:
                    if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                        raise
                    raise RefusedError("watch", "") from error
                streams.append(stream)
                return True

            for _ in range(number):
                count.trial(opened)
            with_streams = _step_seconds(model, server)
            for stream in streams:
                stream.cancel()
        count.peak(peak[0], FLOOD_MB)
    print(f"    p95 of a step: {alone:.3f} s alone, {with_streams:.3f} s with the streams open")
    yield count.outcome()


def _trains(model: Any, server: ServerProcess, patience: float, tls: Any = None) -> bool:
    from regauge.split import TransportError

    try:
        with connect_model(model, server.address, patience, tls):
            forward(model, 2, 16).logits.sum().backward()
    except TransportError:  # the client could not connect
        return False
    return True


def _step_seconds(model: Any, server: ServerProcess, steps: int = 40) -> float:
    """Return the 95th percentile of the seconds of a small training step."""
    seconds = []
    with connect_model(model, server.address, 30.0):
        for _ in range(steps):
            start = time.monotonic()
            forward(model, 2, 16).logits.sum().backward()
            seconds.append(time.monotonic() - start)
    return sorted(seconds)[int(0.95 * steps)]
