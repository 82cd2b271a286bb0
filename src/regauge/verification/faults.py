"""Where it goes wrong: the innermost module that is given what it should be and returns what it should not.

A permutation of rows or columns changes the order of a module's numbers and nothing else. So every module of the moved pass is given and returns, for
each sample, the numbers of the plain pass in another order; sorted, they are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from regauge.verification.subject import PLAIN, Subject, Way, run

Tensor = torch.Tensor
Calls = list[tuple[str, list[Tensor], list[Tensor]]]


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


def _sorted(values: list[Any]) -> list[Tensor]:
    """The tensors among these, nested ones too, each sample's numbers in order."""
    out: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            if value.is_floating_point() and value.dim() > 1:
                out.append(value.detach().double().flatten(1).sort(dim=1).values)
        elif isinstance(value, list | tuple):
            out += _sorted(list(value))
    return out


def _same(a: list[Tensor], b: list[Tensor], tolerance: float) -> bool:
    if [x.shape for x in a] != [x.shape for x in b]:
        return False
    return all(
        float((torch.nan_to_num(x - y)).norm()) <= tolerance * max(float(torch.nan_to_num(x).norm()), 1e-300) for x, y in zip(a, b, strict=True)
    )
