"""Products: what of a layer does not depend on the basis inside it. Q^T K, O V and W_out W_in are
matrices on the stream, and a key conjugates them: T' = M T M^-1. So they tell M, by the rows of
permuted matrices and by the eigenbases of turned ones.
"""

from __future__ import annotations

import numpy as np

from regauge.core.element import identity
from regauge.core.fit import assign, polar
from regauge.core.groups import Permutation
from regauge.core.rng import Floats, Ints
from regauge.matching.costs import Costs

Pairs = list[tuple[Floats, Floats]]


def products(costs: Costs, space: str) -> Pairs:
    """For every inner space the products of what is on both sides of it, [space, space]: for the
    locked model and for the base.
    """
    out = []
    for inner in costs.spec.spaces:
        if inner == space or costs.spec.children(inner):
            continue
        sides: dict[str, list[tuple[Floats, Floats]]] = {"plain": [], "dual": [], "bar": []}
        for y, x in costs.each(inner, identity(costs.spec), lambda block: space in block.spaces):
            leaf = y.dims[y.places(inner)[0]]
            assert leaf is not None
            over = costs.spec.spaces[inner].over
            where = (
                y.places(over)[0] if over is not None and y.places(over) else None,
                y.places(inner)[0],
                y.places(space)[0],
            )
            others = [d for d in y.dims if d is not None and d.space not in (inner, over, space)]
            if any(type(costs.spec.spaces[d.space].group) is not Permutation for d in others):
                continue
            pair = tuple(
                np.asarray(v.unfolded(*where), np.float64).sum(-1) for v in (y, x)
            )  # queries that share a key are summed
            sides["bar" if leaf.bar else "dual" if leaf.star else "plain"].append(pair)
        orthogonal = costs.spec.spaces[inner].group.is_orthogonal
        lefts, rights = sides["plain"], sides["dual"]
        chosen = [(left, right) for left in lefts for right in rights]
        chosen += [(one, one) for one in sides["bar"]]
        if orthogonal:
            chosen += [(one, one) for one in (*lefts, *rights)]
        for left, right in chosen:
            out.append(tuple(np.einsum("osi,osj->ij", left[i], right[i]) for i in (0, 1)))
    return out


def signature(t: Floats, points: int = 24) -> Floats:
    """For each channel what of its row and column does not depend on the order of the others: the
    diagonal, and quantiles of sizes.
    """
    n = len(t)
    at = np.linspace(0, n - 2, min(points, n - 1)).round().astype(int)
    rest = np.abs(t[~np.eye(n, dtype=bool)].reshape(n, n - 1))
    back = np.abs(t.T[~np.eye(n, dtype=bool)].reshape(n, n - 1))
    return np.concatenate(
        [np.diag(t)[:, None], np.sort(rest, 1)[:, at], np.sort(back, 1)[:, at]], axis=1
    )


def eigenbasis(pairs: Pairs, rounds: int = 3) -> Floats:
    """R with T' = R T R^T for all pairs (T', T). A mixture of their symmetric parts has one
    eigenbasis on each side; the signs between the two are those that make all products agree: the
    leading eigenvector of what the two have in common.
    """
    mix = np.random.default_rng(0)
    best, least = np.eye(len(pairs[0][0])), np.inf
    unit = [(y / size, x / size) for y, x in pairs if (size := float(np.linalg.norm(y))) > 0]
    for _ in range(rounds):
        weights = mix.standard_normal(len(unit))
        y, x = (
            sum(w * (p[i] + p[i].T) for w, p in zip(weights, unit, strict=True)) for i in (0, 1)
        )
        (_, u), (_, v) = np.linalg.eigh(y), np.linalg.eigh(x)
        agree = sum((u.T @ p[0] @ u) * (v.T @ p[1] @ v) for p in unit)
        _, vectors = np.linalg.eigh(agree + agree.T)
        r = (u * np.where(vectors[:, -1] < 0, -1.0, 1.0)) @ v.T
        left = sum(float(((p[0] - r @ p[1] @ r.T) ** 2).sum()) for p in unit)
        if left < least:
            best, least = r, left
    for _ in range(20):  # T' R = R T for all at once: Procrustes on what is known so far
        best = polar(np.asarray(sum(y @ best @ x.T + y.T @ best @ x for y, x in unit)))
    return best


def signs(told: Pairs, index: Ints) -> Floats:
    """Signs s with T'_ij = s_i s_j T_ij for all products, once their order is known: the leading
    eigenvector of what the two have in common.
    """
    if not told:
        return np.ones(len(index))
    agree = sum(y * x[index][:, index] / max(float((y * y).sum()), 1e-300) for y, x in told)
    _, vectors = np.linalg.eigh(agree + np.asarray(agree).T)
    return np.where(vectors[:, -1] < 0, -1.0, 1.0)


def rearranged(told: Pairs, index: Ints, rounds: int = 60, signed: bool = False) -> Ints:
    """The order of channels that makes permuted matrices agree, T' = P T P^T, from a first one that
    may be mostly wrong (Frank-Wolfe on the quadratic assignment, each step one linear assignment;
    Vogelstein et al. 2015). The diagonal is left out: where it is large and the same for all, it
    says nothing, and holds every channel where it is.
    """
    unit = [(_off(y, signed), _off(x, signed)) for y, x in told]
    n = len(index)
    at = np.eye(n)[index]  # (P x)[i] = x[index[i]]
    best, most = index, -np.inf
    for _ in range(rounds):
        slope = np.asarray(sum(y @ at @ x.T + y.T @ at @ x for y, x in unit))
        found = assign(slope[None])[0]
        step = np.eye(n)[found] - at
        curve = float(sum(((y @ step @ x.T) * step).sum() for y, x in unit))
        gain = float((slope * step).sum())
        length = 1.0 if curve >= 0 else min(1.0, -gain / (2 * curve))
        at = at + length * step
        worth = float(sum((y * x[found][:, found]).sum() for y, x in unit))
        if worth > most:
            best, most = found, worth
        if gain * length <= 1e-9:
            break
    return best


def _off(t: Floats, signed: bool) -> Floats:
    """What stands beside the diagonal, as one unit; where signs are unknown, sizes against their
    mean.
    """
    t = np.abs(t) if signed else t
    rest = t - np.diag(np.diag(t))
    rest = rest - rest.mean() if signed else rest
    return rest / max(float(np.linalg.norm(rest)), 1e-300)
