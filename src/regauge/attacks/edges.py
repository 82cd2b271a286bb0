"""Attack from the locked file alone, without base, data or labels.

The edges of a locked file are in plain, and training has aligned the backbone with them.

The weights that read the stream in the first layer read what the embedding writes, and every weight
that writes the stream writes for the head. Over the stream, the Gram matrix of such weights
therefore resembles the covariance of the embedding's or the head's rows; channels that are large in
one are large in the other; and biases contain the head's mean. The key conjugates all matrices of
the backbone by one permutation. This is a quadratic assignment over a few matrices at once, with a
linear term.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from regauge.attacks.products import Pairs
from regauge.attacks.views import LockedFile
from regauge.attacks.weights import Guess
from regauge.core.element import Element
from regauge.core.fit import assign
from regauge.core.groups import Permutation
from regauge.core.members import Member, Monomial
from regauge.core.progress import Progress
from regauge.core.rng import Floats, Ints
from regauge.core.spec import Spec
from regauge.matching.costs import Costs

# Weights of matrix pairs, vector pairs, and biases against the head's mean: the expected
# r / (1 - r^2).
MATRIX, VECTOR, BIAS = 0.5, 0.6, 2.0
MIN_ROWS = 8  # a covariance of fewer rows is not informative


@dataclass(frozen=True, eq=False)
class WeightBlock:
    """One block of a weight by its channels, [stream, features].

    `layer` is None outside of layers. `how` is the block's relation to the stream: "reads",
    "writes", "gain", "bias" (of a writer) or "norm bias". `inner` is the space on its other side.
    """

    name: str
    part: str
    layer: int | None
    how: str
    inner: str
    values: Floats

    @property
    def gram(self) -> Floats:
        """The Gram matrix of the channels."""
        return self.values @ self.values.T

    @property
    def size(self) -> Floats:
        """The log of each channel's root mean square."""
        return np.asarray(np.log(np.sqrt(np.square(self.values).mean(1)) + 1e-9))


def has_permuted_stream(view: LockedFile) -> bool:
    """Return whether the key permutes a stream, without signs, between edges in plain."""
    return bool(_permuted_streams(view))


def public_edges(view: LockedFile, *, steps: int = 16, progress: Progress | None = None) -> Guess:
    """Recover the order of the stream from the locked file alone: no base, no data, no labels.

    Sees: the locked file.
    Recovers: the stream's permutation, and with it the owner's model, because transforms inside
        layers do not change the function.
    Why it works: training aligns a backbone with its edges (embedding and head), which stay in
        plain: Gram matrices of the weights that read the stream in the first layer resemble the
        covariance of the embedding's rows, those of the weights that write it resemble the
        covariance of the head's rows, and the writers' biases the head's mean. All share one order,
        which graduated assignment finds by annealing from a uniform mixture of orders.
    What stops it: signs on the stream and rotations, which it does not search. It recovers the
        whole key of the two GPT-2s on which it was tuned, and almost nothing of other GPT-2s, a
        ViT, MiniLM and Llamas. This does not prove that those are safe: for the GPT-2s, MiniLM and
        the ViT the true order fits better than the one found, so that a better search may find it.
    Floor: one position in d.
    Ceiling: all positions.
    References: Gold and Rangarajan 1996 (graduated assignment).
    """
    started = time.monotonic()
    members: dict[str, Member] = {}
    for stream in _permuted_streams(view):
        pairs, likeness = collect_evidence(
            list(_weight_blocks(view, stream)), view.spec.spaces[stream].size
        )
        if pairs:
            plan = anneal(pairs, likeness, steps, progress=progress)
            members[stream] = Monomial(refine_order(pairs, likeness, assign(plan[None])[0])[None])
    return Guess(
        Element(view.spec, members), float("nan"), time.monotonic() - started, "public edges"
    )


