"""APRIL: images from the gradients of the first attention, in closed form, where nothing stands
between the embedding and it.

It needs a ViT whose first block has neither a norm before its attention nor residuals, as the paper
002 and the library that it uses attack. On the models that people train it gets nothing; here it is
the ground truth of our own code, and one of the rows of Table 5.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from regauge.attacks.embeddings import Solved, as_image
from regauge.attacks.updates import SentUpdate
from regauge.errors import UpdateError
from regauge.jigsaw.layers import inner_of, layers_of, readers_of

Tensor = torch.Tensor
MARK = "_regauge_april"


def _attend_then_feed(block: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """x to mlp(norm(attention(x))): no first norm, no residuals."""
    attention, norm = (
        next(getattr(block, n) for n in names if hasattr(block, n))
        for names in (("attention", "attn"), ("layernorm_after", "norm2"))
    )
    found = attention(hidden_states)
    found = found[0] if isinstance(found, tuple) else found
    out: Tensor = block.mlp(norm(found))
    return out


def april_model(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of a ViT (transformers, timm) whose first block is the one that APRIL's closed form is
    for. Its weights are the same.
    """
    from regauge.models.cut import cut

    found = copy.deepcopy(model)
    inner, _ = inner_of(found)
    block: Any = inner.get_submodule(f"{cut(inner).boundaries[0].blocks}.0")
    if not any(hasattr(block, n) for n in ("layernorm_after", "norm2")) or not hasattr(
        block, "mlp"
    ):
        raise UpdateError(
            f"a {type(block).__name__} is no block of a pre-norm ViT",
            hint="APRIL's block is made of ViT, DeiT and timm's ViTs",
        )
    block.__class__ = type(
        f"April{type(block).__name__}", (type(block),), {"forward": _attend_then_feed, MARK: True}
    )
    return found


def is_april(model: torch.nn.Module) -> bool:
    return any(hasattr(type(m), MARK) for m in model.modules())


def april(view: SentUpdate) -> tuple[Tensor, Solved]:
    """The image that an update was made of, [1, channels, height, width], on a model whose first
    block is APRIL's.

    Sees: the gradients by the table of positions and by the first block's query, key and value
    weights; batch size 1. Recovers: the tokens, and from them patches where the patch embedding is
    injective (ViT-B: 768 values to 768 channels; of ViT-S, 384, only the part that it keeps). Why
    it works: W_q^T dW_q + W_k^T dW_k + W_v^T dW_v = (dL/dz)^T z, and dL/dz is the gradient by the
    positions (002 Eq. 2, 3). What stops it: a norm before the attention or a residual past it
    (every model in use); batches; float32, where the system is too ill-conditioned; MJP's shared
    embedding. Floor: the mean image. Ceiling: exact in float64. References: Lu et al., APRIL
    (2112.14087); 002 Sec. 4. Cost: one least squares of as many rows as tokens. Singular values
    count down to the rounding of the update's dtype, as LAPACK takes it.
    """
    layers, readers = layers_of(view.model, view.shape), readers_of(view.model)
    if layers.positions is None:
        raise UpdateError(
            f"{type(layers.inner).__name__} has no table of absolute positions, whose gradient "
            "APRIL needs"
        )
    if layers.stretched is not None:
        raise UpdateError(
            "the positions are stretched over inputs of this size, which APRIL does not undo",
            hint="give images of the model's own size",
        )
    table = view.slope(layers.positions, "the gradient by the table of positions")
    state = {n: p.detach().double().cpu() for n, p in view.model.named_parameters()}
    a = table.detach().double().cpu()[0]
    b = torch.zeros(a.shape[1], a.shape[1], dtype=torch.float64)
    for name in readers.names:
        slope = view.slope(name, "the gradient by the first attention").detach().double().cpu()
        b += state[name].T @ slope
    left, s, right = torch.linalg.svd(a.T, full_matrices=False)
    least = torch.finfo(table.dtype).eps * max(a.shape)
    kept = s > least * s[0]
    z = right.T @ (
        torch.where(kept, 1 / s.clamp(min=1e-300), torch.zeros_like(s))[:, None] * (left.T @ b)
    )
    tokens = (z - state[layers.positions][0])[layers.prefix :]
    tokens = tokens - state[layers.bias] if layers.bias is not None else tokens
    patches = tokens @ torch.linalg.pinv(state[layers.weight].flatten(1)).T
    residual = float((b - a.T @ z).norm() / b.norm().clamp(min=1e-300))
    known = torch.ones(layers.cells, dtype=torch.bool)
    solved = Solved(
        patches,
        known,
        int(kept.sum()),
        len(a),
        float(s[0] / s[-1].clamp(min=1e-300)),
        residual,
        0.0,
    )
    return as_image(patches, layers, view.shape[0]), solved
