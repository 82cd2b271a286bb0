"""Attacks on the features of images that a client of split learning sends: from tokens back to
pixels.

All see a view and nothing else. Reconstructions have the range of the auxiliary images.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import nn

from regauge.attacks.views import PairedImages, PublicPatches

Tensor = torch.Tensor
FALLS = 1e-3  # of the loss of the mean image: less than this is no fall of a loss


def to_patches(images: Tensor, size: int) -> Tensor:
    """[n, c, h, w] to [n, patches, c * size * size], row by row."""
    n, c, h, w = images.shape
    return (
        images.view(n, c, h // size, size, w // size, size)
        .permute(0, 2, 4, 1, 3, 5)
        .reshape(n, -1, c * size * size)
    )


def to_images(patches: Tensor, size: int, channels: int) -> Tensor:
    """And back. Images are square."""
    n, count, _ = patches.shape
    side = round(count**0.5)
    return (
        patches.view(n, side, side, channels, size, size)
        .permute(0, 3, 1, 4, 2, 5)
        .reshape(n, channels, side * size, side * size)
    )


@dataclass(frozen=True)
class Inverted:
    """Reconstructions, and how the attacker's own training went: validation loss after each epoch,
    and what the mean image would have.
    """

    images: Tensor
    losses: tuple[float, ...]
    floor: float


class _Decoder(nn.Module):
    """Tokens to patches by a Transformer with a tanh at its end. In order, each token becomes the
    patch at its place; otherwise every place asks all tokens by cross-attention, and their order
    does not matter.
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


