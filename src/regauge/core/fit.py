"""Fits of group members: the member M that brings x nearest to y.

Least squares over up to three sides: `plain` pairs (y against M x), `dual` pairs (y against M^-T x)
and `bar` pairs (y against the permutation of M alone). A pair (y, x) is two stacks [count, size,
features]. Callers use `Group.fit` in groups.py; this module holds what the groups share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from regauge.core.assignment import best_assignment
from regauge.core.members import MAX_STRETCH, Complexes, Layout, Monomial, planes, stretch_ratio
from regauge.core.rng import Floats, Ints

Pair = tuple[Floats, Floats]
PRECONDITION_SIZE = 512  # from this size on, preconditioning makes an assignment faster
SINGLE_PRECISION_SIZE = 512  # from this size on, cosines are computed in float32 first
MAX_STRANGER = 0.25  # the mean score of an assignment that pairs no copies
_ROWS, _FEATURES = 2048, 1024  # of the blocks that cosines are computed in
SINGLE_PRECISION_RANGE = 1e-12, 1e12  # of norms whose squares are normal numbers in float32


class SummedPair(NamedTuple):
    """A pair that represents many: y is the sum of their y x^T, x the identity."""

    y: Floats
    x: Floats


def make_summed_pair(total: Floats) -> SummedPair:
    """Return the pair that represents a sum of y x^T."""
    return SummedPair(total, np.broadcast_to(np.eye(total.shape[1]), total.shape))


def first_target(*pairs: Pair | None) -> Floats:
    """Return the y of the first pair that is not None."""
    return next(p[0] for p in pairs if p is not None)


def correlation(*pairs: Pair | None, total: Floats | None = None) -> Floats:
    """Return C, the sum of y x^T over pairs: the best orthogonal M maximizes <M, C>.

    A `total` is added to in place.
    """
    for pair in pairs:
        if pair is not None:
            product = pair.y if isinstance(pair, SummedPair) else pair[0] @ pair[1].swapaxes(1, 2)
            total = (
                np.array(product, np.float64)
                if total is None
                else np.add(total, product, out=total)
            )
    if total is None:
        raise ValueError("correlation needs at least one pair")
    return total


def polar(c: Floats) -> Floats:
    """Return the orthogonal matrix nearest to each c: U V^T of its singular value decomposition
    (Procrustes).
    """
    u, _, vt = np.linalg.svd(c)
    return np.asarray(u @ vt)


def assign(scores: Floats) -> Ints:
    """Return, for each matrix of scores, the permutation with the largest total score."""
    return np.stack([_assign_one(s) for s in scores]).astype(np.int64)


def _assign_one(score: Floats, overwrite: bool = False) -> Ints:
    """Return the best permutation; the scores may be overwritten, to save memory."""
    best = np.asarray(score.argmax(1))
    if len(np.unique(best)) == len(best):  # the rows' maxima are a permutation already
        return best
    out = score if overwrite else np.empty(score.shape, np.float64)
    if len(score) >= PRECONDITION_SIZE:
        return best_assignment(_precondition_cost(score, out))
    return best_assignment(np.negative(score, out=out))


def _precondition_cost(score: Floats, out: Floats, rounds: int = 8) -> Floats:
    """Return the costs -score, shifted by a number for each row and each column, in `out`.

    The shifts do not change which assignment is best. A few rounds of Sinkhorn's iteration bring
    them near the dual optimum, which cuts the time of the exact search to a third.
    """
    kernel = score.astype(np.float32)
    row_max, temperature = kernel.max(1), np.float32(0.08) * kernel[::8].std()
    if not (np.isfinite(temperature) and temperature > 0):
        return np.negative(score, out=out)
    kernel -= row_max[:, None]
    kernel /= temperature
    # Clipped, because arithmetic on subnormal numbers is slow.
    np.exp(np.maximum(kernel, np.float32(-60), out=kernel), out=kernel)
    rows = columns = np.asarray(np.ones(len(kernel), np.float32))
    for _ in range(rounds):
        rows = np.asarray(1 / (kernel @ columns))
        columns = np.asarray(1 / (rows @ kernel))
    row_shift = row_max - temperature * np.log(rows)
    column_shift = -temperature * np.log(columns)
    del kernel
    if not (np.isfinite(row_shift).all() and np.isfinite(column_shift).all()):
        return np.negative(score, out=out)
    cost: Floats = np.subtract(row_shift.astype(np.float64)[:, None], score, out=out)
    cost += column_shift
    return cost


def fit_signed(plain: Pair | None, dual: Pair | None, bar: Pair | None) -> Monomial:
    """Fit a permutation with signs."""
    c = (
        correlation(plain, dual)
        if plain is not None or dual is not None
        else np.zeros_like(correlation(bar))
    )
    index = assign(np.abs(c) + (0 if bar is None else correlation(bar)))
    assigned = np.take_along_axis(c, index[:, :, None], 2)[:, :, 0]
    return Monomial(index, np.where(assigned < 0, -1.0, 1.0))


def fit_scaled(plain: Pair | None, dual: Pair | None, bar: Pair | None, positive: bool) -> Monomial:
    """Fit a permutation with scales.

    Cosines, which do not depend on scales, determine the permutation. The scales then balance the
    two sides; with one side only, they are least squares.
    """
    index = _assign_by_cosines(plain, dual, bar, positive)
    (yx, yy, xx), (yx_dual, yy_dual, xx_dual) = (
        _inner_products(plain, index),
        _inner_products(dual, index),
    )
    if plain is not None and dual is not None:
        scale = (_safe_ratio(yy, xx) * _safe_ratio(xx_dual, yy_dual)) ** 0.25
    elif plain is not None:
        scale = _safe_ratio(np.abs(yx), xx)
    else:
        scale = _safe_ratio(xx_dual, np.abs(yx_dual))
    sign = np.where((yx if plain is not None else yx_dual) < 0, -1.0, 1.0)
    scale = _clip_factors(scale)
    return Monomial(index, scale if positive else scale * sign)


def _assign_by_cosines(
    plain: Pair | None, dual: Pair | None, bar: Pair | None, positive: bool
) -> Ints:
    """Return the permutation with the largest total cosine.

    Cosines of large spaces are computed in float32 first. Where every row's largest is certain
    despite the rounding, and these are a permutation, it is the one that float64 gives. Members of
    strangers, given in float32, have no such certainty and hardly a counterpart: for them it is an
    optimum for the rounded cosines, and its mean score is less than 0.001 below the best (twice
    the bound on the rounding). Everything else is decided in float64.
    """
    pairs = [p for p in (plain, dual, bar) if p is not None]
    features = max(p[0].shape[2] for p in pairs)
    if pairs[0][0].shape[1] >= SINGLE_PRECISION_SIZE and _fit_single_precision(pairs):
        # Rounding of a product of unit vectors and of their two norms, in any order of summation
        # within a block, and of the scores. A score is a sum or a product of at most three cosines.
        terms = min(features, _FEATURES) + features // _FEATURES
        error = 3 * (2 * terms + 16) * 2.0**-24
        rows = slice(0, None, max(1, pairs[0][0].shape[1] // 64))
        for part in (rows, slice(None)):  # a few rows show whether there is hope
            scores = _cosine_scores(plain, dual, bar, positive, np.float32, part)
            best = scores.argmax(2)
            top = np.take_along_axis(scores, best[:, :, None], 2)
            np.put_along_axis(scores, best[:, :, None], -np.inf, 2)
            if not bool((top[:, :, 0] - scores.max(2) > 2 * error).all()):
                break
            if any(len(np.unique(one)) < len(one) for one in best):
                break
        else:
            return np.asarray(best, np.int64)
        del scores
        if all(x.dtype == np.float32 for pair in pairs for x in pair):
            scores = _cosine_scores(plain, dual, bar, positive, np.float32, slice(None))
            index = assign(scores)
            if np.take_along_axis(scores, index[:, :, None], 2).mean() < MAX_STRANGER:
                return index
            del scores
    exact = _cosine_scores(plain, dual, bar, positive, np.float64, slice(None))
    return np.stack([_assign_one(one, overwrite=True) for one in exact]).astype(np.int64)


def _fit_single_precision(pairs: Sequence[Pair]) -> bool:
    """Return whether squares of rows neither vanish nor overflow in float32, as those of neurons
    do that weight decay has all but erased.
    """
    low, high = SINGLE_PRECISION_RANGE
    for x in (x for pair in pairs for x in pair):
        squared = np.einsum("cif,cif->ci", x, x, dtype=np.float64)
        if not bool(((squared > low**2) & (squared < high**2)).all()):
            return False
    return True


def _cosine_scores(
    plain: Pair | None,
    dual: Pair | None,
    bar: Pair | None,
    positive: bool,
    dtype: type[np.floating[Any]],
    rows: slice,
) -> Floats:
    """Return the scores that an assignment by cosines maximizes, of some rows.

    They are computed a few rows at a time, so that memory holds one matrix of scores.
    """
    count, size = next(p for p in (plain, dual, bar) if p is not None)[0].shape[:2]
    start, stop, step = rows.indices(size)
    out = np.empty((count, len(range(start, stop, step)), size), dtype)
    for first in range(0, out.shape[1], _ROWS):
        part = slice(start + first * step, min(stop, start + (first + _ROWS) * step), step)
        out[:, first : first + _ROWS] = _score_rows(plain, dual, bar, positive, dtype, part)
    return out


def _score_rows(
    plain: Pair | None,
    dual: Pair | None,
    bar: Pair | None,
    positive: bool,
    dtype: type[np.floating[Any]],
    rows: slice,
) -> Floats:
    sides = [_cosines(p, dtype, rows) for p in (plain, dual) if p is not None]
    if positive or not sides:
        scores = np.asarray(sum(sides))
    else:  # a sign flips both sides at once, so only the product of their cosines is invariant
        scores = np.abs(sides[0]) if len(sides) == 1 else sides[0] * sides[1]
    return scores if bar is None else np.asarray(scores + _cosines(bar, dtype, rows))


def fit_planes(plain: Pair | None, dual: Pair | None, layout: Layout, unit: bool) -> Complexes:
    """Fit one complex factor per plane.

    Its phase is that of the summed products. Its modulus balances the two sides; with one side
    only, it is least squares.
    """

    def as_complex(pair: Pair | None) -> tuple[Complexes, Complexes] | None:
        if pair is None:
            return None
        a, b = planes(pair[0].shape[1], layout)
        y, x = (np.asarray(v[:, a] + 1j * v[:, b]) for v in pair)
        return y, x

    p, d = as_complex(plain), as_complex(dual)
    z = sum(
        (_inner(y, x) for y, x in (s for s in (p, d) if s is not None)), np.zeros((), np.complex128)
    )
    modulus = np.ones(z.shape)
    if not unit:
        if p is not None and d is not None:
            (q1, q2), (k1, k2) = p, d
            c1, c2 = (
                _safe_ratio(_norm2(k1), _norm2(q1)) ** 0.25,
                _safe_ratio(_norm2(k2), _norm2(q2)) ** 0.25,
            )
            z = (c1 * c2) * _inner(q1, q2) + _inner(k1, k2) / (c1 * c2)
            modulus = c2 / c1
        elif p is not None:
            modulus = _safe_ratio(np.abs(z), _norm2(p[1]))
        elif d is not None:
            modulus = _safe_ratio(_norm2(d[1]), np.abs(z))
    phase = np.where(np.abs(z) > 0, z / np.where(np.abs(z) > 0, np.abs(z), 1), 1)
    return np.asarray(_clip_factors(modulus) * phase, np.complex128)


def fit_linear(plain: Pair, dual: Pair | None) -> Floats:
    """Fit an invertible matrix: balance both sides, then Procrustes. With one side only, least
    squares. Singular values beyond the limit are clipped.
    """
    if dual is None:
        best = np.stack([y @ np.linalg.pinv(x) for y, x in zip(*plain, strict=True)])
    else:
        best = np.stack([_fit_balanced(*sides) for sides in zip(*plain, *dual, strict=True)])
    u, s, vt = np.linalg.svd(best)
    return np.asarray((u * _clip_factors(s)[:, None, :]) @ vt)


def _fit_balanced(q1: Floats, q2: Floats, k1: Floats, k2: Floats) -> Floats:
    """Fit one invertible matrix to both sides. If a side is rank-deficient, and so has no balanced
    form, the other one determines the fit, or else the best rotation, which is safe.
    """
    b1, b2 = _balance_matrix(q1, k1), _balance_matrix(q2, k2)
    if b1 is None or b2 is None:
        if _has_full_rank(k1) and _has_full_rank(k2):
            return np.asarray(np.linalg.pinv(k1 @ np.linalg.pinv(k2)).T)
        if _has_full_rank(q1) and _has_full_rank(q2):
            return np.asarray(q1 @ np.linalg.pinv(q2))
        return polar(q1 @ q2.T + k1 @ k2.T)
    i1, i2 = np.linalg.inv(b1), np.linalg.inv(b2)
    rotation = polar((b1 @ q1) @ (b2 @ q2).T + (i1.T @ k1) @ (i2.T @ k2).T)
    return np.asarray(i1 @ rotation @ b2)


def _has_full_rank(x: Floats) -> bool:
    s = np.linalg.svd(x, compute_uv=False)
    return x.shape[0] <= x.shape[1] and bool(s[-1] > 1e-8 * s[0])


def _balance_matrix(q: Floats, k: Floats) -> Floats | None:
    """Return B with (BQ)(BQ)^T = (B^-T K)(B^-T K)^T, the point of least norm on the orbit; None if
    a side is rank-deficient.
    """
    rq, rk = (np.asarray(np.linalg.qr(side.T, mode="r")) for side in (q, k))
    if rq.shape[0] < rq.shape[1] or rk.shape[0] < rk.shape[1]:
        return None
    u, s, _ = np.linalg.svd(rq @ rk.T)
    if s[-1] <= 1e-10 * s[0]:
        return None
    return np.asarray(np.sqrt(s)[:, None] * (u.T @ np.linalg.inv(rq).T))


def _clip_factors(factors: Floats) -> Floats:
    """Clip the factors of a row around their median if they exceed the limit."""
    half = math.sqrt(MAX_STRETCH)
    middle = np.clip(np.median(factors, axis=1, keepdims=True), 1 / half, half)
    return np.where(
        stretch_ratio(factors)[:, None] <= MAX_STRETCH,
        factors,
        np.clip(factors, middle / half, middle * half),
    )


def _cosines(pair: Pair, dtype: type[np.floating[Any]], rows: slice) -> Floats:
    """Return the cosines of some rows of y with all rows of x, summed over blocks of features."""
    y, x = pair[0][:, rows], pair[1]
    norms = [_row_norms(v).astype(dtype)[:, :, None] for v in (y, x)]
    total: Floats | None = None
    for start in range(0, y.shape[2], _FEATURES):
        part = slice(start, start + _FEATURES)
        u, v = (
            np.divide(v[:, :, part], norm, dtype=dtype)
            for v, norm in zip((y, x), norms, strict=True)
        )
        product = u @ v.swapaxes(1, 2)
        total = product if total is None else np.add(total, product, out=total)
    assert total is not None
    return total


def _row_norms(x: Floats) -> Floats:
    """Return the norm of every row in float64, and 1 for rows of zeros."""
    norm = np.sqrt(np.einsum("cif,cif->ci", x, x, dtype=np.float64))
    return np.where(norm > 0, norm, 1.0)


def _inner_products(pair: Pair | None, index: Ints) -> tuple[Floats, Floats, Floats]:
    """Return <y, x>, <y, y> and <x, x> of every coordinate of y and its assigned one of x."""
    if pair is None:
        return np.ones(index.shape), np.ones(index.shape), np.ones(index.shape)
    y, x = pair[0], np.take_along_axis(pair[1], index[:, :, None], 1)
    products = (
        np.einsum("cif,cif->ci", u, v, dtype=np.float64) for u, v in ((y, x), (y, y), (x, x))
    )
    yx, yy, xx = products
    return yx, yy, xx


def _safe_ratio(a: Floats, b: Floats) -> Floats:
    """Return a / b, and 1 where that is not finite and positive."""
    with np.errstate(divide="ignore", invalid="ignore"):
        r = np.asarray(a / b)
    return np.where(np.isfinite(r) & (r > 0), r, 1.0)


def _inner(y: Complexes, x: Complexes) -> Complexes:
    return np.asarray((y * x.conj()).sum(2))


def _norm2(x: Complexes) -> Floats:
    return np.asarray((np.abs(x) ** 2).sum(2))
