"""Attacks on texts that cross to a server of split learning: which tokens they are, and in which
order.

What enters the backbone is a function of one token and its place, and both tables are small: every
state that can be is made and compared. Deeper states are `features.vocabulary`'s.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from regauge.attacks.features import GROUPS
from regauge.attacks.views import EmbeddedText, PairedTexts, Served
from regauge.core.fit import assign
from regauge.core.groups import Orthogonal, SignedPermutation
from regauge.models.cut import cut

Tensor = torch.Tensor


def order_told(view: Served) -> Tensor | None:
    """The places of shuffled tokens, [samples, tokens], read off what crosses beside the stream;
    None if nothing there tells.

    Sees: masks, position ids and rotary tables, which follow the rows. Recovers: the order,
    exactly. Why it works: attention needs them as they are. A causal mask lets a token see as many
    as come before it; position ids are the order; rotary tables are functions of it. What stops it:
    a model that needs none of them (BERT, ViT: there the place is in the stream). Floor: one place
    in as many as there are. Ceiling: all. References: Hidden No More (2505.18332), for sequences in
    another order. Cost: none.
    """
    batch, n = view.stream.shape[:2]
    for name, value in view.others.items():
        if name.startswith("position_ids") and value.dim() == 2 and value.shape[1] == n:
            return _ranks(value.double()).expand(batch, -1)
    for name, value in view.others.items():
        if name.startswith("attention_mask") and value.dim() == 4 and value.shape[-2:] == (n, n):
            open_ = (value if value.dtype == torch.bool else value > -1).double()
            seen = open_[:, 0].sum(-1)
            if all(len(set(row.tolist())) == n for row in seen):
                return _ranks(seen).expand(batch, -1)
    for name, value in view.others.items():
        if name.startswith("position_embeddings") and value.dim() == 3 and value.shape[1] == n:
            # The slowest plane turns by less than half a circle: its cosine falls with the place.
            slow = value[..., value.shape[-1] // 2 - 1].double()
            if all(len(set(row.tolist())) == n for row in slow):
                return _ranks(-slow).expand(batch, -1)
    return None


def _ranks(values: Tensor) -> Tensor:
    return values.argsort(1).argsort(1)


def embedded(
    view: EmbeddedText, *, chunk: int = 16384, kept: int = 32, rounds: int = 4
) -> tuple[Tensor, Tensor]:
    """The tokens of a text and their places, [rows] each, in the order in which rows came; of
    several texts of one length [texts, rows].

    Sees: the stream as it enters the backbone, rows shuffled or not, columns moved by an unknown
    element or not, and the model's public embedding. Recovers: tokens and places. Why it works: a
    state is made of one token and one place, and all that can be are tried. Columns that a
    permutation moved keep their sorted values, under signs their sizes; a rotation keeps lengths,
    which leave a few candidates, and inner products between rows, which choose among them. What
    stops it: an embedding that is secret or was trained apart (by how far); noise. Floor: one in
    the vocabulary, one place in as many as there are. Ceiling: all. References: Hidden No More
    (2505.18332). Cost: vocabulary x places comparisons a row.
    """
    told = view.moved.detach().double()
    several = told if told.dim() == 3 else told[None]
    (texts, rows), turned = (
        several.shape[:2],
        view.kind is not None and isinstance(GROUPS[view.kind], Orthogonal),
    )
    flat = several.flatten(0, 1)
    best = torch.full((len(flat), kept), torch.inf, dtype=torch.float64)
    tokens, places = (torch.zeros(len(flat), kept, dtype=torch.long) for _ in range(2))
    states = torch.zeros(len(flat), kept, flat.shape[1], dtype=torch.float64) if turned else None
    sent = (
        slice(None) if view.kind is not None else flat.abs().amax(0) > 0
    )  # a channel that is always zero is none of the state's
    mine = _marks(view, flat[:, sent])
    for ids, made in _states(view, rows, chunk):  # made: [tokens, places, d]
        marks = _marks(view, made.flatten(0, 1)[:, sent])
        if turned:
            near, at = (mine - marks.T).square().topk(min(kept, len(marks)), dim=1, largest=False)
        else:  # roughly, and then those that are kept exactly
            rough = marks.float().square().sum(1)[None] - 2 * mine.float() @ marks.float().T
            at = rough.topk(min(kept, len(marks)), dim=1, largest=False).indices
            near = torch.stack(
                [(row - marks[one]).square().sum(1) for row, one in zip(mine, at, strict=True)]
            )
        every = torch.cat([best, near], 1)
        best, chosen = every.topk(kept, dim=1, largest=False)
        tokens = torch.cat([tokens, ids[at // rows]], 1).gather(1, chosen)
        places = torch.cat([places, at % rows], 1).gather(1, chosen)
        if states is not None:
            both = torch.cat([states, made.flatten(0, 1)[at]], 1)
            states = both.gather(1, chosen[..., None].expand(-1, -1, both.shape[-1]))
    if not bool(torch.isfinite(best[:, 0]).all()):
        raise ValueError("the model's embedding gave no states")
    found = []
    for i in range(texts):
        part = slice(i * rows, (i + 1) * rows)
        kind = None if states is None else states[part]
        found.append(
            _chosen(several[i], tokens[part], places[part], best[part], kind, view.shuffled, rounds)
        )
    read, order = (torch.stack(list(values)) for values in zip(*found, strict=True))
    return (read, order) if told.dim() == 3 else (read[0], order[0])


def _chosen(
    told: Tensor,
    tokens: Tensor,
    places: Tensor,
    apart: Tensor,
    states: Tensor | None,
    shuffled: bool,
    rounds: int,
) -> tuple[Tensor, Tensor]:
    """Of the candidates of every row of one text, [rows, candidates], one: tokens and places."""
    rows, kept = tokens.shape
    score, pick = apart.clone(), torch.zeros(rows, dtype=torch.long)
    if states is not None:
        pick, score = _by_products(told, states, apart, rounds)
    if not shuffled:
        here = places == torch.arange(rows)[:, None]
        pick = torch.where(here, score, torch.inf).argmin(1) if bool(here.any(1).all()) else pick
        return tokens.gather(1, pick[:, None])[:, 0], torch.arange(rows)
    # Each place once: the cheapest candidate of every row at every place, and one assignment.
    worth = np.full((rows, rows), -1e6)
    unit = float(score[:, : min(4, kept)].median()) + 1e-12
    for r in range(rows):
        for k in range(kept):
            cost = -float(score[r, k]) / unit if np.isfinite(float(score[r, k])) else -1e6
            worth[r, int(places[r, k])] = max(worth[r, int(places[r, k])], cost)
    order = torch.from_numpy(assign(worth[None])[0])
    at_place = places == order[:, None]
    pick = torch.where(at_place.any(1), torch.where(at_place, score, torch.inf).argmin(1), pick)
    return tokens.gather(1, pick[:, None])[:, 0], order


def regressed(
    view: PairedTexts, *, ridges: tuple[float, ...] = (1e-6, 1e-4, 1e-2, 1.0)
) -> tuple[Tensor, Tensor]:
    """The tokens of texts and their places, [texts, rows] each, in the order in which rows came, by
    a map that was learned.

    Sees: streams as they came, and its own texts' streams through a client like this one, defended
    likewise, in order; and a public table of tokens. Recovers: tokens and places. Why it works:
    noise, rounding and fewer channels leave most of a token in its state; the affine map from
    states to rows of the table that does best on held-out texts undoes what can be undone, and the
    nearest row is the token, or a common one where all are far: how far the map is off, and how
    common tokens are, its own texts say. What stops it: so much noise that tokens cannot be told
    apart; few texts of its own. Floor: the commonest token; one place in as many as there are.
    Ceiling: all. References: Song and Raghunathan 2020 (2004.00053) learn such maps for embeddings
    of sentences. Cost: one regression.
    """
    x, ids = view.features.detach().double(), view.ids
    rows = x.shape[1]
    table = view.table.detach().double()
    table = table - table.mean(0)
    target = torch.cat(
        [
            table[ids],
            torch.eye(rows, dtype=x.dtype).expand(len(x), -1, -1)
            * float(table.std() * table.shape[1] ** 0.5),
        ],
        -1,
    )
    flat = torch.cat([x, torch.ones_like(x[..., :1])], -1)
    held = max(1, len(x) // 5)

    def fitted(a: Tensor, b: Tensor, ridge: float) -> Tensor:
        gram = a.T @ a
        eye = torch.eye(len(gram), dtype=gram.dtype) * ridge * gram.diagonal().mean()
        solved: Tensor = torch.linalg.solve(gram + eye, a.T @ b)
        return solved

    common = (torch.bincount(ids.flatten(), minlength=len(table)).double() + 1 / len(table)).log()

    def read(made: Tensor, off: float) -> Tensor:
        state = made[..., : table.shape[1]].flatten(0, -2)
        near = [
            (part @ table.T - table.square().sum(1) / 2 + off * common).argmax(1)
            for part in torch.split(state, 1024)
        ]
        return torch.cat(near).view(made.shape[:-1])

    first, last = (flat[:-held], target[:-held]), (flat[-held:], ids[-held:])

    def tried(ridge: float) -> tuple[float, float, float]:
        """The share that is right of held-out texts, how far off the map is there, and the
        ridge.
        """
        made = last[0] @ fitted(first[0].flatten(0, 1), first[1].flatten(0, 1), ridge)
        off = float((made[..., : table.shape[1]] - table[last[1]]).square().mean())
        return float((read(made, off) == last[1]).double().mean()), off, ridge

    _, off, ridge = max(map(tried, ridges))
    best = fitted(flat.flatten(0, 1), target.flatten(0, 1), ridge)
    seen = view.seen.detach().double()
    made = torch.cat([seen, torch.ones_like(seen[..., :1])], -1) @ best
    if not view.shuffled:
        return read(made, off), torch.arange(rows).expand(len(seen), -1)
    scores = made[..., table.shape[1] :]
    return read(made, off), torch.stack(
        [torch.from_numpy(assign(one[None].numpy())[0]) for one in scores]
    )


def _by_products(told: Tensor, states: Tensor, apart: Tensor, rounds: int) -> tuple[Tensor, Tensor]:
    """Candidates whose inner products with the others' are those of the rows: begun with the surest
    row, then one after the other, and again.
    """
    gram = told @ told.T
    sure = (apart[:, 1] - apart[:, 0]).argsort(descending=True)
    pick = torch.zeros(len(told), dtype=torch.long)
    score = apart.clone()
    placed: list[int] = []
    for r in sure.tolist() * rounds:
        others = [o for o in placed if o != r]
        if others:
            chosen = states[others, pick[others]]
            off = (states[r] @ chosen.T - gram[r, others]).square().mean(1)
            score[r] = off + apart[r]
            pick[r] = int(score[r].argmin())
        placed = [*others, r]
    return pick, score


def _states(view: EmbeddedText, rows: int, chunk: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Every token at every place: [tokens, places, d], as the model's own embedding makes them."""
    size = int(view.model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
    each, cutting = max(1, chunk // rows), cut(view.model)
    with torch.no_grad():
        for start in range(0, size, each):
            ids = torch.arange(start, min(start + each, size))
            yield (
                ids,
                cutting.embed(input_ids=ids[:, None].expand(-1, rows)).stream.detach().double(),
            )


def _marks(view: EmbeddedText, states: Tensor) -> Tensor:
    """What of a state the columns' element does not change."""
    if view.kind is None:
        return states
    group = GROUPS[view.kind]
    if isinstance(group, Orthogonal):
        return states.square().sum(1, keepdim=True).sqrt()
    return (states.abs() if isinstance(group, SignedPermutation) else states).sort(1).values
