"""Time of `regauge move` on a 2 GB bf16 Llama-shaped checkpoint, against `cp` and `sync` of the
same files.

Goals: a permutation in at most 2.0 times the wall time, private memory at most two of the largest
tensors plus 200 MB. The full command is timed, Python's start included; warm cache, interleaved,
median of five. Full elements and rotations are reported too, from one run each. The checkpoint is
created once from a fixed seed in a cache folder: $REGAUGE_BENCH, or regauge-bench in the system's
temporary folder.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

GOAL_RATIO, GOAL_EXTRA = 2.0, 200e6
RUNS = 5
SHARD = 500_000_000
LARGEST = 32000 * 2048 * 2
MOVES = {
    "permutation": ["--group", "permutation"],
    "full, no folding": ["--group", "full"],
    "fold, orthogonal": ["--fold", "--group", "orthogonal"],
}


def main() -> int:
    cache = Path(os.environ.get("REGAUGE_BENCH") or Path(tempfile.gettempdir()) / "regauge-bench")
    cache.mkdir(parents=True, exist_ok=True)
    model = cache / "llama-2gb"
    if not model.exists():
        print(f"creating {model}", file=sys.stderr)
        make(model)
    out = cache / "out"
    copy = partial(shell, f"cp -r '{model}' '{out}' && sync")
    size = sum(p.stat().st_size for p in model.iterdir())
    print(
        f"{size / 1e9:.2f} GB in {len(list(model.glob('*.safetensors')))} shards, largest "
        f"tensor {LARGEST / 1e6:.0f} MB, {os.cpu_count()} cores"
    )
    times = interleave(
        {"cp + sync": copy, "permutation": partial(_move, model, out, MOVES["permutation"])}, out
    )
    memory: dict[str, float] = {}
    for name, options in MOVES.items():
        clean(out)
        alone = _move(model, out, options, sample=True)
        memory[name] = alone.pop("private")
        for key, seconds in alone.items():
            times.setdefault(f"{name}{key}", [seconds])
    clean(out)
    base = statistics.median(times["cp + sync"])
    print(
        f"{'':26}  {'median':>8}  {'least':>7}  {'most':>7}  {'ratio':>6}  {'private memory':>14}"
    )
    for name, seconds in times.items():
        median, private = (
            statistics.median(seconds),
            f"{memory[name] / 1e6:11.0f} MB" if name in memory else "",
        )
        print(
            f"{name:26}  {median:6.2f} s  {min(seconds):5.2f} s  {max(seconds):5.2f} s  "
            f"{median / base:6.2f}  {private:>14}"
        )
    ratio, private, limit = (
        statistics.median(times["permutation"]) / base,
        memory["permutation"],
        2 * LARGEST + GOAL_EXTRA,
    )
    met = "met" if ratio <= GOAL_RATIO and private <= limit else "NOT MET"
    print(
        f"goal: ratio {ratio:.2f} (at most {GOAL_RATIO}), private memory {private / 1e6:.0f} MB "
        f"(at most {limit / 1e6:.0f} MB): {met}"
    )
    return 0 if met == "met" else 1


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama."""

    hidden: int = 2048
    layers: int = 20
    heads: int = 32
    kv: int = 8
    ffn: int = 5504
    vocab: int = 32000