def collect_evidence(blocks: list[WeightBlock], size: int) -> tuple[Pairs, Floats]:
    """Return the matrix pairs (locked, public) that agree up to the order, and the similarity of
    each locked channel to each public one.
    """
    layers = sorted({p.layer for p in blocks if p.layer is not None and p.part == "backbone"})
    if not layers:
        return [], np.zeros((size, size))
    first, middle = layers[0], layers[len(layers) // 2]
    backbone = [p for p in blocks if p.part == "backbone"]
    readers = [
        p for p in backbone if p.how == "reads" and p.inner != "vo"
    ]  # values read any direction
    writers = [p for p in backbone if p.how == "writes"]
    early_readers = [p for p in readers if p.layer == first]
    late_readers = [p for p in readers if p.layer is not None and p.layer >= middle]
    gains = [p for p in backbone if p.how == "gain" and p.layer == first]
    pairs: Pairs = []
    likeness = np.zeros((size, size))

    def agree(locked: list[Floats], public: Floats, weight: float = VECTOR) -> None:
        if locked:
            likeness[:] += weight * np.outer(
                _unit(np.asarray(sum(_unit(v) for v in locked))), _unit(public)
            )

    tables = [p for p in blocks if p.part != "backbone" and p.values.shape[1] >= MIN_ROWS]
    rows = max((p.values.shape[1] for p in tables if p.part == "embed"), default=0)
    for table in tables:
        mean = table.values.mean(1)
        centred = table.values - mean[:, None]
        spread = np.log(centred.std(1) + 1e-9)
        if table.part == "embed":
            positions = table.values.shape[1] < rows  # read by queries and keys, not by an FFN
            table_readers = [p for p in early_readers if p.inner == "qk" or not positions]
            correlations = [_off_diagonal(p.gram) for p in table_readers]
            agree(
                [
                    *(p.size for p in table_readers),
                    *(p.values[:, 0] for p in gains if not positions),
                ],
                spread,
            )
            agree(
                [p.values[:, 0] for p in backbone if p.how == "norm bias" and p.layer == first],
                mean,
            )
        else:
            correlations = [
                *(_off_diagonal(p.gram) for p in writers),
                *(0.5 * _off_diagonal(p.gram) for p in late_readers),
            ]
            agree([p.size for p in writers], spread)
            agree([-p.values[:, 0] for p in backbone if p.how == "bias"], mean, BIAS)
        if correlations:
            combined = np.asarray(sum(correlations))
            pairs.append(
                (
                    MATRIX * combined / max(float(combined.std()), 1e-12),
                    _off_diagonal(centred @ centred.T),
                )
            )
    return pairs, likeness


def anneal(
    pairs: Pairs,
    likeness: Floats,
    steps: int,
    *,
    inner: int = 2,
    coldest: float = 2.0,
    warmest: float = 0.05,
    progress: Progress | None = None,
) -> Floats:
    """Find a doubly stochastic matrix P, near a permutation, that maximizes sum <Y, P X P^T> / 2 +
    <likeness, P>.

    Each step takes the exponential of the gradient at a falling temperature and normalizes rows and
    columns (Sinkhorn).

    Args:
        pairs: Matrices (Y, X), locked and public.
        likeness: Linear term, [n, n].
        steps: Number of temperatures.
        inner: Iterations per temperature.
        coldest: Largest inverse temperature.
        warmest: Smallest inverse temperature.
        progress: Progress callback, in temperatures.

    Returns:
        P, [n, n].
    """
    n = len(likeness)
    pairs = [(y.astype(np.float32), x.astype(np.float32)) for y, x in pairs]
    linear = likeness.astype(np.float32)
    plan = np.full((n, n), 1 / n, np.float32)
    for i, beta in enumerate(np.geomspace(warmest, coldest, steps).astype(np.float32)):
        if progress is not None:
            progress(i, steps, "temperatures")
        for _ in range(inner):
            grad = beta * np.asarray(sum((y @ plan @ x for y, x in pairs), linear))
            plan = np.exp(
                np.maximum(grad - grad.max(1, keepdims=True), -60)
            )  # smaller values become denormal, which is slow
            for _ in range(25):
                plan /= plan.sum(1, keepdims=True) + 1e-30
                plan /= plan.sum(0, keepdims=True) + 1e-30
    return np.asarray(plan, np.float64)


def refine_order(pairs: Pairs, likeness: Floats, index: Ints) -> Ints:
    """Improve an order by linear assignments until the objective stops rising.

    The annealed order is mostly right up to a few exchanged channels.
    """

    def objective(index: Ints) -> float:
        return 0.5 * sum(float((y * x[index][:, index]).sum()) for y, x in pairs) + float(
            likeness[np.arange(len(index)), index].sum()
        )

    while True:
        candidate = assign(np.asarray(sum((y @ x[index] for y, x in pairs), likeness))[None])[0]
        if objective(candidate) <= objective(index):
            return index
        index = candidate


def _permuted_streams(view: LockedFile) -> list[str]:
    """Return the streams that the key permutes."""
    spaces = view.spec.spaces.items()
    return [
        name
        for name, space in spaces
        if name.startswith("stream")
        and space.over is None
        and type(space.group.within(view.kind)) is Permutation
    ]


def _weight_blocks(view: LockedFile, stream: str) -> Iterator[WeightBlock]:
    """Yield the weight blocks that touch the stream."""
    spec, costs = view.spec, Costs(view.spec, view.state, view.state, include_key_bias=True)
    for name in costs.tensors_in(stream):
        layer = _layer(name)
        for block in costs.target_blocks(name):
            places = block.axes_of(stream)
            if len(places) != 1:
                continue
            leaf = block.dims[places[0]]
            assert leaf is not None
            values = np.asarray(block.unfold(places[0]), np.float64)
            others = [
                d.space.partition(".")[0] for d in block.dims if d is not None and d.space != stream
            ]
            role = (
                "gain"
                if leaf.bar
                else "reads"
                if leaf.star
                else "writes"
                if values.shape[1] > 1
                else _bias_role(spec, name)
            )
            for part in _parts(spec, name):
                yield WeightBlock(name, part, layer, role, others[-1] if others else "", values)


def _parts(spec: Spec, name: str) -> list[str]:
    """Return the parts of a tensor; a table shared with the head belongs to both edges."""
    return list(
        dict.fromkeys(
            spec.parts.get(n, "backbone")
            for n in (name, *(a for a, b in spec.ties.items() if b == name))
        )
    )


def _bias_role(spec: Spec, name: str) -> str:
    """Return whether a bias belongs to a norm or to a writer."""
    return (
        "norm bias" if "|" in spec.tensors.get(f"{name.rpartition('.')[0]}.weight", "") else "bias"
    )


def _layer(name: str) -> int | None:
    """Return the layer number in a tensor's name, or None."""
    return next((int(part) for part in name.split(".") if part.isdigit()), None)


def _unit(v: Floats) -> Floats:
    """Standardize to mean 0 and standard deviation 1."""
    return np.asarray((v - v.mean()) / max(float(v.std()), 1e-12))


def _off_diagonal(m: Floats) -> Floats:
    """Return the off-diagonal correlations, standardized to mean 0 and standard deviation 1."""
    size = np.sqrt(np.maximum(np.diag(m), 1e-12))
    mask = ~np.eye(len(m), dtype=bool)
    out = np.zeros_like(m)
    values = (m / size[:, None] / size[None, :])[mask]
    out[mask] = _unit(values)
    return out
