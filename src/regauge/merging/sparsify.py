"""The entries of a task vector that are kept: all, the largest, or random ones, uniformly or by
rank.

Each function returns the selection, and the factor that restores the sum of magnitudes of the whole
vector. Random choices come from a specified stream under the tensor's name and the model's number,
so a merge gives the same model on every machine and in every order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from regauge.core.rng import Stream, seed_key
from regauge.errors import DensityError

Tensor = torch.Tensor
_SAMPLE_ABOVE = 1 << 18  # larger tensors are sampled before values are selected
# One value in so many is sampled. No width of a matrix is a multiple, so all columns are covered.
_STRIDE = 61


@dataclass(frozen=True)
class Selection:
    """The selected values of a task vector, times `scale`.

    Attributes:
        mask: true at the selected values; None if not selected by mask.
        scale: the factor of the selected values.
        threshold: select values of larger magnitude, and those equal to it before `end`.
        end: the index after the last selected value that equals the threshold.
    """

    mask: Tensor | None = None
    scale: float = 1.0
    threshold: float | None = None
    end: int = 0

    def apply(self, delta: Tensor, part: slice) -> Tensor:
        """Zero the values of a block that are not selected, in place."""
        if self.mask is not None:
            return delta.mul_(self.mask[part])
        if self.threshold is not None:
            just_below = float(
                np.nextafter(np.asarray(self.threshold, _NUMPY_DTYPES[delta.dtype]), -np.inf)
            )
            middle = min(max(self.end - part.start, 0), delta.numel())
            for piece, edge in ((delta[:middle], just_below), (delta[middle:], self.threshold)):
                if piece.numel() and edge >= 0:
                    # Zero if the magnitude is at most the edge.
                    torch.hardshrink(piece, edge, out=piece)
        return delta


_NUMPY_DTYPES = {torch.float32: np.float32, torch.float64: np.float64}


@dataclass(frozen=True)
class TaskVector:
    """A model's tensor minus the base's, computed block by block.

    Attributes:
        tensor: the model's tensor.
        base: the base's tensor.
        work: the dtype to compute in.
        rounding: the dtype to round differences to, if any.
        step: values in a block.
    """

    tensor: Tensor
    base: Tensor
    work: torch.dtype
    rounding: torch.dtype | None
    step: int

    def __iter__(self) -> Iterator[tuple[slice, Tensor]]:
        return self.blocks(self.step)

    def blocks(self, step: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield the slice and the values of each block."""
        x, base = self.tensor.reshape(-1), self.base.reshape(-1)
        for at in range(0, x.numel(), step):
            part = slice(at, min(at + step, x.numel()))
            delta = x[part].to(self.work) - base[part].to(self.work)
            yield part, delta if self.rounding is None else delta.to(self.rounding).to(self.work)

    def sample(self, stride: int) -> Tensor:
        """Return one value in `stride`."""
        delta = self.tensor.reshape(-1)[::stride].to(self.work) - self.base.reshape(-1)[
            ::stride
        ].to(self.work)
        return delta if self.rounding is None else delta.to(self.rounding).to(self.work)


# (the task vector, the model's parameters, whether to rescale, the random stream's name, the seed)
Sparsifier = Callable[[TaskVector, Mapping[str, Any], bool, str, int], Selection]


def keep_all(
    vector: TaskVector, parameters: Mapping[str, Any], rescale: bool, name: str, seed: int
) -> Selection:
    """Select all values."""
    return Selection()


def keep_largest(
    vector: TaskVector, parameters: Mapping[str, Any], rescale: bool, name: str, seed: int
) -> Selection:
    """Select the share `density` of the values of largest magnitude; of equal ones, the first."""
    density, n = float(parameters["density"]), vector.tensor.numel()
    if density >= 1:
        return Selection()
    count = int(density * n)
    if not count:
        return Selection(threshold=math.inf)
    threshold, ties = _find_threshold(vector, count)
    selection = Selection(threshold=threshold, end=_end_of_ties(vector, threshold, ties))
    return replace(selection, scale=_rescale_factor(vector, selection)) if rescale else selection


def _end_of_ties(vector: TaskVector, threshold: float, ties: int | None) -> int:
    """Return the index after the first `ties` values of this magnitude; None counts all of them."""
    if ties is None:
        return vector.tensor.numel()
    for part, delta in vector:
        is_tie = np.equal(delta.abs_().numpy(), threshold)
        count = int(np.count_nonzero(is_tie))
        if count >= ties:
            return int(part.start) + int(np.flatnonzero(is_tie)[ties - 1]) + 1
        ties -= count
    return vector.tensor.numel()


def _ratio(before: float, after: float) -> float:
    """Return before / after; 1 if either is almost zero."""
    return 1.0 if before < 1e-7 or after < 1e-7 else before / after


def keep_random(
    vector: TaskVector, parameters: Mapping[str, Any], rescale: bool, name: str, seed: int
) -> Selection:
    """Select each value with probability `density`."""
    density, n = float(parameters["density"]), vector.tensor.numel()
    if density >= 1:
        return Selection()
    stream, mask = Stream(seed_key(seed), f"merge/{name}"), torch.empty(n, dtype=torch.bool)
    for at in range(0, n, vector.step):
        part = slice(at, min(at + vector.step, n))
        mask[part] = torch.from_numpy(_uniform(stream, part) < density)
    return Selection(mask, _rescale_factor(vector, Selection(mask)) if rescale else 1.0)


