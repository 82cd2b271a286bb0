"""Fingerprints: short digests of a model's invariants, to trace lineage and to find copies.

Norms are folded first where possible, so folding does not change the fingerprint either. Then
`regauge.invariants` gives numbers of each tensor or pair of tensors that are the same under every
element: a transformed or locked model has those of the plain one. A lock does not hide them.

The digest is stable to rounding. Each invariant becomes two numbers, its root mean square and its
mean. Their vector is scaled to length one and projected onto eight directions of signs, which
SHA-256 of their names gives, so that the rounding errors of many tensors average out. Each
projection is rounded to a grid (of 1e-4 for models in F32 or F64, of 3e-3 in half precision), and
SHA-256 of the result is the digest. A number may still lie at the border of its grid cell, so there
are two digests, by two grids half a step apart. Two models count as the same if either is equal.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from regauge.checkpoints.reader import LazyState
from regauge.core.action import State
from regauge.core.canonical import canonical_json
from regauge.core.fold import fold_lazily
from regauge.core.rng import Floats
from regauge.core.spec import Spec
from regauge.core.threads import within_threads
from regauge.errors import CheckpointError
from regauge.matching.invariants import find_nonfinite, state_invariants
from regauge.models.sources import require_fit, resolve
from regauge.results.findings import Results, Table
from regauge.results.views import ResultView

if TYPE_CHECKING:
    from regauge.models.discovery import Discovery
    from regauge.models.sources import Source

VERSION = 1
_DIRECTIONS = 8
_GRIDS = {2: 3e-3, 4: 1e-4, 8: 1e-4}  # by the bytes of a value
_NUMBER = re.compile(r"(?<=\.)\d+\b")


@dataclass(frozen=True)
class Fingerprint(ResultView):
    """The fingerprint of a model.

    Attributes:
        digests: by two grids half a step apart.
        rows: for each kind of invariant (its name without the layer) the count, and the smallest,
            mean and largest root mean square.
        family: the family of the model.
        discoveries: how its spec was discovered, if no family describes the model.
    """

    digests: tuple[str, str]
    rows: tuple[tuple[str, int, float, float, float], ...]
    family: str = ""
    discoveries: tuple[Discovery, ...] = ()

    def is_same(self, other: Fingerprint) -> bool:
        """Return whether two models are the same up to an element and rounding.

        Both must be stored in the same precision.
        """
        return any(a == b for a, b in zip(self.digests, other.digests, strict=True))

    def to_dict(self) -> dict[str, Any]:
        """Return the fingerprint as JSON values."""
        names = ("name", "count", "least", "mean", "most")
        return {
            "family": self.family,
            "version": VERSION,
            "digests": list(self.digests),
            "invariants": [dict(zip(names, row, strict=True)) for row in self.rows],
        }

    @property
    def results(self) -> Results:
        """The digests as facts, and the table of invariants."""
        columns = ("invariant", "count", "min", "mean", "max")
        table = Table("Root mean squares", columns, self.rows)
        facts = {"family": self.family, "digests": list(self.digests)}
        return Results(f"Fingerprint {self.digests[0]}", (), (table,), (), facts)

    def __str__(self) -> str:
        width = max((len(row[0]) for row in self.rows), default=0)
        lines = [
            f"{self.family}  {self.digests[0]}  {self.digests[1]}",
            f"{'root mean square of':{width}}  count       min      mean       max",
        ]
        lines += [
            f"{name:{width}}  {count:5}  {low:8.4g}  {mean:8.4g}  {high:8.4g}"
            for name, count, low, mean, high in self.rows
        ]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<fingerprint {' '.join(self.digests)} of a {self.family or 'model'}>"


@within_threads
def fingerprint(source: Source, *, spec: Spec | str | Path | None = None) -> Fingerprint:
    """Compute the fingerprint of a model.

    This reads all tensors and computes singular values: seconds to minutes.

    Args:
        source: a path, a hub id, a checkpoint, a module, or a state dict with `spec`.
        spec: a spec or spec file; by default that of the model's family.

    Returns:
        The fingerprint, with `is_same(other)`.

    Raises:
        CheckpointError: if a tensor has values that are not finite.

    Example:
        >>> _ = regauge.move("model").save("moved")
        >>> regauge.fingerprint("model").is_same(regauge.fingerprint("moved"))
        True
    """
    model = resolve(source, spec)
    require_fit(model.checkpoint, model.spec)
    discoveries = () if model.discovery is None else (model.discovery,)
    return replace(fingerprint_state(model.spec, model.checkpoint), discoveries=discoveries)


def fingerprint_state(spec: Spec, state: State) -> Fingerprint:
    """Compute the fingerprint of a state.

    This reads all tensors and computes singular values: seconds to minutes.

    Raises:
        CheckpointError: if a tensor has values that are not finite.
    """
    itemsize = min(
        (t.dtype.itemsize for t in state.values() if t.dtype.is_floating_point), default=4
    )
    original = state
    if spec.norms or spec.scales:
        spec, folded = fold_lazily(spec, state, rounded=False)
        state = LazyState(folded, lambda name: folded[name]())
    try:
        with np.errstate(invalid="ignore", over="ignore"):
            values_by_name = {
                name: np.abs(np.asarray(values, np.float64)).reshape(-1)
                for name, values in sorted(state_invariants(spec, state).items())
            }
        is_finite = all(np.isfinite(values).all() for values in values_by_name.values())
    except np.linalg.LinAlgError:
        is_finite = False
    if not is_finite:
        raise CheckpointError(
            f'a fingerprint needs finite values, but "{find_nonfinite(original)}" has NaN or Inf',
            hint="is it the right file?",
        )
    sizes = {name: float(np.sqrt((values**2).mean())) for name, values in values_by_name.items()}
    numbers = {
        **{f"{n} rms": v for n, v in sizes.items()},
        **{f"{n} mean": float(values.mean()) for n, values in values_by_name.items()},
    }
    return Fingerprint(
        _digests(
            numbers,
            {name: values.size for name, values in values_by_name.items()},
            _GRIDS.get(itemsize, 3e-3),
        ),
        tuple(_summarize(sizes)),
        spec.family,
    )


def _digests(numbers: dict[str, float], counts: dict[str, int], grid: float) -> tuple[str, str]:
    """Return the digests of the numbers by both grids."""
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
    cells_by_grid = [
        np.floor(projected / grid + shift).astype(np.int64).tolist() for shift in (0.0, 0.5)
    ]
    first, second = (
        hashlib.sha256(canonical_json([VERSION, counts, grid, shift, cells])).hexdigest()[:16]
        for shift, cells in enumerate(cells_by_grid)
    )
    return first, second


def _summarize(sizes: dict[str, float]) -> list[tuple[str, int, float, float, float]]:
    """Return count, smallest, mean and largest size for each kind of invariant."""
    kinds: dict[str, list[float]] = {}
    for name, size in sizes.items():
        kinds.setdefault(_NUMBER.sub("*", name), []).append(size)
    return [
        (
            kind,
            len(sizes_of_kind),
            min(sizes_of_kind),
            float(np.mean(sizes_of_kind)),
            max(sizes_of_kind),
        )
        for kind, sizes_of_kind in kinds.items()
    ]
