"""What the edges of an authorised model cost beside the plain model: time, peak memory and FLOPs, in one run.

The models are those of `permuted`, locked by permutations of the stream and of every inner space, and (the ViT, folded) by rotations: two products
with a matrix of the stream's width. Interleaved: each round runs every variant once, in turn; the
ratio is the median over rounds of variant / plain, with a bootstrap 95 % interval. Goal: permutations within 1 % of plain, in time and memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.permuted import GOAL, alone, causal, measured, needed, step, vit
from regauge import apply_, element, fold_norms, spec_of
from regauge.edge import authorized

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
    return alone(f"from benchmarks.authorized import once; once({model!r}, {kind!r}, {training})")


def once(model: str, kind: str, training: bool) -> None:
    made, inputs = variant(MODELS[model][0], kind)
    made.train(training)
    print(needed(lambda: step(made, inputs, training)))


def main() -> int:
    met = True
    for name, (make, kinds) in MODELS.items():
        made = {kind: variant(make, kind) for kind in kinds}
        for training in (False, True):
            met &= max(measured(name, made, training, peak)["permutation"]) <= 1 + GOAL
    print(f"\ngoal: permutations within {GOAL:.0%} of plain in time and memory: {'met' if met else 'NOT MET'}")
    return 0 if met else 1
