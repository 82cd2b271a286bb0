"""The search for the element that aligns one model with another. Start reading here.

`match` is the whole algorithm. Each step is a function of its own:

    prepare both states              `preparation`
    gather what is compared          `costs`, on the `blocks` that the axes strings cut tensors into
    solve one space given the rest   `solver`; each group's `fit` is the closed form: assignment for
                                     permutations, Procrustes for rotations, balance for scales
    repeat until nothing improves    `first_pass` and `sweep`, below
    return element and report        `result`

A space can be solved once everything else on some of its tensors is known. The residual stream
comes first (embedding, positions and head have axes on which nothing acts), then heads, by
quantities that do not depend on the basis inside them, then the insides of heads and the neurons.
This order is not written down for any family: the next space is the one with the most evidence,
which is counted from the axes strings.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from regauge.core import axes as ax
from regauge.core.action import State
from regauge.core.element import Element, identity
from regauge.core.groups import Kind
from regauge.core.members import Member
from regauge.core.progress import Progress
from regauge.core.spec import Spec
from regauge.errors import Hint, MatchError
from regauge.matching.costs import Costs, SharedRows, Weights
from regauge.matching.preparation import (
    require_finite,
    require_pair,
    select_groups,
    worker_pool,
)
from regauge.matching.result import Match, SearchLog
from regauge.matching.saved_parts import SavedParts
from regauge.matching.solver import Solver

if TYPE_CHECKING:
    from regauge.checkpoints.resume import StateStore
    from regauge.matching.activations import Activations

MAX_SWEEPS = 10
Solved = tuple[list[str], dict[str, Member], dict[str, tuple[float, float]]]
EXACT_TOLERANCE = 1e-13  # of b's squared norm: float32 rounding after an exact match stays below it
MIN_GAIN = 1e-4  # a sweep that gains less than this share of the squared distance is the last
# The relative distance after the first pass below which two models are one model up to noise, such
# as a fine-tuned copy. Models that were trained apart stay near 0.9.
MAX_RELATED = 0.5


def match_states(
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
    sweep_unrelated: bool = True,
    store: StateStore | None = None,
    progress: Progress | None = None,
) -> Match:
    """Find the element that moves a closest to b, both states of this spec.

    At any time memory holds one tensor of each model, and the tensors that one layer's fit needs.
    To remove gauge freedoms first, pass states from `fold_norms`.

    Args:
        spec: the spec of both models.
        a: the state that moves.
        b: the state that stays.
        spaces: the spaces that take part ("qk", "head.3", ...); all by default.
        layers: the layers whose spaces take part; all by default.
        within: the kind that every group is restricted to ("orthogonal": rotations only).
        weights: the weight of each tensor in the distance that is minimized, by name (* matches
            anything) or as a function of name and value.
        rows: the rows that two tables have in common, for models with different vocabularies.
        activations: what `activations.record` returned for a and for b on the same inputs. The
            first pass then matches the stream by these, and heads by their effect on it.
        anchors: the tensors that determine a space in the first pass, if it has any of them
            (names; * matches anything: "*wte.weight"). Sweeps use all tensors.
        start: an element to start from; skips the first pass.
        sweeps: the largest number of sweeps, each of which solves every space again by weights.
        nearest: let sweeps also move spaces that tables determine, such as the stream of a language
            model. Without it the distance in weights is larger; the loss on the path between the
            models may be lower or higher.
        rescale: add one factor per head to its rotation (optional in rotation symmetry).
        whole: compare key biases as stored, as rotation symmetry does; softmax cancels them.
        workers: the number of processes. Layers are independent once the stream is known.
        known_spaces: the spaces that `start` already solves, in the order in which sweeps solve
            them again; all by default.
        sweep_unrelated: also sweep if the first pass leaves the two further apart than copies of
            one model (`MAX_RELATED`).
        store: where finished parts are saved. A search that is given the parts of an interrupted
            one repeats none of them, and returns the same element.
        progress: the progress callback.

    Returns:
        The element, and distances before, after and at every step.

    Raises:
        MatchError: if a state has values that are not finite, or an option names nothing.
    """
    # Prepare both states: what is compared, and the group that each space's member is chosen from.
    started = time.monotonic()
    require_pair(spec, a, b, rows or {})
    make_costs = partial(
        Costs, spec, a, b, weights=weights, rows=rows, include_key_bias=whole, anchors=anchors
    )
    costs = make_costs(activations=activations)
    groups = select_groups(spec, spaces, layers, within)
    log = SearchLog(costs, started)
    # Distances are of the shared rows alone.
    if rows or not np.isfinite([*log.before.values(), *log.size.values()]).all():
        require_finite(a, b)
    require_finite(a, b, spec.ties)  # a stored copy of a tied tensor is not compared
    if not any(log.before.values()):
        return log.result(identity(spec), (), "the two are equal")
    report = progress or (lambda done, total, label: None)
    solver = Solver(costs, groups, start or identity(spec), rescale=rescale, nearest=nearest)
    solver.parts = SavedParts(spec, store)
    if start is not None and known_spaces is None:
        known_spaces = solver.groups
    solver.known |= set(known_spaces or ())

    with worker_pool(workers) as solver.pool:
        # Solve each space given those that are known, the one with the most evidence first.
        report(0, sweeps + 1, solver.stage)
        order = list(known_spaces or ())
        order = [space for space in order if space in solver.groups]
        order += first_pass(solver)
        log.record(solver.stage, solver.g, solver.distances)
        if activations is not None:  # these gave the start; sweeps minimize the weights' distance
            solver.costs = make_costs()
        if not sweep_unrelated and log.relative_distance > MAX_RELATED:
            sweeps = 0
        # Solve each space again given all others, until nothing improves.
        for i in range(sweeps):
            if log.squared <= EXACT_TOLERANCE * sum(log.size.values()):
                break
            solver.stage = f"sweep {i + 1}"
            report(i + 1, sweeps + 1, solver.stage)
            solver.distances.clear()
            sweep(solver, order)
            gain = log.record(solver.stage, solver.g, solver.distances)
            if gain <= MIN_GAIN * log.squared:
                break
    report(sweeps + 1, sweeps + 1, "")

    # Return the best element and the report.
    best, first = (
        Element(spec, {s: m for s, m in g.members.items() if s in groups})
        for g in (log.best, log.first)
    )
    best.require()
    unsolved = [space for space in solver.groups if space not in solver.known]
    notes = [f"no evidence for {', '.join(unsolved)}"] if unsolved else []
    found = log.result(best, order, *notes)
    return replace(found, first=first, by="weights" if activations is None else "activations")


def solve_shared(
    spec: Spec,
    a: State,
    b: State,
    *,
    spaces: Iterable[str] | None = None,
    layers: Iterable[int] | None = None,
    within: Kind = "full",
    weights: Weights | None = None,
    rows: Mapping[str, SharedRows] | None = None,
    anchors: Iterable[str] | None = None,
    rescale: bool = False,
    whole: bool = False,
    store: StateStore | None = None,
) -> tuple[Element, list[str]]:
    """Solve what the first pass of `match_states` solves before the layers, such as the stream.

    Returns:
        The element on these spaces, and their names in the order of solving.
    """
    require_pair(spec, a, b, rows or {})
    costs = Costs(spec, a, b, weights=weights, rows=rows, include_key_bias=whole, anchors=anchors)
    groups = select_groups(spec, spaces, layers, within)
    solver = Solver(costs, groups, identity(spec), rescale=rescale)
    solver.parts = SavedParts(spec, store)
    order = first_pass(solver, only_shared=True)
    return solver.g, order


def first_pass(
    solver: Solver, spaces: Iterable[str] | None = None, *, only_shared: bool = False
) -> list[str]:
    """Solve the unknown spaces, the one with the most evidence first; return them in that order.

    Solving one space makes others solvable. Once the unknown spaces fall into units that no tensor
    joins (the layers, once the stream is known), each unit is solved on its own; or, with
    `only_shared`, not at all.
    """
    wanted = solver.groups if spaces is None else spaces
    unknown = [space for space in wanted if space not in solver.known]
    order: list[str] = []
    while unknown:
        units = solver.independent_units(unknown) if spaces is None else [unknown]
        if len(units) > 1 and only_shared:
            return order
        if len(units) > 1:
            solver.units = units
            return order + solve_units(solver, units, first=True)
        evidence: dict[tuple[str, ...], float] = {(s,): solver.evidence(s) for s in unknown}
        evidence.update(solver.factors([s for s in unknown if not evidence[(s,)]]))
        best = max(evidence, key=lambda spaces: evidence[spaces])
        if evidence[best] <= 0:
            break
        solved = solver.solve_once(*best)
        if not solved:
            break
        order += solved
        solver.known.update(order)
        unknown = [space for space in unknown if space not in solver.known]
    return order


def sweep(solver: Solver, order: Iterable[str]) -> None:
    """Solve every space again from all of its tensors, given all other spaces.

    Unless `nearest` is set, spaces that tables determine stay.
    """
    order = list(order)
    in_units = {space for unit in solver.units for space in unit}
    outside = [space for space in order if space not in in_units]
    resolve(solver, [s for s in outside if solver.nearest or not solver.is_anchored(s)])
    if solver.units:
        units = [[space for space in order if space in unit] for unit in map(set, solver.units)]
        solve_units(solver, units, first=False)


def resolve(solver: Solver, spaces: Iterable[str]) -> None:
    """Solve these spaces again, each from all of its tensors."""
    solved: set[str] = set()
    for space in spaces:
        if space not in solved and not solver.is_inner(space):
            solved.update(solver.solve_once(space, all_tensors=True))


def solve_units(solver: Solver, units: Iterable[list[str]], *, first: bool) -> list[str]:
    """Solve units of spaces that no tensor joins, in worker processes if there are any.

    Returns:
        The spaces in the order in which they were solved.
    """
    order: list[str] = []
    units = list(units)
    saved = {unit[0]: solver.parts.load(solver.part_key(unit[0])) for unit in units}
    tasks = [(solver, unit, first) for unit in units if saved[unit[0]] is None]
    try:
        parts = iter(
            solver.pool.map(_solve_unit, tasks) if solver.pool else map(_solve_unit, tasks)
        )
        for key, part in saved.items():
            solved, members, distances = part or solver.parts.save(
                solver.part_key(key), *next(parts)
            )
            solver.distances.update(distances)
            order += solved
            solver.known.update(solved)
            solver.g = Element(solver.spec, {**solver.g.members, **members})
    except BrokenProcessPool as error:
        raise MatchError(
            "a worker process was killed, most likely because memory ran out",
            hint=Hint(
                "use fewer workers; resume=True continues from the saved progress",
                cli="use fewer workers; --resume continues from the saved progress",
            ),
        ) from error
    return order


def _solve_unit(task: tuple[Solver, list[str], bool]) -> Solved:
    """Solve one unit.

    Returns:
        Its spaces in the order of solving, their members, and the distances of tensors that no
        other unit changes.
    """
    parent, unit, first = task
    costs = parent.costs.within_unit(parent.g, unit)
    solver = Solver(costs, parent.groups, parent.g, set(parent.known), parent.rescale)
    if first:
        order = first_pass(solver, unit)
    else:
        order = unit
        resolve(solver, unit)
    own = set(unit)
    others = {space for other in parent.units for space in other} - own
    distances = {
        pattern: costs.distance(pattern, solver.g)
        for pattern in costs.measured
        if (spaces := ax.spaces(costs.axes[pattern])) & own and not spaces & others
    }
    return order, {s: solver.g.members[s] for s in unit if s in solver.g.members}, distances
