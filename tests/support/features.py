"""Planted features for inversion attacks."""

from __future__ import annotations

import torch

from regauge.attacks.inversion import to_patches
from regauge.attacks.views import PublicPatches

SIDE, PATCH, CHANNELS = 16, 4, 1


TOKENS, VALUES = (SIDE // PATCH) ** 2, CHANNELS * PATCH * PATCH


def pictures(count: int, seed: int) -> torch.Tensor:
    """Smooth random images in 0..1: sums of a few waves."""
    g = torch.Generator().manual_seed(seed)
    line = torch.linspace(0, 1, SIDE)
    waves = 2 * torch.pi * torch.randint(-2, 3, (count, 3, 2), generator=g).float()
    phases, sizes = (
        2 * torch.pi * torch.rand(count, 3, 1, 1, generator=g),
        torch.rand(count, 3, 1, 1, generator=g),
    )
    angle = (
        waves[..., 0, None, None] * line[:, None] + waves[..., 1, None, None] * line[None] + phases
    )
    x = (sizes * torch.cos(angle)).sum(1)
    return (
        (x - x.amin((1, 2), keepdim=True))
        / (x.amax((1, 2), keepdim=True) - x.amin((1, 2), keepdim=True)).clamp(min=1e-6)
    )[:, None]


class Embedding:
    """A patch embedding with positions, as a client has it."""

    def __init__(self, width: int, positions: float = 0.5) -> None:
        g = torch.Generator().manual_seed(9)
        self.weight = torch.randn(width, CHANNELS, PATCH, PATCH, generator=g) / VALUES**0.5
        self.bias = 0.1 * torch.randn(width, generator=g)
        self.positions = positions * torch.randn(TOKENS, width, generator=g)

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        return to_patches(images, PATCH) @ self.weight.flatten(1).T + self.bias + self.positions

    def view(self, observed: torch.Tensor) -> PublicPatches:
        return PublicPatches(
            observed, self.weight, self.bias, self.positions, pictures(200, 1), PATCH
        )


def shuffle_tokens(x: torch.Tensor, seed: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of every sample in another order, and where each came from."""
    g = torch.Generator().manual_seed(seed)
    order = torch.stack([torch.randperm(x.shape[1], generator=g) for _ in x])
    return x.gather(1, order[..., None].expand_as(x)), order
