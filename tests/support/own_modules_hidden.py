"""A module whose symmetry is hidden from families."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


class Hidden(nn.Module):
    """One hidden layer with an activation."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.function = nn.Linear(6, 10), nn.Linear(10, 3), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.function(self.up(x)))
