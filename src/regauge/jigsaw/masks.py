"""Puzzles: which patches of an image are taken out, and where each of them goes.

Convention. Cells of a grid are numbered row by row. `order` gathers: after the shuffle cell i holds
what cell order[i] held, and order[i] = i where the mask is false. A mask of one row serves a whole
batch, as in the reference; one row per image is the better option.

Masks are block-wise, as in BEiT: rectangles are added until a share `ratio` of the cells is
covered. A rectangle has between `smallest` and `largest` cells and an aspect in aspect .. 1 /
aspect; it is smaller than the grid on both sides, adds at least one cell and not more than are
missing. After ten attempts in a row that fit nowhere the mask stays as it is, so that the achieved
share may fall short. On 14 x 14 cells a rectangle has 8 to 75 cells, the reference's numbers; on
other grids these scale with the number of cells.

    puzzle = draw_puzzle(16, (14, 14), 0.1, seed=0)                # one mask for each of 16 images
    shuffled = puzzle.apply(images)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from regauge.errors import RegaugeError

Tensor = torch.Tensor
Grid = tuple[int, int]
Seed = int | Sequence[int]
MIN_BLOCK, MAX_BLOCK, REFERENCE_CELLS = 8, 75, 196
MAX_ATTEMPTS = 10


class JigsawError(RegaugeError):
    """A puzzle that cannot be made, or a model that it cannot be put to."""


@dataclass(frozen=True, eq=False)
class Puzzle:
    """`mask` and `order` are [rows, cells], of one row for the batch or one for each image.
    `inside` shuffles the pixels of every patch alike.
    """

    mask: Tensor
    order: Tensor
    grid: Grid
    pixel_order: Tensor | None = None

    def to(self, device: Any) -> Puzzle:
        inside = None if self.pixel_order is None else self.pixel_order.to(device)
        return replace(
            self, mask=self.mask.to(device), order=self.order.to(device), pixel_order=inside
        )

    def rows(self, at: slice) -> Puzzle:
        """The puzzles of some images of a batch."""
        return (
            self if len(self.mask) == 1 else replace(self, mask=self.mask[at], order=self.order[at])
        )

    def apply(self, images: Tensor) -> Tensor:
        """The shuffled images [batch, channels, height, width]; the patch is what the grid makes
        it.
        """
        n, channels, height, width = images.shape
        h, w = self.grid
        check_size((height, width), (max(height // h, 1), max(width // w, 1)), self.grid)
        patches = (
            images.view(n, channels, h, height // h, w, width // w)
            .permute(0, 2, 4, 1, 3, 5)
            .reshape(n, h * w, channels, -1)
        )
        patches = (
            patches[:, self.order[0]]
            if len(self.order) == 1
            else patches[torch.arange(n, device=images.device)[:, None], self.order]
        )
        if self.pixel_order is not None:
            patches = patches[..., self.pixel_order]
        whole: Tensor = (
            patches.view(n, h, w, channels, height // h, width // w)
            .permute(0, 3, 1, 4, 2, 5)
            .reshape(images.shape)
        )
        return whole


def check_ratio(ratio: float) -> float:
    if not 0 <= ratio < 1:
        raise JigsawError(
            f"a ratio of {ratio:g} is not in [0, 1)",
            hint="the share of patches that are shuffled: 0.1 in the paper",
        )
    return float(ratio)


def check_probability(probability: float) -> None:
    if not 0 <= probability <= 1:
        raise JigsawError(
            f"a probability of {probability:g} is not in [0, 1]",
            hint="the share of passes that are shuffled: 0.5 in the reference",
        )


def check_size(size: Grid, patch: Grid, grid: Grid | None = None) -> Grid:
    """The grid of an image of this size; refused where patches do not tile it, or where it is not
    the expected one.
    """
    found = (size[0] // patch[0], size[1] // patch[1])
    if (found[0] * patch[0], found[1] * patch[1]) != size or min(found) < 1:
        raise JigsawError(
            f"an image of {size[0]} x {size[1]} pixels is no multiple of the patch, {patch[0]} "
            f"x {patch[1]}",
            hint="resize or crop it, or give patch= (--patch)",
        )
    if grid is not None and found != grid:
        raise JigsawError(
            f"an image of {size[0]} x {size[1]} pixels has {found[0]} x {found[1]} patches, the "
            f"positions are of {grid[0]} x {grid[1]}",
            hint="resize it, or the model (timm: model.set_input_size): the unknown embedding "
            "takes the place of a row of that table",
        )
    return found


def block_masks(
    count: int,
    grid: Grid,
    ratio: float,
    draw: np.random.Generator,
    *,
    smallest: int | None = None,
    largest: int | None = None,
    aspect: float = 0.3,
) -> Any:
    """`count` block-wise masks [count, height, width], drawn side by side."""
    h, w = grid
    low, high = (
        max(1, round(n * h * w / REFERENCE_CELLS)) if given is None else given
        for n, given in ((MIN_BLOCK, smallest), (MAX_BLOCK, largest))
    )
    masks = np.zeros((count, h, w), bool)
    missing = np.full(count, int(check_ratio(ratio) * h * w))
    failed = np.zeros(count, int)
    rows, columns = np.arange(h)[None, :, None], np.arange(w)[None, None, :]
    while len(at := np.flatnonzero((missing > 0) & (failed < MAX_ATTEMPTS))):
        top, left, tall, wide = sample_blocks(
            np.minimum(missing[at], high), low, grid, aspect, draw
        )
        fits = (tall <= max(h - 1, 1)) & (wide <= max(w - 1, 1))
        top, tall, left, wide = (x[:, None, None] for x in (top, tall, left, wide))
        block = (rows >= top) & (rows < top + tall) & (columns >= left) & (columns < left + wide)
        new = (block & ~masks[at]).sum((1, 2))
        taken = fits & (new > 0) & (new <= missing[at])
        masks[at[taken]] |= block[taken]
        missing[at] -= np.where(taken, new, 0)
        failed[at] = np.where(taken, 0, failed[at] + 1)
    return masks


def sample_blocks(
    most: Any, least: int, grid: Grid, aspect: float, draw: np.random.Generator
) -> tuple[Any, Any, Any, Any]:
    """Top, left, height and width of one rectangle for each of `most`, the largest size of each.
    Not all of them fit into the grid.
    """
    u = draw.random((4, len(most)))
    area = least + (most - least) * u[0]
    slope = np.exp(np.log(aspect) * (1 - 2 * u[1]))
    tall, wide = (
        np.rint(np.sqrt(area * slope)).astype(int),
        np.rint(np.sqrt(area / slope)).astype(int),
    )
    return (
        (u[2] * (grid[0] - tall + 1)).astype(int),
        (u[3] * (grid[1] - wide + 1)).astype(int),
        tall,
        wide,
    )


def sample_shuffles(masks: Any, draw: np.random.Generator) -> Any:
    """Permutations [count, cells] that are uniform over the cells of each mask [count, cells] and
    leave all others where they are.
    """
    cells = np.broadcast_to(np.arange(masks.shape[1]), masks.shape)
    there = np.argsort(~masks, axis=1, kind="stable")
    drawn = np.argsort(np.where(masks, draw.random(masks.shape), 2.0 + cells), axis=1)
    order = np.empty(masks.shape, np.int64)
    np.put_along_axis(order, there, drawn, axis=1)
    return order


def sample_puzzle(count: int, grid: Grid, ratio: float, seed: Seed, **how: Any) -> Puzzle:
    """`count` puzzles from a seed and nothing else: in any process, worker or order of calls the
    same. `how` goes to `block_masks`.
    """
    draw = np.random.default_rng(seed)
    masks = block_masks(count, grid, ratio, draw, **how).reshape(count, -1)
    return Puzzle(torch.from_numpy(masks), torch.from_numpy(sample_shuffles(masks, draw)), grid)


def sample_scramble(grid: Grid, patch: Grid, seed: Seed) -> Puzzle:
    """All patches and, alike in every patch, all pixels shuffled: the SPP of the paper's ablation,
    after MLP-Mixer.
    """
    draw = np.random.default_rng(seed)
    cells = grid[0] * grid[1]
    order, inside = draw.permutation(cells)[None], draw.permutation(patch[0] * patch[1])
    return Puzzle(
        torch.ones(1, cells, dtype=torch.bool),
        torch.from_numpy(order),
        grid,
        torch.from_numpy(inside),
    )
