"""Where a model of images adds its absolute positions: the name of the table, its patches, their
grid, and how many tokens come before them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Any

import torch

from regauge.jigsaw.masks import Grid, JigsawError

TABLES = ("position_embeddings", "pos_embed", "pos_embedding", "absolute_pos_embed")
PATCH = 16  # of models without patches of their own: the paper's
PREFIX_COUNTS = (1, 0, 2)  # tokens before the patches, where nothing says how many


@dataclass(frozen=True)
class PositionLayout:
    """`table` is a parameter [1, prefix + cells, width], or None where positions are not absolute.
    `stretches`: the model stretches it over images of other sizes, by itself. `assumed`: nothing
    says how large a patch is, so that any other will do.
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
    """Read off the model's parameters and config (of the transformers library), or its patch
    embedding (timm); what is given goes first.
    """
    name = _find_table(model, table)
    size = _to_pair(patch) or _patch_size(model)
    if name is None:
        note = (
            f"{type(model).__name__} has no absolute position "
            f"embedding{_describe_lookup(model)}: of "
            "MJP the shuffle of patches is left (variant E); "
            "the unknown embedding and the regression of positions have nothing to act on"
        )
        return PositionLayout(None, size or (PATCH, PATCH), None, 0, note, assumed=size is None)
    if size is None:
        raise JigsawError(
            f"nothing in {type(model).__name__} says how large its patches are",
            hint="give patch=16, say",
        )
    own = _patch_size(model)
    if own is not None and own != size:
        raise JigsawError(
            f"patches of {size[0]} x {size[1]} pixels are not the model's, {own[0]} x {own[1]}, "
            "and its positions are of its own",
            hint="leave out patch=",
        )
    rows = model.get_parameter(name).shape[1]
    cells = _to_pair(grid) or _patch_grid(model, size, rows)
    prefix = rows - cells[0] * cells[1]
    if prefix < 0 or prefix > rows // 2 + 2:
        raise JigsawError(
            f'"{name}" has {rows} rows, which are no {cells[0]} x {cells[1]} patches and a few '
            "tokens before them",
            hint="give grid=",
        )
    stretches = getattr(getattr(model, "config", None), "model_type", "").startswith("dinov2")
    return PositionLayout(name, size, cells, prefix, interpolates=stretches)


def interpolate_positions(table: torch.Tensor, place: PositionLayout, grid: Grid) -> torch.Tensor:
    """A table over another grid, as the transformers library's models stretch theirs."""
    if place.grid is None or place.grid == grid:
        return table
    before, cells = table[:, : place.prefix], table[:, place.prefix :].contiguous()
    image = cells.view(1, *place.grid, -1).permute(0, 3, 1, 2).float()
    found = torch.nn.functional.interpolate(image, grid, mode="bicubic", align_corners=False)
    return torch.cat([before, found.permute(0, 2, 3, 1).flatten(1, 2).to(table.dtype)], 1)


def _find_table(model: torch.nn.Module, given: str | None) -> str | None:
    parameters = dict(model.named_parameters())
    if given is not None:
        if given not in parameters or parameters[given].dim() != 3:
            raise JigsawError(
                f'{type(model).__name__} has no parameter "{given}" of [1, tokens, width]',
                hint="model.named_parameters() names them",
            )
        return given
    found = [
        name
        for name, p in parameters.items()
        if name.rpartition(".")[2] in TABLES and p.dim() == 3 and p.shape[0] == 1
    ]
    if len(found) > 1:
        raise JigsawError(
            f"{type(model).__name__} has several tables of positions: {', '.join(found)}",
            hint="give table=",
        )
    return found[0] if found else None


def _describe_lookup(model: torch.nn.Module) -> str:
    """What is said of positions that are looked up by number (CLIP, SigLIP): they are there, but
    are no parameter of [1, tokens, width].
    """
    kept = [
        n
        for n, m in model.named_modules()
        if isinstance(m, torch.nn.Embedding)
        and n.rpartition(".")[2].startswith("position_embedding")
    ]
    return (
        f" that is known here (it looks them up in {', '.join(kept)}, and known are parameters "
        "of [1, tokens, width])"
        if kept
        else ""
    )


def _patch_size(model: torch.nn.Module) -> Grid | None:
    config = getattr(model, "config", None)
    found = _to_pair(getattr(config, "patch_size", None)) or _to_pair(
        getattr(getattr(model, "patch_embed", None), "patch_size", None)
    )
    if found is not None:
        return found
    first = next((m for m in model.modules() if isinstance(m, torch.nn.Conv2d)), None)
    strides = first is not None and first.kernel_size == first.stride and max(first.stride) > 1
    return _to_pair(first.stride) if strides and first is not None else None


def _patch_grid(model: torch.nn.Module, patch: Grid, rows: int) -> Grid:
    known = _to_pair(getattr(getattr(model, "patch_embed", None), "grid_size", None))
    if known is not None:
        return known
    image = _to_pair(getattr(getattr(model, "config", None), "image_size", None))
    if image is not None:
        return image[0] // patch[0], image[1] // patch[1]
    side = next((isqrt(rows - p) for p in PREFIX_COUNTS if isqrt(rows - p) ** 2 == rows - p), None)
    if side is None:
        raise JigsawError(
            f"{rows} positions are no square of patches and a token or two before it",
            hint="give grid=(rows, columns)",
        )
    return side, side


def _to_pair(value: Any) -> Grid | None:
    if value is None or isinstance(value, str):
        return None
    if isinstance(value, int):
        return value, value
    one, other = (int(v) for v in value)
    return one, other
