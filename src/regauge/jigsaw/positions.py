"""The absolute position embeddings of an image model: table, patch size, grid and prefix tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Any

import torch

from regauge.errors import JigsawError
from regauge.jigsaw.masks import Grid

TABLES = ("position_embeddings", "pos_embed", "pos_embedding", "absolute_pos_embed")
PATCH = 16  # the paper's patch, for models without patches
PREFIX_COUNTS = (1, 0, 2)  # tokens before the patches to try if the model does not define them


@dataclass(frozen=True)
class PositionLayout:
    """The position table of an image model and the patches that it belongs to.

    Attributes:
        table: The name of a parameter [1, prefix + cells, width], or None without a table of
            absolute positions.
        patch: Height and width of a patch in pixels.
        grid: Rows and columns of patches.
        prefix: The number of tokens before the patches.
        note: A sentence on missing absolute positions.
        interpolates: Whether the model interpolates the table to images of other sizes.
        assumed: Whether the patch size is a default that the model does not define.
    """

    table: str | None
    patch: Grid
    grid: Grid | None = None
    prefix: int = 0
    note: str = ""
    interpolates: bool = False
    assumed: bool = False


def find_positions(
    model: torch.nn.Module,
    *,
    table: str | None = None,
    patch: int | Sequence[int] | None = None,
    grid: Sequence[int] | None = None,
) -> PositionLayout:
    """Find the position table of an image model.

    What is not given follows from the model's parameters, its config (transformers) or its patch
    embedding (timm).

    Args:
        model: The image model.
        table: The name of the position table.
        patch: The patch size in pixels.
        grid: Rows and columns of patches.

    Raises:
        JigsawError: The patch size or the grid is unknown, or does not fit the table.
    """
    name = _find_table(model, table)
    size = _to_pair(patch) or _patch_size(model)
    if name is None:
        note = (
            f"{type(model).__name__} has no absolute position "
            f"embedding{_describe_lookup(model)}: of MJP only the shuffle of patches applies "
            "(variant E), without the unknown embedding and the regression of positions"
        )
        return PositionLayout(None, size or (PATCH, PATCH), None, 0, note, assumed=size is None)
    if size is None:
        raise JigsawError(
            f"the patch size of {type(model).__name__} is unknown",
            hint="give patch=, for example patch=16",
        )
    model_patch = _patch_size(model)
    if model_patch is not None and model_patch != size:
        raise JigsawError(
            f"patches must be of {model_patch[0]} x {model_patch[1]} pixels, as the model's "
            f"positions are, got {size[0]} x {size[1]}",
            hint="leave out patch=",
        )
    rows = model.get_parameter(name).shape[1]
    cells = _to_pair(grid) or _patch_grid(model, size, rows)
    prefix = rows - cells[0] * cells[1]
    if prefix < 0 or prefix > rows // 2 + 2:
        raise JigsawError(
            f'"{name}" must have a row for each of {cells[0]} x {cells[1]} patches and for a few '
            f"tokens before them, got {rows} rows",
            hint="give grid=",
        )
    interpolates = getattr(getattr(model, "config", None), "model_type", "").startswith("dinov2")
    return PositionLayout(name, size, cells, prefix, interpolates=interpolates)


def interpolate_positions(table: torch.Tensor, layout: PositionLayout, grid: Grid) -> torch.Tensor:
    """Interpolate a position table to another grid, as models of transformers do."""
    if layout.grid is None or layout.grid == grid:
        return table
    before, cells = table[:, : layout.prefix], table[:, layout.prefix :].contiguous()
    image = cells.view(1, *layout.grid, -1).permute(0, 3, 1, 2).float()
    resized = torch.nn.functional.interpolate(image, grid, mode="bicubic", align_corners=False)
    return torch.cat([before, resized.permute(0, 2, 3, 1).flatten(1, 2).to(table.dtype)], 1)


def _find_table(model: torch.nn.Module, name: str | None) -> str | None:
    """Return the name of the position table: the given one, or the only parameter named like it."""
    parameters = dict(model.named_parameters())
    if name is not None:
        if name not in parameters or parameters[name].dim() != 3:
            raise JigsawError(
                f'{type(model).__name__} has no parameter "{name}" of [1, tokens, width]',
                hint="model.named_parameters() lists them",
            )
        return name
    tables = [
        name
        for name, p in parameters.items()
        if name.rpartition(".")[2] in TABLES and p.dim() == 3 and p.shape[0] == 1
    ]
    if len(tables) > 1:
        raise JigsawError(
            f"{type(model).__name__} has several position tables: {', '.join(tables)}",
            hint="give table=",
        )
    return tables[0] if tables else None


def _describe_lookup(model: torch.nn.Module) -> str:
    """Describe position embeddings that are looked up by index, as in CLIP and SigLIP.

    They are not supported: a position table must be a parameter [1, tokens, width].
    """
    lookups = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Embedding)
        and name.rpartition(".")[2].startswith("position_embedding")
    ]
    if not lookups:
        return ""
    return (
        f" that is supported (it looks positions up in {', '.join(lookups)}; supported are "
        "parameters of [1, tokens, width])"
    )


def _patch_size(model: torch.nn.Module) -> Grid | None:
    """Return the patch size of the config, of timm's patch embedding or the first convolution."""
    config = getattr(model, "config", None)
    size = _to_pair(getattr(config, "patch_size", None)) or _to_pair(
        getattr(getattr(model, "patch_embed", None), "patch_size", None)
    )
    if size is not None:
        return size
    conv = next((m for m in model.modules() if isinstance(m, torch.nn.Conv2d)), None)
    if conv is None or conv.kernel_size != conv.stride or max(conv.stride) <= 1:
        return None
    return _to_pair(conv.stride)


def _patch_grid(model: torch.nn.Module, patch: Grid, rows: int) -> Grid:
    """Return the grid of timm's patch embedding, of the config's image size, or a square."""
    grid = _to_pair(getattr(getattr(model, "patch_embed", None), "grid_size", None))
    if grid is not None:
        return grid
    image = _to_pair(getattr(getattr(model, "config", None), "image_size", None))
    if image is not None:
        return image[0] // patch[0], image[1] // patch[1]
    side = next((isqrt(rows - p) for p in PREFIX_COUNTS if isqrt(rows - p) ** 2 == rows - p), None)
    if side is None:
        raise JigsawError(
            f"{rows} positions must be a square of patches and at most two tokens before it",
            hint="give grid=(rows, columns)",
        )
    return side, side


def _to_pair(value: Any) -> Grid | None:
    if value is None or isinstance(value, str):
        return None
    if isinstance(value, int):
        return value, value
    height, width = (int(v) for v in value)
    return height, width
