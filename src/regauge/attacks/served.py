"""Attacks on what a split-learning server receives over several rows, samples and passes.

They restore the order of rows and columns, link passes of one sample, average noise, and regroup
the tokens of a shuffled batch.

Streams are [samples, tokens, channels].
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from regauge.attacks.features import GROUPS, feature_statistics, known_inputs
from regauge.attacks.inversion import position_scores
from regauge.attacks.views import (
    KnownInputs,
    KnownStreams,
    ObservedFeatures,
    PairedImages,
    ServerPass,
)
from regauge.core.assignment import best_assignment, sinkhorn
from regauge.core.fit import assign
from regauge.core.groups import Kind, Orthogonal
from regauge.core.members import Member, Monomial
from regauge.core.rng import Floats

Tensor = torch.Tensor


def known_streams(view: KnownStreams, *, rounds: int = 5) -> tuple[Member, Tensor]:
    """Recover the columns' member and the rows' order from known samples: (member, [samples,
    tokens], the position of each row).

    Sees: streams as received, and the output of the public embedding for the same samples.
    Recovers: the fixed element of the columns, and with it every row's position.
    Why it works: a channel's values, sorted over the rows, do not depend on the rows' order, so
        that the columns are found first; a rotation preserves the length of each row, so that for
        rotations the rows are found first.
    What stops it: a fresh element for every pass, which requires transforming the backbone each
        time; a secret embedding; noise.
    Floor: one position in d.
    Ceiling: all.
    References: Schönemann 1966 (Procrustes).
    Cost: one assignment.
    """
    y, x = (v.detach().double().cpu().numpy() for v in (view.moved, view.plain))
    group = GROUPS[view.kind]
    if isinstance(group, Orthogonal):
        lengths = [
            -np.abs((b * b).sum(1)[:, None] - (a * a).sum(1)[None])
            for b, a in zip(y, x, strict=True)
        ]
        order = np.stack([assign(score[None])[0] for score in lengths])
        for _ in range(rounds):
            member = known_inputs(_pairs(y, x, order, view.kind))
            updated = _match_rows(y @ member.matrix()[0], x)
            if np.array_equal(updated, order):
                break
            order = updated
        return member, torch.from_numpy(order)
    sorted_plain, sorted_negated = (
        np.sort(v, axis=1).transpose(2, 0, 1).reshape(v.shape[2], -1) for v in (x, -x)
    )
    sorted_moved = np.sort(y, axis=1).transpose(2, 0, 1).reshape(y.shape[2], -1)
    distance = _squared_distances(sorted_moved, sorted_plain)
    negated_distance = (
        _squared_distances(sorted_moved, sorted_negated)
        if view.kind == "signed"
        else np.full_like(distance, np.inf)
    )
    index = assign(-np.minimum(distance, negated_distance)[None])[0]
    rows = np.arange(len(index))
    signs = np.where(negated_distance[rows, index] < distance[rows, index], -1.0, 1.0)
    first = Monomial(index[None], signs[None] if view.kind == "signed" else None)
    order = _match_rows(y @ first.matrix()[0], x)
    return known_inputs(_pairs(y, x, order, view.kind)), torch.from_numpy(order)


def reused_key(passes: Sequence[ServerPass], others: Tensor, kind: Kind = "permutation") -> Member:
    """Recover the columns' member from many passes under one key, whatever the order of the rows.

    Sees: streams of unknown inputs, and streams of other inputs through the public embedding.
    Recovers: the member.
    Why it works: the statistics of a channel are over all rows of all passes, and shuffling rows
        does not change them.
    What stops it: as for `feature_statistics`.
    Floor: one position in d.
    Ceiling: the result with known inputs.
    References: Saini et al. (2602.11088), for reused keys.
    Cost: that of `feature_statistics`.
    """
    moved = torch.cat([view.stream.detach().flatten(0, 1) for view in passes])
    return feature_statistics(ObservedFeatures(moved, others.detach().flatten(0, -2), kind))


def _pairs(y: Floats, x: Floats, order: np.ndarray, kind: Kind) -> KnownInputs:
    """Return the rows of both streams in matching order."""
    ordered = np.take_along_axis(x, order[..., None], 1)
    return KnownInputs(
        torch.from_numpy(ordered.reshape(-1, x.shape[2])),
        torch.from_numpy(y.reshape(-1, y.shape[2])),
        kind,
    )


def _match_rows(y: Floats, x: Floats) -> np.ndarray:
    """Return the position of each row by assignment, sample by sample."""
    return np.stack([assign(-_squared_distances(b, a)[None])[0] for b, a in zip(y, x, strict=True)])


def _squared_distances(a: Floats, b: Floats) -> Floats:
    """Return the squared distances between rows."""
    return np.asarray((a * a).sum(1)[:, None] + (b * b).sum(1)[None] - 2 * a @ b.T)


def relink_samples(first: Tensor, second: Tensor, *, rounds: int = 3) -> Tensor:
    """Link the samples of two passes: for each sample of the first, its index in the second.

    It tolerates fresh shuffles, noise, and training steps between the passes.

    Sees: features of the same samples in two passes.
    Recovers: which sample is which.
    Why it works: a sample's tokens stay near each other as a set. Noise is isotropic, and a filter
        keeps the directions in which tokens differ; training changes all tokens by one affine map,
        which is fitted to the pairs found so far.
    What stops it: noise much larger than the differences of tokens; a new element on the columns
        for every pass.
    Floor: a random order: one of n samples is right.
    Ceiling: all samples are linked.
    References: Besl and McKay 1992 (iterated closest points).
    Cost: all pairs of samples by all pairs of tokens.
    """
    a, b = (_denoise(v.double()) for v in (first, second))
    links = torch.from_numpy(best_assignment(_set_distances(a, b)))
    for _ in range(rounds):
        x, y = b[links], a
        order = _match_tokens(y, x)
        x = x.gather(1, order[..., None].expand_as(x)).flatten(0, 1)
        design = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)
        gram = design.T @ design
        penalty = 1e-3 * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
        # Shrink towards the identity: few pairs must not decide.
        identity = torch.cat(
            [torch.eye(x.shape[1], dtype=x.dtype), torch.zeros(1, x.shape[1], dtype=x.dtype)]
        )
        weight = torch.linalg.solve(gram + penalty, design.T @ y.flatten(0, 1) + penalty @ identity)
        mapped = b @ weight[:-1] + weight[-1]
        updated = torch.from_numpy(best_assignment(_set_distances(a, mapped)))
        if torch.equal(updated, links):
            break
        links = updated
    return links


def average_views(views: Sequence[Tensor], *, link: bool = True, match: bool = True) -> Tensor:
    """Average many noisy streams of each sample: [samples, tokens, channels], in the first view's
    order.

    Sees: the same samples in several passes, each with fresh noise and its own order.
    Recovers: the streams, with less noise.
    Why it works: fresh noise differs every time, the signal does not: k epochs leave 1 / sqrt(k) of
        the noise. Samples are linked first, then tokens matched to the running mean.
    What stops it: noise sampled once per sample and cached; few epochs; rounding, which is the same
        while the weights are.
    Floor: one noisy view.
    Ceiling: the streams without noise.
    References: Erlingsson et al. 2014 (permanent randomised response, against this).
    Cost: that of `relink_samples` for each view.

    Args:
        views: The streams of the passes.
        link: Whether samples may change places and must be linked.
        match: Whether tokens may change places and must be matched.
    """
    mean = views[0].double()
    for count, view in enumerate(views[1:], 1):
        view = view.double()
        if link:
            view = view[relink_samples(mean, view) if match else _link_ordered(mean, view)]
        if match:
            order = _match_tokens(_denoise(mean), _denoise(view))
            view = view.gather(1, order[..., None].expand_as(view))
        mean = mean + (view - mean) / (count + 1)
    return mean.to(views[0].dtype)


def _link_ordered(first: Tensor, second: Tensor) -> Tensor:
    """Link samples whose tokens are in order: nearest as a whole."""
    distance = torch.cdist(_denoise(first).flatten(1), _denoise(second).flatten(1))
    return torch.from_numpy(best_assignment(distance))


def _denoise(x: Tensor) -> Tensor:
    """Centre tokens and scale each direction by its share of signal; the smallest variances
    estimate the noise.
    """
    flat = x.flatten(0, 1)
    flat = flat - flat.mean(0)
    values, vectors = torch.linalg.eigh(flat.T @ flat / len(flat))
    noise = values[: max(1, len(values) // 8)].mean()
    gain = ((values - noise) / values.clamp(min=1e-300)).clamp(min=0)
    out: Tensor = ((flat @ vectors) * gain @ vectors.T).view_as(x)
    return out


def _set_distances(a: Tensor, b: Tensor, chunk: int = 16) -> Tensor:
    """Return, for each pair of samples, the summed distance of each token to the nearest of the
    other, both ways.
    """
    out = []
    squares = b.square().sum(-1)
    for rows in torch.split(a, chunk):
        distance = (
            rows.square().sum(-1)[:, :, None, None]
            + squares[None, None]
            - 2 * torch.einsum("itd,jsd->itjs", rows, b)
        )
        out.append(
            distance.min(3).values.sum(1) + distance.min(1).values.sum(2)
        )  # [samples, samples]
    return torch.cat(out)


def _match_tokens(reference: Tensor, tokens: Tensor) -> Tensor:
    """Return, for each sample, the token that belongs at each position of another view."""
    distance = torch.cdist(reference, tokens)
    return torch.stack([torch.from_numpy(best_assignment(cost)) for cost in distance])


def regroup_tokens(
    view: PairedImages, *, codes: int = 24, tries: int = 4, sweeps: int = 20, seed: int = 0
) -> Tensor:
    """Recover images from a batch whose tokens were shuffled between samples.

    Sees: one shuffled batch (`view.observed`), and features of the attacker's own images in order.
    Recovers: which tokens belong to one image, and where.
    Why it works: a token reveals its position, and patches of one image go together: light, skin,
        continuous edges. A Gaussian over whole images, learned from the pairs, gives the likelihood
        of each token given the others; repeated assignments give each image one token per position.
    What stops it: noise; large batches of similar images.
    Floor: one image in as many as there are.
    Ceiling: all.
    References: Gallagher 2012, for solvers of jigsaw puzzles.
    Cost: sweeps of one assignment per position.

    Args:
        view: The shuffled batch and the adversary's pairs.
        codes: Number of principal components per token.
        tries: Number of random orders of positions.
        sweeps: Number of temperatures, and of refinement sweeps.
        seed: Random seed.

    Returns:
        [images, positions]: the token numbers, counted through the batch. Images come in no
        particular order; a first token without a patch is left out.
    """
    positions = (view.images.shape[-1] // view.patch) * (view.images.shape[-2] // view.patch)
    skip = view.features.shape[1] - positions
    features = view.features[:, skip:].double()
    count = len(view.observed)
    tokens = view.observed[:, skip:].flatten(0, 1)
    score = position_scores(view, seed=seed)[:, skip:, skip:].flatten(0, 1).double()
    # Every position occurs once per image.
    position = torch.from_numpy(best_assignment(-score.repeat(1, count))) % positions
    mean = features.mean(0)
    centred = (features - mean).flatten(0, 1)
    basis = torch.linalg.eigh(centred.T @ centred).eigenvectors[:, -codes:]
    image_codes = ((features - mean) @ basis).flatten(1)
    gram = image_codes.T @ image_codes / len(image_codes)
    block = torch.arange(len(gram)) // basis.shape[1]
    shrunk = gram * (
        0.9 + 0.1 * (block[:, None] == block[None])
    )  # shrink the covariance between positions
    precision = torch.linalg.inv(
        shrunk + 1e-6 * shrunk.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    )
    blocks = precision.view(positions, basis.shape[1], positions, basis.shape[1]).permute(
        0, 2, 1, 3
    )
    token_index = torch.stack(
        [(position == p).nonzero()[:, 0] for p in range(positions)]
    )  # [positions, images]
    token_codes = torch.stack(
        [(tokens[token_index[p]].double() - mean[p]) @ basis for p in range(positions)]
    )  # [positions, images, codes]
    generator = torch.Generator().manual_seed(seed)
    best_cost, best_groups = float("inf"), torch.stack([torch.arange(count)] * positions)
    for _ in range(tries):
        groups, cost = _assign_tokens(
            token_codes, blocks, torch.randperm(positions, generator=generator).tolist(), sweeps
        )
        if cost < best_cost:
            best_cost, best_groups = cost, groups
    flat = torch.stack([token_index[p][best_groups[p]] for p in range(positions)], 1)
    return flat // positions * view.observed.shape[1] + flat % positions + skip


def _assign_tokens(
    code: Tensor, blocks: Tensor, order: Sequence[int], sweeps: int
) -> tuple[Tensor, float]:
    """Assign the tokens of each position to images by annealing: (groups, cost).

    The first position defines the images. The others are shared among them by their fit, with
    falling temperature, and finally assigned to one each.
    """
    positions, count, _ = code.shape
    shares = [torch.full((count, count), 1 / count, dtype=code.dtype) for _ in range(positions)]
    shares[order[0]] = torch.eye(count, dtype=code.dtype)
    expected = {p: shares[p] @ code[p] for p in range(positions)}
    for beta in torch.logspace(-1.5, 0.7, sweeps).tolist():
        for p in order[1:]:
            gradient = sum(
                (expected[q] @ blocks[q, p] for q in range(positions) if q != p),
                torch.zeros_like(code[p]),
            )
            shares[p] = sinkhorn(-beta * gradient @ code[p].T)
            expected[p] = shares[p] @ code[p]
    groups = torch.stack([torch.from_numpy(best_assignment(-share)) for share in shares])
    unchanged = 0
    for p in [*order[1:], *(p for _ in range(sweeps) for p in order)]:
        gradient = sum(
            (code[q][groups[q]] @ blocks[q, p] for q in range(positions) if q != p),
            torch.zeros_like(code[p]),
        )
        updated = torch.from_numpy(best_assignment(gradient @ code[p].T))
        unchanged = unchanged + 1 if torch.equal(updated, groups[p]) else 0
        groups[p] = updated
        if unchanged >= positions:
            break
    chosen = torch.stack([code[p][groups[p]] for p in range(positions)])
    return groups, float(torch.einsum("pic,pqcd,qid->", chosen, blocks, chosen)) / 2
