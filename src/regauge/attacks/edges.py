"""The attack that needs nothing but the locked file: its edges are in plain, and training has
aligned the backbone with them.

What reads the stream in the first layer reads what the embedding writes, and what writes the stream
anywhere writes for the head. So the Gram matrix of such weights, over the stream, resembles the
covariance of the embedding's or of the head's rows; channels that are large in the one are large in
the other; and biases have the head's mean in them. The key conjugates all of the backbone's
matrices by one permutation: this is a quadratic assignment with a few matrices at once and a linear
term.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from regauge.attacks.products import Pairs
from regauge.attacks.views import Locked
from regauge.attacks.weights import Guess
from regauge.core.element import Element
from regauge.core.fit import assign
from regauge.core.groups import Permutation
from regauge.core.members import Member, Monomial
from regauge.core.rng import Floats, Ints
from regauge.core.spec import Spec
from regauge.matching.costs import Costs

# How much pairs of matrices, pairs of vectors, and biases against the head's mean count: r / (1 -
# r^2), as expected.
MATRIX, VECTOR, BIAS = 0.5, 0.6, 2.0
FEW = 8  # a table of fewer rows has no covariance to speak of


@dataclass(frozen=True, eq=False)
class Piece:
    """One block of a weight by its channels, [stream, features]: its part, its layer (None outside
    of layers), and how it meets the stream: it reads, writes, or is a gain; a bias is that of a
    norm or of a writer. `inner` is the space on its other side.
    """

    name: str
    part: str
    layer: int | None
    how: str
    inner: str
    values: Floats

    @property
    def gram(self) -> Floats:
        return self.values @ self.values.T

    @property
    def size(self) -> Floats:
        return np.asarray(np.log(np.sqrt(np.square(self.values).mean(1)) + 1e-9))


def can_order(view: Locked) -> bool:
    """Is there a stream that the key permutes, without signs, between edges that are in plain?"""
    return bool(_ordered(view))


def public_edges(view: Locked, *, steps: int = 16) -> Guess:
    """The order of the stream, from the locked file alone: no base, no data, no labels.

    Sees: the locked file. Recovers: the stream's permutation, and with it the owner's model: what
    moves inside layers changes no function. Why it works: training aligns a backbone with its
    edges, which stay in plain: Gram matrices of what reads the stream in the first layer resemble
    the covariance of the embedding, those of what writes it that of the head, and writing biases
    the head's mean. All of them have one order in common, which is found by assignment while it is
    annealed from all orders to one (graduated assignment). What stops it: it does not look for
    signs on the stream, nor for rotations. Two GPT-2s of one training, on which its weights were
    chosen, lose all of the key; GPT-2s of another training, a ViT, MiniLM and Llamas next to
    nothing, which is no proof that they are safe: at the true orders of those GPT-2s, of MiniLM and
    of the ViT the edges fit better than at what was found, so that it is the search that fails.
    Floor: one place in d. Ceiling: all places. References: Gold and Rangarajan 1996 (graduated
    assignment).
    """
    started = time.monotonic()
    members: dict[str, Member] = {}
    for stream in _ordered(view):
        pairs, likeness = evidence(list(_pieces(view, stream)), view.spec.spaces[stream].size)
        if pairs:
            members[stream] = Monomial(
                settled(pairs, likeness, assign(annealed(pairs, likeness, steps)[None])[0])[None]
            )
    return Guess(
        Element(view.spec, members), float("nan"), time.monotonic() - started, "public edges"
    )


def evidence(pieces: list[Piece], size: int) -> tuple[Pairs, Floats]:
    """Matrices that should agree but for the order, locked and public, and how alike each locked
    channel is to each public one.
    """
    layers = sorted({p.layer for p in pieces if p.layer is not None and p.part == "backbone"})
    if not layers:
        return [], np.zeros((size, size))
    first, middle = layers[0], layers[len(layers) // 2]
    inside = [p for p in pieces if p.part == "backbone"]
    reads = [
        p for p in inside if p.how == "reads" and p.inner != "vo"
    ]  # values take what they like
    writes = [p for p in inside if p.how == "writes"]
    early = [p for p in reads if p.layer == first]
    late = [p for p in reads if p.layer is not None and p.layer >= middle]
    gains = [p for p in inside if p.how == "gain" and p.layer == first]
    pairs: Pairs = []
    likeness = np.zeros((size, size))

    def agree(locked: list[Floats], public: Floats, weight: float = VECTOR) -> None:
        if locked:
            likeness[:] += weight * np.outer(
                _unit(np.asarray(sum(_unit(v) for v in locked))), _unit(public)
            )

    tables = [p for p in pieces if p.part != "backbone" and p.values.shape[1] >= FEW]
    rows = max((p.values.shape[1] for p in tables if p.part == "embed"), default=0)
    for table in tables:
        mean = table.values.mean(1)
        centred = table.values - mean[:, None]
        spread = np.log(centred.std(1) + 1e-9)
        if table.part == "embed":
            positions = (
                table.values.shape[1] < rows
            )  # which queries and keys look at; an FFN does not
            readers = [p for p in early if p.inner == "qk" or not positions]
            told = [_beside(p.gram) for p in readers]
            agree(
                [*(p.size for p in readers), *(p.values[:, 0] for p in gains if not positions)],
                spread,
            )
            agree(
                [p.values[:, 0] for p in inside if p.how == "norm bias" and p.layer == first], mean
            )
        else:
            told = [*(_beside(p.gram) for p in writes), *(0.5 * _beside(p.gram) for p in late)]
            agree([p.size for p in writes], spread)
            agree([-p.values[:, 0] for p in inside if p.how == "bias"], mean, BIAS)
        if told:
            together = np.asarray(sum(told))
            pairs.append(
                (
                    MATRIX * together / max(float(together.std()), 1e-12),
                    _beside(centred @ centred.T),
                )
            )
    return pairs, likeness


def annealed(
    pairs: Pairs,
    likeness: Floats,
    steps: int,
    *,
    inner: int = 2,
    coldest: float = 2.0,
    warmest: float = 0.05,
) -> Floats:
    """A doubly stochastic matrix P, near a permutation, that makes sum <Y, P X P^T> / 2 +
    <likeness, P> large: the exponential of the slope at a falling temperature, scaled to rows and
    columns that sum to one.
    """
    n = len(likeness)
    pairs = [(y.astype(np.float32), x.astype(np.float32)) for y, x in pairs]
    linear = likeness.astype(np.float32)
    at = np.full((n, n), 1 / n, np.float32)
    for beta in np.geomspace(warmest, coldest, steps).astype(np.float32):
        for _ in range(inner):
            slope = beta * np.asarray(sum((y @ at @ x for y, x in pairs), linear))
            at = np.exp(
                np.maximum(slope - slope.max(1, keepdims=True), -60)
            )  # below there are denormal numbers, which are slow
            for _ in range(25):
                at /= at.sum(1, keepdims=True) + 1e-30
                at /= at.sum(0, keepdims=True) + 1e-30
    return np.asarray(at, np.float64)


def settled(pairs: Pairs, likeness: Floats, index: Ints) -> Ints:
    """The order after assignments from where it is, while they gain: what annealing leaves is
    mostly right, but for a few that are exchanged.
    """

    def worth(index: Ints) -> float:
        return 0.5 * sum(float((y * x[index][:, index]).sum()) for y, x in pairs) + float(
            likeness[np.arange(len(index)), index].sum()
        )

    while True:
        found = assign(np.asarray(sum((y @ x[index] for y, x in pairs), likeness))[None])[0]
        if worth(found) <= worth(index):
            return index
        index = found


def _ordered(view: Locked) -> list[str]:
    """The streams that the key permutes."""
    spaces = view.spec.spaces.items()
    return [
        n
        for n, space in spaces
        if n.startswith("stream")
        and space.over is None
        and type(space.group.within(view.kind)) is Permutation
    ]


def _pieces(view: Locked, stream: str) -> Iterator[Piece]:
    spec, costs = view.spec, Costs(view.spec, view.state, view.state, whole=True)
    for name in costs.where(stream):
        found = _layer(name)
        for block in costs.own(name):
            places = block.places(stream)
            if len(places) != 1:
                continue
            leaf = block.dims[places[0]]
            assert leaf is not None
            values = np.asarray(block.unfolded(places[0]), np.float64)
            others = [
                d.space.partition(".")[0] for d in block.dims if d is not None and d.space != stream
            ]
            how = (
                "gain"
                if leaf.bar
                else "reads"
                if leaf.star
                else "writes"
                if values.shape[1] > 1
                else _bias(spec, name)
            )
            for part in _parts(spec, name):
                yield Piece(name, part, found, how, others[-1] if others else "", values)


def _parts(spec: Spec, name: str) -> list[str]:
    """A table that the head shares is of both edges."""
    return list(
        dict.fromkeys(
            spec.parts.get(n, "backbone")
            for n in (name, *(a for a, b in spec.ties.items() if b == name))
        )
    )


def _bias(spec: Spec, name: str) -> str:
    return (
        "norm bias" if "|" in spec.tensors.get(f"{name.rpartition('.')[0]}.weight", "") else "bias"
    )


def _layer(name: str) -> int | None:
    return next((int(part) for part in name.split(".") if part.isdigit()), None)


def _unit(v: Floats) -> Floats:
    return np.asarray((v - v.mean()) / max(float(v.std()), 1e-12))


def _beside(m: Floats) -> Floats:
    """Correlations beside the diagonal, with a mean of nothing and a spread of one."""
    size = np.sqrt(np.maximum(np.diag(m), 1e-12))
    rest = ~np.eye(len(m), dtype=bool)
    out = np.zeros_like(m)
    values = (m / size[:, None] / size[None, :])[rest]
    out[rest] = _unit(values)
    return out
