"""Attacks by spans: a linear layer's gradient is a sum of (slope) x (input), so that its rows lie
in the span of the layer's inputs.

While an update has fewer tokens than the layer has input channels, the span is a true part of the
space, and whatever lies in it was most likely there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from regauge.attacks.embeddings import position_slopes, silent_rows
from regauge.attacks.updates import SentUpdate
from regauge.errors import UpdateError
from regauge.jigsaw.layers import Layers, Readers, layers_of, readers_of
from regauge.jigsaw.wrapper import MaskedJigsaw

Tensor = torch.Tensor
GAP = 1e-7  # of the largest singular value, in float32: below it there is rounding
TINY = 1e-6  # of a vector's length: nearer to a span than this is all the same


@dataclass(frozen=True, eq=False)
class Span:
    """An orthonormal basis [rank, channels] of what a layer was given, and the singular values of
    its gradient.
    """

    basis: Tensor
    sizes: Tensor

    @property
    def is_all(self) -> bool:
        """Does it hold everything, and so say nothing? What leaves a norm may lack one direction,
        the mean.
        """
        return len(self.basis) >= self.basis.shape[1] - 1

    def away(self, vectors: Tensor) -> Tensor:
        """How far vectors [..., channels] are from the span, as a share of their length."""
        x = vectors.double()
        inside = (x @ self.basis.T) @ self.basis
        away: Tensor = (x - inside).norm(dim=-1) / x.norm(dim=-1).clamp(min=1e-300)
        return away


def span_of(slopes: list[Tensor], expected: int | None = None, tolerance: float = GAP) -> Span:
    """The span of the rows [out, channels] of gradients. `expected` is how many tokens were read,
    where that is known: so many directions count. Their singular values reach down to rounding,
    which is why each gradient is brought to the same size first: a large one would drown the
    others.
    """
    parts = [s.detach().double().cpu() for s in slopes]
    whole = torch.cat([p / p.norm() for p in parts if bool(p.any())] or parts)
    if not bool(whole.any()):
        raise UpdateError(
            "the gradient whose span is asked for is zero", hint="was the layer trained?"
        )
    _, sizes, basis = torch.linalg.svd(whole, full_matrices=False)
    return Span(
        basis[: int((sizes > tolerance * sizes[0]).sum()) if expected is None else expected], sizes
    )


def span_membership(view: SentUpdate, candidates: Tensor) -> Tensor:
    """For each patch [count, values] a score: the higher, the more surely it was in an image that
    the update was made of.

    Sees: the gradient by the first block's query, key and value weights, or by the patch embedding
    (whichever says more); batch size. Recovers: is this patch in the batch, wherever it stood,
    shuffled or not. Why it works: the rows of dL/dW_qkv span LN(W x + b + p) over all tokens; a
    patch of the batch is in the span, any other is not, as long as there are fewer tokens than
    channels. Positions that it may have had are all tried; under MJP the unknown one makes that one
    try. What stops it: more tokens than channels (batches, small models); noise; the first block
    and the patch embedding both withheld. Floor: AUC 0.5. Ceiling: 1. References: DAGER
    (2405.15586). Cost: one SVD and a product for each position.
    """
    layers = layers_of(view.model, view.shape)
    tokens = (
        None if view.granted.batch is None else view.granted.batch * (layers.cells + layers.prefix)
    )
    scores = []
    if layers.weight in view.slopes:
        patches = None if view.granted.batch is None else view.granted.batch * layers.cells
        span = span_of([view.slopes[layers.weight].flatten(1)], patches)
        scores.append((span, span.away(candidates)))
    found = _readers(view)
    if found is not None:
        span = span_of(_slopes(view, found), tokens)
        least = (
            torch.stack(
                [span.away(seen) for seen in candidates_at(view, layers, found, candidates)]
            )
            .min(0)
            .values
        )
        scores.append((span, least))
    if not scores:
        raise UpdateError(
            "neither the patch embedding's gradient nor that of the first block's attention is "
            "in the update",
            hint="both were withheld",
        )
    useful = [away for span, away in scores if not span.is_all]
    return -torch.stack(
        [(away + TINY).log() for away in useful or [away for _, away in scores]]
    ).sum(0)


def _readers(view: SentUpdate) -> Readers | None:
    try:
        found = readers_of(view.model)
    except UpdateError:
        return None
    return found if all(n in view.slopes for n in found.names) else None


def _slopes(view: SentUpdate, found: Readers) -> list[Tensor]:
    return [view.slopes[n].T if found.is_conv1d else view.slopes[n] for n in found.names]


def candidates_at(
    view: SentUpdate, layers: Layers, found: Readers, candidates: Tensor
) -> list[Tensor]:
    """What the first block's attention is given of each candidate, at each position that it may
    have had.
    """
    state = {n: p.detach() for n, p in view.model.named_parameters()}
    weight = state[layers.weight].flatten(1)
    z = candidates.to(weight) @ weight.T + (state[layers.bias] if layers.bias is not None else 0)
    places: list[Tensor] = []
    if layers.positions is not None:
        places = list(layers.as_used(state[layers.positions]))
    if layers.unknown is not None:
        places.append(state[layers.unknown])
    norm = found.norm
    with torch.no_grad():
        return [
            (z + p if norm is None else norm(z + p)).cpu()
            for p in places or [torch.zeros_like(z[0])]
        ]


def mask_leak(view: SentUpdate) -> Tensor:
    """Which places of the images had the unknown embedding, [cells].

    Sees: the gradient by the table of positions. Recovers: MJP's mask. Why it works: a row of the
    table that no token used has a gradient of exactly zero. What stops it: that gradient withheld;
    noise on it; a mask for each image of a batch (what is zero is masked in all of them). Floor:
    the share of the commoner answer. Ceiling: all. References: 002 Sec. 3, for the mask; Melis et
    al. 2019 (1805.04049), for rows of embeddings that were not used. Cost: none.
    """
    layers = layers_of(view.model, view.shape)
    if layers.positions is None or not isinstance(view.model, MaskedJigsaw):
        raise UpdateError(
            "there is no mask to read: the model has no unknown embedding beside a table of "
            "positions",
            hint="it is about MJP",
        )
    return silent_rows(position_slopes(view, layers))
