"""What is kept of a task vector: all of it, the largest values, or values drawn at random, evenly
or by their rank.

Each function returns what is kept and the factor that gives it the length, in the sum of
magnitudes, of the whole. Draws come from a specified stream under the tensor's name and the model's
number, so that a merge gives the same model on every machine and in every order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from regauge.core.rng import Stream, seed_key
from regauge.errors import RegaugeError

Tensor = torch.Tensor
_SAMPLE_ABOVE = 1 << 18  # a tensor with more values is sampled before it is selected from
# one value in so many is sampled: no width of a matrix is a multiple, so that all columns are seen
_STRIDE = 61


class DensityError(RegaugeError):
    """A density that a method cannot keep."""


@dataclass(frozen=True)
class Selection:
    """What is kept, times `scale`: everything, or where the `mask` is true, or what is larger than
    `least` in magnitude, and what equals it up to the place `end`.
    """

    mask: Tensor | None = None
    scale: float = 1.0
    threshold: float | None = None
    end: int = 0

    def apply(self, delta: Tensor, part: slice) -> Tensor:
        """What is kept of a block of the task vector. The block is used up."""
        if self.mask is not None:
            return delta.mul_(self.mask[part])
        if self.threshold is not None:
            below = float(
                np.nextafter(np.asarray(self.threshold, _NUMPY_DTYPES[delta.dtype]), -np.inf)
            )
            middle = min(max(self.end - part.start, 0), delta.numel())
            for piece, edge in ((delta[:middle], below), (delta[middle:], self.threshold)):
                if piece.numel() and edge >= 0:
                    torch.hardshrink(
                        piece, edge, out=piece
                    )  # 0 where the magnitude is at most the edge
        return delta


_NUMPY_DTYPES = {torch.float32: np.float32, torch.float64: np.float64}


@dataclass(frozen=True)
class TaskVector:
    """A task vector, made block by block: what a model's tensor has over the base's, in the working
    precision, rounded to `rounding` if that is given.
    """

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

    def sample(self, stride: int) -> Tensor:
        """One value in so many."""
        delta = self.tensor.reshape(-1)[::stride].to(self.work) - self.base.reshape(-1)[
            ::stride
        ].to(self.work)
        return delta if self.rounding is None else delta.to(self.rounding).to(self.work)


# (the task vector, the model's parameters, whether to rescale, a name for what is drawn, the seed)
Sparsifier = Callable[[TaskVector, Mapping[str, Any], bool, str, int], Selection]


def keep_all(
    deltas: TaskVector, given: Mapping[str, Any], rescale: bool, name: str, seed: int
) -> Selection:
    """All of it."""
    return Selection()


def keep_largest(
    deltas: TaskVector, given: Mapping[str, Any], rescale: bool, name: str, seed: int
) -> Selection:
    """The share `density` of the values that is largest in magnitude; of equal ones, the first."""
    density, n = float(given["density"]), deltas.tensor.numel()
    if density >= 1:
        return Selection()
    count = int(density * n)
    if not count:
        return Selection(threshold=math.inf)
    least, equal = _find_threshold(deltas, count)
    kept = Selection(threshold=least, end=_end_of_ties(deltas, least, equal))
    return replace(kept, scale=_rescale_factor(deltas, kept)) if rescale else kept


def _end_of_ties(deltas: TaskVector, least: float, equal: int | None) -> int:
    """The place after so many values of this magnitude; None stands for all of them."""
    if equal is None:
        return deltas.tensor.numel()
    for part, delta in deltas:
        same = np.equal(delta.abs_().numpy(), least)
        found = int(np.count_nonzero(same))
        if found >= equal:
            return int(part.start) + int(np.flatnonzero(same)[equal - 1]) + 1
        equal -= found
    return deltas.tensor.numel()


def _ratio(before: float, after: float) -> float:
    return 1.0 if before < 1e-7 or after < 1e-7 else before / after


def keep_random(
    deltas: TaskVector, given: Mapping[str, Any], rescale: bool, name: str, seed: int
) -> Selection:
    """Each value with the chance `density`."""
    density, n = float(given["density"]), deltas.tensor.numel()
    if density >= 1:
        return Selection()
    stream, mask = Stream(seed_key(seed), f"merge/{name}"), torch.empty(n, dtype=torch.bool)
    for at in range(0, n, deltas.step):
        part = slice(at, min(at + deltas.step, n))
        mask[part] = torch.from_numpy(_uniform(stream, part) < density)
    return Selection(mask, _rescale_factor(deltas, Selection(mask)) if rescale else 1.0)


def keep_by_rank(
    deltas: TaskVector, given: Mapping[str, Any], rescale: bool, name: str, seed: int
) -> Selection:
    """Each value with a chance from density - epsilon to density + epsilon, by the rank of its
    magnitude in its row.
    """
    density, epsilon, n = float(given["density"]), float(given["epsilon"]), deltas.tensor.numel()
    if density >= 1:
        return Selection()
    if density <= 0:
        return Selection(torch.zeros(n, dtype=torch.bool))
    if density + epsilon >= 1 or density - epsilon <= 0:
        raise DensityError(
            f"a density of {density:g} and an epsilon of {epsilon:g} make chances outside of 0 "
            "to 1",
            hint="choose a smaller epsilon for this density",
        )
    width = n // deltas.tensor.shape[0] if deltas.tensor.dim() > 1 else n
    stream, mask = Stream(seed_key(seed), f"merge/{name}"), torch.empty(n, dtype=torch.bool)
    for part, delta in deltas.blocks(max(deltas.step // max(width, 1), 1) * width if width else 1):
        rows = delta.abs().view(-1, width)
        order = rows.argsort(dim=1, stable=True)
        rank = torch.empty_like(rows).scatter_(
            1, order, torch.arange(width, dtype=rows.dtype).expand_as(rows).contiguous()
        )
        chance = (density - epsilon) + rank.view(-1).numpy() / max(width - 1, 1) * (2 * epsilon)
        mask[part] = torch.from_numpy(_uniform(stream, part) < chance)
    return Selection(mask, _rescale_factor(deltas, Selection(mask)) if rescale else 1.0)


def _uniform(stream: Stream, part: slice) -> Any:
    """Uniform numbers from 0 to 1, one for each value of a block: 32-bit words of the stream over
    2^32.
    """
    count = part.stop - part.start
    return np.frombuffer(stream.bytes(4 * count), "<u4") * np.float64(2**-32)


def _rescale_factor(deltas: TaskVector, kept: Selection) -> float:
    """The sum of all magnitudes over that of the kept ones, where neither is as good as zero."""
    before = after = 0.0
    for part, delta in deltas:
        magnitude = delta.abs_()
        before += float(magnitude.sum())
        after += float(kept.apply(magnitude, part).sum())
    return _ratio(before, after)


def _find_threshold(deltas: TaskVector, count: int) -> tuple[float, int | None]:
    """The smallest of the `count` largest magnitudes, and how many of the values that equal it are
    among them; None if all of them are.

    A sample tells between which two magnitudes it lies, almost surely; one pass then counts what is
    above and keeps the few that are between. Nothing is sorted, and nothing as large as the tensor
    is made.
    """
    n, kind = deltas.tensor.numel(), _NUMPY_DTYPES[deltas.work]
    low, high = _sample_bounds(deltas, count) if n > _SAMPLE_ABOVE else (-math.inf, math.inf)
    above = at_high = at_low = 0
    between: list[Any] = []
    for _, delta in deltas:
        magnitude = delta.abs_().numpy()
        inner = magnitude > low
        if low >= 0:
            at_low += int(np.count_nonzero(magnitude == low))
        if high < math.inf:
            above += int(np.count_nonzero(magnitude > high))
            at_high += int(np.count_nonzero(magnitude == high)) if high > low else 0
            inner &= magnitude < high
        between.append(magnitude[inner])
    inside = np.concatenate(between) if between else np.empty(0, kind)
    if above >= count or above + at_high + inside.size + at_low < count:  # the sample deceived
        return _radix_select(deltas, count)
    if above + at_high >= count:
        return high, _none_if_all(count - above, at_high)
    left = count - above - at_high
    if inside.size >= left:
        least = np.partition(inside, inside.size - left)[inside.size - left]
        larger = int(np.count_nonzero(inside > least))
        return float(least), _none_if_all(left - larger, int(np.count_nonzero(inside == least)))
    return low, _none_if_all(left - inside.size, at_low)


def _none_if_all(equal: int, found: int) -> int | None:
    return None if equal == found else equal


def _sample_bounds(deltas: TaskVector, count: int) -> tuple[float, float]:
    """Two magnitudes of a sample, ten standard deviations of a rank apart, around the one that is
    sought.
    """
    sample = np.sort(deltas.sample(_STRIDE).abs_().numpy())
    share = 1 - count / deltas.tensor.numel()
    middle, far = share * sample.size, 5 * math.sqrt(share * (1 - share) * sample.size) + 2
    low, high = int(middle - far), int(middle + far)
    return float(sample[low]) if low >= 0 else -math.inf, float(
        sample[high]
    ) if high < sample.size else math.inf


def _radix_select(deltas: TaskVector, count: int) -> tuple[float, int | None]:
    """The same, counted digit by digit, 16 bits at a time from the top: as many passes as the dtype
    has digits, whatever the values are.
    """
    bits, kind = (32, np.float32) if deltas.work == torch.float32 else (64, np.float64)
    whole = np.dtype(f"i{bits // 8}")
    prefix, left, found = 0, count, np.zeros(1 << 16, np.int64)
    for shift in range(bits - 16, -1, -16):
        found = np.zeros(1 << 16, np.int64)
        for _, delta in deltas:
            magnitude = delta.abs_().numpy().view(whole)
            if shift + 16 < bits:
                magnitude = magnitude[(magnitude >> (shift + 16)) == prefix >> (shift + 16)]
            found += np.bincount((magnitude >> shift) & 0xFFFF, minlength=1 << 16)
        over = np.cumsum(found[::-1])
        digit = int(np.searchsorted(over, left))
        left -= int(over[digit - 1]) if digit else 0
        prefix |= ((1 << 16) - 1 - digit) << shift
    return float(np.array(prefix, whole).view(kind)), _none_if_all(
        left, int(found[prefix & 0xFFFF])
    )
