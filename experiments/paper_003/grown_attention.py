"""Averages of two models with the attention of both: the construction of Theus et al. (2506.22712).

They multiply queries by keys and values by outputs, and average the products. The product of an
average has the rank of both together, so that attention grows. Here a head of the average holds
both heads side by side: its scores are the average of their scores, its output is the average of
their products of values and outputs. The function is the same, and it also exists with rotary
positions, where queries and keys cannot be multiplied out. All other tensors are averaged as usual.

The result is no model of the class of the ends. It bounds what an alignment of the insides of
heads can gain.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from regauge.core.action import State
from regauge.matching.barriers import interpolate

Tensor = torch.Tensor
NAME = "regauge_grown"


class SideBySide(torch.nn.Module):
    """Parts of two projections, one behind the other: [first of A, first of B, second of A, ...].

    Args:
        ends: the projection of A and that of B.
        scales: the factors of A and of B, for each of the parts.
    """

    def __init__(
        self, ends: tuple[torch.nn.Module, torch.nn.Module], scales: list[tuple[float, float]]
    ) -> None:
        super().__init__()
        self.ends, self.scales = torch.nn.ModuleList(ends), scales

    def forward(self, x: Tensor) -> Tensor:
        outputs = [end(x).chunk(len(self.scales), -1) for end in self.ends]
        parts = [
            scale * output
            for part, scales in enumerate(self.scales)
            for scale, output in zip(scales, (o[part] for o in outputs), strict=True)
        ]
        return torch.cat(parts, -1)


class MeanOfOutputs(torch.nn.Module):
    """The average of what two projections make of the halves of their input."""

    def __init__(self, ends: tuple[torch.nn.Module, torch.nn.Module], t: float) -> None:
        super().__init__()
        self.ends, self.t = torch.nn.ModuleList(ends), t

    def forward(self, x: Tensor) -> Tensor:
        first, second = (end(half) for end, half in zip(self.ends, x.chunk(2, -1), strict=True))
        return torch.lerp(first, second, self.t)


def grow(module: torch.nn.Module, a: State, b: State, t: float) -> torch.nn.Module:
    """Return the average (1 - t) A + t B with the attention of both.

    Args:
        module: a module of the class of both (GPT-2, Llama or ViT).
        a: the weights of A, aligned with B.
        b: the weights of B.
        t: the share of B.
    """
    ends = [_with_state(module, state) for state in (a, b)]
    grown = _with_state(module, interpolate(a, b, t))
    share = (1 - t, t)
    for name, attention in list(grown.named_modules()):
        sides: list[Any] = [end.get_submodule(name) for end in ends]

        def pair(projection: str, sides: list[Any] = sides) -> Any:
            return tuple(getattr(side, projection) for side in sides)

        if hasattr(attention, "c_attn"):
            # queries, keys, values; the shares of the scores lie on the queries
            attention.c_attn = SideBySide(pair("c_attn"), [share, (1, 1), (1, 1)])
            attention.c_proj = MeanOfOutputs(pair("c_proj"), t)
            attention.split_size *= 2
        elif hasattr(attention, "q_proj"):
            attention.q_proj = SideBySide(pair("q_proj"), [share])
            attention.k_proj = SideBySide(pair("k_proj"), [(1, 1)])
            attention.v_proj = SideBySide(pair("v_proj"), [(1, 1)])
            attention.o_proj = MeanOfOutputs(pair("o_proj"), t)
    config: Any = grown.config
    config._attn_implementation = NAME
    return grown


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend with the sum of the scores of both halves of the heads, [batch, heads, tokens, _]."""
    (q, q2), (k, k2), (v, v2) = (x.chunk(2, 1) for x in (query, key, value))
    groups = q.shape[1] // k.shape[1]
    k, k2, v, v2 = (x.repeat_interleave(groups, 1) for x in (k, k2, v, v2))
    scores = (q @ k.mT + q2 @ k2.mT) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = scores.softmax(-1)
    return torch.cat([weights @ v, weights @ v2], 1).transpose(1, 2), None


def _with_state(module: torch.nn.Module, state: State) -> torch.nn.Module:
    model = copy.deepcopy(module).eval()
    model.load_state_dict(dict(state))
    return model


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, eager_mask)
