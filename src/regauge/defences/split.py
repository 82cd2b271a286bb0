"""Defences: what a client does to what leaves it, beyond the columns that a key moves.

They compose in one order, whatever order they are named in:

    pixel-noise, low-pass    on the images, before the embedding
    bottleneck               on the stream: few of its channels leave
    clip                     on the stream, each sample's to a norm
    noise, private           on the stream (and with `private` on the gradients that are sent, too)
    round                    on the stream: few bits of each number
    batch-shuffle            tokens change places between the samples of a batch, and go back when
    they return
    rows                     tokens change places within a sample, and go back
    (columns)                the element of the lock, last

Each takes a crossing on its way out and says what is done to the stream on its way back. What is
drawn is a function of a secret and of the number of the request, so that a run that is repeated
after a crash sends the same bytes. None of them is encryption: `regauge audit split` says what they
buy.
"""

from __future__ import annotations

import math
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
from regauge.defences.parser import parse_combination, require
from regauge.models.cut import TOKEN_SPACES, Crossing

Tensor = torch.Tensor
Undo = Callable[[Tensor], Tensor]


class KeyedRandom:
    """What one pass draws from: a secret and a label. The same two give the same numbers."""

    def __init__(self, secret: bytes, label: str) -> None:
        self.secret, self.label = secret, label

    def stream(self, name: str) -> Stream:
        return Stream(self.secret, f"{name}/{self.label}")

    def normal(self, name: str, like: Tensor) -> Tensor:
        """Standard normal numbers of a tensor's shape, dtype and device. From torch's generator on
        the CPU, seeded by 64 bits of the stream.
        """
        seed = int(self.stream(name).words(1)[0]) & 0x7FFF_FFFF_FFFF_FFFF
        drawn = torch.randn(
            like.shape,
            generator=torch.Generator().manual_seed(seed),
            dtype=torch.float64 if like.dtype == torch.float64 else None,
        )
        return drawn.to(like)


class Defence(Protocol):
    """`stage` is its place in the order. `enter` is given the images, `leave` a crossing; most have
    one of the two.
    """

    @property
    def stage(self) -> int: ...

    def apply_to_images(self, images: Tensor, draw: KeyedRandom) -> Tensor: ...

    def apply_to_crossing(self, crossing: Crossing, draw: KeyedRandom) -> tuple[Crossing, Undo]: ...


class _OnImages:
    stage = 0

    def apply_to_crossing(self, crossing: Crossing, draw: KeyedRandom) -> tuple[Crossing, Undo]:
        return crossing, _identity


class _OnStream:
    def apply_to_images(self, images: Tensor, draw: KeyedRandom) -> Tensor:
        return images


def _identity(z: Tensor) -> Tensor:
    return z


def is_whole(value: float, least: int, most: float = math.inf) -> bool:
    """Is it a whole number in this range? An infinite one is none."""
    return least <= value <= most and math.isfinite(value) and value == int(value)


@dataclass(frozen=True)
class PixelNoise(_OnImages):
    """Gaussian noise on the images as the model is given them (000's code has it there). `scale` is
    its standard deviation, in the model's units.
    """

    scale: float

    def __post_init__(self) -> None:
        require(
            0 < self.scale < math.inf,
            f"noise of {self.scale} is none",
            "give a positive standard deviation",
        )

    def apply_to_images(self, images: Tensor, draw: KeyedRandom) -> Tensor:
        return images + self.scale * draw.normal("pixel-noise", images)


@dataclass(frozen=True)
class LowPass(_OnImages):
    """Nothing of the images but their low frequencies, up to `radius` of the side: in a square, as
    000's code has it, or in a disc.
    """

    radius: float
    shape: Literal["square", "disc"] = "square"

    def __post_init__(self) -> None:
        require(
            0 < self.radius <= 0.5,
            f"a radius of {self.radius} is not in (0, 0.5]",
            "0.05 is the paper's; 0.5 keeps all",
        )
        require(
            self.shape in ("square", "disc"),
            f"a filter is no {self.shape!r}",
            "choose square or disc",
        )

    def apply_to_images(self, images: Tensor, draw: KeyedRandom) -> Tensor:
        height, width = images.shape[-2:]
        y, x = (torch.fft.fftfreq(n, 1 / n, device=images.device).abs() for n in (height, width))
        if self.shape == "square":
            kept = (y[:, None] <= max(int(self.radius * height), 0)) & (
                x[None, :] <= max(int(self.radius * width), 0)
            )
        else:
            kept = (y[:, None] / height) ** 2 + (x[None, :] / width) ** 2 <= self.radius**2
        work = images if images.dtype in (torch.float32, torch.float64) else images.float()
        out: Tensor = torch.fft.ifft2(torch.fft.fft2(work) * kept).real.to(images.dtype)
        return out


