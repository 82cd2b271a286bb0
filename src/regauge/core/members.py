"""Members of groups: three representations, each a stack of `count` invertible matrices of one
`size`.

Convention. A member transforms vectors: x -> M x. A `Monomial` gathers: (M x)[i] = scale[i] *
x[index[i]]. `Planes` multiplies the complex number of each 2-plane. `a.after(b)` applies b first,
then a. `dual` is the inverse transpose, which acts on contracted axes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from regauge.core.rng import Floats, Ints
from regauge.errors import ElementError

Complexes = npt.NDArray[np.complex128]
Layout = Literal["half", "interleaved"]

# The largest ratio between two factors by which a member stretches, with 1 counted as a factor: it
# bounds condition numbers and scales alike. Rounding errors grow with it: at the limit a float32
# model keeps its function to about 1e-4. Six samples composed stay within the limit.
MAX_STRETCH = 1e3


@dataclass(frozen=True, eq=False)
class Monomial:
    """A permutation, with an optional scale (or sign) per coordinate. `scale` is None for plain
    permutations.
    """

    index: Ints
    scale: Floats | None = None

    @property
    def count(self) -> int:
        return int(self.index.shape[0])

    @property
    def size(self) -> int:
        return int(self.index.shape[1])

    def inverse(self) -> Monomial:
        index = np.argsort(self.index, axis=1)
        return Monomial(
            index, None if self.scale is None else 1 / np.take_along_axis(self.scale, index, 1)
        )

    def dual(self) -> Monomial:
        return Monomial(self.index, None if self.scale is None else 1 / self.scale)

    def after(self, other: Member) -> Member:
        if not isinstance(other, Monomial):
            return Dense(self.matrix()).after(other)
        scale = self.scale
        if other.scale is not None:
            permuted = np.take_along_axis(other.scale, self.index, 1)
            scale = permuted if scale is None else scale * permuted
        return Monomial(np.take_along_axis(other.index, self.index, 1), scale)

    def matrix(self) -> Floats:
        out = np.zeros((self.count, self.size, self.size))
        np.put_along_axis(
            out, self.index[:, :, None], 1.0 if self.scale is None else self.scale[:, :, None], 2
        )
        return out

    def take(self, order: Ints) -> Monomial:
        return Monomial(self.index[order], None if self.scale is None else self.scale[order])

    def permutation(self) -> Monomial:
        return Monomial(self.index)


@dataclass(frozen=True, eq=False)
class Dense:
    """Any invertible matrix."""

    values: Floats

    @property
    def count(self) -> int:
        return int(self.values.shape[0])

    @property
    def size(self) -> int:
        return int(self.values.shape[1])

    def inverse(self) -> Dense:
        return Dense(np.asarray(np.linalg.inv(self.values), np.float64))

    def dual(self) -> Dense:
        return Dense(self.inverse().values.swapaxes(1, 2))

    def after(self, other: Member) -> Dense:
        return Dense(self.values @ other.matrix())

    def matrix(self) -> Floats:
        return self.values

    def take(self, order: Ints) -> Dense:
        return Dense(self.values[order])

    def permutation(self) -> Monomial | None:
        """Return the permutation part of this matrix, or None if the matrix is not monomial."""
        index = np.abs(self.values).argmax(axis=2)
        stripped = self.values.copy()
        np.put_along_axis(stripped, index[:, :, None], 0.0, 2)
        is_monomial = (
            np.abs(stripped).max(initial=0.0) < 1e-9
            and (np.sort(index, 1) == np.arange(self.size)).all()
        )
        return Monomial(index) if is_monomial else None


@dataclass(frozen=True, eq=False)
class Soft(Dense):
    """A doubly stochastic map that mixes coordinates, such as a transport plan.

    It is not a group element: it changes the function. It acts on every axis alike, barred ones
    too, as a barycentric average does.
    """

    def dual(self) -> Soft:
        return self

    def take(self, order: Ints) -> Soft:
        return Soft(self.values[order])


@dataclass(frozen=True, eq=False)
class Planes:
    """One rotation and one scale per 2-plane: plane j is (j, j + size/2) in the half-split layout,
    (2j, 2j+1) in the interleaved one.
    """

    factor: Complexes
    layout: Layout

    @property
    def count(self) -> int:
        return int(self.factor.shape[0])

    @property
    def size(self) -> int:
        return 2 * int(self.factor.shape[1])

    def inverse(self) -> Planes:
        return Planes(1 / self.factor, self.layout)

    def dual(self) -> Planes:
        return Planes(1 / self.factor.conj(), self.layout)

    def after(self, other: Member) -> Member:
        if isinstance(other, Planes) and other.layout == self.layout:
            return Planes(self.factor * other.factor, self.layout)
        return Dense(self.matrix()).after(other)

    def matrix(self) -> Floats:
        first, second = planes(self.size, self.layout)
        out = np.zeros((self.count, self.size, self.size))
        out[:, first, first] = out[:, second, second] = self.factor.real
        out[:, second, first] = self.factor.imag
        out[:, first, second] = -self.factor.imag
        return out

    def take(self, order: Ints) -> Planes:
        return Planes(self.factor[order], self.layout)

    def permutation(self) -> Monomial:
        """Return the identity: rotations and scales of planes permute no coordinates."""
        return Monomial(np.tile(np.arange(self.size), (self.count, 1)))


Member = Monomial | Dense | Planes


@dataclass(frozen=True)
class SpaceMember:
    """What an element does on one space: `element["qk.2"]`.

    Attributes:
        name: The name of the space.
        member: The group members, one for each place of the parent space.
        parent: The parent space, such as "head.2"; None if there is none.
    """

    name: str
    member: Member
    parent: str | None = None

    def matrix(self, head: int | None = None) -> Floats:
        """Return the matrix that multiplies coordinates of the space.

        The other side of a product (keys, for queries) is multiplied by its inverse transpose.

        Args:
            head: The head, or the place in another parent space, counted before the element
                permutes heads. Required if there are several.

        Returns:
            A matrix of the size of the space.

        Raises:
            ElementError: `head` is missing, or out of range.

        Example:
            >>> g = regauge.element(regauge.spec_of(model), 0)
            >>> g["qk.1"].matrix(head=2).shape
            (4, 4)
            >>> g["stream"].matrix().shape
            (12, 12)
        """
        count = self.member.count
        place = 0 if head is None and count == 1 else head
        if place is None or not 0 <= place < count:
            raise ElementError(
                f"head must be from 0 to {count - 1} for {self.name}, got {head}",
                hint=f"it counts the places of {self.parent}" if self.parent else None,
            )
        return np.asarray(self.member.matrix()[place])


def is_exact(member: Member) -> bool:
    """Return whether a member only permutes and flips signs, which is exact on stored numbers of
    any floating-point format.
    """
    match member:
        case Monomial():
            return member.scale is None or bool((np.abs(member.scale) == 1).all())
        case Planes():
            return bool(((member.factor.imag == 0) & (np.abs(member.factor.real) == 1)).all())
        case Dense():
            return False


def planes(size: int, layout: Layout) -> tuple[Ints, Ints]:
    """Return the first and the second coordinates of all 2-planes."""
    order = np.arange(size)
    return (
        (order[: size // 2], order[size // 2 :]) if layout == "half" else (order[0::2], order[1::2])
    )


def stretch_ratio(factors: Floats) -> Floats:
    """Return, for each row of factors (scales, singular values), the largest ratio between two of
    them, with 1 counted as a factor.
    """
    with np.errstate(divide="ignore"):
        return np.asarray(np.maximum(factors.max(1), 1) / np.minimum(factors.min(1), 1))


def stretch_fault(factors: Floats) -> str | None:
    """Return why the factors by which a stack of members stretches are not allowed, or None."""
    ratios = stretch_ratio(factors)
    worst = factors[int(ratios.argmax())]
    if ratios.max() <= MAX_STRETCH * (1 + 1e-9):
        return None
    return (
        f"stretches by factors from {worst.min():.3g} to {worst.max():.3g}, which with 1 "
        f"must lie within a ratio of {MAX_STRETCH:g}"
    )


def monomial_scale(member: Member) -> tuple[Floats, str | None]:
    """Return the scales of a member, and the reason why it is not a permutation with scales, or
    None.
    """
    if not isinstance(member, Monomial):
        values = member.matrix()
        order = Dense(values).permutation()
        if order is None:
            return np.ones(values.shape[:2]), "is a rotation or another mixture of coordinates"
        return np.take_along_axis(values, order.index[:, :, None], 2)[:, :, 0], None
    if not (np.sort(member.index, 1) == np.arange(member.size)).all():
        return np.ones(member.index.shape), "is not a permutation"
    return np.ones(member.index.shape) if member.scale is None else member.scale, None


def permutation_index(member: Member) -> Ints:
    """Return the index of a single permutation."""
    order = member.permutation()
    assert order is not None, "parents are permuted only"
    return np.asarray(order.index[0], np.int64)
