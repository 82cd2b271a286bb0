"""Texts from the gradients of two tables.

A word's row is a sum of the rows of its positions.

Supported are BERT and similar models, and GPT-2 with an untied head: learned absolute positions,
added to the words.
"""

from __future__ import annotations

import torch

from regauge.attacks.subspaces import find_text_layers, token_membership
from regauge.attacks.updates import SentUpdate
from regauge.errors import UpdateError

Tensor = torch.Tensor
# Smallest share of a position's row in a word's row. At batch size 1 shares are 0 or 1; several
# texts divide them.
PRESENT = 0.1


def locate_words(view: SentUpdate) -> list[Tensor]:
    """Recover the texts behind an update as a list of token sequences; for several texts the words
    of each position, without their grouping into texts.

    Sees: the gradients of the word table and of the position table; batch size.
    Recovers: for one text every word in its position, exactly, whatever follows the tables:
        dropout, norms, depth, length.
    Why it works: the vectors of a word and of its position are added, so that both get the same
        gradient; the gradient of a word's row is the sum over its positions.
    What stops it: withholding or freezing one of the tables; a head tied to the word table; noise;
        more texts, because positions add up over them and words of one position cannot be
        distinguished.
    Floor: none.
    Ceiling: all.
    References: Melis et al. 2019 (1805.04049), for words by their rows; APRIL (2112.14087), for the
        same idea on patches (`embedding_least_squares`).
    Cost: one small least squares.
    """
    layers = find_text_layers(view.model)
    words = token_membership(view).nonzero()[:, 0]
    position_grads = (
        view.grad(layers.positions, "the gradient of the position table").detach().double().cpu()
    )
    norms = position_grads.norm(dim=1)
    used = (norms > 1e-9 * norms.max().clamp(min=1e-300)).nonzero()[:, 0]
    if not len(used) or len(used) > position_grads.shape[1]:
        raise UpdateError(
            "the number of positions in the update must be between 1 and the "
            f"{position_grads.shape[1]} channels, got {len(used)}"
        )
    rows = view.grad(layers.words, "the gradient of the word table").detach().double().cpu()[words]
    shares = torch.linalg.lstsq(
        position_grads[used].T, rows.T, driver="gelsd"
    ).solution.T  # [words, positions]
    count = min(view.granted.batch or 1, len(words))
    best = shares.topk(count, 0)
    texts = []
    for rank in range(count):
        is_present = best.values[rank] > (
            PRESENT if rank else -torch.inf
        )  # every position has a word
        texts.append(words[best.indices[rank][is_present]])
    return [text for text in texts if len(text)]
