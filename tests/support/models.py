"""Compare live models, and build twins of pico-models."""

from __future__ import annotations

import copy

import torch

from regauge.core.action import apply
from regauge.core.element import Element
from regauge.testing import strict_float64
from support.picos import config_of


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return max(float((a[k] - b[k]).abs().max()) / max(1.0, float(b[k].abs().max())) for k in b)


def gradients(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    with strict_float64():
        result = model(**inputs)
        outs = (
            [result]
            if isinstance(result, torch.Tensor)
            else [v for v in result.values() if isinstance(v, torch.Tensor)]
        )
        sum(
            (o * torch.linspace(-1, 1, o.numel()).view(o.shape)).sum()
            for o in outs
            if o.requires_grad
        ).backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def lock_backbone(model: torch.nn.Module, g: Element) -> torch.nn.Module:
    """The same model with only its backbone moved."""
    twin = copy.deepcopy(model)
    twin.load_state_dict(apply(g, model.state_dict(), part="backbone"))
    return twin


def _twin(model: torch.nn.Module, changes: dict) -> torch.nn.Module:
    """A model of the same class with the config that the folded state asks for."""
    import copy

    if not changes:
        return copy.deepcopy(model)
    config = type(model.config).from_dict({**config_of(model), **changes})
    return type(model)(config).double().eval()


def _load(model: torch.nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Load as from_pretrained does: names that are tied in the state may be tied in the model,
    others get a tensor of their own.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for key, value in state.items():
            if key in parameters and any(
                parameters[key] is p and not torch.equal(value, state[k])
                for k, p in parameters.items()
                if k != key and k in state
            ):
                parent, _, leaf = key.rpartition(".")
                setattr(model.get_submodule(parent), leaf, torch.nn.Parameter(value.clone()))
    model.load_state_dict(state)
