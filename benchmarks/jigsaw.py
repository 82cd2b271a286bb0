"""What training with masked jigsaw puzzles costs: a step of ViT-S/16 at batch 16, wrapped and plain, in turns in one run.

Every step of a wrapped model has a puzzle (probability 1, twice the paper's), so that this is the most it can cost; the puzzles are drawn, patches
shuffled, positions swapped and the regression taken along. Each of $REGAUGE_ROUNDS (30) rounds has a step of every model, in an order that turns
round; the ratio is the median over rounds of wrapped / plain, with a bootstrap 95 % interval. One thread, so that the CPU seconds of a step are its
time on a core of its own, whatever else the machine does; seconds by the clock are told beside them. Goal: the method (J), per batch and per image,
within 2 % of plain. The regression by PCA (H) is reported apart.
"""

from __future__ import annotations

import copy
import os
import statistics
import time

import torch

from benchmarks.permuted import interval, vit
from regauge.jigsaw import MaskedJigsaw

ROUNDS = int(os.environ.get("REGAUGE_ROUNDS", "30"))
GOAL = 0.02
WAYS = {
    "J, per batch": {"variant": "J", "per": "batch"},
    "J, per image": {"variant": "J", "per": "sample"},
    "H (PCA), per batch": {"variant": "H", "per": "batch"},
}
Times = tuple[float, float]


def step(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> Times:
    """Seconds of a forward and a backward pass, by the clock and of the CPU."""
    clock, cpu = time.perf_counter(), time.process_time()
    model(images, labels=labels)["loss"].backward()
    took = time.perf_counter() - clock, time.process_time() - cpu
    for p in model.parameters():
        p.grad = None
    return took


def main() -> int:
    torch.set_num_threads(1)
    plain, inputs = vit()
    plain.train()
    images, labels = inputs["pixel_values"], torch.arange(16) % 10
    models: dict[str, torch.nn.Module] = {"plain": plain}
    models |= {name: MaskedJigsaw(copy.deepcopy(plain), 0.1, probability=1.0, **how).train() for name, how in WAYS.items()}
    times: dict[str, list[Times]] = {name: [] for name in models}
    print(f"ViT-S/16, batch 16, training: {ROUNDS} rounds", flush=True)
    for model in models.values():
        step(model, images, labels)
    names = list(models)
    for i in range(ROUNDS):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            times[name].append(step(models[name], images, labels))
    print(f"{'plain':20}  {statistics.median(t[1] for t in times['plain']):6.3f} CPU s")
    met = True
    for name in WAYS:
        clock, cpu = ([b[k] / a[k] for a, b in zip(times["plain"], times[name], strict=True)] for k in (0, 1))
        goal = not name.startswith("H")
        met &= statistics.median(cpu) <= 1 + GOAL or not goal
        told = "  ".join(
            f"{what} {statistics.median(r):6.4f} ({low:.4f} to {high:.4f})"
            for what, r in (("CPU", cpu), ("clock", clock))
            for low, high in [interval(r)]
        )
        print(f"{name:20}  {statistics.median(t[1] for t in times[name]):6.3f} CPU s, of plain: {told}{'' if goal else '  (no goal)'}")
    print(f"goal: J within {GOAL:.0%} of plain: {'met' if met else 'NOT MET'}")
    return 0 if met else 1
