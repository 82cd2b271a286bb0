"""Match by weights with the users' defaults: CPU time against an earlier version, extrapolation to
a whole model, and anonymous memory.

Every pair is matched in a process of its own: A with an unrelated model of the same shape, and A
with a noisy copy (a random element applied to A, then Gaussian noise of a fifth of each tensor's
standard deviation). The spaces of layers are timed apart from the rest. What is left (reading,
products of tensors with the stream, distances) grows with the number of parameters and is divided
between layers and tables accordingly; the one decomposition of the stream counts with them, so the
extrapolation is an upper bound.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.move import Shape, make

# The last commit before language models were aligned by the text that they write.
BASELINE = os.environ.get("REGAUGE_BASELINE", "d17753a5")
NOISE = 0.2  # of each tensor's standard deviation
KINDS = ("noisy copy", "unrelated")
ONE_B = Shape(hidden=2048, layers=22, heads=32, kv=4, ffn=5632, vocab=32000)
SEVEN_B = Shape(hidden=4096, layers=32, heads=32, kv=32, ffn=11008, vocab=32000)


@dataclass(frozen=True)
class Cost:
    """The cost of one match.

    Attributes:
        cpu: CPU seconds.
        units: CPU seconds of these that the spaces of layers took.
        wall: wall seconds.
        memory: the largest anonymous memory of the process, in bytes.
        relative: the distance after the match, as a share of B's norm.
    """

    cpu: float
    units: float
    wall: float
    memory: float
    relative: float


def checkpoints(cache: Path, shape: Shape) -> dict[str, Path]:
    """Write A, an unrelated model and a noisy copy of A, unless they exist."""
    name = f"llama-{shape.layers}-{shape.hidden}-{shape.ffn}-{shape.kv}-{shape.vocab}"
    paths = {key: cache / f"{name}-{key.replace(' ', '-')}" for key in ("a", *KINDS)}
    for seed, key in enumerate(("a", "unrelated")):
        if not paths[key].exists():
            make(paths[key], seed, shape)
    if not paths["noisy copy"].exists():
        _write_noisy_copy(paths["a"], paths["noisy copy"])
    return paths


def _write_noisy_copy(source: Path, target: Path) -> None:
    """Move a checkpoint by a random element and add noise to its matrices."""
    import torch
    from safetensors.torch import save_file

    import regauge

    with tempfile.TemporaryDirectory(dir=target.parent) as root:
        regauge.move(str(source), 3).save(str(Path(root) / "moved"))
        moved = regauge.open_checkpoint(Path(root) / "moved")
        random, state = torch.Generator().manual_seed(5), {}
        for name, stored in moved.items():
            value = stored.float()
            if value.dim() > 1:
                noise = torch.empty_like(value).normal_(generator=random)
                value = value.add_(noise, alpha=NOISE * float(value.std()))
            state[name] = value.to(stored.dtype)
        out = Path(root) / "noisy"
        out.mkdir()
        save_file(state, out / "model.safetensors", metadata={"format": "pt"})
        shutil.copy(source / "config.json", out)
        out.rename(target)


def measure(a: Path, b: Path, sources: str | None = None, sweeps: int | None = None) -> Cost:
    """Match by weights in a new process of one thread.

    Args:
        a: the first checkpoint.
        b: the second.
        sources: the folder of the package; by default the one that runs.
        sweeps: the largest number of sweeps; by default that of users.
    """
    options = {} if sweeps is None else {"sweeps": sweeps}
    path = [str(sources)] if sources else []
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([*path, *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    module = [sys.executable, "-m", "benchmarks.match_defaults"]
    done = subprocess.run(
        [*module, str(a.resolve()), str(b.resolve()), json.dumps(options)],
        check=True,
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(__file__).resolve().parent.parent,
    )
    return Cost(**json.loads(done.stdout.splitlines()[-1]))


def baseline_sources(root: Path) -> str | None:
    """Extract the package of the baseline commit; None if the repository does not have it."""
    repository = Path(__file__).resolve().parent.parent
    packed = subprocess.run(
        ["git", "-C", str(repository), "archive", BASELINE, "src"], capture_output=True
    )
    if packed.returncode:
        return None
    subprocess.run(["tar", "-x", "-C", str(root)], input=packed.stdout, check=True)
    return str(root / "src")


def parameters(shape: Shape) -> tuple[int, int]:
    """Return the parameters of one layer, and of the tables."""
    width = shape.hidden
    attention = 2 * width * width + 2 * width * width * shape.kv // shape.heads
    return attention + 3 * width * shape.ffn, 2 * width * shape.vocab


def extrapolate(cost: Cost, shape: Shape, layers: int) -> float:
    """Return the CPU seconds for a number of layers, from a match of `shape.layers`."""
    layer, tables = parameters(shape)
    share = layer / (layer * shape.layers + tables)
    each = cost.units / shape.layers + (cost.cpu - cost.units) * share
    return cost.cpu + (layers - shape.layers) * each


def against_baseline(cache: Path, goal: float) -> bool:
    """Compare with the baseline on one layer of TinyLlama's shape. Returns whether both are met."""
    shape = replace(ONE_B, layers=1, vocab=int(os.environ.get("REGAUGE_VOCAB", "4096")))
    paths = checkpoints(cache, shape)
    print(f"\nDefaults by weights, one layer, d {shape.hidden}, {shape.vocab} tokens, CPU seconds")
    met = True
    with tempfile.TemporaryDirectory() as root:
        sources = baseline_sources(Path(root))
        for kind in KINDS:
            now = measure(paths["a"], paths[kind])
            line = f"{kind:11}  {now.cpu:7.1f} s now, {now.memory / 1e9:.2f} GB anonymous"
            if sources is None:
                print(f"{line}; no baseline: commit {BASELINE} is not in this repository")
                met = False
                continue
            before = measure(paths["a"], paths[kind], sources)
            ratio = now.cpu / before.cpu
            met = met and ratio <= goal
            print(
                f"{line}; {before.cpu:7.1f} s and {before.memory / 1e9:.2f} GB at {BASELINE}; "
                f"ratio {ratio:.2f} (goal: at most {goal}: {_verdict(ratio <= goal)}); relative "
                f"distance {now.relative:.4f}, was {before.relative:.4f}",
                flush=True,
            )
    return met


