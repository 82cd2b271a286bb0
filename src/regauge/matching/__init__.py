"""Matching: the description of one model that is nearest to another.

    found = match(spec, a, b)            # the element that moves a next to b
    moved = apply(found.element, a)      # the same function as a, in b's basis

One algorithm over the spec serves every family: `blocks` cuts tensors by their axes, `costs` says
what is compared, `finding` searches, and each group's own `fit` solves the part that is
closed-form. `forms` holds what is beyond one group: gauge-free scores of heads, two-level
assignment, and the formulas of paper 003.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from typing import TYPE_CHECKING

from regauge.core.action import State
from regauge.core.check import check, require
from regauge.core.element import Element, identity, match_spaces
from regauge.core.groups import Group, Kind
from regauge.core.progress import Progress
from regauge.core.spec import Spec
from regauge.matching.costs import Costs, MatchError, SharedRows, Weights
from regauge.matching.search import Solver

if TYPE_CHECKING:
    from regauge.matching.activations import Activations

__all__ = ["Match", "MatchError", "SharedRows", "layers_of", "match"]

MAX_SWEEPS = 10
EXACT_TOLERANCE = (
    1e-13  # of b's squared norm: what is left of a planted element in single precision
)
MIN_GAIN = 1e-4  # a sweep that gains less than this share of the squared distance is the last


@dataclass(frozen=True)
class Step:
    """One step of the search: what was fitted, the squared distance after it, and how long it
    took.
    """

    name: str
    squared: float
    seconds: float


@dataclass(frozen=True, eq=False)
class Match:
    """What matching found. `before` and `after` are squared distances by tensor, `size` the squared
    norms of b; `steps` the search in its order.
    """

    element: Element
    before: Mapping[str, float]
    after: Mapping[str, float]
    size: Mapping[str, float]
    steps: Sequence[Step] = ()
    order: Sequence[str] = ()
    seconds: float = 0.0
    notes: Sequence[str] = field(default_factory=tuple)

    @property
    def distance_before(self) -> float:
        return math.sqrt(sum(self.before.values()))

    @property
    def distance(self) -> float:
        return math.sqrt(sum(self.after.values()))

    @property
    def relative_distance(self) -> float:
        """The distance as a share of b's norm."""
        return self.distance / max(math.sqrt(sum(self.size.values())), 1e-300)

    def with_element(self, g: Element, spec: Spec, a: State, b: State) -> Match:
        """The same match with another element, which went on from this one's: a refined one."""
        after = {n: d for n, (d, _) in Costs(spec, a, b).distances(g).items()}
        return replace(self, element=g, after=after)

    def by_module(self) -> dict[str, tuple[float, float]]:
        """Distances before and after, by module: a weight and its bias are one."""
        out: dict[str, tuple[float, float]] = {}
        for name in self.before:
            module = name.rsplit(".", 1)[0]
            one, other = out.get(module, (0.0, 0.0))
            out[module] = (one + self.before[name], other + self.after[name])
        return {module: (one**0.5, other**0.5) for module, (one, other) in out.items()}


