"""Studies of position tables (projections, variance, regression of positions) and of the attention
of CLS.

Convention. A table is [cells, width], patches only, row by row. Explained variance is of the
centred table (that is what PCA projects); accumulated eigenvalues are the squared singular values
of the uncentred table, as in the paper's Figure 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from regauge.errors import JigsawError, need
from regauge.jigsaw.masks import Grid, check_size
from regauge.jigsaw.wrapper import MaskedJigsaw

Tensor = torch.Tensor
DIMENSIONS = (3, 4, 5, 6, 7)  # of the paper's Table 7
FOLDS, REPEATS = 5, 5
CLS_NAMES = ("cls_token", "class_token", "class_embedding")  # in several libraries


@dataclass(frozen=True)
class Regression:
    """Cross-validated errors of a linear regression of positions from their embeddings.

    Attributes:
        index_mae: The mean absolute error of the index (1-D).
        index_spread: Its standard deviation over repeated divisions into folds.
        grid_mae: The mean absolute error of row and column (2-D).
        grid_spread: Its standard deviation.
    """

    index_mae: float
    index_spread: float
    grid_mae: float
    grid_spread: float


def position_table(wrapped: MaskedJigsaw) -> tuple[Any, Grid]:
    """Return the position embeddings of a model's patches, [cells, width], and their grid."""
    layout = wrapped.layout
    if layout.table is None or layout.grid is None:
        raise JigsawError(
            f"{type(wrapped.model).__name__} has no table of absolute positions that is supported",
            hint="use a ViT or DeiT",
        )
    table = wrapped.model.get_parameter(layout.table).detach()[0, layout.prefix :]
    if wrapped.index is not None:
        table = table + wrapped.index.detach()[0, layout.prefix :]
    return table.double().cpu().numpy(), layout.grid


def explained_variance(table: Any, dimensions: Sequence[int] = DIMENSIONS) -> dict[int, float]:
    """Compute the share of the variance in the first principal directions (Definition 1)."""
    variances = np.cumsum(np.square(np.linalg.svd(table - table.mean(0), compute_uv=False)))
    total = variances[-1]
    return {
        d: float(variances[min(d, len(variances)) - 1] / total) if total > 0 else 0.0
        for d in dimensions
    }


def accumulated_eigenvalues(table: Any) -> list[float]:
    """Compute the share of the first n eigenvalues, n = 1, 2, ...

    The slower the curve rises, the more directions the table uses.
    """
    sums = np.cumsum(np.square(np.linalg.svd(table, compute_uv=False)))
    return [float(x) for x in sums / max(sums[-1], 1e-300)]


def regress_positions(
    table: Any, grid: Grid, *, seed: int = 0, folds: int = FOLDS, repeats: int = REPEATS
) -> Regression:
    """Measure how well a linear map regresses positions from their embeddings.

    Args:
        table: The position table [cells, width].
        grid: Rows and columns of patches.
        seed: The seed of the divisions into folds.
        folds: The folds of the cross-validation.
        repeats: The number of divisions into folds.
    """
    need("sklearn", "studies")
    from sklearn.linear_model import LinearRegression
    from sklearn.model_selection import KFold, cross_val_predict

    rows, columns = np.divmod(np.arange(len(table)), grid[1])
    targets = {
        "index": np.arange(len(table), dtype=float),
        "grid": np.stack([rows, columns], 1).astype(float),
    }
    errors: dict[str, list[float]] = {name: [] for name in targets}
    for repeat in range(repeats):
        division = KFold(min(folds, len(table)), shuffle=True, random_state=seed + repeat)
        for name, target in targets.items():
            predicted = cross_val_predict(LinearRegression(), table, target, cv=division)
            errors[name].append(float(np.abs(predicted - target).mean()))
    return Regression(
        float(np.mean(errors["index"])),
        float(np.std(errors["index"])),
        float(np.mean(errors["grid"])),
        float(np.std(errors["grid"])),
    )


def project_pca(table: Any, dimensions: int = 2) -> Any:
    """Project a table to its leading principal directions, each with its largest entry positive."""
    centred = table - table.mean(0)
    _, _, directions = np.linalg.svd(centred, full_matrices=False)
    projected = centred @ directions[:dimensions].T
    largest = np.abs(projected).argmax(0)
    return projected * np.sign(projected[largest, np.arange(projected.shape[1])])


def project_umap(table: Any, dimensions: int = 2, *, neighbours: int = 15, seed: int = 0) -> Any:
    """Project a table by UMAP."""
    need("umap", "studies")
    import warnings

    import umap

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a seed disables threads
        return umap.UMAP(
            n_components=dimensions, n_neighbors=min(neighbours, len(table) - 1), random_state=seed
        ).fit_transform(table)


