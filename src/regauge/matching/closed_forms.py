"""Closed forms of matching, as pure functions of numpy arrays.

Sources: Zhang et al., "Beyond the permutation symmetry of Transformers" (arXiv:2502.00264,
"rotation symmetry"), Theorem 4.1 and its rescaling; the others are derived in the project's theory
notes. Everywhere y is the model that stays and x the model that moves; the first axis of a stack
counts its members. The fits of a single group (Procrustes, assignment, balance, phases) are in
`core/fit.py`.
"""

from __future__ import annotations

import numpy as np

from regauge.core.fit import assign, polar
from regauge.core.groups import Rotary
from regauge.core.members import planes
from regauge.core.rng import Floats, Ints


def procrustes(q1: Floats, k1: Floats, q2: Floats, k2: Floats) -> tuple[Floats, float]:
    """Return the orthogonal R that brings (q2, k2) closest to (q1, k1), and the squared distance
    left.

    M = q1 q2^T + k1 k2^T = U S V^T, R = U V^T; the squared distance is |q1|^2 + |q2|^2 + |k1|^2 +
    |k2|^2 - 2 |M|_* (Theorem 4.1 of rotation symmetry; R may be a reflection).
    Rows are a head's coordinates; the head's slice of the bias is one more column.
    """
    m = q1 @ q2.T + k1 @ k2.T
    remaining = sum(float((x * x).sum()) for x in (q1, k1, q2, k2)) - 2 * float(
        np.linalg.svd(m, compute_uv=False).sum()
    )
    return polar(m), max(remaining, 0.0)


def solve_rescaling(q1: Floats, k1: Floats, q2: Floats, k2: Floats) -> float:
    """Return the factor a that brings (a q2, k2 / a) closest to (q1, k1).

    It is the best real root of

        |q2|^2 a^4 - <q1, q2> a^3 + <k1, k2> a - |k2|^2 = 0        (after the rotation)

    or 1 if no root is better.
    """
    roots = np.roots([(q2 * q2).sum(), -(q1 * q2).sum(), 0.0, (k1 * k2).sum(), -(k2 * k2).sum()])
    real = [float(r.real) for r in roots if abs(r.imag) <= 1e-9 * abs(r) and abs(r) > 1e-12]
    return min(
        [1.0, *real], key=lambda a: float(((a * q2 - q1) ** 2).sum() + ((k2 / a - k1) ** 2).sum())
    )


def product_cosines(y: tuple[Floats, Floats], x: tuple[Floats, Floats]) -> Floats:
    """Return the cosines of the products P_i = Q_i^T K_i and P'_j = Q'_j^T K'_j of two stacks.

    They do not depend on the basis inside. <P_i, P'_j> = sum of (Q_i Q'_j^T) * (K_i K'_j^T), so no
    product is multiplied out. A stack is [members, inner, coordinates, features]; `inner` (the
    queries of one key-value head) may be 1 on one side.

    Returns:
        Cosines [members of y, inner of y, members of x, inner of x].
    """

    def inner(first: tuple[Floats, Floats], second: tuple[Floats, Floats]) -> Floats:
        parts = [
            np.einsum("iraf,jsbf->irjsab", u, v, optimize=True)
            for u, v in zip(first, second, strict=True)
        ]
        return np.asarray((parts[0] * parts[1]).sum((4, 5)))

    return _cosine(inner(y, x), _squared_norms(y), _squared_norms(x))


def _squared_norms(stack: tuple[Floats, Floats]) -> Floats:
    """Return |P_i|^2 by [member, inner]."""
    q, k = stack
    gram = [np.einsum("iraf,irbf->irab", u, u, optimize=True) for u in (q, k)]
    return np.asarray((gram[0] * gram[1]).sum((2, 3)))


def rotary_cosines(y: tuple[Floats, Floats], x: tuple[Floats, Floats], group: Rotary) -> Floats:
    """Return the cosines of `product_cosines` under rotary positions.

    There only the products of one 2-plane are independent of the basis: the sum over planes of
    Re(<q_i, q'_j> conj <k_i, k'_j>), with q and k as complex numbers.
    """
    first, second = planes(y[0].shape[2], group.layout)
    (q1, k1), (q2, k2) = (
        [u[:, :, first] + 1j * u[:, :, second] for u in stack] for stack in (y, x)
    )
    parts = [
        np.einsum("irmf,jsmf->irjsm", u, v.conj(), optimize=True) for u, v in ((q1, q2), (k1, k2))
    ]
    squared = [
        np.asarray(((np.abs(q) ** 2).sum(3) * (np.abs(k) ** 2).sum(3)).sum(2))
        for q, k in ((q1, k1), (q2, k2))
    ]
    return _cosine(np.asarray((parts[0] * parts[1].conj()).real.sum(4)), *squared)


def row_cosines(y: Floats, x: Floats) -> Floats:
    """Return the cosines of the rows of two stacks [members, features], shaped as the others."""
    return _cosine(
        np.asarray(np.einsum("if,jf->ij", y, x))[:, None, :, None],
        (y * y).sum(1)[:, None],
        (x * x).sum(1)[:, None],
    )


def _cosine(inner: Floats, y: Floats, x: Floats) -> Floats:
    """Divide inner products by the norms. The cosine with a zero vector is 0."""
    squared = np.asarray(y, np.float64)[:, :, None, None] * x[None, None]
    return np.asarray(inner / np.sqrt(np.where(squared > 0, squared, 1.0)))


def assign_two_level(scores: Floats) -> tuple[Ints, Ints]:
    """Return the best assignment of members, each with the best assignment of the indices inside
    it.

    First the inner assignment of every pair of members, then the outer one by the scores that those
    reach (grouped queries: an element of S_r wr S_G).

    Args:
        scores: [members, inner, members, inner].

    Returns:
        The outer index [members], and the inner index [members, inner] of each member of y.
    """
    n, r = scores.shape[:2]
    if r == 1:
        return assign(scores[None, :, 0, :, 0])[0], np.zeros((n, 1), np.int64)
    pairs = scores.transpose(0, 2, 1, 3).reshape(n * n, r, r)
    inner = assign(pairs)
    pair_scores = np.take_along_axis(pairs, inner[:, :, None], 2).sum((1, 2)).reshape(n, n)
    outer = assign(pair_scores[None])[0]
    return outer, inner.reshape(n, n, r)[np.arange(n), outer]


def assign_factors(scores: Floats) -> tuple[Ints, Ints]:
    """Return the two permutations of a product that reach the best total score together.

    Unlike `assign_two_level`, all members share one inner permutation. Alternate from the inner
    assignment that each pair of members prefers on its own, and keep the best end point: a single
    start is misled when two members resemble each other.

    Args:
        scores: [outer, inner, outer, inner], the first two axes of y and the last two of x.

    Returns:
        The outer and the inner index.
    """
    n, r = scores.shape[:2]
    starts = assign(scores.transpose(0, 2, 1, 3).reshape(n * n, r, r))
    best: tuple[float, Ints, Ints] | None = None
    for inner in np.unique(starts, axis=0):
        total = -np.inf
        while True:
            by_outer = scores[:, np.arange(r), :, inner].sum(0)
            outer = assign(by_outer[None])[0]
            by_inner = scores[np.arange(n), :, outer, :].sum(0)
            inner = assign(by_inner[None])[0]
            reached = float(by_inner[np.arange(r), inner].sum())
            if reached <= total:
                break
            total = reached
        if best is None or total > best[0]:
            best = total, outer, inner
    assert best is not None
    return best[1], best[2]
