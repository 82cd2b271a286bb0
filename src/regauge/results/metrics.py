"""Similarity of reconstructed images to their originals, one number for each image.

Images are [images, channels, height, width] in a declared range, on which PSNR and SSIM depend.
PSNR and SSIM are torchmetrics'; the weights of LPIPS are loaded from a file.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.functional import conv2d, max_pool2d, relu

from regauge.errors import MetricError, need

Tensor = torch.Tensor


def _require_comparable(reconstructed: Tensor, true: Tensor) -> None:
    if reconstructed.shape != true.shape or reconstructed.dim() != 4 or not len(reconstructed):
        raise MetricError(
            "images must have the same shape [images, channels, height, width], got "
            f"{list(reconstructed.shape)} and {list(true.shape)}",
        )
    if not bool(torch.isfinite(reconstructed).all() and torch.isfinite(true).all()):
        raise MetricError("images must be finite, got NaN or Inf", hint="did the attack diverge?")


def mse(reconstructed: Tensor, true: Tensor) -> Tensor:
    """Compute the mean squared error of each image."""
    _require_comparable(reconstructed, true)
    return (reconstructed.double() - true.double()).square().flatten(1).mean(1)


def psnr(reconstructed: Tensor, true: Tensor, span: float) -> Tensor:
    """Compute 10 log10(span^2 / MSE) of each image, in dB.

    Args:
        reconstructed: The reconstructions.
        true: The originals.
        span: The width of the range of values: 1 for 0..1, 2 for -1..1.
    """
    need("torchmetrics", "audit")
    from torchmetrics.functional.image import peak_signal_noise_ratio

    _require_comparable(reconstructed, true)
    out: Tensor = peak_signal_noise_ratio(
        reconstructed.double(), true.double(), data_range=span, dim=(1, 2, 3), reduction="none"
    )
    return out


def ssim(reconstructed: Tensor, true: Tensor, span: float) -> Tensor:
    """Compute the structural similarity of each image, 1 for equal images.

    Windows are Gaussian, of 11 pixels, or uniform and smaller for smaller images.
    """
    need("torchmetrics", "audit")
    from torchmetrics.functional.image import structural_similarity_index_measure

    _require_comparable(reconstructed, true)
    window = min(11, 2 * ((min(reconstructed.shape[-2:]) - 1) // 2) + 1)
    out = (
        structural_similarity_index_measure(
            reconstructed.double(),
            true.double(),
            data_range=span,
            reduction="none",
            gaussian_kernel=False,
            kernel_size=window,
        )
        if window < 11
        else structural_similarity_index_measure(
            reconstructed.double(), true.double(), data_range=span, reduction="none"
        )
    )
    assert isinstance(out, Tensor)
    return out.reshape(-1)


def spectral_distance(reconstructed: Tensor, true: Tensor) -> Tensor:
    """Compute the cosine distance of 2-D Fourier transforms: 0 for images equal up to a factor.

    This is the FFT2D of masked jigsaw (2205.12551), with the conjugate that its script omits. By
    Parseval's theorem it equals the cosine distance of the pixels.
    """
    _require_comparable(reconstructed, true)
    a, b = (torch.fft.fft2(v.double()).flatten(1) for v in (reconstructed, true))
    cosine: Tensor = (a * b.conj()).sum(1).real / (
        a.abs().square().sum(1).sqrt() * b.abs().square().sum(1).sqrt()
    ).clamp(min=1e-300)
    return 1 - cosine


class Lpips:
    """Learned perceptual distance (Zhang et al. 2018), version 0.1 on AlexNet.

    The weights are in a safetensors file with `conv0..4` and `lin0..4`. Grey images are repeated
    over three channels.
    """

    _STRIDE, _PADDING = (4, 1, 1, 1, 1), (2, 2, 1, 1, 1)

    def __init__(self, path: Path | str) -> None:
        from regauge.checkpoints.reader import open_checkpoint

        checkpoint = open_checkpoint(path)
        self.state = {name: checkpoint[name].float() for name in checkpoint}
        if not all(f"{kind}{i}.weight" in self.state for kind in ("conv", "lin") for i in range(5)):
            raise MetricError(
                f"{path} must hold conv0..4 and lin0..4, AlexNet and the heads of LPIPS",
            )

    def features(self, x: Tensor, low: float, high: float) -> list[Tensor]:
        """Compute the activations of AlexNet's five layers, for images in `low` to `high`."""
        x = 2 * (x.float() - low) / (high - low) - 1
        x = x.expand(-1, 3, -1, -1) if x.shape[1] == 1 else x
        shift, scale = torch.tensor([-0.030, -0.088, -0.188]), torch.tensor([0.458, 0.448, 0.450])
        x = (x - shift.view(1, 3, 1, 1)) / scale.view(1, 3, 1, 1)
        out = []
        for i in range(5):
            x = max_pool2d(x, 3, 2) if i in (1, 2) else x
            x = relu(
                conv2d(
                    x,
                    self.state[f"conv{i}.weight"],
                    self.state[f"conv{i}.bias"],
                    self._STRIDE[i],
                    self._PADDING[i],
                )
            )
            out.append(x)
        return out

    def __call__(self, reconstructed: Tensor, true: Tensor, low: float, high: float) -> Tensor:
        """Compute the distance of each pair of images in `low` to `high`: 0 for equal images."""
        _require_comparable(reconstructed, true)
        if min(reconstructed.shape[-2:]) < 32:
            raise MetricError(
                "images must be at least 32 x 32 pixels for AlexNet, got "
                f"{list(reconstructed.shape[-2:])}",
            )
        total = torch.zeros(len(reconstructed))
        with torch.no_grad():
            for i, (a, b) in enumerate(
                zip(
                    self.features(reconstructed, low, high),
                    self.features(true, low, high),
                    strict=True,
                )
            ):
                a, b = (v / (v.square().sum(1, keepdim=True).sqrt() + 1e-10) for v in (a, b))
                total += conv2d((a - b).square(), self.state[f"lin{i}.weight"]).mean((1, 2, 3))
        return total


def feature_similarity(
    reconstructed: Tensor, true: Tensor, embed: Callable[[Tensor], Tensor]
) -> Tensor:
    """Compute the absolute cosine similarity of embeddings (the F-SIM of Xu et al.)."""
    _require_comparable(reconstructed, true)
    with torch.no_grad():
        a, b = (embed(v).flatten(1).double() for v in (reconstructed, true))
    return torch.nn.functional.cosine_similarity(a, b).abs()


def is_identified(reconstructed: Tensor, true: Tensor) -> Tensor:
    """Return whether each reconstruction is nearer to its original than to any other.

    The mean image is subtracted, so that common structure does not count.
    """
    _require_comparable(reconstructed, true)
    a, b = (v.flatten(1).double() for v in (reconstructed, true))
    a, b = a - a.mean(0), b - b.mean(0)
    if len(a) < 2:
        raise MetricError("identification needs at least 2 images, got 1")
    cosine = torch.nn.functional.normalize(a, dim=1) @ torch.nn.functional.normalize(b, dim=1).T
    best = cosine.max(1).values
    # a reconstruction that is equally near to all originals identifies none
    return (cosine.diagonal() >= best) & (best > cosine.min(1).values)
