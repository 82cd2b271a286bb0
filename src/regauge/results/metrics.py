"""How near a reconstruction is to the image that it is of. Every number is of one image; whoever
shows them takes means, and the worst.

Images are [images, channels, height, width] in a range that is declared: the same pair has another
PSNR and SSIM if its range is another. PSNR and SSIM are torchmetrics'; LPIPS is made of weights
that are given by path.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.functional import conv2d, max_pool2d, relu

from regauge.errors import RegaugeError, need

Tensor = torch.Tensor


class MetricError(RegaugeError):
    """Images that cannot be compared."""


def _require_comparable(found: Tensor, true: Tensor) -> None:
    if found.shape != true.shape or found.dim() != 4 or not len(found):
        raise MetricError(
            f"images of shape {list(found.shape)} are compared with {list(true.shape)}",
            hint="[images, channels, height, width], both",
        )
    if not bool(torch.isfinite(found).all() and torch.isfinite(true).all()):
        raise MetricError("an image holds NaN or Inf", hint="did the attack diverge?")


def mse(found: Tensor, true: Tensor) -> Tensor:
    """The mean squared difference of each image's values."""
    _require_comparable(found, true)
    return (found.double() - true.double()).square().flatten(1).mean(1)


def psnr(found: Tensor, true: Tensor, span: float) -> Tensor:
    """10 log10(span^2 / MSE) of each image, in dB; `span` is the width of the range of values (1
    for 0..1, 2 for -1..1).
    """
    need("torchmetrics", "audit")
    from torchmetrics.functional.image import peak_signal_noise_ratio

    _require_comparable(found, true)
    out: Tensor = peak_signal_noise_ratio(
        found.double(), true.double(), data_range=span, dim=(1, 2, 3), reduction="none"
    )
    return out


def ssim(found: Tensor, true: Tensor, span: float) -> Tensor:
    """Structural similarity of each image, with Gaussian windows of 11 (smaller where the image
    is): 1 is the same.
    """
    need("torchmetrics", "audit")
    from torchmetrics.functional.image import structural_similarity_index_measure

    _require_comparable(found, true)
    window = min(11, 2 * ((min(found.shape[-2:]) - 1) // 2) + 1)
    out = (
        structural_similarity_index_measure(
            found.double(),
            true.double(),
            data_range=span,
            reduction="none",
            gaussian_kernel=False,
            kernel_size=window,
        )
        if window < 11
        else structural_similarity_index_measure(
            found.double(), true.double(), data_range=span, reduction="none"
        )
    )
    assert isinstance(out, Tensor)
    return out.reshape(-1)


def spectral_distance(found: Tensor, true: Tensor) -> Tensor:
    """1 less the cosine between the two-dimensional Fourier transforms of each pair: 0 is the same
    up to a factor.

    002's FFT2D, with the conjugate that its script leaves out. By Parseval it is the cosine
    distance of the pixels, and so says nothing of its own.
    """
    _require_comparable(found, true)
    a, b = (torch.fft.fft2(v.double()).flatten(1) for v in (found, true))
    alike: Tensor = (a * b.conj()).sum(1).real / (
        a.abs().square().sum(1).sqrt() * b.abs().square().sum(1).sqrt()
    ).clamp(min=1e-300)
    return 1 - alike


class Lpips:
    """Learned perceptual distance (Zhang et al. 2018), version 0.1 on AlexNet, from a safetensors
    file with `conv0..4` and `lin0..4`. Images are in `low` to `high`; grey ones are taken for
    colour.
    """

    _STRIDE, _PADDING = (4, 1, 1, 1, 1), (2, 2, 1, 1, 1)

    def __init__(self, path: Path | str) -> None:
        from regauge.checkpoints.reader import open_checkpoint

        held = open_checkpoint(path)
        self.state = {name: held[name].float() for name in held}
        if not all(f"{kind}{i}.weight" in self.state for kind in ("conv", "lin") for i in range(5)):
            raise MetricError(
                f"{path} holds no AlexNet with the heads of LPIPS",
                hint="conv0..4 and lin0..4 are needed",
            )

    def features(self, x: Tensor, low: float, high: float) -> list[Tensor]:
        """What the five layers of AlexNet say of images."""
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

    def __call__(self, found: Tensor, true: Tensor, low: float, high: float) -> Tensor:
        """The distance of each pair: 0 is the same."""
        _require_comparable(found, true)
        if min(found.shape[-2:]) < 32:
            raise MetricError(
                f"images of {list(found.shape[-2:])} are too small for AlexNet",
                hint="it needs 32 x 32",
            )
        total = torch.zeros(len(found))
        with torch.no_grad():
            for i, (a, b) in enumerate(
                zip(self.features(found, low, high), self.features(true, low, high), strict=True)
            ):
                a, b = (v / (v.square().sum(1, keepdim=True).sqrt() + 1e-10) for v in (a, b))
                total += conv2d((a - b).square(), self.state[f"lin{i}.weight"]).mean((1, 2, 3))
        return total


def feature_similarity(found: Tensor, true: Tensor, embed: Callable[[Tensor], Tensor]) -> Tensor:
    """The absolute cosine of what a network makes of each pair (000's F-SIM, with the network that
    one has).
    """
    _require_comparable(found, true)
    with torch.no_grad():
        a, b = (embed(v).flatten(1).double() for v in (found, true))
    return torch.nn.functional.cosine_similarity(a, b).abs()


def is_identified(found: Tensor, true: Tensor) -> Tensor:
    """Is each reconstruction nearest to its own original, of all of them? Images are taken less
    their mean, so that what all share says nothing.
    """
    _require_comparable(found, true)
    a, b = (v.flatten(1).double() for v in (found, true))
    a, b = a - a.mean(0), b - b.mean(0)
    if len(a) < 2:
        raise MetricError("one image is always nearest to itself", hint="give more")
    alike = torch.nn.functional.normalize(a, dim=1) @ torch.nn.functional.normalize(b, dim=1).T
    best = alike.max(1).values
    return (alike.diagonal() >= best) & (
        best > alike.min(1).values
    )  # what is equally near to all is of none