def decoder(
    view: PairedImages,
    *,
    in_order: bool = True,
    hidden: int = 128,
    depth: int = 2,
    epochs: int = 200,
    patience: int = 8,
    rate: float = 1e-3,
    batch: int = 64,
    seed: int = 0,
) -> Inverted:
    """Images from features, by a decoder that was trained on pairs (000's black-box attack; in no
    order, one that shuffled rows do not stop).

    Sees: defended features, and defended features of images of its own, which it has sent through
    the client or a client like it. Recovers: the images. Why it works: features determine their
    input, and a decoder learns the way back, shuffles or not: tokens carry their position. What
    stops it: noise; samples mixed; no pairs. Floor: the mean image. Ceiling: the same decoder
    without any defence. References: 000 Sec. 5.3, Tab. 6; Dosovitskiy and Brox 2016 (1506.02753).
    Cost: one training on the pairs, until the loss on a tenth of them, held out, has not fallen in
    `patience` epochs by a thousandth of the mean image's.
    """
    torch.manual_seed(seed)
    size, channels = view.patch, view.images.shape[1]
    x, y = view.features.float(), to_patches(view.images.float(), size)
    mean, scale = x.mean((0, 1)), x.std((0, 1)).clamp(min=1e-6)
    low, high = float(y.min()), float(y.max())
    order = torch.randperm(len(x))
    held, used = order[: max(1, len(x) // 10)], order[max(1, len(x) // 10) :]
    floor = float((y[held] - y[used].mean(0)).square().mean())
    model = _Decoder(
        x.shape[1], x.shape[2], y.shape[1], y.shape[2], hidden, depth, in_order, low, high
    )
    optimizer = torch.optim.AdamW(model.parameters(), rate, betas=(0.9, 0.95), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.5, patience=max(1, patience // 3)
    )
    best = mark = sys.float_info.max
    kept, losses, waited = {k: v.clone() for k, v in model.state_dict().items()}, [], 0
    for _ in range(epochs):
        model.train()
        for part in torch.split(used[torch.randperm(len(used))], batch):
            optimizer.zero_grad()
            loss = (model((x[part] - mean) / scale) - y[part]).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        losses.append(_loss(model, (x[held] - mean) / scale, y[held], batch))
        schedule.step(losses[-1])
        waited = 0 if losses[-1] < mark - max(1e-3 * mark, FALLS * floor) else waited + 1
        mark = losses[-1] if waited == 0 else mark
        if losses[-1] < best:
            best, kept = losses[-1], {k: v.clone() for k, v in model.state_dict().items()}
        if waited >= patience:
            break
    model.load_state_dict(kept)
    with torch.no_grad():
        found = torch.cat(
            [model((part.float() - mean) / scale) for part in torch.split(view.seen, batch)]
        )
    return Inverted(to_images(found, size, channels), tuple(losses), floor)


def _loss(model: nn.Module, x: Tensor, y: Tensor, batch: int) -> float:
    model.eval()
    with torch.no_grad():
        parts = zip(torch.split(x, batch), torch.split(y, batch), strict=True)
        return sum((float((model(a) - b).square().mean()) * len(a) for a, b in parts), 0.0) / len(x)


def probe(
    view: PairedImages,
    *,
    hidden: int = 128,
    epochs: int = 60,
    patience: int = 6,
    rate: float = 3e-3,
    seed: int = 0,
) -> Tensor:
    """The places of shuffled tokens: [samples, tokens], for each the place that it came from.

    Sees: shuffled features, and features of its own in order (`view.features`). Recovers: the
    order. Why it works: the position embedding is added before the shuffle, so that a classifier
    reads the place off each token by itself; an assignment makes one order of the guesses. What
    stops it: positions that are not in the tokens; noise. Floor: one place in as many as there are.
    Ceiling: all. References: Hidden No More (2505.18332), for sequences in another order.
    """
    told = place_scores(view, hidden=hidden, epochs=epochs, patience=patience, rate=rate, seed=seed)
    return torch.stack([_assigned(t) for t in told])


def place_scores(
    view: PairedImages,
    *,
    hidden: int = 128,
    epochs: int = 60,
    patience: int = 6,
    rate: float = 3e-3,
    seed: int = 0,
) -> Tensor:
    """For each token of what is seen and each place, the logarithm of how likely it came from
    there: [samples, tokens, places].
    """
    torch.manual_seed(seed)
    x = view.features.float()
    n, tokens, width = x.shape
    mean, scale = x.mean((0, 1)), x.std((0, 1)).clamp(min=1e-6)
    model = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, tokens))
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    order = torch.randperm(n)
    held, used = order[: max(1, n // 10)], order[max(1, n // 10) :]
    labels, best, waited = torch.arange(tokens), float("inf"), 0
    kept = {k: v.clone() for k, v in model.state_dict().items()}
    for _ in range(epochs):
        for part in torch.split(used[torch.randperm(len(used))], 64):
            optimizer.zero_grad()
            told = model((x[part] - mean) / scale)
            loss: Tensor = nn.functional.cross_entropy(told.flatten(0, 1), labels.repeat(len(part)))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        with torch.no_grad():
            now = float(
                nn.functional.cross_entropy(
                    model((x[held] - mean) / scale).flatten(0, 1), labels.repeat(len(held))
                )
            )
        waited += 1
        if now < best * (1 - 1e-3):
            best, kept, waited = now, {k: v.clone() for k, v in model.state_dict().items()}, 0
        if waited >= patience:
            break
    model.load_state_dict(kept)
    with torch.no_grad():
        return model((view.seen.float() - mean) / scale).log_softmax(-1)  # type: ignore[no-any-return]


def _assigned(score: Tensor) -> Tensor:
    """For each token a place of its own, so that the scores add up to the most."""
    rows, places = linear_sum_assignment(-score.double().numpy())
    out = torch.empty(len(rows), dtype=torch.long)
    out[torch.from_numpy(rows)] = torch.from_numpy(places)
    return out


def public_patches(view: PublicPatches, *, rounds: int = 2) -> Tensor:
    """Images from features, token by token, through the inverse of a public patch embedding;
    shuffled tokens are put in order.

    Sees: features (shuffled or not, with or without the first token), the embedding's weights, and
    other images of the kind. Recovers: the images, exactly where the embedding is injective and
    nothing was added. Why it works: a token is W x + b + p, so that each place i gives a candidate
    W^+ (z - b - p_i), and the right one lies in the span of W and looks like a patch of that place.
    An assignment chooses one place for each token, by how well it fits; then what lies beside what
    decides again: edges of neighbours continue. What stops it: noise; an embedding that is secret,
    or has more in front of it. Floor: a random order. Ceiling: exact. References: Gallagher 2012
    (jigsaw puzzles), for edges of neighbours.
    """
    w = view.weight.double().flatten(1)  # [d, values]
    inverse = torch.linalg.pinv(w)
    patches = to_patches(view.images.double(), view.patch)
    count, size = patches.shape[1], view.patch
    places = view.positions.double()[-count:]
    mean = patches.mean(0)
    centred = (patches - mean).flatten(0, 1)
    cov = centred.T @ centred / len(centred)
    white = torch.linalg.cholesky(
        torch.linalg.inv(cov + 1e-3 * cov.diagonal().mean() * torch.eye(len(cov), dtype=cov.dtype))
    )
    seam = _seams(patches, size, view.images.shape[1])
    out = []
    for tokens in view.seen.double():
        if len(tokens) > count:  # one of them is no patch: the one that is least like any
            tokens = _without_first(tokens, view, count)
        rest = tokens[:, None] - view.bias.double() - places[None]  # [tokens, places, d]
        made = rest @ inverse.T
        off = (rest - made @ w.T).square().sum(-1)
        unlike = ((made - mean[None]) @ white).square().sum(-1)
        score = -(unlike + off / max(view.tolerance, 1e-12) ** 2)
        order = _assigned(score)
        for _ in range(rounds):
            order = _assigned(score + _neighbours(made, order, seam, size, view.images.shape[1]))
        found = torch.empty(count, made.shape[-1], dtype=made.dtype)
        found[order] = made[torch.arange(count), order]
        out.append(found)
    return to_images(torch.stack(out), size, view.images.shape[1]).to(view.images.dtype)


def _without_first(tokens: Tensor, view: PublicPatches, count: int) -> Tensor:
    known = view.first.double() if view.first is not None else tokens[0]
    far = (tokens - known).square().sum(-1)
    return tokens[far.argsort(descending=True)[:count].sort().values]


def _edges(patches: Tensor, size: int, channels: int) -> dict[str, Tensor]:
    x = patches.view(*patches.shape[:-1], channels, size, size)
    return {
        "left": x[..., :, 0],
        "right": x[..., :, -1],
        "top": x[..., 0, :],
        "bottom": x[..., -1, :],
    }


def _seams(patches: Tensor, size: int, channels: int) -> float:
    """How much neighbours differ at their common edge, squared and added up, in the mean of the
    auxiliary images.
    """
    side = round(patches.shape[1] ** 0.5)
    e = {k: v.reshape(len(v), side, side, -1) for k, v in _edges(patches, size, channels).items()}
    across = (e["right"][:, :, :-1] - e["left"][:, :, 1:]).square().sum(-1).mean()
    down = (e["bottom"][:, :-1] - e["top"][:, 1:]).square().sum(-1).mean()
    return max(float((across + down) / 2), 1e-12)


def _neighbours(made: Tensor, order: Tensor, seam: float, size: int, channels: int) -> Tensor:
    """For each token at each place, how well its edges fit those that the present order puts beside
    it.
    """
    count = len(order)
    side = round(count**0.5)
    now = torch.empty(count, made.shape[-1], dtype=made.dtype)
    now[order] = made[torch.arange(count), order]
    here, there = _edges(made, size, channels), _edges(now, size, channels)
    score = torch.zeros(count, count, dtype=made.dtype)
    for mine, theirs, step, is_row in (
        ("left", "right", -1, True),
        ("right", "left", 1, True),
        ("top", "bottom", -1, False),
        ("bottom", "top", 1, False),
    ):
        for place in range(count):
            r, c = divmod(place, side)
            r, c = (r, c + step) if is_row else (r + step, c)
            if 0 <= r < side and 0 <= c < side:
                score[:, place] -= (
                    here[mine][:, place] - there[theirs][r * side + c]
                ).square().flatten(1).sum(-1) / seam
    return score


def in_order(seen: Tensor, order: Tensor) -> Tensor:
    """Tokens, each put at the place that was found for it."""
    out = torch.empty_like(seen)
    out.scatter_(1, order[..., None].expand_as(seen), seen)
    return out


def linked(first: Tensor, second: Tensor) -> Tensor:
    """Which sample of a second pass is which of a first one, over fresh shuffles: for each of the
    first, a place in the second.

    Sees: features of the same samples in two passes, shuffled afresh. Recovers: who is who. Why it
    works: a shuffle leaves the set of tokens as it is. What stops it: noise, training steps between
    the passes, columns under a fresh key. Floor: one in as many as there are. Ceiling: all.
    References: On the (In)Security of the Shuffling Defense (ACL 2026), for the alignment of
    activations that are shuffled afresh.
    """
    a, b = (np.sort(v.double().numpy(), axis=1).reshape(len(v), -1) for v in (first, second))
    cost = (a**2).sum(1)[:, None] + (b**2).sum(1)[None] - 2 * a @ b.T
    return torch.from_numpy(linear_sum_assignment(cost)[1])
