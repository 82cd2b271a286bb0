"""What is kept of a task vector: all of it, the largest values, or values drawn at random, evenly or by their rank.

Each function returns what is kept and the factor that gives it the length, in the sum of magnitudes, of the whole. Draws come from a specified stream
under the tensor's name and the model's number, so that a merge gives the same model on every machine and in every order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from regauge.errors import RegaugeError
from regauge.streams import Stream, seed_key

Tensor = torch.Tensor
_COUNTED = 1 << 18  # values that are counted at once


class DensityError(RegaugeError):
    """A density that a method cannot keep."""


@dataclass(frozen=True)
class Kept:
    """What is kept: where the `mask` is true (everything if it is None), times `scale`. Task vectors of half precision are kept as `values`, with
    zeros for what is dropped: that costs two bytes each, and saves making them again."""

    mask: Tensor | None = None
    scale: float = 1.0
    values: Tensor | None = None


@dataclass(frozen=True)
class Deltas:
    """A task vector, made block by block: what a model's tensor has over the base's, in the working precision, rounded to `rounding` if that is
    given."""

    tensor: Tensor
    base: Tensor
    work: torch.dtype
    rounding: torch.dtype | None
    step: int

    def __iter__(self) -> Iterator[tuple[slice, Tensor]]:
        return self.blocks(self.step)

    def blocks(self, step: int) -> Iterator[tuple[slice, Tensor]]:
        x, base = self.tensor.reshape(-1), self.base.reshape(-1)
        for at in range(0, x.numel(), step):
            part = slice(at, min(at + step, x.numel()))
            delta = x[part].to(self.work) - base[part].to(self.work)
            yield part, delta if self.rounding is None else delta.to(self.rounding).to(self.work)

    def stored(self) -> Tensor:
        """All of it, flat, in the dtype that it is rounded to."""
        assert self.rounding is not None, "what is not rounded is not stored"
        if self.tensor.dtype == self.base.dtype == self.rounding:
            return (self.tensor - self.base).reshape(-1)  # torch computes this in float32 and rounds it
        out = torch.empty(self.tensor.numel(), dtype=self.rounding)
        for part, delta in self:
            out[part] = delta
        return out


# (the task vector, the model's parameters, whether to rescale, a name for what is drawn, the seed)
Sparse = Callable[[Deltas, Mapping[str, Any], bool, str, int], Kept]


def whole(deltas: Deltas, given: Mapping[str, Any], rescale: bool, name: str, seed: int) -> Kept:
    """All of it."""
    return Kept()


def by_magnitude(deltas: Deltas, given: Mapping[str, Any], rescale: bool, name: str, seed: int) -> Kept:
    """The share `density` of the values that is largest in magnitude; of equal ones, the first."""
    density, n = float(given["density"]), deltas.tensor.numel()
    if density >= 1:
        return Kept()
    count = int(density * n)
    if deltas.rounding is not None:
        return _trimmed(deltas, count, rescale)
    mask = torch.zeros(n, dtype=torch.bool)
    if count:
        least, equal = _least(deltas, count)
        for part, delta in deltas:
            bits = _magnitude(delta)
            mask[part] = bits > least
            if equal:
                same = (bits == least).nonzero().view(-1)[:equal] + part.start
                mask[same] = True
                equal -= same.numel()
    return Kept(mask, _scale(deltas, mask) if rescale else 1.0)


def _trimmed(deltas: Deltas, count: int, rescale: bool) -> Kept:
    """The same for half precision, where magnitudes are whole numbers of 15 bits: one count of them gives the least that is kept."""
    values = deltas.stored()
    bits = values.view(torch.int16)
    parts = [slice(at, at + _COUNTED) for at in range(0, bits.numel(), _COUNTED)]
    found = torch.zeros(1 << 15, dtype=torch.int64)
    for part in parts:
        found += torch.bincount(bits[part] & 0x7FFF, minlength=1 << 15)
    above = np.cumsum(found.numpy()[::-1])
    digit = int(np.searchsorted(above, count)) if count else 1 << 15
    least, equal = (1 << 15) - 1 - digit, count - (int(above[digit - 1]) if digit and count else 0)
    before, all_equal = _length(values) if rescale else 0.0, count > 0 and equal == int(found[least])
    for part in parts:
        magnitude = bits[part] & 0x7FFF
        keep = magnitude >= least if all_equal else (magnitude > least if count else torch.zeros_like(magnitude, dtype=torch.bool))
        if equal and not all_equal:
            same = (magnitude == least).nonzero().view(-1)[:equal]
            keep[same] = True
            equal -= same.numel()
        bits[part].mul_(keep)
    return Kept(scale=_ratio(before, _length(values)) if rescale else 1.0, values=values)


def _length(values: Tensor) -> float:
    """The sum of magnitudes."""
    return sum(float(values[at : at + _COUNTED].float().abs_().sum()) for at in range(0, values.numel(), _COUNTED))


def _ratio(before: float, after: float) -> float:
    return 1.0 if before < 1e-7 or after < 1e-7 else before / after


def by_chance(deltas: Deltas, given: Mapping[str, Any], rescale: bool, name: str, seed: int) -> Kept:
    """Each value with the chance `density`."""
    density, n = float(given["density"]), deltas.tensor.numel()
    if density >= 1:
        return Kept()
    stream, mask = Stream(seed_key(seed), f"merge/{name}"), torch.empty(n, dtype=torch.bool)
    for at in range(0, n, deltas.step):
        part = slice(at, min(at + deltas.step, n))
        mask[part] = torch.from_numpy(_draws(stream, part) < density)
    return Kept(mask, _scale(deltas, mask) if rescale else 1.0)


def by_rank(deltas: Deltas, given: Mapping[str, Any], rescale: bool, name: str, seed: int) -> Kept:
    """Each value with a chance from density - epsilon to density + epsilon, by the rank of its magnitude in its row."""
    density, epsilon, n = float(given["density"]), float(given["epsilon"]), deltas.tensor.numel()
    if density >= 1:
        return Kept()
    if density <= 0:
        return Kept(torch.zeros(n, dtype=torch.bool))
    if density + epsilon >= 1 or density - epsilon <= 0:
        raise DensityError(
            f"a density of {density:g} and an epsilon of {epsilon:g} make chances outside of 0 to 1", hint="choose a smaller epsilon for this density"
        )
    width = n // deltas.tensor.shape[0] if deltas.tensor.dim() > 1 else n
    stream, mask = Stream(seed_key(seed), f"merge/{name}"), torch.empty(n, dtype=torch.bool)
    for part, delta in deltas.blocks(max(deltas.step // max(width, 1), 1) * width if width else 1):
        rows = delta.abs().view(-1, width)
        order = rows.argsort(dim=1, stable=True)
        rank = torch.empty_like(rows).scatter_(1, order, torch.arange(width, dtype=rows.dtype).expand_as(rows).contiguous())
        chance = (density - epsilon) + rank.view(-1).numpy() / max(width - 1, 1) * (2 * epsilon)
        mask[part] = torch.from_numpy(_draws(stream, part) < chance)
    return Kept(mask, _scale(deltas, mask) if rescale else 1.0)


def _draws(stream: Stream, part: slice) -> Any:
    """Uniform numbers from 0 to 1, one for each value of a block: 32-bit words of the stream over 2^32."""
    count = part.stop - part.start
    return np.frombuffer(stream.bytes(4 * count), "<u4") * np.float64(2**-32)


def _scale(deltas: Deltas, mask: Tensor) -> float:
    """The sum of all magnitudes over that of the kept ones, where neither is as good as zero."""
    before = after = 0.0
    for part, delta in deltas:
        magnitude = delta.abs_()
        before += float(magnitude.sum())
        after += float(magnitude.mul_(mask[part]).sum())
    return _ratio(before, after)


def _magnitude(delta: Tensor) -> Tensor:
    """The magnitudes as whole numbers in the same order: the bits without the sign."""
    return delta.abs().view(torch.int32 if delta.dtype == torch.float32 else torch.int64)


def _least(deltas: Deltas, count: int) -> tuple[int, int]:
    """The smallest of the `count` largest magnitudes, as bits, and how many of the values that equal it are among them.

    Counted digit by digit, 16 bits at a time from the top: as many passes as the dtype has digits, no sorting, and nothing as large as the tensor.
    """
    bits = 32 if deltas.work == torch.float32 else 64
    prefix, left = 0, count
    for shift in range(bits - 16, -1, -16):
        found = np.zeros(1 << 16, np.int64)
        for _, delta in deltas:
            magnitude = _magnitude(delta)
            if shift + 16 < bits:
                magnitude = magnitude[(magnitude >> (shift + 16)) == prefix >> (shift + 16)]
            found += np.bincount(((magnitude >> shift) & 0xFFFF).numpy(), minlength=1 << 16)
        above = np.cumsum(found[::-1])
        digit = int(np.searchsorted(above, left))
        left -= int(above[digit - 1]) if digit else 0
        prefix |= ((1 << 16) - 1 - digit) << shift
    return prefix, left
