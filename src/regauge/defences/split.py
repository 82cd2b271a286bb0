"""Defences of split learning: transforms of images and features before a client sends them.

They act before the columns are transformed by the element of a lock, and always in this order:

    pixel-noise, low-pass    on the images, before the embedding
    bottleneck               on the stream: only its first channels are sent
    clip                     on the stream, each sample to a norm
    noise, private           on the stream; `private` on the gradients that are sent, too
    round                    on the stream: few bits of each number
    batch-shuffle            on the stream: tokens are permuted across the samples of a batch
    rows                     tokens are permuted within a sample

A defence transforms a crossing on its way out and returns a function that restores the stream on
its way back. Its random numbers depend only on a secret and on the number of the request: a run
that is repeated after a crash sends the same bytes. No defence is encryption: `regauge audit split`
measures what each of them protects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch

from regauge.core import axes as ax
from regauge.core.element import Element
from regauge.core.groups import Permutation
from regauge.core.members import Monomial
from regauge.core.rng import Stream
from regauge.core.spec import Space, Spec
from regauge.defences.accountant import gaussian_epsilon
from regauge.defences.parser import (
    parse_combination,
    require,
    require_integer,
    require_positive,
)
from regauge.models.cut import TOKEN_SPACES, Crossing

Tensor = torch.Tensor
Undo = Callable[[Tensor], Tensor]


class KeyedRandom:
    """Random numbers of one pass: a function of a secret, a label and the name of the use."""

    def __init__(self, secret: bytes, label: str) -> None:
        self.secret, self.label = secret, label

    def stream(self, name: str) -> Stream:
        """Return the random stream of a use."""
        return Stream(self.secret, f"{name}/{self.label}")

    def normal(self, name: str, like: Tensor) -> Tensor:
        """Sample standard normal numbers of a tensor's shape, dtype and device.

        They come from torch's generator on the CPU, seeded by 64 bits of the stream.
        """
        seed = int(self.stream(name).words(1)[0]) & 0x7FFF_FFFF_FFFF_FFFF
        values = torch.randn(
            like.shape,
            generator=torch.Generator().manual_seed(seed),
            dtype=torch.float64 if like.dtype == torch.float64 else None,
        )
        return values.to(like)


class Defence(Protocol):
    """A transform of images or of the inputs of the backbone; most change one of the two."""

    @property
    def stage(self) -> int:
        """The place in the order of defences, lowest first."""
        ...

    def apply_to_images(self, images: Tensor, rng: KeyedRandom) -> Tensor:
        """Return the transformed images."""
        ...

    def apply_to_crossing(self, crossing: Crossing, rng: KeyedRandom) -> tuple[Crossing, Undo]:
        """Return the transformed inputs, and the function that restores the returned stream."""
        ...


class _OnImages:
    """A defence that does not change the inputs of the backbone."""

    stage = 0

    def apply_to_crossing(self, crossing: Crossing, rng: KeyedRandom) -> tuple[Crossing, Undo]:
        return crossing, _identity


class _OnStream:
    """A defence that does not change images."""

    def apply_to_images(self, images: Tensor, rng: KeyedRandom) -> Tensor:
        return images


def _identity(z: Tensor) -> Tensor:
    return z


@dataclass(frozen=True)
class PixelNoise(_OnImages):
    """Gaussian noise on the normalized images, as in the code of Xu et al. (2304.07735).

    `scale` is its standard deviation, in the units of the model's inputs.
    """

    scale: float

    def __post_init__(self) -> None:
        require_positive("pixel noise", self.scale, "give its standard deviation")

    def apply_to_images(self, images: Tensor, rng: KeyedRandom) -> Tensor:
        return images + self.scale * rng.normal("pixel-noise", images)


@dataclass(frozen=True)
class LowPass(_OnImages):
    """A filter that keeps only the low frequencies of images.

    They are those up to `radius` of the side, in a square as in Xu et al.'s code, or in a disc.
    """

    radius: float
    shape: Literal["square", "disc"] = "square"

    def __post_init__(self) -> None:
        require(
            0 < self.radius <= 0.5,
            f"the radius must be in (0, 0.5], got {self.radius:g}",
            "the paper has 0.05; 0.5 keeps all frequencies",
        )
        require(
            self.shape in ("square", "disc"),
            f"the shape must be square or disc, got {self.shape!r}",
            "choose square or disc",
        )

    def apply_to_images(self, images: Tensor, rng: KeyedRandom) -> Tensor:
        height, width = images.shape[-2:]
        y, x = (torch.fft.fftfreq(n, 1 / n, device=images.device).abs() for n in (height, width))
        if self.shape == "square":
            passed = (y[:, None] <= max(int(self.radius * height), 0)) & (
                x[None, :] <= max(int(self.radius * width), 0)
            )
        else:
            passed = (y[:, None] / height) ** 2 + (x[None, :] / width) ** 2 <= self.radius**2
        pixels = images if images.dtype in (torch.float32, torch.float64) else images.float()
        filtered: Tensor = torch.fft.ifft2(torch.fft.fft2(pixels) * passed).real.to(images.dtype)
        return filtered


@dataclass(frozen=True)
class Bottleneck(_OnStream):
    """A stream of which only the first `channels` of each token are sent; the others are zero.

    Use it with an embedding that is trained with it: training moves what the task needs into these
    channels.
    """

    channels: float
    stage = 1

    def __post_init__(self) -> None:
        require_integer("the channels of a bottleneck", self.channels, 1)

    def apply_to_crossing(self, crossing: Crossing, rng: KeyedRandom) -> tuple[Crossing, Undo]:
        z = crossing.stream
        require(
            self.channels < z.shape[-1],
            f"a bottleneck must be narrower than the stream, {z.shape[-1]} channels, got "
            f"{self.channels:g}",
            "keep fewer channels",
        )
        is_sent = torch.arange(z.shape[-1], device=z.device) < self.channels
        return _replace_stream(crossing, torch.where(is_sent, z, torch.zeros_like(z))), _identity


@dataclass(frozen=True)
class Clip(_OnStream):
    """A bound on the norm of each sample's stream, over all its tokens and channels."""

    norm: float
    stage = 2

    def __post_init__(self) -> None:
        require_positive("the norm", self.norm, "samples are scaled down to it")

    def apply_to_crossing(self, crossing: Crossing, rng: KeyedRandom) -> tuple[Crossing, Undo]:
        return _replace_stream(crossing, clip_samples(crossing.stream, self.norm)), _identity