def make(folder: Path, seed: int = 0, shape_: Shape = Shape()) -> None:
    """Write the checkpoint, with regauge's writer."""
    import torch

    from regauge.checkpoints.plan import File, Plan, nbytes
    from regauge.checkpoints.writer import write_plan

    s = shape_
    kv = s.hidden * s.kv // s.heads
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (s.vocab, s.hidden)}
    for i in range(s.layers):
        at = f"model.layers.{i}."
        shapes |= {
            at + f"self_attn.{x}_proj.weight": (kv if x in "kv" else s.hidden, s.hidden)
            for x in "qkvo"
        }
        shapes |= {
            at + "mlp.gate_proj.weight": (s.ffn, s.hidden),
            at + "mlp.up_proj.weight": (s.ffn, s.hidden),
            at + "mlp.down_proj.weight": (s.hidden, s.ffn),
        }
        shapes |= {
            at + "input_layernorm.weight": (s.hidden,),
            at + "post_attention_layernorm.weight": (s.hidden,),
        }
    shapes |= {"model.norm.weight": (s.hidden,), "lm_head.weight": (s.vocab, s.hidden)}
    groups: list[list[str]] = [[]]
    shard_bytes = 0
    for name, shape in shapes.items():
        n = nbytes("BF16", shape)
        if shard_bytes + n > SHARD:
            groups.append([])
            shard_bytes = 0
        groups[-1].append(name)
        shard_bytes += n
    files = [
        File(
            f"model-{i + 1:05}-of-{len(groups):05}.safetensors",
            tuple((n, "BF16", shapes[n]) for n in names),
            {"format": "pt"},
        )
        for i, names in enumerate(groups)
    ]
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": s.hidden,
        "intermediate_size": s.ffn,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv,
        "vocab_size": s.vocab,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    index = {
        "metadata": {"total_size": sum(nbytes("BF16", x) for x in shapes.values())},
        "weight_map": {n: f.name for f in files for n, _, _ in f.tensors},
    }

    def sample(place: int, shape: tuple[int, ...]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * seed + place)
        return torch.empty(shape, dtype=torch.bfloat16).normal_(
            1.0 if len(shape) == 1 else 0.0, 0.02, generator=generator
        )

    thunks: dict[str, Callable[[], torch.Tensor]] = {
        name: partial(sample, i, shape) for i, (name, shape) in enumerate(shapes.items())
    }
    small = {
        "config.json": json.dumps(config).encode(),
        "model.safetensors.index.json": json.dumps(index).encode(),
    }
    write_plan(folder, Plan(tuple(files), small), thunks)


def interleave(
    subjects: dict[str, Callable[[], dict[str, float]]], out: Path
) -> dict[str, list[float]]:
    """Measure wall times in rounds over the subjects, after one round that warms the cache."""
    times: dict[str, list[float]] = {}
    for turn in range(RUNS + 1):
        for name, run in subjects.items():
            clean(out)
            for key, seconds in run().items():
                if turn:
                    times.setdefault(f"{name}{key}", []).append(seconds)
    return times


def clean(out: Path) -> None:
    shutil.rmtree(out, ignore_errors=True)
    os.sync()


def shell(command: str) -> dict[str, float]:
    start = time.perf_counter()
    subprocess.run(command, shell=True, check=True)
    return {"": time.perf_counter() - start}


def _move(model: Path, out: Path, options: list[str], sample: bool = False) -> dict[str, float]:
    """Return the seconds of the command; with `sample`, the largest private memory in bytes too."""
    mode = "sample" if sample else "plain"
    command = [
        sys.executable,
        "-m",
        "benchmarks.move",
        mode,
        "move",
        str(model),
        "-o",
        str(out),
        "--random",
        "--seed",
        "1",
        *options,
    ]
    start = time.perf_counter()
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    return {"": seconds, **({"private": float(done.stdout)} if sample else {})}


def _child(arguments: list[str]) -> int:
    """Run the command in this process. In mode "sample", measure its private dirty memory every
    20 ms and print the largest.
    """
    from regauge.cli import main as command

    mode, *rest = arguments
    largest, stop = 0, threading.Event()

    def watch() -> None:
        nonlocal largest
        while not stop.wait(0.02):
            lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
            largest = max(
                largest,
                sum(
                    1024 * int(line.split()[1])
                    for line in lines
                    if line.startswith("Private_Dirty:")
                ),
            )

    if mode == "sample":
        threading.Thread(target=watch, daemon=True).start()
    code = command(rest)
    stop.set()
    print(largest)
    return code


if __name__ == "__main__":
    sys.exit(_child(sys.argv[1:]))
