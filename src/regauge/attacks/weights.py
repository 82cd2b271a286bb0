"""Attacks on a locked model with a public base: the model that it was fine-tuned from.

A lock transforms the backbone by one element. Fine-tuning changes weights little, so the base's
backbone, transformed by the right element, is nearest to the locked one, and matching finds it. The
only difficulty is the start: embedding and head were not transformed, so nothing fixes a basis. Two
starts are tried. Vectors on the stream (gains and biases) are one; products are the other: Q^T K, O
V and W_out W_in of each layer do not depend on the basis inside, and are matrices on the stream
that the key conjugates, T' = M T M^-1.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from regauge.attacks.products import (
    Pairs,
    channel_signatures,
    fit_permutation,
    fit_rotation,
    fit_signs,
    layer_products,
)
from regauge.attacks.views import (
    LockedFileWithBase,
    LockedFileWithCandidates,
    part_spec,
    select_tensors,
)
from regauge.core.action import State, apply
from regauge.core.element import Element, identity
from regauge.core.fit import Pair, assign
from regauge.core.groups import Group, Kind, Orthogonal, OrthogonalFixingOnes, SignedPermutation
from regauge.core.members import Dense, Member, Monomial
from regauge.core.progress import Progress
from regauge.core.rng import Floats
from regauge.core.spec import Spec
from regauge.matching import match_states
from regauge.matching.costs import Costs
from regauge.matching.invariants import invariant_distance, state_invariants


@dataclass(frozen=True, eq=False)
class Guess:
    """An attack's estimate of the key's element on the spaces of the backbone, and its cost.

    `relative` is the relative distance after matching, `start` the initial guess behind it.
    """

    element: Element
    relative: float
    seconds: float
    start: str = ""

    def unlock(self, spec: Spec, state: State) -> dict[str, object]:
        """Return the locked state as this guess would unlock it."""
        return dict(apply(~Element(spec, self.element.members), state, "backbone"))


def norm_vectors(view: LockedFileWithBase) -> Guess:
    """Recover the order of the stream from gains and biases alone.

    Sees: the locked file and a public base.
    Recovers: the stream's permutation.
    Why it works: gains and biases are vectors on the stream, which a permutation reorders and
        fine-tuning hardly changes; a few dozen of them distinguish all channels.
    What stops it: folded norms (without gains), or a base that is not public.
    Floor: one position in d.
    Ceiling: all positions.
    References: ArrowMatch (USENIX Security 2025).
    """
    started = time.monotonic()
    spec = part_spec(view.spec, "backbone")
    costs = Costs(
        spec, select_tensors(view.base, spec.tensors), select_tensors(view.state, spec.tensors)
    )
    members = {
        s: m for s in _streams(spec) if (m := _by_vectors(costs, s, view.kind, [])) is not None
    }
    return Guess(
        Element(spec, members), float("nan"), time.monotonic() - started, "gains and biases"
    )


def public_base(
    view: LockedFileWithBase, *, sweeps: int = 5, progress: Progress | None = None
) -> Guess:
    """Recover the whole key by matching the public base to the locked backbone.

    Sees: the locked file, the group of its lock, and a public base.
    Recovers: every member of the element, and so the plain weights.
    Why it works: the base under the right element is nearest to the locked weights, and the nearest
        can be found: assignment for permutations, Procrustes for rotations, space by space.
    What stops it: a backbone without a public relative; fine-tuning that changes the
        weights by as much as their own size.
    Floor: a random permutation (one channel in d is right), or a random rotation.
    Ceiling: all of the key.
    References: ArrowMatch (USENIX Security 2025); Git Re-Basin (2209.04836).
    """
    started = time.monotonic()
    spec = part_spec(view.spec, "backbone")
    a, b = select_tensors(view.base, spec.tensors), select_tensors(view.state, spec.tensors)
    best: Guess | None = None
    report = progress or (lambda done, total, label: None)
    guesses = initial_guesses(
        spec, a, b, view.kind, lambda done, total, label: report(done, 3 * total, label)
    )
    for i, (start, stream) in enumerate(guesses.items()):
        initial = Element(spec, stream)

        def within(done: int, total: int, label: str, i: int = i, start: str = start) -> None:
            every = len(guesses) * total  # the first third are the products
            report(every + 2 * (i * total + done), 3 * every, f"{label} from {start}")

        result = match_states(
            spec,
            a,
            b,
            sweeps=sweeps,
            within=view.kind,
            start=initial,
            known_spaces=list(stream),
            progress=within,
        )
        if best is None or result.relative_distance < best.relative:
            best = Guess(
                result.element, result.relative_distance, time.monotonic() - started, start
            )
    assert best is not None
    return Guess(best.element, best.relative, time.monotonic() - started, best.start)


def lineage(view: LockedFileWithCandidates) -> dict[str, float]:
    """Measure the distance of a locked model from each of several public models.

    Sees: the locked file and candidates.
    Recovers: the base.
    Why it works: spectra, sorted gains and the products inside heads are invariant under every
        element, so that no key changes them.
    What stops it: nothing that preserves the function.
    Floor: the distance of unrelated models.
    Ceiling: zero.
    References: OriginTracer (2505.19466); Mirsky's bound.
    """
    spec = part_spec(view.spec, "backbone")
    locked_invariants = state_invariants(spec, select_tensors(view.state, spec.tensors))
    relative_distances = {}
    for name, state in view.candidates.items():
        distances = invariant_distance(
            state_invariants(spec, select_tensors(state, spec.tensors)), locked_invariants
        )
        relative_distances[name] = float(
            np.sqrt(
                sum(d for d, _ in distances.values())
                / max(sum(n for _, n in distances.values()), 1e-300)
            )
        )
    return relative_distances


def initial_guesses(
    spec: Spec, a: State, b: State, kind: Kind, progress: Progress | None = None
) -> dict[str, dict[str, Member]]:
    """Return first guesses of the streams, by name, each independent of all other spaces.

    Even functions of the stream cannot distinguish M from -M: both are tried if both are allowed.
    """
    guesses: dict[str, dict[str, Member]] = {}
    roots = _streams(spec)
    costs = Costs(spec, a, b)
    pairs = {s: layer_products(costs, s, progress) for s in roots}
    for method, find in (("gains and biases", _by_vectors), ("products", _by_products)):
        members = {s: m for s in roots if (m := find(costs, s, kind, pairs[s])) is not None}
        if members:
            guesses[method] = members
            negated = {
                s: n
                for s, m in members.items()
                if (n := _negative(spec.spaces[s].group.within(kind), m)) is not None
            }
            if negated:
                guesses[f"{method}, negative"] = members | negated
    return guesses or {"nothing": {}}


def _streams(spec: Spec) -> list[str]:
    """Return the spaces that connect layers: those that occur in more than one layer's modules.

    A space inside a layer has no start of its own.
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
    """Return -M if the group allows it; with fixed ones, negate the complement of the ones;
    else None.
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


def _by_vectors(costs: Costs, space: str, kind: Kind, product_pairs: Pairs) -> Member | None:
    """Fit the space's group to the vectors that live in this space alone."""
    group = costs.spec.spaces[space].group.within(kind)
    if isinstance(group, Orthogonal):  # too few vectors for a rotation
        return None
    sides: dict[str, list[tuple[Floats, Floats]]] = {}
    for y, x in costs.iter_block_pairs(
        space, identity(costs.spec), lambda block: len(block.dims) == 1
    ):
        leaf = y.dims[0]
        assert leaf is not None
        locked, base = (np.asarray(v.values, np.float64)[None, :, None] for v in (y, x))
        sides.setdefault("bar" if leaf.bar else "plain", []).append((locked, base))
    if not sides:
        return None
    pairs: dict[str, Pair] = {}
    for side, vectors in sides.items():
        scale = [
            max(float(np.abs(y).std()), 1e-12) for y, _ in vectors
        ]  # give every vector the same weight
        locked, base = (
            np.concatenate([p[i] / s for p, s in zip(vectors, scale, strict=True)], axis=2)
            for i in (0, 1)
        )
        pairs[side] = (locked, base)
    member: Member = group.fit(**pairs)
    signed = (
        isinstance(group, SignedPermutation) and "plain" not in sides
    )  # gains do not determine signs
    return (
        Monomial(member.index, fit_signs(product_pairs, member.index[0])[None])
        if signed and isinstance(member, Monomial)
        else member
    )


