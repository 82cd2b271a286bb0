"""What training with masked jigsaw puzzles costs: a step of ViT-S/16 at batch 16, wrapped and
plain, in turns in one run.

Every step of a wrapped model has a puzzle (probability 1, twice the paper's), so that this is the
most it can cost; the puzzles are drawn, patches shuffled, positions swapped and the regression
taken along. Each of $REGAUGE_ROUNDS (30) rounds has a step of the plain model and one of the method
(J, per batch), in an order that turns round, and every third round one of J per image and one of
the regression by PCA (H); the ratio is the median over rounds of wrapped / plain, with a bootstrap
95 % interval. One thread, so that the CPU seconds of a step are its time on a core of its own,
whatever else the machine does; seconds by the clock are told beside them. Goal: J within 2 % of
plain.
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
SELDOM = 3  # rounds from one step of what has no goal to the next
METHOD = "J, per batch"
WAYS = {
    METHOD: {"variant": "J", "per": "batch"},
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
    models |= {
        name: MaskedJigsaw(copy.deepcopy(plain), 0.1, probability=1.0, **how).train()
        for name, how in WAYS.items()
    }
    pairs: dict[str, list[tuple[Times, Times]]] = {name: [] for name in WAYS}
    print(f"ViT-S/16, batch 16, training: {ROUNDS} rounds", flush=True)
    for model in models.values():
        step(model, images, labels)
    for i in range(ROUNDS):
        names = list(models) if i % SELDOM == 0 else list(models)[:2]
        took = {
            name: step(models[name], images, labels)
            for name in (names if i % 2 else reversed(names))
        }
        for name in names[1:]:
            pairs[name].append((took["plain"], took[name]))
    medians = {}
    for name, found in pairs.items():
        clock, cpu = ([b[k] / a[k] for a, b in found] for k in (0, 1))
        medians[name] = statistics.median(cpu)
        told = [
            f"{what} {statistics.median(r):.4f} ({low:.4f} to {high:.4f})"
            for what, r in (("CPU", cpu), ("clock", clock))
            for low, high in [interval(r)]
        ]
        print(
            f"{name:20} {statistics.median(b[1] for _, b in found):6.3f} CPU s; of plain, "
            f"{len(found)} pairs: {', '.join(told)}"
        )
    met = medians[METHOD] <= 1 + GOAL
    print(f"goal: {METHOD}, within {GOAL:.0%} of plain: {'met' if met else 'NOT MET'}")
    return 0 if met else 1
