"""The sensitivity of a model to the order of patches: changes of predictions and features under
puzzles.

The ratio here is that of inference, 0.5 in the paper's tables, not that of training. Each image has
its own puzzle, which depends only on the seed and the image's index: all models and batch sizes get
the same puzzles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from regauge.core.progress import Progress
from regauge.data.evaluate import predict
from regauge.data.tasks import Examples
from regauge.errors import JigsawError
from regauge.jigsaw.masks import Grid, Puzzle, check_size, sample_puzzle
from regauge.jigsaw.wrapper import MaskedJigsaw

Tensor = torch.Tensor
RATIO = 0.5
CHUNK = 1000  # puzzles that are sampled together, seeded by the chunk's index


@dataclass(frozen=True)
class Sensitivity:
    """The effect of puzzles of one ratio, over `count` images.

    Attributes:
        ratio: The share of shuffled patches.
        accuracy: Top-1 accuracy on shuffled images.
        consistency: The share of predictions that do not change.
        norm: The mean L2 norm of the difference of features, as in the reference's code.
        squared: The mean of its square, as in the paper's text.
        count: The number of images.
    """

    ratio: float
    accuracy: float
    consistency: float
    norm: float
    squared: float
    count: int

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a dict."""
        return asdict(self)


@dataclass(frozen=True)
class Evaluation:
    """Top-1 accuracy on unshuffled images, and the effect of puzzles of several ratios."""

    accuracy: float
    shuffled: tuple[Sensitivity, ...]

    @property
    def at_half(self) -> Sensitivity:
        """The effect of puzzles of the paper's ratio, 0.5."""
        half = next((s for s in self.shuffled if s.ratio == RATIO), None)
        if half is None:
            raise JigsawError(
                f"puzzles of ratio {RATIO:g} were not measured",
                hint=f"evaluate with {RATIO:g} among the ratios",
            )
        return half


def evaluate(
    wrapped: MaskedJigsaw,
    examples: Examples,
    ratios: Sequence[float] = (RATIO,),
    *,
    seed: int = 0,
    batch: int = 100,
    progress: Progress | None = None,
) -> Evaluation:
    """Measure top-1 accuracy, and for each ratio accuracy, consistency and the change of features.

    Args:
        wrapped: The model, which is left in evaluation mode.
        examples: Images with labels.
        ratios: The shares of patches to shuffle.
        seed: The seed of the puzzles.
        batch: The number of images of a pass.
        progress: Called after each batch.

    Raises:
        JigsawError: `examples` is empty, or the logits are not finite.
    """
    if not len(examples):
        raise JigsawError("the evaluation needs at least one image, got 0")
    correct = 0
    sums = np.zeros((len(ratios), 4))
    with torch.no_grad(), capture_features(wrapped.model) as features:
        for number, (rows, inputs, labels, logits) in enumerate(predict(wrapped, examples, batch)):
            pixels = inputs["pixel_values"]
            if not bool(logits.isfinite().all()):
                raise JigsawError(
                    "the logits of the model are not finite",
                    hint="check that its weights, and mean and std of the pixels, are finite",
                )
            plain = logits.argmax(-1)
            plain_features = features()
            correct += int((plain == labels).sum())
            for i, ratio in enumerate(ratios):
                puzzle = evaluation_puzzles(rows, wrapped, pixels, ratio, seed)
                shuffled = wrapped(pixels, puzzle=puzzle).logits.argmax(-1)
                norms = (features() - plain_features).flatten(1).double().norm(dim=1)
                sums[i] += [
                    int((shuffled == labels).sum()),
                    int((shuffled == plain).sum()),
                    float(norms.sum()),
                    float(norms.square().sum()),
                ]
            if progress is not None:
                progress(number, -(-len(examples) // batch), f"{rows[-1] + 1:,} images")
    n = len(examples)
    return Evaluation(
        correct / n, tuple(_average(ratio, row, n) for ratio, row in zip(ratios, sums, strict=True))
    )


def _average(ratio: float, sums: Any, n: int) -> Sensitivity:
    accuracy, consistency, norm, squared = (float(x) / n for x in sums)
    return Sensitivity(ratio, accuracy, consistency, norm, squared, n)


def evaluation_puzzles(
    rows: Any, wrapped: MaskedJigsaw, pixels: Tensor, ratio: float, seed: int
) -> Puzzle:
    """Return the puzzles of images by their indices `rows`, which must ascend."""
    grid = check_size((int(pixels.shape[-2]), int(pixels.shape[-1])), wrapped.layout.patch)
    parts = []
    for chunk in range(int(rows[0]) // CHUNK, int(rows[-1]) // CHUNK + 1):
        puzzles = _sample_chunk(grid, ratio, seed, chunk)
        in_chunk = [row - chunk * CHUNK for row in rows if row // CHUNK == chunk]
        parts.append((puzzles.mask[in_chunk], puzzles.order[in_chunk]))
    return Puzzle(
        torch.cat([mask for mask, _ in parts]), torch.cat([order for _, order in parts]), grid
    )


# The latest chunks: sampling 1,000 puzzles for every batch of 100 would be ten times the work.
_PUZZLE_CACHE: dict[Any, Puzzle] = {}


def _sample_chunk(grid: Grid, ratio: float, seed: int, chunk: int) -> Puzzle:
    """Sample the puzzles of `CHUNK` images, or return them from the cache."""
    key = (grid, ratio, seed, chunk)
    if key not in _PUZZLE_CACHE:
        while len(_PUZZLE_CACHE) >= 16:
            del _PUZZLE_CACHE[next(iter(_PUZZLE_CACHE))]
        _PUZZLE_CACHE[key] = sample_puzzle(CHUNK, grid, ratio, [seed, chunk, round(1e6 * ratio)])
    return _PUZZLE_CACHE[key]


@contextmanager
def capture_features(model: torch.nn.Module) -> Iterator[Callable[[], Tensor]]:
    """Yield a function that returns the last linear layer's input of the last pass.

    That is the CLS embedding of a ViT, and the pooled features of other models.
    """
    latest: list[Tensor] = []

    def record(module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
        latest[:] = [inputs[0]]

    linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    hooks = [linear.register_forward_pre_hook(record) for linear in linears]
    try:
        yield lambda: latest[0].detach().clone()
    finally:
        for hook in hooks:
            hook.remove()
