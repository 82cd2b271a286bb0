"""The symmetry group of each space, inferred from a walk of the graph, with its parent and its
starred (dual) and barred (permutation only) occurrences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from regauge.core.groups import (
    GeneralLinear,
    Group,
    Orthogonal,
    OrthogonalFixingOnes,
    Permutation,
    PlaneSigns,
    Rotary,
    Scaling,
    SignedPermutation,
    Trivial,
)
from regauge.core.members import Layout
from regauge.models.discovery.rules import RESTRICTIONS
from regauge.models.discovery.scales import Scales, Variable
from regauge.models.discovery.terms import Atom, Sum, factors, parts
from regauge.models.discovery.walk import Axis, Restriction, Value, Walk

_ROTARY: dict[str, Layout] = {"rotary-half": "half", "rotary-interleaved": "interleaved"}


@dataclass
class Kind:
    """A kind of coordinate, which becomes a space of the spec.

    Attributes:
        atom: its term.
        restrictions: all restrictions of its axes.
        occurrences: where it occurs in parameters: (axis, position among the axis's atoms).
        group: the largest group that all restrictions preserve.
        folded: the group once the norms are folded.
        exponents: for each occurrence 1 (plain), -1 (starred) or 0 (barred).
        over: its parent; each coordinate of the parent has a separate member.
        note: a remark for users.
    """

    atom: Atom
    restrictions: list[Restriction] = field(default_factory=list)
    occurrences: list[Variable] = field(default_factory=list)
    group: Group = field(default_factory=Trivial)
    folded: Group | None = None
    exponents: dict[Variable, int] = field(default_factory=dict)
    over: Atom | None = None
    note: str = ""

    @property
    def is_frozen(self) -> bool:
        """Return whether nothing acts on it."""
        return isinstance(self.group, Trivial)

    def occurs_on(self, axis: Axis) -> bool:
        """Return whether it occurs on an axis of a parameter."""
        return any(a is axis for a, _ in self.occurrences)

    def has_restriction(self, *kinds: str) -> bool:
        """Return whether a restriction of one of these kinds applies."""
        return any(r.kind in kinds for r in self.restrictions)


@dataclass(frozen=True, eq=False)
class GroupInference:
    """The kinds of coordinates of a walk by their atoms, and the axes of each parameter by name."""

    walk: Walk
    scales: Scales
    kinds: Mapping[Atom, Kind]
    parameters: Mapping[str, tuple[Axis, ...]]


def infer_groups(w: Walk, foldable: set[str], closed: Mapping[Axis, str]) -> GroupInference:
    """Infer the group of every kind of coordinate.

    Args:
        w: the walk.
        foldable: gains that can be folded.
        closed: axes of outputs on which nothing may act, with the reason.
    """
    sources = [v for by_name in w.aliases.values() for v in by_name.values()]
    sources += [
        v
        for n, v in w.values.items()
        if n.op == "placeholder" and n not in w.aliases and isinstance(v, Value)
    ]
    parameters = {v.source: v.axes for v in sources if v.source}
    ties = [
        (a, b)
        for alias, target in w.graph.ties.items()
        if alias in parameters and target in parameters
        for a, b in zip(parameters[alias], parameters[target], strict=True)
    ]
    for a, b in ties:
        w.equate([a], [b], kind="tied")
    scales = Scales(w, ties)
    kinds: dict[Atom, Kind] = {}

    def kind(atom: Atom) -> Kind:
        return kinds.setdefault(atom, Kind(atom))

    for axes in parameters.values():
        for axis in axes:
            for i, atom in enumerate(scales.atoms(axis)):
                kind(atom).occurrences.append((axis, i))
    frozen = [
        Restriction(a, "frozen", None, "it is split in incompatible ways") for a in scales.misfits
    ]
    frozen += [Restriction(a, "frozen", None, why) for a, why in closed.items()]
    for restriction in (*w.restrictions, *frozen):
        for atom in dict.fromkeys(scales.atoms(restriction.axis)):
            kind(atom).restrictions.append(restriction)
    activations: dict[Atom, list[Variable]] = {}
    for value in _iter_values(w):
        for axis in value.axes if not value.is_weight else ():
            for i, atom in enumerate(scales.atoms(axis)):
                activations.setdefault(atom, []).append((axis, i))
    contracted = {
        a
        for r in w.relations
        if r.kind == "contract"
        for axis in (*r.left, *r.right)
        for a in scales.atoms(axis)
    }
    for candidate in kinds.values():
        if (
            candidate.occurrences
            and not candidate.has_restriction("frozen")
            and candidate.atom not in activations
            and candidate.atom not in contracted
        ):  # the example inputs are shorter than the table
            candidate.restrictions.append(
                Restriction(
                    candidate.occurrences[0][0],
                    "frozen",
                    None,
                    "the example inputs do not read this part of it",
                )
            )
        if candidate.occurrences:
            _choose_group(candidate, scales, foldable, activations.get(candidate.atom, []))
    _assign_parents(w, scales, kinds, parameters)
    return GroupInference(w, scales, kinds, parameters)


def _choose_group(
    kind: Kind, scales: Scales, foldable: set[str], activations: list[Variable]
) -> None:
    """Set the largest group that all restrictions preserve.

    `activations`: its occurrences in tensors other than parameters; the first is on the plain side.
    """
    if kind.has_restriction("frozen"):
        return
    variables = [*kind.occurrences, *activations]
    scale = _unit_solution(scales.scales.solutions(variables), len(kind.occurrences))
    sign = scales.signs.solutions(kind.occurrences)
    star = scales.stars.solutions(variables)
    coordinatewise = [r for r in kind.restrictions if RESTRICTIONS[r.kind].mixtures == "none"]
    without_gains = [r for r in coordinatewise if r.kind != "gain"]
    gains = {r.detail for r in coordinatewise if r.kind == "gain"}
    layouts = {layout for k, layout in _ROTARY.items() if kind.has_restriction(k)}
    is_normed = kind.has_restriction("ones", "rms", "shift")
    if layouts:
        _choose_rotary_group(kind, layouts, scale, sign, star, bool(coordinatewise) or is_normed)
    elif not coordinatewise and not is_normed and scale is not None and all(scale):
        kind.group, kind.exponents = (
            GeneralLinear(),
            dict(zip(kind.occurrences, scale, strict=True)),
        )
    elif not without_gains and (is_normed or not gains):
        ones = kind.has_restriction("ones", "shift")
        rotations: Group = OrthogonalFixingOnes() if ones else Orthogonal()
        kind.exponents = _dual_exponents(kind, star)
        if not gains:
            kind.group = rotations
        else:
            kind.group = SignedPermutation() if sign and not ones else Permutation()
            kind.folded = rotations if gains <= foldable else None
            kind.exponents = _dual_exponents(kind, star, sign)
    elif scale is not None and any(scale):
        flips = [Fraction(abs(s) % 2) for s in scale] in _span_mod_2(sign)
        kind.group, kind.exponents = (
            Scaling(positive=not flips),
            dict(zip(kind.occurrences, scale, strict=True)),
        )
    elif sign:
        kind.group, kind.exponents = SignedPermutation(), _dual_exponents(kind, star, sign)
    else:
        kind.group, kind.exponents = Permutation(), _dual_exponents(kind, star)


def _choose_rotary_group(
    kind: Kind,
    layouts: set[Layout],
    scale: list[int] | None,
    sign: list[list[Fraction]],
    star: list[list[Fraction]],
    restricted: bool,
) -> None:
    """Set the group of a rotary kind: a rotation and a scale for each plane, or one sign if
    anything else restricts it.
    """
    if len(layouts) > 1 or kind.atom.size % 2:
        kind.note = "rotary positions of two layouts are applied to it"
        return
    (layout,) = layouts
    if not restricted and scale is not None and all(scale):
        kind.group = Rotary(layout)
        kind.exponents = dict(zip(kind.occurrences, scale, strict=True))
    elif not restricted:
        kind.group, kind.exponents = Rotary(layout, unit=True), _dual_exponents(kind, star)
    elif sign:
        kind.group, kind.exponents = PlaneSigns(layout), _dual_exponents(kind, star, sign)


def _unit_solution(basis: list[list[Fraction]], size: int) -> list[int] | None:
    """Return the first solution with exponents 1, -1 and 0 on the first `size` variables; its sign
    makes the first of the remaining variables positive.
    """
    for solution in basis:
        largest = max((abs(s) for s in solution), default=Fraction(0))
        scaled = [s / largest for s in solution] if largest else []
        if scaled and set(scaled) <= {-1, 0, 1}:
            sign = next(s for s in (*scaled[size:], *scaled) if s)
            if any(scaled[:size]):
                return [int(s * sign) for s in scaled[:size]]
    return None


def _dual_exponents(
    kind: Kind, star: list[list[Fraction]], sign: list[list[Fraction]] | None = None
) -> dict[Variable, int]:
    """Return the exponents of a group that the star leaves unchanged: which side is the dual, and
    (by the signs) what is barred.
    """
    sides = [0] * len(kind.occurrences)  # parts joined only by a tie have separate solutions
    for solution in filter(None, (_unit_solution([s], len(kind.occurrences)) for s in star)):
        sides = [a or b for a, b in zip(sides, solution, strict=True)]
    if not any(sides):
        sides = [1] * len(kind.occurrences)
    signs = sign[0] if sign else None
    out = {}
    for i, occurrence in enumerate(kind.occurrences):
        side = sides[i] or 1
        if signs is not None:
            out[occurrence] = side if signs[i] else 0
        else:
            out[occurrence] = sides[i]
    return out


def _span_mod_2(basis: list[list[Fraction]]) -> list[list[Fraction]]:
    """Return all sums modulo 2 of a few vectors."""
    out: list[list[Fraction]] = [[Fraction(0)] * len(basis[0])] if basis else []
    for vector in basis[:10]:
        out += [[Fraction((a + b) % 2) for a, b in zip(v, vector, strict=True)] for v in out]
    return out


def _can_act_per_parent(
    parameters: Mapping[str, tuple[Axis, ...]],
    axis: Axis,
    child: Atom,
    parent: Atom,
    scales: Scales,
) -> bool:
    """Return whether a member for each coordinate of the parent can act on an axis: the parent
    precedes the child in a product, or has its own axis.
    """
    if all(parent in p[: p.index(child)] for p in _iter_products(axis) if child in p):
        return True
    siblings = next(axes for axes in parameters.values() if any(a is axis for a in axes))
    return any(scales.atoms(a) == [parent] for a in siblings) or all(
        parent not in scales.atoms(a) for a in siblings
    )


def _assign_parents(
    w: Walk, scales: Scales, kinds: Mapping[Atom, Kind], parameters: Mapping[str, tuple[Axis, ...]]
) -> None:
    """Set the parent of each kind. A kind lies over another if it occurs only together with it:
    then it has one member for each coordinate of that.
    """
    together: dict[Atom, set[Atom]] = {}
    implied = {a: set(scales.atoms(y)) for x, y in w.implied for a in scales.atoms(x)}
    for value in _iter_values(w):
        atoms = [a for axis in value.axes for a in scales.atoms(axis)]
        for atom in set(atoms):
            kind = kinds.get(atom)
            if kind is None or (
                isinstance(kind.group, Rotary)
                and value.is_weight
                and all(
                    not kind.exponents.get((x, i), 0)
                    for x in value.axes
                    for i, b in enumerate(scales.atoms(x))
                    if b is atom
                )
            ):
                continue
            others = set(atoms).union(*(implied[a] for a in atoms if a in implied)) - {atom}
            together[atom] = together[atom] & others if atom in together else others
    preceding: dict[Atom, list[Atom]] = {}
    for kind in kinds.values():
        for axis, _ in kind.occurrences:
            for product in _iter_products(axis):
                if kind.atom in product:
                    preceding.setdefault(kind.atom, []).extend(
                        a for a in product[: product.index(kind.atom)]
                    )
    order = sorted(
        (k for k in kinds.values() if k.occurrences and not k.is_frozen),
        key=lambda k: k.atom in together and len(together[k.atom]),
    )
    for kind in order:
        fixed = [a for a in preceding.get(kind.atom, []) if kinds[a].is_frozen]
        free = [
            a
            for a in together.get(kind.atom, ())
            if a in kinds
            and type(kinds[a].group) is Permutation
            and kinds[a].over is None
            and kinds[a].occurrences
        ]
        candidates = [a for a in (*free, *fixed) if a in together.get(kind.atom, ())]
        # of two that always occur together, the outer one is the parent
        outer = [a for a in candidates if kind.atom not in preceding.get(a, [])]
        outer = [
            a
            for a in outer
            if all(
                _can_act_per_parent(parameters, axis, kind.atom, a, scales)
                for axis, _ in kind.occurrences
            )
        ]
        parents = [
            a
            for a in outer
            if not any(k.over is kind.atom for k in kinds.values()) and a is not kind.atom
        ]
        if parents:
            kind.over = min(parents, key=lambda a: (a not in free, a.id))


def _iter_values(w: Walk) -> Iterator[Value]:
    """Yield all values of a walk, cases one by one."""
    for by_name in w.aliases.values():
        yield from by_name.values()
    for values in w.values.values():
        for value in values if isinstance(values, list) else [values]:
            yield from value.cases or (value,)


def _iter_products(axis: Axis) -> Iterator[list[Atom]]:
    """Yield the atoms of each product along an axis, outermost first."""

    def products(term: object) -> Iterator[list[Atom]]:
        term_factors = factors(term)  # type: ignore[arg-type]
        sums = [f for f in term_factors if isinstance(f, Sum)]
        yield [f for f in term_factors if isinstance(f, Atom)]
        before = [f for f in term_factors if isinstance(f, Atom)]
        for s in sums:
            for t in parts(s):
                for rest in products(t):
                    yield [*before, *rest]

    yield from products(axis.term)