def clip_samples(x: Tensor, norm: float) -> Tensor:
    """Scale each sample down to a norm."""
    norms: Tensor = torch.linalg.vector_norm(x.flatten(1), dim=1).clamp(min=1e-12)
    return x * (norm / norms).clamp(max=1).view(-1, *[1] * (x.dim() - 1))


@dataclass(frozen=True)
class Noise(_OnStream):
    """Gaussian noise on the stream, as in the text of Xu et al. (2304.07735).

    `scale` is its standard deviation, in units of the standard deviation of the stream over the
    batch. Exact zeros (of a bottleneck) stay zero.
    """

    scale: float
    stage = 3

    def __post_init__(self) -> None:
        require_positive("noise", self.scale, "0.5 is half of the stream's standard deviation")

    def apply_to_crossing(self, crossing: Crossing, rng: KeyedRandom) -> tuple[Crossing, Undo]:
        z = crossing.stream
        nonzero = z.detach() != 0
        size = self.scale * z.detach()[nonzero].float().std().to(z.dtype)
        return _replace_stream(crossing, z + nonzero * size * rng.normal("noise", z)), _identity


@dataclass(frozen=True)
class Round(_OnStream):
    """Quantization of the stream to 2 ** `bits` levels; with 1 bit only signs are sent.

    An adversary cannot average it away as noise: with the same weights the same input is rounded
    in the same way in every pass. While the embedding is trained, passes differ and their average
    reveals more. Zeros (of a bottleneck) stay zero. Gradients pass unchanged (straight-through).
    """

    bits: float
    stage = 4

    def __post_init__(self) -> None:
        require_integer("the bits of round", self.bits, 1, 8)

    def apply_to_crossing(self, crossing: Crossing, rng: KeyedRandom) -> tuple[Crossing, Undo]:
        z = crossing.stream
        levels = 2 ** int(self.bits)
        with torch.no_grad():
            size = (
                z.float()
                .square()
                .sum()
                .div((z != 0).sum().clamp(min=1))
                .sqrt()
                .to(z.dtype)
                .clamp(min=1e-12)
            )
            # two standard deviations on either side hold nearly all of a Gaussian
            step = (2 if levels == 2 else 4) * size / levels
            rounded = ((z / step).floor() + 0.5).clamp(0.5 - levels / 2, levels / 2 - 0.5) * step
            rounded = torch.where(z == 0, torch.zeros_like(z), rounded)
        return _replace_stream(crossing, z + (rounded - z).detach()), _identity


