"""What a table of positions holds: its projections, how many directions it needs, and how well
places can be read off it. And where CLS looks.

Convention. A table is [cells, width], patches only, row by row. Explained variance is of the
centred table (that is what PCA projects); accumulated eigenvalues are the squared singular values
of the table as it is, as the paper's Figure 3 takes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from regauge.errors import need
from regauge.jigsaw.masks import Grid, JigsawError, check_size
from regauge.jigsaw.wrapper import MaskedJigsaw

Tensor = torch.Tensor
DIMENSIONS = (3, 4, 5, 6, 7)  # of the paper's Table 7
FOLDS, REPEATS = 5, 5
CLS_NAMES = ("cls_token", "class_token", "class_embedding")  # what libraries call it


@dataclass(frozen=True)
class Regression:
    """The mean absolute error of places that were left out, of a linear map from embeddings: of the
    index (1-D) and of row and column (2-D), and the standard deviation over repeats of the division
    into folds.
    """

    index_mae: float
    index_spread: float
    grid_mae: float
    grid_spread: float


def position_table(wrapped: MaskedJigsaw) -> tuple[Any, Grid]:
    """The positions of a model's patches, [cells, width], and their grid."""
    place = wrapped.layout
    if place.table is None or place.grid is None:
        raise JigsawError(
            f"{type(wrapped.model).__name__} has no table of absolute positions that is known here",
            hint="a ViT or DeiT has one",
        )
    table = wrapped.model.get_parameter(place.table).detach()[0, place.prefix :]
    if wrapped.index is not None:
        table = table + wrapped.index.detach()[0, place.prefix :]
    return table.double().cpu().numpy(), place.grid


def explained_variance(table: Any, dimensions: Sequence[int] = DIMENSIONS) -> dict[int, float]:
    """The share of the variance that so many principal directions explain (the paper's Definition
    1).
    """
    found = np.cumsum(np.square(np.linalg.svd(table - table.mean(0), compute_uv=False)))
    return {
        d: float(found[min(d, len(found)) - 1] / found[-1]) if found[-1] > 0 else 0.0
        for d in dimensions
    }


def accumulated_eigenvalues(table: Any) -> list[float]:
    """The share of the first n eigenvalues, n = 1, 2, ... A curve that rises slowly is of a table
    with more in it.
    """
    found = np.cumsum(np.square(np.linalg.svd(table, compute_uv=False)))
    return [float(x) for x in found / max(found[-1], 1e-300)]


def regress_positions(
    table: Any, grid: Grid, *, seed: int = 0, folds: int = FOLDS, repeats: int = REPEATS
) -> Regression:
    """Can places be read off their embeddings by a linear map? Five-fold cross-validation,
    repeated.
    """
    need("sklearn", "studies")
    from sklearn.linear_model import LinearRegression
    from sklearn.model_selection import KFold, cross_val_predict

    rows, columns = np.divmod(np.arange(len(table)), grid[1])
    wanted = {
        "one": np.arange(len(table), dtype=float),
        "two": np.stack([rows, columns], 1).astype(float),
    }
    found: dict[str, list[float]] = {name: [] for name in wanted}
    for repeat in range(repeats):
        division = KFold(min(folds, len(table)), shuffle=True, random_state=seed + repeat)
        for name, target in wanted.items():
            found[name].append(
                float(
                    np.abs(
                        cross_val_predict(LinearRegression(), table, target, cv=division) - target
                    ).mean()
                )
            )
    return Regression(
        float(np.mean(found["one"])),
        float(np.std(found["one"])),
        float(np.mean(found["two"])),
        float(np.std(found["two"])),
    )


def project_pca(table: Any, dimensions: int = 2) -> Any:
    """The table along its leading principal directions, each with its largest entry positive."""
    centred = table - table.mean(0)
    _, _, directions = np.linalg.svd(centred, full_matrices=False)
    found = centred @ directions[:dimensions].T
    largest = np.abs(found).argmax(0)
    return found * np.sign(found[largest, np.arange(found.shape[1])])


def project_umap(table: Any, dimensions: int = 2, *, neighbours: int = 15, seed: int = 0) -> Any:
    """The table as UMAP lays it out."""
    need("umap", "studies")
    import warnings

    import umap

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on threads that a seed rules out
        return umap.UMAP(
            n_components=dimensions, n_neighbors=min(neighbours, len(table) - 1), random_state=seed
        ).fit_transform(table)


