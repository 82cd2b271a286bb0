"""Images of a training batch, changed: mirrored, moved, cropped, RandAugment, erased, mixed. All of
it is from one generator, so that a training that goes on draws what it would have drawn.

The strong half is DeiT's recipe, which papers 000 and 002 train by: RandAugment 9 / 0.5 (two of
fifteen changes, each done half of the time, at strength N(9, 0.5) of 10), mixup (alpha 0.8) or
CutMix (alpha 1), half of the batches each, erasing with noise, and smoothed labels.
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
# DeiT's settings; the image's mean and deviation have to be added, because colours are changed
# where they are between 0 and 1.
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
    """Each image mirrored or not (`flip`), moved by up to `shift` pixels each way (what comes in
    from outside is zero), cropped to no less than the share `crop` of its area and made as large as
    before, changed by RandAugment of a `strength` (needs `mean` and `std`), and with a probability
    `erase` a rectangle of it replaced by noise.
    """
    n, side = len(pixels), pixels.shape[-1]
    if config.get("flip"):
        chosen = torch.from_numpy(rng.random(n) < 0.5).to(pixels.device)
        pixels = torch.where(chosen[:, None, None, None], pixels.flip(-1), pixels)
    most = int(config.get("shift", 0))
    if most:
        wide = F.pad(pixels, (most,) * 4)
        places = rng.integers(0, 2 * most + 1, (n, 2))
        pixels = torch.stack(
            [
                image[:, y : y + side, x : x + side]
                for image, (y, x) in zip(wide, places, strict=True)
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
    """The batch with itself in reverse: all of each image (mixup) or a rectangle of it (CutMix),
    and labels as shares of classes, smoothed.
    """
    smooth = float(config.get("smooth", 0.0))
    shares = F.one_hot(labels, classes).to(pixels.dtype) * (1 - smooth) + smooth / classes
    ways = [name for name in ("mixup", "cutmix") if config.get(name)]
    if not ways:
        return pixels, shares
    way = ways[int(rng.integers(len(ways)))]
    own = float(rng.beta(config[way], config[way]))
    if way == "mixup":
        pixels = own * pixels + (1 - own) * pixels.flip(0)
    else:
        top, left, height, width = _sample_rectangle(pixels.shape[-2:], 1 - own, 1.0, rng)
        pixels = pixels.clone()
        other = pixels.flip(0)
        pixels[..., top : top + height, left : left + width] = other[
            ..., top : top + height, left : left + width
        ]
        own = 1 - height * width / (pixels.shape[-2] * pixels.shape[-1])
    return pixels, own * shares + (1 - own) * shares.flip(0)


def rand_augment(
    image: Tensor, strength: float, rng: np.random.Generator, count: int = 2
) -> Tensor:
    """RandAugment of one image with values between 0 and 1."""
    names = list(TRANSFORMS)
    for name in rng.integers(0, len(names), count):
        level = float(np.clip(rng.normal(strength, 0.5), 0, MAX_STRENGTH)) / MAX_STRENGTH
        side = 1.0 if rng.random() < 0.5 else -1.0
        if rng.random() < 0.5:
            image = TRANSFORMS[names[name]](image, level, side).clamp(0, 1)
    return image


def _sample_rectangle(
    shape: tuple[int, ...], area: float, aspect: float, draw: np.random.Generator
) -> tuple[int, int, int, int]:
    """A rectangle of about this share of an image: top, left, height, width."""
    rows, columns = int(shape[-2]), int(shape[-1])
    height = min(rows, round(math.sqrt(area * rows * columns * aspect)))
    width = min(columns, round(math.sqrt(area * rows * columns / aspect)))
    return (
        int(draw.integers(0, rows - height + 1)),
        int(draw.integers(0, columns - width + 1)),
        height,
        width,
    )


def _random_crop(image: Tensor, least: float, draw: np.random.Generator) -> Tensor:
    area, aspect = (
        draw.uniform(least, 1.0),
        math.exp(draw.uniform(math.log(3 / 4), math.log(4 / 3))),
    )
    top, left, height, width = _sample_rectangle(tuple(image.shape[-2:]), area, aspect, draw)
    part = image[None, :, top : top + max(1, height), left : left + max(1, width)]
    return F.interpolate(
        part, tuple(image.shape[-2:]), mode="bicubic", align_corners=False, antialias=True
    )[0]


def _random_erase(image: Tensor, draw: np.random.Generator) -> Tensor:
    area, aspect = (
        draw.uniform(0.02, 1 / 3),
        math.exp(draw.uniform(math.log(0.3), math.log(1 / 0.3))),
    )
    top, left, height, width = _sample_rectangle(tuple(image.shape[-2:]), area, aspect, draw)
    image = image.clone()
    image[:, top : top + height, left : left + width] = torch.from_numpy(
        draw.normal(size=(image.shape[0], height, width))
    ).to(image)
    return image


# What RandAugment does, by the names that it is known by: (image, level from 0 to 1, side -1 or 1).
# A larger level is always a larger change.


def _auto_contrast(image: Tensor, level: float, side: float) -> Tensor:
    low, high = image.amin((1, 2), keepdim=True), image.amax((1, 2), keepdim=True)
    return torch.where(high > low, (image - low) / (high - low).clamp(min=1e-12), image)


def _equalize(image: Tensor, level: float, side: float) -> Tensor:
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
    theta = torch.tensor([matrix], dtype=image.dtype, device=image.device)
    grid = F.affine_grid(theta, [1, *image.shape], align_corners=False)
    inside = F.grid_sample(torch.ones_like(image)[None], grid, mode="bilinear", align_corners=False)
    return (
        F.grid_sample(image[None], grid, mode="bilinear", align_corners=False) + 0.5 * (1 - inside)
    )[0]  # grey comes in from outside


def _rotate(image: Tensor, level: float, side: float) -> Tensor:
    angle = math.radians(30 * level * side)
    return _affine(
        image, [[math.cos(angle), -math.sin(angle), 0.0], [math.sin(angle), math.cos(angle), 0.0]]
    )


def _blend(image: Tensor, other: Tensor, level: float, side: float) -> Tensor:
    return other + (1 + 0.9 * level * side) * (image - other)


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


def _posterize(image: Tensor, level: float, side: float) -> Tensor:
    bits = 4 - int(4 * level)
    values = (image * 255).round().long().clamp(0, 255)
    return (
        ((values >> (8 - bits)) << (8 - bits)).to(image.dtype) / 255
        if bits
        else torch.zeros_like(image)
    )


def _solarize_add(image: Tensor, level: float, side: float) -> Tensor:
    return torch.where(image < 0.5, image + min(128, int(110 * level)) / 255, image)


TRANSFORMS: dict[str, Callable[[Tensor, float, float], Tensor]] = {
    "AutoContrast": _auto_contrast,
    "Equalize": _equalize,
    "Invert": lambda image, level, side: 1 - image,
    "Rotate": _rotate,
    "Posterize": _posterize,
    "Solarize": lambda image, level, side: torch.where(image < 1 - level, image, 1 - image),
    "SolarizeAdd": _solarize_add,
    "Color": lambda image, level, side: _blend(image, _grey(image), level, side),
    "Contrast": lambda image, level, side: _blend(
        image, _grey(image).mean().expand_as(image), level, side
    ),
    "Brightness": lambda image, level, side: _blend(image, torch.zeros_like(image), level, side),
    "Sharpness": lambda image, level, side: _blend(image, _smooth(image), level, side),
    "ShearX": lambda image, level, side: _affine(
        image, [[1.0, 0.3 * level * side, 0.0], [0.0, 1.0, 0.0]]
    ),
    "ShearY": lambda image, level, side: _affine(
        image, [[1.0, 0.0, 0.0], [0.3 * level * side, 1.0, 0.0]]
    ),
    "TranslateX": lambda image, level, side: _affine(
        image, [[1.0, 0.0, 0.9 * level * side], [0.0, 1.0, 0.0]]
    ),
    "TranslateY": lambda image, level, side: _affine(
        image, [[1.0, 0.0, 0.0], [0.0, 1.0, 0.9 * level * side]]
    ),
}
