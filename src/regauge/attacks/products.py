"""Products of a layer's weights that do not depend on the basis inside the layer.

Q^T K, O V and W_out W_in are matrices on the stream, and a key conjugates them: T' = M T M^-1. They
determine M by the rows of permuted matrices and by the eigenbases of rotated ones.
"""

from __future__ import annotations

import numpy as np

from regauge.core.element import identity
from regauge.core.fit import assign, polar
from regauge.core.groups import Permutation
from regauge.core.progress import Progress
from regauge.core.rng import Floats, Ints
from regauge.matching.costs import Costs

Pairs = list[tuple[Floats, Floats]]


def layer_products(costs: Costs, space: str, progress: Progress | None = None) -> Pairs:
    """Return, for every inner space, the products of the weights on its two sides, [space, space],
    as pairs (locked, base).
    """
    pairs = []
    for i, inner in enumerate(costs.spec.spaces):
        if progress is not None:
            progress(i, len(costs.spec.spaces), "products of layers")
        if inner == space or costs.spec.children(inner):
            continue
        sides: dict[str, list[tuple[Floats, Floats]]] = {"plain": [], "dual": [], "bar": []}
        for y, x in costs.iter_block_pairs(
            inner, identity(costs.spec), lambda block: space in block.spaces
        ):
            leaf = y.dims[y.axes_of(inner)[0]]
            assert leaf is not None
            over = costs.spec.spaces[inner].over
            axes = (
                y.axes_of(over)[0] if over is not None and y.axes_of(over) else None,
                y.axes_of(inner)[0],
                y.axes_of(space)[0],
            )
            others = [d for d in y.dims if d is not None and d.space not in (inner, over, space)]
            if any(type(costs.spec.spaces[d.space].group) is not Permutation for d in others):
                continue
            pair = tuple(
                np.asarray(v.unfold(*axes), np.float64).sum(-1) for v in (y, x)
            )  # sum the queries that share a key
            sides["bar" if leaf.bar else "dual" if leaf.star else "plain"].append(pair)
        orthogonal = costs.spec.spaces[inner].group.is_orthogonal
        lefts, rights = sides["plain"], sides["dual"]
        factors = [(left, right) for left in lefts for right in rights]
        factors += [(factor, factor) for factor in sides["bar"]]
        if orthogonal:
            factors += [(factor, factor) for factor in (*lefts, *rights)]
        for left, right in factors:
            pairs.append(tuple(np.einsum("osi,osj->ij", left[i], right[i]) for i in (0, 1)))
    return pairs


def channel_signatures(t: Floats, points: int = 24) -> Floats:
    """Return per channel what does not depend on the order of the others: the diagonal entry and
    quantiles of the absolute row and column values.
    """
    n = len(t)
    quantiles = np.linspace(0, n - 2, min(points, n - 1)).round().astype(int)
    row_sizes = np.abs(t[~np.eye(n, dtype=bool)].reshape(n, n - 1))
    column_sizes = np.abs(t.T[~np.eye(n, dtype=bool)].reshape(n, n - 1))
    return np.concatenate(
        [
            np.diag(t)[:, None],
            np.sort(row_sizes, 1)[:, quantiles],
            np.sort(column_sizes, 1)[:, quantiles],
        ],
        axis=1,
    )


def fit_rotation(pairs: Pairs, rounds: int = 3) -> Floats:
    """Find R with T' = R T R^T for all pairs (T', T).

    A random mixture of the symmetric parts has one eigenbasis on each side. The signs between the
    two bases are the leading eigenvector of the products' agreement, which makes all pairs
    consistent.
    """
    generator = np.random.default_rng(0)
    best, best_error = np.eye(len(pairs[0][0])), np.inf
    normalized = [(y / size, x / size) for y, x in pairs if (size := float(np.linalg.norm(y))) > 0]
    for _ in range(rounds):
        weights = generator.standard_normal(len(normalized))
        y, x = (
            sum(w * (p[i] + p[i].T) for w, p in zip(weights, normalized, strict=True))
            for i in (0, 1)
        )
        (_, u), (_, v) = np.linalg.eigh(y), np.linalg.eigh(x)
        agreement = sum((u.T @ p[0] @ u) * (v.T @ p[1] @ v) for p in normalized)
        _, vectors = np.linalg.eigh(agreement + agreement.T)
        r = (u * np.where(vectors[:, -1] < 0, -1.0, 1.0)) @ v.T
        error = sum(float(((p[0] - r @ p[1] @ r.T) ** 2).sum()) for p in normalized)
        if error < best_error:
            best, best_error = r, error
    for _ in range(20):  # Procrustes on T' R = R T, for all pairs at once
        best = polar(np.asarray(sum(y @ best @ x.T + y.T @ best @ x for y, x in normalized)))
    return best


def fit_signs(pairs: Pairs, index: Ints) -> Floats:
    """Find signs s with T'_ij = s_i s_j T_ij for all pairs in a known order: the leading
    eigenvector of their agreement.
    """
    if not pairs:
        return np.ones(len(index))
    agreement = sum(y * x[index][:, index] / max(float((y * y).sum()), 1e-300) for y, x in pairs)
    _, vectors = np.linalg.eigh(agreement + np.asarray(agreement).T)
    return np.where(vectors[:, -1] < 0, -1.0, 1.0)


def fit_permutation(pairs: Pairs, index: Ints, rounds: int = 60, signed: bool = False) -> Ints:
    """Find the channel order with T' = P T P^T from a first guess that may be mostly wrong.

    This is Frank-Wolfe on the quadratic assignment problem; each step is one linear assignment
    (Vogelstein et al. 2015). The diagonal is left out: where it is large and almost constant it
    carries no information and would pin every channel to its position.

    Args:
        pairs: Matrices (T', T).
        index: The first guess.
        rounds: Maximum number of steps.
        signed: Whether signs are unknown, so that absolute values are compared.

    Returns:
        The best order, as indices.
    """
    normalized = [
        (_normalize_off_diagonal(y, signed), _normalize_off_diagonal(x, signed)) for y, x in pairs
    ]
    n = len(index)
    plan = np.eye(n)[index]  # (P x)[i] = x[index[i]]
    best, best_objective = index, -np.inf
    for _ in range(rounds):
        grad = np.asarray(sum(y @ plan @ x.T + y.T @ plan @ x for y, x in normalized))
        candidate = assign(grad[None])[0]
        step = np.eye(n)[candidate] - plan
        curvature = float(sum(((y @ step @ x.T) * step).sum() for y, x in normalized))
        gain = float((grad * step).sum())
        length = 1.0 if curvature >= 0 else min(1.0, -gain / (2 * curvature))
        plan = plan + length * step
        objective = float(sum((y * x[candidate][:, candidate]).sum() for y, x in normalized))
        if objective > best_objective:
            best, best_objective = candidate, objective
        if gain * length <= 1e-9:
            break
    return best


def _normalize_off_diagonal(t: Floats, signed: bool) -> Floats:
    """Return the off-diagonal part with unit norm; with unknown signs, the absolute values minus
    their mean.
    """
    t = np.abs(t) if signed else t
    off_diagonal = t - np.diag(np.diag(t))
    off_diagonal = off_diagonal - off_diagonal.mean() if signed else off_diagonal
    return off_diagonal / max(float(np.linalg.norm(off_diagonal)), 1e-300)
