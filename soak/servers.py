"""Split servers: damaged checkpoints, and processes killed during training."""

from __future__ import annotations

import copy
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from regauge.checkpoints.tensor_files import read_tensors, write_tensors
from regauge.split import Host, InProcess, OptimizerConfig, connect
from regauge.split.server.checkpoint import FILE, VERSION
from soak.harness import Counter, Outcome, mutants

MUTANTS, EDITS, KILLS, STEPS = 4_000, 1_000, 40, 12
OPTIONS = OptimizerConfig("adamw", 1e-2, accumulate=2)


def server_checkpoints(scale: float) -> Iterator[Outcome]:
    """Start servers from damaged checkpoints: all that differ from the good one must be rejected.

    Bytes are mutated with the checksum in place, and with it removed, as in files of older
    versions. Without a checksum, damage to a tensor's values cannot be detected; the server must
    still start in a valid state, or not at all.
    """
    from support.split_pairs import make_model

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _train(Host(make_model("gpt2"), OPTIONS, folder=folder), range(3))
        path, model = folder / FILE, make_model("gpt2")
        good, start = path.read_bytes(), copy.deepcopy(model.state_dict())
        expected = Host(model, OPTIONS, folder=folder).backbone()

        def starts(data: bytes, is_same: bool) -> bool:
            path.write_bytes(data)
            model.load_state_dict(start)
            host = Host(model, OPTIONS, folder=folder)
            weights = host.backbone()
            host.save()
            return not is_same or all(torch.equal(weights[n], t) for n, t in expected.items())

        header = 8 + int.from_bytes(good[:8], "little")
        count = Counter("server checkpoints: bytes")
        for data in mutants(good, 1, int(MUTANTS * scale), focus=header):
            count.trial(lambda data=data: starts(data, True), data)  # type: ignore[misc]
        yield count.outcome()
        path.write_bytes(good)
        tensors, metadata = read_tensors(path, "split", VERSION)
        save_file(tensors, path, metadata)
        bare = path.read_bytes()
        count = Counter("server checkpoints: bytes, no checksum")
        for data in mutants(bare, 2, int(MUTANTS * scale), focus=header):
            count.trial(lambda data=data: starts(data, False), data)  # type: ignore[misc]
        yield count.outcome()
        count, rng = Counter("server checkpoints: edits"), random.Random(3)
        for _ in range(int(EDITS * scale)):
            path.write_bytes(good)
            tensors, metadata = read_tensors(path, "split", VERSION)
            what = _edit(rng, tensors, metadata)
            write_tensors(path, tensors, metadata)
            data = path.read_bytes()
            count.trial(lambda data=data: starts(data, False), what.encode())  # type: ignore[misc]
        yield count.outcome()


def server_kills(scale: float) -> Iterator[Outcome]:
    """Kill a server (-9) at random moments while a client trains, and start it again.

    At the end the weights must be those of an undisturbed run, bit for bit.
    """
    import support.split_processes as splitprocs
    from support.ports import free_port

    count, rng = Counter("server kills"), random.Random(4)
    for _ in range(max(1, int(KILLS * scale))):
        with tempfile.TemporaryDirectory() as name:
            folder, port = Path(name), free_port()
            server = splitprocs.server(port, folder, every=1)
            client = splitprocs.client(port, folder, STEPS)
            try:
                for step in range(STEPS):
                    client.pipe.send(step + 1)
                    if rng.random() < 0.4:
                        client.pipe.poll(rng.uniform(0.0, 0.15))  # within the step, or after it
                        server.kill()
                        server = splitprocs.server(port, folder, every=1)
                client.receive("end")
                splitprocs.end_server(server)
                client.kill()
                saved, expected = splitprocs.saved_weights(folder, STEPS), splitprocs.calm(STEPS)
                is_right = all(torch.equal(saved[n], t) for n, t in expected.items())
                count.add("accepted" if is_right else "lost", None if is_right else "other weights")
            except AssertionError as error:
                count.add("hangs", str(error))
                client.kill()
                server.kill()
    yield count.outcome()


def _train(host: Host, steps: range) -> None:
    """Write a checkpoint with moments, pending gradients, an open pass and an ended session."""
    from support.split_pairs import batch, make_model, optimizer_of, train

    other, mine = make_model("gpt2"), make_model("gpt2")
    with connect(other, InProcess(host, "bob")) as link:
        train("gpt2", other, optimizer_of(other), range(2))
        link.end()
    with connect(mine, InProcess(host, "ann")):
        train("gpt2", mine, optimizer_of(mine), steps)
        loss = mine(**batch("gpt2", 9)).loss
        host.save()
        del loss


def _edit(rng: random.Random, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> str:
    """Change a checkpoint as a faulty writer might, and name the change."""
    key = rng.choice(sorted(tensors))
    tensor = tensors[key]
    if rng.random() < 0.4:
        data = next(mutants(metadata["about"].encode(), rng.randrange(1 << 30), 1))
        metadata["about"] = data.decode(errors="replace")
        return metadata["about"][:200]
    changes: dict[str, Callable[[], Any]] = {
        "drop": lambda: tensors.pop(key),
        "rename": lambda: tensors.update({f"{key}{rng.choice('/x')}": tensors.pop(key)}),
        "cast": lambda: tensors.update(
            {key: tensor.to(rng.choice([torch.float16, torch.float32, torch.int64, torch.bool]))}
        ),
        "shape": lambda: tensors.update({key: tensor.reshape(-1)[: rng.randrange(3)].clone()}),
        "fill": lambda: (
            tensor.is_floating_point()
            and tensor.fill_(rng.choice([float("nan"), float("inf"), -1.0, 1e300]))
        ),
        "swap": lambda: tensors.update({key: tensors[rng.choice(sorted(tensors))].clone()}),
    }
    what = rng.choice(sorted(changes))
    changes[what]()
    return f"{what} {key}"
