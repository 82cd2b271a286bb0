"""Attacks on features of images that a split-learning client sends: from tokens to pixels.

Reconstructions have the range of the auxiliary images.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from regauge.attacks.views import PairedImages, PublicPatches
from regauge.core.assignment import best_assignment
from regauge.core.progress import Progress
from regauge.data.optimizer_config import OptimizerConfig
from regauge.data.train import ScheduledOptimizer, descend

Tensor = torch.Tensor
MIN_IMPROVEMENT = 1e-3  # relative to the loss of the mean image: smaller decreases do not count


def to_patches(images: Tensor, size: int) -> Tensor:
    """Reshape images [n, c, h, w] to patches [n, patches, c * size * size], row by row."""
    n, c, h, w = images.shape
    return (
        images.view(n, c, h // size, size, w // size, size)
        .permute(0, 2, 4, 1, 3, 5)
        .reshape(n, -1, c * size * size)
    )


def to_images(patches: Tensor, size: int, channels: int) -> Tensor:
    """Reshape patches back to square images."""
    n, count, _ = patches.shape
    side = round(count**0.5)
    return (
        patches.view(n, side, side, channels, size, size)
        .permute(0, 3, 1, 4, 2, 5)
        .reshape(n, channels, side * size, side * size)
    )


@dataclass(frozen=True)
class InversionResult:
    """Reconstructions, the attacker's validation loss after each epoch, and the loss of the mean
    image (`floor`).
    """

    images: Tensor
    losses: tuple[float, ...]
    floor: float


class _Decoder(nn.Module):
    """A Transformer from tokens to patches with a final tanh.

    In order, each token becomes the patch at its position; otherwise every position attends to all
    tokens by cross-attention, and their order does not matter.
    """

    def __init__(
        self,
        tokens: int,
        width: int,
        patches: int,
        values: int,
        hidden: int,
        depth: int,
        in_order: bool,
        low: float,
        high: float,
    ) -> None:
        super().__init__()
        self.into = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, hidden))
        self.places = nn.Parameter(
            0.02 * torch.randn(1, tokens, hidden) if in_order else torch.randn(1, patches, hidden)
        )
        layer: dict[str, Any] = {
            "d_model": hidden,
            "nhead": max(1, hidden // 32),
            "dim_feedforward": 4 * hidden,
        }
        layer |= {"dropout": 0.0, "batch_first": True, "norm_first": True}
        self.in_order, self.skip = in_order, tokens - patches
        self.body: nn.Module
        if in_order:
            self.body = nn.TransformerEncoder(
                nn.TransformerEncoderLayer(**layer), depth, enable_nested_tensor=False
            )
        else:
            self.body = nn.TransformerDecoder(nn.TransformerDecoderLayer(**layer), depth)
        self.out = nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, values), nn.Tanh())
        self.middle, self.reach = (low + high) / 2, (high - low) / 2

    def forward(self, z: Tensor) -> Tensor:
        x = self.into(z)
        if self.in_order:
            y = self.body(x + self.places)[:, self.skip :]
        else:
            y = self.body(self.places.expand(len(z), -1, -1), x)
        return self.middle + self.reach * self.out(y)  # type: ignore[no-any-return]


def decoder_inversion(
    view: PairedImages,
    *,
    in_order: bool = True,
    hidden: int = 128,
    depth: int = 2,
    epochs: int = 200,
    patience: int = 8,
    lr: float = 1e-3,
    batch: int = 64,
    seed: int = 0,
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
) -> InversionResult:
    """Recover images from features by a decoder trained on pairs.

    With tokens in order this is the black-box attack of Xu et al.; the variant without order also
    works on shuffled rows.

    Sees: defended features, and defended features of its own images, sent through the client or an
        imitation of it.
    Recovers: the images.
    Why it works: features determine their input, and a decoder learns the inverse, shuffled or not,
        because tokens carry their position.
    What stops it: noise; mixed samples; a client that the adversary cannot query or imitate.
    Floor: the mean image.
    Ceiling: the same decoder without any defence.
    References: Xu et al. (permutation equivariance, 2304.07735), Sec. 5.3, Tab. 6; Dosovitskiy and
        Brox 2016 (1506.02753).
    Cost: one training on the pairs, until the loss on a held-out tenth has not fallen in `patience`
        epochs by a thousandth of the mean image's.

    Args:
        view: The observed features and the adversary's pairs.
        in_order: Whether tokens come in order.
        hidden: Width of the decoder.
        depth: Number of its layers.
        epochs: Maximum number of epochs.
        patience: Epochs without improvement before the training stops.
        lr: Learning rate.
        batch: Batch size.
        seed: Random seed.
        device: The device that trains the decoder. The reconstructions are on that of the images.
        progress: Progress callback, in epochs.
    """
    torch.manual_seed(seed)
    size, channels = view.patch, view.images.shape[1]
    x, y = (t.to(device) for t in (view.features.float(), to_patches(view.images.float(), size)))
    mean, scale = x.mean((0, 1)), x.std((0, 1)).clamp(min=1e-6)
    low, high = float(y.min()), float(y.max())
    order = torch.randperm(len(x))
    heldout, train = order[: max(1, len(x) // 10)], order[max(1, len(x) // 10) :]
    floor = float((y[heldout] - y[train].mean(0)).square().mean())
    model = _Decoder(
        x.shape[1], x.shape[2], y.shape[1], y.shape[2], hidden, depth, in_order, low, high
    ).to(device)
    optimizer = ScheduledOptimizer(
        model.parameters(),
        OptimizerConfig("adamw", lr, weight_decay=0.05, betas=(0.9, 0.95), clip=1.0),
        lambda _: float(optimizer.optimizer.param_groups[0]["lr"]),  # as set by the plateau's
    )
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer.optimizer, factor=0.5, patience=max(1, patience // 3)
    )
    best_loss = reference = sys.float_info.max
    best_state, losses, stale = {k: v.clone() for k, v in model.state_dict().items()}, [], 0
    for epoch in range(epochs):
        if progress is not None:
            progress(epoch, epochs, "epochs")
        model.train()
        _train_epoch(
            optimizer,
            torch.split(train[torch.randperm(len(train))], batch),
            lambda rows: (model((x[rows] - mean) / scale) - y[rows]).square().mean(),
        )
        losses.append(_loss(model, (x[heldout] - mean) / scale, y[heldout], batch))
        schedule.step(losses[-1])
        stale = (
            0
            if losses[-1] < reference - max(1e-3 * reference, MIN_IMPROVEMENT * floor)
            else stale + 1
        )
        reference = losses[-1] if stale == 0 else reference
        if losses[-1] < best_loss:
            best_loss, best_state = (
                losses[-1],
                {k: v.clone() for k, v in model.state_dict().items()},
            )
        if stale >= patience:
            break
    model.load_state_dict(best_state)
    with torch.no_grad():
        patches = torch.cat(
            [
                model((rows.to(device).float() - mean) / scale)
                for rows in torch.split(view.observed, batch)
            ]
        )
    images = to_images(patches, size, channels).to(view.images.device)
    return InversionResult(images, tuple(losses), floor)


def _train_epoch(
    optimizer: ScheduledOptimizer, batches: Sequence[Tensor], loss_on: Callable[[Tensor], Tensor]
) -> None:
    """Take one step for each batch of rows."""

    def backward(n: int) -> Tensor:
        loss = loss_on(batches[n])
        loss.backward()
        return loss.detach()

    for _ in descend(optimizer, backward, range(len(batches))):
        pass


def _loss(model: nn.Module, x: Tensor, y: Tensor, batch: int) -> float:
    """Return the mean squared error, in batches."""
    model.eval()
    with torch.no_grad():
        parts = zip(torch.split(x, batch), torch.split(y, batch), strict=True)
        return sum((float((model(a) - b).square().mean()) * len(a) for a, b in parts), 0.0) / len(x)


def position_probe(
    view: PairedImages,
    *,
    hidden: int = 128,
    epochs: int = 60,
    patience: int = 6,
    lr: float = 3e-3,
    seed: int = 0,
) -> Tensor:
    """Recover the positions of shuffled tokens: [samples, tokens], the original position of each.

    Sees: shuffled features, and its own features in order (`view.features`).
    Recovers: the order.
    Why it works: the position embedding is added before the shuffle, so that a classifier reads the
        position from each token alone; an assignment makes the guesses one order.
    What stops it: positions that are not in the tokens; noise.
    Floor: one position in as many as there are.
    Ceiling: all.
    References: Hidden No More (2505.18332), for reordered sequences.
    """
    scores = position_scores(
        view, hidden=hidden, epochs=epochs, patience=patience, lr=lr, seed=seed
    )
    return torch.stack([_assign_positions(score) for score in scores])


def position_scores(
    view: PairedImages,
    *,
    hidden: int = 128,
    epochs: int = 60,
    patience: int = 6,
    lr: float = 3e-3,
    seed: int = 0,
) -> Tensor:
    """Return the log-likelihood of each position for each observed token: [samples, tokens,
    positions].
    """
    torch.manual_seed(seed)
    x = view.features.float()
    n, tokens, width = x.shape
    mean, scale = x.mean((0, 1)), x.std((0, 1)).clamp(min=1e-6)
    model = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, tokens))
    optimizer = ScheduledOptimizer(
        model.parameters(), OptimizerConfig("adamw", lr, weight_decay=0.01)
    )
    order = torch.randperm(n)
    heldout, train = order[: max(1, n // 10)], order[max(1, n // 10) :]
    labels, best_loss, stale = torch.arange(tokens), float("inf"), 0
    best_state = {k: v.clone() for k, v in model.state_dict().items()}

    def loss_on(rows: Tensor) -> Tensor:
        logits = model((x[rows] - mean) / scale)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.repeat(len(rows)))

    for _ in range(epochs):
        _train_epoch(optimizer, torch.split(train[torch.randperm(len(train))], 64), loss_on)
        with torch.no_grad():
            heldout_loss = float(loss_on(heldout))
        stale += 1
        if heldout_loss < best_loss * (1 - 1e-3):
            best_loss, best_state, stale = (
                heldout_loss,
                {k: v.clone() for k, v in model.state_dict().items()},
                0,
            )
        if stale >= patience:
            break
    model.load_state_dict(best_state)
    with torch.no_grad():
        predicted: Tensor = model((view.observed.float() - mean) / scale)
        return predicted.log_softmax(-1)


def _assign_positions(score: Tensor) -> Tensor:
    """Assign each token a position of its own so that the total score is largest."""
    return torch.from_numpy(best_assignment(-score.double()))


def public_patches(view: PublicPatches, *, rounds: int = 2) -> Tensor:
    """Recover images token by token through the inverse of a public patch embedding; restore the
    order of shuffled tokens.

    Sees: features (shuffled or not, with or without the first token), the embedding's weights, and
        other images of the kind.
    Recovers: the images, exactly if the embedding is injective and nothing was added.
    Why it works: a token is W x + b + p, so that each position i gives a candidate W^+ (z - b -
        p_i), and the right one lies in the span of W and looks like a patch at that position. An
        assignment chooses one position per token by the fit; then neighbours refine the choice:
        their edges must be continuous.
    What stops it: noise; an embedding that is secret or preceded by other layers.
    Floor: a random order.
    Ceiling: exact.
    References: Gallagher 2012 (jigsaw puzzles), for edges of neighbours.
    """
    w = view.weight.double().flatten(1)  # [d, values]
    inverse = torch.linalg.pinv(w)
    patches = to_patches(view.images.double(), view.patch)
    count, size = patches.shape[1], view.patch
    positions = view.positions.double()[-count:]
    mean = patches.mean(0)
    centred = (patches - mean).flatten(0, 1)
    cov = centred.T @ centred / len(centred)
    whitening = torch.linalg.cholesky(
        torch.linalg.inv(cov + 1e-3 * cov.diagonal().mean() * torch.eye(len(cov), dtype=cov.dtype))
    )
    seam = _seams(patches, size, view.images.shape[1])
    images = []
    for tokens in view.observed.double():
        if len(tokens) > count:  # drop the first token, which is not a patch
            tokens = _drop_first_token(tokens, view, count)
        offsets = tokens[:, None] - view.bias.double() - positions[None]  # [tokens, positions, d]
        candidates = offsets @ inverse.T
        residual = (offsets - candidates @ w.T).square().sum(-1)
        distance = ((candidates - mean[None]) @ whitening).square().sum(-1)
        score = -(distance + residual / max(view.tolerance, 1e-12) ** 2)
        order = _assign_positions(score)
        for _ in range(rounds):
            order = _assign_positions(
                score + _neighbours(candidates, order, seam, size, view.images.shape[1])
            )
        ordered = torch.empty(count, candidates.shape[-1], dtype=candidates.dtype)
        ordered[order] = candidates[torch.arange(count), order]
        images.append(ordered)
    return to_images(torch.stack(images), size, view.images.shape[1]).to(view.images.dtype)


def _drop_first_token(tokens: Tensor, view: PublicPatches, count: int) -> Tensor:
    """Drop the token nearest to the first token."""
    first = view.first.double() if view.first is not None else tokens[0]
    distance = (tokens - first).square().sum(-1)
    return tokens[distance.argsort(descending=True)[:count].sort().values]


def _edges(patches: Tensor, size: int, channels: int) -> dict[str, Tensor]:
    """Return the pixels on the four edges of each patch."""
    x = patches.view(*patches.shape[:-1], channels, size, size)
    return {
        "left": x[..., :, 0],
        "right": x[..., :, -1],
        "top": x[..., 0, :],
        "bottom": x[..., -1, :],
    }


def _seams(patches: Tensor, size: int, channels: int) -> float:
    """Return the mean squared difference of neighbours along their common edge in the auxiliary
    images.
    """
    side = round(patches.shape[1] ** 0.5)
    e = {k: v.reshape(len(v), side, side, -1) for k, v in _edges(patches, size, channels).items()}
    across = (e["right"][:, :, :-1] - e["left"][:, :, 1:]).square().sum(-1).mean()
    down = (e["bottom"][:, :-1] - e["top"][:, 1:]).square().sum(-1).mean()
    return max(float((across + down) / 2), 1e-12)


def _neighbours(candidates: Tensor, order: Tensor, seam: float, size: int, channels: int) -> Tensor:
    """Score each token at each position by how well its edges continue those of its current
    neighbours.
    """
    count = len(order)
    side = round(count**0.5)
    current = torch.empty(count, candidates.shape[-1], dtype=candidates.dtype)
    current[order] = candidates[torch.arange(count), order]
    candidate_edges, current_edges = (
        _edges(candidates, size, channels),
        _edges(current, size, channels),
    )
    score = torch.zeros(count, count, dtype=candidates.dtype)
    for edge, opposite, step, is_row in (
        ("left", "right", -1, True),
        ("right", "left", 1, True),
        ("top", "bottom", -1, False),
        ("bottom", "top", 1, False),
    ):
        for position in range(count):
            r, c = divmod(position, side)
            r, c = (r, c + step) if is_row else (r + step, c)
            if 0 <= r < side and 0 <= c < side:
                score[:, position] -= (
                    candidate_edges[edge][:, position] - current_edges[opposite][r * side + c]
                ).square().flatten(1).sum(-1) / seam
    return score


def restore_order(tokens: Tensor, order: Tensor) -> Tensor:
    """Put each token at the position found for it."""
    out = torch.empty_like(tokens)
    out.scatter_(1, order[..., None].expand_as(tokens), tokens)
    return out


def link_samples(first: Tensor, second: Tensor) -> Tensor:
    """Link the samples of two passes over fresh shuffles: for each of the first, its index in the
    second.

    Sees: features of the same samples in two passes, shuffled independently.
    Recovers: which sample is which.
    Why it works: a shuffle preserves the set of tokens.
    What stops it: noise; training steps between the passes; a fresh key on the columns.
    Floor: one in as many as there are.
    Ceiling: all.
    References: On the (In)Security of the Shuffling Defense (ACL 2026), for the alignment of
        activations.
    """
    a, b = (np.sort(v.double().numpy(), axis=1).reshape(len(v), -1) for v in (first, second))
    cost = (a**2).sum(1)[:, None] + (b**2).sum(1)[None] - 2 * a @ b.T
    return torch.from_numpy(best_assignment(cost))
