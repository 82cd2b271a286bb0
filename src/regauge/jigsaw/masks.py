"""Puzzles: the patches of an image that are masked, and the permutation that shuffles them.

Convention. Cells of a grid are numbered row by row. `order` gathers: after the shuffle cell i holds
what cell order[i] held, and order[i] = i where the mask is false. A mask of one row applies to the
whole batch, as in the reference; one row per image is the better option.

Masks are block-wise, as in BEiT: rectangles are added until a share `ratio` of the cells is
covered. A rectangle has between `smallest` and `largest` cells and an aspect ratio from `aspect` to
1 / `aspect`; it is smaller than the grid on both sides, adds at least one cell and at most as many
as are missing. After ten rejected rectangles in a row the mask is final, so that the covered share
may be smaller than `ratio`. On 14 x 14 cells a rectangle has 8 to 75 cells, the reference's
numbers; on other grids these scale with the number of cells.

    puzzle = sample_puzzle(16, (14, 14), 0.1, seed=0)              # one mask for each of 16 images
    shuffled = puzzle.apply(images)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import numpy as np
import torch

from regauge.errors import Hint, JigsawError

Tensor = torch.Tensor
Grid = tuple[int, int]
Seed = int | Sequence[int]
MIN_BLOCK, MAX_BLOCK, REFERENCE_CELLS = 8, 75, 196
MAX_ATTEMPTS = 10


@dataclass(frozen=True, eq=False)
class Puzzle:
    """Masks and permutations of the patches of a batch of images.

    Attributes:
        mask: Whether a cell is shuffled [rows, cells]; one row for the batch, or one per image.
        order: The permutation of the cells, of the same shape.
        grid: Rows and columns of patches.
        pixel_order: A permutation of the pixels of each patch, the same for all, or None.

    Example:
        >>> puzzle = regauge.jigsaw.sample_puzzle(1, (4, 4), 0.5, seed=0)
        >>> puzzle.mask.shape, puzzle.grid
        (torch.Size([1, 16]), (4, 4))
    """

    mask: Tensor
    order: Tensor
    grid: Grid
    pixel_order: Tensor | None = None

    def to(self, device: Any) -> Puzzle:
        """Move the tensors to a device."""
        pixel_order = None if self.pixel_order is None else self.pixel_order.to(device)
        return replace(
            self, mask=self.mask.to(device), order=self.order.to(device), pixel_order=pixel_order
        )

    def rows(self, at: slice) -> Puzzle:
        """Select the puzzles of some images of a batch."""
        return (
            self if len(self.mask) == 1 else replace(self, mask=self.mask[at], order=self.order[at])
        )

    def apply(self, images: Tensor) -> Tensor:
        """Shuffle images [batch, channels, height, width]; the grid determines the patch size."""
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
        shuffled: Tensor = (
            patches.view(n, h, w, channels, height // h, width // w)
            .permute(0, 3, 1, 4, 2, 5)
            .reshape(images.shape)
        )
        return shuffled


def check_ratio(ratio: Any) -> float:
    """Return a ratio, or raise JigsawError unless it is a number in [0, 1)."""
    if not isinstance(ratio, Real) or not 0 <= float(ratio) < 1:
        shown = f"{float(ratio):g}" if isinstance(ratio, Real) else repr(ratio)
        raise JigsawError(
            f"the ratio must be in [0, 1), got {shown}",
            hint="it is the share of patches that are shuffled: 0.1 in the paper",
        )
    return float(ratio)


def check_probability(probability: float) -> None:
    """Raise JigsawError unless a probability is in [0, 1]."""
    if not 0 <= probability <= 1:
        raise JigsawError(
            f"the probability must be in [0, 1], got {probability:g}",
            hint="it is the share of passes that are shuffled: 0.5 in the reference",
        )


def check_size(size: Grid, patch: Grid, grid: Grid | None = None) -> Grid:
    """Return the grid of patches of an image.

    Args:
        size: Height and width of the image.
        patch: Height and width of a patch.
        grid: The expected grid, if there is one.

    Raises:
        JigsawError: Patches do not tile the image, or the grid is not the expected one.
    """
    actual = (size[0] // patch[0], size[1] // patch[1])
    if (actual[0] * patch[0], actual[1] * patch[1]) != size or min(actual) < 1:
        raise JigsawError(
            f"the image size must be a multiple of the patch, {patch[0]} x {patch[1]}, got "
            f"{size[0]} x {size[1]} pixels",
            hint=Hint(
                "resize or crop it, or pass patch=", cli="resize or crop it, or pass --patch"
            ),
        )
    if grid is not None and actual != grid:
        raise JigsawError(
            f"an image of {size[0]} x {size[1]} pixels has {actual[0]} x {actual[1]} patches, but "
            f"the position table has {grid[0]} x {grid[1]}",
            hint="resize it, or the model (timm: model.set_input_size): the unknown embedding "
            "replaces rows of that table",
        )
    return actual


def block_masks(
    count: int,
    grid: Grid,
    ratio: float,
    rng: np.random.Generator,
    *,
    smallest: int | None = None,
    largest: int | None = None,
    aspect: float = 0.3,
) -> Any:
    """Sample `count` block-wise masks [count, height, width], all at the same time.

    Args:
        count: The number of masks.
        grid: Rows and columns of cells.
        ratio: The share of cells to cover.
        rng: The random generator.
        smallest: The fewest cells of a rectangle; scaled from the reference by default.
        largest: The most cells of a rectangle; scaled from the reference by default.
        aspect: The smallest ratio of height to width.

    Returns:
        The masks, as an array of booleans.

    Raises:
        JigsawError: The grid, the ratio or an option is invalid.

    Example:
        >>> import numpy as np
        >>> regauge.jigsaw.block_masks(2, (4, 4), 0.5, np.random.default_rng(0)).shape
        (2, 4, 4)
    """
    h, w = grid
    low, high = (
        max(1, round(reference * h * w / REFERENCE_CELLS)) if cells is None else cells
        for reference, cells in ((MIN_BLOCK, smallest), (MAX_BLOCK, largest))
    )
    masks = np.zeros((count, h, w), bool)
    missing = np.full(count, int(check_ratio(ratio) * h * w))
    failed = np.zeros(count, int)
    rows, columns = np.arange(h)[None, :, None], np.arange(w)[None, None, :]
    while len(at := np.flatnonzero((missing > 0) & (failed < MAX_ATTEMPTS))):
        top, left, height, width = sample_blocks(
            np.minimum(missing[at], high), low, grid, aspect, rng
        )
        fits = (height <= max(h - 1, 1)) & (width <= max(w - 1, 1))
        top, height, left, width = (x[:, None, None] for x in (top, height, left, width))
        in_rows = (rows >= top) & (rows < top + height)
        block = in_rows & (columns >= left) & (columns < left + width)
        new = (block & ~masks[at]).sum((1, 2))
        accepted = fits & (new > 0) & (new <= missing[at])
        masks[at[accepted]] |= block[accepted]
        missing[at] -= np.where(accepted, new, 0)
        failed[at] = np.where(accepted, 0, failed[at] + 1)
    return masks


def sample_blocks(
    largest: Any, smallest: int, grid: Grid, aspect: float, rng: np.random.Generator
) -> tuple[Any, Any, Any, Any]:
    """Sample one rectangle for each entry of `largest`, the most cells that it may have.

    Returns:
        Top, left, height and width of the rectangles. Some of them do not fit into the grid.
    """
    u = rng.random((4, len(largest)))
    area = smallest + (largest - smallest) * u[0]
    ratio = np.exp(np.log(aspect) * (1 - 2 * u[1]))
    height, width = (np.rint(np.sqrt(x)).astype(int) for x in (area * ratio, area / ratio))
    return (
        (u[2] * (grid[0] - height + 1)).astype(int),
        (u[3] * (grid[1] - width + 1)).astype(int),
        height,
        width,
    )


def sample_shuffles(masks: Any, rng: np.random.Generator) -> Any:
    """Sample permutations [count, cells], uniform over the cells of each mask [count, cells].

    All other cells stay in their places.
    """
    cells = np.broadcast_to(np.arange(masks.shape[1]), masks.shape)
    targets = np.argsort(~masks, axis=1, kind="stable")
    sources = np.argsort(np.where(masks, rng.random(masks.shape), 2.0 + cells), axis=1)
    order = np.empty(masks.shape, np.int64)
    np.put_along_axis(order, targets, sources, axis=1)
    return order


def sample_puzzle(count: int, grid: Grid, ratio: float, seed: Seed, **options: Any) -> Puzzle:
    """Sample `count` puzzles that depend on the seed alone, in any process and order of calls.

    Args:
        count: The number of puzzles: 1 for a whole batch, or one for each image.
        grid: Rows and columns of patches.
        ratio: The share of patches to shuffle.
        seed: The random seed.
        options: Further options of `block_masks`.

    Returns:
        The puzzles.

    Raises:
        JigsawError: The grid, the ratio or an option is invalid.

    Example:
        >>> regauge.jigsaw.sample_puzzle(2, (4, 4), 0.5, seed=0).mask.sum(1)
        tensor([8, 8])
    """
    rng = np.random.default_rng(seed)
    masks = block_masks(count, grid, ratio, rng, **options).reshape(count, -1)
    return Puzzle(torch.from_numpy(masks), torch.from_numpy(sample_shuffles(masks, rng)), grid)


def sample_scramble(grid: Grid, patch: Grid, seed: Seed) -> Puzzle:
    """Sample a puzzle that shuffles all patches, and the pixels of each patch in the same way.

    This is SPP of the paper's ablation, after MLP-Mixer.
    """
    rng = np.random.default_rng(seed)
    cells = grid[0] * grid[1]
    order, pixel_order = rng.permutation(cells)[None], rng.permutation(patch[0] * patch[1])
    return Puzzle(
        torch.ones(1, cells, dtype=torch.bool),
        torch.from_numpy(order),
        grid,
        torch.from_numpy(pixel_order),
    )