@dataclass(frozen=True)
class Private(_OnStream):
    """Differentially private features and gradients: clipped per sample, with Gaussian noise.

    Each sample is clipped to `norm`. The standard deviation of the noise is `multiplier` times
    2 `norm`, the largest distance between two clipped samples. `epsilon` is the guarantee.
    """

    multiplier: float
    norm: float = 1.0
    stage = 3

    def __post_init__(self) -> None:
        for value in (self.multiplier, self.norm):
            require_positive("the noise multiplier and the norm", value, "private=1.0,norm=8")

    def apply_to_crossing(self, crossing: Crossing, rng: KeyedRandom) -> tuple[Crossing, Undo]:
        def protect_grad(z: Tensor) -> Tensor:
            if z.requires_grad:
                z.register_hook(lambda grad: self._clip_and_add_noise(grad, rng, "private/back"))
            return z

        private = self._clip_and_add_noise(crossing.stream, rng, "private")
        return _replace_stream(crossing, private), protect_grad

    def _clip_and_add_noise(self, x: Tensor, rng: KeyedRandom, name: str) -> Tensor:
        return clip_samples(x, self.norm) + self.multiplier * 2 * self.norm * rng.normal(name, x)

    def epsilon(self, passes: int, *, backward: bool = True, delta: float = 1e-5) -> float:
        """Compute the epsilon of a sample that took part in some passes.

        The guarantee is local differential privacy: for any two samples, against an adversary that
        observes everything that is sent, without amplification by the batch. In training the
        gradient is a second release of the same sample; it also covers the labels.

        Args:
            passes: The number of passes that the sample took part in.
            backward: Whether gradients were sent, as in training.
            delta: The probability with which the guarantee may fail.
        """
        require(passes >= 0, f"passes must be >= 0, got {passes}", "count them from 0")
        return gaussian_epsilon(
            self.multiplier, passes * (2 if backward else 1), delta, "REPLACE_ONE"
        )


@dataclass(frozen=True)
class BatchShuffle(_OnStream):
    """A permutation of the tokens of all samples of a batch, undone when they return.

    The backbone mixes samples, which costs accuracy. A random `share` of the tokens takes part;
    with `keep_cls` the first token of each sample does not. Only for image models: the masks and
    positions of texts would have to follow their tokens.
    """

    share: float = 1.0
    keep_cls: bool = True
    stage = 5

    def __post_init__(self) -> None:
        require(
            0 < self.share <= 1,
            f"the share must be in (0, 1], got {self.share:g}",
            "1 shuffles all tokens",
        )

    def apply_to_crossing(self, crossing: Crossing, rng: KeyedRandom) -> tuple[Crossing, Undo]:
        z = crossing.stream
        require(
            z.shape[0] > 1,
            "batch-shuffle needs at least 2 samples, got a batch of one",
            "use larger batches, or rows",
        )
        per_token = [
            key
            for key in crossing.tensors
            if key.partition("@")[0] != crossing.boundary.stream
            and ax.spaces(crossing.axes(key) or "") & TOKEN_SPACES
        ]
        require(
            not per_token,
            f'batch-shuffle cannot move tokens to other samples: "{min(per_token, default="")}" '
            "belongs to each token of its sample",
            "use rows",
        )
        tokens = torch.arange(z.shape[0] * z.shape[1]).view(z.shape[0], -1)
        movable = tokens[:, 1:].reshape(-1) if self.keep_cls else tokens.reshape(-1)
        stream = rng.stream("batch-shuffle")
        count = max(2, round(self.share * len(movable)))
        chosen = movable[torch.from_numpy(stream.permutation(len(movable)))][:count]
        order = tokens.reshape(-1).clone()
        order[chosen] = chosen[torch.from_numpy(stream.permutation(len(chosen)))]
        order = order.to(z.device)
        inverse = torch.argsort(order)

        def permute(x: Tensor, index: Tensor) -> Tensor:
            return x.flatten(0, 1)[index].view(x.shape)

        return _replace_stream(crossing, permute(z, order)), lambda y: permute(y, inverse)


