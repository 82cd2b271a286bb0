"""Attack a live split server: memory bombs, floods of connections and health streams, mutated frames."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from soak.harness import HANG_SECONDS, Counter, Outcome

MB = 1 << 20
BUDGET_MB = 1024


@dataclass
class ServerProcess:
    """A `regauge split serve` in a process of its own, and its resident memory."""

    process: subprocess.Popen[str]
    address: str
    lines: list[str] = field(default_factory=list)

    def memory_mb(self, name: str = "VmRSS") -> float:
        found = re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{self.process.pid}/status").read_text())
        return int(found[1]) / 1024 if found else 0.0

    @contextmanager
    def peak(self) -> Iterator[list[float]]:
        """Measure the peak growth of resident memory in MB (Linux: VmHWM, reset before)."""
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")
        before, out = self.memory_mb(), [0.0]
        yield out
        out[0] = max(0.0, self.memory_mb("VmHWM") - before)


@contextmanager
def serve(folder: Path, *options: str) -> Iterator[ServerProcess]:
    command = [sys.executable, "-m", "regauge", "split", "serve", str(folder), "--listen", "127.0.0.1:0", *options]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines: list[str] = []
    try:
        for line in process.stderr:
            lines.append(line.rstrip())
            found = re.search(r"listens on (127\.0\.0\.1:\d+)", line)
            if found:
                threading.Thread(target=lambda: lines.extend(map(str.rstrip, process.stderr or ())), daemon=True).start()
                yield ServerProcess(process, found[1], lines)
                return
        raise RuntimeError("\n".join(lines))
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(60)
        process.kill()
        process.wait()


def minilm() -> Any:
    """A BERT of MiniLM's size, from a config."""
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"num_hidden_layers": 6, "hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536}
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(vocab_size=30522, max_position_embeddings=8192, **sizes))


