"""Attacks on texts sent to a split-learning server: their tokens and their order.

The input of the backbone is a function of one token and its position, and both tables are small:
every possible state is computed and compared. Deeper states are covered by
`features.vocabulary_search`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from regauge.attacks.features import GROUPS
from regauge.attacks.views import EmbeddedText, PairedTexts, ServerPass
from regauge.core.fit import assign
from regauge.core.groups import Orthogonal, SignedPermutation
from regauge.models.cut import cut

Tensor = torch.Tensor


def order_leak(view: ServerPass) -> Tensor | None:
    """Read the positions of shuffled tokens, [samples, tokens], from the tensors sent beside the
    stream; None if they do not reveal them.

    Sees: masks, position ids and rotary tables, which follow the rows.
    Recovers: the order, exactly.
    Why it works: attention needs correct masks and positions. In a causal mask, the number of
        tokens that a token attends to is its position; position ids are the order; rotary tables
        are functions of it.
    What stops it: a model without them (BERT, ViT: the position is in the stream).
    Floor: one position in as many as there are.
    Ceiling: all.
    References: Hidden No More (2505.18332), for reordered sequences.
    Cost: negligible.
    """
    batch, n = view.stream.shape[:2]
    for name, value in view.others.items():
        if name.startswith("position_ids") and value.dim() == 2 and value.shape[1] == n:
            return _ranks(value.double()).expand(batch, -1)
    for name, value in view.others.items():
        if name.startswith("attention_mask") and value.dim() == 4 and value.shape[-2:] == (n, n):
            is_visible = (value if value.dtype == torch.bool else value > -1).double()
            visible = is_visible[:, 0].sum(-1)
            if all(len(set(row.tolist())) == n for row in visible):
                return _ranks(visible).expand(batch, -1)
    for name, value in view.others.items():
        if name.startswith("position_embeddings") and value.dim() == 3 and value.shape[1] == n:
            # The slowest plane turns by less than half a circle, so its cosine is monotonic.
            slow = value[..., value.shape[-1] // 2 - 1].double()
            if all(len(set(row.tolist())) == n for row in slow):
                return _ranks(-slow).expand(batch, -1)
    return None


def _ranks(values: Tensor) -> Tensor:
    """Return the rank of each value in its row."""
    return values.argsort(1).argsort(1)


def embedding_search(
    view: EmbeddedText, *, chunk: int = 16384, candidates: int = 32, rounds: int = 4
) -> tuple[Tensor, Tensor]:
    """Recover the tokens of a text and their positions, [rows] each, in the order of the rows; for
    several texts of one length [texts, rows].

    Sees: the input of the backbone, rows shuffled or not, columns transformed by an unknown element
        or not, and the model's public embedding.
    Recovers: tokens and positions.
    Why it works: a state is the sum of one token and one position, and all pairs are tried. Columns
        under a permutation keep their sorted values, under signs their absolute values; a rotation
        preserves lengths, which leave a few candidates, and inner products between rows, which
        choose among them.
    What stops it: an embedding that is secret or was trained further, depending on its change;
        noise.
    Floor: one in the vocabulary, one position in as many as there are.
    Ceiling: all.
    References: Hidden No More (2505.18332).
    Cost: vocabulary x positions comparisons per row.

    Args:
        view: The text as received, and the model.
        chunk: Number of states computed at once.
        candidates: Number of candidates per row.
        rounds: Rounds of the choice among candidates, for rotations.
    """
    moved = view.moved.detach().double()
    streams = moved if moved.dim() == 3 else moved[None]
    (texts, rows), is_rotation = (
        streams.shape[:2],
        view.kind is not None and isinstance(GROUPS[view.kind], Orthogonal),
    )
    flat = streams.flatten(0, 1)
    distances = torch.full((len(flat), candidates), torch.inf, dtype=torch.float64)
    tokens, positions = (torch.zeros(len(flat), candidates, dtype=torch.long) for _ in range(2))
    states = (
        torch.zeros(len(flat), candidates, flat.shape[1], dtype=torch.float64)
        if is_rotation
        else None
    )
    active = (
        slice(None) if view.kind is not None else flat.abs().amax(0) > 0
    )  # channels that are always zero are not part of the state
    row_marks = _marks(view, flat[:, active])
    for ids, embedded in _states(view, rows, chunk):  # [tokens, positions, d]
        marks = _marks(view, embedded.flatten(0, 1)[:, active])
        if is_rotation:
            nearest, indices = (
                (row_marks - marks.T)
                .square()
                .topk(min(candidates, len(marks)), dim=1, largest=False)
            )
        else:  # roughly in float32, then the candidates exactly
            rough = marks.float().square().sum(1)[None] - 2 * row_marks.float() @ marks.float().T
            indices = rough.topk(min(candidates, len(marks)), dim=1, largest=False).indices
            nearest = torch.stack(
                [
                    (row - marks[index]).square().sum(1)
                    for row, index in zip(row_marks, indices, strict=True)
                ]
            )
        merged = torch.cat([distances, nearest], 1)
        distances, chosen = merged.topk(candidates, dim=1, largest=False)
        tokens = torch.cat([tokens, ids[indices // rows]], 1).gather(1, chosen)
        positions = torch.cat([positions, indices % rows], 1).gather(1, chosen)
        if states is not None:
            merged_states = torch.cat([states, embedded.flatten(0, 1)[indices]], 1)
            states = merged_states.gather(
                1, chosen[..., None].expand(-1, -1, merged_states.shape[-1])
            )
    if not bool(torch.isfinite(distances[:, 0]).all()):
        raise ValueError("the model's embedding must give finite states, got none")
    results = []
    for i in range(texts):
        text_rows = slice(i * rows, (i + 1) * rows)
        text_states = None if states is None else states[text_rows]
        results.append(
            _choose_candidates(
                streams[i],
                tokens[text_rows],
                positions[text_rows],
                distances[text_rows],
                text_states,
                view.shuffled,
                rounds,
            )
        )
    words, order = (torch.stack(list(values)) for values in zip(*results, strict=True))
    return (words, order) if moved.dim() == 3 else (words[0], order[0])


def _choose_candidates(
    stream: Tensor,
    tokens: Tensor,
    positions: Tensor,
    distances: Tensor,
    states: Tensor | None,
    shuffled: bool,
    rounds: int,
) -> tuple[Tensor, Tensor]:
    """Choose one of the candidates of every row of one text, [rows, candidates]: tokens and
    positions.
    """
    rows, count = tokens.shape
    score, choice = distances.clone(), torch.zeros(rows, dtype=torch.long)
    if states is not None:
        choice, score = _by_products(stream, states, distances, rounds)
    if not shuffled:
        in_place = positions == torch.arange(rows)[:, None]
        choice = (
            torch.where(in_place, score, torch.inf).argmin(1)
            if bool(in_place.any(1).all())
            else choice
        )
        return tokens.gather(1, choice[:, None])[:, 0], torch.arange(rows)
    # Each position once: assign by the cheapest candidate of every row at every position.
    scores = np.full((rows, rows), -1e6)
    unit = float(score[:, : min(4, count)].median()) + 1e-12
    for r in range(rows):
        for k in range(count):
            cost = -float(score[r, k]) / unit if np.isfinite(float(score[r, k])) else -1e6
            scores[r, int(positions[r, k])] = max(scores[r, int(positions[r, k])], cost)
    order = torch.from_numpy(assign(scores[None])[0])
    at_place = positions == order[:, None]
    choice = torch.where(at_place.any(1), torch.where(at_place, score, torch.inf).argmin(1), choice)
    return tokens.gather(1, choice[:, None])[:, 0], order


def text_regression(
    view: PairedTexts, *, ridges: tuple[float, ...] = (1e-6, 1e-4, 1e-2, 1.0)
) -> tuple[Tensor, Tensor]:
    """Recover the tokens of texts and their positions, [texts, rows] each, in the order of the
    rows, by a learned map.

    Sees: streams as received, and streams of its own texts through a client like this one with the
        same defences, in order; and a public table of tokens.
    Recovers: tokens and positions.
    Why it works: noise, rounding and fewer channels leave most of a token in its state. The affine
        map from states to rows of the table that does best on held-out texts undoes what can be
        undone; the nearest row is the token, or a common token if all are far. The attacker's own
        texts give the error of the map and the frequency of tokens.
    What stops it: enough noise to make tokens indistinguishable; few texts of its own.
    Floor: the most common token; one position in as many as there are.
    Ceiling: all.
    References: Song and Raghunathan 2020 (2004.00053) learn such maps for embeddings of sentences.
    Cost: one regression.
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
    design = torch.cat([x, torch.ones_like(x[..., :1])], -1)
    heldout = max(1, len(x) // 5)

    def fit(a: Tensor, b: Tensor, ridge: float) -> Tensor:
        gram = a.T @ a
        penalty = torch.eye(len(gram), dtype=gram.dtype) * ridge * gram.diagonal().mean()
        weights: Tensor = torch.linalg.solve(gram + penalty, a.T @ b)
        return weights

    log_frequency = (
        torch.bincount(ids.flatten(), minlength=len(table)).double() + 1 / len(table)
    ).log()

    def nearest_tokens(mapped: Tensor, error: float) -> Tensor:
        state = mapped[..., : table.shape[1]].flatten(0, -2)
        nearest = [
            (part @ table.T - table.square().sum(1) / 2 + error * log_frequency).argmax(1)
            for part in torch.split(state, 1024)
        ]
        return torch.cat(nearest).view(mapped.shape[:-1])

    train, validation = (design[:-heldout], target[:-heldout]), (design[-heldout:], ids[-heldout:])

    def validate(ridge: float) -> tuple[float, float, float]:
        """Return the accuracy on held-out texts, the error of the map there, and the ridge."""
        mapped = validation[0] @ fit(train[0].flatten(0, 1), train[1].flatten(0, 1), ridge)
        error = float((mapped[..., : table.shape[1]] - table[validation[1]]).square().mean())
        return float((nearest_tokens(mapped, error) == validation[1]).double().mean()), error, ridge

    _, error, ridge = max(map(validate, ridges))
    final_weights = fit(design.flatten(0, 1), target.flatten(0, 1), ridge)
    observed = view.observed.detach().double()
    mapped = torch.cat([observed, torch.ones_like(observed[..., :1])], -1) @ final_weights
    if not view.shuffled:
        return nearest_tokens(mapped, error), torch.arange(rows).expand(len(observed), -1)
    scores = mapped[..., table.shape[1] :]
    return nearest_tokens(mapped, error), torch.stack(
        [torch.from_numpy(assign(score[None].numpy())[0]) for score in scores]
    )


def _by_products(
    stream: Tensor, states: Tensor, distances: Tensor, rounds: int
) -> tuple[Tensor, Tensor]:
    """Choose the candidates whose inner products match those of the rows, starting with the surest
    row, in rounds.
    """
    gram = stream @ stream.T
    order = (distances[:, 1] - distances[:, 0]).argsort(descending=True)
    choice = torch.zeros(len(stream), dtype=torch.long)
    score = distances.clone()
    placed: list[int] = []
    for row in order.tolist() * rounds:
        others = [other for other in placed if other != row]
        if others:
            chosen = states[others, choice[others]]
            error = (states[row] @ chosen.T - gram[row, others]).square().mean(1)
            score[row] = error + distances[row]
            choice[row] = int(score[row].argmin())
        placed = [*others, row]
    return choice, score


def _states(view: EmbeddedText, rows: int, chunk: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the model's embedding of every token at every position: [tokens, positions, d]."""
    size = int(view.model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
    step, split = max(1, chunk // rows), cut(view.model)
    with torch.no_grad():
        for start in range(0, size, step):
            ids = torch.arange(start, min(start + step, size))
            yield (
                ids,
                split.embed(input_ids=ids[:, None].expand(-1, rows)).stream.detach().double(),
            )


def _marks(view: EmbeddedText, states: Tensor) -> Tensor:
    """Return what the columns' element preserves of a state."""
    if view.kind is None:
        return states
    group = GROUPS[view.kind]
    if isinstance(group, Orthogonal):
        return states.square().sum(1, keepdim=True).sqrt()
    return (states.abs() if isinstance(group, SignedPermutation) else states).sort(1).values