def _by_products(costs: Costs, space: str, kind: Kind, pairs: Pairs) -> Member | None:
    """Fit the space's group to products: assign channels by their signatures, or rotate one
    eigenbasis to the other.
    """
    group = costs.spec.spaces[space].group.within(kind)
    if not pairs:
        return None
    if isinstance(group, OrthogonalFixingOnes):
        complement = _without_ones(len(pairs[0][0]))
        rotation = fit_rotation(
            [(complement.T @ y @ complement, complement.T @ x @ complement) for y, x in pairs]
        )
        return Dense((complement @ rotation @ complement.T + 1 / len(complement))[None])
    if isinstance(group, Orthogonal):
        return Dense(fit_rotation(pairs)[None])
    y, x = (np.concatenate([channel_signatures(p[i]) for p in pairs], axis=1) for i in (0, 1))
    spread = np.maximum(y.std(0), 1e-12)
    y, x = y / spread, x / spread
    signed = isinstance(group, SignedPermutation)
    similarity = y @ x.T - 0.5 * (x * x).sum(1)[None, :] - 0.5 * (y * y).sum(1)[:, None]
    index = fit_permutation(pairs, assign(similarity[None])[0], signed=signed)
    return Monomial(index[None], fit_signs(pairs, index)[None] if signed else None)


def _without_ones(n: int) -> Floats:
    """Return an orthonormal basis of the complement of the ones vector, [n, n - 1]."""
    q, _ = np.linalg.qr(np.concatenate([np.ones((n, 1)), np.eye(n)[:, 1:]], axis=1))
    return np.asarray(q[:, 1:])
