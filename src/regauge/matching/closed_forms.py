"""The closed forms of matching, as pure functions of numpy arrays.

Sources: Zhang et al., "Beyond the permutation symmetry of Transformers" (paper 003), Theorem 4.1
and its rescaling; the others are derived in the project's theory notes and named there. Everywhere
y is the model that stays and x the model that moves; stacks have their members first. What a
group's own `fit` does (Procrustes, assignment, balance, phases) is in fitting.py.
"""

from __future__ import annotations

import numpy as np

from regauge.core.fit import assign, polar
from regauge.core.groups import Rotary
from regauge.core.members import planes
from regauge.core.rng import Floats, Ints


def procrustes(q1: Floats, k1: Floats, q2: Floats, k2: Floats) -> tuple[Floats, float]:
    """The orthogonal R that brings (q2, k2) nearest to (q1, k1), and the squared distance that is
    left.

    M = q1 q2^T + k1 k2^T = U S V^T, R = U V^T; what is left is |q1|^2 + |q2|^2 + |k1|^2 + |k2|^2 -
    2 |M|_* (Theorem 4.1 of paper 003, where R is said to be a rotation and may be a reflection as
    well). Rows are a head's coordinates; its own slice of the bias is one more column.
    """
    m = q1 @ q2.T + k1 @ k2.T
    left = sum(float((x * x).sum()) for x in (q1, k1, q2, k2)) - 2 * float(
        np.linalg.svd(m, compute_uv=False).sum()
    )
    return polar(m), max(left, 0.0)


def solve_rescaling(q1: Floats, k1: Floats, q2: Floats, k2: Floats) -> float:
    """The factor a that brings (a q2, k2 / a) nearest to (q1, k1): the best real root of

    |q2|^2 a^4 - <q1, q2> a^3 + <k1, k2> a - |k2|^2 = 0        (paper 003, after the rotation)

    Where none is better than 1, it is 1.
    """
    roots = np.roots([(q2 * q2).sum(), -(q1 * q2).sum(), 0.0, (k1 * k2).sum(), -(k2 * k2).sum()])
    real = [float(r.real) for r in roots if abs(r.imag) <= 1e-9 * abs(r) and abs(r) > 1e-12]
    return min(
        [1.0, *real], key=lambda a: float(((a * q2 - q1) ** 2).sum() + ((k2 / a - k1) ** 2).sum())
    )


def product_cosines(y: tuple[Floats, Floats], x: tuple[Floats, Floats]) -> Floats:
    """How alike the products of two stacks are, whatever the basis inside: cosines of P_i = Q_i^T
    K_i and P'_j = Q'_j^T K'_j.

    <P_i, P'_j> = sum of (Q_i Q'_j^T) * (K_i K'_j^T), so that no product is multiplied out. A stack
    is [members, inner, coordinates, features]; `inner` (the queries of one key-value head) may be 1
    on one side. The result is [members of y, inner of y, members of x, inner of x].
    """

    def inner(one: tuple[Floats, Floats], other: tuple[Floats, Floats]) -> Floats:
        parts = [
            np.einsum("iraf,jsbf->irjsab", u, v, optimize=True)
            for u, v in zip(one, other, strict=True)
        ]
        return np.asarray((parts[0] * parts[1]).sum((4, 5)))

    return _cosine(inner(y, x), _squared_norms(y), _squared_norms(x))


def _squared_norms(stack: tuple[Floats, Floats]) -> Floats:
    """|P_i|^2, by [member, inner]."""
    q, k = stack
    gram = [np.einsum("iraf,irbf->irab", u, u, optimize=True) for u in (q, k)]
    return np.asarray((gram[0] * gram[1]).sum((2, 3)))


def rotary_cosines(y: tuple[Floats, Floats], x: tuple[Floats, Floats], group: Rotary) -> Floats:
    """The same under rotary positions, where only the products of one 2-plane are free of the
    basis: the sum over planes of Re(<q_i, q'_j> conj <k_i, k'_j>), with q and k as complex numbers.
    """
    first, second = planes(y[0].shape[2], group.layout)
    (q1, k1), (q2, k2) = (
        [u[:, :, first] + 1j * u[:, :, second] for u in stack] for stack in (y, x)
    )
    parts = [
        np.einsum("irmf,jsmf->irjsm", u, v.conj(), optimize=True) for u, v in ((q1, q2), (k1, k2))
    ]
    own = [
        np.asarray(((np.abs(q) ** 2).sum(3) * (np.abs(k) ** 2).sum(3)).sum(2))
        for q, k in ((q1, k1), (q2, k2))
    ]
    return _cosine(np.asarray((parts[0] * parts[1].conj()).real.sum(4)), *own)


def row_cosines(y: Floats, x: Floats) -> Floats:
    """Cosines between the rows of two stacks [members, features], in the shape of the others."""
    return _cosine(
        np.asarray(np.einsum("if,jf->ij", y, x))[:, None, :, None],
        (y * y).sum(1)[:, None],
        (x * x).sum(1)[:, None],
    )


def _cosine(inner: Floats, y: Floats, x: Floats) -> Floats:
    return np.asarray(inner / np.sqrt(np.maximum(y[:, :, None, None] * x[None, None], 1e-300)))


def assign_two_level(scores: Floats) -> tuple[Ints, Ints]:
    """The best assignment of members, each with the best assignment of what is inside: [members,
    inner, members, inner] scores.

    First the inner assignment of every pair of members, then the outer one by what those collect
    (grouped queries: an element of S_r wr S_G). The result is the outer index [members], and the
    inner index [members, inner] of each member of y.
    """
    n, r = scores.shape[:2]
    if r == 1:
        return assign(scores[None, :, 0, :, 0])[0], np.zeros((n, 1), np.int64)
    pairs = scores.transpose(0, 2, 1, 3).reshape(n * n, r, r)
    inside = assign(pairs)
    collected = np.take_along_axis(pairs, inside[:, :, None], 2).sum((1, 2)).reshape(n, n)
    outer = assign(collected[None])[0]
    return outer, inside.reshape(n, n, r)[np.arange(n), outer]
