"""Attacks on features under a key, at a locked backbone's edges or between client and server."""

from __future__ import annotations

import numpy as np
import torch

from regauge.attacks.products import channel_signatures, fit_permutation, fit_rotation, fit_signs
from regauge.attacks.views import HiddenStates, KnownInputs, ObservedFeatures
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
    """Recover the key's member on the stream from inputs with known features.

    Sees: features before and after the key, for the same tokens.
    Recovers: the member of the stream.
    Why it works: a token gives one equation per channel; a handful of tokens distinguishes the d
        channels of a permutation, and d tokens determine a rotation (Procrustes).
    What stops it: an embedding that the adversary does not have, or a fresh key for every message.
    Floor: one position in d.
    Ceiling: all positions.
    References: Schönemann 1966 (Procrustes); Hidden No More (2505.18332).
    """
    y, x = (v.detach().double().cpu().numpy().T[None] for v in (view.moved, view.plain))
    return GROUPS[view.kind].fit(plain=(y, x))


def feature_statistics(view: ObservedFeatures) -> Member:
    """Recover the key's member on the stream from the statistics of features under the key.

    Sees: features of unknown inputs under the key, and features of other inputs of the same kind
        through the public embedding.
    Recovers: the member of the stream, as far as the two samples have the same statistics.
    Why it works: a permutation reorders channels with their distributions; a rotation preserves the
        spectrum of the covariance.
    What stops it: a fresh key for every batch, or an embedding that is not public.
    Floor: one position in d.
    Ceiling: the result with known inputs.
    References: Saini et al. (2602.11088), for reused keys.
    """
    y, x = (v.detach().double().cpu().numpy() for v in (view.moved, view.others))
    group = GROUPS[view.kind]
    if isinstance(group, Orthogonal):
        pairs = list(zip(_moments(y), _moments(x), strict=True))
        rotation = fit_rotation(pairs)
        moved_skew, plain_skew = (_skew(v) for v in (y, x))
        return Dense((rotation if moved_skew @ rotation @ plain_skew > 0 else -rotation)[None])
    signed = isinstance(group, SignedPermutation)
    a, b = (_channels(v, signed) for v in (y, x))
    scale = np.maximum(b.std(0), 1e-12) * b.shape[1] ** 0.5
    a, b = a / scale, b / scale
    similarity = a @ b.T - 0.5 * (b * b).sum(1)[None, :] - 0.5 * (a * a).sum(1)[:, None]
    pairs = [(np.corrcoef(y.T), np.corrcoef(x.T))]
    index = fit_permutation(pairs, assign(similarity[None])[0], signed=signed)
    if not signed:
        return Monomial(index[None])
    by_products = fit_signs(pairs, index)
    sign = 1.0 if (by_products * y.mean(0) * x.mean(0)[index]).sum() >= 0 else -1.0
    return Monomial(index[None], (sign * by_products)[None])


def _channels(x: Floats, signed: bool) -> Floats:
    """Return order-independent features of each channel: quantiles of its values and of its
    covariances.
    """
    values = np.abs(x) if signed else x
    quantiles = np.quantile(values, np.linspace(0.02, 0.98, 25), axis=0).T
    return np.concatenate([quantiles, 0.3 * channel_signatures(np.cov(x.T))], axis=1)


def _moments(x: Floats) -> list[Floats]:
    """Return matrices that a rotation conjugates: second moments, plain and weighted by the row
    norm.
    """
    size = (x * x).mean(1, keepdims=True)
    centred = x - x.mean(0)
    return [
        centred.T @ centred / len(x),
        (x * size).T @ x / len(x),
        (x / np.maximum(size, 1e-12)).T @ x / len(x),
    ]


def _skew(x: Floats) -> Floats:
    """Return a vector that is odd in the features and turns with them: the mean plus a third
    moment.
    """
    return np.asarray(
        x.mean(0) + ((x * x).mean(1, keepdims=True) * x).mean(0) / max(float((x * x).mean()), 1e-12)
    )


def vocabulary_search(view: HiddenStates, *, batch: int = 256) -> list[int]:
    """Recover a text from the hidden states of an open language model.

    Sees: transformed hidden states of a text, in order or shuffled (`view.shuffled`), and the
        model.
    Recovers: the tokens, in order.
    Why it works: a hidden state is almost surely identified by its sorted values, which no
        permutation changes, or by its inner products with the previous states, which no rotation
        changes. Each token is the vocabulary entry with the nearest state, one position after the
        other; the same comparison finds the next row of a shuffled text.
    What stops it: a model that is not open; noise large enough to cost utility.
    Floor: one in the vocabulary.
    Ceiling: all tokens.
    References: Hidden No More (2505.18332).
    Cost: per token, one forward pass for each vocabulary entry.
    """
    moved = view.moved.detach().double()
    is_rotation = isinstance(GROUPS[view.kind], Orthogonal)
    size = int(view.model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
    tokens: list[int] = []
    used_rows: list[int] = []  # the row of each position
    prefix_states = moved[:0]
    for position in range(len(moved)):
        best_distance, token, row, state = np.inf, 0, position, moved[position]
        open_rows = torch.tensor(
            [r for r in range(len(moved)) if r not in used_rows] if view.shuffled else [position]
        )
        for start in range(0, size, batch):
            candidates = torch.arange(start, min(start + batch, size))
            ids = torch.cat(
                [
                    torch.tensor(tokens, dtype=torch.long).expand(len(candidates), -1),
                    candidates[:, None],
                ],
                1,
            )
            with torch.no_grad():
                states = (
                    view.model(input_ids=ids, output_hidden_states=True, use_cache=False)
                    .hidden_states[view.layer][:, -1]
                    .double()
                    .cpu()
                )
            if is_rotation:
                candidate_marks = torch.cat(
                    [states @ prefix_states.T, states.square().sum(1, keepdim=True)], 1
                )
                row_marks = torch.cat(
                    [
                        moved[open_rows] @ moved[used_rows].T,
                        moved[open_rows].square().sum(1, keepdim=True),
                    ],
                    1,
                )
            else:
                candidate_marks, row_marks = (
                    (v.abs() if view.kind == "signed" else v).sort(1).values
                    for v in (states, moved[open_rows])
                )
            distances = torch.cdist(
                candidate_marks, row_marks, compute_mode="donot_use_mm_for_euclid_dist"
            )  # [candidates, open rows]
            at, column = divmod(int(distances.argmin()), len(open_rows))
            if float(distances[at, column]) < best_distance:
                best_distance, token, row, state = (
                    float(distances[at, column]),
                    int(candidates[at]),
                    int(open_rows[column]),
                    states[at],
                )
        tokens.append(token)
        used_rows.append(row)
        prefix_states = torch.cat([prefix_states, state[None]])
    return tokens
