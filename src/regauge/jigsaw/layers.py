"""The layers of an image model that closed-form attacks use: patch embedding, position table, the
readers of the first block, the head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from regauge.errors import JigsawError, RegaugeError, UpdateError
from regauge.jigsaw.masks import Grid
from regauge.jigsaw.positions import PositionLayout, find_positions, interpolate_positions
from regauge.jigsaw.wrapper import MaskedJigsaw

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class Layers:
    """The patch embedding and the position table of a model.

    Attributes:
        inner: The model without an MJP wrapper.
        weight: The name of the patch embedding's weight; names include the wrapper's prefix.
        bias: The name of the patch embedding's bias, if it has one.
        positions: The name of the position table, or None without absolute positions.
        unknown: The name of MJP's shared unknown embedding, if there is one.
        patch: Height and width of a patch in pixels.
        grid: Rows and columns of patches.
        prefix: The number of tokens before the patches.
        lead: The wrapper's prefix of names, "model." or empty.
        table_layout: The layout of the table, if the model interpolates it for these inputs
            (DINOv2).
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
        """The number of patches."""
        return self.grid[0] * self.grid[1]

    def used_positions(self, table: Tensor) -> Tensor:
        """Return the positions that the model adds to the patches [cells, width].

        Args:
            table: The position table [1, prefix + ..., width].
        """
        if self.table_layout is not None:
            table = interpolate_positions(table, self.table_layout, self.grid)
        return table[0, self.prefix :]

    def used_position_grads(self, table_grads: Tensor) -> Tensor:
        """Return the gradients of `used_positions` [cells, width], from those of the table.

        Interpolation is a linear map of the table, which is inverted.
        """
        grads = table_grads[0, self.prefix :]
        if self.table_layout is None:
            return grads
        count, dtype = len(grads), grads.dtype
        basis = torch.cat(
            [torch.zeros(self.prefix, count, dtype=dtype), torch.eye(count, dtype=dtype)]
        )[None]
        interpolation = self.used_positions(basis)  # [cells, cells of the table]
        solution: Tensor = torch.linalg.lstsq(interpolation.T, grads.cpu()).solution
        return solution


def unwrap_model(model: torch.nn.Module) -> tuple[torch.nn.Module, str]:
    """Return the model without an MJP wrapper, and the wrapper's prefix of its names."""
    return (model.model, "model.") if isinstance(model, MaskedJigsaw) else (model, "")


def patch_embedding(model: torch.nn.Module) -> str | None:
    """Return the name of the patch embedding: the first convolution whose stride is its kernel.

    A convolution over single pixels does not count.
    """
    convs = ((n, m) for n, m in model.named_modules() if isinstance(m, torch.nn.Conv2d))
    return next((n for n, m in convs if m.kernel_size == m.stride and max(m.stride) > 1), None)


def find_layers(model: torch.nn.Module, shape: tuple[int, ...]) -> Layers:
    """Find the patch embedding and the position table of a model.

    Args:
        model: The image model, with or without an MJP wrapper.
        shape: The shape of its inputs, [..., height, width].

    Raises:
        UpdateError: The model has no patch embedding, or its positions do not fit the inputs.
    """
    inner, lead = unwrap_model(model)
    name = patch_embedding(inner)
    if name is None:
        raise UpdateError(
            f"{type(inner).__name__} has no patch embedding (a convolution whose stride is its "
            "kernel)",
            hint="use a ViT, DeiT or similar model",
        )
    layer: Any = inner.get_submodule(name)
    try:
        layout = find_positions(inner)
    except JigsawError as error:
        raise UpdateError(
            f"the position table of {type(inner).__name__} cannot be found: {error}"
        ) from error
    patch = (int(layer.kernel_size[0]), int(layer.kernel_size[1]))
    grid = (shape[-2] // patch[0], shape[-1] // patch[1])
    interpolates = layout.grid is not None and layout.grid != grid
    if interpolates and (not layout.interpolates or isinstance(model, MaskedJigsaw)):
        assert layout.grid is not None
        raise UpdateError(
            f"inputs of {shape[-2]} x {shape[-1]} have {grid[0]} x {grid[1]} patches, but the "
            f"position table has {layout.grid[0]} x {layout.grid[1]}"
        )
    has_unknown = isinstance(model, MaskedJigsaw) and model.unknown is not None
    return Layers(
        inner,
        f"{lead}{name}.weight",
        f"{lead}{name}.bias" if layer.bias is not None else None,
        None if layout.table is None else lead + layout.table,
        "unknown" if has_unknown else None,
        patch,
        grid,
        layout.prefix,
        lead,
        layout if interpolates else None,
    )


@dataclass(frozen=True, eq=False)
class Readers:
    """The query, key and value weights of a block's attention.

    Attributes:
        names: The names of the weights, [out, in] unless `is_conv1d`.
        norm: The norm before them, or None if they read the stream itself (post-norm).
        is_conv1d: Whether they are Conv1D layers of transformers, [in, out].
    """

    names: tuple[str, ...]
    norm: torch.nn.Module | None
    is_conv1d: bool = False


def find_readers(model: torch.nn.Module, block: int = 0) -> Readers:
    """Find the weights that read the norm before a block's attention, by the family's spec.

    Raises:
        UpdateError: The model has no family, or its attention does not read a norm.
    """
    from regauge.models.resolve import spec_of

    inner, lead = unwrap_model(model)
    try:
        norms = spec_of(inner).norms
    except RegaugeError as error:
        raise UpdateError(
            f"no family defines the weights of {type(inner).__name__} that read its first norm",
            hint=str(error),
        ) from error
    attention_norms = [
        n
        for n in norms
        if len(n.readers) in (1, 3) and any(w in n.readers[0][0] for w in ("attn", "attention"))
    ]
    if len(attention_norms) <= block:
        raise UpdateError(
            f"{type(inner).__name__} has no attention that reads a norm",
            hint="span attacks need a pre-norm model: ViT, DeiT, GPT-2",
        )
    norm = attention_norms[block]
    names = tuple(lead + weight for weight, _ in norm.readers)
    owner = inner.get_submodule(norm.readers[0][0].rpartition(".")[0])
    return Readers(
        names, inner.get_submodule(norm.gain.rpartition(".")[0]), type(owner).__name__ == "Conv1D"
    )


def find_head(model: torch.nn.Module, classes: int | None = None) -> tuple[str, str | None]:
    """Find the last linear layer, of `classes` outputs if they are given.

    Returns:
        The names of its weight, and of its bias or None.
    """
    model, lead = unwrap_model(model)
    linears = [
        (n, m)
        for n, m in model.named_modules()
        if isinstance(m, torch.nn.Linear) and (classes is None or m.out_features == classes)
    ]
    if not linears:
        raise UpdateError(
            f"{type(model).__name__} has no linear head",
            hint="labels are inferred from the gradient of the last linear layer",
        )
    name, layer = linears[-1]
    return f"{lead}{name}.weight", f"{lead}{name}.bias" if layer.bias is not None else None
