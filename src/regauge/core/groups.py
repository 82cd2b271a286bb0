"""The groups that a space may have: six verbs each (identity, sample, act, inverse, compose, fit).

A group is a value without a size; a member is a stack of `count` matrices (one per index of the
space's parent, or one). `within(kind)` is the largest subgroup of a kind: "permutation" (stored
losslessly), "signed", "orthogonal" (norms kept), "full". `fault` says why a member is not in the
group, or stretches more than `LIMIT` allows. Registry: `GROUPS`, by the name that spec files use.

`fit` finds the member that moves x nearest to y; fitting.py says what its three sides are.
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
# 3, which bf16 bears.
_SPREAD = math.log(3.0) / 2


class Group(ABC):
    """The verbs that all groups share. A group adds identity, sample, fit, within, fault, and its
    size in bits or dimensions.
    """

    name: ClassVar[str]

    def __str__(self) -> str:
        return self.name

    def identity(self, size: int, count: int = 1) -> Member:
        return Monomial(np.tile(np.arange(size), (count, 1)))

    @abstractmethod
    def sample(self, size: int, count: int, stream: Stream) -> Member: ...

    def act(
        self, member: Member, x: torch.Tensor, dim: int = -1, *, dual: bool = False
    ) -> torch.Tensor:
        """Move one axis of x, of size count * size, by the member (or its dual)."""
        from regauge.core.steps import step

        return step(member.dual() if dual else member)(x, dim)

    def inverse(self, member: Member) -> Member:
        return member.inverse()

    def compose(self, a: Member, b: Member) -> Member:
        """b first, then a."""
        return a.after(b)

    @abstractmethod
    def fit(
        self, plain: Pair | None = None, dual: Pair | None = None, bar: Pair | None = None
    ) -> Member: ...

    @abstractmethod
    def within(self, kind: Kind) -> Group: ...

    @abstractmethod
    def fault(self, member: Member) -> str | None: ...

    def bits(self, size: int) -> float:
        """log2 of the number of members; of the discrete part where the group is continuous."""
        return 0.0

    def dim(self, size: int) -> int:
        """The number of continuous parameters."""
        return 0

    @property
    def is_orthogonal(self) -> bool:
        """Are all members orthogonal, so that the star changes nothing?"""
        return True


@dataclass(frozen=True)
class Trivial(Group):
    """Nothing but the identity."""

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
        return None if same else "moves something"


@dataclass(frozen=True)
class Permutation(Group):
    """S_n: what LayerNorm gains and GELU leave."""

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
    """Permutations with signs: what RMSNorm gains and odd functions leave."""

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
    """Permutations with a scale for each coordinate: positive (ReLU), or any but zero (the up and
    down side of a gated FFN).
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
    """O(n): what RMSNorm leaves once its gains are folded."""

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
        return (
            None
            if np.allclose(m @ m.swapaxes(1, 2), np.eye(member.size), rtol=0, atol=1e-7)
            else "is not orthogonal"
        )

    def bits(self, size: int) -> float:
        return 1.0

    def dim(self, size: int) -> int:
        return size * (size - 1) // 2


@dataclass(frozen=True)
class OrthogonalFixingOnes(Orthogonal):
    """The orthogonal matrices that keep the all-ones vector: what LayerNorm leaves once its gains
    are folded.
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
        kept = np.allclose(member.matrix().sum(2), 1, rtol=0, atol=1e-7)
        return super().fault(member) or (None if kept else "does not keep the all-ones vector")

    def bits(self, size: int) -> float:
        return 1.0 if size > 1 else 0.0

    def dim(self, size: int) -> int:
        return (size - 1) * (size - 2) // 2


@dataclass(frozen=True)
class Rotary(Group):
    """One turn, and unless `unit` one scale, for each 2-plane: what rotary positions leave of the
    query-key product.
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
    """One sign for each 2-plane: what QK-norm with rotary positions leaves."""

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
        turn = super().fit(plain, dual, bar)
        assert isinstance(turn, Planes)
        return Planes(np.where(turn.factor.real < 0, -1.0, 1.0).astype(np.complex128), self.layout)

    def within(self, kind: Kind) -> Group:
        return Trivial() if kind == "permutation" else self

    def fault(self, member: Member) -> str | None:
        wrong = super().fault(member)
        if wrong:
            return wrong
        m = member.matrix()
        return (
            None
            if np.allclose(np.abs(np.einsum("kii->ki", m)), 1, rtol=0, atol=1e-9)
            else "turns planes by more than a sign"
        )

    def bits(self, size: int) -> float:
        return size / 2

    def dim(self, size: int) -> int:
        return 0


@dataclass(frozen=True)
class GeneralLinear(Group):
    """Every invertible matrix: what a dot product leaves."""

    name = "linear"

    def sample(self, size: int, count: int, stream: Stream) -> Member:
        """U diag(s) V with U, V Haar and log s uniform: condition number at most 3."""

        def one() -> Floats:
            u, v = haar(size, stream), haar(size, stream)
            return np.asarray((u * np.exp(_SPREAD * (2 * stream.uniforms(size) - 1))) @ v)

        return Dense(np.stack([one() for _ in range(count)]))

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
