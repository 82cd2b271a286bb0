"""Attacks that put together what a server of split learning sees: rows back in order and columns
back in place, passes of one sample found among others, noise averaged away, and tokens of a
shuffled batch put back together.

Streams are [samples, tokens, channels]. All see views and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment

from regauge.attacks.features import GROUPS, known_inputs, seen_features
from regauge.attacks.inversion import place_scores
from regauge.attacks.views import KnownInputs, KnownStreams, PairedImages, SeenFeatures, Served
from regauge.core.fit import assign
from regauge.core.groups import Kind, Orthogonal
from regauge.core.members import Member, Monomial
from regauge.core.rng import Floats

Tensor = torch.Tensor


def known_streams(view: KnownStreams, *, rounds: int = 5) -> tuple[Member, Tensor]:
    """The member of the columns and the order of the rows, from samples that are known: (member,
    [samples, tokens], for each row its place).

    Sees: streams as they came, and what the public embedding makes of the same samples. Recovers:
    the fixed element of the columns, and with it every row's place. Why it works: a channel's
    values, sorted over the rows, are the same whatever the rows' order, so that the columns are
    found first; a rotation keeps every row's length, so that there the rows are. What stops it: an
    element that is fresh for every pass, which needs a backbone that is moved afresh; an embedding
    that is secret; noise. Floor: one place in d. Ceiling: all. References: Schönemann 1966
    (Procrustes). Cost: one assignment.
    """
    y, x = (v.detach().double().cpu().numpy() for v in (view.moved, view.plain))
    group = GROUPS[view.kind]
    if isinstance(group, Orthogonal):
        lengths = [
            -np.abs((b * b).sum(1)[:, None] - (a * a).sum(1)[None])
            for b, a in zip(y, x, strict=True)
        ]
        order = np.stack([assign(one[None])[0] for one in lengths])
        for _ in range(rounds):
            member = known_inputs(_pairs(y, x, order, view.kind))
            again = _places(y @ member.matrix()[0], x)
            if np.array_equal(again, order):
                break
            order = again
        return member, torch.from_numpy(order)
    up, down = (np.sort(v, axis=1).transpose(2, 0, 1).reshape(v.shape[2], -1) for v in (x, -x))
    here = np.sort(y, axis=1).transpose(2, 0, 1).reshape(y.shape[2], -1)
    apart = _apart(here, up)
    other = _apart(here, down) if view.kind == "signed" else np.full_like(apart, np.inf)
    index = assign(-np.minimum(apart, other)[None])[0]
    rows = np.arange(len(index))
    signs = np.where(other[rows, index] < apart[rows, index], -1.0, 1.0)
    first = Monomial(index[None], signs[None] if view.kind == "signed" else None)
    order = _places(y @ first.matrix()[0], x)
    return known_inputs(_pairs(y, x, order, view.kind)), torch.from_numpy(order)


def reused_key(passes: Sequence[Served], others: Tensor, kind: Kind = "permutation") -> Member:
    """The member of the columns from what one key gave away over many passes, whatever the order of
    the rows.

    Sees: streams of inputs that it does not know, and streams of other inputs through the public
    embedding. Recovers: the member. Why it works: the statistics of a channel are over all rows of
    all passes, and a shuffle of rows changes none of them. What stops it: as of `seen_features`.
    Floor: one place in d. Ceiling: what known inputs give. References: Saini et al. (2602.11088),
    for keys that are used again. Cost: that of `seen_features`.
    """
    moved = torch.cat([view.stream.detach().flatten(0, 1) for view in passes])
    return seen_features(SeenFeatures(moved, others.detach().flatten(0, -2), kind))


def unmoved(member: Member, stream: Tensor) -> Tensor:
    """The stream without the member, once it is known."""
    matrix = torch.from_numpy(np.linalg.inv(member.matrix()[0])).to(stream)
    return stream @ matrix.T


def _pairs(y: Floats, x: Floats, order: np.ndarray, kind: Kind) -> KnownInputs:
    put = np.take_along_axis(x, order[..., None], 1)
    return KnownInputs(
        torch.from_numpy(put.reshape(-1, x.shape[2])),
        torch.from_numpy(y.reshape(-1, y.shape[2])),
        kind,
    )


def _places(y: Floats, x: Floats) -> np.ndarray:
    return np.stack([assign(-_apart(b, a)[None])[0] for b, a in zip(y, x, strict=True)])


def _apart(a: Floats, b: Floats) -> Floats:
    return np.asarray((a * a).sum(1)[:, None] + (b * b).sum(1)[None] - 2 * a @ b.T)


def relinked(first: Tensor, second: Tensor, *, rounds: int = 3) -> Tensor:
    """Which sample of a later pass is which of an earlier one: over fresh shuffles, noise, and
    training steps between. For each of the first, a place in the second.

    Sees: streams of the same samples in two passes. Recovers: who is who. Why it works: a sample's
    tokens stay near each other as a set. Noise lies in all directions alike, and a filter keeps
    those in which tokens differ; training moves all tokens by one affine map, which is fitted to
    the pairs found so far. What stops it: noise that drowns every token; a new element of the
    columns for every pass. Floor: one in as many as there are. Ceiling: all. References: Besl and
    McKay 1992 (iterated closest points). Cost: all pairs of samples by all pairs of tokens.
    """
    a, b = (_filtered(v.double()) for v in (first, second))
    found = torch.from_numpy(linear_sum_assignment(_sets_apart(a, b).numpy())[1])
    for _ in range(rounds):
        x, y = b[found], a
        order = _matched(y, x)
        x = x.gather(1, order[..., None].expand_as(x)).flatten(0, 1)
        with_one = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)
        gram = with_one.T @ with_one
        lead = 1e-3 * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
        # Towards leaving all as it is: few pairs must not decide.
        stay = torch.cat(
            [torch.eye(x.shape[1], dtype=x.dtype), torch.zeros(1, x.shape[1], dtype=x.dtype)]
        )
        weight = torch.linalg.solve(gram + lead, with_one.T @ y.flatten(0, 1) + lead @ stay)
        moved = b @ weight[:-1] + weight[-1]
        again = torch.from_numpy(linear_sum_assignment(_sets_apart(a, moved).numpy())[1])
        if torch.equal(again, found):
            break
        found = again
    return found


def averaged(views: Sequence[Tensor], *, link: bool = True, match: bool = True) -> Tensor:
    """One stream of each sample from many noisy ones: [samples, tokens, channels], in the first
    view's order. Samples that are known not to change places need no `link`, and tokens no `match`.

    Sees: the same samples in several passes, each with fresh noise and in an order of its own.
    Recovers: the streams, with less noise. Why it works: noise that is drawn afresh is different
    every time, what it hides is not: k epochs leave 1 / sqrt(k) of it. Samples are linked first,
    tokens matched to the mean so far. What stops it: noise that is drawn once for each sample and
    kept; few epochs; rounding, which is the same while the weights are. Floor: one noisy view.
    Ceiling: the streams without noise. References: Erlingsson et al. 2014 (permanent randomised
    response, against this). Cost: that of `relinked` for each view.
    """
    mean = views[0].double()
    for count, view in enumerate(views[1:], 1):
        view = view.double()
        if link:
            view = view[relinked(mean, view) if match else _in_order(mean, view)]
        if match:
            order = _matched(_filtered(mean), _filtered(view))
            view = view.gather(1, order[..., None].expand_as(view))
        mean = mean + (view - mean) / (count + 1)
    return mean.to(views[0].dtype)


def _in_order(first: Tensor, second: Tensor) -> Tensor:
    """Which sample is which, of tokens that are at their places: nearest as wholes."""
    apart = torch.cdist(_filtered(first).flatten(1), _filtered(second).flatten(1))
    return torch.from_numpy(linear_sum_assignment(apart.numpy())[1])


def _filtered(x: Tensor) -> Tensor:
    """Tokens less their mean, each direction by how much of it is no noise: of the size of the
    smallest variances, which are noise alone.
    """
    flat = x.flatten(0, 1)
    flat = flat - flat.mean(0)
    values, vectors = torch.linalg.eigh(flat.T @ flat / len(flat))
    floor = values[: max(1, len(values) // 8)].mean()
    keep = ((values - floor) / values.clamp(min=1e-300)).clamp(min=0)
    out: Tensor = ((flat @ vectors) * keep @ vectors.T).view_as(x)
    return out


def _sets_apart(a: Tensor, b: Tensor, chunk: int = 16) -> Tensor:
    """For each pair of samples, how far their tokens are from the nearest of the other, both
    ways.
    """
    out = []
    squares = b.square().sum(-1)
    for part in torch.split(a, chunk):
        apart = (
            part.square().sum(-1)[:, :, None, None]
            + squares[None, None]
            - 2 * torch.einsum("itd,jsd->itjs", part, b)
        )
        out.append(apart.min(3).values.sum(1) + apart.min(1).values.sum(2))  # [samples, samples]
    return torch.cat(out)


def _matched(to: Tensor, tokens: Tensor) -> Tensor:
    """For each sample, which token belongs at each place of another view of it."""
    apart = torch.cdist(to, tokens)
    return torch.stack([torch.from_numpy(linear_sum_assignment(one.numpy())[1]) for one in apart])


def regrouped(
    view: PairedImages, *, codes: int = 24, tries: int = 4, sweeps: int = 20, seed: int = 0
) -> Tensor:
    """Images out of a batch whose tokens changed places between samples: [images, places], for each
    the number of the token (as they came, counted through the batch). Which image is which sample
    is not said; a first token that is of no patch is not looked for.

    Sees: one shuffled batch (`view.seen`), and features of its own in order. Recovers: which tokens
    are of one image, and where. Why it works: a token tells its place, and patches of one image go
    together: light, skin, edges that go on. A Gaussian over whole images, learned from the pairs,
    says how likely each token is beside the others; assignments put one token of every place to
    each image, again and again. What stops it: noise; large batches of images that are alike.
    Floor: one image in as many as there are. Ceiling: all. References: Gallagher 2012, for solvers
    of jigsaw puzzles. Cost: sweeps of one assignment for each place.
    """
    places = (view.images.shape[-1] // view.patch) * (view.images.shape[-2] // view.patch)
    skip = view.features.shape[1] - places
    own = view.features[:, skip:].double()
    count = len(view.seen)
    tokens = view.seen[:, skip:].flatten(0, 1)
    score = place_scores(view, seed=seed)[:, skip:, skip:].flatten(0, 1).double()
    # Every place is there once for each image.
    place = torch.from_numpy(linear_sum_assignment(-score.repeat(1, count).numpy())[1]) % places
    mean = own.mean(0)
    centred = (own - mean).flatten(0, 1)
    basis = torch.linalg.eigh(centred.T @ centred).eigenvectors[:, -codes:]
    learned = ((own - mean) @ basis).flatten(1)
    gram = learned.T @ learned / len(learned)
    inside = torch.arange(len(gram)) // basis.shape[1]
    shrunk = gram * (
        0.9 + 0.1 * (inside[:, None] == inside[None])
    )  # a little less between places than in this sample
    precision = torch.linalg.inv(
        shrunk + 1e-6 * shrunk.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    )
    blocks = precision.view(places, basis.shape[1], places, basis.shape[1]).permute(0, 2, 1, 3)
    at = torch.stack([(place == p).nonzero()[:, 0] for p in range(places)])  # [places, images]
    code = torch.stack(
        [(tokens[at[p]].double() - mean[p]) @ basis for p in range(places)]
    )  # [places, images, codes]
    draw = torch.Generator().manual_seed(seed)
    best, found = float("inf"), torch.stack([torch.arange(count)] * places)
    for _ in range(tries):
        who, cost = _gathered(code, blocks, torch.randperm(places, generator=draw).tolist(), sweeps)
        if cost < best:
            best, found = cost, who
    flat = torch.stack([at[p][found[p]] for p in range(places)], 1)
    return flat // places * view.seen.shape[1] + flat % places + skip


def _gathered(
    code: Tensor, blocks: Tensor, order: Sequence[int], sweeps: int
) -> tuple[Tensor, float]:
    """Tokens of each place put to images: (who, how unlikely). The first place names the images;
    the others are shared among them by how well they fit what is there, more and more surely, and
    in the end each goes to one.
    """
    places, count, _ = code.shape
    shares = [torch.full((count, count), 1 / count, dtype=code.dtype) for _ in range(places)]
    shares[order[0]] = torch.eye(count, dtype=code.dtype)
    there = {p: shares[p] @ code[p] for p in range(places)}
    for beta in torch.logspace(-1.5, 0.7, sweeps).tolist():
        for p in order[1:]:
            pull = sum(
                (there[q] @ blocks[q, p] for q in range(places) if q != p),
                torch.zeros_like(code[p]),
            )
            shares[p] = _doubly(-beta * pull @ code[p].T)
            there[p] = shares[p] @ code[p]
    who = torch.stack([torch.from_numpy(linear_sum_assignment(-one.numpy())[1]) for one in shares])
    still = 0
    for p in [*order[1:], *(p for _ in range(sweeps) for p in order)]:
        pull = sum(
            (code[q][who[q]] @ blocks[q, p] for q in range(places) if q != p),
            torch.zeros_like(code[p]),
        )
        again = torch.from_numpy(linear_sum_assignment((pull @ code[p].T).numpy())[1])
        still = still + 1 if torch.equal(again, who[p]) else 0
        who[p] = again
        if still >= places:
            break
    put = torch.stack([code[p][who[p]] for p in range(places)])
    return who, float(torch.einsum("pic,pqcd,qid->", put, blocks, put)) / 2


def _doubly(score: Tensor, rounds: int = 20) -> Tensor:
    """Scores as shares: rows and columns that each add up to one."""
    for _ in range(rounds):
        score = score - score.logsumexp(1, keepdim=True)
        score = score - score.logsumexp(0, keepdim=True)
    return score.exp()
