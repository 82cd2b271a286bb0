"""The fifteen corruptions of ImageNet-C, for images of any size.

Severities 1 to 5 have the benchmark's published strengths, which are for 224 pixels. Lengths
(radii, shifts, waves) scale with the shorter side; noise strengths and shares do not. Frost and
snow are synthesized from fractal noise and streaks, where the benchmark pastes photographs and
calls an external tool: the errors of these two are not comparable with published ones.

    corrupt(images, "fog", 3, seed=0)        # uint8 [n, height, width, channels] in and out
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from scipy import ndimage

from regauge.errors import JigsawError, need

Rng = np.random.Generator
SEVERITIES = (1, 2, 3, 4, 5)
REFERENCE_SIDE = 224


def corrupt(images: Any, name: str, severity: int, *, seed: int = 0, first: int = 0) -> Any:
    """Return corrupted copies of images.

    Args:
        images: Bytes [n, height, width, channels].
        name: A corruption of `CORRUPTIONS`.
        severity: From 1 to 5.
        seed: The random seed. Each image has its own random numbers, from the seed, its index, the
            corruption and the severity.
        first: The index of the first image, of a part of a dataset.

    Raises:
        JigsawError: The corruption or the severity is unknown, or images are of another type.
    """
    if name not in CORRUPTIONS:
        raise JigsawError(f'unknown corruption "{name}"', hint=", ".join(CORRUPTIONS))
    if severity not in SEVERITIES:
        raise JigsawError(f"the severity must be from 1 to 5, got {severity}")
    if images.dtype != np.uint8 or images.ndim != 4:
        raise JigsawError(
            "images must be bytes [n, height, width, channels], got "
            f"{images.dtype} with {images.ndim} axes",
            hint="convert them to uint8 in 0..255",
        )
    number = list(CORRUPTIONS).index(name)
    out = np.empty_like(images)

    def change(i: int) -> None:
        rng = np.random.default_rng([seed, first + i, number, severity])
        corrupted = CORRUPTIONS[name](images[i].astype(np.float64) / 255, severity - 1, rng)
        out[i] = np.rint(np.clip(corrupted, 0, 1) * 255)

    # numpy and ndimage release the interpreter's lock
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for _ in pool.map(change, range(len(images))):
            pass
    return out


def _scale(x: Any) -> float:
    return float(min(x.shape[:2])) / REFERENCE_SIDE


def gaussian_noise(x: Any, s: int, rng: Rng) -> Any:
    return x + rng.normal(size=x.shape, scale=(0.08, 0.12, 0.18, 0.26, 0.38)[s])


def shot_noise(x: Any, s: int, rng: Rng) -> Any:
    rate = (60, 25, 12, 5, 3)[s]
    return rng.poisson(x * rate) / rate


def impulse_noise(x: Any, s: int, rng: Rng) -> Any:
    share = (0.03, 0.06, 0.09, 0.17, 0.27)[s]
    u = rng.random(x.shape)
    return np.where(u < share / 2, 0.0, np.where(u < share, 1.0, x))


def defocus_blur(x: Any, s: int, rng: Rng) -> Any:
    # a radius of 0 is the area of one pixel
    radius = float(np.sqrt(((3, 4, 6, 8, 10)[s] * _scale(x)) ** 2 + 1 / np.pi))
    half = int(np.ceil(radius))
    parts = 5  # of a pixel, so that small discs are round too
    grid = (np.arange((2 * half + 1) * parts) + 0.5) / parts - half - 0.5
    disc = (grid[:, None] ** 2 + grid[None] ** 2 <= radius**2).astype(float)
    kernel = disc.reshape(2 * half + 1, parts, 2 * half + 1, parts).sum((1, 3))
    return _convolve(x, kernel / kernel.sum())


def glass_blur(x: Any, s: int, rng: Rng) -> Any:
    sigma, distance, times = ((0.7, 1, 2), (0.9, 2, 1), (1.0, 2, 3), (1.1, 3, 2), (1.5, 4, 2))[s]
    scale = _scale(x)
    out = _gaussian_blur(x, sigma * scale)
    grid = np.stack(np.meshgrid(*(np.arange(n, dtype=float) for n in x.shape[:2]), indexing="ij"))
    for _ in range(times):  # each pixel is replaced by a random pixel nearby
        shift = rng.uniform(-distance * scale, distance * scale, grid.shape)
        out = _sample_at(out, grid + shift)
    return _gaussian_blur(out, sigma * scale)


def motion_blur(x: Any, s: int, rng: Rng) -> Any:
    radius, sigma = ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15))[s]
    scale = _scale(x)
    return _line_blur(
        x,
        max(1.0, radius * scale),
        max(0.5, sigma * scale),
        float(rng.uniform(-np.pi / 4, np.pi / 4)),
    )


def zoom_blur(x: Any, s: int, rng: Rng) -> Any:
    factors = np.arange(1, (1.11, 1.16, 1.21, 1.26, 1.33)[s], (0.01, 0.01, 0.02, 0.02, 0.03)[s])
    return np.mean([x, *(_zoom(x, f) for f in factors)], axis=0)


def snow(x: Any, s: int, rng: Rng) -> Any:
    mean, spread, length, white = (
        (0.1, 0.3, 10, 0.8),
        (0.2, 0.3, 12, 0.7),
        (0.55, 0.3, 12, 0.7),
        (0.55, 0.3, 12, 0.65),
        (0.55, 0.3, 14, 0.55),
    )[s]
    flakes = rng.normal(size=x.shape[:2], loc=mean, scale=spread)
    flakes = np.where(flakes < (0.5, 0.5, 0.9, 0.85, 0.8)[s], 0.0, np.clip(flakes, 0, 1))[..., None]
    flakes = _line_blur(
        flakes,
        max(1.0, length * _scale(x)),
        max(0.5, 4 * _scale(x)),
        float(rng.uniform(np.pi / 4, 3 * np.pi / 4)),
    )
    grey = x.mean(-1, keepdims=True)
    return white * x + (1 - white) * np.maximum(x, 1.5 * grey + 0.5) + flakes + flakes[::-1, ::-1]


def frost(x: Any, s: int, rng: Rng) -> Any:
    image, ice = ((1.0, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75))[s]
    # ridges of a fractal are sharp lines, like those of ice
    needles = np.abs(_fractal_noise(x.shape[:2], rng, 1.3) - 0.5) * 2
    return image * x + ice * np.clip(1 - 3 * needles, 0, 1)[..., None]


def fog(x: Any, s: int, rng: Rng) -> Any:
    strength, roughness = ((1.5, 2.0), (2.0, 2.0), (2.5, 1.7), (2.5, 1.5), (3.0, 1.4))[s]
    high = x.max()
    return (
        (x + strength * _fractal_noise(x.shape[:2], rng, roughness)[..., None])
        * high
        / (high + strength)
    )


def brightness(x: Any, s: int, rng: Rng) -> Any:
    """Increase the value of HSV; hue and saturation stay."""
    value = x.max(-1, keepdims=True)
    brighter = np.clip(value + (0.1, 0.2, 0.3, 0.4, 0.5)[s], 0, 1)
    return np.where(value > 0, x / np.maximum(value, 1e-9) * brighter, brighter)


def contrast(x: Any, s: int, rng: Rng) -> Any:
    mean = x.mean((0, 1), keepdims=True)
    return (x - mean) * (0.4, 0.3, 0.2, 0.1, 0.05)[s] + mean


def elastic_transform(x: Any, s: int, rng: Rng) -> Any:
    distance, smooth, bend = (
        (2.0, 0.7, 0.1),
        (2.0, 0.08, 0.2),
        (0.05, 0.01, 0.02),
        (0.07, 0.01, 0.02),
        (0.12, 0.01, 0.02),
    )[s]
    h, w = x.shape[:2]
    side = min(h, w)
    # the displacement of three corners determines an affine map
    corners = np.array([[0, 0, 1], [h - 1, 0, 1], [0, w - 1, 1]], float)
    moved = corners[:, :2] + rng.uniform(-bend * side, bend * side, (3, 2))
    affine = np.linalg.solve(corners, moved).T
    waves = [
        _gaussian_blur(rng.uniform(-1, 1, (h, w, 1)), max(smooth * side, 0.5))[..., 0]
        * distance
        * side
        for _ in range(2)
    ]
    rows, columns = np.meshgrid(np.arange(h), np.arange(w), indexing="ij")
    ones = np.ones_like(rows)
    at = np.einsum("ij,jhw->ihw", affine, np.stack([rows, columns, ones]).astype(float)) + np.stack(
        waves
    )
    return _sample_at(x, at)


def pixelate(x: Any, s: int, rng: Rng) -> Any:
    share = (0.6, 0.5, 0.4, 0.3, 0.25)[s]
    return _via_pil(
        x,
        lambda image, pil: image.resize(
            [max(1, int(n * share)) for n in image.size], pil.BOX
        ).resize(image.size, pil.NEAREST),
    )


def jpeg_compression(x: Any, s: int, rng: Rng) -> Any:
    def compress(image: Any, pil: Any) -> Any:
        from PIL import Image

        file = io.BytesIO()
        image.save(file, "JPEG", quality=(25, 18, 15, 10, 7)[s])
        return Image.open(file)

    return _via_pil(x, compress)


CORRUPTIONS: dict[str, Callable[[Any, int, Rng], Any]] = {
    "gaussian_noise": gaussian_noise,
    "shot_noise": shot_noise,
    "impulse_noise": impulse_noise,
    "defocus_blur": defocus_blur,
    "glass_blur": glass_blur,
    "motion_blur": motion_blur,
    "zoom_blur": zoom_blur,
    "snow": snow,
    "frost": frost,
    "fog": fog,
    "brightness": brightness,
    "contrast": contrast,
    "elastic_transform": elastic_transform,
    "pixelate": pixelate,
    "jpeg_compression": jpeg_compression,
}


def _convolve(x: Any, kernel: Any) -> Any:
    return ndimage.convolve(x, kernel[..., None], mode="reflect")


def _gaussian_blur(x: Any, sigma: float) -> Any:
    return ndimage.gaussian_filter(x, (sigma, sigma, 0), mode="reflect")


def _line_blur(x: Any, length: float, sigma: float, angle: float) -> Any:
    """Blur along a line: average shifted copies, weighted by half a Gaussian."""
    steps = np.arange(0, length + 1e-9, max(0.5, length / 20))
    weights = np.exp(-0.5 * (steps / sigma) ** 2)
    weights /= weights.sum()
    # Interpolated copies share pixels: the weight of each whole shift is added up first.
    shifts: dict[tuple[int, int], float] = {}
    for step, weight in zip(steps, weights, strict=True):
        places = []
        for at in (step * np.sin(angle), step * np.cos(angle)):
            below = int(np.floor(at))
            places.append(((below, 1 - (at - below)), (below + 1, at - below)))
        for (row, a), (column, b) in itertools.product(*places):
            shifts[row, column] = shifts.get((row, column), 0.0) + weight * a * b
    reach = int(np.ceil(length)) + 1
    padded = np.pad(x, ((reach, reach), (reach, reach), (0, 0)), mode="edge")
    h, w = x.shape[:2]
    out = np.zeros_like(x)
    for (row, column), weight in shifts.items():
        if weight:
            out += weight * padded[reach - row :, reach - column :][:h, :w]
    return out


def _zoom(x: Any, factor: float) -> Any:
    """Enlarge the middle to the whole image."""
    h, w = x.shape[:2]
    at = np.stack(
        np.meshgrid(
            *(((np.arange(n) - (n - 1) / 2) / factor + (n - 1) / 2) for n in (h, w)), indexing="ij"
        )
    )
    return _sample_at(x, at)


def _sample_at(x: Any, at: Any) -> Any:
    """Interpolate at coordinates [2, height, width], mirrored at the edges."""
    return np.stack(
        [
            ndimage.map_coordinates(x[..., c], at, order=1, mode="reflect")
            for c in range(x.shape[2])
        ],
        -1,
    )


def _fractal_noise(size: tuple[int, int], rng: Rng, roughness: float) -> Any:
    """Sample fractal noise in 0..1: random waves whose amplitude falls with their frequency."""
    h, w = size
    frequency = np.hypot(np.fft.fftfreq(h)[:, None], np.fft.fftfreq(w)[None])
    frequency[0, 0] = 1.0
    waves = np.fft.fft2(rng.normal(size=size)) / frequency ** (roughness / 2 + 0.5)
    waves[0, 0] = 0
    noise = np.fft.ifft2(waves).real
    return (noise - noise.min()) / max(float(np.ptp(noise)), 1e-12)


def _via_pil(x: Any, change: Callable[[Any, Any], Any]) -> Any:
    """Apply a function of a Pillow image and of its resampling filters."""
    need("PIL", "studies")
    from PIL import Image

    grey = x.shape[2] == 1
    pixels = np.rint(x * 255).astype(np.uint8)
    changed = change(Image.fromarray(pixels[..., 0] if grey else pixels), Image.Resampling)
    array = np.asarray(changed, dtype=np.float64) / 255
    return array[..., None] if grey else array
