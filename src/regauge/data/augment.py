"""Augmentation of image batches: flip, shift, crop, RandAugment, random erasing, mixup and CutMix.
All random numbers come from one generator, so that a resumed run uses the same ones.

`DEIT_AUGMENTATION` is DeiT's recipe, which the papers use: RandAugment 9 / 0.5 (two of
fifteen transforms, each applied half of the time, at strength N(9, 0.5) of 10), mixup (alpha 0.8)
or CutMix (alpha 1), half of the batches each, erasing with noise, and label smoothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

Tensor = torch.Tensor
AugmentConfig = Mapping[str, Any]
MAX_STRENGTH = 10.0  # the largest strength of RandAugment
# The mean and std of the images must be added: colours are transformed with values in [0, 1].
DEIT_AUGMENTATION: dict[str, Any] = {
    "flip": True,
    "crop": 0.08,
    "strength": 9.0,
    "erase": 0.25,
    "mixup": 0.8,
    "cutmix": 1.0,
    "smooth": 0.1,
    "repeat": 3,
}


def augment_images(pixels: Tensor, config: AugmentConfig, rng: np.random.Generator) -> Tensor:
    """Augment each image of a batch.

    Args:
        pixels: The images, [n, channels, height, width].
        config: `flip` mirrors half of the images. `shift` moves each by up to that many pixels,
            padded with zeros. `crop` crops to at least that fraction of the area and resizes back.
            `strength` applies RandAugment (needs `mean` and `std`). `erase` is the probability of
            replacing a rectangle by noise.
        rng: The source of randomness.
    """
    n, side = len(pixels), pixels.shape[-1]
    if config.get("flip"):
        chosen = torch.from_numpy(rng.random(n) < 0.5).to(pixels.device)
        pixels = torch.where(chosen[:, None, None, None], pixels.flip(-1), pixels)
    shift = int(config.get("shift", 0))
    if shift:
        padded = F.pad(pixels, (shift,) * 4)
        corners = rng.integers(0, 2 * shift + 1, (n, 2))
        pixels = torch.stack(
            [
                image[:, y : y + side, x : x + side]
                for image, (y, x) in zip(padded, corners, strict=True)
            ]
        )
    if config.get("crop"):
        pixels = torch.stack([_random_crop(image, config["crop"], rng) for image in pixels])
    if config.get("strength"):
        mean, std = (
            torch.tensor(config[name], dtype=pixels.dtype, device=pixels.device).view(-1, 1, 1)
            for name in ("mean", "std")
        )
        pixels = torch.stack(
            [
                (rand_augment(image * std + mean, config["strength"], rng) - mean) / std
                for image in pixels
            ]
        )
    if config.get("erase"):
        pixels = torch.stack(
            [
                _random_erase(image, rng) if rng.random() < config["erase"] else image
                for image in pixels
            ]
        )
    return pixels


def mix_images(
    pixels: Tensor, labels: Tensor, classes: int, config: AugmentConfig, rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """Mix a batch with itself in reverse order.

    Args:
        pixels: The images.
        labels: Their classes.
        classes: The number of classes.
        config: `mixup` and `cutmix` are the alphas of blending images and of pasting rectangles; if
            both are set, one is chosen at random. `smooth` is the label smoothing.
        rng: The source of randomness.

    Returns:
        The mixed images, and labels as class probabilities.
    """
    smooth = float(config.get("smooth", 0.0))
    targets = F.one_hot(labels, classes).to(pixels.dtype) * (1 - smooth) + smooth / classes
    methods = [name for name in ("mixup", "cutmix") if config.get(name)]
    if not methods:
        return pixels, targets
    method = methods[int(rng.integers(len(methods)))]
    weight = float(rng.beta(config[method], config[method]))
    if method == "mixup":
        pixels = weight * pixels + (1 - weight) * pixels.flip(0)
    else:
        top, left, height, width = _sample_rectangle(pixels.shape[-2:], 1 - weight, 1.0, rng)
        pixels = pixels.clone()
        other = pixels.flip(0)
        pixels[..., top : top + height, left : left + width] = other[
            ..., top : top + height, left : left + width
        ]
        weight = 1 - height * width / (pixels.shape[-2] * pixels.shape[-1])
    return pixels, weight * targets + (1 - weight) * targets.flip(0)


def rand_augment(
    image: Tensor, strength: float, rng: np.random.Generator, count: int = 2
) -> Tensor:
    """Apply RandAugment to one image with values in [0, 1]: `count` transforms at random."""
    names = list(TRANSFORMS)
    for choice in rng.integers(0, len(names), count):
        level = float(np.clip(rng.normal(strength, 0.5), 0, MAX_STRENGTH)) / MAX_STRENGTH
        sign = 1.0 if rng.random() < 0.5 else -1.0
        if rng.random() < 0.5:
            image = TRANSFORMS[names[choice]](image, level, sign).clamp(0, 1)
    return image


def _sample_rectangle(
    shape: tuple[int, ...], area: float, aspect: float, rng: np.random.Generator
) -> tuple[int, int, int, int]:
    """Sample a rectangle of about this fraction of an image: top, left, height, width."""
    rows, columns = int(shape[-2]), int(shape[-1])
    height = min(rows, round(math.sqrt(area * rows * columns * aspect)))
    width = min(columns, round(math.sqrt(area * rows * columns / aspect)))
    return (
        int(rng.integers(0, rows - height + 1)),
        int(rng.integers(0, columns - width + 1)),
        height,
        width,
    )


def _random_crop(image: Tensor, min_area: float, rng: np.random.Generator) -> Tensor:
    """Crop an image to a random rectangle and resize it to its former size."""
    area = rng.uniform(min_area, 1.0)
    aspect = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
    top, left, height, width = _sample_rectangle(tuple(image.shape[-2:]), area, aspect, rng)
    part = image[None, :, top : top + max(1, height), left : left + max(1, width)]
    return F.interpolate(
        part, tuple(image.shape[-2:]), mode="bicubic", align_corners=False, antialias=True
    )[0]


def _random_erase(image: Tensor, rng: np.random.Generator) -> Tensor:
    """Replace a random rectangle of an image by normal noise."""
    area = rng.uniform(0.02, 1 / 3)
    aspect = math.exp(rng.uniform(math.log(0.3), math.log(1 / 0.3)))
    top, left, height, width = _sample_rectangle(tuple(image.shape[-2:]), area, aspect, rng)
    image = image.clone()
    image[:, top : top + height, left : left + width] = torch.from_numpy(
        rng.normal(size=(image.shape[0], height, width))
    ).to(image)
    return image


# The transforms of RandAugment: (image, level in [0, 1], sign -1 or 1). A higher level is always a
# stronger change.


def _auto_contrast(image: Tensor, level: float, sign: float) -> Tensor:
    low, high = image.amin((1, 2), keepdim=True), image.amax((1, 2), keepdim=True)
    return torch.where(high > low, (image - low) / (high - low).clamp(min=1e-12), image)


def _equalize(image: Tensor, level: float, sign: float) -> Tensor:
    return torch.stack([_equalize_channel(channel) for channel in image])


def _equalize_channel(channel: Tensor) -> Tensor:
    bins = (channel * 255).round().long().clamp(0, 255)
    counts = torch.bincount(bins.flatten(), minlength=256)
    step = int(counts[counts > 0][:-1].sum()) // 255
    if not step:
        return channel
    table = ((counts.cumsum(0) - counts + step // 2) // step).clamp(0, 255)
    return table[bins].to(channel.dtype) / 255


def _affine(image: Tensor, matrix: list[list[float]]) -> Tensor:
    """Resample an image by an affine map."""
    theta = torch.tensor([matrix], dtype=image.dtype, device=image.device)
    grid = F.affine_grid(theta, [1, *image.shape], align_corners=False)
    inside = F.grid_sample(torch.ones_like(image)[None], grid, mode="bilinear", align_corners=False)
    # Pixels from outside of the image are grey.
    return (
        F.grid_sample(image[None], grid, mode="bilinear", align_corners=False) + 0.5 * (1 - inside)
    )[0]


def _rotate(image: Tensor, level: float, sign: float) -> Tensor:
    angle = math.radians(30 * level * sign)
    return _affine(
        image, [[math.cos(angle), -math.sin(angle), 0.0], [math.sin(angle), math.cos(angle), 0.0]]
    )


def _blend(image: Tensor, other: Tensor, level: float, sign: float) -> Tensor:
    return other + (1 + 0.9 * level * sign) * (image - other)


def _grey(image: Tensor) -> Tensor:
    if image.shape[0] != 3:
        return image.mean(0, keepdim=True).expand_as(image)
    return (
        (
            image
            * torch.tensor([0.299, 0.587, 0.114], dtype=image.dtype, device=image.device).view(
                3, 1, 1
            )
        )
        .sum(0, keepdim=True)
        .expand_as(image)
    )


def _smooth(image: Tensor) -> Tensor:
    kernel = (
        torch.tensor([[1.0, 1, 1], [1, 5, 1], [1, 1, 1]], dtype=image.dtype, device=image.device)
        / 13
    )
    blurred = F.conv2d(image[:, None], kernel[None, None])[:, 0]
    out = image.clone()
    out[:, 1:-1, 1:-1] = blurred
    return out


def _posterize(image: Tensor, level: float, sign: float) -> Tensor:
    bits = 4 - int(4 * level)
    values = (image * 255).round().long().clamp(0, 255)
    return (
        ((values >> (8 - bits)) << (8 - bits)).to(image.dtype) / 255
        if bits
        else torch.zeros_like(image)
    )


def _solarize_add(image: Tensor, level: float, sign: float) -> Tensor:
    return torch.where(image < 0.5, image + min(128, int(110 * level)) / 255, image)


TRANSFORMS: dict[str, Callable[[Tensor, float, float], Tensor]] = {
    "AutoContrast": _auto_contrast,
    "Equalize": _equalize,
    "Invert": lambda image, level, sign: 1 - image,
    "Rotate": _rotate,
    "Posterize": _posterize,
    "Solarize": lambda image, level, sign: torch.where(image < 1 - level, image, 1 - image),
    "SolarizeAdd": _solarize_add,
    "Color": lambda image, level, sign: _blend(image, _grey(image), level, sign),
    "Contrast": lambda image, level, sign: _blend(
        image, _grey(image).mean().expand_as(image), level, sign
    ),
    "Brightness": lambda image, level, sign: _blend(image, torch.zeros_like(image), level, sign),
    "Sharpness": lambda image, level, sign: _blend(image, _smooth(image), level, sign),
    "ShearX": lambda image, level, sign: _affine(
        image, [[1.0, 0.3 * level * sign, 0.0], [0.0, 1.0, 0.0]]
    ),
    "ShearY": lambda image, level, sign: _affine(
        image, [[1.0, 0.0, 0.0], [0.3 * level * sign, 1.0, 0.0]]
    ),
    "TranslateX": lambda image, level, sign: _affine(
        image, [[1.0, 0.0, 0.9 * level * sign], [0.0, 1.0, 0.0]]
    ),
    "TranslateY": lambda image, level, sign: _affine(
        image, [[1.0, 0.0, 0.0], [0.0, 1.0, 0.9 * level * sign]]
    ),
}
