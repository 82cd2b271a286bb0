"""Numbers that a module makes itself, from nothing that it is given or has learnt: computed once,
to see along which axes they differ.

A mask of ones, a bias of zeros or positions that are compared with themselves restrict nothing,
however they are written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree

from regauge.models.discovery.graph import mutates, operator_name

_MAX_NUMEL = 1 << 22
# What is not the same twice.
_RANDOM = ("rand", "normal", "bernoulli", "uniform", "empty", "new_empty", "multinomial", "dropout")


def evaluate_constants(
    nodes: Iterable[fx.Node], held: Mapping[fx.Node, torch.Tensor]
) -> dict[fx.Node, torch.Tensor]:
    """The values of all nodes that depend on constants alone. `held`: those of the constants that
    no checkpoint stores.
    """
    known: dict[fx.Node, Any] = dict(held)
    for node in nodes:
        if node.op != "call_function" or any(n not in known for n in node.all_input_nodes):
            continue
        if mutates(node):  # whatever shares its numbers is not known any more
            written = _storage(known.get(node.args[0]))  # type: ignore[arg-type]
            known = {n: v for n, v in known.items() if written is None or _storage(v) != written}
            continue
        if (
            not operator_name(node).startswith(_RANDOM)
            and _numel(node.meta.get("val")) <= _MAX_NUMEL
        ):
            value = _evaluate(node, known)
            if value is not None:
                known[node] = value
    return {n: v for n, v in known.items() if isinstance(v, torch.Tensor)}


def _evaluate(node: fx.Node, known: Mapping[fx.Node, Any]) -> Any:
    def here(value: Any) -> Any:
        return (
            known[value]
            if isinstance(value, fx.Node)
            else torch.device("cpu")
            if isinstance(value, torch.device)
            else value
        )

    args, kwargs = _pytree.tree_map(here, (tuple(node.args), dict(node.kwargs)))
    try:
        with torch.no_grad():
            return node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception:  # an operator that cannot be run like this: its value stays unknown
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
    """Are the numbers the same all along an axis?"""
    return bool((value == value.narrow(dim, 0, 1)).all())
