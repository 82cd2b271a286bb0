"""Attacks on texts that cross to a server of split learning: which tokens they are, and in which order.

What enters the backbone is a function of one token and its place, and both tables are small: every state that can be is made and compared. Deeper
states are `features.vocabulary`'s.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from regauge.attacks.features import GROUPS
from regauge.attacks.views import EmbeddedText, Served
from regauge.cutting import cut
from regauge.fitting import assign
from regauge.groups import Orthogonal, SignedPermutation

Tensor = torch.Tensor


def order_told(view: Served) -> Tensor | None:
    """The places of shuffled tokens, [samples, tokens], read off what crosses beside the stream; None if nothing there tells.

    Sees: masks, position ids and rotary tables, which follow the rows. Recovers: the order, exactly. Why it works: attention needs them as they are.
    A causal mask lets a token see as many as come before it; position ids are the order; rotary tables are functions of it. What stops it: a model
    that needs none of them (BERT, ViT: there the place is in the stream). Floor: one place in as many as there are. Ceiling: all. References:
    Hidden No More (2505.18332), for sequences in another order. Cost: none.
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


def embedded(view: EmbeddedText, *, chunk: int = 2048, kept: int = 32, rounds: int = 4) -> tuple[Tensor, Tensor]:
    """The tokens of a text and their places, [rows] each, in the order in which rows came.

    Sees: the stream as it enters the backbone, rows shuffled or not, columns moved by an unknown element or not, and the model's public embedding.
    Recovers: tokens and places. Why it works: a state is made of one token and one place, and all that can be are tried. Columns that a permutation
    moved keep their sorted values, under signs their sizes; a rotation keeps lengths, which leave a few candidates, and inner products between
    rows, which choose among them. What stops it: an embedding that is secret or was trained apart (by how far); noise. Floor: one in the vocabulary,
    one place in as many as there are. Ceiling: all. References: Hidden No More (2505.18332). Cost: vocabulary x places comparisons a row.
    """
    told = view.moved.detach().double()
    rows, turned = len(told), view.kind is not None and isinstance(GROUPS[view.kind], Orthogonal)
    best = torch.full((rows, kept), torch.inf, dtype=torch.float64)
    tokens, places = (torch.zeros(rows, kept, dtype=torch.long) for _ in range(2))
    states = torch.zeros(rows, kept, told.shape[1], dtype=torch.float64) if turned else None
    mine = _marks(view, told)
    for ids, made in _states(view, rows, chunk):  # made: [tokens, places, d]
        marks = _marks(view, made.flatten(0, 1))
        apart = (mine.square().sum(1)[:, None] - 2 * mine @ marks.T + marks.square().sum(1)[None]).clamp(min=0)
        if turned:
            apart = (mine - marks.T).square()
        near, at = apart.topk(min(kept, apart.shape[1]), dim=1, largest=False)
        every = torch.cat([best, near], 1)
        best, chosen = every.topk(kept, dim=1, largest=False)
        tokens = torch.cat([tokens, ids[at // rows]], 1).gather(1, chosen)
        places = torch.cat([places, at % rows], 1).gather(1, chosen)
        if states is not None:
            both = torch.cat([states, made.flatten(0, 1)[at]], 1)
            states = both.gather(1, chosen[..., None].expand(-1, -1, both.shape[-1]))
    if not bool(torch.isfinite(best[:, 0]).all()):
        raise ValueError("the model's embedding gave no states")
    score = best.clone()
    pick = torch.zeros(rows, dtype=torch.long)
    if states is not None:
        pick, score = _by_products(told, states, best, rounds)
    if not view.shuffled:
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


def _by_products(told: Tensor, states: Tensor, apart: Tensor, rounds: int) -> tuple[Tensor, Tensor]:
    """Candidates whose inner products with the others' are those of the rows: begun with the surest row, then one after the other, and again."""
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
            yield ids, cutting.embed(input_ids=ids[:, None].expand(-1, rows)).stream.detach().double()


def _marks(view: EmbeddedText, states: Tensor) -> Tensor:
    """What of a state the columns' element does not change."""
    if view.kind is None:
        return states
    group = GROUPS[view.kind]
    if isinstance(group, Orthogonal):
        return states.square().sum(1, keepdim=True).sqrt()
    return (states.abs() if isinstance(group, SignedPermutation) else states).sort(1).values