def small_gpt2() -> Any:
    """A GPT-2 of MiniLM's size, from a config."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(n_layer=6, n_embd=384, n_head=12, vocab_size=1000, n_positions=8192, **ends))


@contextmanager
def saved(model: Any) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        yield Path(folder)


def ids(batch: int, tokens: int) -> torch.Tensor:
    return torch.randint(5, 900, (batch, tokens), generator=torch.Generator().manual_seed(1))


def forward(model: Any, batch: int, tokens: int) -> Any:
    return model(input_ids=ids(batch, tokens), attention_mask=torch.ones(batch, tokens, dtype=torch.long))


@contextmanager
def linked(model: Any, address: str, patience: float = 5.0) -> Iterator[Any]:
    from regauge.split import connect
    from regauge.split.network import Grpc

    with Grpc(address) as network:
        link = connect(model, network, patience=patience)
        try:
            yield link
        finally:
            link.end()


Bomb = Callable[[Any, ServerProcess], bool]


def _pass(batch: int, tokens: int) -> Bomb:
    """One forward pass of this size, and its backward pass if it is admitted."""

    def run(model: Any, server: ServerProcess) -> bool:
        with linked(model, server.address, 120.0):
            forward(model, batch, tokens).logits.sum().backward()
        return True

    return run


def _prediction(batch: int, tokens: int) -> Bomb:
    def run(model: Any, server: ServerProcess) -> bool:
        with linked(model, server.address, 120.0), torch.no_grad():
            forward(model, batch, tokens)
        return True

    return run


def _open_passes(count: int, batch: int, tokens: int) -> Bomb:
    """Forward passes that are never finished."""

    def run(model: Any, server: ServerProcess) -> bool:
        with linked(model, server.address, 120.0):
            graphs = [forward(model, batch, tokens).logits for _ in range(count)]
            return len(graphs) == count

    return run


def _bits(elements: int, with_session: bool) -> Bomb:
    """A mask of one bit per entry that has eight bytes per entry when it is unpacked."""

    def run(model: Any, server: ServerProcess) -> bool:
        from regauge.split.frames import Frame, Kind, decode, encode
        from regauge.split.network import Grpc

        mask = torch.zeros(1, dtype=torch.float64).expand(elements).contiguous()
        values = {"boundary": "", "training": True, "plain": [], "layouts": [], "order": [], "wants": [], "release": []}
        if with_session:
            with linked(model, server.address) as link:
                link.log.ask(Frame(Kind.FORWARD, 0, values, {"x": mask}), exact=("x",))
        with Grpc(server.address) as network:
            frame = Frame(Kind.FORWARD, 1, {**values, "session": "0" * 32}, {"x": mask})
            reply = decode(network.exchange(list(encode(frame, exact=("x",)))))
        raise _error_of(reply)

    return run


def _error_of(reply: Any) -> Exception:
    from regauge.split.frames import Kind, RefusedError

    return RefusedError(str(reply.values.get("code")), "") if reply.kind is Kind.ERROR else RuntimeError(f"the server replied {reply.kind.name}")


def _generations(count: int, batch: int, tokens: int) -> Bomb:
    """Texts whose keys and values stay with the server."""

    def run(model: Any, server: ServerProcess) -> bool:
        with linked(model, server.address, 120.0), torch.no_grad():
            held = [model(input_ids=ids(batch, tokens), use_cache=True).past_key_values for _ in range(count)]
            return len(held) == count

    return run


def _sessions(count: int, batch: int, tokens: int) -> Bomb:
    """Sessions whose last reply stays with the server, so that it can be sent again."""

    def run(model: Any, server: ServerProcess) -> bool:
        from regauge.split import connect
        from regauge.split.network import Grpc

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
    """Streams that each send most of a frame, and wait."""

    def run(model: Any, server: ServerProcess) -> bool:
        from regauge.split.channel import Loop
        from regauge.split.frames import Frame, Kind, chunks, encode
        from regauge.split.network import Grpc

        frame = Frame(Kind.FORWARD, 1, {"session": "0" * 32}, {"x": torch.zeros(size // 4)})
        pieces = list(chunks(encode(frame)))[:-1]

        async def send(stream: Any) -> None:
            for piece in pieces:
                await stream.write(piece)

        with Grpc(server.address) as network:
            streams = []
            for _ in range(count):

                async def opened() -> Any:
                    return network._open()

                streams.append(Loop.run(opened(), 10))
            import asyncio

            work = [asyncio.run_coroutine_threadsafe(send(s), Loop.get()) for s in streams]
            time.sleep(5)
            for w in work:
                w.cancel()
        from regauge.split.frames import RefusedError

        raise RefusedError("waits", "")

    return run


BERT_BOMBS: dict[str, Bomb] = {
    "6.3 MB frame (8 x 512 tokens)": _pass(8, 512),
    "25 MB frame (32 x 512 tokens)": _pass(32, 512),
    "one text of 8192 tokens": _pass(1, 8192),
    "prediction of 1024 x 128 tokens": _prediction(1024, 128),
    "16 open passes of 8 x 128 tokens": _open_passes(16, 8, 128),
    "16.8 MB of BITS, no session": _bits(1 << 27, with_session=False),
    "16.8 MB of BITS, in a session": _bits(1 << 27, with_session=True),
    "last replies of 48 sessions": _sessions(48, 16, 128),
    "64 streams with 30 MB of a frame each": _half_frames(64, 32 * MB),
}
GPT2_BOMBS: dict[str, Bomb] = {
    "8 texts of 32 x 512 tokens, generated": _generations(8, 32, 512),
    "a text of 8192 tokens, generated": _generations(1, 1, 8192),
}


def memory_bombs(scale: float, options: tuple[str, ...] = ("--memory", f"{BUDGET_MB}M", "--client-memory", f"{BUDGET_MB}M")) -> Iterator[Outcome]:
    """Send requests that need far more memory than the server's budget; measure the peak of its resident memory."""
    for build, bombs in ((minilm, BERT_BOMBS), (small_gpt2, GPT2_BOMBS)):
        model = build()
        model.train()
        with saved(model) as folder, serve(folder, "--rate", "1e-4", *options) as server:
            with linked(model, server.address):
                forward(model, 2, 16).logits.sum().backward()  # so that weights, gradients and moments are there
            for name, bomb in list(bombs.items())[: max(1, round(len(bombs) * min(1.0, scale * 10)))]:
                count = Counter(f"split memory: {name}", 12 * HANG_SECONDS)  # several requests each; one is answered in far less
                with server.peak() as peak:
                    count.trial(partial(bomb, model, server))
                count.peak(peak[0], BUDGET_MB)
                yield count.outcome()
