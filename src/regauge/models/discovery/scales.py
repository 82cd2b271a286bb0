"""Linear equations for the scales and signs of every kind of coordinate.

At each occurrence of a kind of coordinate its scale c acts as c^e: e is 1 for an activation and for
weights that write it, -1 for weights that read it, 0 for a gain or a gate. Equal axes have equal
exponents, contracted axes opposite ones, products add them. A restriction that excludes scales
requires e = 0. Three systems are solved:

    scales    over the rationals, with every restriction: is there a scale, and where is e 1, -1, 0
    signs     the same modulo 2, where odd functions and norms preserve signs
    stars     without restrictions and ties: which side is the dual, if the group does not decide
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

from regauge.models.discovery.rules import RESTRICTIONS
from regauge.models.discovery.terms import Atom, leaves
from regauge.models.discovery.walk import Axis, Walk

Variable = tuple[Axis, int]
Expression = dict[Variable, Fraction]
_STILL = frozenset({"batch", "still"})


class Equations:
    """Homogeneous linear equations, solved as they are added. `modulus`: 2 for signs, 0 for the
    rationals.
    """

    def __init__(self, modulus: int = 0) -> None:
        self.modulus = modulus
        self.solved: dict[Variable, Expression] = {}

    def reduce(self, expression: Mapping[Variable, Fraction]) -> Expression:
        """Write an expression in the free variables."""
        out: Expression = {}
        todo = list(expression.items())
        while todo:
            v, k = todo.pop()
            if v in self.solved:
                self._compress(v)
                todo += [(u, k * c) for u, c in self.solved[v].items()]
                continue
            total = out.get(v, Fraction(0)) + k
            total = Fraction(total % self.modulus) if self.modulus else total
            if total:
                out[v] = total
            else:
                out.pop(v, None)
        return out

    def _compress(self, v: Variable) -> None:
        """Shorten chains of single terms, as in a union-find."""
        chain, factor = [], Fraction(1)
        while v in self.solved and len(self.solved[v]) == 1:
            ((u, c),) = self.solved[v].items()
            chain.append((v, c))
            v = u
        for u, c in reversed(chain):
            factor *= c
            self.solved[u] = {v: factor}

    def require_zero(self, expression: Mapping[Variable, Fraction]) -> None:
        """Add the equation that an expression is zero."""
        reduced = self.reduce(expression)
        if reduced:
            v = next(iter(reduced))
            k = reduced.pop(v)
            self.solved[v] = {u: -c / k if not self.modulus else c for u, c in reduced.items()}

    def solutions(self, variables: Sequence[Variable]) -> list[list[Fraction]]:
        """Return a basis of the solutions, restricted to some variables."""
        rows = [self.reduce({v: Fraction(1)}) for v in variables]
        free = list(dict.fromkeys(v for row in rows for v in row))
        return [[row.get(v, Fraction(0)) for row in rows] for v in free]


class Scales:
    """The three systems of all kinds of coordinates of a walk."""

    def __init__(self, w: Walk, ties: Sequence[tuple[Axis, Axis]]) -> None:
        self.leaves: dict[Axis, list[Atom]] = {}
        self.scales, self.signs, self.stars = Equations(), Equations(2), Equations()
        self.misfits: list[Axis] = []
        one = Fraction(1)
        for r in w.relations:
            left, right = self._occurrences(r.left), self._occurrences(r.right)
            if [a for a, _ in left] != [b for b, _ in right]:
                self.misfits += [*r.left, *r.right]
                continue
            out = self._occurrences([r.out]) if r.out is not None else []
            if out and [a for a, _ in left] != [b for b, _ in out]:
                self.misfits += [*r.left, *r.right]
                continue
            for i, ((_, x), (_, y)) in enumerate(zip(left, right, strict=True)):
                match r.kind:
                    case "same":
                        self._require_zero({x: one, y: -one})
                    case "contract":
                        self._require_zero({x: one, y: one} if x != y else {x: 2 * one})
                    case "times":
                        z = out[i][1]
                        terms: Expression = {}
                        for v, k in ((x, one), (y, one * r.sign), (z, -one)):
                            terms[v] = terms.get(v, Fraction(0)) + k
                        for system in (self.scales, self.signs):
                            system.require_zero(terms)
                        # x * f(x) is one activation; a gate and what it gates are two
                        alike = not self.stars.reduce({x: one, y: -one}) if x != y else True
                        self.stars.require_zero({x: one, z: -one} if alike else terms)
                    case "even":
                        for system in (self.scales, self.stars):
                            system.require_zero({x: one, y: -one})
                        self.signs.require_zero({y: one})
        for a, b in ties:
            for (_, x), (_, y) in zip(self._occurrences([a]), self._occurrences([b]), strict=True):
                self.scales.require_zero({x: one, y: -one})
                self.signs.require_zero({x: one, y: -one})
        for restriction in w.restrictions:
            effect = RESTRICTIONS[restriction.kind]
            for _, x in self._occurrences([restriction.axis]):
                if not effect.scales:
                    self.scales.require_zero({x: one})
                if not effect.signs:
                    self.signs.require_zero({x: one})
                if restriction.kind in _STILL:
                    self.stars.require_zero({x: one})

    def atoms(self, axis: Axis) -> list[Atom]:
        """Return the atoms of an axis."""
        if axis not in self.leaves:
            self.leaves[axis] = list(leaves(axis.term))
        return self.leaves[axis]

    def _occurrences(self, axes: Sequence[Axis | None]) -> list[tuple[Atom, Variable]]:
        """Return the atoms of axes, each with its variable."""
        return [
            (a, (axis, i))
            for axis in axes
            if axis is not None
            for i, a in enumerate(self.atoms(axis))
        ]

    def _require_zero(self, expression: Expression) -> None:
        """Require an expression to be zero in all three systems."""
        self.scales.require_zero(expression)
        self.signs.require_zero(expression)
        self.stars.require_zero(expression)
