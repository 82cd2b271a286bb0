"""What the edges of an authorised model cost beside the plain model: time, peak memory and FLOPs,
in one run.

The models are those of `permuted`, locked by permutations of the stream and of every inner space,
and (the ViT, folded) by rotations: two products with a matrix of the stream's width. Interleaved:
each round runs every variant once, in turn; the ratio is the median over rounds of variant / plain,
with a bootstrap 95 % interval. Goal: permutations within 1 % of plain, in time and memory. On a
noisy machine 1 % is less than the ratio's own spread, so that what the edges take is also measured
by itself.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.permuted import GOAL, alone, causal, measured, needed, step, vit
from regauge import apply_, element, fold_norms, spec_of
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
    made, inputs = variant(MODELS[model][0], kind)
    made.train(training)
    print(needed(lambda: step(made, inputs, training)))


def edges(make: Maker, training: bool) -> float:
    """Seconds of what the edges add, by itself: the stream through the key and back, and in
    training the gradient too. Median of 50.
    """
    model, inputs = make()
    stream = cut(model).embed(**inputs).stream.detach()
    member = element(spec_of(model), 1, within="permutation").members["stream"]
    enter, leave = (
        AxisTransform("stream", member, -1),
        AxisTransform("stream", member.inverse(), -1),
    )
    took = []
    for _ in range(50):
        x = stream.clone().requires_grad_(training)
        started = time.perf_counter()
        with torch.set_grad_enabled(training):
            y = leave(enter(x))
        if training:
            y.backward(stream)
        took.append(time.perf_counter() - started)
    return statistics.median(took)


def main() -> int:
    met = True
    for name, (make, kinds) in MODELS.items():
        made = {kind: variant(make, kind) for kind in kinds}
        for training in (False, True):
            added = edges(make, training)
            found = measured(name, made, training, peak)
            plain = alone_step(made["plain"], training)
            print(
                f"the edges of a permutation by themselves: {1000 * added:.1f} ms, "
                f"{added / plain:.2%} of a plain step"
            )
            met &= max(found["permutation"]) <= 1 + GOAL
    print(
        f"\ngoal: permutations within {GOAL:.0%} of plain in time and memory: "
        f"{'met' if met else 'NOT MET'}"
    )
    return 0 if met else 1


def alone_step(made: tuple[torch.nn.Module, dict[str, Any]], training: bool) -> float:
    took = []
    for _ in range(5):
        started = time.perf_counter()
        step(*made, training)
        took.append(time.perf_counter() - started)
    return statistics.median(took)
