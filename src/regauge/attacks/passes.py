"""The client's pass as an adversary repeats it: gradients of guessed inputs, many guesses side by
side, through which one can differentiate again.
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
from regauge.jigsaw.layers import inner_of, layers_of
from regauge.jigsaw.wrapper import MaskedJigsaw

Tensor = torch.Tensor
Slopes = Callable[[Tensor, Tensor], dict[str, Tensor]]


@contextmanager
def twice() -> Iterator[None]:
    """Attention by plain products: only these can be differentiated twice."""
    with sdpa_kernel([SDPBackend.MATH]):
        yield


def slopes_by(view: SentUpdate, mask: Tensor | None = None) -> Slopes:
    """A function of guessed images [guesses, batch, channels, height, width] and labels [guesses,
    batch] or shares of classes [guesses, batch, classes]: the gradients of each guess [guesses,
    ...], for every tensor of the update. `mask` are the places that MJP's unknown embedding has.
    """
    model = copy.deepcopy(view.model).eval()
    inner, lead = inner_of(model)
    plain_attention(inner)
    state = {n: p.detach() for n, p in model.named_parameters()}
    wanted = {n: state[n] for n in view.update.tensors}
    fixed = {n: t for n, t in state.items() if n not in wanted}
    buffers = dict(inner.named_buffers())
    table = unknown = None
    if isinstance(model, MaskedJigsaw) and mask is not None:
        layers = layers_of(model, view.shape)
        if layers.unknown is not None and layers.positions is not None:
            table, unknown = layers.positions, layers.unknown
            mask = torch.nn.functional.pad(mask.reshape(1, -1), (layers.prefix, 0)).to(
                state[table].device
            )

    def loss(given: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        whole = {**fixed, **given}
        if table is not None and unknown is not None and mask is not None:
            whole[table] = torch.where(mask[..., None], whole[unknown], whole[table])
        found = functional_call(
            inner,
            ({n.removeprefix(lead): t for n, t in whole.items() if n.startswith(lead)}, buffers),
            (x,),
        )
        logits = found if isinstance(found, Tensor) else found.logits
        return torch.nn.functional.cross_entropy(logits, y)

    one = grad(loss)
    many = vmap(one, in_dims=(None, 0, 0), randomness="error")

    def slopes(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        if len(x) == 1:  # plain autograd takes half the time of torch.func's
            leaves = {n: t.requires_grad_(True) for n, t in wanted.items()}
            found_one = torch.autograd.grad(
                loss(leaves, x[0], y[0]),
                list(leaves.values()),
                create_graph=True,
                allow_unused=True,
            )
            return {
                n: torch.zeros_like(wanted[n])[None] if g is None else g[None]
                for n, g in zip(leaves, found_one, strict=True)
            }
        found: dict[str, Tensor] = many(wanted, x, y)
        return found

    return slopes


def plain_attention(model: Any) -> None:
    """timm's blocks without fused kernels. Those of the transformers library go by `twice` (its own
    eager attention has a softmax in float32).
    """
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
