"""Fingerprints: what no element changes, made short, for lineage and for finding the same model
twice.

Norms are folded first where they can be, so that folding changes nothing either. Then
`regauge.invariants` gives numbers of each tensor or pair of tensors that every element leaves
alone: a moved or locked model has those of the plain one. That is what a lock does not hide.

The digest is stable to rounding in this way. Each invariant becomes two numbers, its root mean
square and its mean; their vector is scaled to length one and projected onto eight directions of
signs, which SHA-256 of their names gives, so that rounding errors of many tensors average out. Each
of the eight is rounded to a grid, of 1e-4 for models in F32 or F64 and of 3e-3 in half precision,
and SHA-256 of those is the digest. A number may still lie at the border of its grid: so there are
two digests, by two grids that are half a step apart. Two models are taken for the same if either is
the same.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from regauge.checkpoints.reader import LazyState
from regauge.core.action import State
from regauge.core.canonical import canonical_json
from regauge.core.fold import fold_lazily
from regauge.core.rng import Floats
from regauge.core.spec import Spec
from regauge.errors import CheckpointError
from regauge.matching.invariants import find_nonfinite, invariants

VERSION = 1
_DIRECTIONS = 8
_GRIDS = {2: 3e-3, 4: 1e-4, 8: 1e-4}  # by the bytes of a number
_NUMBER = re.compile(r"(?<=\.)\d+\b")


@dataclass(frozen=True)
class Fingerprint:
    """Two digests, and for each kind of invariant (its name without the layer) how many there are,
    and their root mean squares: least, mean, most.
    """

    digests: tuple[str, str]
    rows: tuple[tuple[str, int, float, float, float], ...]

    def is_same(self, other: Fingerprint) -> bool:
        """Are the two models the same but for an element and rounding? Both must be stored in the
        same precision.
        """
        return any(a == b for a, b in zip(self.digests, other.digests, strict=True))

    def to_dict(self) -> dict[str, Any]:
        names = ("name", "count", "least", "mean", "most")
        return {
            "version": VERSION,
            "digests": list(self.digests),
            "invariants": [dict(zip(names, row, strict=True)) for row in self.rows],
        }


def fingerprint(spec: Spec, state: State) -> Fingerprint:
    """The fingerprint of a model. It reads all of it, and takes singular values: seconds to
    minutes.
    """
    width = min((t.dtype.itemsize for t in state.values() if t.dtype.is_floating_point), default=4)
    plain = state
    if spec.norms or spec.scales:
        spec, folded = fold_lazily(spec, state, rounded=False)
        state = LazyState(folded, lambda name: folded[name]())
    try:
        with np.errstate(invalid="ignore", over="ignore"):
            found = {
                name: np.abs(np.asarray(values, np.float64)).reshape(-1)
                for name, values in sorted(invariants(spec, state).items())
            }
        known = all(np.isfinite(values).all() for values in found.values())
    except np.linalg.LinAlgError:
        known = False
    if not known:
        raise CheckpointError(
            f'the model has no fingerprint: "{find_nonfinite(plain)}" holds NaN or Inf',
            hint="is it the right file?",
        )
    sizes = {name: float(np.sqrt((values**2).mean())) for name, values in found.items()}
    numbers = {
        **{f"{n} rms": v for n, v in sizes.items()},
        **{f"{n} mean": float(values.mean()) for n, values in found.items()},
    }
    return Fingerprint(
        _digests(
            numbers, {name: values.size for name, values in found.items()}, _GRIDS.get(width, 3e-3)
        ),
        tuple(_summarize(sizes)),
    )


def _digests(numbers: dict[str, float], counts: dict[str, int], grid: float) -> tuple[str, str]:
    values: Floats = np.array(list(numbers.values()))
    values = values / max(float(np.linalg.norm(values)), 1e-300)
    signs = np.array(
        [
            [
                1.0 if (hashlib.sha256(name.encode()).digest()[0] >> j) & 1 else -1.0
                for name in numbers
            ]
            for j in range(_DIRECTIONS)
        ]
    )
    projected = signs @ values
    out = [np.floor(projected / grid + shift).astype(np.int64).tolist() for shift in (0.0, 0.5)]
    first, second = (
        hashlib.sha256(canonical_json([VERSION, counts, grid, shift, cells])).hexdigest()[:16]
        for shift, cells in enumerate(out)
    )
    return first, second


def _summarize(sizes: dict[str, float]) -> list[tuple[str, int, float, float, float]]:
    kinds: dict[str, list[float]] = {}
    for name, size in sizes.items():
        kinds.setdefault(_NUMBER.sub("*", name), []).append(size)
    return [
        (kind, len(found), min(found), float(np.mean(found)), max(found))
        for kind, found in kinds.items()
    ]
