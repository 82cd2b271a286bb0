"""How sensitive a model is to the places of patches: what a puzzle does to its answers and to the
features that they are read from.

Training ratio and inference ratio are two things: here it is that of inference, 0.5 in the paper's
tables. Every image has a puzzle of its own, from the seed and the image's number alone, so that all
models and all batch sizes get the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from regauge.core.progress import Progress
from regauge.data.tasks import Examples
from regauge.jigsaw.masks import Grid, JigsawError, Puzzle, check_size, sample_puzzle
from regauge.jigsaw.wrapper import MaskedJigsaw

Tensor = torch.Tensor
RATIO = 0.5
CHUNK = 1000  # puzzles drawn together; their seed has the chunk's number


@dataclass(frozen=True)
class Sensitivity:
    """What puzzles of one ratio do, over `count` images. `norm` is the mean L2 norm of the
    difference of features, as the reference's code has it; `squared` the mean of its square, as the
    paper's text has it.
    """

    ratio: float
    accuracy: float
    consistency: float
    norm: float
    squared: float
    count: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Evaluation:
    """Top-1 on images as they are, and what puzzles do to it."""

    accuracy: float
    shuffled: tuple[Sensitivity, ...]

    @property
    def at_half(self) -> Sensitivity:
        found = next((s for s in self.shuffled if s.ratio == RATIO), None)
        if found is None:
            raise JigsawError(
                f"puzzles of ratio {RATIO:g} were not measured",
                hint=f"evaluate with {RATIO:g} among the ratios",
            )
        return found


def evaluate(
    wrapped: MaskedJigsaw,
    examples: Examples,
    ratios: Sequence[float] = (RATIO,),
    *,
    seed: int = 0,
    batch: int = 100,
    device: str = "cpu",
    progress: Progress | None = None,
) -> Evaluation:
    """Top-1, and for each ratio top-1, consistency and the norm of the difference. The model is
    left in evaluation mode.
    """
    wrapped.eval()
    if not len(examples):
        raise JigsawError("there are no images to measure on", hint="give some")
    right = 0
    sums = np.zeros((len(ratios), 4))
    with torch.no_grad(), capture_features(wrapped.model) as features:
        for start in range(0, len(examples), batch):
            rows = np.arange(start, min(start + batch, len(examples)))
            inputs, labels = examples.batch(rows)
            pixels, labels = inputs["pixel_values"].to(device), labels.to(device)
            answers = wrapped(pixels).logits
            if not bool(answers.isfinite().all()):
                raise JigsawError(
                    "the model's answers are not finite, so that nothing can be said of them",
                    hint="are its weights, --mean and --std?",
                )
            plain = answers.argmax(-1)
            seen = features()
            right += int((plain == labels).sum())
            for i, ratio in enumerate(ratios):
                found = wrapped(
                    pixels, puzzle=evaluation_puzzles(rows, wrapped, pixels, ratio, seed)
                ).logits.argmax(-1)
                apart = (features() - seen).flatten(1).double().norm(dim=1)
                sums[i] += [
                    int((found == labels).sum()),
                    int((found == plain).sum()),
                    float(apart.sum()),
                    float(apart.square().sum()),
                ]
            if progress is not None:
                progress(
                    start // batch, -(-len(examples) // batch), f"{start + len(rows):,} images"
                )
    n = len(examples)
    return Evaluation(
        right / n, tuple(_average(ratio, row, n) for ratio, row in zip(ratios, sums, strict=True))
    )


def _average(ratio: float, sums: Any, n: int) -> Sensitivity:
    accuracy, consistency, norm, squared = (float(x) / n for x in sums)
    return Sensitivity(ratio, accuracy, consistency, norm, squared, n)


def evaluation_puzzles(
    rows: Any, wrapped: MaskedJigsaw, pixels: Tensor, ratio: float, seed: int
) -> Puzzle:
    """The puzzles of images by their numbers, which ascend."""
    grid = check_size((int(pixels.shape[-2]), int(pixels.shape[-1])), wrapped.layout.patch)
    parts = []
    for chunk in range(int(rows[0]) // CHUNK, int(rows[-1]) // CHUNK + 1):
        whole = _sample_chunk(grid, ratio, seed, chunk)
        parts.append(
            [
                t[[r - chunk * CHUNK for r in rows if r // CHUNK == chunk]]
                for t in (whole.mask, whole.order)
            ]
        )
    return Puzzle(
        torch.cat([mask for mask, _ in parts]), torch.cat([order for _, order in parts]), grid
    )


_PUZZLE_CACHE: dict[
    Any, Puzzle
    # the chunks of the ratios at hand: drawing 1,000 for every batch of 100 would be ten times the
    # work
] = {}


def _sample_chunk(grid: Grid, ratio: float, seed: int, chunk: int) -> Puzzle:
    key = (grid, ratio, seed, chunk)
    if key not in _PUZZLE_CACHE:
        while len(_PUZZLE_CACHE) >= 16:
            del _PUZZLE_CACHE[next(iter(_PUZZLE_CACHE))]
        _PUZZLE_CACHE[key] = sample_puzzle(CHUNK, grid, ratio, [seed, chunk, round(1e6 * ratio)])
    return _PUZZLE_CACHE[key]


@contextmanager
def capture_features(model: torch.nn.Module) -> Iterator[Callable[[], Tensor]]:
    """A function that gives what the last linear layer was given in the last pass: the CLS
    embedding of a ViT, the pooled features of others.
    """
    seen: list[Tensor] = []

    def keep(module: torch.nn.Module, given: tuple[Tensor, ...]) -> None:
        seen[:] = [given[0]]

    hooks = [
        m.register_forward_pre_hook(keep) for m in model.modules() if isinstance(m, torch.nn.Linear)
    ]
    try:
        yield lambda: seen[0].detach().clone()
    finally:
        for hook in hooks:
            hook.remove()
