"""The client's training pass as an adversary repeats it.

It gives differentiable gradients of guessed inputs, many guesses at once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from regauge.attacks.updates import SentUpdate
from regauge.jigsaw.layers import find_layers, unwrap_model
from regauge.jigsaw.wrapper import MaskedJigsaw

Tensor = torch.Tensor
GradientFn = Callable[[Tensor, Tensor], dict[str, Tensor]]


@contextmanager
def double_backward() -> Iterator[None]:
    """Use attention by plain matrix products, the only kind that can be differentiated twice."""
    with sdpa_kernel([SDPBackend.MATH]):
        yield


def make_gradient_fn(view: SentUpdate, mask: Tensor | None = None) -> GradientFn:
    """Return a function from guessed images and labels to the gradients of the update.

    The function takes images [guesses, batch, channels, height, width] and labels [guesses, batch]
    or class probabilities [guesses, batch, classes]. It returns [guesses, ...] for every tensor of
    the update.

    Args:
        view: The model and the update.
        mask: The positions that have MJP's unknown embedding.
    """
    model = copy.deepcopy(view.model).eval()
    inner, lead = unwrap_model(model)
    disable_fused_attention(inner)
    state = {n: p.detach() for n, p in model.named_parameters()}
    sent = {n: state[n] for n in view.update.tensors}
    fixed = {n: t for n, t in state.items() if n not in sent}
    buffers = dict(inner.named_buffers())
    table = unknown = None
    if isinstance(model, MaskedJigsaw) and mask is not None:
        layers = find_layers(model, view.shape)
        if layers.unknown is not None and layers.positions is not None:
            table, unknown = layers.positions, layers.unknown
            mask = torch.nn.functional.pad(mask.reshape(1, -1), (layers.prefix, 0)).to(
                state[table].device
            )

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        tensors = {**fixed, **parameters}
        if table is not None and unknown is not None and mask is not None:
            tensors[table] = torch.where(mask[..., None], tensors[unknown], tensors[table])
        output = functional_call(
            inner,
            ({n.removeprefix(lead): t for n, t in tensors.items() if n.startswith(lead)}, buffers),
            (x,),
        )
        logits = output if isinstance(output, Tensor) else output.logits
        return torch.nn.functional.cross_entropy(logits, y)

    single_grad = grad(loss)
    batched_grad = vmap(single_grad, in_dims=(None, 0, 0), randomness="error")

    def gradients(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        if len(x) == 1:  # plain autograd takes half the time of torch.func
            leaves = {n: t.requires_grad_(True) for n, t in sent.items()}
            grads = torch.autograd.grad(
                loss(leaves, x[0], y[0]),
                list(leaves.values()),
                create_graph=True,
                allow_unused=True,
            )
            return {
                n: torch.zeros_like(sent[n])[None] if g is None else g[None]
                for n, g in zip(leaves, grads, strict=True)
            }
        stacked: dict[str, Tensor] = batched_grad(sent, x, y)
        return stacked

    return gradients


def disable_fused_attention(model: Any) -> None:
    """Disable the fused attention kernels of timm's blocks.

    Models of the transformers library use `double_backward` instead: their eager attention computes
    the softmax in float32.
    """
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
