"""Puzzles: the distribution of block-wise masks, shuffles that move masked patches and nothing
else, and seeds that decide all of it.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regauge.jigsaw import JigsawError, block_masks, sample_puzzle
from regauge.jigsaw.masks import sample_blocks, sample_scramble, sample_shuffles

# What the reference's generator achieved on 14 x 14 cells (mean over many masks), and what is least
# to be expected of one.
ACHIEVED = {
    0.1: (0.095, 0.04),
    0.3: (0.295, 0.24),
    0.5: (0.499, 0.45),
    0.7: (0.697, 0.55),
    0.9: (0.882, 0.6),
}


@pytest.mark.parametrize("ratio", ACHIEVED)
def test_masks_achieve_the_ratio_that_the_reference_achieves(ratio: float) -> None:
    shares = block_masks(1000, (14, 14), ratio, np.random.default_rng(0)).mean((1, 2))
    mean, least = ACHIEVED[ratio]
    assert abs(shares.mean() - mean) < 0.003
    assert least <= shares.min()
    assert shares.max() <= int(ratio * 196) / 196  # never more


def test_blocks_have_the_requested_sizes_aspects_and_positions() -> None:
    top, left, tall, wide = sample_blocks(
        np.full(20_000, 75), 8, (14, 14), 0.3, np.random.default_rng(2)
    )
    sizes, aspects = tall * wide, tall / wide
    assert 6 <= sizes.min() <= 8 <= 75 <= sizes.max() <= 90  # 8 to 75, before the sides are rounded
    assert abs(sizes.mean() - (8 + 75) / 2) < 0.5
    assert 0.2 <= aspects.min() < 0.35
    assert 1 / 0.35 < aspects.max() <= 5
    assert abs(np.log(aspects).mean()) < 0.02  # as often tall as wide, evenly in the logarithm
    assert abs(np.log(aspects).std() - np.log(1 / 0.3) / np.sqrt(3)) < 0.03
    fits = (tall < 14) & (wide < 14)
    assert 0.95 < fits.mean() < 1
    assert (top[fits] >= 0).all()
    assert ((top + tall)[fits] <= 14).all()
    assert ((left + wide)[fits] <= 14).all()
    assert set(top[fits & (tall == 4)]) == set(range(11))  # anywhere
    assert block_masks(200, (14, 14), 0.9, np.random.default_rng(0), largest=9, smallest=9).any()


@given(st.integers(1, 20), st.integers(1, 20), st.floats(0, 0.99), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_any_grid_has_masks(h: int, w: int, ratio: float, seed: int) -> None:
    masks = block_masks(3, (h, w), ratio, np.random.default_rng(seed))
    assert masks.shape == (3, h, w)
    assert (masks.sum((1, 2)) <= int(ratio * h * w)).all()
    order = sample_shuffles(masks.reshape(3, -1), np.random.default_rng(seed))
    assert (np.sort(order, 1) == np.arange(h * w)).all()
    assert (order[~masks.reshape(3, -1)] == np.nonzero(~masks.reshape(3, -1))[1]).all()


def test_shuffles_are_uniform_over_the_masked_cells() -> None:
    masks = np.zeros((6000, 5), bool)
    masks[:, [0, 2, 4]] = True
    order = sample_shuffles(masks, np.random.default_rng(0))
    counts = np.unique(order[:, [0, 2, 4]], axis=0, return_counts=True)[1]
    assert len(counts) == 6
    assert abs(counts - 1000).max() < 130  # four standard deviations


def test_the_images_differ_exactly_where_the_mask_says() -> None:
    images = torch.arange(4 * 3 * 12 * 20, dtype=torch.float32).view(
        4, 3, 12, 20
    )  # every pixel its own value, 3 x 5 patches of 4
    puzzle = sample_puzzle(4, (3, 5), 0.6, 3)
    shuffled = puzzle.apply(images)
    moved = puzzle.order != torch.arange(15)
    assert moved.any()
    assert not (moved & ~puzzle.mask).any()
    differs = (
        (shuffled != images).view(4, 3, 3, 4, 5, 4).permute(0, 2, 4, 1, 3, 5).reshape(4, 15, -1)
    )
    assert (differs.all(2) == moved).all()
    assert (differs.any(2) == moved).all()
    for i in range(4):  # cell j holds what cell order[j] held
        for j in range(15):
            (r, c), (a, b) = divmod(j, 5), divmod(int(puzzle.order[i, j]), 5)
            assert torch.equal(
                shuffled[i, :, 4 * r : 4 * r + 4, 4 * c : 4 * c + 4],
                images[i, :, 4 * a : 4 * a + 4, 4 * b : 4 * b + 4],
            )


def test_one_puzzle_serves_a_batch() -> None:
    images = torch.randn(3, 1, 8, 8)
    puzzle = sample_puzzle(1, (4, 4), 0.9, 0)
    whole = puzzle.apply(images)
    assert not torch.equal(whole, images)
    assert all(torch.equal(puzzle.apply(images[i : i + 1])[0], whole[i]) for i in range(3))


def test_a_scramble_moves_pixels_alike_in_every_patch() -> None:
    images = torch.arange(64.0).view(1, 1, 8, 8)
    found = (
        sample_scramble((2, 2), (4, 4), 0)
        .apply(images)
        .view(2, 4, 2, 4)
        .permute(0, 2, 1, 3)
        .reshape(4, 16)
    )
    plain = images.view(2, 4, 2, 4).permute(0, 2, 1, 3).reshape(4, 16)
    assert torch.equal(found.sort(1).values[found.min(1).values.argsort()], plain)
    assert torch.equal(found[0] - found[0].min(), found[1] - found[1].min())
    assert not torch.equal(found[0], found[0].sort().values)


def test_a_seed_decides_and_nothing_else_does() -> None:
    one = sample_puzzle(8, (14, 14), 0.3, [1, 2])
    np.random.seed(7)
    torch.manual_seed(7)
    same, other = sample_puzzle(8, (14, 14), 0.3, [1, 2]), sample_puzzle(8, (14, 14), 0.3, [1, 3])
    assert torch.equal(one.mask, same.mask)
    assert torch.equal(one.order, same.order)
    assert not torch.equal(one.mask, other.mask)


class SampledPuzzles(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> torch.Tensor:
        return sample_puzzle(1, (6, 6), 0.5, [0, i]).order[0]


def test_workers_draw_what_the_process_draws() -> None:
    alone = torch.stack([SampledPuzzles()[i] for i in range(6)])
    loaded = torch.cat(
        list(torch.utils.data.DataLoader(SampledPuzzles(), batch_size=2, num_workers=2))
    )
    assert torch.equal(alone, loaded)
    assert len({tuple(row.tolist()) for row in alone}) == 6


@pytest.mark.parametrize("ratio", [-0.1, 1.0, 1.5, float("nan")])
def test_a_ratio_outside_is_refused(ratio: float) -> None:
    with pytest.raises(JigsawError, match=r"must be in \[0, 1\)"):
        sample_puzzle(1, (4, 4), ratio, 0)


def test_an_image_that_is_not_a_multiple_of_the_patch_is_rejected() -> None:
    with pytest.raises(JigsawError, match=r"multiple of the patch.*got 9 x 8 pixels"):
        sample_puzzle(1, (4, 4), 0.5, 0).apply(torch.zeros(1, 3, 9, 8))