def attention_maps(wrapped: MaskedJigsaw, images: Tensor) -> Any:
    """Return the attention of CLS to the patches in the last layer, [images, heads, rows, columns].

    The grid is that of the images: models that interpolate their positions take other sizes.

    Args:
        wrapped: A ViT, DeiT or DINOv2, of transformers or timm.
        images: Normalized images [images, channels, height, width].

    Raises:
        JigsawError: The model has no CLS token, or its attention cannot be captured.
    """
    model, layout = wrapped.model, wrapped.layout
    if layout.assumed or not any(
        name.rpartition(".")[2] in CLS_NAMES for name, _ in model.named_parameters()
    ):
        raise JigsawError(
            f"{type(model).__name__} has no CLS token that attends to all patches",
            hint="use a ViT or DeiT",
        )
    grid = check_size((int(images.shape[-2]), int(images.shape[-1])), layout.patch)
    with torch.no_grad(), _capture_attention(model.eval()) as attentions:
        model(images)
        attention = attentions()
    prefix, tokens = _count_prefix_tokens(wrapped), attention.shape[-1]
    if tokens != prefix + grid[0] * grid[1]:
        raise JigsawError(
            f"the last layer of {type(model).__name__} must have {grid[0]} x {grid[1]} patches and "
            f"{prefix} tokens before them, got {tokens} tokens",
            hint="supported are ViT and DeiT of transformers and timm",
        )
    return attention[:, :, 0, prefix:].unflatten(-1, grid).double().cpu().numpy()


def _count_prefix_tokens(wrapped: MaskedJigsaw) -> int:
    """Count the tokens before the patches.

    Not all of them are in the position table: registers never are in transformers, and CLS is not
    in timm's DeiT-III.
    """
    timm = getattr(wrapped.model, "num_prefix_tokens", None)
    if isinstance(timm, int):
        return timm
    return max(wrapped.layout.prefix, 1) + int(
        getattr(getattr(wrapped.model, "config", None), "num_register_tokens", 0)
    )


@contextmanager
def _capture_attention(model: torch.nn.Module) -> Iterator[Any]:
    """Yield a function that returns the last layer's attention of the last pass.

    Its shape is [images, heads, tokens, tokens].
    """
    captured: list[Tensor] = []
    blocks: Any = getattr(model, "blocks", None)
    if blocks is not None and hasattr(getattr(blocks[-1], "attn", None), "attn_drop"):
        # timm: the input of the attention's dropout, which the fused kernel skips
        attention = blocks[-1].attn
        fused, attention.fused_attn = attention.fused_attn, False
        hook = attention.attn_drop.register_forward_pre_hook(
            lambda _, inputs: captured.append(inputs[0])
        )
        try:
            yield lambda: captured[-1]
        finally:
            attention.fused_attn = fused
            hook.remove()
        return
    config = getattr(model, "config", None)
    layers = [
        m
        for m in model.modules()
        if type(m).__name__.endswith(("Attention", "SelfAttention")) and hasattr(m, "config")
    ]
    unsupported = JigsawError(
        f"the attention of {type(model).__name__} cannot be captured",
        hint="supported are ViT and DeiT of transformers and timm",
    )
    if config is None or not layers or not hasattr(model, "set_attn_implementation"):
        raise unsupported
    implementation = config._attn_implementation
    model.set_attn_implementation("eager")  # type: ignore[operator]
    hooks = [
        m.register_forward_hook(
            lambda _, __, out: (
                captured.append(out[1]) if isinstance(out, tuple) and out[1] is not None else None
            )
        )
        for m in layers
    ]

    def last() -> Tensor:
        if not captured:
            raise unsupported
        return captured[-1]

    try:
        yield last
    finally:
        model.set_attn_implementation(implementation)  # type: ignore[operator]
        for hook in hooks:
            hook.remove()


def attention_entropies(maps: Any) -> Any:
    """Compute the entropy of each attention map, relative to that of uniform attention."""
    shares = maps / np.maximum(maps.sum((-1, -2), keepdims=True), 1e-300)
    flat = shares.reshape(*shares.shape[:-2], -1)
    return -(flat * np.log(np.maximum(flat, 1e-300))).sum(-1) / np.log(flat.shape[-1])


def study_positions(
    wrapped: MaskedJigsaw, *, seed: int = 0, umap: bool = False
) -> Mapping[str, Any]:
    """Return all studies of a model's position table as plain data.

    Args:
        wrapped: The model.
        seed: The seed of the regression and of UMAP.
        umap: Whether to project the table by UMAP, too.
    """
    table, grid = position_table(wrapped)
    regression = regress_positions(table, grid, seed=seed)
    studies: dict[str, Any] = {
        "explained": explained_variance(table),
        "eigenvalues": accumulated_eigenvalues(table),
        "regression": {
            "1-D": [regression.index_mae, regression.index_spread],
            "2-D": [regression.grid_mae, regression.grid_spread],
        },
        "pca": project_pca(table).tolist(),
        "grid": list(grid),
    }
    if umap:
        studies["umap"] = project_umap(table, seed=seed).tolist()
    return studies
