"""Cost of the edges of an authorized model: time, peak memory and FLOPs as ratios to the plain
model, in one run.

The models are those of `permuted`, locked by permutations of the stream and of every inner space,
and (the ViT, folded) by rotations: two products with a matrix of the stream's width. Each round
runs every variant once; the ratio is the median over rounds of variant / plain, with a bootstrap
95 % interval. Goal: permutations within 1 % of plain, in time and memory. On a noisy machine 1 % is
less than the ratio's spread, so the edges are also timed by themselves.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.permuted import GOAL, alone, causal, measure, needed, step, vit
from regauge import apply_, element, spec_of
from regauge.core.fold import fold_norms
from regauge.locking.authorize import AxisTransform, authorize_with_element
from regauge.models.cut import cut

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
    return authorize_with_element(model, g), inputs


def peak(model: str, kind: str, training: bool) -> float:
    return alone(f"from benchmarks.authorized import once; once({model!r}, {kind!r}, {training})")


def once(model: str, kind: str, training: bool) -> None:
    module, inputs = variant(MODELS[model][0], kind)
    module.train(training)
    print(needed(lambda: step(module, inputs, training)))


def edges(make: Maker, training: bool) -> float:
    """Return the seconds that the edges add: the stream through the key and back, in training the
    gradient too. Median of 50.
    """
    model, inputs = make()
    stream = cut(model).embed(**inputs).stream.detach()
    member = element(spec_of(model), 1, within="permutation").members["stream"]
    enter, leave = (
        AxisTransform("stream", member, -1),
        AxisTransform("stream", member.inverse(), -1),
    )
    times = []
    for _ in range(50):
        x = stream.clone().requires_grad_(training)
        started = time.perf_counter()
        with torch.set_grad_enabled(training):
            y = leave(enter(x))
        if training:
            y.backward(stream)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def main() -> int:
    met = True
    for name, (make, kinds) in MODELS.items():
        variants = {kind: variant(make, kind) for kind in kinds}
        for training in (False, True):
            added = edges(make, training)
            ratios = measure(name, variants, training, peak)
            plain = alone_step(variants["plain"], training)
            print(
                f"the edges of a permutation by themselves: {1000 * added:.1f} ms, "
                f"{added / plain:.2%} of a plain step"
            )
            met &= max(ratios["permutation"]) <= 1 + GOAL
    print(
        f"\ngoal: permutations within {GOAL:.0%} of plain in time and memory: "
        f"{'met' if met else 'NOT MET'}"
    )
    return 0 if met else 1


def alone_step(case: tuple[torch.nn.Module, dict[str, Any]], training: bool) -> float:
    """Return the seconds of a step. Median of 5."""
    times = []
    for _ in range(5):
        started = time.perf_counter()
        step(*case, training)
        times.append(time.perf_counter() - started)
    return statistics.median(times)
