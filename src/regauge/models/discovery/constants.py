"""Values that a module computes from constants alone, evaluated to find the axes along which they
differ.

A mask of ones, a bias of zeros, or positions compared with themselves restrict nothing, however
they are written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree

from regauge.models.discovery.graph import mutates, operator_name

_MAX_NUMEL = 1 << 22
# Operators whose result is not reproducible.
_RANDOM = ("rand", "normal", "bernoulli", "uniform", "empty", "new_empty", "multinomial", "dropout")


def evaluate_constants(
    nodes: Iterable[fx.Node], constants: Mapping[fx.Node, torch.Tensor]
) -> dict[fx.Node, torch.Tensor]:
    """Evaluate all nodes that depend on constants alone.

    Args:
        nodes: the nodes of a graph, in order.
        constants: the values of constants that no checkpoint stores.
    """
    values: dict[fx.Node, Any] = dict(constants)
    for node in nodes:
        if node.op != "call_function" or any(n not in values for n in node.all_input_nodes):
            continue
        if mutates(node):  # drop everything that shares its storage
            storage = _storage(values.get(node.args[0]))  # type: ignore[arg-type]
            values = {n: v for n, v in values.items() if storage is None or _storage(v) != storage}
            continue
        if (
            not operator_name(node).startswith(_RANDOM)
            and _numel(node.meta.get("val")) <= _MAX_NUMEL
        ):
            value = _evaluate(node, values)
            if value is not None:
                values[node] = value
    return {n: v for n, v in values.items() if isinstance(v, torch.Tensor)}


def _evaluate(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    """Run one operator on the CPU; None if that fails."""

    def resolve(value: Any) -> Any:
        return (
            values[value]
            if isinstance(value, fx.Node)
            else torch.device("cpu")
            if isinstance(value, torch.device)
            else value
        )

    args, kwargs = _pytree.tree_map(resolve, (tuple(node.args), dict(node.kwargs)))
    try:
        with torch.no_grad():
            return node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception:  # its value stays unknown
        return None


def _numel(value: Any) -> int:
    return sum(
        v.numel()
        for v in (value if isinstance(value, tuple | list) else [value])
        if isinstance(v, torch.Tensor)
    )


def _storage(value: Any) -> int | None:
    return value.untyped_storage().data_ptr() if isinstance(value, torch.Tensor) else None


def is_uniform(value: torch.Tensor, dim: int) -> bool:
    """Return whether the values are constant along an axis."""
    return bool((value == value.narrow(dim, 0, 1)).all())
