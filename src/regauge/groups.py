"""The groups that a space may have: six verbs each (identity, sample, act, inverse, compose, fit).

A group is a value without a size; a member is a stack of `count` matrices (one per index of the space's parent, or one). `within(kind)`
is the largest subgroup of a kind: "permutation" (stored losslessly), "signed", "orthogonal" (norms kept), "full". `fault` says why a member
is not in the group, or stretches more than `LIMIT` allows. Registry: `GROUPS`, by the name that spec files use.

`fit` finds the member M that moves x nearest to y: least squares over `plain` pairs (M x against y), `dual` pairs (M^-T x against y) and
`bar` pairs (the permutation of M alone). Pairs are stacks [count, size, features].
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from regauge.members import Complexes, Dense, Layout, Member, Monomial, Planes, planes
from regauge.streams import Floats, Ints, Stream

if TYPE_CHECKING:
    import torch

Kind = Literal["permutation", "signed", "orthogonal", "full"]
KINDS: tuple[Kind, ...] = ("permutation", "signed", "orthogonal", "full")
Pair = tuple[Floats, Floats]

# Sampled scales and singular values lie within [1/sqrt(3), sqrt(3)]: condition numbers of at most 3, which bf16 bears.
_SPREAD = math.log(3.0) / 2
# The largest ratio between two factors by which a member stretches, 1 counted among them: so it bounds condition numbers and scales alike.
# Rounding grows with it: at the limit a float32 model still keeps its function to about 1e-4. Six samples composed stay within.
LIMIT = 1e3


class Group(ABC):
    """The verbs that all groups share. A group adds identity, sample, fit, within, fault, and its size in bits or dimensions."""

    name: ClassVar[str]

    def __str__(self) -> str:
        return self.name

    def identity(self, size: int, count: int = 1) -> Member:
        return Monomial(np.tile(np.arange(size), (count, 1)))

    @abstractmethod
    def sample(self, size: int, count: int, stream: Stream) -> Member: ...

    def act(self, member: Member, x: torch.Tensor, dim: int = -1, *, dual: bool = False) -> torch.Tensor:
        """Move one axis of x, of size count * size, by the member (or its dual)."""
        from regauge.steps import step

        return step(member.dual() if dual else member)(x, dim)

    def inverse(self, member: Member) -> Member:
        return member.inverse()

    def compose(self, a: Member, b: Member) -> Member:
        """b first, then a."""
        return a.after(b)

    @abstractmethod
    def fit(self, plain: Pair | None = None, dual: Pair | None = None, bar: Pair | None = None) -> Member: ...

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

    def fit(self, plain: Pair | None = None, dual: Pair | None = None, bar: Pair | None = None) -> Member:
        shape = _first(plain, dual, bar).shape
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
        return Monomial(_permutations(size, count, stream))

    def fit(self, plain: Pair | None = None, dual: Pair | None = None, bar: Pair | None = None) -> Member:
        return Monomial(_assign(_correlation(plain, dual, bar)))

    def within(self, kind: Kind) -> Group:
        return self

    def fault(self, member: Member) -> str | None:
        scale, fault = _monomial_scale(member)
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
        index = _permutations(size, count, stream)
        return Monomial(index, stream.signs(count * size).reshape(count, size))

    def fit(self, plain: Pair | None = None, dual: Pair | None = None, bar: Pair | None = None) -> Member:
        c = _correlation(plain, dual) if plain is not None or dual is not None else np.zeros_like(_correlation(bar))
        index = _assign(np.abs(c) + (0 if bar is None else _correlation(bar)))
        picked = np.take_along_axis(c, index[:, :, None], 2)[:, :, 0]
        return Monomial(index, np.where(picked < 0, -1.0, 1.0))

    def within(self, kind: Kind) -> Group:
        return Permutation() if kind == "permutation" else self

    def fault(self, member: Member) -> str | None:
        scale, fault = _monomial_scale(member)
        if fault:
            return fault
        return None if np.allclose(np.abs(scale), 1, rtol=0, atol=1e-9) else "scales coordinates"

    def bits(self, size: int) -> float:
        return super().bits(size) + size


@dataclass(frozen=True)
class Scaling(Group):
    """Permutations with a scale for each coordinate: positive (ReLU), or any but zero (the up and down side of a gated FFN)."""

    positive: bool

    @property
    def name(self) -> str:  # type: ignore[override]
        return "monomial+" if self.positive else "monomial"

    def sample(self, size: int, count: int, stream: Stream) -> Member:
        index = _permutations(size, count, stream)
        scale = np.exp(_SPREAD * (2 * stream.uniforms(count * size) - 1))
        if not self.positive:
            scale = scale * stream.signs(count * size)
        return Monomial(index, scale.reshape(count, size))

    def fit(self, plain: Pair | None = None, dual: Pair | None = None, bar: Pair | None = None) -> Member:
        """Scale-free scores (cosines) decide who goes where; the scale then balances the two sides. From one side: least squares."""
        sides = [_cosines(p) for p in (plain, dual) if p is not None]
        if self.positive or not sides:
            scores = np.asarray(sum(sides))
        else:  # a sign may flip both sides at once, so only the product of their cosines is seen
            scores = np.abs(sides[0]) if len(sides) == 1 else sides[0] * sides[1]
        index = _assign(scores if bar is None else scores + _cosines(bar))
        (yx, yy, xx), (yx_dual, yy_dual, xx_dual) = _inner_products(plain, index), _inner_products(dual, index)
        if plain is not None and dual is not None:
            scale = (_ratio(yy, xx) * _ratio(xx_dual, yy_dual)) ** 0.25
        elif plain is not None:
            scale = _ratio(np.abs(yx), xx)
        else:
            scale = _ratio(xx_dual, np.abs(yx_dual))
        sign = np.where((yx if plain is not None else yx_dual) < 0, -1.0, 1.0)
        scale = _restrained(scale)
        return Monomial(index, scale if self.positive else scale * sign)

    def within(self, kind: Kind) -> Group:
        if kind == "full":
            return self
        return Permutation() if self.positive or kind == "permutation" else SignedPermutation()

    def fault(self, member: Member) -> str | None:
        scale, fault = _monomial_scale(member)
        if fault:
            return fault
        if self.positive and (scale <= 0).any():
            return "has scales that are not positive"
        if not np.isfinite(scale).all() or (scale == 0).any():
            return "has scales that are zero or not finite"
        return _strain(np.abs(scale))

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

    def fit(self, plain: Pair | None = None, dual: Pair | None = None, bar: Pair | None = None) -> Member:
        if plain is None and dual is None:
            return Permutation().fit(bar=bar)
        return Dense(polar(_correlation(plain, dual)))

    def within(self, kind: Kind) -> Group:
        match kind:
            case "permutation":
                return Permutation()
            case "signed":
                return SignedPermutation()
            case _:
                return self

    def fault(self, member: Member) -> str | None:
        if isinstance(member, Monomial):
            return SignedPermutation().fault(member)
        m = member.matrix()
        return None if np.allclose(m @ m.swapaxes(1, 2), np.eye(member.size), rtol=0, atol=1e-7) else "is not orthogonal"

    def bits(self, size: int) -> float:
        return 1.0

    def dim(self, size: int) -> int:
        return size * (size - 1) // 2


@dataclass(frozen=True)
class OrthogonalFixingOnes(Orthogonal):
    """The orthogonal matrices that keep the all-ones vector: what LayerNorm leaves once its gains are folded."""

    name = "orthogonal-ones"

    def sample(self, size: int, count: int, stream: Stream) -> Member:
        return Dense(np.stack([_lift(haar(size - 1, stream)) for _ in range(count)]))

    def fit(self, plain: Pair | None = None, dual: Pair | None = None, bar: Pair | None = None) -> Member:
        if plain is None and dual is None:
            return Permutation().fit(bar=bar)
        c = _correlation(plain, dual)
        basis = ones_complement(c.shape[1])
        return Dense(np.stack([_lift(r) for r in polar(basis.T @ c @ basis)]))

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
    """One turn, and unless `unit` one scale, for each 2-plane: what rotary positions leave of the query-key product."""

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

    def fit(self, plain: Pair | None = None, dual: Pair | None = None, bar: Pair | None = None) -> Member:
        """The phase of the summed products; the modulus from balancing the two sides, or by least squares from one."""
        if plain is None and dual is None:
            shape = _first(bar).shape
            return self.identity(shape[1], shape[0])
        sides = [None if s is None else (self._complex(s[0]), self._complex(s[1])) for s in (plain, dual)]
        z = sum((_inner(y, x) for y, x in (s for s in sides if s is not None)), np.zeros((), np.complex128))
        modulus = np.ones(z.shape)
        if not self.unit:
            p, d = sides
            if p is not None and d is not None:
                (q1, q2), (k1, k2) = p, d
                c1, c2 = (_ratio(_norm2(k1), _norm2(q1)) ** 0.25, _ratio(_norm2(k2), _norm2(q2)) ** 0.25)
                z = (c1 * c2) * _inner(q1, q2) + _inner(k1, k2) / (c1 * c2)
                modulus = c2 / c1
            elif p is not None:
                modulus = _ratio(np.abs(z), _norm2(p[1]))
            elif d is not None:
                modulus = _ratio(_norm2(d[1]), np.abs(z))
        turn = np.where(np.abs(z) > 0, z / np.where(np.abs(z) > 0, np.abs(z), 1), 1)
        return Planes(np.asarray(_restrained(modulus) * turn, np.complex128), self.layout)

    def _complex(self, x: Floats) -> Complexes:
        first, second = planes(x.shape[1], self.layout)
        return np.asarray(x[:, first] + 1j * x[:, second])

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
        return _strain(np.abs(member.factor))

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
        return Planes(stream.signs(count * size // 2).reshape(count, -1).astype(np.complex128), self.layout)

    def fit(self, plain: Pair | None = None, dual: Pair | None = None, bar: Pair | None = None) -> Member:
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
        return None if np.allclose(np.abs(np.einsum("kii->ki", m)), 1, rtol=0, atol=1e-9) else "turns planes by more than a sign"

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

    def fit(self, plain: Pair | None = None, dual: Pair | None = None, bar: Pair | None = None) -> Member:
        """Balance both sides, then Procrustes. From one side only: least squares. Singular values beyond the limit are brought within."""
        if plain is None and dual is None:
            return Permutation().fit(bar=bar)
        if plain is None:
            return self.fit(plain=dual).dual()
        if dual is None:
            best = np.stack([y @ np.linalg.pinv(x) for y, x in _rows(plain)])
        else:
            best = np.stack([_balanced_fit(*q, *k) for q, k in zip(_rows(plain), _rows(dual), strict=True)])
        u, s, vt = np.linalg.svd(best)
        return Dense((u * _restrained(s)[:, None, :]) @ vt)

    def within(self, kind: Kind) -> Group:
        match kind:
            case "full":
                return self
            case _:
                return Orthogonal().within(kind)

    def fault(self, member: Member) -> str | None:
        if isinstance(member, Monomial):
            return Scaling(positive=False).fault(member)
        m = member.matrix()
        if not np.isfinite(m).all():
            return "is not finite"
        return _strain(np.asarray(np.linalg.svd(m, compute_uv=False), np.float64))

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


def haar(size: int, stream: Stream) -> Floats:
    """A Haar-distributed orthogonal matrix, from size^2 normals of the stream in row-major order."""
    q, r = np.linalg.qr(stream.normals(size * size).reshape(size, size))
    # Fix the signs of R's diagonal: plain QR is not Haar-distributed (Mezzadri 2007, sec. 4).
    return np.asarray(q * np.where(np.diag(r) < 0, -1.0, 1.0))


def polar(c: Floats) -> Floats:
    """The orthogonal matrix nearest to each c: U V^T of its singular value decomposition (Procrustes)."""
    u, _, vt = np.linalg.svd(c)
    return np.asarray(u @ vt)


def ones_complement(size: int) -> Floats:
    """Columns that span the complement of the all-ones vector: the Householder reflection of e_0 to ones/sqrt(n), without its first column."""
    v = np.full(size, 1 / math.sqrt(size))
    v[0] -= 1.0
    norm = v @ v
    reflection = np.eye(size) - (2 / norm) * np.outer(v, v) if norm else np.eye(size)
    return np.asarray(reflection[:, 1:])


def _lift(r: Floats) -> Floats:
    """An orthogonal matrix on the complement of the ones vector, as one of full size that keeps the ones vector."""
    size = r.shape[0] + 1
    basis = ones_complement(size)
    return np.asarray(basis @ r @ basis.T + 1 / size)


def _permutations(size: int, count: int, stream: Stream) -> Ints:
    return np.stack([stream.permutation(size) for _ in range(count)])


def _balanced_fit(q1: Floats, q2: Floats, k1: Floats, k2: Floats) -> Floats:
    b1, b2 = _balance(q1, k1), _balance(q2, k2)
    if b1 is None or b2 is None:  # a rank-deficient side has no balanced form: the best rotation is safe
        return polar(q1 @ q2.T + k1 @ k2.T)
    i1, i2 = np.linalg.inv(b1), np.linalg.inv(b2)
    rotation = polar((b1 @ q1) @ (b2 @ q2).T + (i1.T @ k1) @ (i2.T @ k2).T)
    return np.asarray(i1 @ rotation @ b2)


def _balance(q: Floats, k: Floats) -> Floats | None:
    """B with (BQ)(BQ)^T = (B^-T K)(B^-T K)^T: the point of least norm on the orbit."""
    rq, rk = np.linalg.qr(q.T)[1], np.linalg.qr(k.T)[1]
    if rq.shape[0] < rq.shape[1] or rk.shape[0] < rk.shape[1]:
        return None
    u, s, _ = np.linalg.svd(rq @ rk.T)
    if s[-1] <= 1e-10 * s[0]:
        return None
    return np.asarray(np.sqrt(s)[:, None] * (u.T @ np.linalg.inv(rq).T))


def _first(*pairs: Pair | None) -> Floats:
    return next(p[0] for p in pairs if p is not None)


def _rows(pair: Pair | None) -> Sequence[Pair]:
    assert pair is not None, "fit needs at least one pair"
    return list(zip(*pair, strict=True))


def _correlation(*pairs: Pair | None) -> Floats:
    """Sum of y x^T: <M, C> is what the best orthogonal M maximises."""
    shape = _first(*pairs).shape
    total = np.zeros((shape[0], shape[1], shape[1]))
    for pair in pairs:
        if pair is not None:
            total = total + pair[0] @ pair[1].swapaxes(1, 2)
    return total


def _assign(scores: Floats) -> Ints:
    from scipy.optimize import linear_sum_assignment

    return np.stack([linear_sum_assignment(s, maximize=True)[1] for s in scores]).astype(np.int64)


def _cosines(pair: Pair) -> Floats:
    def unit(x: Floats) -> Floats:
        return np.asarray(x / np.maximum(np.linalg.norm(x, axis=2, keepdims=True), 1e-300))

    return np.asarray(unit(pair[0]) @ unit(pair[1]).swapaxes(1, 2))


def _inner_products(pair: Pair | None, index: Ints) -> tuple[Floats, Floats, Floats]:
    """<y, x>, <y, y> and <x, x> of every coordinate and the one assigned to it."""
    if pair is None:
        return np.ones(index.shape), np.ones(index.shape), np.ones(index.shape)
    y, x = pair[0], np.take_along_axis(pair[1], index[:, :, None], 1)
    return (y * x).sum(2), (y * y).sum(2), (x * x).sum(2)


def _ratio(a: Floats, b: Floats) -> Floats:
    """a / b, and 1 where that is no usable scale."""
    with np.errstate(divide="ignore", invalid="ignore"):
        r = np.asarray(a / b)
    return np.where(np.isfinite(r) & (r > 0), r, 1.0)


def _inner(y: Complexes, x: Complexes) -> Complexes:
    return np.asarray((y * x.conj()).sum(2))


def _norm2(x: Complexes) -> Floats:
    return np.asarray((np.abs(x) ** 2).sum(2))


def _reach(factors: Floats) -> Floats:
    """For each row, the largest ratio between two of its factors, 1 counted among them."""
    with np.errstate(divide="ignore"):
        return np.asarray(np.maximum(factors.max(1), 1) / np.minimum(factors.min(1), 1))


def _strain(factors: Floats) -> str | None:
    """Why the factors by which a stack of members stretches are refused, or None."""
    reach = _reach(factors)
    worst = factors[int(reach.argmax())]
    if reach.max() <= LIMIT * (1 + 1e-9):
        return None
    return f"stretches by factors from {worst.min():.3g} to {worst.max():.3g}, which with 1 must lie within a ratio of {LIMIT:g}"


def _restrained(factors: Floats) -> Floats:
    """The same factors where the limit allows them; elsewhere those far from the middle are cut off."""
    half = math.sqrt(LIMIT)
    middle = np.clip(np.median(factors, axis=1, keepdims=True), 1 / half, half)
    return np.where(_reach(factors)[:, None] <= LIMIT, factors, np.clip(factors, middle / half, middle * half))


def _monomial_scale(member: Member) -> tuple[Floats, str | None]:
    """The scales of a member as a permutation with scales, or the reason why it is none."""
    if not isinstance(member, Monomial):
        values = member.matrix()
        order = Dense(values).permutation()
        if order is None:
            return np.ones(values.shape[:2]), "is a rotation or another mixture of coordinates"
        return np.take_along_axis(values, order.index[:, :, None], 2)[:, :, 0], None
    if not (np.sort(member.index, 1) == np.arange(member.size)).all():
        return np.ones(member.index.shape), "is not a permutation"
    return np.ones(member.index.shape) if member.scale is None else member.scale, None