@dataclass(frozen=True)
class Bottleneck(_OnStream):
    """Nothing of the stream but its first `channels`: a token leaves as that many numbers, the
    others are zero. Training puts into them what the task needs, so that this is for embeddings
    that are trained with it.
    """

    channels: float
    stage = 1

    def __post_init__(self) -> None:
        require(
            is_whole(self.channels, 1),
            f"{self.channels} channels are no bottleneck",
            "give a whole number: 4 keeps four channels of each token",
        )

    def apply_to_crossing(self, crossing: Crossing, draw: KeyedRandom) -> tuple[Crossing, Undo]:
        z = crossing.stream
        require(
            self.channels < z.shape[-1],
            f"the stream has {z.shape[-1]} channels: {self.channels:g} are all of it",
            "keep fewer",
        )
        kept = torch.arange(z.shape[-1], device=z.device) < self.channels
        return _replace_stream(crossing, torch.where(kept, z, torch.zeros_like(z))), _identity


@dataclass(frozen=True)
class Clip(_OnStream):
    """Each sample's stream has at most this norm, over all its tokens and channels."""

    norm: float
    stage = 2

    def __post_init__(self) -> None:
        require(
            0 < self.norm < math.inf,
            f"a norm of {self.norm} clips all or nothing",
            "give a positive number",
        )

    def apply_to_crossing(self, crossing: Crossing, draw: KeyedRandom) -> tuple[Crossing, Undo]:
        return _replace_stream(crossing, clip_samples(crossing.stream, self.norm)), _identity


def clip_samples(x: Tensor, norm: float) -> Tensor:
    """Samples, each scaled down to a norm."""
    length: Tensor = torch.linalg.vector_norm(x.flatten(1), dim=1).clamp(min=1e-12)
    return x * (norm / length).clamp(max=1).view(-1, *[1] * (x.dim() - 1))


@dataclass(frozen=True)
class Noise(_OnStream):
    """Gaussian noise on the stream (000's text has it there). `scale` is its standard deviation in
    units of the stream's own over the batch. What is exactly zero, as a bottleneck leaves it,
    stays.
    """

    scale: float
    stage = 3

    def __post_init__(self) -> None:
        require(
            0 < self.scale < math.inf,
            f"noise of {self.scale} is none",
            "give a positive number: 0.5 is half of the stream's own deviation",
        )

    def apply_to_crossing(self, crossing: Crossing, draw: KeyedRandom) -> tuple[Crossing, Undo]:
        z = crossing.stream
        live = z.detach() != 0
        size = self.scale * z.detach()[live].float().std().to(z.dtype)
        return _replace_stream(crossing, z + live * size * draw.normal("noise", z)), _identity


@dataclass(frozen=True)
class Round(_OnStream):
    """Every number of the stream is one of 2 ** `bits`: with 1 its sign is left. The same input is
    rounded the same way in every pass with the same weights, so that, other than noise, it is not
    averaged away; while the embedding is trained, passes differ and add up. Zeros stay (of
    `bottleneck`); gradients pass as if nothing had been rounded.
    """

    bits: float
    stage = 4

    def __post_init__(self) -> None:
        require(
            is_whole(self.bits, 1, 8),
            f"{self.bits} bits cannot be",
            "give a whole number from 1 to 8",
        )

    def apply_to_crossing(self, crossing: Crossing, draw: KeyedRandom) -> tuple[Crossing, Undo]:
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
            step = (
                (2 if levels == 2 else 4) * size / levels
            )  # two deviations each way: of a Gaussian hardly any is beyond
            near = ((z / step).floor() + 0.5).clamp(0.5 - levels / 2, levels / 2 - 0.5) * step
            near = torch.where(z == 0, torch.zeros_like(z), near)
        return _replace_stream(crossing, z + (near - z).detach()), _identity


