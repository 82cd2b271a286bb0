"""Time of matching: against a transcription of the formulas of Zhang et al. on the
same pair, and of a full sweep on a TinyLlama shape.

1. GPT-2 small (12 layers, d 768, FFN 3072), two sets of random weights: rotations of QK and VO and
   the assignment of FFN neurons, by the transcription in `experiments.paper_003.reference_matcher`
   (numpy, float32, as in the paper's code; its layers are read before the timing) and by `match`.
   Interleaved, medians. Goal: not slower, in CPU seconds (wall seconds are printed too).
2. TinyLlama's shape (22 layers, d 2048, FFN 5632, 32 heads over 4 key-value heads), bf16 on disk,
   with B a transformed A: one full search over the full group, in one process and in two: wall
   seconds, CPU seconds, peak memory of the largest process.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROUNDS = int(os.environ.get("REGAUGE_ROUNDS", "5"))
LAYERS, HEADS, WIDTH, FFN = 12, 12, 768, 3072


def gpt2(seed: int) -> dict[str, Any]:
    import torch

    random = torch.Generator().manual_seed(seed)
    shapes = {"transformer.wte.weight": (1024, WIDTH), "transformer.wpe.weight": (64, WIDTH)}
    for i in range(LAYERS):
        at = f"transformer.h.{i}."
        shapes |= {
            at + "ln_1.weight": (WIDTH,),
            at + "ln_1.bias": (WIDTH,),
            at + "ln_2.weight": (WIDTH,),
            at + "ln_2.bias": (WIDTH,),
        }
        shapes |= {
            at + "attn.c_attn.weight": (WIDTH, 3 * WIDTH),
            at + "attn.c_attn.bias": (3 * WIDTH,),
        }
        shapes |= {at + "attn.c_proj.weight": (WIDTH, WIDTH), at + "attn.c_proj.bias": (WIDTH,)}
        shapes |= {
            at + "mlp.c_fc.weight": (WIDTH, FFN),
            at + "mlp.c_fc.bias": (FFN,),
            at + "mlp.c_proj.weight": (FFN, WIDTH),
        }
        shapes |= {at + "mlp.c_proj.bias": (WIDTH,)}
    shapes |= {"transformer.ln_f.weight": (WIDTH,), "transformer.ln_f.bias": (WIDTH,)}
    return {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}


def transcribed(layers: list[list[Any]]) -> None:
    """Match as Zhang et al. do, layer by layer: two SVDs per head, one assignment per layer."""
    from experiments.paper_003 import reference_matcher

    for a, b in zip(*layers, strict=True):
        reference_matcher.matched(a, b, rescale=False)


def ours(spec: Any, a: dict[str, Any], b: dict[str, Any]) -> None:
    from regauge.matching import match_states

    match_states(spec, a, b, spaces=["qk", "vo", "ffn"], within="orthogonal", whole=True, sweeps=0)


def compare() -> bool:
    """Compare `match` with the transcription. Returns whether it is not slower."""
    import torch

    from experiments.paper_003 import reference_matcher
    from regauge import spec_of

    config = {
        "model_type": "gpt2",
        "n_embd": WIDTH,
        "n_layer": LAYERS,
        "n_head": HEADS,
        "n_positions": 64,
        "vocab_size": 1024,
    }
    spec = spec_of({**config, "architectures": ["GPT2Model"], "bos_token_id": 0, "eos_token_id": 0})
    a, b = ({n.removeprefix("transformer."): t for n, t in gpt2(seed).items()} for seed in (0, 1))
    prefixed = [{f"transformer.{n}": t for n, t in state.items()} for state in (a, b)]
    layers = [reference_matcher.read(state, "gpt2", HEADS, np.float32) or [] for state in prefixed]
    times: dict[str, list[tuple[float, float]]] = {"transcription": [], "match": []}
    for _ in range(ROUNDS):
        for name, run in (
            ("transcription", lambda: transcribed(layers)),
            ("match", lambda: ours(spec, a, b)),
        ):
            cpu, wall = time.process_time(), time.perf_counter()
            run()
            times[name].append((time.process_time() - cpu, time.perf_counter() - wall))
    print(f"GPT-2 small, as Zhang et al. match, {ROUNDS} rounds, {torch.get_num_threads()} threads")
    ratios = []
    for i, what in enumerate(("CPU", "wall")):
        for name, pairs in times.items():
            print(
                f"{name:14}  {what:4}  median {statistics.median(t[i] for t in pairs):6.2f} s  "
                f"least {min(t[i] for t in pairs):6.2f} s"
            )
        ratios.append(
            statistics.median(
                x[i] / y[i] for x, y in zip(times["match"], times["transcription"], strict=True)
            )
        )
    print(
        f"match / transcription: {ratios[0]:.2f} CPU, {ratios[1]:.2f} wall (distances by module "
        "are part of what match returns)"
    )
    return ratios[0] <= 1.0


def tiny_llama(layers: int) -> None:
    from benchmarks.move import Shape, make

    cache = Path(os.environ.get("REGAUGE_BENCH") or Path(tempfile.gettempdir()) / "regauge-bench")
    cache.mkdir(parents=True, exist_ok=True)
    a, b = cache / f"tiny-llama-{layers}", cache / f"tiny-llama-{layers}-planted"
    if not a.exists():
        make(a, 0, Shape(layers=layers, kv=4, ffn=5632))
    if not b.exists():
        subprocess.run(
            [
                sys.executable,
                "-m",
                "regauge.cli",
                "move",
                a,
                "--random",
                "--group",
                "full",
                "--seed",
                "3",
                "-o",
                b,
            ],
            check=True,
        )
    print(f"\nTinyLlama's shape with {layers} layers: one full search over the full group")
    for workers in (1, 2):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        started = time.perf_counter()
        command = [
            sys.executable,
            "-m",
            "regauge.cli",
            "match",
            a,
            b,
            "-o",
            cache / "never",
            "--sweeps",
            "0",
            "--dry-run",
            "--workers",
            str(workers),
        ]
        subprocess.run(
            [*map(str, command)], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        print(
            f"{workers} process{'es' if workers > 1 else ''}: {wall:6.1f} s wall, {cpu:6.1f} s "
            f"CPU, {after.ru_maxrss / 1e6:5.2f} GB in the largest"
        )


def main() -> int:
    met = compare()
    tiny_llama(int(os.environ.get("REGAUGE_LAYERS", "22")))
    print(f"goal: not slower than the transcription: {'met' if met else 'missed'}")
    return 0 if met else 1
