"""Fault localization: the innermost module with correct inputs and wrong outputs.

A permutation of rows or columns only reorders a module's numbers along an axis, and the orders are
known: rows follow the shuffle, columns the spec's orders of the weights. A module of the
transformed pass must therefore have the inputs and outputs of the plain pass in one of these
orders. This is checked for all tensors with three axes, the batch first; other shapes (separate
heads, masks) are sorted before the comparison.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch

from regauge.core import axes as ax
from regauge.core.action import act
from regauge.core.element import Element
from regauge.core.spec import stored_tensors
from regauge.errors import SpecError
from regauge.locking.permuted import sample_row_permutation
from regauge.verification.subject import PLAIN, Subject, Transform, run

Tensor = torch.Tensor
Calls = list[tuple[str, list[Tensor], list[Tensor]]]


class Orders:
    """The orders in which a transform may put the entries of a tensor, by the length of each
    axis.
    """

    def __init__(self, subject: Subject, transform: Transform) -> None:
        assert subject.cut is not None
        self._transform, self._names = (
            transform,
            [boundary.name for boundary in subject.cut.boundaries],
        )
        self._columns = {} if transform.columns is None else _column_orders(transform.columns)

    def candidates(self, x: Tensor) -> Iterator[Tensor]:
        """Yield a tensor [batch, token, channel] or [batch, channel, token] in every order that the
        transformed pass may give it.
        """
        yield x
        for dim in (1, 2):
            for order in self._columns.get(x.shape[dim], ()):
                yield x.index_select(dim, order.to(x.device))
            if self._transform.rows is not None:
                for name in self._names:
                    yield act(
                        sample_row_permutation(
                            x.shape[dim], self._transform.rows, f"verify/{name}"
                        ),
                        x,
                        "_ token _" if dim == 1 else "_ _ token",
                    )


def _column_orders(g: Element) -> dict[int, list[Tensor]]:
    """Return every order that the element gives to an axis of a weight, by length."""
    orders: dict[bytes, Tensor] = {}
    for term in {
        term: None
        for entry in stored_tensors(g.spec).values()
        for term in ax.parse(entry.axes).terms
    }:
        n = ax.size(term, g.spec.sizes)
        with suppress(SpecError):  # an axis inside a head or an expert has no order of its own
            if n is not None:
                index = act(g, np.arange(n), str(ax.Axes((term,))))
                orders[index.tobytes()] = torch.from_numpy(index)
    by_length: dict[int, list[Tensor]] = {}
    for order in orders.values():
        by_length.setdefault(len(order), []).append(order)
    return by_length


def first_fault(
    plain: Subject, transformed: Subject, transform: Transform, tolerance: float
) -> str | None:
    """Return the name of the first module that breaks the symmetry, or None."""
    expected, got = _calls(plain, PLAIN), _calls(transformed, transform)
    if [name for name, *_ in expected] != [name for name, *_ in got]:
        return None
    orders = Orders(plain, transform)
    for (name, inputs, outputs), (_, inputs_now, outputs_now) in zip(expected, got, strict=True):
        if _all_match(inputs, inputs_now, orders, tolerance) and not _all_match(
            outputs, outputs_now, orders, tolerance
        ):
            return f"{name} ({type(plain.model.get_submodule(name)).__name__})"
    return None


def _calls(subject: Subject, transform: Transform) -> Calls:
    """Return every call of a module inside the backbone, in the order of return: children before
    parents.
    """
    assert subject.cut is not None
    calls: Calls = []
    with _recording(subject, calls):
        run(subject, transform)
    return calls


@contextmanager
def _recording(subject: Subject, calls: Calls) -> Iterator[None]:
    """Record the inputs and outputs of every module inside the backbone."""
    assert subject.cut is not None
    roots = [b.blocks for b in subject.cut.boundaries]
    handles = []
    for name, module in subject.model.named_modules():
        if any(name.startswith(root + ".") for root in roots):

            def record(module: Any, args: Any, kwargs: Any, result: Any, name: str = name) -> None:
                calls.append((name, _tensors([*args, *kwargs.values()]), _tensors([result])))

            handles.append(module.register_forward_hook(record, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _tensors(values: list[Any]) -> list[Tensor]:
    """Return copies of the floating-point tensors among nested values; a later module may work in
    place.
    """
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            if value.is_floating_point() and value.dim() > 1:
                tensors.append(value.detach().clone())
        elif isinstance(value, list | tuple):
            tensors += _tensors(list(value))
    return tensors


def _all_match(a: list[Tensor], b: list[Tensor], orders: Orders, tolerance: float) -> bool:
    """Return whether each tensor equals its counterpart in one of its possible orders."""
    return len(a) == len(b) and all(
        _matches(x.double(), y.double(), orders, tolerance) for x, y in zip(a, b, strict=True)
    )


def _matches(x: Tensor, y: Tensor, orders: Orders, tolerance: float) -> bool:
    """Return whether a tensor equals another in one of its possible orders."""
    if x.shape != y.shape:
        return False
    if x.dim() == 3:
        return any(_is_close(z, y, tolerance) for z in orders.candidates(x))
    return _is_close(x.flatten(1).sort(dim=1).values, y.flatten(1).sort(dim=1).values, tolerance)


def _is_close(x: Tensor, y: Tensor, tolerance: float) -> bool:
    """Return whether two tensors agree to a relative tolerance."""
    return float(torch.nan_to_num(x - y).norm()) <= tolerance * max(
        float(torch.nan_to_num(x).norm()), 1e-300
    )