def attention_maps(wrapped: MaskedJigsaw, images: Tensor) -> Any:
    """How CLS attends to the patches in the last layer, [images, heads, rows, columns]; of a ViT,
    DeiT or DINOv2, of transformers or timm. The grid is that of the images: models that stretch
    their positions take other sizes than their own.
    """
    model, place = wrapped.model, wrapped.layout
    if place.assumed or not any(
        name.rpartition(".")[2] in CLS_NAMES for name, _ in model.named_parameters()
    ):
        raise JigsawError(
            f"{type(model).__name__} has no token that looks at all patches",
            hint="a ViT or DeiT has CLS",
        )
    grid = check_size((int(images.shape[-2]), int(images.shape[-1])), place.patch)
    with torch.no_grad(), _capture_attention(model.eval()) as attentions:
        model(images)
        found = attentions()
    before, tokens = _count_prefix_tokens(wrapped), found.shape[-1]
    if tokens != before + grid[0] * grid[1]:
        raise JigsawError(
            f"the last layer of {type(model).__name__} has {tokens} tokens, which are no "
            f"{grid[0]} x {grid[1]} patches and {before} before them",
            hint="known are ViT and DeiT of transformers and timm",
        )
    return found[:, :, 0, before:].unflatten(-1, grid).double().cpu().numpy()


def _count_prefix_tokens(wrapped: MaskedJigsaw) -> int:
    """The tokens before the patches. Not all of them are in the table: registers never are in
    transformers, and CLS is not in timm's DeiT-III.
    """
    timm = getattr(wrapped.model, "num_prefix_tokens", None)
    if isinstance(timm, int):
        return timm
    return max(wrapped.layout.prefix, 1) + int(
        getattr(getattr(wrapped.model, "config", None), "num_register_tokens", 0)
    )


@contextmanager
def _capture_attention(model: torch.nn.Module) -> Iterator[Any]:
    """A function that gives the last layer's attention of the last pass, [images, heads, tokens,
    tokens].
    """
    kept: list[Tensor] = []
    blocks: Any = getattr(model, "blocks", None)
    if blocks is not None and hasattr(
        getattr(blocks[-1], "attn", None), "attn_drop"
    ):  # timm: what its dropout is given, once the kernel is plain
        attention = blocks[-1].attn
        fused, attention.fused_attn = attention.fused_attn, False
        hook = attention.attn_drop.register_forward_pre_hook(lambda _, given: kept.append(given[0]))
        try:
            yield lambda: kept[-1]
        finally:
            attention.fused_attn = fused
            hook.remove()
        return
    config = getattr(model, "config", None)
    layer = [
        m
        for m in model.modules()
        if type(m).__name__.endswith(("Attention", "SelfAttention")) and hasattr(m, "config")
    ]
    unseen = JigsawError(
        f"the attention of {type(model).__name__} cannot be seen",
        hint="known are ViT and DeiT of transformers and timm",
    )
    if config is None or not layer or not hasattr(model, "set_attn_implementation"):
        raise unseen
    before = config._attn_implementation
    model.set_attn_implementation("eager")  # type: ignore[operator]
    hooks = [
        m.register_forward_hook(
            lambda _, __, out: (
                kept.append(out[1]) if isinstance(out, tuple) and out[1] is not None else None
            )
        )
        for m in layer
    ]

    def last() -> Tensor:
        if not kept:
            raise unseen
        return kept[-1]

    try:
        yield last
    finally:
        model.set_attn_implementation(before)  # type: ignore[operator]
        for h in hooks:
            h.remove()


def attention_entropies(maps: Any) -> Any:
    """The entropy of each map, as a share of that of looking everywhere alike: a number for how
    diverse attention is.
    """
    shares = maps / np.maximum(maps.sum((-1, -2), keepdims=True), 1e-300)
    flat = shares.reshape(*shares.shape[:-2], -1)
    return -(flat * np.log(np.maximum(flat, 1e-300))).sum(-1) / np.log(flat.shape[-1])


def study_positions(
    wrapped: MaskedJigsaw, *, seed: int = 0, umap: bool = False
) -> Mapping[str, Any]:
    """All that is to be said of a table of positions, as plain data."""
    table, grid = position_table(wrapped)
    places = regress_positions(table, grid, seed=seed)
    found: dict[str, Any] = {
        "explained": explained_variance(table),
        "eigenvalues": accumulated_eigenvalues(table),
        "regression": {
            "1-D": [places.index_mae, places.index_spread],
            "2-D": [places.grid_mae, places.grid_spread],
        },
        "pca": project_pca(table).tolist(),
        "grid": list(grid),
    }
    return {**found, "umap": project_umap(table, seed=seed).tolist()} if umap else found
