"""A permutation along one axis of a torch tensor, whose backward pass is a gather as well.

torch's own `index_select` is slow along the last axis (about eight times a `gather` by an index
that is expanded and never stored), and its backward pass adds into zeros. A permutation has an
inverse: the gradient is gathered by that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class _Permute(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: torch.Tensor, index: torch.Tensor, inverse: torch.Tensor, dim: int
    ) -> torch.Tensor:
        return (
            x.gather(dim, index.expand(x.shape))
            if dim == x.dim() - 1
            else x.index_select(dim, index)
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, index, inverse, ctx.dim = inputs
        ctx.save_for_backward(index, inverse)
        ctx.save_for_forward(index, inverse)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        index, inverse = ctx.saved_tensors
        return _apply(grads[0], inverse, index, ctx.dim), None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        index, inverse = ctx.saved_tensors
        return _apply(tangents[0], index, inverse, ctx.dim)


_apply: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor] = _Permute.apply


def permute(
    x: torch.Tensor, index: torch.Tensor, dim: int, inverse: torch.Tensor | None = None
) -> torch.Tensor:
    """out[.., i, ..] = x[.., index[i], ..] for a permutation `index`. Any dtype; differentiable,
    forwards and backwards, and under torch.func.

    `inverse` is the inverse of `index`, where it is at hand.
    """
    if (
        not x.dtype.is_floating_point or x.dtype.itemsize < 2
    ):  # gather has no kernel for 8-bit floats
        return x.index_select(dim, index)
    return _apply(x, index, index.argsort() if inverse is None else inverse, dim % x.dim())
