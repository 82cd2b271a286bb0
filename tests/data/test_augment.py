"""Augmentation of training images: bounded, sampled from one generator, and what each change is
known by.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from regauge.data.augment import (
    DEIT_AUGMENTATION,
    TRANSFORMS,
    augment_images,
    mix_images,
    rand_augment,
)

MEAN, STD = [0.4, 0.5, 0.6], [0.2, 0.3, 0.25]


def images(count: int = 6, side: int = 12) -> torch.Tensor:
    """Smooth images with values between 0 and 1."""
    coarse = torch.rand(count, 3, 3, 3, generator=torch.Generator().manual_seed(0))
    return torch.nn.functional.interpolate(
        coarse, (side, side), mode="bilinear", align_corners=True
    )


def test_images_are_moved_and_mirrored() -> None:
    x = torch.arange(2 * 1 * 6 * 6.0).view(2, 1, 6, 6) + 1
    samples = [
        augment_images(x, {"flip": True, "shift": 1}, np.random.default_rng(i)) for i in range(30)
    ]
    assert all(d.shape == x.shape for d in samples)
    assert len({tuple(d[0].flatten().tolist()) for d in samples}) > 10
    for d in samples:
        inner = d[
            0, 0, 2:4, 2:4
        ]  # whatever was done, a neighbour to the right differs by 1 and one below by 6
        assert abs(float(inner[0, 1] - inner[0, 0])) == 1
        assert float(inner[1, 0] - inner[0, 0]) == 6
    assert torch.equal(augment_images(x, {}, np.random.default_rng(0)), x)
    assert torch.equal(
        samples[3], augment_images(x, {"flip": True, "shift": 1}, np.random.default_rng(3))
    )


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_change_is_bounded_and_is_one(name: str) -> None:
    x = 0.1 + 0.8 * torch.rand(
        3, 24, 24, generator=torch.Generator().manual_seed(0)
    )  # fewer pixels than values have nothing to equalize
    for level in (0.0, 0.5, 1.0):
        for side in (-1.0, 1.0):
            changed = TRANSFORMS[name](x, level, side)
            assert changed.shape == x.shape
            assert bool(changed.isfinite().all())
    assert (TRANSFORMS[name](x, 0.9, 1.0).clamp(0, 1) - x).abs().max() > 0.01


@pytest.mark.parametrize(
    "name",
    [
        "Rotate",
        "Color",
        "Contrast",
        "Brightness",
        "Sharpness",
        "ShearX",
        "ShearY",
        "TranslateX",
        "TranslateY",
    ],
)
def test_zero_strength_changes_nothing_and_signs_differ(name: str) -> None:
    x = images(1)[0]
    torch.testing.assert_close(TRANSFORMS[name](x, 0.0, 1.0), x, rtol=0, atol=1e-5)
    assert (TRANSFORMS[name](x, 0.9, 1.0) - TRANSFORMS[name](x, 0.9, -1.0)).abs().max() > 0.01


def test_known_changes() -> None:
    x = images(1)[0]
    assert torch.equal(TRANSFORMS["Invert"](x, 0.3, 1.0), 1 - x)
    assert len(TRANSFORMS["Posterize"](x, 0.9, 1.0).unique()) == 2  # one bit
    grey = TRANSFORMS["Color"](x, 1 / 0.9, -1.0)
    torch.testing.assert_close(grey[0], grey[1])
    stretched = TRANSFORMS["AutoContrast"](x, 0.0, 1.0)
    assert (float(stretched.amin()), float(stretched.amax())) == (0.0, 1.0)
    moved = TRANSFORMS["TranslateX"](x, 1 / 0.9 / 6, 1.0)  # of width 2: by one of twelve columns
    torch.testing.assert_close(moved[:, :, :-1], x[:, :, 1:], rtol=0, atol=1e-5)
    level = TRANSFORMS["Equalize"](torch.arange(256.0).view(1, 16, 16).div(255) ** 3, 0.0, 1.0)
    assert float((level.flatten().sort().values - torch.linspace(0, 1, 256)).abs().mean()) < 0.25


def test_randaugment_stays_between_0_and_1_and_repeats_itself() -> None:
    x = images(1)[0]
    samples = [rand_augment(x, 9.0, np.random.default_rng(i)) for i in range(40)]
    assert all(float(d.min()) >= 0 and float(d.max()) <= 1 for d in samples)
    assert 5 < sum(torch.equal(d, x) for d in samples) < 20  # a quarter: neither of two is done
    assert torch.equal(samples[7], rand_augment(x, 9.0, np.random.default_rng(7)))


def test_mixing_keeps_shares_and_pixels_together() -> None:
    x, labels = (
        torch.stack([torch.full((3, 10, 10), float(i)) for i in range(4)]),
        torch.tensor([0, 1, 2, 3]),
    )
    for how in ({"mixup": 0.8}, {"cutmix": 1.0}):
        mixed = [mix_images(x, labels, 4, how, np.random.default_rng(i)) for i in range(20)]
        for pixels, shares in mixed:
            torch.testing.assert_close(shares.sum(1), torch.ones(4))
            mean = pixels.mean(
                (1, 2, 3)
            )  # images that say their own label: their mean is the labels' mean
            torch.testing.assert_close(mean, shares @ torch.arange(4.0), rtol=0, atol=1e-4)
        assert len({round(float(s[0, 0]), 6) for _, s in mixed}) > 5
    plain, smooth = mix_images(x, labels, 4, {"smooth": 0.1}, np.random.default_rng(0))
    assert torch.equal(plain, x)
    torch.testing.assert_close(smooth[0], torch.tensor([0.925, 0.025, 0.025, 0.025]))


def test_the_strong_recipe_changes_every_image_and_nothing_else() -> None:
    how, x = {**DEIT_AUGMENTATION, "mean": MEAN, "std": STD}, images()
    changed = augment_images(x, how, np.random.default_rng(1))
    assert changed.shape == x.shape
    assert bool(changed.isfinite().all())
    assert all((a - b).abs().max() > 0.01 for a, b in zip(changed, x, strict=True))
    assert torch.equal(changed, augment_images(x, how, np.random.default_rng(1)))
    assert torch.equal(x, images())
