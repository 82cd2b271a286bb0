"""Where a model of images has the layers that closed forms read: its patch embedding, its table of
positions, the first block's readers, its head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from regauge.errors import RegaugeError, UpdateError
from regauge.jigsaw.masks import Grid, JigsawError
from regauge.jigsaw.positions import PositionLayout, find_positions, interpolate_positions
from regauge.jigsaw.wrapper import MaskedJigsaw

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class Layers:
    """Names of parameters in the model as it is given (a wrapper puts `model.` before them).
    `positions` is None where there is no table of absolute positions; `unknown` is MJP's shared
    embedding. `prefix` counts the tokens before the patches. `stretched` is the table's own place
    where a model stretches it over these inputs (DINOv2).
    """

    inner: torch.nn.Module
    weight: str
    bias: str | None
    positions: str | None
    unknown: str | None
    patch: Grid
    grid: Grid
    prefix: int
    lead: str = ""
    table_layout: PositionLayout | None = None

    @property
    def cells(self) -> int:
        return self.grid[0] * self.grid[1]

    def used_positions(self, table: Tensor) -> Tensor:
        """The positions of the patches [cells, width], as the model adds them, of its table [1,
        prefix + ..., width].
        """
        found = (
            table
            if self.table_layout is None
            else interpolate_positions(table, self.table_layout, self.grid)
        )
        return found[0, self.prefix :]

    def used_position_grads(self, slopes: Tensor) -> Tensor:
        """The gradients by these [cells, width], of those by the table: a table that is stretched
        is a linear map of itself, which is undone.
        """
        own = slopes[0, self.prefix :]
        if self.table_layout is None:
            return own
        count = len(own)
        basis = torch.cat(
            [torch.zeros(self.prefix, count, dtype=own.dtype), torch.eye(count, dtype=own.dtype)]
        )[None]
        stretch = self.used_positions(basis)  # [cells, cells of the table]
        found: Tensor = torch.linalg.lstsq(stretch.T, own.cpu()).solution
        return found


def unwrap_model(model: torch.nn.Module) -> tuple[torch.nn.Module, str]:
    """The model without a wrapper of MJP, and what the wrapper puts before its names."""
    return (model.model, "model.") if isinstance(model, MaskedJigsaw) else (model, "")


def patch_embedding(model: torch.nn.Module) -> str | None:
    """The name of the convolution that makes patches: the first whose stride is its kernel. One
    over single pixels makes none.
    """
    found = ((n, m) for n, m in model.named_modules() if isinstance(m, torch.nn.Conv2d))
    return next((n for n, m in found if m.kernel_size == m.stride and max(m.stride) > 1), None)


def find_layers(model: torch.nn.Module, shape: tuple[int, ...]) -> Layers:
    """Read off the model; what is missing is named."""
    inner, lead = unwrap_model(model)
    name = patch_embedding(inner)
    if name is None:
        raise UpdateError(
            f"{type(inner).__name__} has no patch embedding (a convolution whose stride is its "
            "kernel)",
            hint="ViT, DeiT and the like",
        )
    layer: Any = inner.get_submodule(name)
    try:
        place = find_positions(inner)
    except JigsawError as error:
        raise UpdateError(
            f"no table of positions can be read off {type(inner).__name__}: {error}"
        ) from error
    patch = (int(layer.kernel_size[0]), int(layer.kernel_size[1]))
    grid = (shape[-2] // patch[0], shape[-1] // patch[1])
    stretches = place.grid is not None and place.grid != grid
    if stretches and (not place.interpolates or isinstance(model, MaskedJigsaw)):
        assert place.grid is not None
        raise UpdateError(
            f"inputs of {shape[-2]} x {shape[-1]} have {grid[0]} x {grid[1]} patches, the "
            f"positions are of {place.grid[0]} x {place.grid[1]}"
        )
    has_unknown = isinstance(model, MaskedJigsaw) and model.unknown is not None
    return Layers(
        inner,
        f"{lead}{name}.weight",
        f"{lead}{name}.bias" if layer.bias is not None else None,
        None if place.table is None else lead + place.table,
        "unknown" if has_unknown else None,
        patch,
        grid,
        place.prefix,
        lead,
        place if stretches else None,
    )


@dataclass(frozen=True, eq=False)
class Readers:
    """The first block's query, key and value weights: `names` (torch layout [out, in] unless
    `is_conv1d`), and the norm before them, or None where they read the stream itself (post-norm).
    """

    names: tuple[str, ...]
    norm: torch.nn.Module | None
    is_conv1d: bool = False


def find_readers(model: torch.nn.Module, block: int = 0) -> Readers:
    """The readers of a block's attention, by the family's spec: whatever the norm before the
    block's attention is read by.
    """
    from regauge.models.resolve import spec_of

    inner, lead = unwrap_model(model)
    try:
        norms = spec_of(inner).norms
    except RegaugeError as error:
        raise UpdateError(
            f"no family says which weights of {type(inner).__name__} read its first norm",
            hint=str(error),
        ) from error
    firsts = [
        n
        for n in norms
        if len(n.readers) in (1, 3) and any(w in n.readers[0][0] for w in ("attn", "attention"))
    ]
    if len(firsts) <= block:
        raise UpdateError(
            f"{type(inner).__name__} has no attention that reads a norm",
            hint="spans are read off pre-norm models: ViT, DeiT, GPT-2",
        )
    norm = firsts[block]
    names = tuple(lead + weight for weight, _ in norm.readers)
    owner = inner.get_submodule(norm.readers[0][0].rpartition(".")[0])
    return Readers(
        names, inner.get_submodule(norm.gain.rpartition(".")[0]), type(owner).__name__ == "Conv1D"
    )


def find_head(model: torch.nn.Module, classes: int | None = None) -> tuple[str, str | None]:
    """The last linear layer: its weight, and its bias if it has one."""
    model, lead = unwrap_model(model)
    found = [
        (n, m)
        for n, m in model.named_modules()
        if isinstance(m, torch.nn.Linear) and (classes is None or m.out_features == classes)
    ]
    if not found:
        raise UpdateError(
            f"{type(model).__name__} has no linear head",
            hint="labels are read off the last linear layer's gradient",
        )
    name, layer = found[-1]
    return f"{lead}{name}.weight", f"{lead}{name}.bias" if layer.bias is not None else None
