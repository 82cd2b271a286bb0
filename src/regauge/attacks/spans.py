"""Attacks by the span of a linear layer's gradient.

The gradient is a sum of (output gradient) x (input), so that its rows lie in the span of the
layer's inputs.

While an update has fewer tokens than the layer has input channels, the span is a proper subspace,
and a vector in it was most likely an input.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from regauge.attacks.embeddings import position_grads, unused_rows
from regauge.attacks.updates import SentUpdate
from regauge.errors import UpdateError
from regauge.jigsaw.layers import Layers, Readers, find_layers, find_readers
from regauge.jigsaw.wrapper import MaskedJigsaw

Tensor = torch.Tensor
GAP = 1e-7  # relative to the largest singular value, in float32: smaller ones are rounding
RESOLUTION = 1e-6  # relative to a vector's length: smaller distances to a span do not differ


@dataclass(frozen=True, eq=False)
class Span:
    """An orthonormal basis [rank, channels] of a layer's inputs, and the singular values of its
    gradient.
    """

    basis: Tensor
    sizes: Tensor

    @property
    def is_full(self) -> bool:
        """Whether it contains everything and is uninformative. Outputs of a norm may lack one
        direction, the mean.
        """
        return len(self.basis) >= self.basis.shape[1] - 1

    def distance(self, vectors: Tensor) -> Tensor:
        """Return the distance of vectors [..., channels] from the span, relative to their
        length.
        """
        x = vectors.double()
        projected = (x @ self.basis.T) @ self.basis
        distance: Tensor = (x - projected).norm(dim=-1) / x.norm(dim=-1).clamp(min=1e-300)
        return distance


def gradient_span(grads: list[Tensor], expected: int | None = None, tolerance: float = GAP) -> Span:
    """Return the span of the rows [out, channels] of gradients.

    Each gradient is normalized first: the singular values reach down to rounding, and a large
    gradient would drown the others.

    Args:
        grads: The gradients.
        expected: The number of tokens read, if known: the number of directions that count.
        tolerance: Relative size below which singular values are rounding.
    """
    parts = [grad.detach().double().cpu() for grad in grads]
    stacked = torch.cat([p / p.norm() for p in parts if bool(p.any())] or parts)
    if not bool(stacked.any()):
        raise UpdateError(
            "the gradient must not be zero to have a span", hint="check that the layer was trained"
        )
    _, sizes, basis = torch.linalg.svd(stacked, full_matrices=False)
    return Span(
        basis[: int((sizes > tolerance * sizes[0]).sum()) if expected is None else expected], sizes
    )


def span_membership(view: SentUpdate, candidates: Tensor) -> Tensor:
    """Score patches [count, values]: the higher, the more likely they were in an image behind the
    update.

    Sees: the gradient of the first block's query, key and value weights, or of the patch embedding
        (whichever is more informative); batch size.
    Recovers: whether a patch is in the batch, at any position, shuffled or not.
    Why it works: the rows of dL/dW_qkv span LN(W x + b + p) over all tokens; a patch of the batch
        is in the span, any other is not, as long as there are fewer tokens than channels. All
        possible positions are tried; under MJP the unknown embedding is the only one.
    What stops it: more tokens than channels (batches, small models); noise; withholding both the
        first block and the patch embedding.
    Floor: AUC 0.5.
    Ceiling: 1.
    References: DAGER (2405.15586).
    Cost: one SVD and a product for each position.
    """
    layers = find_layers(view.model, view.shape)
    tokens = (
        None if view.granted.batch is None else view.granted.batch * (layers.cells + layers.prefix)
    )
    scores = []
    if layers.weight in view.grads:
        patches = None if view.granted.batch is None else view.granted.batch * layers.cells
        span = gradient_span([view.grads[layers.weight].flatten(1)], patches)
        scores.append((span, span.distance(candidates)))
    readers = _readers(view)
    if readers is not None:
        span = gradient_span(_reader_grads(view, readers), tokens)
        distance = (
            torch.stack(
                [
                    span.distance(inputs)
                    for inputs in candidate_inputs(view, layers, readers, candidates)
                ]
            )
            .min(0)
            .values
        )
        scores.append((span, distance))
    if not scores:
        raise UpdateError(
            "the update must contain the gradient of the patch embedding or of the first "
            "attention, got neither",
            hint="both were withheld",
        )
    informative = [distances for span, distances in scores if not span.is_full]
    return -torch.stack(
        [
            (distances + RESOLUTION).log()
            for distances in informative or [distances for _, distances in scores]
        ]
    ).sum(0)


def _readers(view: SentUpdate) -> Readers | None:
    """Return the first block's query, key and value weights if all are sent."""
    try:
        readers = find_readers(view.model)
    except UpdateError:
        return None
    return readers if all(n in view.grads for n in readers.names) else None


def _reader_grads(view: SentUpdate, readers: Readers) -> list[Tensor]:
    """Return their gradients as [out, in]."""
    return [view.grads[n].T if readers.is_conv1d else view.grads[n] for n in readers.names]


def candidate_inputs(
    view: SentUpdate, layers: Layers, readers: Readers, candidates: Tensor
) -> list[Tensor]:
    """Return the input of the first block's attention for each candidate, at each possible
    position.
    """
    state = {n: p.detach() for n, p in view.model.named_parameters()}
    weight = state[layers.weight].flatten(1)
    z = candidates.to(weight) @ weight.T + (state[layers.bias] if layers.bias is not None else 0)
    positions: list[Tensor] = []
    if layers.positions is not None:
        positions = list(layers.used_positions(state[layers.positions]))
    if layers.unknown is not None:
        positions.append(state[layers.unknown])
    norm = readers.norm
    with torch.no_grad():
        return [
            (z + p if norm is None else norm(z + p)).cpu()
            for p in positions or [torch.zeros_like(z[0])]
        ]


def mask_leak(view: SentUpdate) -> Tensor:
    """Recover the positions with the unknown embedding, [cells].

    Sees: the gradient of the position table.
    Recovers: MJP's mask.
    Why it works: a row of the table that no token used has a gradient of exactly zero.
    What stops it: withholding that gradient; noise on it; a separate mask per image of a batch
        (zero rows are masked in all of them).
    Floor: the share of the more common answer.
    Ceiling: all.
    References: masked jigsaw (2205.12551), Sec. 3, for the mask; Melis et al. 2019 (1805.04049),
        for unused rows of embeddings.
    Cost: negligible.
    """
    layers = find_layers(view.model, view.shape)
    if layers.positions is None or not isinstance(view.model, MaskedJigsaw):
        raise UpdateError(
            "the model must have an unknown embedding and a position table, got "
            f"{type(view.model).__name__}",
            hint="this attack applies to MJP only",
        )
    return unused_rows(position_grads(view, layers))