def match(
    spec: Spec,
    a: State,
    b: State,
    *,
    spaces: Iterable[str] | None = None,
    layers: Iterable[int] | None = None,
    within: Kind = "full",
    weights: Weights | None = None,
    rows: Mapping[str, SharedRows] | None = None,
    activations: tuple[Activations, Activations] | None = None,
    anchors: Iterable[str] | None = None,
    start: Element | None = None,
    sweeps: int = MAX_SWEEPS,
    nearest: bool = True,
    rescale: bool = False,
    whole: bool = False,
    workers: int = 1,
    known_spaces: Iterable[str] | None = None,
    save: Callable[[Element, list[str]], None] | None = None,
    progress: Progress | None = None,
) -> Match:
    """The element that moves a nearest to b, both states of this spec.

    `spaces` take part ("qk", "head.3", ...; all by default), of these `layers` only; `within`
    restricts every group to a kind ("orthogonal": the paper's rotations). `weights` of the tensors
    in what is minimised, by name (* for anything) or as a function of name and value. `rows`: the
    rows that two tables have in common, where vocabularies differ. `seen`: what the two models were
    seen to do on the same inputs (`recording.record`): in the first pass the stream is then matched
    by that, and heads by what they do to it. `anchors`: the tensors by which a space is found at
    first, where it has some of these (names, with * for anything: "*wte.weight"); later sweeps use
    all. `start` is an element to go on from, which skips the first pass. `sweeps` fit every space
    again, by weights; without `nearest` they leave one that tables determine, as the stream of a
    language model, where the first pass has put it, by these or by what was seen: that is further
    in weights, and the loss between may be lower or higher. `rescale`: with rotations alone, one
    factor per head besides (the paper's optional rescaling). `whole`: key biases are compared as
    they are stored, as paper 003 does, although no function sees them. To fix gauges first, give
    states that `fold_norms` or `gauges.fix_gauges` returned.

    `workers`: layers are independent once the stream is known, and are searched in so many
    processes. `saved` is told the element and the spaces known so far after each of them; `start`
    and `known` go on from there. Nothing is held in memory but one tensor of each model at a time,
    and what a fit needs of its own layer.
    """
    started = time.monotonic()
    _require_pair(spec, a, b, rows or {})
    costs = Costs(
        spec,
        a,
        b,
        weights=weights,
        rows=rows,
        include_key_bias=whole,
        activations=activations,
        anchors=anchors,
    )
    groups = select_groups(spec, spaces, layers, within)
    none = identity(spec)
    first = costs.distances(none)
    before, size = ({n: d[i] for n, d in first.items()} for i in (0, 1))
    if not any(before.values()):
        return Match(
            none,
            before,
            before,
            size,
            notes=("the two are equal",),
            seconds=time.monotonic() - started,
        )
    search = Solver(costs, groups, start or none, rescale=rescale, nearest=nearest)
    if start is not None and known_spaces is None:
        search.known |= set(search.groups)
    search.known |= set(known_spaces or ())
    search.save = (
        None if save is None else lambda now: save(now.g, sorted(now.known & now.groups.keys()))
    )
    steps: list[Step] = []
    tell = progress or (lambda done, total, now: None)

    def took(name: str) -> dict[str, float]:
        found = {n: d for n, (d, _) in costs.distances(search.g).items()}
        steps.append(Step(name, sum(found.values()), time.monotonic() - started))
        return found

    tell(0, sweeps + 1, "first pass")
    with _worker_pool(workers) as search.pool:
        skipped = [s for s in search.groups if s in search.known]
        order = skipped + search.first_pass()
        best, after = search.g, took("first pass")
        left = steps[-1].squared
        if activations is not None:  # what the two do has shown the way; from there on by weights
            search.costs = Costs(
                spec, a, b, weights=weights, rows=rows, include_key_bias=whole, anchors=anchors
            )
        for i in range(sweeps):
            if left <= EXACT_TOLERANCE * sum(size.values()):
                break
            tell(i + 1, sweeps + 1, f"sweep {i + 1}")
            search.sweep(order)
            found, gained = took(f"sweep {i + 1}"), left - steps[-1].squared
            if gained > 0:
                best, after, left = search.g, found, steps[-1].squared
            if gained <= MIN_GAIN * left:
                break
    tell(sweeps + 1, sweeps + 1, "")
    lost = [s for s in search.groups if s not in search.known]
    notes = (f"no evidence for {', '.join(lost)}",) if lost else ()
    best = Element(spec, {s: m for s, m in best.members.items() if s in groups})
    best.require()
    return Match(best, before, after, size, steps, order, time.monotonic() - started, notes)


@contextmanager
def _worker_pool(count: int) -> Iterator[Executor | None]:
    """Processes of one thread each, or none."""
    if count <= 1:
        yield None
        return
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(
        dict.fromkeys(names, "1")
    )  # read by the libraries of each process when it starts
    try:
        with ProcessPoolExecutor(count, mp_context=get_context("spawn")) as pool:
            yield pool
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def select_groups(
    spec: Spec, spaces: Iterable[str] | None, layers: Iterable[int] | None, within: Kind
) -> dict[str, Group]:
    """The spaces that take part, and the group that each may move in."""
    names = (
        set(spec.spaces)
        if spaces is None
        else match_spaces(spec, [spaces] if isinstance(spaces, str) else spaces)
    )
    if layers is not None:
        of, wanted = layers_of(spec), set(layers)
        absent = wanted - set(of.values())
        if absent:
            raise MatchError(
                f"there is no layer {min(absent)}",
                hint=f"layers are counted from 0 to {max(of.values(), default=-1)}",
            )
        names = {n for n in names if n not in of or of[n] in wanted}
    return {n: space.group.within(within) for n, space in spec.spaces.items() if n in names}


def layers_of(spec: Spec) -> dict[str, int]:
    """The layer of every space that belongs to one. Layers are counted through the whole model, in
    the order of the spec.
    """
    labels: dict[str, int] = {}
    out: dict[str, int] = {}
    for name in spec.spaces:
        label = name.partition(".")[2]
        if any(part.isdigit() for part in label.split(".")):
            out[name] = labels.setdefault(label, len(labels))
    return out


def _require_pair(spec: Spec, a: State, b: State, rows: Mapping[str, SharedRows]) -> None:
    for name, state in (("the model that moves", a), ("the model that stays", b)):
        faults = [f for f in check(spec, state) if f.name not in rows]
        require(
            faults,
            f'{name} does not fit the spec "{spec.family}"',
            hint="both must be models of one architecture and size",
        )
        for tensor in state:
            value = state[tensor]
            if value.dtype.is_floating_point and not bool(value.isfinite().all()):
                raise MatchError(
                    f'"{tensor}" of {name} has values that are not finite',
                    hint="matching would find nothing but NaN",
                )
