"""APRIL: images from the gradients of the first attention, in closed form.

It needs a ViT whose first block has neither a norm before its attention nor residuals, which is the
block that masked jigsaw (2205.12551) and the library behind it attack. It recovers nothing from the
models in common use. Here it checks our own code against a known answer, and it is one of the rows
of Table 5.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from regauge.attacks.embeddings import LeastSquaresResult, assemble_image
from regauge.attacks.updates import SentUpdate
from regauge.errors import UpdateError
from regauge.jigsaw.layers import find_layers, find_readers, unwrap_model

Tensor = torch.Tensor
MARK = "_regauge_april"


def _attend_then_feed(block: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Map x to mlp(norm(attention(x))): no first norm, no residuals."""
    attention, norm = (
        next(getattr(block, n) for n in names if hasattr(block, n))
        for names in (("attention", "attn"), ("layernorm_after", "norm2"))
    )
    attended = attention(hidden_states)
    attended = attended[0] if isinstance(attended, tuple) else attended
    out: Tensor = block.mlp(norm(attended))
    return out


def make_april_model(model: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of a ViT (transformers, timm) with APRIL's first block and the same weights."""
    from regauge.models.cut import cut

    copied = copy.deepcopy(model)
    inner, _ = unwrap_model(copied)
    block: Any = inner.get_submodule(f"{cut(inner).boundaries[0].blocks}.0")
    if not any(hasattr(block, n) for n in ("layernorm_after", "norm2")) or not hasattr(
        block, "mlp"
    ):
        raise UpdateError(
            f"the first block must be one of a pre-norm ViT, got {type(block).__name__}",
            hint="use a ViT, a DeiT or one of timm's ViTs",
        )
    block.__class__ = type(
        f"April{type(block).__name__}", (type(block),), {"forward": _attend_then_feed, MARK: True}
    )
    return copied


def is_april(model: torch.nn.Module) -> bool:
    """Return whether the model contains APRIL's block."""
    return any(hasattr(type(m), MARK) for m in model.modules())


def april(view: SentUpdate) -> tuple[Tensor, LeastSquaresResult]:
    """Recover the image behind an update, [1, channels, height, width], from a model with APRIL's
    block.

    Sees: the gradients of the position table and of the first block's query, key and value weights;
        batch size 1.
    Recovers: the tokens, and from them the patches if the patch embedding is injective (ViT-B: 768
        values to 768 channels; ViT-S, with 384 channels, gives only their projection).
    Why it works: W_q^T dW_q + W_k^T dW_k + W_v^T dW_v = (dL/dz)^T z, and dL/dz is the gradient of
        the positions (masked jigsaw, Eq. 2, 3).
    What stops it: a norm before the attention or a residual around it (every model in use);
        batches; float32, in which the system is too ill-conditioned; MJP's shared embedding.
    Floor: the mean image.
    Ceiling: exact in float64.
    References: Lu et al., APRIL (2112.14087); masked jigsaw (2205.12551), Sec. 4.
    Cost: one least squares with as many rows as tokens. Singular values count down to the rounding
        of the update's dtype, as in LAPACK.
    """
    layers, readers = find_layers(view.model, view.shape), find_readers(view.model)
    if layers.positions is None:
        raise UpdateError(
            "the model must have a table of absolute positions, got "
            f"{type(layers.inner).__name__} without one"
        )
    if layers.table_layout is not None:
        raise UpdateError(
            "inputs must have the model's own size, got one with interpolated positions",
            hint="pass images of the model's own size; APRIL does not undo interpolation",
        )
    table = view.grad(layers.positions, "the gradient of the position table")
    state = {n: p.detach().double().cpu() for n, p in view.model.named_parameters()}
    a = table.detach().double().cpu()[0]
    b = torch.zeros(a.shape[1], a.shape[1], dtype=torch.float64)
    for name in readers.names:
        grad = view.grad(name, "the gradient of the first attention").detach().double().cpu()
        b += state[name].T @ grad
    left, s, right = torch.linalg.svd(a.T, full_matrices=False)
    tolerance = torch.finfo(table.dtype).eps * max(a.shape)
    is_used = s > tolerance * s[0]
    z = right.T @ (
        torch.where(is_used, 1 / s.clamp(min=1e-300), torch.zeros_like(s))[:, None] * (left.T @ b)
    )
    tokens = (z - state[layers.positions][0])[layers.prefix :]
    tokens = tokens - state[layers.bias] if layers.bias is not None else tokens
    patches = tokens @ torch.linalg.pinv(state[layers.weight].flatten(1)).T
    residual = float((b - a.T @ z).norm() / b.norm().clamp(min=1e-300))
    known = torch.ones(layers.cells, dtype=torch.bool)
    solved = LeastSquaresResult(
        patches,
        known,
        int(is_used.sum()),
        len(a),
        float(s[0] / s[-1].clamp(min=1e-300)),
        residual,
        0.0,
    )
    return assemble_image(patches, layers, view.shape[0]), solved
