"""Attacks on the weights of a locked model, by whoever has a model that it descends from.

A lock moves the backbone by one element. Fine-tuning moves weights little, so the base's backbone,
moved by the right element, is nearest to the locked one: matching finds it. What makes it hard is
only that nothing fixes a basis to begin from, since embedding and head were not moved: two
beginnings are tried. Vectors on the stream (gains and biases) are one; products are the other: Q^T
K, O V and W_out W_in of each layer do not depend on the basis inside, and are matrices on the
stream that the key conjugates, T' = M T M^-1.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from regauge.attacks.products import Pairs, eigenbasis, products, rearranged, signature, signs
from regauge.attacks.views import WithBase, WithCandidates, only, part_of
from regauge.core.action import State, apply
from regauge.core.element import Element, identity
from regauge.core.fit import Pair, assign
from regauge.core.groups import Group, Kind, Orthogonal, OrthogonalFixingOnes, SignedPermutation
from regauge.core.members import Dense, Member, Monomial
from regauge.core.rng import Floats
from regauge.core.spec import Spec
from regauge.matching import match
from regauge.matching.costs import Costs
from regauge.matching.invariants import invariant_distance, invariants


@dataclass(frozen=True, eq=False)
class Guess:
    """What an attack believes the key's element to be, on the spaces of the backbone, and what it
    cost.
    """

    element: Element
    relative: float
    seconds: float
    began: str = ""

    def unlocked(self, spec: Spec, state: State) -> dict[str, object]:
        """The locked state as this guess would unlock it."""
        return dict(apply(~Element(spec, self.element.members), state, "backbone"))


def norm_vectors(view: WithBase) -> Guess:
    """The order of the stream, from gains and biases alone.

    Sees: the locked file and a public base. Recovers: the stream's permutation. Why it works: gains
    and biases are vectors on the stream, which a permutation reorders and fine-tuning hardly
    changes; a few dozen of them tell every channel from every other. What stops it: norms that are
    folded (then there are no gains), or a base that is not public. Floor: one place in d. Ceiling:
    all places. References: facts on permutation locks, TransLinkGuard's successors (USENIX Security
    2025, ArrowMatch).
    """
    started = time.monotonic()
    spec = part_of(view.spec, "backbone")
    costs = Costs(spec, only(view.base, spec.tensors), only(view.state, spec.tensors))
    members = {
        s: m for s in _streams(spec) if (m := _by_vectors(costs, s, view.kind, [])) is not None
    }
    return Guess(
        Element(spec, members), float("nan"), time.monotonic() - started, "gains and biases"
    )


def public_base(view: WithBase, *, sweeps: int = 5) -> Guess:
    """The whole key, by matching the public base to the locked backbone.

    Sees: the locked file, its kind, and a public base. Recovers: every member of the element, so
    the plain weights. Why it works: the base moved by the right element is the nearest description
    of it to the locked weights, and the nearest can be found: assignment for permutations,
    Procrustes for rotations, space by space. What stops it: a backbone that nobody else has;
    fine-tuning as large as the weights themselves. Floor: one place in d, or a random rotation.
    Ceiling: all of the key. References: ArrowMatch (USENIX Security 2025); Git Re-Basin
    (2209.04836).
    """
    started = time.monotonic()
    spec = part_of(view.spec, "backbone")
    a, b = only(view.base, spec.tensors), only(view.state, spec.tensors)
    best: Guess | None = None
    for began, stream in beginnings(spec, a, b, view.kind).items():
        start = Element(spec, stream)
        found = match(spec, a, b, sweeps=sweeps, within=view.kind, start=start, known=list(stream))
        if best is None or found.relative < best.relative:
            best = Guess(found.element, found.relative, time.monotonic() - started, began)
    assert best is not None
    return Guess(best.element, best.relative, time.monotonic() - started, best.began)


def lineage(view: WithCandidates) -> dict[str, float]:
    """Which of some public models a locked one descends from.

    Sees: the locked file and candidates. Recovers: the base. Why it works: spectra, sorted gains
    and the products inside heads are the same in every description of a model, so that no key
    changes them. What stops it: nothing that keeps the function. Floor: the distance of unrelated
    models. Ceiling: zero. References: OriginTracer (2505.19466); Mirsky's bound.
    """
    spec = part_of(view.spec, "backbone")
    here = invariants(spec, only(view.state, spec.tensors))
    out = {}
    for name, state in view.candidates.items():
        apart = invariant_distance(invariants(spec, only(state, spec.tensors)), here)
        out[name] = float(
            np.sqrt(
                sum(d for d, _ in apart.values()) / max(sum(n for _, n in apart.values()), 1e-300)
            )
        )
    return out


def beginnings(spec: Spec, a: State, b: State, kind: Kind) -> dict[str, dict[str, Member]]:
    """First guesses of the streams, each from something that does not depend on any other space.
    What is even in the stream cannot tell M from -M: where both are allowed, both are tried.
    """
    out: dict[str, dict[str, Member]] = {}
    roots = _streams(spec)
    costs = Costs(spec, a, b)
    told = {s: products(costs, s) for s in roots}
    for how, find in (("gains and biases", _by_vectors), ("products", _by_products)):
        members = {s: m for s in roots if (m := find(costs, s, kind, told[s])) is not None}
        if members:
            out[how] = members
            turned = {
                s: n
                for s, m in members.items()
                if (n := _negative(spec.spaces[s].group.within(kind), m)) is not None
            }
            if turned:
                out[f"{how}, negative"] = members | turned
    return out or {"nothing": {}}


def _streams(spec: Spec) -> list[str]:
    """The spaces that hold layers together: those that lie in more modules than one layer's. Inside
    a layer there is no beginning to be made.
    """
    from regauge.matching import layers_of

    inside = layers_of(spec)
    return [
        s
        for s, space in spec.spaces.items()
        if space.over is None
        and not spec.children(s)
        and (s not in inside or s.startswith("stream"))
    ]


def _negative(group: Group, member: Member) -> Member | None:
    """-M, or what of it the group allows: where the ones stay, the other sign on all that is
    orthogonal to them.
    """
    if isinstance(group, OrthogonalFixingOnes):
        return Dense(2 / member.size - member.matrix())
    if isinstance(group, Orthogonal):
        return Dense(-member.matrix())
    if isinstance(group, SignedPermutation) and isinstance(member, Monomial):
        return Monomial(
            member.index, -(np.ones(member.index.shape) if member.scale is None else member.scale)
        )
    return None


def _by_vectors(costs: Costs, space: str, kind: Kind, told: Pairs) -> Member | None:
    """What the space's own group makes of the vectors that live in it alone."""
    group = costs.spec.spaces[space].group.within(kind)
    if isinstance(group, Orthogonal):  # far too few for a rotation
        return None
    sides: dict[str, list[tuple[Floats, Floats]]] = {}
    for y, x in costs.each(space, identity(costs.spec), lambda block: len(block.dims) == 1):
        leaf = y.dims[0]
        assert leaf is not None
        here, there = (np.asarray(v.values, np.float64)[None, :, None] for v in (y, x))
        sides.setdefault("bar" if leaf.bar else "plain", []).append((here, there))
    if not sides:
        return None
    pairs: dict[str, Pair] = {}
    for side, found in sides.items():
        scale = [
            max(float(np.abs(y).std()), 1e-12) for y, _ in found
        ]  # every vector tells as much as any other
        here, there = (
            np.concatenate([p[i] / s for p, s in zip(found, scale, strict=True)], axis=2)
            for i in (0, 1)
        )
        pairs[side] = (here, there)
    member: Member = group.fit(**pairs)
    signed = isinstance(group, SignedPermutation) and "plain" not in sides  # gains tell no signs
    return (
        Monomial(member.index, signs(told, member.index[0])[None])
        if signed and isinstance(member, Monomial)
        else member
    )


