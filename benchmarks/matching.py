"""Time and memory of matching: against a transcription of the formulas of Zhang et al., against an
earlier commit, and for the shapes of larger models.

1. GPT-2 small (12 layers, d 768, FFN 3072), two sets of random weights: rotations of QK and VO and
   the assignment of FFN neurons, by the transcription in `experiments.paper_003.reference_matcher`
   (numpy, float32, as in the paper's code; its layers are read before the timing) and by `match`.
   Interleaved, medians. Goal: not slower, in CPU seconds (wall seconds are printed too).
2. One layer of TinyLlama's shape (d 2048, FFN 5632, 32 heads over 4 kv heads, bf16 on disk) with
   the users' defaults by weights, for a noisy copy and for an unrelated model, against an earlier
   commit (REGAUGE_BASELINE) on the same files. Goal: at most 0.6 of its CPU time.
3. A 7B shape (d 4096, FFN 11008, 32 heads), first pass and one sweep, extrapolated from one layer.
   Goals: 1.0 CPU-hour, 4 GB of anonymous memory.
4. TinyLlama's whole shape, 22 layers, with the defaults.
5. The same with B a transformed A, without noise: the first pass, in one process and in two.

REGAUGE_PARTS chooses of transcription, layer, 7b, 1b, planted; REGAUGE_LAYERS the layers of the
whole shape, REGAUGE_VOCAB the tokens of part 2, REGAUGE_LAYERS_7B and REGAUGE_KV_7B those of part
3, REGAUGE_KINDS the pairs of part 4.
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

from benchmarks.match_defaults import against_baseline, seven_billion, whole_model
from benchmarks.move import Shape, make

PARTS = ("transcription", "layer", "7b", "1b", "planted")
LAYER_RATIO, CPU_HOURS, GIGABYTES = 0.6, 1.0, 4.0
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


def planted(cache: Path, layers: int) -> None:
    """Measure a noiseless transformed copy, in one process and in two."""
    a, b = cache / f"tiny-llama-{layers}", cache / f"tiny-llama-{layers}-planted"
    if not a.exists():
        make(a, 0, Shape(layers=layers, kv=4, ffn=5632))
    command = [sys.executable, "-m", "regauge.cli"]
    if not b.exists():
        move = ["move", a, "--random", "--group", "full", "--seed", "3", "-o", b]
        subprocess.run([*command, *map(str, move)], check=True)
    print(f"\nTinyLlama's shape with {layers} layers, transformed: the first pass over all groups")
    match = ["match", a, b, "-o", cache / "never", "--data", "weights", "--sweeps", "0"]
    for workers in (1, 2):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        started = time.perf_counter()
        subprocess.run(
            [*command, *map(str, match), "--dry-run", "--workers", str(workers)],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        print(
            f"{workers} process{'es' if workers > 1 else ''}: {wall:6.1f} s wall, {cpu:6.1f} s CPU"
        )


def main() -> int:
    parts = os.environ.get("REGAUGE_PARTS", ",".join(PARTS)).split(",")
    unknown = set(parts) - set(PARTS)
    if unknown:
        raise SystemExit(f"REGAUGE_PARTS must be of {', '.join(PARTS)}, got {min(unknown)}")
    cache = Path(os.environ.get("REGAUGE_BENCH") or Path(tempfile.gettempdir()) / "regauge-bench")
    cache.mkdir(parents=True, exist_ok=True)
    layers, met = int(os.environ.get("REGAUGE_LAYERS", "22")), True
    if "transcription" in parts:
        faster = compare()
        print(f"goal: not slower than the transcription: {'met' if faster else 'missed'}")
        met = met and faster
    if "layer" in parts:
        met = against_baseline(cache, LAYER_RATIO) and met
    if "7b" in parts:
        met = seven_billion(cache, CPU_HOURS, GIGABYTES) and met
    if "1b" in parts:
        whole_model(cache)
    if "planted" in parts:
        planted(cache, layers)
    return 0 if met else 1
