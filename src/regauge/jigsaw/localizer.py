"""Dense absolute localization: the regression of row and column from position embeddings.

The loss is the mean absolute difference to (row, column), counted from 0, over the positions that
keep their embedding. The paper's equation (4) adds the two coordinates, its code takes their mean;
this is the mean, half of the sum: lambda times equation (4) is a weight of 2 lambda here.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch

from regauge.errors import JigsawError
from regauge.jigsaw.masks import Grid

Tensor = torch.Tensor
Kind = Literal["pca", "linear", "mlp", "mlp3"]


class Localizer(torch.nn.Module):
    """A regression of positions from their embeddings.

        linear  one linear layer (the paper's LN)
        mlp     linear, ReLU, linear, as in the reference's code (NLN)
        mlp3    three linear layers with ReLU between, as in the paper's text (NLN)
        pca     the two leading directions of the unmasked embeddings, without parameters

    No gradient flows through the directions of `pca`; in the reference it flows through its
    randomized decomposition, whose signs are arbitrary. This one is exact, and the largest entry of
    a direction is positive. Among equally strong directions the choice is the library's.
    """

    targets: Tensor

    def __init__(self, kind: Kind, width: int, grid: Grid) -> None:
        super().__init__()
        if kind not in get_args(Kind):
            raise JigsawError(f'unknown localization "{kind}"', hint="pca, linear, mlp or mlp3")
        if kind == "pca" and min(width, grid[0] * grid[1]) < 2:
            raise JigsawError(
                "pca needs at least 2 positions of width 2, got "
                f"{grid[0] * grid[1]} positions of width {width}",
                hint="use linear or mlp",
            )
        self.kind = kind
        layers: dict[str, Any] = {
            "pca": lambda: None,
            "linear": lambda: torch.nn.Linear(width, 2),
            "mlp": lambda: torch.nn.Sequential(
                torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, 2)
            ),
            "mlp3": lambda: torch.nn.Sequential(
                *(
                    layer
                    for _ in range(2)
                    for layer in (torch.nn.Linear(width, width), torch.nn.ReLU())
                ),
                torch.nn.Linear(width, 2),
            ),
        }
        self.project = layers[kind]()
        coordinates = torch.cartesian_prod(torch.arange(grid[0]), torch.arange(grid[1])).float()
        self.register_buffer("targets", coordinates, persistent=False)

    def forward(self, embeddings: Tensor, unmasked: Tensor) -> Tensor:
        """Compute the loss of embeddings.

        Args:
            embeddings: The position table [cells, width].
            unmasked: Whether a cell keeps its position [rows, cells], for each row of a mask.
        """
        # bfloat16 cannot represent the coordinates of large grids
        with torch.autocast(embeddings.device.type, enabled=False):
            weights = unmasked.to(torch.float32)
            weights = (weights / weights.sum(1, keepdim=True).clamp(min=1)).mean(0)
            if self.project is None:
                directions = self._directions(embeddings.detach().float(), weights)
                predicted = embeddings.float() @ directions
            else:
                dtype = next(self.project.parameters()).dtype
                predicted = self.project(embeddings.to(dtype)).float()
            loss: Tensor = ((predicted - self.targets).abs().mean(1) * weights).sum()
        return loss

    def _directions(self, embeddings: Tensor, weights: Tensor) -> Tensor:
        share = weights / weights.sum().clamp(min=1e-12)
        centred = (embeddings - share @ embeddings) * share.sqrt()[:, None]
        directions: Tensor = torch.linalg.svd(centred, full_matrices=False).Vh[:2]
        largest = directions.gather(1, directions.abs().argmax(1, keepdim=True))
        return (directions * torch.where(largest < 0, -1.0, 1.0)).T