@dataclass(frozen=True)
class Rows(_OnStream):
    """A permutation of the tokens of a sample, one for a batch or one for each sample.

    Masks and positions are permuted with them; with `keep_cls` the first token stays. It costs no
    accuracy: the backbone commutes with it.
    """

    each: Literal["batch", "sample"] = "batch"
    keep_cls: bool = False
    stage = 6

    def __post_init__(self) -> None:
        require(
            self.each in ("batch", "sample"),
            f"rows must be per batch or per sample, got {self.each!r}",
            "choose batch or sample",
        )

    def apply_to_crossing(self, crossing: Crossing, rng: KeyedRandom) -> tuple[Crossing, Undo]:
        batch, n = crossing.stream.shape[:2]
        stream = rng.stream(f"rows/{crossing.boundary.name}")
        elements = [
            _row_permutation(stream, n, self.keep_cls)
            for _ in range(batch if self.each == "sample" else 1)
        ]
        if len(elements) == 1:
            return crossing.transform(elements[0]), lambda z: crossing.restore(elements[0], z)
        parts = [
            crossing.with_inputs(
                **{k: _slice_sample(crossing, k, v, i, batch) for k, v in crossing.inputs.items()}
            ).transform(g)
            for i, g in enumerate(elements)
        ]
        joined = parts[0].with_inputs(
            **{k: _concatenate(crossing, k, [p.inputs[k] for p in parts]) for k in parts[0].inputs}
        )
        return joined, lambda z: torch.cat(
            [crossing.restore(g, z[i : i + 1]) for i, g in enumerate(elements)]
        )


def _replace_stream(crossing: Crossing, stream: Tensor) -> Crossing:
    return crossing.with_inputs(
        **{key: stream for key in crossing.inputs if key == crossing.boundary.stream}
    )


def _row_permutation(stream: Stream, n: int, keep_cls: bool) -> Element:
    index = (
        np.concatenate([[0], 1 + stream.permutation(n - 1)]) if keep_cls else stream.permutation(n)
    )
    return Element(
        Spec("rows", {"token": Space(n, Permutation())}, {}),
        {"token": Monomial(index.astype(np.int64)[None], None)},
    )


def _has_rows(crossing: Crossing, key: str) -> bool:
    axes = crossing.axes(key)
    return axes is not None and bool(ax.spaces(axes) & TOKEN_SPACES)


def _slice_sample(crossing: Crossing, key: str, value: Any, i: int, batch: int) -> Any:
    if not _has_rows(crossing, key) or value is None:
        return value
    if isinstance(value, tuple | list):
        return type(value)(_slice_sample(crossing, key, v, i, batch) for v in value)
    return value[i : i + 1] if value.shape[0] == batch else value


def _concatenate(crossing: Crossing, key: str, values: list[Any]) -> Any:
    if not _has_rows(crossing, key) or values[0] is None:
        return values[0]
    if isinstance(values[0], tuple | list):
        return type(values[0])(torch.cat(parts) for parts in zip(*values, strict=True))
    return torch.cat(values)


DEFENCES: Mapping[str, type] = {
    "pixel-noise": PixelNoise,
    "low-pass": LowPass,
    "bottleneck": Bottleneck,
    "clip": Clip,
    "noise": Noise,
    "round": Round,
    "private": Private,
    "batch-shuffle": BatchShuffle,
    "rows": Rows,
}


def parse_defences(defences: Sequence[Defence | str]) -> tuple[Defence, ...]:
    """Return defences in the order in which they act.

    Args:
        defences: Defences of this module, or specifications for `regauge.defences.parser`:
            "noise=0.5", "low-pass=0.05,disc", "private=1.0,norm=8+rows=sample,keep_cls".
    """
    return parse_combination(defences, DEFENCES)


def apply_defences(
    defences: Sequence[Defence], crossing: Crossing, rng: KeyedRandom
) -> tuple[Crossing, Undo]:
    """Apply defences to a crossing, in order; also return the function that undoes them."""
    undo_steps: list[Undo] = []
    for defence in defences:
        crossing, undo = defence.apply_to_crossing(crossing, rng)
        undo_steps.append(undo)

    def restore(z: Tensor) -> Tensor:
        for undo in reversed(undo_steps):
            z = undo(z)
        return z

    return crossing, restore