def _by_products(costs: Costs, space: str, kind: Kind, told: Pairs) -> Member | None:
    """What products tell: an assignment of channels by what stands in their rows, or the turn
    between two eigenbases.
    """
    group = costs.spec.spaces[space].group.within(kind)
    if not told:
        return None
    if isinstance(group, OrthogonalFixingOnes):
        rest = _without_ones(len(told[0][0]))
        inside = eigenbasis([(rest.T @ y @ rest, rest.T @ x @ rest) for y, x in told])
        return Dense((rest @ inside @ rest.T + 1 / len(rest))[None])
    if isinstance(group, Orthogonal):
        return Dense(eigenbasis(told)[None])
    y, x = (np.concatenate([signature(p[i]) for p in told], axis=1) for i in (0, 1))
    spread = np.maximum(y.std(0), 1e-12)
    y, x = y / spread, x / spread
    signed = isinstance(group, SignedPermutation)
    alike = y @ x.T - 0.5 * (x * x).sum(1)[None, :] - 0.5 * (y * y).sum(1)[:, None]
    index = rearranged(told, assign(alike[None])[0], signed=signed)
    return Monomial(index[None], signs(told, index)[None] if signed else None)


def _without_ones(n: int) -> Floats:
    """An orthonormal basis of what is orthogonal to the ones, [n, n - 1]."""
    q, _ = np.linalg.qr(np.concatenate([np.ones((n, 1)), np.eye(n)[:, 1:]], axis=1))
    return np.asarray(q[:, 1:])
