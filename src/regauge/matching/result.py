"""The result of a search: the element, and distances before, after and at every step."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from regauge.core.action import State
from regauge.core.element import Element, identity
from regauge.core.spec import Spec
from regauge.matching.costs import Costs


@dataclass(frozen=True)
class Step:
    """One step of the search: its name, the squared distance after it, and the seconds since the
    search started.
    """

    name: str
    squared: float
    seconds: float


@dataclass(frozen=True, eq=False)
class Match:
    """The element that aligns a with b, and how it was found.

    Attributes:
        element: the element to apply to a.
        before: squared distances between a and b, by tensor.
        after: squared distances between the transformed a and b, by tensor.
        size: squared norms of b, by tensor.
        steps: the first pass and the sweeps.
        order: the spaces in the order in which they were solved.
        seconds: the duration of the search.
        notes: remarks for the user, such as spaces without evidence.
        first: the element after the first pass; None if there was none.
        by: what the first pass compared, "weights" or "activations".
    """

    element: Element
    before: Mapping[str, float]
    after: Mapping[str, float]
    size: Mapping[str, float]
    steps: Sequence[Step] = ()
    order: Sequence[str] = ()
    seconds: float = 0.0
    notes: Sequence[str] = field(default_factory=tuple)
    first: Element | None = None
    by: str = "weights"

    @property
    def distance_before(self) -> float:
        """The Euclidean distance between a and b."""
        return math.sqrt(sum(self.before.values()))

    @property
    def distance(self) -> float:
        """The Euclidean distance between the transformed a and b."""
        return math.sqrt(sum(self.after.values()))

    @property
    def relative_distance(self) -> float:
        """The distance as a share of b's norm."""
        return self.distance / max(math.sqrt(sum(self.size.values())), 1e-300)

    def with_element(self, g: Element, spec: Spec, a: State, b: State) -> Match:
        """Return the same match with another element, such as a refined one."""
        after = {n: d for n, (d, _) in Costs(spec, a, b).distances(g).items()}
        return replace(self, element=g, after=after)

    def by_module(self) -> dict[str, tuple[float, float]]:
        """Return distances before and after by module: a weight and its bias count together."""
        squares: dict[str, tuple[float, float]] = {}
        for name in self.before:
            module = name.rsplit(".", 1)[0]
            before, after = squares.get(module, (0.0, 0.0))
            squares[module] = (before + self.before[name], after + self.after[name])
        return {module: (before**0.5, after**0.5) for module, (before, after) in squares.items()}


class SearchLog:
    """Distances along one search, and its best element so far."""

    def __init__(self, costs: Costs, started: float) -> None:
        self.costs, self.started = costs, started
        self.best = self.first = identity(costs.spec)
        distances = costs.distances(self.best)
        self.before, self.size = ({n: d[i] for n, d in distances.items()} for i in (0, 1))
        self.after, self.squared = self.before, math.inf
        self.steps: list[Step] = []

    @property
    def relative_distance(self) -> float:
        """The smallest distance so far, as a share of b's norm."""
        return math.sqrt(self.squared / max(sum(self.size.values()), 1e-300))

    def record(
        self, name: str, g: Element, known: Mapping[str, tuple[float, float]] | None = None
    ) -> float:
        """Measure the distance after a step and keep the element if it is the best so far.

        Args:
            name: the name of the step.
            g: the element after it.
            known: distances that were measured with this element already, by tensor.

        Returns:
            The decrease of the squared distance; negative if the step made it worse.
        """
        known = known or {}
        after = {n: (known.get(n) or self.costs.distance(n, g))[0] for n in self.costs.measured}
        step = Step(name, sum(after.values()), time.monotonic() - self.started)
        gain = self.squared - step.squared
        if not self.steps:
            self.first = g
        if not self.steps or gain > 0:
            self.best, self.after, self.squared = g, after, step.squared
        self.steps.append(step)
        return gain

    def result(self, element: Element, order: Sequence[str] = (), *notes: str) -> Match:
        """Return the match with this element."""
        seconds = time.monotonic() - self.started
        return Match(element, self.before, self.after, self.size, self.steps, order, seconds, notes)