def keep_by_rank(
    vector: TaskVector, parameters: Mapping[str, Any], rescale: bool, name: str, seed: int
) -> Selection:
    """Select each value with a probability from density - epsilon to density + epsilon, by the
    rank of its magnitude in its row.
    """
    density, epsilon, n = (
        float(parameters["density"]),
        float(parameters["epsilon"]),
        vector.tensor.numel(),
    )
    if density >= 1:
        return Selection()
    if density <= 0:
        return Selection(torch.zeros(n, dtype=torch.bool))
    if density + epsilon >= 1 or density - epsilon <= 0:
        raise DensityError(
            "density - epsilon and density + epsilon must be between 0 and 1, got density "
            f"{density:g} and epsilon {epsilon:g}",
            hint="choose a smaller epsilon for this density",
        )
    width = n // vector.tensor.shape[0] if vector.tensor.dim() > 1 else n
    stream, mask = Stream(seed_key(seed), f"merge/{name}"), torch.empty(n, dtype=torch.bool)
    for part, delta in vector.blocks(max(vector.step // max(width, 1), 1) * width if width else 1):
        rows = delta.abs().view(-1, width)
        order = rows.argsort(dim=1, stable=True)
        rank = torch.empty_like(rows).scatter_(
            1, order, torch.arange(width, dtype=rows.dtype).expand_as(rows).contiguous()
        )
        probability = (density - epsilon) + rank.view(-1).numpy() / max(width - 1, 1) * (
            2 * epsilon
        )
        mask[part] = torch.from_numpy(_uniform(stream, part) < probability)
    return Selection(mask, _rescale_factor(vector, Selection(mask)) if rescale else 1.0)


def _uniform(stream: Stream, part: slice) -> Any:
    """Return uniform numbers from 0 to 1, one for each value of a block: 32-bit words over 2^32."""
    count = part.stop - part.start
    return np.frombuffer(stream.bytes(4 * count), "<u4") * np.float64(2**-32)


def _rescale_factor(vector: TaskVector, selection: Selection) -> float:
    """Return the sum of all magnitudes over that of the selected ones."""
    before = after = 0.0
    for part, delta in vector:
        magnitude = delta.abs_()
        before += float(magnitude.sum())
        after += float(selection.apply(magnitude, part).sum())
    return _ratio(before, after)


def _find_threshold(vector: TaskVector, count: int) -> tuple[float, int | None]:
    """Return the smallest of the `count` largest magnitudes, and how many values equal to it are
    selected.

    The second is None if all of them are. A sample bounds the threshold from both sides, almost
    surely; one pass then counts the values above and collects the few in between. Nothing is
    sorted, and nothing as large as the tensor is allocated.
    """
    n, dtype = vector.tensor.numel(), _NUMPY_DTYPES[vector.work]
    low, high = _sample_bounds(vector, count) if n > _SAMPLE_ABOVE else (-math.inf, math.inf)
    above = at_high = at_low = 0
    between: list[Any] = []
    for _, delta in vector:
        magnitude = delta.abs_().numpy()
        is_between = magnitude > low
        if low >= 0:
            at_low += int(np.count_nonzero(magnitude == low))
        if high < math.inf:
            above += int(np.count_nonzero(magnitude > high))
            at_high += int(np.count_nonzero(magnitude == high)) if high > low else 0
            is_between &= magnitude < high
        between.append(magnitude[is_between])
    candidates = np.concatenate(between) if between else np.empty(0, dtype)
    total = above + at_high + candidates.size + at_low
    if above >= count or total < count:  # the sample was misleading
        return _radix_select(vector, count)
    if above + at_high >= count:
        return high, _none_if_all(count - above, at_high)
    missing = count - above - at_high
    if candidates.size >= missing:
        threshold = np.partition(candidates, candidates.size - missing)[candidates.size - missing]
        larger = int(np.count_nonzero(candidates > threshold))
        return float(threshold), _none_if_all(
            missing - larger, int(np.count_nonzero(candidates == threshold))
        )
    return low, _none_if_all(missing - candidates.size, at_low)


def _none_if_all(ties: int, total: int) -> int | None:
    """Return None if all ties are selected, otherwise their number."""
    return None if ties == total else ties


def _sample_bounds(vector: TaskVector, count: int) -> tuple[float, float]:
    """Return two magnitudes of a sample, ten standard deviations of a rank apart, around the
    threshold.
    """
    sample = np.sort(vector.sample(_STRIDE).abs_().numpy())
    share = 1 - count / vector.tensor.numel()
    middle, reach = share * sample.size, 5 * math.sqrt(share * (1 - share) * sample.size) + 2
    low, high = int(middle - reach), int(middle + reach)
    return float(sample[low]) if low >= 0 else -math.inf, float(
        sample[high]
    ) if high < sample.size else math.inf


def _radix_select(vector: TaskVector, count: int) -> tuple[float, int | None]:
    """Return the result of `_find_threshold` by counting digits, 16 bits at a time from the top.

    It takes as many passes as the dtype has digits, for any values.
    """
    bits, dtype = (32, np.float32) if vector.work == torch.float32 else (64, np.float64)
    int_dtype = np.dtype(f"i{bits // 8}")
    prefix, missing, histogram = 0, count, np.zeros(1 << 16, np.int64)
    for shift in range(bits - 16, -1, -16):
        histogram = np.zeros(1 << 16, np.int64)
        for _, delta in vector:
            magnitude = delta.abs_().numpy().view(int_dtype)
            if shift + 16 < bits:
                magnitude = magnitude[(magnitude >> (shift + 16)) == prefix >> (shift + 16)]
            histogram += np.bincount((magnitude >> shift) & 0xFFFF, minlength=1 << 16)
        cumulative = np.cumsum(histogram[::-1])
        digit = int(np.searchsorted(cumulative, missing))
        missing -= int(cumulative[digit - 1]) if digit else 0
        prefix |= ((1 << 16) - 1 - digit) << shift
    return float(np.array(prefix, int_dtype).view(dtype)), _none_if_all(
        missing, int(histogram[prefix & 0xFFFF])
    )