def seven_billion(cache: Path, hours: float, gigabytes: float) -> bool:
    """Measure one layer of a 7B shape and extrapolate. Returns whether all goals are met."""
    layers = int(os.environ.get("REGAUGE_LAYERS_7B", "1"))
    shape = replace(SEVEN_B, layers=layers, kv=int(os.environ.get("REGAUGE_KV_7B", "32")))
    paths = checkpoints(cache, shape)
    print(f"\n7B shape ({shape.kv} kv heads), {layers} of 32 layers, first pass and one sweep")
    met = True
    for kind in KINDS:
        cost = measure(paths["a"], paths[kind], sweeps=1)
        whole = extrapolate(cost, shape, SEVEN_B.layers) / 3600
        fast, small = whole <= hours, cost.memory <= gigabytes * 1e9
        met = met and fast and small
        print(
            f"{kind:11}  {cost.cpu:7.1f} CPU s, {cost.units / layers:6.1f} of these per layer's "
            f"own spaces; 32 layers: {whole:.2f} CPU-hours (goal {hours}: {_verdict(fast)}); "
            f"{cost.memory / 1e9:.2f} GB anonymous (goal {gigabytes}: {_verdict(small)})",
            flush=True,
        )
    return met


def whole_model(cache: Path) -> None:
    """Match a whole 1B shape with the defaults."""
    shape = replace(ONE_B, layers=int(os.environ.get("REGAUGE_LAYERS", "22")))
    paths = checkpoints(cache, shape)
    print(f"\nTinyLlama's shape, {shape.layers} layers, defaults by weights, one process")
    for kind in os.environ.get("REGAUGE_KINDS", ",".join(KINDS)).split(","):
        cost = measure(paths["a"], paths[kind])
        print(
            f"{kind:11}  {cost.cpu:7.1f} CPU s, {cost.wall:7.1f} s wall, "
            f"{cost.memory / 1e9:.2f} GB anonymous, relative distance {cost.relative:.4f}",
            flush=True,
        )


def _verdict(is_met: bool) -> str:
    return "met" if is_met else "missed"


def _child(a: str, b: str, options: dict[str, Any]) -> None:
    """Match two checkpoints in this process and print its cost as JSON."""
    import regauge
    from regauge.matching import search

    solve_unit, units = search._solve_unit, 0.0
    memory, stop = 0, threading.Event()

    def timed(task: Any) -> Any:
        nonlocal units
        started = time.process_time()
        solved = solve_unit(task)
        units += time.process_time() - started
        return solved

    def watch() -> None:
        nonlocal memory
        while not stop.wait(0.02):
            for line in Path("/proc/self/status").read_text().splitlines():
                if line.startswith("RssAnon:"):
                    memory = max(memory, 1024 * int(line.split()[1]))

    patched: Any = search
    patched._solve_unit = timed
    threading.Thread(target=watch, daemon=True).start()
    cpu, wall = time.process_time(), time.perf_counter()
    found = regauge.match(a, b, data=None, options=regauge.MatchOptions(**options))
    cost = {
        "cpu": time.process_time() - cpu,
        "units": units,
        "wall": time.perf_counter() - wall,
        "memory": memory,
        "relative": found.match.relative_distance,
    }
    stop.set()
    print(json.dumps(cost))


if __name__ == "__main__":
    _child(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
