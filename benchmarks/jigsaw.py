"""What training with masked jigsaw puzzles costs: a step of ViT-S/16 at batch 16, wrapped and plain, in turns in one run.

Every step of the wrapped model has a puzzle (probability 1, twice the paper's), so that this is the most it can cost; the puzzles are drawn, patches
shuffled, positions swapped and the regression taken along. The ratio is the median over $REGAUGE_ROUNDS (30) pairs of wrapped / plain, with a
bootstrap 95 % interval. Goal: the method (J), per batch and per image, within 2 % of plain. The regression by PCA (H) is reported apart.
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


def step(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    started = time.perf_counter()
    model(images, labels=labels)["loss"].backward()
    took = time.perf_counter() - started
    for p in model.parameters():
        p.grad = None
    return took


def main() -> int:
    plain, inputs = vit()
    plain.train()
    images, labels = inputs["pixel_values"], torch.arange(16) % 10
    met = True
    print(f"ViT-S/16, batch 16, training: {ROUNDS} pairs")
    for name, how in WAYS.items():
        wrapped = MaskedJigsaw(copy.deepcopy(plain), 0.1, probability=1.0, **how).train()
        pair = [plain, wrapped]
        for model in pair:
            step(model, images, labels)
        times: list[list[float]] = [[], []]
        for i in range(ROUNDS):
            for which in (0, 1) if i % 2 else (1, 0):
                times[which].append(step(pair[which], images, labels))
        ratios = [b / a for a, b in zip(*times, strict=True)]
        ratio, (low, high) = statistics.median(ratios), interval(ratios)
        goal = not name.startswith("H")
        met &= ratio <= 1 + GOAL or not goal
        print(
            f"{name:20}  {statistics.median(times[1]):6.3f} s  {ratio:6.4f} of plain ({low:.4f} to {high:.4f}){'' if goal else '  (no goal)'}",
            flush=True,
        )
    print(f"goal: J within {GOAL:.0%} of plain: {'met' if met else 'NOT MET'}")
    return 0 if met else 1
