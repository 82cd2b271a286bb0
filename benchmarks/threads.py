"""Time of a match on a busy machine, with and without the limit on threads.

Two GPT-2s (1 layer, d 256) are matched while as many processes as cores compute beside it. BLAS is
started with four threads per core, as in a container that sees all cores of its host: without the
limit they spin against each other and against the busy processes. Interleaved, medians of wall
seconds, as ratios to the limited match. Goal: the limit never makes the match slower.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROUNDS = int(os.environ.get("REGAUGE_ROUNDS", "3"))
MODELS = """
import sys, torch
from transformers import GPT2Config, GPT2LMHeadModel
for seed, folder in enumerate(sys.argv[1:]):
    torch.manual_seed(seed)
    sizes = dict(n_embd=256, n_layer=1, n_head=8, vocab_size=2000, n_positions=64)
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(folder)
"""
MATCH = """
import sys, time
import regauge
kind, a, b = sys.argv[1:]
if kind == "one thread":
    regauge.set_threads(1)
match = regauge.match.__wrapped__ if kind == "unlimited" else regauge.match
started = time.perf_counter()
match(a, b, options=regauge.MatchOptions(sweeps=1))
print(time.perf_counter() - started)
"""
KINDS = ("limited", "one thread", "unlimited")


def main() -> int:
    cores = len(os.sched_getaffinity(0))
    many = {"OPENBLAS_NUM_THREADS": str(4 * cores), "MKL_NUM_THREADS": str(4 * cores)}
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"} | many
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as root:
        a, b = Path(root) / "a", Path(root) / "b"
        subprocess.run([sys.executable, "-c", MODELS, str(a), str(b)], check=True)
        busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(cores)]
        try:
            for _ in range(ROUNDS):
                for kind in KINDS:
                    out = subprocess.run(
                        [sys.executable, "-c", MATCH, kind, str(a), str(b)],
                        check=True,
                        env=environment,
                        stdout=subprocess.PIPE,
                        text=True,
                    )
                    seconds[kind].append(float(out.stdout))
        finally:
            for process in busy:
                process.kill()
                process.wait()
    medians = {kind: statistics.median(times) for kind, times in seconds.items()}
    for kind, times in seconds.items():
        print(
            f"{kind:12} {medians[kind]:6.2f} s ({min(times):.2f} to {max(times):.2f}), "
            f"{medians[kind] / medians['limited']:.2f}x the limited match"
        )
    met = medians["limited"] <= 1.1 * medians["unlimited"]
    print(f"goal: limited at most 1.1x as long as unlimited: {'met' if met else 'NOT MET'}")
    return 0 if met else 1
