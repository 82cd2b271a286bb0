"""Where it goes wrong: the innermost module that is given what it should be and returns what it
should not.

A permutation of rows or columns changes the order of a module's numbers along an axis and nothing
else, and the orders are known: rows follow the shuffle, columns what the spec says of the weights.
So a module of the moved pass is given and returns what it is in the plain pass, in one of these
orders. That is asked of everything that has three axes, the batch first; other shapes (heads apart,
masks) are sorted and then compared.
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
from regauge.core.spec import stored
from regauge.errors import SpecError
from regauge.locking.permuted import rows
from regauge.verification.subject import PLAIN, Subject, Way, run

Tensor = torch.Tensor
Calls = list[tuple[str, list[Tensor], list[Tensor]]]


class Orders:
    """The orders in which a way puts the numbers of a tensor: for each axis its length decides
    which there can be.
    """

    def __init__(self, subject: Subject, way: Way) -> None:
        assert subject.cut is not None
        self._way, self._names = way, [boundary.name for boundary in subject.cut.boundaries]
        self._columns = {} if way.columns is None else _column_orders(way.columns)

    def of(self, x: Tensor) -> Iterator[Tensor]:
        """A tensor [batch, token, channel], or [batch, channel, token], as it may come in the moved
        pass.
        """
        yield x
        for dim in (1, 2):
            for order in self._columns.get(x.shape[dim], ()):
                yield x.index_select(dim, order.to(x.device))
            if self._way.rows is not None:
                for name in self._names:
                    yield act(
                        rows(x.shape[dim], self._way.rows, f"verify/{name}"),
                        x,
                        "_ token _" if dim == 1 else "_ _ token",
                    )


def _column_orders(g: Element) -> dict[int, list[Tensor]]:
    """By length, every order that the element gives to an axis of a weight."""
    found: dict[bytes, Tensor] = {}
    for term in {
        term: None for entry in stored(g.spec).values() for term in ax.parse(entry.axes).terms
    }:
        n = ax.size(term, g.spec.sizes)
        with suppress(
            SpecError
        ):  # an axis inside a head, or of one expert, has no order of its own
            if n is not None:
                index = act(g, np.arange(n), str(ax.Axes((term,))))
                found[index.tobytes()] = torch.from_numpy(index)
    out: dict[int, list[Tensor]] = {}
    for order in found.values():
        out.setdefault(len(order), []).append(order)
    return out


def first_fault(plain: Subject, moved: Subject, way: Way, tolerance: float) -> str | None:
    """The module that breaks the law first, by its name, or None if no single one does."""
    expected, got = _calls(plain, PLAIN), _calls(moved, way)
    if [name for name, *_ in expected] != [name for name, *_ in got]:
        return None
    orders = Orders(plain, way)
    for (name, given, returned), (_, given_now, returned_now) in zip(expected, got, strict=True):
        if _same(given, given_now, orders, tolerance) and not _same(
            returned, returned_now, orders, tolerance
        ):
            return f"{name} ({type(plain.model.get_submodule(name)).__name__})"
    return None


def _calls(subject: Subject, way: Way) -> Calls:
    """Every module's call inside the backbone, in the order in which they return: children before
    parents.
    """
    assert subject.cut is not None
    calls: Calls = []
    with _noted(subject, calls):
        run(subject, way)
    return calls


@contextmanager
def _noted(subject: Subject, calls: Calls) -> Iterator[None]:
    assert subject.cut is not None
    roots = [b.blocks for b in subject.cut.boundaries]
    handles = []
    for name, module in subject.model.named_modules():
        if any(name.startswith(root + ".") for root in roots):

            def note(module: Any, args: Any, kwargs: Any, result: Any, name: str = name) -> None:
                calls.append((name, _tensors([*args, *kwargs.values()]), _tensors([result])))

            handles.append(module.register_forward_hook(note, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _tensors(values: list[Any]) -> list[Tensor]:
    """The floating-point tensors among these, nested ones too; copies, since a later module may
    work in place.
    """
    out: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            if value.is_floating_point() and value.dim() > 1:
                out.append(value.detach().clone())
        elif isinstance(value, list | tuple):
            out += _tensors(list(value))
    return out


def _same(a: list[Tensor], b: list[Tensor], orders: Orders, tolerance: float) -> bool:
    """Is each tensor what it was, in one of the orders that it may have?"""
    return len(a) == len(b) and all(
        _alike(x.double(), y.double(), orders, tolerance) for x, y in zip(a, b, strict=True)
    )


def _alike(x: Tensor, y: Tensor, orders: Orders, tolerance: float) -> bool:
    if x.shape != y.shape:
        return False
    if x.dim() == 3:
        return any(_close(z, y, tolerance) for z in orders.of(x))
    return _close(x.flatten(1).sort(dim=1).values, y.flatten(1).sort(dim=1).values, tolerance)


def _close(x: Tensor, y: Tensor, tolerance: float) -> bool:
    return float(torch.nan_to_num(x - y).norm()) <= tolerance * max(
        float(torch.nan_to_num(x).norm()), 1e-300
    )
