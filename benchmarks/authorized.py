"""What the edges of an authorised model cost beside the plain model: time, peak memory and FLOPs, in one run.

The models are those of `permuted`, locked by permutations of the stream and of every inner space, and (the ViT, folded) by rotations: two products
with a matrix of the stream's width. Interleaved: each round runs every variant once, in turn; the
ratio is the median over rounds of variant / plain, with a bootstrap 95 % interval. Goal: permutations within 1 % of plain, in time and memory.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.permuted import _memory, causal, flops, interval, step, vit
from regauge import apply_, element, fold_norms, spec_of
from regauge.edge import authorized

ROUNDS = int(os.environ.get("REGAUGE_ROUNDS", "30"))
GOAL = 0.01
Maker = Callable[[], tuple[Any, dict[str, Any]]]
MODELS: dict[str, tuple[Maker, tuple[str, ...]]] = {
    "ViT-S/16, batch 16": (vit, ("plain", "permutation", "rotation")),
    "GPT-2 of that size, 8 x 256 tokens": (causal, ("plain", "permutation")),
}


def variant(make: Maker, kind: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    model, inputs = make()
    if kind == "plain":
        return model, inputs
    spec = spec_of(model)
    if kind == "rotation":
        spec, state = fold_norms(spec, model.state_dict())
        model.load_state_dict(state)
    g = element(spec, 1, within="orthogonal" if kind == "rotation" else "permutation")
    apply_(g, model, part="backbone")
    return authorized(model, g), inputs


def peak(model: str, kind: str, training: bool) -> float:
    """Peak resident memory of one step in a process of its own, less what was resident before it."""
    code = f"from benchmarks.authorized import once; once({model!r}, {kind!r}, {training})"
    return float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()[-1])


def once(model: str, kind: str, training: bool) -> None:
    made, inputs = variant(MODELS[model][0], kind)
    made.train(training)
    before = _memory("VmRSS")
    step(made, inputs, training)
    print(_memory("VmHWM") - before)


def main() -> int:
    met = True
    for name, (make, kinds) in MODELS.items():
        made = {kind: variant(make, kind) for kind in kinds}
        for training in (False, True):
            times: dict[str, list[float]] = {kind: [] for kind in kinds}
            for model, inputs in made.values():
                model.train(training)
                step(model, inputs, training)
            for i in range(ROUNDS):
                turn = i % len(kinds)
                for kind in kinds[turn:] + kinds[:turn]:
                    started = time.perf_counter()
                    step(*made[kind], training)
                    times[kind].append(time.perf_counter() - started)
            memory = {kind: statistics.median(peak(name, kind, training) for _ in range(3)) for kind in kinds}
            work = {kind: flops(*made[kind], training) for kind in kinds}
            print(f"\n{name}, {'training' if training else 'inference'}: {ROUNDS} rounds")
            print(f"{'':11}  {'median':>8}  {'time / plain':>22}  {'peak memory':>18}  {'GFLOPs':>14}")
            for kind in kinds:
                ratios = [a / b for a, b in zip(times[kind], times["plain"], strict=True)]
                low, high = interval(ratios)
                ratio, more = statistics.median(ratios), memory[kind] / memory["plain"]
                line = f"{statistics.median(times[kind]):6.2f} s  {ratio:6.3f} ({low:.3f} to {high:.3f})"
                print(f"{kind:11}  {line}  {memory[kind] / 1e6:8.0f} MB {more:6.3f}  {work[kind] / 1e9:7.1f} {work[kind] / work['plain']:6.3f}")
                if kind == "permutation":
                    met &= ratio <= 1 + GOAL and more <= 1 + GOAL
    print(f"\ngoal: permutations within {GOAL:.0%} of plain in time and memory: {'met' if met else 'NOT MET'}")
    return 0 if met else 1
