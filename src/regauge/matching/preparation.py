"""The inputs of a search: checked states, selected spaces with their groups, worker processes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context

from regauge.core.action import State
from regauge.core.check import check, require
from regauge.core.element import match_spaces
from regauge.core.groups import Group, Kind
from regauge.core.spec import Spec
from regauge.errors import MatchError
from regauge.matching.costs import SharedRows


def require_pair(spec: Spec, a: State, b: State, rows: Mapping[str, SharedRows]) -> None:
    """Raise unless both states fit the spec (tables with shared rows excepted)."""
    for name, state in _named(a, b):
        require(
            [f for f in check(spec, state) if f.name not in rows],
            f'{name} does not fit the spec "{spec.family}"',
            hint="both must be models of one architecture and size",
        )


def require_finite(a: State, b: State, names: Iterable[str] | None = None) -> None:
    """Raise if a tensor of one of the states, or one of these names, has values that are not
    finite.
    """
    for name, state in _named(a, b):
        for tensor in state if names is None else [n for n in names if n in state]:
            value = state[tensor]
            if value.dtype.is_floating_point and not bool(value.isfinite().all()):
                raise MatchError(
                    f'"{tensor}" of {name} has values that are not finite',
                    hint="matching would find nothing but NaN",
                )


def _named(a: State, b: State) -> tuple[tuple[str, State], ...]:
    """Return both states with what messages call them."""
    return ("the model that moves", a), ("the model that stays", b)


def select_groups(
    spec: Spec, spaces: Iterable[str] | None, layers: Iterable[int] | None, within: Kind
) -> dict[str, Group]:
    """Return the spaces that take part, each with the group that its member is chosen from."""
    names = (
        set(spec.spaces)
        if spaces is None
        else match_spaces(spec, [spaces] if isinstance(spaces, str) else spaces)
    )
    if layers is not None:
        layer_by_space, wanted = layers_of(spec), set(layers)
        absent = wanted - set(layer_by_space.values())
        if absent:
            last = max(layer_by_space.values(), default=-1)
            raise MatchError(
                f"layers must be from 0 to {last}, got {min(absent)}",
                hint="layers are counted through the whole model, in the order of the spec",
            )
        names = {n for n in names if n not in layer_by_space or layer_by_space[n] in wanted}
    return {n: space.group.within(within) for n, space in spec.spaces.items() if n in names}


def layers_of(spec: Spec) -> dict[str, int]:
    """Return the layer of every space that belongs to one.

    Layers are counted through the whole model, in the order of the spec.
    """
    layer_by_label: dict[str, int] = {}
    layer_by_space: dict[str, int] = {}
    for name in spec.spaces:
        label = name.partition(".")[2]
        if any(part.isdigit() for part in label.split(".")):
            layer_by_space[name] = layer_by_label.setdefault(label, len(layer_by_label))
    return layer_by_space


@contextmanager
def worker_pool(count: int) -> Iterator[Executor | None]:
    """Start `count` processes of one thread each; yield None for one worker."""
    if count <= 1:
        yield None
        return
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    # The numerical libraries of each process read these when it starts.
    os.environ.update(dict.fromkeys(names, "1"))
    try:
        with ProcessPoolExecutor(count, mp_context=get_context("spawn")) as pool:
            yield pool
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
