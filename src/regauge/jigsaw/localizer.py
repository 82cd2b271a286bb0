"""Dense absolute localization: the rows of a position table say where they belong, by a projection
to two numbers.

The loss is the mean absolute difference to (row, column), counted from 0, over the positions that
keep their embedding. The paper's equation (4) adds the two coordinates, its code takes their mean;
this is the code's, half of the text's.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch

from regauge.jigsaw.masks import Grid, JigsawError

Tensor = torch.Tensor
Kind = Literal["pca", "linear", "mlp"]


class Localizer(torch.nn.Module):
    """Regress positions from their embeddings.

    linear  one linear layer (the paper's LN) mlp     linear, ReLU, linear, as in the reference's
    code (NLN; the paper's text says three layers) pca     the two leading directions of the
    embeddings that are kept, without parameters; no gradient goes through the directions, as in the
            reference. Its decomposition is a randomised one with arbitrary signs; this one is
            exact, draws nothing, and the largest entry of a
            direction is positive. Where directions are equally strong which two are taken is still
            the library's choice
    """

    targets: Tensor

    def __init__(self, kind: Kind, width: int, grid: Grid) -> None:
        super().__init__()
        if kind not in get_args(Kind):
            raise JigsawError(f'there is no localization "{kind}"', hint="pca, linear or mlp")
        if kind == "pca" and min(width, grid[0] * grid[1]) < 2:
            raise JigsawError(
                f"{grid[0] * grid[1]} positions of width {width} have no two leading directions",
                hint="two or more of both, or linear or mlp",
            )
        self.kind = kind
        layers: dict[str, Any] = {
            "pca": lambda: None,
            "linear": lambda: torch.nn.Linear(width, 2),
            "mlp": lambda: torch.nn.Sequential(
                torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, 2)
            ),
        }
        self.project = layers[kind]()
        places = torch.cartesian_prod(torch.arange(grid[0]), torch.arange(grid[1])).float()
        self.register_buffer("targets", places, persistent=False)

    def forward(self, embeddings: Tensor, kept: Tensor) -> Tensor:
        """The loss of embeddings [cells, width]; `kept` [rows, cells] is 1 where a row of the batch
        keeps its position.
        """
        with torch.autocast(
            embeddings.device.type, enabled=False
        ):  # places up to the grid's side need more than eight bits
            weights = kept.to(torch.float32)
            weights = (weights / weights.sum(1, keepdim=True).clamp(min=1)).mean(0)
            if self.project is None:
                found = embeddings.float() @ self._directions(embeddings.detach().float(), weights)
            else:
                found = self.project(embeddings.to(next(self.project.parameters()).dtype)).float()
            loss: Tensor = ((found - self.targets).abs().mean(1) * weights).sum()
        return loss

    def _directions(self, embeddings: Tensor, weights: Tensor) -> Tensor:
        share = weights / weights.sum().clamp(min=1e-12)
        centred = (embeddings - share @ embeddings) * share.sqrt()[:, None]
        found: Tensor = torch.linalg.svd(centred, full_matrices=False).Vh[:2]
        largest = found.gather(1, found.abs().argmax(1, keepdim=True))
        return (found * torch.where(largest < 0, -1.0, 1.0)).T
