"""Attacks on features that a key has moved: what crosses from the edges to a backbone in a locked
basis, or from a client to a server.
"""

from __future__ import annotations

import numpy as np
import torch

from regauge.attacks.products import eigenbasis, rearranged, signature, signs
from regauge.attacks.views import HiddenStates, KnownInputs, SeenFeatures
from regauge.core.fit import assign
from regauge.core.groups import Group, Kind, Orthogonal, Permutation, SignedPermutation
from regauge.core.members import Dense, Member, Monomial
from regauge.core.rng import Floats

GROUPS: dict[Kind, Group] = {
    "permutation": Permutation(),
    "signed": SignedPermutation(),
    "orthogonal": Orthogonal(),
    "full": Orthogonal(),
}


def known_inputs(view: KnownInputs) -> Member:
    """The stream's member of the key, from inputs whose features are known.

    Sees: features before and after the key, of the same tokens. Recovers: the member of the stream.
    Why it works: a token gives one equation for every channel; d channels of a permutation are told
    apart by a handful of tokens, a rotation is solved by d of them (Procrustes). What stops it: an
    embedding that the adversary has not got, or a fresh key for every message. Floor: one place in
    d. Ceiling: all places. References: Schönemann 1966 (Procrustes); Hidden No More (2505.18332).
    """
    y, x = (v.detach().double().cpu().numpy().T[None] for v in (view.moved, view.plain))
    return GROUPS[view.kind].fit(plain=(y, x))


def seen_features(view: SeenFeatures) -> Member:
    """The stream's member of the key, from the statistics of moved features alone.

    Sees: moved features of inputs that it does not know, and features of other inputs of the same
    kind through the public embedding. Recovers: the member of the stream, as far as the two samples
    have the same statistics. Why it works: a permutation moves every channel's distribution as a
    whole, a rotation keeps the spectrum of the covariance. What stops it: a fresh key for every
    batch, or an embedding that is not public. Floor: one place in d. Ceiling: what known inputs
    give. References: Saini et al. (2602.11088), for keys that are used again.
    """
    y, x = (v.detach().double().cpu().numpy() for v in (view.moved, view.others))
    group = GROUPS[view.kind]
    if isinstance(group, Orthogonal):
        told = list(zip(_moments(y), _moments(x), strict=True))
        turn = eigenbasis(told)
        here, there = (_leaning(v) for v in (y, x))
        return Dense((turn if here @ turn @ there > 0 else -turn)[None])
    signed = isinstance(group, SignedPermutation)
    a, b = (_channels(v, signed) for v in (y, x))
    scale = np.maximum(b.std(0), 1e-12) * b.shape[1] ** 0.5
    a, b = a / scale, b / scale
    alike = a @ b.T - 0.5 * (b * b).sum(1)[None, :] - 0.5 * (a * a).sum(1)[:, None]
    told = [(np.corrcoef(y.T), np.corrcoef(x.T))]
    index = rearranged(told, assign(alike[None])[0], signed=signed)
    if not signed:
        return Monomial(index[None])
    by_products = signs(told, index)
    agree = 1.0 if (by_products * y.mean(0) * x.mean(0)[index]).sum() >= 0 else -1.0
    return Monomial(index[None], (agree * by_products)[None])


def _channels(x: Floats, signed: bool) -> Floats:
    """What tells a channel, whatever its place: quantiles of its values, and of its covariances
    with the others.
    """
    values = np.abs(x) if signed else x
    quantiles = np.quantile(values, np.linspace(0.02, 0.98, 25), axis=0).T
    return np.concatenate([quantiles, 0.3 * signature(np.cov(x.T))], axis=1)


def _moments(x: Floats) -> list[Floats]:
    """Matrices that a rotation conjugates: second moments, plain and weighted by how large a row
    is.
    """
    size = (x * x).mean(1, keepdims=True)
    centred = x - x.mean(0)
    return [
        centred.T @ centred / len(x),
        (x * size).T @ x / len(x),
        (x / np.maximum(size, 1e-12)).T @ x / len(x),
    ]


def _leaning(x: Floats) -> Floats:
    return np.asarray(
        x.mean(0) + ((x * x).mean(1, keepdims=True) * x).mean(0) / max(float((x * x).mean()), 1e-12)
    )


def vocabulary(view: HiddenStates, *, batch: int = 256) -> list[int]:
    """The text itself, from the hidden states of an open language model.

    Sees: moved hidden states of a text, token after token or in no order (`view.shuffled`), and the
    model. Recovers: the tokens, in order. Why it works: a hidden state is almost surely told from
    every other by its sorted values, which no permutation changes, or by its inner products with
    those before it, which no rotation changes; so each token is the one of the vocabulary that
    gives the nearest, one after the other, and which row is the next is found by the same
    comparison. What stops it: a model that is not open; noise that costs as much as it protects.
    Floor: one in the vocabulary. Ceiling: all tokens. References: Hidden No More (2505.18332).
    Cost: one forward pass a token for each of the vocabulary.
    """
    moved = view.moved.detach().double()
    turned = isinstance(GROUPS[view.kind], Orthogonal)
    size = int(view.model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
    found: list[int] = []
    rows: list[int] = []  # which row was which place's
    known = moved[:0]
    for t in range(len(moved)):
        least, token, row, state = np.inf, 0, t, moved[t]
        left = torch.tensor(
            [r for r in range(len(moved)) if r not in rows] if view.shuffled else [t]
        )
        for start in range(0, size, batch):
            tried = torch.arange(start, min(start + batch, size))
            ids = torch.cat(
                [torch.tensor(found, dtype=torch.long).expand(len(tried), -1), tried[:, None]], 1
            )
            with torch.no_grad():
                states = (
                    view.model(input_ids=ids, output_hidden_states=True, use_cache=False)
                    .hidden_states[view.layer][:, -1]
                    .double()
                    .cpu()
                )
            if turned:
                here = torch.cat([states @ known.T, states.square().sum(1, keepdim=True)], 1)
                there = torch.cat(
                    [moved[left] @ moved[rows].T, moved[left].square().sum(1, keepdim=True)], 1
                )
            else:
                here, there = (
                    (v.abs() if view.kind == "signed" else v).sort(1).values
                    for v in (states, moved[left])
                )
            apart = torch.cdist(
                here, there, compute_mode="donot_use_mm_for_euclid_dist"
            )  # [tried, rows that are left]
            at, column = divmod(int(apart.argmin()), len(left))
            if float(apart[at, column]) < least:
                least, token, row, state = (
                    float(apart[at, column]),
                    int(tried[at]),
                    int(left[column]),
                    states[at],
                )
        found.append(token)
        rows.append(row)
        known = torch.cat([known, state[None]])
    return found
