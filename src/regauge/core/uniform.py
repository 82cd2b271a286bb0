"""Uniform samples from a stream: permutations, and orthogonal matrices of the full space or of the
complement of the all-ones vector.
"""

from __future__ import annotations

import math

import numpy as np

from regauge.core.rng import Floats, Ints, Stream


def haar(size: int, stream: Stream) -> Floats:
    """Sample a Haar-distributed orthogonal matrix from size^2 normals of the stream, row by row."""
    q, r = np.linalg.qr(stream.normals(size * size).reshape(size, size))
    # Fix the signs of R's diagonal: plain QR is not Haar-distributed (Mezzadri 2007, sec. 4).
    return np.asarray(q * np.where(np.diag(r) < 0, -1.0, 1.0))


def ones_complement(size: int) -> Floats:
    """Return columns that span the complement of the all-ones vector: the Householder reflection of
    e_0 to ones/sqrt(n), without its first column.
    """
    v = np.full(size, 1 / math.sqrt(size))
    v[0] -= 1.0
    norm = v @ v
    reflection = np.eye(size) - (2 / norm) * np.outer(v, v) if norm else np.eye(size)
    return np.asarray(reflection[:, 1:])


def lift(r: Floats) -> Floats:
    """Extend an orthogonal matrix on the complement of the ones vector to one of full size that
    fixes the ones vector.
    """
    size = r.shape[0] + 1
    basis = ones_complement(size)
    return np.asarray(basis @ r @ basis.T + 1 / size)


def permutations(size: int, count: int, stream: Stream) -> Ints:
    """Sample `count` uniform permutations."""
    return np.stack([stream.permutation(size) for _ in range(count)])
