"""Where it goes wrong: the innermost module that is given what it should be and returns what it should not.

A permutation of rows or columns changes the order of a module's numbers along one axis and nothing else. So every module of the moved pass is
given and returns the numbers of the plain pass in another order; sorted along that axis, they are the same. A module that only reorders along
that very axis does not show here: what follows it does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from regauge.verification.subject import PLAIN, Subject, Way, run

Tensor = torch.Tensor
Orders = list[Tensor]
Calls = list[tuple[str, list[Orders], list[Orders]]]


def first_fault(plain: Subject, moved: Subject, way: Way, tolerance: float) -> str | None:
    """The module that breaks the law first, by its name, or None if no single one does."""
    expected, got = _calls(plain, PLAIN), _calls(moved, way)
    if [name for name, *_ in expected] != [name for name, *_ in got]:
        return None
    for (name, given, returned), (_, given_now, returned_now) in zip(expected, got, strict=True):
        if _same(given, given_now, tolerance) and not _same(returned, returned_now, tolerance):
            kind = type(plain.model.get_submodule(name)).__name__
            return f"{name} ({kind})"
    return None


def _calls(subject: Subject, way: Way) -> Calls:
    """Every module's call inside the backbone, in the order in which they return: children before parents."""
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
                calls.append((name, _sorted([*args, *kwargs.values()]), _sorted([result])))

            handles.append(module.register_forward_hook(note, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _sorted(values: list[Any]) -> list[Orders]:
    """The tensors among these, nested ones too, with their numbers in order: along either axis that may have moved, or all of a sample's."""
    out: list[Orders] = []
    for value in values:
        if isinstance(value, Tensor):
            if value.is_floating_point() and value.dim() > 1:
                value = value.detach().double()
                out.append([value.sort(dim=i).values for i in (1, 2)] if value.dim() == 3 else [value.flatten(1).sort(dim=1).values])
        elif isinstance(value, list | tuple):
            out += _sorted(list(value))
    return out


def _same(a: list[Orders], b: list[Orders], tolerance: float) -> bool:
    """Is each tensor, in one order or the other, what it was?"""
    return len(a) == len(b) and all(any(_close(x, y, tolerance) for x, y in zip(p, q, strict=False)) for p, q in zip(a, b, strict=True))


def _close(x: Tensor, y: Tensor, tolerance: float) -> bool:
    return x.shape == y.shape and float(torch.nan_to_num(x - y).norm()) <= tolerance * max(float(torch.nan_to_num(x).norm()), 1e-300)