@dataclass(frozen=True)
class Private(_OnStream):
    """Differentially private features, and gradients: each sample's is clipped to `norm` and gets
    Gaussian noise of `multiplier` times 2 `norm` (the most by which one sample's can differ from
    another's). `epsilon` says what that is worth.
    """

    multiplier: float
    norm: float = 1.0
    stage = 3

    def __post_init__(self) -> None:
        for value in (self.multiplier, self.norm):
            require(
                0 < value < math.inf,
                f"{value} is no noise multiplier or norm",
                "both are positive numbers",
            )

    def apply_to_crossing(self, crossing: Crossing, draw: KeyedRandom) -> tuple[Crossing, Undo]:
        def back(z: Tensor) -> Tensor:
            if z.requires_grad:
                z.register_hook(lambda slope: self._clip_and_add_noise(slope, draw, "private/back"))  # type: ignore[no-untyped-call]
            return z

        return _replace_stream(
            crossing, self._clip_and_add_noise(crossing.stream, draw, "private")
        ), back

    def _clip_and_add_noise(self, x: Tensor, draw: KeyedRandom, what: str) -> Tensor:
        return clip_samples(x, self.norm) + self.multiplier * 2 * self.norm * draw.normal(what, x)

    def epsilon(self, passes: int, *, backward: bool = True, delta: float = 1e-5) -> float:
        """What is spent on a sample that took part in so many passes: each releases its features,
        and in training its gradient too.

        For whoever sees all that is sent, of any two samples (local differential privacy; no batch
        hides a sample). By dp-accounting's Renyi accountant. The gradient is counted as a second
        release of the same sample; labels are in it, and are so covered.
        """
        require(passes >= 0, f"{passes} passes cannot be", "count them from 0")
        return gaussian_epsilon(
            self.multiplier, passes * (2 if backward else 1), delta, "REPLACE_ONE"
        )


@dataclass(frozen=True)
class BatchShuffle(_OnStream):
    """Tokens of all samples of a batch change places, and go back when they return. The backbone
    mixes samples, so that this costs accuracy.

    `share` of the tokens take part, drawn afresh; with `keep_cls` the first of each sample does
    not. For models of images: masks and positions of texts would have to follow.
    """

    share: float = 1.0
    keep_cls: bool = True
    stage = 5

    def __post_init__(self) -> None:
        require(
            0 < self.share <= 1,
            f"a share of {self.share} is not in (0, 1]",
            "1 shuffles all tokens",
        )

    def apply_to_crossing(self, crossing: Crossing, draw: KeyedRandom) -> tuple[Crossing, Undo]:
        z = crossing.stream
        require(
            z.shape[0] > 1,
            "tokens of a batch of one sample have nobody to change places with",
            "use larger batches, or rows",
        )
        others = [
            k
            for k, v in crossing.tensors.items()
            if k.partition("@")[0] != crossing.boundary.stream
            and ax.spaces(crossing.axes(k) or "") & TOKEN_SPACES
        ]
        require(
            not others,
            f'"{min(others, default="")}" belongs to each token of its sample, so that tokens '
            "cannot leave it",
            "use rows",
        )
        tokens = torch.arange(z.shape[0] * z.shape[1]).view(z.shape[0], -1)
        movable = tokens[:, 1:].reshape(-1) if self.keep_cls else tokens.reshape(-1)
        stream = draw.stream("batch-shuffle")
        chosen = movable[torch.from_numpy(stream.permutation(len(movable)))][
            : max(2, round(self.share * len(movable)))
        ]
        order = tokens.reshape(-1).clone()
        order[chosen] = chosen[torch.from_numpy(stream.permutation(len(chosen)))]
        order = order.to(z.device)
        inverse = torch.argsort(order)

        def moved(x: Tensor, index: Tensor) -> Tensor:
            return x.flatten(0, 1)[index].view(x.shape)

        return _replace_stream(crossing, moved(z, order)), lambda y: moved(y, inverse)


@dataclass(frozen=True)
class Rows(_OnStream):
    """Tokens change places within a sample, by one permutation for a batch or one for each sample;
    masks and positions follow. With `keep_cls` the first stays. Nothing is lost by it: the backbone
    commutes with it.
    """

    each: Literal["batch", "sample"] = "batch"
    keep_cls: bool = False
    stage = 6

    def __post_init__(self) -> None:
        require(
            self.each in ("batch", "sample"),
            f'rows are shuffled by "batch" or by "sample", not by {self.each!r}',
            "choose one of the two",
        )

    def apply_to_crossing(self, crossing: Crossing, draw: KeyedRandom) -> tuple[Crossing, Undo]:
        batch, n = crossing.stream.shape[:2]
        stream = draw.stream(f"rows/{crossing.boundary.name}")
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
        there = parts[0].with_inputs(
            **{k: _concatenate(crossing, k, [p.inputs[k] for p in parts]) for k in parts[0].inputs}
        )
        return there, lambda z: torch.cat(
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
    """Return defences in the order in which they act; a text may be a combination of several,
    "noise=0.5+rows". See `regauge.defences.parser`.
    """
    return parse_combination(defences, DEFENCES)


def apply_defences(
    defences: Sequence[Defence], crossing: Crossing, draw: KeyedRandom
) -> tuple[Crossing, Undo]:
    """All defences on a crossing, and all that is undone on the way back."""
    undo: list[Undo] = []
    for defence in defences:
        crossing, back = defence.apply_to_crossing(crossing, draw)
        undo.append(back)

    def home(z: Tensor) -> Tensor:
        for back in reversed(undo):
            z = back(z)
        return z

    return crossing, home
