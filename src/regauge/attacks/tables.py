"""Texts from the gradients of two tables alone: what a word's row has in common with the rows of
places says where the word stood.

For BERT and its like, and GPT-2 with a head of its own: learned absolute positions, added to the
words.
"""

from __future__ import annotations

import torch

from regauge.attacks.subspaces import text_layers, token_membership
from regauge.attacks.updates import SentUpdate
from regauge.errors import UpdateError

Tensor = torch.Tensor
PRESENT = (
    0.1  # of a place's row in a word's: at batch 1 it is 0 or 1; of several texts each has a share
)


def words_in_places(view: SentUpdate) -> list[Tensor]:
    """The texts that an update was made of: a list of token sequences; of several texts words in
    their places, and not which belong together.

    Sees: the gradients by the tables of words and of positions; batch size. Recovers: of one text
    every word in its place, exactly, whatever comes after the tables: dropout, norms, depth,
    length. Why it works: a word's vector and its place's are added, so that both get the same
    gradient; a word's row is the sum of those of the places where it stood. What stops it: one of
    the tables withheld or frozen; a head tied to the table of words; noise; more texts, since
    places add up over them, and words of one place cannot be told apart. Floor: none. Ceiling: all.
    References: Melis et al. 2019 (1805.04049), for words by their rows; for patches it is embedding
    least squares, of APRIL (2112.14087). Cost: one small least squares.
    """
    layers = text_layers(view.model)
    words = token_membership(view).nonzero()[:, 0]
    places = (
        view.slope(layers.positions, "the gradient by the table of positions")
        .detach()
        .double()
        .cpu()
    )
    size = places.norm(dim=1)
    there = (size > 1e-9 * size.max().clamp(min=1e-300)).nonzero()[:, 0]
    if not len(there) or len(there) > places.shape[1]:
        raise UpdateError(
            f"the update tells {len(there)} places, and {places.shape[1]} channels cannot tell "
            "them apart"
        )
    rows = (
        view.slope(layers.words, "the gradient by the table of words")
        .detach()
        .double()
        .cpu()[words]
    )
    shares = torch.linalg.lstsq(
        places[there].T, rows.T, driver="gelsd"
    ).solution.T  # [words, places]
    count = min(view.granted.batch or 1, len(words))
    best = shares.topk(count, 0)
    found = []
    for n in range(count):
        known = best.values[n] > (PRESENT if n else -torch.inf)  # every place has one word
        found.append(words[best.indices[n][known]])
    return [text for text in found if len(text)]
