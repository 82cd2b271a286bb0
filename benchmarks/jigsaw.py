"""Cost of training with masked jigsaw puzzles: a step of ViT-S/16 at batch 16, wrapped and plain,
interleaved in one run.

Every step of a wrapped model has a puzzle (probability 1, twice the paper's), so this is an upper
bound; it includes sampling puzzles, shuffling patches, swapping positions and the regression. Each
of $REGAUGE_ROUNDS (30) rounds has a step of the plain model and one of the method (J, per batch),
in alternating order, and every third round one of J per image and one of the regression by PCA (H).
The ratio is the median over rounds of wrapped / plain, with a bootstrap 95 % interval. One thread,
so that the CPU seconds of a step are its time on an otherwise idle core; wall seconds are printed
too. Goal: J within 2 % of plain.
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
EXTRA_EVERY = 3  # variants without a goal run in every third round
METHOD = "J, per batch"
VARIANTS = {
    METHOD: {"variant": "J", "per": "batch"},
    "J, per image": {"variant": "J", "per": "sample"},
    "H (PCA), per batch": {"variant": "H", "per": "batch"},
}
Times = tuple[float, float]


def step(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> Times:
    """Return the wall and CPU seconds of a forward and a backward pass."""
    clock, cpu = time.perf_counter(), time.process_time()
    model(images, labels=labels)["loss"].backward()
    seconds = time.perf_counter() - clock, time.process_time() - cpu
    for p in model.parameters():
        p.grad = None
    return seconds


def main() -> int:
    torch.set_num_threads(1)
    plain, inputs = vit()
    plain.train()
    images, labels = inputs["pixel_values"], torch.arange(16) % 10
    models: dict[str, torch.nn.Module] = {"plain": plain}
    models |= {
        name: MaskedJigsaw(copy.deepcopy(plain), 0.1, probability=1.0, **options).train()
        for name, options in VARIANTS.items()
    }
    pairs: dict[str, list[tuple[Times, Times]]] = {name: [] for name in VARIANTS}
    print(f"ViT-S/16, batch 16, training: {ROUNDS} rounds", flush=True)
    for model in models.values():
        step(model, images, labels)
    for i in range(ROUNDS):
        names = list(models) if i % EXTRA_EVERY == 0 else list(models)[:2]
        seconds = {
            name: step(models[name], images, labels)
            for name in (names if i % 2 else reversed(names))
        }
        for name in names[1:]:
            pairs[name].append((seconds["plain"], seconds[name]))
    medians = {}
    for name, times in pairs.items():
        clock, cpu = ([b[k] / a[k] for a, b in times] for k in (0, 1))
        medians[name] = statistics.median(cpu)
        summaries = [
            f"{what} {statistics.median(r):.4f} ({low:.4f} to {high:.4f})"
            for what, r in (("CPU", cpu), ("wall", clock))
            for low, high in [interval(r)]
        ]
        print(
            f"{name:20} {statistics.median(b[1] for _, b in times):6.3f} CPU s; ratio to plain, "
            f"{len(times)} pairs: {', '.join(summaries)}"
        )
    met = medians[METHOD] <= 1 + GOAL
    print(f"goal: {METHOD}, within {GOAL:.0%} of plain: {'met' if met else 'NOT MET'}")
    return 0 if met else 1
