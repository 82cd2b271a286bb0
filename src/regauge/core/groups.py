"""The groups that can act on a space, with six verbs: identity, sample, act, inverse, compose, fit.

A group is a value without a size; a member is a stack of `count` matrices (one per index of the
space's parent, or one). `within(kind)` returns the largest subgroup of a kind: "permutation"
(lossless in storage), "signed", "orthogonal" (preserves norms), "full". `fault` returns the reason
why a member is not in the group or stretches more than `MAX_STRETCH`. Registry: `GROUPS`, by the
names in spec files.

`fit` returns the member that brings x nearest to y; fit.py explains its three sides.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from regauge.core.fit import (
    Pair,
    assign,
    correlation,
    first_target,
    fit_linear,
    fit_planes,
    fit_scaled,
    fit_signed,
    polar,
)
from regauge.core.members import (
    Dense,
    Layout,
    Member,
    Monomial,
    Planes,
    monomial_scale,
    planes,
    stretch_fault,
)
from regauge.core.rng import Floats, Stream
from regauge.core.uniform import haar, lift, ones_complement, permutations

if TYPE_CHECKING:
    import torch

Kind = Literal["permutation", "signed", "orthogonal", "full"]
KINDS: tuple[Kind, ...] = ("permutation", "signed", "orthogonal", "full")

# Sampled scales and singular values lie within [1/sqrt(3), sqrt(3)]: condition numbers of at most
# 3, which bf16 tolerates.
_SPREAD = math.log(3.0) / 2


class Group(ABC):
    """Base class of the groups. A subclass adds sample, fit, within, fault, and its size in bits or
    dimensions.
    """

    name: ClassVar[str]

    def __str__(self) -> str:
        return self.name

    def identity(self, size: int, count: int = 1) -> Member:
        """Return `count` identities of a size."""
        return Monomial(np.tile(np.arange(size), (count, 1)))

    @abstractmethod
    def sample(self, size: int, count: int, stream: Stream) -> Member:
        """Sample `count` members of a size from a stream of random numbers."""

    def act(
        self, member: Member, x: torch.Tensor, dim: int = -1, *, dual: bool = False
    ) -> torch.Tensor:
        """Transform one axis of x, of size count * size, by the member (or its dual)."""
        from regauge.core.steps import step

        return step(member.dual() if dual else member)(x, dim)

    def inverse(self, member: Member) -> Member:
        """Return the inverse of a member."""
        return member.inverse()

    def compose(self, a: Member, b: Member) -> Member:
        """Return the member that applies b first, then a."""
        return a.after(b)

    @abstractmethod
    def fit(
        self, plain: Pair | None = None, dual: Pair | None = None, bar: Pair | None = None
    ) -> Member:
        """Return the member that brings x nearest to y, over pairs (y, x) of up to three sides."""

    @abstractmethod
    def within(self, kind: Kind) -> Group:
        """Return the largest subgroup of a kind."""

    @abstractmethod
    def fault(self, member: Member) -> str | None:
        """Return the reason why a member is not in the group, or None. It completes "the element
        ...".
        """

    def bits(self, size: int) -> float:
        """Return log2 of the number of members, or of the discrete part of a continuous group."""
        return 0.0

    def dim(self, size: int) -> int:
        """Return the number of continuous parameters."""
        return 0

    @property
    def is_orthogonal(self) -> bool:
        """Whether all members are orthogonal, so that they equal their duals."""
        return True


@dataclass(frozen=True)
class Trivial(Group):
    """The identity alone."""

    name = "trivial"

    def sample(self, size: int, count: int, stream: Stream) -> Member:
        return self.identity(size, count)

    def fit(
        self, plain: Pair | None = None, dual: Pair | None = None, bar: Pair | None = None
    ) -> Member:
        shape = first_target(plain, dual, bar).shape
        return self.identity(shape[1], shape[0])

    def within(self, kind: Kind) -> Group:
        return self

    def fault(self, member: Member) -> str | None:
        same = np.allclose(member.matrix(), np.eye(member.size), atol=1e-9)
        return None if same else "is not the identity"


@dataclass(frozen=True)
class Permutation(Group):
    """S_n: the symmetry of LayerNorm gains and GELU."""

    name = "permutation"

    def sample(self, size: int, count: int, stream: Stream) -> Member:
        return Monomial(permutations(size, count, stream))

    def fit(
        self, plain: Pair | None = None, dual: Pair | None = None, bar: Pair | None = None
    ) -> Member:
        return Monomial(assign(correlation(plain, dual, bar)))

    def within(self, kind: Kind) -> Group:
        return self

    def fault(self, member: Member) -> str | None:
        scale, fault = monomial_scale(member)
        if fault:
            return fault
        return None if np.allclose(scale, 1, rtol=0, atol=1e-9) else "scales or flips coordinates"

    def bits(self, size: int) -> float:
        return math.lgamma(size + 1) / math.log(2)


@dataclass(frozen=True)
class SignedPermutation(Permutation):
    """Permutations with signs: the symmetry of RMSNorm gains and odd functions."""

    name = "signed"

    def sample(self, size: int, count: int, stream: Stream) -> Member:
        index = permutations(size, count, stream)
        return Monomial(index, stream.signs(count * size).reshape(count, size))

    def fit(
        self, plain: Pair | None = None, dual: Pair | None = None, bar: Pair | None = None
    ) -> Member:
        return fit_signed(plain, dual, bar)

    def within(self, kind: Kind) -> Group:
        return Permutation() if kind == "permutation" else self

    def fault(self, member: Member) -> str | None:
        scale, fault = monomial_scale(member)
        if fault:
            return fault
        return None if np.allclose(np.abs(scale), 1, rtol=0, atol=1e-9) else "scales coordinates"

    def bits(self, size: int) -> float:
        return super().bits(size) + size


@dataclass(frozen=True)
class Scaling(Group):
    """Permutations with a scale per coordinate: positive (ReLU), or nonzero (the up and down side
    of a gated FFN).
    """

    positive: bool

    @property
    def name(self) -> str:  # type: ignore[override]
        return "monomial+" if self.positive else "monomial"

    def sample(self, size: int, count: int, stream: Stream) -> Member:
        index = permutations(size, count, stream)
        scale = np.exp(_SPREAD * (2 * stream.uniforms(count * size) - 1))
        if not self.positive:
            scale = scale * stream.signs(count * size)
        return Monomial(index, scale.reshape(count, size))

    def fit(
        self, plain: Pair | None = None, dual: Pair | None = None, bar: Pair | None = None
    ) -> Member:
        return fit_scaled(plain, dual, bar, self.positive)

    def within(self, kind: Kind) -> Group:
        if kind == "full":
            return self
        return Permutation() if self.positive or kind == "permutation" else SignedPermutation()

    def fault(self, member: Member) -> str | None:
        scale, fault = monomial_scale(member)
        if fault:
            return fault
        if self.positive and (scale <= 0).any():
            return "has scales that are not positive"
        if not np.isfinite(scale).all() or (scale == 0).any():
            return "has scales that are zero or not finite"
        return stretch_fault(np.abs(scale))

    def bits(self, size: int) -> float:
        return Permutation().bits(size) + (0 if self.positive else size)

    def dim(self, size: int) -> int:
        return size

    @property
    def is_orthogonal(self) -> bool:
        return False


@dataclass(frozen=True)
class Orthogonal(Group):
    """O(n): the symmetry of RMSNorm once its gains are folded."""

    name = "orthogonal"

    def sample(self, size: int, count: int, stream: Stream) -> Member:
        return Dense(np.stack([haar(size, stream) for _ in range(count)]))

    def fit(
        self, plain: Pair | None = None, dual: Pair | None = None, bar: Pair | None = None
    ) -> Member:
        if plain is None and dual is None:
            return Permutation().fit(bar=bar)
        return Dense(polar(correlation(plain, dual)))

    def within(self, kind: Kind) -> Group:
        smaller: dict[Kind, Group] = {"permutation": Permutation(), "signed": SignedPermutation()}
        return smaller.get(kind, self)

    def fault(self, member: Member) -> str | None:
        if isinstance(member, Monomial):
            return SignedPermutation().fault(member)
        m = member.matrix()
        orthogonal = np.allclose(m @ m.swapaxes(1, 2), np.eye(member.size), rtol=0, atol=1e-7)
        return None if orthogonal else "is not orthogonal"

    def bits(self, size: int) -> float:
        return 1.0

    def dim(self, size: int) -> int:
        return size * (size - 1) // 2


@dataclass(frozen=True)
class OrthogonalFixingOnes(Orthogonal):
    """The orthogonal matrices that fix the all-ones vector: the symmetry of LayerNorm once its
    gains are folded.
    """

    name = "orthogonal-ones"

    def sample(self, size: int, count: int, stream: Stream) -> Member:
        return Dense(np.stack([lift(haar(size - 1, stream)) for _ in range(count)]))

    def fit(
        self, plain: Pair | None = None, dual: Pair | None = None, bar: Pair | None = None
    ) -> Member:
        if plain is None and dual is None:
            return Permutation().fit(bar=bar)
        c = correlation(plain, dual)
        basis = ones_complement(c.shape[1])
        return Dense(np.stack([lift(r) for r in polar(basis.T @ c @ basis)]))

    def within(self, kind: Kind) -> Group:
        return Permutation() if kind in ("permutation", "signed") else self

    def fault(self, member: Member) -> str | None:
        if isinstance(member, Monomial):
            return Permutation().fault(member)
        fixes_ones = np.allclose(member.matrix().sum(2), 1, rtol=0, atol=1e-7)
        return super().fault(member) or (None if fixes_ones else "does not fix the all-ones vector")

    def bits(self, size: int) -> float:
        return 1.0 if size > 1 else 0.0

    def dim(self, size: int) -> int:
        return (size - 1) * (size - 2) // 2


@dataclass(frozen=True)
class Rotary(Group):
    """One rotation, and unless `unit` one scale, per 2-plane: the symmetry of the query-key product
    under rotary positions.
    """

    layout: Layout
    unit: bool = False

    @property
    def name(self) -> str:  # type: ignore[override]
        return ("turns-" if self.unit else "rotary-") + self.layout

    def identity(self, size: int, count: int = 1) -> Member:
        return Planes(np.ones((count, size // 2), np.complex128), self.layout)

    def sample(self, size: int, count: int, stream: Stream) -> Member:
        n = count * size // 2
        factor = np.exp(2j * np.pi * stream.uniforms(n))
        if not self.unit:
            factor = factor * np.exp(_SPREAD * (2 * stream.uniforms(n) - 1))
        return Planes(factor.reshape(count, -1), self.layout)

    def fit(
        self, plain: Pair | None = None, dual: Pair | None = None, bar: Pair | None = None
    ) -> Member:
        if plain is None and dual is None:
            count, size, _ = first_target(bar).shape
            return self.identity(size, count)
        return Planes(fit_planes(plain, dual, self.layout, self.unit), self.layout)

    def within(self, kind: Kind) -> Group:
        match kind:
            case "permutation":
                return Trivial()
            case "signed":
                return PlaneSigns(self.layout)
            case "orthogonal":
                return Rotary(self.layout, unit=True)
            case _:
                return self

    def fault(self, member: Member) -> str | None:
        if not isinstance(member, Planes) or member.layout != self.layout:
            m = member.matrix()
            first, second = planes(member.size, self.layout)
            member = Planes(m[:, first, first] + 1j * m[:, second, first], self.layout)
            if not np.allclose(member.matrix(), m, rtol=0, atol=1e-9):
                return f"mixes coordinates beyond the {self.layout} rotary planes"
        if not np.isfinite(member.factor).all() or (member.factor == 0).any():
            return "has plane factors that are zero or not finite"
        if self.unit and not np.allclose(np.abs(member.factor), 1, rtol=0, atol=1e-9):
            return "scales planes"
        return stretch_fault(np.abs(member.factor))

    def dim(self, size: int) -> int:
        return size // 2 if self.unit else size

    @property
    def is_orthogonal(self) -> bool:
        return self.unit


@dataclass(frozen=True)
class PlaneSigns(Rotary):
    """One sign per 2-plane: the symmetry of QK-norm with rotary positions."""

    unit: bool = True

    @property
    def name(self) -> str:  # type: ignore[override]
        return "signs-" + self.layout

    def sample(self, size: int, count: int, stream: Stream) -> Member:
        return Planes(
            stream.signs(count * size // 2).reshape(count, -1).astype(np.complex128), self.layout
        )

    def fit(
        self, plain: Pair | None = None, dual: Pair | None = None, bar: Pair | None = None
    ) -> Member:
        fitted = super().fit(plain, dual, bar)
        assert isinstance(fitted, Planes)
        signs = np.where(fitted.factor.real < 0, -1.0, 1.0)
        return Planes(signs.astype(np.complex128), self.layout)

    def within(self, kind: Kind) -> Group:
        return Trivial() if kind == "permutation" else self

    def fault(self, member: Member) -> str | None:
        fault = super().fault(member)
        if fault:
            return fault
        diagonal = np.einsum("kii->ki", member.matrix())
        only_signs = np.allclose(np.abs(diagonal), 1, rtol=0, atol=1e-9)
        return None if only_signs else "rotates planes by more than a sign"

    def bits(self, size: int) -> float:
        return size / 2

    def dim(self, size: int) -> int:
        return 0


@dataclass(frozen=True)
class GeneralLinear(Group):
    """The invertible matrices: the symmetry of a dot product."""

    name = "linear"

    def sample(self, size: int, count: int, stream: Stream) -> Member:
        """Sample U diag(s) V with U, V Haar and log s uniform: condition number at most 3."""

        def sample_matrix() -> Floats:
            u, v = haar(size, stream), haar(size, stream)
            return np.asarray((u * np.exp(_SPREAD * (2 * stream.uniforms(size) - 1))) @ v)

        return Dense(np.stack([sample_matrix() for _ in range(count)]))

    def fit(
        self, plain: Pair | None = None, dual: Pair | None = None, bar: Pair | None = None
    ) -> Member:
        if plain is None:
            return (
                Permutation().fit(bar=bar) if dual is None else Dense(fit_linear(dual, None)).dual()
            )
        return Dense(fit_linear(plain, dual))

    def within(self, kind: Kind) -> Group:
        return self if kind == "full" else Orthogonal().within(kind)

    def fault(self, member: Member) -> str | None:
        if isinstance(member, Monomial):
            return Scaling(positive=False).fault(member)
        m = member.matrix()
        if not np.isfinite(m).all():
            return "is not finite"
        return stretch_fault(np.asarray(np.linalg.svd(m, compute_uv=False), np.float64))

    def bits(self, size: int) -> float:
        return 1.0

    def dim(self, size: int) -> int:
        return size * size

    @property
    def is_orthogonal(self) -> bool:
        return False


GROUPS: dict[str, Group] = {
    g.name: g
    for g in (
        Trivial(),
        Permutation(),
        SignedPermutation(),
        Scaling(positive=True),
        Scaling(positive=False),
        Orthogonal(),
        OrthogonalFixingOnes(),
        Rotary("half"),
        Rotary("interleaved"),
        Rotary("half", unit=True),
        Rotary("interleaved", unit=True),
        PlaneSigns("half"),
        PlaneSigns("interleaved"),
        GeneralLinear(),
    )
}
