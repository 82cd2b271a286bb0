"""Server and client of a split training as processes of their own, for what signals do to them.

They say what happens through pipes; the client trains as far as it is allowed to, so that a fault
finds it at work.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from regauge.core.element import Element
from regauge.split import Host, InProcess, RemoteBackbone, TransportError, connect
from support import forks
from support.split_pairs import (
    ADAMW,
    assemble_state,
    columns,
    lock_backbone,
    make_model,
    optimizer_of,
)

SECRET = 5
PATIENCE = 300.0


def wide(step: int, rows: int = 64) -> dict[str, torch.Tensor]:
    """A batch whose stream takes some tens of kilobytes, so that a connection can break in the
    middle of it.
    """
    ids = torch.randint(3, 30, (rows, 16), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


def train_steps(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: range,
    rows: int = 64,
    after: Callable[[int], None] | None = None,
) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(**wide(step, rows)).loss.backward()
        optimizer.step()
        if after is not None:
            after(step)


@cache
def calm(steps: int, rows: int = 64) -> dict[str, torch.Tensor]:
    """The weights of a run that nothing disturbs."""
    mine = make_model("gpt2")
    g = columns(mine)
    host = Host(lock_backbone(mine, g), ADAMW)
    with connect(mine, InProcess(host), element=g, rows="batch", secret=SECRET):
        train_steps(mine, optimizer_of(mine), range(steps), rows)
    return assemble_state(mine, host, g)


def saved_weights(folder: Path, steps: int) -> dict[str, torch.Tensor]:
    """The weights that a client and a server have left in their folders."""
    mine = make_model("gpt2")
    g = columns(mine)
    host = Host(lock_backbone(mine, g), ADAMW, folder=folder / "server")
    assert host.step == steps
    mine.load_state_dict(torch.load(folder / "client.pt", weights_only=True)["model"])
    return assemble_state(mine, host, g)


class Child:
    """A process and what it says."""

    def __init__(self, target: Callable[..., None], *args: Any) -> None:
        self.pipe, there = forks.CONTEXT.Pipe()
        self.process = forks.start(target, there, *args, daemon=True)
        there.close()

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()

    def receive(self, what: str, seconds: float = 300.0) -> tuple[Any, ...]:
        """Return the next message of this kind; those before it are dropped."""
        until = time.monotonic() + seconds
        while self.pipe.poll(max(0.0, until - time.monotonic())):
            message: tuple[Any, ...] = self.pipe.recv()
            if message[0] == what:
                return message
        raise AssertionError(f"the child has not said {what!r} in {seconds:g} s")


def server(port: int, folder: Path, every: int = 2) -> Child:
    child = Child(_serve, port, str(folder / "server"), every)
    child.receive("ready")
    return child


def client(port: int, folder: Path, steps: int) -> Child:
    return Child(_train, port, str(folder), steps)


def end_server(child: Child) -> None:
    """Let a server keep what it has, and end."""
    child.pipe.send("end")
    child.receive("ended")
    child.kill()


def _serve(pipe: Connection, port: int, folder: str, every: int) -> None:
    torch.set_num_threads(1)
    from regauge.split.server.network import Server

    model = make_model("gpt2")
    served = Server(
        Host(lock_backbone(model, columns(model)), ADAMW, folder=folder, save_every=every),
        f"127.0.0.1:{port}",
    )
    pipe.send(("ready",))
    pipe.recv()
    served.stop()
    pipe.send(("ended",))


def _train(pipe: Connection, port: int, folder: str, steps: int) -> None:
    """From the last checkpoint to the end. A step is begun when the parent has allowed it."""
    torch.set_num_threads(1)
    from regauge.split.server.network import Grpc

    class RecordingGrpc(Grpc):
        def exchange(self, request: Any) -> Any:
            try:
                return super().exchange(request)
            except TransportError as error:
                pipe.send(("broken", str(error), time.monotonic()))
                raise

    model = make_model("gpt2")
    g: Element = columns(model)
    path, allowed = Path(folder) / "client.pt", 0
    with RecordingGrpc(f"127.0.0.1:{port}") as network:
        link: RemoteBackbone = connect(
            model,
            network,
            element=g,
            rows="batch",
            secret=SECRET,
            journal=Path(folder) / "journal",
            patience=PATIENCE,
        )
        optimizer, done = optimizer_of(model), 0
        if path.exists():
            state = torch.load(path, weights_only=True)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            link.load_state_dict(state["link"])
            done = state["step"]

        def after(step: int) -> None:
            pipe.send(("step", step, time.monotonic()))
            if step % 3 == 2 or step == steps - 1:
                _save(
                    path,
                    {
                        "step": step + 1,
                        "model": model.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "link": link.state_dict(),
                    },
                )
                link.mark_saved()

        for step in range(done, steps):
            while allowed <= step:
                allowed = pipe.recv()
            train_steps(model, optimizer, range(step, step + 1), after=after)
        pipe.send(("end",))
        pipe.recv()


def _save(path: Path, state: dict[str, Any]) -> None:
    beside = path.with_suffix(".partial")
    torch.save(state, beside)
    beside.replace(path)
